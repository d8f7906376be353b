"""Reports in a real browser: no error, no request, every section, values by pointer and keyboard."""

import math
import re
import threading

import pytest
from browser import browser_page, find_browser
from run_folders import NASTY, make_run

from hybrid_gkd.reporting.report.command import write
from hybrid_gkd.reporting.report.serving import ReportServer

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium: reports are not opened (apt-get install chromium, or $CHROMIUM)"
)
SECTIONS = ("speed", "time", "timeline", "memory", "answers", "lengths", "configuration", "warnings")
SECTION_LIST = "[...document.querySelectorAll('section')]"
TITLES = "[...document.querySelectorAll('.panel h3')].map(each => each.textContent)"
SHOWN = f"{SECTION_LIST}.map(each => each.id)"
KL_CHART = "document.querySelectorAll('#learning .chart')[3]"
UNDRAWN = "[...document.querySelectorAll('.chart')].filter(each => !each.querySelector('svg')).length"


@pytest.fixture(scope="module")
def page():
    with browser_page(BROWSER) as page:
        yield page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    failed = {"steps": 25, "total": 40, "error": ValueError(NASTY)}
    make_run(parent, "resumed", **failed)
    return {
        "distillation": make_run(parent, "distillation"),
        "ppo": make_run(parent, "ppo", recipe="ppo_demo"),
        "resumed": make_run(parent, "resumed", first=21, steps=40, resume=True),
        "failed": make_run(parent, "failed", **failed),
    }


def open_report(page, folders, tmp_path, **kwargs):
    page.problems.clear()
    page.requests.clear()
    path = write(folders, tmp_path / "report.html")
    page.open(path.as_uri(), height=9000, **kwargs)  # all of it, since a chart is drawn when it is scrolled to
    page.wait_for(f"{UNDRAWN} === 0")
    assert not page.problems
    assert page.requests == [path.as_uri()]
    return path


@pytest.mark.parametrize("kind", ["distillation", "ppo", "resumed", "failed"])
def test_every_section_is_there_without_an_error_or_a_request(page, runs, tmp_path, kind):
    open_report(page, [runs[kind]], tmp_path)
    assert page.value(SHOWN) == ["summary", "learning", "critic" if kind == "ppo" else "teacher", *SECTIONS]
    drawn = page.value(f"{SECTION_LIST}.filter(each => each.querySelector('svg')).map(each => each.id)")
    assert {"learning", "time", "timeline", "memory", "lengths"} <= set(drawn)
    outcome = "failed" if kind == "failed" else "finished"
    assert page.value("document.title") == f"{kind}: {outcome}"  # and not what the prompts would have it
    assert page.value("document.querySelectorAll('img, b > *, .said b').length") == 0
    said = page.value("['answers', 'state'].map(id => document.getElementById(id).textContent).join(' ')")
    assert said.count(NASTY) == 1 + (kind == "failed")
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    parts = {"ppo": "Reward, part by part"}.get(kind, "The same by quarter of the answer, KL(teacher, student)")
    assert any(title.startswith(parts) for title in page.value(TITLES))


def test_the_likeliest_tokens_are_shown_where_the_focus_is(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path)
    assert page.value("document.querySelectorAll('.tokens').length") == 4
    shown = "[...document.querySelectorAll('.candidates:not([hidden])')].map(each => each.textContent).join()"
    assert page.value(shown) == ""
    assert page.value("document.querySelector('.tokens + details').textContent").startswith("4 of 6 tokens; ")
    assert page.value("document.querySelectorAll('#answers .scale').length") == 1
    page.value("document.querySelector('.token').focus()")
    assert page.value(shown).startswith("divergence 0.5 nats")
    assert page.value(shown).endswith("student's topteacherstudent</script>5.0 %25.0 %1 (drawn)90.0 %50.0 %")
    page.press("ArrowRight")
    assert page.value("document.activeElement.textContent") == " after"
    page.press("Escape")
    assert page.value(shown) == ""
    assert not page.problems


def test_several_runs_share_their_axes(page, runs, tmp_path):
    open_report(page, list(runs.values()), tmp_path)
    assert page.value(SHOWN) == ["summary", "differences", "learning", "critic", "teacher", *SECTIONS]
    assert "distillation.enabled" in page.value("document.getElementById('differences').textContent")
    readout = page.value("document.querySelector('#learning .readout').textContent")
    assert readout == "last: distillation 0.9ppo 0.9resumed 0.9failed 0.76"


def test_values_by_pointer_and_keyboard_in_the_dark_on_a_phone(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path, width=390, dark=True)
    assert page.value("document.documentElement.scrollWidth") <= 390
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"
    readout = "document.querySelectorAll('#learning .readout')[3].textContent"
    assert page.value(readout) == "last: actor/kl_loss 0.06667"
    page.value(f"{KL_CHART}.focus()")
    page.press("Home")
    assert page.value(readout) == "step 1: actor/kl_loss 2"
    page.press("ArrowRight")
    assert page.value(readout) == "step 2: actor/kl_loss 1"
    right, top = page.value(f"(({{right, top}}) => [right, top])({KL_CHART}.getBoundingClientRect())")
    page.move_to(right - 3, top + 50)
    assert page.value(readout) == "step 30: actor/kl_loss 0.06667"
    page.value("document.getElementById('smoothing').value = '0.5'")
    page.value("document.querySelector('input[value=minutes]').click()")
    page.wait_for(f"{KL_CHART}.textContent.includes('minutes')")
    page.press("End")
    assert re.fullmatch(r"step 30, \d\S* minutes: actor/kl_loss 0.06667 \(smoothed 0.069\d+\)", page.value(readout))
    assert not page.problems


def test_a_tap_shows_values_until_the_next_one(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path, width=390)
    readout = "document.querySelectorAll('#learning .readout')[3].textContent"
    right, top = page.value(f"(({{right, top}}) => [right, top])({KL_CHART}.getBoundingClientRect())")
    page.tap(right - 3, top + 50)
    assert page.value(readout) == "step 30: actor/kl_loss 0.06667"
    assert not page.problems


def test_a_log_axis_is_drawn_where_all_values_are_above_0(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path)
    heights = f"[...{KL_CHART}.querySelectorAll('.mark-symbol path')].map(each => each.getBoundingClientRect().y)"

    def ratio():  # of the height between 2 and 1 to that between 1 and 2 / 3
        first, second, third = page.value(heights)[:3]
        return (second - first) / (third - second)

    assert ratio() == pytest.approx(3, rel=0.05)
    page.value("document.getElementById('log').click()")
    page.wait_for(f"Math.abs((h => (h[1] - h[0]) / (h[2] - h[1]))({heights}) - 3) > 1")
    assert ratio() == pytest.approx(math.log(2) / math.log(1.5), rel=0.05)
    assert not page.problems


def test_a_served_page_is_drawn_anew_when_there_is_something_new_and_keeps_the_focus(page, tmp_path):
    folder = make_run(tmp_path)
    page.problems.clear()
    with ReportServer([folder], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(f"http://127.0.0.1:{server.port}/", height=9000)
        page.wait_for(f"{UNDRAWN} === 0")
        page.value("document.querySelector('#summary').drawnOnce = true; null")
        page.value(f"{KL_CHART}.focus()")
        asked = sum(url.endswith("data.json") for url in page.requests)
        while sum(url.endswith("data.json") for url in page.requests) < asked + 2:
            page.wait_for("new Promise(done => setTimeout(() => done(true), 500))")
        assert page.value("document.querySelector('#summary').drawnOnce === true")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 31, "actor/kl_loss": 0.25}\n')
        page.wait_for("document.querySelector('#summary').drawnOnce === undefined")
        page.wait_for(f"document.activeElement === {KL_CHART}")
        server.shutdown()
    assert not page.problems

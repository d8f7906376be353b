"""Reports in a real browser: no error, no request, every section, values by pointer and keyboard."""

import pytest
from browser import browser_page, find_browser
from run_folders import NASTY, make_run

from hybrid_gkd.reporting.report.command import write

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium: reports are not opened (apt-get install chromium, or $CHROMIUM)"
)
SECTIONS = (
    "summary", "learning", "teacher", "time", "timeline", "memory", "answers", "lengths", "configuration", "warnings",
)
SECTION_LIST = "[...document.querySelectorAll('section')]"
SHOWN = f"{SECTION_LIST}.map(each => each.id)"
THIRD_CHART = "document.querySelectorAll('#learning .chart')[2]"
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
    assert page.value(SHOWN) == list(SECTIONS)
    drawn = page.value(f"{SECTION_LIST}.filter(each => each.querySelector('svg')).map(each => each.id)")
    assert {"learning", "time", "timeline", "memory", "lengths"} <= set(drawn)
    outcome = "failed" if kind == "failed" else "finished"
    assert page.value("document.title") == f"{kind}: {outcome}"  # and not what the prompts would have it
    assert page.value("document.querySelectorAll('img, b > *, .said b').length") == 0
    said = page.value("['answers', 'state'].map(id => document.getElementById(id).textContent).join(' ')")
    assert said.count(NASTY) == 1 + (kind == "failed")
    assert page.value("document.documentElement.scrollWidth <= innerWidth")


def test_the_likeliest_tokens_are_shown_where_the_focus_is(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path)
    assert page.value("document.querySelectorAll('.tokens').length") == 4
    shown = "[...document.querySelectorAll('.candidates:not([hidden])')].map(each => each.textContent).join()"
    assert page.value(shown) == ""
    assert page.value("document.querySelector('.tokens + details').textContent").startswith("4 of 6 tokens; ")
    page.value("document.querySelector('.token').focus()")
    assert page.value(shown).startswith("divergence 0.5 nats")
    assert page.value(shown).endswith("student's topteacherstudent</script>5.0 %25.0 %190.0 %50.0 %")
    page.press("ArrowRight")
    assert page.value("document.activeElement.textContent") == " after"
    page.press("Escape")
    assert page.value(shown) == ""
    assert not page.problems


def test_several_runs_share_their_axes(page, runs, tmp_path):
    open_report(page, list(runs.values()), tmp_path)
    assert page.value(SHOWN) == ["summary", "differences", *SECTIONS[1:]]
    assert "distillation.enabled" in page.value("document.getElementById('differences').textContent")
    readout = page.value("document.querySelector('#learning .readout').textContent")
    assert readout == "last: distillation 0.9ppo 0.9resumed 0.9failed 0.76"


def test_values_by_pointer_and_keyboard_in_the_dark_on_a_phone(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path, width=390, dark=True)
    assert page.value("document.documentElement.scrollWidth") <= 390
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"
    readout = "document.querySelectorAll('#learning .readout')[2].textContent"
    assert page.value(readout) == "last: actor/kl_loss 0.06667"
    page.value(f"{THIRD_CHART}.focus()")
    page.press("Home")
    assert page.value(readout) == "step 1: actor/kl_loss 2"
    page.press("ArrowRight")
    assert page.value(readout) == "step 2: actor/kl_loss 1"
    right, top = page.value(f"(({{right, top}}) => [right, top])({THIRD_CHART}.getBoundingClientRect())")
    page.move_to(right - 3, top + 50)
    assert page.value(readout) == "step 30: actor/kl_loss 0.06667"
    page.value("document.getElementById('smoothing').value = '0.5'")
    page.value("document.querySelector('input[value=minutes]').click()")
    page.value("document.getElementById('log').click()")
    page.wait_for(f"{THIRD_CHART}.textContent.includes('minutes')")
    assert not page.problems

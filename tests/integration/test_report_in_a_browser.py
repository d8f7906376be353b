"""Reports in a real browser: no error, no request, every section, values by pointer and keyboard."""

import json
import math
import re
import threading

import pytest
from browser import browser_page, find_browser
from run_folders import NASTY, make_run

from hybrid_gkd.reporting.report.command import write
from hybrid_gkd.reporting.report.server import ReportServer

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium: reports are not opened (apt-get install chromium, or $CHROMIUM)"
)
SECTIONS = ("speed", "time", "timeline", "memory", "answers", "lengths", "configuration", "warnings")
SECTION_LIST = "[...document.querySelectorAll('section')]"
TITLES = "[...document.querySelectorAll('.panel h3')].map(each => each.textContent)"
SHOWN = f"{SECTION_LIST}.map(each => each.id)"
KL_CHART = "document.querySelectorAll('#learning .chart')[3]"
TEXTS = "[...document.querySelectorAll('#answers td .text')]"
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
    parts = {"ppo": "Reward components"}.get(kind, "Held-out KL(teacher, student) by quarter of the completion")
    assert any(title.startswith(parts) for title in page.value(TITLES))
    marks = page.value("document.querySelectorAll('#learning .mark-rule.role-mark').length")
    assert marks == (page.value("document.querySelectorAll('#learning svg').length") if kind == "resumed" else 0)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_long_answer_has_the_width_of_its_column(page, tmp_path, width):
    open_report(page, [make_run(tmp_path, words=200)], tmp_path, width=width)
    assert min(page.value(f"{TEXTS}.map(each => each.clientWidth / each.closest('td').clientWidth)")) >= 0.9
    assert page.value("document.querySelector('#answers td').clientWidth") >= (320 if width == 1280 else 240)


def test_the_time_is_that_of_the_whole_run(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path)
    readout = page.value("document.querySelector('#time .readout').textContent")
    assert readout == (
        "whole run: gen 3 s (19 %)wait_prev_teacher 4.5 s (28 %)update_actor 6 s (38 %)"
        "sync_rollout_weights 1.5 s (9.4 %)testing 1 s (6.3 %)"
    )
    widths = page.value("[...document.querySelectorAll('#time .mark-area path')].map(each => each.getBBox().width)")
    assert max(widths) == pytest.approx(min(widths))
    # The one validation is as wide as one of the 31 steps: an area's corners are where its height changes.
    drawn = page.value("[...document.querySelectorAll('#time .mark-area path')].at(-1).getAttribute('d')")
    corners = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[-\d.]+,[-\d.]+", drawn)]
    top = min(y for _, y in corners)
    validation = [x for x, y in corners if y == top]
    assert max(validation) - min(validation) == pytest.approx(max(widths) / 31, rel=0.01)


@pytest.mark.parametrize(("loaded", "said"), [
    ({"device": "cpu"}, "The run was on the CPU."), ({"device": "NVIDIA L4"}, "GPU capacity: not in run.log."),
])  # fmt: skip
def test_a_run_without_a_known_capacity_was_on_the_cpu_only_if_its_start_says_so(page, tmp_path, loaded, said):
    for name, row in (("starts", {"start": 1.0, "loaded": loaded}), ("metrics", {"memory/update/gradients_gb": 1.0})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"step": 0, **row}) + "\n", encoding="utf-8")
    open_report(page, [tmp_path], tmp_path)
    assert page.value("document.querySelector('#memory .panel > p').textContent") == said


def test_answers_as_long_as_the_limit_are_below_it(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path)
    marks = "[...document.querySelectorAll('#lengths .chart')[0].querySelectorAll('.mark-%s.role-mark %s')]"
    tops = f"{marks}.map(each => each.getBoundingClientRect().top)"
    assert page.value(tops % ("rule", "line")) == pytest.approx([min(page.value(tops % ("rect", "path")))], abs=1)


def test_smoothing_counts_steps(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path)
    page.value("document.getElementById('smoothing').value = '0.8'")
    page.value("document.getElementById('smoothing').dispatchEvent(new Event('input', {bubbles: true}))")
    readout = page.value("document.querySelector('#learning .readout').textContent")
    # 0, 10, 20, 30 and their accuracies: of 0.9 the weight is 1, of the one before 0.8 ** 10, and so on.
    weights = [0.8**distance for distance in (30, 20, 10, 0)]
    values = [0.2, 0.2 + 0.7 / 3, 0.2 + 0.7 * 2 / 3, 0.9]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert float(re.search(r"smoothed ([\d.]+)", readout)[1]) == pytest.approx(expected, abs=1e-4)


def test_what_is_not_in_sight_is_drawn_before_it_is_printed(page, runs, tmp_path):
    path = write([runs["distillation"]], tmp_path / "report.html")
    idle = page.send("Page.addScriptToEvaluateOnNewDocument", source="window.requestIdleCallback = () => 0")
    page.open(path.as_uri())
    page.wait_for("document.querySelector('svg')")
    assert page.value(UNDRAWN) > 0
    page.send("Page.printToPDF")
    assert page.value(UNDRAWN) == 0
    page.send("Page.removeScriptToEvaluateOnNewDocument", identifier=idle["identifier"])
    page.open(path.as_uri())  # and else when there is nothing else to do
    page.wait_for(f"{UNDRAWN} === 0")


def test_the_likeliest_tokens_are_shown_where_the_focus_is(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path)
    assert page.value("document.querySelectorAll('.tokens').length") == 4
    shown = "[...document.querySelectorAll('.candidates:not([hidden])')].map(each => each.textContent).join()"
    assert page.value(shown) == ""
    assert page.value("document.querySelector('.tokens + details').textContent").startswith("4 of 6 tokens; ")
    assert page.value("document.querySelectorAll('#answers .scale').length") == 1
    page.value("document.querySelector('.token').focus()")
    assert page.value(shown).startswith("divergence 0.5 nats")
    assert page.value(shown).endswith("student's topteacherstudent</script>5.0 %25.0 %1 (sampled)90.0 %50.0 %")
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
    gaps = """(id => [...document.querySelectorAll(`#${id} > div`)].map(each => each.getBoundingClientRect())
        .map((box, n, all) => n ? box.top - all[n - 1].bottom : 99))"""
    assert all(min(page.value(f"{gaps}('{each}')")) >= 8 for each in ("summary", "timeline", "memory", "answers"))


def test_several_runs_have_one_scale_and_a_look_for_each_line(page, tmp_path):
    folders = [tmp_path / "short", tmp_path / "long"]
    for folder, seconds in zip(folders, (1.0, 4.0), strict=True):
        folder.mkdir()
        row = {"timing/gen": seconds, "memory/rollout/kv_cache_gb": 2 * seconds}
        row |= {f"val/forward_kl/q{quarter}": seconds for quarter in range(1, 5)}
        rows = [json.dumps({"step": step, **row}) for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("\n".join([*rows, ""]), encoding="utf-8")
    open_report(page, folders, tmp_path)
    size = "[...document.querySelectorAll('%s')].map(each => each.getBBox().%s)"
    short, long = page.value(size % ("#time .mark-area path", "height"))
    assert long == pytest.approx(4 * short)
    short, long = page.value(size % ("#memory .mark-rect.role-mark path", "width"))
    assert long == pytest.approx(4 * short)
    lines = "[...document.querySelectorAll('#learning .mark-line path')]"
    looks = page.value(f"{lines}.map(each => each.getAttribute('stroke') + each.getAttribute('stroke-dasharray'))")
    assert len(looks) == len(set(looks)) == 8
    labels = "[...document.querySelectorAll('#learning .role-axis-label')[0].querySelectorAll('text')]"
    assert page.value(f"{labels}.map(each => each.textContent)") == ["1", "2"]  # and no 1.5


def test_what_differs_is_legible_on_a_phone(page, runs, tmp_path):
    open_report(page, [runs["distillation"], runs["ppo"]], tmp_path, width=390)
    assert page.value("(each => each.scrollWidth <= each.clientWidth)(document.querySelector('#differences .scroll'))")


def test_values_by_pointer_and_keyboard_in_the_dark_on_a_phone(page, runs, tmp_path):
    open_report(page, [runs["distillation"]], tmp_path, width=390, dark=True)
    assert page.value("document.documentElement.scrollWidth") <= 390
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"
    rights = "[...document.querySelectorAll('#memory %s')].map(each => each.getBoundingClientRect().right)"
    assert max(page.value(rights % ".role-legend text")) <= page.value(rights % "svg")[0]
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
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 31, "actor/kl_loss": 0.25}\n')
        page.wait_for("document.querySelector('#summary').drawnOnce === undefined")
        page.wait_for(f"document.activeElement === {KL_CHART}")
        said = "document.getElementById('state').textContent.includes('does not respond')"
        page.value("window.answering = window.fetch; window.fetch = () => Promise.reject(new Error('gone')); null")
        page.wait_for(said)
        page.value("window.fetch = window.answering; null")
        page.wait_for(f"!{said}")
        server.shutdown()
    assert not page.problems

"""Contents of a report, from the files of a run folder."""

import fcntl
import importlib.resources
import itertools
import json
import logging
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from run_folders import NASTY, make_run, step_row

from hybrid_gkd.reporting.metric_table import METRICS
from hybrid_gkd.reporting.report import server as serving
from hybrid_gkd.reporting.report.command import FOLLOW, main
from hybrid_gkd.reporting.report.downsampling import Counts, Downsampled, Point, evenly_spaced
from hybrid_gkd.reporting.report.headline import headline
from hybrid_gkd.reporting.report.live_report import live_report
from hybrid_gkd.reporting.report.log_lines import TEXT_KEPT, RunLog
from hybrid_gkd.reporting.report.page import html, labels, page_data
from hybrid_gkd.reporting.report.run_folder import PARTS, POINTS, UNFINISHED, VALIDATIONS, RunFolder
from hybrid_gkd.reporting.report.server import ReportServer
from hybrid_gkd.reporting.starts import append_row
from hybrid_gkd.runtime.files import JsonLinesFile
from hybrid_gkd.scoring.token_scores import ANSWERS, TOKENS
from hybrid_gkd.student.actor import SHOWN_CANDIDATES

MAX_BYTES = 5_000_000


def data_of(folder):
    run = RunFolder(folder)
    run.refresh()
    return with_headline(run)


def with_headline(run):
    data = run.data()
    return data | {"headline": headline(run, data["config"], data["state"])}


def cards(data):
    return {card["label"]: card for card in data["headline"]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("finished"))


# --- thinning


def test_a_thinned_series_has_the_mean_and_the_extremes_of_every_step_once():
    series = Downsampled(8)
    values = [float((7 * step) % 101) for step in range(1, 1001)]
    for step, value in enumerate(values, 1):
        series.add(Point.of(step, value))
        assert len(series.items()) <= 8
    points = series.items()
    assert sum(point.rows for point in points) == 1000
    assert points[-1].step == 1000
    assert sum(point.total for point in points) == pytest.approx(sum(values))
    start = 0
    for point in points:
        part = values[start : point.step]
        assert (point.mean, point.low, point.high) == (pytest.approx(sum(part) / len(part)), min(part), max(part))
        start = point.step


def test_counts_of_several_steps_are_added():
    assert Counts(1, (1, 2)).merged(Counts(2, (0, 1, 5))) == Counts(2, (1, 3, 5))


def test_evenly_keeps_the_first_and_the_last():
    assert evenly_spaced(range(101), 5) == [0, 25, 50, 75, 100]
    assert evenly_spaced([3, 4], 5) == [3, 4]


# --- a run


@pytest.mark.slow
def test_a_finished_run(finished):
    data = data_of(finished)
    assert data["state"] == {"outcome": "finished", "error": None, "step": 30, "total": 30, "starts": 1}
    found = cards(data)
    assert found["Held-out accuracy"] == {
        "label": "Held-out accuracy", "value": "20.0% → 90.0%", "note": "teacher 99.0%", "change": "better",
    }  # fmt: skip
    assert found["Held-out KL"]["value"] == "2.0000 → 0.0667"
    assert found["Tokens"]["value"] == "15 k"
    assert found["Cost to resume"]["value"] == "finished"
    assert data["axes"][data["metrics"]["actor/loss"]["axis"]] == tuple(range(1, 31))
    assert [each["step"] for each in data["answers"]] == [0, 10, 20, 30]
    assert data["answers"][0]["samples"][0]["prompt"] == NASTY
    assert [sample.get("tokens") and sample["tokens"][0][:2] for sample in data["answers"][1]["samples"]] == [
        None, ["1", 0.5 / 11], None,
    ]  # fmt: skip
    assert data["lengths"]["steps"] == list(range(1, 31))
    assert [sum(column) for column in data["lengths"]["counts"]] == [4] * 30
    assert data["card_gb"] == 140.0  # from the text of a Placement
    assert data["changed"] == {"trainer.logger": [["console"], []]}
    assert data["facts"]["plan"] == "workers: 1\nbatch: 128 prompts"
    [warned] = data["warnings"]
    assert warned.level == "WARNING"
    assert NASTY in warned.text


def test_the_step_that_is_drawn_is_a_whole_one(finished):
    timeline = data_of(finished)["timeline"]
    assert timeline["seconds"] == pytest.approx(0.5)
    own = [(name, start, end) for row, _, name, start, end, _ in timeline["spans"] if row == "trainer"]
    assert own == [
        ("gen", 0, 0.1), ("wait_prev_teacher", 0.1, 0.25), ("update_actor", 0.25, 0.45),
        ("sync_rollout_weights", 0.45, 0.5),
    ]  # fmt: skip
    assert {row for row, *_ in timeline["spans"]} == {"trainer", "teacher", "worker 0"}


def test_what_a_step_did_not_do_took_no_time(finished):
    metrics = data_of(finished)["metrics"]
    there = [part for part in PARTS if part in metrics]
    assert len({metrics[part]["axis"] for part in there}) == 1
    assert metrics["timing/testing"]["mean"] == [1] + [0] * 30
    assert "timing/update_actor" in there
    assert "timing/update_critic" not in there  # the run has none


def test_reading_on_finds_what_reading_at_once_does(tmp_path, finished):
    folder = tmp_path / "run"
    folder.mkdir()
    run = RunFolder(folder)
    for line in (finished / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(line[:20])
            file.flush()
            run.refresh()
            file.write(line[20:])
    run.refresh()
    assert run.data()["metrics"] == data_of(finished)["metrics"]


@pytest.mark.slow
def test_the_time_of_the_whole_run_is_that_of_every_step(tmp_path):
    rows = [{"step": step, "timing/gen": step / 4, "timing/testing": float(step == 7)} for step in range(1, 2001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = data_of(tmp_path)
    assert len(data["metrics"]["timing/gen"]["mean"]) < 2000
    assert data["seconds"] == {"timing/gen": 500_250, "timing/testing": 1}


def write_rows(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_phases_of_a_step_do_not_overlap(tmp_path):
    """Separate pools generate in the background: their step has the wait for it, and a snapshot like a checkpoint."""
    row = {"timing/gen": 3.0, "timing/wait_prev_gen": 1.0, "timing/update_actor": 4.0, "timing/snapshot": 0.5}
    write_rows(tmp_path / "metrics.jsonl", [{"step": step, **row} for step in (1, 2)])
    data = data_of(tmp_path)
    assert data["seconds"] == {"timing/wait_prev_gen": 2, "timing/update_actor": 8, "timing/snapshot": 1}
    assert data["metrics"]["timing/gen"]["mean"] == [3, 3]


def test_the_page_stacks_every_phase_in_a_colour_of_its_own():
    folder = importlib.resources.files("hybrid_gkd.reporting.report")
    script, plots = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "plots.js"))
    listed = re.search(r"^const PARTS = \[(.+?)^\];", script, re.DOTALL | re.MULTILINE)[1]
    found = dict(re.findall(r'\["(\w+)", (\d+)\]', listed))
    assert tuple(f"timing/{name}" for name in found) == PARTS
    assert len(set(found.values())) == len(found)
    for colors in re.findall(r"^  (?:light|dark): (.+?),$", plots, re.MULTILINE):
        assert max(map(int, found.values())) < len(set(json.loads(colors)))


def test_a_panel_of_the_page_has_metrics_of_one_unit():
    script = importlib.resources.files("hybrid_gkd.reporting.report").joinpath("page.js").read_text(encoding="utf-8")
    panels = re.findall(r'^    \["([^"]+)", \[(.+)\]\],$', script, re.MULTILINE)
    assert len(panels) > 30
    filled = {re.sub(r"<\w+>", "kl_loss", re.sub("@[nk]$", "@4", name)): unit for name, (unit, _) in METRICS.items()}
    shown = " ".join(metrics for _, metrics in panels)
    for name in ("teacher/end_logprob", "actor/kl_loss/last_update", "actor/distillation/entropy_gap"):
        assert f'"{name}"' in shown  # what shows that a run goes wrong is no plot among many
    for title, metrics in panels:
        names = re.findall(r'"([^"]+)"', metrics)
        patterns = [each.replace(r"\/", "/") for each in re.findall(r"/(\^.+?\$)/", metrics)]
        matching = [[name for name in filled if re.search(pattern, name)] for pattern in patterns]
        assert all(matching), title
        assert len({filled[name] for name in itertools.chain(names, *matching)}) == 1, title


def test_metrics_with_a_placeholder_have_their_unit_and_meaning(tmp_path):
    named = {
        "val/math/pass@2": "val/pass@k", "reward/length/mean": "reward/<name>/mean",
        "teacher/math/latency": "teacher/<key>/latency", "actor/loss": "actor/loss",
    }  # fmt: skip
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, **dict.fromkeys(named, 0.5), "foreign": 1.0}])
    names = json.loads(page_data([RunFolder(tmp_path)]))["names"]
    assert names.pop("foreign") is None
    assert names.items() >= {name: list(METRICS[entry]) for name, entry in named.items()}.items()


def test_a_value_that_was_measured_once_is_no_change(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {val_files: [a]}\n", encoding="utf-8")
    write_rows(tmp_path / "metrics.jsonl", [{"step": 4, "val/forward_kl": 0.5, "actor/sft_loss": 2.0}])
    found = cards(data_of(tmp_path))
    assert (found["Held-out KL"]["value"], found["SFT cross-entropy"]["value"]) == ("— → 0.5000", "— → 2.0000")
    rows = [{"step": step, "val/forward_kl": kl, "actor/sft_loss": 2 * kl} for step, kl in ((4, 0.5), (8, 0.25))]
    write_rows(tmp_path / "metrics.jsonl", rows)
    found = cards(data_of(tmp_path))
    assert found["Held-out KL"]["value"] == "0.5000 → 0.2500"
    assert found["Held-out KL"]["note"].startswith("first at step 4, ")
    assert found["SFT cross-entropy"]["value"] == "1.0000 → 0.5000"


def test_the_step_that_is_drawn_has_no_restart_in_it(tmp_path):
    """Killed in step 5 and resumed from step 2, whose later steps it repeats, and restarted later from step 4."""
    begins = [(1, 100.0), (2, 101.0), (3, 102.0), (4, 112.0), (5, 122.0), (3, 150.0), (4, 151.5), (5, 203.0)]
    spans = [["trainer", "update_actor", at, at + 0.5, 0, step] for step, at in begins]
    write_rows(tmp_path / "logs" / "trainer.spans.jsonl", spans)
    write_rows(tmp_path / "metrics.jsonl", [{"step": 5}])
    starts = [{"start": 90.0, "step": 0}, {"start": 140.0, "step": 2}]
    write_rows(tmp_path / "starts.jsonl", [*starts, {"restart": 200.0, "failed_step": 5, "resumed_step": 4}])
    timeline = data_of(tmp_path)["timeline"]
    assert (timeline["step"], timeline["seconds"]) == (3, 1.5)


def test_the_time_that_is_left_is_at_the_pace_since_the_newest_start(tmp_path):
    rows = [{"step": step, "timing/elapsed": 100.0 * step} for step in range(1, 11)]
    rows += [{"step": step, "timing/elapsed": 1000.0 + 2.0 * (step - 10)} for step in range(11, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    starts = [{"start": 0.0, "step": 0}, {"start": 0.0, "step": 10, "total_steps": 500}]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts), encoding="utf-8")
    with open(tmp_path.parent / f".{tmp_path.name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cards(data_of(tmp_path))["Steps"]["note"] == "about 16:00 left, in 2 starts"


def test_the_best_validation_is_named_where_it_is_not_the_last(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {val_files: [a]}\nreward: {answer_key: b}\n", encoding="utf-8")
    rows = [{"step": step, "val/accuracy": accuracy} for step, accuracy in ((0, 0.1), (10, 0.5), (20, 0.4))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert cards(data_of(tmp_path))["Held-out accuracy"] == {
        "label": "Held-out accuracy", "value": "10.0% → 40.0%", "note": "best 50.0% at step 10", "change": "better",
    }  # fmt: skip


def test_the_accuracy_of_the_teacher_is_that_of_the_newest_start(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {val_files: [a]}\nreward: {answer_key: b}\n", encoding="utf-8")
    for accuracies, note in (([0.9, 0.0], "teacher 0.0%"), ([0.9, None], "")):
        starts = [{"start": 1.0, "step": 0, "teacher_accuracy": accuracy} for accuracy in accuracies]
        write_rows(tmp_path / "starts.jsonl", starts)
        assert cards(data_of(tmp_path))["Held-out accuracy"]["note"] == note


def test_a_reward_of_ones_own_is_no_fraction_and_needs_no_right_answers(tmp_path):
    config = "data: {val_files: [a]}\nreward: {custom_reward_function: {path: mine.py}}\n"
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    rows = [{"step": 0, "val/accuracy": -0.1}, {"step": 10, "val/accuracy": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert cards(data_of(tmp_path))["Held-out reward"]["value"] == "-0.1000 → 1.5000"


def test_a_row_that_a_crash_cut_short_is_left_out(tmp_path):
    row = '{"step": 3, "prompt": "p", "response": "r", "answer": null, "reward": null}\n'
    (tmp_path / "generations.jsonl").write_text(f"{row}{row[:30]}{row}{row[:20]}\n{row}", encoding="utf-8")
    [found] = data_of(tmp_path)["answers"]
    assert [sample["response"] for sample in found["samples"]] == ["r", "r"]


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "actor/loss": 2.0}, 5, None, {"actor/loss": 1.0}])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "actor/loss": "x"}\n{"step": 2, "actor/loss": NaN}\n\0\0\n')
        file.write('{"step": 3, "actor/loss": 3}\n')
    write_rows(tmp_path / "starts.jsonl", [7, {"start": 1.0, "step": 0, "total_steps": 3}])
    write_rows(tmp_path / "lengths.jsonl", [{"step": 1}])
    write_rows(tmp_path / "generations.jsonl", [{"step": 1}])
    run = RunFolder(tmp_path)
    page = json.loads(page_data([run]))["runs"][0]
    assert page["metrics"]["actor/loss"]["mean"] == [2, 3]
    assert [text for _, _, text in page["warnings"]] == [
        f"{name}: damaged lines, which this report omits: {count}"
        for name, count in (("metrics.jsonl", 6), ("lengths.jsonl", 1), ("starts.jsonl", 1))
    ]
    assert page["num_warnings"] == 3


@pytest.mark.slow
def test_a_failed_run_has_its_error(tmp_path):
    data = data_of(make_run(tmp_path, steps=25, total=40, error=ValueError(f"boom {NASTY}")))
    assert (data["state"]["outcome"], data["state"]["step"], data["state"]["total"]) == ("failed", 25, 40)
    assert data["state"]["error"].startswith("ValueError: boom </script>")
    assert [warned.level for warned in data["warnings"]] == ["WARNING", "ERROR"]
    assert cards(data)["Cost to resume"]["value"] == "repeat 5 steps"
    assert cards(data)["Cost to resume"]["note"].startswith("with trainer.resume_mode=auto, from global_step_20, ")
    keys = ["trainer.resume_mode=auto"]
    other = data_of(make_run(tmp_path, "other", steps=5, total=40, error=ValueError("boom"), overrides=keys))
    assert cards(other)["Cost to resume"]["note"].startswith("no checkpoint, ")


@pytest.mark.slow
def test_a_run_that_continues_goes_on_where_it_was(tmp_path):
    folder = make_run(tmp_path, steps=25, total=40, error=ValueError("boom"))
    run = RunFolder(folder)
    run.refresh()
    elapsed = run.last["timing/elapsed"]
    make_run(tmp_path, first=21, steps=40, resume=True, overrides=["actor_rollout_ref.actor.grad_clip=0.5"])
    run.refresh()
    data = with_headline(run)
    assert data["state"]["outcome"] == "finished"
    assert data["state"]["starts"] == 2
    assert data["axes"][data["metrics"]["actor/loss"]["axis"]] == tuple(range(1, 41))
    assert data["lengths"]["steps"] == list(range(1, 41))
    assert data["resumed"] == [20]
    append_row(folder, {"restart": 1.0, "failed_step": 31, "resumed_step": 30, "seconds_down": 1.0})
    run.refresh()
    assert run.data()["resumed"] == [20, 30]
    assert [each["step"] for each in data["answers"]] == [0, 10, 20, 30, 40]
    times = data["metrics"]["timing/elapsed"]["mean"]
    assert times == sorted(times)
    assert run.last["timing/elapsed"] > 0.0 < elapsed
    assert cards(data)["Steps"]["note"] == "in 2 starts"
    assert data["earlier"] == [
        {"file": "config.1.yaml", "changed": {"actor_rollout_ref.actor.grad_clip": [1.0, 0.5]}}
    ]


def test_lengths_of_another_limit_are_not_counted_with_those_of_this_one(tmp_path):
    rows = [{"step": step, "bin": width, "counts": [0, 8]} for step, width in ((1, 2), (2, 2), (3, 20))]
    (tmp_path / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert data_of(tmp_path)["lengths"] == {"bin": 20, "every": 1, "steps": [3], "counts": [(0, 8)]}


@pytest.mark.slow
def test_a_run_without_an_end_goes_on_while_its_folder_is_locked(tmp_path):
    folder = make_run(tmp_path, total=99)
    rows = (folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "starts.jsonl").write_text("\n".join(rows[:-1]) + "\n", encoding="utf-8")
    with open(folder.parent / f".{folder.name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = data_of(folder)
        assert data["state"]["outcome"] == "running"
        assert re.fullmatch(r"about [\d.]+ s left", cards(data)["Steps"]["note"])
    state = data_of(folder)["state"]
    assert (state["outcome"], state["error"]) == ("failed", UNFINISHED)


def test_ppo_has_its_reward_and_no_divergence(tmp_path):
    found = cards(data_of(make_run(tmp_path, recipe="ppo_demo")))
    assert found["Mean reward"] == {
        "label": "Mean reward", "value": "0.020 → 0.290", "note": "first and last tenth, completions trained on",
        "change": "better",
    }  # fmt: skip
    assert not {"Held-out KL", "KL to the teacher"} & found.keys()


def test_a_folder_with_little_in_it_has_a_report_all_the_same(tmp_path):
    (tmp_path / "run.log").write_text("not a record\n", encoding="utf-8")
    (tmp_path / "config.yaml").write_text("- a\n- list: [\n", encoding="utf-8")
    data = data_of(tmp_path)
    assert (data["state"]["outcome"], data["metrics"], data["timeline"]) == ("unknown", {}, None)
    (tmp_path / "config.yaml").write_text("reward:\n  timeout: .inf\n", encoding="utf-8")
    assert b"inf" in page_data([RunFolder(tmp_path)])


def test_long_texts_are_cut(tmp_path):
    (tmp_path / "run.log").write_text(
        f"2026-01-01 00:00:00 WARNING {'x' * 100_000}\n2026-01-01 00:00:01 DEBUG step\n", encoding="utf-8"
    )
    log = RunLog(tmp_path)
    log.refresh()
    assert len(log.warnings[0].text) < TEXT_KEPT + 10


# --- the page


@pytest.mark.slow
def test_ten_thousand_steps_are_a_small_page(tmp_path):
    names = [f"actor/metric_{number}" for number in range(60)]
    with (tmp_path / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, 10_001):
            row = step_row(step, distils=True) | {name: step / 7 + number for number, name in enumerate(names)}
            file.write(json.dumps({"step": step, "timing/elapsed": step * 3.3, **row}) + "\n")
    answers = JsonLinesFile(tmp_path / "generations.jsonl")
    lengths, tokens = JsonLinesFile(tmp_path / "lengths.jsonl"), JsonLinesFile(tmp_path / "tokens.jsonl")
    candidates = [[f"word{n}", 0.1234, 0.4321] for n in range(SHOWN_CANDIDATES)]
    for step in range(0, 10_001, 10):
        text = {"prompt": "p" * 9000, "response": "r" * 9000, "answer": "a" * 9000, "reward": 1.0}
        answers.append({"step": step, **text, "sample": n, "prompt": f"{n}{'p' * 9000}"} for n in range(10))
        rows = [["word", 1.234, candidates, candidates]] * TOKENS
        scored = {"response": text["response"], "num_tokens": 9000, "tokens": rows}
        if step in evenly_spaced(range(0, 10_001, 10), VALIDATIONS):
            tokens.append({"step": step, "prompt": f"{n}{'p' * 9000}", **scored} for n in range(ANSWERS))
        lengths.append([{"step": step, "bin": 20, "counts": [100] * 50}])
    run = RunFolder(tmp_path)
    page = html(page_data([run]))
    assert len(page) <= MAX_BYTES
    data = run.data()
    assert all(len(curve["mean"]) <= POINTS for curve in data["metrics"].values())
    assert data["axes"][data["metrics"]["actor/metric_0"]["axis"]][-1] == 10_000
    assert [each["step"] for each in data["answers"]][:: len(data["answers"]) - 1] == [0, 10_000]


def test_what_comes_from_data_ends_no_element_of_the_page(finished):
    page = html(page_data([RunFolder(finished)])).decode()
    assert page.count("</script") == 3  # data, library, script
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(text)["runs"][0]["answers"][0]["samples"][0]["prompt"] == NASTY
    assert "<" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline'; img" in policy
    assert "connect-src" not in policy
    assert "@data@" not in page


def test_a_lone_surrogate_is_written(tmp_path):
    (tmp_path / "generations.jsonl").write_text(
        json.dumps({"step": 0, "prompt": "\ud800", "response": "", "answer": None, "reward": None}) + "\n",
        encoding="utf-8",
    )
    assert "generations" not in page_data([RunFolder(tmp_path)]).decode("utf-8")


def test_labels_tell_runs_apart(tmp_path):
    assert labels([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert labels([tmp_path / "x/p/a", tmp_path / "y/p/a"]) == ["x", "y"]
    assert labels([tmp_path / "a"]) == ["a"]


# --- the command


@pytest.mark.slow
def test_the_command_writes_into_the_run_folder_or_compares(tmp_path, finished, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([str(finished)]) == 0
    assert capsys.readouterr().out.strip() == str(finished / "report.html")
    other = make_run(tmp_path, "other", recipe="ppo_demo")
    assert main([str(finished), str(other)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "comparison.html")
    text = re.search(
        r'id="data">(.*?)</script>', (tmp_path / "comparison.html").read_text(encoding="utf-8"), re.DOTALL
    )[1]
    page = json.loads(text)
    assert page["differing"]["distillation.enabled"] == [True, False]
    assert "trainer.project_name" not in page["differing"]


def test_the_command_names_what_is_no_run_folder(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert f"{tmp_path / 'nothing'} is not a run folder" in capsys.readouterr().err
    (tmp_path / "run.log").touch()
    assert main([str(tmp_path), "--output", str(tmp_path / "no" / "page.html")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--output=page.html", "--serve=99999"])
    assert "--output is not used with --serve" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_has_its_report_when_it_ends(tmp_path):
    (tmp_path / "run.log").touch()
    with live_report(tmp_path):
        (tmp_path / "metrics.jsonl").write_text('{"step": 7, "actor/loss": 0.5}\n', encoding="utf-8")
    assert '"step":7' in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
def test_a_run_that_fails_names_its_report(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "run.log").touch()
    with pytest.raises(ValueError, match="boom"), live_report(tmp_path):
        raise ValueError("boom")
    assert f"(open in a browser): {(tmp_path / 'report.html').as_uri()}" in caplog.text


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "run.log").touch()
    (tmp_path / "report.html").mkdir()
    with live_report(tmp_path):
        pass
    assert "report.html is outdated: error: [Errno 21]" in caplog.text


@pytest.mark.slow
def test_the_report_of_a_run_that_was_killed_is_written(tmp_path):
    folder = make_run(tmp_path, total=99)
    rows = (folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "starts.jsonl").write_text("\n".join(rows[:-1]) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "hybrid_gkd.report", FOLLOW, str(folder)]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=60)
    assert UNFINISHED in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_serving_follows_the_run_and_answers_this_machine_alone(tmp_path, monkeypatch):
    folder = make_run(tmp_path)
    with ReportServer([folder], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def get(path, host=f"localhost:{server.port}"):
            request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers={"Host": host})
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read().decode()

        assert "connect-src 'self'" in get("/")
        assert json.loads(get("/data.json"))["live"] is True
        for path, host, code in (("/", "evil.example", 403), ("/etc/passwd", f"127.0.0.1:{server.port}", 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(path, host)
            assert refused.value.code == code
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"step": 31, "actor/loss": 0.25}\n')
        monkeypatch.setattr(serving, "FRESH_SECONDS", 0.0)
        assert json.loads(get("/data.json"))["runs"][0]["state"]["step"] == 31
        server.shutdown()


@pytest.mark.slow
def test_the_library_is_what_the_tool_makes():
    import vl_convert

    file = importlib.resources.files("hybrid_gkd.reporting.report").joinpath("vega.min.js")
    assert file.read_text(encoding="utf-8") == vl_convert.javascript_bundle()

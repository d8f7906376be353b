"""docs/results.md from stored runs: equal tokens, equal minutes, and what is refused."""

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import hybrid_gkd
from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.demo.folders import DemoPaths
from hybrid_gkd.errors import DataError
from hybrid_gkd.reporting.metric_table import METRICS

sys.path.insert(0, str(Path(hybrid_gkd.__file__).parents[1] / "benchmarks"))
import results  # type: ignore[import-not-found]
import results_gsm8k
import results_report

TITLES = {name: run.title for name, run in results.RUNS.items()}
HEAD = {
    "models": "abc", "device": "CPU", "code": "123", "overrides": "", "date": "2026-01-01",
    "teacher": "38M parameters, 85.0 % right", "student": "6M parameters, 12.0 % right",
}  # fmt: skip


def stored(folder, name, seed, points, **head):
    """A run with accuracies at (minutes, answer tokens)."""
    rows = [{"step": i, "minutes": m, "answer_tokens": t, "val/accuracy": a} for i, (m, t, a) in enumerate(points)]
    results.store(folder / f"{name}-{seed}.csv", HEAD | {"run": name, "seed": seed} | head, rows)


def write(folder, docs):
    results_report.report(results_report.read_all(folder), TITLES, docs, folder / "conclusions.md")


@pytest.mark.slow
def test_runs_are_compared_at_equal_tokens_and_at_equal_minutes(tmp_path):
    stored(tmp_path, "opd", 0, [(0, 0, 0.1), (2, 1e6, 0.5), (4, 2e6, 0.9)])
    stored(tmp_path, "opd", 1, [(0, 0, 0.1), (2, 1e6, 0.7), (4, 2e6, 0.7)])
    stored(tmp_path, "sft_data", 0, [(0, 0, 0.1), (1, 4e6, 0.3)])
    stored(tmp_path, "opd_k1", 0, [(0, 0, 0.1), (4, 2e6, 0.2)], together=2)
    (tmp_path / "conclusions.md").write_text("What they say.\n", encoding="utf-8")
    write(tmp_path, tmp_path)
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    head, _, opd, sft, *_, base, variant = [line for line in page.splitlines() if line.startswith("|")]
    assert "after 2 M answer tokens | after 1 minutes | at its end" in head
    # At one minute between the validations at 0 and 2 minutes; sft_data has 0.2 halfway to its 4 M tokens.
    assert opd.split(" | ")[1:5] == ["2", "80.0 (70.0 to 90.0)", "35.0 (30.0 to 40.0)", "80.0 (70.0 to 90.0)"]
    assert sft.split(" | ")[1:5] == ["1", "20.0", "30.0", "30.0"]
    assert base.split(" | ")[1] == "2"  # a variant has one seed, and what that says is in the spread of these
    assert variant.startswith("| K = 1 (`opd_k1`) | 1 | 20.0 | 20.0 |")
    assert "What they say." in page
    assert ", 1 or 2 runs at a time on each; " in page
    assert "teacher 38M parameters, 85.0 % right; student 6M parameters, 12.0 % right; models abc" in page
    for kind in ("methods", "variants"):
        assert f"(results_{kind}.svg)" in page
        svg = (tmp_path / f"results_{kind}.svg").read_text(encoding="utf-8")
        assert svg.startswith("<svg")
        assert "accuracy on held-out problems" in svg


def test_what_cannot_be_compared_or_read_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no runs are stored"):
        write(tmp_path, tmp_path)
    stored(tmp_path, "opd", 0, [(0, 0, 0.1), (2, 1e6, 0.5)])
    stored(tmp_path, "opd", 1, [(0, 0, 0.1), (2, 1e6, 0.5)], models="other")
    with pytest.raises(SystemExit, match="several models cannot be compared: abc, other"):
        write(tmp_path, tmp_path)
    (tmp_path / "opd-1.csv").write_text("step\n1\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"opd-1\.csv is no stored run"):
        write(tmp_path, tmp_path)
    assert not (tmp_path / "results.md").exists()


def test_a_run_that_would_be_made_otherwise_now_is_missing(tmp_path):
    stored(tmp_path, "grpo", 0, [(0, 0, 0.1)], overrides="actor_rollout_ref.actor.optim.lr=1")
    stored(tmp_path, "grpo", 1, [(0, 0, 0.1)], overrides=f"{results.own_overrides(results.RUNS['grpo'])} a=1")
    assert results.whole(results_report.read_all(tmp_path)) == {("grpo", 1)}


def test_minutes_and_tokens_are_those_of_training_steps():
    metrics = [{"step": 0, "val/accuracy": 0.1}] + [
        {"step": i, "timing/step": 30.0, "response_length/mean": 10.0, "actor/loss": 1.0, "perf/mfu": 0.1}
        for i in range(1, 201)
    ]
    metrics[100]["val/accuracy"] = 0.5
    rows = results.curve(metrics, answers=4)
    assert rows[0] == {"step": 0, "val/accuracy": 0.1, "minutes": 0.0, "answer_tokens": 0.0}
    assert rows[100]["minutes"] == 50
    assert rows[100]["answer_tokens"] == 4000
    assert "perf/mfu" not in rows[1]
    thin = results.thinned(rows)
    assert len(thin) < 80
    assert [row["step"] for row in thin if "val/accuracy" in row] == [0, 100]
    assert {name for name in results_report.COLUMNS if "/" in name} <= METRICS.keys()


def test_a_run_that_cannot_be_made_here_says_what_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results.importlib.util, "find_spec", lambda name: None)
    settings = results.Settings(paths=DemoPaths.under(tmp_path), device="cpu", steps=1, minutes=1, results=tmp_path)
    results.train_missing([("trl", 0)], settings, set(), time.monotonic() + 60)
    assert capsys.readouterr().out == "trl: skipped: needs TRL, which is not installed (pip install trl)\n"


WHOLE = """import json, pathlib
for step in (0, 1):
    row = {"step": step, "timing/step": 6.0, "response_length/mean": 2.0, "val/accuracy": 0.5}
    print(json.dumps(row), file=open(pathlib.Path(FOLDER, "metrics.jsonl"), "a"))"""
"""A program that comes to its end."""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Names of runs -> Python code that they are to be, with the name FOLDER; filled by the test."""
    programs = {}
    monkeypatch.setattr(results, "run_command", lambda name, seed, settings, folder: [
        sys.executable, "-c", f"FOLDER = {str(folder)!r}\n{programs[name]}"
    ])  # fmt: skip
    for folder in ("teacher", "student"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"weights")
    sizes = {"parameters": 5_640_000, "held_out_accuracy": 0.125}
    (tmp_path / "demo.json").write_text(json.dumps({"teacher": sizes, "student": sizes}), encoding="utf-8")
    return programs


@pytest.mark.slow
def test_a_run_that_fails_does_not_keep_the_others_and_leaves_its_log(tmp_path, programs, capsys):
    programs |= {
        "opd": "print('no such thing'); raise SystemExit(3)",
        "grpo": WHOLE,
        "opd_k1": "import time; time.sleep(600)",
        "opd_k8": """import json, pathlib, time
with open(pathlib.Path(FOLDER, "metrics.jsonl"), "w") as log:
    for step in range(9):
        row = {"step": step, "timing/step": 30.0, "response_length/mean": 2.0, "val/accuracy": 0.5}
        print(json.dumps(row), file=log, flush=True)
        if step == 2: time.sleep(600)""",
    }
    settings = results.Settings(
        paths=DemoPaths.under(tmp_path), device="cpu", steps=1, minutes=1, results=tmp_path / "stored", together=2
    )
    with pytest.raises(SystemExit, match=r"^failed: opd 0$"):
        results.train_missing([("opd", 0), ("grpo", 0), ("opd_k8", 0)], settings, set(), time.monotonic() + 300)
    results.train_missing([("opd_k1", 0)], settings, set(), time.monotonic() + 1)
    run, ended = results_report.read_all(tmp_path / "stored")
    assert (run.name, ended.name) == ("grpo", "opd_k8")
    assert ended.end("minutes") == 1
    assert run.accuracies("minutes") == [(0.0, 50.0), (0.1, 50.0)]
    assert run.head["student"] == "5.64M parameters, 12.5 % right"
    assert run.accuracies("answer_tokens")[-1] == (64.0, 50.0)  # 2 tokens of each of 4 x 8 answers
    out = capsys.readouterr().out
    assert out.count("opd 0: failed with exit code 3: \nno such thing") == 2  # once more when the others have ended
    assert "opd_k8 0: step 2, 1.00 minutes of training: val/accuracy 0.5" in out
    assert "opd_k1 0: stopped before its end" in out
    assert sorted(file.name for file in (tmp_path / "stored").glob("*.log")) == ["opd-0.log", "opd_k1-0.log"]


@pytest.mark.slow
def test_a_run_that_failed_beside_others_is_trained_when_they_have_ended(tmp_path, programs):
    needed = tmp_path / "stored" / "grpo-0.csv"
    fails = f"import pathlib\nif not pathlib.Path({str(needed)!r}).exists(): exit(3)\n"
    programs |= {"grpo": WHOLE, "opd": f"{fails}{WHOLE}"}
    settings = results.Settings(
        paths=DemoPaths.under(tmp_path), device="cpu", steps=1, minutes=1, results=tmp_path / "stored", together=2
    )
    results.train_missing([("opd", 0), ("grpo", 0)], settings, set(), time.monotonic() + 300)
    assert sorted(run.name for run in results_report.read_all(tmp_path / "stored")) == ["grpo", "opd"]


@pytest.mark.slow
def test_a_run_that_is_stopped_is_stored_as_far_as_it_came_and_leaves_no_process(tmp_path, programs):
    settings = results.Settings(paths=DemoPaths.under(tmp_path), device="cpu", steps=9, minutes=9, results=tmp_path)
    programs["opd"] = """import json, pathlib, subprocess, sys, time
with open(pathlib.Path(FOLDER, "metrics.jsonl"), "w") as log:
    for step in (0, 1):
        row = {"step": step, "timing/step": 30.0, "response_length/mean": 2.0, "val/accuracy": 0.5}
        print(json.dumps(row), file=log, flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(FOLDER, "child").write_text(str(child.pid))
pathlib.Path(FOLDER, "child").rename(""" + repr(str(tmp_path / "child")) + """)
time.sleep(600)"""
    file, over = tmp_path / "child", threading.Event()
    over.wait = lambda seconds: (time.sleep(0.05), file.exists())[1]  # type: ignore[method-assign]
    assert results.train("opd", 0, settings, 0, time.monotonic() + 300, over) is False
    (run,) = results_report.read_all(tmp_path)
    assert run.accuracies("minutes") == [(0.0, 50.0), (0.5, 50.0)]
    assert run.head[results.STOPPED] == "0.50 minutes"
    assert results.stored_runs(settings) == set()
    programs["opd"] = programs["opd"].replace("30.0", "6.0")
    file.unlink()
    assert results.train("opd", 0, settings, 0, time.monotonic() + 300, over) is False
    assert results_report.read_all(tmp_path)[0].head[results.STOPPED] == "0.50 minutes"  # it came further
    file.unlink()
    assert results.train("opd", 0, replace(settings, minutes=0.1), 0, time.monotonic() + 300, over)  # it has them all
    assert results.stored_runs(settings) == {("opd", 0)}
    child, deadline = int(file.read_text(encoding="utf-8")), time.monotonic() + 60
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(child)


def test_a_machine_without_git_can_store_runs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert results.commit() == "unknown"


@pytest.mark.slow
def test_every_run_of_the_program_has_a_configuration_of_its_own(tmp_path):
    settings = results.Settings(
        paths=DemoPaths.under(tmp_path), device="cuda", steps=10, minutes=1.0, results=tmp_path
    )
    reasons = {name: results.obstacle(run, settings) for name, run in results.RUNS.items()}
    reasons.pop("trl")  # whether TRL is there
    takes_critic = hasattr(Config(), "critic")
    assert {name for name, reason in reasons.items() if reason} == (set() if takes_critic else {"ppo_gae"}), reasons
    programs = {name for name, run in results.RUNS.items() if run.how == "program"}
    assert {results.answers_per_step(name, settings) for name in programs if not reasons[name]} == {256}
    assert len({results.RUNS[name].overrides for name in programs}) == len(programs)
    order = [(name, seed) for seed in range(3) for name in ("grpo", "opd")]
    assert results.wanted(["opd_k1", "opd", "grpo"], None) == [*order, ("opd_k1", 0)]
    assert results.wanted(["opd_k1", "opd", "trl"], None)[0] == ("trl", 0)  # the longest first
    assert set(results_report.METHODS) <= results.RUNS.keys()


@pytest.mark.slow
def test_runs_on_gsm8k_measure_divergence_and_no_accuracy(tmp_path):
    for device, recipe in results_gsm8k.RECIPES.items():
        settings = results_gsm8k.settings_of(DemoPaths.under(tmp_path), recipe, device, tmp_path, None)
        for name in results_gsm8k.ONLY:
            assert results.obstacle(results.RUNS[name], settings) is None
            config = load_config(
                results.program_overrides(results.RUNS[name], 0, settings, tmp_path), config_name="gpu_demo"
            )
            assert config.distillation.enabled
            assert not config.has_reward
            assert config.trainer.total_training_steps == recipe.steps
    for seed, ends in ((0, (0.5, 0.7)), (1, (0.3, 0.9))):
        rows = [
            {"step": step, "minutes": step, "answer_tokens": step * 1e6, "val/forward_kl": f, "val/reverse_kl": r}
            for step, (f, r) in enumerate([(1.0, 2.0), ends])
        ]
        results.store(tmp_path / f"opd-{seed}.csv", HEAD | {"run": "opd", "seed": seed}, rows)
    results_gsm8k.report(results_report.read_all(tmp_path), tmp_path, tmp_path / "conclusions.md")
    page = (tmp_path / "results_gsm8k.md").read_text(encoding="utf-8")
    expected = "1.000 (1.000 to 1.000) -> 0.400 (0.300 to 0.500) | 2.000 (2.000 to 2.000) -> 0.800 (0.700 to 0.900)"
    assert f"| on-policy distillation (`opd`) | 2 | 1.00 (1.00 to 1.00) | {expected} |" in page
    assert "held-out KL(teacher, student)" in (tmp_path / "results_gsm8k.svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_models_of_gsm8k_are_trained_on_its_solutions(tmp_path):
    texts = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(40)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    small = results_gsm8k.RECIPES["cpu"]
    shape = replace(small.student, training=replace(small.student.training, max_steps=3, batch_size=8))
    recipe = replace(small, vocab_size=300, num_train=32, num_val=4, teacher=shape, student=shape)
    root = tmp_path / "models"
    root.mkdir()
    paths = DemoPaths.under(root)
    results_gsm8k.fill(paths, recipe, f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl", "cpu")
    rows = [json.loads(line) for line in paths.train.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"prompt": row["question"], "answer": row["answer"]} for row in texts[:32]]
    assert len(paths.val.read_text(encoding="utf-8").splitlines()) == 4
    manifest = json.loads(paths.manifest.read_text(encoding="utf-8"))
    assert [manifest[name]["sft_steps"] for name in ("teacher", "student")] == [3, 3]
    assert (paths.teacher / "model.safetensors").is_file()
    with pytest.raises(DataError, match="question"):
        results_gsm8k.read(str(paths.train), "--train")

"""docs/results.md from stored runs: equal tokens, equal minutes, and what is refused."""

import sys
import time
from pathlib import Path

import pytest

import hybrid_gkd
from hybrid_gkd.config import Config
from hybrid_gkd.demo.folders import DemoPaths
from hybrid_gkd.reporting.metrics import METRICS

sys.path.insert(0, str(Path(hybrid_gkd.__file__).parents[1] / "benchmarks"))
import results  # type: ignore[import-not-found]
import results_report

TITLES = {name: run.title for name, run in results.RUNS.items()}
HEAD = {"models": "abc", "device": "CPU", "code": "123", "overrides": "", "date": "2026-01-01"}


def stored(folder, name, seed, points, **head):
    """A run with accuracies at (minutes, answer tokens)."""
    rows = [{"step": i, "minutes": m, "answer_tokens": t, "val/accuracy": a} for i, (m, t, a) in enumerate(points)]
    results.store(folder / f"{name}-{seed}.csv", HEAD | {"run": name, "seed": seed} | head, rows)


def write(folder, docs):
    results_report.report(results_report.read_all(folder), TITLES, docs, folder / "conclusions.md")


def test_runs_are_compared_at_equal_tokens_and_at_equal_minutes(tmp_path):
    stored(tmp_path, "opd", 0, [(0, 0, 0.1), (2, 1e6, 0.5), (4, 2e6, 0.9)])
    stored(tmp_path, "opd", 1, [(0, 0, 0.1), (2, 1e6, 0.7), (4, 2e6, 0.7)])
    stored(tmp_path, "sft_data", 0, [(0, 0, 0.1), (1, 4e6, 0.3)])
    stored(tmp_path, "opd_k1", 0, [(0, 0, 0.1), (4, 2e6, 0.2)])
    (tmp_path / "conclusions.md").write_text("What they say.\n")
    write(tmp_path, tmp_path)
    page = (tmp_path / "results.md").read_text()
    head, _, opd, sft, *_, base, variant = [line for line in page.splitlines() if line.startswith("|")]
    assert "after 2 M answer tokens | after 1 minutes | at its end" in head
    # At one minute between the validations at 0 and 2 minutes; sft_data has 0.2 halfway to its 4 M tokens.
    assert opd.split(" | ")[1:5] == ["2", "80.0 (70.0 to 90.0)", "35.0 (30.0 to 40.0)", "80.0 (70.0 to 90.0)"]
    assert sft.split(" | ")[1:5] == ["1", "20.0", "30.0", "30.0"]
    assert base.split(" | ")[1] == "1"  # only the seed that the variant has
    assert variant.startswith("| K = 1 (`opd_k1`) | 1 | 20.0 | 20.0 |")
    assert "What they say." in page
    for kind in ("methods", "variants"):
        assert f"(results_{kind}.svg)" in page
        svg = (tmp_path / f"results_{kind}.svg").read_text()
        assert svg.startswith("<svg")
        assert "accuracy on held-out problems" in svg


def test_what_cannot_be_compared_or_read_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no runs are stored"):
        write(tmp_path, tmp_path)
    stored(tmp_path, "opd", 0, [(0, 0, 0.1), (2, 1e6, 0.5)])
    stored(tmp_path, "opd", 1, [(0, 0, 0.1), (2, 1e6, 0.5)], models="other")
    with pytest.raises(SystemExit, match="several models cannot be compared: abc, other"):
        write(tmp_path, tmp_path)
    (tmp_path / "opd-1.csv").write_text("step\n1\n")
    with pytest.raises(SystemExit, match=r"opd-1\.csv is no stored run"):
        write(tmp_path, tmp_path)
    assert not (tmp_path / "results.md").exists()


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
    settings = results.Settings(paths=DemoPaths.under(tmp_path), device="cpu", steps=1, sft_minutes=1, results=tmp_path)
    results.train_missing([("trl", 0)], settings, set(), time.monotonic() + 60)
    assert capsys.readouterr().out == "trl: skipped: needs TRL, which is not installed (pip install trl)\n"


def test_a_run_that_fails_does_not_keep_the_others_and_one_that_takes_too_long_is_not_stored(
    tmp_path, monkeypatch, capsys
):
    programs = {
        "opd": "raise SystemExit(3)",
        "grpo": """import json, pathlib
for step in (0, 1):
    row = {"step": step, "timing/step": 6.0, "response_length/mean": 2.0, "val/accuracy": 0.5}
    print(json.dumps(row), file=open(pathlib.Path(FOLDER, "metrics.jsonl"), "a"))""",
        "opd_k1": "import time; time.sleep(600)",
    }
    monkeypatch.setattr(results, "run_command", lambda name, seed, settings, folder: [
        sys.executable, "-c", f"FOLDER = {str(folder)!r}\n{programs[name]}"
    ])  # fmt: skip
    for folder in ("teacher", "student"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"weights")
    settings = results.Settings(
        paths=DemoPaths.under(tmp_path), device="cpu", steps=1, sft_minutes=1, results=tmp_path / "stored"
    )
    with pytest.raises(SystemExit, match=r"^failed: opd 0$"):
        results.train_missing([("opd", 0), ("grpo", 0)], settings, set(), time.monotonic() + 300)
    results.train_missing([("opd_k1", 0)], settings, set(), time.monotonic() + 1)
    assert [file.name for file in (tmp_path / "stored").iterdir()] == ["grpo-0.csv"]
    (run,) = results_report.read_all(tmp_path / "stored")
    assert run.accuracies("minutes") == [(0.0, 50.0), (0.1, 50.0)]
    assert run.accuracies("answer_tokens")[-1] == (64.0, 50.0)  # 2 tokens of each of 4 x 8 answers
    out = capsys.readouterr().out
    assert "opd 0: failed with exit code 3" in out
    assert "opd_k1 0: stopped, the minutes are over" in out


def test_every_run_of_the_program_has_a_configuration_of_its_own(tmp_path):
    settings = results.Settings(
        paths=DemoPaths.under(tmp_path), device="cuda", steps=10, sft_minutes=1.0, results=tmp_path
    )
    reasons = {name: results.obstacle(run, settings) for name, run in results.RUNS.items()}
    reasons.pop("trl")  # whether TRL is there
    takes_critic = hasattr(Config(), "critic")
    assert {name for name, reason in reasons.items() if reason} == (set() if takes_critic else {"ppo_gae"}), reasons
    programs = {name for name, run in results.RUNS.items() if run.how == "program"}
    assert {results.answers_per_step(name, settings) for name in programs if not reasons[name]} == {256}
    assert len({results.RUNS[name].overrides for name in programs}) == len(programs)
    assert results.wanted(["opd_k1", "opd", "grpo"], None)[:4] == [("grpo", 0), ("opd", 0), ("opd_k1", 0), ("grpo", 1)]
    assert set(results_report.METHODS) <= results.RUNS.keys()

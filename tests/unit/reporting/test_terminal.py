import io
from pathlib import Path
from typing import Any

from hybrid_gkd.reporting.terminal import show_next_steps, show_plan

GIB = 2**30


def test_the_plan_has_a_column_for_each_owner_and_the_sum_of_each_phase(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    phases = {"rollout": {"kv_cache": 40 * GIB, "engine_weights": 3 * GIB}, "optimizer_step": {"gradients": 6 * GIB}}
    show_plan(stream, ["student: runs/a[lr=1e-5]/[/x]", "teacher: host:15555, top-64"], phases)
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["student", "runs/a[lr=1e-5]/[/x]"]
    assert lines[1].split() == ["teacher", "host:15555,", "top-64"]
    header = next(line for line in lines if "together" in line)
    assert all(name in header for name in ("engine weights", "kv cache", "gradients"))
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines if line.startswith("│")]
    assert [(row[0], sorted(filter(None, row[1:]))) for row in rows] == [
        ("rollout", ["3.0", "40.0", "43.0"]), ("optimizer step", ["6.0", "6.0"]),
    ]  # fmt: skip
    assert "GiB" in stream.getvalue()


def test_small_models_are_shown_in_mib(monkeypatch):
    stream = io.StringIO()
    show_plan(stream, [], {"rollout": {"engine_weights": 2**20}})
    assert "MiB" in stream.getvalue()


def test_what_comes_next_names_what_is_there(tmp_path):
    stream, folder = io.StringIO(), tmp_path / "my run" / "huggingface"
    folder.mkdir(parents=True)
    more = ["trainer.total_training_steps=N", "trainer.resume_mode=auto"]
    common: dict[str, Any] = {"base": "/models/base", "train_on": more, "run_dir": tmp_path}
    show_next_steps(stream, report=Path("/runs/my run/report.html"), huggingface=folder, **common)
    text = stream.getvalue()
    assert "open the report: " in text
    assert "/runs/my run/report.html" in text
    assert f"vllm serve '{folder}'" in text
    (folder / "adapter_config.json").touch()
    stream = io.StringIO()
    show_next_steps(stream, report=None, huggingface=folder, **common)
    assert f"vllm serve /models/base --enable-lora --lora-modules 'student={folder}'" in stream.getvalue()
    stream = io.StringIO()
    show_next_steps(stream, report=None, huggingface=None, **common)
    assert stream.getvalue().startswith(f"train on: the same command with {' '.join(more)}; ")

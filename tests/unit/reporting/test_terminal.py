import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_gkd.reporting.terminal import serving_command, show_next_steps, show_plan

GIB = 2**30


def test_the_plan_has_a_column_for_each_owner_and_the_sum_of_each_phase(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    phases = {"rollout": {"kv_cache": 40 * GIB, "engine_weights": 3 * GIB}, "optimizer_step": {"gradients": 6 * GIB}}
    lines = ["student: runs/a[lr=1e-5]/[/x]", "teacher: host:15555, top-64"]
    show_plan(stream, lines, phases, card_bytes=79 * GIB)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0].split() == ["student", "runs/a[lr=1e-5]/[/x]"]
    assert lines[1].split() == ["teacher", "host:15555,", "top-64"]
    header = next(line for line in lines if "together" in line)
    assert all(name in header for name in ("engine weights", "kv cache", "gradients"))
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines if line.startswith("│")]
    assert [(row[0], sorted(filter(None, row[1:]))) for row in rows] == [
        ("rollout", ["3.0", "40.0", "43.0"]), ("optimizer step", ["6.0", "6.0"]),
    ]  # fmt: skip
    title = "memory of each worker by phase, GiB (activations: at least), of 79.0 GiB on the card"
    assert title in " ".join(lines)  # it is broken where the table is narrower


def test_small_models_are_shown_in_mib(monkeypatch):
    stream = io.StringIO()
    show_plan(stream, [], {"rollout": {"engine_weights": 2**20}})
    assert "MiB" in stream.getvalue()
    assert "card" not in stream.getvalue()


def test_what_comes_next_names_what_is_there(tmp_path, monkeypatch):
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)  # vLLM too
    monkeypatch.setattr(sys, "executable", "/my env/python")
    stream, folder = io.StringIO(), tmp_path / "my run" / "huggingface"
    folder.mkdir(parents=True)
    more = ["trainer.total_training_steps=N", "trainer.resume_mode=auto"]
    common: dict[str, Any] = {"base": "/models/base", "on_gpu": True, "train_on": more, "run_dir": tmp_path}
    show_next_steps(stream, report=Path("/runs/my run/report.html"), huggingface=folder, **common)
    text = stream.getvalue()
    assert "open the report: " in text
    assert "/runs/my run/report.html" in text
    server = "'/my env/python' -m vllm.entrypoints.openai.api_server --host 127.0.0.1"
    assert f"serve the student: {server} --model '{folder}'\n" in text
    for without in ({"huggingface": None}, {"huggingface": folder}):
        stream = io.StringIO()
        show_next_steps(stream, report=None, **without, **common)
        assert stream.getvalue().startswith(f"train further: the same command with {' '.join(more)}; ")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(("rank", "room"), [(8, []), (16, []), (32, ["32"]), (40, ["64"])])
def test_adapters_are_served_above_the_model_that_they_began_with(tmp_path, rank, room):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}), encoding="utf-8")
    _, _, module, *options = serving_command(tmp_path, "/models/base", on_gpu=True)
    assert module == "vllm.entrypoints.openai.api_server"
    assert options[:2] == ["--host", "127.0.0.1"]  # no key protects it
    assert options[2:7] == ["--model", "/models/base", "--enable-lora", "--lora-modules", f"student={tmp_path}"]
    assert options[7:] == ["--max-lora-rank"] * len(room) + room


def test_on_a_cpu_the_server_takes_half_of_the_memory(tmp_path):
    """By default it asks for 0.92, and does not start where other programs have more than the rest."""
    options = serving_command(tmp_path, "unused", on_gpu=False)[5:]
    assert options == ["--model", str(tmp_path), "--gpu-memory-utilization", "0.5"]

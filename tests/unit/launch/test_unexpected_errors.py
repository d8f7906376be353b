"""An exception that nobody expects, at any seam of a start, is one line with a name, and its traceback is in a file."""

import contextlib
import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from hybrid_gkd.__main__ import main
from hybrid_gkd.launch import command_line, doctor, preflight, restarts, run
from hybrid_gkd.launch.checks import Check, Report
from hybrid_gkd.reporting.logs import RUN_LOG
from hybrid_gkd.runtime.signals import SIGNALS
from hybrid_gkd.student.checkpoint_store import CheckpointStore
from hybrid_gkd.testing import make_tiny_model

SEAMS = {
    command_line: ("examine_config", "used_demos"),
    run: (
        "check_all", "locked_run_folder", "run_log", "write_config", "live_report", "recorded_start", "Assembly",
        "trace_recording", "ray_cluster", "start_workers", "RewardScorer", "start_tracking", "PPOTrainer",
        "check_run_folder", "summarise",
    ),
    restarts: ("freeze_gc", "take_snapshots", "reliability", "remove_snapshots"),
    CheckpointStore: ("reserve", "release"),
}  # fmt: skip
BEFORE_THE_LOG = {"examine_config", "used_demos", "check_all", "locked_run_folder", "run_log", "summarise"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_tiny_model(folder / "student")
    rows = (json.dumps({"prompt": f"What is {row}?"}) + "\n" for row in range(4))
    (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    return folder


@pytest.fixture
def start(folder, tmp_path, monkeypatch, capsys):
    """Run the command line, without Ray and workers; return its exit code and what it prints to standard error."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run, "ray_cluster", lambda *args, **options: contextlib.nullcontext())
    group = SimpleNamespace(description=[], close=lambda: None)
    monkeypatch.setattr(run, "start_workers", lambda *args, **options: group)
    monkeypatch.setattr(run, "start_tracking", lambda facts: contextlib.nullcontext())
    saving, config = SimpleNamespace(snapshot=None, step=0), SimpleNamespace(takes_snapshots=False)
    store = SimpleNamespace(run_dir=tmp_path)
    trainer = SimpleNamespace(
        fit=lambda: None, step=1, total_steps=1, checkpoint=None, saving=saving, config=config, store=store
    )  # fmt: skip
    monkeypatch.setattr(run, "PPOTrainer", lambda *args, **options: trainer)

    def call():
        code = main([
            f"actor_rollout_ref.model.path={folder}/student", f"data.train_files={folder}/train.jsonl",
            "distillation.enabled=false", "reward.answer_key=prompt", "actor_rollout_ref.rollout.n=2",
            "data.train_batch_size=4", "data.max_prompt_length=32", "data.max_response_length=16",
            "trainer.device=cpu", "actor_rollout_ref.rollout.name=hf", f"trainer.default_local_dir={tmp_path}/out",
        ])  # fmt: skip
        return code, capsys.readouterr().err

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def plant(*args, **options):
    raise Exception("planted\nhere")


def expect_one_line(result, name):
    code, errors = result
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 1
    assert errors.endswith(line + "\n")
    assert "Traceback" not in errors
    assert re.search(rf"unexpected error in {name}: Exception: planted here; traceback: ", line), line
    file = Path(line.rpartition("traceback: ")[2])
    text = file.read_text("utf-8")
    assert "Traceback (most recent call last)" in text
    assert "Exception: planted\nhere" in text
    return file


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "seam"), [(owner, seam) for owner, seams in SEAMS.items() for seam in seams])
def test_a_plain_exception_at_a_seam_of_the_start(start, tmp_path, monkeypatch, owner, seam):
    monkeypatch.setattr(owner, seam, plant)
    file = expect_one_line(start(), r"hybrid_gkd\.[\w.]+")
    assert (file == tmp_path / "out" / "hybrid_gkd" / "gkd" / RUN_LOG) == (seam not in BEFORE_THE_LOG), file


@pytest.mark.slow
@pytest.mark.parametrize("name", [check.name for check in preflight.CHECKS])
def test_a_plain_exception_in_a_check_is_named_by_it(start, monkeypatch, name):
    checks = [Check(each.name, plant if each.name == name else each.function, each.after) for each in preflight.CHECKS]
    monkeypatch.setattr(preflight, "CHECKS", checks)
    expect_one_line(start(), rf"hybrid_gkd\.[\w.]+, in the check of {name}")


@pytest.mark.slow
def test_a_ray_that_does_not_start_in_time_is_named(start, monkeypatch):
    from hybrid_gkd.workers.cluster import ray_cluster

    def late(**options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(run, "ray_cluster", ray_cluster)
    monkeypatch.setattr(ray, "init", late)
    code, errors = start()
    assert code == 1
    assert "error: ray_init.address: Ray could not start or be reached: Exception: The current node timed" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_configuration_of_an_earlier_start_that_is_not_utf8_is_kept(start, tmp_path):
    folder = tmp_path / "out" / "hybrid_gkd" / "gkd"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_bytes(b"caf\xe9")
    start()
    assert (folder / "config.1.yaml").read_bytes() == b"caf\xe9"
    assert (folder / "config.yaml").read_text("utf-8")


def test_an_empty_timeout_is_named(monkeypatch, capsys, tmp_path):
    """It is an OSError without a message."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def late(stopping):
        raise TimeoutError

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        assert command_line.run_command(late, debug=False) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "command_line.run_command: TimeoutError; traceback: " in capsys.readouterr().err


def test_a_dry_run_names_the_place_of_a_plain_exception(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = Report()
    report.run_all([Check("first", plant), Check("second", lambda facts: "fine")], SimpleNamespace())
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"FAIL first: unexpected error in .*run_all: Exception: planted here; traceback: /.*", lines[0])
    assert lines[1] == "ok   second: fine"
    assert report.failed == ["first"]


def test_an_unexpected_error_of_the_doctor_is_one_line_and_with_debug_its_traceback(tmp_path, monkeypatch, capsys):
    def fail(options):
        raise RuntimeError("seam")

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(doctor, "load", fail)
    try:
        assert doctor.main([]) == 1
        assert re.fullmatch(r"error: unexpected error in .*RuntimeError: seam; .*\n", capsys.readouterr().err)
        assert doctor.main(["--debug"]) == 1
        assert "Traceback" in capsys.readouterr().err
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

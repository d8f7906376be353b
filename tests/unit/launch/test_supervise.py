"""A run that ends is started again where that is of use. The run is a script in its place, with the files of a run."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_gkd.reporting.starts import read_starts, reliability

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")]

RUN = """#!{python}
import json, os, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "arguments.jsonl", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
number = len((folder / "arguments.jsonl").read_text().splitlines())
plan = {plan!r}[min(number, {length}) - 1]

def append(name, **row):
    with open(folder / name, "a") as file:
        print(json.dumps(row), file=file)

if "aside" in plan:  # as a new run does with the files of an earlier one
    (folder / "starts.jsonl").unlink()
if "steps" in plan:
    append("starts.jsonl", start=time.time(), step=0)
    append("starts.jsonl", ready=time.time())
    for step in plan.get("replaced", []):
        append("starts.jsonl", restart=time.time(), failed_step=step, resumed_step=step - 1, steps_repeated=0,
               seconds_repeated=0.0, seconds_down=7.0)
    for step in plan["steps"]:
        append("metrics.jsonl", step=step, **{{"timing/elapsed": 10.0 * step}})
    if "saved" in plan:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(plan["saved"]))
if "waits" in plan:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / "waits").touch()
    time.sleep(600)
if "error" in plan:
    append("starts.jsonl", end=time.time(), error=plan["error"])
if "signal" in plan:
    os.kill(os.getpid(), plan["signal"])
sys.exit(plan.get("code", 0))
"""
CODE = """
import sys
from hybrid_gkd import __main__
from hybrid_gkd.launch import supervise
supervise.FIRST_PAUSE = 0.0
sys.executable = sys.argv[1]
sys.exit(__main__.main(sys.argv[2:]))
"""


def arguments(tmp_path, plan, *overrides):
    """The supervisor of a script that does what its starts are to do, one after the other, the last one for good."""
    folder, script = tmp_path / "hybrid_gkd" / "gkd", tmp_path / "run"
    text = RUN.format(python=sys.executable, folder=str(folder), plan=plan, length=len(plan))
    script.write_text(text, encoding="utf-8")
    script.chmod(stat.S_IRWXU)
    own = ["data.train_files=a.jsonl", "actor_rollout_ref.model.path=m", "actor_rollout_ref.teacher.server_ip=t"]
    own += [f"trainer.default_local_dir={tmp_path}", *overrides]
    return folder, [sys.executable, "-c", CODE, str(script), "--supervise", *own]


def run(tmp_path, plan, *overrides):
    folder, command = arguments(tmp_path, plan, *overrides)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    starts = [json.loads(line) for line in (folder / "arguments.jsonl").read_text(encoding="utf-8").splitlines()]
    return ended.returncode, starts, ended.stderr, folder


def test_a_run_is_started_again_until_it_succeeds_and_records_what_was_lost(tmp_path):
    plan = [
        {"steps": [1, 2, 3], "saved": 2, "error": "RayLost: Ray's raylet has ended", "code": 1},
        {"signal": int(signal.SIGKILL)},  # of the same step, but before it
        {"steps": [3, 4, 5, 6], "replaced": [4], "signal": int(signal.SIGKILL)}, {"steps": [3, 4, 5, 6, 7]},
    ]
    code, starts, errors, folder = run(tmp_path, plan, "trainer.resume_mode=disable")
    assert code == 0
    assert [argument[:2] for argument in starts] == [["-m", "hybrid_gkd"]] * 4
    assert [argument[-1] for argument in starts] == ["trainer.max_restarts=20", *["trainer.resume_mode=auto"] * 3]
    first = "restart 1 of 20 in 0 s, since step 4 has failed: RayLost: Ray's raylet has ended"
    killed = "was killed by SIGKILL (out of memory?)"
    second = f"restart 2 of 20 in 0 s, since step 4 has failed: it {killed} before its start"
    third = f"restart 4 of 20 in 0 s, since step 7 has failed: the driver {killed}"
    log = (folder / "run.log").read_text(encoding="utf-8")
    for line in (first, second, third):
        assert line in errors
        assert f" WARNING {line}\n" in log
    assert [start["error"] for start in read_starts(folder)[:2]] == [plan[0]["error"], third.partition("failed: ")[2]]
    found = reliability(folder)
    assert (found["reliability/restarts"], found["reliability/steps_repeated"]) == (4, 1 + 4)
    assert 57 <= found["reliability/seconds_lost"] < 57 + 120  # 10 s for each step, and the starts


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("end", [{"error": "TeacherError: gone", "code": 1}, {"signal": int(signal.SIGKILL)}])
def test_a_run_in_the_place_of_an_earlier_one_is_started_again(tmp_path, before, end):
    folder = tmp_path / "hybrid_gkd" / "gkd"
    folder.mkdir(parents=True)
    text = "".join(json.dumps({"start": 1000.0 + number, "step": 0}) + "\n" for number in range(before))
    (folder / "starts.jsonl").write_text(text, encoding="utf-8")
    plan = [{"aside": True, "steps": [1, 2, 3], "saved": 2, **end}, {"steps": [3, 4]}]
    code, starts, errors, _ = run(tmp_path, plan, "trainer.resume_mode=disable")
    assert (code, len(starts)) == (0, 2)
    assert "restart 1 of 20 in 0 s, since step 4 has failed" in errors
    assert "before its start" not in errors
    assert reliability(folder)["reliability/steps_repeated"] == 1


@pytest.mark.parametrize(
    ("plan", "key", "num_starts", "last"), [
        ([{"steps": [1, 2], "error": "TrainingError: NaN", "code": 1}], 20, 2, "step 3 has failed twice"),
        (
            [{"steps": range(n, n + 2), "error": "TrainingError: NaN", "code": 1} for n in (1, 3, 5)], 1, 2,
            "there were 1 restarts (trainer.max_restarts)",
        ),
        # Steps that failed before, after which the run has replaced its workers.
        ([{"steps": [1, 2], "replaced": [3], "error": "TrainingError: NaN", "code": 1}], 20, 1,
         "step 3 has failed twice"),
        ([{"steps": [1, 2], "replaced": [1, 2], "error": "TrainingError: NaN", "code": 1}], 2, 1,
         "there were 2 restarts (trainer.max_restarts)"),
        ([{"code": 1}], 20, 1, None),
        ([{"steps": [1], "error": "ConfigError: data.x: must not", "code": 1}], 20, 1, None),
        ([{"steps": [1], "error": "SystemExit: 143", "code": 143}], 20, 1, None),
    ],
)  # fmt: skip
def test_a_start_that_would_end_alike_is_none(tmp_path, plan, key, num_starts, last):
    plan = [each | ({"steps": list(each["steps"])} if "steps" in each else {}) for each in plan]
    code, starts, errors, folder = run(tmp_path, plan, f"trainer.max_restarts={key}")
    assert code == plan[0]["code"]
    assert len(starts) == num_starts
    if last is None:
        assert "restart" not in errors
        assert not (folder / "run.log").exists()
    else:
        line = f"the run is not started again: {last}; the last error: TrainingError: NaN"
        assert line in errors
        assert line in (folder / "run.log").read_text(encoding="utf-8")


def test_a_signal_is_passed_on_once_and_ends_the_supervision(tmp_path):
    folder, command = arguments(tmp_path, [{"steps": [1], "waits": True}])
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (folder / "waits").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "restart" not in errors


def test_bad_input_is_left_to_the_run(tmp_path):
    code, starts, errors, _ = run(tmp_path, [{"code": 1}], "trainer.max_restarts=-1")
    assert (code, len(starts), errors) == (1, 1, "")

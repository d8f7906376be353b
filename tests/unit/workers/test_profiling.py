"""torch's profiler for steps of one's choice, and nothing for the others."""

import gzip
import json
import subprocess
import sys

import pytest
import torch

from hybrid_gkd.workers.profiling import StepProfiler


def work():
    torch.ones(3, 4) @ torch.ones(4, 5)


def names(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"}


@pytest.mark.slow
def test_the_steps_that_were_asked_for_are_profiled_each_part_in_a_file_of_its_own(tmp_path):
    profiler = StepProfiler([5], tmp_path, "actor worker 1")
    for step in (4, 5, 6):
        profiler.begin(step)
        work()
    first = tmp_path / "profile_step_5_actor_worker_1.json.gz"
    assert sorted(tmp_path.iterdir()) == [first]
    assert "aten::matmul" in names(first)
    profiler.begin(5)
    torch.ones(4).cumsum(0)
    second = tmp_path / "profile_step_5_actor_worker_1.1.json.gz"
    assert profiler.take_outcomes() == [str(first), str(second)]
    assert "aten::cumsum" in names(second)
    assert "aten::cumsum" not in names(first)
    assert profiler.take_outcomes() == []


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_is_said_and_does_not_end_the_run(tmp_path):
    profiler = StepProfiler([1], tmp_path / "gone", "worker 0")
    profiler.begin(1)
    work()
    (outcome,) = profiler.take_outcomes()
    assert outcome.startswith("no profile of worker_0: ")
    assert "gone" in outcome


@pytest.mark.slow
def test_without_such_steps_nothing_is_imported(tmp_path):
    code = (
        "import sys; from pathlib import Path; from hybrid_gkd.workers.profiling import StepProfiler;"
        "profiler = StepProfiler([], Path('.'), 'worker 0'); profiler.begin(1); print(profiler.take_outcomes());"
        "sys.exit('torch.profiler' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

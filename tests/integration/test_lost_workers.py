"""Workers that are killed are replaced within the run, which then computes what it would have without that."""

import json

import psutil
import pytest
from test_command_line import HF, OWN_POOL, arguments, finish, logged_step, run, start, wait_for, world  # noqa: F401
from test_full_determinism import curves

from hybrid_gkd.reporting.starts import read_starts, rows_of_starts
from hybrid_gkd.student.checkpoint_store import SNAPSHOT

STEPS = 6
OPTIONS = (
    *HF, *OWN_POOL, "actor_rollout_ref.actor.fsdp_config.full_determinism=true", "trainer.n_gpus_per_node=2",
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=0", "trainer.test_freq=3",
    "actor_rollout_ref.actor.ppo_epochs=8",  # most of a step is its update
)


def worker(process, log):
    """The process of the run that writes this log."""

    def find():
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if any(file.path.endswith(log) for file in child.open_files()):
                    return child
            except psutil.Error:
                continue
        return None

    return wait_for(find, log)


def test_a_run_that_loses_workers_has_the_curve_of_one_that_does_not(world, tmp_path):  # noqa: F811
    """One of two student workers, most likely in an update, then the rollout worker; Ray and the teacher stay."""
    for name in ("undisturbed", "disturbed"):
        folder = tmp_path / "hybrid_gkd" / name
        options = [*OPTIONS, f"trainer.experiment_name={name}"]
        if name == "undisturbed":
            code, _, errors = run(arguments(world, tmp_path, *options))
            assert code == 0, errors
            assert not (folder / SNAPSHOT).exists()
            continue
        kept = tmp_path / "memory"
        options += ["trainer.max_restarts=3", f"trainer.snapshot_dir={kept}", "trainer.snapshot_freq=1"]
        process = start(arguments(world, tmp_path, *options))
        for step, log in ((2, "actor_1.log"), (4, "rollout_0.log")):
            wait_for(logged_step(tmp_path, step, name), f"step {step}")
            worker(process, log).kill()
            wait_for(lambda step=step: len(restarts(folder)) >= step // 2, "the restart")
        code, _, errors = finish(process)
        assert code == 0, errors
        assert not list(kept.iterdir())
    assert curves(tmp_path / "hybrid_gkd" / "disturbed") == curves(tmp_path / "hybrid_gkd" / "undisturbed")
    assert len(read_starts(folder)) == 1
    first, second = restarts(folder)
    assert "actor worker 1 died in " in first["reason"]
    assert "rollout worker 0 died in " in second["reason"]
    for row in (first, second):
        assert 0 <= row["steps_repeated"] <= 1
        assert f"WARNING restart " in (folder / "run.log").read_text(encoding="utf-8")
    last = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["reliability/restarts"] == 2
    assert last["reliability/steps_repeated"] == first["steps_repeated"] + second["steps_repeated"]
    assert last["reliability/seconds_lost"] > 0


def restarts(folder):
    return [row for row in rows_of_starts(folder) if "restart" in row]

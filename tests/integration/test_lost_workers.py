"""Workers that are killed are replaced within the run, which then computes what it would have without that."""

import time
from pathlib import Path

import psutil
from processes import files_of
from test_command_line import HF, OWN_POOL, arguments, finish, logged_step, run, start, wait_for, world  # noqa: F401
from test_full_determinism import curves

from hybrid_gkd.reporting.starts import read_starts, rows_of_starts
from hybrid_gkd.student.checkpoint_store import SNAPSHOT

STEPS = 6
LOGS = "actor_0.log", "actor_1.log", "rollout_0.log"
OPTIONS = (
    *HF, *OWN_POOL, "actor_rollout_ref.actor.fsdp_config.full_determinism=true", "trainer.n_gpus_per_node=2",
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=0", "trainer.test_freq=3",
    "actor_rollout_ref.actor.ppo_epochs=4",
)  # fmt: skip


def workers(process):
    """The run's workers by the logs that they write: two actors and a rollout worker."""

    def find():
        found = {}
        for child in psutil.Process(process.pid).children(recursive=True):
            found |= {Path(path).name: child for path in files_of(child) if path.endswith(LOGS)}
        return found if len(found) == len(LOGS) else None

    return wait_for(find, "all workers")


def kill_within(victim, method):
    """Kill a worker while it runs a method, which is in its title; stopped, it cannot finish meanwhile."""
    deadline = time.monotonic() + 180
    while True:
        assert time.monotonic() < deadline
        victim.suspend()
        if victim.cmdline()[0] == f"ray::Worker.{method}":
            victim.kill()
            return
        victim.resume()
        time.sleep(0.005)


def restarts(folder):
    return [row for row in rows_of_starts(folder) if "restart" in row]


def test_a_run_that_loses_workers_has_the_curve_of_one_that_does_not(world, tmp_path):  # noqa: F811
    """One of two student workers in an update, then the rollout worker; Ray, the teacher and the other pool stay."""
    out, kept = tmp_path / "hybrid_gkd", tmp_path / "memory"
    code, _, errors = run(arguments(world, tmp_path, *OPTIONS, "trainer.experiment_name=undisturbed"))
    assert code == 0, errors
    own = ("trainer.max_restarts=3", "trainer.snapshot_freq=1", f"trainer.snapshot_dir={kept}")
    process = start(arguments(world, tmp_path, *OPTIONS, *own))
    for number, (step, log, method) in enumerate(((2, "actor_1.log", "update"), (4, "rollout_0.log", "generate")), 1):
        wait_for(logged_step(tmp_path, step), f"step {step}")
        before = workers(process)
        kill_within(before[log], method)
        wait_for(lambda number=number: len(restarts(out / "gkd")) == number, f"restart {number}")
        after, pool = workers(process), log[:5]
        assert [name for name in LOGS if after[name] == before[name]] == [x for x in LOGS if not x.startswith(pool)]
    code, _, errors = finish(process)
    assert code == 0, errors

    found = curves(out / "gkd")
    lost = [{name: row.pop(name) for name in list(row) if name.startswith("reliability/")} for row in found]
    assert found == curves(out / "undisturbed")
    assert len({row["actor/kl_loss"] for row in found if "actor/kl_loss" in row}) == STEPS
    assert not (out / "undisturbed" / SNAPSHOT).exists()
    assert not (out / "gkd" / SNAPSHOT).exists()
    assert not list(kept.iterdir())  # all steps are done
    assert len(read_starts(out / "gkd")) == 1
    first, second = restarts(out / "gkd")
    assert "actor worker 1 died during the update" in first["reason"]
    assert "rollout worker 0 died during the generation" in second["reason"]
    log = (out / "gkd" / "run.log").read_text(encoding="utf-8")
    for number, row in enumerate((first, second), 1):
        assert row["steps_repeated"] <= 1
        place = f"{out}/gkd/{SNAPSHOT}/global_step_{row['resumed_step']}"
        assert f" WARNING restart {number} of 3 from {place}, since step {row['failed_step']} has failed: " in log
    assert lost[-1]["reliability/restarts"] == 2
    assert lost[-1]["reliability/steps_repeated"] == first["steps_repeated"] + second["steps_repeated"]
    assert lost[-1]["reliability/seconds_lost"] > 0
    assert not lost[0]

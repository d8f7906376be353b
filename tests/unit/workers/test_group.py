"""Checks of a group of workers after its processes are placed, without Ray."""

import time
from types import SimpleNamespace

import pytest

from hybrid_gkd.errors import CheckpointError, ConfigError, WorkerError
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.testing import tiny_config
from hybrid_gkd.workers import group, pool
from hybrid_gkd.workers.placement import Placement


def test_nodes_that_do_not_share_the_run_folder_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "worker_0.log").touch()
    workers = SimpleNamespace(
        size=2, log_files=[tmp_path / f"worker_{rank}.log" for rank in range(2)], begin=lambda: None, descriptions=[],
        placements=[
            Placement(rank=rank, host=host, pid=1, visible_devices="") for rank, host in enumerate(["here", "far"])
        ],
    )
    closed = []
    monkeypatch.setattr(group, "VISIBLE_SECONDS", 0.0)
    monkeypatch.setattr(group, "place_workers", lambda *arguments: [workers])
    monkeypatch.setattr(group.WorkerGroup, "close", lambda self: closed.append(self))
    config = tiny_config("trainer.save_freq=1", "trainer.default_local_dir=outputs")
    with pytest.raises(ConfigError, match=r"^trainer\.default_local_dir: .* worker 1 at far .*; got 'outputs'"):
        group.WorkerGroup(config, device="cpu", num_updates=1)
    assert closed


def test_a_snapshot_that_is_not_written_in_time_fails_as_a_checkpoint_and_not_as_a_lost_worker(monkeypatch):
    """The worker's own deadline is a moment after that of its caller."""
    started, limit = time.monotonic(), Timeout(0.2, "actor_rollout_ref.load_timeout")

    def wait(calls, *, num_returns, timeout):
        time.sleep(timeout)
        return (calls, []) if time.monotonic() > started + limit.seconds + 0.1 else ([], calls)

    def get(*_):
        raise CheckpointError("a checkpoint was not written within 0.2s")

    workers = SimpleNamespace(
        timeout=600.0, load_timeout=limit, get=get, mark_stuck_peers=lambda *_: None,
        timeout_error=lambda *_: WorkerError("no answer"),
    )
    workers.start = lambda method: {method: (workers, 0)}
    monkeypatch.setattr(pool.ray, "wait", wait)
    monkeypatch.setattr(pool, "name_workers", lambda calls: "worker 0")
    alone = object.__new__(group.WorkerGroup)
    alone.actors = workers
    with pytest.raises(CheckpointError, match="not written"):
        alone.finish_snapshot()

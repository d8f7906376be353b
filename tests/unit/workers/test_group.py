"""Checks of a group of workers after its processes are placed, without Ray."""

from types import SimpleNamespace

import pytest

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.testing import tiny_config
from hybrid_gkd.workers import group
from hybrid_gkd.workers.placement import Placement


def test_nodes_that_do_not_share_the_run_folder_are_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "worker_0.log").touch()
    pool = SimpleNamespace(
        size=2, log_files=[tmp_path / f"worker_{rank}.log" for rank in range(2)], begin=lambda: None, descriptions=[],
        placements=[
            Placement(rank=rank, host=host, pid=1, visible_devices="") for rank, host in enumerate(["here", "far"])
        ],
    )
    closed = []
    monkeypatch.setattr(group, "VISIBLE_SECONDS", 0.0)
    monkeypatch.setattr(group, "place_workers", lambda *arguments: [pool])
    monkeypatch.setattr(group.WorkerGroup, "close", lambda self: closed.append(self))
    config = tiny_config("trainer.save_freq=1", "trainer.default_local_dir=outputs")
    with pytest.raises(ConfigError, match=r"^trainer\.default_local_dir: .* worker 1 at far .*; got 'outputs'"):
        group.WorkerGroup(config, device="cpu", num_updates=1)
    assert closed

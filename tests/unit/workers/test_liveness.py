"""Ray's processes are looked at from outside; here they are sockets."""

import math
import socket

import pytest

from hybrid_gkd.workers import liveness
from hybrid_gkd.workers.liveness import CONTROL_STORE, RAYLET, Liveness, RayLost


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setattr(liveness, "EVERY_SECONDS", 1e-9)
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        opened.listen()
        yield opened


def test_a_process_that_accepts_no_connections_any_more_is_reported_once_by_name(listener, tmp_path, caplog):
    logs = tmp_path / "r" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("first\n" + "line\n" * 9 + "Check failed: memory\n", encoding="utf-8")
    ray = Liveness({RAYLET: listener.getsockname()}, 0.0, tmp_path)
    ray.check()
    assert ray.lost is None
    host, port = listener.getsockname()
    listener.close()
    ended = rf"Ray's raylet at {host}:{port} has ended"
    with caplog.at_level("DEBUG", "hybrid_gkd"), pytest.raises(RayLost, match=ended):
        ray.check()
    assert ray.lost == RAYLET
    assert "Check failed: memory" in caplog.text
    assert "first" not in caplog.text
    ray.check()


def test_a_pause_within_the_patience_is_none(listener):
    ray = Liveness({RAYLET: listener.getsockname()}, math.inf)
    listener.close()
    ray.check()
    ray.check()
    assert ray.lost is None


def test_a_worker_that_died_with_its_raylet_has_that_as_the_cause(listener):
    """Within the patience, and before the next look is due."""
    ray = Liveness({RAYLET: listener.getsockname()}, math.inf)
    ray.check()
    ray.check(raylet_only=True, at_once=True)
    listener.close()
    with pytest.raises(RayLost, match="Ray's raylet"):
        ray.check(raylet_only=True, at_once=True)


def test_the_end_of_the_control_store_is_left_to_a_call_that_may_be_interrupted(listener):
    ray = Liveness({CONTROL_STORE: listener.getsockname()}, 0.0)
    listener.close()
    ray.check(raylet_only=True)
    assert ray.lost is None
    with pytest.raises(RayLost, match=r"control store \(gcs_server\)"):
        ray.check()

"""The Ray cluster that a run starts: who can reach it, and what is left of it. CPU."""

import contextlib
import os
import stat
from pathlib import Path

import psutil
import pytest
from test_workers import make_config

from hybrid_gkd.testing import make_tiny_model
from hybrid_gkd.workers.cluster import place_workers, ray_cluster, stop_workers


@pytest.fixture
def config(tmp_path):
    return make_config(make_tiny_model(tmp_path / "model"), tmp_path)


def own_folder():
    """The private folder of the cluster."""
    return Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent


def of_ray(folder):
    """Ray's processes, without the guard, which is a shell."""
    found = psutil.process_iter(["name", "cmdline"])  # None of processes that have ended
    return [p for p in found if str(folder) in " ".join(p.info["cmdline"] or ()) and p.info["name"] != "sh"]


def test_sockets_and_token_are_in_a_folder_of_this_user_alone_which_is_gone_afterwards(config, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token of the user's")
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
    with ray_cluster(config, "cpu"):
        folder = own_folder()
        token = folder / "token"
        assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(token.stat().st_mode)) == (0o700, 0o600)
        processes = of_ray(folder)
        assert {"gcs_server", "raylet"} <= {each.info["name"] for each in processes}
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                environment = each.environ()
                assert environment["RAY_AUTH_MODE"] == "token"
                assert environment["RAY_AUTH_TOKEN_PATH"] == str(token)
                assert "RAY_AUTH_TOKEN" not in environment
                assert environment["VLLM_RPC_BASE_PATH"] == str(folder)  # of sockets that killed workers leave
                sockets = {one.laddr for one in each.net_connections(kind="unix") if one.laddr.startswith("/")}
                assert all(Path(path).is_relative_to(folder) for path in sockets), sockets
                if each.name() == "raylet":
                    assert {Path(path).name for path in sockets} >= {"plasma_store", "raylet"}
    assert not folder.exists()
    assert {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")} == before



def test_no_process_is_started_that_no_worker_uses(config):
    config.ray_init.num_cpus = 4
    with ray_cluster(config, "cpu"):
        (pool,) = place_workers(config, "cpu")
        pool.begin()
        (raylet,) = (each for each in of_ray(own_folder()) if each.name() == "raylet")
        there = [each.name() for each in raylet.children()]
        stop_workers([pool])
    assert [name for name in there if "Worker" in name or "IDLE" in name or "python" in name] == ["ray::Worker"], there

"""Ray clusters that are given, with several nodes, all on this machine: who is placed where. CPU."""

import contextlib
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from test_workers import make_config, random_batch, shares

from hybrid_gkd.errors import ConfigError, WorkerError
from hybrid_gkd.testing import make_tiny_model
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup


@pytest.fixture
def address(monkeypatch):
    """Return the address of a cluster of two nodes with room for one worker each."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))  # for the second node's workers
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # with it, Ray refuses a node with more GPUs
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1, num_gpus=1)  # as far as Ray knows
        yield cluster.address
    finally:
        cluster.shutdown()


def test_each_node_gets_as_many_workers_as_asked_for(address, tmp_path, monkeypatch):
    def configure(*overrides):
        return make_config(model, tmp_path, *overrides)

    def start(config):
        return WorkerGroup(config, device="cpu", num_updates=2, stop_token_ids=[256])

    def node(worker):
        return ray.get_runtime_context().get_node_id()

    make_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)  # the cluster was started elsewhere
    model = "model"
    given = f"ray_init.address={address}"
    with (
        pytest.raises(ConfigError, match=r"^trainer\.device: .*no GPU, the cluster has 1; got 'auto'"),
        ray_cluster(configure(given, "trainer.device=auto"), "cpu"),
    ):
        pass
    with ray_cluster(configure(given), "cpu"):
        room = r"trainer\.nnodes: 1 node\(s\) with room for 2 worker\(s\) .*has 2 node\(s\), with room for 1, 1"
        with pytest.raises(WorkerError, match=room):
            start(configure(given, "trainer.n_gpus_per_node=2"))
        with contextlib.closing(start(configure(given, "trainer.nnodes=2"))) as group:
            nodes = ray.get([worker.__ray_call__.remote(node) for worker in group.actors.workers], timeout=60)
            assert len(set(nodes)) == 2
            group.publish(0)
            metrics = group.update(shares(random_batch(0), 2, 128))
    assert metrics[0]["actor/loss"] > 0
    with ray_cluster(configure(), "cpu"):  # one of its own, whatever else there is
        assert len(ray.nodes()) == 1

"""Weights gathered from real FSDP2 shards over gloo, and what both engines hold of them afterwards."""

import contextlib
import sys
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout import weights as publish
from hybrid_gkd.testing import make_tiny_model, tiny_config
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
needs_vllm = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
MESHES = {1: [(1,)], 2: [(2,), (2, 1), (1, 2)]}
"""Ranks -> replicas and shards."""
BUCKETS = [1, 100, 1000, 10**6]
"""Bytes: below the smallest tensor, between the sizes, all in one."""


class Model(nn.Module):
    """Odd row counts, one row for two ranks, a vector, three dimensions, and a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, rows) for rows in (1, 3, 8))
        self.kernel = nn.Parameter(torch.randn(5, 2, 3))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight


def make_model():
    torch.manual_seed(0)
    return Model()


def check_all(rank, world_size, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    for mesh_shape in MESHES[world_size]:
        check_gather(mesh_shape)
    replicated = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (world_size,)), [Replicate()])
    with pytest.raises(AssertionError):
        list(publish.gather_in_buckets([("x", replicated)], dtype=torch.float32, bucket_bytes=1))
    dist.destroy_process_group()


def check_gather(mesh_shape):
    expected = dict(make_model().named_parameters(remove_duplicate=False))
    order = list(expected)[:-1]
    order.insert(order.index("embed.weight") + 1, "head.weight")
    model = make_model()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    collectives = []

    def all_gather(*args, **kwargs):
        collectives.append(args)
        return original(*args, **kwargs)

    original, publish.all_gather = publish.all_gather, all_gather
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in BUCKETS:
            collectives.clear()
            parameters = model.named_parameters(remove_duplicate=False)
            found = list(publish.gather_in_buckets(parameters, dtype=dtype, bucket_bytes=bucket_bytes))
            assert [name for name, _ in found] == order
            for name, tensor in found:  # all kept until now: no memory was used twice
                assert tensor.dtype == dtype
                assert tensor.is_contiguous()
                assert torch.equal(tensor, expected[name].to(dtype)), (name, bucket_bytes)
            assert dict(found)["head.weight"] is dict(found)["embed.weight"]
            number = {1: len(found) - 1, 10**6: 1}.get(bucket_bytes)
            if mesh_shape[-1] == 1:
                assert not collectives
            elif number is not None:
                assert len(collectives) == number
    publish.all_gather = original


@pytest.mark.parametrize("world_size", MESHES)
def test_gathered_tensors_are_the_originals(world_size, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mp.spawn(check_all, (world_size, tmp_path / "rendezvous"), nprocs=world_size)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One Ray cluster with room for two workers."""
    model = make_tiny_model(tmp_path_factory.mktemp("ray_model"))
    with ray_cluster(make_config(model, tmp_path_factory.mktemp("ray"), "trainer.n_gpus_per_node=2"), "cpu"):
        yield


def make_config(model, folder, *overrides):
    return tiny_config(
        f"trainer.default_local_dir={folder}", "data.max_prompt_length=24", "data.max_response_length=24",
        "actor_rollout_ref.rollout.max_num_seqs=16", "actor_rollout_ref.nccl_timeout=120",
        "actor_rollout_ref.rollout.verify_weights=true", *overrides, model=model,
    )  # fmt: skip


def on_every_worker(group, function):
    return ray.get([worker.__ray_call__.remote(function) for worker in group.actors.workers], timeout=60)


def change(worker, name):
    """Change the last row of a weight of the actor, on the ranks that have a part of it."""
    with torch.no_grad():
        dict(worker.actor.hf_model.named_parameters())[name].to_local()[-1:] += 0.5


def problem_of(worker):
    """Return the result of a comparison without a publish."""
    try:
        worker.engine.verify_weights(worker.actor.full_tensors(worker.engine.dtype))
    except WorkerError as error:
        return str(error)
    return None


def drop_a_weight(worker, dropped):
    original = worker.actor.full_tensors
    worker.actor.full_tensors = lambda dtype: ((n, t) for n, t in original(dtype) if n != dropped)


def shared_by_ranks():
    """Files of the memory that vLLM's tensor-parallel ranks share on CPUs, and of their messages on any device."""
    return {path for pattern in ("-tp:*", "psm_*") for path in Path("/dev/shm").glob(pattern)}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("engine", "workers", "tensor_parallel", "tied"),
    [
        ("hf", 2, 1, True),
        pytest.param("vllm", 2, 2, False, marks=needs_vllm),  # one key-value head for two ranks
    ],
)
def test_a_publish_is_verified_and_a_stale_weight_named(tmp_path, request, engine, workers, tensor_parallel, tied):
    if tensor_parallel > 1:
        request.getfixturevalue("only_tensor_parallel_engine")
    before = shared_by_ranks()
    model = make_tiny_model(tmp_path / "model", tied=tied)
    config = make_config(
        model, tmp_path, f"actor_rollout_ref.rollout.name={engine}", f"trainer.n_gpus_per_node={workers}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}",
    )
    layer = "model.layers.1"
    names = [
        "model.embed_tokens.weight", f"{layer}.input_layernorm.weight", f"{layer}.self_attn.q_proj.weight",
        f"{layer}.self_attn.k_proj.weight", f"{layer}.self_attn.v_proj.bias", f"{layer}.self_attn.o_proj.weight",
        f"{layer}.mlp.up_proj.weight", f"{layer}.mlp.down_proj.weight", "model.norm.weight",
    ] + ([] if tied else ["lm_head.weight"])
    with contextlib.closing(WorkerGroup(config, device="cpu", num_updates=2, stop_token_ids=[256])) as group:
        group.publish(0)
        for version, name in enumerate(names):
            on_every_worker(group, lambda worker, name=name: change(worker, name))
            found = [problem for problem in on_every_worker(group, problem_of) if problem is not None]
            assert found, name
            assert all(f"verify_weights: {name} in" in problem for problem in found), (name, found)
            group.publish(version + 1)
        on_every_worker(group, lambda worker: drop_a_weight(worker, f"{layer}.self_attn.k_proj.weight"))
        with pytest.raises(WorkerError, match=r"left weights of the rollout engine unset: .*k_proj"):
            group.publish(len(names) + 1)
    if tensor_parallel > 1:
        assert shared_by_ranks() <= before  # nothing that the next engine would trip over, or that fills /dev/shm

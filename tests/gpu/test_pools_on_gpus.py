"""Student and rollout engine on GPUs of their own, weights through NCCL.

    bash tests/run.sh -m gpu tests/gpu/test_pools_on_gpus.py
"""

import contextlib
import dataclasses

import numpy as np
import pytest
import ray
import torch
from processes import stop_process
from test_hybrid_engine import (
    MEAN_LOGPROB_DIFFERENCE,
    config_for,
    distil,
    draw,
    logprob_differences,
    model,  # noqa: F401 (a fixture)
    versions,
)

from hybrid_gkd.errors import DeviceMemoryError, WorkerError
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import plan_memory, trained_models
from hybrid_gkd.types import GenerationRequest, SampleId, SamplingParams
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def engine_memory(config):
    """By which the rollout engine finds its share of a GPU."""
    return plan_memory(config, trained_models(config, student_spec(config)), "cuda").engine_memory


def separate(folder, path, actors, rollouts, *overrides):
    return config_for(
        path, folder, f"trainer.n_gpus_per_node={actors}", f"rollout.n_gpus_per_node={rollouts}",
        "actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.update_weights_bucket_megabytes=64",
        *overrides,
    )


def requests(count=32):
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(id=SampleId(1, i, 0), prompt_ids=rng.integers(0, 256, 16 + i % 7).astype(np.int32), seed=i)
        for i in range(count)
    ]


@pytest.mark.parametrize(("actors", "rollouts", "tensor_parallel"), [(1, 1, 1), (2, 2, 2), (1, 3, 1)])
def test_weights_arrive_and_the_engine_uses_them(model, tmp_path, actors, rollouts, tensor_parallel):  # noqa: F811
    if actors + rollouts > torch.cuda.device_count():
        pytest.skip(f"needs {actors + rollouts} GPUs")
    config = separate(
        tmp_path, model, actors, rollouts,
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    )
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=3, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        for version in range(3):  # verify_weights compares every weight with what was sent
            print(group.publish(version))
            found = draw(group, requests(), SamplingParams(max_tokens=64, logprobs=True))
            assert versions(found) == {version}
            assert logprob_differences(group, found, actors).mean() < MEAN_LOGPROB_DIFFERENCE
            shares = [distil(found[rank::actors], version) for rank in range(actors)]
            total = sum(share[0][0].num_tokens for share in shares)
            group.update([[dataclasses.replace(part, num_tokens=total) for part in share[0]] for share in shares])


def test_a_receiver_that_hangs_is_named_and_the_student_can_be_saved(model, tmp_path):  # noqa: F811
    config = separate(tmp_path, model, 1, 1, "actor_rollout_ref.rollout.verify_weights=false")
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=3, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        group.publish(0)

        def shorten(worker):
            worker.weight_sync.timeout = 15.0

        group.timeout = group.actors.timeout = group.rollouts.timeout = 15.0
        ray.get([w.__ray_call__.remote(shorten) for w in (*group.actors.workers, *group.rollouts.workers)], timeout=60)
        stop_process(group.rollouts.placements[0].pid)
        with pytest.raises(WorkerError, match=r"rollout worker 0 .*rollout_0\.log"):
            group.publish(1)
        assert group.can_save()
        group.actors.timeout = 120.0
        group.save_checkpoint(tmp_path / "saved", tokenizer_path=str(model))
        assert (tmp_path / "saved" / "huggingface").is_dir()


def test_peers_of_a_worker_that_fails_are_not_waited_for(model, tmp_path, caplog):  # noqa: F811
    """Not for the GPU either, which waits in a collective while the call that gave it the work has ended."""

    def plant(worker):  # travels to the worker by value
        def fail(*_):
            raise torch.OutOfMemoryError("CUDA out of memory, planted")

        worker.actor.hf_model.model.layers[12].register_forward_pre_hook(fail)

    config = config_for(model, tmp_path, "trainer.n_gpus_per_node=2", "actor_rollout_ref.nccl_timeout=3600")
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=3, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        group.publish(0)
        found = draw(group, requests(), SamplingParams(max_tokens=64))
        ray.get(group.actors.workers[1].__ray_call__.remote(plant), timeout=60)
        with pytest.raises(DeviceMemoryError, match=r"phase update: worker 1 ran out"):
            group.accumulate([distil(found[rank::2], 0)[0][0] for rank in range(2)])
        assert not group.can_save()
    assert "the student cannot be saved" in caplog.text
    print(caplog.text)

"""The student's update on one GPU in bf16: the host does not wait for the device between micro-batches.

    bash tests/run.sh -m gpu tests/gpu/test_actor_on_gpu.py
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.reference import Reference
from hybrid_gkd.testing import make_sample, make_tiny_model, tail_of, tiny_config
from hybrid_gkd.types import MiniBatch, TopK
from hybrid_gkd.workers.device import SharedDevice
from hybrid_gkd.workers.updater import Updater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def random_batch(seed):
    rng = np.random.default_rng(seed)
    micro_batches = []
    for index in range(3):
        prompt, response = (rng.integers(0, 256, n).tolist() for n in (20, 50 + index))
        ids = np.stack([rng.permutation(256)[:8] for _ in response]).astype(np.int32)
        logprobs = np.log(rng.dirichlet(np.ones(9), len(response))[:, :8]).astype(np.float32)
        tail = tail_of(logprobs)
        teacher = TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])
        micro_batches.append((make_sample(index, prompt=prompt, completion=response, teacher=teacher),))
    return MiniBatch(micro_batches=tuple(micro_batches), num_tokens=153)


def test_nothing_waits_for_the_device_before_the_last_micro_batch_is_under_way(tmp_path):
    config = tiny_config("distillation.topk=8", "trainer.device=cuda", model=make_tiny_model(tmp_path / "model"))
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        actor = Actor(config, device=torch.device("cuda"), num_updates=3)
        for step in range(2):  # kernels and workspaces
            actor.update(random_batch(step))
        torch.cuda.set_sync_debug_mode("error")
        actor.accumulate(random_batch(2))
        torch.cuda.set_sync_debug_mode("default")
        actor.update(random_batch(3))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


def test_a_part_that_runs_out_of_memory_leaves_no_gradient_of_itself_or_the_parts_before_it(tmp_path):
    """FSDP2 keeps the float32 sum of bf16 gradients until it is reduced, out of reach of zero_grad()."""
    arguments = [
        "data.train_files=unused", f"actor_rollout_ref.model.path={make_tiny_model(tmp_path / 'model')}",
        "actor_rollout_ref.teacher.server_ip=unused", "distillation.topk=8", "trainer.device=cuda",
    ]
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        norms = []
        for fails in (False, True):
            actor = Actor(load_config(arguments), device=torch.device("cuda"), num_updates=3)
            if fails:
                actor.accumulate(random_batch(2))
                block, uses = actor.hf_model.model.layers[0], []

                def fail(*_, uses=uses):
                    uses.append(None)
                    if len(uses) == 2:
                        raise torch.OutOfMemoryError("CUDA out of memory, planted")

                handle = block.register_full_backward_pre_hook(fail)
                with pytest.raises(torch.OutOfMemoryError):
                    actor.accumulate(random_batch(3))
                handle.remove()
            actor.accumulate(random_batch(0))
            norms.append(actor.update(random_batch(1))["actor/grad_norm"])
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    finally:
        dist.destroy_process_group()


def test_the_candidates_of_a_reference_and_the_kl_on_them(tmp_path):
    """In bf16: the log-probabilities of the student itself are the reference's, so there is no distance at first."""
    config = tiny_config(
        "distillation.enabled=false", "reward.answer_key=answer", "algorithm.adv_estimator=reinforce_plus_plus",
        "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full",
        "actor_rollout_ref.ref.topk=2", "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.device=cuda",
        model=make_tiny_model(tmp_path / "model"),
    )  # fmt: skip
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        actor = Actor(config, device=torch.device("cuda"), num_updates=3)
        reference = Reference(config, device=torch.device("cuda"))
        distances = []
        for step in range(3):
            batch = random_batch(step)
            scores = reference.compute_ref_topk(batch.micro_batches)
            plain = reference.compute_ref_logprobs(batch.micro_batches)
            items = []
            for (item,) in batch.micro_batches:
                found = scores[item.id]
                np.testing.assert_allclose(found.sampled_logprobs, plain[item.id], atol=1e-2)
                mass = np.exp(found.logprobs).sum(1) + np.exp(found.tail_logprobs)
                np.testing.assert_allclose(mass, 1, atol=1e-4)
                advantages = np.linspace(-1, 1, item.num_trained, dtype=np.float32)
                items.append((item.with_signals(
                    advantages=advantages, reference=found.sampled_logprobs, reference_topk=found
                ),))  # fmt: skip
            metrics = actor.update(dataclasses.replace(batch, micro_batches=tuple(items)))
            distances.append(metrics["actor/ref_kl"])
        assert abs(distances[0]) < 1e-3
        assert distances[1] > 1e-3
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.model.lora_rank=4"]], ids=["full", "lora"])
@pytest.mark.parametrize("reshard", [True, False])
def test_out_of_memory_is_tried_again_in_halves_and_changes_nothing_else(reshard, overrides, tmp_path):
    """Once in a forward and once in a backward pass; the optimizer state is on the host in between."""
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = tiny_config(
        "distillation.topk=8", "trainer.device=cuda", "actor_rollout_ref.actor.optim.eps=1e-4",
        f"{fsdp}.optimizer_offload=true", f"{fsdp}.reshard_after_forward={reshard}", *overrides,
        model=make_tiny_model(tmp_path / "model"),
    )  # fmt: skip
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = []
        for runs_out in (False, True):
            actor, shared, asked = Actor(config, device=torch.device("cuda"), num_updates=3), SharedDevice("cuda"), []
            shared.add_model("actor", actor)
            residency = shared.manage(None)
            updater = Updater(actor, residency, shared.meter, worker="worker 0", alone=True)

            def ask_for_too_much(*_, asked=asked):
                asked.append(None)
                if len(asked) == 2:
                    torch.empty(2**50, dtype=torch.uint8, device="cuda")

            rows = []
            for step in range(3):
                block, parts = actor.hf_model.model.layers[1], random_batch(step).micro_batches
                register = {1: block.register_forward_pre_hook, 2: block.register_full_backward_pre_hook}.get(step)
                hook = register(ask_for_too_much) if runs_out and register else None
                asked.clear()
                rows += updater.update([MiniBatch(micro_batches=(parts[0], parts[1] + parts[2]), num_tokens=153)])
                if hook:
                    assert len(asked) > 2
                    hook.remove()
            found.append(rows)
        for one, other in zip(*found, strict=True):
            for name in ("actor/loss", "actor/grad_norm"):
                assert one[name] == pytest.approx(other[name], rel=2e-2), name
    finally:
        dist.destroy_process_group()

"""Critic, reference policy and adapters on one GPU, with every offload: who is where, what is kept, what resumes from a
checkpoint that is written behind the steps.

    bash tests/run.sh -m gpu tests/gpu/test_ppo_on_gpu.py
"""

import contextlib

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import plan_memory, trained_models
from hybrid_gkd.student.checkpoint_store import find_damage, write_manifest
from hybrid_gkd.testing import make_tokenizer, tiny_config
from hybrid_gkd.types import GenerationRequest, MiniBatch, SampleId, SamplingParams
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ACTOR, VOCAB = "actor_rollout_ref.actor", 32000


def engine_memory(config):
    """By which the rollout engine finds its share of a GPU."""
    return plan_memory(config, trained_models(config, student_spec(config)), "cuda").engine_memory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """About 100M parameters with random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(group, steps, first):
    """Metrics of so many steps, each with a rollout, and its mean log-ratio of student and reference, in nats."""
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(id=SampleId(1, i, 0), prompt_ids=rng.integers(0, VOCAB, 50 + i).astype(np.int32), seed=i)
        for i in range(16)
    ]
    rows, reference = [], []
    for step in range(first, first + steps):
        group.publish(step)
        sampling = SamplingParams(max_tokens=64, logprobs=True)
        found = sorted((s for part in group.generate(requests, sampling) for s in part), key=lambda s: s.id)
        shares = [(tuple(found),)]
        old, ref = group.compute_logprobs(shares), group.compute_ref_logprobs(shares)
        difference = np.concatenate([np.abs(s.logprobs - old[s.id]) for s in found])
        assert difference.mean() < 0.015  # the engine's bf16 kernels against the actor's
        reference.append(np.mean(np.concatenate([old[s.id] - ref[s.id] for s in found])))
        batch = [
            s.with_signals(
                advantages=np.linspace(-1, 1, s.num_trained, dtype=np.float32), old_logprobs=old[s.id],
                reference=ref[s.id],
            )
            for s in found
        ]
        row = {}
        if group.config.uses_critic:
            values = group.compute_values(shares)
            batch = [s.with_signals(values=values[s.id], returns=np.ones(s.num_trained, np.float32)) for s in batch]
            row |= group.update_critic(mini_batch(batch))[0]
        rows.append(row | group.update(mini_batch(batch))[0])
    return rows, reference


def mini_batch(batch):
    num_tokens = sum(s.num_trained for s in batch)
    return [[MiniBatch(micro_batches=(tuple(batch[:8]), tuple(batch[8:])), num_tokens=num_tokens)]]


@pytest.mark.parametrize("which", ["critic", "lora"])
def test_they_take_turns_with_the_engine_and_resume(which, model, tmp_path):
    own = {
        "critic": [
            "algorithm.adv_estimator=gae", "critic.optim.lr=1e-4", "critic.fsdp_config.param_offload=true",
            "critic.fsdp_config.optimizer_offload=true",
        ],
        "lora": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=16"],
    }[which]  # fmt: skip
    fsdp = f"{ACTOR}.fsdp_config"
    config = tiny_config(
        f"trainer.default_local_dir={tmp_path}", "data.max_prompt_length=128", "data.max_response_length=128",
        "trainer.device=cuda", "distillation.enabled=false", "reward.answer_key=answer",
        "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=2000000000",
        "actor_rollout_ref.rollout.verify_weights=true", f"{ACTOR}.optim.lr=1e-3", f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.entropy_coeff=0.01", f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true",
        "trainer.save_freq=1", *own, model=model,
    )  # fmt: skip
    found = []
    for resumes in (False, True):
        with ray_cluster(config, "cuda"), contextlib.closing(
            WorkerGroup(config, device="cuda", num_updates=8, num_critic_updates=8, stop_token_ids=[256],
                        engine_memory=engine_memory(config), copy_bytes=(0.0,))
        ) as group:
            if resumes:
                group.load_checkpoint(tmp_path / "checkpoint")
                rows, _ = train(group, 2, 2)
            else:
                rows, reference = train(group, 2, 0)
                assert group.saves_in_background
                group.take_snapshot(tokenizer_path=str(model))
                (tmp_path / "checkpoint").mkdir()
                group.write_snapshot(tmp_path / "checkpoint")
                rows, _ = train(group, 2, 2)
                write_manifest(tmp_path / "checkpoint", group.finish_snapshot()[0])
                assert find_damage(tmp_path / "checkpoint") == {}
            found.append(rows)
            memory = group.device_metrics()
    print(which, found, memory)
    assert abs(reference[0]) < 1e-6  # the student is the reference at first
    assert abs(reference[1]) > 1e-4
    assert memory["memory/rollout/actor_rest_gb"] < 0.3
    on_device = {name.split("/")[2] for name in memory if name.startswith("memory/rollout/")}
    assert on_device == {"engine_weights_gb", "kv_cache_gb", "actor_rest_gb"}
    if which == "critic":
        assert found[0][1]["critic/vf_loss"] < found[0][0]["critic/vf_loss"]
    for one, other in zip(*found, strict=True):
        for name in one.keys() & {"actor/loss", "actor/grad_norm", "actor/ref_kl", "critic/vf_loss"}:
            assert one[name] == pytest.approx(other[name], rel=2e-2), name

"""The reference policy: the start of the run, also after a resume, and a term of the loss. CPU, one rank."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd.config.actor_rollout_ref import RefConfig, RefModelConfig
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import plan_memory, trained_models
from hybrid_gkd.ppo.resuming import learning_settings
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.student.checkpoint_store import CheckpointStore
from hybrid_gkd.student.reference import Reference
from hybrid_gkd.testing import (
    LocalGroup,
    MetricRows,
    NumberTokenizer,
    make_tiny_model,
    single_process_group,
    tiny_config,
)
from hybrid_gkd.types import Task

KL = "actor_rollout_ref.actor"


def make_config(model, *overrides):
    return tiny_config(
        "trainer.save_freq=0", "distillation.enabled=false", "reward.answer_key=answer",
        "algorithm.adv_estimator=reinforce_plus_plus", "data.train_batch_size=4", f"{KL}.optim.lr=1e-2",
        "trainer.total_training_steps=2", *overrides, model=model,
    )  # fmt: skip


def train(config):
    def respond(request, version):
        return np.random.default_rng(request.seed).integers(0, 256, 5).astype(np.int32)

    rows = MetricRows()
    prompts = [Task(index=i, token_ids=np.array([i, 7], np.int32), text=str(i), answer="1") for i in range(4)]
    group = LocalGroup(config, respond=respond, num_updates=2)
    group.reference_config = config
    PPOTrainer(
        config, group=group, tokenizer=NumberTokenizer(), train_prompts=prompts, val_prompts=[], tracking=rows,
        reward=lambda response, answer: float(len(response) % 2), store=CheckpointStore(config.run_dir, keep=None),
    ).fit()
    return rows.by_step, group


def phases(config, spec):
    """Phase -> owner -> bytes on a GPU."""
    return plan_memory(config, trained_models(config, spec), "cuda").phases(None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kl_from_the_start_is_0_at_first_and_is_what_the_estimate_says_then(kind, tmp_path):
    model = make_tiny_model(tmp_path / "model")
    with single_process_group():
        plain, _ = train(make_config(model))
        rows, group = train(
            make_config(model, f"{KL}.use_kl_loss=true", f"{KL}.kl_loss_coef=0.5", f"{KL}.kl_loss_type={kind}")
        )
        assert "actor/ref_kl" not in plain[1]
        assert rows[1]["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
        assert rows[2]["actor/ref_kl"] > 1e-4
        assert rows[2]["actor/loss"] == pytest.approx(
            rows[2]["actor/pg_loss"] + 0.5 * rows[2]["actor/ref_kl"], rel=1e-5, abs=1e-6
        )
        start = dict(Reference(group.reference_config, device=torch.device("cpu")).named_parameters())
        for name, weight in group.reference.named_parameters():
            assert torch.equal(weight.full_tensor(), start[name].full_tensor()), name


@pytest.mark.slow
def test_with_lora_the_model_below_the_adapters_is_the_reference_and_there_is_no_second_model(tmp_path):
    config = make_config(
        make_tiny_model(tmp_path / "model"), f"{KL}.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=4"
    )
    with single_process_group():
        rows, group = train(config)
    assert group.reference is group.actor
    assert rows[1]["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["actor/ref_kl"] > 1e-6
    assert "reference" not in phases(config, student_spec(config))
    other = dataclasses.replace(config.actor_rollout_ref, ref=RefConfig(model=RefModelConfig(path="other")))
    assert dataclasses.replace(config, actor_rollout_ref=other).has_reference_model


@pytest.mark.slow
def test_another_folder_is_another_policy_and_both_decide_what_is_learned(tmp_path):
    model, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=1)
    config = make_config(model, f"{KL}.use_kl_loss=true", f"actor_rollout_ref.ref.model.path={other}")
    with single_process_group():
        rows, _ = train(config)
    assert rows[1]["actor/ref_kl"] > 0.1
    settings = learning_settings(config, steps=2)
    assert settings["actor_rollout_ref.ref.model.path"] == str(other)
    assert not [key for key in learning_settings(make_config(model), steps=2) if "kl_loss_" in key]


@pytest.mark.slow
@pytest.mark.parametrize("topk", [3, 259])
def test_the_whole_distribution_of_a_reference_is_compared(topk, tmp_path):
    """On its most likely tokens and all others as one: by the models themselves. Of 259 tokens there are no others."""
    model, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=1)
    full = [f"{KL}.use_kl_loss=true", f"{KL}.kl_loss_type=full", f"actor_rollout_ref.ref.topk={topk}"]
    config = make_config(
        model, *full, f"actor_rollout_ref.ref.model.path={other}", "actor_rollout_ref.rollout.temperature=0.7",
    )
    with single_process_group():
        rows, group = train(config)
    assert "actor/distillation/overlap_ratio" not in rows[1]
    values, models = [], [AutoModelForCausalLM.from_pretrained(folder).double() for folder in (model, other)]
    for item in group.trained[0]:
        ids = torch.tensor(item.tokens, dtype=torch.int64)[None]
        with torch.no_grad():
            q, p = ((m(ids).logits[0, item.positions - 1] / 0.7).softmax(-1) for m in models)
        assert q.shape[1] == 259
        p, chosen = p.topk(topk)
        np.testing.assert_array_equal(item.topk("reference_topk").ids[:, :3], chosen[:, :3])
        q = q.gather(1, chosen)
        if topk < 259:
            q, p = (torch.cat([each, 1 - each.sum(1, keepdim=True)], 1) for each in (q, p))
        values.append((q * (q / p).log()).sum(1))
    assert rows[1]["actor/ref_kl"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)
    with single_process_group():
        rows, _ = train(make_config(model, *full, "actor_rollout_ref.model.lora_rank=4"))
    assert rows[1]["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["actor/ref_kl"] > 1e-6


def test_it_is_on_the_device_in_its_own_phase_only(tmp_path):
    config = make_config(make_tiny_model(tmp_path), f"{KL}.use_kl_loss=true")
    spec = student_spec(config)
    held = phases(config, spec)
    assert {phase for phase, owners in held.items() if "ref_params" in owners} == {"reference"}
    assert held["reference"]["ref_params"] == 2 * spec.parameters
    assert "reference" not in phases(make_config(tmp_path), spec)

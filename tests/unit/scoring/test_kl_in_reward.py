"""The KL to the reference policy inside the rewards: verl's numbers, what the loop computes when, and the resume."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_gkd.errors import ConfigError, TrainingError
from hybrid_gkd.ppo.resuming import learning_settings
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.scoring.reference_scorer import ESTIMATES, KLPenalty
from hybrid_gkd.scoring.rewards import token_rewards
from hybrid_gkd.student.checkpoint_store import CheckpointStore, load_state
from hybrid_gkd.testing import MetricRows, NumberTokenizer, RecordingGroup, make_sample, tiny_config
from hybrid_gkd.types import Task

VERL = json.loads(Path(__file__).with_name("verl_kl.json").read_text(encoding="utf-8"))
"""`how` in the file says how the numbers were made."""
KINDS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
KL = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5")
LOG_RATIO = np.log(0.5) - np.log(0.125)
"""Return the KL of every token as RecordingGroup computes it."""
PROMPTS = [Task(index=i, token_ids=np.full(1, i, np.int32), text=str(i), answer="1") for i in range(4)]


def config(*overrides):
    return tiny_config(
        "data.train_batch_size=2", "reward.answer_key=answer", "distillation.enabled=false",
        "algorithm.adv_estimator=reinforce_plus_plus", "trainer.total_training_steps=4", *overrides,
    )  # fmt: skip


def make(*overrides, run_dir=None, resume_from=None, steps=4):
    group, rows = RecordingGroup(), MetricRows()
    stop = SimpleNamespace(at=steps)
    trainer = PPOTrainer(
        config(*overrides, *(["trainer.save_freq=0"] if run_dir is None else ["trainer.save_freq=1"])), group=group,
        tokenizer=NumberTokenizer(), train_prompts=PROMPTS, val_prompts=[], tracking=rows, resume_from=resume_from,
        reward=lambda response, answer: float(len(response) % 2), store=run_dir and CheckpointStore(run_dir, keep=None),
        stop_requested=lambda: trainer.step >= stop.at,
    )  # fmt: skip
    return trainer, group, rows


@pytest.mark.parametrize("case", VERL["rewards"])
def test_rewards_and_coefficients_are_those_of_verl(case):
    kind, name = case.split()
    settings = f"algorithm.kl_ctrl={{type: {kind}, kl_coef: 0.05, target_kl: 0.2, horizon: 50}}"
    penalty = KLPenalty(config(*KL, settings, f"algorithm.kl_penalty={KINDS[name]}"))
    for number, step in enumerate(VERL["rewards"][case]):
        sequences = [
            make_sample(
                i, completion=[0] * len(old), old_logprobs=np.array(old) * (1 + 0.1 * number),
                reference=np.array(reference),
            )
            for i, (old, reference) in enumerate(zip(VERL["logprobs"], VERL["ref_logprobs"], strict=True))
        ]
        scores = token_rewards(np.array(VERL["scores"]), [len(row) for row in VERL["logprobs"]])
        rewards, metrics = penalty.apply(sequences, scores)
        for found, expected in zip(rewards, step["rewards"], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
        assert metrics == {"reward/kl": pytest.approx(step["kl"]), "reward/kl_coef": pytest.approx(step["coef"])}
        penalty.end_step()
        assert penalty.coef == pytest.approx(step["next_coef"], rel=1e-8)  # verl's mean divides by 1e-8 more tokens


def test_estimates_against_their_formulas():
    log_ratio = np.array([-30.0, -1.0, 0.0, 2.0])
    np.testing.assert_allclose(ESTIMATES["k1"](log_ratio), log_ratio)
    np.testing.assert_allclose(ESTIMATES["abs"](log_ratio), [30, 1, 0, 2])
    np.testing.assert_allclose(ESTIMATES["k2"](log_ratio), [450, 0.5, 0, 2])
    np.testing.assert_allclose(ESTIMATES["k3"](log_ratio), [10, np.e - 2, 0, np.exp(-2) + 1])  # verl's limit


def test_every_token_loses_the_coefficient_times_its_kl_before_the_estimator():
    trainer, group, rows = make(*KL, steps=1)
    trainer.fit()
    texts = [" ".join(map(str, item.trained_ids)) for item in group.trained[0]]
    rewards = [np.array([0, len(text) % 2]) - 0.5 * LOG_RATIO for text in texts]
    returns = [np.cumsum(each[::-1])[::-1] for each in rewards]
    together = np.concatenate(returns)
    for item, found in zip(group.trained[0], returns, strict=True):
        want = (found - together.mean()) / np.sqrt(together.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(item.array("advantages"), want, rtol=1e-4)
        np.testing.assert_allclose(item.array("old_logprobs"), np.log(0.5))
    assert group.num_forwards == 1
    row = rows.by_step[1]
    assert (row["reward/kl"], row["reward/kl_coef"]) == (pytest.approx(LOG_RATIO), 0.5)
    assert row["timing/ref"] > 0


def test_a_score_of_the_whole_answer_has_the_penalties_of_its_tokens_in_it():
    """grpo sums token rewards, as in verl: an answer of three tokens loses three penalties."""
    n = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "algorithm.norm_adv_by_std_in_grpo=false"]
    trainer, group, _ = make(*KL, *n, steps=1)
    group.respond = lambda request, version: np.zeros(1 + 2 * (request.id.number % 2), np.int32)
    trainer.fit()
    for item in group.trained[0]:  # texts "0" and "0 0 0" are odd: both are right
        expected = (0.5 if item.id.number % 2 == 0 else -0.5) * 2 * 0.5 * LOG_RATIO
        np.testing.assert_allclose(item.array("advantages"), expected, rtol=1e-5)


def test_the_greedy_answer_is_compared_without_a_penalty_as_in_verl():
    trainer, group, _ = make(*KL, "algorithm.adv_estimator=remax", steps=1)
    group.respond = lambda request, version: np.zeros(1, np.int32)
    trainer.fit()
    for item in group.trained[0]:
        np.testing.assert_allclose(item.array("advantages"), -0.5 * LOG_RATIO, rtol=1e-5)


@pytest.mark.slow
def test_the_reference_is_asked_once_where_reward_and_loss_need_it_and_never_where_nothing_does():
    for overrides, asked, for_critic in (
        ([], 0, False), (["actor_rollout_ref.actor.use_kl_loss=true", *KL], 1, False),
        ([*KL, "algorithm.adv_estimator=gae", "trainer.critic_warmup=1"], 1, True),
    ):  # fmt: skip
        trainer, group, rows = make(*overrides, steps=1)
        trainer.fit()
        assert group.events.count(("ref",)) == asked
        assert ("reward/kl" in rows.by_step[1]) == bool(asked)
        if for_critic:
            assert [event[0] for event in group.events[2:5]] == ["ref", "values", "update_critic"]
        else:
            assert all(("reference" in item.signals) == bool(asked) for item in group.trained[0])
    assert make()[1].num_forwards == 0


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_very_coefficient(tmp_path):
    adaptive = [*KL, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=7"]
    trainer, _, rows = make(*adaptive, run_dir=tmp_path / "whole")
    trainer.fit()
    coefs = [rows.by_step[step]["reward/kl_coef"] for step in range(1, 5)]
    assert coefs == pytest.approx([0.5 * (1 + 0.2 * 2 / 7) ** step for step in range(4)])
    first, group, _ = make(*adaptive, run_dir=tmp_path / "parts", steps=2)
    group.update, update = lambda batches, last=True: fail_at(3, group, update, batches), group.update
    first.fit()
    state = load_state(first.checkpoint)
    assert state.kl_coef == first.kl_penalty.coef == coefs[2]
    second, _, rows = make(*adaptive, run_dir=tmp_path / "parts", resume_from=first.checkpoint)
    second.fit()
    assert [rows.by_step[step]["reward/kl_coef"] for step in (3, 4)] == coefs[2:]
    settings = learning_settings(second.config, steps=4)
    assert settings["algorithm.kl_ctrl.target_kl"] == 0.1
    fixed, _, _ = make(*KL, run_dir=tmp_path / "fixed", resume_from=first.checkpoint)
    assert (fixed.kl_penalty.coef, fixed.kl_penalty.state) == (0.5, None)


def fail_at(number, group, update, batches):
    if len(group.updates) == number - 1:
        raise TrainingError("loss nan, the step was not taken")
    return update(batches)


def test_a_step_that_was_not_taken_leaves_the_coefficient(tmp_path):
    trainer, group, _ = make(*KL, "algorithm.kl_ctrl.type=adaptive", run_dir=tmp_path)
    group.update, update = lambda batches, last=True: fail_at(2, group, update, batches), group.update
    with pytest.raises(TrainingError):
        trainer.fit()
    assert load_state(trainer.checkpoint).kl_coef == trainer.kl_penalty.coef == 0.5 * (1 + 0.2 * 2 / 10000)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["distillation.enabled=true", "actor_rollout_ref.teacher.model.path=x"], ["_in_reward", "needs rewards"]),
        (["algorithm.kl_penalty=full"], ["algorithm.kl_penalty", "k1, abs, k2, k3", "full"]),
        (["algorithm.kl_ctrl.target_kl=0"], ["algorithm.kl_ctrl.target_kl", "above 0"]),
        (["algorithm.kl_ctrl.horizon=0"], ["algorithm.kl_ctrl.horizon", "above 0"]),
        (["algorithm.kl_ctrl={type: adaptive, kl_coef: 0}"], ["algorithm.kl_ctrl.kl_coef", "above 0", "adaptive"]),
        (["actor_rollout_ref.actor.kl_loss_type=k1"], ["kl_loss_type", "expected gradient is 0", "k1+"]),
        (
            ["distillation={enabled: true, as_reward: true}", "actor_rollout_ref.teacher.model.path=x",
             "actor_rollout_ref.actor={use_kl_loss: true, kl_loss_type: full}"],
            ["kl_loss_type", "distillation.enabled=true", "full"],
        ),
    ],
)
def test_what_does_not_go_together(overrides, parts):
    assert config(*KL).uses_reference
    with pytest.raises(ConfigError) as error:
        config(*KL, *overrides)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_the_state_before_this_key_is_read(tmp_path):
    trainer, _, _ = make(run_dir=tmp_path, steps=1)
    trainer.fit()
    file = trainer.checkpoint / "trainer_state.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    assert values.pop("kl_coef") is None
    file.write_text(json.dumps(values), encoding="utf-8")
    assert dataclasses.asdict(load_state(trainer.checkpoint))["kl_coef"] is None

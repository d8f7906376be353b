"""The critic's turn in a step, on a stand-in for the workers: what is computed when, and with what."""

import numpy as np
import pytest

from hybrid_gkd.config import AlgorithmConfig, updates_per_step
from hybrid_gkd.errors import CheckpointError, TrainingError
from hybrid_gkd.ppo.advantages import gae
from hybrid_gkd.ppo.resuming import data_state, learning_settings, state_to_resume
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.scoring.critic_stage import value_metrics
from hybrid_gkd.student.checkpoint_store import CheckpointStore, TrainerState
from hybrid_gkd.testing import (
    LocalTeacher,
    MetricRows,
    NumberTokenizer,
    RecordingGroup,
    make_sample,
    tail_of,
    tiny_config,
)
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Task, TopK

GAE = (
    "data.train_batch_size=4",
    "data.max_prompt_length=8", "data.max_response_length=8", "reward.answer_key=answer", "trainer.save_freq=0",
    "algorithm.adv_estimator=gae", "algorithm.lam=0.5", "trainer.total_training_steps=1",
)  # fmt: skip
PPO = "distillation.enabled=false"
PROMPTS = [Task(index=i, token_ids=np.full(1, i, np.int32), text=str(i), answer="1") for i in range(4)]


def make(*overrides, cls=PPOTrainer, store=None, **options):
    group, rows = RecordingGroup(), MetricRows()
    trainer = cls(
        tiny_config(*GAE, *overrides), group=group, tokenizer=NumberTokenizer(), train_prompts=PROMPTS,
        val_prompts=[], reward=lambda response, answer: 1.0, tracking=rows, store=store, **options,
    )
    return trainer, group, rows


def test_values_come_first_and_the_critic_learns_before_the_actor():
    trainer, group, rows = make(PPO)
    trainer.fit()
    steps = ["publish", "generate", "values", "update_critic", "update", "publish"]
    assert [event[0] for event in group.events] == steps
    for item in [i for share in group.critic_updates[0] for part in share for m in part.micro_batches for i in m]:
        # Of two tokens the last one is rewarded with 1: deltas 0 and 0.75, advantages 0.375 and 0.75.
        np.testing.assert_array_equal(item.array("values"), [0.25, 0.25])
        np.testing.assert_allclose(item.array("returns"), [0.625, 1.0])
    row = rows.by_step[1]
    assert row["critic/values/mean"] == 0.25
    assert row["critic/returns/mean"] == pytest.approx(0.8125)
    assert {"critic/vf_loss", "critic/lr", "timing/values", "timing/update_critic"} <= row.keys()
    assert sum(row[f"timing/{name}"] for name in ("values", "update_critic")) <= row["timing/step"]


@pytest.mark.slow
def test_its_mini_batches_and_epochs_are_its_own_or_the_actors():
    own = ["critic.ppo_mini_batch_size=2", "critic.ppo_epochs=3", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    for overrides, actor, critic in (
        (own, 1, 6), (["actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_epochs=2"], 8, 8)
    ):  # fmt: skip
        trainer, group, rows = make(PPO, *overrides)
        trainer.fit()
        assert [len(share) for share in group.updates[0]] == [actor] * 2
        assert [len(share) for share in group.critic_updates[0]] == [critic] * 2
        assert rows.by_step[1]["critic/lr"] == pytest.approx(0.1 * (critic - 1))
        sections = trainer.config.actor_rollout_ref.actor, trainer.config.resolved_critic
        prompts = trainer.config.data.train_batch_size
        assert [updates_per_step(prompts, section) for section in sections] == [actor, critic]


def test_in_its_warm_up_it_learns_alone():
    trainer, group, rows = make(PPO, "trainer.critic_warmup=2", "trainer.total_training_steps=3")
    trainer.fit()
    assert (len(group.critic_updates), len(group.updates)) == (3, 1)
    assert ["actor/loss" in rows.by_step[step] for step in (1, 2, 3)] == [False, False, True]


def test_the_teacher_and_a_critic_together():
    def score(reading):
        logprobs = np.full((2, 1), -0.5, np.float32)
        ids, tail = reading.token_ids[reading.positions, None], tail_of(logprobs)
        return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])

    trainer, group, _ = make(
        "distillation.use_task_rewards=true", "actor_rollout_ref.teacher.model.path=x", cls=GKDTrainer,
        teacher=LocalTeacher(score),
    )
    trainer.fit()
    assert len(group.critic_updates) == len(group.updates) == 1
    assert all("teacher" in item.signals and "advantages" in item.signals for item in group.trained[0])


def test_without_rewards_there_is_no_critic():
    for overrides in (["actor_rollout_ref.teacher.model.path=x"], [PPO, "algorithm.adv_estimator=reinforce_plus_plus",
                                                                   "algorithm.lam=1"]):  # fmt: skip
        config = tiny_config(*GAE, *overrides)
        assert not config.uses_critic


@pytest.mark.parametrize(("failing", "saved"), [("update", []), ("update_critic", [1])])
def test_after_the_critics_update_the_state_is_not_that_of_a_whole_step(failing, saved, tmp_path):
    """And is not saved, where the second step fails; before it the state of the first one is."""
    steps = ("trainer.total_training_steps=2", "trainer.save_freq=-1")
    trainer, group, _ = make(PPO, *steps, store=CheckpointStore(tmp_path, keep=1))
    update = getattr(group, failing)

    def refuse(*args, **options):
        if trainer.step == 1:
            raise TrainingError("loss nan, the step was not taken")
        return update(*args, **options)

    setattr(group, failing, refuse)
    with pytest.raises(TrainingError):
        trainer.fit()
    assert group.saved == saved


def test_explained_variance_against_the_formula():
    values, returns = np.array([0.0, 1.0, 2.0], np.float32), np.array([0.0, 2.0, 2.0], np.float32)
    items = [make_sample(values=values[part], returns=returns[part]) for part in (slice(2), slice(2, 3))]
    found = value_metrics(items)
    assert found["critic/vf_explained_var"] == pytest.approx(1 - np.var([0, 1, 0]) / np.var([0, 2, 2]))
    equal = [make_sample(values=values, returns=np.ones(3, np.float32))]
    assert value_metrics(equal).keys() == {"critic/values/mean", "critic/returns/mean"}


def test_rounding_of_returns_is_no_variance():
    """Without a reward every return is 0; advantages with gamma below 1, and so their sum with values, are rounded."""
    values = np.random.default_rng(0).normal(size=40).astype(np.float32)
    _, (returns,) = gae([np.zeros(40, np.float32)], 1, [values], AlgorithmConfig(gamma=0.99))
    assert returns.any()
    assert value_metrics([make_sample(values=values, returns=returns)]).keys() == {
        "critic/values/mean", "critic/returns/mean"
    }


def test_a_run_with_a_critic_continues_only_from_one_with_a_critic(tmp_path):
    config = tiny_config(*GAE, PPO)
    state = TrainerState(step=1, data=data_state(config, 4), first_metrics={})
    store = CheckpointStore(tmp_path, keep=None)
    with store.writing(state):
        pass
    with pytest.raises(CheckpointError, match=r"adv_estimator=gae needs a critic, and .*global_step_1 has none"):
        state_to_resume(store.latest(), config, 4)
    changed = tiny_config(*GAE, PPO, "critic.optim.lr=0.5")
    was, now = (learning_settings(each, steps=1) for each in (config, changed))
    assert {key: now[key] for key in now if was.get(key) != now[key]} == {"critic.optim.lr": 0.5}
    assert now["critic.model.path"] == "unused"  # the student's

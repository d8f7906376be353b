"""The reward model's turn in a step and in a validation, on a stand-in for the workers, and what it reads."""

import dataclasses
import logging

import numpy as np
import pytest

from hybrid_gkd.errors import HybridGKDError, TrainingError
from hybrid_gkd.ppo.resuming import learning_settings
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring.reward_functions import load_functions
from hybrid_gkd.scoring.reward_model_scorer import RewardModelScorer, RewardTexts
from hybrid_gkd.scoring.rewards import RewardScorer
from hybrid_gkd.testing import (
    CHAT_TEMPLATE,
    MetricRows,
    NumberTokenizer,
    RecordingGroup,
    make_sample,
    make_tokenizer,
    tiny_config,
)
from hybrid_gkd.types import Task

OWN = [
    "data.val_files=unused", "trainer.save_freq=0",
    "data.train_batch_size=4", "data.max_prompt_length=8", "data.max_response_length=8", "trainer.test_freq=2",
    "distillation.enabled=false", "algorithm.adv_estimator=remax", "trainer.total_training_steps=3",
]  # fmt: skip
MODEL = ["reward_model.enable=true", "reward_model.model.path=judge"]
PROMPTS = [
    Task(
        index=i, token_ids=np.full(1, i, np.int32), text=str(i), answer="1",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": str(i)}],
    )
    for i in range(4)
]  # fmt: skip


def respond(request, version):
    """One to four tokens."""
    return np.full(1 + request.id.row % 4, 7, np.int32)


def make(*overrides, texts=None, score=None):
    config, group, rows, clock = tiny_config(*OWN, *MODEL, *overrides), RecordingGroup(respond), MetricRows(), Clock()
    if score is not None:
        group.compute_reward_scores = lambda shares: dict.fromkeys(range(99), score)
    turn = RewardModelScorer(config, group, texts or RewardTexts(NumberTokenizer()), clock)
    functions = load_functions(config.reward) if config.has_reward_functions else {}
    trainer = PPOTrainer(
        config, group=group, tokenizer=NumberTokenizer(), train_prompts=PROMPTS, val_prompts=PROMPTS[:2],
        reward=RewardScorer(functions, NumberTokenizer(), config, turn), tracking=rows, store=None, clock=clock,
    )
    return trainer, group, rows


@pytest.mark.parametrize("scheduler", ["sync", "one_step_off"])
def test_it_scores_after_the_rollout_and_in_validation(scheduler):
    """remax scores greedy answers too. A text has one token of the prompt, and scores 1 for each of its tokens."""
    trainer, group, rows = make(f"trainer.scheduler={scheduler}")
    trainer.fit()
    events = [event[0] for event in group.events if event[0] != "generate"]
    step, validation = ["reward_model", "update", "publish"], ["reward_model"]
    assert events == ["publish", *validation, *step, *step, *validation, *step, *validation]
    assert [event[2] for event in group.events if event[0] == "reward_model"] == [2, 8, 8, 2, 8, 2]
    for item in group.trained[0]:
        # Greedy answers are as long as the drawn ones here: the reward is the baseline.
        assert not np.any(item.array("advantages"))
    row = rows.by_step[2]
    assert row["reward/mean"] == np.mean([2, 3, 4, 5]) == row["reward/greedy"]
    assert row["val/reward_model"] == 2.5
    assert row["reward/model_truncated/mean"] == 0
    assert not {"val/accuracy", "reward/model/mean"} & row.keys()
    assert row["timing/reward_model"] <= row["timing/step"]
    assert rows.generations[0].reward == 2


def test_with_functions_the_reward_is_the_weighted_sum_and_they_alone_are_the_accuracy():
    trainer, _, rows = make("reward.functions={model: 2.0, length: 4.0}")
    trainer.fit()
    row = rows.by_step[2]
    assert row["reward/model/mean"] == 3.5
    assert row["reward/length/mean"] == -2.5 / 8
    assert row["reward/mean"] == pytest.approx(2 * 3.5 - 4 * 2.5 / 8)
    assert row["val/reward_model"] == 2.5
    assert row["val/accuracy"] == -4 * 1.5 / 8
    assert rows.generations[0].reward == 2 * 2 - 4 / 8


def test_a_score_that_is_no_number_ends_the_run_with_the_row():
    with pytest.raises(TrainingError, match="row 1 of the data: the reward model's score is nan"):
        make(score=float("nan"))[0].fit()


def sample(*ids, row=0):
    return make_sample(row, prompt=[1, 2], completion=ids)


def test_texts_lose_their_end_at_the_limit_which_is_said_and_counted(caplog):
    trainer, _, rows = make(texts=RewardTexts(NumberTokenizer(), max_length=3))
    with caplog.at_level(logging.WARNING):
        trainer.fit()
    assert "4 of 8 texts for the reward model are truncated to 3 tokens (reward_model.max_length" in caplog.text
    assert rows.by_step[1]["reward/model_truncated/mean"] == 0.5
    assert rows.by_step[1]["reward/mean"] == np.mean([2, 3, 3, 3])


def test_what_it_reads_is_the_chat_behind_its_own_template():
    tokenizer, own = make_tokenizer(), make_tokenizer(extra_tokens=("<|b|>",))
    answer = make_sample(3, prompt=[3], completion=[*tokenizer("yes").input_ids, tokenizer.eos_token_id])
    np.testing.assert_array_equal(
        RewardTexts(tokenizer).tokens(PROMPTS[3], answer), answer.tokens
    )
    own.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|b|>{% endfor %}"
    found = RewardTexts(tokenizer, own).tokens(PROMPTS[3], answer)
    assert own.decode(found) == "[system]be brief<|b|>[user]3<|b|>[assistant]yes<|b|>"
    assert own.convert_tokens_to_ids("<|b|>") in found
    own.chat_template = None
    plain = dataclasses.replace(PROMPTS[3], messages=PROMPTS[3].messages[1:])
    assert own.decode(RewardTexts(tokenizer, own).tokens(plain, answer)) == "3\nyes"
    with pytest.raises(HybridGKDError, match=r"row 4 of the data: reward_model\.model\.path has no chat template"):
        RewardTexts(tokenizer, own).tokens(PROMPTS[3], answer)
    own.chat_template = "{{ raise_exception('no system') }}" + CHAT_TEMPLATE
    with pytest.raises(HybridGKDError, match=r"row 4 of the data: reward_model\.model\.path: .* rejects it: no system"):
        RewardTexts(tokenizer, own).tokens(PROMPTS[3], answer)


def test_micro_batches_are_cut_by_their_own_limit_and_a_longer_text_is_one():
    trainer, group, _ = make("reward_model.forward_max_token_len_per_gpu=4")
    asked, compute = [], group.compute_reward_scores
    group.compute_reward_scores = lambda shares: asked.append(shares) or compute(shares)
    pairs = [(PROMPTS[i % 4], sample(*range(length), row=i)) for i, length in enumerate((1, 1, 1, 6))]
    assert trainer.rewards.scores(pairs) == [3, 3, 3, 8]
    (shares,) = asked
    assert len(shares) == group.size
    assert len(set(map(len, shares))) == 1
    sizes = [sum(len(text.token_ids) for text in micro) for share in shares for micro in share]
    assert max(sizes) == 8


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["reward_model.model.path=null"], ["reward_model.model.path", "must name a classifier"]),
        (["reward.functions={length: 1}"], ["reward.functions", "must have model if and only if reward_model.enable"]),
        (["reward_model.enable=false", "reward.functions={model: 1}"], ["reward.functions", "if and only if"]),
        (["reward.custom_reward_function.path=a.py"], ["reward.functions", "{model: 1.0, custom: 1.0}"]),
        (["reward.functions={model: 1, gsm8k: 1}"], ["reward.answer_key", "right answers"]),
        (["reward_model.max_length=0"], ["reward_model.max_length", "above 0"]),
        (["trainer.best_metric=val/accuracy"], ["trainer.best_metric", "reward_model"]),
        (
            ["distillation.enabled=true", "actor_rollout_ref.teacher.model.path=x", "data.val_files=null"],
            ["reward_model.enable", "has no effect", "data.val_files"],
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides, parts):
    with pytest.raises(HybridGKDError) as caught:
        tiny_config(*OWN, *MODEL, *overrides)
    for part in parts:
        assert part in str(caught.value)


def test_it_decides_what_is_learned_where_rewards_are_trained_on():
    config = tiny_config(*OWN, *MODEL)
    assert {"reward_model.enable", "reward_model.model.path"} <= learning_settings(config, steps=1).keys()
    off = tiny_config(*OWN, "reward.answer_key=answer")
    assert not off.uses_reward_model
    assert "reward_model.model.path" not in learning_settings(off, steps=1)
    distils = dataclasses.replace(config, distillation=dataclasses.replace(config.distillation, enabled=True))
    assert distils.uses_reward_model  # in validations
    assert "reward_model.enable" not in learning_settings(distils, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["sync", "one_step_off"])
def test_where_groups_are_left_out_every_generation_batch_is_scored_once(scheduler, monkeypatch):
    """Half of the groups have no signal, so that a step takes two generation batches, each of which is scored once."""
    monkeypatch.setattr(
        f"{__name__}.respond",
        lambda request, version: np.full(1 + request.id.number * (request.id.row % 2), 7, np.int32),
    )
    trainer, group, rows = make(
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "algorithm.filter_groups.enable=true",
        f"trainer.scheduler={scheduler}", "trainer.total_training_steps=2", "trainer.val_before_train=false",
        "trainer.test_freq=0",
    )  # fmt: skip
    trainer.fit()
    refilled = ["generate", "reward_model"] * 2
    ahead = [*refilled, *refilled, "update", "publish", "update", "publish"]
    sync = [*refilled, "update", "publish"]
    assert [event[0] for event in group.events] == ["publish", *(ahead if scheduler == "one_step_off" else sync * 2)]
    assert [event[2] for event in group.events if event[0] == "reward_model"] == [8] * 4
    assert rows.by_step[1]["training/num_gen_batches"] == 2
    with pytest.raises(HybridGKDError, match=r"filter_groups\.enable: must be false with a reward model, a separate"):
        make(
            "algorithm.filter_groups.enable=true", "actor_rollout_ref.hybrid_engine=false",
            "rollout.n_gpus_per_node=1", "trainer.scheduler=one_step_off", "actor_rollout_ref.rollout.n=2",
        )

"""Validation metrics of several completions per prompt, from several data sources."""

import itertools
from decimal import Decimal
from math import comb

import numpy as np
import pytest

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.data.tables import short_names
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.preflight import loss
from hybrid_gkd.ppo.best import check_best_metric, new_best
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.ppo.validation import by_quarter, final_answer, majority, pass_at_k, pass_sizes, reward_metrics
from hybrid_gkd.reporting.metric_table import check_names
from hybrid_gkd.student.checkpoint_store import CheckpointStore
from hybrid_gkd.testing import MetricRows, NumberTokenizer, RecordingGroup, tiny_config
from hybrid_gkd.types import Task

VAL_KWARGS = "actor_rollout_ref.rollout.val_kwargs"
SAMPLED = (f"{VAL_KWARGS}.temperature=1", "reward.answer_key=answer", "distillation.enabled=false")


@pytest.mark.parametrize("n", [2, 3, 8])
def test_pass_at_k_is_the_estimator_of_its_paper_and_the_mean_over_all_choices(n):
    rewards = np.random.default_rng(n).integers(0, 2, (20, n)).astype(float)
    for k in range(1, n + 1):
        right = rewards.sum(1).astype(int)
        paper = np.mean([1 - comb(n - c, k) / comb(n, k) for c in right])
        choices = np.mean([rewards[:, list(choice)].max(1) for choice in itertools.combinations(range(n), k)])
        np.testing.assert_allclose([pass_at_k(rewards, k)] * 2, [paper, choices], rtol=1e-12, atol=1e-12)


def test_pass_at_k_of_any_rewards_is_the_expected_best():
    rewards = np.random.default_rng(0).normal(size=(5, 6))
    for k in (1, 2, 4, 6):
        choices = np.mean([rewards[:, list(choice)].max(1) for choice in itertools.combinations(range(6), k)])
        assert pass_at_k(rewards, k) == pytest.approx(choices, rel=1e-12)
    assert [pass_sizes(n) for n in (2, 3, 4, 7, 8)] == [[2], [2], [2, 4], [2, 4], [2, 4, 8]]


def test_the_majority_is_of_final_answers_and_the_first_of_several_wins():
    assert majority([0.0, 1.0, 1.0], ["3", "4", "4"]) == 1
    assert majority([0.0, 1.0, 0.0], ["3", "4", "3"]) == 0
    assert majority([1.0, 0.0], ["4", "3"]) == 1
    assert majority([1.0, 0.5, 0.0], ["4", "4", "3"]) == 0.75  # a reward that looks at more than the final answer
    found = reward_metrics(np.array([[0.0, 1, 1, 0], [0, 0, 1, 0]]), ["3", "4", "4", "5", "6", "7", "8", "7"])
    expected = {"accuracy": 3 / 8, "best@4": 1, "maj@4": 0.5, "pass@2": (5 / 6 + 1 / 2) / 2, "pass@4": 1}
    assert found == pytest.approx(expected)
    assert reward_metrics(np.array([[1.0], [0.0]]), []) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("text", "right", "final"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"an open \boxed{1", "x", r"an open \boxed{1"),
        ("2 + 2 = 4\n#### 1,200 apples\nas I said", "1200", Decimal(1200)),
        ("The answer is $18.00.", "... #### 18", Decimal(18)),
        ("I do not know", "18", None),
        (r"\boxed{42.0}", "42", Decimal(42)),
        ("  Paris. ", "Paris", "Paris"),
        ("1 2\n3", "1 2 3", "1 2 3"),
    ],
)
def test_final_answers(text, right, final):
    assert final_answer(text, right) == final


def test_a_quarter_is_one_of_each_answer():
    values = [np.arange(8.0), np.array([10.0, 20.0]), np.array([30.0])]
    found = by_quarter("kl", values)
    assert found == pytest.approx({
        "kl": (28 + 60) / 11, "kl/q1": (0 + 1 + 10 + 30) / 4, "kl/q2": 2.5, "kl/q3": (4 + 5 + 20) / 3, "kl/q4": 6.5,
    })  # fmt: skip
    assert by_quarter("kl", [np.ones(1)]) == {"kl": 1, "kl/q1": 1}


def validate(prompts, *overrides, respond=None):
    """The metrics of a validation of a PPO run, and the trackers."""
    config = load_config([
        "data.train_files=[]", "data.val_files=unused", "trainer.val_only=true", "actor_rollout_ref.model.path=unused",
        *SAMPLED, *overrides,
    ])  # fmt: skip
    tracking = MetricRows()
    trainer = PPOTrainer(
        config, group=RecordingGroup(respond), tokenizer=NumberTokenizer(), train_prompts=[], val_prompts=prompts,
        reward=lambda response, answer: float(response == answer), tracking=tracking,
        store=CheckpointStore(None, keep=None),
    )  # fmt: skip
    trainer.fit()
    (row,) = tracking.rows
    assert trainer.last_metrics == {name: value for name, value in row.items() if name.startswith("val/")}
    check_names(row)
    return trainer.last_metrics, tracking.generations


def make_prompts(sources, file="test"):
    return [
        Task(
            index=i, token_ids=np.full(1, i, np.int32), text=f"question {i}", answer="1", data_source=source, file=file
        )
        for i, source in enumerate(sources)
    ]


def test_each_data_source_has_metrics_and_all_together():
    """Prompt i has i right answers of four, the others are all different; the longest is cut."""

    def respond(request, version):
        _, row, number = request.id
        return np.full(1, 1 if number < row else 7 + 4 * row + number, np.int32)

    found, generations = validate(
        make_prompts(["org/math", "org/math", None, "org/math"]), f"{VAL_KWARGS}.n=4", "trainer.log_val_generations=2",
        respond=respond,
    )  # fmt: skip
    assert (found["val/num_prompts"], found["val/accuracy"]) == (4, 6 / 16)
    assert (found["val/best@4"], found["val/maj@4"], found["val/pass@4"]) == (3 / 4, 3 / 4, 3 / 4)
    assert found["val/pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    assert (found["val/org/math/accuracy"], found["val/test/accuracy"]) == (4 / 12, 1 / 2)
    assert (found["val/org/math/num_prompts"], found["val/test/num_prompts"]) == (3, 1)
    groups = ("val/", "val/org/math/", "val/test/")
    names = {name.removeprefix("val/") for name in found if not name.startswith(groups[1:])}
    assert found.keys() == {group + name for group in groups for name in names}
    shown = [(g.data_source, g.prompt, g.sample, g.response, g.reward) for g in generations]
    assert shown == [
        *(("org/math", "question 0", sample, str(7 + sample), 0.0) for sample in range(4)),
        ("test", "question 2", 0, "1", 1.0), ("test", "question 2", 1, "1", 1.0),
        ("test", "question 2", 2, "17", 0.0), ("test", "question 2", 3, "18", 0.0),
    ]


def test_a_single_data_source_and_a_single_answer_have_no_names_of_their_own():
    found, _ = validate(make_prompts(["org/math", "org/math"]), "trainer.log_val_generations=0")
    assert found.keys() == {
        "val/accuracy", "val/num_prompts", "val/response_length", "val/response_length/clip_ratio"
    }  # fmt: skip


def test_several_answers_have_to_be_drawn():
    with pytest.raises(ConfigError, match=r"val_kwargs.n: must be 1 with actor_rollout_ref.rollout.val_kwargs.temp"):
        validate([], f"{VAL_KWARGS}.n=2", f"{VAL_KWARGS}.temperature=0")


def test_files_are_called_by_what_tells_them_apart():
    assert short_names(["/data/gsm8k/test.parquet", "/data/math/test.parquet", "val.jsonl.gz"]) == [
        "gsm8k/test", "math/test", "val"
    ]  # fmt: skip
    assert short_names(["openai/gsm8k:main:test", "/a/b.csv", "/a/b.csv"]) == ["gsm8k:main:test", "a/b", "a/b"]
    with pytest.raises(AssertionError, match="val/org/math/acuracy"):
        check_names(["val/org/math/accuracy", "val/org/math/acuracy", "val/pass@2"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["trainer.best_metric=val/forward_kl"], r"must be val/<name> or .*: accuracy, best@4, maj@4, pass@2, pass@4"),
        (["trainer.best_metric=accuracy"], r"must be val/<name>"),
        (["trainer.best_metric=val/org/best@8"], r"must be val/<name>"),
        (["trainer.best_metric=val/accuracy", "data.val_files=null"], r"needs data.val_files"),
        (["trainer.best_metric=val/accuracy", "trainer.test_freq=0"], r"needs validations"),
        (["trainer.best_metric=val/accuracy", "trainer.save_freq=0"], r"needs checkpoints"),
    ],
)
def test_a_best_metric_has_to_be_one_that_the_run_will_have(overrides, rule):
    run = ["data.train_files=x", "data.val_files=y", "actor_rollout_ref.model.path=z", "actor_rollout_ref.rollout.n=2"]
    run += [*SAMPLED, f"{VAL_KWARGS}.n=4"]
    for metric in ("val/accuracy", "val/org/math/pass@4"):
        load_config([*run, f"trainer.best_metric={metric}"])
    with pytest.raises(ConfigError, match=f"trainer.best_metric: {rule}"):
        load_config([*run, *overrides])


def test_a_best_metric_of_a_data_source_needs_one_of_several():
    config = tiny_config(
        "data.val_files=y", "actor_rollout_ref.model.path=z", "actor_rollout_ref.rollout.n=2", *SAMPLED,
        "trainer.best_metric=val/org/math/accuracy",
    )  # fmt: skip
    check_best_metric(config.trainer, ["org/math", "test"])
    with pytest.raises(ConfigError, match="must name one of the data sources org/code, test"):
        check_best_metric(config.trainer, ["org/code", "test"])
    with pytest.raises(ConfigError, match="must be a metric over all prompts"):
        check_best_metric(config.trainer, ["org/math", "org/math"])
    config.trainer.best_metric = "val/accuracy"
    check_best_metric(config.trainer, ["org/math"])


def test_a_validation_without_its_metric_is_not_the_best():
    """No held-out completion was scored."""
    best = new_best("val/forward_kl", {"val/forward_kl": 0.5}, 1, None)
    assert best.value == 0.5
    assert new_best("val/forward_kl", {"val/accuracy": 1.0}, 2, best) is None
    assert new_best("val/forward_kl", {"val/forward_kl": 0.4}, 3, best).step == 3


def test_the_loss_of_a_run_without_teacher_and_rewards_is_named():
    assert loss(Facts(tiny_config("distillation.enabled=false", "data.response_key=text"))) == (
        "cross-entropy of given completions"
    )
    assert loss(Facts(tiny_config())).startswith("forward_kl, top-")

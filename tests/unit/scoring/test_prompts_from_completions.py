"""Prompts of the teacher that a function builds after the completions (`distillation.teacher_prompt_fn`)."""

import dataclasses

import numpy as np
import pytest
import torch

from hybrid_gkd import testing
from hybrid_gkd.errors import ConfigError, DataError, TrainingError
from hybrid_gkd.ppo.token_weighting import Weighting
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring.rewards import RewardScorer
from hybrid_gkd.scoring.teacher_prompts import CompletionPrompts, load_prompt_function
from hybrid_gkd.student.checkpoint_store import CheckpointStore
from hybrid_gkd.testing import LocalGroup, LocalTeacher, MetricRows, make_sample, make_tiny_model, tiny_config
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Rollout, Task, TopK, with_tasks
from hybrid_gkd.workers.aggregation import with_loss_weights

TOKENIZER = testing.make_tokenizer()
FUNCTION = """
import time

def solved(task, sample, group):
    best = [each for each in group if each.reward == 1]
    if sample.reward == 1 or not best:
        return None
    return [{"role": "user", "content": f"{task.text}? {best[0].text}"}]

def even(task, sample, group):
    return "again" if task.index % 2 == 0 else None

def nobody(task, sample, group):
    return None

def shown(task, sample, group):
    return f"{sample.text}, {sample.reward}"

def number(task, sample, group):
    return 7

def empty(task, sample, group):
    return " "

def long(task, sample, group):
    return "x" * 40

def fails(task, sample, group):
    return {}["feedback"]

def hangs(task, sample, group):
    time.sleep(60)

def two(task, sample):
    return "text"
"""


@pytest.fixture
def function(tmp_path):
    """Import path of a function by its name."""
    (tmp_path / "prompts.py").write_text(FUNCTION, encoding="utf-8")
    return lambda name: f"{tmp_path}/prompts.py:{name}"


def make_prompts(function, *overrides, rewards=False, templates=()):
    config = tiny_config(
        f"distillation.teacher_prompt_fn={function}", "actor_rollout_ref.rollout.n=3", "data.max_prompt_length=30",
        *overrides,
    )  # fmt: skip
    scorer = RewardScorer.of(lambda text, answer: float(text == answer), TOKENIZER, config, Clock())
    return CompletionPrompts(config, TOKENIZER, scorer if rewards else None, dict(templates))


def group_of(row, *texts, status="stop"):
    task = Task(index=row, token_ids=np.array([1], np.int32), text=f"task {row}", answer="yes")
    completions = [TOKENIZER(text, add_special_tokens=False).input_ids for text in texts]
    samples = [make_sample(row, completion=ids, number=i, status=status) for i, ids in enumerate(completions)]
    return with_tasks([task], samples)


def test_the_prompt_is_made_of_a_successful_completion_when_the_group_is_complete(function):
    prompts = make_prompts(function("solved"), "reward.answer_key=answer", rewards=True)
    first, second = group_of(0, "no", "yes", "maybe"), group_of(1, "a", "b", "c")
    assert prompts.finished([first[2], second[0]]) == ([], [])
    found, unscored = prompts.finished([first[0], second[2], first[1]])
    assert [str(sample.id) for _, sample in found] == ["row 1, sample 2", "row 1, sample 0"]
    assert [TOKENIZER.decode(task.teacher_ids) for task, _ in found] == ["task 0? yes<|a|>"] * 2
    assert unscored == [first[1][1].id]
    assert prompts.finished([second[1]]) == ([], [sample.id for _, sample in (second[0], second[2], second[1])])


def test_a_text_is_one_message_and_the_template_of_the_teacher_counts(function):
    template = "[{{ messages[0]['content'] }}]"
    prompts = make_prompts(function("even"), templates={"default": template})
    (pair,), unscored = prompts.finished(group_of(4, "given", status="given"))  # a group of its own
    assert TOKENIZER.decode(pair[0].teacher_ids) == "[again]"
    assert not unscored


def test_the_text_of_a_given_completion_has_its_excluded_spans_and_not_the_prompt(function):
    """Trained are the end of the prompt and the last token of the completion."""
    prompts = make_prompts(function("shown"), "reward.answer_key=answer", rewards=True)
    ids = TOKENIZER("yes", add_special_tokens=False).input_ids
    task = Task(index=0, token_ids=np.array([1, 2], np.int32), text="task", answer="yes")
    mask = [False, True, *(place >= len(ids) - 1 for place in range(len(ids)))]
    sample = make_sample(0, prompt=task.token_ids, completion=ids, loss_mask=mask, status="given")
    ((found, _),), unscored = prompts.finished([(task, sample)])
    assert TOKENIZER.decode(found.teacher_ids) == "yes, 1.0<|a|>"
    assert not unscored


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("number", DataError, "must be a text or a list of chat messages; got 7"),
        ("empty", DataError, "the prompt is empty"),
        ("long", TrainingError, r"the prompt has 41 tokens, the limit is data.max_prompt_length=30"),
        ("fails", TrainingError, "raised KeyError: 'feedback'"),
        ("hangs", TrainingError, r"no prompt within 0.2 s \(reward.timeout\)"),
    ],
)
def test_what_is_no_prompt_is_an_error_with_function_and_row(function, name, error, message):
    prompts = make_prompts(function(name), "reward.timeout=0.2")
    with pytest.raises(error, match=rf"teacher_prompt_fn=.*prompts.py:{name}, row 3 of the data, sample 0: {message}"):
        prompts.finished(group_of(2, "a", "b", "c"))


def test_the_limit_is_the_teachers_own(function):
    prompts = make_prompts(function("long"), "data.max_teacher_prompt_length=41")
    found, _ = prompts.finished(group_of(2, "a", "b", "c"))
    assert [len(task.teacher_ids) for task, _ in found] == [41] * 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.teacher_prompt_key=hint"], "must be null with data.teacher_prompt_key"),
        (["distillation.as_reward=true"], "must be null with distillation.as_reward"),
        (["distillation.enabled=false", "reward.answer_key=a"], "needs distillation.enabled=true"),
        (
            ["actor_rollout_ref.teacher.cache=x", "actor_rollout_ref.teacher.server_ip=null",
             "data.response_key=response"],
            "needs a teacher service, not scores stored in",
        ),
        (["data.loss_mask=all", "data.response_key=response"], "data.loss_mask: must be answer with"),
        (["distillation.teacher_prompt_fn=build"], "must be module:name or file.py:name"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config("distillation.teacher_prompt_fn=prompts.py:build", "actor_rollout_ref.rollout.n=2", *overrides)


def test_the_function_must_take_three_arguments(function):
    with pytest.raises(ConfigError, match=r"teacher_prompt_fn: must take the arguments task, sample, group: too many"):
        load_prompt_function(function("two"))


def test_samples_without_teacher_count_neither_in_the_loss_nor_in_its_mean():
    """Beside another term, by factors of the distillation term: N / (tokens with a teacher), 0 without."""
    config = tiny_config("distillation.use_task_rewards=true", "reward.answer_key=a", "actor_rollout_ref.rollout.n=2")
    ones = [np.ones(length, np.float32) for length in (1, 3, 4)]
    samples = [make_sample(row, completion=range(len(each)), advantages=each) for row, each in enumerate(ones)]
    unscored = Weighting(config).without_teacher
    samples[1] = unscored(samples[1])
    factors = [sample.array("weights/distillation").tolist() for sample in with_loss_weights(config, samples)]
    assert factors == [[np.float32(8 / 5)], [0, 0, 0], [np.float32(8 / 5)] * 4]
    samples = list(map(unscored, samples))
    assert with_loss_weights(config, samples) == samples  # other terms are trained


def scores(reading):
    ids = reading.token_ids[reading.positions][:, None]
    logprobs = np.full(ids.shape, -0.1, np.float32)
    tail = testing.tail_of(logprobs)
    return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])


def respond(request, version):
    return (np.arange(3 + request.seed % 3) * 7 + int(request.prompt_ids[-1])).astype(np.int32) % 200


def train(model, function, *overrides, rows=range(4)):
    """Train a real student for a step; return its weights, metrics by step and what the teacher has read."""
    config = tiny_config(
        "data.train_batch_size=4", "data.max_prompt_length=16", "data.max_response_length=8",
        "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=0",
        "trainer.total_training_steps=1", "distillation.topk=1", "actor_rollout_ref.actor.optim.weight_decay=0",
        *([f"distillation.teacher_prompt_fn={function}"] if function else []), *overrides, model=model,
    )  # fmt: skip
    tasks = [Task(index=i, token_ids=np.array([9, i], np.int32), text=str(i), answer="2") for i in range(4)]
    read, metrics = [], MetricRows()
    teacher = LocalTeacher(lambda reading: (read.append(reading), scores(reading))[1])
    prompts = CompletionPrompts(config, TOKENIZER, None) if function else None
    with testing.single_process_group():
        group = LocalGroup(config, respond=respond)
        trainer = GKDTrainer(
            config, group=group, tokenizer=TOKENIZER, train_prompts=tasks, val_prompts=tasks, reward=None,
            tracking=metrics, store=CheckpointStore(None, keep=None), teacher=teacher, prompts=prompts,
        )
        rollout = trainer.generation.rollout(1)
        chosen = [task for task in rollout.tasks if task.index in rows]
        samples = [sample for _, sample in with_tasks(rollout.tasks, rollout.samples) if sample.id.row in rows]
        if len(chosen) < 4:
            rollout = Rollout(step=1, epoch=0, tasks=tuple(chosen), samples=tuple(samples))
            trainer._pending[1] = {s.id: trainer._pending[1][s.id] for s in samples}
        metrics = trainer._update_actor(rollout)
        weights = [each.detach().clone() for each in group.actor.model.parameters()]
        return weights, metrics, read, trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("own", [[], ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24"]])
def test_training_is_that_on_the_samples_with_a_teacher(model, function, own):
    """The sums are of other micro-batches, which rounds float32 gradients; Adam's first step is about +-lr."""
    half, metrics, read, _ = train(model, function("even"), *own)
    assert metrics["teacher/unscored_fraction"] == 0.5
    assert sorted({int(reading.name[4]) for reading in read}) == [1, 3]
    assert all(TOKENIZER.decode(reading.token_ids).startswith("again<|a|>") for reading in read)
    alone, expected, _, _ = train(model, None, *own, rows=(0, 2))
    assert metrics["actor/kl_loss"] == pytest.approx(expected["actor/kl_loss"], rel=1e-5)
    assert "teacher/unscored_fraction" not in expected
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    far = [float(((a - b).abs() > 1e-4).float().mean()) for a, b in zip(half, alone, strict=True)]
    assert max(far) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["uniform", "position", "student_entropy"])
def test_a_rollout_without_any_teacher_has_a_gradient_of_zero(model, function, weights):
    _, metrics, read, trainer = train(model, function("nobody"), f"distillation.token_weights={weights}")
    assert metrics["teacher/unscored_fraction"] == 1
    assert metrics["actor/grad_norm"] == 0
    assert not read
    assert "actor/kl_loss" not in metrics
    assert not trainer._pending


@pytest.mark.slow
def test_a_validation_measures_the_samples_with_a_teacher(model, function):
    _, _, read, trainer = train(model, function("even"))
    read.clear()
    tasks = trainer.val_prompts
    samples = [make_sample(task.index, prompt=task.token_ids, completion=[5, 6], batch=-1) for task in tasks]
    pairs = [(task, dataclasses.replace(sample)) for task, sample in zip(tasks, samples, strict=True)]
    with testing.single_process_group():
        found = trainer._held_out_divergence(pairs)
    assert [len(each) for each in found["forward_kl"]] == [2, 0, 2, 0]
    assert np.isfinite(np.concatenate(found["forward_kl"])).all()
    assert torch.is_grad_enabled()
    assert len(read) == 2

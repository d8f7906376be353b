"""Training on given answers: alone (SFT), beside the student's own, and as a warm-up."""

import math
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd import testing
from hybrid_gkd.config import metadata as rules
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import ConfigError, SeveralErrors
from hybrid_gkd.launch.data_checks import warn_about_steps
from hybrid_gkd.ppo.steps import drawn_rows
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.student.checkpoint_store import CheckpointStore
from hybrid_gkd.testing import LocalGroup, LocalTeacher, MetricRows, RecordingGroup, make_tiny_model
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Task, TopK

VOCABULARY, N, BATCH = 259, 2, 4
SCHEDULE = "data.max_response_length_schedule"
OPTIM = "actor_rollout_ref.actor.optim"
SFT = ("distillation.enabled=false",)


def configure(student="unused", *overrides):
    return load_config([
        "data.train_files=unused", f"actor_rollout_ref.model.path={student}", "data.response_key=response",
        "actor_rollout_ref.teacher.model.path=unused", f"data.train_batch_size={BATCH}", "data.max_prompt_length=8",
        "data.max_response_length=8", f"actor_rollout_ref.rollout.n={N}", f"distillation.topk={VOCABULARY}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32", "trainer.save_freq=0", "data.shuffle=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}", *overrides,
    ])  # fmt: skip


def tasks(count=8, given=lambda row: True):
    """Each with an answer whose second token is not trained on."""
    made = []
    for row in range(count):
        random, prompt = np.random.default_rng(row), np.arange(1, row % 3 + 2, dtype=np.int32)
        answer = random.integers(0, VOCABULARY, random.integers(2, 7)).astype(np.int32)
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        mask[len(prompt) + 1] = False
        own = {"response_ids": answer, "loss_mask": mask} if given(row) else {}
        made.append(Task(index=row, token_ids=prompt, text=str(row), answer="2", **own))
    return made


def fit(cls, config, group, prompts=None, **options):
    tracking = MetricRows()
    trainer = cls(
        config, group=group, tokenizer=testing.NumberTokenizer(), train_prompts=prompts or tasks(),
        tracking=tracking, store=CheckpointStore(None, keep=None),
        **{"val_prompts": [], "reward": None} | options,
    )
    trainer.fit()
    return tracking


def score(reading):
    """A teacher that knows all tokens, and finds those of lower ids likelier."""
    ids = np.tile(np.arange(VOCABULARY, dtype=np.int32), (len(reading.positions), 1))
    logprobs = torch.arange(VOCABULARY, 0, -1).mul(0.01).log_softmax(-1).numpy()
    drawn = reading.token_ids[reading.positions]
    return TopK(
        ids=ids, logprobs=np.tile(logprobs, (len(ids), 1)), tail_logprobs=np.full(len(ids), -np.inf, np.float32),
        sampled_logprobs=logprobs[drawn % VOCABULARY],
    )


@pytest.mark.slow
@pytest.mark.parametrize("mini_batch", [4, 2])
def test_sft_is_the_cross_entropy_that_transformers_computes(tmp_path, mini_batch):
    """A step's loss is what transformers says of the same rows as labels, which other trainers minimise; so are the
    weights after several steps of AdamW."""
    student = make_tiny_model(tmp_path / "student", layers=1)
    optim = "actor_rollout_ref.actor.optim"
    config = configure(
        student, *SFT, "trainer.total_training_steps=3", f"{optim}.lr=0.003", f"{optim}.eps=0.0001",
        f"{optim}.weight_decay=0", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        "actor_rollout_ref.actor.grad_clip=1000",
    )
    with testing.single_process_group():
        group = LocalGroup(config, respond=None, num_updates=3 * BATCH // mini_batch)
        rows = fit(PPOTrainer, config, group).rows
        found = group.actor.compute_logprobs(((group.trained[-1][0],),))
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-4, betas=(0.9, 0.999), weight_decay=0)
    prompts, losses = tasks() * 2, []
    for start in range(0, 3 * BATCH, mini_batch):
        part = prompts[start : start + mini_batch]
        length = max(len(task.loss_mask) for task in part)
        ids, labels = torch.zeros(len(part), length, dtype=torch.int64), torch.full((len(part), length), -100)
        for row, task in enumerate(part):
            tokens = torch.from_numpy(np.concatenate([task.token_ids, task.response_ids]).astype(np.int64))
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = torch.where(torch.from_numpy(task.loss_mask), tokens, -100)
        loss = model(input_ids=ids, attention_mask=(ids >= 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), int((labels[:, 1:] != -100).sum())))
    steps = BATCH // mini_batch
    for step, row in enumerate(rows):
        values, weights = zip(*losses[step * steps : (step + 1) * steps], strict=True)
        assert row["actor/sft_loss"] == pytest.approx(np.average(values, weights=weights), rel=1e-5)
        assert row["actor/loss"] == pytest.approx(np.average(values, weights=weights), rel=1e-5)
    sample = group.trained[-1][0]
    with torch.no_grad():
        logits = model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0]
    expected = logits.log_softmax(-1)[sample.positions - 1, sample.trained_ids]
    np.testing.assert_allclose(found[sample.id], expected, rtol=1e-3)


def test_sft_generates_nothing_and_publishes_for_validations_alone():
    group = RecordingGroup()
    options = [*SFT, "trainer.total_training_steps=4", "trainer.test_freq=2", "data.val_files=unused"]
    reward = {"reward": lambda response, answer: 0.0, "val_prompts": tasks(1, lambda row: False)}
    rows = fit(PPOTrainer, configure("unused", *options, "reward.answer_key=answer"), group, **reward).by_step
    validation = ("generate", 1)
    kinds = [(event[0], event[-1]) if event[0] == "generate" else event[0] for event in group.events]
    assert kinds == ["publish", validation, *["update", "update", "publish", validation] * 2]
    assert [event[1] for event in group.events if event[0] == "publish"] == [0, 2, 4]
    assert all(row["training/given_fraction"] == 1 for step, row in rows.items() if step)
    assert all("response_length/clip_ratio" not in row and "reward/mean" not in row for row in rows.values())


def test_a_fraction_of_the_given_tasks_is_answered_by_the_student():
    group = RecordingGroup()
    options = ["distillation.on_policy_fraction=0.5", "trainer.total_training_steps=2"]
    rows = fit(GKDTrainer, configure("unused", *options), group, teacher=LocalTeacher(score)).rows
    for samples, row in zip(group.trained, rows, strict=True):
        given = {sample.id.row for sample in samples if sample.status == "given"}
        drawn = [sample.id.row for sample in samples if sample.status != "given"]
        assert len(given) == BATCH // 2
        assert given.isdisjoint(drawn)
        assert len(drawn) == N * len(set(drawn)) == N * BATCH // 2
        assert row["training/given_fraction"] == 0.5
        assert all("teacher" in sample.signals for sample in samples)


def test_rows_without_an_answer_are_always_answered_by_the_student():
    group = RecordingGroup()
    prompts = tasks(given=lambda row: row % 2 == 0)
    fit(GKDTrainer, configure("unused", "trainer.total_training_steps=2"), group, prompts, teacher=LocalTeacher(score))
    for samples in group.trained:
        assert {sample.id.row % 2 for sample in samples if sample.status == "given"} == {0}
        assert {sample.id.row % 2 for sample in samples if sample.status != "given"} == {1}


def test_the_share_is_exact_in_a_batch_and_in_the_long_run():
    prompts = tasks(10, lambda row: row < 7)
    counts = [len(drawn_rows(prompts, 3 / 7, seed=0, number=number)) for number in range(1, 50)]
    assert set(counts) == {6}
    counts = [len(drawn_rows(prompts, 0.5, seed=0, number=number)) for number in range(1, 400)]
    assert set(counts) == {6, 7}
    assert np.mean(counts) == pytest.approx(6.5, abs=0.1)
    again = [drawn_rows(prompts, 0.5, seed=0, number=number) for number in (3, 4)]
    assert again == [drawn_rows(prompts, 0.5, seed=0, number=number) for number in (3, 4)]
    assert len({drawn_rows(prompts, 0.5, seed=seed, number=1) for seed in range(20)}) > 10


def test_advantages_are_of_what_the_student_has_written():
    """Beside given answers, of other numbers in every group; mini-batches are cut by tasks."""
    group = RecordingGroup()
    options = [
        *SFT, "distillation.on_policy_fraction=0.5", "reward.answer_key=answer", "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "algorithm.rollout_is_threshold=2.0",
    ]
    fit(PPOTrainer, configure("unused", *options), group, reward=lambda response, answer: float(len(response)))
    for update in group.updates:
        for step in range(2):
            samples = [s for share in update for micro in share[step].micro_batches for s in micro]
            assert len({sample.id.row for sample in samples}) == 2
            for sample in samples:
                given = sample.status == "given"
                assert ("sft" in sample.signals) == given
                assert ("advantages" in sample.signals) == (not given)
                assert ("old_logprobs" in sample.signals) == (not given)


@pytest.mark.slow
def test_a_warm_up_by_sft_has_a_rate_of_its_own_and_no_teacher(tmp_path):
    student, asked = make_tiny_model(tmp_path / "student", layers=1), []
    optim, sft = "actor_rollout_ref.actor", "actor_rollout_ref.actor.optim_sft"
    config = configure(
        student, "trainer.warmup_steps_sft=4", "trainer.total_training_steps=14", f"{optim}.optim.lr=0.01",
        f"{sft}.lr=0.1", f"{sft}.lr_scheduler_type=linear", f"{sft}.lr_warmup_steps=2",
        f"{optim}.ppo_mini_batch_size=2", "distillation.on_policy_fraction=1",
    )
    teacher = LocalTeacher(lambda reading: (asked.append(reading.name), score(reading))[1])
    with testing.single_process_group():
        group = LocalGroup(config, respond=lambda request, version: np.array([5, 7], np.int32), num_updates=28)
        rows = fit(GKDTrainer, config, group, teacher=teacher).by_step
    for step in range(1, 15):
        assert ("actor/sft_loss" in rows[step]) == (step <= 4)
        assert ("actor/kl_loss" in rows[step]) == (step > 4)
    assert len(asked) == 10 * BATCH * N
    rates = [rows[step]["actor/lr"] for step in range(1, 15)]  # of the second optimizer step of each
    np.testing.assert_allclose(rates[:4], [0.1, 0.1 * 5 / 6, 0.1 * 3 / 6, 0.1 * 1 / 6])
    np.testing.assert_allclose(rates[4:], [0.01] * 10)  # a tenth of 20 is 2: the first of them has half of it
    assert group.actor.updates_done == 28


def test_the_rate_behind_a_warm_up_begins_low(tmp_path):
    student = make_tiny_model(tmp_path / "student", layers=1)
    config = configure(student, "trainer.warmup_steps_sft=2", "actor_rollout_ref.actor.optim.lr=0.01")
    with testing.single_process_group():
        group = LocalGroup(config, respond=None, num_updates=42)
        for left, rise in ((40, [0.25, 0.5, 0.75]), (30, [1 / 3, 2 / 3]), (21, [1 / 3, 2 / 3]), (5, [0.5]), (1, [0.5])):
            group.actor.num_updates, rates = 2 + left, []
            for group.actor.updates_done in range(2, 2 + left):
                rates.append(group.actor.learning_rate())
            np.testing.assert_allclose(rates, [*(0.01 * share for share in rise), *[0.01] * (left - len(rise))])


@pytest.mark.slow
def test_the_teacher_and_the_cross_entropy_may_share_a_micro_batch(tmp_path):
    """Each term is a mean over the tokens that it is of."""
    student = make_tiny_model(tmp_path / "student", layers=1)
    config = configure(
        student, "distillation.on_policy_fraction=0.5", "distillation.sft_coef=0.5", "trainer.total_training_steps=1",
    )
    with testing.single_process_group():
        group = LocalGroup(config, respond=lambda request, version: np.array([5, 7], np.int32))
        [row] = fit(GKDTrainer, config, group, teacher=LocalTeacher(score)).rows
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    divergences, entropies = [], []
    for sample in group.trained[0]:
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0].double()
        q = logits.log_softmax(-1)[sample.positions - 1]
        p = torch.from_numpy(sample.topk("teacher").logprobs).double()
        divergences += (p.exp() * (p - q)).sum(1).tolist()
        if sample.status == "given":
            entropies += (-q[torch.arange(len(q)), sample.trained_ids]).tolist()
    assert row["actor/kl_loss"] == pytest.approx(np.mean(divergences), rel=1e-5)
    assert row["actor/sft_loss"] == pytest.approx(np.mean(entropies), rel=1e-5)
    expected = np.mean(divergences) + 0.5 * np.mean(entropies)
    assert row["actor/loss"] == pytest.approx(expected, rel=1e-5)
    assert math.isfinite(row["actor/distillation/overlap_ratio"])


def test_a_held_out_completion_that_repeats_itself_is_not_ended():
    """It is measured as it is: an ended one would lose its answer."""
    group, counts = RecordingGroup(), []
    generate = group.generate
    group.generate = lambda requests, sampling: (counts.append(sampling.repetitions), generate(requests, sampling))[1]
    options = [
        "data.response_key=null", "actor_rollout_ref.rollout.end_repetitions=3", "trainer.total_training_steps=1",
        "trainer.test_freq=1", "data.val_files=unused",
    ]  # fmt: skip
    fit(GKDTrainer, configure("unused", *options), group, teacher=LocalTeacher(score), val_prompts=tasks(1))
    assert counts == [None, 3, None]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.response_key=null", "distillation.on_policy_fraction=0.5"], "on_policy_fraction: needs"),
        (["data.response_key=null", "distillation.sft_coef=1"], "distillation.sft_coef: needs data.response_key"),
        (["data.response_key=null", "trainer.warmup_steps_sft=3"], "trainer.warmup_steps_sft: needs data.response_key"),
        (["distillation.on_policy_fraction=1.5"], "distillation.on_policy_fraction"),
        ([*SFT, "data.teacher_prompt_key=hint"], "data.teacher_prompt_key: needs distillation.enabled=true"),
        (["data.max_teacher_prompt_length=9"], "data.max_teacher_prompt_length: needs data.teacher_prompt_key"),
        (["data.teacher_prompt_key=hint", "data.loss_mask=all"], "data.loss_mask: must be answer with"),
        ([*SFT, "distillation.sft_coef=0"], "distillation.sft_coef: must be above 0"),
        (["distillation.as_reward=true"], "distillation.as_reward: must be false with data.response_key"),
        (["distillation.loss_mode=k2"], "distillation.loss_mode: must use none of k1, k2, k3"),
        (["distillation.sft_coef=1", "distillation.temperature=2"], "distillation.temperature: must be 1"),
        (["data.loss_mask=prompt"], "data.loss_mask"),
        (["data.loss_mask=all", "actor_rollout_ref.teacher.chat_template=x"], "data.loss_mask: must be answer"),
    ],
)
def test_what_does_not_go_together_is_named(overrides, message):
    with pytest.raises((ConfigError, SeveralErrors), match=message):
        configure("unused", *overrides)


@pytest.mark.slow
def test_the_divergence_of_each_quarter_and_of_the_first_and_last_update(tmp_path):
    """In a micro-batch with answers of all lengths, some without the teacher's scores."""
    student = make_tiny_model(tmp_path / "student", layers=1)
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    config = configure(student, "trainer.total_training_steps=1", mini, "actor_rollout_ref.actor.optim.lr=1e-12")
    with testing.single_process_group():
        group = LocalGroup(config, respond=None, num_updates=2)
        [row] = fit(GKDTrainer, config, group, teacher=LocalTeacher(score)).rows
        samples = [sample for samples in group.trained for sample in samples]
        found = group.actor.compute_divergences(tuple((sample,) for sample in samples))
    quarters = {number: [] for number in range(4)}
    for sample in samples:
        for place, value in enumerate(found[sample.id][:, 0]):
            quarters[4 * place // sample.num_trained].append(value)
    for number, values in quarters.items():
        assert row[f"actor/distillation/forward_kl/q{number + 1}"] == pytest.approx(np.mean(values), rel=1e-4)
    halves = [np.mean(np.concatenate([found[s.id][:, 0] for s in part])) for part in group.trained]
    ends = [row[f"actor/kl_loss/{name}_update"] for name in ("first", "last")]
    assert ends == pytest.approx(halves, rel=1e-4)


def test_the_limit_of_answers_grows_with_the_schedule():
    group, limits = RecordingGroup(), []
    generate = group.generate
    group.generate = lambda requests, sampling: (limits.append(sampling.max_tokens), generate(requests, sampling))[1]
    schedule = "data.max_response_length_schedule={2: 3, 4: 6}"
    options = ["data.response_key=null", schedule, "trainer.total_training_steps=5"]
    fit(GKDTrainer, configure("unused", *options), group, teacher=LocalTeacher(score))
    assert limits == [8, 3, 3, 6, 6]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.warmup_steps_sft=4"], "trainer.warmup_steps_sft=4: all 4 steps of the run train on given"),
        (["data.max_response_length_schedule={1: 3, 5: 6}"], "has only 4 steps; got {1: 3, 5: 6}"),
        (["trainer.warmup_steps_sft=3"], ""), ([*SFT, "trainer.warmup_steps_sft=4"], ""),
        (["data.max_response_length_schedule={1: 3, 4: 6}"], ""),
        ([f"{OPTIM}.lr_warmup_steps=9", f"{OPTIM}.lr=0.5", "actor_rollout_ref.actor.ppo_mini_batch_size=2"],
         f"{OPTIM}.lr_warmup_steps=9: the learning rate does not reach {OPTIM}.lr=0.5 in the 8 optimizer steps of the "
         "run (trainer.total_training_steps=4)"),
        ([f"{OPTIM}.lr_warmup_steps=4"], ""),
        (["trainer.warmup_steps_sft=1", f"{OPTIM}_sft.lr_warmup_steps=2", f"{OPTIM}.lr_warmup_steps=3"],
         f"{OPTIM}_sft.lr_warmup_steps=2: the learning rate does not reach {OPTIM}_sft.lr=1e-05 in the 1 optimizer"),
    ],
)
def test_settings_for_steps_that_the_run_does_not_have_are_logged(caplog, overrides, message):
    config = configure("unused", *overrides)
    warn_about_steps(config, 4)
    assert message in caplog.text
    assert bool(message) == bool(caplog.text)
    caplog.clear()
    warn_about_steps(config, 0)  # only validation
    assert not caplog.text


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [
        ("{1: 6, 3: 5}", "must not decrease; got {1: 6, 3: 5}"),
        ("{1: 9}", "must have limits of at most data.max_response_length (8); got {1: 9}"),
        *((given, f"{rules.LENGTH_SCHEDULE['rule']}; got {shown or given}") for given, shown in (
            ("{0: 4}", ""), ("{1: 0}", ""), ("4", ""), ("[4, 8]", ""), ("null", "None"), ("{1: null}", "{1: None}"),
            ("{1: 4.0}", ""), ("{1.5: 4}", ""), ("{true: 4}", "{True: 4}"), ("{1: true}", "{1: True}"),
            ("{1: {2: 3}}", ""), ("{a: 4}", "{'a': 4}"),
        )),
    ],
)
def test_a_schedule_of_limits_that_cannot_be_is_refused(schedule, rule):
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'{SCHEDULE}: {rule}')}$"):
        configure("unused", f"{SCHEDULE}={schedule}")


@pytest.mark.parametrize("step", ["1", "last"])
def test_a_step_of_a_schedule_as_a_dotted_key_is_refused_with_the_form(step):
    rule = re.escape(f"{SCHEDULE}: {rules.LENGTH_SCHEDULE['rule']}; got {{'{step}': 8}}")
    with pytest.raises(ConfigError, match=rf"^{rule}$"):
        configure("unused", f"{SCHEDULE}.{step}=8")

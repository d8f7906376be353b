"""The seam between PPO and GKD, and what must never happen around it. Faults come from fakes, on demand."""

import dataclasses
import inspect
import itertools
import re
import time

import numpy as np
import pytest

from hybrid_gkd.config import updates_per_step
from hybrid_gkd.errors import BadTeacherReply, TeacherError, TrainingError
from hybrid_gkd.models.spec import ModelSpec, training_flops
from hybrid_gkd.ppo.step_metrics import step_metrics
from hybrid_gkd.ppo.steps import request_seeds, total_steps
from hybrid_gkd.ppo.token_weighting import Weighting
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.testing import LocalTeacher, NumberTokenizer, RecordingGroup, make_sample, tail_of, tiny_config
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Rollout, Task, TopK, with_tasks

NUM_PROMPTS, GROUP_SIZE = 6, 2
SIZE = ModelSpec(
    parameters=10**9, kv_bytes_per_token=0, embedding_parameters=10**8, head_parameters=10**8, attention_width=10**5
)


def config(*overrides):
    return tiny_config(
        "data.train_batch_size=3", "data.max_prompt_length=8", "data.max_response_length=8",
        f"actor_rollout_ref.rollout.n={GROUP_SIZE}", *overrides,
    )  # fmt: skip


def place(name):
    """Return the place of a sample in its rollout, by its id or the name of its reading."""
    row, number = map(int, re.findall(r"\d+", str(name)))
    return (row - 1) * GROUP_SIZE + number


def name(place):
    return f"row {place // GROUP_SIZE + 1}, sample {place % GROUP_SIZE}"


def pairs(rollout):
    return with_tasks(rollout.tasks, rollout.samples)


def scores(reading):
    """Scores that tell of which sample they are."""
    ids = np.full((len(reading.positions), 1), place(reading.name), np.int32)
    logprobs = np.full(ids.shape, -0.5, np.float32)
    return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail_of(logprobs), sampled_logprobs=logprobs[:, 0])


def make(cls, *overrides, **options):
    prompts = [
        Task(index=i, token_ids=np.arange(i + 1, dtype=np.int32), text=str(i), answer="2")
        for i in range(NUM_PROMPTS)
    ]
    group = RecordingGroup()
    trainer = cls(
        config(*overrides), group=group, tokenizer=NumberTokenizer(), train_prompts=prompts, val_prompts=[],
        tracking=None, store=None,
        **{"reward": lambda response, answer: float(len(response.split()) == int(answer))} | options,
    )
    samples = tuple(
        make_sample(task.index, number=number, prompt=task.token_ids, completion=range(number + 1))
        for task in prompts[:3] for number in range(GROUP_SIZE)
    )
    return trainer, group, Rollout(step=1, epoch=0, tasks=tuple(prompts[:3]), samples=samples)


def trained(group):
    return [place(sample.id) for sample in group.trained[-1]]


def test_gkd_overrides_exactly_one_method_of_ppo():
    methods = {name for name, _ in inspect.getmembers(PPOTrainer, inspect.isfunction)} - {"__init__"}
    assert {name for name in methods if name in vars(GKDTrainer)} == {"_update_actor"}


def test_gkd_trains_every_sample_with_its_own_scores():
    teacher = LocalTeacher(scores, delay=None)
    teacher.drain_metrics = lambda: TeacherMetrics(
        requests=[(0.1, 0.2)], complete_until=0.3, tokens=10, scored_tokens=5
    )
    trainer, group, rollout = make(GKDTrainer, teacher=teacher)
    trainer.generation.on_finished[0](1, pairs(rollout)[4:])  # these finished early
    trainer.generation.on_finished[0](1, pairs(rollout)[:2])
    submit = teacher.submit
    teacher.submit = lambda readings: (submit(readings), teacher.answer())[0]  # the rest, then the answers
    metrics = trainer._update_actor(rollout)
    assert trained(group) == [0, 1, 2, 3, 4, 5]
    for share in group.updates[0]:
        assert share[0].num_tokens == sum(sample.num_trained for sample in rollout.samples)
        for micro_batch in share[0].micro_batches:
            for item in micro_batch:
                assert set(item.topk("teacher").ids.ravel()) == {place(item.id)}
    assert metrics["teacher/latency"] == pytest.approx(0.1)


def test_the_teacher_gets_prompts_behind_its_own_template():
    """And the student its own."""
    seen = []
    teacher = LocalTeacher(lambda reading: (seen.append(reading), scores(reading))[1])
    trainer, _, _ = make(GKDTrainer, teacher=teacher)
    prompts = trainer.generation.tasks
    trainer.generation.tasks = [dataclasses.replace(p, teacher_ids=p.token_ids + 100) for p in prompts]
    rollout = trainer.generation.rollout(1)
    assert len(seen) == len(rollout.samples) == 3 * GROUP_SIZE
    readings = {reading.name: reading for reading in seen}
    for task, sample in pairs(rollout):
        np.testing.assert_array_equal(sample.tokens[: sample.prompt_length], task.token_ids)
        reading = readings[str(sample.id)]
        np.testing.assert_array_equal(reading.token_ids, [*(task.token_ids + 100), *sample.trained_ids])
        np.testing.assert_array_equal(reading.token_ids[reading.positions], sample.trained_ids)


def test_what_is_scored_is_trained_while_the_rest_is_still_being_scored():
    """The teacher answers two samples, and two more whenever the workers have trained what there was."""
    teacher = LocalTeacher(scores, delay=None)
    one_each = ["use_dynamic_bsz=false", "ppo_micro_batch_size_per_gpu=1"]
    trainer, group, rollout = make(
        GKDTrainer, *(f"actor_rollout_ref.actor.{override}" for override in one_each), teacher=teacher
    )
    trainer.generation.on_finished[0](1, pairs(rollout))
    teacher.answer(name(2), name(4))
    late, accumulate = [5, 1, 3, 0], group.accumulate
    group.accumulate = lambda parts: (accumulate(parts), teacher.answer(name(late.pop()), name(late.pop())))
    trainer._update_actor(rollout)
    parts = [*group.accumulated, [share[0] for share in group.updates[0]]]
    found = [[place(i.id) for batch in part for micro in batch.micro_batches for i in micro] for part in parts]
    assert [sorted(part) for part in found] == [[2, 4], [0, 3], [1, 5]]
    num_tokens = sum(sample.num_trained for sample in rollout.samples)
    for part in parts:
        assert {batch.num_tokens for batch in part} == {num_tokens}
        assert len({len(batch.micro_batches) for batch in part}) == 1
        for item in [i for batch in part for micro in batch.micro_batches for i in micro]:
            assert set(item.topk("teacher").ids.ravel()) == {place(item.id)}


@pytest.mark.parametrize(
    ("max_tokens", "shares_gpu", "accumulated"),
    [(16, False, []), (8, False, [[1]]), (6, False, [[1]]), (4, False, [[1], [1]]), (3, False, [[2]]), (4, True, [])],
)
def test_parts_are_whole_micro_batches_on_each_worker(max_tokens, shares_gpu, accumulated):
    """Six samples of 3 tokens; the last is scored when the trainer has begun to wait for it.

    Of five, with 3 tokens, four are two micro-batches on each worker, and one waits for the last. Two workers that
    share their GPUs with the teacher train all at once. Given is how many micro-batches the parts before the last have.
    """
    lengths = ["data.max_prompt_length=2", "data.max_response_length=1"]
    teacher = LocalTeacher(scores, delay=None)
    trainer, group, rollout = make(
        GKDTrainer, *lengths, f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max_tokens}", teacher=teacher,
        check_teacher=lambda: teacher.answer(name(5)), shares_gpu=shares_gpu,
    )
    samples = [make_sample(s.id.row, number=s.id.number, prompt=[0, 1], completion=[2]) for s in rollout.samples]
    rollout = dataclasses.replace(rollout, samples=tuple(samples))
    trainer.generation.on_finished[0](1, pairs(rollout))
    teacher.answer(*map(name, range(5)))
    trainer._update_actor(rollout)
    assert [sorted({len(share.micro_batches) for share in part}) for part in group.accumulated] == accumulated
    assert trained(group) == list(range(6))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1]])
def test_with_full_determinism_nothing_depends_on_when_scores_arrive(order):
    """The teacher gets the rollout in its order when it is complete, and the update begins when all is scored."""
    teacher, submitted = LocalTeacher(scores, delay=None), []
    trainer, group, rollout = make(
        GKDTrainer, "actor_rollout_ref.actor.fsdp_config.full_determinism=true",
        "actor_rollout_ref.teacher.server_ip=null", "actor_rollout_ref.teacher.model.path=unused", teacher=teacher,
    )
    assert trainer.generation.on_finished == []
    submit = teacher.submit

    def answer_in_order(readings):
        futures = submit(readings)
        submitted.extend(teacher.waiting)
        teacher.answer(*map(name, order))
        return futures

    teacher.submit = answer_in_order
    trainer._update_actor(rollout)
    assert submitted == [name(number) for number in range(6)]
    assert group.accumulated == []
    assert trained(group) == [0, 1, 2, 3, 4, 5]


def update_at_once(*overrides):
    """A GKD update whose teacher answers at once; the group and the metrics."""
    trainer, group, rollout = make(GKDTrainer, *overrides, teacher=LocalTeacher(scores))
    return group, trainer._update_actor(rollout)


ON_REWARDS = ["distillation.enabled=false", "reward.answer_key=answer"]
REWARDS = ["distillation.use_task_rewards=true", "reward.answer_key=answer"]
POLICY = ["distillation.loss_mode=k1", "distillation.use_policy_gradient=true"]
ONE_PROMPT = "actor_rollout_ref.actor.ppo_mini_batch_size=1"
TWO_STEPS = ["actor_rollout_ref.actor.ppo_mini_batch_size=2"]


@pytest.mark.parametrize(
    ("overrides", "rewards", "old_logprobs"),
    [
        ([], False, False), (TWO_STEPS, False, False),
        (REWARDS, True, False), ([*REWARDS, *TWO_STEPS], True, True),
        (POLICY, False, False), ([*POLICY, *TWO_STEPS], False, True),
    ],
)
def test_gkd_computes_what_its_loss_needs_and_no_more(overrides, rewards, old_logprobs):
    """Rewards only for task rewards; old log-probabilities only for a policy that moves within the rollout."""
    group, metrics = update_at_once(*overrides)
    items = [item for items in group.trained for item in items]
    assert len(items) == 6
    assert {"teacher" in item.signals for item in items} == {True}
    assert {"advantages" in item.signals for item in items} == {rewards}
    assert {"old_logprobs" in item.signals for item in items} == {old_logprobs}
    assert group.num_forwards == old_logprobs
    assert ("reward/mean" in metrics) == rewards


@pytest.mark.parametrize(
    ("unscored", "events"),
    [
        ((), ["start 1", "start 2", "end 1", "start 3", "end 2", "end 3"]),
        ((2, 3), ["start 1", "end 1", "start 2", "start 3", "end 2", "end 3"]),
    ],
)
def test_the_workers_get_a_mini_batch_during_the_step_before_if_it_is_scored(unscored, events):
    teacher = LocalTeacher(scores, delay=None)
    trainer, group, rollout = make(
        GKDTrainer, ONE_PROMPT, teacher=teacher, check_teacher=lambda: teacher.answer(*map(name, unscored))
    )
    found = record_steps(group)
    trainer.generation.on_finished[0](1, pairs(rollout))
    teacher.answer(*(name(place) for place in range(6) if place not in unscored))
    metrics = trainer._update_actor(rollout)
    assert found == events
    assert metrics["actor/loss"] == 2


@pytest.mark.parametrize("fails", [1, 2])
def test_weights_are_those_of_the_step_before_if_the_first_of_several_steps_is_refused(fails):
    """The next one has been sent by then; the workers refuse it too."""
    trainer, group, rollout = make(GKDTrainer, ONE_PROMPT, teacher=LocalTeacher(scores))
    found = record_steps(group, fails)
    with pytest.raises(TrainingError, match="not finite"):
        trainer._update_actor(rollout)
    assert found[-2:] == [f"start {fails + 1}", f"end {fails}"]
    assert trainer._weights_consistent == (fails == 1)


def record_steps(group, fails=None):
    """Return a list that gets the starts and ends of the group's optimizer steps; the loss of each is its number."""
    events, numbers = [], itertools.count(1)

    def start_update(batches, *, last):
        number = next(numbers)
        events.append(f"start {number}")

        def wait():
            events.append(f"end {number}")
            if number == fails:
                raise TrainingError("the loss is not finite")
            return [{"actor/loss": float(number)}]

        return wait

    group.start_update = start_update
    return events


def test_nothing_is_trained_when_one_sample_has_no_scores():
    def score(reading):
        if place(reading.name) == 3:
            raise BadTeacherReply("row 1 holds NaN")
        return scores(reading)

    trainer, group, rollout = make(GKDTrainer, teacher=LocalTeacher(score))
    trainer.generation.on_finished[0](1, pairs(rollout))
    with pytest.raises(BadTeacherReply, match="NaN"):
        trainer._update_actor(rollout)
    assert group.updates == []
    assert group.accumulated == []


def test_a_teacher_that_ended_is_noticed_while_waiting():
    def check():
        raise TeacherError("the teacher ended: killed")

    trainer, group, rollout = make(GKDTrainer, teacher=LocalTeacher(scores, delay=None), check_teacher=check)
    with pytest.raises(TeacherError, match="killed"):
        trainer._update_actor(rollout)
    assert group.updates == []


def test_a_silent_client_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr("hybrid_gkd.scoring.teacher_scorer.GRACE_SECONDS", 0.0)
    monkeypatch.setattr("hybrid_gkd.scoring.teacher_scorer.CHECK_SECONDS", 0.01)
    teacher = LocalTeacher(scores, delay=None)
    trainer, _, rollout = make(GKDTrainer, "actor_rollout_ref.teacher.request_timeout=0.05", teacher=teacher)
    with pytest.raises(TeacherError, match="6 samples"):
        trainer._update_actor(rollout)


@pytest.fixture
def said(monkeypatch, caplog):
    """Return the log of waits, which are logged at once."""
    monkeypatch.setattr("hybrid_gkd.runtime.waiting.FIRST_SECONDS", 0.001)
    caplog.set_level("INFO", "hybrid_gkd.runtime.waiting")
    return caplog


def wait_for_a_line(said):
    deadline = time.monotonic() + 60
    while not said.messages:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_wait_for_scores_says_how_many_are_missing_and_until_when(said):
    teacher = LocalTeacher(scores, delay=None)

    def check():
        wait_for_a_line(said)
        teacher.answer()

    trainer, _, rollout = make(GKDTrainer, teacher=teacher, check_teacher=check)
    trainer._update_actor(rollout)
    assert re.fullmatch(
        r"waiting for the teacher: 6 of 6 samples are not scored yet; a stand-in; since \S+, for 0 s now, until \S+ "
        r"\(actor_rollout_ref\.teacher\.request_timeout=600\)", said.messages[0],
    )


def test_a_reward_that_takes_long_is_said_with_its_row_and_what_it_raises_names_the_row(said):
    def reward(response, answer):
        wait_for_a_line(said)
        raise ValueError("it failed")

    trainer, group, rollout = make(PPOTrainer, reward=reward)
    with pytest.raises(TrainingError, match=r"^row 1 of the data: the reward reward raised ValueError: it failed "):
        trainer._update_actor(rollout)
    assert group.updates == []
    assert re.fullmatch(
        r"waiting for the reward function reward: 0 of 6 completions are scored, now row 1 of the data; "
        r"since \S+, for 0 s now", said.messages[0],
    )


@pytest.mark.parametrize(
    ("cls", "overrides", "ahead"),
    [(PPOTrainer, ["distillation.enabled=false", REWARDS[1]], 6), (GKDTrainer, [], 0), (GKDTrainer, REWARDS, 6)],
)
def test_rewards_are_begun_as_responses_are_finished(cls, overrides, ahead):
    """Where they are trained on."""
    teacher = {"teacher": LocalTeacher(scores)} if cls is GKDTrainer else {}
    trainer, _, _ = make(cls, *overrides, **teacher)
    drawn, begun = [], []
    trainer.generation.on_finished.append(lambda step, pairs: drawn.extend(sample.id for _, sample in pairs))
    trainer.rewards.begin = lambda pairs: begun.append(([sample.id for _, sample in pairs], list(drawn)))
    trainer.generation.rollout(1)
    assert sum(len(indices) for indices, _ in begun) == ahead
    for indices, before in begun:
        assert not set(indices) & set(before)
    assert all(len(before) < 6 for _, before in begun)


def test_ppo_gives_each_sequence_its_group_relative_advantage():
    trainer, group, rollout = make(PPOTrainer, "algorithm.norm_adv_by_std_in_grpo=false")
    metrics = trainer._update_actor(rollout)
    assert trained(group) == [0, 1, 2, 3, 4, 5]
    assert metrics["reward/mean"] == 0.5  # responses of one token are wrong, of two are right
    for share in group.updates[0]:
        for item in share[0].micro_batches[0]:
            expected = 0.5 if item.id.number else -0.5
            np.testing.assert_allclose(item.array("advantages"), np.full(item.num_trained, expected))


def test_remax_compares_with_the_greedy_answer_to_the_prompt():
    trainer, group, _ = make(PPOTrainer, "algorithm.adv_estimator=remax", *ON_REWARDS)
    sampled, lengths = [], [1, 2, 2, 1, 2, 1]  # of 6 responses; those of two tokens are right, as is one greedy answer
    generate, (_, rows) = group.generate, trainer.generation.sampler.batch(1)

    def respond(request, version):
        at, is_greedy = rows.tolist().index(request.id.row), sampled[-1].temperature == 0
        length = (1 + (at == 1)) if is_greedy else lengths[at * GROUP_SIZE + request.id.number]
        return np.zeros(length, np.int32)

    group.respond, group.generate = respond, lambda requests, sampling: (
        sampled.append(sampling), generate(requests, sampling)
    )[1]
    rollout = trainer.generation.rollout(1)
    assert [(len(rollout.greedy), len(rollout.samples)), len(sampled)] == [(3, 6), 2]
    metrics = trainer._update_actor(rollout)
    assert (metrics["reward/mean"], metrics["reward/greedy"]) == (0.5, pytest.approx(1 / 3))
    assert [i.array("advantages").tolist() for i in group.trained[-1]] == [[0], [1, 1], [0, 0], [-1], [1, 1], [0]]


AS_REWARD = ["distillation.as_reward=true", "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0"]


@pytest.mark.slow
def test_the_teacher_as_a_reward_of_each_token():
    """log p = -0.5 and log q = log 0.5 for all tokens: log-ratios are equal, so whitened they are 0 but for rewards."""
    group, metrics = update_at_once(*AS_REWARD)
    assert group.num_forwards == 1
    assert metrics["reward/teacher"] == pytest.approx(-0.5 - np.log(0.5))
    assert "reward/mean" not in metrics
    for item in group.trained[-1]:
        assert "teacher" in item.signals
        np.testing.assert_allclose(item.array("advantages"), 0, atol=1e-3)
        np.testing.assert_allclose(item.array("old_logprobs"), np.log(0.5))
    group, metrics = update_at_once(*AS_REWARD, *REWARDS, "distillation.distillation_loss_coef=2")
    log_ratio = 2 * (-0.5 - np.log(0.5))
    rewards = {i: np.full(i % 2 + 1, log_ratio) + np.array([0, i % 2])[-(i % 2) - 1 :] for i in range(6)}
    together = np.concatenate(list(rewards.values()))
    for item in group.trained[-1]:
        want = (rewards[place(item.id)] - together.mean()) / together.std(ddof=1)
        np.testing.assert_allclose(item.array("advantages"), want, rtol=1e-4)
    assert metrics["reward/mean"] == 0.5


def test_the_teacher_as_a_reward_beside_the_greedy_answer():
    """Which the teacher scores too: a token is compared with what the greedy answer has from its position on."""
    trainer, group, _ = make(
        GKDTrainer, "distillation.as_reward=true", "algorithm.adv_estimator=remax", REWARDS[1],
        "distillation.use_task_rewards=true", teacher=LocalTeacher(scores),
    )
    _, rows = trainer.generation.sampler.batch(1)
    drawn, lengths = group.generate, [3, 1, 2, 2, 1, 2]  # one greedy answer of three tokens, and two of two

    def respond(request, version):
        at = rows.tolist().index(request.id.row)
        drawn_length = 2 + (at == 0) if group.greedy else lengths[at * GROUP_SIZE + request.id.number]
        return np.zeros(drawn_length, np.int32)

    def generate(requests, sampling):
        group.greedy = sampling.temperature == 0
        yield from drawn(requests, sampling)

    group.respond, group.generate = respond, generate
    rollout = trainer.generation.rollout(1)
    assert [sample.id for sample in rollout.greedy] == [(1, row, GROUP_SIZE) for row in rows]
    metrics = trainer._update_actor(rollout)
    assert metrics["reward/teacher"] == pytest.approx(-0.5 - np.log(0.5))
    assert metrics["reward/greedy"] == pytest.approx(2 / 3)  # answers of two tokens are right
    assert len(group.trained[-1]) == 6
    for index, item in enumerate(group.trained[-1]):
        length = lengths[index]
        right = [float(length == 2), float(index >= GROUP_SIZE)]  # of the answer and of the greedy one
        other = 3 if index < GROUP_SIZE else 2
        left = [max(length - at, 0) - max(other - at, 0) for at in range(length)]
        want = right[0] - right[1] + (-0.5 - np.log(0.5)) * np.array(left)
        np.testing.assert_allclose(item.array("advantages"), want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_teacher_as_a_reward_for_a_critic_to_learn():
    """Its values are 1/4; of its warm-up only the critic learns."""
    overrides = ["distillation.as_reward=true", "algorithm.adv_estimator=gae", "algorithm.lam=0.5", REWARDS[1]]
    log_ratio = -0.5 - np.log(0.5)
    for more, score in ([], 0.0), (["distillation.use_task_rewards=true"], 1.0):
        group, metrics = update_at_once(*overrides, *more)
        (items,) = [[i for share in batch for part in share for m in part.micro_batches for i in m]
                    for batch in group.critic_updates]  # fmt: skip
        for item in items:
            if len(item.trained_ids) == 2:  # right, where that counts
                last = log_ratio + score - 0.25
                first = log_ratio + 0.25 - 0.25 + 0.5 * last
                np.testing.assert_allclose(item.array("returns"), np.array([first, last]) + 0.25, rtol=1e-5)
        assert metrics["critic/values/mean"] == 0.25
        assert all("advantages" in item.signals for item in group.trained[-1])
    group, metrics = update_at_once(*overrides, "trainer.critic_warmup=1")
    assert (len(group.critic_updates), group.trained) == (1, [])
    assert metrics.keys() >= {"reward/teacher", "critic/vf_loss"}


def test_the_kl_to_the_reference_beside_the_teacher_as_a_reward():
    for more in ([], ["actor_rollout_ref.actor.use_kl_loss=true"]):
        group, _ = update_at_once(
            "distillation.as_reward=true", "algorithm.norm_adv_by_std_in_grpo=false", *more,
            "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5",
        )
        assert (group.num_forwards, group.events.count(("ref",))) == (1, 1)
        token = -0.5 - np.log(0.5) - 0.5 * (np.log(0.5) - np.log(0.125))
        for item in group.trained[-1]:  # sums of one and of two tokens' rewards, relative to their mean
            want = token / 2 * (1 if item.id.number else -1)
            np.testing.assert_allclose(item.array("advantages"), want, rtol=1e-5)


def test_a_log_ratio_beyond_the_clamp_counts_as_the_limit():
    group, metrics = update_at_once(
        "distillation.as_reward=true", "distillation.loss_max_clamp=0.1", "algorithm.norm_adv_by_std_in_grpo=false"
    )
    assert metrics["actor/distillation/clamp_share"] == 1
    assert metrics["reward/teacher"] == pytest.approx(-0.5 - np.log(0.5))
    for item in group.trained[-1]:  # sums of one and of two tokens' rewards, relative to their mean
        np.testing.assert_allclose(item.array("advantages"), 0.05 if item.id.number else -0.05, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "factors"), [("linear", [1, 0.75, 0.25]), ("cosine", [1, 0.8535534, 0.1464466])])
def test_the_coefficient_falls_towards_0_with_the_steps(schedule, factors):
    for step, factor in zip((1, 2, 4), factors, strict=True):
        trainer, group, rollout = make(
            GKDTrainer, f"distillation.distillation_loss_coef_schedule={schedule}",
            "distillation.distillation_loss_coef=0.5", "trainer.total_training_steps=4", teacher=LocalTeacher(scores),
        )
        metrics = trainer._update_actor(dataclasses.replace(rollout, step=step))
        assert metrics["actor/distillation/coef"] == pytest.approx(0.5 * factor)
        for item in group.trained[-1]:
            found = item.signals.get("teacher_weights", np.ones(item.num_trained))
            np.testing.assert_allclose(found, np.full(item.num_trained, factor), rtol=1e-6)
    group, metrics = update_at_once()
    assert not any("teacher_weights" in item.signals for item in group.trained[-1])
    assert "actor/distillation/coef" not in metrics


@pytest.mark.parametrize("cls", [PPOTrainer, GKDTrainer])
@pytest.mark.parametrize("updates", [[], TWO_STEPS])
def test_responses_count_the_same_where_they_are_to(cls, updates):
    """Responses of one and of two tokens; the factors of a mini-batch sum to its number of tokens."""
    options = {"teacher": LocalTeacher(scores)} if cls is GKDTrainer else {}
    mode = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    trainer, group, rollout = make(cls, mode, *updates, **options)
    trainer._update_actor(rollout)
    batches = [[share[i] for share in group.updates[-1]] for i in range(len(group.updates[-1][0]))]
    for parts in batches:
        items = [item for part in parts for micro in part.micro_batches for item in micro]
        for item in items:
            length = len(item.trained_ids)
            want = parts[0].num_tokens / (len(items) * length)
            np.testing.assert_allclose(item.array("weights"), np.full(length, want), rtol=1e-6)


def test_mini_batches_and_epochs_cut_the_rollout_by_prompts():
    trainer, group, rollout = make(
        PPOTrainer, "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=2"
    )
    metrics = trainer._update_actor(rollout)
    assert [batch.num_tokens for batch in group.updates[0][0]] == [6, 3, 6, 3]
    assert group.num_forwards == 1
    assert metrics["actor/lr"] == pytest.approx(0.3)  # of the last optimizer step
    assert updates_per_step(trainer.config.data.train_batch_size, trainer.config.actor_rollout_ref.actor) == 4


PARTS = {"compute": 0.5, "optimizer_step": 0.1, "copies": 0.05}


@pytest.mark.parametrize(
    ("devices", "size", "found"),
    [
        (["NVIDIA H200"] * 2, SIZE, True),
        (["NVIDIA H200", "a new one"], SIZE, False),
        (["cpu"] * 2, SIZE, False),
        (["NVIDIA H200"] * 2, dataclasses.replace(SIZE, has_experts=True), False),
    ],
)
def test_utilization_is_of_all_that_was_trained_and_of_all_gpus(devices, size, found):
    _, _, rollout = make(PPOTrainer)
    metrics = step_metrics(
        config("actor_rollout_ref.actor.ppo_epochs=3"), rollout,
        {"timing/update_actor": 0.75} | {f"timing/update_actor/{part}": seconds for part, seconds in PARTS.items()},
        devices=devices, spec=lambda: size,
    )
    assert metrics["timing/step"] == 0.75
    assert metrics["timing/update_actor/other"] == pytest.approx(0.1)
    assert ("perf/mfu" in metrics) == found
    if found:
        lengths = [s.num_tokens for s in rollout.samples]
        flops = 3 * training_flops(SIZE, lengths, sum(sample.num_trained for sample in rollout.samples))
        assert metrics["perf/mfu"] == pytest.approx(flops / 0.5 / (2 * 989e12))


@pytest.mark.slow
def test_steps_come_from_epochs_unless_given():
    tasks = [Task(index=row, token_ids=np.zeros(1, np.int32), text="") for row in range(7)]
    assert total_steps(config("trainer.total_epochs=3"), tasks) == 7
    assert total_steps(config("trainer.total_epochs=3", "trainer.total_training_steps=4"), tasks) == 4
    halves = [dataclasses.replace(task, file="b", weight=0.5) if task.index > 2 else task for task in tasks]
    assert total_steps(config("trainer.total_epochs=3"), halves) == 5


def test_seeds_differ_by_sample_and_step_and_are_the_same_on_every_run():
    seeds = [request_seeds(0, step, 100) for step in range(3)]
    assert len({seed for step in seeds for seed in step}) == 300
    assert seeds[1] == request_seeds(0, 1, 100)
    assert seeds[1] != request_seeds(1, 1, 100)
    assert all(0 <= seed < 2**31 for seed in seeds[0])


def test_the_teacher_and_the_student_read_what_is_selected_by_position():
    """The first half of each completion, which is one token here; validations and metrics of lengths see the whole."""
    seen = []
    teacher = LocalTeacher(lambda reading: (seen.append(reading), scores(reading))[1])
    options = ("distillation.token_weights=position", "distillation.token_weights_kwargs.fraction=0.5")
    trainer, group, rollout = make(GKDTrainer, *options, teacher=teacher)
    trainer.generation.on_finished[0](1, pairs(rollout)[2:])
    metrics = trainer._update_actor(rollout)
    assert {reading.name for reading in seen} == {str(sample.id) for sample in rollout.samples}
    for reading in seen:
        assert reading.positions.tolist() == [len(reading.token_ids) - 1]
    assert trained(group) == [0, 1, 2, 3, 4, 5]
    for sample in group.trained[-1]:
        assert sample.num_trained == 1
        assert sample.num_tokens == sample.prompt_length + 1
        assert "token_weights" not in sample.signals
    assert metrics["actor/distillation/selected_fraction"] == pytest.approx(6 / 9)
    assert "teacher/end_logprob" not in metrics


def test_the_selected_fraction_is_of_the_tokens_that_are_not_rejected():
    """Workers select half of the tokens of weight 1, here one of two, which is one of the four tokens."""
    options = ("distillation.token_weights=student_entropy", "distillation.token_weights_kwargs.fraction=0.5")
    teacher = TopK(
        ids=np.zeros((4, 1), np.int32), logprobs=np.zeros((4, 1), np.float32),
        tail_logprobs=np.full(4, -np.inf, np.float32), sampled_logprobs=np.zeros(4, np.float32),
    )
    whole = make_sample(completion=range(4), teacher=teacher)
    rejected = whole.with_signals(weights=np.array([1, 0, 0, 1], np.float32))
    weighting = Weighting(config(*options))
    assert weighting.metrics([whole], [whole]) == {"actor/distillation/selected_fraction": 2 / 4}
    assert weighting.metrics([whole], [rejected]) == {"actor/distillation/selected_fraction": 1 / 4}


def test_a_store_has_the_scores_of_whole_completions(tmp_path):
    seen = []
    teacher = LocalTeacher(lambda reading: (seen.append(reading), scores(reading))[1])
    options = ("distillation.token_weights=position", "distillation.token_weights_kwargs.fraction=0.5")
    cache = f"actor_rollout_ref.teacher.cache={tmp_path}"
    trainer, group, rollout = make(GKDTrainer, *options, cache, teacher=teacher)
    metrics = trainer._update_actor(rollout)
    assert sorted(len(reading.positions) for reading in seen) == [1, 1, 1, 2, 2, 2]
    assert [sample.num_trained for sample in group.trained[-1]] == [1] * 6
    assert metrics["actor/distillation/selected_fraction"] == pytest.approx(6 / 9)


def later_tokens(signals, *, factor):
    """Weights of one's own, from the positions and the teacher's scores."""
    assert signals.teacher.ids.shape == (signals.length, 1)
    return factor * (signals.positions > 0)


@pytest.mark.parametrize("alone", [True, False])
def test_weights_of_ones_own_are_computed_when_all_is_scored(alone):
    """So that their sum is known before the first backward pass. Beside another term no token is cut."""
    teacher = LocalTeacher(scores)
    options = [f"distillation.token_weights={__file__}:later_tokens", "distillation.token_weights_kwargs.factor=2"]
    options += [] if alone else ["actor_rollout_ref.actor.use_kl_loss=true"]
    trainer, group, rollout = make(GKDTrainer, *options, teacher=teacher)
    metrics = trainer._update_actor(rollout)
    assert group.accumulated == []
    samples = group.trained[-1]
    numbers = [[], [2]] if alone else [[0], [0, 2]]
    for sample, number in zip(samples, numbers * 3, strict=True):
        assert sample.num_trained == len(number)
        assert ([] if alone and not number else sample.array("token_weights").tolist()) == number
        (share,) = {part.num_tokens for parts in group.updates[-1] for part in parts}
        factor = share / 6  # by the sum of the weights
        np.testing.assert_allclose(sample.array("weights/distillation"), np.array(number) * factor, rtol=1e-6)
    assert metrics["actor/distillation/selected_fraction"] == pytest.approx(3 / 9)
    assert metrics["teacher/end_logprob"] == pytest.approx(-0.5)
    assert trainer.config.needs_rollout_logprobs

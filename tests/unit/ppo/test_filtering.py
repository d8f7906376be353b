"""Dynamic sampling: which groups are left out, how a batch is refilled, and where a run is in its data afterwards."""

import logging
import re

import numpy as np
import pytest

from hybrid_gkd.config import BATCHES_AHEAD
from hybrid_gkd.data.sampler import PromptSampler
from hybrid_gkd.errors import HybridGKDError
from hybrid_gkd.launch.data_checks import describe_dropped_prompts
from hybrid_gkd.launch.plan import placement_lines
from hybrid_gkd.ppo import rollout_pipeline as pipeline_module
from hybrid_gkd.ppo.filtering import GROUP_METRICS, GroupCollector, informative_groups
from hybrid_gkd.ppo.resuming import changed_settings, learning_settings
from hybrid_gkd.ppo.rollout_pipeline import RolloutPipeline
from hybrid_gkd.ppo.steps import request_seeds
from hybrid_gkd.reporting.final_table import final_table
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.reward_functions import RewardFunction, one_by_one
from hybrid_gkd.scoring.rewards import RewardScorer
from hybrid_gkd.student.checkpoint_store import CheckpointStore, load_state
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
from hybrid_gkd.types import Rollout, Task, TopK

BATCH, N, NUM_PROMPTS = 3, 2, 10
FILTER = ("algorithm.filter_groups.enable=true", "distillation.use_task_rewards=true", "reward.answer_key=answer")
OWN_POOL = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=1")
DEPTHS = pytest.mark.parametrize("scheduler", BATCHES_AHEAD)
POOLS = pytest.mark.parametrize("pools", [(), OWN_POOL], ids=["hybrid", "separate"])


def has_signal(row):
    """Prompts 0 to 5 of 10 teach nothing."""
    return row > 5


def reward(response, answer):
    """A response is its seed and its number in the group."""
    return float(has_signal(int(answer)) and int(response.split()[1]) % 2)


def respond(request, version):
    return np.array([request.seed, request.id.number], np.int32)


def fit(steps, folder, *overrides, reward=reward, **options):
    """A run to its end; the trainer, and the error that ended it."""
    config = tiny_config(
        f"data.train_batch_size={BATCH}", "data.max_prompt_length=8", "data.max_response_length=8",
        f"actor_rollout_ref.rollout.n={N}", f"trainer.total_training_steps={steps}", "trainer.save_freq=2",
        "trainer.val_before_train=false", "trainer.test_freq=0", *FILTER, *overrides,
    )  # fmt: skip
    prompts = [
        Task(index=i, token_ids=np.full(1, i, np.int32), text=str(i), answer=str(i)) for i in range(NUM_PROMPTS)
    ]
    asked = []

    def score(reading):
        asked.append(reading)
        logprobs = np.full((len(reading.positions), 1), -0.5, np.float32)
        ids, tail = reading.token_ids[reading.positions, None], tail_of(logprobs)
        return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])

    trainer = GKDTrainer(
        config, group=RecordingGroup(respond), tokenizer=NumberTokenizer(), train_prompts=prompts, val_prompts=[],
        reward=reward, tracking=MetricRows(), store=CheckpointStore(folder, keep=None), teacher=LocalTeacher(score),
        settings=learning_settings(config, steps=steps), **options,
    )
    trainer.asked, failure = asked, None
    try:
        trainer.fit()
    except HybridGKDError as error:
        failure = error
    return trainer, failure


def plan(steps, size=BATCH):
    """Return per step: row, generation batch and place of its groups; number of batches; informative fraction."""
    sampler, number, found = PromptSampler(NUM_PROMPTS, size, True, 0), 0, []
    for _ in range(steps):
        kept, first = [], number + 1
        while len(kept) < BATCH:
            number += 1
            rows = sampler.batch(number)[1].tolist()
            kept += [(row, number, position) for position, row in enumerate(rows) if has_signal(row)]
        found.append((kept[:BATCH], number - first + 1, len(kept) / (size * (number - first + 1))))
    return found


def assert_trained(trainer, planned, size=BATCH):
    """Exactly these groups, all n of each, in order, with their own scores; the teacher saw no others."""
    group = trainer.group
    assert len(group.trained) == len(planned)
    for items, (kept, _, _) in zip(group.trained, planned, strict=True):
        assert [item.id for item in items] == [(number, row, i) for row, number, _ in kept for i in range(N)]
        prompts = [item.tokens[: item.prompt_length].tolist() for item in items]
        assert prompts == [[row] for row, _, _ in kept for _ in range(N)]
        assert [item.trained_ids[0] for item in items] == [
            request_seeds(0, number, size * N)[position * N + sample] for _, number, position in kept
            for sample in range(N)
        ]
        for item in items:
            np.testing.assert_array_equal(item.topk("teacher").ids[:, 0], item.trained_ids)
            assert (item.array("advantages") > 0).all() == bool(item.id.number % 2)
    assert len(trainer.asked) == len(planned) * BATCH * N


@pytest.mark.parametrize(
    ("values", "n", "expected"),
    [
        ([0, 0, 1, 1], 2, []), ([0, 1, 1, 1], 2, [0]), ([0, 0, 0, 1], 2, [1]), ([0.5, 0.5, 0.25], 3, [0]),
        ([0.1 + 0.2, 0.3], 2, [0]), ([-1, -1, -1, -1, -1, -2], 3, [1]), ([1, 2, 3], 1, []),
    ],
)  # fmt: skip
def test_a_group_without_a_signal_has_one_value_alone(values, n, expected):
    samples = [make_sample(i // n, number=i % n) for i in range(len(values))]
    assert informative_groups(samples, values) == [(1, row) for row in expected]


def test_metrics_of_a_response():
    config = tiny_config("data.max_response_length=8", "reward.overlong_buffer={enable: true, len: 4}")

    def score(response):
        value = float(response.text.split()[0])
        return {"score": value, "acc": value > 5} if len(response.text.split()) > 1 else value

    pairs = [
        (Task(index=i, token_ids=np.zeros(1, np.int32), text=""), make_sample(i, prompt=[0], completion=ids))
        for i, ids in enumerate([[7], [8, 8], [3] * 8])
    ]  # fmt: skip
    functions = {"custom": RewardFunction("custom", "mine", one_by_one(score))}
    scorer = RewardScorer(functions, NumberTokenizer(), config, weights={"custom": 1.0})
    found = {name: compute(scorer, pairs) for name, compute in GROUP_METRICS.items()}
    assert found == {"acc": [7.0, 1.0, 0.0], "score": [7.0, 8.0, 3.0], "seq_reward": [7.0, 8.0, 2.0]}
    for name in GROUP_METRICS:
        tiny_config(f"algorithm.filter_groups.metric={name}")


@pytest.mark.slow
@POOLS
@DEPTHS
def test_batches_are_refilled_with_groups_that_have_a_signal(scheduler, pools, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trainer, failure = fit(5, tmp_path, f"trainer.scheduler={scheduler}", *pools)
    assert failure is None
    planned = plan(5)
    assert_trained(trainer, planned)
    assert len({batches for _, batches, _ in planned}) > 1
    for step, (_, batches, share) in enumerate(planned, 1):
        row = trainer.tracking.by_step[step]
        assert row["training/num_gen_batches"] == batches
        assert row["training/groups_with_signal"] == pytest.approx(share)
        assert (row["reward/mean"], row["reward/all_groups"]) == (0.5, pytest.approx(share / 2))
        assert row["training/staleness"] == min(step - 1, BATCHES_AHEAD[scheduler])
    logged = "generation batches; a training batch needs 3"
    assert caplog.text.count(logged) == sum(batches - 1 for _, batches, _ in planned)
    extra = [sum(batches - 1 for _, batches, _ in planned[:step]) for step in (2, 4)]
    assert [load_state(tmp_path / f"global_step_{step}").extra_batches for step in (2, 4)] == extra


@pytest.mark.slow
@POOLS
@DEPTHS
def test_a_resumed_run_goes_on_behind_the_last_trained_batch(scheduler, pools, tmp_path):
    given = (f"trainer.scheduler={scheduler}", *pools)
    fit(3, tmp_path, *given)
    trainer, failure = fit(5, tmp_path, *given, resume_from=tmp_path / "global_step_2")
    assert failure is None
    assert_trained(trainer, plan(5)[2:])


@pytest.mark.slow
def test_without_the_filter_a_run_goes_on_at_the_same_place(tmp_path):
    fit(2, tmp_path)
    off = ("algorithm.filter_groups.enable=false",)
    trainer, _ = fit(4, tmp_path, *off, resume_from=tmp_path / "global_step_2")
    used = sum(batches for _, batches, _ in plan(2))
    sampler = PromptSampler(NUM_PROMPTS, BATCH, True, 0)
    for number, items in enumerate(trainer.group.trained, used + 1):
        rows = np.repeat(sampler.batch(number)[1], N)
        assert [item.tokens[: item.prompt_length][0] for item in items] == rows.tolist()
    assert "training/num_gen_batches" not in trainer.tracking.by_step[3]
    assert load_state(tmp_path / "global_step_4").extra_batches == used - 2


def test_what_is_beyond_a_full_batch_is_not_trained_on(tmp_path):
    trainer, failure = fit(3, tmp_path, "data.gen_batch_size=9")
    assert failure is None
    planned = plan(3, size=9)
    assert {batches for _, batches, _ in planned} == {1}
    assert max(share for _, _, share in planned) > 1 / 3
    assert_trained(trainer, planned, size=9)


def test_what_is_said_of_a_run_that_refills_its_batches(tmp_path):
    trainer, _ = fit(2, tmp_path, "data.gen_batch_size=9")
    config = trainer.config
    plan = "\n".join(placement_lines(config, device="cpu", engine="hf"))
    assert "(seq_reward) are replaced, with at most 10 generation batches of 9 prompts per step" in plan
    assert "further prompts" in describe_dropped_prompts(config, NUM_PROMPTS, 1)
    table = final_table(config, steps=2, wall_seconds=1.0, first=trainer.first_metrics, last=trainer.last_metrics)
    shares = [trainer.tracking.by_step[step]["reward/all_groups"] for step in (1, 2)]
    assert re.search(rf"reward/all_groups, first and last step +{shares[0]:.4f} -> {shares[1]:.4f}", table)


def test_too_few_groups_end_the_run_with_the_counts_and_a_way_out(tmp_path):
    def only_at_first(response, answer):
        seed, number = response.split()
        first = {str(s) for batch in (1, 2, 3) for s in request_seeds(0, batch, BATCH * N)}
        return float(seed in first and int(number) % 2)

    trainer, failure = fit(
        5, tmp_path, "algorithm.filter_groups.max_num_gen_batches=4", "trainer.save_freq=-1", reward=only_at_first
    )
    for part in (
        "step 4: 0 of 12 groups", "differ in seq_reward", "a training batch needs 3",
        "(algorithm.filter_groups.max_num_gen_batches=4)", "mean reward is 0:", "actor_rollout_ref.rollout.n",
        "algorithm.filter_groups.enable=false",
    ):  # fmt: skip
        assert part in str(failure)
    assert len(trainer.group.trained) == 3
    saved = load_state(tmp_path / "global_step_3")
    assert saved.extra_batches == 0
    other, _ = fit(3, tmp_path, "algorithm.filter_groups.max_num_gen_batches=9", resume_from=tmp_path / "global_step_3")
    assert changed_settings(saved.settings, other.settings) == []


def test_greedy_answers_stay_with_their_prompts(tmp_path):
    trainer, _ = fit(1, tmp_path, "algorithm.adv_estimator=remax")
    prompts, n = trainer.generation.tasks, N
    refill, rows = GroupCollector(trainer.config, trainer.rewards, 1), [(1, 6, 7), (8, 2, 9)]

    for number, batch in enumerate(rows):
        assert not refill.is_full
        refill.add(Rollout(
            step=1, epoch=0, tasks=tuple(prompts[row] for row in batch), extra_batches=number,
            samples=tuple(
                make_sample(row, batch=9 + number, number=i, completion=[row, i]) for row in batch for i in range(n)
            ),
            greedy=tuple(make_sample(row, batch=9 + number, number=n, completion=[100 + row, 0]) for row in batch),
        ))  # fmt: skip
    found = refill.rollout()
    assert [prompt.index for prompt in found.tasks] == [6, 7, 8]
    assert [(each.id.row, int(each.trained_ids[0])) for each in found.greedy] == [(6, 106), (7, 107), (8, 108)]
    assert found.extra_batches == 1


def test_a_generation_that_waits_for_rewards_is_not_taken_for_stuck(monkeypatch):
    """It waits here until the trainer has looked at it several times, each time later than the deadline."""
    looks, enough = [], pipeline_module.threading.Event()

    def look(futures, timeout):
        looks.append(futures)
        if len(looks) > 3:
            enough.set()
        return wait(futures, timeout)

    wait = pipeline_module.wait
    monkeypatch.setattr(pipeline_module, "wait", look)
    monkeypatch.setattr(pipeline_module, "CHECK_SECONDS", 0.01)

    def generate(step):
        with ahead.paused():
            assert enough.wait(60)
        return step

    ahead = RolloutPipeline(
        generate, depth=0, in_background=True, inactivity_timeout=Timeout(0.001, "key"), clock=Clock()
    )
    assert list(ahead(1, 1)) == [1]

"""Generation ahead of the update, on a stand-in for the workers: what is generated, trained and published when."""

import logging
import math
import shutil
import threading

import numpy as np
import pytest

from hybrid_gkd.config import BATCHES_AHEAD
from hybrid_gkd.data.sampler import PromptSampler
from hybrid_gkd.errors import (
    BadTeacherReply,
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    HybridGKDError,
    TrainingError,
    WorkerError,
)
from hybrid_gkd.models.spec import ModelSpec
from hybrid_gkd.ppo.importance import effective_sample_size, importance_weights
from hybrid_gkd.ppo.steps import request_seeds
from hybrid_gkd.student.checkpoint_store import Best, CheckpointStore, load_state
from hybrid_gkd.testing import LocalTeacher, MetricRows, NumberTokenizer, RecordingGroup, tail_of, tiny_config
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Task, TopK

BATCH, NUM_PROMPTS = 3, 9
VALIDATED = {
    "val/accuracy", "val/forward_kl", "val/reverse_kl", "val/response_length", "val/response_length/clip_ratio",
    "val/num_prompts", *(f"val/{name}/q{quarter}" for name in ("forward_kl", "reverse_kl") for quarter in (1, 3)),
}  # answers have two tokens
DEPTHS = pytest.mark.parametrize("scheduler", BATCHES_AHEAD)
STEPS = pytest.mark.parametrize("steps", [1, 2, 3, pytest.param(7, marks=pytest.mark.slow)])
OWN_POOL = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=1")
POOLS = pytest.mark.parametrize("pools", [(), OWN_POOL], ids=["hybrid", "separate"])


def make_teacher(fails_at=None):
    """Answers a little later and not in the order of the questions; its scores name the response."""

    def score(reading):
        completion = reading.token_ids[reading.positions]
        if completion[0] == fails_at:
            raise BadTeacherReply("row 1 holds NaN")
        logprobs = np.full((2, 1), -0.5, np.float32)
        ids, tail = completion[:, None], tail_of(logprobs)
        return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])

    return LocalTeacher(score, delay=0.01)


def fit(
    scheduler, steps, folder, *overrides, teacher=None, group=None, tracking=None, keep=None,
    prepare=lambda trainer: None, **options,
):  # fmt: skip
    """A run to its end; the trainer and the workers."""
    config = tiny_config(
        f"data.train_batch_size={BATCH}", "data.max_prompt_length=8", "data.max_response_length=8",
        f"trainer.total_training_steps={steps}", f"trainer.scheduler={scheduler}", "trainer.save_freq=0", *overrides,
    )  # fmt: skip
    prompts = [
        Task(index=i, token_ids=np.full(1, i, np.int32), text=str(i), answer="1") for i in range(NUM_PROMPTS)
    ]
    trainer = GKDTrainer(
        config, group=group or RecordingGroup(), tokenizer=NumberTokenizer(), train_prompts=prompts,
        val_prompts=prompts[:1], reward=lambda response, answer: 1.0, tracking=tracking or MetricRows(),
        store=CheckpointStore(folder, keep=keep), teacher=teacher or make_teacher(), **options,
    )
    failure = None
    prepare(trainer)
    try:
        trainer.fit()
    except HybridGKDError as error:
        failure = error
    return trainer, trainer.group, failure


def assert_trained(group, steps):
    """Exactly these steps' batches, in order, each sample once and with its own scores."""
    assert len(group.trained) == len(steps)
    for step, items in zip(steps, group.trained, strict=True):
        _, rows = PromptSampler(NUM_PROMPTS, BATCH, True, 0).batch(step)
        assert [item.tokens[: item.prompt_length].tolist() for item in items] == [[row] for row in rows]
        assert [item.trained_ids[0] for item in items] == request_seeds(0, step, BATCH)
        for item in items:
            np.testing.assert_array_equal(item.topk("teacher").ids[:, 0], item.trained_ids)


@DEPTHS
@STEPS
def test_every_batch_is_generated_once_and_trained_once_in_order(scheduler, steps, tmp_path):
    depth = BATCHES_AHEAD[scheduler]
    trainer, group, failure = fit(scheduler, steps, tmp_path)
    assert failure is None
    assert_trained(group, range(1, steps + 1))
    rows = trainer.tracking.by_step
    assert [rows[step]["training/staleness"] for step in range(1, steps + 1)] == [
        min(step - 1, depth) for step in range(1, steps + 1)
    ]
    expected, generated = [("publish", 0), ("generate", 0, 1), ("divergences", 0, 1)], 0  # before training
    for step in range(1, steps + 1):
        while generated < min(step + depth, steps):
            expected.append(("generate", step - 1, BATCH))
            generated += 1
        expected += [("update",), ("publish", step)]
    assert group.events == [*expected, ("generate", steps, 1), ("divergences", steps, 1)]


@DEPTHS
@STEPS
def test_a_pool_that_only_generates_draws_the_same_batches_with_the_same_weights(scheduler, steps, tmp_path):
    depth = BATCHES_AHEAD[scheduler]
    trainer, group, failure = fit(scheduler, steps, tmp_path, *OWN_POOL)
    assert failure is None
    assert_trained(group, range(1, steps + 1))
    rows = trainer.tracking.by_step
    assert [rows[step]["training/staleness"] for step in range(1, steps + 1)] == [
        min(step - 1, depth) for step in range(1, steps + 1)
    ]
    assert [event[1] for event in group.events if event[0] == "publish"] == list(range(steps + 1))
    generated = [event[1] for event in group.events if event[0] == "generate" and event[2] == BATCH]
    assert generated == [max(0, step - 1 - depth) for step in range(1, steps + 1)]
    assert "timing/wait_prev_gen" in rows[1]


@DEPTHS
@STEPS
def test_a_teacher_on_the_students_gpu_is_asked_when_the_next_generation_begins(scheduler, steps, tmp_path):
    depth, group = BATCHES_AHEAD[scheduler], RecordingGroup()
    step_of = {request_seeds(0, step, BATCH)[0]: step for step in range(1, steps + 1)}

    def ask(readings):
        steps_asked = [step_of.get(reading.token_ids[reading.positions[0]]) for reading in readings]
        group.events += [("ask", step) for step in steps_asked if step is not None]  # not those of validation
        return submit(readings)

    teacher = make_teacher()
    submit, teacher.submit = teacher.submit, ask
    _, _, failure = fit(scheduler, steps, tmp_path, teacher=teacher, group=group, shares_gpu=True)
    assert failure is None
    assert_trained(group, range(1, steps + 1))
    expected, generated = [], 0
    for step in range(1, steps + 1):
        while generated < min(step + depth, steps):
            expected += [("ask", generated)] if depth and generated else []
            expected.append(("generate",))
            generated += 1
        expected += [("ask", step)] if step == steps or not depth else []
        expected.append(("update",))
    validation = {("generate", 0, 1), ("generate", steps, 1)}
    events = [e for e in group.events if e[0] not in ("publish", "divergences") and e not in validation]
    assert [event[:1] if event[0] == "generate" else event for event in events] == expected


@pytest.mark.slow
@POOLS
@DEPTHS
def test_validation_answers_with_the_newest_weights_and_disturbs_nothing(scheduler, pools, tmp_path):
    _, group, _ = fit(scheduler, 4, tmp_path, "trainer.test_freq=1", *pools)
    assert [event[1] for event in group.events if event[0] == "generate" and event[2] == 1] == [0, 1, 2, 3, 4]
    assert_trained(group, range(1, 5))


@pytest.mark.slow
def test_what_the_final_table_compares_is_of_the_first_and_the_last_step_or_not_there(tmp_path):
    """Losses rise by one a step here; other validations than those before and after training are neither."""
    group = RecordingGroup()
    update = group.update
    group.update = lambda shares, last: [update(shares)[0] | {"actor/kl_loss": float(len(group.trained))}]
    late = ("trainer.val_before_train=false", "trainer.test_freq=2", "trainer.save_freq=3")
    trainer, _, _ = fit("sync", 5, tmp_path, *late, group=group)
    assert trainer.first_metrics == {"actor/kl_loss": 1.0}
    assert trainer.last_metrics.keys() == {"actor/kl_loss", *VALIDATED}
    assert trainer.last_metrics["actor/kl_loss"] == 5.0
    resumed, _, _ = fit("sync", 5, tmp_path, "trainer.test_freq=0", resume_from=tmp_path / "global_step_3", group=group)
    assert (resumed.first_metrics["actor/kl_loss"], resumed.last_metrics["actor/kl_loss"]) == (1.0, 7.0)
    assert not VALIDATED & {*resumed.first_metrics, *resumed.last_metrics}
    never_again, _, _ = fit("sync", 2, tmp_path, "trainer.test_freq=0")
    assert never_again.first_metrics.keys() >= VALIDATED
    assert not VALIDATED & never_again.last_metrics.keys()


@pytest.mark.slow
def test_val_only_validates_what_the_run_would_start_from_and_ends(tmp_path):
    """A new run, and a finished one with other settings for its batches, which do not matter here."""
    only = ("trainer.val_only=true", "trainer.val_before_train=false", "data.val_files=unused")
    trainer, group, _ = fit("one_step_off", 3, tmp_path, *only)
    assert group.events == [("publish", 0), ("generate", 0, 1), ("divergences", 0, 1)]
    assert trainer.last_metrics.keys() == VALIDATED
    fit("sync", 3, tmp_path, "trainer.save_freq=-1")
    other = ("data.train_batch_size=2", "data.seed=5")
    trainer, group, _ = fit("sync", 3, tmp_path, *only, *other, resume_from=tmp_path / "global_step_3")
    assert group.events == [("publish", 3), ("generate", 3, 1), ("divergences", 3, 1)]
    assert trainer.tracking.by_step[3]["val/forward_kl"] == 0.5


def falling(*values):
    """A group whose validation after step i has values[i - 1] as the divergence."""
    group = RecordingGroup()
    compute = group.compute_divergences
    group.compute_divergences = lambda shares: {
        index: found * 0 + values[group.version - 1] for index, found in compute(shares).items()
    }
    return group


BEFORE = ("trainer.val_before_train=false", "data.val_files=unused")
BEST = (*BEFORE, "trainer.best_metric=val/forward_kl", "trainer.test_freq=1")


def kept(folder):
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_beside_the_newest_and_known_after_a_resume(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    often = (*BEST, "trainer.save_freq=2")
    trainer, group, _ = fit("sync", 5, tmp_path, *often, keep=1, group=falling(3.0, 2.0, 1.0, 1.0, 4.0))
    assert group.saved == [1, 2, 3, 4, 5]
    assert kept(tmp_path) == [3, 5]
    assert trainer.best == Best(metric="val/forward_kl", value=1.0, step=3)
    assert load_state(tmp_path / "global_step_5").best == trainer.best
    assert caplog.text.count("new best validation") == 3
    trainer, group, _ = fit(
        "sync", 8, tmp_path, *often, keep=1, group=falling(0, 0, 0, 0, 0, 2.0, 0.5, 0.75),
        resume_from=tmp_path / "global_step_5",
    )
    assert (kept(tmp_path), trainer.best.step) == ([7, 8], 7)


@pytest.mark.slow
def test_without_a_save_frequency_only_the_best_and_the_last_are_saved(tmp_path):
    _, group, _ = fit("sync", 4, tmp_path, *BEST, "trainer.save_freq=-1", group=falling(2.0, 1.0, 1.5, 3.0))
    assert group.saved == [1, 2, 4]
    _, group, _ = fit("sync", 4, tmp_path / "never asked", *BEFORE, "trainer.test_freq=1", "trainer.save_freq=-1")
    assert group.saved == [4]


@pytest.mark.slow
def test_a_best_checkpoint_by_another_metric_or_that_is_gone_is_not_known_any_more(tmp_path):
    fit("sync", 2, tmp_path, *BEST, "trainer.save_freq=1", group=falling(1.0, 2.0))
    again = dict(resume_from=tmp_path / "global_step_2", group=falling(1.0, 2.0, 3.0))
    other = ("trainer.best_metric=val/reverse_kl", *BEFORE, "trainer.test_freq=1", "trainer.save_freq=1")
    trainer, _, _ = fit("sync", 3, tmp_path, *other, **again)
    assert trainer.best == Best(metric="val/reverse_kl", value=3.0, step=3)
    shutil.rmtree(tmp_path / "global_step_1")
    trainer, _, _ = fit("sync", 3, tmp_path, *BEST, "trainer.save_freq=1", **again)
    assert trainer.best.step == 3


@pytest.mark.slow
@POOLS
@DEPTHS
def test_a_resumed_run_trains_what_was_in_flight(scheduler, pools, tmp_path):
    fit(scheduler, 7, tmp_path, "trainer.save_freq=3", *pools)
    trainer, group, _ = fit(scheduler, 7, tmp_path, *pools, resume_from=tmp_path / "global_step_3")
    assert_trained(group, range(4, 8))
    staleness = [trainer.tracking.by_step[step]["training/staleness"] for step in range(4, 8)]
    assert staleness == [min(step - 4, BATCHES_AHEAD[scheduler]) for step in range(4, 8)]


@pytest.mark.slow
@POOLS
@DEPTHS
def test_a_batch_without_scores_ends_the_run_and_the_state_before_it_is_saved(scheduler, pools, tmp_path):
    failing = request_seeds(0, 3, BATCH)[1]
    trainer, group, failure = fit(
        scheduler, 7, tmp_path, *pools, "trainer.save_freq=-1", teacher=make_teacher(failing)
    )
    assert "row 1 holds NaN" in str(failure)
    assert_trained(group, [1, 2])
    assert group.saved == [2]
    assert load_state(trainer.checkpoint).step == 2
    _, group, _ = fit(scheduler, 7, tmp_path, *pools, resume_from=tmp_path / "global_step_2")
    assert_trained(group, range(3, 8))


@POOLS
@DEPTHS
def test_a_generation_that_fails_ends_the_run_and_the_last_state_is_saved(scheduler, pools, tmp_path):
    failing = request_seeds(0, 4, BATCH)[0]

    def respond(request, version):
        if request.seed == failing:
            raise WorkerError("rollout worker 0 died")
        return np.array([request.seed, request.id.row], np.int32)

    depth, group = BATCHES_AHEAD[scheduler], RecordingGroup(respond)
    _, _, failure = fit(scheduler, 7, tmp_path, *pools, "trainer.save_freq=-1", group=group)
    assert "rollout worker 0 died" in str(failure)
    trained = 3 - depth + (1 if pools and depth else 0)  # beside an update, the failure shows after it
    assert_trained(group, range(1, trained + 1))
    assert group.saved == [trained]


def within_the_step():
    error = DeviceMemoryError("phase optimizer_step: out of device memory within the step")
    error.weights_changed = True
    return error


@pytest.mark.parametrize(
    ("error", "overrides", "size", "saved"),
    [
        (WorkerError("worker 0 died"), [], 2, []),
        (TrainingError("loss nan; the step was not taken"), [], 2, [1]),
        (TrainingError("loss nan; the step was not taken"), ["actor_rollout_ref.actor.ppo_mini_batch_size=1"], 2, []),
        (DeviceMemoryError("phase update: worker 0 ran out"), [], 1, [1]),
        (DeviceMemoryError("phase update: worker 0 ran out"), [], 2, []),  # the other one waits in a collective
        (within_the_step(), [], 1, []),
    ],
    ids=["lost", "refused", "refused after others", "given up", "given up by one", "within the step"],
)
@POOLS
def test_weights_that_may_be_between_two_steps_are_not_saved(pools, error, overrides, size, saved, tmp_path):
    group = RecordingGroup()
    group.size, update = size, group.update

    def fail_at_step_2(shares, last):
        if sum(map(len, group.trained)) >= BATCH + bool(overrides):  # at its first or second mini-batch
            raise error
        return update(shares)

    group.update = fail_at_step_2
    _, _, failure = fit("sync", 3, tmp_path, *pools, *overrides, "trainer.save_freq=-1", group=group)
    assert failure is error
    assert group.saved == saved


@pytest.mark.slow
@POOLS
def test_a_failure_is_not_hidden_by_a_checkpoint_that_is_gone_and_leaves_no_gap_in_the_metrics(pools, tmp_path):
    group, tracking = RecordingGroup(), MetricRows()
    publish = group.publish

    def fail_at_step_3(version):
        if version == 3:
            shutil.rmtree(tmp_path / "global_step_2")
            raise WorkerError("rollout worker 0 died")
        return publish(version)

    group.publish = fail_at_step_3
    trainer, _, failure = fit("sync", 5, tmp_path, *pools, "trainer.save_freq=2", group=group, tracking=tracking)
    assert "rollout worker 0 died" in str(failure)
    assert load_state(trainer.checkpoint).step == 3
    _, _, failure = fit("sync", 5, tmp_path, *pools, resume_from=trainer.checkpoint, tracking=tracking)
    assert failure is None
    assert sorted(tracking.by_step) == [0, 1, 2, 3, 4, 5]
    assert tracking.by_step[3]["actor/loss"] == 1.0


def test_the_times_of_a_step_are_without_those_of_checkpoints_and_of_the_start(tmp_path):
    group = RecordingGroup()
    publish = group.publish
    group.publish = lambda version: publish(version) | {"offload": 1.0}
    trainer, _, _ = fit("sync", 3, tmp_path, "trainer.save_freq=1", "trainer.val_before_train=false", group=group)
    assert [trainer.tracking.by_step[step]["timing/offload"] for step in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_a_number_that_is_not_finite_ends_the_run_and_is_in_no_row(tmp_path):
    group, tracking = RecordingGroup(), MetricRows()
    update = group.update
    group.update = lambda shares, last: [update(shares)[0] | {"actor/lr": math.nan if len(group.trained) == 2 else 0.1}]
    _, _, failure = fit("sync", 3, tmp_path, "trainer.save_freq=-1", group=group, tracking=tracking)
    assert str(failure) == "step 2: actor/lr is nan"
    assert group.saved == [2]
    assert "actor/lr" in tracking.by_step[1]
    assert tracking.by_step[2]["actor/loss"] == 1.0
    assert "actor/lr" not in tracking.by_step[2]


@pytest.mark.slow
def test_the_sizes_of_the_student_are_looked_up_once_in_a_run_and_only_for_gpus(tmp_path, monkeypatch):
    asked = []
    spec = ModelSpec(
        parameters=10**9, kv_bytes_per_token=0, embedding_parameters=10**8, head_parameters=10**8, attention_width=10**5
    )
    monkeypatch.setattr("hybrid_gkd.ppo.trainer.student_spec", lambda config: (asked.append(1), spec)[1])
    for device, times in (("cpu", 0), ("NVIDIA H200", 1)):
        group = RecordingGroup()
        group.description = [{"device": device}] * 2
        parts = {f"timing/update_actor/{part}": 1e-6 for part in ("compute", "optimizer_step", "copies")}
        group.device_metrics = lambda *, generating, parts=parts: parts
        trainer, _, _ = fit("sync", 3, tmp_path / device, group=group)
        assert len(asked) == times
        assert all(("perf/mfu" in trainer.tracking.by_step[step]) == bool(times) for step in (1, 2, 3))


def test_an_error_that_nobody_thought_of_saves_the_last_state_too(tmp_path):
    class Full(MetricRows):
        def log(self, metrics, step):
            if step == 2:
                raise OSError("No space left on device")

    group = RecordingGroup()
    with pytest.raises(OSError, match="No space left"):
        fit("sync", 3, tmp_path, "trainer.save_freq=-1", group=group, tracking=Full())
    assert group.saved == [2]


@pytest.mark.slow
@DEPTHS
@POOLS
def test_a_requested_stop_ends_with_the_step_in_hand_which_is_saved_and_continued_from(
    scheduler, pools, tmp_path, caplog
):
    group, tracking = RecordingGroup(), MetricRows()
    trainer, _, failure = fit(
        scheduler, 5, tmp_path, *pools, "trainer.save_freq=-1", "trainer.test_freq=1", group=group, tracking=tracking,
        stop_requested=lambda: len(group.trained) == 3,
    )
    assert failure is None
    assert_trained(group, [1, 2, 3])
    assert ("publish", 3) not in group.events  # only a further step would need it
    assert group.saved == [3]
    assert load_state(trainer.checkpoint).step == 3
    assert "stopped after step 3 of 5 on request" in caplog.text
    assert f"resume from: {trainer.checkpoint}, after step 3" in caplog.text
    trainer, group, failure = fit(
        scheduler, 5, tmp_path, *pools, "trainer.save_freq=-1", resume_from=trainer.checkpoint, tracking=tracking
    )
    assert failure is None
    assert_trained(group, [4, 5])
    assert sorted(tracking.by_step) == [0, 1, 2, 3, 4, 5]


def test_a_requested_stop_waits_for_no_generation_in_another_pool(tmp_path):
    """A worker that generates answers no call until it is done, which may be later than the grace period."""
    began, ended = threading.Event(), threading.Event()

    class Busy(RecordingGroup):
        def update(self, batches, *, last=True):
            assert began.wait(60)
            return super().update(batches, last=last)

        def device_metrics(self, *, generating):
            assert generating == self._is_generating
            return {"memory/update/actor_params_gb": 1.0}

        def write_profiles(self, *, generating):
            assert generating == self._is_generating
            return []

    def respond(request, version):
        if request.seed in request_seeds(0, 2, BATCH):
            began.set()
            ended.wait(60)
        return np.array([request.seed, request.id.row], np.int32)

    group = Busy(respond)
    trainer, _, failure = fit(
        "one_step_off", 3, tmp_path, *OWN_POOL, "trainer.save_freq=-1", "trainer.val_before_train=false",
        "trainer.profile_steps=[1]", group=group, stop_requested=lambda: len(group.trained) == 1,
    )
    ended.set()
    assert failure is None
    assert load_state(trainer.checkpoint).step == 1
    assert trainer.tracking.by_step[1]["memory/update/actor_params_gb"] == 1


@pytest.mark.slow
def test_a_stop_in_the_last_step_or_after_a_save_leaves_nothing_out(tmp_path):
    group = RecordingGroup()
    trainer, _, _ = fit(
        "sync", 3, tmp_path, "trainer.save_freq=1", group=group, stop_requested=lambda: len(group.trained) == 3
    )
    assert group.saved == [1, 2, 3]
    assert "val/accuracy" in trainer.tracking.by_step[3]
    group, asked = RecordingGroup(), []
    stop = lambda: asked.append(len(group.saved)) or asked[-1] == 1  # noqa: E731 (from within the first save on)
    fit("sync", 3, tmp_path / "other", "trainer.save_freq=1", group=group, stop_requested=stop)
    assert group.saved == [1]


def test_a_disk_that_fills_ends_the_run_with_the_step_in_hand_saved(tmp_path, monkeypatch, caplog):
    """The room for that checkpoint was reserved; there is none for the next."""

    def reserve(store):
        raise CheckpointError("no room for the next checkpoint")

    monkeypatch.setattr(CheckpointStore, "reserve", reserve)
    group = RecordingGroup()
    trainer, _, failure = fit("sync", 5, tmp_path, "trainer.save_freq=2", group=group)
    assert str(failure) == "no room for the next checkpoint"
    assert group.saved == [2]
    assert f"resume from: {trainer.checkpoint}, after step 2" in caplog.text
    assert "lost" not in caplog.text


@pytest.mark.slow
def test_what_is_lost_with_the_student_is_said(tmp_path, caplog):
    group = RecordingGroup()
    group.can_save = lambda: False
    update = group.update

    def dies(shares, last):
        if len(group.trained) == 3:
            raise WorkerError("worker 0 died")
        return update(shares)

    group.update = dies
    trainer, _, _ = fit("sync", 5, tmp_path, "trainer.save_freq=2", group=group)
    assert f"resume from: {trainer.checkpoint}, after step 2; step 3 is lost" in caplog.text
    fit("sync", 5, tmp_path / "other", "trainer.save_freq=0", group=group)
    assert "no checkpoint to resume from" in caplog.text


def test_importance_weights_where_no_response_is_stale(tmp_path):
    """The engine computes with other digits than the student."""
    trainer, group, _ = fit(
        "sync", 2, tmp_path, "algorithm.rollout_is_threshold=1.5", "algorithm.rollout_is=token",
        "distillation.loss_mode=k3",
    )
    found = [item.array("sampled_weights") for items in group.trained for item in items]
    assert set(np.concatenate(found).tolist()) == {1.5}
    assert trainer.tracking.by_step[1]["actor/importance/kl"] == pytest.approx(-np.log(2))


@pytest.mark.parametrize("loss", ["forward_kl", "k1", "k3"])
def test_importance_weights_reach_the_workers_with_every_loss(loss, tmp_path):
    trainer, group, _ = fit(
        "one_step_off", 2, tmp_path, "algorithm.rollout_is_threshold=3", f"distillation.loss_mode={loss}",
        f"distillation.use_policy_gradient={loss == 'k1'}",
    )
    own = loss != "forward_kl"  # the sampled token's ratio counts where the loss is of that token
    for items in group.trained:
        for item in items:
            np.testing.assert_allclose(item.array("weights"), [1, 2], rtol=1e-6)
            assert ("sampled_weights" in item.signals) == own
            if own:
                np.testing.assert_allclose(item.array("sampled_weights"), [2, 1.5], rtol=1e-6)
            assert "old_logprobs" not in item.signals
    weights = np.array([2, 3] if own else [1, 2])
    size = weights.sum() ** 2 / (2 * (weights**2).sum())
    assert trainer.tracking.by_step[2]["actor/importance/mean"] == pytest.approx(weights.mean())
    assert trainer.tracking.by_step[2]["actor/importance/effective_sample_size"] == pytest.approx(size)


def test_without_a_threshold_nothing_is_weighted_or_computed(tmp_path):
    trainer, group, _ = fit("one_step_off", 2, tmp_path)
    assert {"weights" not in item.signals for items in group.trained for item in items} == {True}
    assert {"sampled_weights" not in item.signals for items in group.trained for item in items} == {True}
    assert {item.logprobs is None for items in group.trained for item in items} == {True}
    assert "actor/importance/mean" not in trainer.tracking.by_step[2]


def test_importance_weights_are_products_of_ratios_up_to_a_limit():
    rng = np.random.default_rng(0)
    now, then = np.log(rng.uniform(0.1, 1, (2, 20)))
    products = [np.prod(np.exp(now[: t + 1]) / np.exp(then[: t + 1])) for t in range(20)]
    np.testing.assert_allclose(importance_weights(now, then, 1e30), products, rtol=1e-5)
    np.testing.assert_allclose(importance_weights(now, then, 2.0), np.minimum(products, 2.0), rtol=1e-5)
    before = np.concatenate([[1.0], products[:-1]])
    np.testing.assert_allclose(importance_weights(now, then, 1e30, own=False), before, rtol=1e-5)
    np.testing.assert_allclose(importance_weights(now, then, 2.0, "token", own=False), np.ones(20))
    np.testing.assert_allclose(importance_weights(now, now, 2.0), np.ones(20))
    assert np.isfinite(importance_weights(np.full(5, 300.0), np.full(5, -300.0), 2.0)).all()
    assert importance_weights(np.full(3000, -1.05), np.full(3000, -1.0), 2.0).min() > 0  # 0 would be left out of means


def test_weighted_with_what_it_was_drawn_from_a_mean_becomes_that_of_the_policy():
    """Exact, over all sequences of two tokens: sum over mu of mu * w * f(prefix, token) is the sum over pi.

    The same of g(prefix), by the weights without the token's own ratio, which the others only make more of a spread.
    """
    rng = np.random.default_rng(1)
    first, second = rng.dirichlet(np.ones(3), 2), rng.dirichlet(np.ones(3), (2, 3))  # of mu and pi
    value = rng.normal(size=(3, 3))  # of the second token given the first
    of_prefix, squares = rng.normal(size=3), np.zeros(2)  # of the distribution of the second token
    found, found_of_prefix = 0.0, np.zeros(2)
    for a in range(3):
        for b in range(3):
            drawn, policy = (np.log([first[who, a], second[who, a, b]]) for who in range(2))
            own, before = (importance_weights(policy, drawn, 1e9, own=own)[1] for own in (True, False))
            found += np.exp(drawn.sum()) * own * value[a, b]
            found_of_prefix += np.exp(drawn.sum()) * np.array([own, before]) * of_prefix[a]
            squares += np.exp(drawn.sum()) * (np.array([own, before]) * of_prefix[a]) ** 2
    assert found == pytest.approx((first[1][:, None] * second[1] * value).sum(), rel=1e-6)
    assert found_of_prefix == pytest.approx(np.full(2, (first[1] * of_prefix).sum()), rel=1e-6)
    assert squares[1] < squares[0]


def test_effective_sample_size_at_its_ends():
    assert effective_sample_size(np.full(7, 0.3, np.float32)) == pytest.approx(1.0)
    assert effective_sample_size(np.array([0, 0, 5, 0], np.float32)) == pytest.approx(0.25)


def test_a_teacher_that_would_wait_for_the_update_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"overlap_rollout.*one_step_off"):
        fit("one_step_off", 1, tmp_path, "actor_rollout_ref.teacher.overlap_rollout=false")

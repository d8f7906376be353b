"""Lost workers are replaced, on a stand-in for the workers: from which state, and how often."""

import contextlib
import functools
import logging

import numpy as np
import pytest

from hybrid_gkd.errors import CheckpointError, TrainingError, WorkerError
from hybrid_gkd.launch import restarts
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.restarts import fit_with_restarts
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.ppo import checkpoint_writer
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.reporting.starts import append_row, reliability, rows_of_starts
from hybrid_gkd.runtime.threads import CallingThread
from hybrid_gkd.student.checkpoint_store import SNAPSHOT, CheckpointStore
from hybrid_gkd.testing import MetricRows, NumberTokenizer, RecordingGroup, tiny_config
from hybrid_gkd.types import Task
from hybrid_gkd.workers.liveness import RayLost

pytestmark = pytest.mark.slow
STEPS = 6


class Workers(RecordingGroup):
    """Each start of them fails in the update of the step that is next in `plan`; None: in none."""

    def __init__(self, plan, trainers, error=WorkerError, pool=None):
        super().__init__()
        self.saves_in_background, self.placements, self.pool = True, [], pool
        self._fails_at, self._trainers, self._error = plan.pop(0) if plan else None, trainers, error

    def update(self, batches, **options):
        if self._trainers[-1].step + 1 == self._fails_at:
            raise self._error("worker 0 died during the update: killed")
        return super().update(batches, **options)

    def write_snapshot(self, folder):
        (folder / "actor").mkdir(parents=True)
        (folder / "actor" / "part").write_text("weights", encoding="utf-8")

    def can_save(self):
        return False

    def keep_usable(self, *, actors):
        return [self.pool] if self.pool else []


class KeptPool:
    """Closed by whoever has it last."""

    num_closed = 0

    def close(self):
        self.num_closed += 1


class Run:
    """Starts of a run with workers that are lost by a plan."""

    def __init__(self, folder, plan, *overrides, error=WorkerError, stopping=None, before=lambda number, kept: None,
                 pool=None):
        self.config = tiny_config(
            "distillation.enabled=false", "actor_rollout_ref.rollout.n=2", "reward.answer_key=a",
            "data.train_batch_size=2", "data.max_prompt_length=8", "data.max_response_length=8",
            f"trainer.total_training_steps={STEPS}", "trainer.save_freq=0", "trainer.snapshot_freq=1",
            f"trainer.default_local_dir={folder}", "trainer.max_restarts=3", *overrides,
        )  # fmt: skip
        self.plan, self.error, self.stopping, self.before = list(plan), error, stopping or Stopping(), before
        self.pool = pool
        self.trainers, self.closed, self.folder = [], [], self.config.run_dir
        self.folder.mkdir(parents=True, exist_ok=True)

    def build(self, facts, stack, kept):
        self.before(len(self.trainers), kept)
        tasks = [Task(index=i, token_ids=np.full(1, i, np.int32), text=str(i), answer="1") for i in range(8)]
        trainer = PPOTrainer(
            self.config, group=Workers(self.plan, self.trainers, self.error, self.pool), tokenizer=NumberTokenizer(),
            train_prompts=tasks, val_prompts=[], reward=lambda response, answer: 1.0, tracking=MetricRows(),
            store=CheckpointStore(self.folder, keep=None), stop_requested=self.stopping.requested,
            resume_from=facts.resumption.folder if facts.resumption else None,
        )
        stack.callback(self.closed.append, len(self.trainers))
        self.trainers.append(trainer)
        return trainer

    def fit(self):
        is_ready = functools.partial(append_row, self.folder, {"ready": 1.0})
        append_row(self.folder, {"start": 0.0})
        with contextlib.ExitStack() as stack:
            return fit_with_restarts(Facts(self.config), stack, self.stopping, self.build, is_ready)

    @property
    def first_steps(self):
        return [min(trainer.tracking.by_step, default=None) for trainer in self.trainers]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Snapshots of a stand-in are complete before its next step."""
    monkeypatch.setattr(checkpoint_writer, "single_thread", lambda name: CallingThread())


def test_every_step_is_trained_once_and_the_losses_are_recorded(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    run = Run(tmp_path, [3, 5])
    trainer = run.fit()
    assert trainer is run.trainers[-1]
    assert run.first_steps == [1, 3, 5]
    assert run.closed == [0, 1, 2]
    assert [sorted(each.tracking.by_step) for each in run.trainers] == [[1, 2], [3, 4], [5, 6]]
    rows = [row for row in rows_of_starts(run.folder) if "restart" in row]
    assert [(row["failed_step"], row["resumed_step"], row["reason"]) for row in rows] == [
        (step, step - 1, "WorkerError: worker 0 died during the update: killed") for step in (3, 5)
    ]
    assert all(row["seconds_down"] > 0 for row in rows)
    last = trainer.tracking.by_step[6]
    assert {name: last[name] for name in last if name.startswith("reliability/")} == reliability(run.folder)
    assert reliability(run.folder)["reliability/restarts"] == 2
    place = run.folder / SNAPSHOT / "global_step_2"
    assert f"restart 1 of 3 from {place}, since step 3 has failed: WorkerError: worker 0 died" in caplog.text
    assert not (run.folder / SNAPSHOT).exists()


def test_workers_that_cannot_be_used_again_are_built_too(tmp_path, caplog):
    """And nothing of the first attempt is left."""
    run, seen = Run(tmp_path, [3], pool=(pool := KeptPool())), []

    def refuse(number, kept):
        seen.append((number, list(kept)))
        if kept:
            raise WorkerError("cannot form the weight sync group")

    run.before = refuse
    run.fit()
    assert seen == [(0, []), (1, [pool]), (1, [])]
    assert run.first_steps == [1, 3]
    assert pool.num_closed == 1
    assert "all workers are built again: cannot form the weight sync group" in caplog.text
    assert len([row for row in rows_of_starts(run.folder) if "restart" in row]) == 1


def test_without_a_saved_state_it_begins_again(tmp_path, caplog):
    run = Run(tmp_path, [3], "trainer.snapshot_freq=0")
    run.fit()
    assert run.first_steps == [1, 1]
    assert "restart 1 of 3 from the start, since step 3 has failed" in caplog.text


@pytest.mark.parametrize(
    ("plan", "overrides", "error", "said"), [
        ([3, 3], (), WorkerError, "the workers are not replaced: step 3 has failed twice"),
        ([2, 3, 4], ("trainer.max_restarts=2",), WorkerError, "there were 2 restarts (trainer.max_restarts)"),
        ([3], ("trainer.max_restarts=0",), WorkerError, None),
        ([3], (), RayLost, None),
        ([3], (), TrainingError, None),
    ],
)  # fmt: skip
def test_where_it_is_of_no_use_the_error_ends_the_run(plan, overrides, error, said, tmp_path, caplog):
    run = Run(tmp_path, plan, *overrides, error=error)
    with pytest.raises(error, match="worker 0 died during the update"):
        run.fit()
    assert len(run.trainers) == len(plan)
    assert run.closed == list(range(len(plan)))
    assert ("the workers are not replaced" in caplog.text) == (said is not None)
    assert said is None or said in caplog.text
    assert (run.folder / SNAPSHOT / f"global_step_{plan[-1] - 1}").is_dir()  # for the same command


def test_a_requested_stop_ends_it_too(tmp_path):
    stopping = Stopping()
    run = Run(tmp_path, [3], stopping=stopping)

    class Requested(WorkerError):
        def __init__(self, *arguments):
            stopping.exit_code = 143
            super().__init__(*arguments)

    run.error = Requested
    with pytest.raises(Requested):
        run.fit()
    assert len(run.trainers) == 1




def test_a_damaged_snapshot_is_skipped_for_the_checkpoint(tmp_path, monkeypatch, caplog):
    """And without one it ends the run, instead of training all of it again."""
    run = Run(tmp_path, [5], "trainer.save_freq=2")
    spoil(monkeypatch)
    run.fit()
    assert run.first_steps == [1, 5]
    run = Run(tmp_path / "other", [5])
    with pytest.raises(CheckpointError, match=r"snapshot/global_step_4/actor/part has 1 bytes instead of 7"):
        run.fit()
    assert "skipped: " in caplog.text


def spoil(monkeypatch):
    """Damage every snapshot before it is read."""
    intact = restarts.newest_intact

    def spoiled(states):
        for _, folder in states:
            if folder.parent.name == SNAPSHOT:
                (folder / "actor" / "part").write_text("x", encoding="utf-8")
        return intact(states)

    monkeypatch.setattr(restarts, "newest_intact", spoiled)


def test_snapshots_of_another_course_are_removed(tmp_path):
    run = Run(tmp_path, [4, 4])
    with pytest.raises(WorkerError):
        run.fit()
    left = run.folder / SNAPSHOT / "global_step_3"
    seen = []
    run = Run(tmp_path, [], "trainer.snapshot_freq=0", "trainer.max_restarts=0")
    run.before = lambda number, kept: seen.append(left.is_dir())
    run.fit()  # from the start
    assert seen == [True]
    assert not left.exists()

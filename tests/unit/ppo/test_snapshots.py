"""When snapshots are taken and what is kept, on a stand-in for the workers."""

import functools
import logging
from types import SimpleNamespace

import pytest
from test_saving import SlowDisk, moments
from test_schedulers import fit

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.ppo import checkpoint_writer
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.runtime.threads import CallingThread
from hybrid_gkd.student.checkpoint_store import SNAPSHOT, CheckpointStore, find_damage, load_state

pytestmark = pytest.mark.slow
QUIET = ("trainer.test_freq=0", "trainer.val_before_train=false", "trainer.max_restarts=1")


fit_with_snapshots = functools.partial(fit, "sync", prepare=PPOTrainer.take_snapshots)


@pytest.fixture(autouse=True)
def _complete_at_once(monkeypatch):
    """Steps of the stand-in are shorter than the last part of a checkpoint in its thread."""
    monkeypatch.setattr(checkpoint_writer, "single_thread", lambda name: CallingThread())


def kept(folder):
    return sorted(path.name for path in (folder / SNAPSHOT).glob("*global_step_*"))


class Timed(SlowDisk):
    """An optimizer step takes `step` seconds and a copy of the state `copy`."""

    def __init__(self, clock, step, copy):
        super().__init__(0)
        self._clock, self._step, self._copy = clock, step, copy

    def update(self, batches, **options):
        self._clock.now += self._step
        return super().update(batches, **options)

    def take_snapshot(self, **arguments):
        self._clock.now += self._copy
        super().take_snapshot(**arguments)


@pytest.mark.parametrize(("copy", "taken"), [(0.1, [1, 2, 3, 4, 5]), (0.5, [1, 4])])
def test_they_are_taken_as_often_as_they_cost_two_percent(copy, taken, tmp_path, monkeypatch):
    """Steps take 10 seconds: a cost of 1 % is every step, one of 5 % every third."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(checkpoint_writer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    group = Timed(clock, 10.0, copy)
    trainer, _, failure = fit_with_snapshots(6, tmp_path, *QUIET, group=group)
    assert failure is None
    assert group.saved == taken  # none after the last step
    assert trainer.saving.snapshot == (taken[-1], tmp_path / SNAPSHOT / f"global_step_{taken[-1]}")
    assert trainer.checkpoint is None


def test_the_newest_complete_one_is_kept_and_a_checkpoint_takes_its_place(tmp_path):
    group, seen = SlowDisk(0), []
    publish = group.publish

    def look(version):
        seen.append(kept(tmp_path))
        return publish(version)

    group.publish = look
    trainer, _, failure = fit_with_snapshots(
        5, tmp_path, *QUIET, "trainer.snapshot_freq=1", "trainer.save_freq=3", group=group
    )
    assert failure is None
    step = [("update",), ("snapshot",), ("publish",), ("write",), ("finish",)]
    assert moments(group) == [("publish",), *step * 4, ("update",), ("publish",)]
    assert max(len([name for name in names if not name.endswith(".writing")]) for names in seen) == 1
    assert [name for name in seen[2] if name[0] != "."] == ["global_step_1"]
    assert kept(tmp_path) == ["global_step_4"]
    newest = tmp_path / SNAPSHOT / "global_step_4"
    assert load_state(newest).step == 4
    assert find_damage(newest) == {}
    assert [path.name for path in CheckpointStore(tmp_path, keep=None).resumable()] == [
        "global_step_5", "global_step_4", "global_step_3",
    ]  # fmt: skip
    assert trainer.saving.newest_states()[0] == (5, tmp_path / "global_step_5")


def test_one_that_is_still_written_lets_the_next_steps_go(tmp_path):
    group = SlowDisk(3)
    _, _, failure = fit_with_snapshots(7, tmp_path, *QUIET, "trainer.snapshot_freq=1", group=group)
    assert failure is None
    assert group.saved == [1, 4]


def test_a_failed_one_is_a_warning_and_none_follows(tmp_path, caplog):
    group = SlowDisk(0)
    finish, failures = group.finish_snapshot, []

    def fails():
        found = finish()
        if not failures:
            failures.append(group.file)
            raise CheckpointError(f"cannot write {group.file}: No space left on device")
        return found

    group.finish_snapshot = fails
    trainer, _, failure = fit_with_snapshots(
        5, tmp_path, *QUIET, "trainer.snapshot_freq=1", "trainer.save_freq=4", group=group
    )
    assert failure is None
    assert group.saved == [1, 4, 5]
    assert f"no further snapshots are taken (trainer.snapshot_freq): cannot write {failures[0]}" in caplog.text
    assert kept(tmp_path) == []
    assert trainer.checkpoint == tmp_path / "global_step_5"


def test_workers_that_do_not_share_the_folder_are_a_failure_too(tmp_path, caplog):
    group = SlowDisk(0)
    finish = group.finish_snapshot
    group.finish_snapshot = lambda: ({"actor/rank_1_of_2.safetensors": None}, finish()[1])
    _, _, failure = fit_with_snapshots(3, tmp_path, *QUIET, "trainer.snapshot_freq=1", group=group)
    assert failure is None
    assert "actor/rank_1_of_2.safetensors was written by a worker and is not in this folder" in caplog.text
    assert kept(tmp_path) == []


def test_the_best_is_a_whole_checkpoint_although_a_snapshot_was_taken(tmp_path):
    group, exports = SlowDisk(0), []
    copy = group.take_snapshot

    def note(*, tokenizer_path):
        exports.append(tokenizer_path is not None)
        copy(tokenizer_path=tokenizer_path)

    group.take_snapshot = note
    trainer, _, failure = fit_with_snapshots(
        2, tmp_path, "trainer.save_freq=-1", "trainer.best_metric=val/forward_kl", "trainer.test_freq=1",
        "data.val_files=unused", "trainer.val_before_train=false", "trainer.snapshot_freq=1", group=group,
    )
    assert failure is None
    assert exports == [False, True]
    assert trainer.best.step == 1
    assert find_damage(tmp_path / "global_step_1") == {}
    assert kept(tmp_path) == []


def test_a_checkpoint_of_the_same_step_that_is_not_written_in_the_background_takes_its_place(tmp_path):
    """A stop is requested during a validation that is the best: the workers drop the copy and have nothing to write."""
    group = SlowDisk(0)
    trainer, _, failure = fit_with_snapshots(
        2, tmp_path, "trainer.save_freq=-1", "trainer.best_metric=val/forward_kl", "trainer.test_freq=1",
        "data.val_files=unused", "trainer.val_before_train=false", "trainer.snapshot_freq=1", group=group,
        stop_requested=lambda: any(event[0] == "divergences" for event in group.events),
    )
    assert failure is None
    assert trainer.checkpoint == tmp_path / "global_step_1"
    assert kept(tmp_path) == []


def test_a_run_that_resumes_from_one_knows_its_checkpoint_too(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    options = (*QUIET, "trainer.snapshot_freq=1", "trainer.save_freq=3")
    stop = SlowDisk(0)
    fit_with_snapshots(9, tmp_path, *options, "trainer.save_freq=0", group=stop,
                       stop_requested=lambda: len(stop.trained) == 5)  # fmt: skip
    (newest,) = CheckpointStore(tmp_path, keep=None).resumable()
    assert newest == tmp_path / SNAPSHOT / "global_step_4"
    assert f"resume from: {newest}, after step 4; step 5 is lost" in caplog.text
    group = SlowDisk(0)
    trainer, _, failure = fit_with_snapshots(
        9, tmp_path, *options, group=group, resume_from=newest, stop_requested=lambda: len(group.trained) == 1
    )
    assert failure is None
    assert group.saved == [1]  # the step after it, of the fifth
    assert trainer.checkpoint == tmp_path / "global_step_5"
    assert trainer.saving.newest_states() == [
        (5, tmp_path / "global_step_5"), (4, tmp_path / SNAPSHOT / "global_step_4"),
    ]  # fmt: skip


def test_after_an_earlier_checkpoint_is_resumed_from_later_ones_are_not(tmp_path):
    """A run that began at step 2 of 6 again and is killed after step 4 continues from its own snapshot."""
    fit_with_snapshots(6, tmp_path, *QUIET, "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=null")
    store, group = CheckpointStore(tmp_path, keep=None), SlowDisk(0)
    assert store.latest() == store.folder(6)
    fit_with_snapshots(
        6, tmp_path, *QUIET, "trainer.save_freq=0", "trainer.snapshot_freq=1", group=group, resume_from=store.folder(2),
        stop_requested=lambda: len(group.trained) == 2,
    )
    assert store.resumable()[:2] == [tmp_path / SNAPSHOT / "global_step_3", store.folder(2)]

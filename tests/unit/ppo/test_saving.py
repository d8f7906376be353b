"""Checkpoints that are written behind the next steps, on a stand-in for the workers: what waits for them, and when."""

import logging
import re

import pytest
from test_schedulers import OWN_POOL, fit

from hybrid_gkd.errors import CheckpointError, WorkerError
from hybrid_gkd.ppo import checkpoint_writer
from hybrid_gkd.runtime.threads import CallingThread
from hybrid_gkd.student.checkpoint_store import CheckpointStore, find_damage, load_state
from hybrid_gkd.testing import RecordingGroup


class SlowDisk(RecordingGroup):
    """Its writing lasts `steps` optimizer steps, unless it is waited for."""

    def __init__(self, steps):
        super().__init__()
        self.saves_in_background, self._steps, self.begun = True, steps, None

    def take_snapshot(self, **arguments):
        assert self.begun is None, "the memory of a snapshot that is being written"
        super().take_snapshot(**arguments)
        self.events.append(("snapshot",))

    def write_snapshot(self, folder):
        (folder / "actor").mkdir()
        self.file, self.begun = folder / "actor" / "part", len(self.updates)
        self.events.append(("write",))

    def snapshot_written(self):
        return len(self.updates) >= self.begun + self._steps

    def finish_snapshot(self):
        self.events.append(("finish",))
        self.file.write_text(str(self.begun), encoding="utf-8")
        self.begun = None
        return {}, 12.34


def moments(group):
    return [event if event[0] != "publish" else event[:1] for event in group.events if event[0] != "generate"]


@pytest.mark.slow
@pytest.mark.parametrize("pools", [(), OWN_POOL], ids=["hybrid", "separate"])
def test_the_snapshot_comes_before_the_publish_and_steps_follow_before_it_is_written(pools, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    group = SlowDisk(2)
    trainer, _, failure = fit(
        "sync", 6, tmp_path, *pools, "trainer.save_freq=3", "trainer.test_freq=0", "trainer.val_before_train=false",
        group=group,
    )
    assert failure is None
    step, behind = [("update",), ("publish",)], [("update",), ("snapshot",), ("publish",), ("write",)]
    assert moments(group)[1:] == [*step * 2, *behind, *step * 2, ("finish",), *step]
    assert group.saved == [3, 6]  # nothing follows the last, which needs no snapshot
    assert f"saved checkpoint of step 3: {tmp_path / 'global_step_3'}, written by the workers in 12.3 s" in caplog.text
    for number in (3, 6):
        folder = tmp_path / f"global_step_{number}"
        assert load_state(folder).step == number
        assert find_damage(folder) == {}
    assert trainer.checkpoint == tmp_path / "global_step_6"


@pytest.mark.slow
def test_only_complete_ones_are_counted_and_the_next_save_waits_for_the_one_before(tmp_path):
    group, seen = SlowDisk(10), []
    publish = group.publish

    def look(version):
        store = CheckpointStore(tmp_path, keep=None)
        seen.append((version, store.latest() and store.latest().name, len(list(tmp_path.glob("global_step_*")))))
        return publish(version)

    group.publish = look
    _, _, failure = fit("sync", 5, tmp_path, "trainer.save_freq=2", group=group, keep=1)
    assert failure is None
    assert [name for version, name, _ in seen if version == 3] == [None]
    assert [name for version, name, _ in seen if version == 4] == ["global_step_2"]
    assert max(number for *_, number in seen) == 1
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_5"]
    assert group.saved == [2, 4, 5]


def test_a_requested_stop_and_the_end_wait_for_what_is_being_written(tmp_path, caplog):
    group = SlowDisk(10)
    stop = lambda: len(group.trained) == 4  # noqa: E731
    trainer, _, failure = fit("sync", 9, tmp_path, "trainer.save_freq=3", group=group, stop_requested=stop)
    assert failure is None
    assert group.saved == [3, 4]
    assert load_state(tmp_path / "global_step_3").step == 3
    assert f"resume from: {trainer.checkpoint}, after step 4" in caplog.text


def test_a_failure_elsewhere_waits_too_and_saves_the_last_state(tmp_path, caplog):
    group = SlowDisk(10)
    publish = group.publish

    def dies(version):
        if version == 3:
            raise WorkerError("the rollout pool died")
        return publish(version)

    group.publish = dies
    _, _, failure = fit("sync", 9, tmp_path, "trainer.save_freq=2", group=group)
    assert str(failure) == "the rollout pool died"
    assert group.saved == [2, 3]
    assert load_state(tmp_path / "global_step_2").step == 2
    logged = "training failed, saving the last completed step: the rollout pool died"
    assert 0 <= caplog.text.find(logged) < caplog.text.find("saved the state after step 3")


def test_a_run_whose_last_checkpoint_fails_logs_what_it_resumes_from(tmp_path, caplog):
    group = RecordingGroup()
    save = group.save_checkpoint

    def fails(folder, **options):
        if len(group.updates) == 3:
            raise CheckpointError(f"cannot write {folder}: No space left on device")
        return save(folder, **options)

    group.save_checkpoint = fails
    _, _, failure = fit("sync", 3, tmp_path, "trainer.save_freq=2", group=group)
    assert "No space left on device" in str(failure)
    assert f"resume from: {tmp_path / 'global_step_2'}, after step 2; step 3 is lost" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 10])
def test_a_failed_write_ends_the_run_by_name_and_leaves_the_checkpoint_before(steps, tmp_path):
    group = SlowDisk(steps)
    finish = group.finish_snapshot

    def fails():
        if group.saved[-1] == 4:
            group.begun = None
            raise CheckpointError(f"cannot write {group.file}: No space left on device")
        return finish()

    group.finish_snapshot = fails
    trainer, _, failure = fit("sync", 9, tmp_path, "trainer.save_freq=2", group=group)
    assert str(failure) == f"cannot write {group.file}: No space left on device"
    assert group.file.parts[-3] == ".global_step_4.writing"
    assert group.saved[:2] == [2, 4]
    assert find_damage(tmp_path / "global_step_2") == {}
    assert not list(tmp_path.glob("*global_step_4*"))  # the last state had its room
    assert load_state(trainer.checkpoint).step == trainer.step  # the last state, at once


def test_the_best_is_saved_behind_the_next_steps_too(tmp_path):
    group = SlowDisk(1)
    trainer, _, failure = fit(
        "sync", 3, tmp_path, "trainer.save_freq=-1", "trainer.best_metric=val/forward_kl", "trainer.test_freq=1",
        "data.val_files=unused", "trainer.val_before_train=false", group=group,
    )
    assert failure is None
    first = moments(group)[moments(group).index(("update",)) :][:5]
    assert first == [("update",), ("publish",), ("divergences", 1, 1), ("snapshot",), ("write",)]
    assert trainer.best.step == 1
    assert find_damage(tmp_path / "global_step_1") == {}


def test_the_best_before_stays_where_the_checkpoint_of_a_better_one_fails(tmp_path, caplog):
    group = SlowDisk(1)
    finish, compute = group.finish_snapshot, group.compute_divergences

    def fails():
        if group.saved[-1] == 2:
            raise CheckpointError("No space left on device")
        return finish()

    group.finish_snapshot = fails
    group.compute_divergences = lambda plan: {
        index: values * (3, 2, 1, 2)[group.version] for index, values in compute(plan).items()
    }
    trainer, _, failure = fit(
        "sync", 9, tmp_path, "trainer.save_freq=-1", "trainer.best_metric=val/forward_kl", "trainer.test_freq=1",
        "data.val_files=unused", "trainer.val_before_train=false", group=group, keep=1,
    )
    assert str(failure) == "No space left on device"
    assert trainer.checkpoint == tmp_path / "global_step_3"
    assert load_state(trainer.checkpoint).best.step == 1
    assert find_damage(tmp_path / "global_step_1") == {}
    assert f"best checkpoint: {tmp_path / 'global_step_1'}, val/forward_kl 1" in caplog.text


def test_a_resumed_run_does_not_compare_with_another_validation(tmp_path, caplog):
    settings = ["trainer.best_metric=val/forward_kl", "trainer.test_freq=1", "data.val_files=unused"]
    settings += ["trainer.save_freq=-1"]
    before, _, _ = fit("sync", 2, tmp_path, *settings)
    kept = before.best, {name for name in before.first_metrics if name.startswith("val/")}
    assert None not in kept
    assert "val/forward_kl" in kept[1]

    def resume(*overrides):
        found, _, failure = fit("sync", 2, tmp_path, *settings, *overrides, resume_from=before.checkpoint)
        assert failure is None
        return found.best, {name for name in found.first_metrics if name.startswith("val/")}

    assert resume() == kept
    assert "not compared" not in caplog.text
    divergences = {name for name in kept[1] if "_kl" in name}
    others = kept[1] - divergences
    assert "val/accuracy" in others
    assert resume("reward.score_on_error=0.5") == (kept[0], divergences)
    assert resume("distillation.topk=2", "trainer.allow_changed_config=true") == (None, others)
    for key, value in [
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "0.5"), ("data.max_response_length", "4"),
    ]:
        assert resume(f"{key}={value}", "trainer.allow_changed_config=true") == (None, set())
        assert re.search(rf"{re.escape(key)}: \S+ -> {value}", caplog.text)


@pytest.mark.slow
def test_room_for_the_next_is_held_when_the_one_before_is_complete(tmp_path, monkeypatch):
    group, reserved = SlowDisk(2), []
    monkeypatch.setattr(checkpoint_writer, "single_thread", lambda name: CallingThread())
    monkeypatch.setattr(CheckpointStore, "reserve", lambda store: reserved.append(len(group.updates)))
    fit("sync", 8, tmp_path, "trainer.save_freq=4", group=group)
    assert reserved == [6]

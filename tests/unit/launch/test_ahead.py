"""What begins beside the checks of a run: when, and how it ends."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import DataError, WorkerError
from hybrid_gkd.launch import ahead, run
from hybrid_gkd.launch.ahead import is_needed, started_ahead
from hybrid_gkd.student.checkpoint_store import CheckpointStore, TrainerState


def configure(folder, *overrides):
    return load_config([
        "actor_rollout_ref.model.path=unused", "distillation.enabled=false", "reward.answer_key=prompt",
        "actor_rollout_ref.rollout.n=2", "data.train_files=unused", f"trainer.default_local_dir={folder}/out",
        "trainer.device=cpu", *overrides,
    ])  # fmt: skip


@pytest.fixture
def events(tmp_path, monkeypatch):
    """What happens in a run that has stand-ins for Ray and the workers, in order; its session is a folder."""
    came, session = [], tmp_path / "session_1"

    @contextlib.contextmanager
    def ray_cluster(config, device):
        came.append("Ray begins")
        session.mkdir()
        (tmp_path / "session_latest").symlink_to(session)
        try:
            yield
        finally:
            came.append("Ray has ended")

    pool = SimpleNamespace(size=1, start=came.append)
    monkeypatch.setattr(ahead, "ray_cluster", ray_cluster)
    monkeypatch.setattr(ahead, "session_folder", lambda: session)
    monkeypatch.setattr(ahead, "place_workers", lambda config, device: [pool])
    monkeypatch.setattr(ahead, "stop_workers", lambda pools: came.append("workers are stopped"))
    monkeypatch.setattr(ahead, "import_transformers", lambda: None)
    monkeypatch.setattr(ahead, "check_presence", lambda config: None)
    return came


BEGUN, ENDED = ["Ray begins", "import_packages"], ["workers are stopped", "Ray has ended"]


def test_the_workers_import_while_the_checks_go_on_and_are_stopped_where_one_fails(events, tmp_path, monkeypatch):
    def check_all(config, **options):
        events.append("checks")
        raise DataError("no prompts")

    monkeypatch.setattr(run, "check_all", check_all)
    with pytest.raises(DataError, match=r"^no prompts$"):
        run.run(configure(tmp_path))
    assert events == [*BEGUN, "checks", *ENDED]
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_checks_pass_takes_them_and_ray_s_own_logs_stay(events, tmp_path, monkeypatch):
    def execute(facts, stopping, about, ahead):
        assert [pool.size for pool in ahead.take()] == [1]
        raise WorkerError("the worker died")

    monkeypatch.setattr(run, "check_all", lambda config, **options: SimpleNamespace(finished=False, spec=None))
    monkeypatch.setattr(run, "execute", execute)
    with pytest.raises(WorkerError, match="died"):
        run.run(configure(tmp_path))
    assert events == [*BEGUN, *ENDED]
    assert {path.name for path in tmp_path.iterdir()} == {"session_1", "session_latest"}


@pytest.mark.parametrize("part", ["ray_cluster", "place_workers"])
def test_what_cannot_begin_ends_at_once_and_is_left_to_the_run(events, tmp_path, monkeypatch, part):
    def fail(config, device):
        raise WorkerError("no room")

    monkeypatch.setattr(ahead, part, fail)
    with started_ahead(configure(tmp_path)) as found:
        assert found.take() == []
        assert events == ([] if part == "ray_cluster" else ["Ray begins", "Ray has ended"])
        assert list(tmp_path.iterdir()) == []  # before the run starts a Ray of its own


def test_a_device_that_is_not_there_begins_nothing(events, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with started_ahead(configure(tmp_path, "trainer.device=cuda")) as found:
        assert found.take() == []
    assert events == []


def test_a_path_that_leads_nowhere_begins_nothing(events, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(ahead, "ray_cluster", lambda config, device: events.append("Ray begins"))
    with started_ahead(configure(tmp_path, "data.train_files=nowhere.jsonl")) as found:
        assert found.take() == []
    assert events == []


def test_nothing_begins_on_a_given_cluster_or_for_a_run_that_may_be_finished(events, tmp_path):
    new = configure(tmp_path)
    assert is_needed(new)
    assert not is_needed(configure(tmp_path, "ray_init.address=far:6379"))
    assert not is_needed(configure(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}"))
    state = TrainerState(step=3, data={}, first_metrics={})
    with CheckpointStore(new.experiment_dir, keep=None).writing(state) as folder:
        (folder / "actor").mkdir()
    assert not is_needed(new)  # the number of its steps is not known yet
    assert not is_needed(configure(tmp_path, "trainer.total_training_steps=3"))
    assert is_needed(configure(tmp_path, "trainer.total_training_steps=4"))
    assert is_needed(configure(tmp_path, "trainer.resume_mode=disable"))
    with started_ahead(new) as found:
        assert found.take() == []
    assert events == []
    assert json.loads((new.experiment_dir / "global_step_3" / "trainer_state.json").read_text())["step"] == 3

"""What a run decides before it starts anything."""

import pytest
import torch

from hybrid_gkd import run
from hybrid_gkd.config import load_config
from hybrid_gkd.errors import ConfigError

LOCAL = ["data.train_files=x", "actor_rollout_ref.model.path=x", "actor_rollout_ref.teacher.model.path=x"]


@pytest.mark.parametrize(
    ("visible", "count", "overrides", "expected"),
    [
        (None, 1, [], "0"),  # the worker's own
        (None, 2, [], "1"),  # the one after the worker's
        ("1", 1, [], "1"),
        ("3,5,2", 3, ["trainer.n_gpus_per_node=2"], "2"),
        ("GPU-a,GPU-b", 2, ["actor_rollout_ref.teacher.tensor_model_parallel_size=2"], "GPU-a,GPU-b"),
    ],
)
def test_a_local_teacher_gets_gpus_of_those_that_the_run_sees(monkeypatch, visible, count, overrides, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config([*LOCAL, *overrides])
    assert run.teacher_environment(config, "cuda") == {"CUDA_VISIBLE_DEVICES": expected}


def test_more_gpus_for_the_teacher_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = load_config([*LOCAL, "actor_rollout_ref.teacher.tensor_model_parallel_size=2"])
    with pytest.raises(ConfigError, match=r"teacher.tensor_model_parallel_size.* shows 1 GPUs; got 2"):
        run.teacher_environment(config, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = load_config([*LOCAL, "actor_rollout_ref.teacher.device=cuda"])
    with pytest.raises(ConfigError, match=r"teacher.device.* no CUDA device is visible; got 'cuda'"):
        run.teacher_environment(config, "cpu")


def test_a_local_teacher_on_the_cpu_shares_the_cores_with_workers_there():
    config = load_config([*LOCAL, "actor_rollout_ref.teacher.device=cpu"])
    assert run.teacher_environment(config, "cuda") == {}
    assert set(run.teacher_environment(config, "cpu")) == {"OMP_NUM_THREADS"}


def test_a_fresh_start_moves_the_earlier_run_aside(tmp_path):
    earlier = [tmp_path / "hybrid_gkd" / name for name in ("gkd", "gkd.1")]
    for number, folder in enumerate(earlier):
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(str(number))
    config = load_config([*LOCAL, f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=disable"])
    with run.locked_run_folder(config):
        assert [path.name for path in config.run_dir.iterdir()] == ["config.yaml"]
    kept = {folder.name: (folder / "metrics.jsonl").read_text() for folder in config.run_dir.parent.glob("gkd.*")}
    assert kept == {"gkd.1": "1", "gkd.2": "0"}

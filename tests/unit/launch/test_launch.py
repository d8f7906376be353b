"""Decisions of a run before it starts anything."""

import contextlib
import dataclasses
import fcntl
import json
import logging
import pickle
import re
import signal
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig

import hybrid_gkd
from hybrid_gkd.__main__ import main
from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.config.loading import load_config, to_yaml
from hybrid_gkd.errors import CheckpointError, ConfigError, DataError, ModelError, SeveralErrors, WorkerError
from hybrid_gkd.launch import compatibility, inputs, plan, preflight, run
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.data_checks import check_data_sources, check_right_answers
from hybrid_gkd.launch.inputs import check_positions, check_topk
from hybrid_gkd.launch.plan import describe_loading, loading_line
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.launch.resume import Resumption
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.launch.teacher import teacher_environment
from hybrid_gkd.models import spec
from hybrid_gkd.offload import budget
from hybrid_gkd.offload.budget import GIB
from hybrid_gkd.offload.needs import place_teacher
from hybrid_gkd.ppo.resuming import TEACHER_PATH, TEACHER_WEIGHTS, data_state, learning_settings
from hybrid_gkd.rollout.engine import resolve_engine
from hybrid_gkd.rollout.vllm import VLLMRolloutEngine
from hybrid_gkd.scoring.reward_functions import load_functions
from hybrid_gkd.student.checkpoint_store import RESERVED, CheckpointStore, TrainerState, load_state, write_manifest
from hybrid_gkd.testing import make_tiny_model, make_tokenizer, tiny_config
from hybrid_gkd.types import Task
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.placement import Placement, threads_per_process


def environment(config, device, gpus):
    """Return the environment of a local teacher on a machine with this number of GPUs."""
    place, section = place_teacher(config, device=device, gpus=gpus), config.actor_rollout_ref.teacher
    return teacher_environment(section, place, device, threads_per_process(config))


LOCAL = ["data.train_files=x", "actor_rollout_ref.model.path=x", "actor_rollout_ref.teacher.model.path=x"]


@pytest.mark.parametrize(
    ("visible", "count", "overrides", "expected"),
    [
        (None, 1, [], "0"),  # the worker's own
        (None, 2, [], "1"),  # the one after the worker's
        ("1", 1, [], "1"),
        ("3,5,2", 3, ["trainer.n_gpus_per_node=2"], "2"),
        ("GPU-a,GPU-b", 2, ["actor_rollout_ref.teacher.tensor_model_parallel_size=2"], "GPU-a,GPU-b"),
        (None, 4, ["trainer.n_gpus_per_node=4"], "0,1,2,3"),  # a copy on each of the workers'
        (None, 4, ["trainer.n_gpus_per_node=2", "actor_rollout_ref.teacher.num_replicas=2"], "2,3"),
        (None, 3, ["trainer.n_gpus_per_node=2", "actor_rollout_ref.teacher.num_replicas=2"], "0,1"),
    ],
)
def test_a_local_teacher_gets_gpus_of_those_that_the_run_sees(monkeypatch, visible, count, overrides, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config([*LOCAL, *overrides])
    assert environment(config, "cuda", count) == {"CUDA_VISIBLE_DEVICES": expected}


def test_more_gpus_for_the_teacher_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = load_config([*LOCAL, "actor_rollout_ref.teacher.tensor_model_parallel_size=2"])
    with pytest.raises(ConfigError, match=r"teacher.tensor_model_parallel_size.* 1 are visible; got 2"):
        environment(config, "cuda", 1)
    config = load_config([*LOCAL, "actor_rollout_ref.teacher.num_replicas=3"])
    with pytest.raises(ConfigError, match=r"num_replicas.* need 3 GPUs, 1 are visible; got 1"):
        environment(config, "cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = load_config([*LOCAL, "actor_rollout_ref.teacher.device=cuda"])
    with pytest.raises(ConfigError, match=r"teacher.device.* no CUDA device is visible; got 'cuda'"):
        environment(config, "cpu", 0)


def test_a_local_teacher_on_the_cpu_shares_the_cores_with_workers_there():
    config = load_config([*LOCAL, "actor_rollout_ref.teacher.device=cpu"])
    assert environment(config, "cuda", 1) == {}
    assert set(environment(config, "cpu", 0)) == {"OMP_NUM_THREADS"}


def test_a_fresh_start_moves_the_earlier_run_aside(tmp_path):
    earlier = [tmp_path / "hybrid_gkd" / name for name in ("gkd", "gkd.1")]
    for number, folder in enumerate(earlier):
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(str(number), encoding="utf-8")
    (folder.parent / "gkd" / RESERVED).write_text("held by a run that was killed", encoding="utf-8")
    config = load_config([*LOCAL, f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=disable"])
    with run.locked_run_folder(config):
        assert list(config.run_dir.iterdir()) == []
    assert not list(tmp_path.glob(f"**/{RESERVED}"))
    kept = {
        folder.name: (folder / "metrics.jsonl").read_text(encoding="utf-8")
        for folder in config.run_dir.parent.glob("gkd.*")
    }
    assert kept == {"gkd.1": "1", "gkd.2": "0"}


@pytest.mark.slow
def test_a_report_that_looks_at_a_run_folder_does_not_keep_a_run_from_it(tmp_path):
    config = load_config([*LOCAL, f"trainer.default_local_dir={tmp_path}"])
    config.run_dir.parent.mkdir(parents=True)
    with open(config.run_dir.parent / f".{config.run_dir.name}.lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as the report takes it, for a moment
        release = threading.Timer(run.LOCK_SECONDS / 10, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        release.start()
        with run.locked_run_folder(config):
            with pytest.raises(ConfigError, match="another process is training"), run.locked_run_folder(config):
                pass
        release.join()


def runnable(folder, *overrides):
    """A configuration whose inputs are there."""
    make_tiny_model(folder / "student")
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(8)), encoding="utf-8"
    )
    return load_config(
        [
            f"actor_rollout_ref.model.path={folder}/student", "distillation.enabled=false", "reward.answer_key=prompt",
            "actor_rollout_ref.rollout.n=2", f"data.train_files={folder}/train.jsonl",
            "data.train_batch_size=8", "data.max_prompt_length=32",
            "data.max_response_length=16", f"trainer.default_local_dir={folder}/out", "trainer.device=cpu",
            "actor_rollout_ref.rollout.name=hf", *overrides,
        ]
    )


@pytest.mark.slow
def test_a_disk_that_cannot_hold_the_checkpoints_ends_the_run_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "shutil", SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=0)))
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir: the checkpoints of this run need"):
        run.run(runnable(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_disk_that_cannot_hold_the_snapshots_ends_the_run_before_it_starts(tmp_path, monkeypatch):
    own = (f"trainer.snapshot_dir={tmp_path}/memory", "trainer.save_freq=0")
    free = lambda folder: SimpleNamespace(free=100)  # noqa: E731
    monkeypatch.setattr(preflight, "shutil", SimpleNamespace(disk_usage=free))
    with pytest.raises(ConfigError, match=r"trainer\.snapshot_dir: the snapshots of this run need 0\.0 GiB more"):
        run.run(runnable(tmp_path, *own, "trainer.snapshot_freq=1"))
    with pytest.raises(ConfigError, match=r"trainer\.snapshot_dir: must be a folder that this user can write to"):
        run.run(runnable(tmp_path, "trainer.snapshot_dir=/proc/none", "trainer.save_freq=0", "trainer.max_restarts=1"))
    assert not (tmp_path / "memory").exists()


@pytest.mark.slow
def test_a_disk_without_inodes_for_a_checkpoint_is_refused(tmp_path, monkeypatch):
    status = SimpleNamespace(f_files=100, f_favail=3, f_bavail=2**40, f_frsize=4096, f_blocks=2**40, f_bfree=2**40)
    monkeypatch.setattr(preflight.os, "statvfs", lambda folder: status)
    with pytest.raises(ConfigError, match=r"a checkpoint needs \d+ files, but the disk of .* has only 3 inodes free"):
        run.run(runnable(tmp_path))
    status.f_files = 0  # a file system that makes them as needed
    preflight.check_disk(tmp_path, 0, files=50)


@pytest.mark.slow
def test_checks_and_start_ask_for_the_same_room(tmp_path, monkeypatch):
    config, asked = runnable(tmp_path, "trainer.max_actor_ckpt_to_keep=null"), []
    monkeypatch.setattr(preflight, "check_disk", lambda run_dir, needed, files: asked.append((needed, files)) or "")
    stores = []

    def reserve(store):
        stores.append((store.reserved_bytes, store.reserved_files))
        raise CheckpointError("enough")

    monkeypatch.setattr(CheckpointStore, "reserve", reserve)
    with pytest.raises(CheckpointError, match="enough"):
        run.run(config)
    assert asked == stores
    assert asked[0][0] > 0


def test_the_first_error_is_raised_though_a_callback_of_the_exit_raises_another(caplog):
    def fail(error):
        raise error

    def end_with(error=None):
        with run.exit_stack() as stack:
            stack.callback(fail, OSError("read-only"))
            if error is not None:
                raise error

    with pytest.raises(WorkerError, match="the first"):
        end_with(WorkerError("the first"))
    assert "another error during the shutdown: OSError: read-only" in caplog.text
    with pytest.raises(OSError, match="read-only"):
        end_with()
    with pytest.raises(SystemExit):
        end_with(SystemExit(130))


def test_a_run_folder_that_was_deleted_or_replaced_is_an_error_at_the_end(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    before = folder.stat()
    run.check_run_folder(folder, before, None)
    with pytest.raises(CheckpointError, match=r"deleted or replaced .* is left: none"):
        run.check_run_folder(folder, before, folder / "global_step_1")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="deleted or replaced"):
        run.check_run_folder(folder, before, None)
    (folder / "global_step_1").mkdir(parents=True)  # by the last checkpoint
    with pytest.raises(CheckpointError, match=r"is left: .*run/global_step_1"):
        run.check_run_folder(folder, before, folder / "global_step_1")


@pytest.mark.slow
def test_room_for_checkpoints_is_held_by_a_run_that_will_write_some_and_given_back_when_it_cannot_start(
    tmp_path, monkeypatch
):
    held = []

    def failing(config, *_):
        held.extend(file.stat().st_size for file in config.run_dir.glob(RESERVED))
        raise WorkerError("no Ray here")

    monkeypatch.setattr(run, "ray_cluster", failing)
    validation = ("trainer.val_only=true", "data.train_files=[]", f"data.val_files={tmp_path}/train.jsonl")
    for overrides in ((), validation):
        with pytest.raises(WorkerError, match="no Ray here"):
            run.run(runnable(tmp_path, *overrides))
    assert len(held) == 1
    assert not list(tmp_path.glob(f"**/{RESERVED}"))


@pytest.mark.slow
def test_validation_alone_needs_no_training_prompts_no_room_for_checkpoints_and_no_rule_of_training(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "shutil", SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=0)))
    only = ("trainer.val_only=true", "data.train_files=[]", f"data.val_files={tmp_path}/train.jsonl")
    training = ("reward.answer_key=null", "actor_rollout_ref.rollout.n=1", "trainer.profile_steps=[2]")
    facts = check_all(runnable(tmp_path, *only, *training))
    assert (len(facts.train_prompts), len(facts.val_prompts), facts.steps, facts.finished) == (0, 8, 0, False)
    assert facts.config.run_dir == facts.config.experiment_dir / "validation"
    assert not (tmp_path / "out").exists()


def test_a_model_folder_without_weights_is_refused(tmp_path):
    config = runnable(tmp_path)
    (tmp_path / "student" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"actor_rollout_ref\.model\.path: the folder has no weights.*student"):
        check_all(config)


@pytest.mark.slow
def test_an_exported_student_whose_weights_have_changed_is_refused(tmp_path):
    config = runnable(tmp_path)
    write_manifest(tmp_path, {})
    (tmp_path / "student" / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    check_all(config)
    weights = tmp_path / "student" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.path: .*student/model\.safetensors has another checksum"):
        check_all(config)


def test_a_generation_config_that_cannot_be_used_is_named(tmp_path):
    config = runnable(tmp_path)
    (tmp_path / "student" / "generation_config.json").write_text('{"max_new_tokens": -1}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"model\.path: generation_config\.json of .*max_new_tokens"):
        check_all(config)


def test_a_tokenizer_that_is_not_there_is_named_by_its_key(tmp_path):
    with pytest.raises(ModelError, match=r"actor_rollout_ref\.model\.tokenizer_path: /nowhere"):
        check_all(runnable(tmp_path, "actor_rollout_ref.model.tokenizer_path=/nowhere"))


@pytest.mark.parametrize("name", ["gsm8k", "by_data_source"])
def test_an_answer_without_a_number_is_named_before_the_run(name):
    facts = Facts(load_config(["data.train_files=x", "actor_rollout_ref.model.path=x", "distillation.enabled=false",
                               "actor_rollout_ref.rollout.n=2", f"reward.name={name}", "reward.answer_key=a"]))
    facts.reward = load_functions(facts.config.reward)
    rows = enumerate([("#### 4", "openai/gsm8k"), (None, "openai/gsm8k"), ("x", "aime2024"), ("n/a", "openai/gsm8k")])
    tasks = [
        Task(
            index=row, token_ids=np.zeros(1, np.int32), text="", data_source=source, answer=answer, source="f",
            place=row,
        )
        for row, (answer, source) in rows
    ]  # fmt: skip
    facts.train_prompts, facts.val_prompts = tasks[:2], tasks
    row = 2 if name == "gsm8k" else 3
    with pytest.raises(DataError, match=rf"^f, row {row + 1}: the gsm8k reward needs a number"):
        check_right_answers(facts)


def test_a_row_of_a_data_set_without_a_known_reward_is_named(monkeypatch):
    facts = Facts(load_config(["data.train_files=x", "actor_rollout_ref.model.path=x", "distillation.enabled=false",
                               "actor_rollout_ref.rollout.n=2", "reward.name=by_data_source", "reward.answer_key=a"]))
    facts.reward = load_functions(facts.config.reward)
    prompts = [
        Task(index=row, token_ids=np.zeros(1, np.int32), text="", data_source=source, source="f", place=row)
        for row, source in enumerate(["openai/gsm8k", "aime2024", None])
    ]
    facts.train_prompts = prompts[:2]
    check_data_sources(facts)
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"^reward\.name: math needs the package math-verify: .*pip install "):
            check_data_sources(facts)
        facts.train_prompts = prompts[:1]
        check_data_sources(facts)
    facts.val_prompts = prompts
    with pytest.raises(DataError, match=r"^f, row 3, column 'data_source' \(data\.reward_fn_key\): .* for None"):
        check_data_sources(facts)


def test_scores_of_a_completion_that_no_reply_can_hold_are_refused_before_the_run():
    given = ["data.train_files=x", "actor_rollout_ref.model.path=x", "actor_rollout_ref.teacher.model.path=x"]
    config = load_config([*given, "distillation.topk=151936", "data.max_response_length=2048"])
    rule = r"^distillation\.topk: .* data\.max_response_length=2048 .* \d+ bytes, .* is 1073741824; .* got 151936"
    with pytest.raises(ConfigError, match=rule):
        check_topk(Facts(config, num_ids=151936))
    config.data.max_response_length = 1024
    check_topk(Facts(config, num_ids=151936))


def test_a_reference_cannot_have_more_candidates_than_there_are_tokens():
    actor, ref = "actor_rollout_ref.actor={use_kl_loss: true, kl_loss_type: full}", "actor_rollout_ref.ref.topk=260"
    given = ["data.train_files=x", "actor_rollout_ref.model.path=x", "distillation.enabled=false", actor, ref]
    config = load_config([*given, "reward.answer_key=a", "algorithm.adv_estimator=reinforce_plus_plus"])
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.ref\.topk: must be at most the 259 tokens .* got 260"):
        check_topk(Facts(config, num_ids=259))


def test_all_failures_are_said_at_once_and_what_follows_from_one_is_not(tmp_path):
    config = runnable(tmp_path, "trainer.logger=[nowhere:Tracker]", "data.val_files=missing.jsonl")
    (tmp_path / "student" / "model.safetensors").unlink()
    with pytest.raises(SeveralErrors) as caught:
        check_all(config)
    parts = ("the folder has no weights", "trainer.logger", "data.val_files: file not found: 'missing.jsonl'")
    for part, error in zip(parts, caught.value.errors, strict=True):
        assert part in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [[], ["data.seed=x"]], ids=["keys are right", "a key is wrong too"])
def test_a_dry_run_of_what_is_not_there_fails(tmp_path, capsys, wrong):
    make_tiny_model(tmp_path / "student")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        code = main([
            "--dry-run", f"actor_rollout_ref.model.path={tmp_path}/student", "data.train_files=missing.jsonl",
            "actor_rollout_ref.teacher.model.path=/nowhere", "actor_rollout_ref.rollout.name=hf", *wrong,
        ])  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert code == 1
    shown = "".join(capsys.readouterr())
    expected = ["data.train_files: file not found: 'missing.jsonl'", "model.path: no such folder; got '/nowhere'"]
    for part in [*expected, *("data.seed" for _ in wrong)]:
        assert part in shown


@pytest.mark.slow
def test_prompts_that_are_left_out_are_said_at_the_start(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    check_all(runnable(tmp_path, "data.train_batch_size=3", "trainer.total_epochs=2"))
    assert "5 steps; 1 of 8 prompts are left out of the last epoch, since they do not fill a batch of 3" in caplog.text
    caplog.clear()
    check_all(runnable(tmp_path, "data.train_batch_size=4"))
    assert "2 steps" in caplog.text
    assert "left out" not in caplog.text


def test_a_value_without_effect_is_named_at_the_start(tmp_path, caplog):
    keys = ["trainer.total_epochs", "distillation.beta"]
    check_all(runnable(tmp_path, "trainer.total_epochs=2", "distillation.beta=0.2"), set_keys=keys)
    assert "no effect: distillation.beta (needs distillation.enabled=true)" in caplog.messages
    assert "total_epochs" not in caplog.text


@pytest.mark.slow
def test_the_time_of_a_run_is_told_by_an_earlier_one_with_the_same_settings(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = runnable(tmp_path, "trainer.total_training_steps=100")
    check_all(config)
    assert "steps: 100; no duration known: no earlier run with these settings" in caplog.text
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    rows = [{"step": step, "timing/step": 90.0 if step == 1 else 30.0} for step in (1, 2, 3)]
    rows[2] |= {"timing/testing": 20.0}
    (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    check_all(config)
    assert "steps: 100, about 1:06:40 at 40.00 s each" in caplog.text
    caplog.clear()
    check_all(runnable(tmp_path, "actor_rollout_ref.rollout.n=4"))
    assert "about" not in caplog.text


def test_how_long_loading_takes_is_told_by_the_last_start_with_the_same_models(tmp_path):
    def loading(config, engine):
        return loading_line(describe_loading(config, device="cpu", engine=engine), config.experiment_dir.parent)

    config = runnable(tmp_path)
    size = f"{sum(file.stat().st_size for file in tmp_path.glob('**/model.safetensors')) / 2**20:.1f} MiB"
    unknown = f"loading: {size} of weights to read; no duration known: no earlier start with these models"
    assert loading(config, "hf") == unknown
    rows = []
    for start, seconds in ((1000, 50), (2000, 42), (3000, None)):  # the last one did not get so far
        rows.append({"start": start, "loaded": describe_loading(config, device="cpu", engine="hf")})
        rows += [{"ready": start + seconds}] if seconds else []
    other = config.run_dir.parent / "another_run"
    other.mkdir(parents=True)
    (other / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert f"loading: {size} of weights to read; it took 42 s last time (" in loading(config, "hf")
    assert loading(config, "vllm") == unknown
    config.actor_rollout_ref.model.path = "org/no-such-model"
    assert "loading: to be downloaded: org/no-such-model; " in loading(config, "hf")


@pytest.mark.slow
def test_more_positions_by_override_are_enough(tmp_path):
    many = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200000"
    config = runnable(tmp_path, "data.max_response_length=100000", many)
    with pytest.raises(ConfigError, match=r"data\.max_response_length"):
        check_all(config)
    config.actor_rollout_ref.model.override_config["max_position_embeddings"] = 200000
    check_all(config)


def test_a_cluster_that_nobody_answers_for_is_named(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (
        pytest.raises(WorkerError, match=rf"ray_init\.address: nothing answers at {address}"),
        ray_cluster(runnable(tmp_path, f"ray_init.address={address}"), "cpu"),
    ):
        pass


def put_checkpoint(config, step, num_prompts=8):
    """A checkpoint without weights, which no check looks into."""
    settings = learning_settings(config, steps=step)
    state = TrainerState(step=step, data=data_state(config, num_prompts), first_metrics={}, settings=settings)
    with CheckpointStore(config.run_dir, keep=None).writing(state) as folder:
        (folder / "actor").mkdir()


def snapshot(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]}


@pytest.mark.slow
def test_a_finished_run_says_so_and_touches_nothing(tmp_path):
    """Before the teacher is asked, which may be gone by then."""
    config = runnable(tmp_path)
    put_checkpoint(config, 1)
    run.write_config(config)
    before = snapshot(tmp_path / "out")
    text = run.run(config)
    for told in ("nothing to do", "all 1 steps", "trainer.total_training_steps", "trainer.experiment_name"):
        assert told in text
    names = [check.name for check in preflight.CHECKS]
    assert names.index("checkpoint") < names.index("teacher")
    config.actor_rollout_ref.actor.optim.lr = 1.0
    with pytest.raises(ConfigError, match=r"allow_changed_config: .*\n.*actor\.optim\.lr: 1e-06 -> 1\.0"):
        run.run(config)
    assert snapshot(tmp_path / "out") == before
    config.trainer.total_training_steps, config.trainer.allow_changed_config = 2, True
    begin(config)


@pytest.mark.slow
def test_other_prompts_in_the_same_file_are_other_data(tmp_path):
    config = runnable(tmp_path, "trainer.total_training_steps=2")
    facts = check_all(config)
    state = TrainerState(step=1, data=data_state(config, 8), first_metrics={}, settings=facts.settings)
    with CheckpointStore(config.run_dir, keep=None).writing(state) as folder:
        (folder / "actor").mkdir()
    assert check_all(config).steps_done == 1
    file = tmp_path / "train.jsonl"
    file.write_text(file.read_text(encoding="utf-8").replace("What is 3?", "What is 4?"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.train_files \(checksum of the prompts\): \w{8} -> \w{8}"):
        check_all(config)


def test_the_model_that_a_given_teacher_serves_is_the_teacher(tmp_path, monkeypatch):
    config = runnable(tmp_path)
    put_checkpoint(config, 1)
    config.distillation.enabled, config.actor_rollout_ref.teacher.server_ip = True, "far"
    config.trainer.total_training_steps = 2
    state = CheckpointStore(config.run_dir, keep=None)
    facts = preflight.Facts(config)
    facts.resumption = Resumption(state.latest(), load_state(state.latest()), [])
    facts.resumption.state.settings[TEACHER_PATH] = "large"

    @contextlib.contextmanager
    def connect(config, tokenizer, endpoints):
        model = SimpleNamespace(
            model="larger", chat_template=None, stop_token_ids=(), num_embeddings=300, weights="b"
        )
        yield SimpleNamespace(model=model)

    monkeypatch.setattr(compatibility, "connect", connect)
    config.trainer.allow_changed_config = True
    with pytest.raises(ConfigError, match=rf"teacher\.allow_teacher_change: .*\n{TEACHER_PATH}: large -> larger"):
        compatibility.check_compatibility(facts)
    config.actor_rollout_ref.teacher.allow_teacher_change = True
    assert "large -> larger" in compatibility.check_compatibility(facts)
    assert facts.settings == {TEACHER_PATH: "larger", TEACHER_WEIGHTS: "b"}
    config.actor_rollout_ref.teacher.allow_teacher_change = False
    facts.resumption.state.settings[TEACHER_WEIGHTS] = "b"  # the same weights in another folder
    assert "large" not in compatibility.check_compatibility(facts).replace("larger", "")
    facts.resumption.state.settings.update({TEACHER_PATH: "larger", TEACHER_WEIGHTS: "a"})  # others of that name
    with pytest.raises(ConfigError, match=r"allow_teacher_change: .*\n.*\(hash of the weights\): a -> b"):
        compatibility.check_compatibility(facts)


@pytest.mark.slow
def test_the_configuration_of_each_start_is_kept(tmp_path):
    config = runnable(tmp_path)
    config.run_dir.mkdir(parents=True)
    for rate in (1.0, 2.0, 2.0, 3.0):
        config.actor_rollout_ref.actor.optim.lr = rate
        run.write_config(config)
    rates = [
        OmegaConf.load(config.run_dir / f"{name}.yaml").actor_rollout_ref.actor.optim.lr
        for name in ("config.1", "config.2", "config")
    ]
    assert rates == [1.0, 2.0, 3.0]
    assert len(list(config.run_dir.glob("config*"))) == 3


class Begun(Exception):
    """A run has passed its first checks."""


def begin(config):
    """A run up to where it takes its folder."""

    def locked_run_folder(config):
        raise Begun

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "locked_run_folder", locked_run_folder)
        with pytest.raises(Begun):
            run.run(config)


@pytest.mark.slow
def test_a_run_says_what_it_will_hold(tmp_path, caplog, monkeypatch):
    """And one that saves nothing needs no disk."""
    monkeypatch.setattr(preflight, "shutil", SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=0)))
    with caplog.at_level(logging.INFO, "hybrid_gkd"):
        begin(runnable(tmp_path, "trainer.save_freq=0"))
    assert caplog.text.count("memory of each worker by phase") == 1
    assert "optimizer_state" in caplog.text


@pytest.mark.slow
def test_a_start_makes_its_plan_once_and_asks_once_what_the_machine_has(tmp_path, monkeypatch):
    """The configuration of each model is read once: of the student, which the critic starts from, and of a judge."""
    calls = Counter()

    def counted(owner, name):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith("hybrid_gkd."):
                calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    for owner, name in (
        (preflight, "make_plan"), (plan, "plan_memory"), (torch.cuda, "device_count"), (spec, "model_spec"),
        (budget.Memory, "phases"),
    ):  # fmt: skip
        counted(owner, name)
    make_tiny_model(tmp_path / "judge", architecture="Qwen2ForSequenceClassification")
    make_tokenizer().save_pretrained(tmp_path / "judge")
    facts = check_all(runnable(
        tmp_path, "algorithm.adv_estimator=gae", "reward_model.enable=true", "trainer.save_freq=1",
        f"reward_model.model.path={tmp_path}/judge", "trainer.total_training_steps=2",
    ))  # fmt: skip
    started = {}

    def start(config, **arguments):
        arguments["on_placed"]([Placement(host="a", pid=1, visible_devices="")])
        started.update(arguments)
        raise Begun

    monkeypatch.setattr(run, "ray_cluster", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(run, "WorkerGroup", start)
    facts.config.run_dir.mkdir(parents=True)
    with contextlib.ExitStack() as stack, pytest.raises(Begun):
        run.Assembly(facts, stack, Stopping()).build(facts, stack)
    assert calls == {"make_plan": 1, "plan_memory": 1, "device_count": 1, "model_spec": 2, "phases": 2}
    assert started["copy_bytes"] == (sum(facts.plan.host.values()),) != (0,)
    assert pickle.loads(pickle.dumps(facts.plan)) == facts.plan
    assert started["engine_memory"] == facts.plan.memory.engine_memory
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.plan.gpu_bytes = 3


@pytest.mark.slow
def test_a_run_on_a_cluster_is_checked_against_the_gpus_that_it_gets(tmp_path):
    """All of them, and although they are empty."""
    config = runnable(
        tmp_path, "ray_init.address=far:6379", "trainer.device=cuda",
        "actor_rollout_ref.rollout.gpu_memory_utilization=5e-6",  # of 140 GiB 0.7 MiB, of 10 GiB a third of the weights
    )
    memory = check_all(config).plan.memory  # no GPU of this machine is asked
    worker = {"host": "a", "pid": 1, "visible_devices": "0", "device": "H200"}
    large = Placement(**worker, gpu="a 0", free_bytes=139 * GIB, total_bytes=140 * GIB)
    run.check_placement(memory, [large])
    small = Placement(**worker, rank=1, gpu="a 1", free_bytes=10 * GIB, total_bytes=10 * GIB)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: 5e-06 of a GPU of 10\.0 GiB"):
        run.check_placement(memory, [large, small])


@pytest.mark.parametrize("name", ["auto", "vllm"])
def test_a_vllm_that_is_not_supported_is_refused_before_anything_starts(monkeypatch, name):
    monkeypatch.setattr(vllm_compat, "vllm_version", lambda: "0.25.1")
    with pytest.raises(ModelError, match=r"vLLM 0\.25\.1 is not supported"):
        resolve_engine(name)
    assert resolve_engine("hf") == "hf"
    monkeypatch.setattr(vllm_compat, "vllm_version", lambda: "0.26.0")
    assert resolve_engine(name) == "vllm"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cuda", "auto", "bfloat16"),  # the actor's compute, not the type of the files, which may be float16
        ("cuda", "float16", "float16"), ("cuda", "float32", "float32"), ("cpu", "auto", "float32"),
    ],
)  # fmt: skip
def test_vllm_gets_the_type_that_the_configuration_means(tmp_path, monkeypatch, device, dtype, expected):
    given = {}

    def load(llm_class, arguments, *others, **options):
        given.update(arguments)
        raise Begun

    monkeypatch.setattr(vllm_compat, "import_llm", lambda device: None)
    monkeypatch.setattr("hybrid_gkd.rollout.vllm.load_llm", load)
    config = runnable(
        tmp_path, f"actor_rollout_ref.rollout.dtype={dtype}", "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"
    )
    with pytest.raises(Begun):
        VLLMRolloutEngine(config, device=torch.device(device), stop_token_ids=[0])
    assert given["dtype"] == expected
    assert given.get("gpu_memory_utilization") == (0.5 if device == "cuda" else None)
    config.actor_rollout_ref.rollout.gpu_memory_utilization = None
    room = budget.EngineMemory(weights=GIB, token=2**20, longest=2048, max_num_seqs=1000, reserved=4 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (42 * GIB, 80 * GIB))  # 6 GiB stay free beside it
    with pytest.raises(Begun):
        VLLMRolloutEngine(config, device=torch.device(device), stop_token_ids=[0], room=room)
    assert given.get("gpu_memory_utilization") == (0.4 if device == "cuda" else None)  # (42 - 6 - 4) / 80


def test_packages_that_python_would_compile_at_each_start_are_named(monkeypatch, tmp_path, caplog):
    facts = Facts(load_config(config_name="demo"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # where no bytecode is
    text = preflight.versions(facts)
    assert text.startswith(f"hybrid_gkd {hybrid_gkd.__version__}")
    command = rf"python -m compileall -q -j 0 {re.escape(str(Path(torch.__file__).parent))} "
    assert re.search(rf"torch, transformers, ray.* have no bytecode .*{command}", caplog.text)
    caplog.clear()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    preflight.versions(facts)
    assert not caplog.text


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("gemma2", {"head_dim": 8}, r"actor_rollout_ref\.model\.path: gemma2: .*final_logit_softcapping.*got 30\.0"),
        ("cohere", {}, r"actor_rollout_ref\.model\.path: cohere: config\.logit_scale changes the logits.*got 0\.0625"),
        ("gpt2", {}, r"actor_rollout_ref\.model\.path: gpt2: .* has dropout"),
        ("phi3", {
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            "original_max_position_embeddings": 47,
        }, r"data\.max_response_length: .*need 48 positions, but .* has 47 \(original_max_position_embeddings of"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_computed_exactly_is_refused_before_it_is_loaded(tmp_path, model_type, fields, message):
    config = runnable(tmp_path)
    folder = Path(config.actor_rollout_ref.model.path)
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 259, "pad_token_id": 257, "bos_token_id": None, "eos_token_id": 256,
        "max_position_embeddings": 128,
    }  # fmt: skip
    AutoConfig.for_model(model_type, **sizes, **fields).save_pretrained(folder)
    with pytest.raises((ModelError, ConfigError), match=message):
        inputs.student(Facts(config))


def test_the_engine_may_not_be_made_for_longer_sequences_than_the_model_computes_alike(tmp_path):
    config = runnable(tmp_path, "actor_rollout_ref.rollout.max_model_len=4096")
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len: .* has 2048 positions \(max_pos.*got 4096"):
        inputs.student(Facts(config))


@pytest.mark.slow
@pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
def test_an_architecture_that_vllm_cannot_serve_is_refused_with_the_engine_that_can(tmp_path):
    config, teacher = runnable(tmp_path), "actor_rollout_ref.teacher.model.path"
    file = Path(config.actor_rollout_ref.model.path) / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8")) | {"architectures": ["RenamedForCausalLM"]}
    file.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ModelError, match=r"model\.path: vLLM .*RenamedForCausalLM .* neither .*rollout\.name=hf uses"):
        inputs.student(Facts(config, engine="vllm"))
    assert "parameters" in inputs.student(Facts(config, engine="hf"))
    config.distillation.enabled, config.actor_rollout_ref.teacher.model.path = True, str(file.parent)
    with pytest.raises(ModelError, match=rf"{teacher}: vLLM cannot serve .*; actor_rollout_ref\.teacher\.backend=hf"):
        inputs.teacher(Facts(config))
    config.actor_rollout_ref.teacher.backend = "hf"
    assert "the run will start" in inputs.teacher(Facts(config))


def test_heads_that_the_ranks_of_an_engine_cannot_share_are_refused_by_the_key(tmp_path):
    config = runnable(tmp_path, "actor_rollout_ref.rollout.name=vllm")
    arr, rule = config.actor_rollout_ref, r"tensor_model_parallel_size: must divide the model's 2 attention .*; got 3"
    arr.rollout.tensor_model_parallel_size = 3
    with pytest.raises(ConfigError, match=rf"^actor_rollout_ref\.rollout\.{rule}"):
        inputs.student(Facts(config, engine="vllm"))
    config.distillation.enabled = True
    arr.teacher.model.path, arr.teacher.backend, arr.teacher.tensor_model_parallel_size = arr.model.path, "vllm", 3
    with pytest.raises(ConfigError, match=rf"^actor_rollout_ref\.teacher\.{rule}"):
        inputs.teacher(Facts(config, device="cuda", gpus=8))
    arr.teacher.tensor_model_parallel_size = 2
    assert "the run will start" in inputs.teacher(Facts(config, device="cuda", gpus=8))


def test_positions_that_a_teachers_own_prompts_need_are_counted():
    overrides = ("data.max_prompt_length=32", "data.max_response_length=16", "data.teacher_prompt_key=hint")
    config = tiny_config(*overrides, "data.max_teacher_prompt_length=90")
    assert (config.max_sequence_length, config.max_reading_length, config.teacher_length) == (48, 106, 107)
    check_positions("student", "folder", config, config.max_sequence_length, (64, "max_position_embeddings"))
    with pytest.raises(ConfigError, match=r"limits \(90 \+ 16\) need 107 positions, but the teacher folder has 64"):
        check_positions("teacher", "folder", config, config.teacher_length, (64, "max_position_embeddings"))


def test_full_determinism_is_refused_on_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = load_config([*LOCAL, "actor_rollout_ref.actor.fsdp_config.full_determinism=true", "trainer.device=cuda"])
    with pytest.raises(ConfigError, match=r"full_determinism: is for trainer\.device=cpu: on GPUs"):
        preflight.device(preflight.Facts(config))

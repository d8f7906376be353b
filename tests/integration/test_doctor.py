"""The doctor on real Ray workers, sockets and files, on the CPU."""

import contextlib
import json
import os
import signal
import socket
from types import SimpleNamespace

import peft
import psutil
import pytest
import torch
from processes import stop_process
from transformers import AutoModelForCausalLM

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import ConfigError, WorkerError
from hybrid_gkd.launch import doctor, preflight
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.plan import check_free_memory, checkpoint_bytes
from hybrid_gkd.launch.preflight import check_disk
from hybrid_gkd.launch.teacher import refuse_teacher_gpu
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.budget import GIB
from hybrid_gkd.offload.needs import place_teachers, plan_memory, trained_models
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.testing import make_tiny_model
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup
from hybrid_gkd.workers.placement import Placement
from hybrid_gkd.workers.pool import gather


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A student and prompts."""
    root = tmp_path_factory.mktemp("world")
    make_tiny_model(root / "student", seed=1, layers=1)
    rows = [{"prompt": f"What is {i} + {i}?"} for i in range(8)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return root


def arguments(world, out, *overrides):
    return [
        f"actor_rollout_ref.model.path={world}/student", f"actor_rollout_ref.teacher.model.path={world}/student",
        f"data.train_files={world}/train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=32",
        "data.max_response_length=16", f"trainer.default_local_dir={out}", "trainer.device=cpu",
        "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.name=hf", *overrides,
    ]


def examine(capsys, *args):
    """Exit code, and what was printed by check."""
    code = doctor.main(arguments(*args))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("ok", "FAIL", "skip"))]
    return code, {line[5:].partition(":")[0]: line for line in lines}, lines


def test_a_run_that_would_start(world, tmp_path, capsys):
    """With adapters to start from, whose answers are not those of the model below them."""
    before = set(psutil.Process().children(recursive=True))
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    student = AutoModelForCausalLM.from_pretrained(world / "student")
    peft.get_peft_model(student, lora).save_pretrained(tmp_path / "adapter")
    adapter = f"actor_rollout_ref.model.lora_adapter_path={tmp_path}/adapter"
    code = doctor.main(["--self-test", *arguments(world, tmp_path / "out", adapter)])
    text = capsys.readouterr().out
    assert code == 0, text
    checks = [line[5:].partition(":")[0] for line in text.splitlines() if line.startswith("ok   ")]
    assert checks == [
        "versions", "folders", "engine", "device", "loss", "student", "reward", "trackers", "tokenizers", "files",
        "data", "unused keys", "checkpoint", "critic", "reference", "reward model", "teacher", "compatibility", "disk",
        "plan", "placement", "GPU memory", "all-reduce", "self-test",
    ]
    assert "as its own teacher has a divergence of" in text
    for shown in ("ray ", "torch ", "worker 1: ", "2 worker(s) reach each", "optimizer_state", "on the CPU"):
        assert shown in text
    assert not (tmp_path / "out").exists()
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=60)
    assert not alive


def test_what_is_wrong_is_said_and_the_other_checks_run(world, tmp_path, capsys):
    """A folder below a file, a teacher that is not there, a device that is not there."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    code, lines, _ = examine(
        capsys, world, tmp_path / "file" / "out", "actor_rollout_ref.teacher.server_ip=127.0.0.1",
        "actor_rollout_ref.teacher.server_port=9", "actor_rollout_ref.teacher.connect_timeout=2",
        "trainer.n_gpus_per_node=1", *(() if torch.cuda.is_available() else ("trainer.device=cuda",)),
    )
    assert code == 1
    assert {name for name, line in lines.items() if line.startswith("FAIL")} - {"device"} == {"disk", "teacher"}
    if not torch.cuda.is_available():
        assert lines["device"] == "FAIL device: trainer.device: no CUDA device is visible; got 'cuda'"
    assert "trainer.default_local_dir: must be a folder that this user can write to" in lines["disk"]
    assert "127.0.0.1:9" in lines["teacher"]
    assert lines["all-reduce"].startswith("ok   all-reduce: 1 worker(s)")


def test_a_configuration_that_is_wrong_is_one_line(world, tmp_path, capsys):
    code, _, lines = examine(capsys, world, tmp_path, "data.train_batch_size=0")
    assert code == 1
    assert lines == ["FAIL configuration: data.train_batch_size: must be above 0; got 0"]


def test_a_disk_that_cannot_hold_a_checkpoint_is_refused(world, tmp_path):
    config = load_config(arguments(world, tmp_path))
    assert "is writable" in check_disk(config.run_dir, 4096)
    message = r"default_local_dir: the checkpoints of this run need 1048576\.0 GiB more, but .* free"
    with pytest.raises(ConfigError, match=message):
        check_disk(config.run_dir, 2**50)


def test_the_disk_is_compared_with_the_checkpoints_of_the_run(world, tmp_path, monkeypatch):
    """The run has two steps, so it keeps two checkpoints although three are allowed; three if the steps are unknown."""
    config = load_config(arguments(world, tmp_path, "trainer.save_freq=1", "trainer.total_training_steps=2"))
    trained = trained_models(config, student_spec(config))
    one = checkpoint_bytes(config.actor_rollout_ref.actor.checkpoint, trained)
    monkeypatch.setattr(preflight, "shutil", SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=2 * one)))
    assert "is writable" in preflight.disk(Facts(config, trained=trained, steps=2))
    with pytest.raises(ConfigError, match="default_local_dir"):
        preflight.disk(Facts(config, trained=trained))


def test_a_worker_that_hangs_in_the_all_reduce_is_named(world, tmp_path):
    """So it is where a peer reports the failure of their collective, and one that died is the cause of it."""

    def closed(worker):
        raise RuntimeError("connection closed by peer")

    config = load_config(arguments(world, tmp_path))
    with (
        ray_cluster(config, "cpu"),
        contextlib.closing(WorkerGroup(config, device="cpu", load=False, log_folder=tmp_path)) as group,
    ):
        group.all_reduce(Timeout(60))
        pid = group.placements[1].pid
        stop_process(pid)
        calls = group.actors.start("__ray_call__", closed)
        try:
            peer = r"no answer from worker 1 \("
            message = rf"worker 0 failed during the update: .*closed by peer \(.*worker_0\.log\); {peer}"
            with pytest.raises(WorkerError, match=message):
                gather("update", calls)
            message = r"no answer from worker 1 within .* during the all-reduce test: worker 1 \(.* cpu, log: .*_1\.log"
            with pytest.raises(WorkerError, match=message):
                group.all_reduce(Timeout(3))
        finally:
            os.kill(pid, signal.SIGKILL)
        (again, _), (_, pending) = group.actors.start("__ray_call__", closed).items(), calls.items()
        with pytest.raises(WorkerError, match=r"worker 1 died during the update: .*worker_1\.log"):
            gather("update", dict([again, pending]))


def placed(free, gpu="a 3"):
    """A worker on a GPU, made by hand: the tests have none."""
    return [
        Placement(
            host="a", pid=1, visible_devices="3", device="H200", gpu=gpu,
            free_bytes=free, total_bytes=140 * GIB,
        )
    ]


def test_a_gpu_that_others_fill_is_refused(world, tmp_path):
    config = load_config(arguments(world, tmp_path, "actor_rollout_ref.teacher.server_ip=far"))
    memory = plan_memory(config, trained_models(config, student_spec(config)), "cuda")
    check_free_memory(memory, placed(40 * GIB))
    message = r"worker 0 \(a, CUDA_VISIBLE_DEVICES=3, H200, 1\.0 of 140\.0 GiB free\) needs"
    with pytest.raises(ConfigError, match=message):
        check_free_memory(memory, placed(GIB))


def test_a_worker_on_the_gpu_of_the_local_teacher_is_refused(world, tmp_path, monkeypatch):
    config = load_config(arguments(world, tmp_path, "actor_rollout_ref.teacher.device=auto"))
    teacher = place_teachers(config, device="cuda", gpus=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    refuse_teacher_gpu(teacher, placed(GIB, f"{socket.gethostname()} uuid-0"))
    with pytest.raises(ConfigError, match=r"teacher\.server_ip: worker 0 \(a, .* was assigned GPU 2"):
        refuse_teacher_gpu(teacher, placed(GIB, f"{socket.gethostname()} uuid-2"))

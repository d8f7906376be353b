"""Commands and examples of the pages, run as they stand in a folder of a user, with short settings behind them."""

import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import documented
import pytest
import torch
from documented import ROOT

from hybrid_gkd.__main__ import main
from hybrid_gkd.config import CustomRewardFunction, RewardConfig
from hybrid_gkd.losses.divergence import check_loss_fn, forward_kl
from hybrid_gkd.scoring.builtin_rewards import Response
from hybrid_gkd.scoring.reward_functions import Score, load_functions
from hybrid_gkd.testing import make_tiny_model

SECONDS = 300
SERVICE = ["--backend", "hf", "--device", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Where a user starts the program: prompts, two models, and the files of the pages' examples."""
    folder = tmp_path_factory.mktemp("user")
    make_tiny_model(folder / "student", seed=1, layers=1)
    make_tiny_model(folder / "teacher", seed=2, layers=2)
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in ("my_loss.py", "my_reward.py", "judge.py", "my_engine.py", "my_tracker.py", "test_my_loss.py"):
        (folder / name).write_text(documented.example(name), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        yield folder


def short(folder, experiment):
    """Settings that make a run a short one on the tiny models."""
    return [
        f"actor_rollout_ref.model.path={folder}/student", f"actor_rollout_ref.teacher.model.path={folder}/teacher",
        "data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=8", "trainer.device=cpu",
        "actor_rollout_ref.teacher.backend=hf", "actor_rollout_ref.rollout.max_num_seqs=8",
        f"trainer.default_local_dir={folder}/outputs", f"trainer.experiment_name={experiment}",
        "trainer.total_training_steps=1", "trainer.save_freq=0", "trainer.test_freq=0",
    ]


def words(command, *more):
    """The command with this interpreter and this repository, whatever the working directory."""
    given = documented.arguments(command)
    if given is not None:
        return [sys.executable, "-m", "hybrid_gkd", *given, *more]
    program, script, *rest = shlex.split(command)
    return [sys.executable if "python" in program else program, str(ROOT / script) if "/" in script else script, *rest,
            *more]  # fmt: skip


def run(command, *more):
    """Run a command and return its output."""
    done = subprocess.run(words(command, *more), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def service(folder):
    """Ports of the service that docs/teacher.md starts, with its keys."""
    run(documented.KEYS)
    ready = folder / "ready.json"
    own = ["--ckpt-path", f"{folder}/teacher", "--workers", "1", "--tp-size", "1", "--host", "127.0.0.1"]
    ports = ["--port", "0", "--worker-port", "0", "--ready-file", str(ready)]
    with open(folder / "service.log", "wb") as log:
        process = subprocess.Popen(words(documented.SERVE, *own, *ports, *SERVICE), stdout=log, stderr=log)
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "service.log").read_text(encoding="utf-8")
        yield SimpleNamespace(**json.loads(ready.read_text(encoding="utf-8")))
    finally:
        process.terminate()
        process.wait(SECONDS)


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_the_teacher_of_the_page_serves_a_run_a_client_and_a_second_worker(folder, service):
    """Keys, service, status, one more worker and client, the client in Python, and a run that trains on its scores."""
    status = ["--addr", f"127.0.0.1:{service.port}"]
    assert "workers alive      1" in run(documented.STATUS, *status)
    run(documented.MORE_KEYS)
    assert (folder / "teacher_keys" / "server" / "clients" / "second.key").exists()
    joining = words(
        documented.JOIN, "--ckpt-path", f"{folder}/teacher", "--proxy-addr", f"127.0.0.1:{service.worker_port}",
        *SERVICE,
    )
    with open(folder / "joined.log", "wb") as log:
        joined = subprocess.Popen(joining, stdout=log, stderr=log)
    try:
        client = documented.example("teacher_client.py")
        client = client.replace("Qwen/Qwen3-0.6B", f"{folder}/student")
        found = {}
        exec(client.replace("127.0.0.1:15555", f"127.0.0.1:{service.port}"), found)
        (scores,) = found["scores"]
        assert scores.ids.shape == (1, 64)
        given = ["actor_rollout_ref.teacher.server_ip=127.0.0.1", "trainer.logger=[jsonl]"]
        port = f"actor_rollout_ref.teacher.server_port={service.port}"
        run(documented.GIVEN_TEACHER, *short(folder, "given"), *given, port, "actor_rollout_ref.rollout.name=hf")
        wait_for(lambda: "workers alive      2" in run(documented.STATUS, *status))
    finally:
        joined.terminate()
        joined.wait(SECONDS)
    (row,) = (folder / "outputs" / "hybrid_gkd" / "given" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(row)["actor/kl_loss"] > 0


@pytest.mark.parametrize("command", [documented.DRY_RUN, documented.ONE_CARD, documented.PPO])
def test_the_plan_of_a_documented_run(folder, capsys, command):
    """In this process: only imports would take long in another one."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        code = main([*documented.arguments(command), *short(folder, "plan"), "--dry-run"])
    finally:
        signal.signal(signal.SIGTERM, handler)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    _, _, checks = page.partition("Checks, in this order:")
    described = [name for name in re.findall(r"`([\w-]+)`", checks[: checks.index("\n\n")]) if name.islower()]
    assert re.findall(r"^ok   ([\w-]+):", shown.out, re.MULTILINE) == described
    assert not (folder / "outputs" / "hybrid_gkd" / "plan").exists()


@pytest.mark.slow
def test_loss_reward_engine_and_tracker_of_ones_own_train_together(folder):
    """All commands of docs/extending.md in one."""
    own = [word for command in documented.OWN_OBJECTS for word in documented.arguments(command)]
    files = ["data.train_files=train.jsonl", "data.val_files=val.jsonl", "reward.answer_key=answer"]
    steps = ["trainer.total_training_steps=2", "trainer.test_freq=2"]
    text = run("bash run_gkd.sh", *own, *short(folder, "own"), *files, *steps)
    assert "held-out reward: student after" in text
    (first, second) = (folder / "outputs" / "hybrid_gkd" / "own" / "loss.csv").read_text(encoding="utf-8").splitlines()
    assert (first.partition(",")[0], second.partition(",")[0]) == ("1", "2")


def load(name):
    """A module of the user's folder."""
    spec = importlib.util.spec_from_file_location(name, f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_of_a_loss_is_what_it_says():
    """Its formula, written out; without its share of the teacher it is forward_kl."""
    module = load("my_loss")
    check_loss_fn(module.skewed_kl, tail="bucket")
    teacher, student = torch.randn(2, 6, 9, dtype=torch.float64).log_softmax(-1)
    p = torch.cat([teacher[:, :4].exp(), teacher[:, 4:].exp().sum(-1, keepdim=True)], -1)
    q = torch.cat([student[:, :4].exp(), student[:, 4:].exp().sum(-1, keepdim=True)], -1)
    tails = {"teacher_tail": p[:, 4].log(), "student_tail": q[:, 4].log()}
    found = module.skewed_kl(teacher[:, :4], student[:, :4], tail="bucket", **tails)
    torch.testing.assert_close(found, (p * (p / (0.1 * p + 0.9 * q)).log()).sum(-1))
    module.FRACTION = 1e-12
    found = module.skewed_kl(teacher[:, :4], student[:, :4], tail="bucket", **tails)
    torch.testing.assert_close(found, forward_kl(teacher[:, :4], student[:, :4], tail="bucket"))


def test_the_examples_of_rewards():
    functions = load_functions(reward_config("my_reward.py", "score"))
    asked = Response(text="It is four apples", answer="four pears")
    assert functions["custom"].compute([asked]) == [Score(0.5)]
    functions = load_functions(reward_config("judge.py", "compute_score"))
    asked = Response(text="It is 4", answer="4")
    assert functions["custom"].compute([asked]) == [Score(0.5, {"right": 1.0, "boxed": 0.0})]


def reward_config(path, name):
    return RewardConfig(answer_key="answer", custom_reward_function=CustomRewardFunction(path=path, name=name))


def test_the_example_of_a_tracker_continues_its_table(tmp_path):
    tracker = load("my_tracker").MyTracker
    info = SimpleNamespace(run_dir=tmp_path, resume=False, start_step=0)
    first = tracker(info)
    for step in (1, 2, 3):
        first.log({"actor/kl_loss": step / 4}, step)
    first.log_generations([], 3)
    first.close(failed=True)
    again = tracker(SimpleNamespace(run_dir=tmp_path, resume=True, start_step=2))
    again.log({"actor/kl_loss": 0.5}, 3)
    again.close(failed=False)
    assert (tmp_path / "loss.csv").read_text(encoding="utf-8").splitlines() == ["1,0.25", "2,0.5", "3,0.5"]


def test_the_example_of_a_test_passes(tmp_path):
    load("test_my_loss").test_the_loss_falls(tmp_path)

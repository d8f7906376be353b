"""`python -m hybrid_gkd` as a user runs it: real Ray, FSDP2, vLLM, teacher service, files and signals."""

import contextlib
import gzip
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from processes import command_line, descendants, files_of, is_alive

from hybrid_gkd.__main__ import main
from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.launch import doctor, evaluate
from hybrid_gkd.reporting.trace import write_trace
from hybrid_gkd.runtime.signals import SIGNALS
from hybrid_gkd.runtime.spans import Span, hidden_seconds, seconds
from hybrid_gkd.student.checkpoint_store import LATEST, find_damage
from hybrid_gkd.teacher.server.local import child_environment
from hybrid_gkd.testing import make_tiny_model

ENGINE = "vllm" if vllm_compat.vllm_available() else "hf"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Student, teacher, a teacher of another vocabulary, and prompts."""
    root = tmp_path_factory.mktemp("world")
    make_tiny_model(root / "student", seed=1, layers=1)
    make_tiny_model(root / "teacher", seed=2, layers=2)
    make_tiny_model(root / "stranger", seed=3, extra_tokens=("<|other|>",))
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (root / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]), encoding="utf-8")
    (root / "empty.jsonl").write_text("", encoding="utf-8")
    return root


def arguments(world, out, *overrides):
    """A short GKD run on the tiny models."""
    return [
        f"actor_rollout_ref.model.path={world}/student", f"actor_rollout_ref.teacher.model.path={world}/teacher",
        f"data.train_files={world}/train.jsonl", f"data.val_files={world}/val.jsonl", "data.prompt_key=question",
        "reward.answer_key=answer", "data.train_batch_size=8", "data.max_prompt_length=32",
        "data.max_response_length=16", "actor_rollout_ref.actor.optim.lr=1e-2", "distillation.topk=32",
        f"actor_rollout_ref.rollout.name={ENGINE}",
        "actor_rollout_ref.teacher.backend=hf", "trainer.total_training_steps=4", "trainer.save_freq=2",
        "trainer.test_freq=2", f"trainer.default_local_dir={out}", "trainer.device=cpu",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}", *overrides,
    ]


HF = ("actor_rollout_ref.rollout.name=hf",)
"""For runs whose subject is not the engine: vLLM takes twice as long to start."""
OWN_POOL = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=1")
NO_CLUSTER = ("ray_init.address=127.0.0.1:1",)
"""For runs that a check has to end: nothing is begun beside the checks, and a run that passes them ends there."""


def start(args, **options):
    command = [sys.executable, "-m", "hybrid_gkd", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process, timeout=300):
    """Exit code, standard output, standard error; whatever the process started must be gone."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert_gone(children)
    return process.returncode, out, err


def assert_gone(processes, seconds=30):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive, list(map(command_line, alive))


def run(args, **options):
    return finish(start(args, **options))


def run_here(capsys, args, program=main):
    """The same in this process, where it matters what is printed and written: in another one the imports take long."""
    handlers, before = {number: signal.getsignal(number) for number in SIGNALS}, psutil.Process().children()
    capsys.readouterr()
    try:
        code = program(args)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert_gone(set(psutil.Process().children()) - set(before))
    return code, *capsys.readouterr()


def run_watched(args, environment=None):
    """The same, and (address, command line) of all that the run and its descendants were seen to listen on."""
    process = start(args, env={**os.environ, **(environment or {})})
    seen, known, ended = set(), set(), threading.Event()

    def look():
        while not ended.wait(0.3):
            if (listening := listening_sockets()) <= known:
                continue  # to ask every process takes a third of what the run does
            known.update(listening)
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                for each in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        places = [one.laddr for one in each.net_connections() if one.status == psutil.CONN_LISTEN]
                        seen.update((place.ip, command_line(each)[:200]) for place in places)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        return *finish(process), seen
    finally:
        ended.set()
        watching.join()


def ray_folders(processes):
    """Folders of Ray's sessions, by the command lines of its processes."""
    return {Path(found) for each in processes for found in re.findall(r"/\S*/gkd_\w+", command_line(each))}


def listening_sockets():
    """Inodes of all sockets of this machine that listen for TCP connections."""
    tables = [Path("/proc/net", name).read_text(encoding="utf-8").splitlines()[1:] for name in ("tcp", "tcp6")]
    return {fields[9] for fields in map(str.split, itertools.chain(*tables)) if fields[3] == "0A"}


def refuse_strangers(seen):
    """Check that all listening sockets are reachable from this machine only."""
    assert seen
    assert not {each for each in seen if not each[0].removeprefix("::ffff:").startswith("127.")}


def rows_of(out, experiment="gkd"):
    lines = (out / "hybrid_gkd" / experiment / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def wait_for(condition, what, seconds=180):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)
    return found


def logged_step(out, step, experiment="gkd"):
    """A condition: the run has logged this step."""

    def condition():
        file = out / "hybrid_gkd" / experiment / "metrics.jsonl"
        return file.exists() and any(
            json.loads(line)["step"] >= step for line in file.read_text(encoding="utf-8").splitlines()
        )

    return condition


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("out")
    code, text, errors, seen = run_watched([
        *arguments(world, out), "trainer.profile_steps=[2]", "trainer.best_metric=val/forward_kl"
    ])  # fmt: skip
    assert code == 0, errors
    return out, text, errors, seen


def test_a_run_trains_and_says_where_everything_is(finished):
    out, text, errors, _ = finished
    rows = rows_of(out)
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert rows[4]["actor/kl_loss"] < rows[1]["actor/kl_loss"]
    assert all({"val/accuracy", "val/reverse_kl"} <= rows[step].keys() for step in (0, 2, 4))
    assert rows[4]["val/forward_kl"] < rows[0]["val/forward_kl"]
    assert {row["training/staleness"] for step, row in rows.items() if step} == {0.0}
    for shown in ("student after", "actor/kl_loss", "val/reverse_kl", "global_step_4", "metrics.jsonl", "config.yaml"):
        assert shown in text
    best = min((2, 4), key=lambda step: rows[step]["val/forward_kl"])
    folder = out / "hybrid_gkd" / "gkd" / f"global_step_{best}"
    value = rows[best]["val/forward_kl"]
    assert re.search(rf"best checkpoint by val/forward_kl +{value:.4f} after step {best}: {folder}\n", text)
    assert folder.is_dir()
    assert f"rollout engine {ENGINE}" in errors
    assert f"worker 0: {socket.gethostname()}, cpu" in errors
    assert "engine hf" in errors.partition("teacher:")[2]
    steps = [line for line in errors.splitlines() if " timing/wait_prev_teacher=" in line]
    assert [line.split()[3] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    log = (out / "hybrid_gkd" / "gkd" / "run.log").read_text(encoding="utf-8")
    assert all(line in log for line in ("INFO versions: ", "INFO run folder: ", "DEBUG step 4  actor/"))
    assert f"{(out / 'hybrid_gkd' / 'gkd' / 'report.html').as_uri()}\n" in text
    report = (out / "hybrid_gkd" / "gkd" / "report.html").read_text(encoding="utf-8")
    assert '"outcome":"finished","error":null,"step":4,"total":4' in report


def test_the_workers_begin_after_the_checks(finished):
    log = (finished[0] / "hybrid_gkd" / "gkd" / "run.log").read_text(encoding="utf-8")
    moments = ("INFO versions: ", "INFO worker 0: ", "INFO run folder")
    places = [log.rindex(each) for each in moments]
    assert places == sorted(places)


def test_a_failed_check_leaves_nothing(world, tmp_path):
    """The last one but two. Nothing that it would have to stop has begun."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray_") as folder:  # a path that is short enough for sockets
        stranger = f"actor_rollout_ref.teacher.model.path={world}/stranger"
        code, _, errors, seen = run_watched(arguments(world, tmp_path / "out", stranger), {"RAY_TMPDIR": folder})
        assert not [command for _, command in seen if "raylet" in command]
        assert not list(Path(folder).iterdir())
    assert code == 1
    assert errors.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_everything_listens_on_loopback_only(finished):
    """Other runs below look too: two workers, and two pools, have stores and groups besides."""
    seen = finished[-1]
    for program in ("hybrid_gkd.teacher serve", "raylet", "gcs_server", "ray::Worker"):
        assert [address for address, command in seen if program in command], program
    refuse_strangers(seen)


def test_the_trace_shows_what_the_metrics_say(finished):
    """One row per participant; sums of the trainer's spans are timing/*, and the rest follows from the others."""
    out, _, _, _ = finished
    rows = rows_of(out).values()
    events = json.loads((out / "hybrid_gkd" / "gkd" / "trace.json").read_text(encoding="utf-8"))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"trainer", "teacher", "worker 0"}
    spans = [
        Span(names[event["pid"]], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events if event["ph"] == "X"
    ]
    assert {span.name for span in spans if span.row == "worker 0"} == {
        "initialize", "gen", "update_actor", "sync_rollout_weights", "testing"
    }
    for row, name in [(row, name) for row in ("trainer", "worker 0") for name in ("gen", "update_actor")]:
        found = [each["args"]["step"] for each in events if (names[each["pid"]], each["name"]) == (row, name)]
        assert found == sorted(found), (row, name)
        assert set(found) - {0} == {1, 2, 3, 4}, (row, name)  # 0: the validation before training
    requests = [event["args"]["step"] for event in events if event["name"] == "request"]
    assert set(requests) == {1, 2, 3, 4}
    curves = {(names[event["pid"]], event["name"]) for event in events if event["ph"] == "C"}
    assert {("worker 0", "host memory, GiB"), ("trainer", "throughput, tokens/s")} <= curves
    for name in ("gen", "wait_prev_teacher", "update_actor", "sync_rollout_weights", "testing", "save_checkpoint"):
        found = [span.end - span.start for span in spans if (span.row, span.name) == ("trainer", name)]
        written = sum(row.get(f"timing/{name}", 0.0) for row in rows)
        last = 0 if name not in ("save_checkpoint", "sync_rollout_weights") else max(found)  # after the last report
        assert written - 1e-3 <= sum(found) <= written + last + 1e-3, name
    requests = [(span.start, span.end) for span in spans if span.row == "teacher"]
    told = [row["timing/get_teacher_knowledge"] for row in rows if row["step"]]
    assert sum(told) == pytest.approx(seconds(requests), abs=1e-3)
    hidden = [row["teacher/hidden_fraction"] * part for row, part in zip(list(rows)[1:], told, strict=True)]
    assert sum(hidden) == pytest.approx(hidden_seconds(requests, spans), abs=1e-3)


def test_a_step_of_choice_is_profiled(finished):
    """In the form of trace.json; the other steps are not."""
    out, _, errors, _ = finished
    folder = out / "hybrid_gkd" / "gkd"
    assert sorted(path.name for path in folder.glob("profile*")) == ["profile_step_2_worker_0.json.gz"]
    assert f"torch's profiler, step 2: {folder}/profile_step_2_worker_0.json.gz" in errors
    with gzip.open(folder / "profile_step_2_worker_0.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert any(name.startswith("Optimizer.step") for name in names)
    assert "aten::embedding" in names


def test_models_and_checkpoints_are_validated_into_one_table(finished, world, tmp_path, capsys):
    """The untrained student and a checkpoint, of which only the shards are left: what the run itself has reported."""
    shutil.copytree(finished[0] / "hybrid_gkd" / "gkd", tmp_path / "first")
    shutil.rmtree(tmp_path / "first" / "global_step_4" / "huggingface")
    before = sorted(tmp_path.rglob("*"))
    models = [f"{world}/student", f"{tmp_path}/first/global_step_4"]
    settings = ["--config-path", f"{tmp_path}/first", "--config-name", "config", "--data", f"{world}/val.jsonl"]
    settings += ["--json", f"trainer.default_local_dir={tmp_path}/out", *HF]
    code, text, errors = run_here(capsys, [*models, *settings], evaluate.main)
    assert code == 0, errors
    rows = rows_of(finished[0])
    for found, model, step in zip(json.loads(text), models, (0, 4), strict=True):
        assert found.pop("model") == model
        assert set(found) >= {"val/accuracy", "val/forward_kl", "val/reverse_kl", "val/num_prompts"}
        assert found == pytest.approx({name: rows[step][name] for name in found}, rel=1e-3)
    assert sorted(path for path in tmp_path.rglob("*") if tmp_path / "out" not in (path, *path.parents)) == before


def test_the_checkpoint_is_a_hugging_face_folder(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished[0] / "hybrid_gkd" / "gkd" / "global_step_4" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert model(ids).logits.shape == (1, ids.shape[1], model.config.vocab_size)


def test_an_interrupted_and_resumed_run_ends_as_an_uninterrupted_one(finished, world, tmp_path, capsys):
    """SIGTERM after step 1, then the same command again: it goes on from the step that was in hand.

    The first begins anew beside a run of before, and while it runs no other one may write to its folder.
    """
    folder, wanted = tmp_path / "hybrid_gkd" / "gkd", arguments(world, tmp_path, "trainer.save_freq=-1")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 700}\n', encoding="utf-8")
    process = start([*wanted, "trainer.resume_mode=disable"], start_new_session=True)
    try:
        wait_for((folder / "config.yaml").exists, "the run folder")
        code, _, errors = run_here(capsys, [*wanted, *NO_CLUSTER])
        assert code == 1
        assert "trainer.experiment_name" in errors.splitlines()[-1]
        wait_for(logged_step(tmp_path, 1), "step 1")
    finally:
        # To the process group, as `timeout` and terminals do: the workers have to be there to save.
        os.killpg(process.pid, signal.SIGTERM)
        code, _, errors = finish(process)
    assert (tmp_path / "hybrid_gkd" / "gkd.1" / "metrics.jsonl").read_text(encoding="utf-8") == '{"step": 700}\n'
    if code != 0:  # the run may have been at its last step already
        assert code == 128 + signal.SIGTERM, errors
        assert "Traceback" not in errors
        assert "SIGTERM: the run ends after the current step is finished and saved" in errors
        (saved,) = folder.glob("global_step_*")
        assert f"stopped after step {saved.name.removeprefix('global_step_')} of 4 on request" in errors
        assert f"resume from: {saved}, after step " in errors
        code, output, errors = run(wanted)
        assert code == 0, errors
        assert f"resuming from {saved}" in errors
        assert "  wall time of this start  " in output
    whole, resumed = rows_of(finished[0]), rows_of(tmp_path)
    assert sorted(resumed) == sorted(whole)
    # Scores depend in the last bits on how the teacher happened to batch its requests; those are rounded to float16.
    for name in ("actor/kl_loss", "actor/grad_norm", "response_length/mean", "val/accuracy"):
        assert resumed[4][name] == pytest.approx(whole[4][name], rel=1e-3), name


FIRST_BATCH = ("actor/kl_loss", "actor/grad_norm", "response_length/mean")
"""Metrics of the first step that are those of every scheduler."""


def test_generation_ahead_of_the_update_trains_every_batch_and_says_how_stale_it_was(finished, world, tmp_path):
    """With separate pools."""
    code, _, errors, seen = run_watched(
        arguments(world, tmp_path, "trainer.scheduler=one_step_off", "trainer.save_freq=0", *OWN_POOL)
    )
    assert code == 0, errors
    refuse_strangers(seen)
    assert errors.count("Rollout weight sync completed in ") == 5
    whole, rows = rows_of(finished[0]), rows_of(tmp_path)
    assert [rows[step]["training/staleness"] for step in range(1, 5)] == [0, 1, 1, 1]
    assert [rows[s]["prompt_length/mean"] for s in range(1, 5)] == [whole[s]["prompt_length/mean"] for s in range(1, 5)]
    for name in FIRST_BATCH:
        assert rows[1][name] == pytest.approx(whole[1][name], rel=1e-3), name
    assert rows[4]["actor/kl_loss"] < rows[1]["actor/kl_loss"]


def test_a_resumed_run_trains_the_batches_that_were_in_flight(finished, world, tmp_path):
    """Killed after step 3, when step 4 has been generated with the weights of step 2 or before. No process is left of
    it. With importance weights, which are 1 for the first batch and not for what is stale."""
    wanted = arguments(world, tmp_path, "trainer.scheduler=two_step_off", "algorithm.rollout_is_threshold=2")
    process, folder = start(wanted), tmp_path / "hybrid_gkd" / "gkd"
    wait_for(logged_step(tmp_path, 3), "step 3")
    wait_for((folder / LATEST).exists, "the end of the writing behind step 3")
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=60)
    assert len(children) > 3
    assert_gone(children)
    events = json.loads(write_trace(folder).read_text(encoding="utf-8"))
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "trainer", "teacher", "worker 0"
    }
    goes_on_after = int((folder / LATEST).read_text(encoding="utf-8"))  # 4 where all steps were done by then
    code, _, errors = run(wanted)
    assert code == 0, errors
    whole, rows = rows_of(finished[0]), rows_of(tmp_path)
    assert [rows[s]["prompt_length/mean"] for s in range(1, 5)] == [whole[s]["prompt_length/mean"] for s in range(1, 5)]
    after = 0 if goes_on_after == 2 else 2
    staleness = [0, 1, after, min(after + 1, 2)]
    assert [rows[s]["training/staleness"] for s in range(1, 5)] == staleness
    for name in FIRST_BATCH:
        assert rows[1][name] == pytest.approx(whole[1][name], rel=1e-3), name
    sizes = [rows[step]["actor/importance/effective_sample_size"] for step in range(1, 5)]
    assert sizes[0] == pytest.approx(1.0, abs=1e-4)
    assert max(size for size, stale in zip(sizes, staleness, strict=True) if stale) < 0.999


def test_a_finished_run_started_again_says_so_and_touches_nothing(finished, world, capsys):
    """Also with another loss, which it refuses."""
    run_dir = finished[0] / "hybrid_gkd" / "gkd"
    assert find_damage(run_dir / "global_step_4") == {}
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    code, text, errors = run_here(capsys, arguments(world, finished[0], *NO_CLUSTER))  # nothing is started
    assert code == 0, errors
    assert "nothing to do" in text
    assert "all 4 steps of" in text
    code, _, errors = run_here(capsys, arguments(world, finished[0], "distillation.loss_mode=reverse_kl"))
    assert code == 1
    assert "trainer.allow_changed_config" in errors
    assert "distillation.loss_mode: forward_kl -> reverse_kl" in errors
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_resuming_with_other_data_is_refused(finished, world, capsys):
    written = next(finished[0].glob("*/*/config.yaml"))
    before = written.read_text(encoding="utf-8")
    code, _, errors = run_here(capsys, arguments(world, finished[0], "data.train_batch_size=4"))
    assert code == 1
    assert "data.train_batch_size" in errors
    assert "with 8, this run has 4" in errors
    assert written.read_text(encoding="utf-8") == before


def test_files_beside_the_run_take_no_module_s_place_in_any_process(world, tmp_path):
    """Driver, teacher, workers and the processes of rewards; a module of one's own is found there."""
    for name in ("tokenize", "random", "signal", "secrets", "queue", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user\'s file was imported')\n", encoding="utf-8")
    (tmp_path / "own.py").write_text(
        "def loss(teacher_logprobs, student_logprobs, *, tail, student_tail):\n"
        "    return (teacher_logprobs.exp() * (teacher_logprobs - student_logprobs)).sum(-1)\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n",
        encoding="utf-8",
    )
    code, _, errors = run(arguments(
        world, tmp_path / "out", "distillation.loss_fn=own:loss", "reward.custom_reward_function.path=own.py",
        "trainer.total_training_steps=1", "trainer.save_freq=0", *HF,
    ), cwd=tmp_path)  # fmt: skip
    assert code == 0, errors
    assert "user's file" not in "".join(file.read_text(encoding="utf-8") for file in (tmp_path / "out").rglob("*.log"))
    assert rows_of(tmp_path / "out")[1]["val/accuracy"] > 0


def test_two_interrupts_while_it_loads_leave_no_process(world, tmp_path):
    process = start(arguments(world, tmp_path, *HF))
    started = psutil.Process(process.pid)
    wait_for(lambda: descendants(started, "Agent"), "Ray's agents")
    children = started.children(recursive=True)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "ended by SIGINT; all processes of this run are stopped"
    assert "Traceback" not in errors
    assert not [child for child in children if is_alive(child.pid)]


def test_a_killed_rollout_pool_ends_the_run_by_name_after_the_last_state_is_saved(world, tmp_path):
    process = start(
        arguments(
            world, tmp_path, "trainer.total_training_steps=500", "trainer.save_freq=-1", "trainer.test_freq=0",
            "trainer.scheduler=one_step_off", *OWN_POOL, *HF,
        )
    )
    wait_for(logged_step(tmp_path, 1), "step 1")
    log = str(tmp_path / "hybrid_gkd" / "gkd" / "logs" / "rollout_0.log")
    (victim,) = [
        child for child in psutil.Process(process.pid).children(recursive=True)
        if log in files_of(child)
    ]
    victim.kill()
    code, _, errors = finish(process)
    assert code == 1
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("error: rollout worker 0 died during ")
    assert "rollout_0.log" in errors.splitlines()[-1]
    (folder,) = (tmp_path / "hybrid_gkd" / "gkd").glob("global_step_*")
    step = int(folder.name.removeprefix("global_step_"))
    assert f"saved the state after step {step}: {folder}" in errors
    assert step in (max(rows_of(tmp_path)), max(rows_of(tmp_path)) + 1)  # published or not, when the worker died


@pytest.mark.parametrize(
    ("victim", "scheduler", "teacher", "name", "saved"), [
        ("ray::Worker", "sync", ENGINE, "worker 0", 0),  # the raylet's command names a worker too
        ("gcs_server ", "one_step_off", "hf", "Ray's control store (gcs_server)", 1),
        ("raylet/raylet ", "sync", "hf", "Ray's raylet", 0),
    ],
)  # fmt: skip
def test_a_killed_part_ends_the_run_by_name(world, tmp_path, victim, scheduler, teacher, name, saved):
    """The state of the last step is lost with the student, and otherwise saved."""
    process = start(
        arguments(
            world, tmp_path, "trainer.total_training_steps=500", "trainer.save_freq=-1", "trainer.test_freq=0",
            f"trainer.scheduler={scheduler}", f"actor_rollout_ref.teacher.backend={teacher}", *HF,
        )
    )
    wait_for(logged_step(tmp_path, 1), "step 1")
    children = psutil.Process(process.pid).children(recursive=True)
    victims = [child for child in children if victim in command_line(child)]
    assert victims
    folders = ray_folders(children)
    assert folders
    for child in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    code, _, errors = finish(process)
    assert code == 1
    assert errors.splitlines()[-1].startswith("error: ")
    assert name in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert "Some common causes" not in errors  # a paragraph of Ray's, which is in run.log
    assert ("resume from: " if saved else "no checkpoint to resume from") in errors
    folder = tmp_path / "hybrid_gkd" / "gkd"
    assert len(list(folder.glob("global_step_*"))) == saved
    last = json.loads((folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert name in last["error"]
    assert not [each for each in folders if each.exists()]


def test_a_killed_teacher_of_the_run_is_started_again_and_no_step_is_lost(world, tmp_path):
    """Broker and worker; generation runs ahead meanwhile."""
    process = start(arguments(
        world, tmp_path, "trainer.total_training_steps=30", "trainer.save_freq=0", "trainer.test_freq=0",
        "trainer.scheduler=two_step_off", *HF,
    ))  # fmt: skip
    wait_for(logged_step(tmp_path, 1), "step 1")
    for child in descendants(psutil.Process(process.pid), "hybrid_gkd.teacher"):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    code, _, errors = finish(process)
    assert code == 0, errors
    assert "the teacher of this run was killed by SIGKILL (out of memory?), restart 1 of 5; its log: " in errors
    assert sorted(rows_of(tmp_path)) == list(range(31))


def test_a_supervised_run_whose_driver_is_killed_ends_with_all_of_its_steps(world, tmp_path):
    """Also with a part of Ray killed afterwards; nothing is left of any start."""
    process = start([*arguments(world, tmp_path, "trainer.save_freq=1", *HF), "--supervise"])
    supervisor = psutil.Process(process.pid)
    for step, victim in ((1, "-m hybrid_gkd actor"), (2, "raylet/raylet ")):
        wait_for(logged_step(tmp_path, step), f"step {step}")
        for child in descendants(supervisor, victim):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    code, _, errors = finish(process, timeout=600)
    assert code == 0, errors
    rows = rows_of(tmp_path)
    assert sorted(rows) == list(range(5))
    log = (tmp_path / "hybrid_gkd" / "gkd" / "run.log").read_text(encoding="utf-8")
    assert " WARNING restart 1 of 20 in 2 s, since step " in log
    if "restart 2 of 20" in log:  # else the run had ended before
        assert rows[4]["reliability/restarts"] == 2
        assert rows[4]["reliability/seconds_lost"] > 0


def test_a_given_teacher_is_used_and_left_running(world, finished, tmp_path, capsys):
    """The teacher is the student that another run has exported: the engine loads that folder's own weights."""
    exported = finished[0] / "hybrid_gkd" / "gkd" / "global_step_4" / "huggingface"
    ready = tmp_path / "ready.json"
    service = subprocess.Popen(
        [
            sys.executable, "-m", "hybrid_gkd.teacher", "serve", "--ckpt-path", str(exported), "--port", "0",
            "--worker-port", "0", "--backend", ENGINE, "--max-model-len", "64", "--device", "cpu",
            "--ready-file", str(ready),
        ],
        cwd=tmp_path, env=child_environment(),
    )  # fmt: skip
    try:
        wait_for(ready.exists, "readiness")
        port = json.loads(ready.read_text(encoding="utf-8"))["port"]
        given = ["actor_rollout_ref.teacher.server_ip=127.0.0.1", f"actor_rollout_ref.teacher.server_port={port}"]
        given.append(f"actor_rollout_ref.teacher.keys={tmp_path}/teacher_keys/client")
        short = ["trainer.total_training_steps=1", "trainer.save_freq=0", "trainer.test_freq=0", "data.val_files=null"]
        code, text, errors = run(arguments(world, tmp_path, *given, *short, *HF))
        assert code == 0, errors
        assert f"127.0.0.1:{port}" in errors
        assert "training steps" in text
        assert service.poll() is None
        code, text, _ = run_here(capsys, arguments(world, tmp_path, *given, *HF), doctor.main)
        assert code == 0, text
        assert f"ok   teacher: 127.0.0.1:{port} answers, 1 worker(s)" in text
        stranger = [f"actor_rollout_ref.model.path={world}/stranger", "trainer.experiment_name=other"]
        code, _, errors = run_here(capsys, arguments(world, tmp_path, *given, *stranger, *NO_CLUSTER))
        assert code == 1
        assert "260" in errors
        assert "261" in errors
        long = [*HF, "trainer.experiment_name=lost", "trainer.total_training_steps=1000", *short[1:]]
        process = start(arguments(world, tmp_path, *given, *long, "actor_rollout_ref.teacher.request_timeout=12"))
        rows = tmp_path / "hybrid_gkd" / "lost" / "metrics.jsonl"
        wait_for(lambda: rows.exists() and "actor/kl_loss" in rows.read_text(encoding="utf-8"), "a step")
        service.kill()
        code, _, errors = finish(process)
        assert code == 1
        lost = rf"127\.0\.0\.1:{port}: connection refused since \d\d:\d\d:\d\d, \d+ request\(s\) scored before"
        assert re.search(
            rf"waiting for the teacher: \d of 8 samples are not scored yet; {lost}; since \S+, for 1\d s now, until "
            r"\S+ \(actor_rollout_ref\.teacher\.request_timeout=12\)", errors,
        )
        limit = r"the limit is 12 s \(actor_rollout_ref\.teacher\.request_timeout\)"
        assert re.search(rf"error: .*: {limit}; {lost}", errors)
    finally:
        service.terminate()
        service.wait(timeout=60)


def test_ppo_trains_without_a_teacher_on_two_workers(world, tmp_path):
    """A reward that the random student can reach, computed in processes; one row's is a failure. The KL to the
    reference is taken off it. Long prompts are cut."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    long = len(solution_str)\n"
        "    return {'score': long % 7 / 7 if long else None, 'characters': long}\n", encoding="utf-8"
    )
    control = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 1e-3, "horizon": 320}
    code, _, errors, seen = run_watched(arguments(
        world, tmp_path, "distillation.enabled=false", "actor_rollout_ref.teacher.model.path=null",
        "actor_rollout_ref.rollout.n=4", f"reward.custom_reward_function.path={reward}",
        "reward.functions={custom: 1.0, length: 0.1}", "reward.score_on_error=0", "reward.num_workers=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.n_gpus_per_node=2", "algorithm.use_kl_in_reward=true",
        *(f"algorithm.kl_ctrl.{key}={value}" for key, value in control.items()), *HF,
        "data.max_prompt_length=8", "data.truncation=middle", "data.filter_overlong_prompts=false",
        "trainer.total_training_steps=3",
    ))  # fmt: skip
    refuse_strangers(seen)
    assert code == 0, errors
    rows = rows_of(tmp_path)
    assert sorted(rows) == [0, 1, 2, 3]
    assert rows[1]["prompt_length/max"] == 8
    assert rows[1]["reward/std"] > 0
    assert -1 <= rows[1]["reward/length/mean"] < 0 < rows[1]["reward/characters/mean"]
    parts = rows[1]["reward/custom/mean"] + 0.1 * rows[1]["reward/length/mean"]
    assert rows[1]["reward/mean"] == pytest.approx(parts, abs=1e-6)
    assert 0 <= rows[1]["reward/failures"] < 1
    assert rows[1]["actor/ppo_kl"] != 0  # four optimizer steps on one rollout
    assert "actor/kl_loss" not in rows[1]
    assert rows[1]["reward/kl"] == pytest.approx(0, abs=1e-6)
    assert "actor/ref_kl" not in rows[1]
    coef = 0.1
    for step in range(1, 4):
        assert rows[step]["reward/kl_coef"] == coef
        coef *= 1 + min(max(rows[step]["reward/kl"] / 1e-3 - 1, -0.2), 0.2) * 32 / 320
    assert coef != pytest.approx(0.1 * 0.98**3)  # the KL has grown beyond its target


@pytest.mark.parametrize(("rows", "of_teacher"), [(300, 272), (259, 300)])
def test_models_with_other_rows_beyond_the_tokens_are_the_same_model(world, tmp_path, rows, of_teacher):
    """Student and teacher differ in rows that are no tokens, and in one token that a student without a row lacks."""
    from transformers import AutoModelForCausalLM

    make_tiny_model(tmp_path / "student", seed=1, layers=1, vocab_size=300)
    shutil.copytree(tmp_path / "student", tmp_path / "teacher")
    for seed, (who, size) in enumerate((("student", rows), ("teacher", of_teacher))):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / who)
        model.resize_token_embeddings(size)
        model.get_output_embeddings().weight.data[260:].normal_(generator=torch.Generator().manual_seed(seed))
        model.save_pretrained(tmp_path / who)
    code, _, err = run(arguments(
        world, tmp_path, *(f"actor_rollout_ref.{key}model.path={tmp_path}/{who}"
                           for key, who in (("", "student"), ("teacher.", "teacher"))),
        f"actor_rollout_ref.teacher.backend={ENGINE}", "trainer.total_training_steps=1", "trainer.save_freq=0",
        "trainer.val_before_train=true", "trainer.test_freq=1",
    ))  # fmt: skip
    assert code == 0, err
    rows = rows_of(tmp_path)
    found = rows[0]["val/forward_kl"], rows[0]["val/reverse_kl"], rows[1]["actor/kl_loss"]
    assert found == pytest.approx((0, 0, 0), abs=1e-4)


def test_dry_run_prints_the_configuration_and_the_plan(world, tmp_path, capsys):
    code, text, errors = run_here(capsys, [*arguments(world, tmp_path / "out"), "--dry-run"])
    assert code == 0, errors
    assert "train_batch_size: 8" in text
    assert "memory of each worker by phase" in text
    assert not (tmp_path / "out").exists()


BAD = {
    "unknown key": (["data.trian_files=x"], ["data.trian_files", "no such key"]),
    "wrong type": (["trainer.save_freq=often"], ["trainer.save_freq", "often"]),
    "no model folder": (["actor_rollout_ref.model.path=./nowhere"], ["actor_rollout_ref.model.path", "./nowhere"]),
    "no teacher folder": (
        ["actor_rollout_ref.teacher.model.path=/nowhere/at/all"], ["actor_rollout_ref.teacher.model.path", "/nowhere"],
    ),
    "no data file": (["data.train_files=nowhere.jsonl"], ["data.train_files", "nowhere.jsonl"]),
    "empty data file": (["data.train_files={world}/empty.jsonl"], ["data.train_files", "empty.jsonl"]),
    "no such column": (["data.prompt_key=prompt"], ["data.prompt_key", "'prompt'", "question"]),
    "prompt too long": (
        ["data.max_prompt_length=4", "data.filter_overlong_prompts=false"],
        ["data.max_prompt_length=4", "row 1", "data.truncation"],
    ),
    "batch larger than data": (["data.train_batch_size=100"], ["data.train_batch_size", "100", "40"]),
    "other vocabulary": (["actor_rollout_ref.teacher.model.path={world}/stranger"], ["stranger", "261", "260"]),
    "no cuda": (["trainer.device=cuda", "ray_init.address=null"], ["trainer.device", "cuda"]),
    "nothing to resume": (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere"],
        ["trainer.resume_from_path", "/nowhere"],
    ),
    "unwritable run folder": (["trainer.default_local_dir=/proc/runs"], ["trainer.default_local_dir", "/proc/runs"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_message(world, tmp_path, capsys, caplog, case):
    if case == "no cuda" and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    (overrides, parts), out = BAD[case], tmp_path / "out"
    keys = {override.partition("=")[0] for override in overrides}
    base = [each for each in arguments(world, out, *NO_CLUSTER) if each.partition("=")[0] not in keys]
    code, text, errors = run_here(capsys, [*base, *(override.format(world=world) for override in overrides)])
    assert code == 1
    assert "Traceback" not in errors + text
    assert not [each for each in caplog.records if each.levelno >= logging.INFO and each.exc_info]  # on the console too
    before, error, message = f"\n{errors}".rpartition("\nerror: ")  # with a line for each file that is wrong
    assert error, before
    for part in parts:
        assert part in message
    assert not out.exists() or not list(out.glob("*/*/global_step_*"))


def test_an_unreachable_teacher_ends_the_run_within_its_connect_timeout(world, tmp_path, capsys):
    with socket.socket() as listener:  # answers no handshake
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, _, errors = run_here(
            capsys, arguments(
                world, tmp_path, "actor_rollout_ref.teacher.server_ip=127.0.0.1",
                f"actor_rollout_ref.teacher.server_port={port}", "actor_rollout_ref.teacher.connect_timeout=2",
                *NO_CLUSTER,
            )
        )  # fmt: skip
    assert code == 1
    limit = "within 2 s (actor_rollout_ref.teacher.connect_timeout)"
    reason = f"no teacher server answered the status request {limit}: connected, but no answer"
    assert f"127.0.0.1:{port}: {reason}" in errors.splitlines()[-1]


def test_a_teacher_whose_port_is_taken_ends_the_run_while_the_workers_still_load(world, tmp_path):
    (tmp_path / "late.py").write_text(
        "import time\n\ndef engine(*args, **kwargs):\n    time.sleep(1000)\n", encoding="utf-8"
    )
    late = f"actor_rollout_ref.rollout.name={tmp_path}/late.py:engine"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, _, errors = run(arguments(world, tmp_path, late, f"actor_rollout_ref.teacher.server_port={port}"))
    assert code == 1
    for part in ("the teacher did not start", f"--port {port}: cannot bind"):
        assert part in errors.splitlines()[-1]

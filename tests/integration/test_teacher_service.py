"""The teacher service with real processes: right numbers, and what happens when parts of it die."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from processes import TIMEOUT, is_alive, stop_process, wait_until
from transformers import AutoModelForCausalLM

from hybrid_gkd.compat.vllm.versions import vllm_available
from hybrid_gkd.config import run_teachers
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import TeacherError, TeacherMismatch, TeacherRefused
from hybrid_gkd.launch.plan import make_plan
from hybrid_gkd.launch.teacher import make_teacher_process
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.models.tokenizer import load_tokenizer, tokenizer_hash
from hybrid_gkd.offload.needs import place_teachers, trained_models
from hybrid_gkd.runtime.signals import SIGNALS
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.client.connection import query_status
from hybrid_gkd.teacher.keys import load_keys
from hybrid_gkd.teacher.server import local
from hybrid_gkd.teacher.server.local import TeacherProcess, child_environment
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.testing import make_tiny_model
from hybrid_gkd.types import Reading
from hybrid_gkd.workers.placement import threads_per_process

MAX_LENGTH = 128
HF = ["--backend", "hf", "--device", "cpu", "--max-model-len", str(MAX_LENGTH)]
VLLM = ["--backend", "vllm", "--device", "cpu", "--max-model-len", str(MAX_LENGTH)]
needs_vllm = pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("teacher_model")))


@contextlib.contextmanager
def running(*args, **options):
    with TeacherProcess(*args, **options) as teacher:
        teacher.wait_ready()
        yield teacher


@pytest.fixture(scope="module")
def hf_teacher(model_path, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("hf") / "teacher.log"
    with running(model_path, log_path=log_path, options=HF, start_timeout=TIMEOUT) as teacher:
        yield teacher


@pytest.fixture
def own_teacher(model_path, tmp_path):
    """For tests that break it."""
    with running(model_path, log_path=tmp_path / "teacher.log", options=HF, start_timeout=TIMEOUT) as teacher:
        yield teacher


@pytest.fixture(scope="module")
def vllm_teacher(model_path, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("vllm") / "teacher.log"
    with running(model_path, log_path=log_path, options=VLLM, start_timeout=TIMEOUT) as teacher:
        yield teacher


def status_of(teacher):
    return query_status(teacher.address, TIMEOUT, load_keys(teacher.keys))


@contextlib.contextmanager
def connected(model_path, teacher, **options):
    options = {"topk": 5, "vocab_size": 259, "connect_timeout": TIMEOUT, "request_timeout": TIMEOUT} | options
    tokenizer = load_tokenizer(model_path)
    with TeacherClient([teacher.address], keys=teacher.keys, **options) as client:
        client.handshake(
            tokenizer_hash=tokenizer_hash(tokenizer), tokenizer_size=len(tokenizer), max_sequence_length=100
        )
        yield client


def make_readings(count):
    """Return readings of 2 to 119 tokens, with some of them scored at any position."""
    rng = np.random.default_rng(7)
    readings = []
    for length in rng.integers(2, 120, count):
        positions = 1 + np.sort(rng.permutation(length - 1)[: rng.integers(1, length)])
        readings.append(Reading(token_ids=rng.integers(0, 259, length, dtype=np.int32), positions=positions))
    return readings


@pytest.fixture(scope="module")
def reference(model_path):
    """(reading, temperature) -> log-probabilities [R, V] by the shortest way there is."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(reading, temperature):
        ids = torch.from_numpy(reading.token_ids.astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0, reading.positions - 1]
        return (logits / temperature).log_softmax(-1).numpy()

    return logprobs


def expect_scores(futures, batch, reference, temperature=1.0):
    for future, reading in zip(futures, batch, strict=True):
        score = future.result(TIMEOUT)
        expected = reference(reading, temperature)
        top = -np.sort(-expected, axis=1)[:, : score.ids.shape[1]]
        rows, targets = np.arange(len(reading.positions)), reading.token_ids[reading.positions]
        np.testing.assert_allclose(score.sampled_logprobs, expected[rows, targets], atol=2e-4)
        # float16 on the wire: 11 bits.
        np.testing.assert_allclose(score.logprobs, top, rtol=1e-3, atol=2e-4)
        np.testing.assert_allclose(np.take_along_axis(expected, score.ids, 1), top, atol=2e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_hf_scores_are_the_plain_log_softmax(model_path, hf_teacher, reference, temperature):
    batch = make_readings(30)
    with connected(model_path, hf_teacher, temperature=temperature) as client:
        expect_scores(client.submit(batch), batch, reference, temperature)


def test_whole_vocabulary(model_path, tmp_path, reference):
    options = {"log_path": tmp_path / "log", "options": [*HF, "--n-logprobs=259"], "start_timeout": TIMEOUT}
    with running(model_path, **options) as teacher, connected(model_path, teacher, topk=259) as client:
        batch = make_readings(3)
        expect_scores(client.submit(batch), batch, reference)


@needs_vllm
def test_vllm_scores_are_the_plain_log_softmax(model_path, vllm_teacher, reference):
    batch = make_readings(30)
    for temperature in (1.0, 0.6):
        with connected(model_path, vllm_teacher, temperature=temperature, n_server_workers=4) as client:
            expect_scores(client.submit(batch), batch, reference, temperature)
    # The longest that it promises to score.
    rng = np.random.default_rng(0)
    limit = status_of(vllm_teacher).model.max_sequence_length
    assert limit == MAX_LENGTH
    full = [Reading(token_ids=rng.integers(0, 259, limit, dtype=np.int32), positions=np.arange(8, limit))]
    with connected(model_path, vllm_teacher) as client:
        expect_scores(client.submit(full), full, reference)


def test_what_does_not_fit_is_said(model_path, hf_teacher):
    with pytest.raises(TeacherMismatch, match="the teacher has 64, the student needs 65"):
        with connected(model_path, hf_teacher, topk=65):
            pass
    long = Reading(token_ids=np.ones(MAX_LENGTH + 1, np.int32), positions=np.array([MAX_LENGTH]))
    with connected(model_path, hf_teacher) as client:
        with pytest.raises(TeacherRefused, match=f"has {long.num_tokens} tokens, the server's limit is {MAX_LENGTH}"):
            client.submit([long])[0].result(TIMEOUT)


def dealer_of(context, teacher, port):
    """A socket with the keys that belong to this port of the teacher."""
    keys = load_keys(teacher.keys if port == teacher.address else teacher.keys.parent / "worker")
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 2000)
    dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
    dealer.curve_serverkey = keys.server_public
    dealer.connect(f"tcp://{port}")
    return dealer


def test_malformed_messages_are_dropped_and_counted(model_path, hf_teacher, reference):
    before = status_of(hf_teacher).counters["malformed"]
    with zmq.Context() as context:
        for address in (hf_teacher.address, hf_teacher.worker_address):
            with dealer_of(context, hf_teacher, address) as dealer:
                for frames in ([b""], [b"\x80\x04garbage"], [b"x"] * protocol.MAX_FRAMES, [b"\x93", b"y"]):
                    dealer.send_multipart(frames)
        wait_until(lambda: status_of(hf_teacher).counters["malformed"] == before + 8, "for all of them to be counted")
    with socket.create_connection(hf_teacher.address.split(":"), timeout=TIMEOUT) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with connected(model_path, hf_teacher) as client:
        batch = make_readings(2)
        expect_scores(client.submit(batch), batch, reference)


def start_joined_worker(model_path, teacher, log_path):
    command = [
        sys.executable, "-m", "hybrid_gkd.teacher", "join", "--proxy-addr", teacher.worker_address,
        "--ckpt-path", model_path, "--keys", str(teacher.keys.parent / "worker"),
    ]  # fmt: skip
    with open(log_path, "wb") as log:
        return subprocess.Popen([*command, *HF], stdout=log, stderr=log, env=child_environment())


@contextlib.contextmanager
def joined_worker(model_path, teacher, tmp_path):
    worker = start_joined_worker(model_path, teacher, tmp_path / "join.log")
    try:
        wait_until(lambda: status_of(teacher).num_workers == 2, "for the second worker")
        yield worker
    finally:
        worker.kill()
        worker.wait()


def test_requests_of_a_dead_worker_go_to_another(model_path, own_teacher, reference, tmp_path):
    batch = make_readings(60)
    with joined_worker(model_path, own_teacher, tmp_path) as worker:
        with connected(model_path, own_teacher) as client:
            stop_process(worker.pid)  # so that it surely holds requests when it dies
            futures = client.submit(batch)
            wait_until(lambda: status_of(own_teacher).num_in_flight > 0, "for requests in flight")
            worker.kill()
            expect_scores(futures, batch, reference)
            metrics = client.drain_metrics()
        state = status_of(own_teacher)
    assert state.counters["requeued"] > 0
    assert state.counters["delivered"] == len(metrics.latencies) == 15
    assert metrics.retries == 0


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def test_the_own_worker_is_replaced(model_path, own_teacher, reference):
    (worker,) = children(own_teacher.pid)
    batch = make_readings(8)
    with connected(model_path, own_teacher) as client:
        stop_process(worker)
        futures = client.submit(batch)
        wait_until(lambda: status_of(own_teacher).num_in_flight == 2, "for requests in flight")
        os.kill(worker, signal.SIGKILL)
        expect_scores(futures, batch, reference)
    assert children(own_teacher.pid) != [worker]


def test_several_workers_share_the_work(model_path, tmp_path, reference):
    options = [*HF, "--workers", "2"]
    with running(model_path, log_path=tmp_path / "log", options=options, start_timeout=TIMEOUT) as teacher:
        wait_until(lambda: status_of(teacher).num_workers == 2, "for both workers")
        with connected(model_path, teacher, num_microbatches=1) as client:
            for _ in range(20):
                batch = make_readings(16)
                expect_scores(client.submit(batch), batch, reference)
                state = status_of(teacher)
                if min(worker.num_delivered for worker in state.workers) > 0:
                    break
        assert min(worker.num_delivered for worker in state.workers) > 0
        assert {worker.name.rpartition(":")[2] for worker in state.workers} == set(map(str, children(teacher.pid)))
        shown = subprocess.run(
            [sys.executable, "-m", "hybrid_gkd.teacher", "status", "--addr", teacher.address, "--keys",
             str(teacher.keys)], capture_output=True,
            text=True, timeout=TIMEOUT, env=child_environment(),
        ).stdout  # fmt: skip
        for line in (r"latency +p50 \d+\.\d+ s, p95", r"bytes per token +38\b", r"engine busy +\d+%", r"in flight \d"):
            assert re.search(line, shown), shown


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_drains(model_path, tmp_path, reference, number):
    """Accepted requests are answered, later ones are rejected, and the service ends by itself."""
    options = {"log_path": tmp_path / "log", "options": [*HF, "--drain-timeout", str(TIMEOUT)]}
    batch, late = make_readings(8), []

    def refused():
        late.extend(client.submit(batch[:1]))  # the signal needs a moment
        return status_of(teacher).counters["refused"] > 0

    with running(model_path, start_timeout=TIMEOUT, **options) as teacher:
        with connected(model_path, teacher, n_server_workers=1000) as client:
            (worker,) = children(teacher.pid)
            stop_process(worker)
            futures = client.submit(batch)
            wait_until(lambda: status_of(teacher).num_in_flight == 2, "for requests in flight")
            os.kill(teacher.pid, number)
            wait_until(refused, "for a refusal")
            os.kill(worker, signal.SIGCONT)
            expect_scores(futures, batch, reference)
            wait_until(lambda: teacher.poll() is not None, "for the service to end")
        assert teacher.poll() == 0
        wait_until(lambda: not is_alive(worker), "for its worker to end")
    assert f"{number.name}: finishing 2 requests, for at most" in (tmp_path / "log").read_text(encoding="utf-8")
    with pytest.raises(TeacherError, match=rf"{teacher.address}: request .* waited .*: the teacher client was closed"):
        late[-1].result(TIMEOUT)


def test_workers_and_clients_survive_a_restart_of_the_broker(model_path, own_teacher, reference, tmp_path):
    batch = make_readings(8)
    ports = [own_teacher.address.split(":")[1], own_teacher.worker_address.split(":")[1]]
    with joined_worker(model_path, own_teacher, tmp_path), connected(model_path, own_teacher) as client:
        expect_scores(client.submit(batch), batch, reference)
        os.kill(own_teacher.pid, signal.SIGKILL)
        wait_until(lambda: own_teacher.poll() is not None, "for the service to die")
        futures = client.submit(batch)
        options = [*HF, "--worker-port", ports[1], "--keys", str(own_teacher.keys.parent / "server")]
        log_path = tmp_path / "second.log"
        with running(
            model_path, log_path=log_path, port=int(ports[0]), start_timeout=TIMEOUT, options=options
        ):
            expect_scores(futures, batch, reference)
            wait_until(lambda: status_of(own_teacher).num_workers == 2, "for the worker to come back")


def test_a_restarted_service_with_other_weights_under_the_same_name_is_refused(tmp_path):
    folder, batch = tmp_path / "model", make_readings(4)
    start = functools.partial(running, str(make_tiny_model(folder, seed=1)), start_timeout=TIMEOUT)
    with start(log_path=tmp_path / "first.log", options=HF) as first, connected(str(folder), first) as client:
        for future in client.submit(batch):
            future.result(TIMEOUT)
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: first.poll() is not None, "for the service to die")
        make_tiny_model(folder, seed=2)
        options, port = [*HF, "--keys", str(first.keys.parent / "server")], int(first.address.split(":")[1])
        with start(log_path=tmp_path / "second.log", port=port, options=options), pytest.raises(
            TeacherMismatch, match=rf"serves {folder.name} \(weights .* first handshake .* another teacher"
        ):
            client.submit(batch)[0].result(TIMEOUT)


def test_a_killed_service_of_a_run_is_started_again(model_path, own_teacher, reference, monkeypatch, caplog):
    monkeypatch.setattr(local, "MAX_RESTARTS", 1)
    batch, address = make_readings(8), own_teacher.address
    with connected(model_path, own_teacher) as client:
        expect_scores(client.submit(batch), batch, reference)
        os.kill(own_teacher.pid, signal.SIGKILL)
        wait_until(lambda: own_teacher.poll() is not None, "for the service to die")
        own_teacher.check()
        assert "was killed by SIGKILL (out of memory?), restart 1 of 1; its log: " in caplog.text
        expect_scores(client.submit(batch), batch, reference)
        own_teacher.wait_ready()
        assert own_teacher.address == address
        os.kill(own_teacher.pid, signal.SIGKILL)
        wait_until(lambda: own_teacher.poll() is not None, "for the service to die")
        with pytest.raises(TeacherError, match="the teacher ended: it was killed by SIGKILL"):
            own_teacher.check()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_the_service(own_teacher, how, monkeypatch):
    monkeypatch.setattr(local, "MAX_RESTARTS", 0)
    processes = [own_teacher.pid, *children(own_teacher.pid)]
    assert len(processes) == 2
    os.kill(own_teacher.pid, how)
    wait_until(lambda: own_teacher.poll() is not None, "for the service to end")
    wait_until(lambda: not any(map(is_alive, processes)), "for its worker to end")
    assert own_teacher.poll() == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    if how == signal.SIGKILL:
        with pytest.raises(TeacherError, match=r"ended: it was killed by SIGKILL \(out of memory\?\); its last line: "):
            own_teacher.check()


@pytest.mark.parametrize("service_is_killed", [False, True])
def test_the_service_ends_with_its_parent_and_their_keys_are_deleted(model_path, tmp_path, service_is_killed):
    program = (
        "import sys, time; from hybrid_gkd.teacher.server.local import TeacherProcess\n"
        f"teacher = TeacherProcess({model_path!r}, log_path={str(tmp_path / 'log')!r}, options={HF!r})\n"
        "teacher.__enter__().wait_ready(); print(teacher.pid, teacher.keys, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=child_environment())
    try:
        service, keys = parent.stdout.readline().decode().split()
        processes = [int(service), *children(service)]
        folder = Path(keys).parents[1]
        assert folder.is_dir()
        if service_is_killed:
            os.kill(int(service), signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(is_alive, processes)), "for the service to end with its parent")
    wait_until(lambda: not folder.exists(), "for the folder to be removed")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ckpt-path", "{model}", "--insecure", "--keys", "k"], "--keys, --insecure: expected one of them, got both"),
        (["--ckpt-path", "{model}", "--keys", "/no/keys"], "/no/keys: a folder of keys must have one .key_secret file"),
        (["--ckpt-path", "{model}", "--port", "{taken}"], "--port {taken}: cannot bind .* another process uses it"),
        (["--ckpt-path", "{model}", "--tp-size", "2"], "--tp-size 2: tensor parallelism needs --backend vllm"),
        pytest.param(
            ["--ckpt-path", "{model}", "--backend", "vllm", "--tp-size", "3"],
            "--tp-size 3: must divide the model's 2 attention heads", marks=needs_vllm,
        ),
        (["--ckpt-path", "{model}", "--turns", "/no/folder"], "--turns /no/folder: cannot create its locks: No such"),
        (["--ckpt-path", "{model}", "--ready-file", "{model}"], "--ready-file {model}: cannot be replaced: Is a"),
        (["--ckpt-path", "{model}", "--dtype", "bfloat16"], "--dtype bfloat16: must be auto or float32 on the CPU"),
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_line(model_path, hf_teacher, arguments, text):
    values = {"model": model_path, "taken": hf_teacher.address.split(":")[1]}
    command = [sys.executable, "-m", "hybrid_gkd.teacher", "serve", "--port", "0", "--worker-port", "0"]
    command += ["--backend", "hf", "--device", "cpu", *(word.format(**values) for word in arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=child_environment())
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode == 1
    assert len(errors) == 1
    assert re.search(text.format(**values), errors[0])
    assert "Traceback" not in ended.stderr


def test_a_service_that_is_not_ready_has_no_ready_file(tmp_path):
    """A file of an earlier service would pass for its own."""
    (ready := tmp_path / "ready.json").write_text("{}", encoding="utf-8")
    command = [sys.executable, "-m", "hybrid_gkd.teacher", "serve", "--port=0", "--worker-port=0", "--insecure"]
    command += [*HF, "--ckpt-path=/no/such/folder", f"--ready-file={ready}"]
    assert subprocess.run(command, capture_output=True, timeout=TIMEOUT, env=child_environment()).returncode == 1
    assert not ready.exists()


def test_the_launcher_reports_the_reason_at_once(tmp_path):
    teacher = TeacherProcess("/no/such/folder", log_path=tmp_path / "log", options=HF, start_timeout=TIMEOUT)
    with teacher, pytest.raises(TeacherError, match="did not start: /no/such/folder: no such model folder; its log: "):
        teacher.wait_ready()
    assert teacher.poll() == 1


def test_status_command(hf_teacher):
    command = [sys.executable, "-m", "hybrid_gkd.teacher", "status", "--addr"]
    environment = child_environment()
    answer = subprocess.run(
        [*command, hf_teacher.address, "--keys", str(hf_teacher.keys)], capture_output=True, text=True,
        timeout=TIMEOUT, env=environment,
    )  # fmt: skip
    assert answer.returncode == 0
    for line in (
        r"model .*backend hf",
        r"workers alive +1",
        r"queue length +0",
        r"tokens per second +\d+",
        "top-k +up to 64",
    ):
        assert re.search(line, answer.stdout), answer.stdout
    as_json = subprocess.run(
        [*command, hf_teacher.address, "--keys", str(hf_teacher.keys), "--json"], capture_output=True, text=True,
        timeout=TIMEOUT, env=environment,
    )  # fmt: skip
    assert as_json.returncode == 0
    shown = json.loads(as_json.stdout)
    assert (shown["num_workers"], shown["model"]["backend"], shown["workers"][0]["ready"]) == (1, "hf", True)
    nobody = subprocess.run(
        [*command, "127.0.0.1:1"], capture_output=True, text=True, timeout=TIMEOUT, env=environment
    )
    assert nobody.returncode == 1
    assert nobody.stderr.startswith("error: 127.0.0.1:1: no teacher server answered")


def test_a_teacher_that_shares_the_cores_with_workers_is_told_how_many_are_its_own(model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = load_config(
        [
            "data.train_files=unused", f"actor_rollout_ref.model.path={model_path}", "trainer.n_gpus_per_node=3",
            f"actor_rollout_ref.teacher.model.path={model_path}", f"trainer.default_local_dir={tmp_path}",
        ]
    )
    places = place_teachers(config, device="cpu", gpus=0)
    plan = make_plan(config, trained_models(config, student_spec(config)), "cpu", places)
    with make_teacher_process(run_teachers(config)[0], plan, threads_per_process(config)) as teacher:
        environment = Path(f"/proc/{teacher.pid}/environ")
        wait_until(environment.read_bytes, "the environment: while a program is being loaded it reads as empty")
        lines = environment.read_bytes().split(b"\0")
    assert [line for line in lines if line.startswith(b"OMP_NUM_THREADS=")] == [b"OMP_NUM_THREADS=2"]

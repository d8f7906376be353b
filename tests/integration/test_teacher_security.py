"""Who gets in, and what cannot be smuggled in. Real processes and sockets."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import faults
import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from hybrid_gkd.errors import TeacherUnreachable
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.client.connection import query_status
from hybrid_gkd.teacher.keys import load_keys, make_keys
from hybrid_gkd.teacher.server.local import TeacherProcess, child_environment
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.testing import make_tiny_model

TIMEOUT = faults.TIMEOUT
HF = ["--backend", "hf", "--device", "cpu", "--max-model-len", "128"]


def command(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "hybrid_gkd.teacher", *map(str, words)], capture_output=True, text=True,
        timeout=TIMEOUT, env=child_environment(), **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "made"
    make_keys(folder)
    make_keys(folder, client="stranger")
    (folder / "server" / "clients" / "stranger.key").unlink()
    return folder


@pytest.fixture(scope="module")
def teacher(model_path, keys, tmp_path_factory):
    """On all interfaces, which is allowed with keys."""
    options = [*HF, "--keys", str(keys / "server"), "--host", "0.0.0.0"]
    log_path = keys.parent / "teacher.log"
    with TeacherProcess(model_path, log_path=log_path, options=options, start_timeout=TIMEOUT) as running:
        running.wait_ready()
        yield running


def test_a_client_with_keys_is_served(teacher, keys, model_path):
    shown = command("status", "--addr", teacher.address, "--keys", keys / "client")
    assert "workers alive      1" in shown.stdout, shown.stderr
    assert command("status", "--addr", teacher.address, "--keys", keys / "server").returncode == 0


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        (None, "the server requires keys"),
        ("stranger", "the server does not accept the key in .*stranger"),
        ("impostor", "its key differs from .*impostor/server.key"),
    ],
)
def test_the_wrong_key_is_an_error_that_says_so(teacher, keys, tmp_path, folder, text):
    if folder == "impostor":  # right client key, wrong server key
        shutil.copytree(keys / "client", keys / folder, dirs_exist_ok=True)
        shutil.copy(keys / "stranger" / "stranger.key", keys / folder / "server.key")
    chosen = None if folder is None else keys / folder
    client = TeacherClient([teacher.address], topk=1, vocab_size=259, connect_timeout=TIMEOUT, keys=chosen)
    with client, pytest.raises(TeacherUnreachable, match=text) as error:
        client.handshake(**faults.STUDENT)
    assert teacher.address in str(error.value)
    words = ["--keys", chosen] if chosen else []
    shown = command("status", "--addr", teacher.address, *words)
    assert shown.returncode == 1
    assert teacher.address in shown.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--keys", "stranger"], "does not accept the key"),
        (["--keys", "client"], "(.key) to workers/ of the server's keys"),
        ([], "the server requires keys"),
    ],
)
def test_a_worker_without_the_right_key_cannot_join(teacher, keys, words, text):
    joiner = [sys.executable, faults.__file__, "worker", teacher.worker_address, *words]
    ended = subprocess.run(
        joiner, capture_output=True, text=True, timeout=TIMEOUT, env=child_environment(), cwd=keys
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f"TeacherError: {teacher.worker_address}: cannot join the broker: " in last
    assert text in last


def test_a_worker_is_no_client(teacher, keys):
    with pytest.raises(TeacherUnreachable, match=r"\(\.key\) to clients/"):
        query_status(teacher.address, TIMEOUT, load_keys(keys / "worker"))


def test_who_sends_more_parts_than_a_message_has_is_dropped_and_named(teacher, keys, tmp_path):
    """The others are served meanwhile, and it is not let in again."""
    make_keys(keys, client="flood")
    own = load_keys(keys / "flood")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.curve_publickey, dealer.curve_secretkey = own.public, own.secret
        dealer.curve_serverkey = own.server_public
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        dealer.connect(f"tcp://{teacher.address}")
        dealer.send_multipart([b""] * 30_000)
        events = []
        while zmq.EVENT_HANDSHAKE_FAILED_AUTH not in events:
            assert monitor.poll(int(TIMEOUT * 1000)), events
            events.append(recv_monitor_message(monitor)["event"])
        assert events == [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH]
        dealer.disable_monitor()
    log = (keys.parent / "teacher.log").read_text(encoding="utf-8")
    assert "clients: clients/flood.key at 127.0.0.1 sent a message of 30000 parts" in log
    assert "refused: clients/flood.key is banned for an invalid message" in log
    assert query_status(teacher.address, TIMEOUT, load_keys(keys / "client")).num_workers == 1


def test_the_status_of_a_service_without_a_ready_worker_is_no_success():
    with faults.Cluster(0) as cluster:
        shown = command("status", "--addr", cluster.address)
        assert (shown.returncode, shown.stderr) == (3, "")
        assert "none: no worker is ready" in shown.stdout
        shown = command("status", "--addr", cluster.address, "--json")
        assert shown.returncode == 3
        assert json.loads(shown.stdout)["num_workers"] == 0


def test_serve_makes_keys_where_it_has_none(model_path, tmp_path):
    """On loopback too, which every user of the machine reaches."""
    options = [*HF, "--port", "0", "--worker-port", "0", "--ready-file", str(tmp_path / "ready")]
    serving = [sys.executable, "-m", "hybrid_gkd.teacher", "serve", "--ckpt-path", model_path, *options]
    with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=child_environment()) as service:
        try:
            said, ready = service.stdout.readline(), service.stdout.readline()
            assert said.startswith(f"keys: {tmp_path}/teacher_keys; clients need its subfolder client")
            address = ready.removeprefix("teacher ready on ").partition(",")[0]
            assert "the server requires keys" in command("status", "--addr", address).stderr
            folder = tmp_path / "teacher_keys" / "client"
            assert command("status", "--addr", address, "--keys", folder).returncode == 0
        finally:
            service.terminate()


def test_keys_for_a_server_without(keys):
    with faults.Cluster(0) as cluster:
        # Either side may be the first to end a connection on which the two do not agree.
        text = r"(keys were given .*, but the server|closed 5 connections .*, it) was started without"
        with pytest.raises(TeacherUnreachable, match=text):
            query_status(cluster.address, TIMEOUT, load_keys(keys / "client"))


def test_a_key_can_be_added_and_taken_away_while_the_service_runs(teacher, keys):
    allowed = keys / "server" / "clients" / "late.key"
    make_keys(keys, client="late")
    late = ["status", "--addr", teacher.address, "--keys", keys / "late"]
    assert command(*late).returncode == 0
    allowed.unlink()
    assert "does not accept the key" in command(*late).stderr


def test_the_keys_command(tmp_path):
    made = command("keys", "--out", tmp_path / "k")
    assert made.returncode == 0, made.stderr
    files = {str(path.relative_to(tmp_path / "k")) for path in (tmp_path / "k").rglob("*") if path.is_file()}
    assert files == {
        ".gitignore", "server/.gitignore", "client/.gitignore", "worker/.gitignore",
        "server/server.key", "server/server.key_secret", "server/clients/client.key", "server/workers/worker.key",
        "client/client.key", "client/client.key_secret", "client/server.key",
        "worker/worker.key", "worker/worker.key_secret", "worker/server.key",
    }  # fmt: skip
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copytree(tmp_path / "k" / "client", tmp_path / "copied")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert not subprocess.run(["git", "ls-files"], cwd=tmp_path, capture_output=True, check=True).stdout
    for path in files - {path for path in files if path.endswith(".gitignore")}:
        assert (tmp_path / "k" / path).stat().st_mode & 0o777 == 0o600, path
    before = (tmp_path / "k" / "server" / "server.key_secret").read_bytes()
    again = command("keys", "--out", tmp_path / "k")
    assert again.returncode == 1
    assert "exists and is not overwritten; --client NAME or --worker NAME" in again.stderr
    assert command("keys", "--out", tmp_path / "k", "--client", "bob").returncode == 0
    assert (tmp_path / "k" / "server" / "clients" / "bob.key").exists()
    assert command("keys", "--out", tmp_path / "k", "--worker", "gpu2").returncode == 0
    assert (tmp_path / "k" / "server" / "workers" / "gpu2.key").exists()
    assert (tmp_path / "k" / "server" / "server.key_secret").read_bytes() == before


def test_a_secret_that_others_can_read_is_refused(model_path, keys, tmp_path):
    shutil.copytree(keys / "client", tmp_path / "open")
    (tmp_path / "open" / "client.key_secret").chmod(0o644)
    for words in (["status"], ["serve", "--ckpt-path", model_path], ["join", "--ckpt-path", model_path, "--proxy-addr",
                                                                      "127.0.0.1:1"]):  # fmt: skip
        shown = command(*words, "--keys", tmp_path / "open")
        assert shown.returncode == 1
        assert "others can read this secret key; chmod 600" in shown.stderr
    shown = command("status", "--keys", tmp_path)
    assert "must have one .key_secret file, found none" in shown.stderr


class Bomb:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def test_a_pickle_bomb_is_only_a_malformed_message(tmp_path):
    """In the place of headers and of arrays, sent to broker, worker and client."""
    crater = tmp_path / "crater"
    bomb = pickle.dumps(Bomb(crater))
    (reading,) = faults.make_readings(np.random.default_rng(0), 1)
    header = protocol.encode_message(protocol.Ping(number=1))[0]
    messages = [[bomb], [protocol.seal(bomb)], [header, bomb], [bytes(header) + bomb]]
    with faults.Cluster(1) as cluster, zmq.Context() as context, faults.connected(cluster.address) as client:
        for port in cluster.ports:
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, int(TIMEOUT * 1000))
                dealer.connect(f"tcp://127.0.0.1:{port}")
                for message in messages:
                    dealer.send_multipart(message)
        request = protocol.ScoreRequest(
            id="b", attempt=1, timeout_seconds=60.0, topk=1, temperature=1.0, lengths=[2], ranges=[[1, 2]],
            arrays=(protocol.ArraySpec("int32", (len(bomb) // 4,), 0),),
        )  # fmt: skip
        with context.socket(zmq.DEALER) as dealer:  # the broker passes the array on to the worker
            dealer.connect(f"tcp://{cluster.address}")
            dealer.send_multipart([*protocol.encode_message(request), bomb])
            assert dealer.poll(int(TIMEOUT * 1000))
            answer = protocol.decode_header(dealer.recv_multipart()[0])
            assert isinstance(answer, protocol.ScoreError)
        (score,) = client.submit([reading])
        faults.expect(score.result(TIMEOUT), reading)
        assert all(process.poll() is None for process in (cluster.broker, *cluster.workers.values()))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with TeacherClient([f"127.0.0.1:{port}"], topk=1, vocab_size=9, connect_timeout=0.5) as client:
            assert router.poll(int(TIMEOUT * 1000))
            for message in messages:
                router.send_multipart([router.recv_multipart()[0], *message])
            with pytest.raises(TeacherUnreachable, match="no worker is ready"):
                client.handshake(**faults.STUDENT)
    assert not crater.exists()
    pickle.loads(bomb)
    assert crater.exists(), "the bomb is one"

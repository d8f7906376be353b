"""The client against a scripted server: every fault ends in scores or in the right error, never in silence."""

import contextlib
import dataclasses
import re
import threading
import time

import numpy as np
import pytest
import zmq
from msgspec import UNSET

from hybrid_gkd import teacher_client
from hybrid_gkd.errors import (
    BadTeacherReply,
    TeacherError,
    TeacherMismatch,
    TeacherRefused,
    TeacherTimeout,
    TeacherUnreachable,
)
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.client import requests
from hybrid_gkd.teacher.client.connection import query_status
from hybrid_gkd.teacher.network import EXPECTS_KEYS
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.testing import tail_of
from hybrid_gkd.types import Reading, TopK

TIMEOUT = 30.0  # seconds; no test waits for it
STUDENT = {"tokenizer_hash": "h", "tokenizer_size": 50, "max_sequence_length": 32}


ADAPTERS = (protocol.AdapterInfo("a", "of a"), protocol.AdapterInfo("b", "of b"))


def model_info(**changes):
    fields = {
        "model": "m", "backend": "hf", "vocab_size": 50, "num_embeddings": 64, "tokenizer_hash": "h", "max_topk": 8,
        "max_sequence_length": 64, "any_temperature": True,
    } | changes  # fmt: skip
    return protocol.ModelInfo(**fields)


def scores_of(readings, topk):
    """Scores that depend on the tokens and their positions, so that a mix-up would show."""
    found = []
    for reading in readings:
        targets = reading.token_ids[reading.positions]
        logprobs = np.full((len(targets), topk), -3.0, np.float32)
        found.append(TopK(
            ids=(targets[:, None] + np.arange(topk)).astype(np.int32) % 50, logprobs=logprobs,
            tail_logprobs=tail_of(logprobs),
            sampled_logprobs=-(reading.token_ids.sum() + targets + reading.positions).astype(np.float32),
        ))  # fmt: skip
    return found


class Server:
    """A ROUTER that serves hellos and pings; each score request goes to the next step of the script."""

    def __init__(self, *script, model=None, answers_pings=True, port=None):
        self.script, self.model, self.answers_pings = list(script), model or model_info(), answers_pings
        self.requests: list[protocol.ScoreRequest] = []
        self.held: set[str] = set()
        self.foreign = False
        self.instance = "first"
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if port is None:
            port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        else:
            self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.address = f"127.0.0.1:{port}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._stopping.set()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        self._context.destroy(linger=0)

    def _run(self):
        while not self._stopping.is_set():
            if not self.socket.poll(20):
                continue
            if self.script is None:  # hung
                self._stopping.wait(0.01)
                continue
            client, header, *frames = self.socket.recv_multipart()
            if self.foreign:
                self.socket.send_multipart([client, protocol.seal(b"", version=2)])
                continue
            match message := protocol.decode_header(header):
                case protocol.Hello():
                    self.send(client, protocol.Welcome(instance=self.instance, num_workers=1, model=self.model))
                case protocol.Ping() if self.answers_pings:
                    pending = sorted(self.held)
                    pong = protocol.Pong(
                        number=message.number, instance=self.instance, pending=pending, queue_length=3, engine_busy=0.5
                    )
                    self.send(client, pong)
                case protocol.ScoreRequest():
                    self.requests.append(message)
                    self.held.add(message.id)
                    step = self.script.pop(0) if self.script else answer
                    step(self, client, message, protocol.unpack_request(message, frames))

    def send(self, client, message, arrays=()):
        self.socket.send_multipart([client, *protocol.encode_message(message, arrays)])


def result_for(request, readings):
    header = protocol.ScoreResult(id=request.id, attempt=request.attempt, server="worker")
    return header, protocol.result_arrays(scores_of(readings, request.topk))


def answer(server, client, request, readings):
    server.held.discard(request.id)
    server.send(client, *result_for(request, readings))


def answer_twice(server, client, request, readings):
    answer(server, client, request, readings)
    answer(server, client, request, readings)


def silence(server, client, request, readings):
    pass


def lose(server, client, request, readings):
    server.held.discard(request.id)


def damage(server, client, request, readings):
    server.held.discard(request.id)
    frames = protocol.encode_message(*result_for(request, readings))
    frames[2] = frames[2] * 0 - 1
    server.socket.send_multipart([client, *frames])


def poison(server, client, request, readings):
    server.held.discard(request.id)
    header, arrays = result_for(request, readings)
    arrays[1][0, 0] = np.nan
    server.send(client, header, arrays)


def error(code):
    def step(server, client, request, readings):
        server.held.discard(request.id)
        reply = protocol.ScoreError(id=request.id, attempt=request.attempt, code=code, reason="because")
        server.send(client, reply)

    return step


@pytest.fixture(autouse=True)
def _fast_heartbeats(monkeypatch):
    monkeypatch.setattr(protocol, "PING_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(protocol, "LIVENESS_SECONDS", 1.0)


def make_readings(count=3):
    """Return readings of 2 to 9 tokens; every fourth one has every other token scored, the others only their end."""
    rng = np.random.default_rng(1)
    readings = []
    for index in range(count):
        first = 1 + index % 4
        length = first + 1 + index % 5
        positions = np.arange(first, length) if first < 4 else np.arange(1, length, 2)
        token_ids = rng.integers(0, 50, length, dtype=np.int32)
        readings.append(Reading(token_ids=token_ids, positions=positions, name=f"sample {index}"))
    return readings


def connect(*servers, **options):
    options = {"topk": 4, "vocab_size": 50, "num_microbatches": 4, "connect_timeout": TIMEOUT} | options
    return TeacherClient([server.address for server in servers], **options)


def expect_scores(futures, batch):
    for future, reading in zip(futures, batch, strict=True):
        score = future.result(TIMEOUT)
        (expected,) = scores_of([reading], 4)
        np.testing.assert_array_equal(score.ids, expected.ids)
        np.testing.assert_array_equal(score.sampled_logprobs, expected.sampled_logprobs)


def test_scores_come_back_in_order_and_are_counted():
    batch = make_readings(50)
    # A timeout that is longer than a message may have.
    with Server() as server, connect(server, n_server_workers=2, request_timeout=1e8) as client:
        assert client.handshake(**STUDENT).model == "m"
        expect_scores(client.submit(batch), batch)
        metrics = client.drain_metrics()
        assert metrics.tokens == sum(reading.num_tokens for reading in batch)
        assert metrics.scored_tokens == sum(len(reading.positions) for reading in batch)
        assert len(metrics.latencies) == len(server.requests) == 13
        assert metrics.retries == 0
        assert client.drain_metrics().tokens == 0


def test_what_is_uncounted_is_in_no_metrics_and_what_was_counted_before_still_is():
    first, second = make_readings(4), make_readings(12)[4:]
    with Server() as server, connect(server) as client:
        client.handshake(**STUDENT)
        expect_scores(client.submit(first), first)
        with client.uncounted():
            expect_scores(client.submit(second), second)
        metrics = client.drain_metrics()
        assert metrics.tokens == sum(reading.num_tokens for reading in first)
        assert len(metrics.requests) == 1
        assert client.drain_metrics().tokens == 0


@pytest.mark.slow
def test_at_most_n_server_workers_requests_are_in_flight():
    batch = make_readings(9)
    gate = threading.Event()
    most = []

    def hold(server, client, request, readings):
        most.append(len(server.held))
        if len(most) == 2:
            gate.set()

    with (
        Server(hold, hold) as server,
        connect(server, n_server_workers=2, num_microbatches=1, request_timeout=4) as client,
    ):
        client.handshake(**STUDENT)
        futures = client.submit(batch)
        assert gate.wait(TIMEOUT)
        expect_scores(futures, batch)
        assert max(most) == 2


FAULTS = [lose, damage, poison, error("failed"), error("busy"), error("expired")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, pytest.param(silence, marks=pytest.mark.slow)])
def test_one_fault_is_repaired(fault):
    batch = make_readings()
    with Server(fault) as server, connect(server, request_timeout=8 if fault is silence else 60) as client:
        client.handshake(**STUDENT)
        expect_scores(client.submit(batch), batch)
        assert [request.attempt for request in server.requests] == [1, 2]
        assert len({request.id for request in server.requests}) == 1
        assert client.drain_metrics().retries == 1


def test_repeated_reply_is_delivered_once():
    first, second = make_readings(3), make_readings(6)[3:]
    with Server(answer_twice) as server, connect(server) as client:
        client.handshake(**STUDENT)
        expect_scores(client.submit(first), first)
        expect_scores(client.submit(second), second)
        assert len(client.drain_metrics().latencies) == 2


@pytest.mark.slow
def test_late_reply_of_an_earlier_attempt_is_used_once():
    batch = make_readings()
    kept = []

    def keep(server, client, request, readings):
        kept.append(request)

    def answer_the_first(server, client, request, readings):
        answer(server, client, kept[0], readings)
        answer(server, client, request, readings)

    with Server(keep, answer_the_first) as server, connect(server, request_timeout=4) as client:
        client.handshake(**STUDENT)
        expect_scores(client.submit(batch), batch)
        assert len(client.drain_metrics().latencies) == 1


@pytest.mark.parametrize(("fault", "text"), [(damage, "checksum"), (poison, "row 0: log-probability is NaN")])
def test_bad_replies_end_in_an_error_that_says_what_was_wrong(fault, text):
    with Server(*[fault] * 3) as server, connect(server, max_retries=2) as client:
        client.handshake(**STUDENT)
        for future in client.submit(make_readings()):
            with pytest.raises(BadTeacherReply, match=text) as caught:
                future.result(TIMEOUT)
            assert server.address in str(caught.value)
        assert client.drain_metrics().bad_replies == 3


def test_what_no_server_can_score_is_refused_by_name_and_never_sent():
    batch = make_readings(3)
    long = Reading(token_ids=np.ones(65, np.int32), positions=np.array([60]), name="row 41, sample 0")
    foreign = Reading(token_ids=np.array([64, 1, 1], np.int32), positions=np.array([1]))
    with Server() as server, connect(server) as client:
        client.handshake(**STUDENT)
        futures = client.submit([long, *batch, foreign])
        expect_scores(futures[1:4], batch)
        for future, text in (
            (futures[0], "row 41, sample 0 has 65 tokens, the server's limit is 64"),
            (futures[4], "a reading has token ids outside the 64 that the model can read, for example 64"),
        ):
            with pytest.raises(TeacherRefused, match=f"{server.address}: {text}"):
                future.result(TIMEOUT)
        assert sum(len(request.lengths) for request in server.requests) == 3


def test_requests_are_packed_by_tokens(monkeypatch):
    monkeypatch.setattr(requests, "TOKENS_PER_REQUEST", 20)
    batch = make_readings(40)
    with Server() as server, connect(server, num_microbatches=8) as client:
        client.handshake(**STUDENT)
        expect_scores(client.submit(batch), batch)
        sizes = [request.num_tokens for request in server.requests]
        assert max(sizes) <= 20
        assert len(sizes) < 15
        assert sum(sizes) == sum(reading.num_tokens for reading in batch)


@pytest.mark.slow
def test_submit_waits_for_room_instead_of_queueing_without_end(monkeypatch):
    monkeypatch.setattr(teacher_client, "MAX_WAITING_TOKENS", 30)
    batch = make_readings(60)
    most, queued = [], []

    class Watched(list):
        """`submit` takes a reading after it has found room for the one before."""

        def __iter__(self):
            queued.clear()
            for reading in list.__iter__(self):
                yield reading
                queued.append(reading.num_tokens)

    def note(server, client, request, readings):
        most.append(sum(queued) - sum(each.num_tokens for each in server.requests))
        answer(server, client, request, readings)

    with Server(*[note] * 60) as server, connect(server, num_microbatches=1, n_server_workers=1) as submitter:
        submitter.handshake(**STUDENT)
        expect_scores(submitter.submit(Watched(batch)), batch)
        assert 0 < max(most) <= 30 + 9
    # What is in flight has the same deadline, and makes room where it is seen first.
    monkeypatch.setattr(teacher_client.TeacherClient, "_check_deadlines", lambda self: None)
    with Server(*[silence] * 60) as server, connect(server, num_microbatches=1, request_timeout=1.0) as submitter:
        submitter.handshake(**STUDENT)
        limit = r"1 s \(actor_rollout_ref\.teacher\.request_timeout\)"
        with pytest.raises(TeacherTimeout, match=rf"waited {limit} to queue 60 sequences, \d+ tokens are still"):
            submitter.submit(batch)


@pytest.mark.slow
def test_what_the_server_says_of_itself_is_counted():
    with Server() as server, connect(server) as client:
        client.handshake(**STUDENT)
        deadline = time.monotonic() + TIMEOUT
        found = []
        while not found and time.monotonic() < deadline:
            time.sleep(0.02)
            found = client.drain_metrics().queue_lengths
        assert found[0] == 3


def test_another_protocol_version_is_a_mismatch(monkeypatch):
    with Server() as server:
        with connect(server) as client:
            client.handshake(**STUDENT)
        monkeypatch.setattr(protocol.seal, "__defaults__", (9,))
        monkeypatch.setattr(protocol, "PROTOCOL_VERSION", 9)
        server.foreign = True
        with connect(server) as client:
            with pytest.raises(TeacherMismatch, match="protocol version mismatch: the teacher has 2, the student 9"):
                client.handshake(**STUDENT)


def test_refusal_is_final():
    with Server(error("refused")) as server, connect(server) as client:
        client.handshake(**STUDENT)
        with pytest.raises(TeacherRefused, match="because"):
            client.submit(make_readings())[0].result(TIMEOUT)
        assert len(server.requests) == 1


@pytest.mark.slow
def test_timeout_names_server_request_and_wait():
    with Server(*[silence] * 9) as server, connect(server, request_timeout=1.0, max_retries=1) as client:
        client.handshake(**STUDENT)
        futures = client.submit(make_readings())
        for future in futures:
            with pytest.raises(
                TeacherTimeout, match=r"3 sequences, .* tokens\): waited 1\.\d s for its scores"
            ) as caught:
                future.result(TIMEOUT)
            assert server.address in str(caught.value)
        assert server.requests[0].id in str(caught.value)


def lost(change, **options):
    """The error of a request that is sent after one was scored and `change(server)` has happened."""
    batch = make_readings(2)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server())
        client = stack.enter_context(connect(server, request_timeout=3.0, **options))
        client.handshake(**STUDENT)
        expect_scores(client.submit(batch), batch)
        change(server)
        error = client.submit(batch)[0].exception(TIMEOUT)
        assert isinstance(error, TeacherTimeout)
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "state"),
    [
        pytest.param(lambda server: server.__exit__(), "connection refused since", id="killed"),
        pytest.param(lambda server: setattr(server, "script", None), "connected, but no answer since", id="hung"),
        pytest.param(lambda server: setattr(server, "script", [silence] * 99), "connected, 3 .* queued", id="slow"),
    ],
)
def test_the_error_says_what_happened_to_the_server(change, state):
    message = lost(change)
    limit = r"the limit is 3 s \(actor_rollout_ref\.teacher\.request_timeout\)"
    assert re.search(rf"sent [0-4] time\(s\): {limit}; 127\.0\.0\.1:\d+: {state}", message)
    assert "1 request(s) scored before" in message
    if "since" in state:
        assert re.search(rf"{state} \d\d:\d\d:\d\d", message)


@pytest.mark.slow
def test_a_wait_for_the_handshake_is_said(monkeypatch, caplog):
    monkeypatch.setattr("hybrid_gkd.runtime.waiting.FIRST_SECONDS", 0.01)
    caplog.set_level("INFO", "hybrid_gkd.runtime.waiting")
    with TeacherClient(["127.0.0.1:1"], topk=1, vocab_size=2, connect_timeout=0.3) as client:
        with pytest.raises(TeacherUnreachable):
            client.handshake(**STUDENT)
    assert re.fullmatch(
        r"waiting for the teacher: its handshake: 127\.0\.0\.1:1: connection refused since \S+; since \S+, for 0 s "
        r"now, until \S+ \(actor_rollout_ref\.teacher\.connect_timeout=0\.3\)", caplog.messages[0],
    )


@pytest.mark.slow
def test_a_wait_for_the_status_is_said(monkeypatch, caplog):
    monkeypatch.setattr("hybrid_gkd.runtime.waiting.FIRST_SECONDS", 0.01)
    caplog.set_level("INFO", "hybrid_gkd.runtime.waiting")
    with pytest.raises(TeacherUnreachable):
        query_status("127.0.0.1:1", 0.3, timeout_key="key")
    waits = r"waiting for the teacher at 127\.0\.0\.1:1: connection refused; since .* \(key=0\.3\)"
    assert re.fullmatch(waits, caplog.messages[0])


@pytest.mark.slow
def test_failover_to_the_next_server():
    batch = make_readings(20)
    dies = threading.Event()

    def die(server, client, request, readings):
        server.answers_pings = False
        server.script = [silence] * 1000
        dies.set()

    with Server(die) as dying, Server() as healthy, connect(dying, healthy, num_microbatches=2) as client:
        client.handshake(**STUDENT)
        expect_scores(client.submit(batch), batch)
        assert dies.is_set()
        assert healthy.requests


@pytest.mark.slow
def test_restarted_server_is_asked_again():
    batch = make_readings()

    def restart(server, client, request, readings):
        server.instance = "second"
        server.held.clear()

    with Server(restart) as server, connect(server) as client:
        client.handshake(**STUDENT)
        expect_scores(client.submit(batch), batch)
        assert len(server.requests) == 2


@pytest.mark.slow
def test_a_connection_that_libzmq_gives_up_is_opened_again():
    """After a handshake that can never succeed, libzmq does not try again, whoever listens there later."""
    batch = make_readings()
    with contextlib.ExitStack() as stack:
        with Server() as server:
            client = stack.enter_context(connect(server))
            client.handshake(**STUDENT)
        port = int(server.address.rpartition(":")[2])
        with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
            other.curve_server = True
            other.curve_publickey, other.curve_secretkey = zmq.curve_keypair()
            other.bind(f"tcp://127.0.0.1:{port}")
            deadline = time.monotonic() + TIMEOUT
            while EXPECTS_KEYS not in client.describe():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        stack.enter_context(Server(port=port))
        expect_scores(client.submit(batch), batch)


@pytest.mark.slow
def test_server_that_comes_back_with_another_model_ends_the_run():
    def change(server, client, request, readings):
        server.instance, server.model = "second", model_info(tokenizer_hash="other")

    with Server(change) as server, connect(server) as client:
        client.handshake(**STUDENT)
        with pytest.raises(TeacherMismatch, match="tokenizer hash: the teacher has other, the student needs h"):
            client.submit(make_readings())[0].result(TIMEOUT)
        with pytest.raises(TeacherMismatch):
            client.submit(make_readings())


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"weights": "b"}, {"model": "n", "weights": ""}])
def test_a_restarted_server_with_another_teacher_is_refused_unless_allowed(change, caplog):
    """Neither its name nor its weights may change, and no score of it arrives before the handshake has shown that."""
    first = model_info(weights="a")

    def replace(server, client, request, readings):
        server.instance, server.model = "second", model_info(**{"weights": "a"} | change)

    found = r"127\.0\.0\.1:\d+ serves . \(weights \w+\), but at the first handshake .* served m \(weights a\)"
    with Server(replace, model=first) as server, connect(server) as client:
        client.handshake(**STUDENT)
        with pytest.raises(TeacherMismatch, match=rf"{found}: it is another teacher; .*allow_teacher_change=true"):
            client.submit(make_readings())[0].result(TIMEOUT)
        assert len(server.requests) == 1
    batch = make_readings()
    with Server(replace, model=first) as server, connect(server, allow_change=True) as client:
        client.handshake(**STUDENT)
        expect_scores(client.submit(batch), batch)
    assert re.search(f"{found}; training continues", caplog.text)


def test_a_client_of_an_adapter_names_it_and_notices_when_it_changes():
    """Above the client, its model is an ordinary one; those of the model itself name none."""
    batch, changed = make_readings(), (ADAPTERS[0], protocol.AdapterInfo("b", "of another"))

    def replace(server, client, request, readings):
        server.instance, server.model = "second", model_info(weights="w", adapters=changed)

    with Server(answer, replace, model=model_info(weights="w", adapters=ADAPTERS)) as server:
        with connect(server) as client:
            assert client.handshake(**STUDENT).weights == "w"
            expect_scores(client.submit(batch), batch)
        with connect(server, adapter="b") as client:
            served = client.handshake(**STUDENT)
            assert (served.model, served.weights, served.adapters) == ("m with adapter b", "of b", UNSET)
            with pytest.raises(TeacherMismatch, match=r"b \(weights of another\), but at the first.*another teacher"):
                client.submit(batch)[0].result(TIMEOUT)
        assert [request.adapter for request in server.requests] == [UNSET, "b"]


@pytest.mark.slow
def test_a_score_of_a_new_server_before_its_handshake_is_dropped():
    """Another server takes the address while a request is open, and answers it before the hello."""
    batch, early = make_readings(), threading.Event()
    with contextlib.ExitStack() as stack:
        with Server(silence) as server:
            client = stack.enter_context(connect(server))
            client.handshake(**STUDENT)
            futures = client.submit(batch)
            while not server.requests:
                time.sleep(0.01)
        (request,) = server.requests
        new = Server(port=int(server.address.rpartition(":")[2]), model=model_info(model="n"))
        send = new.send

        def answer_before_the_welcome(identity, message, arrays=()):
            if isinstance(message, protocol.Welcome) and not early.is_set():
                early.set()
                send(identity, *result_for(request, batch))
            send(identity, message, arrays)

        new.send = answer_before_the_welcome
        stack.enter_context(new)
        with pytest.raises(TeacherMismatch, match="it is another teacher"):
            futures[0].result(TIMEOUT)
        assert early.is_set()


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({"tokenizer_hash": "x"}, {}, "tokenizer hash: the teacher has x, the student needs h"),
        ({"vocab_size": 49}, {}, "tokenizer size: the teacher has 49, the student needs 50"),
        ({"max_topk": 3}, {}, "the teacher has 3, the student needs 4"),
        ({"max_sequence_length": 31}, {}, "tokens of a sequence: the teacher has 31, the student needs 32"),
        ({"any_temperature": False}, {"temperature": 0.5}, r"only 1\.0 \(backend hf\), the student needs 0\.5"),
        (
            {}, {"given_topk": 4},
            r"candidates of the student \(distillation.candidates\): the teacher has no scores of given ids",
        ),
        ({"given_ids": True}, {"given_topk": 30}, "the teacher has 8, the student needs 30"),
        ({}, {"adapter": "c"}, r"adapter \(the server's --adapters\): the teacher m has none, the student needs c"),
        ({"adapters": ADAPTERS}, {"adapter": "c"}, "the teacher m has a, b, the student needs c"),
    ],
)
def test_mismatch_names_both_sides(changes, options, text):
    with Server(model=model_info(**changes)) as server, connect(server, **options) as client:
        with pytest.raises(TeacherMismatch, match=text):
            client.handshake(**STUDENT)


def with_given(readings, width=3):
    given = [np.arange(5, 5 + width, dtype=np.int32)[None].repeat(len(each.positions), 0) for each in readings]
    return [dataclasses.replace(each, given_ids=ids) for each, ids in zip(readings, given, strict=True)]


def give(server, client, request, readings):
    """The given ids are the most likely ones."""
    server.held.discard(request.id)
    scores = scores_of(readings, request.topk)
    for score, reading in zip(scores, readings, strict=True):
        if reading.given_ids is not None:
            others = np.arange(20, 20 + request.topk - reading.given_ids.shape[1], dtype=np.int32)
            score.ids[:] = np.concatenate([reading.given_ids, others[None].repeat(len(score.ids), 0)], 1)
    header = protocol.ScoreResult(id=request.id, attempt=request.attempt, server="worker")
    server.send(client, header, protocol.result_arrays(scores))


def test_given_ids_travel_apart_from_readings_without_and_come_back():
    plain, given = make_readings(2), with_given(make_readings(3))
    with Server(*[give] * 3, model=model_info(given_ids=True)) as server, connect(server, given_topk=5) as client:
        client.handshake(**STUDENT)
        scores = [each.result(TIMEOUT) for each in client.submit([*given[:2], *plain, given[2]])]
    assert [score.ids.shape[1] for score in scores] == [5, 5, 4, 4, 5]
    assert all((score.ids[:, :3] == [5, 6, 7]).all() for score in (*scores[:2], scores[4]))
    assert [(request.topk, len(request.lengths)) for request in server.requests] == [(5, 2), (4, 2), (5, 1)]


def test_a_reply_without_a_given_id_is_bad():
    with Server(model=model_info(given_ids=True)) as server:
        with connect(server, given_topk=4, max_retries=0) as client:
            client.handshake(**STUDENT)
            batch = with_given(make_readings(1), 1)
            batch[0].given_ids[:] = 49
            with pytest.raises(BadTeacherReply, match=r"row 0: the given id 49 is not among the candidates"):
                client.submit(batch)[0].result(TIMEOUT)


def test_token_ids_and_positions_may_be_lists():
    batch = make_readings(4)
    listed = [
        dataclasses.replace(each, token_ids=each.token_ids.tolist(), positions=each.positions.tolist())
        for each in batch
    ]
    with Server() as server, connect(server) as client:
        client.handshake(**STUDENT)
        assert client.model == server.model
        expect_scores(client.submit(listed), batch)
    (request,) = server.requests
    assert request.ranges == [[1, 2], [2, 4], [3, 6], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"token_ids": [0.5, 1.5]}, "sample 0: token_ids must be a list or array of integers, got float64"),
        ({"positions": [1.0]}, "sample 0: positions must be a list or array of integers, got float64"),
        ({"positions": [[1]]}, r"integers, got int64 of shape \(1, 1\)"),
        ({"positions": []}, r"sample 0: positions must be ascending in \[1, 2\) and not empty"),
        ({"positions": [0, 1]}, r"not empty; got \[0, 1\]"),
        ({"positions": [2]}, r"not empty; got \[2\]"),
        ({"positions": [1, 1]}, r"not empty; got \[1, 1\]"),
        ({"token_ids": [1, 2, 3], "positions": np.array([2, 1], np.uint32), "name": ""}, "a reading: .* got .2, 1."),
        ({"given_ids": [1, 2]}, r"given_ids must be integers of shape \[1, C\], got int64 of shape \(2,\)"),
        ({"given_ids": [[1, 2]]}, r"2 given ids per token, beyond given_topk=0 of this client"),
    ],
)
def test_what_is_no_reading_is_an_error_at_once(change, text):
    with Server() as server, connect(server) as client:
        client.handshake(**STUDENT)
        with pytest.raises(TeacherError, match=text):
            client.submit([dataclasses.replace(make_readings(1)[0], **change)])


def test_servers_of_different_models():
    for of_one, of_two in (({}, {"model": "n"}), ({"weights": "a"}, {"weights": "b"})):
        models = (Server(model=model_info(**changes)) for changes in (of_one, of_two))
        with next(models) as one, next(models) as two, connect(one, two) as client:
            with pytest.raises(TeacherMismatch, match="serves"):
                client.handshake(**STUDENT)


@pytest.mark.slow
def test_nobody_there():
    with TeacherClient(["127.0.0.1:1"], topk=1, vocab_size=2, connect_timeout=0.3) as client:
        limit = r"waited 0\.3 s \(actor_rollout_ref\.teacher\.connect_timeout\)"
        with pytest.raises(TeacherUnreachable, match=rf"127\.0\.0\.1:1: {limit} .*: connection refused since \d\d:"):
            client.handshake(**STUDENT)
        with pytest.raises(TeacherError, match="needs a handshake first"):
            client.submit(make_readings())


def test_bad_addresses_are_refused_at_once():
    for endpoints in ([], ["127.0.0.1"], ["127.0.0.1:15555", "nowhere"]):
        with pytest.raises(TeacherError, match="address"):
            TeacherClient(endpoints, topk=1, vocab_size=2)


def test_close_fails_what_is_open():
    with Server(silence) as server:
        with connect(server) as client:
            client.handshake(**STUDENT)
            futures = client.submit(make_readings())
        for future in futures:
            with pytest.raises(TeacherError, match="closed"):
                future.result(TIMEOUT)
        client.close()


def test_a_dead_thread_fails_everything(monkeypatch):
    def explode(*_, **__):
        raise RuntimeError("boom")

    with Server() as server, connect(server) as client:
        client.handshake(**STUDENT)
        monkeypatch.setattr(protocol, "unpack_result", explode)
        with pytest.raises(TeacherError, match="boom"):
            client.submit(make_readings())[0].result(TIMEOUT)
        with pytest.raises(TeacherError, match="boom"):
            client.submit(make_readings())


@pytest.mark.slow
def test_cancelled_futures_are_left_out():
    batch = make_readings(8)
    with Server(silence) as server, connect(server, n_server_workers=1, request_timeout=4) as client:
        client.handshake(**STUDENT)
        futures = client.submit(batch)
        deadline = time.monotonic() + TIMEOUT
        while not server.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(future.cancel() for future in futures[4:6])
        expect_scores(futures[:4] + futures[6:], batch[:4] + batch[6:])

"""The broker in a thread of this process, with workers and clients of the test's own: who gets work, who is who."""

import contextlib
import dataclasses
import os
import queue
import re
import select
import socket
import struct
import threading

import faults
import msgspec
import numpy as np
import pytest
import zmq
from processes import wait_until

from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.ranges import ranges_of
from hybrid_gkd.teacher.server import port
from hybrid_gkd.teacher.server.broker import Broker
from hybrid_gkd.teacher.server.dispatch import (
    MAX_HELD_PER_CONNECTION,
    MAX_HELD_REQUESTS,
    MAX_TOKENS_AT_WORKER,
    assignments,
    busy_reason,
    choose_worker,
)
from hybrid_gkd.teacher.server.records import ClientRecord, KeyRecord, Ticket, WorkerRecord
from hybrid_gkd.teacher.server.scoring_worker import Link

TIMEOUT = 30.0  # seconds; no test waits for it


@pytest.fixture
def broker():
    running = Broker(port=0, worker_port=0)
    stopping = threading.Event()
    thread = threading.Thread(target=running.run, args=[lambda: not stopping.is_set()])
    thread.start()
    yield running
    stopping.set()
    thread.join(TIMEOUT)
    running.close()
    assert not thread.is_alive()


class FakeWorker:
    """Worker stand-in: received messages are in `inbox`; the test request is answered."""

    def __init__(self, broker, name, credits):
        registration = protocol.Register(name=name, model=faults.MODEL, credits=credits)
        self._link, self._name = Link(f"127.0.0.1:{broker.worker_port}", registration, None), name
        self.inbox = queue.Queue()
        self.answer(self._link.inbox.get(timeout=TIMEOUT))
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self):
        while not isinstance(work := self._link.inbox.get(), BaseException):
            self.inbox.put(work)

    def answer(self, work):
        scores = [faults.expected_scores(reading, work.request.topk) for reading in work.readings]
        result = protocol.ScoreResult(id=work.request.id, attempt=work.request.attempt, server=self._name)
        self._link.reply(result, protocol.result_arrays(scores))


@pytest.mark.slow
def test_work_goes_round_whatever_a_worker_says_it_can_hold(broker):
    workers = [FakeWorker(broker, "greedy", 1024), FakeWorker(broker, "modest", 3)]
    wait_until(lambda: broker.num_workers == 2)
    with faults.connected(f"127.0.0.1:{broker.port}", num_microbatches=1) as client:
        batch = faults.make_readings(np.random.default_rng(0), 6)
        futures = client.submit(batch)
        wait_until(lambda: sum(worker.inbox.qsize() for worker in workers) == 6)
        assert [worker.inbox.qsize() for worker in workers] == [3, 3]
        for worker in workers:
            for _ in range(3):
                worker.answer(worker.inbox.get(timeout=TIMEOUT))
        for future, reading in zip(futures, batch, strict=True):
            faults.expect(future.result(TIMEOUT), reading)


@pytest.mark.slow
def test_a_worker_with_other_limits_reads_which_ones(broker):
    FakeWorker(broker, "worker", 2)
    wait_until(lambda: broker.num_workers == 1)
    model = msgspec.structs.replace(faults.MODEL, max_topk=3, chat_template="x" * 1000)
    link = Link(f"127.0.0.1:{broker.worker_port}", protocol.Register(name="other", model=model, credits=2), None)
    reason = str(link.inbox.get(timeout=TIMEOUT))
    assert f"max_topk 3 instead of {faults.MODEL.max_topk}, chat_template 'xxx" in reason
    assert reason.endswith(f"instead of {faults.MODEL.chat_template!r:.60}")
    assert len(reason) < 400


@pytest.mark.slow
def test_clients_take_turns_however_much_one_of_them_asks_for(broker):
    """The worker holds two requests of one client, whose eight are the older ones; the next one is the other's."""
    worker, address = FakeWorker(broker, "worker", 2), f"127.0.0.1:{broker.port}"
    wait_until(lambda: broker.num_workers == 1)
    rng = np.random.default_rng(0)
    with faults.connected(address, num_microbatches=1) as many, faults.connected(address, num_microbatches=1) as one:
        readings, (own,) = faults.make_readings(rng, 8), faults.make_readings(rng, 1, length=70)
        futures = many.submit(readings)
        wait_until(lambda: broker.num_held == 8)
        futures += one.submit([own])
        wait_until(lambda: broker.num_held == 9)
        served = []
        while len(served) < 9:
            work = worker.inbox.get(timeout=TIMEOUT)
            served.append(np.array_equal(work.readings[0].token_ids, own.token_ids))
            worker.answer(work)
        assert served.index(True) < 5  # 2, unless the worker's connection was lost meanwhile
        for future, reading in zip(futures, [*readings, own], strict=True):
            faults.expect(future.result(TIMEOUT), reading)


def ticket(client, name, num_tokens):
    """A queued request of one reading."""
    request = protocol.ScoreRequest(
        id=name, attempt=1, timeout_seconds=60.0, topk=1, temperature=1.0, lengths=[num_tokens], ranges=[[1, 2]]
    )
    made = Ticket(name, client, request, [], 0.0, 60.0)
    client.tickets[name] = made
    return made


def test_a_client_has_a_bounded_number_of_tokens_at_a_worker():
    """One request is always possible; a second worker is free for more."""
    client, other = ClientRecord(b"a", KeyRecord()), ClientRecord(b"b", KeyRecord())
    register = protocol.Register(name="worker", model=faults.MODEL, credits=16)
    first, second = (WorkerRecord(name, register, 0.0, tested=True) for name in (b"1", b"2"))
    assert choose_worker(ticket(client, "long", MAX_TOKENS_AT_WORKER + 1), [first]) is first
    client.tickets["long"].worker = first
    assert choose_worker(ticket(client, "next", 1), [first]) is None
    assert choose_worker(client.tickets["next"], [first, second]) is second
    assert choose_worker(ticket(other, "other", 10), [first]) is first


def test_the_connections_of_a_key_share_its_turns_and_its_place():
    """Eight connections of one key have filled half of the queue; another key's request is the second one served."""
    register = protocol.Register(name="worker", model=faults.MODEL, credits=1024)
    worker = WorkerRecord(b"1", register, 0.0, tested=True)
    key, queue = KeyRecord(), []
    for number in range(16):
        client = ClientRecord(b"%d" % number, key)
        while busy_reason(client, 0, num_held=len(queue), held_bytes=0) is None:
            queue.append(ticket(client, f"{number}.{len(client.tickets)}", 1024))
    assert len(queue) == MAX_HELD_REQUESTS // 2 == 8 * MAX_HELD_PER_CONNECTION
    other = ClientRecord(b"other", KeyRecord())
    assert busy_reason(other, 0, num_held=len(queue), held_bytes=0) is None
    queue.append(ticket(other, "other", 1024))
    served = []
    for each, _ in assignments(queue, [worker]):
        each.worker = worker
        served.append(each)
    assert served.index(queue[-1]) <= 1
    assert sum(each.num_tokens for each in served if each.client.key is key) == MAX_TOKENS_AT_WORKER
    assert len({each.client for each in served if each.client.key is key}) == 8


@contextlib.contextmanager
def asking(broker):
    """A client's socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{broker.port}")
        yield dealer


def large_request(readings, name="1", **changes):
    """The frames of a request; each row has one given id."""
    fields = {
        "id": name, "attempt": 1, "timeout_seconds": TIMEOUT, "topk": 4, "temperature": 1.0,
        "lengths": [each.num_tokens for each in readings], "ranges": [ranges_of(each.positions) for each in readings],
    }  # fmt: skip
    return protocol.encode_message(protocol.ScoreRequest(**fields | changes), protocol.request_arrays(readings))


def received(dealer):
    assert dealer.poll(int(TIMEOUT * 1000))
    header, *frames = dealer.recv_multipart()
    return protocol.decode_header(header), frames


@pytest.mark.slow
def test_a_request_with_too_many_tokens_for_a_worker_is_scored_in_parts(broker):
    """Between readings, with one answer. An error of one part is that of the whole; a reply can be too large."""
    worker = FakeWorker(broker, "worker", 16)
    wait_until(lambda: broker.num_workers == 1)
    readings = [
        dataclasses.replace(each, given_ids=each.token_ids[each.positions][:, None])
        for each in faults.make_readings(np.random.default_rng(0), 300, length=500, num_scored=3)
    ]
    with asking(broker) as dealer:
        dealer.send_multipart(large_request(readings))
        parts = [worker.inbox.get(timeout=TIMEOUT) for _ in range(2)]  # of a key at a worker
        dealer.send_multipart(protocol.encode_message(protocol.Ping(number=1)))
        assert received(dealer)[0].pending == ["1"]
        dealer.send_multipart(large_request(readings, attempt=2))
        for work in reversed(parts):
            worker.answer(work)
        parts.append(worker.inbox.get(timeout=TIMEOUT))
        worker.answer(parts[-1])
        answer, frames = received(dealer)
        assert (answer.id, answer.attempt, answer.server) == ("1", 2, "worker")
        found = protocol.unpack_result(
            answer, frames, topk=4, vocab_size=faults.VOCAB, num_scored=[len(each.positions) for each in readings]
        )
        for score, reading in zip(found, readings, strict=True):
            wanted = faults.expected_scores(reading, 4)
            np.testing.assert_array_equal(score.ids, wanted.ids)
            np.testing.assert_array_equal(score.sampled_logprobs, wanted.sampled_logprobs)
        assert [len(work.readings) for work in parts] == [131, 131, 38]
        given = np.concatenate([each.given_ids for work in parts for each in work.readings])
        np.testing.assert_array_equal(given, np.concatenate([each.given_ids for each in readings]))

        ranges = [ranges_of(each.positions) for each in readings]
        dealer.send_multipart(large_request(readings, "2", ranges=[*ranges[:-1], [0, 3]]))
        late = worker.inbox.get(timeout=TIMEOUT)
        worker.answer(worker.inbox.get(timeout=TIMEOUT))
        answer, _ = received(dealer)
        assert (answer.id, answer.code) == ("2", "refused")
        assert "must be ascending within [1, 500)" in answer.reason
        wait_until(lambda: broker.num_held == 0)
        worker.answer(late)
        wait_until(lambda: broker.counters["late"] == 1)
        dealer.send_multipart(large_request(readings, "3", topk=1 << 20))
        answer, _ = received(dealer)
        assert (answer.id, answer.code) == ("3", "refused")
        size = r"the result of 900 scored tokens with topk 1048576 would have \d+ bytes"
        assert re.fullmatch(f"{size}, the limit is 1073741824", answer.reason)
        assert broker.num_held == 0


def test_a_peer_that_names_itself_is_told(broker):
    """Nobody can give the name of another one, whose names are known to the socket alone."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, b"a name of its own")
        dealer.connect(f"tcp://127.0.0.1:{broker.port}")
        dealer.send_multipart(protocol.encode_message(protocol.Hello()))
        assert dealer.poll(int(TIMEOUT * 1000))
        answer = protocol.decode_header(dealer.recv_multipart()[0])
        assert answer == protocol.Rejected(reason="the service assigns routing ids itself: set no ROUTING_ID")


class Cable:
    """A TCP connection to `number` of this machine that can be cut; a new one can be made at once."""

    def __init__(self, number):
        self._number, self._listener = number, socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._number))
                self._ends = [near, far]
                threading.Thread(target=self._pass_on, args=[near, far], daemon=True).start()

    def _pass_on(self, near, far):
        other = {near: far, far: near}
        with contextlib.suppress(OSError):
            while True:
                for end in select.select([near, far], [], [])[0]:
                    if not (data := end.recv(1 << 16)):
                        raise OSError
                    other[end].sendall(data)
        near.close()
        far.close()

    def cut(self):
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()
        self.cut()


@pytest.mark.slow
def test_a_client_whose_connection_is_cut_gets_all_its_scores(broker):
    """It comes back under a name that the broker does not know."""
    worker = FakeWorker(broker, "worker", 4)
    wait_until(lambda: broker.num_workers == 1)
    with contextlib.closing(Cable(broker.port)) as cable, faults.connected(cable.address) as client:
        batch = faults.make_readings(np.random.default_rng(0), 8)
        futures = client.submit(batch)
        held = [worker.inbox.get(timeout=TIMEOUT) for _ in range(2)]
        cable.cut()
        for work in held:
            worker.answer(work)  # nobody is there to take it
        while not all(future.done() for future in futures):
            with contextlib.suppress(queue.Empty):
                worker.answer(worker.inbox.get(timeout=0.1))
        for future, reading in zip(futures, batch, strict=True):
            faults.expect(future.result(TIMEOUT), reading)
        assert client.drain_metrics().retries > 0


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


@pytest.fixture
def one_cpu():
    """Number of the only CPU that this thread may use, so that an idle-priority thread there has to wait for it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


def test_a_message_without_an_end_is_cut_off(caplog, one_cpu):
    """libzmq keeps its parts and tells nobody; a peer that only is slow stays."""
    with zmq.Context() as context:
        context.set(zmq.THREAD_AFFINITY_CPU_ADD, one_cpu)  # libzmq closes the connection some checks later
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_IDLE)
        found = port.Port(
            context, "clients", "127.0.0.1", 0, "--port", max_message_bytes=1 << 16, max_unsent=9, allowed=None
        )
        with (
            found.socket,
            socket.create_connection(("127.0.0.1", found.number), TIMEOUT) as endless,
            socket.create_connection(("127.0.0.1", found.number), TIMEOUT) as slow,
        ):
            for peer in (endless, slow):
                peer.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
                heard = b""
                while not heard.endswith(b"Identity\0\0\0\0"):
                    heard += peer.recv(1 << 10)
            part = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)  # and more to come
            slow.sendall(part)
            sent, closed = 0, False
            while not closed and sent < 1000:
                for _ in range(3):
                    found.check_unfinished()
                try:
                    endless.sendall(part)
                    sent += 1
                except ConnectionError:  # at once, not after a wait for room
                    closed = True
            assert closed
            assert "was dropped: unfinished message of" in caplog.text
            assert caplog.text.count("was dropped") == 1
            slow.sendall(b"\0\x02hi")
            assert found.socket.poll(int(TIMEOUT * 1000))
            ((_, _, frames),) = found.receive()
            assert [len(frame) for frame in frames] == [1 << 16, 2]

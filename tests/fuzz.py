"""Damaged, foreign and forged messages against broker, worker and client, with valid ones in between.

Damage (bits flipped, frames cut, lost, repeated, in another order, of another message, or garbage) must be noticed
whatever it hits. A forged message has an impossible field and a right checksum; it must not end the receiver.
"""

from __future__ import annotations

import os
import socket
import threading
import time

import msgspec
import numpy as np
import zmq
from faults import (
    MODEL,
    TIMEOUT,
    TOPK,
    Cluster,
    connected,
    expect,
    expected_scores,
    make_readings,
    memory_mib,
)  # fmt: skip

from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.ranges import ranges_of

MAX_GROWTH_MIB = 64
BURST = 500
"""Bad messages between two valid requests."""
ODD = [
    None, True, -1, 0, 1, 2**31, 2**63, 1e300, float("nan"), "", "x" * 300, b"\x80\x04.", [], {}, {"": 0},
    ["int32"], [1] * 70000, [[]], [[3, 2]], [[1, 2**31 - 1]], [[0, 1]], [[1, 2] * 70000],
]  # fmt: skip
SPARED = {"id"}
"""A forged id would be a right answer to another question; only keys keep such a sender out."""


class Mutator:
    """Makes bad messages of good ones. Reproducible by its seed."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def _below(self, limit: int) -> int:
        return int(self._rng.integers(limit))

    def bad(self, good: list[list[bytes]], *, forge: bool = True) -> list[bytes]:
        """A message that is none of `good`."""
        while True:
            frames = list(good[self._below(len(good))])
            frames = self._forged(frames) if forge and self._below(8) == 0 else self._damaged(frames, good)
            if frames not in good and frames:
                return frames

    def _damaged(self, frames: list[bytes], good: list[list[bytes]]) -> list[bytes]:
        kind, index = self._below(9), self._below(len(frames))
        frame = frames[index]
        if kind == 0:
            frames[index] = frame[: self._below(len(frame) + 1)]
        elif kind <= 2 and frame:
            changed = bytearray(frame)
            for _ in range(1 + self._below(4)):
                changed[self._below(len(changed))] ^= 1 << self._below(8)
            frames[index] = bytes(changed)
        elif kind == 3:
            frames = [frames[each] for each in self._rng.permutation(len(frames))]
        elif kind == 4:
            frames.insert(self._below(len(frames) + 1), frame)
        elif kind == 5:
            del frames[index]
        elif kind == 6:
            other = good[self._below(len(good))]
            frames[index] = other[self._below(len(other))]
        elif kind == 7:  # another number in a text, such as an id
            digits = [position for position, byte in enumerate(frames[0]) if byte in b"0123456789"]
            if digits:
                changed = bytearray(frames[0])
                changed[digits[self._below(len(digits))]] = 48 + self._below(10)
                frames[0] = bytes(changed)
        else:
            frames[index:] = [self._rng.bytes(self._below(200)) for _ in range(1 + self._below(5))]
        return frames

    def _forged(self, frames: list[bytes]) -> list[bytes]:
        header = msgspec.msgpack.decode(frames[0][protocol.PREFIX_BYTES :])
        fields = sorted(header.keys() - SPARED - {"kind"})
        if not fields:
            return []
        node, key = header, fields[self._below(len(fields))]
        if isinstance(node[key], dict) and node[key] and self._below(2):
            node = node[key]
            key = sorted(node)[self._below(len(node))]
        node[key] = ODD[self._below(len(ODD))]
        frames[0] = protocol.seal(msgspec.msgpack.encode(header))
        return frames


def wire(message: protocol.AnyMessage, *arrays: np.ndarray) -> list[bytes]:
    return [bytes(frame) for frame in protocol.encode_message(message, arrays)]


def score_request(reading, **changes) -> list[bytes]:
    fields = {
        "id": f"r{reading.name}", "attempt": 1, "timeout_seconds": 60.0, "topk": TOPK, "temperature": 1.0,
        "lengths": [reading.num_tokens], "ranges": [ranges_of(reading.positions)],
    } | changes  # fmt: skip
    return wire(protocol.ScoreRequest(**fields), reading.token_ids)


def score_result(reading, **changes) -> list[bytes]:
    scores = expected_scores(reading)
    header = protocol.ScoreResult(**({"id": f"r{reading.name}", "attempt": 1, "server": "fuzz"} | changes))
    return wire(header, *protocol.result_arrays([scores]))


def server_socket(context: zmq.Context) -> tuple[zmq.Socket, str]:
    router = context.socket(zmq.ROUTER)
    network.configure(router, protocol.MAX_REPLY_BYTES)
    return router, f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


def fuzz_broker(num_messages: int, seed: int = 0) -> dict[str, float]:
    """Both ports get bad messages from connections that come and go, and bytes that are not even ZMTP."""
    mutator, rng = Mutator(seed), np.random.default_rng(seed)
    examples = make_readings(rng, 3)
    to_client_port = [
        wire(protocol.Hello()), wire(protocol.Ping(number=1)), wire(protocol.Bye()), wire(protocol.StatusRequest()),
        *map(score_request, examples),
    ]  # fmt: skip
    register = protocol.Register(name="fuzz:1", model=MODEL, credits=4)
    pong = protocol.Pong(number=1, pending=["a"], engine_busy=0.5)
    failed = protocol.ScoreError(id="r0", attempt=1, code="failed", reason="x")
    to_worker_port = [wire(register), wire(pong), wire(failed), *map(score_result, examples)]
    with Cluster(1) as cluster, connected(cluster.address) as client, zmq.Context() as context:
        memory, started, sent = memory_mib(cluster.broker.pid), time.monotonic(), 0
        while sent < num_messages:
            for port, good in zip(cluster.ports, (to_client_port, to_worker_port), strict=True):
                _send_raw_garbage(port, rng)
                with context.socket(zmq.DEALER) as dealer:
                    dealer.setsockopt(zmq.LINGER, 2000)  # whoever is dropped cannot deliver the rest
                    dealer.connect(f"tcp://127.0.0.1:{port}")
                    for _ in range(BURST):
                        dealer.send_multipart(mutator.bad(good))
                    sent += BURST
            batch = make_readings(rng, 4)
            for future, reading in zip(client.submit(batch), batch, strict=True):
                expect(future.result(TIMEOUT), reading)
        growth = memory_mib(cluster.broker.pid) - memory
        state = cluster.status()
        assert cluster.broker.poll() is None
        assert all(worker.poll() is None for worker in cluster.workers.values())
        assert state.num_workers == 1
        assert growth < MAX_GROWTH_MIB, growth
        return {
            "bad messages": sent, "counted as malformed": state.counters["malformed"], "broker grew by MiB": growth,
            "valid requests": len(client.drain_metrics().latencies), "seconds": time.monotonic() - started,
        }  # fmt: skip


def _send_raw_garbage(port: int, rng: np.random.Generator) -> None:
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + b"\x00" * 48
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as plain:
        plain.sendall((greeting if rng.integers(2) else b"") + rng.bytes(int(rng.integers(1, 2000))))


def fuzz_worker(num_messages: int, seed: int = 0) -> dict[str, float]:
    """A worker process whose broker sends bad messages."""
    mutator, rng = Mutator(seed), np.random.default_rng(seed)
    with Cluster(0) as cluster, zmq.Context() as context:
        router, address = server_socket(context)
        with router:
            process = cluster.start("worker", address)
            cluster.workers["fuzzed"] = process
            worker = _next_message(router, protocol.Register)[0]
            router.send_multipart([worker, *wire(protocol.Registered())])
            good = [wire(protocol.Ping(number=1)), *map(score_request, make_readings(rng, 3))]
            memory, started, sent, answered = 0.0, time.monotonic(), 0, 0
            while sent < num_messages:
                for _ in range(BURST):
                    router.send_multipart([worker, *mutator.bad(good)])
                sent += BURST
                (reading,) = make_readings(rng, 1, first=1000 + answered)
                router.send_multipart([worker, *score_request(reading, attempt=7)])
                frames = _answer_to(router, f"r{reading.name}", worker)
                answer = protocol.decode_header(frames[0])
                (score,) = protocol.unpack_result(
                    answer, frames[1:], topk=TOPK, vocab_size=MODEL.vocab_size,
                    num_scored=[len(reading.positions)],
                )  # fmt: skip
                expect(score, reading)
                answered += 1
                memory = memory or memory_mib(process.pid)
            assert process.poll() is None
            growth = memory_mib(process.pid) - memory
            assert growth < MAX_GROWTH_MIB, growth
            return {
                "bad messages": sent, "valid requests": answered, "worker grew by MiB": growth,
                "seconds": time.monotonic() - started,
            }  # fmt: skip


def _next_message(router: zmq.Socket, kind: type) -> tuple[bytes, protocol.AnyMessage, list[bytes]]:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if router.poll(200):
            worker, header, *arrays = router.recv_multipart()
            message = protocol.decode_header(header)
            if isinstance(message, kind):
                return worker, message, [header, *arrays]
    raise AssertionError(f"waited {TIMEOUT} s for {kind.__name__}")


def _answer_to(router: zmq.Socket, request_id: str, worker: bytes) -> list[bytes]:
    while True:
        _, message, frames = _next_message(router, protocol.ScoreResult | protocol.ScoreError | protocol.Register)
        if isinstance(message, protocol.Register):  # it took the silence for the end of the broker
            router.send_multipart([worker, *wire(protocol.Registered())])
        elif message.id == request_id:
            return frames


class BadServer:
    """Answers every request with a burst of bad messages, then with the right scores."""

    def __init__(self, num_messages: int, seed: int):
        self._mutator, self._num_messages = Mutator(seed), num_messages
        self._context = zmq.Context()
        self._router, self.address = server_socket(self._context)
        self._stopping = threading.Event()
        self.sent = 0
        self._answered: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self.sent >= self._num_messages

    def __enter__(self) -> BadServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join(TIMEOUT)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._router.poll(50):
                continue
            client, header, *arrays = self._router.recv_multipart()
            match message := protocol.decode_header(header):
                case protocol.Hello():
                    welcome = protocol.Welcome(instance="fuzz", num_workers=1, model=MODEL)
                    self._router.send_multipart([client, *wire(welcome)])
                case protocol.Ping():
                    pong = protocol.Pong(number=message.number, instance="fuzz", pending=[])
                    self._router.send_multipart([client, *wire(pong)])
                case protocol.ScoreRequest():
                    self._answer(client, message, arrays)

    def _answer(self, client: bytes, request: protocol.ScoreRequest, arrays: list[bytes]) -> None:
        scores = [expected_scores(reading) for reading in protocol.unpack_request(request, arrays)]
        result = protocol.ScoreResult(id=request.id, attempt=request.attempt, server="fuzz")
        good = wire(result, *protocol.result_arrays(scores))
        pong = wire(protocol.Pong(number=0, instance="fuzz", pending=[request.id]))
        if request.id not in self._answered:  # a bad message may have made the client ask again
            self._answered.add(request.id)
            for _ in range(BURST):
                self._router.send_multipart([client, *self._mutator.bad([good, good, pong])])
            self.sent += BURST
        self._router.send_multipart([client, *good])


def fuzz_client(num_messages: int, seed: int = 0) -> dict[str, float]:
    """The client with a server that sends bad messages; every array that it accepts is compared."""
    rng = np.random.default_rng(seed)
    with BadServer(num_messages, seed) as server:
        # All requests have the same shape, so that scores which reach the wrong one are noticed by their values only.
        with connected(server.address, max_retries=10**9, n_server_workers=32, num_microbatches=1) as client:
            memory, started, accepted = 0.0, time.monotonic(), 0
            while not server.done:
                batch = make_readings(rng, 32, length=16, num_scored=8)
                for future, reading in zip(client.submit(batch), batch, strict=True):
                    expect(future.result(TIMEOUT), reading)
                    accepted += 1
                memory = memory or memory_mib(os.getpid())
            metrics = client.drain_metrics()
        growth = memory_mib(os.getpid()) - memory
        assert metrics.bad_replies > 0
        assert growth < MAX_GROWTH_MIB, growth
        return {
            "bad messages": server.sent, "recognised as bad replies": metrics.bad_replies,
            "sequences accepted, all right": accepted, "client grew by MiB": growth,
            "seconds": time.monotonic() - started,
        }  # fmt: skip

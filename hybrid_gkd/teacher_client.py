"""The trainer's side of the teacher service: sequences in, futures of checked scores out.

One background thread owns the sockets. It groups sequences into requests, keeps a bounded number of them in
flight, and sees each through to its one outcome: scores that passed every check, or an error that names the
server, the request, what was waited for and for how long. A sequence is never skipped.

Who unblocks whom: `submit` wakes the thread through a socket pair; the thread resolves futures and, during
`handshake`, notifies a condition. The thread itself waits in one place, the poller, and never longer than
until its next deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np
import zmq

from hybrid_gkd.errors import (
    BadTeacherReply,
    TeacherError,
    TeacherMismatch,
    TeacherRefused,
    TeacherTimeout,
    TeacherUnreachable,
)
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.connection import Connection, ServerInfo, StudentNeeds, query_status
from hybrid_gkd.teacher.protocol import ScoreError, ScoreRequest, ScoreResult, Status
from hybrid_gkd.types import Sequence, TeacherTopK

GROUP_WAIT_SECONDS = 0.005
"""A request that is not full leaves when its first sequence has waited this long."""
BUSY_WAIT_SECONDS = 0.2
POLL_SECONDS = 0.2


@dataclass(kw_only=True)
class TeacherMetrics:
    """What happened since the last `drain_metrics`."""

    latencies: list[float] = field(default_factory=list)
    """Seconds from the first sending of a request to its scores, one entry per request."""
    tokens: int = 0
    """Prompt and response tokens scored."""
    retries: int = 0
    """Requests sent again, for whatever reason."""
    bad_replies: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(eq=False)
class _Request:
    id: str
    sequences: list[Sequence]
    futures: list[Future[TeacherTopK]]
    array: np.ndarray
    deadline: float
    started: float
    attempt: int = 0
    attempt_deadline: float = 0.0
    endpoint: Connection | None = None
    """Where the current attempt is; None: to be sent, not before `send_at`."""
    last_endpoint: Connection | None = None
    sent_at_ping: int = 0
    send_at: float = 0.0
    num_failures: int = 0
    problem: str = ""
    """Why the last attempt came to nothing."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


class TeacherClient:
    """Scores sequences with one or several teacher servers that serve the same model.

    Args:
        endpoints: "host:port" of each server
        topk: K, candidates per response token
        temperature: of the teacher's distribution
        vocab_size: ids in replies are below it
        connect_timeout: seconds for the handshake with all servers
        request_timeout: seconds from the first sending of a request to its scores, all attempts together
        max_retries: further attempts after a reply that fails its checks or an engine failure; a silent
            attempt is repeated after request_timeout / (max_retries + 1)
        n_server_workers: requests in flight
        num_microbatches: sequences per request at most

    A context manager; call `handshake` before `submit`.
    """

    def __init__(
        self, endpoints: list[str], *, topk: int, temperature: float = 1.0, vocab_size: int,
        connect_timeout: float = 10.0, request_timeout: float = 600.0, max_retries: int = 3,
        n_server_workers: int = 8, num_microbatches: int = 4,
    ):  # fmt: skip
        self._topk, self._temperature, self._vocab_size = topk, temperature, vocab_size
        self._connect_timeout, self._request_timeout, self._max_retries = connect_timeout, request_timeout, max_retries
        self._max_in_flight, self._group_size = n_server_workers, num_microbatches
        self._name = uuid.uuid4().hex
        self._ids = itertools.count(1)
        if not endpoints:
            raise TeacherError("no teacher address is given")
        for address in endpoints:
            network.endpoint_url(address)  # a bad one is an error before anything is opened
        self._context = zmq.Context()
        self._endpoints = [Connection(self._context, address) for address in endpoints]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        # Everything below that both sides touch is guarded by this condition's lock.
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, Sequence, Future[TeacherTopK]]] = deque()
        self._needs: StudentNeeds | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._metrics = TeacherMetrics()
        self._in_flight: dict[str, _Request] = {}
        self._next_beat = 0.0
        self._thread = threading.Thread(target=self._run, name="teacher client", daemon=True)
        self._thread.start()

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def handshake(self, *, tokenizer_hash: str, tokenizer_size: int, max_sequence_length: int) -> ServerInfo:
        """Wait until every server has answered and fits; returns what the first one serves.

        Raises TeacherUnreachable after connect_timeout and TeacherMismatch with both sides' values.
        """
        needs = StudentNeeds(
            tokenizer_hash=tokenizer_hash, tokenizer_size=tokenizer_size, max_sequence_length=max_sequence_length,
            topk=self._topk, temperature=self._temperature,
        )  # fmt: skip

        def settled() -> bool:
            return self._failure is not None or all(endpoint.server for endpoint in self._endpoints)

        with self._changed:
            self._changed.wait_for(settled, self._connect_timeout)
            self._raise_failure()
            for endpoint in self._endpoints:
                if endpoint.server is None:
                    found = "the server has no worker ready" if endpoint.answered else "nothing answered"
                    raise TeacherUnreachable(
                        f"{endpoint.address}: waited {self._connect_timeout:g} s for the teacher's handshake, {found}; "
                        f"see python -m hybrid_gkd.teacher status --addr {endpoint.address}"
                    )
                self._check_fit(endpoint.server, needs)
            self._needs = needs
            assert self._endpoints[0].server is not None
            return self._endpoints[0].server

    def submit(self, sequences: list[Sequence]) -> list[Future[TeacherTopK]]:
        """Queue sequences for scoring; returns at once, one future per sequence in the same order.

        A future raises TeacherTimeout, BadTeacherReply, TeacherRefused or TeacherMismatch.
        """
        futures: list[Future[TeacherTopK]] = [Future() for _ in sequences]
        with self._changed:
            self._raise_failure()
            if self._needs is None:
                raise TeacherError("submit before handshake: it is not known whether the teacher fits the student")
            now = time.monotonic()
            self._waiting.extend((now, *pair) for pair in zip(sequences, futures, strict=True))
        self._wake()
        return futures

    def status(self) -> dict[str, Status]:
        """Current state of every server by address. Raises TeacherUnreachable."""
        return {endpoint.address: query_status(endpoint.address, self._connect_timeout) for endpoint in self._endpoints}

    def drain_metrics(self) -> TeacherMetrics:
        """Counters since the last call."""
        with self._changed:
            metrics, self._metrics = self._metrics, TeacherMetrics()
            for endpoint in self._endpoints:
                metrics.bytes_sent += endpoint.bytes_sent
                metrics.bytes_received += endpoint.bytes_received
                endpoint.bytes_sent = endpoint.bytes_received = 0
        return metrics

    def close(self) -> None:
        """Stop the thread; futures that are still open raise TeacherError. May be called twice."""
        with self._changed:
            self._closing = True
        self._wake()
        self._thread.join(timeout=10.0)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake up anyway; closed: it has ended
            self._wake_writer.send(b"x")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Everything below runs in the background thread.

    def _run(self) -> None:
        failure: BaseException = TeacherError("the teacher client was closed")
        try:
            self._loop()
        except TeacherError as error:
            failure = error
        except BaseException as error:
            failure = TeacherError(f"the teacher client's thread died: {type(error).__name__}: {error}")
            failure.__cause__ = error
        finally:
            with self._changed:
                self._failure = failure
                futures = [future for _, _, future in self._waiting]
                self._waiting.clear()
                self._changed.notify_all()
            for request in self._in_flight.values():
                futures.extend(request.futures)
            self._in_flight.clear()
            for future in futures:
                _resolve(future, failure)
            self._context.destroy(linger=0)
            self._wake_reader.close()
            self._wake_writer.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        by_socket = {endpoint.socket: endpoint for endpoint in self._endpoints}
        for dealer in by_socket:
            poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        pause = 0.0
        while not self._closing:
            for ready, _ in poller.poll(math.ceil(pause * 1000)):
                if ready in by_socket:
                    self._receive(by_socket[ready])
                else:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_reader.recv(4096)
            self._beat()
            self._check_deadlines()
            pause = self._form_requests()
            self._send_requests()

    def _receive(self, endpoint: Connection) -> None:
        for message, frames in endpoint.receive(time.monotonic()):
            match message:
                case protocol.Welcome():
                    self._on_welcome(endpoint, message)
                case protocol.Pong():
                    self._on_pong(endpoint, message)
                case ScoreResult():
                    self._on_result(endpoint, message, frames)
                case ScoreError():
                    self._on_error(endpoint, message)

    def _on_welcome(self, endpoint: Connection, welcome: protocol.Welcome) -> None:
        with self._changed:
            endpoint.on_welcome(welcome)
            if self._needs is not None and endpoint.server is not None:
                self._check_fit(endpoint.server, self._needs)  # a mismatch ends the thread: training must not go on
            self._changed.notify_all()

    def _check_fit(self, server: ServerInfo, needs: StudentNeeds) -> None:
        needs.check(server)
        for other in [each.server for each in self._endpoints if each.server is not None]:
            if other.model.model != server.model.model:
                raise TeacherMismatch(
                    f"{server.address} serves {server.model.model}, {other.address} serves {other.model.model}"
                )

    def _beat(self) -> None:
        """Every second: a hello to servers that are not known to serve, a ping to the others."""
        now = time.monotonic()
        for endpoint in self._endpoints:
            if endpoint.server is not None and endpoint.heard < now - protocol.LIVENESS_SECONDS:
                self._lose(endpoint, f"{endpoint.address} was silent for {protocol.LIVENESS_SECONDS:.0f} s")
        if now >= self._next_beat:
            # Faster as long as somebody waits for the handshake.
            self._next_beat = now + protocol.PING_INTERVAL_SECONDS / (10 if self._needs is None else 1)
            for endpoint in self._endpoints:
                endpoint.beat()

    def _lose(self, endpoint: Connection, problem: str) -> None:
        """Take the requests back from a server that died or was replaced; it has to say hello again."""
        with self._changed:
            endpoint.server = None
        for request in self._in_flight.values():
            if request.endpoint is endpoint:
                self._again(request, problem)

    def _on_pong(self, endpoint: Connection, pong: protocol.Pong) -> None:
        if endpoint.server is None or pong.instance != endpoint.server.instance:
            self._lose(endpoint, f"{endpoint.address} was restarted")
            return
        for request in self._in_flight.values():
            lost = request.sent_at_ping < pong.number and request.id not in pong.pending
            if request.endpoint is endpoint and lost:
                self._again(request, f"{endpoint.address} lost the request or its reply")

    def _on_result(self, endpoint: Connection, result: ScoreResult, frames: list[protocol.Buffer]) -> None:
        request = self._in_flight.get(result.id)
        if request is None:
            return  # a second reply, or one after the deadline
        try:
            scores = protocol.unpack_result(
                result, frames, server=f"{endpoint.address} ({result.server})", topk=self._topk,
                vocab_size=self._vocab_size,
                response_lengths=[len(sequence.response_ids) for sequence in request.sequences],
            )  # fmt: skip
        except TeacherError as error:
            with self._changed:
                self._metrics.bad_replies += 1
            if result.attempt == request.attempt:  # else a newer attempt is under way already
                place = "" if isinstance(error, BadTeacherReply) else f"{endpoint.address}: request {request.id}: "
                self._fail_attempt(request, BadTeacherReply(f"{place}{error}; attempt {result.attempt}"))
            return
        del self._in_flight[request.id]
        with self._changed:
            self._metrics.latencies.append(time.monotonic() - request.started)
            self._metrics.tokens += request.num_tokens
        for future, score in zip(request.futures, scores, strict=True):
            _resolve(future, score)

    def _on_error(self, endpoint: Connection, error: ScoreError) -> None:
        request = self._in_flight.get(error.id)
        if request is None or request.attempt != error.attempt:
            return
        reason = f"{endpoint.address}: request {request.id}: {error.reason}"
        if error.code in ("busy", "expired"):
            self._again(request, reason, wait=BUSY_WAIT_SECONDS)
        elif error.code == "failed":
            self._fail_attempt(request, TeacherRefused(reason))
        else:
            self._finish(request, TeacherRefused(reason))

    def _fail_attempt(self, request: _Request, error: TeacherError) -> None:
        request.num_failures += 1
        if request.num_failures > self._max_retries:
            self._finish(request, error)
        else:
            self._again(request, str(error))

    def _again(self, request: _Request, problem: str, *, wait: float = 0.0) -> None:
        request.endpoint, request.problem, request.send_at = None, problem, time.monotonic() + wait
        with self._changed:
            self._metrics.retries += 1

    def _finish(self, request: _Request, error: TeacherError) -> None:
        del self._in_flight[request.id]
        for future in request.futures:
            _resolve(future, error)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for request in list(self._in_flight.values()):
            if request.deadline <= now:
                self._finish(request, self._timeout_error(request, now))
            elif request.endpoint is not None and request.attempt_deadline <= now:
                self._again(request, f"{request.endpoint.address} did not answer attempt {request.attempt}")

    def _timeout_error(self, request: _Request, now: float) -> TeacherTimeout:
        place = request.endpoint or request.last_endpoint
        if place is None:
            servers = ", ".join(endpoint.address for endpoint in self._endpoints)
            where, heard = servers, "no server was alive"
        else:
            where, heard = place.address, f"last heard of it {now - place.heard:.1f} s ago"
        message = (
            f"{where}: request {request.id} ({len(request.sequences)} sequences, {request.num_tokens} tokens): waited "
            f"{now - request.started:.1f} s for its scores, {request.attempt} attempts, {heard}"
        )
        return TeacherTimeout(f"{message}; before that: {request.problem}" if request.problem else message)

    def _form_requests(self) -> float:
        """Move waiting sequences into flight; returns the seconds until the next one is due."""
        with self._changed:
            while self._waiting and len(self._in_flight) < self._max_in_flight:
                now = time.monotonic()
                due = self._waiting[0][0] + GROUP_WAIT_SECONDS
                if len(self._waiting) < self._group_size and now < due:
                    return due - now
                group = [self._waiting.popleft() for _ in range(min(self._group_size, len(self._waiting)))]
                pairs = [(sequence, future) for _, sequence, future in group if future.set_running_or_notify_cancel()]
                if pairs:
                    self._start(pairs, now)
        return POLL_SECONDS

    def _start(self, pairs: list[tuple[Sequence, Future[TeacherTopK]]], now: float) -> None:
        sequences, futures = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        request = _Request(
            id=f"{self._name}-{next(self._ids)}", sequences=sequences, futures=futures,
            array=protocol.request_array([(each.prompt_ids, each.response_ids) for each in sequences]),
            deadline=now + self._request_timeout, started=now,
        )  # fmt: skip
        self._in_flight[request.id] = request

    def _send_requests(self) -> None:
        now = time.monotonic()
        for request in self._in_flight.values():
            alive = [each for each in self._endpoints if each.server is not None]
            if request.endpoint is not None or request.send_at > now or not alive:
                continue
            load = {each: sum(other.endpoint is each for other in self._in_flight.values()) for each in alive}
            endpoint = min(alive, key=lambda each: (each is request.last_endpoint, load[each]))
            request.attempt += 1
            message = ScoreRequest(
                id=request.id, attempt=request.attempt, timeout_seconds=request.deadline - now, topk=self._topk,
                temperature=self._temperature,
                prompt_lengths=[len(each.prompt_ids) for each in request.sequences],
                response_lengths=[len(each.response_ids) for each in request.sequences],
            )  # fmt: skip
            if not endpoint.send(message, [request.array]):
                continue  # disconnected this moment; the missing pongs or a reconnect settle it
            request.endpoint = request.last_endpoint = endpoint
            request.sent_at_ping = endpoint.ping_number
            request.attempt_deadline = now + self._request_timeout / (self._max_retries + 1)


def _resolve(future: Future[TeacherTopK], outcome: TeacherTopK | BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled by its owner
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

"""Client of the teacher service: takes readings and returns futures of checked scores.

A background thread owns the sockets. It groups readings into requests, keeps a bounded number of them in flight, and
resolves each one exactly once: with scores that passed every check, or with an error that names the server, the
request, and the kind and duration of the wait. A reading is never skipped.

One lock, that of `_changed`, guards all state. The thread holds it for a whole iteration and releases it while it polls
and while it resolves futures, whose callbacks may call the client. `_wake` ends the poll through a socket pair; the end
of every iteration notifies `_changed`; only the thread resolves futures.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

import zmq
from msgspec import UNSET

from hybrid_gkd.errors import BadTeacherReply, TeacherError, TeacherMismatch, TeacherRefused, TeacherTimeout
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.client.connection import Connection, StudentNeeds, query_status
from hybrid_gkd.teacher.client.requests import ReadingQueue, Request, TeacherMetrics, normalize_reading
from hybrid_gkd.teacher.keys import load_keys
from hybrid_gkd.teacher.limits import rejection_reason
from hybrid_gkd.teacher.protocol import AnyMessage, Buffer, ModelInfo, ScoreError, ScoreRequest, ScoreResult, Status
from hybrid_gkd.teacher.ranges import ranges_of
from hybrid_gkd.types import Reading, TopK

logger = logging.getLogger(__name__)

MAX_WAITING_TOKENS = 1 << 24
"""Maximum number of tokens of readings that are not in flight; `submit` blocks beyond it."""
BUSY_WAIT_SECONDS = 0.2
POLL_SECONDS = 0.2
CLOSE_MILLISECONDS = 200
"""Timeout for sending the goodbye message."""


class TeacherClient:
    """Scores readings with teacher servers of one model. A context manager; call `handshake` before `submit`.

    Args:
        endpoints: "host:port" of each server
        topk: K, candidates per scored token
        temperature: of the teacher's distribution
        given_topk: candidates per scored token of readings with given ids: these and the most likely others
        vocab_size: number of scored ids; the distribution is restricted to them
        connect_timeout: timeout of the handshake with all servers, seconds
        request_timeout: timeout of a request over all attempts, seconds
        max_retries: further attempts after an invalid reply or an engine failure; an attempt without a reply is
            repeated after request_timeout / (max_retries + 1)
        n_server_workers: maximum number of requests in flight
        num_microbatches: maximum number of readings per request
        keys: folder with this client's keys, if the servers require them
        allow_change: accept a server that serves another teacher than the first handshake found
        section: dotted section of the configuration, for messages
        adapter: name of the servers' adapter that scores; None for their model without one
    """

    def __init__(
        self, endpoints: list[str], *, topk: int, temperature: float = 1.0, vocab_size: int,
        connect_timeout: float = 10.0, request_timeout: float = 600.0, max_retries: int = 3,
        n_server_workers: int = 8, num_microbatches: int = 4, keys: str | Path | None = None,
        section: str = "actor_rollout_ref.teacher", allow_change: bool = False, given_topk: int = 0,
        adapter: str | None = None,
    ):
        if not endpoints:
            raise TeacherError("a teacher client needs at least one address, host:port")
        for address in endpoints:
            network.endpoint_url(address)  # raises for an invalid address before anything is opened
        self._endpoints, self._topk, self._temperature, self._vocab_size = endpoints, topk, temperature, vocab_size
        self._given_topk, self._adapter = given_topk, adapter
        self._connect_timeout = Timeout(connect_timeout, f"{section}.connect_timeout")
        self._request_timeout = Timeout(request_timeout, f"{section}.request_timeout")
        self._max_retries, self._max_in_flight = max_retries, n_server_workers
        self._allow_change, self._change_key = allow_change, f"{section}.allow_teacher_change"
        self._keys = load_keys(keys) if keys is not None else None
        self._changed = threading.Condition()
        self._failure: TeacherError | None = None
        """Reason for the end of the thread: `close`, or an unrecoverable error."""
        self._needs: StudentNeeds | None = None
        """Set by the handshake; afterwards an incompatible server ends the thread."""
        self._served: dict[str, ModelInfo] = {}
        self._waiting = ReadingQueue(num_microbatches, max(topk, given_topk))
        self._in_flight: dict[str, Request] = {}
        self._finished: list[tuple[Future[TopK], TopK | TeacherError]] = []
        """Futures to resolve at the end of the iteration."""
        self._metrics = TeacherMetrics()
        self._name, self._ids = uuid.uuid4().hex, itertools.count(1)
        self._context = zmq.Context()
        self._connections = [Connection(self._context, address, self._keys, adapter) for address in endpoints]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._closing = False
        self._last_iteration = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="teacher client", daemon=True)
        self._thread.start()

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def handshake(self, *, tokenizer_hash: str, tokenizer_size: int, max_sequence_length: int) -> ModelInfo:
        """Wait until every server has replied and matches; return the model of the first one.

        Raises TeacherUnreachable after connect_timeout, or at once if keys are rejected, and TeacherMismatch with both
        sides' values.
        """
        needs = StudentNeeds(
            tokenizer_hash=tokenizer_hash, tokenizer_size=tokenizer_size, max_sequence_length=max_sequence_length,
            topk=max(self._topk, self._given_topk), temperature=self._temperature, given_ids=self._given_topk > 0,
        )
        connections, timeout = self._connections, self._connect_timeout
        with self._changed:
            self._wait_for(lambda: all(each.model or each.problem for each in connections), timeout, "its handshake")
            self._served = {each.address: each.require_model(timeout) for each in connections}
            for address, model in self._served.items():
                self._check_match(address, model, needs)
            self._needs = needs
        return self.model

    @property
    def model(self) -> ModelInfo:
        """The model of the first server, known after the handshake."""
        return self._served[self._endpoints[0]]

    def submit(self, readings: list[Reading]) -> list[Future[TopK]]:
        """Queue readings for scoring; return one future per reading in the same order.

        Token ids and positions may be arrays or lists of integers. Returns at once, or blocks while the queue is full.
        Raises TeacherError for other types, and TeacherTimeout after request_timeout. A future raises TeacherTimeout,
        BadTeacherReply, TeacherRefused or TeacherMismatch.
        """
        futures: list[Future[TopK]] = [Future() for _ in readings]
        with self._changed:
            for reading, future in zip(map(normalize_reading, readings), futures, strict=True):
                if not self._has_room():
                    self._wake()
                if not self._wait_for(self._has_room, self._request_timeout, "room for more readings"):
                    raise TeacherTimeout(
                        f"{', '.join(self._endpoints)}: waited {self._request_timeout} to queue {len(readings)} "
                        f"sequences, {self._waiting.num_tokens} tokens are still queued; {self.describe()}"
                    )
                given = reading.given_ids
                if given is not None and not 1 <= given.shape[1] <= self._given_topk:
                    limit = f"given_topk={self._given_topk} of this client"
                    raise TeacherError(f"{reading.name}: {given.shape[1]} given ids per token, beyond {limit}")
                if self._needs is None:
                    raise TeacherError("submit needs a handshake first, which checks that teacher and student match")
                for address, model in self._served.items():  # readings that a server would reject are not sent
                    if reason := rejection_reason(reading, model, self._vocab_size):
                        self._finished.append((future, TeacherRefused(f"{address}: {reason}")))
                        break
                else:
                    self._waiting.add(reading, future)
        self._wake()
        return futures

    def status(self) -> dict[str, Status]:
        """Return the current status of every server by address. Raises TeacherUnreachable."""
        limit = self._connect_timeout
        return {each: query_status(each, limit.seconds, self._keys, limit.key) for each in self._endpoints}

    def describe(self) -> str:
        """Describe the state of every server: "10.0.0.5:15555: connection refused since 12:03:11, it scored ..."."""
        return "; ".join(f"{each.address}: {each.describe()}" for each in self._connections)

    def drain_metrics(self) -> TeacherMetrics:
        """Return the counters since the last call."""
        with self._changed:
            metrics, self._metrics = self._metrics, TeacherMetrics()
            metrics.complete_until = min([time.monotonic(), *(each.started for each in self._in_flight.values())])
            for each in self._connections:
                metrics.bytes_sent += each.bytes_sent
                metrics.bytes_received += each.bytes_received
                each.bytes_sent = each.bytes_received = 0
        return metrics

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the requests of the block from all metrics. No requests may be in flight before it."""
        counted = self.drain_metrics()
        try:
            yield
        finally:
            with self._changed:
                self.drain_metrics()
                self._metrics = counted

    def close(self) -> None:
        """Stop the thread; open futures raise TeacherError. May be called repeatedly."""
        self._closing = True
        self._wake()
        self._thread.join(timeout=10.0)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: the thread wakes up anyway; closed: it has ended
            self._wake_writer.send(b"x")

    def _has_room(self) -> bool:
        return self._waiting.num_tokens < MAX_WAITING_TOKENS

    def _wait_for(self, condition: Callable[[], bool], timeout: Timeout, what: str) -> bool:
        """Return whether the condition was met within `timeout`; raise the error that ended the thread."""
        if not condition():
            with waiting(f"the teacher: {what}", timeout, self.describe):
                self._changed.wait_for(lambda: self._failure or condition(), timeout.seconds)
        if self._failure is not None:
            raise self._failure
        return condition()

    def _check_match(self, address: str, model: ModelInfo, needs: StudentNeeds) -> None:
        """Raise TeacherMismatch for an incompatible server, or one with another teacher than the first handshake."""
        needs.check(address, model)
        if model.is_same(self.model):
            return
        found = f"{address} serves {model}, but at the first handshake {self._endpoints[0]} served {self.model}"
        if not self._allow_change:
            raise TeacherMismatch(f"{found}: it is another teacher; {self._change_key}=true trains with it")
        logger.warning("%s; training continues with it (%s)", found, self._change_key)

    # All methods below run in the thread; all but _run, _poll and _resolve hold the lock.

    def _run(self) -> None:
        failure, pause = TeacherError("the teacher client was closed"), 0.0
        try:
            while not self._closing:
                self._poll(pause)
                with self._changed:
                    pause = self._iterate()
                    self._changed.notify_all()
                self._resolve()
        except TeacherError as error:
            failure = error
        except BaseException as error:
            failure = TeacherError(f"the teacher client's thread died: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._changed:
            self._failure = failure
            for request in list(self._in_flight.values()):
                self._fail(request, failure)
            for reading, future, _ in self._waiting.take():
                text = f"{', '.join(self._endpoints)}: {reading.name} was queued: {failure}"
                self._finished.append((future, type(failure)(text)))
            self._changed.notify_all()
        self._resolve()
        for each in self._connections:
            each.send(protocol.Bye())
            each.close(CLOSE_MILLISECONDS)
        self._context.destroy(linger=CLOSE_MILLISECONDS)
        self._wake_reader.close()
        self._wake_writer.close()

    def _poll(self, pause: float) -> None:
        poller = zmq.Poller()  # a new one, because a connection may have been reopened
        poller.register(self._wake_reader, zmq.POLLIN)
        for each in self._connections:
            each.register(poller)
        poller.poll(math.ceil(pause * 1000))
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)

    def _resolve(self) -> None:
        with self._changed:
            finished, self._finished = self._finished, []
        for future, outcome in finished:
            with contextlib.suppress(InvalidStateError):  # cancelled by its owner
                if isinstance(outcome, TeacherError):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def _iterate(self) -> float:
        """Run an iteration; return the seconds until the next one, unless a message arrives."""
        for connection in self._connections:
            if connection.read_events():  # possibly a new server, which needs a handshake
                connection.is_unknown = True
                self._lose(connection, f"the connection to {connection.address} was lost")
                connection.send(protocol.Hello())
            for message, frames in connection.receive():
                self._handle(connection, message, frames)
        self._keep_alive()
        self._check_deadlines()
        pause = self._form_requests()
        self._send_requests()
        return pause

    def _handle(self, connection: Connection, message: AnyMessage, frames: list[Buffer]) -> None:
        connection.last_message = time.monotonic()
        known = connection.instance if connection.model else None
        if known and isinstance(message, protocol.Welcome | protocol.Pong) and message.instance != known:
            self._lose(connection, f"{connection.address} was restarted")
        match message:
            case protocol.Welcome():
                connection.on_welcome(message)
                if self._needs is not None and connection.model is not None:  # a mismatch ends the thread
                    self._check_match(connection.address, connection.model, self._needs)
            case protocol.Pong() if connection.model is not None:
                self._on_pong(connection, message)
            case ScoreResult():
                self._on_result(connection, message, frames)
            case ScoreError():
                self._on_error(connection, message)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        pause, self._last_iteration = now - self._last_iteration, now
        for connection in self._connections:
            if pause > protocol.LIVENESS_SECONDS / 2:  # this process was paused and could not receive messages
                connection.heard = max(connection.heard, now - protocol.LIVENESS_SECONDS / 2)
            if connection.model is not None and connection.heard < now - protocol.LIVENESS_SECONDS:
                self._lose(connection, f"{connection.address} was silent for {protocol.LIVENESS_SECONDS:.0f} s")
            connection.reopen_if_stuck(now)
            connection.send_heartbeat(now)

    def _lose(self, connection: Connection, problem: str) -> None:
        """Requeue the requests of a server that died or was replaced; it needs a new handshake."""
        connection.model = None
        for request in self._in_flight.values():
            if request.connection is connection:
                self._repeat(request, problem)

    def _on_pong(self, connection: Connection, pong: protocol.Pong) -> None:
        connection.queue_length = pong.queue_length
        self._metrics.queue_lengths.append(pong.queue_length)
        self._metrics.engine_busy.append(pong.engine_busy)
        for request in self._in_flight.values():
            lost = request.sent_at_ping < pong.number and request.id not in pong.pending
            if request.connection is connection and lost:
                self._repeat(request, f"{connection.address} lost the request or its reply")

    def _on_result(self, connection: Connection, result: ScoreResult, frames: list[Buffer]) -> None:
        request = self._in_flight.get(result.id)
        if request is None or connection.is_unknown:
            return  # a second reply, one after the deadline, or of a server before its handshake
        try:
            scores = protocol.unpack_result(
                result, frames, topk=self._num_candidates(request), vocab_size=self._vocab_size,
                num_scored=request.num_scored, given=protocol.joined_given_ids(request.readings),
            )
        except TeacherError as error:
            self._metrics.bad_replies += 1
            if result.attempt == request.attempt:  # else a newer attempt is in flight
                self._fail_attempt(request, BadTeacherReply(f"attempt {result.attempt}: {error}"))
            return
        connection.num_answers += 1
        self._metrics.requests.append((request.started, time.monotonic()))
        self._metrics.steps.append(request.step)
        self._metrics.tokens += request.num_tokens
        self._metrics.scored_tokens += sum(request.num_scored)
        self._finish(request, scores)

    def _num_candidates(self, request: Request) -> int:
        return self._topk if request.readings[0].given_ids is None else self._given_topk

    def _on_error(self, connection: Connection, error: ScoreError) -> None:
        request = self._in_flight.get(error.id)
        if request is None or request.attempt != error.attempt:
            return
        reason = f"attempt {error.attempt} at {connection.address}: {error.reason}"
        if error.code in ("busy", "expired"):
            self._repeat(request, reason, wait=BUSY_WAIT_SECONDS)
        elif error.code == "failed":
            self._fail_attempt(request, TeacherRefused(reason))
        else:
            self._fail(request, TeacherRefused(reason))

    def _fail_attempt(self, request: Request, error: TeacherError) -> None:
        request.num_failures += 1
        if request.num_failures > self._max_retries:
            self._fail(request, error)
        else:
            self._repeat(request, str(error), wait=BUSY_WAIT_SECONDS * 2 ** (request.num_failures - 1))

    def _repeat(self, request: Request, problem: str, *, wait: float = 0.0) -> None:
        request.connection, request.problem, request.send_at = None, problem, time.monotonic() + wait
        self._metrics.retries += 1

    def _fail(self, request: Request, error: TeacherError) -> None:
        """Fail a request; the error describes where it was and how long it waited."""
        error = type(error)(f"{request.describe(self._connections)}: {error}")
        self._finish(request, [error] * len(request.futures))

    def _finish(self, request: Request, outcomes: ListLike[TopK | TeacherError]) -> None:
        del self._in_flight[request.id]
        self._finished += zip(request.futures, outcomes, strict=True)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        servers = ""
        for request in list(self._in_flight.values()):
            if request.deadline <= now:
                servers = servers or self.describe()  # which may take a second each
                self._fail(request, TeacherTimeout(request.describe_timeout(self._request_timeout, servers)))
            elif request.connection is not None and request.attempt_deadline <= now:
                self._repeat(request, f"{request.connection.address} did not answer attempt {request.attempt}")

    def _form_requests(self) -> float:
        """Group queued readings into requests; return the seconds until the next group is due."""
        while len(self._in_flight) < self._max_in_flight:
            now = time.monotonic()
            group, pause = self._waiting.take_group(now)
            if not group:
                return min(pause, POLL_SECONDS)
            pairs = [pair for pair in group if pair[1].set_running_or_notify_cancel()]
            if pairs:
                readings, futures, steps = zip(*pairs, strict=True)
                request_id = f"{self._name}-{next(self._ids)}"
                self._in_flight[request_id] = Request(
                    id=request_id, readings=readings, futures=futures, started=now,
                    deadline=now + self._request_timeout.seconds, step=steps[0],
                )
        return POLL_SECONDS

    def _send_requests(self) -> None:
        now = time.monotonic()
        alive = [each for each in self._connections if each.model is not None]
        for request in self._in_flight.values():
            if request.connection is not None or request.send_at > now or not alive:
                continue
            load = {each: sum(other.connection is each for other in self._in_flight.values()) for each in alive}
            connection = min(alive, key=lambda each: (each is request.last_connection, load[each]))
            timeout = min(max(0.0, request.deadline - now), protocol.MAX_TIMEOUT_SECONDS)
            message = ScoreRequest(
                id=request.id, attempt=request.attempt + 1, timeout_seconds=timeout,
                topk=self._num_candidates(request),
                temperature=self._temperature, lengths=[each.num_tokens for each in request.readings],
                ranges=[ranges_of(each.positions) for each in request.readings], num_ids=self._vocab_size,
                adapter=self._adapter or UNSET,
            )
            if not connection.send(message, protocol.request_arrays(request.readings)):
                continue  # disconnected; missing pongs or a reconnect are handled later
            request.attempt += 1
            request.connection = request.last_connection = connection
            request.sent_at_ping = connection.ping_number
            request.attempt_deadline = now + self._request_timeout.seconds / (self._max_retries + 1)

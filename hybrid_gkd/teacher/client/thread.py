"""The background thread of a `TeacherClient`: it owns the sockets, forms requests and sees each to its outcome.

One lock, that of `changed`, guards everything. The thread holds it for a whole turn and lets go of it while it polls
and while it resolves futures, whose callbacks may call the client. Who unblocks whom: `wake` ends the poll through a
socket pair; the end of every turn notifies `changed`; futures are resolved by the thread alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
import uuid

import zmq

from hybrid_gkd.errors import BadTeacherReply, TeacherError, TeacherMismatch, TeacherRefused, TeacherTimeout
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.client.connection import CLOSE_MILLISECONDS, Connection, ServerInfo, StudentNeeds
from hybrid_gkd.teacher.client.requests import Outcome, Request, TeacherMetrics, Waiting, resolve
from hybrid_gkd.teacher.keys import Keys
from hybrid_gkd.teacher.protocol import AnyMessage, Buffer, ScoreError, ScoreRequest, ScoreResult

BUSY_WAIT_SECONDS = 0.2
POLL_SECONDS = 0.2


class RequestThread:
    """Serves until `close`, or until an error that no server can make good. Arguments as in `TeacherClient`."""

    def __init__(
        self, endpoints: list[str], keys: Keys | None, *, topk: int, temperature: float, vocab_size: int,
        request_timeout: float, max_retries: int, max_in_flight: int, group_size: int,
    ):
        self._topk, self._temperature, self._vocab_size = topk, temperature, vocab_size
        self._request_timeout, self._max_retries, self._max_in_flight = request_timeout, max_retries, max_in_flight
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        """Why the thread has ended."""
        self.needs: StudentNeeds | None = None
        """Set by the handshake; from then on a server that does not fit ends the thread."""
        self.waiting = Waiting(group_size)
        self._in_flight: dict[str, Request] = {}
        self._finished: list[tuple[Request, Outcome]] = []
        """To be resolved at the end of the turn."""
        self._metrics = TeacherMetrics()
        self._name = uuid.uuid4().hex
        self._ids = itertools.count(1)
        self._context = zmq.Context()
        self.connections = [Connection(self._context, address, keys) for address in endpoints]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._closing = False
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="teacher client", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake up anyway; closed: it has ended
            self._wake_writer.send(b"x")

    def close(self) -> None:
        """May be called twice."""
        self._closing = True
        self.wake()
        self._thread.join(timeout=10.0)

    def check_fit(self, server: ServerInfo, needs: StudentNeeds) -> None:
        """Raises TeacherMismatch, also where two servers serve different models."""
        needs.check(server)
        for other in [each.server for each in self.connections if each.server is not None]:
            if other.model.model != server.model.model:
                raise TeacherMismatch(
                    f"{server.address} serves {server.model.model}, {other.address} serves {other.model.model}"
                )

    def drain_metrics(self) -> TeacherMetrics:
        with self.changed:
            metrics, self._metrics = self._metrics, TeacherMetrics()
            metrics.complete_until = min([time.monotonic(), *(each.started for each in self._in_flight.values())])
            for each in self.connections:
                metrics.bytes_sent += each.bytes_sent
                metrics.bytes_received += each.bytes_received
                each.bytes_sent = each.bytes_received = 0
        return metrics

    # Everything below runs in the thread, and all but _run, _poll and _resolve with the lock.

    def _run(self) -> None:
        failure, pause = TeacherError("the teacher client was closed"), 0.0
        try:
            while not self._closing:
                self._poll(pause)
                with self.changed:
                    pause = self._turn()
                    self.changed.notify_all()
                self._resolve()
        except TeacherError as error:
            failure = error
        except BaseException as error:
            failure = TeacherError(f"the teacher client's thread died: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self.changed:
            self.failure = failure
            for request in list(self._in_flight.values()):
                self._fail(request, failure)
            waiting = self.waiting.take_all()
            self.changed.notify_all()
        self._resolve()
        servers = ", ".join(each.address for each in self.connections)
        for sequence, future in waiting:
            resolve(future, type(failure)(f"{servers}: sequence {sequence.index} waited to be sent: {failure}"))
        for each in self.connections:
            each.say_goodbye()
        self._context.destroy(linger=CLOSE_MILLISECONDS)
        self._wake_reader.close()
        self._wake_writer.close()

    def _poll(self, pause: float) -> None:
        poller = zmq.Poller()  # a new one, because a connection may have been reopened
        poller.register(self._wake_reader, zmq.POLLIN)
        for each in self.connections:
            each.register(poller)
        poller.poll(math.ceil(pause * 1000))
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)

    def _resolve(self) -> None:
        finished, self._finished = self._finished, []
        for request, outcome in finished:
            request.resolve(outcome)

    def _turn(self) -> float:
        """Returns the seconds for which there is nothing to do unless something arrives."""
        for connection in self.connections:
            if connection.read_events():  # perhaps to a new server: it is asked at once
                connection.send(protocol.Hello())
            for message, frames in connection.receive():
                self._handle(connection, message, frames)
        self._keep_alive()
        self._check_deadlines()
        pause = self._form_requests()
        self._send_requests()
        return pause

    def _handle(self, connection: Connection, message: AnyMessage, frames: list[Buffer]) -> None:
        match message:
            case protocol.Welcome():
                if connection.server is not None and connection.server.instance != message.instance:
                    self._lose(connection, f"{connection.address} was restarted")
                connection.on_welcome(message)
                if self.needs is not None and connection.server is not None:
                    self.check_fit(connection.server, self.needs)  # a mismatch ends it: training must not go on
            case protocol.Pong():
                self._on_pong(connection, message)
            case ScoreResult():
                self._on_result(connection, message, frames)
            case ScoreError():
                self._on_error(connection, message)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        pause, self._last_turn = now - self._last_turn, now
        for connection in self.connections:
            if pause > protocol.LIVENESS_SECONDS / 2:  # nobody was silent while this process could not listen
                connection.heard = max(connection.heard, now - protocol.LIVENESS_SECONDS / 2)
            if connection.server is not None and connection.heard < now - protocol.LIVENESS_SECONDS:
                self._lose(connection, f"{connection.address} was silent for {protocol.LIVENESS_SECONDS:.0f} s")
            connection.reopen_if_stuck(now)
            connection.beat(now)

    def _lose(self, connection: Connection, problem: str) -> None:
        """Take the requests back from a server that died or was replaced; it has to say hello again."""
        connection.server = None
        for request in self._in_flight.values():
            if request.connection is connection:
                self._repeat(request, problem)

    def _on_pong(self, connection: Connection, pong: protocol.Pong) -> None:
        if connection.server is None or pong.instance != connection.server.instance:
            self._lose(connection, f"{connection.address} was restarted")
            return
        self._metrics.queue_lengths.append(pong.queue_length)
        self._metrics.engine_busy.append(pong.engine_busy)
        for request in self._in_flight.values():
            lost = request.sent_at_ping < pong.number and request.id not in pong.pending
            if request.connection is connection and lost:
                self._repeat(request, f"{connection.address} lost the request or its reply")

    def _on_result(self, connection: Connection, result: ScoreResult, frames: list[Buffer]) -> None:
        request = self._in_flight.get(result.id)
        if request is None:
            return  # a second reply, or one after the deadline
        try:
            scores = protocol.unpack_result(
                result, frames, server=result.server or connection.address, topk=self._topk,
                vocab_size=self._vocab_size, response_lengths=request.response_lengths,
            )
        except TeacherError as error:
            self._metrics.bad_replies += 1
            if result.attempt == request.attempt:  # else a newer attempt is under way already
                self._fail_attempt(request, BadTeacherReply(f"attempt {result.attempt}: {error}"))
            return
        self._metrics.requests.append((request.started, time.monotonic()))
        self._metrics.tokens += request.num_tokens
        self._metrics.response_tokens += sum(request.response_lengths)
        self._finish(request, scores)

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
            self._repeat(request, str(error))

    def _repeat(self, request: Request, problem: str, *, wait: float = 0.0) -> None:
        request.connection, request.problem, request.send_at = None, problem, time.monotonic() + wait
        self._metrics.retries += 1

    def _fail(self, request: Request, error: TeacherError) -> None:
        """The error that the futures raise says where the request was and how long it waited."""
        self._finish(request, type(error)(f"{request.describe(self.connections)}: {error}"))

    def _finish(self, request: Request, outcome: Outcome) -> None:
        del self._in_flight[request.id]
        self._finished.append((request, outcome))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for request in list(self._in_flight.values()):
            if request.deadline <= now:
                self._fail(request, TeacherTimeout(request.why_late(self.connections)))
            elif request.connection is not None and request.attempt_deadline <= now:
                self._repeat(request, f"{request.connection.address} did not answer attempt {request.attempt}")

    def _form_requests(self) -> float:
        """Move waiting sequences into flight; returns the seconds until the next group is due."""
        while len(self._in_flight) < self._max_in_flight:
            now = time.monotonic()
            group, pause = self.waiting.take_group(now)
            if not group:
                return min(pause, POLL_SECONDS)
            pairs = [pair for pair in group if pair[1].set_running_or_notify_cancel()]
            if pairs:
                request = Request(
                    id=f"{self._name}-{next(self._ids)}", sequences=[pair[0] for pair in pairs],
                    futures=[pair[1] for pair in pairs], started=now, deadline=now + self._request_timeout,
                )
                self._in_flight[request.id] = request
        return POLL_SECONDS

    def _send_requests(self) -> None:
        now = time.monotonic()
        alive = [each for each in self.connections if each.server is not None]
        for request in self._in_flight.values():
            if request.connection is not None or request.send_at > now or not alive:
                continue
            load = {each: sum(other.connection is each for other in self._in_flight.values()) for each in alive}
            connection = min(alive, key=lambda each: (each is request.last_connection, load[each]))
            request.attempt += 1
            message = ScoreRequest(
                id=request.id, attempt=request.attempt, timeout_seconds=request.deadline - now, topk=self._topk,
                temperature=self._temperature, prompt_lengths=[len(each.prompt_ids) for each in request.sequences],
                response_lengths=request.response_lengths,
            )
            if not connection.send(message, [request.array]):
                continue  # disconnected this moment; the missing pongs or a reconnect settle it
            request.connection = request.last_connection = connection
            request.sent_at_ping = connection.ping_number
            request.attempt_deadline = now + self._request_timeout / (self._max_retries + 1)

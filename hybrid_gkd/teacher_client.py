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
from concurrent.futures import Future
from pathlib import Path

import zmq

from hybrid_gkd.errors import BadTeacherReply, TeacherError, TeacherMismatch, TeacherRefused, TeacherTimeout
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.client.connection import CLOSE_MILLISECONDS, Connection, ServerInfo, StudentNeeds, query_status
from hybrid_gkd.teacher.client.pending import Pair, PendingRequest, TeacherMetrics, Waiting, resolve
from hybrid_gkd.teacher.keys import load_keys
from hybrid_gkd.teacher.protocol import ScoreError, ScoreRequest, ScoreResult, Status
from hybrid_gkd.types import Sequence, TeacherTopK

MAX_WAITING_TOKENS = 1 << 24
"""Of sequences that are not in flight yet; `submit` waits when there are more."""
BUSY_WAIT_SECONDS = 0.2
POLL_SECONDS = 0.2


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
        keys: folder with this client's keys, where the servers have some

    A context manager; call `handshake` before `submit`.
    """

    def __init__(
        self, endpoints: list[str], *, topk: int, temperature: float = 1.0, vocab_size: int,
        connect_timeout: float = 10.0, request_timeout: float = 600.0, max_retries: int = 3,
        n_server_workers: int = 8, num_microbatches: int = 4, keys: str | Path | None = None,
    ):  # fmt: skip
        self._topk, self._temperature, self._vocab_size = topk, temperature, vocab_size
        self._connect_timeout, self._request_timeout, self._max_retries = connect_timeout, request_timeout, max_retries
        self._max_in_flight = n_server_workers
        self._name = uuid.uuid4().hex
        self._ids = itertools.count(1)
        if not endpoints:
            raise TeacherError("no teacher address is given")
        for address in endpoints:
            network.endpoint_url(address)  # a bad one is an error before anything is opened
        self._keys = load_keys(keys) if keys is not None else None
        self._context = zmq.Context()
        self._endpoints = [Connection(self._context, address, self._keys) for address in endpoints]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        # Everything below that both sides touch is guarded by this condition's lock.
        self._changed = threading.Condition()
        self._waiting = Waiting(num_microbatches)
        self._needs: StudentNeeds | None = None
        self._served: list[ServerInfo] = []
        """What the servers said in the handshake."""
        self._failure: BaseException | None = None
        self._closing = False
        self._metrics = TeacherMetrics()
        self._in_flight: dict[str, PendingRequest] = {}
        """Changed by the thread alone, with the lock."""
        self._next_beat = self._next_ping = 0.0
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="teacher client", daemon=True)
        self._thread.start()

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def handshake(self, *, tokenizer_hash: str, tokenizer_size: int, max_sequence_length: int) -> ServerInfo:
        """Wait until every server has answered and fits; returns what the first one serves.

        Raises TeacherUnreachable after connect_timeout, or at once where keys do not fit, and TeacherMismatch with
        both sides' values.
        """
        needs = StudentNeeds(
            tokenizer_hash=tokenizer_hash, tokenizer_size=tokenizer_size, max_sequence_length=max_sequence_length,
            topk=self._topk, temperature=self._temperature,
        )  # fmt: skip

        def settled() -> bool:
            return self._failure is not None or all(each.server or each.problem for each in self._endpoints)

        with self._changed:
            self._changed.wait_for(settled, self._connect_timeout)
            self._raise_failure()
            self._served = [endpoint.require_server(self._connect_timeout) for endpoint in self._endpoints]
            for server in self._served:
                self._check_fit(server, needs)
            self._needs = needs
            return self._served[0]

    def submit(self, sequences: list[Sequence]) -> list[Future[TeacherTopK]]:
        """Queue sequences for scoring; returns one future per sequence in the same order.

        Returns at once, or waits for room where very much is queued already: TeacherTimeout after request_timeout.
        A future raises TeacherTimeout, BadTeacherReply, TeacherRefused or TeacherMismatch.
        """
        futures: list[Future[TeacherTopK]] = [Future() for _ in sequences]
        with self._changed:
            for sequence, future in zip(sequences, futures, strict=True):
                self._wait_for_room(len(sequences))
                reason = self._refusal(sequence)
                if reason:
                    resolve(future, TeacherRefused(reason))
                else:
                    self._waiting.add(sequence, future)
        self._wake()
        return futures

    def _wait_for_room(self, num_sequences: int) -> None:
        self._raise_failure()
        if self._needs is None:
            raise TeacherError("submit before handshake: it is not known whether the teacher fits the student")
        if self._waiting.num_tokens < MAX_WAITING_TOKENS:
            return
        self._wake()
        self._changed.wait_for(
            lambda: self._failure is not None or self._waiting.num_tokens < MAX_WAITING_TOKENS, self._request_timeout
        )
        self._raise_failure()
        if self._waiting.num_tokens >= MAX_WAITING_TOKENS:
            raise TeacherTimeout(
                f"{', '.join(each.address for each in self._endpoints)}: waited {self._request_timeout:g} s to queue "
                f"{num_sequences} sequences, {self._waiting.num_tokens} tokens are still waiting to be sent"
            )

    def _refusal(self, sequence: Sequence) -> str | None:
        """Why a server will not score the sequence; found before it is sent."""
        for server in self._served:
            reason = protocol.sequence_refusal(sequence.prompt_ids, sequence.response_ids, server.model)
            if reason:
                return f"{server.address}: sequence {sequence.index} {reason}"
        return None

    def status(self) -> dict[str, Status]:
        """Current state of every server by address. Raises TeacherUnreachable."""
        addresses = [endpoint.address for endpoint in self._endpoints]
        return {address: query_status(address, self._connect_timeout, self._keys) for address in addresses}

    def drain_metrics(self) -> TeacherMetrics:
        """Counters since the last call."""
        with self._changed:
            metrics, self._metrics = self._metrics, TeacherMetrics()
            metrics.complete_until = min([time.monotonic(), *(each.started for each in self._in_flight.values())])
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
        failure: TeacherError = TeacherError("the teacher client was closed")
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
                waiting = self._waiting.take_all()
                self._changed.notify_all()
            now = time.monotonic()
            for request in self._in_flight.values():
                request.resolve(type(failure)(f"{request.describe(now, self._endpoints)}: {failure}"))
            with self._changed:
                self._in_flight.clear()
            servers = ", ".join(endpoint.address for endpoint in self._endpoints)
            for sequence, future in waiting:
                resolve(future, type(failure)(f"{servers}: sequence {sequence.index} waited to be sent: {failure}"))
            for endpoint in self._endpoints:
                endpoint.close()
            self._context.destroy(linger=CLOSE_MILLISECONDS)
            self._wake_reader.close()
            self._wake_writer.close()

    def _loop(self) -> None:
        pause = 0.0
        while not self._closing:
            poller = zmq.Poller()  # a new one, because a connection may have been reopened
            poller.register(self._wake_reader, zmq.POLLIN)
            for endpoint in self._endpoints:
                poller.register(endpoint.socket, zmq.POLLIN)
                poller.register(endpoint.monitor.socket, zmq.POLLIN)
            poller.poll(math.ceil(pause * 1000))
            with contextlib.suppress(BlockingIOError):
                self._wake_reader.recv(4096)
            for endpoint in self._endpoints:
                if endpoint.monitor.read():  # perhaps to a new server: it is asked at once
                    endpoint.send(protocol.Hello())
                self._receive(endpoint)
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
        if endpoint.server is not None and endpoint.server.instance != welcome.instance:
            self._lose(endpoint, f"{endpoint.address} was restarted")
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
        """Every second a ping to servers that are known to serve, more often a hello to the others."""
        now = time.monotonic()
        pause, self._last_turn = now - self._last_turn, now
        for endpoint in self._endpoints:
            if pause > protocol.LIVENESS_SECONDS / 2:  # nobody was silent while this process could not listen
                endpoint.heard = max(endpoint.heard, now - protocol.LIVENESS_SECONDS / 2)
            if endpoint.server is not None and endpoint.heard < now - protocol.LIVENESS_SECONDS:
                self._lose(endpoint, f"{endpoint.address} was silent for {protocol.LIVENESS_SECONDS:.0f} s")
            endpoint.reopen_if_stuck(now)
        if now >= self._next_beat:
            self._next_beat = now + protocol.PING_INTERVAL_SECONDS / 4
            ping_due = now >= self._next_ping
            if ping_due:
                self._next_ping = now + protocol.PING_INTERVAL_SECONDS
            for endpoint in self._endpoints:
                if ping_due or endpoint.server is None:
                    endpoint.beat()
        if self._needs is None:
            with self._changed:
                self._changed.notify_all()  # the handshake looks for problems

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
        with self._changed:
            self._metrics.queue_lengths.append(pong.queue_length)
            self._metrics.engine_busy.append(pong.engine_busy)
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
                result, frames, server=result.server or endpoint.address, topk=self._topk,
                vocab_size=self._vocab_size,
                response_lengths=[len(sequence.response_ids) for sequence in request.sequences],
            )  # fmt: skip
        except TeacherError as error:
            with self._changed:
                self._metrics.bad_replies += 1
            if result.attempt == request.attempt:  # else a newer attempt is under way already
                self._fail_attempt(request, BadTeacherReply(f"attempt {result.attempt}: {error}"))
            return
        with self._changed:
            del self._in_flight[request.id]
            self._metrics.requests.append((request.started, time.monotonic()))
            self._metrics.tokens += request.num_tokens
            self._metrics.response_tokens += sum(len(each.response_ids) for each in request.sequences)
        request.resolve(scores)

    def _on_error(self, endpoint: Connection, error: ScoreError) -> None:
        request = self._in_flight.get(error.id)
        if request is None or request.attempt != error.attempt:
            return
        reason = f"attempt {error.attempt} at {endpoint.address}: {error.reason}"
        if error.code in ("busy", "expired"):
            self._again(request, reason, wait=BUSY_WAIT_SECONDS)
        elif error.code == "failed":
            self._fail_attempt(request, TeacherRefused(reason))
        else:
            self._finish(request, TeacherRefused(reason))

    def _fail_attempt(self, request: PendingRequest, error: TeacherError) -> None:
        request.num_failures += 1
        if request.num_failures > self._max_retries:
            self._finish(request, error)
        else:
            self._again(request, str(error))

    def _again(self, request: PendingRequest, problem: str, *, wait: float = 0.0) -> None:
        request.endpoint, request.problem, request.send_at = None, problem, time.monotonic() + wait
        with self._changed:
            self._metrics.retries += 1

    def _finish(self, request: PendingRequest, error: TeacherError) -> None:
        """The error that the future raises says where the request was and how long it waited."""
        with self._changed:
            del self._in_flight[request.id]
        text = f"{request.describe(time.monotonic(), self._endpoints)}: {error}"
        request.resolve(type(error)(text))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for request in list(self._in_flight.values()):
            if request.deadline <= now:
                self._finish(request, TeacherTimeout(request.why_late(now, self._endpoints)))
            elif request.endpoint is not None and request.attempt_deadline <= now:
                self._again(request, f"{request.endpoint.address} did not answer attempt {request.attempt}")

    def _form_requests(self) -> float:
        """Move waiting sequences into flight; returns the seconds until the next group is due."""
        with self._changed:
            while self._waiting and len(self._in_flight) < self._max_in_flight:
                now = time.monotonic()
                due = self._waiting.seconds_until_due(now)
                if due > 0:
                    return due
                pairs = [pair for pair in self._waiting.take_group() if pair[1].set_running_or_notify_cancel()]
                self._changed.notify_all()  # there is room again
                if pairs:
                    self._start(pairs, now)
        return POLL_SECONDS

    def _start(self, pairs: list[Pair], now: float) -> None:
        sequences, futures = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        request = PendingRequest(
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


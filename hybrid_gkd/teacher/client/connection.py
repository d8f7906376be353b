"""A client's connection to one teacher server, and the handshake that checks compatibility."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass

import zmq

from hybrid_gkd.errors import TeacherMismatch, TeacherUnreachable
from hybrid_gkd.runtime.waiting import Timeout, clock_time, waiting
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.keys import Keys
from hybrid_gkd.teacher.network import Dealer
from hybrid_gkd.teacher.protocol import ModelInfo

PROBE_SECONDS = 1.0
"""Timeout of a plain TCP connection that is made to diagnose a failure."""


@dataclass(frozen=True, kw_only=True)
class StudentNeeds:
    """Requirements on a teacher, checked before training and at every reconnection."""

    tokenizer_hash: str
    tokenizer_size: int
    max_sequence_length: int
    topk: int
    temperature: float
    given_ids: bool = False
    """Whether requests name candidates."""

    def check(self, address: str, model: ModelInfo) -> None:
        """Check a teacher's model. Raises TeacherMismatch with the values of both sides."""
        length = self.max_sequence_length
        able = "any temperature" if model.any_temperature else f"only 1.0 (backend {model.backend})"
        for what, fits, theirs, ours in (
            ("tokenizer size", model.vocab_size == self.tokenizer_size, model.vocab_size, self.tokenizer_size),
            ("tokenizer hash", model.tokenizer_hash == self.tokenizer_hash, model.tokenizer_hash, self.tokenizer_hash),
            ("topk (the server's --n-logprobs)", model.max_topk >= self.topk, model.max_topk, self.topk),
            ("tokens of a sequence", model.max_sequence_length >= length, model.max_sequence_length, length),
            (
                "candidates of the student (distillation.candidates)", model.given_ids or not self.given_ids,
                f"no scores of given ids (backend {model.backend})", "them",
            ),
            ("temperature", model.any_temperature or self.temperature == 1.0, able, self.temperature),
        ):
            if not fits:
                raise TeacherMismatch(f"{address}: {what}: the teacher has {theirs}, the student needs {ours}")


class Connection(Dealer):
    """A socket and the state of its server."""

    def __init__(self, context: zmq.Context, address: str, keys: Keys | None, adapter: str | None = None):
        super().__init__(context, address, protocol.MAX_REPLY_BYTES, keys, "clients")
        self._adapter = adapter
        self._keys_option = f" --keys {keys.folder}" if keys else ""
        self.model: ModelInfo | None = None
        """The server's model, with the adapter of the requests; None until it is ready: only hellos are sent."""
        self.instance = ""
        """Id of the server process; changes when the server is restarted."""
        self.is_unknown = True
        """True from a new connection until its welcome: another server may have taken the address."""
        self.ping_number, self._last_beat = 0, 0.0
        self.queue_length = self.num_answers = 0
        """Requests queued at the server according to its last pong; requests that it has scored for this client."""
        self.last_message: float | None = None
        self._began = time.monotonic()

    @property
    def problem(self) -> str:
        """Reason why this server cannot be used; "" if none is known."""
        if self.foreign_version is not None:
            ours = protocol.PROTOCOL_VERSION
            return f"protocol version mismatch: the teacher has {self.foreign_version}, the student {ours}"
        return self.refused

    def describe(self) -> str:
        """Return the server's state for a message; probe a silent server with a plain connection."""
        before = f", {self.num_answers} request(s) scored before" if self.num_answers else ""
        last = self.last_message
        if self.problem:
            return f"{self.problem}{before}"
        if last is not None and time.monotonic() - last < protocol.LIVENESS_SECONDS:
            state = f"{self.queue_length} request(s) queued for a worker" if self.model else "no worker is ready"
            return f"connected, {state}{before}"
        state = connection_error(self.address) or "connected, but no answer"
        return f"{state} since {clock_time(self._began if last is None else last)}{before}"

    def require_model(self, waited: Timeout) -> ModelInfo:
        """Return the server's model. Raises TeacherMismatch or TeacherUnreachable if it is unknown after `waited`."""
        if self.foreign_version is not None:
            raise TeacherMismatch(f"{self.address}: {self.problem}")
        if self.model is not None:
            return self.model
        if self.problem:
            raise TeacherUnreachable(f"{self.address}: no handshake with the teacher: {self.problem}")
        raise TeacherUnreachable(
            f"{self.address}: waited {waited} for the teacher's handshake: {self.describe()}; "
            f"see python -m hybrid_gkd.teacher status --addr {self.address}{self._keys_option}"
        )

    def on_welcome(self, welcome: protocol.Welcome) -> None:
        """Take the server's model. Raises TeacherMismatch: it lacks the adapter of the requests."""
        self.foreign_version, self.is_unknown = None, False
        if welcome.model is not None and welcome.num_workers > 0:  # otherwise the next hello asks again
            self.instance, self.model = welcome.instance, welcome.model.with_adapter(self._adapter, self.address)

    def send_heartbeat(self, now: float) -> None:
        """Send a ping every second to a ready server; send hellos more often to another one."""
        if now >= self._last_beat + protocol.PING_INTERVAL_SECONDS * (1 if self.model else 0.25):
            self._last_beat = now
            self.ping_number += 1
            self.send(protocol.Ping(number=self.ping_number) if self.model else protocol.Hello())


def connection_error(address: str) -> str:
    """Return why no plain connection can be made ("connection refused"); "" if one can."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
    except TimeoutError:
        return "no answer to a connection"
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) or not error.errno else os.strerror(error.errno)
        return (reason or str(error)).lower()
    return ""


def query_status(
    address: str, timeout: float = 2.0, keys: Keys | None = None, timeout_key: str = ""
) -> protocol.Status:
    """Query the state of one server. Raises TeacherUnreachable after `timeout` seconds, or earlier on wrong keys."""
    deadline, asked, limit = time.monotonic() + timeout, False, Timeout(timeout, timeout_key)
    with (
        zmq.Context() as context, contextlib.closing(Connection(context, address, keys)) as connection,
        waiting(f"the teacher at {address}", limit, lambda: connection_error(address)),
    ):  # fmt: skip
        while time.monotonic() < deadline and not connection.problem:
            connection.read_events()
            asked = asked or connection.send(protocol.StatusRequest())
            connection.socket.poll(50)
            for message, _ in connection.receive():
                if isinstance(message, protocol.Status):
                    return message
    reason = connection.problem
    if not reason:
        found = connection_error(address) or "connected, but no answer"
        reason = f"no teacher server answered the status request within {limit}: {found}"
    raise TeacherUnreachable(f"{address}: {reason}")

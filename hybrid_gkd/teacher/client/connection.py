"""One client's connection to one teacher server: is it there, what does it serve, does it fit the student."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zmq

from hybrid_gkd.errors import TeacherMismatch, TeacherUnreachable
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.keys import Keys
from hybrid_gkd.teacher.protocol import PROTOCOL_VERSION, AnyMessage, Buffer

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 64
CLOSE_MILLISECONDS = 200
"""For the goodbye to leave."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a server said in the handshake."""

    address: str
    instance: str
    """Changes when the server is restarted."""
    num_workers: int
    model: protocol.ModelInfo


@dataclass(frozen=True, kw_only=True)
class StudentNeeds:
    """What a teacher is compared with before training and whenever it comes back."""

    tokenizer_hash: str
    tokenizer_size: int
    max_sequence_length: int
    topk: int
    temperature: float

    def check(self, server: ServerInfo) -> None:
        """Raises TeacherMismatch with both sides' values."""
        model = server.model
        able = "any temperature" if model.any_temperature else f"only 1.0 (backend {model.backend})"
        for what, fits, theirs, ours in (
            ("tokenizer size", model.vocab_size == self.tokenizer_size, model.vocab_size, self.tokenizer_size),
            ("tokenizer hash", model.tokenizer_hash == self.tokenizer_hash, model.tokenizer_hash, self.tokenizer_hash),
            ("topk (the server's --n-logprobs)", model.max_topk >= self.topk, model.max_topk, self.topk),
            ("tokens of prompt and response", model.max_sequence_length >= self.max_sequence_length,
             model.max_sequence_length, self.max_sequence_length),
            ("temperature", model.any_temperature or self.temperature == 1.0, able, self.temperature),
        ):  # fmt: skip
            if not fits:
                raise TeacherMismatch(f"{server.address}: {what}: the teacher has {theirs}, the student needs {ours}")


class Connection:
    """A DEALER socket and what is known about its server. Belongs to one thread."""

    def __init__(self, context: zmq.Context, address: str, keys: Keys | None = None):
        self.address = address
        self._context, self._keys, self._name = context, keys, uuid.uuid4().bytes
        self._open()
        self.server: ServerInfo | None = None
        """None: not (or no longer) known to serve; nothing but hellos is sent there."""
        self.answered = False
        """Whether the server has ever said welcome, even one without workers."""
        self.foreign_version: int | None = None
        """The protocol version of a server that speaks another one."""
        self.heard = 0.0
        """Monotonic time of the last message."""
        self.ping_number = 0
        self.bytes_sent = 0
        self.bytes_received = 0

    def _open(self) -> None:
        self.socket, self.monitor = network.connect(
            self._context, self.address, protocol.MAX_REPLY_BYTES, keys=self._keys, name=self._name
        )
        self._opened = time.monotonic()

    def reopen_if_stuck(self, now: float) -> None:
        """libzmq never tries again after some failures (a handshake refused, a message too long): start over."""
        if now - max(self._opened, self.heard) > 2 * protocol.LIVENESS_SECONDS:
            problem = self.monitor.problem
            network.close(self.socket, self.monitor)
            self._open()
            self.monitor.problem = problem  # until there is news

    def close(self) -> None:
        """Say goodbye, so that the server stops working for this client."""
        self.send(protocol.Bye())
        network.close(self.socket, self.monitor, linger_ms=CLOSE_MILLISECONDS)

    @property
    def problem(self) -> str:
        """Why this server cannot be used, as far as it is known."""
        if self.foreign_version is not None:
            return f"protocol version: the teacher speaks {self.foreign_version}, the student {PROTOCOL_VERSION}"
        return self.monitor.problem

    def require_server(self, waited: float) -> ServerInfo:
        """What it serves. Raises TeacherMismatch or TeacherUnreachable if it is not known after `waited` seconds."""
        if self.foreign_version is not None:
            raise TeacherMismatch(f"{self.address}: {self.problem}")
        if self.server is not None:
            return self.server
        if self.problem:
            raise TeacherUnreachable(f"{self.address}: no handshake with the teacher: {self.problem}")
        found = "the server has no worker ready" if self.answered else "nothing answered"
        raise TeacherUnreachable(
            f"{self.address}: waited {waited:g} s for the teacher's handshake, {found}; "
            f"see python -m hybrid_gkd.teacher status --addr {self.address}"
        )

    def on_welcome(self, welcome: protocol.Welcome) -> None:
        self.answered = True
        self.foreign_version = None
        if welcome.model is None or welcome.num_workers == 0:
            return  # asked again with the next hello
        self.server = ServerInfo(
            address=self.address, instance=welcome.instance, num_workers=welcome.num_workers, model=welcome.model
        )

    def beat(self) -> None:
        """A ping if the server is known to serve, else a hello."""
        if self.server is not None:
            self.ping_number += 1
            self.send(protocol.Ping(number=self.ping_number))
        else:
            self.send(protocol.Hello())

    def send(self, message: AnyMessage, arrays: list[np.ndarray] | None = None) -> bool:
        """False when there is no connection at the moment; the message is dropped then."""
        frames = protocol.encode(message, arrays or [])
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self.bytes_sent += sum(memoryview(frame).nbytes for frame in frames)
        return True

    def receive(self, now: float) -> Iterator[tuple[AnyMessage, list[Buffer]]]:
        """What has arrived, header and array frames; not everything, so that a flood does not stop the rest."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.bytes_received += sum(map(len, frames))
            try:
                message = protocol.decode_header(frames[0].buffer)
            except protocol.ForeignVersion as error:
                self.foreign_version = error.version
                continue
            except protocol.ProtocolError as error:
                log.debug("%s: dropped a malformed message: %s", self.address, error)
                continue  # the request that it may have belonged to is found lost at the next pong
            self.heard = now
            yield message, [frame.buffer for frame in frames[1:]]


def query_status(address: str, timeout: float = 2.0, keys: Keys | None = None) -> protocol.Status:
    """Ask one server for its state. Raises TeacherUnreachable after `timeout` seconds, earlier if keys do not fit."""
    deadline = time.monotonic() + timeout
    with zmq.Context() as context:
        connection = Connection(context, address, keys)
        try:
            asked = False
            while (now := time.monotonic()) < deadline and not connection.problem:
                connection.monitor.read()
                asked = asked or connection.send(protocol.StatusRequest())
                connection.socket.poll(50)
                for message, _ in connection.receive(now):
                    if isinstance(message, protocol.Status):
                        return message
        finally:
            connection.close()
    raise TeacherUnreachable(
        f"{address}: {connection.problem or f'no teacher server answered the status request within {timeout:.0f} s'}"
    )

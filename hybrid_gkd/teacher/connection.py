"""One client's connection to one teacher server: is it there, what does it serve, does it fit the student."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zmq

from hybrid_gkd.errors import TeacherMismatch, TeacherUnreachable
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.protocol import PROTOCOL_VERSION, AnyMessage, Buffer


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a server said in the handshake."""

    address: str
    instance: str
    """Changes when the server is restarted."""
    protocol_version: int
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
        model, version = server.model, server.protocol_version
        able = "any temperature" if model.any_temperature else f"only 1.0 (backend {model.backend})"
        for what, fits, theirs, ours in (
            ("protocol version", version == PROTOCOL_VERSION, version, PROTOCOL_VERSION),
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

    def __init__(self, context: zmq.Context, address: str):
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        network.configure(self.socket, protocol.MAX_REPLY_BYTES)
        self.socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().bytes)  # survives reconnects
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a server that is away
        self.socket.connect(network.endpoint_url(address))
        self.server: ServerInfo | None = None
        """None: not (or no longer) known to serve; nothing but hellos is sent there."""
        self.answered = False
        """Whether the server has ever said welcome, even one without workers."""
        self.heard = 0.0
        """Monotonic time of the last message."""
        self.ping_number = 0
        self.bytes_sent = 0
        self.bytes_received = 0

    def on_welcome(self, welcome: protocol.Welcome) -> None:
        self.answered = True
        if welcome.model is None or welcome.num_workers == 0:
            return  # asked again with the next hello
        self.server = ServerInfo(
            address=self.address, instance=welcome.instance, protocol_version=welcome.protocol_version,
            num_workers=welcome.num_workers, model=welcome.model,
        )  # fmt: skip

    def beat(self) -> None:
        """A ping if the server is known to serve, else a hello."""
        if self.server is not None:
            self.ping_number += 1
            self.send(protocol.Ping(number=self.ping_number))
        else:
            self.send(protocol.Hello(protocol_version=PROTOCOL_VERSION))

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
        """Everything that has arrived, header and array frames."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.heard = now
            self.bytes_received += sum(map(len, frames))
            try:
                message = protocol.decode_header(frames[0].buffer)
            except protocol.ProtocolError:
                continue  # the request that it may have belonged to is found lost at the next pong
            yield message, [frame.buffer for frame in frames[1:]]


def query_status(address: str, timeout: float = 2.0) -> protocol.Status:
    """Ask one server for its state. Raises TeacherUnreachable after `timeout` seconds."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        network.configure(dealer, protocol.MAX_REQUEST_BYTES)
        dealer.connect(network.endpoint_url(address))
        dealer.send_multipart(protocol.encode(protocol.StatusRequest()))
        if dealer.poll(int(timeout * 1000)):
            message = protocol.decode_header(dealer.recv_multipart()[0])
            if isinstance(message, protocol.Status):
                return message
    raise TeacherUnreachable(f"{address}: no teacher server answered within {timeout:.0f} s")

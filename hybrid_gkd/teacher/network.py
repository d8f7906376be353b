"""Sockets and addresses of client, broker and worker."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.runtime.addresses import is_address
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.keys import Keys, Role
from hybrid_gkd.teacher.protocol import AnyMessage, Buffer

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5
"""Timeout of the handshake of a connection."""
MAX_CUT_OFF = 5
"""Number of aborted handshakes in a row after which the connection counts as refused."""
HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
MESSAGES_PER_READ = 64
"""Messages read from one socket before the others are polled."""
EXPECTS_KEYS = "the server requires keys (actor_rollout_ref.teacher.keys, --keys) and none were given"


def configure(socket: zmq.Socket, max_message_bytes: int) -> None:
    """Set the options that all sockets of the service share; call before bind or connect."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    # The transport's heartbeat drops connections to lost hosts; it runs in libzmq's I/O thread, so a long computation
    # does not delay it.
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(protocol.PING_INTERVAL_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(protocol.LIVENESS_SECONDS * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def receive_frames(socket: zmq.Socket, most: int) -> tuple[list[zmq.Frame], int]:
    """Return at most `most` frames of the next message, and the number of dropped ones. Raises zmq.Again: none."""
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more and len(frames) < most:
        frames.append(socket.recv(copy=False))
    more, num_left_out = frames[-1].more, 0
    while more:  # libzmq has received them all and cannot skip them
        more = socket.recv(copy=False).more
        num_left_out += 1
    return frames, num_left_out


class Dealer:
    """DEALER socket that connects to ``host:port`` in the background. Not thread-safe."""

    def __init__(self, context: zmq.Context, address: str, max_message_bytes: int, keys: Keys | None, role: Role):
        self.address, self._role = address, role
        self.heard = time.monotonic()
        """Monotonic time of the last message; initially of the construction."""
        self.foreign_version: int | None = None
        self.refused = ""
        """Reason why no handshake can succeed, from libzmq's events; "" if one may."""
        self.bytes_sent = self.bytes_received = 0
        self._context, self._max_message_bytes, self._keys = context, max_message_bytes, keys
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        configure(self.socket, self._max_message_bytes)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # no queue for an unreachable server
        if self._keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = self._keys.public, self._keys.secret
            self.socket.curve_serverkey = self._keys.server_public
        self._num_cut_off = 0
        self._monitor = self.socket.get_monitor_socket(HANDSHAKE_EVENTS)
        self.socket.connect(endpoint_url(self.address))
        self._opened = time.monotonic()

    def reopen_if_stuck(self, now: float) -> None:
        """Reopen the socket after failures that libzmq does not retry (a refused handshake, a message too long)."""
        if now - max(self._opened, self.heard) > 2 * protocol.LIVENESS_SECONDS:
            self.close()
            self._open()

    def close(self, linger_ms: int = 0) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=linger_ms)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def send(self, message: AnyMessage, arrays: list[np.ndarray] | None = None) -> bool:
        """Send a message; return False, and drop it, if there is no connection at the moment."""
        return self.send_frames(protocol.encode_message(message, arrays or []))

    def send_frames(self, frames: list) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self.bytes_sent += sum(memoryview(frame).nbytes for frame in frames)
        return True

    def receive(self) -> Iterator[tuple[AnyMessage, list[Buffer]]]:
        """Yield header and array frames of received messages, at most `MESSAGES_PER_READ`."""
        for _ in range(MESSAGES_PER_READ):
            try:
                frames, _ = receive_frames(self.socket, protocol.MAX_FRAMES)
            except zmq.Again:
                return
            self.bytes_received += sum(map(len, frames))
            try:
                message = protocol.decode_header(frames[0].buffer)
            except protocol.ForeignVersion as error:
                self.foreign_version = error.version
            except protocol.ProtocolError as error:  # the next pong shows that its request is lost
                log.debug("%s: dropped a malformed message: %s", self.address, error)
            else:
                self.heard = time.monotonic()
                yield message, [frame.buffer for frame in frames[1:]]

    def read_events(self) -> bool:
        """Process libzmq's handshake events; return True on a new connection, perhaps to a restarted server."""
        connected, folder = False, self._keys.folder if self._keys else None
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connected, self.refused, self._num_cut_off = True, "", 0
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                advice = f"copy its public key (.key) to {self._role}/ of the server's keys"
                self.refused = f"the server does not accept the key in {folder}; {advice}"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                given = f"keys were given ({folder}), but the server was started without; give both keys, or none"
                self.refused = given if folder else EXPECTS_KEYS
            else:  # no reason from libzmq: the server closed first and so hides the other events
                self._num_cut_off += 1
                if self._num_cut_off >= MAX_CUT_OFF:
                    given = f"its key differs from {folder}/server.key, it was started without keys"
                    self.refused = (
                        f"the server closed {self._num_cut_off} connections during the handshake: "
                        f"{given if folder else EXPECTS_KEYS}, or it is not a teacher service"
                    )
        return connected


def endpoint_url(address: str) -> str:
    """Return the tcp:// URL of ``host:port``. Raises TeacherError: invalid address."""
    if not is_address(address):
        raise TeacherError(f"{address!r} is not a teacher address; expected host:port, for example 127.0.0.1:15555")
    return f"tcp://{address}"


def resolve(host: str) -> str:
    """Return the IP address of `host`. Raises TeacherError: the name does not resolve."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or too long part
        raise TeacherError(f"--host {host}: not an address of this machine ({error})") from error

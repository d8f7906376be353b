"""A port of the broker, with protection against peers that send invalid or endless messages.

Only owners of keys can send messages. libzmq buffers all parts of a message before it returns the first, without a
limit, and has no call to disconnect a peer. Therefore `check_unfinished` inspects the TCP sockets, and a peer is
disconnected by shutting down its socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.keys import AllowList, Role
from hybrid_gkd.teacher.protocol import AnyMessage

log = logging.getLogger(__name__)

MAX_CONNECTING = 128
"""Backlog of connections to accept."""
MAX_UNREAD = 32
"""Receive queue of one peer, in messages; beyond that, TCP flow control stops the peer."""
MAX_UNFINISHED_BYTES = 1 << 30
"""Limit of the unfinished messages of all peers of a port together, unless a single message may be larger."""
TCP_INFO = struct.Struct("B127xQ")
"""Fields tcpi_state and tcpi_bytes_received of Linux's tcp_info."""
TCP_OPEN = {1, 8}
"""TCP states ESTABLISHED and CLOSE_WAIT: this side has not closed the connection."""
PeerConnection = tuple[int, tuple[str, int]]
"""Descriptor and peer address of a connection; a descriptor alone may be reused."""


class Port:
    """Bound ROUTER socket; port 0 picks a free one. Raises TeacherError naming `option`: it cannot be bound.

    At most `max_unsent` messages are queued for a peer that does not read; sending more fails with EAGAIN.
    """

    def __init__(
        self, context: zmq.Context, role: Role, host: str, number: int, option: str, *, max_message_bytes: int,
        max_unsent: int, allowed: AllowList | None,
    ):  # fmt: skip
        self.role, self._allowed = role, allowed
        self._max_unfinished = protocol.MAX_FRAMES * max_message_bytes
        """Largest size of a message of the protocol, bytes."""
        self._finished: dict[PeerConnection, int] = {}
        """Bytes received on each connection up to its last complete message."""
        self._heard: set[int] = set()
        """Descriptors of the connections with messages since the last `check_unfinished`."""
        self.socket = context.socket(zmq.ROUTER)
        network.configure(self.socket, max_message_bytes)
        # Peers do not choose routing ids: otherwise one could take over another one's id, and its replies.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise an error for a message that cannot be sent
        self.socket.setsockopt(zmq.SNDHWM, max_unsent)
        self.socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        self.socket.setsockopt(zmq.BACKLOG, MAX_CONNECTING)
        if allowed is not None:
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = allowed.keys.public, allowed.keys.secret
            self.socket.setsockopt_string(zmq.ZAP_DOMAIN, role)
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator: refuse all connections
        try:
            self.socket.bind(f"tcp://{network.resolve(host)}:{number or '*'}")
        except zmq.ZMQError as error:
            advice = "another process uses it; choose another port, or 0 for a free one"
            reason = advice if error.errno == zmq.EADDRINUSE else str(error)
            raise TeacherError(f"{option} {number}: cannot bind {host}:{number}: {reason}") from error
        self.number = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def receive(self) -> Iterator[tuple[bytes, str | None, list[zmq.Frame]]]:
        """Yield routing id, key (None without keys) and frames of received messages, at most `MESSAGES_PER_READ`."""
        for _ in range(network.MESSAGES_PER_READ):
            try:
                (identity, *frames), num_left_out = network.receive_frames(self.socket, 1 + protocol.MAX_FRAMES)
            except zmq.Again:
                return
            descriptor = _property(identity, zmq.SRCFD)
            if descriptor is not None:
                self._heard.add(descriptor)
            if num_left_out:
                self._drop(identity, f"a message of {len(frames) + num_left_out} parts")
            yield identity.bytes, _property(identity, "User-Id") or None, ([] if num_left_out else frames)

    def send(
        self, identity: bytes, message: AnyMessage, payload: list[zmq.Frame] | list[np.ndarray] | None = None
    ) -> int:
        """Send a message; return 0 or zmq's error: EAGAIN (the peer does not read), EHOSTUNREACH (disconnected)."""
        try:
            frames = [identity, *protocol.encode_message(message), *(payload or [])]
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # pings and deadlines handle the loss
            log.debug("cannot send %s: %s", type(message).__name__, error)
            return error.errno or zmq.EAGAIN
        return 0

    def check_unfinished(self) -> None:
        """Disconnect peers whose unfinished message exceeds the limits; called once per second."""
        open_now = dict(self._connections())
        self._finished = {
            each: num_bytes if each[0] in self._heard else self._finished.get(each, 0)
            for each, num_bytes in open_now.items()
        }
        self._heard.clear()
        unfinished = {each: num_bytes - self._finished[each] for each, num_bytes in open_now.items()}
        total, most_of_all = sum(unfinished.values()), max(self._max_unfinished, MAX_UNFINISHED_BYTES)
        for each in sorted(unfinished, key=lambda each: -unfinished[each]):
            if unfinished[each] <= self._max_unfinished and total <= most_of_all:
                return
            total -= unfinished[each]
            log.warning(
                "%s: %s:%d was dropped: unfinished message of %d bytes; the limit is %d, and %d for all peers together",
                self.role, *each[1], unfinished[each], self._max_unfinished, most_of_all,
            )
            _shut(each[0])

    def _drop(self, identity: zmq.Frame, what: str) -> None:
        """Disconnect the sender of a message and ban its key."""
        name, user = "a peer", _property(identity, "User-Id")
        if self._allowed is not None and user is not None:
            key = user.encode()
            name = self._allowed.name(self.role, key) or "a removed key"
            self._allowed.ban(key)
        who = f"{name} at {_property(identity, 'Peer-Address')}"
        log.warning(
            "%s: %s sent %s, the limit is %d: dropped, and banned until the service is restarted",
            self.role, who, what, protocol.MAX_FRAMES,
        )
        descriptor = _property(identity, zmq.SRCFD)
        if descriptor in {connection[0] for connection, _ in self._connections()}:  # otherwise already closed
            _shut(descriptor)

    def _connections(self) -> Iterator[tuple[PeerConnection, int]]:
        """Yield the open connections of this port with the number of bytes received."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or another kind of socket
                descriptor = int(name)
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as same:
                    if same.type == socket.SOCK_STREAM and same.getsockname()[1:2] == (self.number,):
                        info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
                        state, num_bytes = TCP_INFO.unpack(info)
                        if state in TCP_OPEN:
                            yield (descriptor, same.getpeername()), num_bytes


def _property(frame: zmq.Frame, name: int | str) -> Any:
    """Return a property of the connection that a frame came from; None if libzmq does not provide it."""
    try:
        return frame.get(name)
    except zmq.ZMQError:
        return None


def _shut(descriptor: int) -> None:
    """Make libzmq close a connection, with a reset, because a blocked sender would not notice an orderly shutdown."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        same.shutdown(socket.SHUT_RDWR)


def start_authenticator(context: zmq.Context, allowed: AllowList) -> ThreadAuthenticator:
    """Start to check connections to a context's ports against `allowed`. Stop the authenticator before the ports."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    roles: tuple[Role, ...] = ("clients", "workers")
    for role in roles:
        authenticator.configure_curve_callback(domain=role, credentials_provider=allowed)
    return authenticator

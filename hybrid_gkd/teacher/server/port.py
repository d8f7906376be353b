"""A port of the broker: who is connected to it, what they sent, and who is dropped for what was sent.

Only the owners of keys get as far as a message. libzmq collects all parts of one before it hands out the first, and
has neither a limit for that nor a call to drop a peer. So `check_unfinished` looks at the sockets themselves, and a
peer is dropped by shutting its socket down.
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

import zmq
from zmq.auth.thread import ThreadAuthenticator

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.keys import AllowList, Role
from hybrid_gkd.teacher.protocol import AnyMessage

log = logging.getLogger(__name__)

MAX_CONNECTING = 128
"""Connections that may wait to be accepted."""
MAX_UNREAD = 32
"""Messages of one peer that wait to be read; beyond that TCP makes the peer wait."""
MAX_UNFINISHED_BYTES = 1 << 30
"""Of the messages that all peers of a port together have begun, unless a single one may be larger."""
TCP_INFO = struct.Struct("B127xQ")
"""The fields tcpi_state and tcpi_bytes_received of Linux's tcp_info."""
TCP_OPEN = {1, 8}
"""The states ESTABLISHED and CLOSE_WAIT: whatever the peer has done, this side has not ended the connection."""
Connection = tuple[int, tuple[str, int]]
"""Descriptor, and the peer's address: the descriptor alone may soon be that of another connection."""


class Port:
    """A bound ROUTER. Raises TeacherError naming `option` if it cannot be bound; port 0 picks a free one.

    A peer that does not read gets `max_unsent` messages at most; sending it more fails with EAGAIN.
    """

    def __init__(
        self, context: zmq.Context, role: Role, host: str, number: int, option: str, *, max_message_bytes: int,
        max_unsent: int, allowed: AllowList | None,
    ):  # fmt: skip
        self.role, self._allowed = role, allowed
        self._max_unfinished = protocol.MAX_FRAMES * max_message_bytes
        """A peer with more bytes than this in an unfinished message is not sending one of the protocol's."""
        self._finished: dict[Connection, int] = {}
        """Bytes that had come over a connection when it was last seen to finish a message."""
        self._heard: set[int] = set()
        """Descriptors over which messages came since the last `check_unfinished`."""
        self.socket = context.socket(zmq.ROUTER)
        network.configure(self.socket, max_message_bytes)
        # Peers do not choose their names: nobody can take another one's place, and its replies, by giving its name.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message that cannot be sent is an error
        self.socket.setsockopt(zmq.SNDHWM, max_unsent)
        self.socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        self.socket.setsockopt(zmq.BACKLOG, MAX_CONNECTING)
        if allowed is not None:
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = allowed.keys.public, allowed.keys.secret
            self.socket.setsockopt_string(zmq.ZAP_DOMAIN, role)
            self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody gets in
        try:
            self.socket.bind(f"tcp://{network.resolve(host)}:{number or '*'}")
        except zmq.ZMQError as error:
            advice = "another process uses it; choose another port, 0 picks a free one"
            reason = advice if error.errno == zmq.EADDRINUSE else str(error)
            raise TeacherError(f"{option} {number}: cannot bind {host}:{number}: {reason}") from error
        self.number = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def receive(self) -> Iterator[tuple[bytes, list[zmq.Frame]]]:
        """Routing id and frames of what has arrived; not everything, so that a flood does not stop the rest."""
        for _ in range(network.MESSAGES_PER_TURN):
            try:
                (identity, *frames), num_left_out = network.receive_frames(self.socket, 1 + protocol.MAX_FRAMES)
            except zmq.Again:
                return
            descriptor = _property(identity, zmq.SRCFD)
            if descriptor is not None:
                self._heard.add(descriptor)
            if num_left_out:
                self._drop(identity, f"a message of {len(frames) + num_left_out} parts")
            yield identity.bytes, ([] if num_left_out else frames)

    def send(
        self, identity: bytes, message: AnyMessage, payload: list[zmq.Frame] | list[protocol.Buffer] | None = None
    ) -> int:
        """0, or the error of zmq: EAGAIN for a peer that does not read, EHOSTUNREACH for one that is gone."""
        try:
            self.socket.send_multipart([identity, *protocol.encode(message), *(payload or [])], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # pings and deadlines take care of the rest
            log.debug("could not send %s: %s", type(message).__name__, error)
            return error.errno or zmq.EAGAIN
        return 0

    def check_unfinished(self) -> None:
        """Drop who has sent more bytes than a message has without finishing one; called once a second."""
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
                "%s: %s:%d was dropped: %d bytes came from it without the end of a message; the most are %d, "
                "and %d from all peers together",
                self.role, *each[1], unfinished[each], self._max_unfinished, most_of_all,
            )
            _shut(each[0])

    def _drop(self, identity: zmq.Frame, what: str) -> None:
        """End the connection over which a message came, and let its key in no more."""
        name, user = "a peer", _property(identity, "User-Id")
        if self._allowed is not None and user is not None:
            key = user.encode()
            name = self._allowed.name(self.role, key) or "a key that was withdrawn"
            self._allowed.ban(key)
        who = f"{name} at {_property(identity, 'Peer-Address')}"
        log.warning(
            "%s: %s sent %s, the protocol has %d at most: dropped, and not let in again until the service is restarted",
            self.role, who, what, protocol.MAX_FRAMES,
        )
        descriptor = _property(identity, zmq.SRCFD)
        if descriptor in {connection[0] for connection, _ in self._connections()}:  # else it has gone by itself
            _shut(descriptor)

    def _connections(self) -> Iterator[tuple[Connection, int]]:
        """Of this port, each with the bytes that have come over it; without those that `_shut` has ended."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or a socket of another kind
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
    """What libzmq knows of the connection over which a frame came; None where it does not say."""
    try:
        return frame.get(name)
    except zmq.ZMQError:
        return None


def _shut(descriptor: int) -> None:
    """Have libzmq close a connection. The peer gets a reset: one that waits to send would not notice an orderly end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        same.shutdown(socket.SHUT_RDWR)


def start_authenticator(context: zmq.Context, allowed: AllowList) -> ThreadAuthenticator:
    """Asks `allowed` about every connection to the ports of `context` that have it. Stop it before them."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    roles: tuple[Role, ...] = ("clients", "workers")
    for role in roles:
        authenticator.configure_curve_callback(domain=role, credentials_provider=allowed)
    return authenticator

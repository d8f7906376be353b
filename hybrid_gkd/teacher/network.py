"""Sockets, addresses and binding: everything about the network that is the same for all parts."""

from __future__ import annotations

import ipaddress
import socket

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.keys import AllowList, Keys

AUTHENTICATION_DOMAIN = "teacher"
MAX_CONNECTING = 128
"""Connections that may wait to be accepted; an accepted one has HANDSHAKE_SECONDS to identify itself."""
HANDSHAKE_SECONDS = 5
MAX_UNREAD = 32
"""Messages of one peer that wait to be read; beyond that TCP makes the peer wait."""
DISRUPTIONS = 5
"""A handshake that was cut off this often in a row will not succeed."""
EXPECTS_KEYS = "the server expects keys (actor_rollout_ref.teacher.keys, --keys) and none were given"


def configure(socket: zmq.Socket, max_message_bytes: int) -> None:
    """Options that every socket of the service shares; call before bind or connect."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    # The transport's own heartbeat drops connections to hosts that vanished without a word; it runs
    # in the I/O thread of libzmq, so a long computation does not delay it.
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(protocol.PING_INTERVAL_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(protocol.LIVENESS_SECONDS * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def connect(
    context: zmq.Context, address: str, max_message_bytes: int, *, keys: Keys | None, name: bytes = b""
) -> tuple[zmq.Socket, Monitor]:
    """A DEALER that connects to ``host:port`` in the background; `name` is its routing id."""
    dealer = context.socket(zmq.DEALER)
    configure(dealer, max_message_bytes)
    if name:
        dealer.setsockopt(zmq.ROUTING_ID, name)  # survives reconnects
    dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a server that is away
    if keys is not None:
        dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
        dealer.curve_serverkey = keys.server_public
    monitor = Monitor(dealer, keys)
    dealer.connect(endpoint_url(address))
    return dealer, monitor


class Monitor:
    """What libzmq tells about the handshakes of a connecting socket."""

    def __init__(self, dealer: zmq.Socket, keys: Keys | None):
        self._keys = keys
        self._num_cut_off = 0
        self.problem = ""
        """Why no handshake will ever succeed; empty as long as one may."""
        self.socket = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )  # fmt: skip

    def read(self) -> bool:
        """Take in what has happened; True if a connection was made."""
        connected = False
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connected, self.problem, self._num_cut_off = True, "", 0
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                assert self._keys is not None, "only a server that was given keys can refuse them"
                self.problem = (
                    f"the server does not accept the key in {self._keys.folder}; "
                    "its public half (.key) belongs into clients/ of the server's keys"
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.problem = (
                    EXPECTS_KEYS
                    if self._keys is None
                    else f"keys were given ({self._keys.folder}), but the server was started without"
                )
            else:  # libzmq does not say why; a server that closes first hides what the other events would tell
                self._num_cut_off += 1
                if self._num_cut_off >= DISRUPTIONS:
                    own = self._keys and (
                        f"its key is not the one in {self._keys.folder / 'server.key'}, it was started without keys"
                    )
                    self.problem = (
                        f"the server has ended {self._num_cut_off} connections during the handshake: "
                        f"{own or EXPECTS_KEYS}, or it is no teacher service"
                    )
        return connected


def close(dealer: zmq.Socket, monitor: Monitor, linger_ms: int = 0) -> None:
    dealer.disable_monitor()
    monitor.socket.close(linger=0)
    dealer.close(linger=linger_ms)


def endpoint_url(address: str) -> str:
    """tcp:// URL of ``host:port``. Raises TeacherError for another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise TeacherError(f"{address!r} is no teacher address; expected host:port, for example 127.0.0.1:15555")
    return f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Raises TeacherError for a name that does not resolve."""
    return ipaddress.ip_address(resolve(host)).is_loopback


def resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise TeacherError(f"--host {host}: not an address of this machine ({error})") from error


def bind(
    server: zmq.Socket, host: str, port: int, option: str, *, max_message_bytes: int, max_unsent: int,
    keys: Keys | None,
) -> int:  # fmt: skip
    """Bind a ROUTER and return its port (0 picks a free one). Raises TeacherError naming `option`.

    A peer that does not read gets `max_unsent` messages at most; sending it more fails with EAGAIN.
    """
    configure(server, max_message_bytes)
    server.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects keeps its name at once
    server.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent is an error instead of silence
    server.setsockopt(zmq.SNDHWM, max_unsent)
    server.setsockopt(zmq.RCVHWM, MAX_UNREAD)
    server.setsockopt(zmq.BACKLOG, MAX_CONNECTING)
    if keys is not None:
        server.curve_server = True
        server.curve_publickey, server.curve_secretkey = keys.public, keys.secret
        server.setsockopt_string(zmq.ZAP_DOMAIN, AUTHENTICATION_DOMAIN)
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody gets in
    try:
        server.bind(f"tcp://{resolve(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        advice = "another process uses it; choose another port, 0 picks a free one"
        reason = advice if error.errno == zmq.EADDRINUSE else str(error)
        raise TeacherError(f"{option} {port}: cannot bind {host}:{port}: {reason}") from error
    return int(server.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def start_authenticator(context: zmq.Context, keys: Keys) -> ThreadAuthenticator:
    """Let in who is on the allow-list, on all sockets of `context` that are bound with keys. Stop it before them."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=AUTHENTICATION_DOMAIN, credentials_provider=AllowList(keys))
    return authenticator

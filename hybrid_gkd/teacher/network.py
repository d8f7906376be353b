"""Socket options, addresses and binding: everything about the network that is the same for all parts."""

from __future__ import annotations

import ipaddress
import socket

import zmq

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import protocol


def configure(socket: zmq.Socket, max_message_bytes: int) -> None:
    """Options that every socket of the service shares; call before bind or connect."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    # The transport's own heartbeat drops connections to hosts that vanished without a word; it runs
    # in the I/O thread of libzmq, so a long computation does not delay it.
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(protocol.PING_INTERVAL_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(protocol.LIVENESS_SECONDS * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)


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


def bind(server: zmq.Socket, host: str, port: int, option: str, max_message_bytes: int, max_queued: int) -> int:
    """Bind a ROUTER and return its port (0 picks a free one). Raises TeacherError naming `option`."""
    configure(server, max_message_bytes)
    server.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects keeps its name at once
    server.setsockopt(zmq.SNDHWM, max_queued)  # a ROUTER drops silently what exceeds it
    try:
        server.bind(f"tcp://{resolve(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        advice = "another process uses it; choose another port, 0 picks a free one"
        reason = advice if error.errno == zmq.EADDRINUSE else str(error)
        raise TeacherError(f"{option} {port}: cannot bind {host}:{port}: {reason}") from error
    return int(server.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

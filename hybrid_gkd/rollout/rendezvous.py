"""Rendezvous store of a process group, without authentication, bound to one network interface.

torch's own store listens on all interfaces, even for a single process.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(address: tuple[str, int], *, rank: int, size: int, timeout: float) -> dist.Store:
    """Open the store of a group; rank 0 listens at `address` only. A single process needs no socket.

    Raises RuntimeError or OSError: the other ranks do not connect within `timeout` seconds, or the port is in use.
    """
    if size == 1:
        return dist.HashStore()
    limit = timedelta(seconds=timeout)
    if rank > 0:
        return dist.TCPStore(*address, size, False, limit)
    listener = socket.create_server(address)
    return dist.TCPStore(*address, size, True, limit, master_listen_fd=listener.detach())

"""The store through which the processes of a group find each other. It asks nobody who they are.

torch's own would listen on all interfaces, also for a single process.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(address: tuple[str, int], *, rank: int, size: int, timeout: float) -> dist.Store:
    """Rank 0 listens at `address`, and on no other interface; a process alone needs no socket.

    Raises RuntimeError or OSError if the others do not come within `timeout` seconds, or the port is taken.
    """
    if size == 1:
        return dist.HashStore()
    limit = timedelta(seconds=timeout)
    if rank > 0:
        return dist.TCPStore(*address, size, False, limit)
    listener = socket.create_server(address)
    return dist.TCPStore(*address, size, True, limit, master_listen_fd=listener.detach())

"""torch.distributed process group of a pool of workers: rendezvous and a connectivity check.

torch is imported when a worker joins, after its environment variables have been set.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from hybrid_gkd.config import Config
from hybrid_gkd.errors import WorkerError
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.workers.placement import Role, threads_per_process

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
"""Interfaces of gloo, NCCL and vLLM if all workers are on one machine, unless set by the user."""


class GroupMember:
    """Process `rank` of `size` in the process group of its pool, on "cuda" or "cpu"."""

    def __init__(self, config: Config, *, role: Role, rank: int, size: int, device_type: str):
        self.config, self.role, self.rank, self.size = config, role, rank, size
        self.device_type = device_type

    def address(self) -> tuple[str, int]:
        """Return host and a free port of this process for a rendezvous, on the interface that the others reach."""
        host = "127.0.0.1"
        if not self._on_one_host():
            import ray

            host = ray.util.get_node_ip_address()  # reachable from Ray's other nodes
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def _on_one_host(self) -> bool:
        return self.config.ray_init.address is None or (self.config.trainer.nnodes == 1 and self.role == "worker")

    def join(self, address: tuple[str, int], timeout: Timeout) -> None:
        """Join the process group at `address`. Raises WorkerError if the others do not within `timeout`."""
        # Read by torch, gloo, NCCL and vLLM at their import.
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.size), LOCAL_RANK="0")
        if self.device_type == "cpu":
            os.environ["OMP_NUM_THREADS"] = str(threads_per_process(self.config))
        if self._on_one_host():  # no remote access is needed, and the host's own name may not resolve on a laptop
            for name, value in LOOPBACK.items():
                os.environ.setdefault(name, value)
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        import torch
        import torch.distributed as dist

        from hybrid_gkd.compat.torch import set_timeout_of_new_groups
        from hybrid_gkd.rollout.weight_sync import ABORT_SECONDS, open_store

        if self.device_type == "cuda":
            torch.cuda.set_device(0)  # Ray shows each worker its own GPU only
        try:
            store = open_store(address, rank=self.rank, size=self.size, timeout=timeout.seconds)
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"{self.role} {self.rank}: the {self.size} {self.role}s did not all connect to "
                f"{address[0]}:{address[1]} within {timeout}: {str(error).splitlines()[0]}"
            ) from error
        # Collectives have a longer timeout than their callers and than a weight sync between pools: a worker that
        # waits for a late rank must still be alive when the student is saved.
        longest = timedelta(seconds=max(timeout.seconds, self.config.actor_rollout_ref.nccl_timeout) + ABORT_SECONDS)
        set_timeout_of_new_groups(longest)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device_type == "cuda" else "gloo",
            store=store, rank=self.rank, world_size=self.size, timeout=longest,
        )

    def all_reduce(self, address: tuple[str, int], timeout: Timeout) -> None:
        """Sum one number over all workers on their devices, after joining the group if necessary.

        Raises WorkerError: timeout, or a wrong sum.
        """
        import torch
        import torch.distributed as dist

        deadline = time.monotonic() + timeout.seconds
        if not dist.is_initialized():
            self.join(address, timeout)
        number = torch.tensor([self.rank + 1.0], device=self.device_type)
        work = dist.all_reduce(number, async_op=True)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{self.role} {self.rank} waited {timeout} for the others in an all-reduce; check network "
                    "interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and firewalls"
                )
            time.sleep(0.01)
        work.wait()
        expected = self.size * (self.size + 1) / 2
        if number.item() != expected:
            raise WorkerError(f"{self.role} {self.rank}: an all-reduce gave {number.item()}, not {expected}")

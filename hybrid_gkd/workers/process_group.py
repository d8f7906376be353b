"""The process group of a pool of workers: how they find each other, and whether they do.

torch is imported when a worker joins, after the environment that it reads has been set.
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
"""What gloo, NCCL and vLLM listen on where all workers are on one machine, unless the user has set it."""


class GroupMember:
    """Process `rank` of `size` in the process group of its pool, on "cuda" or "cpu"."""

    def __init__(self, config: Config, *, role: Role, rank: int, size: int, device_type: str):
        self.config, self.role, self.rank, self.size = config, role, rank, size
        self.device_type = device_type

    def address(self) -> tuple[str, int]:
        """Host and a free port of this process, for a rendezvous: of the interface that the others reach."""
        host = "127.0.0.1"
        if not self._on_one_host():
            import ray

            host = ray.util.get_node_ip_address()  # by which Ray's other nodes reach this one
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def _on_one_host(self) -> bool:
        return self.config.ray_init.address is None or (self.config.trainer.nnodes == 1 and self.role == "worker")

    def join(self, address: tuple[str, int], timeout: Timeout) -> None:
        """Meet the others at `address`. Raises WorkerError if they do not come within `timeout`."""
        # What torch, gloo, NCCL and vLLM read when they are imported.
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.size), LOCAL_RANK="0")
        if self.device_type == "cpu":
            os.environ["OMP_NUM_THREADS"] = str(threads_per_process(self.config))
        if self._on_one_host():  # nobody else has to reach them, and the host's own name may not resolve on a laptop
            for name, value in LOOPBACK.items():
                os.environ.setdefault(name, value)
        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        import torch
        import torch.distributed as dist

        from hybrid_gkd.rollout.rendezvous import open_store
        from hybrid_gkd.rollout.weight_sync import ABORT_SECONDS

        if self.device_type == "cuda":
            torch.cuda.set_device(0)  # Ray shows each worker its own GPU only
        try:
            store = open_store(address, rank=self.rank, size=self.size, timeout=timeout.seconds)
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"{self.role} {self.rank}: the {self.size} {self.role}s did not meet at {address[0]}:{address[1]} "
                f"within {timeout}: {str(error).splitlines()[0]}"
            ) from error
        # Collectives are given longer than the caller waits for them and than a weight sync between pools may take:
        # a worker that waits for a late rank must still be there when the student is saved.
        longest = max(timeout.seconds, self.config.actor_rollout_ref.nccl_timeout) + ABORT_SECONDS
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device_type == "cuda" else "gloo",
            store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=longest),
        )

    def all_reduce(self, address: tuple[str, int], timeout: Timeout) -> None:
        """One number summed over all workers, on their devices; joins the group first where that was not done.

        Raises:
            WorkerError: not within `timeout`, or with a wrong sum.
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
                raise WorkerError(f"{self.role} {self.rank} waited {timeout} for the others in an all-reduce")
            time.sleep(0.01)
        work.wait()
        expected = self.size * (self.size + 1) / 2
        if number.item() != expected:
            raise WorkerError(f"{self.role} {self.rank}: an all-reduce gave {number.item()}, not {expected}")

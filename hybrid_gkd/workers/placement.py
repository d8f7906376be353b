"""The role of a worker, and where it runs."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid_gkd.config import Config

Role = Literal["worker", "actor worker", "rollout worker"]
"""Trains and generates in turns; only trains; only generates."""
CGROUP = "sys/fs/cgroup"
CGROUP_FILES = (
    (f"{CGROUP}/memory.max", f"{CGROUP}/memory.current", f"{CGROUP}/memory.stat", "inactive_file"),
    (f"{CGROUP}/memory/memory.limit_in_bytes", f"{CGROUP}/memory/memory.usage_in_bytes",
     f"{CGROUP}/memory/memory.stat", "total_inactive_file"),
)  # fmt: skip
"""Of both versions: the limit of a container's memory, what is in use, and the field with what of it can be dropped."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Host, device and free memory of a worker."""

    role: Role = "worker"
    rank: int = 0
    """In its pool."""
    host: str
    pid: int
    visible_devices: str
    """CUDA_VISIBLE_DEVICES as Ray set it."""
    device: str = "cpu"
    """Name of the GPU."""
    gpu: str | None = None
    """Host and unique id of the GPU, None on the CPU."""
    free_bytes: int = 0
    total_bytes: int = 0
    """Memory of the GPU."""
    free_host_bytes: int = 0
    """Of the host, container limits included, as `free_host_bytes` finds it."""

    @classmethod
    def here(cls, role: Role, rank: int, device_type: str) -> Placement:
        """Of a worker in this process, on "cuda" or "cpu"."""
        host, gpu = socket.gethostname(), dict[str, Any]()
        if device_type == "cuda":
            import torch

            properties, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
            gpu = {
                "device": properties.name, "gpu": f"{host} {properties.uuid}", "free_bytes": free, "total_bytes": total,
            }
        return cls(
            role=role, rank=rank, host=host, pid=os.getpid(),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", "not set"), free_host_bytes=free_host_bytes(),
            **gpu,
        )

    @property
    def worker(self) -> str:
        """Role and rank."""
        return f"{self.role} {self.rank}"

    @property
    def name(self) -> str:
        """Host and device."""
        return f"{self.host} cpu" if self.gpu is None else f"{self.host} GPU {self.visible_devices}"

    def __str__(self) -> str:
        if self.gpu is None:
            return f"{self.host}, cpu"
        memory = f"{self.free_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.1f} GiB free"
        return f"{self.host}, CUDA_VISIBLE_DEVICES={self.visible_devices}, {self.device}, {memory}"


def free_host_bytes(root: Path = Path("/")) -> int:
    """Memory that the processes of this machine, or of this container if that has less, can still take."""
    memory = _fields(root / "proc/meminfo")
    free = [memory.get("MemAvailable:", memory["MemFree:"]) * 1024]
    for limit, used, stat, cache in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError, KeyError):  # there is the other version, or no limit ("max")
            values = [int((root / name).read_text(encoding="utf-8")) for name in (limit, used)]
            free.append(values[0] - values[1] + _fields(root / stat)[cache])
    return max(0, min(free))


def _fields(file: Path) -> dict[str, int]:
    rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {row[0]: int(row[1]) for row in rows}


def threads_per_process(config: Config) -> int:
    """Of each worker and of each copy of a local teacher's model, which share the cores of a machine without a GPU.

    Threads that spin for each other are slower than few: a process with as many as there are cores nearly stands still
    while another one computes.
    """
    teacher = config.actor_rollout_ref.teacher
    local_teachers = (teacher.num_replicas or 1) if config.distillation.enabled and teacher.is_local else 0
    return max(1, len(os.sched_getaffinity(0)) // (config.workers_per_node + local_teachers))

"""Role of a worker, and its host, device and free memory."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid_gkd.config import Config, run_teachers

Role = Literal["worker", "actor worker", "rollout worker"]
"""Role of a worker: it trains and generates alternately, only trains, or only generates."""
CGROUP = "sys/fs/cgroup"
CGROUP_FILES = (
    (f"{CGROUP}/memory.max", f"{CGROUP}/memory.current", f"{CGROUP}/memory.stat", "inactive_file"),
    (f"{CGROUP}/memory/memory.limit_in_bytes", f"{CGROUP}/memory/memory.usage_in_bytes",
     f"{CGROUP}/memory/memory.stat", "total_inactive_file"),
)  # fmt: skip
"""Files with a container's memory limit, usage and statistics, and the statistics field of memory that can be dropped;
for cgroup v2 and v1."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Host, device and free memory of a worker."""

    role: Role = "worker"
    rank: int = 0
    """Rank in the pool."""
    host: str
    pid: int
    visible_devices: str
    """CUDA_VISIBLE_DEVICES as set by Ray."""
    device: str = "cpu"
    """Name of the GPU."""
    gpu: str | None = None
    """Host and unique id of the GPU; None on the CPU."""
    free_bytes: int = 0
    total_bytes: int = 0
    """Total memory of the GPU."""
    free_host_bytes: int = 0
    """Free memory of the host, container limits included, see `free_host_bytes`."""

    @classmethod
    def here(cls, role: Role, rank: int, device_type: str) -> Placement:
        """Return the placement of a worker in this process, on "cuda" or "cpu"."""
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
        """Return role and rank."""
        return f"{self.role} {self.rank}"

    @property
    def name(self) -> str:
        """Return host and device."""
        return f"{self.host} cpu" if self.gpu is None else f"{self.host} GPU {self.visible_devices}"

    def __str__(self) -> str:
        if self.gpu is None:
            return f"{self.host}, cpu"
        memory = f"{self.free_bytes / 2**30:.1f} of {self.total_bytes / 2**30:.1f} GiB free"
        return f"{self.host}, CUDA_VISIBLE_DEVICES={self.visible_devices}, {self.device}, {memory}"


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the free memory of this machine, or of this container if that is less."""
    memory = _fields(root / "proc/meminfo")
    free = [memory.get("MemAvailable:", memory["MemFree:"]) * 1024]
    for limit, used, stat, cache in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError, KeyError):  # another cgroup version, or no limit ("max")
            values = [int((root / name).read_text(encoding="utf-8")) for name in (limit, used)]
            free.append(values[0] - values[1] + _fields(root / stat)[cache])
    return max(0, min(free))


def _fields(file: Path) -> dict[str, int]:
    rows = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {row[0]: int(row[1]) for row in rows}


def threads_per_process(config: Config) -> int:
    """Return the threads of each worker and of each replica of a local teacher on a machine without a GPU.

    They share the cores evenly, because spinning threads of a process with as many threads as cores nearly stop while
    another process computes.
    """
    sections = [teacher.section for teacher in run_teachers(config)]
    local_teachers = sum(section.num_replicas or 1 for section in sections if section.is_local)
    return max(1, len(os.sched_getaffinity(0)) // (config.workers_per_node + local_teachers))

"""The device of one worker: how much of its memory is in use, and the shares of its engine and its models."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from hybrid_gkd.offload.pinned import FrozenTensors, OffloadedTensors
from hybrid_gkd.offload.residency import FROZEN, MARGIN_BYTES, MODEL_OWNERS, MemoryOwner, Residency

if TYPE_CHECKING:
    from hybrid_gkd.rollout.engine import RolloutEngine
    from hybrid_gkd.student.sharded_model import ShardedModel


class MemoryMeter:
    """Measures one device; all zeros on the CPU. `start` and `take_peak` share torch's counter of the peak."""

    def __init__(self, device_type: str):
        self._on_gpu = device_type == "cuda"
        self._peak = self._started_with = 0

    def used(self) -> int:
        """Bytes in use on the device, over all processes."""
        free, total = torch.cuda.mem_get_info() if self._on_gpu else (0, 0)
        return total - free

    def reserved(self) -> int:
        """Bytes that torch's allocator holds in this process, an engine's included, asleep or not."""
        return torch.cuda.memory_reserved() if self._on_gpu else 0

    def start(self) -> None:
        """`taken` counts from here on."""
        if self._on_gpu:
            self._keep_peak()
            self._started_with = torch.cuda.memory_allocated()

    def taken(self) -> int:
        """Peak bytes of tensors since `start`, beyond the bytes at that moment."""
        return torch.cuda.max_memory_allocated() - self._started_with if self._on_gpu else 0

    def present(self) -> int:
        """Bytes of tensors beyond those at the last `start`."""
        return torch.cuda.memory_allocated() - self._started_with if self._on_gpu else 0

    def take_peak(self) -> int:
        """Peak bytes of tensors since the last call."""
        if self._on_gpu:
            self._keep_peak()
        peak, self._peak = self._peak, 0
        return peak

    def trim(self) -> None:
        """Give torch's cached memory back to the device."""
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _keep_peak(self) -> None:
        self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


class EngineOwner(MemoryOwner):
    """The rollout engine's weights, or its KV cache. vLLM frees both in one call and wakes them one after the other.

    Args:
        wake: takes the memory.
        release: frees it. Releasing the KV cache frees the weights too, so that they need no release of their own.
        size: its bytes, as the engine knows them; 0: it does not. Then they are measured at every wake, with what other
            processes take or free on the device meanwhile.
    """

    def __init__(
        self, wake: Callable[[], None], release: Callable[[], None] = lambda: None, size: Callable[[], int] = lambda: 0
    ):
        self._wake, self._release, self._size = wake, release, size
        self._num_bytes = size()

    def num_bytes(self) -> int:
        return self._num_bytes

    def acquire(self) -> None:
        """Wake. Memory in torch's cache is given back first if it is needed: vLLM does not allocate from it."""
        if not self._num_bytes or self._num_bytes + MARGIN_BYTES > torch.cuda.mem_get_info()[0]:
            torch.cuda.empty_cache()  # waits for all copies in flight
        before = torch.cuda.mem_get_info()[0]
        self._wake()
        self._num_bytes = self._size() or max(0, before - torch.cuda.mem_get_info()[0])

    def release(self) -> None:
        self._release()


def free_device_bytes() -> int:
    """Bytes that torch or vLLM can still allocate: free on the device, or cached by torch's allocator."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached


class SharedDevice:
    """The memory of a worker's engine and models on "cuda" or "cpu".

    `build_engine` comes first, since an engine measures how much memory is free, then every model with `add_model`, the
    actor as the last, then `manage`.
    """

    def __init__(self, device_type: str):
        self.on_gpu = device_type == "cuda"
        self.meter = MemoryMeter(device_type)
        self.offloaded: dict[str, OffloadedTensors] = {}
        self._models: list[str] = []
        self._movable, self._away = set[str](), set[str]()
        self._generated = self._hybrid = self._engine_sleeps = False
        self._engine_bytes = 0
        """Of the engine as it was built; asleep, if it can sleep."""
        self._actor_rest_bytes = 0
        """In torch's allocator after a publish, beyond the engine's own."""
        self._engine_pool_bytes = self._reserved_with_engine = 0

    def build_engine(self, make: Callable[[], RolloutEngine]) -> RolloutEngine:
        """Make the engine, put it to sleep if it can, and note the memory that it takes.

        Asleep it is the CUDA context above all, which only the free memory of the device shows: another process that
        takes memory meanwhile is counted too.
        """
        used_before = self.meter.used()
        engine = make()
        self.meter.trim()
        self._reserved_with_engine = self.meter.reserved()
        self._engine_sleeps = engine.can_sleep
        if engine.can_sleep:
            # torch counts the pool of a sleeping engine as allocated, though nothing is behind the addresses.
            self._engine_pool_bytes = torch.cuda.memory_allocated()
            engine.sleep()
        self._engine_bytes = self.meter.used() - used_before
        return engine

    def add_model(self, name: str, model: ShardedModel) -> None:
        """Make memory owners of a model of `MODEL_OWNERS`, movable as its `fsdp` says; all but the actor leave now."""
        params, *states = MODEL_OWNERS[name]
        self._models.append(name)
        self.offloaded[params] = OffloadedTensors(model.parameters)
        self.offloaded |= {state: OffloadedTensors(model.optimizer_tensors) for state in states}
        if model.frozen_parameters():
            self.offloaded[FROZEN] = FrozenTensors(model.frozen_parameters)
        frozen = {FROZEN} & self.offloaded.keys()
        self._movable |= {params} | frozen if self.on_gpu and model.fsdp.param_offload else set()
        self._movable |= set(states) if self.on_gpu and model.fsdp.optimizer_offload else set()
        if name != "actor" and params in self._movable:  # so that the next model has room
            self.offloaded[params].release()
            self._away.add(params)

    def manage(self, engine: RolloutEngine | None) -> Residency:
        """The residency of this worker's memory owners: of the models that were added, an engine, or both.

        The actor's parameters stay where they make room for nobody. The engine is asleep, if it can sleep.
        """
        owners: dict[str, MemoryOwner] = dict(self.offloaded)
        movable, asleep = set(self._movable), set(self._away)
        self._hybrid = bool(self._models) and engine is not None
        if self._models == ["actor"] and not self._hybrid:
            movable -= {"actor_params", FROZEN}
        if self.on_gpu and self._hybrid and engine is not None:
            def sizes() -> tuple[int, int]:
                if engine.can_sleep:
                    return engine.sleeping_bytes()
                return engine.weight_bytes, max(0, self._engine_bytes - engine.weight_bytes)

            # The methods are looked up when they are needed: an engine that never sleeps may lack them.
            owners["engine_weights"] = EngineOwner(lambda: engine.wake_weights(), size=lambda: sizes()[0])
            owners["kv_cache"] = EngineOwner(
                lambda: engine.wake_kv_cache(), lambda: engine.sleep(), size=lambda: sizes()[1]
            )
            asleep |= {"kv_cache", "engine_weights"} if engine.can_sleep else set()
        return Residency(
            owners, movable=movable | asleep, resident=set(owners) - asleep,
            free_bytes=free_device_bytes if self.on_gpu else None,
        )

    @contextlib.contextmanager
    def generation(self) -> Iterator[None]:
        """Around a generation: memory that the first one takes and keeps is the engine's."""
        before = self.meter.reserved()
        yield
        if not self._generated:
            self._generated = True
            self.meter.trim()
            self._reserved_with_engine += self.meter.reserved() - before

    def trim_after_publish(self) -> float:
        """Give cached memory back and note how much of the actor's stays; seconds."""
        started = time.perf_counter()
        self.meter.trim()
        self._actor_rest_bytes = self.meter.reserved() - self._reserved_with_engine
        return time.perf_counter() - started

    def metrics(self, residency: Residency) -> dict[str, float]:
        """Peak memory since the last call and bytes by phase and owner, GiB, under their metric names."""
        sizes = residency.bytes_by_phase()
        metrics = {f"memory/{phase}/{owner}_gb": size / 2**30 for (phase, owner), size in sizes.items()}
        if self.on_gpu:
            metrics["perf/max_memory_allocated_gb"] = (self.meter.take_peak() - self._engine_pool_bytes) / 2**30
            if self._hybrid and self._engine_sleeps:
                metrics["memory/update/sleeping_engine_gb"] = self._engine_bytes / 2**30
            if self._hybrid:
                metrics["memory/rollout/actor_rest_gb"] = self._actor_rest_bytes / 2**30
            for name, tensors in self.offloaded.items():
                for direction, rate in tensors.gigabytes_per_second.items():
                    metrics[f"perf/copy/{name}_{direction}"] = rate
        metrics["perf/max_host_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return metrics

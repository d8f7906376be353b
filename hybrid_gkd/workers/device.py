"""Memory of one worker's device: measurements, and the memory owners of its engine and its models."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from hybrid_gkd.offload.pinned import OffloadedTensors
from hybrid_gkd.offload.residency import EMA, FROZEN, MARGIN_BYTES, MODEL_OWNERS, MemoryOwner, Residency

if TYPE_CHECKING:
    from hybrid_gkd.rollout.engine import RolloutEngine
    from hybrid_gkd.student.sharded_model import ShardedModel


class MemoryMeter:
    """Measures the memory of one device; all zeros on the CPU. `start` and `take_peak` share torch's peak counter."""

    def __init__(self, device_type: str):
        self._on_gpu = device_type == "cuda"
        self._peak = self._started_with = 0

    def used(self) -> int:
        """Return the bytes in use on the device, over all processes."""
        free, total = torch.cuda.mem_get_info() if self._on_gpu else (0, 0)
        return total - free

    def reserved(self) -> int:
        """Return the bytes of torch's allocator in this process, including those of an engine, sleeping or not."""
        return torch.cuda.memory_reserved() if self._on_gpu else 0

    def start(self) -> None:
        """Start a measurement for `taken` and `present`."""
        if self._on_gpu:
            self._keep_peak()
            self._started_with = torch.cuda.memory_allocated()

    def taken(self) -> int:
        """Return the peak bytes of tensors since `start`, beyond the bytes at that moment."""
        return torch.cuda.max_memory_allocated() - self._started_with if self._on_gpu else 0

    def present(self) -> int:
        """Return the bytes of tensors beyond those at the last `start`."""
        return torch.cuda.memory_allocated() - self._started_with if self._on_gpu else 0

    def take_peak(self) -> int:
        """Return the peak bytes of tensors since the last call."""
        if self._on_gpu:
            self._keep_peak()
        peak, self._peak = self._peak, 0
        return peak

    def trim(self) -> None:
        """Return torch's cached memory to the device."""
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _keep_peak(self) -> None:
        self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


class EngineOwner(MemoryOwner):
    """The rollout engine's weights, or its KV cache. vLLM frees both in one call and restores them separately.

    Args:
        wake: allocates the memory.
        release: frees it. Releasing the KV cache also frees the weights, which need no release of their own.
        size: returns its bytes; 0: unknown. Unknown sizes are measured at every wake, including what other processes
            allocate or free on the device at the same time.
    """

    def __init__(
        self, wake: Callable[[], None], release: Callable[[], None] = lambda: None, size: Callable[[], int] = lambda: 0
    ):
        self._wake, self._release, self._size = wake, release, size
        self._num_bytes = size()

    def num_bytes(self) -> int:
        return self._num_bytes

    def acquire(self) -> None:
        """Wake. If necessary, torch's cached memory is returned first, since vLLM does not allocate from it."""
        if not self._num_bytes or self._num_bytes + MARGIN_BYTES > torch.cuda.mem_get_info()[0]:
            torch.cuda.empty_cache()  # waits for all copies in flight
        before = torch.cuda.mem_get_info()[0]
        self._wake()
        self._num_bytes = self._size() or max(0, before - torch.cuda.mem_get_info()[0])

    def release(self) -> None:
        self._release()


def free_device_bytes() -> int:
    """Return the bytes that torch or vLLM can still allocate: free on the device, or cached by torch's allocator."""
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached


class SharedDevice:
    """Memory of a worker's engine and models on "cuda" or "cpu".

    Call `build_engine` first, since an engine measures the free memory, then `add_model` for every model, the actor
    last, then `manage`.
    """

    def __init__(self, device_type: str):
        self.on_gpu = device_type == "cuda"
        self.meter = MemoryMeter(device_type)
        self.offloaded: dict[str, OffloadedTensors] = {}
        self._models: list[str] = []
        self._movable, self._away = set[str](), set[str]()
        self._generated = self._hybrid = self._engine_sleeps = False
        self._engine_bytes = 0
        """Bytes of the engine after it was built; asleep, if it can sleep."""
        self._actor_rest_bytes = 0
        """Bytes in torch's allocator after a publish, beyond the engine's own."""
        self._engine_pool_bytes = self._reserved_with_engine = 0

    def build_engine(self, make: Callable[[], RolloutEngine]) -> RolloutEngine:
        """Build the engine, put it to sleep if it can, and record its memory.

        A sleeping engine mainly holds its CUDA context, which shows only in the free memory of the device: allocations
        of other processes at the same time are counted too.
        """
        used_before = self.meter.used()
        engine = make()
        self.meter.trim()
        self._reserved_with_engine = self.meter.reserved()
        self._engine_sleeps = engine.can_sleep
        if engine.can_sleep:
            # torch counts the pool of a sleeping engine as allocated, although no memory is mapped there.
            self._engine_pool_bytes = torch.cuda.memory_allocated()
            engine.sleep()
        self._engine_bytes = self.meter.used() - used_before
        return engine

    def add_model(self, name: str, model: ShardedModel) -> None:
        """Create the owners of a model of `MODEL_OWNERS`, movable by its `fsdp`; release all but the actor's now."""
        params, *states = MODEL_OWNERS[name]
        self._models.append(name)
        self.offloaded[params] = OffloadedTensors(model.parameters)
        self.offloaded |= {state: OffloadedTensors(model.optimizer_tensors) for state in states}
        if model.frozen_parameters():
            self.offloaded[FROZEN] = OffloadedTensors(model.frozen_parameters)
        if (average := model.average) is not None:
            self.offloaded[EMA] = OffloadedTensors(lambda: average.tensors)
            if self.on_gpu:
                self._movable.add(EMA)
                self.offloaded[EMA].release()
                self._away.add(EMA)
        frozen = {FROZEN} & self.offloaded.keys()
        self._movable |= {params} | frozen if self.on_gpu and model.fsdp.param_offload else set()
        self._movable |= set(states) if self.on_gpu and model.fsdp.optimizer_offload else set()
        if name != "actor" and params in self._movable:  # to make room for the next model
            self.offloaded[params].release()
            self._away.add(params)

    def manage(self, engine: RolloutEngine | None) -> Residency:
        """Return the residency of this worker's memory owners: those of added models, of an engine, or both.

        The actor's parameters stay on the device if there is no other owner to make room for. The engine is asleep, if
        it can sleep.
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

            # The methods are looked up on use: an engine that never sleeps may lack them.
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
        """Wrap a generation: memory that the first one keeps is counted as the engine's."""
        before = self.meter.reserved()
        yield
        if not self._generated:
            self._generated = True
            self.meter.trim()
            self._reserved_with_engine += self.meter.reserved() - before

    def trim_after_publish(self) -> float:
        """Return cached memory to the device and record how much of the actor's remains; return the seconds taken."""
        started = time.perf_counter()
        self.meter.trim()
        self._actor_rest_bytes = self.meter.reserved() - self._reserved_with_engine
        return time.perf_counter() - started

    def metrics(self, residency: Residency) -> dict[str, float]:
        """Return peak memory since the last call and bytes by phase and owner, GiB, by metric name."""
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

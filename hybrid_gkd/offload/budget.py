"""Predict the memory of each phase on a GPU from the residency table and the needs of a run (needs.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.models.spec import ModelSpec
from hybrid_gkd.offload.residency import EMA, FROZEN, RESIDENCY

GIB = 2**30
SLEEPING_ENGINE_BYTES = 2 * GIB
"""Memory of a sleeping vLLM: CUDA context, graphs, NCCL buffers (measured: 0.8 to 1.6 GiB)."""
BESIDE_ENGINE_BYTES = 6 * GIB
"""Memory left free by the rollout engine: CUDA context, NCCL buffers, kernels, buckets of weights in transfer."""
ENGINE_WORKSPACE_BYTES = 8 * GIB
"""Memory of the rollout engine beyond weights and KV cache: activations of its largest step, logits, CUDA graphs."""
KV_BLOCK_TOKENS = 128
"""Maximum block size; the KV cache of a sequence is a whole number of blocks."""
TEACHER_WORKSPACE_BYTES = 6 * GIB
"""Activations of one engine step, logits of 1024 positions and their top-k, CUDA context."""
MAX_FRACTION = 0.92
"""vLLM's default fraction of a GPU that it does not share."""
EXCLUSIVE_FRACTION = 0.9
"""Fraction of a GPU for a teacher that does not share it."""
SLEEPING_FRACTION = 0.05
"""Fraction of a GPU that is left to each teacher that sleeps there while it is another one's turn."""
ENGINE_OWNERS = ("engine_weights", "kv_cache")
UPDATES = {"actor": ("update", "optimizer_step"), "critic": ("critic_update", "critic_optimizer_step")}
"""Model -> its phases with gradients, the one with activations first."""
OTHER_PASSES = ("reference", "reward_model", "ema_teacher")
"""Phases with forward passes only."""


@dataclass(frozen=True)
class TeacherPlacement:
    """Placement of a teacher that the run starts."""

    replicas: int = 1
    gpus: tuple[int, ...] = ()
    """Its GPUs: those after the workers' GPUs, or the workers' own if there are too few; empty on the CPU."""
    shares_gpu: bool = False
    """Whether workers use these GPUs too."""
    fraction: float | None = EXCLUSIVE_FRACTION
    """Configured fraction of a GPU's memory; None computes it from the needs of the model."""
    takes_turns: bool = False
    """Whether its model is on the host while another teacher uses these GPUs."""

    def __str__(self) -> str:
        shared = ", shared with workers" if self.shares_gpu else ""
        shared += ", in turns with other teachers" if self.takes_turns else ""
        return f"GPU {', '.join(map(str, self.gpus))}{shared}" if self.gpus else f"the CPU{shared}"


@dataclass(frozen=True)
class EngineMemory:
    """Memory that a rollout engine needs on each device, and that it leaves to others."""

    weights: float
    """Bytes."""
    token: float
    """Bytes of one token in the KV cache."""
    longest: int
    """Tokens of the longest sequence."""
    max_num_seqs: int
    reserved: float = 0.0
    """Bytes of models on the device during generation."""
    usable_fraction: float = 1.0
    """Fraction of the remaining memory for the engine; the rest is for activations."""

    @property
    def useful_cache(self) -> float:
        """Return the bytes of KV cache that `max_num_seqs` full sequences use."""
        return self.max_num_seqs * (self.longest + KV_BLOCK_TOKENS) * self.token

    def fraction(self, *, total_bytes: int, free_bytes: int) -> float:
        """Return the value of `rollout.gpu_memory_utilization` if it is not configured. Raises ConfigError if it is too
        small.

        It is limited to what `max_num_seqs` full sequences can use, since vLLM maps its KV cache again in every step, 3
        ms per GiB.
        """
        room = self.usable_fraction * (free_bytes - BESIDE_ENGINE_BYTES - self.reserved)
        useful = math.ceil(100 * (self.weights + self.useful_cache + ENGINE_WORKSPACE_BYTES) / total_bytes) / 100
        fraction = min(MAX_FRACTION, math.floor(100 * room / total_bytes) / 100, useful)
        self.check(fraction, total_bytes)
        return fraction

    def check(self, fraction: float, total_bytes: int) -> None:
        """Raise ConfigError if a fraction of a GPU is too small for the weights and one sequence."""
        cache = self.token * self.longest
        if fraction * total_bytes < self.weights + cache:
            raise ConfigError(
                "actor_rollout_ref.rollout.gpu_memory_utilization",
                f"{fraction:g} of a GPU of {total_bytes / GIB:.1f} GiB is "
                f"{max(0.0, fraction) * total_bytes / GIB:.1f} GiB, but the engine's weights take "
                f"{self.weights / GIB:.1f} GiB and the KV cache of one sequence {cache / GIB:.2f} GiB",
                show_value=False,
            )


@dataclass(frozen=True)
class Memory:
    """Memory of models, engine and teacher of a run, on GPUs of any size or on the CPU, where nothing moves."""

    device: str
    specs: dict[str, ModelSpec]
    """Specs by the model's purpose in the run."""
    owners: dict[str, float]
    """Memory owner -> bytes of the models on each device."""
    moves: dict[str, bool]
    """Memory owner -> whether it may be moved off a shared device."""
    passes: dict[str, dict[str, float]]
    """Phase -> name -> bytes that its passes need beyond the owners."""
    checkpoint: tuple[float, ...]
    """Bytes of each training worker's part of a checkpoint, by rank."""
    hybrid: bool
    """Whether engine and models alternate on the same devices."""
    sleeps: bool
    """Whether the engine releases its memory while the models use the device."""
    engine: EngineMemory
    configured_fraction: float | None
    """Configured fraction of a GPU; None if it is computed."""
    teachers: dict[str, TeacherPlacement]
    """Label -> placement of each teacher that the run starts."""
    teacher_bytes: dict[str, tuple[float, float]]
    """Label -> bytes on each GPU shared with workers: a teacher's weights, and its KV cache or largest forward pass."""
    loads_in_parallel: bool
    """Whether engine and teacher load at the same time if a GPU has room for `fixed_cache`."""

    def phases(self, total_bytes: int | None) -> dict[str, dict[str, float]]:
        """Return phase -> owner -> bytes on each device.

        Activations are a lower bound for the largest possible micro-batch, of a mini-batch or of a forward pass over
        the whole batch (values, log-probabilities, rewards). Without `total_bytes`, the memory of one GPU, the KV cache
        and the teacher are left out, since they are fractions of it.
        """
        on_gpu, phases = self.device == "cuda", dict[str, dict[str, float]]()
        owners = {"engine_weights": self.engine.weights, **self.owners}
        moves = self.moves | dict.fromkeys(ENGINE_OWNERS, self.sleeps)
        if total_bytes is not None:
            sized_by_vllm = max(0.0, self.engine_fraction(total_bytes) * total_bytes - self.engine.weights)
            owners["kv_cache"] = self.fixed_cache(total_bytes) or sized_by_vllm
        for phase, wanted in RESIDENCY.items():
            optional = {"kv_cache", FROZEN} | (set() if phase == "ema_teacher" else {EMA})
            if not owners.keys() >= wanted - optional:
                continue
            present = {t: b for t, b in owners.items() if t in wanted or not on_gpu or not moves[t]}
            if not self.hybrid:  # separate GPUs for generation
                present = {t: b for t, b in present.items() if (t in ENGINE_OWNERS) == (phase == "rollout")}
            present |= self.passes.get(phase, {})
            if self.hybrid and on_gpu and "engine_weights" not in present:
                present["sleeping engine"] = SLEEPING_ENGINE_BYTES
            if total_bytes is not None:
                present |= {name: share * total_bytes for name, share in self._shared_fractions(total_bytes).items()}
            phases[phase] = present
        return phases

    def host(self, *, saves: bool) -> tuple[dict[str, float], ...]:
        """Return owner -> bytes on the host of each training worker, by rank: movable owners, or on the CPU the largest
        phase.

        With `saves`, `checkpoint` is a copy of the worker's part of one that is written in the background.
        """
        found = {name: size for name, size in self.owners.items() if self.moves[name]}
        if self.device == "cpu":
            found = {"largest phase": max(sum(phase.values()) for phase in self.phases(None).values())}
        return tuple(found | ({"checkpoint": part} if saves else {}) for part in self.checkpoint)

    @property
    def shares_gpu(self) -> bool:
        """Return whether a local teacher uses a GPU of a worker."""
        return any(place.shares_gpu for place in self.teachers.values())

    def teacher_fraction(self, total_bytes: int | None, label: str = "teacher") -> float:
        """Return a local teacher's fraction of a GPU; `total_bytes` is needed if workers share it."""
        given = self.teachers[label].fraction
        if given is not None:
            return given
        assert total_bytes is not None
        return math.ceil(100 * (sum(self.teacher_bytes[label]) + TEACHER_WORKSPACE_BYTES) / total_bytes) / 100

    def _shared_fractions(self, total_bytes: int) -> dict[str, float]:
        """Return label -> fraction of the teachers on a worker's GPU; of those with turns all but the largest sleep."""
        shared = [label for label, place in self.teachers.items() if place.shares_gpu]
        found = {label: self.teacher_fraction(total_bytes, label) for label in shared}
        in_turn = sorted((label for label in shared if self.teachers[label].takes_turns), key=found.__getitem__)
        return found | dict.fromkeys(in_turn[:-1], SLEEPING_ENGINE_BYTES / total_bytes)

    def engine_fraction(self, total_bytes: int) -> float:
        """Return the engine's configured fraction, or that computed for an empty GPU, minus the teacher on it."""
        if self.configured_fraction is not None:
            return self.configured_fraction
        taken = sum(self._shared_fractions(total_bytes).values())
        return self.engine_memory.fraction(total_bytes=total_bytes, free_bytes=int((1 - taken) * total_bytes))

    def fixed_cache(self, total_bytes: int) -> float | None:
        """Return the bytes of the engine's KV cache if it is fixed, so that a teacher can load beside it; None: vLLM
        sizes it by the free memory."""
        if not self.loads_in_parallel:
            return None
        engine, room = self.engine, self.engine_fraction(total_bytes) * total_bytes
        return engine.useful_cache if room >= engine.weights + engine.useful_cache + ENGINE_WORKSPACE_BYTES else None

    @property
    def engine_memory(self) -> EngineMemory:
        """Return the engine's needs with the memory that models keep in the rollout phase (none in a separate pool).

        An engine that never sleeps (`free_cache_engine=false`) takes half of what the phases of the models leave.
        """
        moving = {name: size for name, size in self.owners.items() if self.moves[name]}
        staying = sum(self.owners.values()) - sum(moving.values()) if self.hybrid else 0.0
        if self.sleeps or not self.hybrid:
            return replace(self.engine, reserved=staying)
        most = [sum(moving.get(name, 0.0) for name in RESIDENCY[phase]) for phase in OTHER_PASSES]
        for update, step in UPDATES.values():
            beside = [self.passes.get(update, {}).get(name, 0.0) for name in ("gradients", "gathered_params")]
            most.append(sum(moving.get(name, 0.0) for name in RESIDENCY[step]) + sum(beside))
        return replace(self.engine, reserved=staying + max(most), usable_fraction=0.5)

    def check(self, total_bytes: int, role: str = "worker") -> None:
        """Check that all phases fit into a GPU with a worker of this role. Raises ConfigError with the sizes."""
        if self.configured_fraction is not None and has_phase(role, "rollout"):
            self.engine.check(self.configured_fraction, total_bytes)
        for phase, owners in self.phases(total_bytes).items():
            needed = sum(owners.values())
            if needed > total_bytes and has_phase(role, phase):
                parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in owners.items())
                raise ConfigError(
                    "actor_rollout_ref.actor.fsdp_config.param_offload, .optimizer_offload, .reshard_after_forward, "
                    "actor_rollout_ref.rollout.free_cache_engine, .gpu_memory_utilization",
                    f"in the phase {phase} a GPU would have to hold {needed / GIB:.1f} GiB ({parts}), but it has "
                    f"{total_bytes / GIB:.1f}; enable an offload or reshard_after_forward (for a critic in "
                    "critic.fsdp_config), lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, enable gradient "
                    "checkpointing or use more GPUs",
                    show_value=False,
                )


def has_phase(role: str, phase: str) -> bool:
    return role == "worker" or (role == "rollout worker") == (phase == "rollout")

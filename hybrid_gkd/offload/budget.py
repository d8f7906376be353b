"""The memory of each phase on a GPU, predicted from the residency table and from what a run needs (needs.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.models.spec import ModelSpec
from hybrid_gkd.offload.residency import FROZEN, RESIDENCY

GIB = 2**30
SLEEPING_ENGINE_BYTES = 2 * GIB
"""Of vLLM while it sleeps: CUDA context, graphs, NCCL buffers (measured: 0.8 to 1.6 GiB)."""
BESIDE_ENGINE_BYTES = 6 * GIB
"""Left free beside the rollout engine: CUDA context, NCCL buffers, kernels, buckets of weights on their way."""
ENGINE_WORKSPACE_BYTES = 8 * GIB
"""Of the rollout engine beside weights and KV cache: activations of its largest step, logits, CUDA graphs."""
KV_BLOCK_TOKENS = 128
"""At most; the KV cache of a sequence is a whole number of blocks."""
TEACHER_WORKSPACE_BYTES = 6 * GIB
"""Activations of one engine step, logits of 1024 positions and their top-k, CUDA context."""
LARGEST_SHARE = 0.92
"""vLLM's own default for a card of its own."""
ALONE = 0.9
"""Share of a teacher that has its GPUs for itself."""
ENGINE_OWNERS = ("engine_weights", "kv_cache")
UPDATES = {"actor": ("update", "optimizer_step"), "critic": ("critic_update", "critic_optimizer_step")}
"""Model -> its phases with gradients, the one with activations first."""


@dataclass(frozen=True)
class LocalTeacher:
    """Where the teacher that a run starts computes."""

    replicas: int = 1
    gpus: tuple[int, ...] = ()
    """As the run counts them: after the workers', or, if there are too few, theirs. None on the CPU."""
    shares_gpu: bool = False
    """Whether workers use them too."""
    share: float | None = ALONE
    """Of a GPU's memory, as configured; None where it is computed from what the model needs."""

    def __str__(self) -> str:
        shared = ", shared with workers" if self.shares_gpu else ""
        return f"GPU {', '.join(map(str, self.gpus))}{shared}" if self.gpus else "the CPU"


@dataclass(frozen=True)
class EngineRoom:
    """What a rollout engine needs of each device, and what it leaves to others there."""

    weights: float
    """Bytes."""
    token: float
    """Bytes of one token in its KV cache."""
    longest: int
    """Tokens of the longest sequence that it takes."""
    max_num_seqs: int
    reserved: float = 0.0
    """Bytes of the models' that are there while it generates."""
    part: float = 1.0
    """Of what those leave; the rest is for activations."""

    @property
    def useful_cache(self) -> float:
        """Bytes of KV cache that `max_num_seqs` full sequences use."""
        return self.max_num_seqs * (self.longest + KV_BLOCK_TOKENS) * self.token

    def share(self, *, total_bytes: int, free_bytes: int) -> float:
        """`rollout.gpu_memory_utilization` where it is left open. Raises ConfigError if that is too little.

        No more than `max_num_seqs` full sequences can use: vLLM maps its KV cache anew in every step, 3 ms per GiB.
        """
        room = self.part * (free_bytes - BESIDE_ENGINE_BYTES - self.reserved)
        useful = math.ceil(100 * (self.weights + self.useful_cache + ENGINE_WORKSPACE_BYTES) / total_bytes) / 100
        share = min(LARGEST_SHARE, math.floor(100 * room / total_bytes) / 100, useful)
        self.check(share, total_bytes)
        return share

    def check(self, share: float, total_bytes: int) -> None:
        """Raises ConfigError where a share of a GPU does not hold weights and one sequence."""
        cache = self.token * self.longest
        if share * total_bytes < self.weights + cache:
            raise ConfigError(
                "actor_rollout_ref.rollout.gpu_memory_utilization",
                f"{share:g} of a GPU of {total_bytes / GIB:.1f} GiB is {max(0.0, share) * total_bytes / GIB:.1f} GiB, "
                f"but the engine's weights take {self.weights / GIB:.1f} GiB and the KV cache of one sequence "
                f"{cache / GIB:.2f} GiB",
                show_value=False,
            )


@dataclass(frozen=True)
class Memory:
    """What models, engine and teacher of a run take, on GPUs of any size or (`device` cpu) where nothing moves."""

    device: str
    specs: dict[str, ModelSpec]
    """By what the models are to the run."""
    owners: dict[str, float]
    """Memory owner -> bytes of the models on each device."""
    moves: dict[str, bool]
    """Memory owner -> whether it may leave a device that it shares."""
    passes: dict[str, dict[str, float]]
    """Phase -> what its passes hold beside the owners -> bytes."""
    checkpoint: float
    """Bytes of the first worker's part of one."""
    hybrid: bool
    """Whether engine and models take turns on the same devices."""
    sleeps: bool
    """Whether the engine leaves them in its turn."""
    engine: EngineRoom
    engine_share: float | None
    """Of a GPU, as configured; None where it is computed."""
    teacher: LocalTeacher | None
    teacher_bytes: tuple[float, float]
    """Of its weights, and of its KV cache or largest forward pass, on each GPU that it shares."""

    def phases(self, total_bytes: int | None) -> dict[str, dict[str, float]]:
        """Phase -> owner -> bytes on each device.

        Activations are those of the largest possible micro-batch, at least: a model may keep more. That is one of a
        mini-batch, or of a forward pass over the whole batch (values, log-probabilities, rewards). Without
        `total_bytes`, the memory of one GPU, the KV cache and the teacher, which are shares of it, are left out.
        """
        on_gpu, phases = self.device == "cuda", dict[str, dict[str, float]]()
        owners = {"engine_weights": self.engine.weights, **self.owners}
        moves = self.moves | dict.fromkeys(ENGINE_OWNERS, self.sleeps)
        if total_bytes is not None:
            owners["kv_cache"] = max(0.0, self.share_of_engine(total_bytes) * total_bytes - self.engine.weights)
        for phase, wanted in RESIDENCY.items():
            if not owners.keys() >= wanted - {"kv_cache", FROZEN}:
                continue
            present = {t: b for t, b in owners.items() if t in wanted or not on_gpu or not moves[t]}
            if not self.hybrid:  # each phase has its own GPUs
                present = {t: b for t, b in present.items() if (t in ENGINE_OWNERS) == (phase == "rollout")}
            present |= self.passes.get(phase, {})
            if self.hybrid and on_gpu and "engine_weights" not in present:
                present["sleeping engine"] = SLEEPING_ENGINE_BYTES
            if total_bytes is not None and self.shares_gpu:
                present["teacher"] = self.share_of_teacher(total_bytes) * total_bytes
            phases[phase] = present
        return phases

    def host(self, *, saves: bool) -> dict[str, float]:
        """Owner -> bytes on the host of each worker that trains: what may leave a GPU; on the CPU, its largest phase.

        And `checkpoint`, where training goes on while one is written: a copy of it.
        """
        found = {name: size for name, size in self.owners.items() if self.moves[name]}
        if self.device == "cpu":
            found = {"largest phase": max(sum(phase.values()) for phase in self.phases(None).values())}
        return found | ({"checkpoint": self.checkpoint} if saves else {})

    @property
    def shares_gpu(self) -> bool:
        """Whether a local teacher computes on a GPU that a worker uses too."""
        return self.teacher is not None and self.teacher.shares_gpu

    def share_of_teacher(self, total_bytes: int | None) -> float:
        """Of a local teacher, of the memory of a GPU, which has to be given where workers use it too."""
        assert self.teacher is not None
        if self.teacher.share is not None:
            return self.teacher.share
        assert total_bytes is not None
        return math.ceil(100 * (sum(self.teacher_bytes) + TEACHER_WORKSPACE_BYTES) / total_bytes) / 100

    def share_of_engine(self, total_bytes: int) -> float:
        """As configured, or as it will be computed on an empty card beside the teacher, if there is one on it."""
        if self.engine_share is not None:
            return self.engine_share
        taken = self.share_of_teacher(total_bytes) if self.shares_gpu else 0.0
        return self.engine_room.share(total_bytes=total_bytes, free_bytes=int((1 - taken) * total_bytes))

    @property
    def engine_room(self) -> EngineRoom:
        """The engine's, beside the models in the rollout phase (in a pool of its own there are none).

        An engine that never sleeps (`free_cache_engine=false`) takes half of what the phases of the models leave.
        """
        moving = {name: size for name, size in self.owners.items() if self.moves[name]}
        staying = sum(self.owners.values()) - sum(moving.values()) if self.hybrid else 0.0
        if self.sleeps or not self.hybrid:
            return replace(self.engine, reserved=staying)
        most = [sum(moving.get(name, 0.0) for name in RESIDENCY[phase]) for phase in ("reference", "reward_model")]
        for update, step in UPDATES.values():
            beside = [self.passes.get(update, {}).get(name, 0.0) for name in ("gradients", "gathered_params")]
            most.append(sum(moving.get(name, 0.0) for name in RESIDENCY[step]) + sum(beside))
        return replace(self.engine, reserved=staying + max(most), part=0.5)

    def check(self, total_bytes: int, role: str = "worker") -> None:
        """Refuse phases that do not fit into a GPU with a worker of this role. Raises ConfigError with the sizes."""
        if self.engine_share is not None and has_phase(role, "rollout"):
            self.engine.check(self.engine_share, total_bytes)
        for phase, owners in self.phases(total_bytes).items():
            needed = sum(owners.values())
            if needed > total_bytes and has_phase(role, phase):
                parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in owners.items())
                raise ConfigError(
                    "actor_rollout_ref.actor.fsdp_config.param_offload, .optimizer_offload, .reshard_after_forward, "
                    "actor_rollout_ref.rollout.free_cache_engine, .gpu_memory_utilization",
                    f"in the phase {phase} a GPU would have to hold {needed / GIB:.1f} GiB ({parts}), "
                    f"and it has {total_bytes / GIB:.1f}; switch on an offload or reshard_after_forward (of a critic "
                    "in critic.fsdp_config), lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, checkpoint "
                    "activations or take more GPUs",
                    show_value=False,
                )


def has_phase(role: str, phase: str) -> bool:
    return role == "worker" or (role == "rollout worker") == (phase == "rollout")

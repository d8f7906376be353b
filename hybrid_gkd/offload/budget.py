"""The memory of each phase on a GPU, predicted from the residency table, the offload keys and the model specs."""

from __future__ import annotations

import math

from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.models.spec import ModelSpec, model_spec
from hybrid_gkd.offload.residency import RESIDENCY

GIB = 2**30
SLEEPING_ENGINE_BYTES = 2 * GIB
"""Of vLLM while it sleeps: CUDA context, graphs, NCCL buffers (measured: 0.8 to 1.6 GiB)."""
BESIDE_ENGINE_BYTES = 6 * GIB
"""Left free beside the rollout engine: CUDA context, NCCL buffers, kernels, buckets of weights on their way."""
ENGINE_WORKSPACE_BYTES = 8 * GIB
"""Of the rollout engine beside weights and KV cache: activations of its largest step, logits, CUDA graphs."""
KV_BLOCK_TOKENS = 128
"""At most; the KV cache of a sequence is a whole number of blocks."""
TEACHER_TOKENS = 32768
"""KV cache of a teacher that shares a GPU: four engine steps, so that one is filled while another is scored."""
TEACHER_WORKSPACE_BYTES = 6 * GIB
"""Activations of one engine step, logits of 1024 positions and their top-k, CUDA context."""
LARGEST_SHARE = 0.92
"""vLLM's own default for a card of its own."""
ENGINE_OWNERS = ("engine_weights", "kv_cache")


def engine_dtype(config: Config, device: str) -> str:
    """Type of the rollout engine's weights and KV cache on "cuda" or "cpu"; left open, that of the actor's compute."""
    automatic, dtype = "bfloat16" if device == "cuda" else "float32", config.actor_rollout_ref.rollout.dtype
    return automatic if dtype == "auto" else dtype


def _master_bytes(config: Config, spec: ModelSpec) -> float:
    """Of the weights that are trained on each device; gradients take as much, the optimizer state twice that."""
    itemsize = {"fp32": 4, "bf16": 2}[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
    return itemsize * spec.trained_parameters / config.shard_size


def _frozen_bytes(config: Config, spec: ModelSpec, device: str = "cuda") -> float:
    """Of the weights below LoRA adapters on each device, in the type of the computation."""
    return (2 if device == "cuda" else 4) * spec.parameters / config.shard_size if spec.adapter_parameters else 0.0


def engine_bytes(config: Config, spec: ModelSpec, device: str) -> tuple[float, float]:
    """Of the rollout engine's weights, and of one token in its KV cache, on each device."""
    itemsize = 4 if engine_dtype(config, device) == "float32" else 2
    ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return itemsize * spec.parameters / ranks, itemsize / 2 * spec.kv_bytes_per_token / ranks


def _gathered_bytes(config: Config, spec: ModelSpec) -> int:
    """Gathered parameters on each GPU during the update, in bf16: FSDP2 makes a copy on a single GPU too.

    With `reshard_after_forward` that is the root group alone, and a block or two which are not counted.
    """
    reshards = config.actor_rollout_ref.actor.fsdp_config.reshard_after_forward
    return 2 * (spec.embedding_parameters if reshards else spec.parameters)


def _largest_micro_batch(config: Config) -> int:
    """Tokens of the largest micro-batch that there can be on a GPU, if no sequence alone is larger."""
    actor, longest = config.actor_rollout_ref.actor, config.max_sequence_length
    whole = longest * math.ceil(config.mini_batch_size * config.actor_rollout_ref.rollout.n / config.world_size)
    if actor.use_dynamic_bsz:
        return min(whole, actor.ppo_max_token_len_per_gpu)
    return min(whole, longest * (actor.ppo_micro_batch_size_per_gpu or 1))


def phase_bytes(
    config: Config, spec: ModelSpec, *, device: str, total_bytes: int | None
) -> dict[str, dict[str, float]]:
    """Phase -> owner -> bytes on each device ("cuda", or "cpu", where nothing moves).

    Activations are those of the largest possible micro-batch, at least: a model may keep more. Without `total_bytes`,
    the memory of one GPU, the KV cache and the teacher, which are shares of it, are left out.
    """
    arr, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
    hybrid, master = arr.hybrid_engine, _master_bytes(config, spec)
    engine_weights, _ = engine_bytes(config, spec, device)
    owners = {"actor_params": master, "optimizer_state": 2 * master, "engine_weights": engine_weights}
    if spec.adapter_parameters:
        owners["frozen_params"] = _frozen_bytes(config, spec, device)
    if total_bytes is not None:
        owners["kv_cache"] = max(0.0, engine_share(config, spec, total_bytes) * total_bytes - engine_weights)
    moves = {
        "actor_params": fsdp.param_offload and hybrid, "frozen_params": fsdp.param_offload and hybrid,
        "optimizer_state": fsdp.optimizer_offload,
        "engine_weights": arr.rollout.free_cache_engine, "kv_cache": arr.rollout.free_cache_engine,
    }
    phases: dict[str, dict[str, float]] = {}
    for phase, wanted in RESIDENCY.items():
        present = {t: b for t, b in owners.items() if t in wanted or device == "cpu" or not moves[t]}
        if not hybrid:  # each phase has its own GPUs
            present = {t: b for t, b in present.items() if (t in ENGINE_OWNERS) == (phase == "rollout")}
        if phase in ("update", "optimizer_step"):
            present["gradients"] = master
        if phase == "update" and device == "cuda":
            present["gathered_params"] = _gathered_bytes(config, spec)
            present["activations"] = _largest_micro_batch(config) * spec.activation_bytes_per_token
        if hybrid and device == "cuda" and "engine_weights" not in present:
            present["sleeping engine"] = SLEEPING_ENGINE_BYTES
        if total_bytes is not None and teacher_shares_gpu(config):
            present["teacher"] = teacher_share(config, total_bytes=total_bytes) * total_bytes
        phases[phase] = present
    return phases


def rollout_share(config: Config, spec: ModelSpec, *, total_bytes: int, free_bytes: int) -> float:
    """`rollout.gpu_memory_utilization` where it is left open. Raises ConfigError if that is too little.

    The free memory of the card, less the actor's in the rollout phase (0 in a pool of its own). An engine that never
    sleeps (`free_cache_engine=false`) takes half of what the update's tensors leave: the rest is for activations. No
    more than `max_num_seqs` full sequences can use: vLLM maps its KV cache anew in every step, 3 ms per GiB.
    """
    arr, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
    master, frozen = _master_bytes(config, spec), _frozen_bytes(config, spec)
    room: float = free_bytes - BESIDE_ENGINE_BYTES
    if arr.hybrid_engine and arr.rollout.free_cache_engine:
        room -= (0 if fsdp.param_offload else master + frozen) + (0 if fsdp.optimizer_offload else 2 * master)
    elif arr.hybrid_engine:
        # Parameters, gradients, both moments, gathered copies.
        parts = 4 * master + frozen + _gathered_bytes(config, spec)
        room = (room - parts) / 2
    tokens = arr.rollout.max_num_seqs * (engine_length(config) + KV_BLOCK_TOKENS)
    weights, token = engine_bytes(config, spec, "cuda")
    useful = math.ceil(100 * (weights + tokens * token + ENGINE_WORKSPACE_BYTES) / total_bytes) / 100
    share = min(LARGEST_SHARE, math.floor(100 * room / total_bytes) / 100, useful)
    _check_engine_fits(config, spec, share, total_bytes)
    return share


def engine_length(config: Config) -> int:
    """Tokens of the longest sequence that the rollout engine takes."""
    return config.actor_rollout_ref.rollout.max_model_len or config.max_sequence_length


def _check_engine_fits(config: Config, spec: ModelSpec, share: float, total_bytes: int) -> None:
    weights, token = engine_bytes(config, spec, "cuda")
    cache = token * engine_length(config)
    if share * total_bytes < weights + cache:
        raise ConfigError(
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            f"{share:g} of a GPU of {total_bytes / GIB:.1f} GiB is {max(0.0, share) * total_bytes / GIB:.1f} GiB, but "
            f"the engine's weights take {weights / GIB:.1f} GiB and the KV cache of one sequence {cache / GIB:.2f} GiB",
            show_value=False,
        )


def teacher_share(config: Config, *, total_bytes: int) -> float:
    """`teacher.gpu_memory_utilization` of a local teacher, computed where the configuration leaves it open."""
    teacher = config.actor_rollout_ref.teacher
    if teacher.gpu_memory_utilization is not None:
        return teacher.gpu_memory_utilization
    if not teacher_shares_gpu(config):
        return 0.9
    assert teacher.model.path is not None
    spec = model_spec(
        teacher.model.path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code, override_config={}
    )
    per_gpu = (2 * spec.parameters + TEACHER_TOKENS * spec.kv_bytes_per_token) / teacher.tensor_model_parallel_size
    return math.ceil(100 * (per_gpu + TEACHER_WORKSPACE_BYTES) / total_bytes) / 100


def engine_share(config: Config, spec: ModelSpec, total_bytes: int) -> float:
    """As configured, or as it will be computed on an empty card beside the teacher, if there is one on it."""
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if share is not None:
        return share
    taken = teacher_share(config, total_bytes=total_bytes) if teacher_shares_gpu(config) else 0.0
    return rollout_share(config, spec, total_bytes=total_bytes, free_bytes=int((1 - taken) * total_bytes))


def check_memory(config: Config, spec: ModelSpec, *, total_bytes: int, role: str = "worker") -> None:
    """Refuse phases that cannot fit into a GPU with a worker of this role. Raises ConfigError with owners and sizes."""
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if share is not None and has_phase(role, "rollout"):
        _check_engine_fits(config, spec, share, total_bytes)
    for phase, owners in phase_bytes(config, spec, device="cuda", total_bytes=total_bytes).items():
        needed = sum(owners.values())
        if needed > total_bytes and has_phase(role, phase):
            parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in owners.items())
            raise ConfigError(
                "actor_rollout_ref.actor.fsdp_config.param_offload, .optimizer_offload, .reshard_after_forward, "
                "actor_rollout_ref.rollout.free_cache_engine, .gpu_memory_utilization",
                f"in the phase {phase} a GPU would have to hold {needed / GIB:.1f} GiB ({parts}), "
                f"and it has {total_bytes / GIB:.1f}; switch on an offload or reshard_after_forward, lower "
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu, checkpoint activations or take more GPUs",
                show_value=False,
            )


def has_phase(role: str, phase: str) -> bool:
    return role == "worker" or (role == "rollout worker") == (phase == "rollout")


def teacher_shares_gpu(config: Config) -> bool:
    """Whether a local teacher computes on a GPU that a worker uses too."""
    import torch

    teacher = config.actor_rollout_ref.teacher
    local = config.distillation.enabled and teacher.server_ip is None and teacher.device != "cpu"
    return local and torch.cuda.device_count() < config.workers_per_node + teacher.tensor_model_parallel_size

"""What a configuration would do, without doing it: `--dry-run`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.offload.residency import RESIDENCY

GIB = 2**30
SLEEPING_ENGINE_BYTES = 2 * GIB
"""What vLLM keeps while it sleeps: CUDA context, graphs, NCCL buffers (measured: 1.6 GiB)."""


@dataclass(frozen=True)
class Size:
    """Parameters of a model."""

    parameters: int
    kv_bytes_per_token: int
    """Keys and values of one token in 16 bits."""


def model_size(path: str, *, trust_remote_code: bool, override_config: dict[str, Any]) -> Size:
    """Count a model's parameters from its config.json, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    for name, value in override_config.items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Size(sum(p.numel() for p in model.parameters()), 2 * 2 * config.num_hidden_layers * heads * head_dim)


def phase_bytes(config: Config, size: Size, *, device: str, total_bytes: int | None) -> dict[str, dict[str, float]]:
    """Phase -> tenant -> bytes on each device, from the residency table and the offload keys.

    Activations are not included: they depend on the micro-batch and on what the model keeps.

    Args:
        config: the whole configuration.
        size: of the student.
        device: "cuda" or "cpu"; nothing moves on the CPU.
        total_bytes: memory of one GPU; None leaves out what is given as a share of it.
    """
    arr, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
    master = {"fp32": 4, "bf16": 2}[fsdp.model_dtype] * size.parameters / config.shard_size
    engine_weights = size.parameters * (2 if device == "cuda" else 4) / arr.rollout.tensor_model_parallel_size
    tenants: dict[str, float] = {
        "actor_params": master, "optimizer_state": 2 * master, "engine_weights": engine_weights,
    }
    if total_bytes is not None:
        tenants["kv_cache"] = max(0.0, arr.rollout.gpu_memory_utilization * total_bytes - engine_weights)
    moves = {
        "actor_params": fsdp.param_offload, "optimizer_state": fsdp.optimizer_offload,
        "engine_weights": arr.rollout.free_cache_engine, "kv_cache": arr.rollout.free_cache_engine,
    }
    phases: dict[str, dict[str, float]] = {}
    for phase, wanted in RESIDENCY.items():
        present = {t: b for t, b in tenants.items() if t in wanted or device == "cpu" or not moves[t]}
        if phase in ("update", "optimizer_step"):
            present["gradients"] = master
        if device == "cuda" and "engine_weights" not in present:
            present["sleeping engine"] = SLEEPING_ENGINE_BYTES
        if total_bytes is not None and teacher_shares_gpu(config):
            present["teacher"] = arr.teacher.gpu_memory_utilization * total_bytes
        phases[phase] = present
    return phases


def check_memory(config: Config, size: Size, *, total_bytes: int) -> None:
    """Refuse a run whose phases cannot fit into one GPU. Raises ConfigError with the phase, its tenants and sizes."""
    for phase, tenants in phase_bytes(config, size, device="cuda", total_bytes=total_bytes).items():
        needed = sum(tenants.values())
        if needed > total_bytes:
            parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in tenants.items())
            raise ConfigError(
                "actor_rollout_ref.actor.fsdp_config.param_offload, .optimizer_offload, "
                "actor_rollout_ref.rollout.free_cache_engine, .gpu_memory_utilization",
                f"in the phase {phase} a GPU would have to hold {needed / GIB:.1f} GiB ({parts}), "
                f"and it has {total_bytes / GIB:.1f}; switch on an offload or take more GPUs",
                show_value=False,
            )


def teacher_shares_gpu(config: Config) -> bool:
    """Whether a local teacher computes on a GPU that a worker uses too."""
    import torch

    teacher = config.actor_rollout_ref.teacher
    local = config.distillation.enabled and teacher.server_ip is None and teacher.device != "cpu"
    return local and torch.cuda.device_count() < config.trainer.n_gpus_per_node + teacher.tensor_model_parallel_size


def plan(config: Config, *, device: str, engine: str) -> str:
    """Placement, steps and memory per worker and phase, as text."""
    import torch

    arr = config.actor_rollout_ref
    lines = [
        f"workers: {config.world_size} on {device} ({config.trainer.nnodes} node(s))",
        f"rollout engine: {engine}, tensor parallel {arr.rollout.tensor_model_parallel_size}",
        f"batch: {config.data.train_batch_size} prompts x {arr.rollout.n} responses, up to "
        f"{config.data.max_prompt_length} + {config.data.max_response_length} tokens, "
        f"{config.mini_batch_size} prompts per optimizer step",
    ]
    if config.distillation.enabled:
        where = f"{arr.teacher.server_ip}:{arr.teacher.server_port}" if arr.teacher.server_ip else "started by this run"
        lines.append(f"teacher: {where}, top-{config.distillation.topk}, {config.distillation.loss_mode}, "
                     f"tail {config.distillation.tail}")
    if not os.path.isfile(os.path.join(arr.model.path, "config.json")):
        return "\n".join([*lines, f"memory: not computed, {arr.model.path} is not on this machine yet"])
    size = student_size(config)
    total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    lines.append(
        f"student: {size.parameters / 1e6:.1f} M parameters, {size.kv_bytes_per_token} bytes of KV cache a token"
    )
    lines.append("memory of each worker by phase, GiB (without activations):")
    for phase, tenants in phase_bytes(config, size, device=device, total_bytes=total).items():
        parts = ", ".join(f"{name} {value / GIB:.3f}" for name, value in tenants.items())
        lines.append(f"  {phase:15s} {sum(tenants.values()) / GIB:8.3f} = {parts}")
    if total is not None:
        check_memory(config, size, total_bytes=total)
    return "\n".join(lines)


def student_size(config: Config) -> Size:
    """Parameters of the configured student."""
    model = config.actor_rollout_ref.model
    return model_size(
        model.path, trust_remote_code=model.trust_remote_code, override_config=model.override_config
    )

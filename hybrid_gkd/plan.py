"""What a configuration would do, without doing it: `--dry-run`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from hybrid_gkd.config import Config

GIB = 2**30


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


def plan(config: Config, *, device: str, engine: str) -> str:
    """Placement, steps and memory per worker and phase, as text."""
    arr, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
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
    size = model_size(
        arr.model.path, trust_remote_code=arr.model.trust_remote_code, override_config=arr.model.override_config
    )
    master = {"fp32": 4, "bf16": 2}[fsdp.model_dtype]
    shard = size.parameters / config.world_size
    engine_bytes = size.parameters * (2 if device == "cuda" else 4) / arr.rollout.tensor_model_parallel_size
    on_device = {"rollout": 0.0 if fsdp.param_offload and device == "cuda" else shard * master,
                 "update": shard * master * 2}
    optimizer = shard * master * 2
    if not (fsdp.optimizer_offload and device == "cuda"):
        on_device = {phase: value + optimizer for phase, value in on_device.items()}
    on_device["optimizer step"] = shard * master * 4
    lines.append(
        f"student: {size.parameters / 1e6:.1f} M parameters, {size.kv_bytes_per_token} bytes of KV cache a token"
    )
    lines.append("memory per worker, GiB (activations not included):")
    lines += [f"  {phase:15s} actor {value / GIB:8.3f}" for phase, value in on_device.items()]
    lines.append(f"  {'rollout':15s} engine weights {engine_bytes / GIB:.3f}")
    return "\n".join(lines)

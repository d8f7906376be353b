"""What a configuration would do, without doing it: `--dry-run`."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError, ModelError
from hybrid_gkd.models.tokenizer import first_line
from hybrid_gkd.offload.residency import RESIDENCY

if TYPE_CHECKING:
    from hybrid_gkd.workers.placement import Placement, Role

GIB = 2**30
SLEEPING_ENGINE_BYTES = 2 * GIB
"""What vLLM keeps while it sleeps: CUDA context, graphs, NCCL buffers (measured: 0.8 to 1.6 GiB)."""
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
HUB_SECONDS = 5.0
"""In which the hub has to answer to be asked for a model's configuration."""


ENGINE_TENANTS = ("engine_weights", "kv_cache")


@dataclass(frozen=True)
class Size:
    """Parameters of a model."""

    parameters: int
    kv_bytes_per_token: int
    """Keys and values of one token in 16 bits."""
    activation_bytes_per_token: int = 0
    """What the backward pass keeps of one token in 16 bits, at least: a block's six tensors of the hidden size and
    three of the intermediate size; with activation checkpointing its input."""
    embedding_parameters: int = 0
    """Of the input embedding and the output head; counted once where they are tied."""
    tied_parameters: int = 0
    """Of the output head where it is the input embedding: a checkpoint holds them under both names."""
    stored_itemsize: int = 4
    """Bytes of one parameter in the model's own type, which an export keeps."""
    head_parameters: int = 0
    """Of the output head: vocabulary times hidden size."""
    attention_width: int = 0
    """Heads times their size, summed over the layers."""
    has_experts: bool = False
    """A mixture of experts, of which a token uses a part."""


def model_size(
    path: str, *, trust_remote_code: bool, override_config: dict[str, Any], checkpointing: bool = False
) -> Size:
    """Count a model's parameters and what its tokens take from its config.json, without weights.

    Raises:
        ModelError: it cannot be read, or makes no model.
        ConfigError: `override_config` names a field that it does not have, or gives one a value that it does not take.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = read_config(path, trust_remote_code, override_config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ConfigError:
        raise
    except Exception as error:  # whatever a model raises whose numbers do not fit together
        raise ModelError(f"{path}: the model's configuration cannot be used: {first_line(error)}") from error
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    stored = getattr(config, "dtype", None) or torch.float32  # text where another library read config.json
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kept = text.hidden_size
    if not checkpointing:
        kept = 6 * text.hidden_size + 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    parameters = sum(p.numel() for p in model.parameters())
    return Size(
        parameters=parameters,
        kv_bytes_per_token=2 * 2 * text.num_hidden_layers * heads * head_dim,
        activation_bytes_per_token=2 * text.num_hidden_layers * kept,
        embedding_parameters=sum(p.numel() for p in torch.nn.ModuleList(ends).parameters()),
        tied_parameters=sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False)) - parameters,
        stored_itemsize=(getattr(torch, stored) if isinstance(stored, str) else stored).itemsize,
        head_parameters=text.vocab_size * text.hidden_size,
        attention_width=text.num_hidden_layers * text.num_attention_heads * head_dim,
        has_experts=any("expert" in name and value for name, value in text.to_dict().items()),
    )


def read_config(path: str, trust_remote_code: bool, override_config: dict[str, Any]) -> Any:
    """A model's configuration: of a folder, of the hub's cache, or of a hub that answers at once.

    Raises:
        OSError, ValueError: it is in none of them, or cannot be used.
        ConfigError: see `model_size`.
    """
    from huggingface_hub import get_session, hf_hub_url
    from transformers import AutoConfig

    try:
        # A folder may name code on the hub, which is fetched then.
        local_files_only = not os.path.isdir(path)
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    except OSError as error:
        if not local_files_only:
            raise
        try:  # transformers would ask a hub out of reach again and again, for more than a minute
            get_session().head(hf_hub_url(path, "config.json"), timeout=HUB_SECONDS)
        except Exception:  # whatever the hub's transport raises
            raise error from None
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    for name, value in override_config.items():
        if not hasattr(config, name):
            raise ConfigError("actor_rollout_ref.model.override_config", f"{path} has no such field", name)
        try:
            setattr(config, name, value)
        except Exception as error:  # transformers checks types with errors of its own
            rule = f"{path} does not take this {name}: {first_line(error)}"
            raise ConfigError("actor_rollout_ref.model.override_config", rule, value) from error
    return config


def engine_dtype(config: Config, device: str) -> str:
    """Type of the rollout engine's weights and KV cache on "cuda" or "cpu"; left open, that of the actor's compute."""
    dtype = config.actor_rollout_ref.rollout.dtype
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cuda" else "float32"


def _engine_bytes(config: Config, size: Size, device: str) -> tuple[float, float]:
    """Of the rollout engine's weights, and of one token in its KV cache, on each device."""
    itemsize = 4 if engine_dtype(config, device) == "float32" else 2
    ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return itemsize * size.parameters / ranks, itemsize / 2 * size.kv_bytes_per_token / ranks


def _gathered_bytes(config: Config, size: Size) -> int:
    """What FSDP2 keeps of the whole model on each GPU during the update, in bf16: also on one GPU it makes a copy.

    With `reshard_after_forward` that is the root group alone, and a block or two which are not counted.
    """
    reshards = config.actor_rollout_ref.actor.fsdp_config.reshard_after_forward
    return 2 * (size.embedding_parameters if reshards else size.parameters)


def _largest_micro_batch(config: Config) -> int:
    """Tokens of the largest micro-batch that there can be on a GPU, if no sequence alone is larger."""
    actor, longest = config.actor_rollout_ref.actor, config.max_sequence_length
    whole = longest * math.ceil(config.mini_batch_size * config.actor_rollout_ref.rollout.n / config.world_size)
    if actor.use_dynamic_bsz:
        return min(whole, actor.ppo_max_token_len_per_gpu)
    return min(whole, longest * (actor.ppo_micro_batch_size_per_gpu or 1))


def phase_bytes(config: Config, size: Size, *, device: str, total_bytes: int | None) -> dict[str, dict[str, float]]:
    """Phase -> tenant -> bytes on each device, from the residency table and the offload keys.

    Activations are those of the largest possible micro-batch, at least: a model may keep more.

    Args:
        config: the whole configuration.
        size: of the student.
        device: "cuda" or "cpu"; nothing moves on the CPU.
        total_bytes: memory of one GPU; None leaves out what is given as a share of it.
    """
    arr, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
    hybrid = arr.hybrid_engine
    master = {"fp32": 4, "bf16": 2}[fsdp.model_dtype] * size.parameters / config.shard_size
    engine_weights, _ = _engine_bytes(config, size, device)
    tenants: dict[str, float] = {
        "actor_params": master, "optimizer_state": 2 * master, "engine_weights": engine_weights,
    }
    if total_bytes is not None:
        share = _share_of_engine(config, size, total_bytes)
        tenants["kv_cache"] = max(0.0, share * total_bytes - engine_weights)
    moves = {
        "actor_params": fsdp.param_offload and hybrid, "optimizer_state": fsdp.optimizer_offload,
        "engine_weights": arr.rollout.free_cache_engine, "kv_cache": arr.rollout.free_cache_engine,
    }
    phases: dict[str, dict[str, float]] = {}
    for phase, wanted in RESIDENCY.items():
        present = {t: b for t, b in tenants.items() if t in wanted or device == "cpu" or not moves[t]}
        if not hybrid:  # each phase has its own GPUs
            present = {t: b for t, b in present.items() if (t in ENGINE_TENANTS) == (phase == "rollout")}
        if phase in ("update", "optimizer_step"):
            present["gradients"] = master
        if phase == "update" and device == "cuda":
            present["gathered_params"] = _gathered_bytes(config, size)
            present["activations"] = _largest_micro_batch(config) * size.activation_bytes_per_token
        if hybrid and device == "cuda" and "engine_weights" not in present:
            present["sleeping engine"] = SLEEPING_ENGINE_BYTES
        if total_bytes is not None and teacher_shares_gpu(config):
            present["teacher"] = teacher_share(config, total_bytes=total_bytes) * total_bytes
        phases[phase] = present
    return phases


def rollout_share(config: Config, size: Size, *, total_bytes: int, free_bytes: int) -> float:
    """`rollout.gpu_memory_utilization` where the configuration leaves it open.

    What is free on the card, less what of the actor stays on it in the rollout phase: nothing in a pool of its own. An
    engine that stays beside it (`free_cache_engine=false`) takes half of what the update's tensors leave: the rest is
    for activations. No more than `max_num_seqs` sequences of full length can use: vLLM maps its KV cache anew in every
    step, which takes 3 ms per GiB.

    Args:
        config: the whole configuration.
        size: of the student.
        total_bytes: memory of one GPU.
        free_bytes: free on it before the engine is built.

    Raises:
        ConfigError: the engine's weights do not fit into the share.
    """
    arr, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
    master = {"fp32": 4, "bf16": 2}[fsdp.model_dtype] * size.parameters / config.shard_size
    room: float = free_bytes - BESIDE_ENGINE_BYTES
    if arr.hybrid_engine and arr.rollout.free_cache_engine:
        room -= (0 if fsdp.param_offload else master) + (0 if fsdp.optimizer_offload else 2 * master)
    elif arr.hybrid_engine:
        parts = 4 * master + _gathered_bytes(config, size)  # parameters, gradients, both moments, and what is gathered
        room = (room - parts) / 2
    tokens = arr.rollout.max_num_seqs * (engine_length(config) + KV_BLOCK_TOKENS)
    weights, token = _engine_bytes(config, size, "cuda")
    useful = math.ceil(100 * (weights + tokens * token + ENGINE_WORKSPACE_BYTES) / total_bytes) / 100
    share = min(LARGEST_SHARE, math.floor(100 * room / total_bytes) / 100, useful)
    _check_engine_fits(config, size, share, total_bytes)
    return share


def engine_length(config: Config) -> int:
    """Tokens of the longest sequence that the rollout engine takes."""
    return config.actor_rollout_ref.rollout.max_model_len or config.max_sequence_length


def _check_engine_fits(config: Config, size: Size, share: float, total_bytes: int) -> None:
    weights, token = _engine_bytes(config, size, "cuda")
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
    size = model_size(
        teacher.model.path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code, override_config={}
    )
    per_gpu = (2 * size.parameters + TEACHER_TOKENS * size.kv_bytes_per_token) / teacher.tensor_model_parallel_size
    return math.ceil(100 * (per_gpu + TEACHER_WORKSPACE_BYTES) / total_bytes) / 100


def _share_of_engine(config: Config, size: Size, total_bytes: int) -> float:
    """As configured, or as it will be computed on an empty card beside the teacher, if there is one on it."""
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if share is not None:
        return share
    taken = teacher_share(config, total_bytes=total_bytes) if teacher_shares_gpu(config) else 0.0
    return rollout_share(config, size, total_bytes=total_bytes, free_bytes=int((1 - taken) * total_bytes))


def check_memory(config: Config, size: Size, *, total_bytes: int, role: Role = "worker") -> None:
    """Refuse a run whose phases cannot fit into one GPU. Raises ConfigError with the phase, its tenants and sizes.

    Args:
        config: the whole configuration.
        size: of the student.
        total_bytes: memory of the GPU.
        role: of the worker on it, whose phases count.
    """
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if share is not None and _has_phase(role, "rollout"):
        _check_engine_fits(config, size, share, total_bytes)
    for phase, tenants in phase_bytes(config, size, device="cuda", total_bytes=total_bytes).items():
        needed = sum(tenants.values())
        if needed > total_bytes and _has_phase(role, phase):
            parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in tenants.items())
            raise ConfigError(
                "actor_rollout_ref.actor.fsdp_config.param_offload, .optimizer_offload, .reshard_after_forward, "
                "actor_rollout_ref.rollout.free_cache_engine, .gpu_memory_utilization",
                f"in the phase {phase} a GPU would have to hold {needed / GIB:.1f} GiB ({parts}), "
                f"and it has {total_bytes / GIB:.1f}; switch on an offload or reshard_after_forward, lower "
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu, checkpoint activations or take more GPUs",
                show_value=False,
            )


def _has_phase(role: Role, phase: str) -> bool:
    return role == "worker" or (role == "rollout worker") == (phase == "rollout")


def check_free_memory(
    config: Config, size: Size, placements: list[Placement], *, teacher_loaded: bool = False
) -> None:
    """Refuse a GPU that is too small for a phase, or of which others hold too much. Raises ConfigError with the sizes.

    Args:
        config: the whole configuration.
        size: of the student.
        placements: of the workers, measured before they load anything.
        teacher_loaded: a local teacher that shares a GPU has what it needs already.
    """
    for role, total_bytes in dict.fromkeys((place.role, place.total_bytes) for place in placements if place.gpu):
        check_memory(config, size, total_bytes=total_bytes, role=role)
    computed = config.actor_rollout_ref.rollout.gpu_memory_utilization is None  # then from what is free
    ignored = ({"kv_cache"} if computed else set()) | ({"teacher"} if teacher_loaded else set())
    for place in placements:
        if place.gpu is None:
            continue
        for phase, tenants in phase_bytes(config, size, device="cuda", total_bytes=place.total_bytes).items():
            needed = sum(value for name, value in tenants.items() if name not in ignored)
            if _has_phase(place.role, phase) and needed > place.free_bytes:
                raise ConfigError(
                    "trainer.n_gpus_per_node",
                    f"{place.worker} ({place}) needs {needed / GIB:.1f} GiB in the phase {phase}; another process, "
                    "perhaps a teacher, holds what is not free: stop it, or leave this GPU out of CUDA_VISIBLE_DEVICES",
                    show_value=False,
                )


def checkpoint_bytes(config: Config, size: Size) -> int:
    """What one checkpoint takes on the disk: weights and both moments, and the Hugging Face folder."""
    actor = config.actor_rollout_ref.actor
    master = {"fp32": 4, "bf16": 2}[actor.fsdp_config.model_dtype]
    exported = size.stored_itemsize if actor.checkpoint.save_hf_model else 0
    return master * (3 * size.parameters + size.tied_parameters) + exported * size.parameters


def disk_bytes(config: Config, size: Size, *, steps: int | None) -> int:
    """What has to be free for the checkpoints of a run, beside those that its folder holds already.

    One that is no longer kept is removed when the next is complete, so for a moment there is one more than are kept.
    Where all are kept, there has to be room for the next one.

    Args:
        config: the whole configuration.
        size: of the student.
        steps: of the whole run; None where that is not known.
    """
    trainer, one = config.trainer, checkpoint_bytes(config, size)
    if trainer.save_freq == 0:
        return 0
    if trainer.save_freq == -1 or trainer.max_actor_ckpt_to_keep is None:
        return one
    number = trainer.max_actor_ckpt_to_keep + 1
    if steps is not None:
        number = min(number, math.ceil(steps / trainer.save_freq))
    present = 0
    if trainer.resume_mode != "disable":  # else the run folder is moved aside
        for file in config.run_dir.glob("global_step_*/**/*"):
            with contextlib.suppress(FileNotFoundError):  # another run may be removing it
                present += file.stat().st_size
    return max(one, number * one - present)


def teacher_shares_gpu(config: Config) -> bool:
    """Whether a local teacher computes on a GPU that a worker uses too."""
    import torch

    teacher = config.actor_rollout_ref.teacher
    local = config.distillation.enabled and teacher.server_ip is None and teacher.device != "cpu"
    return local and torch.cuda.device_count() < config.workers_per_node + teacher.tensor_model_parallel_size


def plan(config: Config, *, device: str, engine: str) -> str:
    """Placement, steps and memory per worker and phase, as text.

    Raises:
        ConfigError: a phase does not fit into this machine's GPU. Those of a given cluster are known when the workers
            are placed, see `check_free_memory`.
        ModelError: the configuration of a local teacher, or a folder's own, cannot be read.
    """
    import torch

    arr = config.actor_rollout_ref
    pools = f"workers: {config.world_size} on {device} ({config.trainer.nnodes} node(s))"
    if not arr.hybrid_engine:
        pools += f" that train, {config.rollout_world_size} ({config.rollout.nnodes} node(s)) that generate"
    lines = [
        pools,
        f"rollout engine: {engine}, tensor parallel {arr.rollout.tensor_model_parallel_size}",
        f"batch: {config.data.train_batch_size} prompts x {arr.rollout.n} responses, up to "
        f"{config.data.max_prompt_length} + {config.data.max_response_length} tokens, "
        f"{config.mini_batch_size} prompts per optimizer step",
    ]
    if config.distillation.enabled:
        where = ", ".join(arr.teacher.endpoints) if arr.teacher.server_ip else "started by this run"
        lines.append(f"teacher: {where}, top-{config.distillation.topk}, {config.distillation.loss_mode}, "
                     f"tail {config.distillation.tail}")
    try:
        size = student_size(config)
    except ModelError as error:
        if os.path.isdir(arr.model.path):
            raise
        return "\n".join([*lines, f"memory: not computed, {error}"])
    on_this_machine = device == "cuda" and config.ray_init.address is None
    total = torch.cuda.get_device_properties(0).total_memory if on_this_machine else None
    _, token = _engine_bytes(config, size, device)
    lines.append(f"student: {size.parameters / 1e6:.1f} M parameters, {token:.0f} bytes of KV cache a token per worker")
    lines.append("memory of each worker by phase, GiB (activations: at least):")
    for phase, tenants in phase_bytes(config, size, device=device, total_bytes=total).items():
        parts = ", ".join(f"{name} {value / GIB:.3f}" for name, value in tenants.items())
        lines.append(f"  {phase:15s} {sum(tenants.values()) / GIB:8.3f} = {parts}")
    if total is not None:
        shares = [f"rollout engine {_share_of_engine(config, size, total):g}"]
        if config.distillation.enabled and arr.teacher.server_ip is None:
            shares.append(f"local teacher {teacher_share(config, total_bytes=total):g}")
        lines.append(f"shares of a GPU of {total / GIB:.1f} GiB (gpu_memory_utilization): {', '.join(shares)}")
        check_memory(config, size, total_bytes=total)
    elif device == "cuda":
        lines.append("KV cache and shares of a GPU: computed when the cluster has placed the workers")
    return "\n".join(lines)


def student_size(config: Config) -> Size:
    """Parameters of the configured student."""
    model = config.actor_rollout_ref.model
    return model_size(
        model.path, trust_remote_code=model.trust_remote_code, override_config=model.override_config,
        checkpointing=model.enable_gradient_checkpointing,
    )

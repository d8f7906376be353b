"""A Hugging Face causal LM in FSDP2 shards, with its optimizer: build, step, gather. Knows no loss, Ray or vLLM.

All methods are collective: every rank calls them in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybrid_gkd.compat.torch import abandon_backward
from hybrid_gkd.compat.transformers import block_classes
from hybrid_gkd.config import FSDPConfig, ModelConfig, OptimConfig, ScheduleConfig
from hybrid_gkd.errors import DeviceMemoryError, ModelError
from hybrid_gkd.models.adapters import adapter_config, add_adapters, base_weights
from hybrid_gkd.models.fast_layers import use_liger
from hybrid_gkd.models.packed_attention import packed_attention, register_packed_attention
from hybrid_gkd.rollout.weights import Layout, gather_in_buckets, identity_shard, layout_of
from hybrid_gkd.student.loading import PATH_KEY, build_model, classifier_head, load_shards, materialize
from hybrid_gkd.student.lora import Adapters, initialize_adapters

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GROUP_BYTES = 2**28
"""Of bf16 weights that consecutive blocks are gathered with, at most."""


class ShardedModel:
    """One rank of a model. Raises ModelError if it cannot be loaded.

    Args:
        wrap: Hugging Face model -> the root module, whose forward pass is run.
        shard_size: the weights are sharded within groups of so many consecutive ranks and replicated across them.
        bucket_bytes: see `gather_in_buckets`.
        compile: see `compile_blocks`.
        seed: of the first values of LoRA adapters.
        optim: None for a frozen model, which has no optimizer.
        num_updates: optimizer steps of the whole run, the length of the learning-rate schedule.
        new_head: `wrap` puts a head of its own in the place of the output embedding. It begins with zeros, whatever the
            folder has, and computes in float32.
        classifier: the folder has a classifier with one label, and no language model.
        path_key: the key that named the folder, for messages.
    """

    section = "actor_rollout_ref.actor"
    """Of the configuration, for messages."""
    token_limit = "ppo_max_token_len_per_gpu"
    """The key in it that limits a micro-batch."""

    def __init__(
        self, model: ModelConfig, *, wrap: Callable[[Any], nn.Module], fsdp: FSDPConfig, shard_size: int,
        device: torch.device, bucket_bytes: int, compile: bool = False, seed: int = 0, optim: OptimConfig | None,
        num_updates: int = 0, new_head: bool = False, classifier: bool = False, path_key: str = PATH_KEY,
    ):  # fmt: skip
        self.device = device
        if device.type == "cuda":
            take_workspaces(device)
        self.fsdp, self.optim, self.bucket_bytes = fsdp, optim, bucket_bytes
        self.num_updates, self.updates_done = num_updates, 0
        self.world_size = dist.get_world_size()
        compute = torch.bfloat16 if device.type == "cuda" else None
        lora, dtype = adapter_config(model), DTYPES[fsdp.model_dtype]
        # Frozen weights are used in the compute type alone, so they are kept in it.
        self.hf_model = build_model(
            model.path, dtype=dtype if lora is None else compute or torch.float32,
            trust_remote_code=model.trust_remote_code, override_config=model.override_config, key=path_key,
            classifier=classifier,
        )
        if device.type == "cuda" and not compile and (reason := use_liger(self.hf_model)):
            logger.info("norms are torch's, gates and rotary embeddings transformers': %s", reason)
        if lora is not None:
            add_adapters(self.hf_model, lora, dtype)
        if model.enable_gradient_checkpointing:
            self.hf_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.hf_model.train()
        if compile:
            compile_blocks(self.hf_model)
        self.model: Any = wrap(self.hf_model)
        head = classifier_head(self.hf_model) if classifier else self.hf_model.get_output_embeddings()
        self.hidden_size = head.in_features
        if shard_size == self.world_size:
            mesh = init_device_mesh(device.type, (shard_size,))
        else:
            shape = (self.world_size // shard_size, shard_size)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        reduce_dtype = torch.promote_types(dtype, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        self._saved = set(self.hf_model.state_dict())
        self._blocks = decoder_blocks(self.hf_model)  # now: FSDP2 gives modules classes of other names
        for blocks in block_groups(self._blocks):
            fully_shard(blocks, reshard_after_forward=self.fsdp.reshard_after_forward, **options)
        if new_head:
            fully_shard(head, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32), reshard_after_forward=False)
        # The head's weight is needed again at once, in the backward pass: do not free it in between.
        fully_shard(self.model, reshard_after_forward=False, **options)
        materialize(self.model, device)
        own = set(map(id, head.parameters())) if new_head else set()
        new = {name for name, parameter in self.named_parameters() if id(parameter) in own}
        load_shards(self.hf_model, model.path, key=path_key, new=new)
        self.adapters = None if lora is None else Adapters(self.hf_model, lora)
        if lora is not None:
            initialize_adapters(self.hf_model, seed=seed, folder=model.lora_adapter_path)
        fused = device.type == "cuda"
        self.optimizer = None if optim is None else make_optimizer(self.hf_model, optim, fused=fused)

    def parameters(self) -> list[Tensor]:
        """The parameter shards of this rank that are trained, or all of a frozen model."""
        return [p for p in self.hf_model.parameters() if p.requires_grad]

    def frozen_parameters(self) -> list[Tensor]:
        """The parameter shards of this rank that never change: with LoRA all but the adapters."""
        return [p for p in self.hf_model.parameters() if not p.requires_grad]

    def optimizer_tensors(self) -> list[Tensor]:
        """The optimizer-state shards of this rank; empty before the first step."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [value for state in states for value in state.values() if torch.is_tensor(value)]

    def reshard(self) -> None:
        """Free the weights that a forward pass keeps gathered; without a backward pass nothing else does."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextlib.contextmanager
    def before_each_backward(self, call: Callable[[int], None]) -> Iterator[None]:
        """Within it, `call` before the backward pass of every decoder block, with the number of calls that are left."""
        left = iter(range(len(self._blocks), 0, -1))

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            first = output if torch.is_tensor(output) else output[0]
            if first.requires_grad:  # what gradient checkpointing computes again is no part of the backward pass
                first.register_hook(lambda _: call(next(left, 1)))

        hooks = [block.register_forward_hook(after_forward) for block in self._blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def abandon_backward(self) -> None:
        """Drop all gradients and bring FSDP2 back to where a forward pass can begin."""
        abandon_backward(self.model)
        self.model.zero_grad()

    def clip_grad_norm(self, largest: float) -> Tensor:
        """Scale the gradients down to a norm of at most `largest`; their norm before, over all ranks, on the device."""
        norm = nn.utils.clip_grad_norm_(self.hf_model.parameters(), largest)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        assert self.optim is not None, "a frozen model takes no steps"
        return learning_rate(self.optim, self.updates_done, self.num_updates)

    def step(self) -> float:
        """One optimizer step, which consumes the gradients; its learning rate.

        Raises DeviceMemoryError if the device memory did not suffice; some weights may have changed.
        """
        assert self.optimizer is not None, "a frozen model takes no steps"
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError as error:  # some parameters may have changed: never to be tried again
            failure = DeviceMemoryError(
                "phase optimizer_step: out of device memory within the step, continue from the last checkpoint; switch "
                f"on {self.section}.fsdp_config.optimizer_offload or take more GPUs. "
                f"{str(error).splitlines()[0]}"
            )
            failure.weights_changed = True
            raise failure from error
        self.optimizer.zero_grad()
        self.updates_done += 1
        return rate

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameter shards under their Hugging Face names, a tied one under each of them; without adapters."""
        return base_weights(self.hf_model.named_parameters(remove_duplicate=False))

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """What a folder has beside parameters, such as the biases of a router; every rank has them whole."""
        return ((name, each) for name, each in self.hf_model.named_buffers() if name in self._saved)

    def layout(self) -> Layout:
        """Of `full_tensors`."""
        return layout_of(itertools.chain(self.named_parameters(), self.saved_buffers()))

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights in `dtype` under all Hugging Face names (an engine may have copies), gathered in buckets, and
        the buffers that a folder has, in their own type.

        Adapters are merged into them, each rank into its own rows of a bucket.
        """
        weights = gather_in_buckets(
            self.named_parameters(), dtype=dtype, bucket_bytes=self.bucket_bytes,
            shard_of=identity_shard if self.adapters is None else self.adapters.merged,
        )
        return itertools.chain(weights, self.saved_buffers())


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS take the memory that it needs in this thread and in autograd's, and that it never gives back.

    At the first product torch would cut it from any large free block, which then could not go back to the device.
    """
    torch.cuda.empty_cache()
    square = torch.zeros(8, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    (square @ square).sum().backward()


def decoder_blocks(model: Any) -> list[nn.Module]:
    """The transformer blocks of a Hugging Face model, by the class names that it must not split."""
    names = block_classes(model)
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ModelError(f"{type(model).__name__} names no decoder blocks (_no_split_modules) to shard")
    return blocks


def block_groups(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Consecutive blocks that are gathered and reduced together: as many as GROUP_BYTES hold, at least one.

    FSDP2's work on the host is per group, and with small blocks the device would wait for it.
    """
    largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    size = max(1, GROUP_BYTES // (2 * largest))
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def compile_blocks(model: Any) -> None:
    """Let torch.compile fuse the operations between attention and matrix products in every decoder block.

    The graphs take any number of tokens and serve all blocks, so that only the first forward and backward pass compile.
    """
    register_packed_attention(torch.compiler.disable(packed_attention))
    for block in decoder_blocks(model):
        block.forward = torch.compile(block.forward, dynamic=True)


def make_optimizer(model: nn.Module, config: OptimConfig, *, fused: bool) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only: it is not meant to shrink biases and norms."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    others = [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused, foreach=not fused)


def learning_rate(config: ScheduleConfig, update: int, num_updates: int) -> float:
    """Learning rate of optimizer step `update` (0-based) of `num_updates`: linear warm-up, then the schedule."""
    warmup = config.lr_warmup_steps or int(config.lr_warmup_steps_ratio * num_updates)
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (update - warmup) / max(1, num_updates - warmup))
    shape = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)

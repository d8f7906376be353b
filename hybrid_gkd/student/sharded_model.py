"""A Hugging Face causal LM in FSDP2 shards, with its optimizer. Depends on neither losses, Ray nor vLLM.

All methods are collective: every rank must call them in the same order.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hybrid_gkd.compat.torch import ShardAdamW, abandon_backward, local_shard, scale_each
from hybrid_gkd.compat.transformers import block_classes
from hybrid_gkd.config import FSDPConfig, ModelConfig, OptimConfig, ScheduleConfig
from hybrid_gkd.errors import DeviceMemoryError, ModelError
from hybrid_gkd.models.adapters import adapter_config, add_adapters, base_weights
from hybrid_gkd.models.fast_layers import use_liger
from hybrid_gkd.models.packed_attention import packed_attention, register_packed_attention
from hybrid_gkd.rollout.weights import Layout, gather_in_buckets, identity_shard, layout_of
from hybrid_gkd.student.lora import Adapters, initialize_adapters
from hybrid_gkd.student.moving_average import MovingAverage
from hybrid_gkd.student.pretrained import PATH_KEY, build_model, classifier_head, load_shards, materialize

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GROUP_BYTES = 2**28
"""Largest size of consecutive blocks, in bf16, that are gathered together."""


class ShardedModel:
    """One rank of a model. Raises ModelError: it cannot be loaded.

    Args:
        wrap: maps the Hugging Face model to the root module, whose forward pass is run.
        fsdp: None for a frozen model, which is offloaded and needs no master copy: it is kept in the compute type.
        shard_size: number of consecutive ranks over which weights are sharded; replicated across such groups.
        bucket_bytes: see `gather_in_buckets`; 0 if `full_tensors` is not used.
        compile: see `compile_blocks`.
        seed: seed of the initialization of LoRA adapters.
        optim: optimizer settings; None for a frozen model.
        num_updates: optimizer steps of the whole run: the length of the learning-rate schedule.
        new_head: whether `wrap` replaces the output embedding by a new head, which starts at zero and computes in
            float32.
        classifier: whether the folder has a classifier with one label instead of a language model.
        path_key: configuration key of the folder, for messages.
    """

    section = "actor_rollout_ref.actor"
    """Configuration section, for messages."""
    token_limit = "ppo_max_token_len_per_gpu"
    """Key in `section` that limits a micro-batch."""
    average: MovingAverage | None = None
    """Moving average of the trained parameters, if it is needed."""

    def __init__(
        self, model: ModelConfig, *, wrap: Callable[[Any], nn.Module], shard_size: int, device: torch.device,
        fsdp: FSDPConfig | None = None, bucket_bytes: int = 0, compile: bool = False, seed: int = 0,
        optim: OptimConfig | None = None, num_updates: int = 0, new_head: bool = False, classifier: bool = False,
        path_key: str = PATH_KEY,
    ):  # fmt: skip
        self.device = device
        if device.type == "cuda":
            allocate_workspaces(device)
        if fsdp is None:
            fsdp = FSDPConfig(param_offload=True, model_dtype="bf16" if device.type == "cuda" else "fp32")
        self.fsdp, self.optim, self.bucket_bytes = fsdp, optim, bucket_bytes
        self.num_updates, self.updates_done = num_updates, 0
        self.world_size = dist.get_world_size()
        compute = torch.bfloat16 if device.type == "cuda" else None
        lora, dtype = adapter_config(model), DTYPES[fsdp.model_dtype]
        # Frozen weights are kept in the compute type.
        self.hf_model = build_model(
            model.path, dtype=dtype if lora is None else compute or torch.float32,
            trust_remote_code=model.trust_remote_code, override_config=model.override_config, key=path_key,
            classifier=classifier,
        )
        if device.type == "cuda" and not compile and (reason := use_liger(self.hf_model)):
            logger.info("fused layers of Liger are not used: %s", reason)
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
        self._shard_group = mesh.get_group(mesh.ndim - 1)
        self._saved = set(self.hf_model.state_dict())
        self._blocks = decoder_blocks(self.hf_model)  # before fully_shard, which changes class names
        reduce_dtype = torch.promote_types(dtype, torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype)
        self._shard(mesh, policy, new_head=head if new_head else None)
        materialize(self.model, device)
        own = set(map(id, head.parameters())) if new_head else set()
        new = {name for name, parameter in self.named_parameters() if id(parameter) in own}
        load_shards(self.hf_model, model.path, key=path_key, new=new)
        self.adapters = None if lora is None else Adapters(self.hf_model, lora)
        if lora is not None:
            initialize_adapters(self.hf_model, seed=seed, folder=model.lora_adapter_path)
        parameters = [*self.hf_model.parameters()]  # the shards; during a pass the model has the gathered ones
        self._trained = [p for p in parameters if p.requires_grad]
        self._frozen = [p for p in parameters if not p.requires_grad]
        fused = device.type == "cuda"
        self.optimizer = None if optim is None else make_optimizer(self._trained, optim, fused=fused)

    def _shard(self, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, new_head: nn.Module | None) -> None:
        """Let FSDP2 shard groups of blocks, a new head, which computes in float32, and the rest."""
        groups = block_groups(self._blocks)
        for blocks in groups:
            frees = self.fsdp.reshard_after_forward and blocks is not groups[-1]  # the backward pass begins with these
            fully_shard(blocks, reshard_after_forward=frees, mesh=mesh, mp_policy=policy)
        if new_head is not None:
            in_float32 = MixedPrecisionPolicy(torch.float32)
            fully_shard(new_head, mesh=mesh, mp_policy=in_float32, reshard_after_forward=False)
        # The backward pass needs the head's weight first: do not free it in between.
        fully_shard(self.model, reshard_after_forward=False, mesh=mesh, mp_policy=policy)

    def parameters(self) -> list[Tensor]:
        """Return this rank's shards of the trained parameters."""
        return self._trained

    def frozen_parameters(self) -> list[Tensor]:
        """Return this rank's shards of the frozen parameters: with LoRA all but the adapters."""
        return self._frozen

    def optimizer_tensors(self) -> list[Tensor]:
        """Return this rank's shards of the optimizer state; empty before the first step."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [value for state in states for value in state.values() if torch.is_tensor(value)]

    def reshard(self) -> None:
        """Free the weights that a forward pass without a backward pass leaves gathered."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextlib.contextmanager
    def before_each_backward(self, call: Callable[[int], None]) -> Iterator[None]:
        """Within the context, call `call` before each decoder block's backward pass, with the number of calls left."""
        left = iter(range(len(self._blocks), 0, -1))

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            first = output if torch.is_tensor(output) else output[0]
            if first.requires_grad:  # ignore the recomputation of gradient checkpointing
                first.register_hook(lambda _: call(next(left, 1)))

        hooks = [block.register_forward_hook(after_forward) for block in self._blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def abandon_backward(self) -> None:
        """Drop all gradients and reset FSDP2 for the next forward pass."""
        abandon_backward(self.model)
        self.model.zero_grad()

    @torch.no_grad()
    def clip_grad_norm(self, largest: float) -> Tensor:
        """Clip the gradients to a norm of `largest`; return their global norm before clipping, on the device.

        As torch's clip_grad_norm_, on local shards: DTensor's dispatch costs more than the operations of a small model.
        """
        grads = [local_shard(p.grad) for p in self._trained if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if self._shard_group.size() > 1:
            squared = norm**2.0
            dist.all_reduce(squared, group=self._shard_group)
            norm = squared**0.5
        scale_each(grads, (largest / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def learning_rate(self) -> float:
        """Return the learning rate of the next optimizer step."""
        assert self.optim is not None, "a frozen model has no optimizer"
        return learning_rate(self.optim, self.updates_done, self.num_updates)

    def step(self) -> float:
        """Take an optimizer step, which consumes the gradients; return its learning rate.

        Raises DeviceMemoryError: out of device memory; some weights may have changed.
        """
        assert self.optimizer is not None, "a frozen model has no optimizer"
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
        except torch.OutOfMemoryError as error:  # some parameters may have changed: must not be retried
            failure = DeviceMemoryError(
                "phase optimizer_step: out of device memory within the step; resume from the last checkpoint with "
                f"{self.section}.fsdp_config.optimizer_offload=true or more GPUs. {str(error).splitlines()[0]}"
            )
            failure.weights_changed = True
            raise failure from error
        self.optimizer.zero_grad()
        self.updates_done += 1
        return rate

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameter shards under their Hugging Face names, tied ones under each; without adapters."""
        return base_weights(self.hf_model.named_parameters(remove_duplicate=False))

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that a folder has, such as router biases; every rank has them whole."""
        return ((name, each) for name, each in self.hf_model.named_buffers() if name in self._saved)

    def layout(self) -> Layout:
        """Return the layout of `full_tensors`."""
        return layout_of(self.named_parameters(), self.saved_buffers())

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights in `dtype` under all Hugging Face names, gathered in buckets, and the saved buffers.

        Buffers keep their type. Adapters are merged into the weights, by each rank into its own rows of a bucket.
        """
        weights = gather_in_buckets(
            self.named_parameters(), dtype=dtype, bucket_bytes=self.bucket_bytes,
            shard_of=identity_shard if self.adapters is None else self.adapters.merged,
        )
        return itertools.chain(weights, self.saved_buffers())


def allocate_workspaces(device: torch.device) -> None:
    """Allocate the permanent cuBLAS workspaces of this thread and of autograd's.

    Otherwise torch would allocate them inside a large cached block, which could then never be freed.
    """
    torch.cuda.empty_cache()
    square = torch.zeros(8, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    (square @ square).sum().backward()


def decoder_blocks(model: Any) -> list[nn.Module]:
    """Return the transformer blocks of a Hugging Face model, by its `_no_split_modules`."""
    names = block_classes(model)
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ModelError(f"{type(model).__name__} declares no decoder blocks (_no_split_modules) to shard")
    return blocks


def block_groups(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Group consecutive blocks that are gathered and reduced together, up to `GROUP_BYTES`, at least one.

    FSDP2's host overhead is per group; with small blocks the device would wait for it.
    """
    largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    size = max(1, GROUP_BYTES // (2 * largest))
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def compile_blocks(model: Any) -> None:
    """Compile the operations between attention and matrix products in every decoder block.

    The graphs have a dynamic number of tokens and are shared by all blocks, so only the first pass compiles.
    """
    register_packed_attention(torch.compiler.disable(packed_attention))
    for block in decoder_blocks(model):
        block.forward = torch.compile(block.forward, dynamic=True)


def make_optimizer(trained: list[Tensor], config: OptimConfig, *, fused: bool) -> ShardAdamW:
    """Create AdamW with weight decay on matrices only, not on biases and norms."""
    matrices = [p for p in trained if p.ndim >= 2]
    others = [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return ShardAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused, foreach=not fused)


def learning_rate(config: ScheduleConfig, update: int, num_updates: int) -> float:
    """Return the learning rate of optimizer step `update` (0-based): linear warm-up, then the schedule."""
    warmup = config.lr_warmup_steps or int(config.lr_warmup_steps_ratio * num_updates)
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (update - warmup) / max(1, num_updates - warmup))
    shape = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)

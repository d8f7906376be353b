"""The student: FSDP2 shards of a Hugging Face causal language model, its optimizer and its update.

Knows torch and transformers, but neither Ray nor vLLM. All methods are collective: every rank calls them
in the same order.

Shapes: T packed tokens of a micro-batch, R of them predict response tokens, K ids per row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybrid_gkd.config import ActorConfig, Config, OptimConfig
from hybrid_gkd.errors import DeviceMemoryError, ModelError, TrainingError
from hybrid_gkd.losses.head import LossFunction, head_loss, logprobs_of_ids
from hybrid_gkd.losses.objective import Objective, Targets
from hybrid_gkd.models.packed_attention import PackedBatch, pack, packed_attention, register_packed_attention, to_device
from hybrid_gkd.rollout.weight_sync import WeightSpec, layout_of
from hybrid_gkd.rollout.weights import gather_in_buckets
from hybrid_gkd.student.loading import build_model, load_shards, materialize
from hybrid_gkd.types import MiniBatch, TrainSequence

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LogprobModel(nn.Module):
    """A causal LM whose forward pass returns log-probabilities of given ids, or a loss of them, instead of logits.

    The head runs inside this module's forward, so FSDP2, which shards the embedding, the last norm and the
    head as this module's own parameters, has gathered the output embedding when it is used.

    Raises:
        ModelError: the architecture mixes packed sequences, changes the logits behind the head, or has dropout.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model: Any = model
        self._refuse_leaks()
        self._refuse_inexact_heads()
        self._refuse_dropout()

    def forward(
        self,
        batch: PackedBatch,
        rows: Tensor,
        ids: Tensor,
        loss_fn: LossFunction | None = None,
        *,
        temperature: float,
        topk: int = 0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probabilities of `ids` [R, K] at the packed positions `rows` [R], float32 [R, K]; or a loss of them.

        Returns:
            with `loss_fn`, what `head_loss` returns, the first `topk` ids being the teacher's; else the
            log-probabilities and nothing.
        """
        decoder = getattr(self.model, self.model.base_model_prefix)
        hidden = decoder(**batch.model_kwargs()).last_hidden_state[0][rows]
        weight = self.model.get_output_embeddings().weight
        if loss_fn is None:
            return logprobs_of_ids(hidden, weight, ids, temperature=temperature), {}
        return head_loss(
            hidden, weight, ids, loss_fn, temperature=temperature, with_entropy=True, overlap_topk=topk, tail_topk=topk
        )

    def _refuse_leaks(self) -> None:
        """What does not call the attention function, or not only, is never told where a sequence ends."""
        if not self.model._supports_attention_backend or self.model._is_stateful:
            raise ModelError(
                f"{self.model.config.model_type}: packed sequences would leak into each other; the architecture must "
                "mix tokens in transformers' attention interface only (_supports_attention_backend, not _is_stateful)"
            )

    def _refuse_inexact_heads(self) -> None:
        head, config = self.model.get_output_embeddings(), self.model.config
        if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
            raise ModelError(f"{config.model_type}: the output embedding must be a linear layer without bias")
        caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        for name in (*caps, "logits_scaling", "logit_scale"):
            if getattr(config, name, None) not in (None, 1.0):
                raise ModelError(f"{config.model_type}: config.{name} changes the logits, which is not supported")

    def _refuse_dropout(self) -> None:
        """With it the student is not the policy that sampled, and a step depends on the cut into micro-batches."""
        config = self.model.config
        for module in self.model.modules():
            rates = [value for name, value in vars(module).items() if "drop" in name]  # for torch's function
            if isinstance(module, nn.Dropout):
                rates = [module.p]
            if any(isinstance(rate, float) and rate > 0 for rate in rates):
                fields = [name for name, value in config.to_dict().items() if "drop" in name and value]
                raise ModelError(
                    f"{config.model_type}: {type(module).__name__} has dropout, which is not supported; fields to set "
                    f"to 0.0 through actor_rollout_ref.model.override_config: {', '.join(fields) or 'none known'}"
                )


class Actor:
    """One rank of the student.

    Args:
        config: the whole configuration.
        device: where this rank computes.
        num_updates: optimizer steps of the whole run, the length of the learning-rate schedule.

    Raises:
        ModelError: the model cannot be loaded or its architecture cannot be trained exactly.
    """

    def __init__(self, config: Config, *, device: torch.device, num_updates: int):
        self.config: ActorConfig = config.actor_rollout_ref.actor
        self.objective = Objective(config.distillation, clip_ratio=self.config.clip_ratio)
        self.topk = config.distillation.topk if config.distillation.enabled else 0
        self.sampling_temperature = config.actor_rollout_ref.rollout.temperature
        self.temperature = config.distillation.temperature if self.topk else self.sampling_temperature
        self.bucket_bytes = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * 2**20
        self.device = device
        if device.type == "cuda":
            take_workspaces(device)
        self.num_updates = num_updates
        self.updates_done = 0
        self._sums: dict[str, Tensor] = {}
        """What is reported, summed over the micro-batches since the last step."""
        self.world_size = dist.get_world_size()
        model_config = config.actor_rollout_ref.model
        self.hf_model = build_model(
            model_config.path,
            dtype=DTYPES[self.config.fsdp_config.model_dtype],
            trust_remote_code=model_config.trust_remote_code,
            override_config=model_config.override_config,
        )
        if model_config.enable_gradient_checkpointing:
            self.hf_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.hf_model.train()
        if self.config.use_torch_compile:
            compile_blocks(self.hf_model)
        self.model: Any = LogprobModel(self.hf_model)
        self.hidden_size = self.hf_model.get_output_embeddings().in_features
        self._shard(config.shard_size)
        materialize(self.model, device)
        load_shards(self.hf_model, model_config.path)
        self.optimizer = make_optimizer(self.hf_model, self.config.optim, fused=device.type == "cuda")

    def _shard(self, shard_size: int) -> None:
        """`fully_shard` per decoder block, then the rest (embedding, last norm, head) as one group.

        The weights are sharded within groups of `shard_size` consecutive ranks and replicated across them.
        """
        if shard_size == self.world_size:
            mesh = init_device_mesh(self.device.type, (shard_size,))
        else:
            shape = (self.world_size // shard_size, shard_size)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        compute = torch.bfloat16 if self.device.type == "cuda" else None
        reduce_dtype = torch.promote_types(self.hf_model.dtype, torch.float32)
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype),
        }
        for block in decoder_blocks(self.hf_model):
            fully_shard(block, reshard_after_forward=self.config.fsdp_config.reshard_after_forward, **options)
        # The head's weight is needed again at once, in the backward pass: do not free it in between.
        fully_shard(self.model, reshard_after_forward=False, **options)

    def parameters(self) -> list[Tensor]:
        """The parameter shards of this rank."""
        return list(self.hf_model.parameters())

    def optimizer_tensors(self) -> list[Tensor]:
        """The optimizer-state shards of this rank; empty before the first step."""
        return [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]

    def update(
        self, batch: MiniBatch, *, before_last: Callable[[], None] = lambda: None,
        before_step: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch, or on the last part of one whose other parts were accumulated.

        The loss is the sum over response tokens divided by the number of response tokens of the mini-batch
        over all ranks, so it does not depend on how the batch is cut into micro-batches or ranks.

        Args:
            batch: this rank's share; `num_tokens` is of the whole mini-batch.
            before_last: called before the last micro-batch.
            before_step: called between the last backward pass and the optimizer step.

        Returns:
            Metrics of the whole mini-batch, equal on all ranks.

        Raises:
            TrainingError: the gradient is not finite; no weight has changed.
            torch.OutOfMemoryError: the device memory did not suffice; no weight has changed.
            DeviceMemoryError: the same within the optimizer step; some weights may have changed.
        """
        self.accumulate(batch, before_last=before_last)
        sums, self._sums = self._sums, {}  # now: whoever tries again after a failure must begin anew
        grad_norm = nn.utils.clip_grad_norm_(self.hf_model.parameters(), self.config.grad_clip)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        metrics = self._all_reduce(sums, batch.num_tokens)  # waits for the device, which has been given all work by now
        metrics["actor/grad_norm"] = float(grad_norm)
        if not math.isfinite(metrics["actor/grad_norm"]) or not math.isfinite(metrics["actor/loss"]):
            raise TrainingError(
                f"optimizer step {self.updates_done + 1}: loss {metrics['actor/loss']}, "
                f"gradient norm {metrics['actor/grad_norm']}; the step was not taken"
            )
        before_step()
        metrics["actor/lr"] = learning_rate(self.config.optim, self.updates_done, self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = metrics["actor/lr"]
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError as error:  # some parameters may have changed: never to be tried again
            raise DeviceMemoryError(
                "phase optimizer_step: out of device memory within the step, continue from the last checkpoint; switch "
                "on actor_rollout_ref.actor.fsdp_config.optimizer_offload or take more GPUs. "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.optimizer.zero_grad(set_to_none=True)
        self.updates_done += 1
        return metrics

    def accumulate(self, batch: MiniBatch, *, before_last: Callable[[], None] = lambda: None) -> None:
        """Add the gradients of a part of a mini-batch to those of its parts before; see `update`, which gets the last.

        Raises:
            torch.OutOfMemoryError: the device memory did not suffice; there are no gradients, of earlier parts neither.
        """
        try:
            self._backward(batch, before_last)
        except torch.OutOfMemoryError:
            self._abandon_backward()
            raise

    def _backward(self, batch: MiniBatch, before_last: Callable[[], None]) -> None:
        sums = self._sums
        if not sums:
            self.optimizer.zero_grad(set_to_none=True)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            last = number == len(batch.micro_batches)
            if last:
                before_last()
            if not self.config.fsdp_config.reshard_after_forward:  # what was gathered serves all micro-batches
                self.model.set_reshard_after_backward(last)
            loss_sum, parts = self._loss(micro_batch)
            # FSDP2 averages gradients over ranks; the loss is a sum over them.
            (loss_sum * (self.world_size / batch.num_tokens)).backward()
            for name, value in (parts | {"actor/loss": loss_sum.detach()}).items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value

    def _abandon_backward(self) -> None:
        """Drop all gradients and bring FSDP2 back to where a forward pass can begin.

        It has no public way for that; what it queues to run after a backward pass does exactly this.
        """
        self._sums = {}
        self.model.set_reshard_after_backward(True)
        self.model.zero_grad(set_to_none=True)  # of parameters that are gathered right now
        self.model._get_fsdp_state()._root_post_backward_final_callback()
        self.model.zero_grad(set_to_none=True)

    def _loss(self, micro_batch: tuple[TrainSequence, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over the response tokens of a micro-batch, and sums of what is reported.

        An empty micro-batch takes part in the collectives and adds nothing.
        """
        batch, rows, sampled_ids = self._pack(micro_batch)
        ids, targets = self._targets(micro_batch, sampled_ids)
        teacher = targets.teacher_logprobs
        return self.model(
            batch, rows, ids, self.objective.loss_fn(targets), temperature=self.temperature,
            topk=0 if teacher is None else teacher.shape[1],
        )

    def _targets(self, micro_batch: tuple[TrainSequence, ...], sampled_ids: Tensor) -> tuple[Tensor, Targets]:
        """The ids [R, K] whose log-probabilities the loss needs, and what it compares them with."""
        columns, values = [], dict[str, Tensor]()
        teacher = [item.teacher for item in micro_batch if item.teacher is not None]
        if self.topk and teacher:
            columns.append(self._concat([t.ids[:, : self.topk] for t in teacher], torch.int64))
            values["teacher_logprobs"] = self._concat([t.logprobs[:, : self.topk] for t in teacher])
            values["teacher_sampled"] = self._concat([t.sampled_logprobs for t in teacher])
        for name in ("advantages", "old_logprobs", "importance_weights"):
            found = [value for item in micro_batch if (value := getattr(item, name)) is not None]
            if found:
                values[name] = self._concat(found)
        if self.objective.uses_sampled or not columns:
            columns.append(sampled_ids[:, None])
        return torch.cat(columns, 1), Targets(**values)

    @torch.no_grad()
    def compute_logprobs(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """Log-probabilities of the sampled tokens under the current weights, at the sampling temperature.

        Returns:
            sequence index -> float32 [R], for the sequences of this rank.
        """
        result: dict[int, np.ndarray] = {}
        for micro_batch in micro_batches:
            batch, rows, ids = self._pack(micro_batch)
            logprobs, _ = self.model(batch, rows, ids[:, None], temperature=self.sampling_temperature)
            lengths = [len(item.sequence.response_ids) for item in micro_batch]
            for item, values in zip(micro_batch, logprobs[:, 0].cpu().split(lengths), strict=True):
                result[item.sequence.index] = values.numpy()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward pass nothing else frees what a forward pass keeps gathered
        return result

    def _pack(self, micro_batch: tuple[TrainSequence, ...]) -> tuple[PackedBatch, Tensor, Tensor]:
        """Packed inputs, the rows [R] whose hidden state predicts a response token, and those tokens [R]."""
        if not micro_batch:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
            return pack([np.zeros(2, np.int32)], self.device), nothing, nothing  # one token would compile anew
        sequences = [item.sequence for item in micro_batch]
        batch = pack([np.concatenate([s.prompt_ids, s.response_ids]) for s in sequences], self.device)
        rows, start = [], 0
        for s in sequences:
            first = start + len(s.prompt_ids) - 1
            rows.append(np.arange(first, first + len(s.response_ids)))
            start += s.num_tokens
        return batch, self._concat(rows, torch.int64), self._concat([s.response_ids for s in sequences], torch.int64)

    def _concat(self, arrays: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return to_device(np.concatenate(arrays), self.device).to(dtype)

    def _all_reduce(self, sums: dict[str, Tensor], num_tokens: int) -> dict[str, float]:
        """Sums over micro-batches of this rank -> means over the response tokens of all ranks."""
        # The same names on every rank, also on one that had only empty micro-batches.
        names = ["actor/loss", "entropy", *self.objective.reported]
        if self.topk:
            names += ["overlap_ratio", "overlap_rows"]
        stacked = torch.stack([sums.get(name, torch.zeros((), device=self.device)).double() for name in names])
        if self.world_size > 1:  # for a single rank NCCL would take 0.4 GiB to do nothing
            dist.all_reduce(stacked)
        metrics = dict(zip(names, (stacked / num_tokens).tolist(), strict=True))
        metrics["actor/entropy"] = metrics.pop("entropy")
        if self.topk:
            metrics["actor/distillation/overlap_ratio"] = metrics.pop("overlap_ratio") / metrics.pop("overlap_rows")
        return metrics

    def weight_layout(self) -> list[WeightSpec]:
        """What `full_tensors` hands out, in its order."""
        return layout_of(self.hf_model.named_parameters(remove_duplicate=False))

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights in `dtype` under their Hugging Face names, gathered in buckets.

        A tied output embedding is handed out too, since an engine may hold a copy of its own.
        """
        parameters = self.hf_model.named_parameters(remove_duplicate=False)
        return gather_in_buckets(parameters, dtype=dtype, bucket_bytes=self.bucket_bytes)


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS take the memory that it needs in this thread and in autograd's, and that it never gives back.

    At the first product, the cut that torch makes for it may be of any large block that is free just then, and keeps
    all of that from going back to the device. Now, with nothing cached, it is a block of its own.
    """
    torch.cuda.empty_cache()
    square = torch.zeros(8, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    (square @ square).sum().backward()


def split_micro_batches(batch: MiniBatch) -> MiniBatch | None:
    """The same mini-batch in micro-batches of half as many sequences; None if there is nothing left to split."""
    if all(len(micro_batch) < 2 for micro_batch in batch.micro_batches):
        return None
    halves: list[tuple[TrainSequence, ...]] = []
    for micro_batch in batch.micro_batches:
        middle = -(-len(micro_batch) // 2)
        halves += [part for part in (micro_batch[:middle], micro_batch[middle:]) if part]
    return MiniBatch(micro_batches=tuple(halves), num_tokens=batch.num_tokens)


def decoder_blocks(model: Any) -> list[nn.Module]:
    """The transformer blocks of a Hugging Face model, by the class names that it must not split."""
    names = set(model._no_split_modules or [])
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ModelError(f"{type(model).__name__} names no decoder blocks (_no_split_modules) to shard")
    return blocks


def compile_blocks(model: Any) -> None:
    """Let torch.compile fuse what lies between the attention and the matrix products of every decoder block.

    FSDP2's hooks and gradient checkpointing stay outside. The graphs take any number of tokens and serve all blocks,
    so that only the first forward and backward pass compile.
    """
    register_packed_attention(torch.compiler.disable(packed_attention))
    for block in decoder_blocks(model):
        block.forward = torch.compile(block.forward, dynamic=True)


def make_optimizer(model: nn.Module, config: OptimConfig, *, fused: bool) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, as biases and norms are not what it is meant to shrink."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=fused
    )


def learning_rate(config: OptimConfig, update: int, num_updates: int) -> float:
    """Learning rate of optimizer step `update` (0-based) of `num_updates`: linear warm-up, then the schedule."""
    if update < config.lr_warmup_steps:
        return config.lr * (update + 1) / config.lr_warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = (update - config.lr_warmup_steps) / max(1, num_updates - config.lr_warmup_steps)
    progress = min(1.0, progress)
    shape = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)

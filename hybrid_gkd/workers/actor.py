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
from hybrid_gkd.errors import ModelError, TrainingError
from hybrid_gkd.losses.divergence import forward_kl, support_mass
from hybrid_gkd.losses.head import logprobs_of_ids
from hybrid_gkd.losses.policy import clipped_policy_loss
from hybrid_gkd.packed_attention import PackedBatch, pack
from hybrid_gkd.types import MiniBatch, TrainSequence
from hybrid_gkd.workers.loading import build_model, load_shards, materialize
from hybrid_gkd.workers.publish import gather_in_buckets

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LogprobModel(nn.Module):
    """A causal LM whose forward pass returns log-probabilities of given ids instead of logits.

    The head runs inside this module's forward, so FSDP2, which shards the embedding, the last norm and the
    head as this module's own parameters, has gathered the output embedding when it is used.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model: Any = model
        self._refuse_inexact_heads()

    def forward(
        self, batch: PackedBatch, rows: Tensor, ids: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of `ids` [R, K] at the packed positions `rows` [R]; float32 [R, K], entropy [R]."""
        decoder = getattr(self.model, self.model.base_model_prefix)
        hidden = decoder(**batch.model_kwargs()).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        return logprobs_of_ids(hidden[rows], weight, ids, temperature=temperature, with_entropy=with_entropy)

    def _refuse_inexact_heads(self) -> None:
        head, config = self.model.get_output_embeddings(), self.model.config
        if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
            raise ModelError(f"{config.model_type}: the output embedding must be a linear layer without bias")
        for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(config, name, None) not in (None, 1.0):
                raise ModelError(f"{config.model_type}: config.{name} changes the logits, which is not supported")


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
        self.distillation = config.distillation
        self.sampling_temperature = config.actor_rollout_ref.rollout.temperature
        self.bucket_bytes = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * 2**20
        self.device = device
        self.num_updates = num_updates
        self.updates_done = 0
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
        self.model = LogprobModel(self.hf_model)
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
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
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

    def update(self, batch: MiniBatch, *, before_step: Callable[[], None] = lambda: None) -> dict[str, float]:
        """One optimizer step on a mini-batch.

        The loss is the sum over response tokens divided by the number of response tokens of the mini-batch
        over all ranks, so it does not depend on how the batch is cut into micro-batches or ranks.

        Args:
            batch: this rank's share.
            before_step: called between the last backward pass and the optimizer step.

        Returns:
            Metrics of the whole mini-batch, equal on all ranks.

        Raises:
            TrainingError: the gradient is not finite; no weight has changed.
        """
        sums: dict[str, Tensor] = {}
        self.optimizer.zero_grad(set_to_none=True)
        for micro_batch in batch.micro_batches:
            loss_sum, parts = self._loss(micro_batch)
            # FSDP2 averages gradients over ranks; the loss is a sum over them.
            (loss_sum * (self.world_size / batch.num_tokens)).backward()
            for name, value in (parts | {"actor/loss": loss_sum.detach()}).items():
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value
        metrics = self._all_reduce(sums, batch.num_tokens)
        grad_norm = nn.utils.clip_grad_norm_(self.hf_model.parameters(), self.config.grad_clip)
        metrics["actor/grad_norm"] = float(grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm)
        if not math.isfinite(metrics["actor/grad_norm"]) or not math.isfinite(metrics["actor/loss"]):
            raise TrainingError(
                f"optimizer step {self.updates_done + 1}: loss {metrics['actor/loss']}, "
                f"gradient norm {metrics['actor/grad_norm']}; the step was not taken"
            )
        before_step()
        metrics["actor/lr"] = learning_rate(self.config.optim, self.updates_done, self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = metrics["actor/lr"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates_done += 1
        return metrics

    def _loss(self, micro_batch: tuple[TrainSequence, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over the response tokens of a micro-batch, and sums of what is reported."""
        distil = not micro_batch or micro_batch[0].teacher is not None
        temperature = self.distillation.temperature if distil else self.sampling_temperature
        batch, rows, sampled_ids = self._pack(micro_batch)
        teacher = [item.teacher for item in micro_batch if item.teacher is not None]
        ids = self._concat([t.ids for t in teacher], torch.int64) if teacher else sampled_ids[:, None]
        logprobs, entropy = self.model(batch, rows, ids, temperature=temperature, with_entropy=True)
        assert entropy is not None
        if not micro_batch:  # takes part in the collectives, adds nothing
            return logprobs.sum() * 0.0, {}
        parts = {"actor/entropy": entropy.sum()}
        if teacher:
            loss = self._distillation_loss(self._concat([t.logprobs for t in teacher]), logprobs, parts)
        else:
            loss = self._policy_loss(micro_batch, logprobs[:, 0], parts)
        return loss, parts

    def _distillation_loss(self, teacher_logprobs: Tensor, logprobs: Tensor, parts: dict[str, Tensor]) -> Tensor:
        divergence = forward_kl(teacher_logprobs, logprobs, tail=self.distillation.tail).sum()
        parts["actor/kl_loss"] = divergence.detach()
        parts["actor/distillation/student_mass"] = support_mass(logprobs.detach()).sum()
        parts["actor/distillation/teacher_mass"] = support_mass(teacher_logprobs).sum()
        return divergence * self.distillation.distillation_loss_coef

    def _policy_loss(
        self, micro_batch: tuple[TrainSequence, ...], logprobs: Tensor, parts: dict[str, Tensor]
    ) -> Tensor:
        old_logprobs = self._concat([item.old_logprobs for item in micro_batch])
        advantages = self._concat([item.advantages for item in micro_batch])
        loss, clipped = clipped_policy_loss(logprobs, old_logprobs, advantages, clip_ratio=self.config.clip_ratio)
        parts["actor/pg_clipfrac"] = clipped.sum()
        parts["actor/ppo_kl"] = (old_logprobs - logprobs.detach()).sum()
        return loss.sum()

    @torch.no_grad()
    def compute_logprobs(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """Log-probabilities of the sampled tokens under the current weights, at the sampling temperature.

        Returns:
            sequence index -> float32 [R], for the sequences of this rank.
        """
        result: dict[int, np.ndarray] = {}
        for micro_batch in micro_batches:
            batch, rows, ids = self._pack(micro_batch)
            logprobs, _ = self.model(
                batch, rows, ids[:, None], temperature=self.sampling_temperature, with_entropy=False
            )
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
            return pack([np.zeros(1, np.int32)], self.device), nothing, nothing
        sequences = [item.sequence for item in micro_batch]
        batch = pack([np.concatenate([s.prompt_ids, s.response_ids]) for s in sequences], self.device)
        rows, start = [], 0
        for s in sequences:
            first = start + len(s.prompt_ids) - 1
            rows.append(np.arange(first, first + len(s.response_ids)))
            start += s.num_tokens
        return batch, self._concat(rows, torch.int64), self._concat([s.response_ids for s in sequences], torch.int64)

    def _concat(self, arrays: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.device, dtype)

    def _all_reduce(self, sums: dict[str, Tensor], num_tokens: int) -> dict[str, float]:
        """Sums over micro-batches of this rank -> means over the response tokens of all ranks."""
        names = self._metric_names()
        stacked = torch.stack([sums.get(name, torch.zeros((), device=self.device)).float() for name in names])
        dist.all_reduce(stacked)
        return dict(zip(names, (stacked / num_tokens).tolist(), strict=True))

    def _metric_names(self) -> list[str]:
        """The same on every rank, also on one that had only empty micro-batches."""
        if self.distillation.enabled:
            special = ["actor/kl_loss", "actor/distillation/student_mass", "actor/distillation/teacher_mass"]
        else:
            special = ["actor/pg_clipfrac", "actor/ppo_kl"]
        return ["actor/loss", "actor/entropy", *special]

    def full_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights in `dtype` under their Hugging Face names, gathered in buckets.

        A tied output embedding is handed out too, since an engine may hold a copy of its own.
        """
        parameters = self.hf_model.named_parameters(remove_duplicate=False)
        return gather_in_buckets(parameters, dtype=dtype, bucket_bytes=self.bucket_bytes)


def decoder_blocks(model: Any) -> list[nn.Module]:
    """The transformer blocks of a Hugging Face model, by the class names that it must not split."""
    names = set(model._no_split_modules or [])
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ModelError(f"{type(model).__name__} names no decoder blocks (_no_split_modules) to shard")
    return blocks


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

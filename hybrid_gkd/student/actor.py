"""The actor: a sharded model with the objective of distillation or PPO. Knows neither Ray nor vLLM.

Shapes: R response tokens of a micro-batch, K ids per response token.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_gkd.config import Config
from hybrid_gkd.losses.objective import Objective, Targets
from hybrid_gkd.student.logprob_model import LogprobModel, concat, pack_responses, sampled_logprobs, top_candidates
from hybrid_gkd.student.trained_model import TrainedModel
from hybrid_gkd.types import TeacherTopK, TrainSequence

SHOWN_CANDIDATES = 5
"""Of teacher and student, at a token of a held-out answer."""


class Actor(TrainedModel):
    """One rank of the student. Raises ModelError if it cannot be loaded or its architecture not be trained exactly."""

    prefix, loss_name = "actor", "actor/loss"

    def __init__(self, config: Config, *, device: torch.device, num_updates: int):
        arr = config.actor_rollout_ref
        self.objective = Objective(config.distillation, arr.actor)
        self.topk = config.distillation.topk if config.distillation.enabled else 0
        self.ref_topk = config.ref_topk
        self.sampling_temperature = arr.rollout.temperature
        self.temperature = config.distillation.temperature if self.topk else self.sampling_temperature
        super().__init__(
            arr.model, wrap=LogprobModel, fsdp=arr.actor.fsdp_config, shard_size=config.shard_size, device=device,
            bucket_bytes=arr.rollout.update_weights_bucket_megabytes * 2**20, compile=arr.actor.use_torch_compile,
            optim=arr.actor.optim, num_updates=num_updates, grad_clip=arr.actor.grad_clip, seed=config.trainer.seed,
        )

    def _loss(self, micro_batch: tuple[TrainSequence, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sums over the response tokens of a micro-batch: of the loss, and of the metrics by name."""
        batch, rows, sampled_ids = pack_responses(micro_batch, self.device)
        ids, targets = self._targets(micro_batch, sampled_ids)
        candidates = targets.teacher_logprobs if targets.ref_topk_logprobs is None else targets.ref_topk_logprobs
        topk = 0 if candidates is None else candidates.shape[1]
        options: dict[str, Any] = {"entropy_weights": self.objective.entropy_weights(targets, len(rows), self.device)}
        if self.objective.of_sequences and targets.old_logprobs is not None:
            lengths = [len(item.sequence.response_ids) for item in micro_batch]
            numbers = np.repeat(np.arange(len(lengths)), lengths)
            targets = replace(targets, sequence=concat([numbers], self.device, torch.int64))
            options["prepare"] = lambda sampled: self.objective.loss_fn(
                self.objective.with_sequence_ratios(targets, sampled)
            )
        return self.model(
            batch, rows, ids, self.objective.loss_fn(targets), temperature=self.temperature, topk=topk,
            with_overlap=self.topk > 0, **options,
        )

    def _targets(self, micro_batch: tuple[TrainSequence, ...], sampled_ids: Tensor) -> tuple[Tensor, Targets]:
        """The ids [R, K] whose log-probabilities the loss needs, and the tensors that it compares them with."""
        joined = functools.partial(concat, device=self.device)
        columns, values = [], dict[str, Tensor]()
        teacher = [item.teacher for item in micro_batch if item.teacher is not None]
        if self.topk and teacher:
            columns.append(joined([t.ids for t in teacher], dtype=torch.int64))
            values["teacher_logprobs"] = joined([t.logprobs for t in teacher])
            values["teacher_tail"] = joined([t.tail_logprobs for t in teacher])
            values["teacher_sampled"] = joined([t.sampled_logprobs for t in teacher])
            if any(item.teacher_weight != 1 for item in micro_batch):
                factors = [np.full(len(i.sequence.response_ids), i.teacher_weight, np.float32) for i in micro_batch]
                values["teacher_weights"] = joined(factors)
        reference = [item.ref_topk for item in micro_batch if item.ref_topk is not None]
        if reference:
            columns.append(joined([each.ids for each in reference], dtype=torch.int64))
            values["ref_topk_logprobs"] = joined([each.logprobs for each in reference])
            values["ref_tail"] = joined([each.tail_logprobs for each in reference])
        for name in ("advantages", "old_logprobs", "ref_logprobs", "loss_weights", "sampled_weights"):
            found = [value for item in micro_batch if (value := getattr(item, name)) is not None]
            if found:
                values[name] = joined(found)
        if self.objective.uses_sampled or not columns:
            columns.append(sampled_ids[:, None])
        return torch.cat(columns, 1), Targets(**values)

    def compute_logprobs(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """Sequence index -> float32 [R], the log-probabilities of the sampled tokens at the sampling temperature."""
        self._seed()
        temperature = self.sampling_temperature
        found = sampled_logprobs(self.model, micro_batches, temperature=temperature, device=self.device)
        self.reshard()
        return found

    @torch.no_grad()
    def compute_divergences(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """Sequence index -> float32 [R, 2 + 3 s], at every response token, at `distillation.temperature`.

        First forward and reverse KL between teacher and student, nats, on the teacher's top k and the tail; the rest
        compares their s most likely candidates, see `Objective.keep_divergences`. s is 5, or k where that is less.
        """
        self._seed()
        result: dict[int, np.ndarray] = {}
        for micro_batch in micro_batches:
            batch, rows, sampled_ids = pack_responses(micro_batch, self.device)
            ids, targets = self._targets(micro_batch, sampled_ids)
            found = torch.zeros(len(rows), 2 + 3 * min(SHOWN_CANDIDATES, self.topk), device=self.device)
            loss_fn, topk = self.objective.keep_divergences(targets, found), self.topk if micro_batch else 0
            self.model(batch, rows, ids, loss_fn, temperature=self.temperature, topk=topk)
            lengths = [len(item.sequence.response_ids) for item in micro_batch]
            for item, values in zip(micro_batch, found.cpu().split(lengths), strict=True):
                result[item.sequence.index] = values.numpy()
        self.reshard()
        return result

    def compute_ref_logprobs(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """As `compute_logprobs`, of the model below the LoRA adapters: a reference that needs no second model."""
        assert self.adapters is not None, "a student without adapters has no other weights"
        with self.adapters.left_out():
            return self.compute_logprobs(micro_batches)

    def compute_ref_topk(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, TeacherTopK]:
        """As `compute_ref_logprobs`, with the `ref.topk` most likely tokens."""
        assert self.adapters is not None, "a student without adapters has no other weights"
        self._seed()
        with self.adapters.left_out():
            found = top_candidates(
                self.model, micro_batches, temperature=self.sampling_temperature, device=self.device, k=self.ref_topk,
                num_ids=self.num_ids,
            )
        self.reshard()
        return found

    @property
    def num_ids(self) -> int:
        """Rows of its head."""
        return int(self.model.model.config.get_text_config().vocab_size)

    def _names(self) -> list[str]:
        overlap = ["overlap_ratio", "overlap_rows"] if self.topk else []
        return ["actor/loss", "entropy", *self.objective.reported, *overlap]

    def _all_reduce(self, sums: dict[str, Tensor], num_tokens: int) -> dict[str, float]:
        """The means, under the names of the metrics."""
        metrics = super()._all_reduce(sums, num_tokens)
        metrics["actor/entropy"] = metrics.pop("entropy")
        if self.topk:
            metrics["actor/distillation/overlap_ratio"] = metrics.pop("overlap_ratio") / metrics.pop("overlap_rows")
        return metrics

"""The actor: a sharded model with the objective of distillation or PPO. Depends on neither Ray nor vLLM.

Shapes: R trained tokens of a micro-batch, K candidates per trained token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_gkd.config import ActorConfig, Config, DistillationConfig, summed_teachers
from hybrid_gkd.errors import prefix_errors
from hybrid_gkd.losses import table, terms
from hybrid_gkd.losses.head import LossFunction, RowStatistics
from hybrid_gkd.losses.objective import POOLED, Objective
from hybrid_gkd.losses.selection import highest
from hybrid_gkd.losses.token_weights import num_selected
from hybrid_gkd.student.logprob_model import (
    LogprobModel,
    by_sample,
    check_packing,
    concat,
    count_rows,
    count_tokens,
    join_signals,
    pack_samples,
    sampled_logprobs,
    top_candidates,
)
from hybrid_gkd.student.moving_average import MovingAverage
from hybrid_gkd.student.pretrained import PATH_KEY
from hybrid_gkd.student.sharded_model import learning_rate
from hybrid_gkd.student.trained_model import TrainedModel
from hybrid_gkd.types import Sample, SampleId, TopK, quarter_of_tokens

WARMUP_AFTER_SFT = 10
"""The warm-up after a warm start by SFT is one in so many of the optimizer steps, if none is configured: a high initial
rate would undo the warm start."""
SHOWN_CANDIDATES = 5
"""Number of candidates of teacher and student shown per token of a held-out completion."""
HEAD_METRICS = {"entropy": "actor/entropy", "overlap_ratio": "actor/distillation/overlap_ratio"}
"""Metric names by the head's names."""
HEAD_ROWS = "rows of the head"
"""Name of the count of rows that the head computes, if it differs from the number of trained tokens."""


def make_objective(
    loss: DistillationConfig, actor: ActorConfig, *, given: bool = False,
    teachers: Mapping[str, float] = MappingProxyType({}),
) -> Objective:
    """Return the terms of the loss in order of summation.

    `given`: whether there are given completions; `teachers`: name -> weight of those with a term each.
    """
    row = table.policy_loss(actor.policy_loss.loss_mode)
    bounds = {f"clip_ratio_{side}": getattr(actor, f"clip_ratio_{side}") for side in ("low", "high")}
    options = {key: actor.clip_ratio if value is None else value for key, value in bounds.items()}
    options["clip_ratio_c"] = math.inf if actor.clip_ratio_c is None else actor.clip_ratio_c
    policy = terms.policy_loss(row, {key: options[key] for key in row.options})
    chosen, on_rewards = [], not loss.enabled or loss.use_task_rewards or loss.as_reward
    for teacher, weight in (teachers or {"": 1.0}).items() if loss.enabled else ():
        chosen.append(terms.distillation(
            table.weighted_divergences(loss.loss_mode, loss.mixed_weights, loss.loss_fn),
            tail=loss.tail, beta=loss.beta,
            estimator=loss.loss_mode, policy=policy if loss.use_policy_gradient else None,
            # As a reward, it is part of the advantages, and the divergence is only reported.
            coefficient=0.0 if loss.as_reward else weight * loss.distillation_loss_coef,
            limit=None if loss.as_reward else loss.loss_max_clamp, teacher=teacher,
        ))  # fmt: skip
    if given:
        chosen.append(terms.sft())
    if on_rewards:
        chosen.append(terms.policy(policy))
    if actor.use_kl_loss:
        chosen.append(terms.reference(table.KL_LOSSES[actor.kl_loss_type], actor.kl_loss_coef))
    of_sequences = row.of_sequences and (on_rewards or loss.use_policy_gradient)
    return Objective(chosen, of_sequences=of_sequences, entropy_coeff=actor.entropy_coeff)


class Actor(TrainedModel):
    """One rank of the student. Raises ModelError: it cannot be loaded or its architecture is not supported.

    `num_ids`: see `LogprobModel`.
    """

    prefix, loss_name = "actor", "actor/loss"

    def __init__(self, config: Config, *, device: torch.device, num_updates: int, num_ids: int | None = None):
        arr = config.actor_rollout_ref
        given = config.data.response_key is not None
        teachers = {each.name: each.weight for each in summed_teachers(config)}
        self.objective = make_objective(config.distillation, arr.actor, given=given, teachers=teachers)
        self.optim_sft, self.sft_updates = arr.actor.optim_sft, config.sft_updates
        row = config.distillation.weighting
        self.selection = row if row is not None and row.needs == "student" else None
        """Token weights that depend on the student's distribution, if configured."""
        self.skips_rows = config.distils_alone
        """Whether the head skips unselected rows, because no other term needs them."""
        self.topk = config.distillation.topk if config.distillation.enabled else 0
        self.ref_topk = config.ref_topk
        self.sampling_temperature = arr.rollout.temperature
        self.temperature = config.distillation.temperature if self.topk else self.sampling_temperature
        super().__init__(
            arr.model, wrap=functools.partial(LogprobModel, num_ids=num_ids), fsdp=arr.actor.fsdp_config,
            shard_size=config.shard_size, device=device,
            bucket_bytes=arr.rollout.update_weights_bucket_megabytes * 2**20, compile=arr.actor.use_torch_compile,
            optim=arr.actor.optim, num_updates=num_updates, grad_clip=arr.actor.grad_clip, seed=config.trainer.seed,
        )
        self.teacher_source = arr.teacher.source
        if config.has_moving_average:
            self.average = MovingAverage(self.parameters(), arr.teacher.ema_decay)

    def learning_rate(self) -> float:
        """Return the rate of the next optimizer step; the first `sft_updates` steps have their own schedule."""
        assert self.optim is not None
        done, left = self.updates_done - self.sft_updates, self.num_updates - self.sft_updates
        if done < 0:
            return learning_rate(self.optim_sft, self.updates_done, self.sft_updates)
        optim = self.optim
        if self.sft_updates and not (optim.lr_warmup_steps or optim.lr_warmup_steps_ratio):
            optim = dataclasses.replace(optim, lr_warmup_steps=max(2, math.ceil(left / WARMUP_AFTER_SFT)))
        return learning_rate(optim, done, left)

    def _loss(self, micro_batch: tuple[Sample, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return sums over a micro-batch's trained tokens: the loss, and metrics and token counts by name."""
        batch, rows, sampled_ids = pack_samples(micro_batch, self.device)
        ids, topk, signals = self._signals(micro_batch, sampled_ids)
        options: dict[str, Any] = {"entropy_weights": self.objective.entropy_weights(signals, len(rows), self.device)}
        if self.objective.of_sequences and "old_logprobs" in signals:
            lengths = [sample.num_trained for sample in micro_batch if sample.num_trained]
            numbers = concat([np.repeat(np.arange(len(lengths)), lengths)], self.device, torch.int64)
            options["prepare"] = lambda sampled: self.objective.loss_fn(
                self.objective.with_sequence_ratios(signals, numbers, sampled)
            )
        selects = self.selection is not None and "teacher.logprobs" in signals
        if selects:
            options["select"] = functools.partial(self._select, micro_batch, signals)
        quarters = [quarter_of_tokens(sample.num_trained) for sample in micro_batch]
        signals["quarter"] = concat([np.zeros(0), *quarters], self.device)
        first = self.objective.candidates[0] if self.objective.candidates else ""
        loss, sums = self.model(
            batch, rows, ids, self.objective.loss_fn(signals), temperature=self.temperature, topk=topk,
            with_overlap=f"{first}.ids" in signals, overlap_mask=signals.get(f"has.{first}"), **options,
        )

        def count(signal_names: tuple[str, ...], quarter: int | None) -> Tensor:
            has_signal = any(not sample.signals.keys().isdisjoint(signal_names) for sample in micro_batch)
            if selects and self.skips_rows and has_signal:
                return count_rows(signals["quarter"], quarter=quarter)
            return count_tokens(micro_batch, signal_names, self.device, quarter=quarter)

        counts = {
            _count(name, names): sum(count(any_of, _quarter(name)) for any_of in _groups(name, names))
            for name, names in self.objective.reported.items()
        }
        if self.selection is not None:
            counts[HEAD_ROWS] = count_rows(signals["quarter"])
        return loss, {HEAD_METRICS.get(name, name): value for name, value in sums.items()} | counts

    def _signals(self, micro_batch: tuple[Sample, ...], sampled_ids: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Return the inputs of the loss: ids [R, ...] whose log-probabilities it needs, the number of leading ids that
        define the tail, and the signals."""
        signals = join_signals(micro_batch, self.objective.signals, self.device)
        columns = [signals[f"{name}.ids"] for name in self.objective.candidates if f"{name}.ids" in signals]
        topk = columns[0].shape[1] if columns else 0
        if self.objective.uses_sampled or not columns:
            columns.append(sampled_ids[:, None])
        if self.objective.samples_tail:
            given = [np.full(sample.num_trained, sample.status == "given") for sample in micro_batch]
            is_given = concat([np.zeros(0, bool), *given], self.device, torch.bool)
            signals["sampled_ids"] = sampled_ids.masked_fill(is_given, -1)
        return torch.cat(columns, 1), topk, signals

    def _select(
        self, micro_batch: tuple[Sample, ...], signals: dict[str, Tensor], student: RowStatistics
    ) -> tuple[Tensor | None, LossFunction]:
        """Select rows by the student's distribution for `LogprobModel.forward`, and reduce the signals to them.

        If another term needs all rows, the signals are kept, and unselected rows get the factor 0 in the distillation
        term.
        """
        assert self.selection is not None
        scores, counted = self.selection.function(student, signals), signals.get("weights/distillation")
        if counted is not None:
            scores = scores.masked_fill(counted == 0, -math.inf)
        numbers = [num_selected(self.selection.options["fraction"], _num_counted(sample)) for sample in micro_batch]
        rows = highest(scores, [sample.num_trained for sample in micro_batch], numbers)
        if self.skips_rows:
            signals.update({name: value[rows] for name, value in signals.items()})
            return rows, self.objective.loss_fn(signals)
        factors = torch.zeros_like(scores).index_fill_(0, rows, 1)
        signals["teacher_weights"] = signals.get("teacher_weights", 1) * factors
        return None, self.objective.loss_fn(signals)

    def check_packing(self, longest: int) -> None:
        """Run `check_packing` of logprob_model.py. Raises ModelError naming the key of the model's path."""
        self.hf_model.eval()  # PhiMoE's router draws random numbers in training
        with prefix_errors(PATH_KEY):
            check_packing(self.model, self.hf_model.config, longest=longest, device=self.device)
        self.hf_model.train()
        self.reshard()

    def compute_logprobs(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        """Return log-probabilities of the trained tokens at the sampling temperature, float32 [R] per sample."""
        self._seed()
        return sampled_logprobs(self, micro_batches, temperature=self.sampling_temperature)

    @torch.no_grad()
    def compute_divergences(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        """Return divergences of scored samples, float32 [R, 2 + 3 s] each, at `distillation.temperature`.

        The first two columns are forward and reverse KL between teacher and student, nats, on the teacher's top-k and
        the tail. The others compare their s most likely candidates, see `Objective.keep_divergences`; s is min(5, k).
        """
        self._seed()
        result: dict[SampleId, np.ndarray] = {}
        for micro_batch in micro_batches:
            batch, rows, sampled_ids = pack_samples(micro_batch, self.device)
            signals = join_signals(micro_batch, ("teacher",), self.device)
            found = torch.zeros(len(rows), 2 + 3 * min(SHOWN_CANDIDATES, self.topk), device=self.device)
            # Without samples, where others have some, there are no signals.
            ids = signals.get("teacher.ids", sampled_ids[:, None])
            loss_fn, topk = self.objective.keep_divergences(signals, found), ids.shape[1] if signals else 0
            self.model(batch, rows, ids, loss_fn, temperature=self.temperature, topk=topk)
            result |= by_sample(micro_batch, found)
        self.reshard()
        return result

    def compute_ref_logprobs(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        """Return `compute_logprobs` of the base model without LoRA adapters, as a reference without a second model."""
        with self._base_weights():
            return self.compute_logprobs(micro_batches)

    def compute_ref_topk(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, TopK]:
        """Return the base model's `ref.topk` most likely tokens at the trained tokens of each sample."""
        return self._candidates(micro_batches, self._base_weights(), self.sampling_temperature, self.ref_topk)

    def compute_topk(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, TopK]:
        """Return the `distillation.topk` most likely tokens at the trained tokens of each sample, at
        `distillation.temperature`: by its weights of `teacher.source`, the present ones if that is a model."""
        return self._candidates(micro_batches, self._teacher_weights(), self.temperature, self.topk)

    def _candidates(
        self, micro_batches: tuple[tuple[Sample, ...], ...], weights: contextlib.AbstractContextManager[None],
        temperature: float, k: int,
    ) -> dict[SampleId, TopK]:  # fmt: skip
        self._seed()
        self.reshard()
        with weights:
            return top_candidates(self, micro_batches, temperature=temperature, k=k)

    def _base_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights of the base model, without adapters."""
        assert self.adapters is not None, "a student without adapters has no other weights"
        return self.adapters.disabled()

    def _teacher_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights of `teacher.source`."""
        if self.average is not None:
            return self.average.in_place()
        return self._base_weights() if self.teacher_source == "initial" else contextlib.nullcontext()

    def _reported(self) -> dict[str, str | None]:
        overlap = {HEAD_METRICS["overlap_ratio"]: "overlap_rows"} if self.topk else {}
        of_signals = {name: _count(name, signals) for name, signals in self.objective.reported.items()}
        of_entropy = None if self.selection is None else HEAD_ROWS
        return {"actor/loss": None, "actor/entropy": of_entropy, **of_signals, **overlap}


def _count(metric: str, signals: tuple[str, ...]) -> str:
    """Return the name of a metric's token count: tokens with one of the signals, in the metric's quarter, if any."""
    quarter, groups = _quarter(metric), map(" or ".join, _groups(metric, signals))
    return f"tokens with {' and '.join(groups)}" + ("" if quarter is None else f" in quarter {quarter}")


def _groups(metric: str, signals: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the groups of signals of a metric, in each of which a token counts once."""
    return [(each,) for each in signals] if metric.startswith(POOLED) else [signals]


def _num_counted(sample: Sample) -> int:
    """Return the number of trained tokens with a non-zero weight in the distillation term."""
    name = "weights/distillation"
    return int(np.count_nonzero(sample.array(name))) if name in sample.signals else sample.num_trained


def _quarter(metric: str) -> int | None:
    """Return the quarter of the completions, 0 to 3, that a metric covers; None for all."""
    _, found, number = metric.rpartition("/q")
    return int(number) - 1 if found else None

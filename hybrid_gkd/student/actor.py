"""The actor: a sharded model with the objective of distillation or PPO. Knows neither Ray nor vLLM.

Shapes: R trained tokens of a micro-batch, K candidates per trained token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_gkd.config import ActorConfig, Config, DistillationConfig
from hybrid_gkd.errors import prefix_errors
from hybrid_gkd.losses import table, terms
from hybrid_gkd.losses.head import LossFunction, RowStatistics
from hybrid_gkd.losses.objective import Objective
from hybrid_gkd.losses.selection import highest
from hybrid_gkd.losses.token_weights import num_selected
from hybrid_gkd.student.loading import PATH_KEY
from hybrid_gkd.student.logprob_model import (
    LogprobModel,
    by_sample,
    check_packing,
    concat,
    count_rows,
    count_tokens,
    join_signals,
    pack_samples,
    quarter_of_tokens,
    sampled_logprobs,
    top_candidates,
)
from hybrid_gkd.student.sharded_model import learning_rate
from hybrid_gkd.student.trained_model import TrainedModel
from hybrid_gkd.types import Sample, SampleId, TopK

WARMUP_AFTER_SFT = 0.1
"""Of the optimizer steps behind a warm-up by SFT: at a high rate at once its student would lose what it has learned."""
SHOWN_CANDIDATES = 5
"""Of teacher and student, at a token of a held-out answer."""
HEAD_METRICS = {"entropy": "actor/entropy", "overlap_ratio": "actor/distillation/overlap_ratio"}
"""What the head calls them -> what they are reported as."""
HEAD_ROWS = "rows of the head"
"""Name of the number of rows that the head computes, where it is not that of trained tokens."""


def make_objective(loss: DistillationConfig, actor: ActorConfig, *, given: bool = False) -> Objective:
    """The terms of a run's loss, in the order in which they are added up. `given`: there are given answers."""
    row = table.policy_loss(actor.policy_loss.loss_mode)
    bounds = {f"clip_ratio_{side}": getattr(actor, f"clip_ratio_{side}") for side in ("low", "high")}
    options = {key: actor.clip_ratio if value is None else value for key, value in bounds.items()}
    options["clip_ratio_c"] = math.inf if actor.clip_ratio_c is None else actor.clip_ratio_c
    policy = terms.policy_loss(row, {key: options[key] for key in row.options})
    chosen, on_rewards = [], not loss.enabled or loss.use_task_rewards or loss.as_reward
    if loss.enabled:
        chosen.append(terms.distillation(
            table.weighted_divergences(loss.loss_mode, loss.mixed_weights, loss.loss_fn),
            tail=loss.tail, beta=loss.beta,
            estimator=loss.loss_mode, policy=policy if loss.use_policy_gradient else None,
            # As a reward it is in the advantages; the divergence is only reported then.
            coefficient=0.0 if loss.as_reward else loss.distillation_loss_coef,
            limit=None if loss.as_reward else loss.loss_max_clamp,
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
    """One rank of the student. Raises ModelError if it cannot be loaded or its architecture not be trained exactly.

    `num_ids`: see `LogprobModel`.
    """

    prefix, loss_name = "actor", "actor/loss"

    def __init__(self, config: Config, *, device: torch.device, num_updates: int, num_ids: int | None = None):
        arr = config.actor_rollout_ref
        given = config.data.response_key is not None
        self.objective = make_objective(config.distillation, arr.actor, given=given)
        self.optim_sft, self.sft_updates = arr.actor.optim_sft, config.sft_updates
        row = config.distillation.weighting
        self.selection = row if row is not None and row.needs == "student" else None
        """Token weights that need the student's distribution."""
        self.skips_rows = config.distils_alone
        """Rows that are not selected are left out of the head: no other term needs them."""
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

    def learning_rate(self) -> float:
        """Of the next optimizer step; the first `sft_updates` have a schedule of their own."""
        assert self.optim is not None
        done, left = self.updates_done - self.sft_updates, self.num_updates - self.sft_updates
        if done < 0:
            return learning_rate(self.optim_sft, self.updates_done, self.sft_updates)
        optim = self.optim
        if self.sft_updates and not (optim.lr_warmup_steps or optim.lr_warmup_steps_ratio):
            optim = dataclasses.replace(optim, lr_warmup_steps_ratio=WARMUP_AFTER_SFT)
        return learning_rate(optim, done, left)

    def _loss(self, micro_batch: tuple[Sample, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sums over the trained tokens of a micro-batch: of the loss, of the metrics by name, and of `_reported`."""
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
        loss, sums = self.model(
            batch, rows, ids, self.objective.loss_fn(signals), temperature=self.temperature, topk=topk,
            with_overlap=topk > 0, overlap_mask=signals.get("has.teacher"), **options,
        )
        counts = {
            _count(name, names): count_rows(signals["quarter"], quarter=_quarter(name)) if selects and self.skips_rows
            else count_tokens(micro_batch, names, self.device, quarter=_quarter(name))
            for name, names in self.objective.reported.items()
        }
        if self.selection is not None:
            counts[HEAD_ROWS] = count_rows(signals["quarter"])
        return loss, {HEAD_METRICS.get(name, name): value for name, value in sums.items()} | counts

    def _signals(self, micro_batch: tuple[Sample, ...], sampled_ids: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
        """The ids [R, ...] whose log-probabilities the loss needs, of how many the head sums the mass outside, and the
        signals that it compares them with."""
        signals = join_signals(micro_batch, self.objective.signals, self.device)
        columns = [signals[f"{name}.ids"] for name in self.objective.candidates if f"{name}.ids" in signals]
        topk = columns[0].shape[1] if columns else 0
        if self.objective.uses_sampled or not columns:
            columns.append(sampled_ids[:, None])
        return torch.cat(columns, 1), topk, signals

    def _select(
        self, micro_batch: tuple[Sample, ...], signals: dict[str, Tensor], student: RowStatistics
    ) -> tuple[Tensor | None, LossFunction]:
        """Select rows by the student's distribution, as `LogprobModel.forward` needs it; reduce the signals to them.

        Where another term needs all rows, the signals stay, and rows that are not selected get the factor 0 in the
        distillation term.
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
        """See `check_packing` in logprob_model.py. Raises ModelError, for the key of the model's path."""
        self.hf_model.eval()  # PhiMoE's router draws random numbers in training
        with prefix_errors(PATH_KEY):
            check_packing(self.model, self.hf_model.config, longest=longest, device=self.device)
        self.hf_model.train()
        self.reshard()

    def compute_logprobs(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        """Of each sample float32 [R], the log-probabilities of its trained tokens at the sampling temperature."""
        self._seed()
        temperature = self.sampling_temperature
        found = sampled_logprobs(self.model, micro_batches, temperature=temperature, device=self.device)
        self.reshard()
        return found

    @torch.no_grad()
    def compute_divergences(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        """Of each sample, all of them scored, float32 [R, 2 + 3 s], at `distillation.temperature`.

        First forward and reverse KL between teacher and student, nats, on the teacher's top k and the tail; the rest
        compares their s most likely candidates, see `Objective.keep_divergences`. s is 5, or k where that is less.
        """
        self._seed()
        result: dict[SampleId, np.ndarray] = {}
        for micro_batch in micro_batches:
            batch, rows, sampled_ids = pack_samples(micro_batch, self.device)
            ids, topk, signals = self._signals(micro_batch, sampled_ids)
            found = torch.zeros(len(rows), 2 + 3 * min(SHOWN_CANDIDATES, self.topk), device=self.device)
            loss_fn = self.objective.keep_divergences(signals, found)
            self.model(batch, rows, ids, loss_fn, temperature=self.temperature, topk=topk)
            result |= by_sample(micro_batch, found)
        self.reshard()
        return result

    def compute_ref_logprobs(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        """As `compute_logprobs`, of the model below the LoRA adapters: a reference that needs no second model."""
        assert self.adapters is not None, "a student without adapters has no other weights"
        with self.adapters.left_out():
            return self.compute_logprobs(micro_batches)

    def compute_ref_topk(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, TopK]:
        """As `compute_ref_logprobs`, with the `ref.topk` most likely tokens."""
        assert self.adapters is not None, "a student without adapters has no other weights"
        self._seed()
        with self.adapters.left_out():
            found = top_candidates(
                self.model, micro_batches, temperature=self.sampling_temperature, device=self.device, k=self.ref_topk
            )
        self.reshard()
        return found

    def _reported(self) -> dict[str, str | None]:
        overlap = {HEAD_METRICS["overlap_ratio"]: "overlap_rows"} if self.topk else {}
        of_signals = {name: _count(name, signals) for name, signals in self.objective.reported.items()}
        of_entropy = None if self.selection is None else HEAD_ROWS
        return {"actor/loss": None, "actor/entropy": of_entropy, **of_signals, **overlap}


def _count(metric: str, signals: tuple[str, ...]) -> str:
    """Name of the number of tokens that have one of the signals, and are in the quarter that the metric is of."""
    quarter = _quarter(metric)
    return f"tokens with {' or '.join(signals)}" + ("" if quarter is None else f" in quarter {quarter}")


def _num_counted(sample: Sample) -> int:
    """Return how many of the trained tokens have a weight other than 0 in the distillation term."""
    name = "weights/distillation"
    return int(np.count_nonzero(sample.array(name))) if name in sample.signals else sample.num_trained


def _quarter(metric: str) -> int | None:
    """Which quarter of the answers a metric is of, 0 to 3; None: of all."""
    _, found, number = metric.rpartition("/q")
    return int(number) - 1 if found else None

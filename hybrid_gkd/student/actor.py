"""The actor: a sharded model with the objective of distillation or PPO. Knows neither Ray nor vLLM.

Shapes: R response tokens of a micro-batch, K ids per response token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_gkd.config import ActorConfig, Config
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.losses.objective import Objective, Targets
from hybrid_gkd.student.logprob_model import LogprobModel, concat, pack_responses
from hybrid_gkd.student.sharded_model import ShardedModel
from hybrid_gkd.types import MiniBatch, TrainSequence


class Actor(ShardedModel):
    """One rank of the student. Raises ModelError if it cannot be loaded or its architecture not be trained exactly."""

    def __init__(self, config: Config, *, device: torch.device, num_updates: int):
        arr = config.actor_rollout_ref
        self.config: ActorConfig = arr.actor
        self.objective = Objective(config.distillation, clip_ratio=self.config.clip_ratio)
        self.topk = config.distillation.topk if config.distillation.enabled else 0
        self.sampling_temperature = arr.rollout.temperature
        self.temperature = config.distillation.temperature if self.topk else self.sampling_temperature
        self.seed = config.trainer.seed
        self._sums: dict[str, Tensor] = {}
        """Of the metrics, over the micro-batches since the last step."""
        super().__init__(
            arr.model, wrap=LogprobModel, fsdp=arr.actor.fsdp_config, shard_size=config.shard_size, device=device,
            bucket_bytes=arr.rollout.update_weights_bucket_megabytes * 2**20, compile=arr.actor.use_torch_compile,
            optim=arr.actor.optim, num_updates=num_updates,
        )

    def update(
        self, batch: MiniBatch, *, before_last: Callable[[], None] = lambda: None,
        before_step: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch, or on the last part of one whose other parts were accumulated.

        The loss is the sum over response tokens divided by their number in the mini-batch over all ranks, so that the
        cut into micro-batches and ranks does not matter. Returns metrics of the whole mini-batch, equal on all ranks.

        Args:
            batch: this rank's share; `num_tokens` is of the whole mini-batch.
            before_last: called before the last micro-batch.
            before_step: called between the last backward pass and the optimizer step.

        Raises:
            TrainingError: the gradient is not finite; no weight has changed.
            torch.OutOfMemoryError: the device memory did not suffice; no weight has changed.
            DeviceMemoryError: see `step`.
        """
        self.accumulate(batch, before_last=before_last)
        sums, self._sums = self._sums, {}  # now: a new attempt after a failure must begin anew
        grad_norm = self.clip_grad_norm(self.config.grad_clip)
        metrics = self._all_reduce(sums, batch.num_tokens)  # waits for the device, which has been given all work by now
        loss, norm = metrics["actor/loss"], float(grad_norm)
        if not math.isfinite(norm) or not math.isfinite(loss):
            step = self.updates_done + 1
            raise TrainingError(f"optimizer step {step}: loss {loss}, gradient norm {norm}; the step was not taken")
        before_step()
        return metrics | {"actor/grad_norm": norm, "actor/lr": self.step()}

    def accumulate(self, batch: MiniBatch, *, before_last: Callable[[], None] = lambda: None) -> None:
        """Add the gradients of a part of a mini-batch; its last part goes to `update`.

        Raises torch.OutOfMemoryError; the gradients of earlier parts are gone too.
        """
        sums = self._sums
        if not sums:
            assert self.optimizer is not None
            self.optimizer.zero_grad()
            self._seed()
        try:
            for number, micro_batch in enumerate(batch.micro_batches, start=1):
                last = number == len(batch.micro_batches)
                if last:
                    before_last()
                if not self.fsdp.reshard_after_forward:  # weights that stay gathered serve the next micro-batch too
                    self.model.set_reshard_after_backward(last)
                loss_sum, parts = self._loss(micro_batch)
                # FSDP2 averages gradients over ranks; the loss is a sum over them.
                (loss_sum * (self.world_size / batch.num_tokens)).backward()
                self._add(sums, parts | {"actor/loss": loss_sum.detach()})
        except torch.OutOfMemoryError:
            self._sums = {}
            self.abandon_backward()
            raise

    @torch.no_grad()
    def evaluate(self, batch: MiniBatch) -> dict[str, float]:
        """The metrics that `update` would give, without its step: means over `batch.num_tokens`, equal on all ranks.

        Not between `accumulate` and `update`. Raises torch.OutOfMemoryError.
        """
        self._seed()
        sums: dict[str, Tensor] = {}
        for micro_batch in batch.micro_batches:
            loss_sum, parts = self._loss(micro_batch)
            self._add(sums, parts | {"actor/loss": loss_sum})
        self.reshard()
        return self._all_reduce(sums, batch.num_tokens)

    def _add(self, sums: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value

    def _seed(self) -> None:
        """Some architectures draw random numbers (PhiMoE's router): the same ones after a resume."""
        torch.manual_seed(self.seed + self.updates_done)

    def _loss(self, micro_batch: tuple[TrainSequence, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sums over the response tokens of a micro-batch: of the loss, and of the metrics by name."""
        batch, rows, sampled_ids = pack_responses(micro_batch, self.device)
        ids, targets = self._targets(micro_batch, sampled_ids)
        topk = 0 if targets.teacher_logprobs is None else targets.teacher_logprobs.shape[1]
        return self.model(batch, rows, ids, self.objective.loss_fn(targets), temperature=self.temperature, topk=topk)

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
        for name in ("advantages", "old_logprobs", "importance_weights"):
            found = [value for item in micro_batch if (value := getattr(item, name)) is not None]
            if found:
                values[name] = joined(found)
        if self.objective.uses_sampled or not columns:
            columns.append(sampled_ids[:, None])
        return torch.cat(columns, 1), Targets(**values)

    @torch.no_grad()
    def compute_logprobs(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """Sequence index -> float32 [R], the log-probabilities of the sampled tokens at the sampling temperature."""
        self._seed()
        result: dict[int, np.ndarray] = {}
        for micro_batch in micro_batches:
            batch, rows, ids = pack_responses(micro_batch, self.device)
            logprobs, _ = self.model(batch, rows, ids[:, None], temperature=self.sampling_temperature)
            lengths = [len(item.sequence.response_ids) for item in micro_batch]
            for item, values in zip(micro_batch, logprobs[:, 0].cpu().split(lengths), strict=True):
                result[item.sequence.index] = values.numpy()
        self.reshard()
        return result

    def _all_reduce(self, sums: dict[str, Tensor], num_tokens: int) -> dict[str, float]:
        """Sums over micro-batches of this rank -> means over the response tokens of all ranks."""
        # The same names on every rank, also on one that had only empty micro-batches.
        overlap = ["overlap_ratio", "overlap_rows"] if self.topk else []
        names = ["actor/loss", "entropy", *self.objective.reported, *overlap]
        stacked = torch.stack([sums.get(name, torch.zeros((), device=self.device)).double() for name in names])
        if self.world_size > 1:  # for a single rank NCCL would take 0.4 GiB to do nothing
            dist.all_reduce(stacked)
        metrics = dict(zip(names, (stacked / num_tokens).tolist(), strict=True))
        metrics["actor/entropy"] = metrics.pop("entropy")
        if self.topk:
            metrics["actor/distillation/overlap_ratio"] = metrics.pop("overlap_ratio") / metrics.pop("overlap_rows")
        return metrics

"""The reference policy: a frozen model for KL regularization, or the student's first weights as teacher.

Depends on neither Ray nor vLLM.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from hybrid_gkd.config import Config
from hybrid_gkd.student.logprob_model import LogprobModel, sampled_logprobs, top_candidates
from hybrid_gkd.student.pretrained import PATH_KEY
from hybrid_gkd.student.sharded_model import ShardedModel
from hybrid_gkd.types import Sample, SampleId, TopK


class Reference(ShardedModel):
    """One rank of the reference policy: the initial model of the run, also after a resume, or another folder.

    `num_ids`: see `LogprobModel`. Raises ModelError: it cannot be loaded or its architecture is not supported.
    """

    def __init__(self, config: Config, *, device: torch.device, num_ids: int | None = None):
        self.temperature = self.topk_temperature = config.actor_rollout_ref.rollout.temperature
        self.topk = config.ref_topk
        if config.teaches_itself:
            self.topk, self.topk_temperature = config.distillation.topk, config.distillation.temperature
        own = config.actor_rollout_ref.ref.model.path
        super().__init__(
            config.ref_model, wrap=functools.partial(LogprobModel, num_ids=num_ids), shard_size=config.shard_size,
            device=device, path_key=PATH_KEY if own is None else "actor_rollout_ref.ref.model.path",
        )

    def compute_ref_logprobs(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        """Return log-probabilities of the trained tokens at the sampling temperature, float32 [R] per sample."""
        return sampled_logprobs(self, micro_batches, temperature=self.temperature)

    def compute_ref_topk(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, TopK]:
        """Return the `ref.topk` most likely tokens at the trained tokens of each sample, at the same temperature.

        As a teacher, `distillation.topk` of them at `distillation.temperature`.
        """
        return top_candidates(self, micro_batches, temperature=self.topk_temperature, k=self.topk)

"""The reference policy as a scorer, and the KL penalty in the rewards.

The penalty, its estimators and its two controllers are verl's (`algorithm.use_kl_in_reward`).

Shapes: R trained tokens of a sample. A log-ratio is log q - log p with q the student and p the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.config import Config, KLCtrlConfig
from hybrid_gkd.scoring.scorer import WorkersScorer
from hybrid_gkd.types import Arrays, Sample
from hybrid_gkd.workers.batches import Batches

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup

LARGEST_K3, LOG_RATIO_LIMIT = 10.0, 20.0
"""Bounds of a token's k3 and of the log-ratio in it: k3 grows exponentially with the log-ratio."""
LARGEST_ERROR = 0.2
"""Bound of the controller's relative error |KL / target - 1|."""


def _k3(log_ratio: np.ndarray) -> np.ndarray:
    bounded = log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (np.expm1(-bounded) + bounded).clip(max=LARGEST_K3)


ESTIMATES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda log_ratio: log_ratio,
    "abs": np.abs,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": _k3,
}
"""Estimators of KL(q || p) by algorithm.kl_penalty: log-ratios [R] -> estimates [R], nats."""


def reference_scorer(config: Config, group: WorkerGroup, batches: Batches) -> WorkersScorer:
    """Return the scorer of the trained tokens' log-probabilities, or of top-k candidates if the loss needs them."""
    if config.ref_topk:
        return WorkersScorer("reference_topk", group.compute_ref_topk, batches)
    return WorkersScorer("reference", group.compute_ref_logprobs, batches)


class KLPenalty:
    """KL penalty to the reference policy in the rewards, with the controller of its coefficient."""

    def __init__(self, config: Config):
        self.config, self.section = config, config.algorithm.kl_ctrl
        self.coef = self._next_coef = self.section.kl_coef
        """Coefficient of the present step."""

    def apply(self, samples: list[Sample], rewards: Arrays | None) -> tuple[Arrays, dict[str, float]]:
        """Subtract coef times the KL from the token-level rewards (None: zeros); return float32 [R] each, and metrics.

        The samples need old log-probabilities and those of the reference. Rewards of greedy samples, which follow those
        of `samples`, stay unchanged, as in verl.
        """
        estimate = ESTIMATES[self.config.algorithm.kl_penalty]
        kls = [estimate(_log_ratio(sample)) for sample in samples]
        kl = float(np.mean([each.mean() for each in kls]))
        metrics = {"reward/kl": kl, "reward/kl_coef": self.coef}
        self._next_coef = next_coefficient(self.section, self.coef, kl, len(kls))
        rewards = rewards or [np.zeros(len(each), np.float32) for each in kls]
        left = [(reward - self.coef * each).astype(np.float32) for reward, each in zip(rewards, kls, strict=False)]
        return left + rewards[len(kls) :], metrics

    def end_step(self) -> None:
        """Switch to the controller's coefficient for the next step."""
        self.coef = self._next_coef

    @property
    def state(self) -> float | None:
        """Coefficient of the next step, for checkpoints; None if it is fixed."""
        return self.coef if self.config.algorithm.adapts_kl_coef else None

    def resume(self, state: float | None) -> None:
        """Restore the state of a checkpoint; None keeps the configured coefficient."""
        if state is not None and self.config.algorithm.adapts_kl_coef:
            self.coef = self._next_coef = state


def next_coefficient(section: KLCtrlConfig, coef: float, kl: float, num_sequences: int) -> float:
    """Return the coefficient after a step with `num_sequences` samples of mean KL `kl`, nats per token.

        coef (1 + e num_sequences / horizon),   e = kl / target_kl - 1, clipped to [-0.2, 0.2]

    With `type=fixed` it is constant. Source: Ziegler et al., arXiv 1909.08593, section 2.2. There the KL is summed over
    the tokens of a completion; here, as in verl, it is their mean.
    """
    if section.type == "fixed":
        return coef
    error = min(max(kl / section.target_kl - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coef * (1 + error * num_sequences / section.horizon)


def _log_ratio(sample: Sample) -> np.ndarray:
    has_topk = "reference_topk" in sample.signals
    reference = sample.topk("reference_topk").sampled_logprobs if has_topk else sample.array("reference")
    return sample.array("old_logprobs").astype(np.float64) - reference

"""The reference policy as a scorer, and the KL to it inside the rewards.

The penalty, its estimates and its two controllers are verl's (`algorithm.use_kl_in_reward`).

Shapes: R trained tokens of a sample; a log-ratio is log q - log p, q of the student and p of the reference.
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
"""k3 grows with exp of the log-ratio: a token counts this at most, from a log-ratio of this size at most."""
LARGEST_ERROR = 0.2
"""Part of the target by which a KL counts as too large or too small at most."""
ESTIMATES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda log_ratio: log_ratio,
    "abs": np.abs,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": lambda log_ratio: _k3(log_ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).clip(max=LARGEST_K3),
}
"""algorithm.kl_penalty -> of log-ratios [R] the estimates of KL(q || p), [R], nats."""


def reference_scorer(config: Config, group: WorkerGroup, batches: Batches) -> WorkersScorer:
    """Return the scorer of the log-probabilities of trained tokens, or of all candidates if the loss needs them."""
    if config.ref_topk:
        return WorkersScorer("reference_topk", group.compute_ref_topk, batches)
    return WorkersScorer("reference", group.compute_ref_logprobs, batches)


class KLPenalty:
    """The KL to the reference policy inside the rewards, with the controller of its coefficient."""

    def __init__(self, config: Config):
        self.config, self.section = config, config.algorithm.kl_ctrl
        self.coef = self._next_coef = self.section.kl_coef
        """Of the present step."""

    def apply(self, samples: list[Sample], rewards: Arrays | None) -> tuple[Arrays, dict[str, float]]:
        """Return the rewards of the tokens, or zeros, less coef times the KL, float32 [R] each, and metrics.

        The samples have old log-probabilities and those of the reference. Rewards behind theirs, those of greedy
        samples, stay as they are, as in verl.
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
        """Take the controller's coefficient for the next step."""
        self.coef = self._next_coef

    @property
    def state(self) -> float | None:
        """What a checkpoint keeps: the coefficient of the next step, where a controller changes it."""
        return self.coef if self.config.algorithm.adapts_kl_coef else None

    def resume(self, state: float | None) -> None:
        """Go on with the state of a checkpoint; None: it has none, and the configured coefficient stays."""
        if state is not None and self.config.algorithm.adapts_kl_coef:
            self.coef = self._next_coef = state


def next_coefficient(section: KLCtrlConfig, coef: float, kl: float, num_sequences: int) -> float:
    """The coefficient after a step whose responses, so many, had the mean KL `kl`, nats per token.

        coef (1 + e num_sequences / horizon),   e = kl / target_kl - 1, between -0.2 and 0.2

    With `type=fixed` it stays. Source: Ziegler et al., arXiv 1909.08593, section 2.2, where a KL is the sum of a
    response; as in verl it is the mean of its tokens here.
    """
    if section.type == "fixed":
        return coef
    error = min(max(kl / section.target_kl - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coef * (1 + error * num_sequences / section.horizon)


def _log_ratio(sample: Sample) -> np.ndarray:
    has_topk = "reference_topk" in sample.signals
    reference = sample.topk("reference_topk").sampled_logprobs if has_topk else sample.array("reference")
    return sample.array("old_logprobs").astype(np.float64) - reference


def _k3(log_ratio: np.ndarray) -> np.ndarray:
    return np.expm1(-log_ratio) + log_ratio

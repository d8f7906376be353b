"""The reference policy's part of a step: log-probabilities of a rollout's responses, and the KL inside the rewards.

The penalty, its estimates and its two controllers are verl's (`algorithm.use_kl_in_reward`).

Shapes: R trained tokens of a sample; a log-ratio is log q - log p, q of the student and p of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.config import Config, KLCtrlConfig
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.types import Sample
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


class ReferenceTurn:
    """What the loop asks of the reference policy; without one it changes nothing."""

    def __init__(self, config: Config, group: WorkerGroup, clock: Clock, batches: Batches):
        self.config, self.group, self.clock, self.batches = config, group, clock, batches
        self.section = config.algorithm.kl_ctrl
        self.coef = self._next_coef = self.section.kl_coef
        """Of the KL in the rewards, in the present step."""

    def with_logprobs(self, samples: list[Sample]) -> list[Sample]:
        """Add the reference's log-probabilities, unless they are there, where the loss needs them."""
        return self._scored(samples) if self.config.actor_rollout_ref.actor.use_kl_loss else samples

    def penalised(
        self, samples: list[Sample], of_tokens: list[np.ndarray] | None
    ) -> tuple[list[Sample], list[np.ndarray], dict[str, float]]:
        """Return the samples, which have old log-probabilities; the rewards of their tokens, or zeros, less coef times
        the KL, float32 [R] each (behind them, those of greedy ones stay as they are, as in verl); metrics."""
        scored, estimate = self._scored(samples), ESTIMATES[self.config.algorithm.kl_penalty]
        kls = [estimate(_log_ratio(item)) for item in scored]
        kl = float(np.mean([each.mean() for each in kls]))
        metrics = {"reward/kl": kl, "reward/kl_coef": self.coef}
        self._next_coef = next_coefficient(self.section, self.coef, kl, len(kls))
        rewards = of_tokens or [np.zeros(len(each), np.float32) for each in kls]
        left = [(reward - self.coef * each).astype(np.float32) for reward, each in zip(rewards, kls, strict=False)]
        uses_them = self.config.actor_rollout_ref.actor.use_kl_loss
        return scored if uses_them else samples, left + rewards[len(kls) :], metrics

    def end_step(self) -> None:
        """The step is taken: the controller's coefficient is that of the next one."""
        self.coef = self._next_coef

    @property
    def state(self) -> float | None:
        """What a checkpoint keeps: the coefficient of the next step, where a controller changes it."""
        return self.coef if self.config.algorithm.adapts_kl_coef else None

    def resume(self, state: float | None) -> None:
        """Go on with the state of a checkpoint; None: it has none, and the configured coefficient stays."""
        if state is not None and self.config.algorithm.adapts_kl_coef:
            self.coef = self._next_coef = state

    def _scored(self, samples: list[Sample]) -> list[Sample]:
        if all("reference" in sample.signals for sample in samples):
            return samples
        plan = [tuple(share) for share in self.batches.plan(samples)]
        with self.clock.span("ref"):
            if not self.config.ref_topk:
                found = self.group.compute_ref_logprobs(plan)
                return [sample.with_signals(reference=found[sample.id]) for sample in samples]
            scores = self.group.compute_ref_topk(plan)
        pairs = [(sample, scores[sample.id]) for sample in samples]
        return [sample.with_signals(reference=s.sampled_logprobs, reference_topk=s) for sample, s in pairs]


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
    return sample.array("old_logprobs").astype(np.float64) - sample.array("reference")


def _k3(log_ratio: np.ndarray) -> np.ndarray:
    return np.expm1(-log_ratio) + log_ratio

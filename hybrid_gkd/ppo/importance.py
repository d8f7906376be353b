"""Rollout correction: importance weights and rejection for off-policy completions.

The rollout policy mu differs from the trained policy pi because its weights are older or its engine computes
differently. Importance weights correct the expectation; rejection drops tokens that differ too much. The rules and
their names are those of verl's rollout correction.

Shapes: R trained tokens of a sample, N of a batch. A log-ratio is log pi / mu.
"""

from __future__ import annotations

import numpy as np

from hybrid_gkd.config import AlgorithmConfig, rejection_bounds
from hybrid_gkd.types import Sample

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log-ratio; larger ones are clipped, so that one token or completion cannot dominate."""
SMALLEST_LOG_WEIGHT = 80.0
"""Negated log of the smallest weight: exp(-80) is above 0 in float32, and a weight of 0 would reject the token."""


def importance_weights(
    logprobs: np.ndarray, rollout_logprobs: np.ndarray, threshold: float, level: str = "prefix", *, own: bool = True
) -> np.ndarray:
    """Return min(weight, threshold) of each token, float32 [R].

    Args:
        logprobs: [R] under the trained policy.
        rollout_logprobs: [R] under the rollout policy.
        threshold: upper bound of a weight, at least 1. Truncation bounds the variance and biases towards the rollout
            policy (Ionides, 2008).
        level: "prefix" multiplies the ratios pi / mu up to each token (per-decision importance sampling; Precup, Sutton
            and Singh, 2000), "sequence" those of all tokens, "token" takes the token's alone, which has less variance
            and ignores the shift of the prefixes.
        own: whether a token's own ratio is part of its weight. A loss of the sampled token needs it. A divergence sums
            over the whole distribution at a position and does not: without `own`, "prefix" is the product over the
            previous tokens and "token" is 1. The own ratio would be 1 in expectation, but nearly 0 wherever the student
            has moved away from the sampled token, and would mask the loss at those positions. "sequence" ignores `own`.

    Example: importance_weights(np.log([0.2, 0.6]), np.log([0.1, 0.3]), 3.0) == [2, 3], and [1, 2] without `own`
    """
    log_ratios = logprobs.astype(np.float64) - rollout_logprobs
    if level == "prefix":
        up_to = np.cumsum(log_ratios)
        log_ratios = (up_to if own else up_to - log_ratios).clip(min=-SMALLEST_LOG_WEIGHT)
    elif level == "token":
        log_ratios = (log_ratios if own else np.zeros_like(log_ratios)).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    else:
        log_ratios = np.full_like(log_ratios, log_ratios.sum().clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return np.exp(np.minimum(log_ratios, np.log(threshold))).astype(np.float32)


def kept_tokens(log_ratios: np.ndarray, bounds: dict[str, tuple[float, float]]) -> np.ndarray:
    """Return which tokens of a completion pass every rule of `rejection_bounds`, bool [R], given log-ratios [R].

    k1, k2 and k3 are Schulman's estimators of KL(mu || pi) from tokens that mu drew (joschu.net/blog/kl-approx.html).
    """
    log_ratios = log_ratios.astype(np.float64).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = {"k1": -log_ratios, "k2": log_ratios**2 / 2, "k3": np.expm1(log_ratios) - log_ratios}
    kept = np.ones(len(log_ratios), bool)
    for name, (lower, upper) in bounds.items() if len(kept) else ():
        level, _, estimator = name.rpartition("_")
        value = values[estimator]
        if level != "token":
            value = getattr(np, level.removeprefix("seq_"))(value)
        kept &= (lower <= value) & (value <= upper)
    return kept


def effective_sample_size(weights: np.ndarray) -> float:
    """Return (sum w)^2 / (N sum w^2) of weights [N] (Kish, 1965): 1 if all are equal, 1/N if only one is not 0."""
    weights = weights.astype(np.float64)
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def with_rollout_correction(
    section: AlgorithmConfig, samples: list[Sample], logprobs: list[np.ndarray], *, of_sampled: bool
) -> tuple[list[Sample], dict[str, float]]:
    """Add importance weights computed from the student's `logprobs` to the samples; also return metrics.

    of_sampled: whether the loss has a term of the sampled tokens (`Config.has_sampled_loss`). Its weights go into the
    signal `sampled_weights`, and the metrics describe them.
    """
    drawn = [np.asarray(sample.logprobs) for sample in samples]
    log_ratios = [now.astype(np.float64) - then for now, then in zip(logprobs, drawn, strict=True)]
    together = np.concatenate(log_ratios)
    metrics = {
        "actor/importance/kl": float(-together.mean()),
        "actor/importance/k3_kl": float((np.expm1(together.clip(max=LOG_RATIO_LIMIT)) - together).mean()),
        "actor/importance/largest_ratio": float(np.exp(np.abs(together).max().clip(max=LOG_RATIO_LIMIT))),
    }
    weights = [np.ones(len(each), np.float32) for each in drawn]
    sampled_weights: list[np.ndarray] | None = None
    if section.rollout_is_threshold is not None:
        options, pairs = (section.rollout_is_threshold, section.rollout_is), list(zip(logprobs, drawn, strict=True))
        described = weights = [importance_weights(*pair, *options, own=False) for pair in pairs]
        if of_sampled:
            described = [importance_weights(*pair, *options) for pair in pairs]
            sampled_weights = [whole / prefix for whole, prefix in zip(described, weights, strict=True)]
        all_weights = np.concatenate(described)
        metrics["actor/importance/mean"] = float(all_weights.mean())
        metrics["actor/importance/effective_sample_size"] = effective_sample_size(all_weights)
        if section.rollout_is_batch_normalize:
            per_sequence = section.rollout_is == "sequence"
            mean = np.mean([each[0] for each in described]) if per_sequence else all_weights.mean(dtype=np.float64)
            weights = [(each / mean).astype(np.float32) for each in weights]
    if section.rollout_rs is not None:
        bounds = rejection_bounds(section.rollout_rs, section.rollout_rs_threshold)
        kept = [kept_tokens(each, bounds) for each in log_ratios]
        weights = [each * mask for each, mask in zip(weights, kept, strict=True)]
        metrics["actor/importance/rejected"] = float(1 - np.concatenate(kept).mean())
    samples = [sample.with_signals(weights=each) for sample, each in zip(samples, weights, strict=True)]
    if sampled_weights is not None:
        both = zip(samples, sampled_weights, strict=True)
        samples = [sample.with_signals(sampled_weights=each) for sample, each in both]
    return samples, metrics

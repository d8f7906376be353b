"""The difference between the student and what drew its responses, which is older or computes differently.

Importance weights train on such responses as if the present student had drawn them; rejection leaves out what differs
too much. The rules and their names are those of verl's rollout correction.

Shapes: R trained tokens of a sample, N of a batch; a log-ratio is that of the student to what drew, log pi / mu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_gkd.config import AlgorithmConfig, rejection_bounds
from hybrid_gkd.types import Sample

LOG_RATIO_LIMIT = 20.0
"""Log-ratios beyond it count as the limit, where a single token or response may not make the rest vanish."""
SMALLEST_LOG_WEIGHT = 80.0
"""A weight is exp(-80) at least, which float32 still tells from 0: that would be a token that is left out."""


def importance_weights(
    logprobs: np.ndarray, rollout_logprobs: np.ndarray, threshold: float, level: str = "prefix", *, own: bool = True
) -> np.ndarray:
    """min(weight, threshold) of each token, float32 [R] from [R] and [R]; threshold >= 1.

    level: "prefix" is the product of pi / mu over the tokens up to each, "token" that of the token alone, "sequence"
    that of all. Per-decision importance sampling (Precup, Sutton and Singh, 2000), truncated, which bounds the variance
    and biases towards the drawn responses (Ionides, 2008). "token" leaves a bias of the prefixes, at less variance.

    own: whether a token's own ratio counts in its weight, as a loss of the sampled token needs it. A divergence is of
    the whole distribution that the token is drawn from: without `own` "prefix" is the product over the tokens before
    each, and "token" is 1. There the own ratio is 1 in the mean, but nearly 0 wherever the student has since moved away
    from the token that was drawn, and takes the loss away from just those positions. "sequence" is the same with both.

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
    """Which tokens of a response pass every rule of `rejection_bounds`, bool [R], from their log-ratios [R].

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
    """(sum w)^2 / (N sum w^2) of weights [N] (Kish, 1965): 1 if all are equal, 1/N if one is all there is."""
    weights = weights.astype(np.float64)
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def with_rollout_correction(
    section: AlgorithmConfig, samples: list[Sample], logprobs: list[np.ndarray], *, of_sampled: bool
) -> tuple[list[Sample], dict[str, float]]:
    """Add weights from the student's log-probabilities to the samples; also return metrics of the difference.

    of_sampled: a term of the loss is of the sampled tokens (`Config.has_sampled_loss`); then the metrics are of its
    weights.
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
    of_own: Sequence[np.ndarray | None] = [None] * len(drawn)
    if section.rollout_is_threshold is not None:
        options, pairs = (section.rollout_is_threshold, section.rollout_is), list(zip(logprobs, drawn, strict=True))
        used = weights = [importance_weights(*pair, *options, own=False) for pair in pairs]
        if of_sampled:
            used = [importance_weights(*pair, *options) for pair in pairs]
            of_own = [own / before for own, before in zip(used, weights, strict=True)]
        all_weights = np.concatenate(used)
        metrics["actor/importance/mean"] = float(all_weights.mean())
        metrics["actor/importance/effective_sample_size"] = effective_sample_size(all_weights)
        if section.rollout_is_batch_normalize:
            per_sequence = section.rollout_is == "sequence"
            mean = np.mean([each[0] for each in used]) if per_sequence else all_weights.mean(dtype=np.float64)
            weights = [(each / mean).astype(np.float32) for each in weights]
    if section.rollout_rs is not None:
        bounds = rejection_bounds(section.rollout_rs, section.rollout_rs_threshold)
        kept = [kept_tokens(each, bounds) for each in log_ratios]
        weights = [each * mask for each, mask in zip(weights, kept, strict=True)]
        metrics["actor/importance/rejected"] = float(1 - np.concatenate(kept).mean())
    found = [sample.with_signals(weights=each) for sample, each in zip(samples, weights, strict=True)]
    return [
        sample if own is None else sample.with_signals(sampled_weights=own)
        for sample, own in zip(found, of_own, strict=True)
    ], metrics

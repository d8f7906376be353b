"""Importance weights: training on responses that older weights have written as if the present ones had.

Shapes: R response tokens of a sequence, N of a batch.
"""

from __future__ import annotations

import numpy as np


def importance_weights(logprobs: np.ndarray, rollout_logprobs: np.ndarray, threshold: float) -> np.ndarray:
    """min(prod of pi / pi_rollout over the tokens up to each, threshold), float32 [R] from [R] and [R]; threshold >= 1.

    Per-decision importance sampling (Precup, Sutton and Singh, 2000), truncated, which bounds the variance and biases
    towards the drawn responses (Ionides, 2008).

    Example: importance_weights(np.log([0.2, 0.6]), np.log([0.1, 0.3]), 3.0) == [2, 3]
    """
    log_ratios = np.cumsum(logprobs.astype(np.float64) - rollout_logprobs)
    return np.exp(np.minimum(log_ratios, np.log(threshold))).astype(np.float32)


def effective_sample_size(weights: np.ndarray) -> float:
    """(sum w)^2 / (N sum w^2) of weights [N] (Kish, 1965): 1 if all are equal, 1/N if one is all there is."""
    weights = weights.astype(np.float64)
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))

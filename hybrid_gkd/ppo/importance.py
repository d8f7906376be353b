"""Importance weights: training on responses that older weights have written as if the present ones had.

Shapes: R response tokens of a sequence, N of a batch.
"""

from __future__ import annotations

import numpy as np


def importance_weights(logprobs: np.ndarray, rollout_logprobs: np.ndarray, threshold: float) -> np.ndarray:
    """How much likelier a policy makes the response, up to and with each token, than the one it was drawn from.

    The loss at a token depends on all tokens before it, so the weight is the product of their ratios and its own:
    per-decision importance sampling (Precup, Sutton and Singh, 2000), here truncated, which bounds the variance and
    biases towards the drawn responses (Ionides, 2008).

    Args:
        logprobs: [R], of the drawn tokens under the policy.
        rollout_logprobs: [R], where they were drawn.
        threshold: largest weight, at least 1.

    Returns:
        float32 [R].

    Example: importance_weights(np.log([0.2, 0.6]), np.log([0.1, 0.3]), 3.0) == [2, 3]
    """
    log_ratios = np.cumsum(logprobs.astype(np.float64) - rollout_logprobs)
    return np.exp(np.minimum(log_ratios, np.log(threshold))).astype(np.float32)


def effective_sample_size(weights: np.ndarray) -> float:
    """(sum w)^2 / (N sum w^2) of weights [N] (Kish, 1965): 1 if all are equal, 1/N if one is all there is."""
    weights = weights.astype(np.float64)
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))

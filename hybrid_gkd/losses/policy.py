"""PPO's policy loss on the log-probabilities of the sampled tokens. Shapes: T packed response tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_ratio: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token, negated so that it is minimised: -min(r A, clip(r, 1 - c, 1 + c) A).

    Source: Schulman et al., arXiv 1707.06347, eq. 7, with r = exp(logprobs - old_logprobs) and c = clip_ratio.

    Args:
        logprobs: [T], of the sampled tokens under the weights being trained; receives the gradient.
        old_logprobs: [T], under the weights before the first mini-batch of this rollout.
        advantages: [T].

    Returns:
        loss [T], not reduced; clipped bool [T], where the clip is active and the gradient therefore 0.

    Raises:
        ValueError: the shapes are not one [T] (broadcasting would be silent), or `clip_ratio` is not positive.
    """
    if logprobs.ndim != 1 or not logprobs.shape == old_logprobs.shape == advantages.shape:
        shapes = [tuple(tensor.shape) for tensor in (logprobs, old_logprobs, advantages)]
        raise ValueError(f"logprobs, old_logprobs and advantages must all be [T]; got {shapes}")
    if not clip_ratio > 0:
        raise ValueError(f"clip_ratio must be positive; got {clip_ratio}")
    ratio = (logprobs - old_logprobs).exp()
    bounded = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    clipped = bounded * advantages < ratio * advantages
    return -torch.where(clipped, bounded, ratio) * advantages, clipped

"""Advantages without a critic: every response is judged against the others to the same prompt.

Shapes: B prompts, n responses each.
"""

from __future__ import annotations

import numpy as np


def group_relative_advantages(
    rewards: np.ndarray, group_size: int, *, norm_by_std: bool, eps: float = 1e-6
) -> np.ndarray:
    """A = r - mean(group), divided by std(group) + eps if `norm_by_std`.

    Source: GRPO, arXiv 2402.03300, section 4.1.2. Without the division: Dr. GRPO, arXiv 2503.20783, which shows
    that the division overweights prompts that are nearly always or nearly never solved.
    The standard deviation is the sample one (divisor n - 1), as in the implementations that users come from.

    Args:
        rewards: float [B * n]; sample j of prompt i is at i * n + j.
        group_size: n, at least 2.
        norm_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation, in units of the reward; a group of equal rewards gets zeros.

    Returns float32 [B * n] in the order of `rewards`. Raises ValueError: a group of one, a length that is no multiple
    of n, or a reward that is not finite.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2: one response has no group to be compared with; got {group_size}"
        )
    if rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards must be [B * {group_size}]; got {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite; got {rewards[~np.isfinite(rewards)][:4]}")
    groups = rewards.astype(np.float64).reshape(-1, group_size)
    advantages = groups - groups.mean(axis=1, keepdims=True)
    if norm_by_std:
        advantages /= groups.std(axis=1, ddof=1, keepdims=True) + eps
    return advantages.reshape(-1).astype(np.float32)

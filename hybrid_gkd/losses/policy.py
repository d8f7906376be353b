"""Policy losses on the log-probabilities of the sampled tokens, one value per token. Shapes: T packed trained tokens.

All take

    logprobs        [T], under the weights being trained; they receive the gradient
    old_logprobs    [T], under the weights before the first mini-batch of the rollout
    advantages      [T]

and the keys of the section `actor` in their row of table.py. The ratio is r = exp(logprobs - old_logprobs). They return
the loss [T] to be minimised, not reduced, and a bool [T]: True where a bound of the ratio applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.losses.divergence import LOG_RATIO_LIMIT, TRIAL_ROWS, check_row_loss

SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""Upper limit of a sequence's mean log-ratio."""


def vanilla(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float,
    clip_ratio_c: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A); for A < 0 at most -c A (dual clip).

    Where a bound applies, the gradient is 0.

    Source: Schulman et al., arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip: arXiv
    1912.09729, eq. 5.

    Raises ValueError: the shapes are not all [T] (they would be broadcast), or a bound is out of range.
    """
    _check(logprobs, old_logprobs, advantages)
    if not (clip_ratio_low > 0 and clip_ratio_high > 0 and clip_ratio_c > 1):
        found = f"{clip_ratio_low}, {clip_ratio_high} and {clip_ratio_c}"
        raise ValueError(f"clip_ratio_low and clip_ratio_high must be positive, clip_ratio_c above 1; got {found}")
    ratio = _ratio(logprobs, old_logprobs)
    bounded = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    clipped = bounded * advantages < ratio * advantages
    too_large = (advantages < 0) & (ratio > clip_ratio_c)
    bounded = torch.where(too_large, ratio.detach().clamp(max=clip_ratio_c), bounded)
    clipped = clipped | too_large
    return -torch.where(clipped, bounded, ratio) * advantages, clipped


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float,
    sequence_log_ratio: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate with the ratio s of the whole sequence, exp of the mean of log r over its tokens.

    `sequence_log_ratio` [T] is that mean at each token, without gradient. A token's gradient is that of s logprobs, so
    that the mean over the tokens of a sequence has the gradient of s.

    Source: GSPO-token, arXiv 2507.18071, eq. 13 to 17.
    """
    _check(logprobs, old_logprobs, advantages)
    log_ratio = logprobs - logprobs.detach() + sequence_log_ratio
    ratio = log_ratio.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    bounded = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    clipped = bounded * advantages < ratio * advantages
    return -torch.where(clipped, bounded, ratio) * advantages, clipped


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, Tensor]:
    """Return -clip(r, 1 - low, 1 + high) A logprobs. The ratio has no gradient, so no token loses its gradient.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    _check(logprobs, old_logprobs, advantages)
    ratio = _ratio(logprobs, old_logprobs).detach()
    bounded = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return -bounded * advantages * logprobs, bounded != ratio


def gpg(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -A logprobs, the plain policy gradient without the ratio. Source: GPG, arXiv 2504.02546."""
    _check(logprobs, old_logprobs, advantages)
    return -advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def check_policy_loss(function: Callable[..., Any], options: dict[str, float]) -> None:
    """Try out a user's policy loss on random rows.

    Raises ConfigError: it does not return a loss [T] and a bool [T], or see `check_row_loss`.
    """
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, TRIAL_ROWS, generator=generator, dtype=torch.float64)

    def evaluate(part: slice) -> tuple[Tensor, Tensor]:
        logprobs, old, advantages = (-rows[0, part].abs()).requires_grad_(), -rows[1, part].abs(), rows[2, part]
        loss, clipped = function(logprobs, old, advantages, **options)
        for value, what in ((loss, "the loss"), (clipped, "the second value")):
            if not isinstance(value, Tensor) or value.shape != logprobs.shape:
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                rule = f"must return a loss [T] and a bool [T]; for T = {len(logprobs)}, {what} is {found}"
                raise ConfigError(key, rule, show_value=False)
        return logprobs, loss

    check_row_loss(key, evaluate)


def _check(*tensors: Tensor) -> None:
    if tensors[0].ndim != 1 or any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"logprobs, old_logprobs and advantages must all be [T]; got {shapes}")


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

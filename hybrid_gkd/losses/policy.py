"""Policy losses on the log-probabilities of the sampled tokens, one value per token. Shapes: T packed response tokens.

All take

    logprobs        [T], under the weights being trained; they receive the gradient
    old_logprobs    [T], under the weights before the first mini-batch of the rollout
    advantages      [T]

with r = exp(logprobs - old_logprobs), and the keys of the section `actor` that their row in table.py names. They return
the loss [T], negated so that it is minimised and not reduced, and a bool [T]: where a bound of the ratio acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid_gkd.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Beyond it a log-ratio counts as the limit: exp(20) is 5e8, and exp of more would become inf and then NaN."""
SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""The same, upwards, of a sequence's mean log-ratio."""


def vanilla(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float,
    clip_ratio_c: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -c A (dual clip).

    Where a bound acts, the gradient is 0.

    Source: Schulman et al., arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip: arXiv
    1912.09729, eq. 5.

    Raises:
        ValueError: the shapes are not one [T] (broadcasting would be silent), or a bound is not possible.
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
    """The clipped surrogate with the ratio s of the whole sequence, exp of the mean of log r over its tokens.

    `sequence_log_ratio` [T] is that mean at each token, without gradient. A token's gradient is that of
    s logprobs, so that the mean over the tokens of a sequence has the gradient of s.

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
    """-clip(r, 1 - low, 1 + high) A logprobs, the clipped ratio without gradient: no token loses its gradient.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    _check(logprobs, old_logprobs, advantages)
    ratio = _ratio(logprobs, old_logprobs).detach()
    bounded = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return -bounded * advantages * logprobs, bounded != ratio


def gpg(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-A logprobs, the plain policy gradient, whatever the ratio. Source: GPG, arXiv 2504.02546."""
    _check(logprobs, old_logprobs, advantages)
    return -advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def check_policy_loss(function: Callable[..., Any], options: dict[str, float]) -> None:
    """Try out a policy loss of the user's own on random rows before anything starts.

    The head computes chunk by chunk, so row i of the result may depend on row i of the inputs alone.

    Raises ConfigError: it raises, the result is not a finite [T] with a gradient and a bool [T], or it mixes rows.
    """
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 5, generator=generator, dtype=torch.float64)

    def refusal(rule: str) -> ConfigError:
        return ConfigError(key, rule, show_value=False)

    def evaluate(part: slice) -> tuple[Tensor, Tensor]:
        logprobs, old, advantages = (-rows[0, part].abs()).requires_grad_(), -rows[1, part].abs(), rows[2, part]
        try:
            loss, clipped = function(logprobs, old, advantages, **options)
        except Exception as error:  # whatever the user's code raises
            raise refusal(f"raised {type(error).__name__} when it was tried: {error}") from error
        for value, what in ((loss, "the loss"), (clipped, "what is clipped")):
            if not isinstance(value, Tensor) or value.shape != logprobs.shape:
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise refusal(f"must return a loss [T] and a bool [T]; for T = {len(logprobs)}, {what} is {found}")
        if not loss.requires_grad:
            raise refusal("its result has no gradient for the log-probabilities")
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        if not (loss.isfinite().all() and gradient.isfinite().all()):
            raise refusal("gave values or gradients that are not finite")
        return loss.detach(), gradient

    whole = evaluate(slice(None))
    alone = [torch.cat(parts) for parts in zip(*(evaluate(slice(i, i + 1)) for i in range(5)), strict=True)]
    if not all(torch.allclose(found, expected) for found, expected in zip(whole, alone, strict=True)):
        raise refusal("the value and the gradient of a row must depend on that row alone")


def _check(*tensors: Tensor) -> None:
    if tensors[0].ndim != 1 or any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"logprobs, old_logprobs and advantages must all be [T]; got {shapes}")


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

"""PPO's loss of a value function. Shapes: T packed trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Return half the squared error per token, the larger one of the value's and the clipped value's:

        max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

    A value that has moved by more than c towards its return has no gradient. Source: the value loss of PPO (Schulman et
    al., arXiv 1707.06347) in its authors' implementation; whether the clip helps is disputed (Andrychowicz et al.,
    arXiv 2006.05990, section 3.5).

    Args:
        values: [T], of the weights being trained; receives the gradient.
        old_values: [T], of the weights before the first mini-batch of this rollout.
        returns: [T], targets of the values.
        cliprange: c, in units of the reward; infinity disables the clip.

    Returns:
        loss [T], not reduced; clipped bool [T], True where the clipped value's error is the larger one.

    Raises ValueError: the shapes are not all [T] (they would be broadcast), or `cliprange` is not positive.
    """
    if values.ndim != 1 or not values.shape == old_values.shape == returns.shape:
        shapes = [tuple(tensor.shape) for tensor in (values, old_values, returns)]
        raise ValueError(f"values, old_values and returns must all be [T]; got {shapes}")
    if not cliprange > 0:
        raise ValueError(f"cliprange must be positive; got {cliprange}")
    moved = values - old_values
    bounded = old_values + moved.clamp(-cliprange, cliprange)
    error, bounded_error = (values - returns) ** 2, (bounded - returns) ** 2
    clipped = (moved.abs() > cliprange) & (bounded_error > error)
    return 0.5 * torch.where(clipped, bounded_error, error), clipped

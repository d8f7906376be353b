"""The critic's clipped loss against closed forms, and what it refuses."""

import math

import pytest
import torch

from hybrid_gkd.losses.value import clipped_value_loss


def test_the_larger_error_of_the_value_and_of_the_clipped_value():
    old = torch.zeros(5, dtype=torch.float64)
    values = torch.tensor([0.25, 2.0, 2.0, -2.0, 1.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([1.0, 3.0, 0.0, -3.0, 3.0], dtype=torch.float64)
    loss, clipped = clipped_value_loss(values, old, returns, cliprange=0.5)
    # Within the range; beyond it towards the return, twice; beyond it past the return; towards it again.
    expected = [0.75**2 / 2, 2.5**2 / 2, 2.0**2 / 2, 2.5**2 / 2, 2.5**2 / 2]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))
    assert clipped.tolist() == [False, True, False, True, True]
    loss.sum().backward()
    assert values.grad.tolist() == [0.25 - 1.0, 0.0, 2.0, 0.0, 0.0]  # v - R where the clip is not active


def test_without_a_clip_it_is_half_the_squared_error():
    values, old, returns = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss, clipped = clipped_value_loss(values, old, returns, cliprange=math.inf)
    torch.testing.assert_close(loss, (values - returns) ** 2 / 2)
    assert not clipped.any()


def test_what_would_broadcast_and_a_range_of_nothing_are_refused():
    row = torch.zeros(3)
    for shapes in ((row, row, row[:1]), (row[None], row, row), (row, row[:0], row)):
        with pytest.raises(ValueError, match=r"must all be \[T\]"):
            clipped_value_loss(*shapes, cliprange=0.5)
    with pytest.raises(ValueError, match="cliprange must be positive"):
        clipped_value_loss(row, row, row, cliprange=0.0)

"""The clipped surrogate against values computed by hand."""

import pytest
import torch

from hybrid_gkd.losses.policy import clipped_policy_loss

# ratio, advantage -> loss, dloss/dlogprob, clipped (clip_ratio 0.2)
CASES = [
    (1.0, 2.0, -2.0, -2.0, False),  # first mini-batch: the plain policy gradient
    (1.1, 2.0, -2.2, -2.2, False),
    (1.5, 2.0, -2.4, 0.0, True),  # already far enough up
    (0.5, 2.0, -1.0, -1.0, False),  # wrong way: the pessimistic branch keeps its gradient
    (0.5, -2.0, 1.6, 0.0, True),  # already far enough down
    (1.5, -2.0, 3.0, 3.0, False),
    (1.5, 0.0, 0.0, 0.0, False),
]


def column(index):
    return torch.tensor([case[index] for case in CASES], dtype=torch.float64)


def test_values_and_gradients_by_hand():
    old = torch.linspace(-3, -1, len(CASES), dtype=torch.float64)
    logprobs = (old + column(0).log()).requires_grad_()
    loss, clipped = clipped_policy_loss(logprobs, old, column(1), clip_ratio=0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss, column(2))
    torch.testing.assert_close(logprobs.grad, column(3))
    assert clipped.tolist() == [case[4] for case in CASES]
    assert not (logprobs.grad[clipped]).any()


def test_equals_the_formula_of_the_paper():
    gen = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 200, generator=gen, dtype=torch.float64)
    ratio = (logprobs - old).exp()
    want = -torch.minimum(ratio * advantages, ratio.clamp(0.7, 1.3) * advantages)
    torch.testing.assert_close(clipped_policy_loss(logprobs, old, advantages, clip_ratio=0.3)[0], want)


def test_no_tokens():
    logprobs = torch.zeros(0, requires_grad=True)
    loss, clipped = clipped_policy_loss(logprobs, torch.zeros(0), torch.zeros(0), clip_ratio=0.2)
    loss.sum().backward()
    assert loss.shape == clipped.shape == logprobs.grad.shape == (0,)


def test_refuses():
    with pytest.raises(ValueError, match="all be"):
        clipped_policy_loss(torch.zeros(3, 1), torch.zeros(3), torch.zeros(3), clip_ratio=0.2)
    with pytest.raises(ValueError, match="all be"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(3), torch.zeros(1), clip_ratio=0.2)
    with pytest.raises(ValueError, match="clip_ratio"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), clip_ratio=0.0)

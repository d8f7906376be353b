"""Group-relative advantages against values computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hybrid_gkd.ppo.advantages import group_relative_advantages


def test_by_hand():
    rewards = np.array([1, 0, 0, 1, 3, 0, 0, 1], np.float32)
    plain = group_relative_advantages(rewards, 4, norm_by_std=False)
    np.testing.assert_allclose(plain, [0.5, -0.5, -0.5, 0.5, 2, -1, -1, 0])
    assert plain.dtype == np.float32
    normed = group_relative_advantages(rewards, 4, norm_by_std=True)
    # sample deviations: sqrt(1/3) and sqrt(6/3)
    want = np.concatenate([plain[:4] * 3**0.5, plain[4:] / 2**0.5])
    np.testing.assert_allclose(normed, want, rtol=1e-5)


def test_groups_are_neighbours():
    """Sample j of prompt i is at i * n + j: a bonus to prompt 1 must not reach prompt 0."""
    rewards = np.array([0.0, 1.0, 0.0, 1.0])
    shifted = rewards + np.array([0, 0, 10, 10])
    for norm in (False, True):
        np.testing.assert_allclose(
            group_relative_advantages(rewards, 2, norm_by_std=norm),
            group_relative_advantages(shifted, 2, norm_by_std=norm),
        )


@pytest.mark.parametrize("norm", [False, True])
def test_equal_rewards_give_zeros(norm):
    np.testing.assert_allclose(
        group_relative_advantages(np.full(6, 0.1, np.float32), 3, norm_by_std=norm), 0, atol=1e-9
    )


@pytest.mark.slow
@given(hnp.arrays(np.float64, (4, 3), elements=st.floats(-100, 100)))
def test_every_group_sums_to_zero(rewards):
    advantages = group_relative_advantages(rewards.reshape(-1), 3, norm_by_std=False)
    np.testing.assert_allclose(advantages.reshape(4, 3).sum(1), 0, atol=1e-4)


def test_empty_batch():
    assert group_relative_advantages(np.zeros(0), 4, norm_by_std=True).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "group_size", "message"),
    [
        (np.zeros(3), 1, "at least 2"),
        (np.zeros(7), 2, r"\[B \* 2\]"),
        (np.zeros((2, 2)), 2, r"\[B \* 2\]"),
        (np.array([0.0, np.nan]), 2, "finite"),
    ],
)
def test_refuses(rewards, group_size, message):
    with pytest.raises(ValueError, match=message):
        group_relative_advantages(rewards, group_size, norm_by_std=True)

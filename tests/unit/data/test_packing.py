"""Properties of the micro-batch plan, for any lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gkd.data.packing import attention_cost, plan_micro_batches

lengths_of = st.lists(st.integers(1, 50), max_size=40)


def total(costs, rank):
    return sum(costs[i] for micro in rank for i in micro)


@pytest.mark.slow
@given(
    lengths_of,
    st.integers(1, 5),
    st.none() | st.integers(50, 120),
    st.none() | st.integers(1, 7),
    st.booleans(),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_covers_everything_once_within_the_limits_with_equal_counts(
    lengths, num_ranks, max_tokens, max_sequences, balance, quadratic
):
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, max_sequences, balance, quadratic)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert plan[0]  # at least one micro-batch, if only an empty one: all ranks enter the step
    members = [micro for rank in plan for micro in rank]
    assert sorted(i for micro in members for i in micro) == list(range(len(lengths)))
    for micro in members:
        assert max_tokens is None or sum(lengths[i] for i in micro) <= max_tokens
        assert max_sequences is None or len(micro) <= max_sequences
    if not balance:
        order = [sorted(i for micro in rank for i in micro) for rank in plan]
        assert [i for rank in order for i in rank] == list(range(len(lengths)))  # contiguous slices
    assert plan == plan_micro_batches(list(lengths), num_ranks, max_tokens, max_sequences, balance, quadratic)


@pytest.mark.slow
@given(lengths_of, st.integers(1, 9), st.integers(50, 120), st.sampled_from([0.0, 0.02, 0.5]))
def test_ranks_cost_about_the_same_in_total_and_step_by_step(lengths, num_ranks, max_tokens, quadratic):
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, None, True, quadratic)
    costs = [n + quadratic * n * n for n in lengths]
    loads = [total(costs, rank) for rank in plan]
    largest = max(costs, default=0)
    # No plan can be better than the mean, or than the costliest sequence.
    assert max(loads) <= sum(loads) / num_ranks + (1 - 1 / num_ranks) * largest + 1e-6
    assert sum(bool(load) for load in loads) == min(num_ranks, len(lengths))
    for rank in plan:
        steps = [total(costs, [micro]) for micro in rank]
        assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
@given(lengths_of, st.integers(1, 5), st.integers(50, 120), st.sampled_from([0.0, 0.5]))
def test_at_most_twice_the_micro_batches_that_the_tokens_need(lengths, num_ranks, max_tokens, quadratic):
    """A longest-first bin is opened only when all others are more than half full."""
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, None, True, quadratic)
    needed = max(-(-total(lengths, rank) // max_tokens) for rank in plan)
    assert len(plan[0]) <= max(1, 2 * needed)


def test_a_long_sequence_counts_more_than_its_tokens():
    """One of 40 tokens and ten of 4: equal in tokens, but the long one costs 40 + 16 against 40 + 1.6."""
    lengths = [40] + [4] * 10
    linear, quadratic = (plan_micro_batches(lengths, 2, None, None, True, each) for each in (0.0, 0.01))
    assert sorted(map(len, (linear[0][0], linear[1][0]))) == [1, 10]
    assert sorted(map(len, (quadratic[0][0], quadratic[1][0]))) == [1, 10]
    lengths = [40] + [4] * 13
    quadratic = plan_micro_batches(lengths, 2, None, None, True, 0.01)
    assert sorted(map(len, (quadratic[0][0], quadratic[1][0]))) == [1, 13]
    assert attention_cost(1000) == pytest.approx(1 / 6000)


def test_a_full_bin_does_not_end_the_search():
    """By attention the bin of the two short ones is cheaper, but it has no room for a third."""
    assert plan_micro_batches([6, 5, 5, 4], 1, 10, None, True, 1.0) == [[[0, 3], [1, 2]]]


def test_a_rank_with_less_work_gets_empty_micro_batches():
    assert plan_micro_batches([10, 10, 10], 2, 10, None, balance=True) == [[[0], [2]], [[1], []]]


def test_without_limits_there_is_one_micro_batch():
    assert plan_micro_batches([4, 1, 3], 1, None, None, balance=True) == [[[0, 1, 2]]]
    assert plan_micro_batches([], 2, 10, None, balance=True) == [[[]], [[]]]


def test_a_sequence_above_the_limit_is_refused_by_name():
    with pytest.raises(ValueError, match=r"sequence 1 has 11 tokens.*ppo_max_token_len_per_gpu=10"):
        plan_micro_batches([3, 11], 1, 10, None, True)


@pytest.mark.parametrize("max_sequences", [0, -1])
def test_a_limit_of_no_sequences_is_refused(max_sequences):
    with pytest.raises(ValueError, match="max_sequences"):
        plan_micro_batches([1], 1, None, max_sequences, balance=True)

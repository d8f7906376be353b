import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gkd.data.packing import pack_micro_batches, plan_micro_batches, split_over_ranks

lengths_of = st.lists(st.integers(0, 50), max_size=40)


@given(lengths_of, st.integers(1, 9))
def test_split_gives_every_item_to_one_rank_and_leaves_no_rank_out(costs, num_ranks):
    ranks = split_over_ranks(costs, num_ranks)
    assert sorted(i for rank in ranks for i in rank) == list(range(len(costs)))
    assert sum(bool(rank) for rank in ranks) == min(num_ranks, len(costs))
    loads = [sum(costs[i] for i in rank) for rank in ranks]
    # Longest first: two ranks never differ by more than the item placed last, hence by the longest.
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert ranks == split_over_ranks(list(costs), num_ranks)


@given(lengths_of, st.integers(50, 120))
def test_packing_keeps_the_limit_and_wastes_at_most_half(lengths, max_tokens):
    bins = pack_micro_batches(lengths, max_tokens)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= max_tokens for members in bins)
    if sum(lengths):
        # Longest first fails with n bins only when all n are more than half full.
        assert len(bins) <= 2 * -(-sum(lengths) // max_tokens)


def test_packing_of_nothing_and_of_too_much():
    assert pack_micro_batches([], 10) == []
    assert pack_micro_batches([10], 10) == [[0]]
    with pytest.raises(ValueError, match=r"sequence 1 has 11 tokens, more than the 10"):
        pack_micro_batches([3, 11], 10)


@given(
    lengths_of,
    st.integers(1, 5),
    st.none() | st.integers(50, 120),
    st.none() | st.integers(1, 7),
    st.booleans(),
)
def test_plan_covers_everything_once_within_the_limits_with_equal_counts(
    lengths, num_ranks, max_tokens, max_sequences, balance
):
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, max_sequences, balance)
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
    assert plan == plan_micro_batches(lengths, num_ranks, max_tokens, max_sequences, balance)


def test_a_rank_with_less_work_gets_empty_micro_batches():
    plan = plan_micro_batches([10, 10, 10], 2, 10, None, balance=True)
    assert plan == [[[0], [2]], [[1], []]]


def test_one_micro_batch_without_limits():
    assert plan_micro_batches([4, 1, 3], 1, None, None, balance=True) == [[[0, 1, 2]]]


@pytest.mark.parametrize("max_sequences", [0, -1])
def test_a_limit_of_no_sequences_is_refused(max_sequences):
    with pytest.raises(ValueError, match="max_sequences"):
        plan_micro_batches([1], 1, None, max_sequences, balance=True)

"""Which sequences a rank trains, and in which micro-batches: pure functions of the sequence lengths.

All are deterministic, so that every rank can compute the same plan by itself. The method is the
longest-first greedy one: its largest bin is at most 4/3 of the best possible (Graham 1969).
"""

from __future__ import annotations

import heapq


def split_over_ranks(costs: list[int], num_ranks: int) -> list[list[int]]:
    """Indexes of `costs` for each rank, sums balanced; a rank is empty only if there are fewer items than ranks."""
    bins = _fill(costs, num_ranks)
    assert bins is not None  # without limits everything fits
    return bins


def pack_micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Bins of at most `max_tokens` tokens, about as few as possible and about equally full."""
    return plan_micro_batches(lengths, 1, max_tokens, None, balance=True)[0] if lengths else []


def plan_micro_batches(
    lengths: list[int], num_ranks: int, max_tokens: int | None, max_sequences: int | None, balance: bool
) -> list[list[list[int]]]:
    """For each rank its micro-batches of sequence indexes, the same number of micro-batches on each rank.

    An empty micro-batch still takes part in every collective of the step. `balance` evens out the
    tokens of the ranks; without it rank r gets the r-th contiguous slice.

    Example: plan_micro_batches([6, 2, 3], 2, 6, None, True) == [[[0]], [[1, 2]]]
    """
    longest = max(lengths, default=0)
    if max_tokens is not None and longest > max_tokens:
        raise ValueError(
            f"sequence {lengths.index(longest)} has {longest} tokens, more than the {max_tokens} of a micro-batch"
        )
    if max_sequences is not None and max_sequences < 1:
        raise ValueError(f"max_sequences must be at least 1; got {max_sequences}")
    shares = split_over_ranks(lengths, num_ranks) if balance else _slices(len(lengths), num_ranks)
    num_bins = 1
    for share in shares:
        if max_tokens is not None:
            num_bins = max(num_bins, -(-sum(lengths[i] for i in share) // max_tokens))
        if max_sequences is not None:
            num_bins = max(num_bins, -(-len(share) // max_sequences))
    while True:  # ends: with a bin per sequence everything fits
        plan = []
        for share in shares:
            bins = _fill([lengths[i] for i in share], num_bins, max_tokens, max_sequences)
            if bins is None:
                break
            plan.append([[share[i] for i in members] for members in bins])
        else:
            return plan
        num_bins += 1


def _fill(
    costs: list[int], num_bins: int, max_cost: int | None = None, max_items: int | None = None
) -> list[list[int]] | None:
    """Longest first into the least full bin; None where a limit does not allow it."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, 0, b) for b in range(num_bins)]  # cost, number of items, bin; the smallest is filled next
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        while heap and max_items is not None and heap[0][1] == max_items:
            heapq.heappop(heap)  # full for good
        if not heap or (max_cost is not None and heap[0][0] + costs[i] > max_cost):
            return None
        cost, count, b = heap[0]
        bins[b].append(i)
        heapq.heapreplace(heap, (cost + costs[i], count + 1, b))
    return [sorted(members) for members in bins]


def _slices(num_items: int, num_ranks: int) -> list[list[int]]:
    """Contiguous slices whose sizes differ by at most one."""
    return [list(range(num_items * r // num_ranks, num_items * (r + 1) // num_ranks)) for r in range(num_ranks)]

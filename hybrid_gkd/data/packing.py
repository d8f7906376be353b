"""Assign sequences to ranks and micro-batches, as a pure function of the sequence lengths.

The longest-first greedy algorithm (Graham 1969): without token limits the most expensive bin costs at most the mean
plus (1 - 1/bins) times the most expensive item, and at most 4/3 of the optimum.
"""

from __future__ import annotations

import math


def attention_cost(hidden_size: int) -> float:
    """Return c for the cost n + c n^2 of a sequence of n tokens, in tokens of a very short sequence.

    A block of 12 D^2 weights needs 24 D^2 operations per token and 2 D n^2 for causal attention: n^2 / (12 D), doubled
    since attention kernels reach about half the rate of matrix products.
    """
    return 1 / (6 * hidden_size)


def plan_micro_batches(
    lengths: list[int], num_ranks: int, max_tokens: int | None, max_sequences: int | None, balance: bool,
    attention_cost: float = 0.0,
) -> list[list[list[int]]]:
    """Return for each rank its micro-batches of sequence indices, with the same number of micro-batches on each rank.

    An empty micro-batch still takes part in all collectives of the step; they occur only with fewer sequences than
    ranks. A rank has at most twice as many micro-batches as its tokens need, and begins with the most expensive one, so
    that ranks do about the same work between collectives.

    Args:
        lengths: tokens of each sequence.
        max_tokens, max_sequences: limits of a micro-batch; None: no limit.
        balance: balance the cost of the ranks; False: rank r gets the r-th contiguous slice.

    Raises ValueError: a sequence is longer than `max_tokens`, or `max_sequences` is below 1.
    """
    longest = max(lengths, default=0)
    if max_tokens is not None and longest > max_tokens:
        rule = f"more than actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max_tokens} allows"
        raise ValueError(f"sequence {lengths.index(longest)} has {longest} tokens, {rule}")
    if max_sequences is not None and max_sequences < 1:
        raise ValueError(f"max_sequences must be at least 1; got {max_sequences}")
    limits = [math.inf if limit is None else limit for limit in (max_tokens, max_sequences)]
    costs = [n + attention_cost * n * n for n in lengths]
    total = len(lengths)
    shares = [list(range(total * r // num_ranks, total * (r + 1) // num_ranks)) for r in range(num_ranks)]
    if balance:
        shares = _fill(list(range(total)), lengths, costs, num_ranks, math.inf, math.inf) or []
    needed = [max(sum(lengths[i] for i in share) / limits[0], len(share) / limits[1]) for share in shares]
    num_bins = max(1, math.ceil(max(needed)))
    plan: list[list[list[int]] | None] = [None]
    while None in plan:  # terminates: with a bin per sequence everything fits
        plan = [_fill(share, lengths, costs, num_bins, *limits) for share in shares]
        num_bins += 1
    return [sorted(bins or [], key=lambda members: -sum(costs[i] for i in members)) for bins in plan]


def _fill(
    items: list[int], lengths: list[int], costs: list[float], num_bins: int, max_tokens: float, max_items: float
) -> list[list[int]] | None:
    """Put the most expensive items first into the cheapest bin with room; None if an item fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    loads = [(0.0, 0, b) for b in range(num_bins)]  # cost, number of items, bin
    for i in sorted(items, key=lambda i: (-costs[i], i)):
        room = [load for load in loads if tokens[load[2]] + lengths[i] <= max_tokens and load[1] < max_items]
        if not room:
            return None
        cost, count, b = min(room)
        loads[b] = (cost + costs[i], count + 1, b)
        tokens[b] += lengths[i]
        bins[b].append(i)
    return [sorted(members) for members in bins]

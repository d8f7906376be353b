"""Compact encoding of scored positions as ranges: 3 4 5 8 become [3, 6, 8, 9].

A list of ranges has start and exclusive stop of each range, ascending.
"""

from __future__ import annotations

import numpy as np

from hybrid_gkd.errors import TeacherRefused


def count_ranges(positions: np.ndarray) -> int:
    """Return the number of ranges of ascending positions [R], R at least 1."""
    return 1 + int(np.count_nonzero(np.diff(positions) > 1))


def ranges_of(positions: np.ndarray) -> list[int]:
    """Return the ranges of ascending positions [R], R at least 1."""
    last = np.flatnonzero(np.diff(positions, append=positions[-1] + 2) > 1)  # last index of each range
    first = np.concatenate([[0], last[:-1] + 1])
    return np.stack([positions[first], positions[last] + 1], axis=1).ravel().tolist()


def positions_of(ranges: list[int], length: int, name: str) -> np.ndarray:
    """Return the positions, int64 [R], of a reading of `length` tokens. Raises TeacherRefused: invalid ranges."""
    edges = np.array([1, *ranges, length], np.int64)
    starts, stops = edges[1:-1:2], edges[2:-1:2]
    if len(starts) == 0 or len(starts) != len(stops) or (np.diff(edges) < 0).any() or (starts == stops).any():
        rule = f"the ranges of its scored tokens must be ascending within [1, {length}) and not empty"
        raise TeacherRefused(f"{name}: {rule}; got {ranges[:9]}")
    sizes = stops - starts
    return np.arange(sizes.sum()) + np.repeat(starts - (sizes.cumsum() - sizes), sizes)

"""Downsampling of series to a bounded length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Mergeable = TypeVar("Mergeable", "Point", "Counts")


class Downsampled(Generic[Mergeable]):
    """Series of at most `limit` items, an even number; when it is full, neighbours are merged.

    `every` added items form one kept item. The result depends on the items alone, not on when they were added.
    """

    def __init__(self, limit: int):
        assert limit % 2 == 0, limit
        self._limit, self.every = limit, 1
        self._whole: list[Mergeable] = []
        self._last: Mergeable | None = None
        self._in_last = 0

    def add(self, item: Mergeable) -> None:
        self._last = item if self._last is None else self._last.merged(item)
        self._in_last += 1
        if self._in_last < self.every:
            return
        self._whole.append(self._last)
        self._last, self._in_last = None, 0
        if len(self._whole) == self._limit:
            pairs = zip(self._whole[::2], self._whole[1::2], strict=True)
            self._whole = [first.merged(second) for first, second in pairs]
            self.every *= 2

    def items(self) -> list[Mergeable]:
        """Return the kept items; the last one may have fewer than `every` added items."""
        return self._whole + ([] if self._last is None else [self._last])


class Point(NamedTuple):
    """A metric over some consecutive steps."""

    step: int
    """Last of the steps."""
    rows: int
    total: float
    low: float
    high: float

    @classmethod
    def of(cls, step: int, value: float) -> Point:
        return cls(step, 1, value, value, value)

    @property
    def mean(self) -> float:
        return self.total / self.rows

    def merged(self, later: Point) -> Point:
        low, high = min(self.low, later.low), max(self.high, later.high)
        return Point(later.step, self.rows + later.rows, self.total + later.total, low, high)


class Counts(NamedTuple):
    """Histogram of completion lengths over some consecutive steps."""

    step: int
    """Last of the steps."""
    counts: tuple[int, ...]
    """Count of each bin, shortest first."""

    def merged(self, later: Counts) -> Counts:
        sums = itertools.zip_longest(self.counts, later.counts, fillvalue=0)
        return Counts(later.step, tuple(map(sum, sums)))


def round_significant(value: float, digits: int = 5) -> float | int:
    """Round to significant digits; return whole numbers as int, to keep the JSON short."""
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() else value


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` items, two or more, evenly spaced and including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]

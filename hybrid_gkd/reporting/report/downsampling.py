"""Downsampling of series to a bounded length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class Downsampled(Generic[Item]):
    """Series of at most `limit` items, an even number; when it is full, neighbours are merged.

    `every` added items form one kept item. The result depends on the items alone, not on when they were added.
    """

    def __init__(self, merge: Callable[[Item, Item], Item], limit: int):
        assert limit % 2 == 0, limit
        self._merge, self._limit, self.every = merge, limit, 1
        self._whole: list[Item] = []
        self._last: Item | None = None
        self._in_last = 0

    def add(self, item: Item) -> None:
        self._last = item if self._last is None else self._merge(self._last, item)
        self._in_last += 1
        if self._in_last < self.every:
            return
        self._whole.append(self._last)
        self._last, self._in_last = None, 0
        if len(self._whole) == self._limit:
            pairs = zip(self._whole[::2], self._whole[1::2], strict=True)
            self._whole = [self._merge(first, second) for first, second in pairs]
            self.every *= 2

    def items(self) -> list[Item]:
        """Return the kept items; the last one may have fewer than `every` added items."""
        return self._whole if self._last is None else [*self._whole, self._last]


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


def merge_points(first: Point, second: Point) -> Point:
    """Merge two neighbours."""
    return Point(
        second.step, first.rows + second.rows, first.total + second.total, min(first.low, second.low),
        max(first.high, second.high),
    )  # fmt: skip


class Counts(NamedTuple):
    """Histogram of completion lengths over some consecutive steps."""

    step: int
    """Last of the steps."""
    counts: tuple[int, ...]
    """Count of each bin, shortest first."""


def merge_counts(first: Counts, second: Counts) -> Counts:
    """Merge two neighbours."""
    length = max(len(first.counts), len(second.counts))
    padded = (each.counts + (0,) * (length - len(each.counts)) for each in (first, second))
    return Counts(second.step, tuple(map(sum, zip(*padded, strict=True))))


def round_significant(value: float, digits: int = 5) -> float | int:
    """Round to significant digits; return whole numbers as int, to keep the JSON short."""
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() else value


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` items, two or more, evenly spaced and including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]

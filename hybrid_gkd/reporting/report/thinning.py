"""Series that stay small however long a run is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """At most `limit` items (an even number): when there are more, neighbours are merged, and so are those to come.

    What is kept depends on the items alone, and not on when they were added. `every` items are merged into one.
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
        """The last one may be of fewer than `every` items."""
        return self._whole if self._last is None else [*self._whole, self._last]


class Point(NamedTuple):
    """A metric in some steps that follow each other."""

    step: int
    """The last of them."""
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
    """Both as one."""
    return Point(
        second.step, first.rows + second.rows, first.total + second.total, min(first.low, second.low),
        max(first.high, second.high),
    )  # fmt: skip


class Counts(NamedTuple):
    """How many answers of some steps were how long."""

    step: int
    """The last of them."""
    counts: tuple[int, ...]
    """Of each bin, from the shortest on."""


def merge_counts(first: Counts, second: Counts) -> Counts:
    """Both as one."""
    length = max(len(first.counts), len(second.counts))
    padded = (each.counts + (0,) * (length - len(each.counts)) for each in (first, second))
    return Counts(second.step, tuple(map(sum, zip(*padded, strict=True))))


def rounded(value: float, digits: int = 5) -> float | int:
    """To significant digits; whole numbers without a point, so that they are short in JSON."""
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() else value


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` (two or more) of them: the first, the last, and those evenly between."""
    if len(items) <= count:
        return list(items)
    return [items[round(n * (len(items) - 1) / (count - 1))] for n in range(count)]

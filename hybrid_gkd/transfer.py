"""Dataclasses with many small arrays, on their way to another process: one array for each field.

However small an array is, sending it costs about ten microseconds: 128 short sequences with their teacher scores are
900 arrays, which take 12 ms to a worker one by one and 5 joined. Large ones stay as they are: joining copies them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

LARGEST_BYTES = 16384
"""Mean size up to which the arrays of a field are joined."""


class Transfer:
    """Pickled, it is an array for each field of its items, dataclasses of one class; unpickled, the list of them."""

    def __init__(self, items: Sequence[Any]):
        self.items = items

    def __reduce__(self) -> Any:
        return _restored, (_by_field(list(self.items)),)


@dataclasses.dataclass(frozen=True, slots=True)
class _Joined:
    array: np.ndarray
    lengths: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    kind: type
    columns: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Same:
    value: Any
    count: int


def _by_field(values: list[Any]) -> Any:
    """What stands for the values of a field, or for the items themselves."""
    if len(values) < 2 or len(set(map(type, values))) > 1:
        return values
    first, kind = values[0], type(values[0])
    if all(value is first for value in values):
        return _Same(first, len(values))
    if kind is np.ndarray and _can_join(values):
        return _Joined(np.concatenate(values), [len(value) for value in values])
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return _Rows(kind, {name: _by_field([getattr(value, name) for value in values]) for name in names})
    if kind is dict and first and all(value.keys() == first.keys() for value in values):
        return _Rows(dict, {name: _by_field([value[name] for value in values]) for name in first})
    return values


def _can_join(arrays: list[np.ndarray]) -> bool:
    alike = len({(array.dtype, array.shape[1:], array.ndim > 0) for array in arrays}) == 1
    return alike and arrays[0].ndim > 0 and sum(array.nbytes for array in arrays) <= LARGEST_BYTES * len(arrays)


def _restored(by_field: Any) -> list[Any]:
    match by_field:
        case _Same(value, count):
            return [value] * count
        case _Joined(array, lengths):
            ends = list(itertools.accumulate(lengths, initial=0))
            return [array[start:end] for start, end in itertools.pairwise(ends)]
        case _Rows(kind, columns):
            rows = zip(*map(_restored, columns.values()), strict=True)
            return [kind(**dict(zip(columns, row, strict=True))) for row in rows]
        case _:
            values: list[Any] = by_field
            return values

"""Events: sets of tokens of two vocabularies whose probabilities can be compared.

A token of the teacher and one of the student are in one event if they spell the same bytes, or if one begins with the
other and the tokenizer of the shorter one splits the longer one there. All tokens of an event begin with the bytes of
its shortest one, so teacher and student both have a probability of the event. Events partition both vocabularies; the
mass outside the chosen events is the tail.

Shapes: N tokens of the teacher, R rows, each the prediction of a token of the student, K candidates of the teacher,
C columns.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_gkd.models.spelling import Spelling

LARGEST_EVENT = 0.25
"""Largest fraction of the columns for one event. A larger event keeps its first tokens, in BPE the most frequent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of a text, with the range of bytes that each one spells. A first token may begin before the text."""

    ids: np.ndarray
    """int32 [N]."""
    starts: np.ndarray
    """int64 [N]."""
    ends: np.ndarray
    """int64 [N], not descending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events of rows, E in all, by row, the most likely first."""

    rows: np.ndarray
    """int64 [E], not descending."""
    logprobs: np.ndarray
    """float32 [E]."""
    starts: np.ndarray
    """int64 [E]: the tokens of the student are members[start : start + size]."""
    sizes: np.ndarray
    """int64 [E]."""
    members: np.ndarray
    """Token ids."""


class TokenEvents:
    """The events of two vocabularies.

    Args:
        roles: special tokens of the teacher -> those of the student with the same role.
        num_ids: ids of the student that may be candidates.
        num_columns: C, at most `num_ids`.
    """

    def __init__(
        self, teacher: Spelling, student: Spelling, roles: Mapping[int, Sequence[int]], *, num_ids: int,
        num_columns: int,
    ):  # fmt: skip
        self.teacher, self.student, self.roles = teacher, student, roles
        self.num_ids, self.num_columns, self.is_same = num_ids, num_columns, teacher is student
        self.largest = max(1, int(LARGEST_EVENT * num_columns))
        """Largest number of student tokens in an event."""
        self.longer: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        """First teacher tokens of a student token that the teacher splits into more -> such student tokens."""
        if self.is_same:
            self.event = self.members = np.arange(num_ids, dtype=np.int32)
            self.offsets = np.arange(num_ids + 1)
            return
        self.first = _first_tokens(teacher, student)
        """int32: the first token of the student in the bytes of each of the teacher's; -1: none."""
        owners = _owners(teacher, student)
        for number, owner in enumerate(owners[:num_ids]):
            for length in range(1, len(owner)):
                if len(self.longer[owner[:length]]) < self.largest:
                    self.longer[owner[:length]].append(number)
        self.event = _roots(teacher, self.first, owners)
        """int32: the event of each token of the teacher: the id of its shortest one; -1: none."""
        members = defaultdict[int, list[int]](list)
        for number in sorted(range(num_ids), key=lambda number: len(owners[number]) != 1):  # the others are longer
            event = int(self.event[owners[number][0]]) if owners[number] else -1
            if event >= 0 and len(members[event]) < self.largest:
                members[event].append(number)
        shared = dict[tuple[int, ...], int]()
        for number, same in roles.items():  # all that end a text are one event
            self.event[number] = shared.setdefault(tuple(same), number)
            members[int(self.event[number])] = [each for each in same if each < num_ids]
        sizes = np.zeros(len(self.event) + 1, np.int64)
        sizes[[event + 1 for event in members]] = [*map(len, members.values())]
        self.offsets = np.cumsum(sizes)
        self.members = np.array([*itertools.chain.from_iterable(members[key] for key in sorted(members))], np.int32)
        """Tokens of the student of all events; those of event e are members[offsets[e] : offsets[e + 1]]."""

    def matched(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[Events, np.ndarray]:
        """Return the events of rows, and the mass of candidates without an event, [R].

        Args:
            ids: int32 [R, K], the teacher's candidates, most likely first.
            logprobs: float32 [R, K].
        """
        bits, size = ids.shape[1].bit_length(), ids.size
        keys = np.sort(self.event[ids].astype(np.int64) << bits | np.arange(ids.shape[1]), 1)
        events, order = (keys >> bits).ravel(), (keys & ((1 << bits) - 1)) + np.arange(len(ids))[:, None] * ids.shape[1]
        starts = np.flatnonzero(np.diff(keys >> bits, axis=1, prepend=-2))
        values, sizes = logprobs.ravel()[order.ravel()], np.diff(starts, append=size)
        merged, shared = values[starts], np.flatnonzero(sizes > 1)
        if len(shared):
            parts = np.exp(values[ranges(starts[shared], sizes[shared])], dtype=np.float64)
            with np.errstate(divide="ignore"):
                merged[shared] = np.log(np.add.reduceat(parts, np.cumsum(sizes[shared]) - sizes[shared]))
        found, without = np.full(size, -1), np.zeros(len(ids))
        found[order.ravel()[starts]] = np.arange(len(starts))
        found = found[found >= 0]  # by the likeliest candidate in each row
        rows, events, merged = starts[found] // ids.shape[1], events[starts[found]], merged[found]
        unknown = events < 0
        without[rows[unknown]] = np.exp(merged[unknown], dtype=np.float64)
        rows, events, merged = rows[~unknown], events[~unknown], merged[~unknown]
        starts = self.offsets[events]
        return Events(
            rows=rows, logprobs=merged, starts=starts, sizes=self.offsets[events + 1] - starts, members=self.members
        ), without


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the concatenation of start ... start + size - 1, int64."""
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _first_tokens(teacher: Spelling, student: Spelling) -> np.ndarray:
    """Return the first token of the student in the bytes of each token of the teacher, int32; -1: none."""
    found = np.full(len(teacher.bytes), -1, np.int32)
    for text, number in teacher.ids.items():
        same = student.ids.get(text)  # of several tokens with the same bytes, the one with the same name
        spelled = teacher.bytes[number]
        if spelled and same is not None and student.bytes[same] == spelled:
            found[number] = same
    others = [number for number, each in enumerate(teacher.bytes) if each and found[number] < 0]
    for number, ids in zip(others, student.split([teacher.bytes[number] or b"" for number in others]), strict=True):
        found[number] = next(iter(ids), -1)
    return found


def _owners(teacher: Spelling, student: Spelling) -> list[tuple[int, ...]]:
    """Return the tokens of the teacher in the bytes of each token of the student; none for special ones."""
    pieces = [each or b"" for each in student.bytes]
    found = teacher.split(pieces)
    for text, number in student.ids.items():
        same = teacher.ids.get(text)
        if same is not None and pieces[number] and teacher.bytes[same] == pieces[number]:
            found[number] = (same,)
    return found


def _roots(teacher: Spelling, first: np.ndarray, owners: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the shortest token of the event of each token of the teacher, int32; -1: none."""
    found = np.full(len(first), -1, np.int32)
    for number in np.argsort(teacher.lengths, kind="stable").tolist():
        if first[number] < 0:
            continue
        owner = next(iter(owners[first[number]]), number)
        found[number] = found[owner] if owner != number and found[owner] >= 0 else number
    return found

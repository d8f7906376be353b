"""Common outcomes of two vocabularies: events, which are sets of tokens, and the teacher's probabilities of them.

A token of the teacher and one of the student are in one event if they spell the same bytes, or if either begins with
the other where its tokenizer splits the longer one. So the tokens of an event share the bytes of its shortest one, and
the probability of an event is known on both sides. Events partition both vocabularies: what a side has outside of the
chosen events is the tail.

Shapes: N tokens of the teacher, R rows, each the prediction of a token of the student, K candidates of the teacher,
C columns.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_gkd.models.spelling import Spelling
from hybrid_gkd.types import TopK

LEAVES, LEAST = 16, 1e-3
"""Candidates per token of the teacher in a span, and their least probability; further ones are in the tail."""
LARGEST_EVENT = 0.25
"""Fraction of the columns that one event may have; of more tokens the first ones, in BPE the most frequent ones."""
CACHED_PIECES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of a text, with the range of bytes that each one spells. A first token may begin before the text."""

    ids: np.ndarray
    """int32 [N]."""
    starts: np.ndarray
    """int64 [N]."""
    ends: np.ndarray
    """int64 [N], not descending."""


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
        if self.is_same:
            self.event = self.members = np.arange(num_ids, dtype=np.int32)
            self.offsets = np.arange(num_ids + 1)
            return
        self.first = _first_tokens(teacher, student)
        """int32: the first token of the student in the bytes of each of the teacher's; -1: none."""
        owners, largest = _owners(teacher, student), max(1, int(LARGEST_EVENT * num_columns))
        self.longer: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        """First tokens of the teacher in a token of the student that it splits -> such tokens."""
        for number, owner in enumerate(owners[:num_ids]):
            for length in range(1, len(owner)):
                if len(self.longer[owner[:length]]) < largest:
                    self.longer[owner[:length]].append(number)
        self.event = _roots(teacher, self.first, owners)
        """int32: the event of each token of the teacher: the id of its shortest one; -1: none."""
        members = defaultdict[int, list[int]](list)
        for number in sorted(range(num_ids), key=lambda number: len(owners[number]) != 1):  # the others are longer
            event = int(self.event[owners[number][0]]) if owners[number] else -1
            if event >= 0 and len(members[event]) < largest:
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
        self._first_of = functools.lru_cache(CACHED_PIECES)(self._first_of_bytes)

    def matched(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the events of rows: row, event and log-probability, [E] each, by their likeliest candidate in each
        row; and the mass of candidates without an event, [R].

        Args:
            ids: int32 [R, K], the teacher's candidates, most likely first.
            logprobs: float32 [R, K].
        """
        events = self.event[ids]
        order = np.argsort(events, 1, kind="stable")
        ordered = np.take_along_axis(events, order, 1)
        starts = np.flatnonzero(np.diff(ordered, axis=1, prepend=-2))
        rows, columns = starts // events.shape[1], order.ravel()[starts]
        masses = np.exp(np.take_along_axis(logprobs, order, 1), dtype=np.float64).ravel()
        sums = np.add.reduceat(masses, starts) if len(starts) else masses
        alone = np.diff(starts, append=events.size) == 1
        merged = np.full(events.shape, np.nan, np.float32)
        with np.errstate(divide="ignore"):
            merged[rows, columns] = np.where(alone, logprobs[rows, columns], np.log(sums))
        unknown = events < 0
        without = np.nansum(np.exp(np.where(unknown, merged, np.nan), dtype=np.float64), 1)
        rows, columns = np.nonzero(~(unknown | np.isnan(merged)))
        return rows, events[rows, columns], merged[rows, columns], without

    def in_span(
        self, tokens: Tokens, scores: TopK, start: int, end: int
    ) -> tuple[list[tuple[set[int], float]], float]:
        """Return events (tokens of the student, probability) of a row whose token need not be one of the teacher's,
        and the log-probability of that token.

        The teacher's candidates after each of its tokens that the student's token covers are outcomes, given the bytes
        before it: those of the first one that begin with them, and those after the others, which this text continues.
        """
        spelled, place = self.teacher.bytes, int(np.searchsorted(tokens.ends, start, side="right"))
        before = spelled[tokens.ids[place]] or b""
        read = before[: max(0, start - int(tokens.starts[place]))]
        text = self._space_before(start, int(tokens.starts[place]))
        path: tuple[int, ...] = ()
        total = self._prefix_logprob(scores, place, tokens, read)
        logprob, groups = -total, _Groups()
        while True:
            own, is_last = int(tokens.ids[place]), int(tokens.ends[place]) >= end
            for number, value in self._candidates(scores, place, own):
                if number == own and not is_last:
                    continue
                piece, mass = spelled[number], float(np.exp(logprob + value))
                if piece is None and not read:
                    groups.add({self._first_of(text)} if text else self._role(number), mass)
                elif piece is not None and piece.startswith(read) and piece != read:
                    piece = text + piece[len(read) :]
                    key = (*path, number) if not read else (self.teacher.by_bytes.get(piece, -1),)
                    groups.add({self._first_of(piece), *self.longer.get(key, ())}, mass)
            if is_last:
                break
            logprob += float(scores.sampled_logprobs[place])
            text += (spelled[own] or b"")[len(read) :]
            path, read, place = (*path, own), b"", place + 1
        inside = end - int(tokens.starts[place])
        covered = (spelled[own] or b"")[:inside] if int(tokens.ends[place]) > end else None
        logprob += float(scores.sampled_logprobs[place]) if covered is None else self._prefix_logprob(
            scores, place, tokens, covered
        )
        return groups.found, logprob

    def _space_before(self, start: int, teacher_start: int) -> bytes:
        """Return what the student's token spells before the text and the teacher's does not."""
        return self.student.lead[: max(0, teacher_start - start)]

    def _candidates(self, scores: TopK, place: int, own: int) -> list[tuple[int, float]]:
        """Return the likeliest candidates after a token with log-probabilities, the text's own token included."""
        logprobs = scores.logprobs[place, :LEAVES].tolist()
        number = bisect.bisect(logprobs, -math.log(LEAST), key=lambda value: -value)
        found = list(zip(scores.ids[place, :number].tolist(), logprobs[:number], strict=True))
        if all(number != own for number, _ in found):
            found.append((own, float(scores.sampled_logprobs[place])))
        return found

    def _prefix_logprob(self, scores: TopK, place: int, tokens: Tokens, prefix: bytes) -> float:
        """Return the log-probability of the candidates that begin with a prefix of the text's own token."""
        if not prefix:
            return 0.0
        own = int(tokens.ids[place])
        masses = [
            np.exp(value) for number, value in self._candidates(scores, place, own)
            if number == own or (self.teacher.bytes[number] or b"").startswith(prefix)
        ]  # fmt: skip
        return float(np.log(max(sum(masses), 1e-300)))

    def _role(self, number: int) -> set[int]:
        return set(self.roles.get(number, ()))

    def _first_of_bytes(self, piece: bytes) -> int:
        return next(iter(self.student.split([piece])[0]), -1)


class _Groups:
    """Outcomes of one row, joined where they share a token of the student."""

    def __init__(self) -> None:
        self._events: list[tuple[set[int], float] | None] = []
        self._places: dict[int, int] = {}

    def add(self, ids: set[int], mass: float) -> None:
        """Add an outcome; without a token of the student, -1, it belongs to the tail."""
        ids.discard(-1)
        for place in {self._places[number] for number in ids & self._places.keys()}:
            joined = self._events[place]
            assert joined is not None
            ids, mass, self._events[place] = ids | joined[0], mass + joined[1], None
        if ids:
            self._places.update(dict.fromkeys(ids, len(self._events)))
            self._events.append((ids, mass))

    @property
    def found(self) -> list[tuple[set[int], float]]:
        """Return the events, the most likely first."""
        return sorted((each for each in self._events if each is not None), key=lambda event: -event[1])


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

"""Events of the student's tokens that need not be one token of the teacher, of a whole sample at once.

The teacher's candidates after each of its tokens that such a token covers are outcomes, given the bytes before it:
those of the first one that begin with them, and those after the others, which this text continues. Outcomes that share
a token of the student are one event.

Shapes: S tokens of the student, each a row; P pairs of a row and a token of the teacher that it covers; K candidates of
the teacher; O outcomes, by row.
"""

from __future__ import annotations

import bisect
import functools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_gkd.scoring.token_events import Events, TokenEvents, Tokens, ranges
from hybrid_gkd.types import TopK

LEAVES, LEAST = 16, 1e-3
"""Candidates per token of the teacher, and their least probability; further ones are in the tail."""
CACHED = 1 << 18
"""Outcomes and prefixes to keep."""

Context = tuple[bytes, bytes, tuple[int, ...]]
"""Of a pair: the row's bytes before the teacher's token, this token's bytes before the row, the tokens before it."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The likeliest candidates at each token of the teacher, and in a last column its own if it is not among them."""

    ids: np.ndarray
    """int32 [N, K + 1]."""
    logprobs: np.ndarray
    """float64 [N, K + 1]."""
    likely: np.ndarray
    """bool [N, K + 1], whether it is a candidate."""
    is_own: np.ndarray
    """bool [N, K + 1], whether it is the text's own token."""

    @staticmethod
    def of(tokens: Tokens, scores: TopK) -> _Candidates:
        ids = np.column_stack([scores.ids[:, :LEAVES], tokens.ids])
        logprobs = np.column_stack([scores.logprobs[:, :LEAVES], scores.sampled_logprobs]).astype(np.float64)
        likely, is_own = logprobs >= math.log(LEAST), ids == tokens.ids[:, None]
        likely[:, -1] = ~(likely & is_own)[:, :-1].any(1)
        return _Candidates(ids, logprobs, likely, is_own)


class TokenSpans:
    """Finds the events of tokens in spans."""

    def __init__(self, events: TokenEvents):
        self.events, self._spelled = events, [each or b"" for each in events.teacher.bytes]
        order = sorted(range(len(self._spelled)), key=self._spelled.__getitem__)
        self._sorted = [self._spelled[number] for number in order]
        self._ranks = np.argsort(order)
        """Place of each token of the teacher in the order of bytes, where those with a prefix are consecutive."""
        self._range = functools.lru_cache(CACHED)(self._range_of_prefix)
        self._clear()

    def _clear(self) -> None:
        self._contexts, self._outcomes = dict[Context, int](), dict[int, int]()
        """Numbers of contexts, and of outcomes by context and candidate."""
        self._ends, self._members = array("q", [0]), array("q")
        """Tokens of the student in outcome o: members[ends[o] : ends[o + 1]]."""

    def find(self, tokens: Tokens, scores: TopK, own: Tokens) -> tuple[Events, np.ndarray]:
        """Return the events of the rows, and the log-probability of each row's own token, float64 [S].

        Args:
            tokens: of the teacher.
            scores: [N, K], of these.
            own: S > 0 tokens of the student, whose ends the teacher's tokens reach.
        """
        candidates = _Candidates.of(tokens, scores)
        first, last = np.searchsorted(tokens.ends, own.starts, side="right"), np.searchsorted(tokens.ends, own.ends)
        counts = last - first + 1
        places, ends = ranges(first, counts), np.cumsum(counts)
        read = self._prefixes(tokens, first, own.starts)
        logprobs = np.zeros(len(places))
        logprobs[ends - counts] = -self._prefix_logprobs(candidates, first, read)
        sampled = scores.sampled_logprobs.astype(np.float64)
        for depth in range(1, int(counts.max())):
            deeper = (ends - counts)[counts > depth] + depth
            logprobs[deeper] = logprobs[deeper - 1] + sampled[places[deeper] - 1]
        covered = self._prefix_logprobs(candidates, last, self._prefixes(tokens, last, own.ends))
        own_logprobs = logprobs[ends - 1] + np.where(tokens.ends[last] > own.ends, covered, sampled[last])
        possible = candidates.likely[places]
        possible[candidates.is_own[places] & (np.diff(np.repeat(np.arange(len(ends)), counts), append=-1) == 0)[:, None]] = False
        pairs, columns = np.nonzero(possible)
        at = places[pairs], columns
        outcomes = self._outcomes_of(self._contexts_of(tokens, first, last, own.starts, read), pairs, candidates.ids[at])
        masses = np.exp(logprobs[pairs] + candidates.logprobs[at])
        rows = np.repeat(np.arange(len(ends)), counts)[pairs]
        return _joined(self.events, rows, masses, outcomes, own.ids), own_logprobs

    def _prefixes(self, tokens: Tokens, places: np.ndarray, ends: np.ndarray) -> list[bytes]:
        """Return the bytes of tokens up to a place in the text."""
        lengths = np.maximum(0, ends - tokens.starts[places]).tolist()
        return [self._spelled[number][:length] for number, length in zip(tokens.ids[places].tolist(), lengths, strict=True)]

    def _range_of_prefix(self, prefix: bytes) -> tuple[int, int]:
        start = bisect.bisect_left(self._sorted, prefix)
        return start, bisect.bisect_right(self._sorted, prefix, start, key=lambda each: each[: len(prefix)])

    def _prefix_logprobs(self, candidates: _Candidates, places: np.ndarray, prefixes: list[bytes]) -> np.ndarray:
        """Return the log-probability of the candidates that begin with a prefix of the text's own token, [S]."""
        starts, ends = np.array([self._range(each) for each in prefixes]).T[:, :, None]
        ranks = self._ranks[candidates.ids[places]]
        begins = candidates.likely[places] & (candidates.is_own[places] | ((ranks >= starts) & (ranks < ends)))
        masses = np.where(begins, np.exp(candidates.logprobs[places]), 0.0)
        sums = np.log(np.maximum(np.cumsum(masses, 1)[:, -1], 1e-300))
        return np.where([bool(each) for each in prefixes], sums, 0.0)

    def _contexts_of(
        self, tokens: Tokens, first: np.ndarray, last: np.ndarray, starts: np.ndarray, read: list[bytes]
    ) -> list[Context]:
        """Return the context of each pair."""
        lead, ids, found = self.events.student.lead, tokens.ids.tolist(), list[Context]()
        missing = np.maximum(0, tokens.starts[first] - starts).tolist()  # spelled by the student before the text
        for start, end, space, before in zip(first.tolist(), last.tolist(), missing, read, strict=True):
            context = lead[:space], before, ()
            found.append(context)
            for number in ids[start:end]:
                text, before, path = context
                context = text + self._spelled[number][len(before) :], b"", (*path, number)
                found.append(context)
        return found

    def _outcomes_of(
        self, contexts: list[Context], pairs: np.ndarray, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of tokens of the student in each outcome, [O], and all of these tokens."""
        if len(self._outcomes) > CACHED:
            self._clear()
        known = np.array([self._contexts.setdefault(each, len(self._contexts)) for each in contexts])
        keys = (known[pairs] * len(self._spelled) + numbers).tolist()
        missing = {
            key: (contexts[pair], number) for key, pair, number in zip(keys, pairs.tolist(), numbers.tolist(), strict=True)
            if key not in self._outcomes
        }  # fmt: skip
        for key, members in zip(missing, self._new_outcomes([*missing.values()]), strict=True):
            self._outcomes[key] = len(self._ends) - 1
            self._members.extend(members)
            self._ends.append(len(self._members))
        found, ends = np.array([self._outcomes[key] for key in keys]), np.frombuffer(self._ends, np.int64)
        starts, sizes = ends[found], ends[found + 1] - ends[found]
        return sizes, np.frombuffer(self._members, np.int64)[ranges(starts, sizes)]

    def _new_outcomes(self, wanted: Sequence[tuple[Context, int]]) -> list[set[int]]:
        """Return the tokens of the student that candidates of the teacher mean; none: they belong to the tail."""
        pieces, found = list[bytes](), list[set[int]]()
        for (text, read, path), number in wanted:
            piece, members = self._spelled[number], set[int]()
            if not piece and not read:
                piece = text
                members.update(() if text else self.events.roles.get(number, ()))
            elif piece != read and piece.startswith(read):
                piece = text + piece[len(read) :]
                key = (self.events.teacher.by_bytes.get(piece, -1),) if read else (*path, number)
                members.update(self.events.longer.get(key, ()))
            else:
                piece = b""
            pieces.append(piece)
            found.append(members)
        distinct = [*dict.fromkeys(pieces)]
        first = dict(zip(distinct, self.events.student.split(distinct), strict=True))
        for piece, members in zip(pieces, found, strict=True):
            members.update(first[piece][:1] if piece else ())
        return found


def _joined(
    events: TokenEvents, rows: np.ndarray, masses: np.ndarray, outcomes: tuple[np.ndarray, np.ndarray], own: np.ndarray
) -> Events:
    """Join the outcomes of a row that share a token of the student.

    Args:
        rows: of the outcomes, [O], ascending.
        masses: their probabilities, [O].
        outcomes: their numbers of tokens of the student, [O], and all of these.
        own: [S], the token of each row, which an event has if it has too many.
    """
    sizes, members = outcomes
    member_bits, bits = len(events.student.bytes).bit_length(), len(rows).bit_length()
    of = np.repeat(np.arange(len(rows)), sizes)
    keys = np.sort(((rows[of] << member_bits | members) << bits) | of)
    of, keys = keys & ((1 << bits) - 1), keys >> bits
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    event = _components(of, starts, len(rows))
    sums, latest = np.bincount(event, masses, len(rows)), np.zeros(len(rows), np.int64)
    np.maximum.at(latest, event, np.arange(len(rows)))
    order = np.lexsort((latest, -sums, rows))
    members, ranks = keys[starts] & ((1 << member_bits) - 1), np.argsort(order)[event[of[starts]]]
    is_own = members == own[rows[of[starts]]]
    keys = np.sort((ranks << member_bits | np.where(is_own, 0, members + 1))[members < events.num_ids])
    ranks, members = keys >> member_bits, (keys & ((1 << member_bits) - 1)) - 1
    members = np.where(members < 0, own[rows[order[ranks]]], members)
    starts = np.flatnonzero(np.diff(ranks, prepend=-1))
    sizes = np.diff(starts, append=len(ranks))
    event = order[ranks[starts]]
    return Events(
        rows=rows[event], logprobs=np.log(np.maximum(sums[event], 1e-300)).astype(np.float32), starts=starts,
        sizes=np.minimum(sizes, events.largest), members=members,
    )  # fmt: skip


def _components(of: np.ndarray, starts: np.ndarray, number: int) -> np.ndarray:
    """Return the event of each outcome: the first one that is connected with it by tokens that outcomes share, [O].

    Args:
        of: outcomes, by their tokens.
        starts: where the outcomes with another token begin.
    """
    found, sizes = np.arange(number), np.diff(starts, append=len(of))
    shared = sizes > 1
    of, sizes = of[np.repeat(shared, sizes)], sizes[shared]
    starts = np.cumsum(sizes) - sizes
    while len(starts):
        least = np.repeat(np.minimum.reduceat(found[of], starts), sizes)
        if (least == found[of]).all():
            break
        np.minimum.at(found, of, least)
        found = found[found]
    return found

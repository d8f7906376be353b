"""Events of student tokens that are not one token of the teacher, for a whole sample at once.

One or more tokens of the teacher cover the bytes of such a token. Each candidate of the teacher at one of them is an
outcome, with the probability of the text up to it. At the first one, which may begin earlier than the student's token,
only candidates that begin with these earlier bytes count. Outcomes that share a token of the student are one event.

Shapes: S tokens of the student, each a row; P pairs of a row and a token of the teacher that it covers; K candidates of
the teacher; O outcomes, by row.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid_gkd.scoring.token_events import Events, TokenEvents, Tokens, ranges
from hybrid_gkd.types import TopK

LEAVES, LEAST = 16, 1e-3
"""Largest number of candidates per token of the teacher, and their smallest probability; others are in the tail."""
CACHED = 1 << 18
"""Size of the caches of outcomes and of prefixes."""

Context = tuple[bytes, bytes, tuple[int, ...] | None]
"""Bytes and tokens before a token of the teacher in a row: the row's bytes before it, its own bytes before the row, and
the teacher's tokens that spell the former; None: none spell exactly these."""


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
        self._lists = {key: number for number, key in enumerate(events.longer)}
        """Number of each list of longer tokens."""
        self._lists_with = defaultdict[int, list[int]](list)
        """Numbers of the lists that have a token."""
        for number, members in enumerate(events.longer.values()):
            for member in members:
                self._lists_with[member].append(number)
        self._range = functools.lru_cache(CACHED)(self._range_of_prefix)
        self._clear()

    def _clear(self) -> None:
        self._contexts, self._outcomes = dict[Context, int](), dict[int, int]()
        """Numbers of contexts, and of outcomes by context and candidate."""
        self._members, self._nodes = _Rows(), _Rows()
        """Student tokens of each outcome, ascending, and nodes that connect it with others (see `_new_outcomes`)."""

    def find(self, tokens: Tokens, scores: TopK, own: Tokens) -> tuple[Events, np.ndarray]:
        """Return the events of the rows, and the log-probability of each row's own token, float64 [S].

        Args:
            tokens: N tokens of the teacher.
            scores: [N, K], scores of these tokens.
            own: S > 0 tokens of the student; the teacher's tokens reach the end of each.
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
        continues = np.ones(len(places), bool)
        continues[ends - 1] = False
        possible = candidates.likely[places] & ~(candidates.is_own[places] & continues[:, None])
        pairs, columns = np.nonzero(possible)
        at = places[pairs], columns
        contexts = self._contexts_of(tokens, first, last, own.starts, read)
        outcomes = self._outcomes_of(contexts, pairs, candidates.ids[at])
        masses = np.exp(logprobs[pairs] + candidates.logprobs[at])
        rows = np.repeat(np.arange(len(ends)), counts)[pairs]
        return self._join_outcomes(rows, masses, outcomes, own.ids), own_logprobs

    def _prefixes(self, tokens: Tokens, places: np.ndarray, ends: np.ndarray) -> list[bytes]:
        """Return the bytes of tokens up to a place in the text."""
        lengths, ids = np.maximum(0, ends - tokens.starts[places]).tolist(), tokens.ids[places].tolist()
        return [self._spelled[number][:length] for number, length in zip(ids, lengths, strict=True)]

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
            text, path = lead[:space], None if space or before else tuple[int, ...]()
            found.append((text, before, path))
            for number in ids[start:end]:
                text, before = text + self._spelled[number][len(before) :], b""
                path = None if path is None else (*path, number)
                found.append((text, before, path))
        return found

    def _outcomes_of(self, contexts: list[Context], pairs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of outcomes, [O]."""
        if len(self._outcomes) > CACHED:
            self._clear()
        known = np.array([self._contexts.setdefault(each, len(self._contexts)) for each in contexts])
        keys = (known[pairs] * len(self._spelled) + numbers).tolist()
        found = np.fromiter(map(self._outcomes.get, keys, itertools.repeat(-1)), np.int64, len(keys))
        if (found < 0).any():
            missing = {keys[i]: (contexts[pairs[i]], int(numbers[i])) for i in np.flatnonzero(found < 0)}
            for key, (members, nodes) in zip(missing, self._new_outcomes([*missing.values()]), strict=True):
                self._outcomes[key] = len(self._outcomes)
                self._members.append(members)
                self._nodes.append(nodes)
            found = np.array([self._outcomes[key] for key in keys])
        return found

    def _new_outcomes(self, wanted: Sequence[tuple[Context, int]]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the tokens of the student and the nodes of candidates of the teacher in contexts.

        The tokens are the first one in the candidate's bytes and longer ones that begin with these; without any, the
        candidate is in the tail. Since lists of longer tokens have no token in common, two outcomes of a row share one
        only if it is the first one of either. Outcomes are connected by nodes: their first token and their list, even
        numbers, and the other lists with that token, odd numbers, which need an outcome of the row that has the list.
        """
        meanings, width = [self._meaning(*each) for each in wanted], len(self.events.student.bytes)
        pieces = [*dict.fromkeys(piece for piece, _ in meanings)]
        first_of = dict(zip(pieces, self.events.student.split(pieces), strict=True))
        for (context, number), (piece, key) in zip(wanted, meanings, strict=True):
            first = first_of[piece][:1]
            if not self._spelled[number] and not any(context[:2]):
                first = tuple(self.events.roles.get(number, ()))
            members = sorted({*first, *self.events.longer.get(key, ())})
            lists = [self._lists[key]] if key in self._lists else []
            nodes = [2 * each for each in (*first, *(width + each for each in lists))]
            nodes += [2 * (width + each) + 1 for token in first for each in self._lists_with.get(token, ())]
            yield [each for each in members if each < self.events.num_ids], nodes

    def _meaning(self, context: Context, number: int) -> tuple[bytes, tuple[int, ...]]:
        """Return the bytes of a candidate from the row's start on, and the key of longer tokens that begin so."""
        (text, read, path), piece = context, self._spelled[number]
        if not piece:  # a special token
            return b"" if read else text, ()
        if piece == read or not piece.startswith(read):
            return b"", ()
        piece = text + piece[len(read) :]
        return piece, (self.events.teacher.by_bytes.get(piece, -1),) if path is None else (*path, number)

    def _join_outcomes(self, rows: np.ndarray, masses: np.ndarray, outcomes: np.ndarray, own: np.ndarray) -> Events:
        """Join outcomes of a row that share a token of the student, and return those that can have columns.

        Args:
            rows: row of each outcome, [O], ascending.
            masses: probability of each outcome, [O].
            outcomes: number of each outcome, [O].
            own: [S], the token of each row, which an event keeps if it has too many members.
        """
        largest, count = self.events.largest, len(rows)
        event = _components(rows, *self._nodes.take(outcomes))
        sizes, latest, fewest = self._members.sizes(outcomes), np.zeros(count, np.int64), np.zeros(count, np.int64)
        np.maximum.at(latest, event, np.arange(count))
        np.maximum.at(fewest, event, np.minimum(sizes, largest))
        sums, order = np.bincount(event, masses, count), np.flatnonzero(event == np.arange(count))
        order = order[np.lexsort((latest[order], -sums[order], rows[order]))]
        ends = np.cumsum(fewest[order])
        before = (ends - fewest[order])[np.searchsorted(rows[order], rows[order])]
        order = order[ends - before <= self.events.num_columns]
        ranks = np.full(count, -1)
        ranks[order] = np.arange(len(order))
        chosen = np.flatnonzero(ranks[event] >= 0)
        sizes, members = self._members.take(outcomes[chosen])
        members = np.where(members == np.repeat(own[rows[chosen]], sizes), -1, members)
        bits = len(self.events.student.bytes).bit_length()
        keys = np.sort(np.repeat(ranks[event[chosen]], sizes) << bits | (members + 1))
        keys = keys[np.diff(keys, prepend=-1) > 0]
        ranks, members = keys >> bits, (keys & ((1 << bits) - 1)) - 1
        members = np.where(members < 0, own[rows[order[ranks]]], members)
        starts = np.flatnonzero(np.diff(ranks, prepend=-1))
        sizes, event = np.minimum(np.diff(starts, append=len(ranks)), largest), order[ranks[starts]]
        logprobs = np.log(np.maximum(sums[event], 1e-300)).astype(np.float32)
        return Events(rows=rows[event], logprobs=logprobs, starts=starts, sizes=sizes, members=members)


def _components(rows: np.ndarray, sizes: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Return the index of the first connected outcome for each outcome, [O].

    Args:
        rows: row of each outcome, [O].
        sizes: number of nodes of each outcome, [O].
        nodes: nodes of all outcomes; an odd one connects only if an outcome of the row has the even one before it.
    """
    found, of = np.arange(len(rows)), np.repeat(np.arange(len(rows)), sizes)
    keys = rows[of] << 40 | nodes >> 1
    is_even = nodes & 1 == 0
    even, odd = np.sort(keys[is_even]), np.flatnonzero(~is_even)
    found_odd = odd[np.append(even, -1)[np.searchsorted(even, keys[odd])] == keys[odd]]
    keys, of = np.append(keys[is_even], keys[found_odd]), np.append(of[is_even], of[found_odd])
    order = np.argsort(keys)
    keys, of = keys[order], of[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    sizes = np.diff(starts, append=len(of))
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


class _Rows:
    """Growing table of rows of integers of different lengths."""

    def __init__(self) -> None:
        self._ends, self._values = array("q", [0]), array("q")

    def append(self, row: Sequence[int]) -> None:
        self._values.extend(row)
        self._ends.append(len(self._values))

    def sizes(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of integers of each row."""
        ends = np.frombuffer(self._ends, np.int64)
        return ends[numbers + 1] - ends[numbers]

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of integers of each row, and the integers of all rows."""
        sizes = self.sizes(numbers)
        if not sizes.any():
            return sizes, np.zeros(0, np.int64)
        places = ranges(np.frombuffer(self._ends, np.int64)[numbers], sizes)
        return sizes, np.frombuffer(self._values, np.int64)[places]

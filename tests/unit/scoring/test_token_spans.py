"""Events of tokens in spans: the same numbers as a loop over tokens and candidates."""

import bisect
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_cross_tokenizer import EVENTS, PAIRS, SPANS, aligned, random_scores, texts

from hybrid_gkd.scoring import token_spans
from hybrid_gkd.scoring.cross_tokenizer import student_scores
from hybrid_gkd.scoring.token_spans import LEAST, LEAVES, TokenSpans


class PlainSpans:
    """The same as TokenSpans, one row and one candidate after the other."""

    def __init__(self, events):
        self.events, self.spelled = events, events.teacher.bytes

    def find(self, tokens, scores, own):
        """Return the events of each row, [(tokens of the student, probability)], and the log-probabilities."""
        rows = [self.row(tokens, scores, *each) for each in zip(own.ids, own.starts, own.ends, strict=True)]
        return [events for events, _ in rows], np.array([logprob for _, logprob in rows])

    def row(self, tokens, scores, own_id, start, end):
        place = int(np.searchsorted(tokens.ends, start, side="right"))
        read = (self.spelled[tokens.ids[place]] or b"")[: max(0, start - int(tokens.starts[place]))]
        text = self.events.student.lead[: max(0, int(tokens.starts[place]) - start)]
        path, is_exact, groups = (), not read and not text, []
        logprob = -self.prefix_logprob(scores, place, tokens, read)
        while True:
            own, is_last = int(tokens.ids[place]), int(tokens.ends[place]) >= end
            for number, value in self.candidates(scores, place, own):
                if number != own or is_last:
                    members = self.members(text, read, (*path, number) if is_exact else None, number)
                    join(groups, members, float(np.exp(logprob + value)))
            if is_last:
                break
            logprob += float(scores.sampled_logprobs[place])
            text += (self.spelled[own] or b"")[len(read) :]
            path, read, place = (*path, own), b"", place + 1
        covered = (self.spelled[own] or b"")[: end - int(tokens.starts[place])]
        logprob += (
            self.prefix_logprob(scores, place, tokens, covered) if int(tokens.ends[place]) > end
            else float(scores.sampled_logprobs[place])
        )  # fmt: skip
        found = [
            (sorted((n for n in ids if n < self.events.num_ids), key=lambda n: (n != own_id, n)), mass)
            for ids, mass in sorted(groups, key=lambda group: -group[1])
        ]
        return [(ids[: self.events.largest], mass) for ids, mass in found if ids], logprob

    def members(self, text, read, key, number):
        piece = self.spelled[number]
        if piece is None:
            return set() if read else self.first(text) if text else {*self.events.roles.get(number, ())}
        if piece == read or not piece.startswith(read):
            return set()
        piece = text + piece[len(read) :]
        key = (self.events.teacher.by_bytes.get(piece, -1),) if key is None else key
        return self.first(piece) | {*self.events.longer.get(key, ())}

    def first(self, piece):
        return {*self.events.student.split([piece])[0][:1]}

    def candidates(self, scores, place, own):
        logprobs = scores.logprobs[place, :LEAVES].tolist()
        number = bisect.bisect(logprobs, -math.log(LEAST), key=lambda value: -value)
        found = list(zip(scores.ids[place, :number].tolist(), logprobs[:number], strict=True))
        if all(number != own for number, _ in found):
            found.append((own, float(scores.sampled_logprobs[place])))
        return found

    def prefix_logprob(self, scores, place, tokens, prefix):
        if not prefix:
            return 0.0
        own = int(tokens.ids[place])
        masses = [
            np.exp(value) for number, value in self.candidates(scores, place, own)
            if number == own or (self.spelled[number] or b"").startswith(prefix)
        ]  # fmt: skip
        return float(np.log(max(sum(masses), 1e-300)))


def join(groups, ids, mass):
    """Add an outcome to those that share a token with it, as one event."""
    for other in [group for group in groups if group[0] & ids]:
        groups.remove(other)
        ids, mass = ids | other[0], mass + other[1]
    if ids:
        groups.append((ids, mass))


def compare(pair, spans, alignment, scores):
    """Compare rows that need not be one token of the teacher; events beyond the columns may be left out."""
    events, rows = EVENTS[pair], np.flatnonzero(alignment.covered & (alignment.matched < 0))
    if not len(rows):
        return
    own = token_spans.Tokens(
        ids=alignment.student.ids[rows], starts=alignment.student.starts[rows], ends=alignment.student.ends[rows]
    )
    found, logprobs = spans.find(alignment.teacher, scores, own)
    expected, expected_logprobs = PlainSpans(events).find(alignment.teacher, scores, own)
    assert np.array_equal(logprobs, expected_logprobs)
    for row, wanted in enumerate(expected):
        of_row = np.flatnonzero(found.rows == row)
        members = [found.members[found.starts[i] : found.starts[i] + found.sizes[i]].tolist() for i in of_row]
        assert members == [ids for ids, _ in wanted[: len(of_row)]]
        masses = np.array([mass for _, mass in wanted[: len(of_row)]])
        assert np.array_equal(found.logprobs[of_row], np.log(masses).astype(np.float32))
        assert len(of_row) == len(wanted) or sum(
            len(ids) for ids, _ in wanted[: len(of_row) + 1]) > events.num_columns  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@settings(max_examples=15, deadline=None)
@given(data=texts, seed=st.sampled_from([None, 1, 2]), flat=st.sampled_from([0.3, 1.0]))
@example(data="  the weather in 東京 is 🙂 123456".encode(), seed=1, flat=0.3)
@example(data=b"The teacher reads the theory of the others", seed=2, flat=0.5)
def test_events_and_log_probabilities_are_those_of_a_loop_to_the_last_digit(pair, data, seed, flat):
    events, alignment = aligned(pair, data, seed=seed)
    scores, _ = random_scores(alignment.teacher.ids, len(events.teacher.bytes), flat=flat)
    compare(pair, SPANS[pair], alignment, scores)


def test_a_full_store_of_outcomes_changes_nothing(monkeypatch):
    pair = ("bytes", "digits")
    monkeypatch.setattr(token_spans, "CACHED", 10)
    spans = TokenSpans(EVENTS[pair])
    for data in (b"The weather 12345", b"The theory of 2019", b"The weather 12345"):
        events, alignment = aligned(pair, data, seed=1)
        scores, _ = random_scores(alignment.teacher.ids, len(events.teacher.bytes))
        compare(pair, spans, alignment, scores)
        found = student_scores(events, alignment, scores, spans=spans)
        again = student_scores(events, alignment, scores, spans=TokenSpans(events))
        assert all(np.array_equal(array, again.parts()[name]) for name, array in found.parts().items())

"""A teacher with another tokenizer: aligns its tokens with the student's, and converts its scores to the student's.

Shapes: R trained tokens of a sample, N tokens of the teacher, K candidates of the teacher, C columns, E events of all
rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from hybrid_gkd.scoring.scorer import completed_future, settle
from hybrid_gkd.scoring.teacher_scorer import Teacher, TeacherScorer
from hybrid_gkd.scoring.token_events import Events, TokenEvents, Tokens, ranges
from hybrid_gkd.scoring.token_spans import TokenSpans
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.types import Pair, Reading, Sample, Task, TopK

PLACEHOLDER = b"\0"
"""Byte in a text in place of a special token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """A completion in the tokens of teacher and student."""

    teacher: Tokens
    """N tokens, to the end of the completion or to the teacher's limit."""
    student: Tokens
    """The R trained tokens."""
    matched: np.ndarray
    """int64 [R], place of the teacher's token with the same bytes; -1: none."""
    covered: np.ndarray
    """bool [R], whether the teacher's tokens reach the end of the token; False for special tokens without a role."""


class Aligner:
    """Aligns the tokens of completions by bytes.

    Args:
        events: of teacher and student.
        limit: longest sequence that the teacher scores, tokens.
    """

    def __init__(self, events: TokenEvents, *, limit: int):
        self.events, self.limit = events, limit
        roles = reversed(list(events.roles.items()))
        self._role = {number: each for each, same in roles for number in same}
        """Special tokens of the student -> the teacher's."""

    def align(self, task: Task, sample: Sample) -> Alignment:
        """Return the completion of a sample in the tokens of teacher and student."""
        if self.events.is_same:
            mask = sample.loss_mask[len(task.token_ids) :]
            trained, ids = np.flatnonzero(mask), sample.tokens[len(task.token_ids) :]
            places = np.arange(len(ids))
            return Alignment(
                teacher=Tokens(ids=ids, starts=places, ends=places + 1),
                student=Tokens(ids=ids[mask], starts=trained, ends=trained + 1), matched=trained,
                covered=np.ones(len(trained), bool),
            )  # fmt: skip
        room = self.limit - len(task.token_ids if task.teacher_ids is None else task.teacher_ids)
        ids, start = sample.tokens[len(task.token_ids) :], 0
        parts, own = list[Tokens](), list[Tokens]()
        complete = True
        for special, group in itertools.groupby(ids.tolist(), key=lambda number: self._kind(number)):
            numbers = np.fromiter(group, np.int32)
            if special is None:
                own.append(self._student_text(numbers, start))
                text = self.events.student.spell(numbers.tolist())[max(0, start - int(own[-1].starts[0])) :]
                if complete:
                    parts.append(self._teacher_text(text, start))
                    complete = int(parts[-1].ends[-1]) == start + len(text) if len(parts[-1].ids) else not text
                start += len(text)
            else:
                ends = start + len(PLACEHOLDER) * (special >= 0) * np.arange(1, len(numbers) + 1)
                starts = np.concatenate([[start], ends[:-1]])
                own.append(Tokens(ids=numbers, starts=starts, ends=ends))
                if complete and special >= 0:
                    parts.append(Tokens(ids=np.full(len(numbers), special, np.int32), starts=starts, ends=ends))
                start = int(ends[-1])
        teacher, student = _concatenated(parts, room), _concatenated(own, len(ids))
        trained = sample.loss_mask[len(task.token_ids) :]
        student = Tokens(ids=student.ids[trained], starts=student.starts[trained], ends=student.ends[trained])
        return _matched(teacher, student)

    def _kind(self, number: int) -> int | None:
        """Return None for a token of text, the teacher's token for a special one, -1 for a special one without role."""
        return None if self.events.student.bytes[number] else self._role.get(number, -1)

    def _student_text(self, numbers: np.ndarray, start: int) -> Tokens:
        student = self.events.student
        lengths = student.lengths[numbers]
        first = student.bytes[numbers[0]] or b""
        before = len(student.lead) if start == 0 and first.startswith(student.lead) else 0
        ends = start - before + np.cumsum(lengths)
        return Tokens(ids=numbers, starts=ends - lengths, ends=ends)

    def _teacher_text(self, text: bytes, start: int) -> Tokens:
        ids, starts, ends = self.events.teacher.encode(text)
        return Tokens(ids=np.array(ids, np.int32), starts=start + starts, ends=start + ends)


def _concatenated(parts: list[Tokens], limit: int) -> Tokens:
    """Concatenate tokens; return the first `limit`."""
    nothing = np.zeros(0, np.int64)
    ids = np.concatenate([nothing, *(each.ids for each in parts)])[:limit].astype(np.int32)
    starts, ends = (
        np.concatenate([nothing, *(getattr(each, name) for each in parts)])[:limit] for name in ("starts", "ends")
    )
    return Tokens(ids=ids, starts=starts, ends=ends)


def _matched(teacher: Tokens, student: Tokens) -> Alignment:
    """Match the student's tokens with the teacher's by their ranges of bytes."""
    places = np.searchsorted(teacher.ends, student.ends)
    inside = np.minimum(places, max(0, len(teacher.ids) - 1))
    written = student.ends > student.starts
    reach = int(teacher.ends[-1]) if len(teacher.ids) else -1  # a token may spell a space before the text and end at 0
    covered = written & (student.ends <= reach)
    same = covered.copy()
    if len(teacher.ids):
        after = np.concatenate([teacher.ends[1:], [reach + 1]])
        same &= (teacher.ends[inside] == student.ends) & (teacher.starts[inside] == student.starts)
        same &= after[inside] > student.ends
    return Alignment(teacher=teacher, student=student, matched=np.where(same, inside, -1), covered=covered)


class CrossTokenizerScorer(TeacherScorer):
    """Scores samples with a teacher that has another tokenizer.

    Args:
        client: see `TeacherScorer`.
        aligner: aligns completions in the tokens of teacher and student.
        spans: also score tokens that are not one token of the teacher; otherwise they have no effect on the loss.
    """

    def __init__(self, client: Teacher, aligner: Aligner, *, spans: bool):
        super().__init__(client)
        self.aligner, self.spans = aligner, TokenSpans(aligner.events) if spans else None
        self._counts, self._thread = TeacherMetrics(), ThreadPoolExecutor(1, "alignment")

    def submit(self, pairs: list[Pair]) -> list[Future[TopK]]:
        """Send samples without waiting for scores. Raises the client's errors."""
        alignments = [self.aligner.align(task, sample) for task, sample in pairs]
        readings = [
            _reading(task, sample, each) for (task, sample), each in zip(pairs, alignments, strict=True)
            if len(each.teacher.ids)
        ]  # fmt: skip
        futures, found = iter(self.client.submit(readings)), list[Future[TopK]]()
        for each in alignments:
            convert = functools.partial(student_scores, self.aligner.events, each, spans=self.spans)
            if len(each.teacher.ids):
                found.append(_converted(next(futures), convert, self._thread))
            else:
                found.append(completed_future(convert(None)))
            self._count(each)
        return found

    def _count(self, alignment: Alignment) -> None:
        matched, covered = int((alignment.matched >= 0).sum()), int(alignment.covered.sum())
        self._counts.aligned_tokens += len(alignment.matched)
        self._counts.matched_tokens += matched
        self._counts.span_tokens += (covered - matched) * (self.spans is not None)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude requests in this context from the metrics."""
        counts, self._counts = self._counts, TeacherMetrics()
        with super().uncounted():
            yield
        self._counts = counts

    def drain(self) -> dict[str, TeacherMetrics]:
        """Return the counters since the last call."""
        counts, self._counts = self._counts, TeacherMetrics()
        return {"": self.client.drain_metrics() + counts}


def _reading(task: Task, sample: Sample, alignment: Alignment) -> Reading:
    prompt = task.token_ids if task.teacher_ids is None else task.teacher_ids
    positions = len(prompt) + np.arange(len(alignment.teacher.ids))
    ids = np.concatenate([prompt, alignment.teacher.ids]).astype(np.int32)
    return Reading(token_ids=ids, positions=positions, name=str(sample.id), keep=sample.status == "given")


def _converted(future: Future[TopK], convert: Callable[[TopK], TopK], thread: Executor) -> Future[TopK]:
    """Return a future of the result, converted in the thread; it has the error of the first one or the conversion."""
    found: Future[TopK] = Future()
    future.add_done_callback(lambda done: thread.submit(settle, found, lambda: convert(done.result(0))))
    return found


def student_scores(events: TokenEvents, alignment: Alignment, scores: TopK | None, *, spans: TokenSpans | None) -> TopK:
    """Convert scores of the teacher's tokens to scores of the student's, with events as candidates.

    A token that is not scored has all of its mass in the tail, for teacher and student, and thus no effect on the loss;
    its `sampled_logprobs` is NaN.

    Args:
        scores: [N, K]; None: no token is scored.
        spans: finds the events of tokens that are not one token of the teacher; None: these are not scored.
    """
    num_rows, found = len(alignment.matched), list[Events]()
    sampled, tails = np.full(num_rows, np.nan, np.float32), np.zeros(num_rows, np.float32)
    outside = np.zeros(num_rows)
    if scores is not None:
        rows = np.flatnonzero(alignment.matched >= 0)
        places = alignment.matched[rows]
        sampled[rows], tails[rows] = scores.sampled_logprobs[places], scores.tail_logprobs[places]
        matched, outside[rows] = events.matched(scores.ids[places], scores.logprobs[places])
        found.append(replace(matched, rows=rows[matched.rows]))
        rows, student = np.flatnonzero(alignment.covered & (alignment.matched < 0)), alignment.student
        if spans is not None and len(rows):
            own = Tokens(ids=student.ids[rows], starts=student.starts[rows], ends=student.ends[rows])
            in_spans, sampled[rows] = spans.find(alignment.teacher, scores, own)
            found.append(replace(in_spans, rows=rows[in_spans.rows]))
            tails[rows] = np.nan
    return _in_columns(events, found, tails, outside, sampled)


def _in_columns(
    events: TokenEvents, found: list[Events], tails: np.ndarray, outside: np.ndarray, sampled: np.ndarray
) -> TopK:
    """Lay out events in C columns, one per member; the column of the first member has the event's log-probability.

    Events that do not fit belong to the tail, and so do the tokens that fill the remaining columns.

    Args:
        found: events of different rows.
        tails: float32 [R], log of the mass outside the candidates; NaN: all mass outside the events.
        outside: [R], mass of candidates that are no event.
    """
    num_rows, inside = len(tails), np.zeros(len(tails))
    ids = np.full((num_rows, events.num_columns), -1, np.int32)
    groups, values = np.full_like(ids, -1), np.full(ids.shape, -np.inf, np.float32)
    for each in found:
        before = np.cumsum(each.sizes) - each.sizes
        start = before - np.append(before, 0)[np.searchsorted(each.rows, np.arange(num_rows))][each.rows]
        fits = (start + each.sizes <= events.num_columns) & (each.sizes > 0)
        mass = np.exp(each.logprobs, dtype=np.float64)
        outside = outside + np.bincount(each.rows[~fits], mass[~fits], num_rows)
        rows, start, sizes = each.rows[fits], start[fits], each.sizes[fits]
        inside += np.bincount(rows, mass[fits], num_rows)
        first = rows * events.num_columns + start
        places = ranges(first, sizes)
        ids.ravel()[places] = each.members[ranges(each.starts[fits], sizes)]
        groups.ravel()[places] = np.repeat(start, sizes)
        values.ravel()[first] = each.logprobs[fits]
    _fill_gaps(ids, events.num_ids)
    with np.errstate(divide="ignore"):
        more = np.log(np.exp(tails, dtype=np.float64) + outside)
        rest = np.log(np.maximum(0.0, 1 - inside))
    tail = np.where(np.isnan(tails), rest, np.where(outside > 0, more, tails)).astype(np.float32)
    return TopK(ids=ids, logprobs=values, tail_logprobs=tail, sampled_logprobs=sampled, groups=groups)


def _fill_gaps(ids: np.ndarray, num_ids: int) -> None:
    """Replace each -1 by the lowest id that its row does not have yet."""
    gaps = ids < 0
    num_gaps, low = gaps.sum(1), ~gaps & (ids < 2 * ids.shape[1])
    free = np.ones((len(ids), min(num_ids, (num_gaps + low.sum(1)).max(initial=0))), bool)
    rows, places = np.nonzero(low & (ids < free.shape[1]))
    free[rows, ids[rows, places]] = False
    free &= np.cumsum(free, 1) <= num_gaps[:, None]
    ids[gaps] = np.nonzero(free)[1]

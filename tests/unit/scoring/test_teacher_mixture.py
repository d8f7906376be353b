"""The mixture of teachers: against the closed form, what is left out, and errors of one of them."""

import numpy as np
import pytest

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.scoring.teacher_mixture import MixtureScorer, SumScorer, mean_scores, mixture
from hybrid_gkd.scoring.teacher_scorer import TeacherScorer
from hybrid_gkd.testing import LocalTeacher, make_sample
from hybrid_gkd.types import Task, TopK

WEIGHTS, SIZE = [0.2, 0.8], 50


def distributions(seed, spread=2.0):
    """Log-probabilities of 6 rows over SIZE tokens, float64."""
    logits = spread * np.random.default_rng(seed).standard_normal((6, SIZE))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def top(logprobs, topk, sampled=3):
    """The K most likely tokens of each row."""
    ids = np.argsort(-logprobs, 1)[:, :topk]
    kept = np.take_along_axis(logprobs, ids, 1)
    with np.errstate(divide="ignore"):
        tail = np.log(np.clip(1 - np.exp(kept).sum(1), 0, None)) if topk < SIZE else np.full(len(ids), -np.inf)
    kept, tail, own = (each.astype(np.float32) for each in (kept, tail, logprobs[:, sampled]))
    return TopK(ids=ids.astype(np.int32), logprobs=kept, tail_logprobs=tail, sampled_logprobs=own)


def exact(*logprobs):
    return np.log(sum(weight * np.exp(each) for weight, each in zip(WEIGHTS, logprobs, strict=True)))


def test_with_all_tokens_it_is_the_weighted_mean():
    one, two = distributions(1), distributions(2)
    found, wanted = mixture([top(one, SIZE), top(two, SIZE)], WEIGHTS), exact(one, two)
    assert found.logprobs == pytest.approx(np.take_along_axis(wanted, found.ids, 1), abs=1e-5)
    assert (np.sort(found.ids, 1) == np.arange(SIZE)).all()
    assert (np.diff(found.logprobs, axis=1) <= 0).all()
    assert found.sampled_logprobs == pytest.approx(wanted[:, 3], abs=1e-5)
    assert (found.tail_logprobs == -np.inf).all()
    assert found.logprobs.dtype == found.tail_logprobs.dtype == np.float32


@pytest.mark.parametrize("topk", [1, 4, 20])
def test_candidates_are_the_most_likely_of_the_union_and_the_tail_is_the_rest(topk):
    """The probability of a token that a teacher does not have among its candidates is too low by at most its last's."""
    one, two = distributions(1), distributions(2)
    tops = [top(one, topk), top(two, topk)]
    found, wanted = mixture(tops, WEIGHTS), np.exp(exact(one, two))
    assert found.ids.shape == (6, topk)
    mass = np.exp(found.logprobs, dtype=np.float64).sum(1) + np.exp(found.tail_logprobs, dtype=np.float64)
    assert mass == pytest.approx(1, abs=1e-6)
    missing = np.take_along_axis(wanted, found.ids, 1) - np.exp(found.logprobs)
    bound = sum(weight * np.exp(each.logprobs[:, -1:]) for weight, each in zip(WEIGHTS, tops, strict=True))
    assert (missing > -1e-6).all()
    assert (missing <= bound + 1e-6).all()
    for row in range(6):
        assert len(set(found.ids[row])) == topk
        assert set(found.ids[row]) <= set(tops[0].ids[row]) | set(tops[1].ids[row])
    assert found.sampled_logprobs == pytest.approx(np.log(wanted[:, 3]), abs=1e-5)


def test_a_teacher_mixed_with_itself_is_the_teacher():
    given = top(distributions(1), 8)
    found = mixture([given] * 3, [0.5, 0.25, 0.25])
    assert (found.ids == given.ids).all()
    for name in ("logprobs", "tail_logprobs", "sampled_logprobs"):
        assert getattr(found, name) == pytest.approx(getattr(given, name), abs=1e-6)


def test_candidates_of_the_student_stay_however_unlikely_they_are():
    """Each teacher adds its own to them, of which the most likely ones fill the rest."""
    teachers, topk, tops = [distributions(seed) for seed in (1, 2)], 4, []
    wanted = exact(*teachers)
    given = np.argsort(wanted, 1)[:, :topk].astype(np.int32)
    for each in teachers:
        others = each.copy()
        np.put_along_axis(others, given, -np.inf, 1)
        own = top(others, topk).ids
        ids = np.concatenate([given, own], 1)
        kept = np.take_along_axis(each, ids, 1)
        tail = np.log(1 - np.exp(kept).sum(1))
        tops.append(TopK(ids=ids, logprobs=kept, tail_logprobs=tail, sampled_logprobs=each[:, 3]))
    found, first = mixture(tops, WEIGHTS, given), np.s_[:, :topk]
    assert (np.sort(found.ids[first]) == np.sort(given)).all()
    assert found.logprobs[first] == pytest.approx(np.take_along_axis(wanted, found.ids[first], 1), abs=1e-5)
    assert np.exp(found.logprobs).sum(1) + np.exp(found.tail_logprobs) == pytest.approx(1, abs=1e-5)
    assert set(mixture(tops, WEIGHTS).ids[0]).isdisjoint(given[0])


def scorer(*scores):
    teachers = [LocalTeacher(each, delay=None) for each in scores]
    members = {f"t{place}": (weight, TeacherScorer(each)) for place, (weight, each) in enumerate(
        zip((1.0, 4.0), teachers, strict=True)
    )}  # fmt: skip
    return MixtureScorer(members), teachers


PAIR = Task(index=0, token_ids=np.array([1], np.int32), text=""), make_sample(completion=range(6))


def test_a_sample_is_scored_when_all_teachers_have_answered():
    tops = [top(distributions(seed), 8) for seed in (1, 2)]
    mixed, teachers = scorer(*(lambda reading, each=each: each for each in tops))
    (future,) = mixed.submit([PAIR])
    teachers[1].answer()
    assert not future.done()
    teachers[0].answer()
    assert future.result(0).logprobs == pytest.approx(mixture(tops, WEIGHTS).logprobs)


def test_a_sum_has_the_scores_of_each_teacher_by_signal():
    tops = {f"teacher/t{place}": top(distributions(place), 8) for place in range(2)}
    mixed, teachers = scorer(*(lambda reading, each=each: each for each in tops.values()))
    (future,) = SumScorer({name: (1.0, each) for name, each in mixed.scorers.items()}).submit([PAIR])
    for teacher in teachers:
        teacher.answer()
    assert future.result(0) == tops
    found = mean_scores(future.result(0), {"teacher/t0": 1.0, "teacher/t1": 4.0, "teacher/other": 1.0})
    assert found.logprobs == pytest.approx(mixture(list(tops.values()), WEIGHTS).logprobs)
    assert mean_scores(tops["teacher/t0"], {}) is tops["teacher/t0"]


def test_the_error_of_one_teacher_is_that_of_the_sample_at_once():
    def fail(reading):
        raise TeacherError("far:1: no answer")

    mixed, teachers = scorer(lambda reading: top(distributions(1), 8), fail)
    (future,) = mixed.submit([PAIR])
    teachers[1].answer()
    with pytest.raises(TeacherError, match="far:1: no answer"):
        future.result(0)
    teachers[0].answer()  # too late, and without effect
    mixed, teachers = scorer(*(lambda reading, size=size: top(distributions(1)[:size], 8) for size in (5, 6)))
    (future,) = mixed.submit([PAIR])
    for teacher in teachers:
        teacher.answer()
    with pytest.raises(ValueError, match="dimension"):  # not lost in the thread that mixes
        future.result(0)

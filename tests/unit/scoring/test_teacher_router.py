"""Several teachers as one scorer: who scores a sample, what is counted, and an error of one of them."""

import numpy as np
import pytest

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.teacher_router import TeacherRouter
from hybrid_gkd.scoring.teacher_scorer import TeacherScorer
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.testing import LocalTeacher, make_sample
from hybrid_gkd.types import Task, TopK


def scores_of(value):
    """The scores of a teacher that says `value` everywhere."""

    def score(reading):
        column = np.full(len(reading.positions), value, np.float32)
        return TopK(
            ids=np.zeros((len(column), 1), np.int32), logprobs=column[:, None], tail_logprobs=column,
            sampled_logprobs=column,
        )

    return score


class Counted(LocalTeacher):
    """Reports counters of requests that took `seconds`."""

    def __init__(self, value, metrics):
        super().__init__(scores_of(value))
        self.metrics = metrics

    def drain_metrics(self):
        return self.metrics


def pair(row, teacher, size=2):
    task = Task(index=row, token_ids=np.array([1], np.int32), text="", teacher=teacher)
    return task, make_sample(row, completion=range(2, 2 + size))


def route(**teachers):
    return TeacherRouter({key: TeacherScorer(teacher) for key, teacher in teachers.items()})


PAIRS = [pair(0, "math"), pair(1, "default", 3), pair(2, "math"), pair(3, "code")]


def test_each_sample_gets_the_scores_of_its_teacher_in_order():
    values = {"code": -3, "math": -1, "default": -2}
    router = route(**{key: LocalTeacher(scores_of(value)) for key, value in values.items()})
    assert router.name == TeacherScorer.name
    values = [future.result(5).sampled_logprobs.tolist() for future in router.submit(PAIRS)]
    assert values == [[-1, -1], [-2, -2, -2], [-1, -1], [-3, -3]]
    scores = router.start(PAIRS)
    found = router.take_scores(scores, 4, timeout=Timeout(5, "key"), check=lambda: None)
    assert found[PAIRS[3][1].id].sampled_logprobs.tolist() == [-3, -3]
    assert scores == {}


def test_an_error_of_one_teacher_ends_the_wait():
    def fail(reading):
        raise TeacherError("far:1: no answer")

    router = route(math=LocalTeacher(scores_of(-1)), default=LocalTeacher(fail))
    with pytest.raises(TeacherError, match="far:1: no answer"):
        router.take_scores(router.start(PAIRS[:3]), 3, timeout=Timeout(5, "key"), check=lambda: None)


def test_metrics_are_over_all_teachers_and_of_each():
    router = route(**{
        "math": Counted(-1, TeacherMetrics(
            requests=[(0.0, 1.0), (1.0, 2.0)], steps=[1, 1], tokens=60, scored_tokens=30, retries=1, bytes_received=300,
            complete_until=5.0,
        )),
        "org/code": Counted(-1, TeacherMetrics(
            requests=[(0.0, 4.0)], steps=[1], tokens=20, scored_tokens=10, bytes_received=100, complete_until=4.0,
        )),
        "default": Counted(-1, TeacherMetrics(complete_until=6.0, cache_lookups=2, cache_hits=1)),
    })  # fmt: skip
    found = router.take_metrics(Clock())
    assert found["teacher/math/latency"] == 1.0
    assert found["teacher/org/code/latency"] == 4.0
    assert "teacher/default/latency" not in found
    shares = [found[f"teacher/{key}/token_fraction"] for key in ("math", "org/code", "default")]
    assert shares == [0.75, 0.25, 0]
    assert found["teacher/retries"] == 1
    assert found["teacher/bytes_per_token"] == 10
    assert found["teacher/tokens_per_second"] == 20  # 80 tokens in four seconds in which one at least worked
    assert found["teacher/cache_hit_fraction"] == 0.5

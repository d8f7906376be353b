"""`python -m hybrid_gkd.teacher score` with a teacher that has ended, and with the store of another one."""

import contextlib
import dataclasses
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from hybrid_gkd.config import Config
from hybrid_gkd.errors import TeacherError, TeacherMismatch
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.score import check_one_teacher, score_missing
from hybrid_gkd.teacher.client.score_store import ScoredBy, ScoreStore
from hybrid_gkd.teacher.protocol import ModelInfo
from hybrid_gkd.testing import tail_of
from hybrid_gkd.types import Reading, SampleId, TopK


class EndedTeacher:
    """Never scores anything."""

    def submit(self, readings):
        return [Future() for _ in readings]

    def describe(self):
        return "connection refused"


MODEL = ModelInfo(
    model="t", backend="hf", vocab_size=9, num_embeddings=9, tokenizer_hash="h", max_topk=2, max_sequence_length=9,
    any_temperature=True, weights="w",
)  # fmt: skip
SCORED_BY = ScoredBy(model=MODEL, topk=2, temperature=1.0, num_ids=9)
READING = Reading(token_ids=np.arange(3), positions=np.array([2]))


def test_a_service_that_has_ended_is_reported_before_the_timeout_of_a_request(tmp_path):
    readings = {SampleId(1, row, 0): READING for row in range(2)}

    def check():
        raise TeacherError("killed by SIGKILL")

    with contextlib.closing(ScoreStore(tmp_path)) as store, pytest.raises(TeacherError, match="killed by SIGKILL"):
        score_missing(store, SCORED_BY, EndedTeacher(), readings, Facts(Config()), check)


def test_a_store_gets_the_scores_of_one_teacher(tmp_path):
    logprobs = np.array([[-1, -2]], np.float32)
    scores = TopK(
        ids=np.array([[1, 2]], np.int32), logprobs=logprobs, tail_logprobs=tail_of(logprobs),
        sampled_logprobs=logprobs[:, 0],
    )  # fmt: skip
    other = dataclasses.replace(SCORED_BY, model=msgspec.structs.replace(MODEL, model="other", weights="x"))
    with contextlib.closing(ScoreStore(tmp_path)) as store:
        store.put(SCORED_BY, READING, scores)
        check_one_teacher(store, SCORED_BY)
        check_one_teacher(store, dataclasses.replace(other, temperature=2.0))  # a run tells them apart
        with pytest.raises(TeacherMismatch, match=r"--out: .* has scores of t \(.*get those of other .*another folder"):
            check_one_teacher(store, other)

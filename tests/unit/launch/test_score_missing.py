"""Waits of `python -m hybrid_gkd.teacher score` for a teacher that has ended."""

import contextlib
from concurrent.futures import Future

import numpy as np
import pytest

from hybrid_gkd.config import Config
from hybrid_gkd.errors import TeacherError
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.score import score_missing
from hybrid_gkd.teacher.client.score_store import ScoredBy, ScoreStore
from hybrid_gkd.teacher.protocol import ModelInfo
from hybrid_gkd.types import Reading, SampleId


class EndedTeacher:
    """Never scores anything."""

    def submit(self, readings):
        return [Future() for _ in readings]

    def describe(self):
        return "connection refused"


def test_a_service_that_has_ended_is_reported_before_the_timeout_of_a_request(tmp_path):
    model = ModelInfo(
        model="t", backend="hf", vocab_size=9, num_embeddings=9, tokenizer_hash="h", max_topk=2, max_sequence_length=9,
        any_temperature=True, weights="w",
    )  # fmt: skip
    scored_by = ScoredBy(model=model, topk=2, temperature=1.0, num_ids=9)
    readings = {SampleId(1, row, 0): Reading(token_ids=np.arange(3), positions=np.array([2])) for row in range(2)}

    def check():
        raise TeacherError("killed by SIGKILL")

    with contextlib.closing(ScoreStore(tmp_path)) as store, pytest.raises(TeacherError, match="killed by SIGKILL"):
        score_missing(store, scored_by, EndedTeacher(), readings, Facts(Config()), check)

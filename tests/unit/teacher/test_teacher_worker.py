"""The worker's loop with an engine that breaks on demand."""

import queue
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher.engines.base import ScoringEngine
from hybrid_gkd.teacher.protocol import ModelInfo, ScoreError, ScoreRequest, ScoreResult
from hybrid_gkd.teacher.server import scoring_worker as worker_module
from hybrid_gkd.teacher.server.scoring_worker import (
    MAX_CONSECUTIVE_FAILURES,
    PREFETCH_TOKENS,
    BusyTime,
    ScoringWorker,
    Work,
)
from hybrid_gkd.teacher.server.turns import GpuTurns
from hybrid_gkd.testing import tail_of
from hybrid_gkd.types import Reading, TopK

INFO = ModelInfo(
    model="m", backend="hf", vocab_size=9, num_embeddings=9, tokenizer_hash="h", max_topk=4, max_sequence_length=9999,
    any_temperature=True,
)  # fmt: skip
POISON = 8


class Engine(ScoringEngine):
    """Scores one reading per step, and breaks on one that begins with POISON."""

    def __init__(self):
        super().__init__(INFO)
        self.most_tokens = 0
        self.computed, self.saw_leftovers, self.is_asleep = [], False, False

    def sleep(self):
        self.is_asleep = True

    def wake(self):
        self.is_asleep = False

    def _step(self):
        assert not self.is_asleep
        self.most_tokens = max(self.most_tokens, self.num_tokens)
        item = self._queue.popleft()
        self.saw_leftovers = self.saw_leftovers or any(each() is not None for each in self.computed)
        activations = np.zeros(9)
        self.computed.append(weakref.ref(activations))
        first_id = item.reading.token_ids[0]
        if first_id == POISON:
            raise ValueError("poison")
        shape = (len(item.rows), item.k)
        ids = np.broadcast_to(np.arange(item.k, dtype=np.int32), shape)
        first = np.full(shape, -first_id, np.float32)
        scores = TopK(ids=ids, logprobs=first, tail_logprobs=tail_of(first), sampled_logprobs=first[:, 0])
        return [(item, scores)]


class Link:
    """Hands out what it was made with, then ends."""

    def __init__(self, works):
        self.inbox = queue.SimpleQueue()
        for work in [*works, TeacherError("the end")]:
            self.inbox.put(work)
        self.replies = {}

    def reply(self, message, arrays):
        assert message.id not in self.replies
        self.replies[message.id] = (message, arrays)


def work(name, firsts, num_scored=3, timeout=600.0):
    """Return work with readings that begin with `firsts`."""
    positions = np.arange(1, num_scored + 1)
    readings = [Reading(token_ids=np.insert(np.ones(num_scored, np.int32), 0, each), positions=positions)
                for each in firsts]  # fmt: skip
    request = ScoreRequest(
        id=name, attempt=0, timeout_seconds=timeout, topk=2, temperature=1.0, lengths=[num_scored + 1] * len(firsts),
        ranges=[[1, num_scored + 1]] * len(firsts),
    )  # fmt: skip
    return Work(request, readings, time.monotonic() + timeout)


def run(monkeypatch, works, match="the end"):
    link, engine = Link(works), Engine()
    monkeypatch.setattr(worker_module, "Link", lambda *_: link)
    with pytest.raises(TeacherError, match=match):
        ScoringWorker(engine, "unused:1").run()
    return link.replies, engine


def logprobs(reply):
    message, arrays = reply
    assert isinstance(message, ScoreResult)
    return arrays[1][:, 0].tolist()


def test_a_request_that_breaks_the_engine_takes_no_other_along(monkeypatch):
    monkeypatch.setattr(worker_module.log, "disabled", True)  # pytest keeps records, and their tracebacks
    # Large enough to be answered before the link's end is seen.
    big = PREFETCH_TOKENS
    replies, engine = run(monkeypatch, [work("a", [1, 2]), work("b", [3, POISON]), work("c", [4]), work("d", [5], big)])
    assert logprobs(replies["a"]) == [-1, -1, -1, -2, -2, -2]
    assert logprobs(replies["c"]) == [-4, -4, -4]
    assert isinstance(replies["b"][0], ScoreError)
    assert replies["b"][0].code == "failed"
    assert "ValueError: poison" in replies["b"][0].reason
    assert not engine.saw_leftovers  # what failed for want of memory is tried again with all of it


def test_expired_work_is_not_scored(monkeypatch):
    replies, engine = run(monkeypatch, [work("late", [1], timeout=0.0), work("a", [2], PREFETCH_TOKENS)])
    assert replies["late"][0].code == "expired"
    assert logprobs(replies["a"])[0] == -2
    assert engine.most_tokens == PREFETCH_TOKENS + 1


def test_the_engine_is_fed_no_further_ahead_than_needed(monkeypatch):
    half = PREFETCH_TOKENS // 2
    batch = [work(name, [1], half) for name in "abcdefgh"] + [work("i", [1], PREFETCH_TOKENS)]
    replies, engine = run(monkeypatch, batch)
    assert set("abcdefg") <= set(replies)
    assert engine.most_tokens <= 2 * PREFETCH_TOKENS + half


@pytest.mark.slow
def test_an_engine_that_keeps_failing_ends_the_worker(monkeypatch):
    bad = [work(str(i), [POISON], PREFETCH_TOKENS) for i in range(MAX_CONSECUTIVE_FAILURES)]
    replies, _ = run(monkeypatch, bad, match=f"the engine failed {MAX_CONSECUTIVE_FAILURES} times in a row")
    assert all(isinstance(message, ScoreError) for message, _ in replies.values())


def test_an_engine_sleeps_while_it_is_the_turn_of_another_worker(monkeypatch, tmp_path):
    link, engine = Link([]), Engine()
    link.inbox = queue.SimpleQueue()
    own, other = GpuTurns(str(tmp_path)), GpuTurns(str(tmp_path))
    own.take()
    monkeypatch.setattr(worker_module, "Link", lambda *_: link)
    link.inbox.put(work("a", [1]))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(ScoringWorker(engine, "unused:1", turns=own).run)
        other.take()  # once the engine is idle
        assert set(link.replies) == {"a"}
        assert engine.is_asleep
        link.inbox.put(work("b", [2], PREFETCH_TOKENS))
        while not other.is_awaited:
            time.sleep(0.001)
        assert set(link.replies) == {"a"}
        other.release()
        link.inbox.put(TeacherError("the end"))
        with pytest.raises(TeacherError, match="the end"):
            done.result(10)
    assert set(link.replies) == {"a", "b"}
    assert not engine.is_asleep


def test_the_busy_time_of_the_last_ten_seconds_is_added_up(monkeypatch):
    now = 100.0
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now)
    busy = BusyTime()
    assert busy.fraction() == 0
    for start in range(100, 120, 2):  # half a second of every two
        now = start
        busy.note(True)
        busy.note(True)  # a second request
        now = start + 0.5
        busy.note(False)
    now = 120.0
    assert busy.fraction() == pytest.approx(5 * 0.5 / 10)
    busy.note(True)
    now = 125.0
    assert busy.fraction() == pytest.approx((2 * 0.5 + 5) / 10)
    now = 140.0
    assert busy.fraction() == 1

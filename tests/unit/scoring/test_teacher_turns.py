"""Turns of teachers on one GPU: the order of their readings, and the locks that let one worker awake at a time."""

import threading

import numpy as np
import pytest

from hybrid_gkd.errors import TeacherError, TeacherTimeout
from hybrid_gkd.runtime.spans import current_step, working_for
from hybrid_gkd.scoring import teacher_turns
from hybrid_gkd.scoring.teacher_turns import TeacherInTurn, Turns
from hybrid_gkd.teacher.server import turns as server_turns
from hybrid_gkd.testing import LocalTeacher
from hybrid_gkd.types import Reading


def reading(name):
    return Reading(token_ids=np.array([1, 2]), positions=np.array([1]), name=name)


def teachers(*scores, seconds=60.0):
    """Teachers in turns, and the stand-ins behind them, which answer when `answer` is called."""
    turns = Turns(seconds)
    behind = [LocalTeacher(score, delay=None) for score in scores]
    return [TeacherInTurn(each, turns) for each in behind], behind, turns


def sent(turns):
    """Wait until the thread has sent what it can."""
    turns.thread.submit(lambda: None).result(10)


def test_a_teacher_gets_all_of_its_readings_when_the_one_before_has_answered():
    steps = []
    (one, two), (first, second), turns = teachers(lambda each: each.name, lambda each: each.name)
    submit, is_sent = second.submit, threading.Event()

    def noting(readings):
        steps.append(current_step.get())
        found = submit(readings)
        is_sent.set()
        return found

    second.submit = noting
    with working_for(7):
        found = one.submit([reading("a")]) + two.submit([reading("c"), reading("d")])
    assert two.submit([]) == []
    found[0].add_done_callback(lambda done: steps.append("answered"))
    while not first.waiting:
        pass
    assert not second.waiting
    first.answer()
    assert is_sent.wait(10)
    second.answer()
    assert [each.result(10) for each in found] == ["a", "c", "d"]
    assert steps == ["answered", 7]
    again = two.submit([reading("e")])  # it still has the turn
    sent(turns)
    second.answer()
    assert again[0].result(0) == "e"
    turns.close()


def test_errors_reach_the_readings(monkeypatch):
    def fail(each):
        raise TeacherError("far:1: no answer")

    monkeypatch.setattr(teacher_turns, "GRACE_SECONDS", 0.0)
    (one, two), (first, second), turns = teachers(fail, lambda each: each.name, seconds=0.01)
    found = one.submit([reading("a")])
    sent(turns)
    first.answer()
    with pytest.raises(TeacherError, match="far:1: no answer"):
        found[0].result(10)
    found = two.submit([reading("b")]) + one.submit([reading("c")])
    with pytest.raises(TeacherTimeout, match="the teacher before it has not answered: a stand-in"):
        found[1].result(10)
    second.answer()
    assert found[0].result(10) == "b"
    turns.close()


def test_a_worker_has_its_gpus_until_another_one_waits_for_one_of_them(tmp_path, monkeypatch):
    """The locks belong to open files, so that two workers can be in one process here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    both = server_turns.GpuTurns(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    one = server_turns.GpuTurns(str(tmp_path))
    both.take()
    assert both.has_turn
    assert not both.is_awaited
    waiting = threading.Thread(target=one.take, daemon=True)
    waiting.start()
    while not both.is_awaited:
        pass
    assert not one.has_turn
    both.release()
    waiting.join(10)
    assert one.has_turn
    assert not one.is_awaited
    monkeypatch.setattr(server_turns, "TURN_SECONDS", 0.02)
    with pytest.raises(TeacherError, match="another teacher kept GPU 1 for more than"):
        both.take()

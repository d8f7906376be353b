"""What is waited for is said, with since when and until when; a short wait is not."""

import contextlib
import logging
import re
import threading
import time

import pytest

from hybrid_gkd import waiting as module
from hybrid_gkd.waiting import Timeout, waiting

TEACHER = "the teacher at 10.0.0.5:15555"
LIMIT = Timeout(600.0, "actor_rollout_ref.teacher.request_timeout")
LINE = re.compile(
    r"waiting for the teacher at 10\.0\.0\.5:15555: (?P<detail>.*); since \d\d:\d\d:\d\d, for \d+ s now, "
    r"until \d\d:\d\d:\d\d \(actor_rollout_ref\.teacher\.request_timeout=600\)"
)


@pytest.fixture
def said(monkeypatch, caplog):
    """The lines, which come at once and then again and again."""
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.001)
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.001)
    caplog.set_level(logging.INFO, "hybrid_gkd.waiting")

    def lines(count=0):
        deadline = time.monotonic() + 60
        while len(caplog.records) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return [record.getMessage() for record in caplog.records]

    return lines


def test_a_long_wait_is_said_again_and_again_with_what_is_still_missing(said):
    left = [2]
    with waiting(TEACHER, LIMIT, lambda: f"{left[0]} of 64 sequences are not scored yet"):
        said(1)
        left[0] = 1
        deadline = time.monotonic() + 60
        while LINE.fullmatch(said()[-1])["detail"] != "1 of 64 sequences are not scored yet":
            assert time.monotonic() < deadline
    *lines, last = said()
    assert all(map(LINE.fullmatch, lines))
    assert re.fullmatch(r"waited \d+ s for the teacher at 10\.0\.0\.5:15555", last)


def test_nothing_is_said_after_the_end_and_an_error_speaks_for_itself(said):
    with contextlib.suppress(ValueError), waiting(TEACHER, LIMIT):
        said(2)
        raise ValueError("which is reported")
    for thread in [each for each in threading.enumerate() if each.name == "waiting"]:
        thread.join()
    assert all(line.startswith("waiting for the teacher at 10.0.0.5:15555; since ") for line in said())


def test_a_short_wait_is_not_said(caplog):
    caplog.set_level(logging.INFO, "hybrid_gkd.waiting")
    with waiting(TEACHER, LIMIT):
        pass
    assert not caplog.records


def test_until_when_moves_with_progress_where_the_timeout_is_one_of_inactivity(monkeypatch):
    now = time.monotonic()
    with waiting(TEACHER, LIMIT) as wait:
        monkeypatch.setattr(module.time, "monotonic", lambda: now + 7200)
        before = re.search("until ([0-9:]+)", str(wait))[1]
        wait.restart_timeout()
        after = re.search("until ([0-9:]+)", str(wait))[1]
    hours = [int(text[:2]) * 60 + int(text[3:5]) for text in (before, after)]
    assert (hours[1] - hours[0]) % 1440 in (119, 120, 121)


def test_a_limit_names_the_key_that_sets_it():
    assert str(LIMIT) == "600 s (actor_rollout_ref.teacher.request_timeout)"
    assert str(Timeout(30.0)) == "30 s (fixed)"
    with waiting("Ray to start") as wait:
        assert re.fullmatch(r"waiting for Ray to start; since \d\d:\d\d:\d\d, for 0 s now", str(wait))

"""Waits are logged with their begin and deadline; short ones are not."""

import ast
import contextlib
import dataclasses
import functools
import logging
import re
import threading
import time
from pathlib import Path

import pytest

import hybrid_gkd
from hybrid_gkd.config import Config
from hybrid_gkd.runtime import waiting as module
from hybrid_gkd.runtime.waiting import Timeout, waiting

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
    caplog.set_level(logging.INFO, "hybrid_gkd.runtime.waiting")

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
    caplog.set_level(logging.INFO, "hybrid_gkd.runtime.waiting")
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


FIXED = set(
    "ALL_REDUCE_SECONDS CALL_SECONDS CLOSE_SECONDS ENDING_SECONDS END_SECONDS IMPORT_SECONDS REPORT_SECONDS "
    "SCORES_SECONDS SETTLE_SECONDS TEMPLATE_SECONDS WANDB_FINISH_SECONDS".split()
)
"""Timeouts that no key sets: of the doctor, of a check, of a user's code, of a failure, of the end of a run."""
NO_DEADLINES = {
    "waited {time.monotonic() - self.started} s for its scores",  # what it was; the limit follows
    "waited %.0f s for %s", "has not answered %.0f s after the end of a client's request_timeout",
}


@functools.cache
def trees():
    """Return every module of the package, parsed."""
    files = sorted(Path(hybrid_gkd.__file__).parent.rglob("*.py"))
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def keys_of(section, prefix=""):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        is_section = dataclasses.is_dataclass(value)
        yield from keys_of(value, f"{prefix}{field.name}.") if is_section else [f"{prefix}{field.name}"]


def texts(tree):
    """Every text of a module but its docstrings, with expressions in braces."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pairs = [(part, isinstance(part, ast.Constant)) for part in node.values]
            yield "".join(part.value if plain else f"{{{ast.unparse(part.value)}}}" for part, plain in pairs)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


@pytest.mark.slow
def test_every_timeout_has_the_key_that_sets_it_and_every_such_key_its_timeout():
    named, keys = set(), set(keys_of(Config()))
    assigned = [node for tree in trees() for node in tree.body if isinstance(node, ast.Assign)]
    constants = {ast.unparse(node.targets[0]): node.value for node in assigned}
    for tree in trees():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "Timeout":
                continue
            if len(call.args) == 1:
                assert ast.unparse(call.args[0]) in FIXED, ast.unparse(call)
                continue
            key = ast.unparse(call.args[1])
            if key.endswith(("connect_timeout'", "request_timeout'")) and key.startswith("f"):  # of several teachers
                named.add(f"actor_rollout_ref.teacher{call.args[1].values[-1].value}")
                continue
            if re.search(r"\bkey\b|_key$", key):  # that of another one
                continue
            named.add(ast.literal_eval(constants.get(key, call.args[1])).removesuffix(", a grace period"))
    assert named == {key for key in keys if key.endswith(("timeout", "grace_period"))}


@pytest.mark.slow
def test_no_message_states_the_seconds_of_a_deadline_without_its_key():
    """A `Timeout` in a message names it; a bare number of seconds is something that has happened."""
    stated = re.compile(r"(within|waited|not ready after|limit is|and no error in|answered) ?(\{[^}]*\}|%\S+) s\b")
    found = {text for tree in trees() for text in texts(tree) if stated.search(text)}
    assert not [text for text in found if not any(known in text for known in NO_DEADLINES)]
    assert all(any(known in text for text in found) for known in NO_DEADLINES)

"""Warnings about degenerating completions."""

import logging
import re

import numpy as np
import pytest

from hybrid_gkd.ppo.guards import Guards, repeated_fraction, repeated_tokens
from hybrid_gkd.testing import make_sample

CUT, REPEATED = "response_length/clip_ratio", "response/repeated_fraction"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (range(50), 0),
        ([*range(8)] * 2, 8),
        ([*range(8), 99, *range(8)], 8),
        ([*range(7), 99, *range(7)], 0),
        ([*range(10), *range(10), *range(10)], 20),
        ([5] * 20, 19),
        ([5] * 8, 0),
        ([], 0),
    ],
)
def test_tokens_of_runs_that_have_come_before(ids, expected):
    assert repeated_tokens(np.array([*ids], np.int32)) == expected


def test_every_repetition_is_found_and_nothing_else():
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = random.integers(0, 3, 60).astype(np.int32)
        seen, again = set(), set()
        for start in range(len(ids) - 7):
            run = tuple(ids[start : start + 8])
            again |= set(range(start, start + 8)) if run in seen else set()
            seen.add(run)
        assert repeated_tokens(ids) == len(again)


def test_the_fraction_is_over_all_tokens():
    samples = [make_sample(completion=[3] * 20), make_sample(1, completion=range(30))]
    assert repeated_fraction(samples) == 19 / 50


def look(values, name=CUT):
    guards = Guards()
    for step, value in enumerate(values, 1):
        guards.check({name: value, "actor/loss": 1.0}, step)


@pytest.mark.parametrize("name", [CUT, REPEATED])
def test_a_share_that_doubles_within_20_steps_is_warned_of_once(name, caplog):
    with caplog.at_level(logging.WARNING):
        look([0.04] * 10 + [0.2] * 15, name)
    [record] = caplog.records
    assert name in record.message
    assert re.match(r"step 12: completion.*: 10 %, up from 4 % 7 steps ago \(", record.message)


@pytest.mark.parametrize(
    "values", [[0.001] * 10 + [0.04] * 20, [0.3] * 10 + [0.55] * 20, [0.5] * 3, np.linspace(0.2, 0.8, 100)]
)
def test_small_shares_and_slow_growth_are_not(values, caplog):
    with caplog.at_level(logging.WARNING):
        look(values)
    assert not caplog.records


def test_a_share_that_goes_on_growing_is_warned_of_again(caplog):
    with caplog.at_level(logging.WARNING):
        look([0.02] * 10 + [0.1] * 25 + [0.4] * 25)
    assert len(caplog.records) == 2

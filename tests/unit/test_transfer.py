"""Dataclasses that travel as an array for each field come out as they went in."""

import dataclasses
import pickle

import numpy as np
import pytest

from hybrid_gkd import transfer
from hybrid_gkd.testing import make_sample
from hybrid_gkd.transfer import Transfer
from hybrid_gkd.types import MiniBatch, TopK

K = 4


def make(index, *, length, teacher=True, logprobs=True):
    rng = np.random.default_rng(index)
    drawn = rng.normal(size=length).astype(np.float32)
    scores = TopK(
        ids=rng.integers(0, 9, (length, K)).astype(np.int32), logprobs=rng.normal(size=(length, K)).astype(np.float32),
        tail_logprobs=rng.normal(size=length).astype(np.float32),
        sampled_logprobs=rng.normal(size=length).astype(np.float32),
    )
    signals = {"advantages": rng.normal(size=length).astype(np.float32)} | ({"teacher": scores} if teacher else {})
    return make_sample(
        index, prompt=rng.integers(0, 9, index + 1), completion=rng.integers(0, 9, length), version=3,
        status=("stop", "length")[index % 2], logprobs=drawn if logprobs else None, **signals,
    )  # fmt: skip


def assert_same(found, expected):
    assert type(found) is type(expected)
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def sent(value):
    """Out of band as Ray sends it, and the number of buffers."""
    buffers = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers), len(buffers)


ITEMS = {
    "none": [], "one": [make(0, length=3)], "alike": [make(i, length=5) for i in range(7)],
    "of different lengths, one of them empty": [make(i, length=i) for i in range(6)],
    "some without scores": [make(i, length=2, teacher=i % 2 == 0) for i in range(5)],
    "some without log-probabilities": [make(i, length=2, logprobs=i % 2 == 0) for i in range(5)],
}  # fmt: skip


@pytest.mark.parametrize("name", ITEMS)
def test_items_come_out_as_they_went_in(name):
    found, _ = sent(Transfer(ITEMS[name]))
    assert len(found) == len(ITEMS[name])
    for got, item in zip(found, ITEMS[name], strict=True):
        assert_same(got, item)


def test_small_arrays_travel_joined_and_large_ones_as_they_are(monkeypatch):
    items = ITEMS["alike"]
    # Tokens, which are trained, versions, log-probabilities, advantages, and four of the teacher's.
    assert sent(Transfer(items))[1] == 9
    monkeypatch.setattr(transfer, "LARGEST_BYTES", 12 * 4)
    found, buffers = sent(Transfer(items))
    assert buffers == 7 + 2 * len(items)  # the teacher's candidates have 80 bytes, their log-probabilities too
    for got, item in zip(found, items, strict=True):
        assert_same(got, item)


def test_a_mini_batch_keeps_its_micro_batches():
    items = ITEMS["alike"]
    batch = MiniBatch(micro_batches=(tuple(items[:3]), (), tuple(items[3:])), num_tokens=99)
    found, buffers = sent(batch)
    assert buffers == 9
    assert found.num_tokens == 99
    assert [len(micro_batch) for micro_batch in found.micro_batches] == [3, 0, 4]
    assert type(found.micro_batches[0]) is tuple
    for got, item in zip([each for part in found.micro_batches for each in part], items, strict=True):
        assert_same(got, item)

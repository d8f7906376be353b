"""Every way in which a reply can be unusable is its own error, naming server, request, row and value."""

import numpy as np
import pytest

from hybrid_gkd.errors import BadTeacherReply
from hybrid_gkd.teacher.protocol import check_scores

ROWS, TOPK, VOCAB = 7, 5, 11


def good():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(ROWS, VOCAB))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1)[:, :TOPK].astype(np.int32)
    top = np.take_along_axis(logprobs, ids, 1).astype(np.float16)
    tail = np.log(1 - np.exp(np.take_along_axis(logprobs, ids, 1)).sum(1))
    return ids, top, tail.astype(np.float32), logprobs[:, 0].astype(np.float32)


def check(ids, logprobs, tail, sampled):
    expected = {"num_rows": ROWS, "topk": TOPK, "vocab_size": VOCAB}
    check_scores(ids, logprobs, tail, sampled, **expected, server="host:1", request="r9")


def test_good_scores_pass():
    check(*good())


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        (1, np.nan, "log-probability is NaN (value nan)"),
        (1, -np.inf, "log-probability is infinite (value -inf)"),
        (1, 0.5, "log-probability is positive (value 0.5)"),
        (2, np.nan, "log-probability of the tail is NaN (value nan)"),
        (2, np.inf, "log-probability of the tail is positive (value inf)"),
        (2, 0.25, "log-probability of the tail is positive (value 0.25)"),
        (3, np.nan, "log-probability of the sampled token is NaN (value nan)"),
        (3, np.inf, "log-probability of the sampled token is infinite (value inf)"),
        (3, 0.25, "log-probability of the sampled token is positive (value 0.25)"),
        (0, -1, "token id outside the vocabulary of 11 (value -1)"),
        (0, VOCAB, "token id outside the vocabulary of 11 (value 11)"),
    ],
)
def test_one_bad_value(part, value, text):
    arrays = good()
    arrays[part][(4,) if part >= 2 else (4, 2)] = value
    with pytest.raises(BadTeacherReply) as error:
        check(*arrays)
    assert str(error.value) == f"host:1: request r9, row 4: {text}"


def test_duplicate_id():
    ids, logprobs, tail, sampled = good()
    ids[6, 0] = ids[6, 4]
    with pytest.raises(BadTeacherReply, match=rf"row 6: token id appears twice \(value {ids[6, 4]}\)"):
        check(ids, logprobs, tail, sampled)


def test_mass_above_one():
    ids, logprobs, tail, sampled = good()
    logprobs[2] = np.log(0.25)
    with pytest.raises(BadTeacherReply, match=r"row 2: probabilities sum to more than 1 \(value 1.2"):
        check(ids, logprobs, tail, sampled)


@pytest.mark.parametrize("change", [-0.2, 0.2, -np.inf])
def test_a_tail_that_does_not_fit_the_candidates(change):
    ids, logprobs, tail, sampled = good()
    assert np.exp(tail[3]) > 0.03
    tail[3] += change
    with pytest.raises(BadTeacherReply, match=r"row 3: probabilities of candidates and tail do not sum to 1 \(value"):
        check(ids, logprobs, tail, sampled)


@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_wrong_shape(part):
    arrays = list(good())
    arrays[part] = arrays[part][:-1]
    name = ("ids", "logprobs", "tail_logprobs", "sampled_logprobs")[part]
    with pytest.raises(BadTeacherReply, match=f"request r9: {name} has shape"):
        check(*arrays)


@pytest.mark.parametrize("vocab_size", [2, 64, 1000, 50_000])
def test_full_vocabulary_of_a_flat_distribution_survives_float16(vocab_size):
    """All entries round the same way there: the worst case of the mass check's tolerance."""
    for shift in np.linspace(0.0, 1.0, 7):
        logprobs = np.full((1, vocab_size), -np.log(vocab_size), np.float64)
        logprobs[0, : vocab_size // 2] += shift * 1e-3
        logprobs -= np.log(np.exp(logprobs).sum())
        check_scores(
            np.arange(vocab_size, dtype=np.int32)[None], logprobs.astype(np.float16), np.array([-np.inf], np.float32),
            np.array([-1.0], np.float32), num_rows=1, topk=vocab_size, vocab_size=vocab_size, server="s", request="r",
        )  # fmt: skip

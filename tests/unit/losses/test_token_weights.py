"""Weights of tokens against naive computations in float64, and what a user may put in their place."""

import inspect
import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from documented import example

from hybrid_gkd.errors import ConfigError, TrainingError
from hybrid_gkd.losses.head import RowStatistics, row_statistics
from hybrid_gkd.losses.selection import confident_wrong, highest, student_entropy
from hybrid_gkd.losses.table import TOKEN_WEIGHTS, token_weights
from hybrid_gkd.losses.token_weights import KEY, TokenSignals, check_token_weights, compute_weights, num_selected
from hybrid_gkd.ppo.token_weighting import Weighting
from hybrid_gkd.testing import make_sample, tiny_config
from hybrid_gkd.types import TopK
from hybrid_gkd.workers.aggregation import with_loss_weights

PAGE = (Path(__file__).parents[3] / "docs" / "losses.md").read_text(encoding="utf-8")


def signals(length, **more):
    return TokenSignals(
        token_ids=np.zeros(length, np.int32), positions=np.arange(length), length=length, **more
    )  # fmt: skip


@pytest.mark.parametrize("name", TOKEN_WEIGHTS)
def test_a_row_has_a_function_and_a_line_in_the_documentation(name):
    row = TOKEN_WEIGHTS[name]
    assert len(inspect.signature(row.function).parameters) == 2
    assert set(row.options) == {"fraction"}
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    assert f"by default {row.options['fraction']:g} of" in line


@pytest.mark.parametrize("fraction", ["0.1", "0.3", "0.5", "0.7", "1"])
def test_the_first_tokens_of_a_completion_have_weight_1(fraction):
    row = token_weights("position", {"fraction": float(fraction)})
    for length in (0, 1, 2, 3, 7, 10, 30, 1000):
        number = math.ceil(Fraction(fraction) * length)  # exact, where 0.1 * 30 in floats is above 3
        assert num_selected(float(fraction), length) == number
        expected = [1.0] * number + [0.0] * (length - number)
        np.testing.assert_array_equal(compute_weights(row, signals(length)), np.array(expected, np.float32))


@pytest.mark.parametrize(("chunk_rows", "num_ids", "temperature"), [(None, None, 1.0), (4, 20, 0.7), (1, 23, 2.0)])
def test_statistics_of_rows_are_those_of_the_whole_distribution(chunk_rows, num_ids, temperature):
    hidden, weight = torch.randn(11, 5, dtype=torch.float64), torch.randn(23, 5, dtype=torch.float64)
    found = row_statistics(hidden, weight, temperature=temperature, chunk_rows=chunk_rows, num_ids=num_ids)
    q = ((hidden @ weight.T)[:, :num_ids] / temperature).softmax(1)
    torch.testing.assert_close(found.entropy, -(q * q.log()).sum(1))
    assert torch.equal(found.top_ids, q.argmax(1))
    torch.testing.assert_close(found.top_logprobs, q.amax(1).log())
    empty = row_statistics(hidden[:0], weight)
    assert [each.shape for each in empty] == [(0,)] * 3


@pytest.mark.parametrize("k", [3, 9])
def test_scores_are_those_of_the_whole_distributions(k):
    gen = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 50, 9, generator=gen, dtype=torch.float64).mul(2).softmax(-1)
    top, ids = p.topk(k)
    outside = (1 - top.sum(1)).clamp(min=0)
    teacher = {"teacher.ids": ids, "teacher.logprobs": top.log(), "teacher.tail_logprobs": outside.log()}
    student = RowStatistics(-(q * q.log()).sum(1), q.argmax(1), q.amax(1).log())
    assert torch.equal(student_entropy(student, teacher), student.entropy)
    expected = []
    for row in range(50):
        token = int(q[row].argmax())
        known = float(p[row, token])
        if token not in ids[row].tolist():
            known = min(float(top[row, -1]), float(outside[row]))
            assert known >= float(p[row, token])
        expected.append(float(q[row, token]) * (1 - known))
    torch.testing.assert_close(confident_wrong(student, teacher), torch.tensor(expected, dtype=torch.float64))


def test_the_highest_scores_of_each_completion_are_selected():
    scores = torch.tensor([0.1, 0.5, 0.5, 0.2, 9.0, 1.0, 1.0, 1.0, -math.inf])
    found = highest(scores, [4, 0, 1, 4], [2, 0, 1, 2])
    assert found.tolist() == [1, 2, 4, 5, 6]  # of equal ones the earlier


BAD = {
    "one weight per token": lambda signals: np.ones(signals.length + 1),
    r"got \[\]": lambda signals: 1.0,
    "at least 0": lambda signals: np.full(signals.length, -0.5),
    "finite": lambda signals: np.full(signals.length, np.nan),
    r"finite .*; got inf": lambda signals: np.where(signals.positions == 2, np.inf, 1),
    "real numbers .*; got <U1": lambda signals: ["a"] * signals.length,
    "real numbers .*; got complex128": lambda signals: np.full(signals.length, 1j),
    "raised KeyError": lambda signals: {}["x"],
    "raised SystemExit": lambda signals: sys.exit(3),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_function_without_a_finite_weight_for_each_token_is_refused(reason, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "tried", BAD[reason], raising=False)
    row = token_weights(f"{__name__}:tried", {})
    with pytest.raises(ConfigError, match=reason) as caught:
        check_token_weights(row, topk=4)
    assert KEY in str(caught.value)


@pytest.mark.parametrize(
    ("run", "reason"),
    [({"given": True}, r"TypeError when it was tried, for a given completion \(logprobs=None\)"),
     ({"other_tokenizer": True}, r"finite .* where teacher.sampled_logprobs is NaN \(another tokenizer\); got nan")],
)  # fmt: skip
def test_a_function_is_tried_on_what_the_run_can_have(run, reason, monkeypatch):
    """A function of both log-probabilities works on sampled completions and teachers with the student's tokens only."""

    def ratio(signals):
        return np.exp(signals.logprobs - signals.teacher.sampled_logprobs)

    monkeypatch.setattr(sys.modules[__name__], "tried", ratio, raising=False)
    row = token_weights(f"{__name__}:tried", {})
    check_token_weights(row, topk=4)
    with pytest.raises(ConfigError, match=reason):
        check_token_weights(row, topk=4, **run)


def test_an_error_of_a_function_during_the_run_names_the_key(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "tried", BAD["raised KeyError"], raising=False)
    row = token_weights(f"{__name__}:tried", {})
    with pytest.raises(ConfigError, match=f"{KEY}: raised KeyError: 'x'"):
        compute_weights(row, signals(2))
    weighting = Weighting(tiny_config())
    weighting._row = row
    with pytest.raises(ConfigError, match=f"{KEY}: raised KeyError for row 3, sample 0: 'x'"):
        weighting._weighed(make_sample(2, completion=(1, 2)))


def test_the_example_of_the_pages(tmp_path):
    file = tmp_path / "my_weights.py"
    file.write_text(example("my_weights.py"), encoding="utf-8")
    row = token_weights(f"{file}:surprise", {"limit": 2})
    assert row.needs == "teacher"
    check_token_weights(row, topk=3, given=True, other_tokenizer=True)
    ones = np.zeros((3, 1), np.float32)
    teacher = TopK(
        ids=ones.astype(np.int32), logprobs=ones, tail_logprobs=ones[:, 0],
        sampled_logprobs=np.array([-1, -2, -9], np.float32),
    )  # fmt: skip
    found = compute_weights(row, signals(3, teacher=teacher, logprobs=np.array([-3, -1, -1], np.float32)))
    np.testing.assert_array_equal(found, np.array([0, 1, 2], np.float32))
    np.testing.assert_array_equal(compute_weights(row, signals(2, teacher=teacher)), np.ones(2, np.float32))


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", MODES)
def test_the_term_is_divided_by_the_sum_of_the_weights(mode):
    """Also where a rule has left tokens out; against the mean of each mode, written out in float64."""
    rng = np.random.default_rng(0)
    own = [rng.uniform(0, 2, length).astype(np.float32) for length in (3, 5, 1)]
    left_out = [np.array(each, np.float32) for each in ([1, 0, 2], [1, 1, 1, 0.5, 1], [1])]
    samples = [
        make_sample(row, completion=range(len(each)), token_weights=each, weights=weights)
        for row, (each, weights) in enumerate(zip(own, left_out, strict=True))
    ]
    config = tiny_config(f"{KEY}=m:f", "data.max_response_length=6")
    found = [sample.array("weights/distillation") for sample in with_loss_weights(config, samples, mode)]
    values = [rng.normal(size=len(each)) for each in own]
    sums = [float((value * each * w).sum()) for value, each, w in zip(values, own, left_out, strict=True)]
    counted = [float(each[w != 0].astype(np.float64).sum()) for each, w in zip(own, left_out, strict=True)]
    expected = {
        "token-mean": sum(sums) / sum(counted),
        "seq-mean-token-sum": sum(sums) / 3,
        "seq-mean-token-mean": sum(part / number for part, number in zip(sums, counted, strict=True)) / 3,
        "seq-mean-token-sum-norm": sum(sums) / 3 / 6,
    }
    total = sum(float((value * factors).sum()) for value, factors in zip(values, found, strict=True))
    assert total / 9 == pytest.approx(expected[mode], rel=1e-6)


def test_a_selection_by_the_student_is_divided_by_its_number():
    config = tiny_config(f"{KEY}=student_entropy", f"{KEY}_kwargs.fraction=0.4")
    samples = [
        make_sample(0, completion=range(5)),
        make_sample(1, completion=range(4), weights=np.array([1, 0, 1, 1], np.float32)),
    ]
    found = with_loss_weights(config, samples)
    for sample, weights in zip(found, ([1] * 5, [1, 0, 1, 1]), strict=True):  # two tokens of each are selected
        np.testing.assert_allclose(sample.array("weights/distillation"), np.array(weights) * 9 / 4, rtol=1e-6)
        np.testing.assert_allclose(sample.array("weights"), np.array(weights) * 9 / 8, rtol=1e-6)


def test_uniform_weights_add_nothing_to_a_sample():
    samples = [make_sample(0, completion=range(5))]
    assert with_loss_weights(tiny_config(), samples) is samples


def test_a_mini_batch_without_a_weight_is_an_error():
    config = tiny_config(f"{KEY}=m:f")
    with pytest.raises(TrainingError, match="no token of the 1 completions of a mini-batch has a weight above 0"):
        with_loss_weights(config, [make_sample(0, completion=range(2), token_weights=np.zeros(2, np.float32))])

"""Rollout correction against numbers that verl's functions gave, and in the loop."""

import json
from pathlib import Path

import numpy as np
import pytest

from hybrid_gkd.config import AlgorithmConfig, rejection_bounds
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.ppo.importance import importance_weights, kept_tokens, with_rollout_correction
from hybrid_gkd.testing import make_sample, tiny_config

VERL = json.loads(Path(__file__).with_name("verl_rollout_correction.json").read_text(encoding="utf-8"))
"""`how` in the file says how the numbers were made."""
LOGPROBS, DRAWN = ([np.array(row) for row in VERL[name]] for name in ("logprobs", "rollout_logprobs"))


def corrected(*, of_sampled=True, **settings):
    items = [make_sample(row, completion=[0] * len(drawn), logprobs=drawn) for row, drawn in enumerate(DRAWN)]
    items, metrics = with_rollout_correction(AlgorithmConfig(**settings), items, LOGPROBS, of_sampled=of_sampled)
    own = [item.signals.get("sampled_weights", 1) for item in items]
    return [item.array("weights") * each for item, each in zip(items, own, strict=True)], metrics


@pytest.mark.parametrize("case", VERL["weights"])
def test_same_weights_as_verl(case):
    level, _, normalize = case.partition(" ")
    weights, metrics = corrected(
        rollout_is=level, rollout_is_threshold=VERL["threshold"], rollout_is_batch_normalize=bool(normalize)
    )
    for found, want in zip(weights, VERL["weights"][case], strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6)
    assert metrics["actor/importance/kl"] == pytest.approx(VERL["metrics"]["kl"], abs=1e-9)
    assert metrics["actor/importance/k3_kl"] == pytest.approx(VERL["metrics"]["k3_kl"], abs=1e-9)
    largest = max(np.abs(now - then).max() for now, then in zip(LOGPROBS, DRAWN, strict=True))
    assert metrics["actor/importance/largest_ratio"] == pytest.approx(np.exp(largest))


def test_a_divergence_is_weighted_by_the_tokens_before_and_a_policy_loss_by_its_own_too():
    settings = {"rollout_is_threshold": VERL["threshold"]}
    before, metrics = corrected(of_sampled=False, **settings)
    for found, now, then in zip(before, LOGPROBS, DRAWN, strict=True):
        np.testing.assert_allclose(found, importance_weights(now, then, VERL["threshold"], own=False))
    assert metrics["actor/importance/mean"] == pytest.approx(np.concatenate(before).mean())
    both, metrics = corrected(**settings)
    for found, now, then in zip(both, LOGPROBS, DRAWN, strict=True):
        np.testing.assert_allclose(found, importance_weights(now, then, VERL["threshold"]), rtol=1e-6)
    assert metrics["actor/importance/mean"] == pytest.approx(np.concatenate(both).mean())


@pytest.mark.parametrize("case", VERL["kept"])
def test_same_tokens_kept_as_verl(case):
    names, limits = case.split(" ")
    bounds = rejection_bounds(names, limits)
    for now, then, want in zip(LOGPROBS, DRAWN, VERL["kept"][case], strict=True):
        np.testing.assert_array_equal(kept_tokens(now - then, bounds), np.array(want, bool))


@pytest.mark.parametrize("name", ["token_k1", "seq_mean_k2", "seq_max_k3"])
def test_a_response_without_tokens_keeps_none(name):
    assert kept_tokens(np.zeros(0), rejection_bounds(name, "2")).shape == (0,)


def test_what_is_rejected_has_no_weight():
    weights, metrics = corrected(rollout_rs="token_k1", rollout_rs_threshold="1.4")
    want = [row for row in VERL["kept"]["token_k1 1.4"]]
    for found, kept in zip(weights, want, strict=True):
        np.testing.assert_array_equal(found, np.array(kept, np.float32))
    assert metrics["actor/importance/rejected"] == pytest.approx(1 - np.mean([x for row in want for x in row]))
    assert "actor/importance/mean" not in metrics
    both, _ = corrected(
        rollout_rs="token_k1", rollout_rs_threshold="1.4", rollout_is="token", rollout_is_threshold=1.5
    )
    for found, now, then, kept in zip(both, LOGPROBS, DRAWN, want, strict=True):
        np.testing.assert_allclose(found, importance_weights(now, then, 1.5, "token") * kept, rtol=1e-6)


@pytest.mark.parametrize(
    ("names", "limits", "message"),
    [
        ("token_k4", "1", "must name some of token_k1, .*'token_k4'"),
        ("token_k1,token_k2", "1.5,0.1,2", "one limit, or one for each of 2"),
        ("token_k2", "0.1_2.0", "a number above 0 for token_k2, not '0.1_2.0'"),
        ("token_k1", "much", "a number or lower_upper above 0 for token_k1, not 'much'"),
        ("token_k1", "0.5", "lower bound below the upper, not '0.5'"),
        ("seq_max_k1", "1.5", "must name some of"),
        ("seq_sum_k3", "-1", "above 0"),
    ],
)
def test_limits_that_make_no_sense(names, limits, message):
    with pytest.raises(ValueError, match=message):
        rejection_bounds(names, limits)


def test_the_configuration_names_what_is_wrong_and_reads_lower_and_upper():
    with pytest.raises(ConfigError, match=r"^algorithm\.rollout_rs: .*token_k1.*'much'"):
        tiny_config("algorithm.rollout_rs=token_k1", "algorithm.rollout_rs_threshold=much")
    with pytest.raises(ConfigError, match=r"^algorithm\.rollout_rs: needs samples of the full distribution"):
        tiny_config(
            "algorithm.rollout_rs=token_k3", "algorithm.rollout_rs_threshold=2", "actor_rollout_ref.rollout.top_p=0.9"
        )
    config = tiny_config("algorithm.rollout_rs=token_k1", "algorithm.rollout_rs_threshold=0.5_2.0")
    assert config.algorithm.rollout_rs_threshold == "0.5_2.0"
    assert config.algorithm.compares_logprobs
    nested = [f"algorithm.rollout_correction.{each}" for each in ("rollout_is=token", "rollout_is_threshold=2.0")]
    config = tiny_config("distillation.loss_mode=k3", *nested)
    assert (config.algorithm.rollout_is, config.algorithm.rollout_is_threshold) == ("token", 2.0)

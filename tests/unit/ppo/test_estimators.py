"""Advantage estimators against direct formulas and against numbers that verl's and TRL's functions gave."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hybrid_gkd.config.learning import ADV_ESTIMATORS, AlgorithmConfig
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.ppo import advantages
from hybrid_gkd.ppo.advantages import ESTIMATORS, check_estimator, group_relative_advantages
from hybrid_gkd.scoring.rewards import token_rewards

VERL = json.loads(Path(__file__).with_name("verl_estimators.json").read_text(encoding="utf-8"))
TRL = json.loads(Path(__file__).with_name("trl_advantages.json").read_text(encoding="utf-8"))
"""`how` in the files says how the numbers were made."""
N, LENGTHS = 2, [2, 4, 1, 3]
SCORES = np.array([1.0, 0.0, 0.25, 0.75])
MEAN = np.array([0.5, 0.5, 0.5, 0.5])


def estimate(name, rewards, n, values=None, **settings):
    section = dataclasses.replace(AlgorithmConfig(), adv_estimator=name, **settings)
    return ESTIMATORS[name](rewards, n, values, section)


def arrays(rows):
    return [np.array(row) for row in rows]


def test_the_configuration_knows_every_estimator():
    assert list(ESTIMATORS) == list(ADV_ESTIMATORS)


@pytest.mark.parametrize("name", VERL["estimators"])
def test_same_numbers_as_verl(name):
    estimator, _, without = name.partition("_without_")
    values = {"gae": arrays(VERL["values"]), "remax": arrays(
        [[score] * len(row) for score, row in zip(VERL["greedy"], VERL["rewards"], strict=True)]
    )}
    advantages, returns = estimate(
        estimator, arrays(VERL["rewards"]), VERL["n"], values.get(estimator), norm_adv_by_std_in_grpo=not without,
        gamma=VERL["gamma"], lam=VERL["lam"],
    )
    want = VERL["estimators"][name]
    for found, expected in zip(advantages, want["advantages"], strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-7)
    if estimator in ("gae", "remax", "reinforce_plus_plus"):  # where verl's are not the advantages again
        for found, expected in zip(returns, want["returns"], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    else:
        assert returns is None


@pytest.mark.parametrize("name", TRL["advantages"])
def test_same_numbers_as_trl(name):
    estimator, _, without = name.partition("_without_")
    rewards = token_rewards(np.array(TRL["rewards"]), [2] * len(TRL["rewards"]))
    advantages, _ = estimate(estimator, rewards, TRL["n"], norm_adv_by_std_in_grpo=not without)
    # TRL adds 1e-4 to a standard deviation, verl and this program 1e-6; those here are 0.14 and more.
    tolerance = 1e-3 if name == "grpo" else 1e-6
    expected = TRL["advantages"][name]["advantages"]
    np.testing.assert_allclose([each[-1] for each in advantages], expected, rtol=tolerance, atol=1e-7)
    if name == "grpo":
        found = group_relative_advantages(np.array(TRL["rewards"]), TRL["n"], norm_by_std=True, eps=1e-4)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def whitened(values):
    together = np.concatenate(values)
    return [(each - together.mean()) / np.sqrt(together.var(ddof=1) + 1e-8) for each in values]


def per_token(scores):
    return [np.full(length, score) for length, score in zip(LENGTHS, scores, strict=True)]


def direct(name, gamma, lam, values):
    """Formulas of the papers, written out with loops."""
    rewards = token_rewards(SCORES, LENGTHS)
    if name == "grpo":
        return per_token((SCORES - MEAN) / (np.repeat([0.5**0.5, 0.125**0.5], 2) + 1e-6))
    if name == "rloo":
        return per_token([1.0 - 0.0, 0.0 - 1.0, 0.25 - 0.75, 0.75 - 0.25])
    if name == "opo":
        baselines = [(2 * 1.0 + 4 * 0.0) / 6, (1 * 0.25 + 3 * 0.75) / 4]
        return per_token(SCORES - np.repeat(baselines, 2))
    if name == "reinforce_plus_plus_baseline":
        return whitened(per_token(SCORES - MEAN))
    if name == "reinforce_plus_plus":
        return whitened([score * gamma ** np.arange(k - 1, -1, -1.0) for score, k in zip(SCORES, LENGTHS, strict=True)])
    if name == "remax":
        return [np.full(len(r), r.sum()) - v for r, v in zip(rewards, values, strict=True)]
    found = []
    for reward, value in zip(rewards, values, strict=True):
        following = np.append(value, 0.0)
        deltas = [reward[t] + gamma * following[t + 1] - value[t] for t in range(len(reward))]
        powers = (gamma * lam) ** np.arange(len(reward))
        found.append(np.array([np.dot(powers[: len(deltas) - t], deltas[t:]) for t in range(len(deltas))]))
    return whitened(found)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_direct_formulas(name):
    values = [np.linspace(0.1, 0.6, length) for length in LENGTHS] if name in ("gae", "remax") else None
    advantages, _ = estimate(name, token_rewards(SCORES, LENGTHS), N, values, gamma=0.9, lam=0.7)
    for found, expected in zip(advantages, direct(name, 0.9, 0.7, values), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_single_token_has_nothing_to_be_whitened_with():
    advantages, returns = estimate("reinforce_plus_plus", [np.array([2.0])], 1)
    assert (advantages[0], returns[0]) == (0.0, 2.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_reward_that_is_not_finite_is_refused(name):
    rewards = token_rewards(np.array([0.0, np.nan, 1.0, 0.0]), LENGTHS)
    with pytest.raises(ValueError, match="rewards must be finite"):
        estimate(name, rewards, N, [np.zeros(length) for length in LENGTHS])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return [r[:-1] for r in rewards], None", r"one advantage per token in a trial call.* it returned 4, of"),
        ("return [r * float('nan') for r in rewards], None", "not finite"),
        ("return rewards", "raised ValueError in a trial call"),
        ("return rewards, None", None),
    ],
)
def test_an_estimator_of_ones_own_is_tried_out(tmp_path, code, message):
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(rewards, n, values, section):\n    {code}\n", encoding="utf-8")
    section = AlgorithmConfig(adv_estimator=f"{file}:mine")
    if message is None:
        return check_estimator(2, section)
    with pytest.raises(ConfigError, match=f"^algorithm.adv_estimator: .*{message}"):
        check_estimator(2, section)


def test_an_estimator_of_ones_own_that_fails_during_the_run_is_named(tmp_path):
    """The rewards of the trial call are all above 0."""
    file = tmp_path / "mine.py"
    code = "def mine(rewards, n, values, section):\n    return [r / r[-1] for r in rewards], None\n"
    file.write_text(code, encoding="utf-8")
    section = AlgorithmConfig(adv_estimator=f"{file}:mine")
    check_estimator(2, section)
    with np.errstate(invalid="ignore"), pytest.raises(ConfigError, match=r"^algorithm.adv_estimator: .*not finite"):
        advantages.estimate([np.zeros(2)] * 2, 2, None, section)

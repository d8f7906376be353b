"""Advantage estimators.

An estimator is a plain function in `ESTIMATORS`, keyed by the value of `algorithm.adv_estimator`. It takes

    rewards   per completion, float [R_i] token-level rewards; the score of a whole completion is on its last token
    n         completions per prompt; completion j of prompt i is at i * n + j
    values    per completion, float [R_i] baseline: the critic's values (gae) or the greedy completion's return from
              the same position (remax; see `greedy_baseline`); None for the others
    section   the section `algorithm`

and returns the advantages, float32 [R_i] each, and the critic's targets (returns) in the same shapes, or None.

All compute in float64. Shapes: B prompts, n completions each, R_i tokens of completion i, N tokens in total.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.runtime.imports import is_import_path, load_object
from hybrid_gkd.scoring.rewards import token_rewards
from hybrid_gkd.types import Arrays

if TYPE_CHECKING:
    from hybrid_gkd.config import AlgorithmConfig

Estimator = Callable[[Arrays, int, Arrays | None, "AlgorithmConfig"], tuple[Arrays, Arrays | None]]
VARIANCE_FLOOR = 1e-8
"""Constant added to a variance before dividing by its root."""


def group_relative_advantages(
    rewards: np.ndarray, group_size: int, *, norm_by_std: bool, eps: float = 1e-6
) -> np.ndarray:
    """Return A = r - mean(group), divided by std(group) + eps if `norm_by_std`.

    Source: GRPO, arXiv 2402.03300, section 4.1.2. Without the division: Dr. GRPO, arXiv 2503.20783, which shows
    that the division overweights prompts that are nearly always or nearly never solved.
    The standard deviation is the sample one (divisor n - 1), as in verl and TRL.

    Args:
        rewards: float [B * n]; sample j of prompt i is at i * n + j.
        group_size: n, at least 2.
        norm_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation, in units of the reward; a group of equal rewards gets zeros.

    Returns float32 [B * n] in the order of `rewards`. Raises ValueError: a group of one, a length that is no multiple
    of n, or a reward that is not finite.
    """
    groups = _groups(rewards, group_size)
    advantages = groups - groups.mean(axis=1, keepdims=True)
    if norm_by_std:
        advantages /= groups.std(axis=1, ddof=1, keepdims=True) + eps
    return advantages.reshape(-1).astype(np.float32)


def grpo(rewards: Arrays, n: int, values: Arrays | None, section: AlgorithmConfig) -> tuple[Arrays, None]:
    """Return `group_relative_advantages` of the completions' scores, repeated at every token."""
    return _at_every_token(
        group_relative_advantages(_scores(rewards), n, norm_by_std=section.norm_adv_by_std_in_grpo), rewards
    ), None


def rloo(rewards: Arrays, n: int, values: Arrays | None, section: AlgorithmConfig) -> tuple[Arrays, None]:
    """Return the score minus the mean score of the OTHER completions of the prompt, at every token.

    Source: REINFORCE leave-one-out, arXiv 2402.14740, section 3.3.
    """
    groups = _groups(_scores(rewards), n)
    others = (groups.sum(1, keepdims=True) - groups) / (n - 1)
    return _at_every_token(groups - others, rewards), None


def opo(rewards: Arrays, n: int, values: Arrays | None, section: AlgorithmConfig) -> tuple[Arrays, None]:
    """Return the score minus the length-weighted mean score of the group, at every token.

    This baseline nearly minimizes the variance if all tokens have about the same gradient norm.
    Source: on-policy RL with optimal baseline, arXiv 2505.23585, section 3.
    """
    groups = _groups(_scores(rewards), n)
    lengths = np.array([len(each) for each in rewards], np.float64).reshape(groups.shape)
    baselines = (lengths * groups).sum(1, keepdims=True) / lengths.sum(1, keepdims=True)
    return _at_every_token(groups - baselines, rewards), None


def reinforce_plus_plus(
    rewards: Arrays, n: int, values: Arrays | None, section: AlgorithmConfig
) -> tuple[Arrays, Arrays]:
    """Return the discounted return of each token, whitened over all N tokens of the rollout.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    returns = [_discounted(_finite(each), section.gamma) for each in rewards]
    return _whitened(returns), _as_float32(returns)


def reinforce_plus_plus_baseline(
    rewards: Arrays, n: int, values: Arrays | None, section: AlgorithmConfig
) -> tuple[Arrays, None]:
    """Return the score minus the group's mean, at every token, whitened over all N tokens of the rollout.

    Source: REINFORCE++-baseline, arXiv 2501.03262.
    """
    groups = _groups(_scores(rewards), n)
    return _whitened(_at_every_token(groups - groups.mean(1, keepdims=True), rewards)), None


def remax(rewards: Arrays, n: int, values: Arrays | None, section: AlgorithmConfig) -> tuple[Arrays, Arrays]:
    """Return the undiscounted return of each token minus that of the prompt's greedy completion (`values`).

    Source: ReMax, arXiv 2310.10505, equation 8.
    """
    assert values is not None
    returns = [_discounted(_finite(each), 1.0) for each in rewards]
    advantages = [found - baseline for found, baseline in zip(returns, values, strict=True)]
    return _as_float32(advantages), _as_float32(returns)


def gae(rewards: Arrays, n: int, values: Arrays | None, section: AlgorithmConfig) -> tuple[Arrays, Arrays]:
    """Return generalised advantage estimates, whitened over all N tokens, and the returns A + V (A before whitening).

        A_t = delta_t + gamma lam A_(t+1),   delta_t = r_t + gamma V_(t+1) - V_t,   V and A 0 after the last token

    Source: arXiv 1506.02438, equation 16. The whitening is usual in PPO for language models.
    """
    assert values is not None
    advantages, returns = [], []
    for reward, value in zip(rewards, values, strict=True):
        value = value.astype(np.float64)
        deltas = _finite(reward) + section.gamma * np.append(value[1:], 0.0) - value
        advantages.append(_discounted(deltas, section.gamma * section.lam))
        returns.append(advantages[-1] + value)
    return _whitened(advantages), _as_float32(returns)


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
}
"""Estimators by name; `ADV_ESTIMATORS` in hybrid_gkd/config/learning.py lists the inputs that each of them needs."""


def load_estimator(name: str) -> Estimator:
    """Return the estimator of `ESTIMATORS`, or a user's own function. Raises ConfigError: it cannot be imported."""
    if not is_import_path(name):
        return ESTIMATORS[name]
    return load_object("algorithm.adv_estimator", name)


def estimate(
    rewards: Arrays, n: int, values: Arrays | None, section: AlgorithmConfig, case: str = ""
) -> tuple[Arrays, Arrays | None]:
    """Return advantages, float32, and returns of the estimator of `algorithm.adv_estimator`.

    Raises ConfigError: a user's own estimator raises, or its advantages are not one finite value per token.

    `case`: description of the call, for the message.
    """
    estimator = load_estimator(section.adv_estimator)
    if not is_import_path(section.adv_estimator):
        return estimator(rewards, n, values, section)

    def refusal(rule: str) -> ConfigError:
        return ConfigError("algorithm.adv_estimator", rule, section.adv_estimator)

    try:
        advantages, returns = estimator(rewards, n, values, section)
        found = [np.asarray(each, np.float32) for each in advantages]
    except Exception as error:  # whatever the user's code raises
        raise refusal(f"raised {type(error).__name__}{case}: {error}") from error
    lengths, shapes = [len(each) for each in rewards], [each.shape for each in found]
    if shapes != [(length,) for length in lengths]:
        rule = f"must return one advantage per token{case}, for completions of {lengths[:4]}"
        raise refusal(f"{rule} and so on, {len(lengths)} in total; it returned {len(found)}, of shapes {shapes[:4]}")
    if not all(np.isfinite(each).all() for each in found):
        raise refusal(f"returned advantages that are not finite{case}")
    return found, returns


def check_estimator(n: int, section: AlgorithmConfig) -> None:
    """Call a user's own estimator on random rewards for two prompts, as a preflight check. Raises as `estimate`."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 6, 2 * n).tolist()
    estimate(token_rewards(generator.random(2 * n), lengths), n, None, section, " in a trial call")


def _scores(rewards: Arrays) -> np.ndarray:
    """Return the sum of each completion's token-level rewards, float64 [B * n]."""
    return np.array([each.sum(dtype=np.float64) for each in rewards])


def _groups(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Reshape rewards [B * n] to float64 [B, n]. Raises ValueError as `group_relative_advantages` does."""
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2: a single completion has no group to compare with; got {group_size}"
        )
    if rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards must be [B * {group_size}]; got {rewards.shape}")
    return _finite(rewards).reshape(-1, group_size)


def _finite(rewards: np.ndarray) -> np.ndarray:
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite; got {rewards[~np.isfinite(rewards)][:4]}")
    return rewards.astype(np.float64)


def _discounted(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Return the sum over s >= t of gamma^(s - t) rewards_s for every t, [R]."""
    sums, total = np.empty_like(rewards), 0.0
    for at in range(len(rewards) - 1, -1, -1):
        total = sums[at] = rewards[at] + gamma * total
    return sums


def _whitened(values: Arrays) -> Arrays:
    """Subtract the mean of all N tokens and divide by their standard deviation (divisor N - 1)."""
    together = np.concatenate([np.zeros(0), *values])
    if len(together) < 2:
        return _as_float32([np.zeros_like(each) for each in values])
    scale = 1 / np.sqrt(together.var(ddof=1) + VARIANCE_FLOOR)
    return _as_float32([(each - together.mean()) * scale for each in values])


def _at_every_token(scores: np.ndarray, rewards: Arrays) -> Arrays:
    """Repeat one number per completion, in any shape, at each of its tokens."""
    pairs = zip(scores.reshape(-1), rewards, strict=True)
    return [np.full(len(each), score, np.float32) for score, each in pairs]


def _as_float32(arrays: Arrays) -> Arrays:
    return [each.astype(np.float32) for each in arrays]

"""Learning signal of the policy loss: from the scores of a rollout to token-level advantages.

Shapes: B prompts, n completions each, R_i tokens of completion i.
"""

from __future__ import annotations

import numpy as np

from hybrid_gkd.config import ADV_ESTIMATORS, Config
from hybrid_gkd.ppo.advantages import estimate
from hybrid_gkd.types import Arrays, Rollout, Sample


def needs_greedy_samples(config: Config) -> bool:
    """Return whether the greedy completion of each prompt is the baseline of the advantages."""
    return config.has_advantages and ADV_ESTIMATORS.get(config.algorithm.adv_estimator) == "greedy completion"


def with_advantages(
    config: Config, rollout: Rollout, samples: list[Sample], greedy: list[Sample], of_tokens: Arrays | None = None
) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples of a rollout with their advantages, and metrics.

    Args:
        samples: the samples, with rewards and a critic's values if the run has them. With values, the critic's targets
            (`returns`) are added too.
        greedy: the greedy samples of the rollout, with rewards like the others.
        of_tokens: additional token-level rewards of the samples, optionally followed by those of the greedy ones.
    """
    section, n = config.algorithm, config.actor_rollout_ref.rollout.n
    drawn, of_greedy = scores_of(samples), scores_of(greedy)
    metrics = {"reward/mean": float(drawn.mean()), "reward/std": float(drawn.std())} if len(drawn) else {}
    rewards = [
        sample.array("rewards") if len(drawn) else np.zeros(sample.num_trained, np.float32) for sample in samples
    ]
    if of_tokens is not None:
        rewards = [reward + each for reward, each in zip(rewards, of_tokens, strict=False)]
    values = [sample.array("values") for sample in samples] if config.uses_critic else None
    baseline = values
    if greedy:
        of_greedy_tokens = (of_tokens or [])[len(samples) :]
        places = {each.id.group: place for place, each in enumerate(greedy)}
        baseline = [
            greedy_baseline(
                sample.num_trained, of_greedy[place] if len(of_greedy) else 0.0,
                of_greedy_tokens[place] if of_greedy_tokens else None,
            )
            for sample, place in ((sample, places[sample.id.group]) for sample in samples)
        ]
    advantages, returns = estimate(rewards, n, baseline, section)
    pairs = zip(samples, advantages, strict=True)
    samples = [sample.with_signals(advantages=each) for sample, each in pairs]
    if values is not None:
        assert returns is not None
        samples = [sample.with_signals(returns=each) for sample, each in zip(samples, returns, strict=True)]
    if len(of_greedy):
        metrics["reward/greedy"] = float(of_greedy.mean())
    return samples, metrics


def scores_of(samples: list[Sample]) -> np.ndarray:
    """Return the rewards of whole samples, float32 [number of samples]; empty where they have none."""
    found = [sample.array("rewards").sum() for sample in samples if "rewards" in sample.signals]
    assert len(found) in (0, len(samples)), "some samples have no reward"
    return np.array(found, np.float32)


def greedy_baseline(length: int, score: float, of_tokens: np.ndarray | None) -> np.ndarray:
    """Return the ReMax baseline of a completion's tokens [R]: the greedy completion's return from the same position.

    The baseline is the greedy score at every position (arXiv 2310.10505) plus the greedy completion's token rewards
    summed from there, 0 after its end. It depends on the prompt and the position alone, so the gradient stays unbiased.
    """
    baseline = np.full(length, score, np.float64)
    if of_tokens is not None:
        from_there = np.cumsum(of_tokens[::-1], dtype=np.float64)[::-1][:length]
        baseline[: len(from_there)] += from_there
    return baseline


def teacher_rewards(config: Config, samples: list[Sample], factor: float) -> tuple[Arrays, dict[str, float]]:
    """Return factor * (log p - log q) of each sampled token, float32 [R_i], for `distillation.as_reward`, and metrics.

    p is the teacher, q the student; in expectation the sum is -KL(q || p). `loss_max_clamp` clips log p - log q,
    which is 0 where the teacher has no score of the token.
    """
    limit = config.distillation.loss_max_clamp
    log_ratios = [
        np.nan_to_num(sample.topk("teacher").sampled_logprobs.astype(np.float32) - sample.array("old_logprobs"))
        for sample in samples
    ]
    together = np.concatenate(log_ratios)
    metrics = {"reward/teacher": float(together.mean())}
    if limit is not None:
        metrics["actor/distillation/clamp_share"] = float((np.abs(together) > limit).mean())
        log_ratios = [each.clip(-limit, limit) for each in log_ratios]
    return [np.float32(factor) * each for each in log_ratios], metrics

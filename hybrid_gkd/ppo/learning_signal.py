"""What a policy loss learns from: the scores of a rollout as advantages of its tokens.

Shapes: B prompts, n responses each, R_i tokens of response i.
"""

from __future__ import annotations

import numpy as np

from hybrid_gkd.config import ADV_ESTIMATORS, Config
from hybrid_gkd.ppo.advantages import Arrays, load_estimator, token_rewards
from hybrid_gkd.types import Pair, Rollout, Sample, with_tasks


def needs_greedy_answers(config: Config) -> bool:
    """Whether advantages are relative to the greedy answer to each prompt."""
    return config.has_advantages and ADV_ESTIMATORS.get(config.algorithm.adv_estimator) == "greedy answer"


def answers_to_score(rollout: Rollout) -> list[Pair]:
    """Return each sample of a rollout with its task, and behind them the greedy ones, where there are any."""
    return with_tasks(rollout.tasks, (*rollout.samples, *rollout.greedy))


def with_advantages(
    config: Config, rollout: Rollout, samples: list[Sample], scores: list[float],
    values: Arrays | None = None, of_tokens: Arrays | None = None,
) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples of a rollout with their advantages, and metrics.

    `scores` are those of `answers_to_score`; empty where samples as a whole have none. `values`, a critic's of each
    sample, become signals, with what it is to learn in their place. `of_tokens`: rewards of the trained tokens of each
    sample, added to the scores; behind them perhaps those of the greedy ones.
    """
    section, n = config.algorithm, config.actor_rollout_ref.rollout.n
    lengths = [sample.num_trained for sample in samples]
    drawn, greedy = np.split(np.array(scores, np.float32), [len(lengths)])
    metrics = {"reward/mean": float(drawn.mean()), "reward/std": float(drawn.std())} if len(drawn) else {}
    rewards = token_rewards(drawn if len(drawn) else np.zeros(len(lengths)), lengths)
    if of_tokens is not None:
        rewards = [reward + each for reward, each in zip(rewards, of_tokens, strict=False)]
    baseline = values
    if rollout.greedy:
        of_greedy = (of_tokens or [])[len(lengths) :]
        places = {each.id.group: place for place, each in enumerate(rollout.greedy)}
        baseline = [
            greedy_baseline(
                sample.num_trained, greedy[place] if len(greedy) else 0.0, of_greedy[place] if of_greedy else None
            )
            for sample, place in ((sample, places[sample.id.group]) for sample in samples)
        ]
    advantages, returns = load_estimator(section.adv_estimator)(rewards, n, baseline, section)
    pairs = zip(samples, advantages, strict=True)
    samples = [sample.with_signals(advantages=np.asarray(each, np.float32)) for sample, each in pairs]
    if values is not None:
        assert returns is not None
        targets = zip(samples, values, returns, strict=True)
        samples = [sample.with_signals(values=value, returns=each) for sample, value, each in targets]
    if len(greedy):
        metrics["reward/greedy"] = float(greedy.mean())
    return samples, metrics


def greedy_baseline(length: int, score: float, of_tokens: np.ndarray | None) -> np.ndarray:
    """What remax compares the tokens of a response [R] with: what the greedy answer has from the same position on.

    That is its score at every position (as in arXiv 2310.10505), and the sum of the rewards of its tokens from there,
    0 behind its end. It depends on the prompt and the position alone, so it leaves the expected gradient as it is.
    """
    baseline = np.full(length, score, np.float64)
    if of_tokens is not None:
        from_there = np.cumsum(of_tokens[::-1], dtype=np.float64)[::-1][:length]
        baseline[: len(from_there)] += from_there
    return baseline


def teacher_rewards(
    config: Config, samples: list[Sample], factor: float
) -> tuple[Arrays, dict[str, float]]:
    """factor (log p - log q) of each sampled token, float32 [R_i], and metrics; p of the teacher, q of the student.

    Their expected sum is -KL(q || p), for `distillation.as_reward`. `loss_max_clamp` limits a log-ratio before.
    """
    limit = config.distillation.loss_max_clamp
    log_ratios = [
        sample.topk("teacher").sampled_logprobs.astype(np.float32) - sample.array("old_logprobs") for sample in samples
    ]
    together = np.concatenate(log_ratios)
    metrics = {"reward/teacher": float(together.mean())}
    if limit is not None:
        metrics["actor/distillation/clamp_share"] = float((np.abs(together) > limit).mean())
        log_ratios = [each.clip(-limit, limit) for each in log_ratios]
    return [np.float32(factor) * each for each in log_ratios], metrics

"""What a policy loss learns from: the scores of a rollout as advantages of its tokens.

Shapes: B prompts, n responses each, R_i tokens of response i.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hybrid_gkd.config import ADV_ESTIMATORS, Config
from hybrid_gkd.ppo.advantages import Arrays, load_estimator, token_rewards
from hybrid_gkd.types import Prompt, Rollout, Sequence, TrainSequence


def needs_greedy_answers(config: Config) -> bool:
    """Whether advantages are relative to the greedy answer to each prompt."""
    return config.has_advantages and ADV_ESTIMATORS.get(config.algorithm.adv_estimator) == "greedy answer"


def answers_to_score(rollout: Rollout) -> list[tuple[Prompt, Sequence]]:
    """Each response of a rollout with its prompt, and behind them the greedy answers, where there are any."""
    n = len(rollout.sequences) // len(rollout.prompts)
    pairs = [(rollout.prompts[sequence.index // n], sequence) for sequence in rollout.sequences]
    return pairs + list(zip(rollout.prompts, rollout.greedy, strict=False))


def with_advantages(
    config: Config, rollout: Rollout, sequences: list[TrainSequence], scores: list[float],
    values: Arrays | None = None, of_tokens: Arrays | None = None,
) -> tuple[list[TrainSequence], dict[str, float]]:
    """The sequences of a rollout with their advantages, and metrics.

    `scores` are those of `answers_to_score`; empty where responses as a whole have none. `values`, a critic's of each
    response, go into the sequences, with what it is to learn in their place. `of_tokens`: rewards of the tokens of each
    response, added to the scores; behind them perhaps those of the greedy answers.
    """
    section, n = config.algorithm, config.actor_rollout_ref.rollout.n
    lengths = [len(item.sequence.response_ids) for item in sequences]
    drawn, greedy = np.split(np.array(scores, np.float32), [len(lengths)])
    metrics = {"reward/mean": float(drawn.mean()), "reward/std": float(drawn.std())} if len(drawn) else {}
    rewards = token_rewards(drawn if len(drawn) else np.zeros(len(lengths)), lengths)
    if of_tokens is not None:
        rewards = [reward + each for reward, each in zip(rewards, of_tokens, strict=False)]
    baseline = values
    if rollout.greedy:
        of_greedy = (of_tokens or [])[len(lengths) :]
        baseline = [
            greedy_baseline(length, greedy[i // n] if len(greedy) else 0.0, of_greedy[i // n] if of_greedy else None)
            for i, length in enumerate(lengths)
        ]
    advantages, returns = load_estimator(section.adv_estimator)(rewards, n, baseline, section)
    pairs = zip(sequences, advantages, strict=True)
    sequences = [dataclasses.replace(item, advantages=np.asarray(each, np.float32)) for item, each in pairs]
    if values is not None:
        assert returns is not None
        targets = zip(sequences, values, returns, strict=True)
        sequences = [dataclasses.replace(item, values=value, returns=each) for item, value, each in targets]
    if len(greedy):
        metrics["reward/greedy"] = float(greedy.mean())
    return sequences, metrics


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
    config: Config, sequences: list[TrainSequence], factor: float
) -> tuple[Arrays, dict[str, float]]:
    """factor (log p - log q) of each sampled token, float32 [R_i], and metrics; p of the teacher, q of the student.

    Their expected sum is -KL(q || p), for `distillation.as_reward`. `loss_max_clamp` limits a log-ratio before.
    """
    limit = config.distillation.loss_max_clamp
    log_ratios = []
    for item in sequences:
        assert item.teacher is not None
        assert item.old_logprobs is not None
        log_ratios.append(item.teacher.sampled_logprobs.astype(np.float32) - item.old_logprobs)
    together = np.concatenate(log_ratios)
    metrics = {"reward/teacher": float(together.mean())}
    if limit is not None:
        metrics["actor/distillation/clamp_share"] = float((np.abs(together) > limit).mean())
        log_ratios = [each.clip(-limit, limit) for each in log_ratios]
    return [np.float32(factor) * each for each in log_ratios], metrics

"""What a validation reports of the answers to held-out prompts: over all of them, and by data source.

Shapes: P prompts with n answers each, R response tokens of an answer.
"""

from __future__ import annotations

import math
from collections import Counter, abc, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

import numpy as np

from hybrid_gkd.scoring.builtin_rewards import final_number, last_boxed
from hybrid_gkd.types import Generation, Sample, Task

QUARTERS = 4


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers of a validation."""

    tasks: list[Task]
    """[P]."""
    samples: list[Sample]
    """[P * n]; sample j of task i is i * n + j."""
    texts: list[str]
    """[P * n], the responses as text."""
    rewards: list[float] | None = None
    """[P * n]; None where the data has no right answers."""
    by_functions: list[float] | None = None
    """[P * n], the part of the rewards that functions give, or all of it; None without."""
    by_model: list[float] | None = None
    """[P * n], the scores of the reward model; None without one."""
    token_values: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """What validators found at every token of every answer: metric -> [P * n] arrays [R]."""

    @property
    def n(self) -> int:
        return len(self.samples) // len(self.tasks)


def source_of(task: Task) -> str:
    """The data source that a row names, or else the file that it is from."""
    return task.data_source or task.file


def validation_metrics(answers: Answers) -> dict[str, float]:
    """`val/*` of all answers and, where there are several data sources, `val/<data source>/*` of each."""
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for row, task in enumerate(answers.tasks):
        rows_of[source_of(task)].append(row)
    groups = {"val": list(range(len(answers.tasks)))}
    if len(rows_of) > 1:
        groups |= {f"val/{source}": rows for source, rows in rows_of.items()}
    found = {group: _metrics(answers, rows) for group, rows in groups.items()}
    return {f"{group}/{name}": value for group, metrics in found.items() for name, value in metrics.items()}


def _metrics(answers: Answers, rows: list[int]) -> dict[str, float]:
    """Of the answers to some of the prompts."""
    n = answers.n
    chosen = [row * n + sample for row in rows for sample in range(n)]
    samples = [answers.samples[index] for index in chosen]
    metrics = {
        "num_prompts": float(len(rows)),
        "response_length": float(np.mean([sample.num_trained for sample in samples])),
        "response_length/clip_ratio": float(np.mean([sample.status == "length" for sample in samples])),
    }
    for name, values in answers.token_values.items():
        metrics |= by_quarter(name, [values[index] for index in chosen])
    if answers.by_model is not None:
        metrics["reward_model"] = float(np.mean([answers.by_model[index] for index in chosen]))
    if answers.by_functions is not None:
        rewards = np.array([answers.by_functions[index] for index in chosen]).reshape(-1, n)
        metrics |= reward_metrics(rewards, _finals(answers, chosen) if n > 1 else [])
    return metrics


def _finals(answers: Answers, chosen: list[int]) -> list[Hashable]:
    return [final_answer(answers.texts[index], answers.tasks[index // answers.n].answer or "") for index in chosen]


def by_quarter(name: str, values: list[np.ndarray]) -> dict[str, float]:
    """The mean over all tokens, and that of the tokens in each quarter of their answer: `name/q1` is the first.

    Token r of R is in quarter floor(4 r / R) + 1, so an answer of less than four tokens is not in all of them.
    """
    tokens = np.concatenate(values).astype(np.float64)
    quarter = np.concatenate([np.arange(len(each)) * QUARTERS // len(each) for each in values])
    metrics = {name: float(tokens.mean())}
    for number in range(QUARTERS):
        if (quarter == number).any():
            metrics[f"{name}/q{number + 1}"] = float(tokens[quarter == number].mean())
    return metrics


def reward_metrics(rewards: np.ndarray, finals: abc.Sequence[Hashable]) -> dict[str, float]:
    """Mean, best and majority of the rewards [P, n]; `finals` [P * n], the final answers, are used where n > 1."""
    n = rewards.shape[1]
    metrics = {"accuracy": float(rewards.mean())}
    if n > 1:
        metrics[f"best@{n}"] = float(rewards.max(1).mean())
        votes = [finals[start : start + n] for start in range(0, len(finals), n)]
        metrics[f"maj@{n}"] = float(np.mean([majority(r, v) for r, v in zip(rewards, votes, strict=True)]))
        for k in pass_sizes(n):
            metrics[f"pass@{k}"] = pass_at_k(rewards, k)
    return metrics


def pass_sizes(n: int) -> list[int]:
    """The k of pass@k with n answers: powers of two. pass@1 is the mean."""
    return [2**power for power in range(1, n.bit_length()) if 2**power <= n]


def pass_at_k(rewards: np.ndarray, k: int) -> float:
    """The expected best of k answers to a prompt, drawn from its n without replacement; mean over prompts, [P, n].

    With the i-th smallest reward r_i it is sum_i r_i C(i - 1, k - 1) / C(n, k). For rewards of 0 and 1, c of them 1,
    that is 1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k (arXiv 2107.03374, equation 1).
    """
    n = rewards.shape[1]
    weights = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return float((np.sort(rewards, axis=1) @ np.array(weights)).mean())


def majority(rewards: np.ndarray, finals: abc.Sequence[Hashable]) -> float:
    """The reward of the final answer that most of a prompt's n answers have (self-consistency, arXiv 2203.11171).

    Of several that are equally frequent, the one that came first. The mean of their rewards, should they differ.
    """
    chosen = Counter(finals).most_common(1)[0][0]  # in the order of their first appearance
    return float(np.mean([reward for reward, final in zip(rewards, finals, strict=True) if final == chosen]))


def final_answer(text: str, right_answer: str) -> Hashable:
    """What a response ends up with: the content of its last `\\boxed{...}`, else what follows its last `####` in that
    line, else all of it; and if the right answer is a number, the last number there (None without one).

    White space, dollar signs and a full stop at the end do not count.
    """
    return final_number(_conclusion(text)) if _is_number(_conclusion(right_answer)) else _conclusion(text)


def _conclusion(text: str) -> str:
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    elif "####" in text:
        text = text.rpartition("####")[2].strip().partition("\n")[0]
    return " ".join(text.replace("$", "").split()).removesuffix(".")


def _is_number(text: str) -> bool:
    try:
        return Decimal(text.replace(",", "")).is_finite()
    except InvalidOperation:
        return False


def sample_generations(answers: Answers, num_prompts: int) -> list[Generation]:
    """All answers to so many prompts, as equally many of each data source as there are, for people to read."""
    taken: Counter[str] = Counter()
    order = []
    for row, task in enumerate(answers.tasks):
        taken[source_of(task)] += 1
        order.append((taken[source_of(task)], row))
    rewards: abc.Sequence[float | None] = answers.rewards or [None] * len(answers.samples)
    return [
        Generation(
            prompt=answers.tasks[row].text, response=answers.texts[index], answer=answers.tasks[row].answer,
            reward=rewards[index], data_source=source_of(answers.tasks[row]), sample=index - row * answers.n,
        )
        for row in sorted(row for _, row in sorted(order)[:num_prompts])
        for index in range(row * answers.n, (row + 1) * answers.n)
    ]

"""Validation metrics over all held-out prompts and by data source.

Shapes: P prompts with n completions each, R tokens of a completion.
"""

from __future__ import annotations

import math
from collections import Counter, abc, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

import numpy as np

from hybrid_gkd.scoring.builtin_rewards import final_number, last_boxed
from hybrid_gkd.types import QUARTERS, Generation, Sample, Task, quarter_of_tokens


@dataclass(frozen=True, kw_only=True)
class ValidationSamples:
    """Samples of a validation with their rewards."""

    tasks: list[Task]
    """[P]."""
    samples: list[Sample]
    """[P * n]; sample j of task i is i * n + j."""
    texts: list[str]
    """[P * n] decoded completions."""
    rewards: list[float] | None = None
    """[P * n] total rewards; None without rewards."""
    by_functions: list[float] | None = None
    """[P * n] rewards from reward functions; None without."""
    by_model: list[float] | None = None
    """[P * n] scores of the reward model; None without."""
    token_values: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Token-level values from validators: metric -> [P * n] arrays [R]."""

    @property
    def n(self) -> int:
        return len(self.samples) // len(self.tasks)


def source_of(task: Task) -> str:
    """Return the data source of a row; by default its file."""
    return task.data_source or task.file


def validation_metrics(validation: ValidationSamples) -> dict[str, float]:
    """Return `val/*` over all samples and, with several data sources, `val/<data source>/*` for each."""
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for row, task in enumerate(validation.tasks):
        rows_of[source_of(task)].append(row)
    groups = {"val": list(range(len(validation.tasks)))}
    if len(rows_of) > 1:
        groups |= {f"val/{source}": rows for source, rows in rows_of.items()}
    found = {group: _metrics(validation, rows) for group, rows in groups.items()}
    return {f"{group}/{name}": value for group, metrics in found.items() for name, value in metrics.items()}


def _metrics(validation: ValidationSamples, rows: list[int]) -> dict[str, float]:
    """Return the metrics of the samples of some prompts."""
    n = validation.n
    chosen = [row * n + sample for row in rows for sample in range(n)]
    samples = [validation.samples[index] for index in chosen]
    metrics = {
        "num_prompts": float(len(rows)),
        "response_length": float(np.mean([sample.num_trained for sample in samples])),
        "response_length/clip_ratio": float(np.mean([sample.status == "length" for sample in samples])),
    }
    for name, values in validation.token_values.items():
        metrics |= by_quarter(name, [values[index] for index in chosen])
    if validation.by_model is not None:
        metrics["reward_model"] = float(np.mean([validation.by_model[index] for index in chosen]))
    if validation.by_functions is not None:
        rewards = np.array([validation.by_functions[index] for index in chosen]).reshape(-1, n)
        metrics |= reward_metrics(rewards, _finals(validation, chosen) if n > 1 else [])
    return metrics


def _finals(validation: ValidationSamples, chosen: list[int]) -> list[Hashable]:
    tasks = [validation.tasks[index // validation.n] for index in chosen]
    return [final_answer(validation.texts[i], task.answer or "") for i, task in zip(chosen, tasks, strict=True)]


def by_quarter(name: str, values: list[np.ndarray]) -> dict[str, float]:
    """Return the mean over all tokens (`name`) and over those in each quarter of their completion (`name/q1`, ...).

    A completion of less than four tokens does not reach all quarters. Nothing is returned without tokens.
    """
    tokens = np.concatenate(values).astype(np.float64)
    quarter = np.concatenate([quarter_of_tokens(len(each)) for each in values])
    metrics = {name: float(tokens.mean())} if len(tokens) else {}
    for number in range(QUARTERS):
        if (quarter == number).any():
            metrics[f"{name}/q{number + 1}"] = float(tokens[quarter == number].mean())
    return metrics


def reward_metrics(rewards: np.ndarray, finals: abc.Sequence[Hashable]) -> dict[str, float]:
    """Return mean, best, majority and pass@k of rewards [P, n]; `finals` [P * n] are the final answers, for n > 1."""
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
    """Return the k of pass@k for n completions: powers of two from 2 (pass@1 is the mean)."""
    return [2**power for power in range(1, n.bit_length()) if 2**power <= n]


def pass_at_k(rewards: np.ndarray, k: int) -> float:
    """Return the expected best of k rewards drawn from a prompt's n without replacement, averaged over prompts [P, n].

    With the i-th smallest reward r_i it is sum_i r_i C(i - 1, k - 1) / C(n, k). For rewards of 0 and 1, c of them 1,
    it equals 1 - C(n - c, k) / C(n, k), the unbiased estimator of pass@k (arXiv 2107.03374, equation 1).
    """
    n = rewards.shape[1]
    weights = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return float((np.sort(rewards, axis=1) @ np.array(weights)).mean())


def majority(rewards: np.ndarray, finals: abc.Sequence[Hashable]) -> float:
    """Return the reward of the most frequent final answer among n completions (self-consistency, arXiv 2203.11171).

    The first of equally frequent ones wins. The result is the mean if completions with this final answer differ.
    """
    chosen = Counter(finals).most_common(1)[0][0]  # ties: in the order of first appearance
    return float(np.mean([reward for reward, final in zip(rewards, finals, strict=True) if final == chosen]))


def final_answer(text: str, right_answer: str) -> Hashable:
    """Extract the final answer of a completion.

    It is the content of the last `\\boxed{...}`, else the rest of the line after the last `####`, else the whole text.
    If the right answer is a number, it is the last number in there, or None. White space, dollar signs and a trailing
    full stop are removed.
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


def select_generations(validation: ValidationSamples, num_prompts: int) -> list[Generation]:
    """Return all completions of `num_prompts` prompts for logging, taken evenly from the data sources."""
    taken: Counter[str] = Counter()
    order = []
    for row, task in enumerate(validation.tasks):
        taken[source_of(task)] += 1
        order.append((taken[source_of(task)], row))
    rewards: abc.Sequence[float | None] = validation.rewards or [None] * len(validation.samples)
    return [
        Generation(
            prompt=validation.tasks[row].text, response=validation.texts[index], answer=validation.tasks[row].answer,
            reward=rewards[index], data_source=source_of(validation.tasks[row]), sample=index - row * validation.n,
        )
        for row in sorted(row for _, row in sorted(order)[:num_prompts])
        for index in range(row * validation.n, (row + 1) * validation.n)
    ]

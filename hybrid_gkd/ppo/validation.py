"""What a validation reports of the answers to held-out prompts."""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Callable

import numpy as np

from hybrid_gkd.types import Generation, Prompt, Sequence

Pairs = list[tuple[Prompt, Sequence]]
"""Each prompt with the answer to it, in the order of the answers' index."""


def answer_metrics(pairs: Pairs, rewards: abc.Sequence[float] | None) -> dict[str, float]:
    """`val/*` of the answers; `val/accuracy` where they have rewards."""
    metrics = {
        "val/response_length": float(np.mean([len(sequence.response_ids) for _, sequence in pairs])),
        "val/num_prompts": float(len(pairs)),
    }
    return metrics if rewards is None else metrics | {"val/accuracy": float(np.mean(rewards))}


def sample_generations(
    pairs: Pairs, rewards: abc.Sequence[float] | None, decode: Callable[[Sequence], str]
) -> list[Generation]:
    """The answers as text, for people to read; `rewards` of at least these."""
    return [
        Generation(prompt=prompt.text, response=decode(sequence), answer=prompt.answer, reward=reward)
        for (prompt, sequence), reward in zip(pairs, rewards or itertools.repeat(None), strict=False)
    ]

"""Rewards of responses: from token ids to a number each, with the row of the data in every message."""

from __future__ import annotations

import math
from typing import Any

from hybrid_gkd.config import RewardConfig
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.ppo.rewards import Reward
from hybrid_gkd.types import Prompt, Sequence
from hybrid_gkd.waiting import Timeout, waiting


def decode(tokenizer: Any, sequence: Sequence) -> str:
    """A response as text, without special tokens."""
    return tokenizer.decode(sequence.response_ids.tolist(), skip_special_tokens=True)


class Scorer:
    """Applies a reward function to responses.

    Args:
        reward: score of a response given the answer.
        tokenizer: decodes responses.
        section: the configuration that the function comes from.
    """

    def __init__(self, reward: Reward, tokenizer: Any, section: RewardConfig):
        self.reward, self.tokenizer, self.section = reward, tokenizer, section

    def scores(self, pairs: list[tuple[Prompt, Sequence]]) -> list[float]:
        """Of responses to their prompts. Raises TrainingError that names the row of the data."""
        found: list[float] = []
        own, seconds = self.section.custom_reward_function, self.section.timeout
        limit = Timeout(seconds, "reward.timeout") if own.path and math.isfinite(seconds) else None

        def detail() -> str:
            row = pairs[min(len(found), len(pairs) - 1)][0].index
            return f"{len(found)} of {len(pairs)} responses are scored, now one to row {row} of the data"

        whom = f"{own.path}:{own.name}" if own.path else self.section.name
        with waiting(f"the reward function {whom}", limit, detail) as wait:
            for prompt, sequence in pairs:
                wait.restart_timeout()
                found.append(self._score(prompt, sequence))
        return found

    def _score(self, prompt: Prompt, sequence: Sequence) -> float:
        if prompt.answer is None:
            raise TrainingError(f"row {prompt.index} of the data has no answer to compute a reward from")
        try:
            return self.reward(decode(self.tokenizer, sequence), prompt.answer)
        except TrainingError as error:
            raise TrainingError(f"row {prompt.index} of the data: {error}") from error

"""Reward model: the text that it reads, and its scores from the workers."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.config import MODEL, Config
from hybrid_gkd.data.chat_template import plain_text, renderer
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.models.tokenizer import decode
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring.reward_functions import Score
from hybrid_gkd.types import Pair, RewardText, Sample, Task

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

TRUNCATED = f"{MODEL}_truncated"
"""Metric of a score: 1 if the text was truncated, else 0."""


@dataclass(frozen=True)
class RewardTexts:
    """Tokenizes prompts and completions for the reward model."""

    tokenizer: Any
    """The student's tokenizer."""
    own: Any = None
    """The reward model's tokenizer; None to pass on the student's tokens."""
    max_length: int | None = None
    """Maximum number of tokens; None for no limit."""

    def tokens(self, task: Task, sample: Sample) -> np.ndarray:
        """Return the tokens of the whole text, int32 [T]. Raises DataError: the chat template fails or is missing."""
        if self.own is None:
            return sample.tokens
        assert task.messages is not None
        answer = decode(self.tokenizer, task, sample)
        if not self.own.chat_template:
            prompt = plain_text(task.messages, task.tools, f"{task.where}: reward_model.model.path")
            return np.array(self.own(f"{prompt}\n{answer}").input_ids, np.int32)
        chat = [*task.messages, {"role": "assistant", "content": answer}]
        text = renderer(self.own, {}, f"{task.where}: reward_model.model.path")(chat, tools=task.tools)
        return np.array(self.own(text, add_special_tokens=False).input_ids, np.int32)


class RewardModelScorer:
    """Scores completions with the reward model, which the workers run in a separate phase after a rollout."""

    def __init__(self, config: Config, group: WorkerGroup, texts: RewardTexts, clock: Clock):
        self.group, self.texts, self.clock = group, texts, clock
        section, actor = config.reward_model, config.actor_rollout_ref.actor
        self.max_tokens = section.forward_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        self.balance = config.trainer.balance_batch

    def scores(self, pairs: list[Pair]) -> list[Score]:
        """Score samples. Raises TrainingError: a score is not finite; DataError as `RewardTexts.tokens` does."""
        whole = [self.texts.tokens(*pair) for pair in pairs]
        texts = [ids[: self.texts.max_length] for ids in whole]
        cut = [len(ids) > len(text) for ids, text in zip(whole, texts, strict=True)]
        if any(cut):
            longest = max(map(len, whole))
            logger.warning(
                "%d of %d texts for the reward model are truncated to %d tokens (reward_model.max_length, or its "
                "max_position_embeddings); the longest has %d", sum(cut), len(cut), self.texts.max_length, longest,
            )  # fmt: skip
        found = self.group.compute_reward_scores(self._plan(texts))
        for index, (task, _) in enumerate(pairs):
            if not math.isfinite(found[index]):
                raise TrainingError(f"{task.where}: the reward model's score is {found[index]}")
        return [Score(found[index], {TRUNCATED: float(each)}) for index, each in enumerate(cut)]

    def _plan(self, texts: list[np.ndarray]) -> list[tuple[tuple[RewardText, ...], ...]]:
        """Return the micro-batches of each worker, equally many for all."""
        lengths = [len(text) for text in texts]
        limit = max(self.max_tokens, *lengths)
        cost = self.group.attention_cost
        plan = plan_micro_batches(lengths, self.group.size, limit, None, self.balance, attention_cost=cost)
        return [
            tuple(tuple(RewardText(index=i, token_ids=texts[i]) for i in micro_batch) for micro_batch in share)
            for share in plan
        ]

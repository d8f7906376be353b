"""The reward model's part of a reward: what it reads of a prompt and a response, and asking the workers for scores."""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.config import MODEL, Config
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.data.prompts import plain_text
from hybrid_gkd.errors import DataError, TrainingError, describe_error
from hybrid_gkd.models.tokenizer import decode
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring.reward_functions import Score
from hybrid_gkd.types import Pair, RewardText, Sample, Task

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

TRUNCATED = f"{MODEL}_truncated"
"""Beside a score: whether the text lost its end, 1 or 0."""


@dataclass(frozen=True)
class RewardTexts:
    """From a prompt and a response to the tokens that the reward model reads."""

    tokenizer: Any
    """The student's."""
    own: Any = None
    """The reward model's; None where texts are the student's tokens as they are."""
    max_length: int | None = None
    """Tokens that it reads; None: any number."""

    def tokens(self, task: Task, sample: Sample) -> np.ndarray:
        """Of the whole text, int32 [T]. Raises DataError: its chat template refuses the chat, or it needs one."""
        if self.own is None:
            return sample.tokens
        assert task.messages is not None
        answer = decode(self.tokenizer, sample)
        if not self.own.chat_template:
            prompt = plain_text(task.messages, task.tools, f"row {task.row} of the data: reward_model.model.path")
            return np.array(self.own(f"{prompt}\n{answer}").input_ids, np.int32)
        chat = [*task.messages, {"role": "assistant", "content": answer}]
        try:
            text = self.own.apply_chat_template(
                chat, tools=task.tools, add_generation_prompt=False, tokenize=False
            )
        except Exception as error:  # a template is a program, which refuses roles or their order in its own way
            reason = f"the chat template of reward_model.model.path refuses it: {describe_error(error)}"
            raise DataError(f"row {task.row} of the data: {reason}") from error
        return np.array(self.own(text, add_special_tokens=False).input_ids, np.int32)


class RewardModelTurn:
    """What a `RewardScorer` asks of the reward model. The workers compute it in a phase of its own, after a rollout."""

    def __init__(self, config: Config, group: WorkerGroup, texts: RewardTexts, clock: Clock):
        self.group, self.texts, self.clock = group, texts, clock
        section, actor = config.reward_model, config.actor_rollout_ref.actor
        self.max_tokens = section.forward_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        self.balance = config.trainer.balance_batch

    def span(self) -> contextlib.AbstractContextManager[None]:
        """Around the scores of a training step, for its times."""
        return self.clock.span("reward_model")

    def scores(self, pairs: list[Pair]) -> list[Score]:
        """Of responses to their prompts. Raises TrainingError: a score is not finite; DataError as `tokens`."""
        whole = [self.texts.tokens(*pair) for pair in pairs]
        texts = [ids[: self.texts.max_length] for ids in whole]
        cut = [len(ids) > len(text) for ids, text in zip(whole, texts, strict=True)]
        if any(cut):
            longest = max(map(len, whole))
            logger.warning(
                "%d of %d texts for the reward model lose their end: it reads %d tokens (reward_model.max_length, or "
                "its positions), and the longest has %d", sum(cut), len(cut), self.texts.max_length, longest,
            )  # fmt: skip
        found = self.group.compute_reward_scores(self._plan(texts))
        for index, (task, _) in enumerate(pairs):
            if not math.isfinite(found[index]):
                raise TrainingError(f"row {task.row} of the data: the reward model's score is {found[index]}")
        return [Score(found[index], {TRUNCATED: float(each)}) for index, each in enumerate(cut)]

    def _plan(self, texts: list[np.ndarray]) -> list[tuple[tuple[RewardText, ...], ...]]:
        """For each worker its micro-batches, the same number for each."""
        lengths = [len(text) for text in texts]
        limit = max(self.max_tokens, *lengths)
        cost = self.group.attention_cost
        plan = plan_micro_batches(lengths, self.group.size, limit, None, self.balance, attention_cost=cost)
        return [
            tuple(tuple(RewardText(index=i, token_ids=texts[i]) for i in micro_batch) for micro_batch in share)
            for share in plan
        ]

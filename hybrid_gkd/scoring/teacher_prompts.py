"""Prompts of the teacher that depend on completions, from a function of the user (`distillation.teacher_prompt_fn`).

The function runs in the trainer's process, in a thread of its own with the deadline `reward.timeout` for each prompt.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from types import MappingProxyType
from typing import Any

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.data.chat_template import tokenize_chat
from hybrid_gkd.data.prompts import check_messages
from hybrid_gkd.errors import ConfigError, TrainingError
from hybrid_gkd.models.tokenizer import decode
from hybrid_gkd.runtime.imports import load_object
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.scoring.rewards import RewardScorer
from hybrid_gkd.scoring.scorer import scored
from hybrid_gkd.types import Pair, Sample, SampleId, Task

KEY = "distillation.teacher_prompt_fn"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Sample):
    """Argument of the function: a sample with its text."""

    text: str
    """The completion without special tokens."""

    @property
    def reward(self) -> float | None:
        """Return the reward of the completion; None if the run computes none."""
        return float(self.array("rewards").sum()) if "rewards" in self.signals else None


PromptFunction = Callable[[Task, Completion, tuple[Completion, ...]], Any]
Prompts = tuple[list[Pair], list[SampleId]]
"""Samples with tasks that have the teacher's prompts, and the ids of the samples that get no teacher."""


class TaskPrompts:
    """The teacher's prompts are those of the tasks, known before the completions."""

    waits_for_rewards = False
    """Whether prompts need rewards that are computed for a whole rollout, by a reward model or a batch function."""

    def finished(self, pairs: list[Pair]) -> Prompts:
        """Add finished samples of rollouts; return those whose prompts are known now."""
        return self.of_groups(pairs)

    def of_groups(self, pairs: list[Pair]) -> Prompts:
        """Return the prompts of whole groups."""
        return pairs, []


class CompletionPrompts(TaskPrompts):
    """The teacher's prompts are returned by a function of the task, a sample and its group.

    Args:
        config: the whole configuration.
        tokenizer: decodes completions and encodes prompts.
        rewards: computes the rewards that the samples have; None without.
        templates: the teachers' chat templates by `Task.teacher`; others take the tokenizer's.

    Raises ConfigError: the function cannot be imported or does not take three arguments.
    """

    def __init__(
        self, config: Config, tokenizer: Any, rewards: RewardScorer | None,
        templates: Mapping[str, str] = MappingProxyType({}),
    ):
        assert config.distillation.teacher_prompt_fn is not None
        self._config, self._tokenizer, self._rewards, self._templates = config, tokenizer, rewards, templates
        self._function = load_prompt_function(config.distillation.teacher_prompt_fn)
        self.waits_for_rewards = rewards is not None and (
            rewards.model is not None or any(function.needs_all for function in rewards.functions.values())
        )
        self._incomplete: dict[tuple[int, int], list[Pair]] = {}
        """Finished samples by group, of the groups with unfinished samples."""

    def finished(self, pairs: list[Pair]) -> Prompts:
        """Add finished samples; return those of the groups that are complete now. Raises as `of_groups`."""
        complete = list[Pair]()
        for pair in pairs:
            key, size = pair[1].id.group, self._config.actor_rollout_ref.rollout.n
            group = self._incomplete.setdefault(key, [])
            group.append(pair)
            if len(group) == (1 if pair[1].status == "given" else size):
                complete += self._incomplete.pop(key)
        return self.of_groups(complete)

    def of_groups(self, pairs: list[Pair]) -> Prompts:
        """Return the prompts of whole groups.

        Raises TrainingError or DataError that names the function and the row: the function raised, took longer than
        `reward.timeout`, or its result is no prompt or too long.
        """
        if not pairs:
            return [], []
        samples = [sample for _, sample in pairs] if self._rewards is None else scored(self._rewards, pairs)
        completions, groups = dict[SampleId, Completion](), defaultdict[tuple[int, int], list[Completion]](list)
        for (task, _), sample in sorted(zip(pairs, samples, strict=True), key=lambda each: each[1].id):
            values = {each.name: getattr(sample, each.name) for each in dataclasses.fields(Sample)}
            completions[sample.id] = Completion(**values, text=decode(self._tokenizer, task, sample))
            groups[sample.id.group].append(completions[sample.id])
        calls = [(task, completions[sample.id], tuple(groups[sample.id.group])) for task, sample in pairs]
        found, unscored = list[Pair](), list[SampleId]()
        for (task, sample), prompt in zip(pairs, self._ask(calls), strict=True):
            if prompt is None:
                unscored.append(sample.id)
            else:
                ids = self._token_ids(task, prompt, self._where(task, sample))
                found.append((dataclasses.replace(task, teacher_ids=ids), sample))
        return found, unscored

    def _where(self, task: Task, sample: Sample) -> str:
        return f"{KEY}={self._config.distillation.teacher_prompt_fn}, {task.where}, sample {sample.id.number}"

    def _ask(self, calls: list[tuple[Task, Completion, tuple[Completion, ...]]]) -> list[Any]:
        """Call the function; return its results. Raises TrainingError: it raised, or took too long."""
        limit = Timeout(self._config.reward.timeout, "reward.timeout")
        seconds = None if limit.seconds == math.inf else limit.seconds
        futures, found = [Future[Any]() for _ in calls], list[Any]()
        # A daemon thread: a function that hangs must not keep the run from ending.
        threading.Thread(target=_answer, args=(self._function, calls, futures), name=KEY, daemon=True).start()
        with waiting(KEY, limit if seconds else None, lambda: f"{len(found)} of {len(calls)} prompts") as waited:
            for (task, sample, _), future in zip(calls, futures, strict=True):
                wait([future], timeout=seconds)
                if not future.done():
                    raise TrainingError(f"{self._where(task, sample)}: no prompt within {limit}")
                if (error := future.exception()) is not None:
                    rule = f"raised {type(error).__name__}: {error}"
                    raise TrainingError(f"{self._where(task, sample)}: {rule}") from error
                found.append(future.result())
                waited.restart_timeout()
        return found

    def _token_ids(self, task: Task, prompt: Any, where: str) -> np.ndarray:
        """Return a prompt's token ids, int32. Raises DataError: it is no prompt, or too long."""
        data = self._config.data
        ids = tokenize_chat(
            check_messages(prompt, where), self._tokenizer, data.apply_chat_template_kwargs, where,
            self._templates.get(task.teacher), task.tools,
        )  # fmt: skip
        own = data.max_teacher_prompt_length
        key, limit = ("teacher_", own) if own is not None else ("", data.max_prompt_length)
        if len(ids) > limit:
            rule = f"the prompt has {len(ids)} tokens, the limit is data.max_{key}prompt_length={limit}"
            raise TrainingError(f"{where}: {rule}")
        return np.asarray(ids, np.int32)


def load_prompt_function(import_path: str) -> PromptFunction:
    """Return the function. Raises ConfigError: it cannot be imported or does not take three arguments."""
    function: PromptFunction = load_object(KEY, import_path)
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise ConfigError(KEY, f"must take the arguments task, sample, group: {error}", import_path) from error
    return function


def _answer(function: PromptFunction, calls: list[Any], futures: list[Future[Any]]) -> None:
    """Call the function, until it raises; the waiting thread handles whatever a user's code raises."""
    for call, future in zip(calls, futures, strict=True):
        try:
            future.set_result(function(*call))
        except BaseException as error:
            future.set_exception(error)
            return

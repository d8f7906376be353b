"""Rewards of responses: the weighted sum of what reward functions and reward model say of each.

Functions that can hang are computed in processes (reward_pool.py) from the moment on that a response leaves the engine;
the others, which are quick, and the reward model, when the rewards are asked for. Messages name the row of the data.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.config import CUSTOM, MODEL, Config
from hybrid_gkd.errors import DataError, TrainingError
from hybrid_gkd.models.tokenizer import decode
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.scoring.builtin_rewards import Response, overlong_penalty, wrong_answer
from hybrid_gkd.scoring.reward_functions import Outcome, RewardFunction, Score, checked, one_by_one
from hybrid_gkd.scoring.scorer import done
from hybrid_gkd.types import Arrays, Pair, SampleId, Signal

if TYPE_CHECKING:
    from hybrid_gkd.scoring.reward_model import RewardModelTurn
    from hybrid_gkd.scoring.reward_pool import RewardPool

logger = logging.getLogger(__name__)

LATE_SECONDS = 60.0
"""Grace period: processes are killed at their own deadline; with no response done this much later, they have not been
replaced."""
SAID = 3
"""Failures of a function that are logged for a rollout, one by one."""
Reward = Callable[[str, str], float]


def token_rewards(scores: Iterable[float], lengths: list[int]) -> Arrays:
    """Return scores of whole samples as rewards of their tokens, float32 [R] each: at the last one, if there is one."""
    rewards = [np.zeros(length, np.float32) for length in lengths]
    for reward, score in zip(rewards, scores, strict=True):
        reward[-1:] = score
    return rewards


@dataclass
class _Entry:
    """A response with what is known of its reward."""

    row: int
    response: Response
    alive: weakref.ref[np.ndarray]
    outcomes: dict[str, Future[Outcome]] = field(default_factory=dict)
    """By function, of those that the pool computes."""
    scores: dict[str, Score] = field(default_factory=dict)
    """By function; of the reward model under MODEL."""
    failed: bool = False
    """Whether a function has no score of it, and another value counts."""


class RewardScorer:
    """Applies the reward functions of a run to responses. Close it: it may have processes.

    Args:
        functions: by name.
        tokenizer: decodes responses.
        config: the whole configuration.
        model: the reward model, where there is one.
        clock: gets the spans `reward`.
        weights: of functions and model by name; None: those of the configuration.
    """

    name = "rewards"

    def __init__(
        self, functions: dict[str, RewardFunction], tokenizer: Any, config: Config,
        model: RewardModelTurn | None = None, clock: Clock | None = None, weights: dict[str, float] | None = None,
    ):  # fmt: skip
        self.functions, self.tokenizer, self.config, self.model = functions, tokenizer, config, model
        self.section, self._clock = config.reward, clock or Clock()
        self._is_waited_for = config.actor_rollout_ref.hybrid_engine or not config.algorithm.filter_groups.enable
        """Else a background thread scores what it has generated, while the trainer does something else."""
        known = {*functions, *([MODEL] if model is not None else [])}
        weights = config.reward_weights if weights is None else weights
        self._weights = {name: weight for name, weight in weights.items() if name in known}
        self._pool: RewardPool | None = None
        self._lock = threading.Lock()  # a rollout may be generated in another thread while one is scored
        self._entries: dict[SampleId, _Entry] = {}
        """Of the samples whose tokens, which copies of a sample share, still exist."""

    @classmethod
    def of(cls, function: Reward, tokenizer: Any, config: Config, clock: Clock) -> RewardScorer:
        """Of a plain function (response, answer), which is called in this process."""
        compute = one_by_one(lambda response: function(response.text, response.right_answer))
        given = RewardFunction(CUSTOM, getattr(function, "__name__", "given"), compute)
        return cls({CUSTOM: given}, tokenizer, config, clock=clock, weights={CUSTOM: 1.0})

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._pool is not None:
            self._pool.close()

    def begin(self, pairs: Iterable[Pair]) -> None:
        """Have the processes compute what they can of responses that have just been finished; returns at once."""
        if any(function.can_hang for function in self.functions.values()):
            entries = [self._entry(pair) for pair in pairs]
            for function in self.functions.values():
                if not function.needs_all:
                    self._submit(function, entries)

    def scores(self, pairs: list[Pair], *, in_training: bool = False) -> list[float]:
        """Of responses to their prompts: the weighted sum of the functions and the reward model.

        Raises TrainingError or DataError that names the row of the data: there is no score of it.
        """
        entries = [self._entry(pair) for pair in pairs]
        for function in self.functions.values():
            self._submit(function, entries)
        with self.model.span() if self.model is not None and in_training else contextlib.nullcontext():
            self._ask_model(pairs)
        if self.functions:
            timed = in_training and self._is_waited_for
            with self._clock.span("reward") if timed else contextlib.nullcontext():
                self._wait_for_functions(entries)
        return [self._sum(entry, self._weights) for entry in entries]

    def of_validation(self, pairs: list[Pair]) -> dict[str, list[float]]:
        """The scores, and where there are any the accuracy by functions and what the reward model says: for `Answers`.

        Raises as `scores`.
        """
        found = {"rewards": self.scores(pairs)}
        entries = [self._entry(pair) for pair in pairs]
        if self.functions:
            found["by_functions"] = [self._sum(entry, self.functions, accuracy=True) for entry in entries]
        if self.model is not None:
            found["by_model"] = [entry.scores[MODEL].value for entry in entries]
        return found

    def _sum(self, entry: _Entry, names: Iterable[str], *, accuracy: bool = False) -> float:
        """Weighted, of the scores; or of the number `acc` beside them, where a function returns one."""
        scores = [(self._weights[name], entry.scores[name]) for name in names]
        return sum(w * (score.metrics.get("acc", score.value) if accuracy else score.value) for w, score in scores)

    def _ask_model(self, pairs: list[Pair]) -> None:
        """Have the reward model score what it has not."""
        new = [pair for pair in pairs if self.model is not None and MODEL not in self._entry(pair).scores]
        if new and self.model is not None:
            for pair, score in zip(new, self.model.scores(new), strict=True):
                self._entry(pair).scores[MODEL] = score

    def _wait_for_functions(self, entries: list[_Entry]) -> None:
        """Raises as `scores`."""
        whom = ", ".join(function.label for function in self.functions.values())
        pooled = math.isfinite(self.section.timeout) and any(f.can_hang for f in self.functions.values())
        limit = Timeout(self.section.timeout, "reward.timeout") if pooled else None
        done = failed = 0

        def detail() -> str:
            now = f", now one to row {entries[done].row} of the data" if done < len(entries) else ""
            return f"{done} of {len(entries)} responses are scored{now}"

        with waiting(f"the reward function {whom}", limit, detail) as wait:
            for entry in entries:
                for function in self.functions.values():
                    if function.name not in entry.scores:
                        outcome = self._outcome(function, entry, wait.restart_timeout)
                        failed += not isinstance(outcome, Score)
                        entry.failed |= not isinstance(outcome, Score)
                        entry.scores[function.name] = self._score(function, entry, outcome, say=failed <= SAID)
                done += 1
        if failed > SAID:
            logger.warning("%d responses in all have no score, see the first %d above", failed, SAID)

    def submit(self, pairs: list[Pair]) -> list[Future[Signal]]:
        """Wait for what is trained on, see `rewards`; a score is at the last token. Raises as `scores`."""
        lengths = [sample.num_trained for _, sample in pairs]
        return [done(each) for each in token_rewards(self.rewards(pairs), lengths)]

    def rewards(self, pairs: list[Pair]) -> list[float]:
        """What is trained on: the scores, and the penalty on long responses where there is one. Raises as `scores`."""
        found = self.scores(pairs, in_training=True)
        if not self.section.overlong_buffer.enable:
            return found
        return [score + self._penalty(pair) for score, pair in zip(found, pairs, strict=True)]

    def accuracies(self, pairs: list[Pair]) -> list[float]:
        """The number `acc` that a function returns beside its score, and the score where none does. Raises as `scores`.

        So does verl's reward manager dapo.
        """
        found = zip(self.scores(pairs), map(self._entry, pairs), strict=True)
        return [
            next((each.metrics["acc"] for each in entry.scores.values() if "acc" in each.metrics), score)
            for score, entry in found
        ]

    def metrics(self, pairs: list[Pair]) -> dict[str, float]:
        """Of responses whose rewards are known: `reward/<name>/mean` of each of several parts and of what else one of
        them has found, and `reward/failures` where functions can fail."""
        entries = [self._entry(pair) for pair in pairs]
        found: defaultdict[str, list[float]] = defaultdict(list)
        for entry in entries:
            for name, score in entry.scores.items():
                for key, value in (score.metrics | ({name: score.value} if len(self._weights) > 1 else {})).items():
                    found[key].append(value)
        if self.section.overlong_buffer.enable:
            found["overlong"] = [self._penalty(pair) for pair in pairs]
        metrics = {f"reward/{name}/mean": float(np.mean(values)) for name, values in found.items()}
        if self._pool is not None:
            metrics["reward/failures"] = float(np.mean([entry.failed for entry in entries]))
        return metrics

    def _entry(self, pair: Pair) -> _Entry:
        task, sample = pair
        key = sample.id
        if key not in self._entries:
            response = Response(
                text=decode(self.tokenizer, sample), answer=task.answer, data_source=task.data_source,
                extra_info=task.extra_info, share_of_limit=sample.num_trained / self.config.data.max_response_length,
            )  # fmt: skip
            alive = weakref.ref(sample.tokens, lambda _: self._entries.pop(key, None))
            self._entries[key] = _Entry(task.row, response, alive)
        return self._entries[key]

    def _submit(self, function: RewardFunction, entries: list[_Entry]) -> None:
        """Have the pool compute what it has not been given yet."""
        new = [entry for entry in entries if function.name not in entry.outcomes and function.name not in entry.scores]
        if not new or not function.can_hang:
            return
        with self._lock:
            if self._pool is None:
                from hybrid_gkd.scoring.reward_pool import RewardPool  # only here is it needed

                self._pool = RewardPool(self.section)
        futures = self._pool.submit(function, [entry.response for entry in new])
        for entry, future in zip(new, futures, strict=True):
            entry.outcomes[function.name] = future

    def _outcome(self, function: RewardFunction, entry: _Entry, progress: Callable[[], None]) -> Outcome:
        """Raises TrainingError: the processes have ended, or do not answer."""
        if function.name not in entry.outcomes:
            return function.compute([entry.response])[0]
        assert self._pool is not None
        future, seen = entry.outcomes[function.name], -1
        late = None if self.section.timeout == math.inf else self.section.timeout + LATE_SECONDS
        while True:
            try:
                outcome = future.result(late)
                progress()
                return outcome
            except TimeoutError:
                if self._pool.num_done == seen:
                    raise TrainingError(
                        f"row {entry.row} of the data: the processes that compute the reward {function.label} do not "
                        f"answer ({late:.0f} s without any score)"
                    ) from None
                seen = self._pool.num_done
                progress()

    def _score(self, function: RewardFunction, entry: _Entry, outcome: Outcome, *, say: bool) -> Score:
        """What counts for an outcome. Raises TrainingError or DataError where the run is to end."""
        if isinstance(outcome, Score):
            return outcome
        if outcome.of_data:
            raise DataError(f"row {entry.row} of the data: {outcome.reason}")
        text = (
            f"row {entry.row} of the data: the reward {function.label} {outcome.reason}, for the answer "
            f"{(entry.response.answer or '')[:80]!r} and a response that starts with {entry.response.text[:80]!r}"
        )
        value = self.section.score_on_error if function.is_own else wrong_answer(function.name, entry.response)
        if value is None:
            raise TrainingError(text)
        score = checked(value)
        assert isinstance(score, Score)
        if say:
            logger.warning("%s; it counts as %g", text, score.value)
        return score

    def _penalty(self, pair: Pair) -> float:
        limit = self.config.data.max_response_length
        return overlong_penalty(pair[1].num_trained, limit, self.section.overlong_buffer)

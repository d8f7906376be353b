"""Rewards of completions: the weighted sum of reward functions and the reward model.

Functions that can hang run in separate processes (reward_pool.py), starting when a completion leaves the engine. The
others, which are fast, and the reward model run when the rewards are requested. Messages name the row of the data.
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
from hybrid_gkd.scoring.builtin_rewards import Response, lowest_score, overlong_penalty
from hybrid_gkd.scoring.reward_functions import Outcome, RewardFunction, Score, as_outcome, one_by_one
from hybrid_gkd.scoring.scorer import completed_future
from hybrid_gkd.types import Arrays, Pair, SampleId, Signal

if TYPE_CHECKING:
    from hybrid_gkd.scoring.reward_model_scorer import RewardModelScorer
    from hybrid_gkd.scoring.reward_pool import RewardPool

logger = logging.getLogger(__name__)

GRACE_SECONDS = 60.0
"""Margin after `reward.timeout`, at which processes are replaced; a pool without progress by then counts as hung."""
NUM_LOGGED = 3
"""Failures that are logged one by one per rollout."""
Reward = Callable[[str, str], float]


def token_rewards(scores: Iterable[float], lengths: list[int]) -> Arrays:
    """Convert scores of whole samples to token-level rewards, float32 [R] each: the score is at the last token."""
    rewards = [np.zeros(length, np.float32) for length in lengths]
    for reward, score in zip(rewards, scores, strict=True):
        reward[-1:] = score
    return rewards


@dataclass
class _Entry:
    """A completion and its scores so far."""

    where: str
    """Beginning of messages: the row of the prompt."""
    response: Response
    alive: weakref.ref[np.ndarray]
    outcomes: dict[str, Future[Outcome]] = field(default_factory=dict)
    """Futures by function, for functions in the pool."""
    scores: dict[str, Score] = field(default_factory=dict)
    """Scores by function; that of the reward model is under MODEL."""
    failed: bool = False
    """Whether a function failed and a default score is used."""


class RewardScorer:
    """Computes the rewards of a run's completions. Must be closed: it may own processes.

    Args:
        functions: reward functions by name.
        tokenizer: decodes completions.
        config: the whole configuration.
        model: the reward model, if any.
        clock: records the spans `reward`.
        weights: weights of functions and reward model by name; None for those of the configuration.
    """

    name = "rewards"

    def __init__(
        self, functions: dict[str, RewardFunction], tokenizer: Any, config: Config,
        model: RewardModelScorer | None = None, clock: Clock | None = None, weights: dict[str, float] | None = None,
    ):  # fmt: skip
        self.functions, self.tokenizer, self.config, self.model = functions, tokenizer, config, model
        self.section, self._clock = config.reward, clock or Clock()
        self._is_timed = config.actor_rollout_ref.hybrid_engine or not config.algorithm.filter_groups.enable
        """Whether the trainer waits for rewards; otherwise a background thread generates and scores."""
        known = {*functions, *([MODEL] if model is not None else [])}
        weights = config.reward_weights if weights is None else weights
        self._weights = {name: weight for name, weight in weights.items() if name in known}
        self._pool: RewardPool | None = None
        self._lock = threading.Lock()  # a background thread may generate a rollout while another is scored
        self._entries: dict[SampleId, _Entry] = {}
        """Entries of the samples whose token array, shared by copies of a sample, is still alive."""

    @classmethod
    def of(cls, function: Reward, tokenizer: Any, config: Config, clock: Clock) -> RewardScorer:
        """Build a scorer from a plain function (response, answer), called in this process."""
        compute = one_by_one(lambda response: function(response.text, response.right_answer))
        given = RewardFunction(CUSTOM, getattr(function, "__name__", "given"), compute)
        return cls({CUSTOM: given}, tokenizer, config, clock=clock, weights={CUSTOM: 1.0})

    def close(self) -> None:
        """Stop the processes, if any."""
        if self._pool is not None:
            self._pool.close()

    def begin(self, pairs: Iterable[Pair]) -> None:
        """Start the pooled functions on finished completions without waiting."""
        if any(function.can_hang for function in self.functions.values()):
            entries = [self._entry(pair) for pair in pairs]
            for function in self.functions.values():
                if not function.needs_all:
                    self._submit(function, entries)

    def scores(self, pairs: list[Pair], *, in_training: bool = False) -> list[float]:
        """Return the weighted sums of reward functions and reward model.

        Raises TrainingError or DataError, naming the row of the data: a score is missing.
        """
        entries = [self._entry(pair) for pair in pairs]
        for function in self.functions.values():
            self._submit(function, entries)
        if self.model is not None:
            with self.model.clock.span("reward_model") if in_training else contextlib.nullcontext():
                self._run_model(self.model, pairs)
        if self.functions:
            timed = in_training and self._is_timed
            with self._clock.span("reward") if timed else contextlib.nullcontext():
                self._wait_for_functions(entries)
        return [self._sum(entry, self._weights) for entry in entries]

    def validation_scores(self, pairs: list[Pair]) -> dict[str, list[float]]:
        """Return the fields of `ValidationSamples`: rewards, function rewards (accuracy) and reward model scores.

        Raises the errors of `scores`.
        """
        found = {"rewards": self.scores(pairs)}
        entries = [self._entry(pair) for pair in pairs]
        if self.functions:
            found["by_functions"] = [self._sum(entry, self.functions, accuracy=True) for entry in entries]
            self._warn_of_missing_acc([entry for entry in entries if not entry.failed])
        if self.model is not None:
            found["by_model"] = [entry.scores[MODEL].value for entry in entries]
        return found

    def _sum(self, entry: _Entry, names: Iterable[str], *, accuracy: bool = False) -> float:
        """Return the weighted sum of scores; with `accuracy`, of the values `acc` of functions that have one."""
        scores = [(self._weights[name], entry.scores[name]) for name in names]
        return sum(w * (score.metrics.get("acc", score.value) if accuracy else score.value) for w, score in scores)

    def _warn_of_missing_acc(self, entries: list[_Entry]) -> None:
        """Log a warning if the user's function returned `acc` for some completions only, whose mean mixes two values.

        by_data_source has `acc` for some data sources; its other scores are fractions of right answers as well.
        """
        found = sum("acc" in entry.scores[CUSTOM].metrics for entry in entries) if CUSTOM in self.functions else 0
        if 0 < found < len(entries):
            logger.warning(
                "%s returned acc for %d of %d held-out completions; val/accuracy has the score of the others",
                self.functions[CUSTOM].label, found, len(entries),
            )  # fmt: skip

    def _run_model(self, model: RewardModelScorer, pairs: list[Pair]) -> None:
        """Run the reward model on completions that it has not scored yet."""
        new = [pair for pair in pairs if MODEL not in self._entry(pair).scores]
        for pair, score in zip(new, model.scores(new) if new else [], strict=True):
            self._entry(pair).scores[MODEL] = score

    def _wait_for_functions(self, entries: list[_Entry]) -> None:
        """Wait for all functions and store their scores. Raises the errors of `scores`."""
        labels = ", ".join(function.label for function in self.functions.values())
        pooled = math.isfinite(self.section.timeout) and any(f.can_hang for f in self.functions.values())
        limit = Timeout(self.section.timeout, "reward.timeout") if pooled else None
        done = failed = 0

        def detail() -> str:
            now = f", now {entries[done].where}" if done < len(entries) else ""
            return f"{done} of {len(entries)} completions are scored{now}"

        with waiting(f"the reward function {labels}", limit, detail) as wait:
            for entry in entries:
                for function in self.functions.values():
                    if function.name not in entry.scores:
                        outcome = self._outcome(function, entry, wait.restart_timeout)
                        failed += not isinstance(outcome, Score)
                        entry.failed |= not isinstance(outcome, Score)
                        entry.scores[function.name] = self._score(function, entry, outcome, log=failed <= NUM_LOGGED)
                done += 1
        if failed > NUM_LOGGED:
            logger.warning("%d completions have no score; the first %d are listed above", failed, NUM_LOGGED)

    def submit(self, pairs: list[Pair]) -> list[Future[Signal]]:
        """Wait for `rewards`; return them as token-level rewards. Raises the errors of `scores`."""
        lengths = [sample.num_trained for _, sample in pairs]
        return [completed_future(each) for each in token_rewards(self.rewards(pairs), lengths)]

    def rewards(self, pairs: list[Pair]) -> list[float]:
        """Return the scores plus the overlong penalty, if configured. Raises the errors of `scores`."""
        found = self.scores(pairs, in_training=True)
        if not self.section.overlong_buffer.enable:
            return found
        return [score + self._penalty(pair) for score, pair in zip(found, pairs, strict=True)]

    def accuracies(self, pairs: list[Pair]) -> list[float]:
        """Return the additional value `acc` of a function, by default the score, as verl's dapo does.

        Raises the errors of `scores`.
        """
        found = zip(self.scores(pairs), map(self._entry, pairs), strict=True)
        return [
            next((each.metrics["acc"] for each in entry.scores.values() if "acc" in each.metrics), score)
            for score, entry in found
        ]

    def metrics(self, pairs: list[Pair]) -> dict[str, float]:
        """Return metrics of scored completions.

        `reward/<name>/mean` is the mean per reward component, if there are several, and per additional metric, over the
        completions that have one. Its name follows that of its function if a component or another function's metric may
        have the same. `reward/failures` is the fraction of failures, if functions run in the pool.
        """
        entries = [self._entry(pair) for pair in pairs]
        components = [*self._weights] if len(self._weights) > 1 else []
        taken = {*components, *(["overlong"] if self.section.overlong_buffer.enable else [])}
        taken |= {"acc"} if {CUSTOM, "by_data_source"} <= taken else set()
        found: defaultdict[str, list[float]] = defaultdict(list)
        for entry in entries:
            for name in components:
                found[name].append(entry.scores[name].value)
            for name, score in entry.scores.items():
                for key, value in score.metrics.items():
                    found[f"{name}/{key}" if key in taken else key].append(value)
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
                text=decode(self.tokenizer, task, sample), answer=task.answer, data_source=task.data_source,
                extra_info=task.extra_info, limit_fraction=sample.num_trained / self.config.data.max_response_length,
            )  # fmt: skip
            alive = weakref.ref(sample.tokens, lambda _: self._entries.pop(key, None))
            self._entries[key] = _Entry(task.where, response, alive)
        return self._entries[key]

    def _submit(self, function: RewardFunction, entries: list[_Entry]) -> None:
        """Submit the calls that are new to the pool."""
        new = [entry for entry in entries if function.name not in entry.outcomes and function.name not in entry.scores]
        if not new or not function.can_hang:
            return
        with self._lock:
            if self._pool is None:
                from hybrid_gkd.scoring.reward_pool import RewardPool  # needs pebble

                self._pool = RewardPool(self.section)
        futures = self._pool.submit(function, [entry.response for entry in new])
        for entry, future in zip(new, futures, strict=True):
            entry.outcomes[function.name] = future

    def _outcome(self, function: RewardFunction, entry: _Entry, progress: Callable[[], None]) -> Outcome:
        """Compute or wait for an outcome. Raises TrainingError: the reward processes have ended or hang."""
        if function.name not in entry.outcomes:
            return function.compute([entry.response])[0]
        assert self._pool is not None
        future, seen = entry.outcomes[function.name], -1
        limit = None if self.section.timeout == math.inf else self.section.timeout + GRACE_SECONDS
        while True:
            try:
                outcome = future.result(limit)
                progress()
                return outcome
            except TimeoutError:
                if self._pool.num_done == seen:
                    raise TrainingError(
                        f"{entry.where}: the processes of the reward {function.label} hang ({limit:.0f} "
                        "s without any score); find the call that blocks, or raise reward.timeout"
                    ) from None
                seen = self._pool.num_done
                progress()

    def _score(self, function: RewardFunction, entry: _Entry, outcome: Outcome, *, log: bool) -> Score:
        """Return the score, or the default score of a failure. Raises TrainingError or DataError: there is none."""
        if isinstance(outcome, Score):
            return outcome
        if outcome.is_data_error:
            raise DataError(f"{entry.where}: {outcome.reason}")
        text = (
            f"{entry.where}: the reward {function.label} {outcome.reason}; reference answer "
            f"{(entry.response.answer or '')[:80]!r}, completion {entry.response.text[:80]!r}"
        )
        value = self.section.score_on_error if function.name == CUSTOM else lowest_score(function.name, entry.response)
        if value is None:
            raise TrainingError(text)
        score = as_outcome(value)
        assert isinstance(score, Score)
        if log:
            logger.warning("%s; using the score %g", text, score.value)
        return score

    def _penalty(self, pair: Pair) -> float:
        limit = self.config.data.max_response_length
        return overlong_penalty(pair[1].num_trained, limit, self.section.overlong_buffer)

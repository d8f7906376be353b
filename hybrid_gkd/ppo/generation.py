"""Sources of the samples of training steps and validations: the rollout engine and given completions."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hybrid_gkd.config import Config, RolloutConfig, ValKwargs
from hybrid_gkd.data.sampler import PromptSampler
from hybrid_gkd.ppo.filtering import GroupCollector
from hybrid_gkd.ppo.learning_signal import needs_greedy_samples
from hybrid_gkd.ppo.rollout_pipeline import RolloutPipeline
from hybrid_gkd.ppo.steps import drawn_rows, make_sampler, request_seeds, response_limit
from hybrid_gkd.runtime.spans import Clock, working_for
from hybrid_gkd.scoring.rewards import RewardScorer
from hybrid_gkd.types import (
    GenerationRequest,
    Pair,
    Rollout,
    Sample,
    SampleId,
    SamplingParams,
    Task,
    given_sample,
    with_tasks,
)

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup


class RolloutGenerator:
    """Generates the rollouts of a run one after the other, in the order of their steps.

    Args:
        config: the whole configuration.
        group: the workers.
        tasks: the training tasks.
        scorer: computes rewards; None without. Rewards that are trained on are computed while generation runs.
        pipeline: receives progress notifications.
        clock: records the spans `gen`.
    """

    def __init__(
        self, config: Config, group: WorkerGroup, tasks: list[Task], scorer: RewardScorer | None,
        pipeline: RolloutPipeline, clock: Clock,
    ):  # fmt: skip
        self.config, self.group, self.tasks, self.scorer = config, group, tasks, scorer
        self.pipeline, self.clock = pipeline, clock
        self.extra_batches = 0
        """Number of generation batches so far beyond one per step."""
        self.on_generate: list[Callable[[], None]] = []
        """Callbacks at the start of the generation of a training batch."""
        self.on_finished: list[Callable[[int, list[Pair]], None]] = []
        """Callbacks with a step and samples of its rollout as they leave the engine or, with filtered groups, are kept.
        Both kinds run in a background thread if the engine has a pool of its own."""

    @functools.cached_property
    def sampler(self) -> PromptSampler:
        """Sampler of the prompts of each generation batch."""
        return make_sampler(self.config.data, self.tasks)

    def draws(self, step: int) -> bool:
        """Return whether a training step may need generation by the student."""
        return step > self.config.trainer.warmup_steps_sft and self._draws

    @functools.cached_property
    def _draws(self) -> bool:
        return self.config.on_policy_fraction > 0 or any(task.response_ids is None for task in self.tasks)

    def rollout(self, step: int) -> Rollout:
        """Return the rollout of a step: one generation batch, or the informative groups of several.

        Raises the errors of `GroupCollector.add`.
        """
        if not self.config.algorithm.filter_groups.enable:
            return self._batch(step, self._finished)
        assert self.scorer is not None
        refill = GroupCollector(self.config, self.scorer, step)
        while True:
            batch = self._batch(step)
            with self.pipeline.paused():
                kept = refill.add(batch)
            self._finished(step, with_tasks(batch.tasks, kept))
            if refill.is_full:
                return refill.rollout()
            self.extra_batches += 1

    def validation_samples(self, tasks: abc.Sequence[Task], step: int) -> list[Sample]:
        """Draw `val_kwargs.n` samples per task after a step; return them in the order of the tasks.

        The computation of their rewards has been started.
        """
        section = self.config.actor_rollout_ref.rollout.val_kwargs
        requests = self._requests(tasks, section.n, batch=-1 - step, seed_number=0)
        sampling = self._sampling(section, self.config.data.max_response_length)
        return self._all_drawn(tasks, requests, sampling, self.scorer)

    def _finished(self, step: int, pairs: list[Pair]) -> None:
        for listener in self.on_finished if pairs else ():
            listener(step, pairs)

    def _batch(self, step: int, finished: Callable[[int, list[Pair]], None] = lambda step, pairs: None) -> Rollout:
        """Draw `rollout.n` samples for each task of the next generation batch of a step; report them to `finished`."""
        number = step + self.extra_batches
        epoch, rows = self.sampler.batch(number)
        tasks = tuple(self.tasks[row] for row in rows)
        section = self.config.actor_rollout_ref.rollout
        samples = self._given(tasks, step, number)
        finished(step, with_tasks(tasks, samples))
        given_rows = {sample.id.row for sample in samples}
        open_tasks = tuple(task for task in tasks if task.index not in given_rows)
        requests = self._requests(open_tasks, section.n, batch=number)
        limit = response_limit(self.config.data, step)
        sampling = self._sampling(section, limit, logprobs=self.config.needs_rollout_logprobs)
        greedy: tuple[Sample, ...] = ()
        for begins in self.on_generate if open_tasks else ():
            begins()
        with working_for(step), self.clock.span("gen") if open_tasks else contextlib.nullcontext():
            if needs_greedy_samples(self.config):
                greedy = self._greedy_samples(open_tasks, number, limit)
            scorer = self.scorer if self.config.scores_rollouts else None
            for pairs in self._drawn(open_tasks, requests, sampling, scorer):
                samples += [sample for _, sample in pairs]
                finished(step, pairs)
        places = {task.index: place for place, task in enumerate(tasks)}
        samples.sort(key=lambda sample: (places[sample.id.row], sample.id.number))
        return Rollout(
            step=step, epoch=epoch, tasks=tasks, samples=tuple(samples), greedy=greedy,
            extra_batches=self.extra_batches,
        )  # fmt: skip

    def _given(self, tasks: tuple[Task, ...], step: int, number: int) -> list[Sample]:
        """Return the samples of the tasks of a batch that are trained on their given completion."""
        if self.config.data.response_key is None:
            return []
        if step <= self.config.trainer.warmup_steps_sft:
            return [given_sample(task, number, 1.0) for task in tasks]
        drawn = drawn_rows(tasks, self.config.on_policy_fraction, seed=self.config.data.seed, number=number)
        return [given_sample(task, number, self.config.sft_coef) for task in tasks if task.index not in drawn]

    def _greedy_samples(self, tasks: tuple[Task, ...], number: int, limit: int) -> tuple[Sample, ...]:
        """Draw one greedy completion per task, in their order, numbered after the sampled ones."""
        sampling = SamplingParams(max_tokens=limit, temperature=0.0)
        first = self.config.actor_rollout_ref.rollout.n
        return tuple(self._all_drawn(tasks, self._requests(tasks, 1, batch=number, first=first), sampling, None))

    def _drawn(
        self, tasks: abc.Sequence[Task], requests: list[GenerationRequest], sampling: SamplingParams,
        scorer: RewardScorer | None,
    ) -> Iterator[list[Pair]]:  # fmt: skip
        """Yield samples with their tasks as they finish; start the computation of their rewards by `scorer`."""
        for finished in self.group.generate(requests, sampling) if requests else ():
            self.pipeline.progress()
            pairs = with_tasks(tasks, finished)
            if scorer is not None:
                scorer.begin(pairs)
            yield pairs

    def _all_drawn(
        self, tasks: abc.Sequence[Task], requests: list[GenerationRequest], sampling: SamplingParams,
        scorer: RewardScorer | None,
    ) -> list[Sample]:  # fmt: skip
        """Return the samples of `_drawn` in the order of the requests."""
        drawn = itertools.chain.from_iterable(self._drawn(tasks, requests, sampling, scorer))
        by_id = {sample.id: sample for _, sample in drawn}
        return [by_id[request.id] for request in requests]

    def _requests(
        self, tasks: abc.Sequence[Task], n: int, *, batch: int, seed_number: int | None = None, first: int = 0
    ) -> list[GenerationRequest]:
        """Return `n` requests per task, numbered from `first`.

        Seeds are those of generation batch `seed_number` (0 for validations; default: `batch`).
        """
        ids = [(task, SampleId(batch, task.index, first + number)) for task in tasks for number in range(n)]
        seeds = request_seeds(
            self.config.actor_rollout_ref.rollout.seed, batch if seed_number is None else seed_number, len(ids)
        )
        return [
            GenerationRequest(id=each, prompt_ids=task.token_ids, seed=seed)
            for (task, each), seed in zip(ids, seeds, strict=True)
        ]

    def _sampling(self, section: RolloutConfig | ValKwargs, limit: int, *, logprobs: bool = False) -> SamplingParams:
        return SamplingParams(
            max_tokens=limit, temperature=section.temperature, top_p=section.top_p, top_k=section.top_k,
            logprobs=logprobs, repetitions=section.end_repetitions if isinstance(section, RolloutConfig) else None,
        )

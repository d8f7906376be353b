"""Draws the responses of a run, with the weights that the rollout engine has: of training steps and of validations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hybrid_gkd.config import BATCHES_AHEAD, Config, RolloutConfig, ValKwargs
from hybrid_gkd.data.sampler import PromptSampler
from hybrid_gkd.ppo.filtering import Refill
from hybrid_gkd.ppo.learning_signal import needs_greedy_answers
from hybrid_gkd.ppo.scheduler import RolloutsAhead
from hybrid_gkd.ppo.steps import make_sampler, request_seeds
from hybrid_gkd.runtime.spans import Clock, working_for
from hybrid_gkd.scoring.rewards import Scorer
from hybrid_gkd.types import GenerationRequest, Prompt, Rollout, SamplingParams, Sequence

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup


class Generation:
    """Generates the rollouts of a run one after the other, in the order of their steps.

    Args:
        config: the whole configuration.
        group: the workers.
        prompts: those that are trained on.
        scorer: computes rewards, which begin while responses are drawn where they are trained on; None without.
        ahead: is told of progress.
        clock: gets the spans `gen`.
    """

    def __init__(
        self, config: Config, group: WorkerGroup, prompts: list[Prompt], scorer: Scorer | None, ahead: RolloutsAhead,
        clock: Clock,
    ):  # fmt: skip
        self.config, self.group, self.prompts, self.scorer = config, group, prompts, scorer
        self.ahead, self.clock = ahead, clock
        self.extra_batches = 0
        """Generation batches so far beyond one a step."""
        self.on_generate: list[Callable[[], None]] = []
        """Called when the generation of a batch to train on begins."""
        self.on_finished: list[Callable[[int, list[Sequence]], None]] = []
        """Called with a step and sequences of its rollout as they leave the engine, or are kept where groups are left
        out. Both are called from a background thread where the engine has a pool of its own."""

    @functools.cached_property
    def sampler(self) -> PromptSampler:
        """Which prompts a generation batch takes."""
        return make_sampler(self.config, len(self.prompts))

    def rollout(self, step: int) -> Rollout:
        """Of a step: a generation batch, or the groups with a signal of several. Raises as `Refill.add`."""
        if not self.config.algorithm.filter_groups.enable:
            return self._batch(step, self._finished)
        assert self.scorer is not None
        refill = Refill(self.config, self.scorer, step)
        while True:
            batch = self._batch(step)
            with self.ahead.paused():
                kept = refill.add(batch)
            self._finished(step, kept)
            self._refill_engine(batch, is_last=refill.is_full)
            if refill.is_full:
                return refill.rollout()
            self.extra_batches += 1

    def _refill_engine(self, batch: Rollout, *, is_last: bool) -> None:
        """Publish once more if a reward model cost the engine its weights and a generation follows before an update."""
        follows = not is_last or BATCHES_AHEAD[self.config.trainer.scheduler] > 0
        if follows and self.config.uses_reward_model and self.config.actor_rollout_ref.hybrid_engine:
            with self.clock.span("sync_rollout_weights"):
                self.group.publish(batch.sequences[0].weight_version)

    def answers(self, prompts: abc.Sequence[Prompt]) -> list[Sequence]:
        """`val_kwargs.n` to each prompt, in their order; their rewards have begun."""
        section = self.config.actor_rollout_ref.rollout.val_kwargs
        drawn = self._drawn(prompts, self._requests(prompts, section.n, 0), self._sampling(section), self.scorer)
        return sorted(itertools.chain.from_iterable(drawn), key=lambda sequence: sequence.index)

    def _finished(self, step: int, sequences: list[Sequence]) -> None:
        for listener in self.on_finished if sequences else ():
            listener(step, sequences)

    def _batch(self, step: int, finished_some: Callable[[int, list[Sequence]], None] | None = None) -> Rollout:
        """`rollout.n` responses to each prompt of the next generation batch, which is for this step."""
        number = step + self.extra_batches
        epoch, rows = self.sampler.batch(number)
        prompts = tuple(self.prompts[row] for row in rows)
        section = self.config.actor_rollout_ref.rollout
        requests = self._requests(prompts, section.n, number)
        sampling = self._sampling(section, logprobs=self.config.algorithm.compares_logprobs)
        sequences: dict[int, Sequence] = {}
        for begins in self.on_generate:
            begins()
        with working_for(step), self.clock.span("gen"):
            greedy = self._greedy_answers(prompts, number) if needs_greedy_answers(self.config) else ()
            scorer = self.scorer if self.config.trains_on_rewards else None
            for finished in self._drawn(prompts, requests, sampling, scorer):
                self.ahead.progress()
                sequences |= {sequence.index: sequence for sequence in finished}
                if finished_some is not None:
                    finished_some(step, finished)
        ordered = tuple(sequences[request.index] for request in requests)
        return Rollout(
            step=step, epoch=epoch, prompts=prompts, sequences=ordered, greedy=greedy, extra_batches=self.extra_batches
        )

    def _greedy_answers(self, prompts: tuple[Prompt, ...], number: int) -> tuple[Sequence, ...]:
        """One to each prompt, in their order; their indices are those behind the responses'."""
        sampling = SamplingParams(max_tokens=self.config.data.max_response_length, temperature=0.0)
        found, drawn = list[Sequence](), len(prompts) * self.config.actor_rollout_ref.rollout.n
        for finished in self._drawn(prompts, self._requests(prompts, 1, number), sampling, None):
            self.ahead.progress()
            found += [dataclasses.replace(sequence, index=drawn + sequence.index) for sequence in finished]
        return tuple(sorted(found, key=lambda sequence: sequence.index))

    def _drawn(
        self, prompts: abc.Sequence[Prompt], requests: list[GenerationRequest], sampling: SamplingParams,
        scorer: Scorer | None,
    ) -> Iterator[list[Sequence]]:  # fmt: skip
        """Responses as they are finished, with what the teacher sees before them; as many to each prompt.

        `scorer`: begins to compute their rewards meanwhile.
        """
        n = len(requests) // len(prompts)
        for finished in self.group.generate(requests, sampling):
            pairs = [(prompts[sequence.index // n], sequence) for sequence in finished]
            if scorer is not None:
                scorer.begin(pairs)
            yield [dataclasses.replace(sequence, teacher_prompt_ids=prompt.teacher_ids) for prompt, sequence in pairs]

    def _requests(self, prompts: abc.Sequence[Prompt], n: int, number: int) -> list[GenerationRequest]:
        """`n` requests for each prompt, with the seeds of a generation batch; 0 is validation."""
        ids = [prompt.token_ids for prompt in prompts for _ in range(n)]
        seeds = request_seeds(self.config.actor_rollout_ref.rollout.seed, number, len(ids))
        pairs = enumerate(zip(ids, seeds, strict=True))
        return [GenerationRequest(index=index, prompt_ids=each, seed=seed) for index, (each, seed) in pairs]

    def _sampling(self, section: RolloutConfig | ValKwargs, *, logprobs: bool = False) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.config.data.max_response_length, temperature=section.temperature, top_p=section.top_p,
            top_k=section.top_k, logprobs=logprobs,
        )

"""On-policy distillation: read this first.

The loop is `PPOTrainer.fit`. This class replaces the learning signal: instead of rewards and advantages, it uses the
teacher's most likely tokens at every position of every response, and the student minimises a divergence between the
two distributions.

    rollout engine ──finished samples────> TeacherClient ──> teacher service
          ^                                      │ top-k log-probabilities
          └──publish── actor <── update <────────┘
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from hybrid_gkd.config import BATCHES_AHEAD, run_teachers, updates_per_step
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.ppo.learning_signal import teacher_rewards
from hybrid_gkd.ppo.steps import distillation_factor
from hybrid_gkd.ppo.token_weighting import Weighting
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.runtime.spans import working_for
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.rewards import decode
from hybrid_gkd.scoring.scorer import Scorer, WorkersScorer, scored
from hybrid_gkd.scoring.teacher_mixture import mean_scores
from hybrid_gkd.scoring.teacher_prompts import TaskPrompts
from hybrid_gkd.scoring.teacher_scorer import Scores, Teacher, TeacherScorer
from hybrid_gkd.scoring.token_scores import ANSWERS, token_scores
from hybrid_gkd.types import Pair, Rollout, Sample, SampleId, Scored, TopK, teacher_scores, with_tasks, without_given
from hybrid_gkd.workers.batches import mean_metrics

UNSCORED: Future[Any] = Future()
"""Placeholder for the scores of a sample without teacher (`distillation.teacher_prompt_fn`); its result is None."""
UNSCORED.set_result(None)
NO_TOKENS = np.zeros(0, np.float32)
PARTS = 4
"""Number of parts of a rollout: the teacher scores one part while the student computes its candidates of the next."""


class GKDTrainer(PPOTrainer):
    """Generalised knowledge distillation (arXiv 2306.13649), on-policy up to the staleness of `trainer.scheduler`.

    Args:
        teacher: a client after its handshake, a scorer of several (the caller closes them), or `OwnTeacher`.
        prompts: the teacher's prompts; by default those of the tasks.
        check_teacher: raises if the teacher has ended; called while waiting for it.
        shares_gpu: the teacher uses a GPU of the student. Prefetched batches are then sent when the next generation
            begins, since generation leaves part of the GPU idle and an update does not. With several workers an update
            waits for all scores.
        takes_turns: several teachers take turns on a GPU. All samples of a rollout are then sent together, so that each
            has one turn in a step.
        others: see `PPOTrainer`.
    """

    def __init__(
        self, *args: Any, teacher: Teacher | TeacherScorer, check_teacher: Callable[[], None] = lambda: None,
        shares_gpu: bool = False, takes_turns: bool = False, prompts: TaskPrompts | None = None, **kwargs: Any,
    ):  # fmt: skip
        super().__init__(*args, **kwargs)
        self.teacher = teacher if isinstance(teacher, TeacherScorer) else TeacherScorer(teacher)
        self.check_teacher = check_teacher
        self._pending: defaultdict[int, Scores] = defaultdict(dict)
        """Scores by the step of the rollout; several rollouts may be pending."""
        self._kept: defaultdict[int, list[Pair]] = defaultdict(list)
        """Finished samples, by step, to send when the next generation begins."""
        self._prompts, self._weighting = prompts or TaskPrompts(), Weighting(self.config)
        waits = self._weighting.needs_scores or self.config.full_determinism
        self._updates_while_scoring = (self.group.size == 1 or not shares_gpu) and not waits
        """True if an update may begin while the teacher still scores, see `_train_as_scored`."""
        teachers = run_teachers(self.config)
        self._weights = {f"teacher/{each.name}": each.weight for each in teachers}
        """Weight of each teacher in the mixture that validation compares with, with distillation.ensemble=sum."""
        slowest = max(teachers, key=lambda each: each.section.request_timeout)
        self._timeout = Timeout(slowest.section.request_timeout, f"{slowest.where}.request_timeout")
        if not any(each.section.is_stored for each in teachers):
            self.validators.append(self._held_out_divergence)
        self._candidates: list[Scorer] = []
        """Scorers of the samples that the teacher scores: of the student's candidates, if configured."""
        loss = self.config.distillation
        if loss.given_topk:
            self._candidates.append(WorkersScorer("student_topk", self.group.compute_topk, self.batches))
        self._logprobs: dict[SampleId, np.ndarray] = {}
        """Log-probabilities of trained tokens from the pass for the student's candidates, if the loss needs them."""
        self._has_policy_loss = loss.use_task_rewards or loss.use_policy_gradient
        self._keeps_logprobs = self._needs_old_logprobs() and not self._weighting.cuts_before
        self._scores_whole = takes_turns
        alternates = (shares_gpu or takes_turns) and self.config.actor_rollout_ref.hybrid_engine
        early = not self._candidates  # otherwise the student's forward pass comes first, with the weights of the update
        if alternates and BATCHES_AHEAD[self.config.trainer.scheduler] and early:
            self.generation.on_finished.append(lambda step, pairs: self._kept[step].extend(pairs))
            self.generation.on_generate.append(self._submit_kept)
        elif early and not takes_turns and self.config.actor_rollout_ref.teacher.overlap_rollout and not (
            self.config.full_determinism or self._prompts.waits_for_rewards or self.config.teaches_itself
        ):
            self.generation.on_finished.append(self._submit)

    def _update_actor(self, rollout: Rollout) -> dict[str, float]:
        """Collect the teacher's scores of the rollout, and rewards if configured, and train on the rollout.

        Raises TeacherError: a sample could not be scored; no weight has changed unless an earlier optimizer step of the
        rollout was taken.
        """
        if rollout.step <= self.config.trainer.warmup_steps_sft:
            return super()._update_actor(rollout)
        scores = self._pending[rollout.step]
        if rollout.step in self._kept:  # no generation follows the last rollouts
            self._submit_kept()
        loss = self.config.distillation
        factor = distillation_factor(loss.distillation_loss_coef_schedule, rollout.step, self.total_steps)
        samples = rollout.samples + (rollout.greedy if loss.as_reward else ())
        pairs = with_tasks(rollout.tasks, [each for each in samples if each.id not in scores])
        size = math.ceil(len(pairs) / PARTS) if self._candidates and not self._scores_whole else len(pairs)
        for start in range(0, len(pairs), size or 1):
            self._submit(rollout.step, pairs[start : start + size])
        unknown = len(scores) - len(samples)
        if unknown:
            raise TrainingError(f"{unknown} samples at the teacher belong to no rollout")
        unscored = sum(each is UNSCORED for each in scores.values())
        if loss.as_reward:
            metrics = self._train_on_log_ratio(rollout, scores, factor)
        else:
            found, metrics = self._policy_signal(rollout)
            found = self._weighting.without_others(rollout.tasks, found)
            metrics |= self._train_as_scored(with_teacher_weights(found, factor), scores)
        if loss.distillation_loss_coef_schedule != "constant":
            metrics["actor/distillation/coef"] = loss.distillation_loss_coef * factor
        if loss.teacher_prompt_fn is not None:
            metrics["teacher/unscored_fraction"] = unscored / len(samples)
        del self._pending[rollout.step]
        return metrics | self.teacher.take_metrics(self.clock)

    def _train_as_scored(self, samples: list[Sample], scores: Scores) -> dict[str, float]:
        """Train on each mini-batch as soon as its samples are scored, while the teacher scores the rest.

        If an update spans several GPUs that the teacher also uses, it waits for all scores: otherwise every collective
        would wait for the GPU on which the teacher runs at that moment.
        It also waits if token weights depend on the scores, since their sum must be known before the first backward
        pass, and with `full_determinism`, since micro-batches must not depend on the order in which scores arrive.
        """
        whole, weighting = samples, self._weighting
        samples = [
            weighting.without_teacher(sample) if scores[sample.id] is UNSCORED else weighting.before_scoring(sample)
            for sample in samples
        ]
        if not self._updates_while_scoring:
            with self.clock.span("wait_prev_teacher"):
                found = self._take_scores(scores, len(scores))
            with self.clock.span("update_actor"):
                scored = [with_teacher(sample, found[sample.id]) for sample in samples]
                samples = [weighting.after_scoring(sample) for sample in scored]
                return self.train(samples) | self._end_metrics(scored) | weighting.metrics(whole, samples)
        updates, under_way = list[dict[str, float]](), list[Callable[[], list[dict[str, float]]]]()

        def wait_for_steps(*, left: int) -> None:
            while len(under_way) > left:
                with self.clock.span("update_actor"):
                    updates.extend(under_way.pop(0)())

        mini_batches, epochs = self.batches.mini_batches(samples), self.config.actor_rollout_ref.actor.ppo_epochs
        for number, mini_batch in enumerate(mini_batches, start=1):
            own = {sample.id: scores.pop(sample.id) for sample in mini_batch}
            last = number == len(mini_batches) and epochs == 1
            # With all scores, the workers receive the mini-batch during the previous step.
            if not all(score.done() for score in own.values()):
                wait_for_steps(left=0)
            mini_batches[number - 1], started = self._start_mini_batch_as_scored(mini_batch, own, last=last)
            under_way.append(started)
            wait_for_steps(left=1)
        wait_for_steps(left=0)
        samples = list(itertools.chain.from_iterable(mini_batches))
        if epochs > 1:
            with self.clock.span("update_actor"):
                updates += self.train_mini_batches(mini_batches * (epochs - 1))
        return mean_metrics(updates) | self._end_metrics(samples) | weighting.metrics(whole, samples)

    def _end_metrics(self, samples: list[Sample]) -> dict[str, float]:
        """Return `end_metrics` unless the ends are cut before the teacher scores them."""
        return {} if self._weighting.cuts_before else end_metrics(samples)

    def _start_mini_batch_as_scored(
        self, mini_batch: list[Sample], scores: Scores, *, last: bool
    ) -> tuple[list[Sample], Callable[[], list[dict[str, float]]]]:
        """Take an optimizer step in parts; return the mini-batch with its scores, and the function of the last part's
        `start_mini_batch`.

        The loss is a sum over tokens, so its gradient does not depend on the parts. Each part but the last fills a
        micro-batch on every worker, since smaller ones would cost more time than they overlap.
        """
        batches, position = self.batches, {sample.id: place for place, sample in enumerate(mini_batch)}
        num_tokens = sum(sample.num_trained for sample in mini_batch)
        mean_size = sum(map(batches.measure, mini_batch)) / len(mini_batch)
        waiting, scored = list[Sample](), dict[SampleId, Sample]()

        def missing() -> int:
            """Return about how many more samples fit into a micro-batch on every worker."""
            return max(0, int((batches.capacity - sum(map(batches.measure, waiting))) / mean_size))

        while True:
            with self.clock.span("wait_prev_teacher"):
                found = self._take_scores(scores, min(missing(), len(scores)))
            for each in sorted(found, key=position.__getitem__):
                scored[each] = with_teacher(mini_batch[position[each]], found[each])
                waiting.append(scored[each])
            with self.clock.span("update_actor"):
                if not scores:
                    started = self.start_mini_batch(waiting, num_tokens, last=last)
                    return [scored[sample.id] for sample in mini_batch], started
                if not missing():
                    count = batches.count_full(waiting)
                    self.group.accumulate(batches.parts(waiting[:count], num_tokens))
                    waiting = waiting[count:]

    def _train_on_log_ratio(self, rollout: Rollout, scores: Scores, factor: float) -> dict[str, float]:
        """Train on advantages from the teacher's log-ratio of each trained token, and from rewards if configured."""
        with self.clock.span("update_actor"):
            answers = self.with_old_logprobs([*rollout.samples, *rollout.greedy])  # while the teacher scores
        with self.clock.span("wait_prev_teacher"):
            found = self._take_scores(scores, len(answers))
        answers = [with_teacher(sample, found[sample.id]) for sample in answers]
        samples, greedy = answers[: len(rollout.samples)], answers[len(rollout.samples) :]
        coef = self.config.distillation.distillation_loss_coef * factor
        rewards, metrics = teacher_rewards(self.config, samples, coef)
        if greedy:
            rewards += teacher_rewards(self.config, greedy, coef)[0]
        samples, more = self.with_advantages(rollout, samples, rewards)
        if rollout.step <= self.config.trainer.critic_warmup:
            return metrics | more
        samples = self.with_reference(samples)
        with self.clock.span("update_actor"):
            samples, weights = self.with_corrections(samples)
            return self.train(samples) | metrics | more | weights

    def _policy_signal(self, rollout: Rollout) -> tuple[list[Sample], dict[str, float]]:
        """Compute advantages, old log-probabilities and importance weights, as configured, while the teacher scores."""
        loss = self.config.distillation
        samples, metrics = [*rollout.samples], dict[str, float]()
        if self._logprobs:
            known, self._logprobs = self._logprobs, {}
            samples = [s.with_signals(old_logprobs=known[s.id]) if s.id in known else s for s in samples]
        if loss.use_task_rewards:
            samples, metrics = self.with_advantages(rollout, samples)
        samples = self.with_reference(samples)
        with self.clock.span("update_actor"):
            samples, weights = self.with_corrections(samples, policy_loss=self._has_policy_loss)
        return samples, metrics | weights

    def _needs_old_logprobs(self) -> bool:
        """Return whether log-probabilities before the update are needed, of the teacher's temperature."""
        config, actor = self.config, self.config.actor_rollout_ref.actor
        several = self._has_policy_loss and updates_per_step(config.data.train_batch_size, actor) > 1
        needed = config.algorithm.compares_logprobs or config.algorithm.use_kl_in_reward or several
        return needed and config.distillation.temperature == config.actor_rollout_ref.rollout.temperature

    def _submit(self, step: int, pairs: list[Pair]) -> None:
        """Send samples of a rollout to the teacher without waiting, unless its step is an SFT warm-up."""
        if step <= self.config.trainer.warmup_steps_sft:
            return
        with self._rollouts.paused():  # a function of the user has its own deadline
            pairs, unscored = self._prompts.finished(pairs)
        pairs = [(task, self._weighting.before_scoring(sample)) for task, sample in pairs]
        for scorer in self._candidates:
            with self.clock.span("update_actor"):
                samples = scored(scorer, pairs)
            pairs = [(task, sample) for (task, _), sample in zip(pairs, samples, strict=True)]
            if self._keeps_logprobs:
                own = without_given(samples)
                self._logprobs |= {sample.id: sample.topk("student_topk").sampled_logprobs for sample in own}
        with working_for(step):
            self._pending[step] |= self.teacher.start(pairs) | dict.fromkeys(unscored, UNSCORED)

    def _submit_kept(self) -> None:
        """Send the samples that were held back, all of a step at once."""
        kept, self._kept = self._kept, defaultdict(list)
        for step, pairs in kept.items():
            self._submit(step, pairs)

    def _take_scores(self, scores: Scores, enough: int) -> dict[SampleId, Scored]:
        """Call `TeacherScorer.take_scores` with the longest timeout of a request as inactivity timeout."""
        return self.teacher.take_scores(scores, enough, timeout=self._timeout, check=self.check_teacher)

    def _held_out_divergence(self, pairs: list[Pair]) -> dict[str, list[np.ndarray]]:
        """Return forward and reverse KL at every token of a validation's completions, and log the candidates of a few.

        Completions are scored in parts of the size of a training batch, which limits the memory for scores. Raises as
        `_update_actor`.
        """
        for scores in self._pending.values():  # requests of later steps, which count in the metrics
            self._take_scores(dict(scores), len(scores))
        size = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        readable, _ = self._prompts.of_groups(pairs)
        shown = self._shown(pairs)
        divergences, shown_scores = dict[SampleId, np.ndarray](), dict[SampleId, TopK]()
        for start in range(0, len(readable), size):
            part = readable[start : start + size]
            with self.teacher.uncounted():
                found = self._take_scores(self.teacher.start(part), len(part))
            scores_of = {each: mean_scores(scores, self._weights) for each, scores in found.items()}
            with_scores = [sample.with_signals(teacher=scores_of[sample.id]) for _, sample in part]
            divergences |= self.group.compute_divergences(self.batches.plan(with_scores))
            shown_scores |= {each: scores_of[each] for each in shown if each in scores_of}
        rows = []
        for each, candidates in shown_scores.items():
            sample, row = shown[each]
            rows.append(row | {"tokens": token_scores(sample, candidates, divergences[each], self.tokenizer.decode)})
        self.tracking.log_tokens(rows, self.step)
        return {
            name: [divergences[sample.id][:, column] if sample.id in divergences else NO_TOKENS for _, sample in pairs]
            for column, name in enumerate(("forward_kl", "reverse_kl"))
        }

    def _shown(self, pairs: list[Pair]) -> dict[SampleId, tuple[Sample, dict[str, Any]]]:
        """Return the samples whose tokens are logged, one of each of the first tasks, with their texts."""
        count = self.config.trainer.log_val_generations
        chosen = {task.index for task in self.val_prompts[: min(ANSWERS, count)]}
        return {
            sample.id: (sample, {
                "prompt": task.text, "response": decode(self.tokenizer, task, sample), "num_tokens": sample.num_trained,
            })
            for task, sample in pairs
            if task.index in chosen and sample.id.number == 0
        }  # fmt: skip


def with_teacher(sample: Sample, scores: Scored | None) -> Sample:
    """Return the sample with the scores of its teacher or teachers, if it has any."""
    if scores is None:
        return sample
    return sample.with_signals(**({"teacher": scores} if isinstance(scores, TopK) else scores))


def end_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the teacher's log-probability of the ends of completions; low if its own end-of-text token differs."""
    ended = (teacher_scores(sample) for sample in samples if sample.status == "stop" and sample.num_trained)
    ends = [each.sampled_logprobs[-1] for scores in ended for each in scores]
    ends = [each for each in ends if not np.isnan(each)]
    return {"teacher/end_logprob": float(np.mean(ends, dtype=np.float64))} if ends else {}


def with_teacher_weights(samples: list[Sample], factor: float) -> list[Sample]:
    """Add the factor of the distillation term to the samples, unless it is 1."""
    if factor == 1:
        return samples
    return [s.with_signals(teacher_weights=np.full(s.num_trained, factor, np.float32)) for s in samples]

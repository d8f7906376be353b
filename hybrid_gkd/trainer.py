"""On-policy distillation: read this first.

The loop is `PPOTrainer.fit`. This class replaces the learning signal: instead of rewards and advantages, the
teacher's most likely tokens at every position of every response, and a divergence between the two distributions that
the student minimises.

    rollout engine ──finished sequences──> TeacherClient ──> teacher service
          ^                                      │ top-k log-probabilities
          └──publish── actor <── update <────────┘
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any

import numpy as np

from hybrid_gkd.config import BATCHES_AHEAD
from hybrid_gkd.errors import TeacherTimeout, TrainingError
from hybrid_gkd.models.tokenizer import decode
from hybrid_gkd.ppo.learning_signal import teacher_rewards
from hybrid_gkd.ppo.steps import distillation_factor, num_updates
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.runtime.spans import working_for
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.scoring.token_scores import ANSWERS, token_scores
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.types import Rollout, Sequence, TeacherTopK, TrainSequence
from hybrid_gkd.workers.aggregation import with_loss_weights

LATE_SECONDS = 30.0
"""Grace period: the client ends every request before its own deadline; this much later it is taken for dead."""
CHECK_SECONDS = 1.0
"""How often a local teacher is checked while the trainer waits for scores."""


Scoring = dict[int, Future[TeacherTopK]]
"""Scores under way for one rollout, by the index of the sequence, until they are taken."""


class GKDTrainer(PPOTrainer):
    """Generalised knowledge distillation (arXiv 2306.13649), on-policy up to the staleness of `trainer.scheduler`.

    Args:
        teacher: a client that has shaken hands; the caller closes it.
        check_teacher: raises if the teacher is known to have ended; called while waiting for it.
        shares_gpu: the teacher computes on a GPU of the student's. Batches ahead of their update are then sent when the
            next generation begins: generation leaves part of the GPU idle, an update does not. With several workers an
            update waits for all scores.
        others: see `PPOTrainer`.
    """

    def __init__(
        self, *args: Any, teacher: TeacherClient, check_teacher: Callable[[], None] = lambda: None,
        shares_gpu: bool = False, **kwargs: Any,
    ):  # fmt: skip
        super().__init__(*args, **kwargs)
        self.teacher, self.check_teacher = teacher, check_teacher
        self._pending: defaultdict[int, Scoring] = defaultdict(dict)
        """By the step of the rollout: several may be under way at a time."""
        self._kept: list[tuple[int, list[Sequence]]] = []
        """Steps and finished sequences that are sent when the next generation begins."""
        self._updates_beside_teacher = self.group.size == 1 or not shares_gpu
        """Whether an update may begin while the teacher still scores, see `_train_as_scored`."""
        self.validators.append(self._held_out_divergence)
        takes_turns = shares_gpu and self.config.actor_rollout_ref.hybrid_engine
        if takes_turns and BATCHES_AHEAD[self.config.trainer.scheduler]:
            self.generation.on_finished.append(lambda step, sequences: self._kept.append((step, sequences)))
            self.generation.on_generate.append(self._submit_kept)
        elif self.config.actor_rollout_ref.teacher.overlap_rollout:
            self.generation.on_finished.append(self._submit)

    def _update_actor(self, rollout: Rollout) -> dict[str, float]:
        """Collect the teacher's scores of the rollout, its rewards if asked for, and take the step on all of it.

        Raises TeacherError: a sequence could not be scored; no weight has changed.
        """
        scoring = self._pending[rollout.step]
        if any(step == rollout.step for step, _ in self._kept):  # no generation follows the last rollouts
            self._submit_kept()
        loss, factor = self.config.distillation, distillation_factor(self.config, rollout.step, self.total_steps)
        answers = rollout.sequences + (rollout.greedy if loss.as_reward else ())
        self._submit(rollout.step, [s for s in answers if s.index not in scoring])
        unknown = len(scoring) - len(answers)
        if unknown:
            raise TrainingError(f"{unknown} sequences at the teacher belong to no rollout")
        if loss.as_reward:
            metrics = self._train_on_log_ratio(rollout, scoring, factor)
        else:
            sequences, metrics = self._policy_signal(rollout)
            sequences = [dataclasses.replace(item, teacher_weight=factor) for item in sequences]
            metrics |= self._train_as_scored(sequences, scoring)
        if loss.distillation_loss_coef_schedule != "constant":
            metrics["actor/distillation/coef"] = loss.distillation_loss_coef * factor
        del self._pending[rollout.step]
        return metrics | self._teacher_metrics()

    def _train_as_scored(self, sequences: list[TrainSequence], scoring: Scoring) -> dict[str, float]:
        """Train on the scored sequences while the teacher scores the rest.

        The loss is a sum over tokens, so its gradient is the same in parts. Each part but the last fills a micro-batch
        on every worker: smaller ones would cost more time than they overlap. With several optimizer steps per rollout,
        which are cut by prompts, the whole rollout is waited for. So it is where an update crosses GPUs on which the
        teacher computes: each of them takes turns by itself, and all wait in every collective for the last one's.
        """
        batches, in_parts = self.batches, num_updates(self.config, 1) == 1 and self._updates_beside_teacher
        if in_parts:
            sequences = with_loss_weights(self.config, sequences)
        by_index = {item.sequence.index: item for item in sequences}
        num_tokens = sum(len(item.sequence.response_ids) for item in sequences)
        mean_size = sum(map(batches.measure, sequences)) / len(sequences)
        scored: list[TrainSequence] = []

        def missing() -> int:
            """Sequences that still fit into a micro-batch on every worker, about."""
            return max(0, int((batches.room - sum(map(batches.measure, scored))) / mean_size))

        while True:
            with self.clock.span("wait_prev_teacher"):
                scores = self._take_scores(scoring, min(missing(), len(scoring)) if in_parts else len(scoring))
            scored += [dataclasses.replace(by_index[index], teacher=scores[index]) for index in sorted(scores)]
            with self.clock.span("update_actor"):
                if not scoring:
                    return self._train(scored, num_tokens=num_tokens if in_parts else None)
                if not missing():
                    count = batches.whole(scored)
                    self.group.accumulate(batches.parts(scored[:count], num_tokens))
                    scored = scored[count:]

    def _train_on_log_ratio(self, rollout: Rollout, scoring: Scoring, factor: float) -> dict[str, float]:
        """Train on advantages from the teacher's log-ratio of each sampled token, and from rewards if asked for."""
        answers = [TrainSequence(sequence=s) for s in (*rollout.sequences, *rollout.greedy)]
        with self.clock.span("update_actor"):
            answers = self._with_old_logprobs(answers)  # while the teacher scores
        with self.clock.span("wait_prev_teacher"):
            scores = self._take_scores(scoring, len(answers))
        answers = [dataclasses.replace(item, teacher=scores[item.sequence.index]) for item in answers]
        sequences, greedy = answers[: len(rollout.sequences)], answers[len(rollout.sequences) :]
        coef = self.config.distillation.distillation_loss_coef * factor
        rewards, metrics = teacher_rewards(self.config, sequences, coef)
        if greedy:
            rewards += teacher_rewards(self.config, greedy, coef)[0]
        sequences, found = self._with_advantages(rollout, sequences, rewards)
        if rollout.step <= self.config.trainer.critic_warmup:
            return metrics | found
        sequences = self.reference.with_logprobs(sequences)
        with self.clock.span("update_actor"):
            sequences, weights = self._with_logprobs(sequences)
            return self._train(sequences) | metrics | found | weights

    def _policy_signal(self, rollout: Rollout) -> tuple[list[TrainSequence], dict[str, float]]:
        """Advantages, old log-probabilities and importance weights, as configured; while the teacher scores."""
        loss = self.config.distillation
        sequences, metrics = [TrainSequence(sequence=s) for s in rollout.sequences], dict[str, float]()
        if loss.use_task_rewards:
            sequences, metrics = self._with_advantages(rollout)
        sequences = self.reference.with_logprobs(sequences)
        with self.clock.span("update_actor"):
            policy_loss = loss.use_task_rewards or loss.use_policy_gradient
            sequences, weights = self._with_logprobs(sequences, policy_loss=policy_loss)
        return sequences, metrics | weights

    def _submit(self, step: int, sequences: list[Sequence]) -> None:
        """Send sequences of a step's rollout to the teacher without waiting for it."""
        scoring = self._pending[step]
        with working_for(step):
            futures = self.teacher.submit(sequences)
        for sequence, future in zip(sequences, futures, strict=True):
            scoring[sequence.index] = future

    def _submit_kept(self) -> None:
        """Send the sequences that were kept back."""
        kept, self._kept = self._kept, []
        for step, sequences in kept:
            self._submit(step, sequences)

    def _take_scores(self, scoring: Scoring, enough: int) -> dict[int, TeacherTopK]:
        """All scores that have arrived, by the index of the sequence, as soon as there are `enough`.

        The inactivity timeout is that of a request. Raises the client's errors.
        """
        seconds = self.config.actor_rollout_ref.teacher.request_timeout
        limit = Timeout(seconds, "actor_rollout_ref.teacher.request_timeout")
        late = Timeout(limit.seconds + LATE_SECONDS, f"{limit.key}, a grace period")
        deadline = time.monotonic() + late.seconds
        found: dict[int, TeacherTopK] = {}
        total = len(scoring)

        def detail() -> str:
            return f"{len(scoring)} of {total} sequences are not scored yet; {self.teacher.describe()}"

        with waiting("the teacher", limit, detail) as waited:
            while True:
                arrived = [index for index, future in scoring.items() if future.done()]
                found |= {index: scoring.pop(index).result(0) for index in arrived}
                if len(found) >= enough:
                    return found
                if arrived:
                    deadline = time.monotonic() + late.seconds
                    waited.restart_timeout()
                elif time.monotonic() > deadline:
                    raise TeacherTimeout(f"{len(scoring)} sequences were not scored and not refused in {late}")
                self.check_teacher()
                until = FIRST_EXCEPTION if len(found) + len(scoring) == enough else FIRST_COMPLETED
                wait(scoring.values(), timeout=CHECK_SECONDS, return_when=until)

    def _held_out_divergence(self, sequences: list[Sequence]) -> dict[str, list[np.ndarray]]:
        """Forward and reverse KL at every token of the answers of a validation; for people, the candidates of a few.

        As much at a time as a training batch has, so that no more scores are in memory than in training. Raises as
        `_update_actor`.
        """
        for scoring in self._pending.values():  # of later steps; so that only these answers are not counted
            self._take_scores(dict(scoring), len(scoring))
        size = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        found, scored = dict[int, np.ndarray](), dict[int, TeacherTopK]()
        shown = self._shown(sequences)
        for start in range(0, len(sequences), size):
            part = sequences[start : start + size]
            with self.teacher.uncounted():
                scoring = dict(zip((s.index for s in part), self.teacher.submit(part), strict=True))
                scores = self._take_scores(scoring, len(part))
            plan = self.batches.plan([TrainSequence(sequence=s, teacher=scores[s.index]) for s in part])
            found |= self.group.compute_divergences([tuple(share) for share in plan])
            scored |= {index: scores[index] for index in shown if index in scores}
        rows = []
        for index, row in shown.items():
            rows.append(row | {"tokens": token_scores(sequences[index], scored[index], found[index], self._text)})
        self.tracking.log_tokens(rows, self.step)
        return {
            name: [found[sequence.index][:, column] for sequence in sequences]
            for column, name in enumerate(("forward_kl", "reverse_kl"))
        }

    def _shown(self, sequences: list[Sequence]) -> dict[int, dict[str, Any]]:
        """Index of an answer whose tokens are kept -> its prompt and itself as text: the first to each first prompt."""
        n, count = self.config.actor_rollout_ref.rollout.val_kwargs.n, self.config.trainer.log_val_generations
        return {
            row * n: {
                "prompt": prompt.text, "response": decode(self.tokenizer, sequences[row * n]),
                "num_tokens": len(sequences[row * n].response_ids),
            }
            for row, prompt in enumerate(self.val_prompts[: min(ANSWERS, count)])
        }  # fmt: skip

    def _text(self, ids: list[int]) -> str:
        """Of tokens, special ones too."""
        text: str = self.tokenizer.decode(ids)
        return text

    def _teacher_metrics(self) -> dict[str, float]:
        """Of the requests since the step before."""
        found = self.teacher.drain_metrics()
        in_flight = self.clock.requests(found.requests, until=found.complete_until, steps=found.steps)
        seen = {}
        if found.queue_lengths:  # a step may be shorter than the second between two messages
            seen["teacher/queue_length"] = float(np.mean(found.queue_lengths))
            seen["teacher/engine_busy"] = float(np.mean(found.engine_busy))
        if found.requests:  # the last rollouts may have been scored before
            names = ("teacher/latency", "teacher/latency_p95", "teacher/latency_p99")
            seen |= dict(zip(names, np.percentile(found.latencies, (50, 95, 99)).tolist(), strict=True))
            seen["teacher/bytes_per_token"] = found.bytes_received / found.response_tokens
        if in_flight:
            seen["teacher/tokens_per_second"] = found.tokens / in_flight
        return seen | {"teacher/retries": float(found.retries)}

"""The loop: generate, update, publish, validate, report, save.

`PPOTrainer` is a complete trainer on a reward, with a critic where the advantages need one. Subclasses override
`_update_actor` alone, which owns the whole learning signal; what it may use is listed in the class's docstring.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.config import BATCHES_AHEAD, Config, updates_per_step
from hybrid_gkd.errors import DeviceMemoryError, HybridGKDError, TrainingError
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.models.tokenizer import decode
from hybrid_gkd.ppo.best import best_to_resume, new_best
from hybrid_gkd.ppo.generation import Generation
from hybrid_gkd.ppo.guards import Guards
from hybrid_gkd.ppo.importance import with_rollout_correction
from hybrid_gkd.ppo.learning_signal import with_advantages
from hybrid_gkd.ppo.resuming import data_state, state_to_resume
from hybrid_gkd.ppo.saving import Saving
from hybrid_gkd.ppo.scheduler import RolloutsAhead
from hybrid_gkd.ppo.step_metrics import step_metrics
from hybrid_gkd.ppo.steps import total_steps
from hybrid_gkd.ppo.validation import Answers, sample_generations, validation_metrics
from hybrid_gkd.runtime.spans import Clock, working_for
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.critic import CriticTurn
from hybrid_gkd.scoring.reference import KLPenalty, reference_scorer
from hybrid_gkd.scoring.rewards import Reward, RewardScorer
from hybrid_gkd.scoring.scorer import WorkersScorer, scored
from hybrid_gkd.student.checkpoint_store import Best, CheckpointStore, TrainerState
from hybrid_gkd.types import Arrays, Pair, Rollout, Sample, Task, TrainerLog, replace_by_id, with_tasks, without_given
from hybrid_gkd.workers.batches import Batches, mean_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from hybrid_gkd.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

COMPARED = ("actor/kl_loss", "reward/mean", "reward/all_groups")
"""What a run keeps of its beginning and its end for the final table, beside the metrics of validations."""
LATE_SECONDS = 30.0
"""Grace period: the workers' group ends every wait by its own deadline; this much later it is taken for stuck."""
THROUGHPUT = {"throughput": "perf/tokens_per_second", "teacher's throughput": "teacher/tokens_per_second"}
"""Curves in the trace, and the metrics that they show."""


class PPOTrainer:
    """Trains the actor of a worker group.

    Args:
        config: the whole configuration.
        group: the workers; the caller closes them.
        tokenizer: decodes responses for rewards and samples.
        train_prompts, val_prompts: tokenized; no validation where the latter are empty.
        reward: what scores responses, which the caller closes, or a plain function of a response and the right answer;
            None where there is no reward.
        tracking, store, clock: take metrics, checkpoints, spans.
        resume_from: a checkpoint folder to continue from, or None.
        settings: those of `learning_settings`, which checkpoints keep.
        stop_requested: asked once a step; where it is true, training ends there, and the step is saved.

    Raises DataError: fewer prompts than one batch; CheckpointError: it cannot be loaded or belongs to other data.

    For subclasses, whose `_update_actor` gets a rollout and returns the metrics of the optimizer steps on it:

        with_advantages         rewards, values and advantages of a rollout; the critic's update
        with_old_logprobs       log-probabilities under the weights before the rollout's first mini-batch
        with_corrections        the same where a policy loss needs them, and importance weights
        with_reference          the reference policy's log-probabilities, where the loss needs them
        train                   all optimizer steps on samples that have their signals
        train_mini_batches      some of them, each on a whole mini-batch of `batches.mini_batches`
        train_mini_batch        one of them, on the last part of a mini-batch
        batches, group, clock   how samples are cut, the workers, spans for the time of each phase
        generation.on_finished  called with samples as they leave the rollout engine
        validators              called with the samples of a validation
    """

    def __init__(
        self, config: Config, *, group: WorkerGroup, tokenizer: Any, train_prompts: list[Task],
        val_prompts: list[Task], reward: RewardScorer | Reward | None, tracking: TrainerLog, store: CheckpointStore,
        resume_from: Path | None = None, settings: dict[str, Any] | None = None, clock: Clock | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ):  # fmt: skip
        self.config, self.group, self.tokenizer = config, group, tokenizer
        self.num_train_prompts, self.val_prompts = len(train_prompts), val_prompts
        self._tasks = {task.index: task for task in train_prompts}
        self.clock, self.stop_requested = clock or Clock(), stop_requested
        if reward is not None and not isinstance(reward, RewardScorer):
            reward = RewardScorer.of(reward, tokenizer, config, self.clock)
        self.rewards = reward
        self.tracking, self.store, self.settings = tracking, store, settings or {}
        self.total_steps = total_steps(config, train_prompts)
        self.step = self.extra_batches = 0
        """Training steps done, and generation batches that they took beyond one each: the position in the data."""
        self.saving = Saving(config, group, store)
        self.best: Best | None = None
        """The best validation by `trainer.best_metric`; the store has its checkpoint."""
        self._unreported: dict[str, float] = {}
        """Metrics of the update of `step`, until they are reported."""
        self.first_metrics: dict[str, float] = {}
        """Of the whole run, also a resumed one: the validation before training, and the first step."""
        self.last_metrics: dict[str, float] = {}
        """Of the newest step, with its validation where it had one; empty before the first."""
        self.validators: list[Callable[[list[Pair]], dict[str, list[np.ndarray]]]] = []
        """Called with the samples of a validation; give by name a value for every token of each, [R], whose means are
        reported. They may compute with the student."""
        self._rollouts = RolloutsAhead(
            lambda step: self.generation.rollout(step), depth=BATCHES_AHEAD[config.trainer.scheduler], clock=self.clock,
            in_background=not config.actor_rollout_ref.hybrid_engine,
            inactivity_timeout=Timeout(
                config.actor_rollout_ref.nccl_timeout + LATE_SECONDS, "actor_rollout_ref.nccl_timeout, a grace period"
            ),
        )
        self.generation = Generation(config, group, train_prompts, self.rewards, self._rollouts, self.clock)
        self.batches = Batches(config, config.actor_rollout_ref.actor, group)
        self.critic = CriticTurn(config, group, self.clock) if config.uses_critic else None
        self.old_logprobs = WorkersScorer("old_logprobs", group.compute_logprobs, self.batches)
        self.reference, self.kl_penalty = reference_scorer(config, group, self.batches), KLPenalty(config)
        self.guards = Guards()
        self._student_spec = functools.cache(functools.partial(student_spec, config))
        self._weights_are_whole = True
        """Whether the actor's weights are those of `step`: not while optimizer steps are taken."""
        if resume_from is not None:
            self._resume(resume_from)

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint that this run wrote or continued from."""
        return self.saving.newest

    def fit(self) -> None:
        """Train to the last step, or until a stop is requested; with `trainer.val_only` validate and no more."""
        before_training = self.step == 0 and self.config.trainer.val_before_train
        with working_for(self.step):
            self._publish_weights()
            if self.val_prompts and (before_training or self.config.trainer.val_only):
                self._report(self._validate())
        self.clock.take()  # the first step's times are its own
        self.clock.untimed()
        try:
            rollouts = self._rollouts(self.step + 1, self.total_steps)
            while not self.stop_requested() and (rollout := next(rollouts, None)):
                with working_for(rollout.step):
                    self._train_step(rollout)
            if self.step < self.total_steps:
                self._end_early()
            self.saving.finish()
        except Exception as error:
            self._save_last_state(error)
            raise
        finally:
            if self.step < self.total_steps:
                self._say_where_to_continue()

    def _train_step(self, rollout: Rollout) -> None:
        """Update, publish, validate, report, save; without what takes time that a requested stop does not have."""
        metrics = self._unreported = self._update_actor(rollout)
        self.step, self.extra_batches, self._weights_are_whole = rollout.step, rollout.extra_batches, True
        self.kl_penalty.end_step()
        ends_here = self.stop_requested() and self.step < self.total_steps
        if self.group.saves_in_background and self._due(self.config.trainer.save_freq) and self._goes_on():
            with self.clock.span("save_checkpoint"):
                self.saving.take_snapshot()  # now: before the publish the devices have all that is saved
        validates = not ends_here and self._due(self.config.trainer.test_freq) and bool(self.val_prompts)
        if validates or (not ends_here and self.generation.draws(self.step + 1 + self._rollouts.depth)):
            self._publish_weights()
        generating = ends_here and BATCHES_AHEAD[self.config.trainer.scheduler] > 0  # else publishing has waited
        if self.step in self.config.trainer.profile_steps:
            files = self.group.write_profiles(generating=generating)
            logger.info("torch's profiler, step %d: %s", self.step, ", ".join(files))
        metrics = metrics | self._step_metrics(rollout, generating)
        metrics |= self._validate() if validates else {}
        best = new_best(self.config.trainer.best_metric, metrics, self.step, self.best) if validates else None
        saves = self._due(self.config.trainer.save_freq) or best is not None
        self._report(metrics)
        if best is not None:
            self.best = best
            logger.info("step %d is the best so far: %s %.5g", best.step, best.metric, best.value)
        # After the report: a run that resumes here finds the rows of all steps before it.
        if self.saving.look() and not saves and self._goes_on():
            self.store.reserve()
        if saves:
            self._save()

    def _end_early(self) -> None:
        """Save the last step, if it is not, and say where it is."""
        self.saving.finish()
        if self.step != self.saving.step and self.config.trainer.save_freq != 0:
            self._save()
        logger.warning("the run ends after step %d of %d, as requested", self.step, self.total_steps)

    def _update_actor(self, rollout: Rollout) -> dict[str, float]:
        """Rewards, values, advantages, the critic's update, old log-probabilities, PPO's objective. All metrics."""
        samples, metrics = self.with_advantages(rollout)
        if rollout.step <= self.config.trainer.critic_warmup:
            return metrics
        samples = self.with_reference(samples)
        with self.clock.span("update_actor"):
            samples, weights = self.with_corrections(samples)
            return self.train(samples) | metrics | weights

    def with_advantages(
        self, rollout: Rollout, samples: list[Sample] | None = None, of_tokens: Arrays | None = None
    ) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples of a rollout, of which `samples` may have more signals, with advantages; metrics.

        Of rewards of the samples, `of_tokens` and a critic's values; see the function `with_advantages`. Given answers
        get none.
        """
        everything, greedy, metrics = samples or [*rollout.samples], [*rollout.greedy], dict[str, float]()
        samples = without_given(everything)
        if not samples:
            return everything, metrics
        if of_tokens is None or self.config.trains_on_rewards:
            assert self.rewards is not None
            both = scored(self.rewards, self.pairs([*samples, *greedy]))
            samples, greedy = both[: len(samples)], both[len(samples) :]
            metrics |= self.rewards.metrics(self.pairs(samples))
        if self.config.algorithm.use_kl_in_reward:
            with self.clock.span("update_actor"):
                samples = self.with_old_logprobs(samples)
            samples = self._referenced(samples)
            of_tokens, found = self.kl_penalty.apply(samples, of_tokens)
            metrics |= found
        if self.critic is not None:
            with self.clock.span("values"):
                samples = scored(self.critic.values, self.pairs(samples))
        samples, found = with_advantages(self.config, rollout, samples, greedy, of_tokens)
        everything = replace_by_id(everything, samples)
        if self.critic is None:
            return everything, metrics | found
        steps = updates_per_step(self.config.data.train_batch_size, self.config.resolved_critic)
        with self._changing_weights(steps=steps):
            return everything, metrics | found | self.critic.update(samples)

    def with_reference(self, samples: list[Sample]) -> list[Sample]:
        """Add the reference policy's log-probabilities where the loss needs them."""
        return self._referenced(samples) if self.config.actor_rollout_ref.actor.use_kl_loss else samples

    def _referenced(self, samples: list[Sample]) -> list[Sample]:
        with self.clock.span("ref"):
            return scored(self.reference, self.pairs(samples))

    def with_corrections(
        self, samples: list[Sample], *, policy_loss: bool = True
    ) -> tuple[list[Sample], dict[str, float]]:
        """Add old log-probabilities, for a policy loss in several steps, and importance weights; return metrics too.

        Given answers get neither.
        """
        section, prompts = self.config.algorithm, self.config.data.train_batch_size
        policy_loss = policy_loss and updates_per_step(prompts, self.config.actor_rollout_ref.actor) > 1
        own = without_given(samples)
        if not own or not (section.compares_logprobs or policy_loss):
            return samples, {}
        known, metrics = self.with_old_logprobs(own), dict[str, float]()
        own, logprobs = known if policy_loss else own, [sample.array("old_logprobs") for sample in known]
        if section.compares_logprobs:
            of_sampled = self.config.has_sampled_loss
            own, metrics = with_rollout_correction(section, own, logprobs, of_sampled=of_sampled)
        return replace_by_id(samples, own), metrics

    def with_old_logprobs(self, samples: list[Sample]) -> list[Sample]:
        """Add log-probabilities of the trained tokens under the present weights, unless they are there."""
        return scored(self.old_logprobs, self.pairs(samples))

    def pairs(self, samples: Iterable[Sample]) -> list[Pair]:
        """Return samples of the training data with their tasks."""
        return [(self._tasks[sample.id.row], sample) for sample in samples]

    def train(self, samples: list[Sample]) -> dict[str, float]:
        """Take `ppo_epochs` passes in mini-batches of `ppo_mini_batch_size` prompts, one optimizer step each."""
        mini_batches = self.batches.mini_batches(samples)
        return mean_metrics(self.train_mini_batches(mini_batches * self.config.actor_rollout_ref.actor.ppo_epochs))

    def train_mini_batches(self, mini_batches: list[list[Sample]]) -> list[dict[str, float]]:
        """Take an optimizer step on each mini-batch; return the metrics of each."""
        with self._changing_weights(steps=len(mini_batches)):
            return self.group.update(self.batches.shares(mini_batches))

    def train_mini_batch(self, part: list[Sample], num_tokens: int, *, last: bool) -> dict[str, float]:
        """Take an optimizer step on a mini-batch of `num_tokens` trained tokens, of which `part` is the last part.

        `last`: no other step follows in this update.
        """
        shares = [[each] for each in self.batches.parts(part, num_tokens)]
        with self._changing_weights(steps=1):
            return self.group.update(shares, last=last)[0]

    @contextlib.contextmanager
    def _changing_weights(self, *, steps: int) -> Iterator[None]:
        """Around optimizer steps: the weights are those between two training steps again if the only one is refused."""
        were_whole, self._weights_are_whole = self._weights_are_whole, False
        try:
            yield
        except (TrainingError, DeviceMemoryError) as error:
            # Refused on all ranks, or given up by the only one: the weights are those before it.
            unchanged = isinstance(error, TrainingError) or (self.group.size == 1 and not error.weights_changed)
            self._weights_are_whole = were_whole and steps == 1 and unchanged
            raise

    def _publish_weights(self) -> None:
        self._rollouts.finish()
        with self.clock.span("sync_rollout_weights"):
            seconds = self.group.publish(self.step)
        self.clock.add("offload", seconds["offload"])

    def _validate(self) -> dict[str, float]:
        """Answer the validation prompts; what ppo/validation.py and the validators say of the answers."""
        token_values: dict[str, list[np.ndarray]] = {}
        with self.clock.span("testing"):
            found = self.generation.answers(self.val_prompts, self.step)
            pairs = with_tasks(self.val_prompts, found)
            for validator in self.validators:
                token_values |= validator(pairs)
            scores = {} if self.rewards is None else self.rewards.of_validation(pairs)
        answers = Answers(
            tasks=self.val_prompts, samples=found, token_values=token_values,
            texts=[decode(self.tokenizer, sample) for sample in found], **scores,
        )  # fmt: skip
        shown = sample_generations(answers, self.config.trainer.log_val_generations)
        self.tracking.log_generations(shown, self.step)
        return validation_metrics(answers)

    def _due(self, every: int) -> bool:
        """Whether something that happens each `every` steps happens now: -1 = at the last step, 0 = never."""
        last = self.step == self.total_steps
        return every != 0 and (last or (every > 0 and self.step % every == 0))

    def _step_metrics(self, rollout: Rollout, generating: bool) -> dict[str, float]:
        self.tracking.log_lengths([sample.num_trained for sample in rollout.samples], self.step)
        devices = [worker["device"] for worker in self.group.description]
        measured = self.clock.take() | self.group.device_metrics(generating=generating)
        metrics = step_metrics(self.config, rollout, measured, devices=devices, spec=self._student_spec)
        self.guards.look(metrics, self.step)
        return metrics

    def _report(self, metrics: dict[str, float]) -> None:
        metrics = metrics | self.clock.take() | self.clock.overlap() | {"training/global_step": float(self.step)}
        metrics |= self.clock.untimed()
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise TrainingError(f"step {self.step}: {bad[0]} is {metrics[bad[0]]}")
        self._remember(metrics)
        self.tracking.log(metrics, self.step)
        self.clock.count({f"{name}, tokens/s": metrics[key] for name, key in THROUGHPUT.items() if key in metrics})
        self._unreported = {}

    def _remember(self, metrics: dict[str, float]) -> None:
        """Keep what the final table compares: only what belongs to the first or the newest step is called so."""
        names = [name for name in metrics if name in COMPARED or name.startswith("val/")]
        kept = {name: metrics[name] for name in names if math.isfinite(metrics[name])}
        if self.step <= 1:
            before = {name: value for name, value in kept.items() if name.startswith("val/") == (self.step == 0)}
            self.first_metrics |= before
        self.last_metrics = kept

    def _goes_on(self) -> bool:
        return self.step < self.total_steps and not self.stop_requested()

    def _save(self) -> None:
        """Begin to write the step's snapshot; where it has none yet, take one, or write at once."""
        with self.clock.span("save_checkpoint"):
            behind = self.saving.has_snapshot
            if not behind and self.group.saves_in_background and self._goes_on():
                self.saving.take_snapshot()
                behind = True
            (self.saving.start if behind else self.saving.write)(self._state())
        if not behind and self._goes_on():
            self.store.reserve()

    def _save_last_state(self, cause: Exception) -> None:
        """After a failure: a checkpoint of the last step, if the student still has its weights and answers."""

        def nothing_new() -> bool:
            return self.step == self.saving.step or not self._weights_are_whole

        if self.config.trainer.save_freq == 0 or (nothing_new() and not self.saving.is_writing):
            return
        text = "the run has failed, what can be saved is saved: %s"  # now: that may take long
        logger.error(text, cause if isinstance(cause, HybridGKDError) else repr(cause))
        try:
            if self.group.can_save():
                self.saving.finish()
                if nothing_new():
                    return
                self._remember(self._unreported)
                if self.best is not None and self.best.step != self.step:
                    self.best = self.saving.best  # of a checkpoint that failed there is nothing to keep
                self.saving.write(self._state())
                logger.warning("the state after step %d is saved: %s", self.step, self.checkpoint)
                if self._unreported:  # a run that resumes here will not see this step again
                    metrics = {name: value for name, value in self._unreported.items() if math.isfinite(value)}
                    self.tracking.log(metrics | {"training/global_step": float(self.step)}, self.step)
        except Exception as error:  # what ended the run is what has to be reported
            logger.warning("the state after step %d could not be saved: %s", self.step, error)

    def _say_where_to_continue(self) -> None:
        """After a run that has not come to its end."""
        lost = self.step - self.saving.step
        left = "" if not lost else f"; step {self.step} is lost" if lost == 1 else f"; the {lost} steps since are lost"
        if self.checkpoint is None:
            logger.warning("there is no checkpoint to continue from%s", left)
        else:
            logger.warning("to continue from: %s, after step %d%s", self.checkpoint, self.saving.step, left)
        if (best := self.saving.best) is not None:
            logger.warning("the best checkpoint: %s, %s %.5g", self.store.folder(best.step), best.metric, best.value)

    def _state(self) -> TrainerState:
        data = data_state(self.config, self.num_train_prompts)
        return TrainerState(
            step=self.step, data=data, first_metrics=dict(self.first_metrics), settings=self.settings, best=self.best,
            kl_coef=self.kl_penalty.state, extra_batches=self.extra_batches, working_dir=os.getcwd(),
        )  # fmt: skip

    def _resume(self, folder: Path) -> None:
        state = state_to_resume(folder, self.config, self.num_train_prompts)
        self.group.load_checkpoint(folder)
        self.step = self.saving.step = state.step
        self.extra_batches = self.generation.extra_batches = state.extra_batches
        self.first_metrics = dict(state.first_metrics)
        self.best = self.saving.best = best_to_resume(self.config.trainer.best_metric, state, self.store)
        self.kl_penalty.resume(state.kl_coef)
        self.saving.newest = folder

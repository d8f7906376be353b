"""The training loop: generate, update, publish, validate, report, save.

`PPOTrainer` is a complete PPO/GRPO trainer, with a critic if the advantage estimator needs one. Subclasses override
`_update_actor` alone, which owns the whole learning signal; the class's docstring lists its building blocks.
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
from hybrid_gkd.ppo.best import best_to_resume, is_comparable, new_best
from hybrid_gkd.ppo.checkpoint_writer import CheckpointWriter, Snapshots
from hybrid_gkd.ppo.generation import RolloutGenerator
from hybrid_gkd.ppo.guards import Guards
from hybrid_gkd.ppo.importance import with_rollout_correction
from hybrid_gkd.ppo.learning_signal import with_advantages
from hybrid_gkd.ppo.resuming import changed_settings, data_state, state_to_resume, validation_settings
from hybrid_gkd.ppo.rollout_pipeline import RolloutPipeline
from hybrid_gkd.ppo.step_metrics import step_metrics
from hybrid_gkd.ppo.steps import total_steps
from hybrid_gkd.ppo.validation import ValidationSamples, select_generations, validation_metrics
from hybrid_gkd.runtime.spans import Clock, working_for
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.critic_stage import CriticStage
from hybrid_gkd.scoring.reference_scorer import KLPenalty, reference_scorer
from hybrid_gkd.scoring.rewards import Reward, RewardScorer
from hybrid_gkd.scoring.scorer import WorkersScorer, scored
from hybrid_gkd.student.checkpoint_store import Best, CheckpointStore, TrainerState, prepare_snapshots
from hybrid_gkd.types import Arrays, Pair, Rollout, Sample, Task, TrainerLog, replace_by_id, with_tasks, without_given
from hybrid_gkd.workers.batches import Batches, mean_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from hybrid_gkd.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

COMPARED = ("actor/kl_loss", "reward/mean", "reward/all_groups")
"""Metrics kept from the first and the last step for the final table, besides those of validations."""
GRACE_SECONDS = 30.0
"""Margin after the worker group's own deadline before a generation counts as hung."""
THROUGHPUT = {"throughput": "perf/tokens_per_second", "teacher's throughput": "teacher/tokens_per_second"}
"""Counter tracks of the trace, and their metrics."""


class PPOTrainer:
    """Trains the actor of a worker group.

    Args:
        config: the whole configuration.
        group: the workers; the caller closes them.
        tokenizer: decodes completions for rewards and logged samples.
        train_prompts, val_prompts: tokenized prompts; without the latter there is no validation.
        reward: scorer of completions (the caller closes it), or a function of a completion and the reference answer;
            None without rewards.
        tracking, store, clock: receive metrics, checkpoints, spans.
        resume_from: checkpoint folder to resume from, or None.
        settings: result of `learning_settings`, stored in checkpoints.
        stop_requested: polled once per step; once true, training stops after that step and saves it.

    Raises DataError: fewer prompts than one batch; CheckpointError: it cannot be loaded or was written with other data.

    Building blocks for `_update_actor`, which takes a rollout and returns the metrics of its optimizer steps:

        with_advantages         rewards, values and advantages of a rollout; the critic's update
        with_old_logprobs       log-probabilities under the weights before the rollout's first mini-batch
        with_corrections        old log-probabilities if the policy loss needs them, and importance weights
        with_reference          the reference policy's log-probabilities, if the loss needs them
        train                   all optimizer steps on samples that have their signals
        train_mini_batches      optimizer steps on whole mini-batches of `batches.mini_batches`
        start_mini_batch        one optimizer step, on the last part of a mini-batch, without waiting for it
        batches, group, clock   batching, the workers, spans for the time of each phase
        generation.on_finished  callbacks with samples as they leave the rollout engine
        validators              callbacks with the samples of a validation
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
        """Position in the data: completed training steps, and generation batches beyond one per step."""
        self.saving = CheckpointWriter(config, group, store)
        self._validation = validation_settings(config, val_prompts, self.settings)
        self.best: Best | None = None
        """Best validation by `trainer.best_metric`; the store has its checkpoint."""
        self._unreported: dict[str, float] = {}
        """Metrics of the update of `step` until they are reported."""
        self.first_metrics: dict[str, float] = {}
        """Metrics of the validation before training and of the first step, also in a resumed run."""
        self.last_metrics: dict[str, float] = {}
        """Metrics of the newest step and its validation, if any; empty before the first."""
        self.constant_metrics: dict[str, float] = {}
        """Metrics that are the same in every report of this start."""
        self.validators: list[Callable[[list[Pair]], dict[str, list[np.ndarray]]]] = []
        """Callbacks that take the samples of a validation and return, by metric, one value per token of each sample,
        [R]; the means are reported. They may run the student."""
        self._rollouts = RolloutPipeline(
            lambda step: self.generation.rollout(step), depth=BATCHES_AHEAD[config.trainer.scheduler], clock=self.clock,
            in_background=not config.actor_rollout_ref.hybrid_engine,
            inactivity_timeout=Timeout(
                config.actor_rollout_ref.nccl_timeout + GRACE_SECONDS, "actor_rollout_ref.nccl_timeout, a grace period"
            ),
        )
        self.generation = RolloutGenerator(config, group, train_prompts, self.rewards, self._rollouts, self.clock)
        self.batches = Batches(config, config.actor_rollout_ref.actor, group)
        self.critic = CriticStage(config, group, self.clock) if config.uses_critic else None
        self.old_logprobs = WorkersScorer("old_logprobs", group.compute_logprobs, self.batches)
        self.reference, self.kl_penalty = reference_scorer(config, group, self.batches), KLPenalty(config)
        self.guards = Guards()
        self.snapshots = Snapshots(
            config.trainer.snapshot_freq, self.saving, store, self.clock, state=self._state, continues=self._continues
        )
        self._student_spec = functools.cache(functools.partial(student_spec, config))
        self._weights_consistent = True
        """Whether the actor's weights are those of `step`; False during optimizer steps."""
        if resume_from is not None:
            self._resume(resume_from)

    @property
    def checkpoint(self) -> Path | None:
        """Newest complete checkpoint that this run wrote or resumed from."""
        return self.saving.newest

    def fit(self) -> None:
        """Train to the last step or until a stop is requested; with `trainer.val_only` only validate."""
        before_training = self.step == 0 and self.config.trainer.val_before_train
        with working_for(self.step):
            self._publish_weights()
            if self.val_prompts and (before_training or self.config.trainer.val_only):
                self._report(self._validate())
        self.clock.take()  # drop the times before the first step
        self.clock.untimed()
        unfinished = True
        try:
            rollouts = self._rollouts(self.step + 1, self.total_steps)
            while not self.stop_requested() and (rollout := next(rollouts, None)):
                with working_for(rollout.step):
                    self._train_step(rollout)
            if self.step < self.total_steps:
                self._end_early()
            self.saving.finish()
            unfinished = self.step < self.total_steps
        except Exception as error:
            self._save_last_state(error)
            raise
        finally:
            if unfinished:
                self.saving.log_resume_hint(self.step)

    def _train_step(self, rollout: Rollout) -> None:
        """Update, publish, validate, report, save. A requested stop skips publishing and validation."""
        self.snapshots.poll()
        metrics = self._unreported = self._update_actor(rollout)
        self.step, self.extra_batches, self._weights_consistent = rollout.step, rollout.extra_batches, True
        self.kl_penalty.end_step()
        ends_here = self.stop_requested() and self.step < self.total_steps
        if self.group.saves_in_background and self._due(self.config.trainer.save_freq) and self._continues():
            with self.clock.span("save_checkpoint"):
                self.saving.take_snapshot()  # before publishing, while the whole state is on the devices
        self.snapshots.take(self.step)
        validates = not ends_here and self._due(self.config.trainer.test_freq) and bool(self.val_prompts)
        if validates or (not ends_here and self.generation.draws(self.step + 1 + self._rollouts.depth)):
            self._publish_weights()
        # Otherwise publishing has waited for generation.
        generating = ends_here and BATCHES_AHEAD[self.config.trainer.scheduler] > 0
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
            logger.info("new best validation: step %d, %s %.5g", best.step, best.metric, best.value)
        # After the report, so that a run resumed from this checkpoint finds the metrics of all earlier steps.
        if self.saving.poll() and not saves and self._continues():
            self.store.reserve()
        if saves:
            self._save()
        self.snapshots.start()

    def _end_early(self) -> None:
        """Save the last step unless it is saved already."""
        self.saving.finish()
        if self.step != self.saving.step and self.config.trainer.save_freq != 0:
            self._save()
        logger.warning("stopped after step %d of %d on request", self.step, self.total_steps)

    def _update_actor(self, rollout: Rollout) -> dict[str, float]:
        """Compute rewards, values, advantages and old log-probabilities; update critic and actor. Return metrics."""
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
        """Return the samples of a rollout with advantages, and metrics; given completions get none.

        Args:
            samples: the rollout's samples with further signals; None: as they are in the rollout.
            of_tokens: additional token-level rewards; see `hybrid_gkd.ppo.learning_signal.with_advantages`.
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
        """Add the reference policy's log-probabilities if the loss needs them."""
        return self._referenced(samples) if self.config.actor_rollout_ref.actor.use_kl_loss else samples

    def _referenced(self, samples: list[Sample]) -> list[Sample]:
        with self.clock.span("ref"):
            return scored(self.reference, self.pairs(samples))

    def with_corrections(
        self, samples: list[Sample], *, policy_loss: bool = True
    ) -> tuple[list[Sample], dict[str, float]]:
        """Add importance weights, and old log-probabilities for a policy loss with several updates; return metrics too.

        Given completions get neither.
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
        """Add log-probabilities of the trained tokens under the present weights, unless present."""
        return scored(self.old_logprobs, self.pairs(samples))

    def pairs(self, samples: Iterable[Sample]) -> list[Pair]:
        """Return training samples with their tasks."""
        return [(self._tasks[sample.id.row], sample) for sample in samples]

    def train(self, samples: list[Sample]) -> dict[str, float]:
        """Run `ppo_epochs` passes in mini-batches of `ppo_mini_batch_size` prompts, one optimizer step each."""
        mini_batches = self.batches.mini_batches(samples)
        return mean_metrics(self.train_mini_batches(mini_batches * self.config.actor_rollout_ref.actor.ppo_epochs))

    def train_mini_batches(self, mini_batches: list[list[Sample]]) -> list[dict[str, float]]:
        """Take an optimizer step on each mini-batch; return the metrics of each."""
        with self._changing_weights(steps=len(mini_batches)):
            return self.group.update(self.batches.shares(mini_batches))

    def start_mini_batch(
        self, part: list[Sample], num_tokens: int, *, last: bool
    ) -> Callable[[], list[dict[str, float]]]:
        """Start an optimizer step on a mini-batch of `num_tokens` trained tokens, given its last part.

        Returns a function that waits for its metrics. The next step may be started before this one is complete; if this
        one fails, the workers reject the next. `last`: whether this is the last optimizer step of the update.
        """
        shares = [[each] for each in self.batches.parts(part, num_tokens)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._changing_weights(steps=1))
            finish, under_way = self.group.start_update(shares, last=last), stack.pop_all()

        def wait() -> list[dict[str, float]]:
            with under_way:
                return finish()

        return wait

    @contextlib.contextmanager
    def _changing_weights(self, *, steps: int) -> Iterator[None]:
        """Mark the weights as inconsistent during `steps` optimizer steps, and after a failure that changed them."""
        were_whole, self._weights_consistent = self._weights_consistent, False
        try:
            yield
        except (TrainingError, DeviceMemoryError) as error:
            # Rejected on all ranks, or failed on the only one before its weights changed.
            unchanged = isinstance(error, TrainingError) or (self.group.size == 1 and not error.weights_changed)
            self._weights_consistent = were_whole and steps == 1 and unchanged
            raise

    def _publish_weights(self) -> None:
        self._rollouts.finish()
        with self.clock.span("sync_rollout_weights"):
            seconds = self.group.publish(self.step)
        self.clock.add("offload", seconds["offload"])

    def _validate(self) -> dict[str, float]:
        """Complete the validation prompts, log some completions and return the validation metrics."""
        token_values: dict[str, list[np.ndarray]] = {}
        with self.clock.span("testing"):
            found = self.generation.validation_samples(self.val_prompts, self.step)
            pairs = with_tasks(self.val_prompts, found)
            for validator in self.validators:
                token_values |= validator(pairs)
            scores = {} if self.rewards is None else self.rewards.validation_scores(pairs)
        validation = ValidationSamples(
            tasks=self.val_prompts, samples=found, token_values=token_values,
            texts=[decode(self.tokenizer, *pair) for pair in pairs], **scores,
        )  # fmt: skip
        shown = select_generations(validation, self.config.trainer.log_val_generations)
        self.tracking.log_generations(shown, self.step)
        return validation_metrics(validation)

    def _due(self, every: int) -> bool:
        """Return whether an action of period `every` is due: -1 = at the last step, 0 = never."""
        last = self.step == self.total_steps
        return every != 0 and (last or (every > 0 and self.step % every == 0))

    def _step_metrics(self, rollout: Rollout, generating: bool) -> dict[str, float]:
        self.tracking.log_lengths([sample.num_trained for sample in rollout.samples], self.step)
        devices = [worker["device"] for worker in self.group.description]
        measured = self.clock.take() | self.group.device_metrics(generating=generating)
        metrics = step_metrics(self.config, rollout, measured, devices=devices, spec=self._student_spec)
        self.guards.check(metrics, self.step)
        return metrics

    def _report(self, metrics: dict[str, float]) -> None:
        metrics = metrics | self.clock.take() | self.clock.overlap() | {"training/global_step": float(self.step)}
        metrics |= self.clock.untimed() | self.constant_metrics
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise TrainingError(f"step {self.step}: {bad[0]} is {metrics[bad[0]]}")
        self._remember(metrics)
        self.tracking.log(metrics, self.step)
        self.clock.count({f"{name}, tokens/s": metrics[key] for name, key in THROUGHPUT.items() if key in metrics})
        self._unreported = {}

    def _remember(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of the first and the newest step that the final table compares."""
        names = [name for name in metrics if name in COMPARED or name.startswith("val/")]
        kept = {name: metrics[name] for name in names if math.isfinite(metrics[name])}
        if self.step <= 1:
            before = {name: value for name, value in kept.items() if name.startswith("val/") == (self.step == 0)}
            self.first_metrics |= before
        self.last_metrics = kept

    def take_snapshots(self) -> None:
        """Take snapshots from now on. Raises CheckpointError: their folder cannot be created."""
        self.saving.snapshots = prepare_snapshots(self.store.run_dir, self.config.trainer.snapshot_dir)

    def _continues(self) -> bool:
        return self.step < self.total_steps and not self.stop_requested()

    def _save(self) -> None:
        """Save the step: in the background from a snapshot if the workers support it, otherwise synchronously."""
        with self.clock.span("save_checkpoint"):
            copied = self.saving.copied_for is self.store
            if not copied and self.group.saves_in_background and self._continues():
                self.saving.take_snapshot()
            in_background = self.saving.copied_for is self.store
            (self.saving.start if in_background else self.saving.write)(self._state())
        if not in_background and self._continues():
            self.store.reserve()

    def _save_last_state(self, cause: Exception) -> None:
        """After a failure, save the last step if the workers respond and their weights are consistent."""

        def nothing_new() -> bool:
            saves = self.config.trainer.save_freq != 0 and self._weights_consistent
            return not saves or self.step == self.saving.step

        if nothing_new() and not self.saving.is_writing:
            return
        text = "training failed, saving the last completed step: %s"  # logged first, because saving may take long
        logger.error(text, cause if isinstance(cause, HybridGKDError) else repr(cause))
        try:
            if self.group.can_save():
                self.saving.finish()
                if nothing_new():
                    return
                self._remember(self._unreported)
                if self.best is not None and self.best.step != self.step:
                    self.best = self.saving.best  # the checkpoint of a later best was not written
                self.saving.write(self._state())
                logger.warning("saved the state after step %d: %s", self.step, self.checkpoint)
                if self._unreported:  # a resumed run does not repeat this step
                    metrics = {name: value for name, value in self._unreported.items() if math.isfinite(value)}
                    self.tracking.log(metrics | {"training/global_step": float(self.step)}, self.step)
        except Exception as error:  # `cause` is the error to raise
            logger.warning("cannot save the state after step %d: %s", self.step, error)

    def _state(self) -> TrainerState:
        data = data_state(self.config, self.num_train_prompts)
        return TrainerState(
            step=self.step, data=data, first_metrics=dict(self.first_metrics), settings=self.settings, best=self.best,
            kl_coef=self.kl_penalty.state, extra_batches=self.extra_batches, working_dir=os.getcwd(),
            validation=self._validation,
        )  # fmt: skip

    def _resume(self, folder: Path) -> None:
        state = state_to_resume(folder, self.config, self.num_train_prompts)
        self.group.load_checkpoint(folder)
        self.step = state.step
        self.saving.resume(folder, state)
        self.extra_batches = self.generation.extra_batches = state.extra_batches
        self.first_metrics = dict(state.first_metrics)
        self.best = self.saving.best = best_to_resume(self.config.trainer.best_metric, state, self.store)
        self._compare_validations(state)
        self.kl_penalty.resume(state.kl_coef)

    def _compare_validations(self, state: TrainerState) -> None:
        """Drop the checkpoint's validation metrics that depend on settings which have changed since."""
        if not self.val_prompts:  # nothing is compared until a later start
            self._validation = state.validation
        changed = changed_settings(state.validation, self._validation, folder=state.working_dir)
        if not changed or self.config.trainer.val_only:
            return
        if self.best is not None and not is_comparable(self.best.metric, changed):
            self.best = self.saving.best = None
        self.first_metrics = {
            name: value for name, value in self.first_metrics.items()
            if not name.startswith("val/") or is_comparable(name, changed)
        }
        logger.warning(
            "validation metrics that depend on these settings are not compared with earlier ones (was -> is):\n%s",
            "\n".join(changed),
        )

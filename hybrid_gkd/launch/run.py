"""Execute a run: check, assemble, train, shut down.

Nothing is loaded or written before the checks of preflight.py have passed; then the local teacher and the workers load
in parallel.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hybrid_gkd.config import Config, run_teachers
from hybrid_gkd.config.loading import to_yaml
from hybrid_gkd.errors import CheckpointError, ConfigError, describe_error
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.compatibility import check_confidence, check_same_teacher
from hybrid_gkd.launch.inputs import teacher_templates
from hybrid_gkd.launch.plan import RunPlan, check_free_memory, checkpoint_files, host_line
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.launch.restarts import fit_with_restarts
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.launch.teacher import RunTeachers, refuse_teacher_gpu
from hybrid_gkd.offload.budget import Memory
from hybrid_gkd.offload.needs import with_planned_caches
from hybrid_gkd.ppo.steps import optimizer_steps
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.reporting.final_table import final_table
from hybrid_gkd.reporting.logs import failure_logged, run_log
from hybrid_gkd.reporting.report.live_report import live_report
from hybrid_gkd.reporting.report.page import REPORT
from hybrid_gkd.reporting.starts import recorded_start
from hybrid_gkd.reporting.terminal import show_next_steps, show_plan
from hybrid_gkd.reporting.trace import trace_recording
from hybrid_gkd.reporting.trackers import Tracking
from hybrid_gkd.runtime.files import free_path
from hybrid_gkd.scoring.own_teacher import OwnTeacher
from hybrid_gkd.scoring.reward_model_scorer import RewardModelScorer
from hybrid_gkd.scoring.rewards import RewardScorer
from hybrid_gkd.scoring.teacher_prompts import CompletionPrompts
from hybrid_gkd.scoring.teacher_scorer import TeacherScorer
from hybrid_gkd.student.checkpoint_store import CheckpointStore, exports
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import RunInfo
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup
from hybrid_gkd.workers.placement import Placement
from hybrid_gkd.workers.pool import Pool

logger = logging.getLogger(__name__)

LOCK_SECONDS = 1.0
"""Timeout for the lock of a run folder; a report holds it for less while it checks whether the run is active."""


def suggest_next_steps(config: Config) -> None:
    """Print commands to use after a run, on a terminal."""
    if not is_interactive(config.trainer.console):
        return
    report, newest = config.run_dir.absolute() / REPORT, CheckpointStore(config.experiment_dir, keep=None).latest()
    show_next_steps(
        sys.stderr, report=report if report.is_file() else None, run_dir=config.run_dir,
        huggingface=next(iter(exports(newest)), None),
        base=config.actor_rollout_ref.model.path, on_gpu=torch.cuda.is_available(),
        train_on=further_overrides(config),
    )


def further_overrides(config: Config) -> list[str]:
    """Return the overrides with which the command of a complete run trains further."""
    keys = ["trainer.total_training_steps=N"]
    if config.trainer.resume_mode == "disable":
        keys.append("trainer.resume_mode=auto")
    if config.actor_rollout_ref.actor.optim.lr_scheduler_type != "constant":  # the schedule depends on them
        keys.append("trainer.allow_changed_config=true")
    return keys


def run(
    config: Config, *, teacher_accuracy: float | None = None, recipe: str | None = None,
    changed: Mapping[str, Any] = MappingProxyType({}), set_keys: Collection[str] = (),
    stopping: Stopping | None = None,
) -> str:
    """Train and return the final table.

    Args:
        teacher_accuracy: accuracy of the teacher on the validation prompts, if known.
        recipe, changed: configuration file of the run and the changes to it, for the run's report.
        set_keys: keys that the user set, of which those without effect are logged.
        stopping: ends training early, after a step.

    Raises HybridGKDError after all started processes have been stopped; see errors.py.
    """
    started, stopping = time.monotonic(), stopping or Stopping()
    draws = is_interactive(config.trainer.console)
    about = {"recipe": recipe, "changed": dict(changed), "teacher_accuracy": teacher_accuracy}
    with stopping.uninterrupted_shutdown():
        facts = check_all(config, set_keys=set_keys, log_only=("plan",) if draws else ())
        if facts.finished:
            return finished_message(facts)
        if draws:
            lines = describe_placement(config, facts.plan)
            show_plan(sys.stderr, lines, facts.plan.phases, card_bytes=facts.plan.card_bytes)
        trainer = execute(facts, stopping, about)
    return summarise(trainer, started, teacher_accuracy, resumed=facts.resumption is not None)


def execute(facts: Facts, stopping: Stopping, about: Mapping[str, Any] = MappingProxyType({})) -> PPOTrainer:
    """Start everything, train (with `trainer.val_only` validate), shut down, and return the trainer.

    `about`: further fields of starts.jsonl. Raises as `run`.
    """
    config = facts.config
    with exit_stack() as stack:
        stack.enter_context(locked_run_folder(config))
        folder = os.stat(config.run_dir)
        stack.enter_context(run_log(config.run_dir))
        stack.enter_context(failure_logged())
        write_config(config)
        if not config.trainer.val_only:
            stack.enter_context(live_report(config.run_dir))
        about = {"step": facts.steps_done, "total_steps": facts.steps, "loaded": facts.plan.loaded, **about}
        with recorded_start(config.run_dir, about) as is_ready, failure_logged(), stopping.uninterrupted_shutdown():
            assembly = Assembly(facts, stack, stopping)
            trainer = fit_with_restarts(facts, stack, stopping, assembly.build, is_ready)
            check_run_folder(config.run_dir, folder, trainer.checkpoint)
    return trainer


@contextlib.contextmanager
def exit_stack() -> Iterator[contextlib.ExitStack]:
    """Return an ExitStack; an error of the block is raised also if a callback then raises another, which is logged."""
    first: BaseException | None = None
    try:
        with contextlib.ExitStack() as stack:
            try:
                yield stack
            except BaseException as error:
                first = error
                raise
    except Exception as error:
        if first is None or error is first:
            raise
        logger.warning("another error during the shutdown: %s", describe_error(error))
        raise first from first.__cause__


def check_run_folder(run_dir: Path, before: os.stat_result, checkpoint: Path | None) -> None:
    """Raise CheckpointError if the run folder was replaced since the start, or lacks the newest checkpoint."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(run_dir), before) and (checkpoint is None or checkpoint.is_dir()):
            return
    left = checkpoint if checkpoint is not None and checkpoint.is_dir() else "none"
    raise CheckpointError(
        f"{run_dir}: the run folder was deleted or replaced during the run, and its logs and metrics are lost; "
        f"checkpoint that is left: {left}"
    )


def is_interactive(console: str) -> bool:
    """Return whether the console is a terminal that shows more than a log."""
    return sys.stderr.isatty() and console in ("auto", "progress")


def describe_placement(config: Config, plan: RunPlan) -> list[str]:
    """Return lines about the models, workers and steps of a run."""
    models = [f"student: {config.actor_rollout_ref.model.path}"]
    teachers = [teacher for teacher in run_teachers(config) if teacher.label in plan.memory.teachers]
    models += [f"{teacher.label}'s model: {teacher.section.model.path}" for teacher in teachers]
    return [*models, *plan.places, *plan.times, host_line(plan), f"run folder: {config.run_dir}"]


def finished_message(facts: Facts) -> str:
    """Return the message for a run whose steps are all done."""
    assert facts.resumption is not None
    return (
        f"nothing to do: all {facts.steps} steps of {facts.config.run_dir} are done (last checkpoint "
        f"{facts.resumption.folder.name}). To train further, set more steps "
        f"({' '.join(further_overrides(facts.config))}); to start a new run, set trainer.experiment_name=..."
    )


def write_config(config: Config) -> None:
    """Write config.yaml; a different one of an earlier start is kept as config.N.yaml."""
    file, text = config.run_dir / "config.yaml", to_yaml(config)
    if file.is_file() and file.read_bytes() != text.encode():
        file.rename(free_path(config.run_dir / "config", ".yaml"))
    file.write_text(text, encoding="utf-8")


class Assembly:
    """The parts of a run that outlive its workers: Ray and the teachers. Closing `stack` stops them.

    Raises HybridGKDError.
    """

    def __init__(self, facts: Facts, stack: contextlib.ExitStack, stopping: Stopping):
        config, memory = facts.config, facts.plan.memory
        saves = config.trainer.save_freq != 0 and not config.trainer.val_only
        self.facts, self.stopping, self.store = facts, stopping, CheckpointStore(
            config.run_dir, keep=config.trainer.max_actor_ckpt_to_keep,
            reserved_bytes=facts.plan.checkpoint_bytes if saves else 0,
            reserved_files=checkpoint_files(config) if saves else 0,
        )
        self.store.reserve()
        stack.callback(self.store.release)  # also if the start fails
        self.clock = stack.enter_context(trace_recording(config.run_dir))
        loading = with_planned_caches(config, memory, facts.plan.gpu_bytes)
        self.loading = loading or config
        self.teachers = RunTeachers(facts, stack, self.loading)
        stack.enter_context(ray_cluster(config, memory.device, config.run_dir))
        self.teachers.check()  # raises for a port in use, before the workers load
        if memory.shares_gpu and loading is None:
            self.teachers.wait_ready()  # vLLM sizes its cache by the free memory, which must not change during that

    @functools.cached_property
    def teacher(self) -> TeacherScorer:
        """Scorer of all teachers, once they are ready. Raises TeacherError."""
        self.teachers.connect()
        for teacher in run_teachers(self.facts.config):
            if client := self.teachers.clients.get(teacher.label):
                # Checked again: for a model of the hub, the hash of its weights is known only now.
                check_same_teacher(self.facts, teacher, client.model)
                logger.info("%s: %s", teacher.label, check_confidence(self.facts, teacher, client))
        return self.teachers.scorer()

    def build(self, facts: Facts, stack: contextlib.ExitStack, kept: Sequence[Pool] = ()) -> PPOTrainer:
        """Start the workers, except the `kept` pools, and build their trainer; closing `stack` stops them all.

        Raises HybridGKDError.
        """
        config, clock = facts.config, self.clock
        group = start_workers(facts, stack, self.loading, check_teacher=self.teachers.check, kept=kept)
        teacher = self.teacher if config.distillation.enabled and not config.teaches_itself else None
        scorer, model = None, None
        if facts.reward_texts is not None:
            model = RewardModelScorer(config, group, facts.reward_texts, clock)
        if facts.reward is not None:
            scorer = RewardScorer(facts.reward, facts.tokenizer, config, model, clock)
            stack.enter_context(contextlib.closing(scorer))
        arguments: dict[str, Any] = {
            "group": group, "tokenizer": facts.tokenizer, "train_prompts": facts.train_prompts,
            "val_prompts": facts.val_prompts, "reward": scorer,
            "tracking": stack.enter_context(start_tracking(facts)),
            "store": self.store,
            "resume_from": facts.resumption.folder if facts.resumption else None, "settings": facts.settings,
            "clock": clock, "stop_requested": self.stopping.requested,
        }
        # Before the trackers close, which may have unwritten rows because of a full disk.
        stack.callback(self.store.release)
        if not config.distillation.enabled:
            return PPOTrainer(config, **arguments)
        if config.distillation.teacher_prompt_fn is not None:
            rewards = scorer if config.scores_rollouts else None
            arguments["prompts"] = CompletionPrompts(config, facts.tokenizer, rewards, teacher_templates(config))
        if config.teaches_itself:
            return GKDTrainer(config, teacher=OwnTeacher(config, group, clock, num_ids=facts.num_ids), **arguments)
        memory = facts.plan.memory
        takes_turns = any(place.takes_turns for place in memory.teachers.values())
        arguments |= {"check_teacher": self.teachers.check, "shares_gpu": memory.shares_gpu, "takes_turns": takes_turns}
        assert teacher is not None
        return GKDTrainer(config, teacher=teacher, **arguments)


def start_workers(
    facts: Facts, stack: contextlib.ExitStack, loading: Config, *, check_teacher: Callable[[], None],
    kept: Sequence[Pool] = (),
) -> WorkerGroup:
    """Start all workers with student and rollout engine, except the `kept` pools.

    Raises HybridGKDError, also if a local teacher ends.
    """
    config, plan = facts.config, facts.plan
    assert facts.steps is not None
    updates = optimizer_steps(config, facts.steps)
    group = WorkerGroup(
        loading, device=plan.memory.device, stop_token_ids=facts.stop_token_ids, num_ids=facts.num_ids,
        engine_memory=plan.memory.engine_memory, copy_bytes=plan.copy_bytes,
        num_updates=updates["actor"], num_critic_updates=updates["critic"],
        on_placed=lambda placements: check_placement(plan.memory, placements),
        check=check_teacher, kept=kept,
    )
    stack.enter_context(contextlib.closing(group))
    first = group.description[0]
    logger.info(
        "student: %s, %d worker(s) on %s, torch %s, rollout engine %s",
        config.actor_rollout_ref.model.path, group.size, first["device"], first["torch"], first["engine"],
    )
    logger.info("run folder: %s", config.run_dir)
    return group


def check_placement(memory: Memory, placements: list[Placement]) -> None:
    """Log the GPU of each worker. Raises ConfigError if one is too small, or other processes use too much of it."""
    for place in placements:
        logger.info("%s: %s", place.worker, place)
    refuse_teacher_gpu(memory.teachers, placements)
    check_free_memory(memory, placements, beside_teacher=memory.shares_gpu)


def start_tracking(facts: Facts) -> Tracking:
    """Start the trackers of `trainer.logger`. Raises ConfigError if one cannot start."""
    config = facts.config
    assert facts.steps is not None
    info = RunInfo(
        project_name=config.trainer.project_name, experiment_name=config.trainer.experiment_name,
        run_dir=config.run_dir, config=asdict(config), total_steps=facts.steps or facts.steps_done,
        resume=facts.resumption is not None and not config.trainer.val_only, start_step=facts.steps_done,
        device=facts.device,
    )
    return Tracking(config.trainer.logger, info)


@contextlib.contextmanager
def locked_run_folder(config: Config) -> Iterator[None]:
    """Create and lock the run folder; `trainer.resume_mode=disable` renames that of an earlier run.

    Raises ConfigError: another process holds the lock, or the folder cannot be created.
    """
    run_dir = config.run_dir
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir.parent / f".{run_dir.name}.lock", "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError("trainer.default_local_dir", f"cannot be written to: {error}", show_value=False) from error
    with lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    rule = f"another process is training in {run_dir}"
                    raise ConfigError("trainer.experiment_name", rule, run_dir.name) from error
            time.sleep(LOCK_SECONDS / 100)
        if config.trainer.resume_mode == "disable" and run_dir.exists():
            CheckpointStore(run_dir, keep=None).release()  # left by a killed run
            aside = run_dir.rename(free_path(run_dir))
            logger.info("earlier run of this name moved to %s", aside)
        run_dir.mkdir(exist_ok=True)
        yield


def summarise(trainer: PPOTrainer, started: float, teacher_accuracy: float | None, *, resumed: bool) -> str:
    """Return the final table."""
    run_dir = trainer.config.run_dir
    best, metrics, report = trainer.best, run_dir / "metrics.jsonl", run_dir.absolute() / REPORT
    return final_table(
        trainer.config, steps=trainer.step, wall_seconds=time.monotonic() - started, first=trainer.first_metrics,
        last=trainer.last_metrics, teacher_accuracy=teacher_accuracy, checkpoint=trainer.checkpoint,
        best=(best.value, best.step, trainer.store.folder(best.step)) if best else None,
        huggingface=next(iter(exports(trainer.checkpoint)), None),
        metrics=metrics if metrics.is_file() else None, report=report if report.is_file() else None,
        config_file=run_dir / "config.yaml", resumed=resumed,
    )

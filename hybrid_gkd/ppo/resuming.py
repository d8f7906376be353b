"""Settings that a checkpoint and the run that resumes from it must share."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hybrid_gkd.config import DEFAULT_TEACHER, NAMED, Config, has_several_teachers, run_teachers
from hybrid_gkd.data.given import CUT
from hybrid_gkd.data.prompts import Rows
from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.student.checkpoint_store import TrainerState, load_state
from hybrid_gkd.types import Task

ARR = "actor_rollout_ref"
SAME_BATCHES = (
    "data.train_batch_size", "data.gen_batch_size", "data.shuffle", "data.seed", f"{ARR}.rollout.n",
    f"{ARR}.rollout.seed",
)  # fmt: skip
"""Keys that determine the next prompts and seeds; they must not change on resume."""
LEARNING = (
    "data.train_files", "data.train_weights", "data.prompt_key", "data.response_key", "data.loss_mask",
    "data.excluded_spans_key", "data.teacher_prompt_key", "data.max_teacher_prompt_length",
    "data.max_prompt_length", "data.max_response_length", "data.max_response_length_schedule",
    "data.filter_overlong_prompts", "data.truncation", "data.apply_chat_template_kwargs",
    *(f"{ARR}.model.{key}" for key in (
        "path", "tokenizer_path", "override_config", "lora_rank", "lora_alpha", "target_modules", "exclude_modules",
        "lora_adapter_path",
    )),
    *(f"{ARR}.actor.{key}" for key in (
        "optim", "optim_sft", "ppo_mini_batch_size", "ppo_epochs", "grad_clip", "clip_ratio", "clip_ratio_low",
        "clip_ratio_high", "clip_ratio_c", "policy_loss", "loss_agg_mode", "loss_scale_factor", "entropy_coeff",
        "use_kl_loss", "fsdp_config.model_dtype",
    )),
    f"{ARR}.rollout.temperature", f"{ARR}.rollout.top_p", f"{ARR}.rollout.top_k", f"{ARR}.rollout.end_repetitions",
    f"{ARR}.teacher.source",
    "distillation", "algorithm", "trainer.scheduler", "trainer.warmup_steps_sft",
)
"""Keys and sections that determine what is learned; changes on resume must be allowed explicitly."""
LIMITS = ("algorithm.filter_groups.max_num_gen_batches", "distillation.teacher_sharing")
"""Keys within `LEARNING` that may change on resume: limits that only decide when a run fails, and placement."""
REFERENCE = tuple(f"{ARR}.{key}" for key in ("actor.kl_loss_coef", "actor.kl_loss_type", "ref.model.path", "ref.topk"))
"""Further keys with a reference policy."""
CRITIC = (
    "critic.model", "critic.optim", "critic.ppo_mini_batch_size", "critic.ppo_epochs", "critic.grad_clip",
    "critic.cliprange_value", "critic.loss_agg_mode", "critic.fsdp_config.model_dtype", "trainer.critic_warmup",
)
"""Further keys with a critic, compared after null values are resolved."""
REWARD = (
    "reward.name", "reward.functions", "reward.answer_key", "reward.strict", "reward.format", "reward.overlong_buffer",
    "reward.custom_reward_function", "reward.score_on_error", "data.reward_fn_key", "reward_model.enable",
)  # fmt: skip
"""Further keys if rewards are trained on or read by `distillation.teacher_prompt_fn`, and not only reported."""
REWARD_MODEL = ("reward_model.model.path", "reward_model.max_length")
"""Further keys if rewards that are trained on come from a reward model."""
TEACHER_PATH = f"{ARR}.teacher.model.path"
WEIGHTS = " (hash of the weights)"
TEACHER_WEIGHTS = TEACHER_PATH + WEIGHTS


def data_state(config: Config, num_prompts: int) -> dict[str, Any]:
    """Return the settings that, with the step, determine the next prompts and seeds."""
    return {key: operator.attrgetter(key)(config) for key in SAME_BATCHES} | {"num_prompts": num_prompts}


def learning_settings(config: Config, *, steps: int) -> dict[str, Any]:
    """Return the settings that determine what is learned, by dotted key, normalized by a JSON round trip.

    `steps`, the length of the run, is included if a schedule depends on it. An external service or a store of scores is
    identified by its model, not its address. The model is unknown here, so the caller adds `teacher_settings`.
    """
    loss = config.distillation
    rewards: tuple[str, ...] = REWARD if config.scores_rollouts else ()
    rewards += REWARD_MODEL if rewards and config.reward_model.enable else ()
    critic, reference = CRITIC if config.uses_critic else (), REFERENCE if config.uses_reference else ()
    config = dataclasses.replace(config, critic=config.resolved_critic)
    average = (f"{ARR}.teacher.ema_decay",) if config.has_moving_average else ()
    found = _values(config, (*LEARNING, *rewards, *critic, *reference, *average))
    found = {key: value for key, value in found.items() if key not in LIMITS}
    scheduled = loss.enabled and loss.distillation_loss_coef_schedule != "constant"
    optims = [config.actor_rollout_ref.actor.optim] + ([config.critic.optim] if critic else [])
    scheduled = scheduled or config.trainer.warmup_steps_sft > 0
    relative_warmup = any(each.lr_warmup_steps_ratio and not each.lr_warmup_steps for each in optims)
    if scheduled or relative_warmup or any(each.lr_scheduler_type != "constant" for each in optims):
        found["trainer.total_training_steps"] = steps
    if loss.teacher_prompt_fn is not None:
        found["distillation.teacher_prompt_fn (reads rewards)"] = bool(rewards)
    found[NAMED] = {each.where: each.key for each in run_teachers(config)} if has_several_teachers(config) else {}
    for teacher in run_teachers(config):
        found |= {f"{teacher.where}.weight": teacher.weight} if has_several_teachers(config) else {}
        found[f"{teacher.where}.chat_template"] = teacher.section.chat_template
        if teacher.section.is_local:
            found[f"{teacher.where}.model.path"] = teacher.section.model.path
    settings: dict[str, Any] = json.loads(json.dumps(found))
    return settings


def validation_settings(config: Config, prompts: Collection[Task], learning: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that determine the validation metrics of given weights.

    Args:
        prompts: those of validation.
        learning: result of `learning_settings`, with those of the teachers.
    """
    keys = (
        "data.max_response_length", f"{ARR}.rollout.val_kwargs", *REWARD, *REWARD_MODEL, "distillation.topk",
        "distillation.temperature",
    )  # fmt: skip
    found: dict[str, Any] = json.loads(json.dumps(_values(config, keys)))
    texts = (f"{prompt.text}\n{prompt.answer}\n" for prompt in prompts)
    found["data.val_files (checksum of prompts and answers)"] = _checksum(texts)
    return found | {key: value for key, value in learning.items() if ".teacher" in key}


def teacher_settings(where: str, model: str, weights: str) -> dict[str, str]:
    """Return the settings that identify the teacher of a section; `weights`: their hash, empty if unknown."""
    path = f"{where}.model.path"
    return {path: model} | ({path + WEIGHTS: weights} if weights else {})


def _values(section: Any, keys: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return the values of keys, and of all keys within those that are sections, by dotted key."""
    found: dict[str, Any] = {}
    for key in keys:
        value = operator.attrgetter(key)(section)
        within = [entry.name for entry in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        found |= _values(value, within, f"{prefix}{key}.") if within else {prefix + key: value}
    return found


def data_checksums(prompts: Collection[Task], tables: Collection[Rows], *, answers: bool) -> dict[str, str]:
    """Return checksums of the training data as settings, because a file may change under the same name.

    They cover the prompts' text, the messages and tools of the rows before the chat template (which may insert the
    date), the given completions, and with `answers` the reference answers of the rewards.
    """
    texts: dict[str, Iterable[str]] = {"prompts": (prompt.text for prompt in prompts)}
    rows = [row for table in tables for row in table.rows]
    texts["messages"] = (json.dumps([row.messages, row.tools], sort_keys=True, default=str) for row in rows)
    if answers:
        texts["answers"] = (f"{prompt.answer}\n" for prompt in prompts)
    completions = [row.given for row in rows if row.given is not None]
    if completions:
        given = ([each.messages, each.excluded, *([CUT] if each.is_cut else [])] for each in completions)
        texts["given answers"] = (json.dumps(each, sort_keys=True, default=str) for each in given)
    if any(prompt.teacher != DEFAULT_TEACHER for prompt in prompts):
        texts["teachers"] = (f"{prompt.teacher}\n" for prompt in prompts)
    if any(row.teacher_messages for row in rows):
        texts["teacher prompts"] = (json.dumps(row.teacher_messages, sort_keys=True, default=str) for row in rows)
    return {f"data.train_files (checksum of the {name})": _checksum(each) for name, each in texts.items()}


def template_checksums(student: Any, teachers: Mapping[str, str | None]) -> dict[str, str]:
    """Return checksums of the chat templates as settings: the student's, and by section teachers' own ones."""
    found = {f"{ARR}.model.path (checksum of the chat template)": student}
    found |= {f"{where}.chat_template (checksum)": own for where, own in teachers.items() if own is not None}
    return {name: _checksum([json.dumps(template, sort_keys=True)]) for name, template in found.items()}


def _checksum(texts: Iterable[str]) -> str:
    checksum = 0
    for text in texts:
        checksum = zlib.crc32(text.encode(errors="replace"), checksum)
    return f"{checksum:08x}"


def changed_settings(was: dict[str, Any], now: dict[str, Any], *, folder: str = "") -> list[str]:
    """Return `key: was -> now` for each differing setting; settings present on one side only are ignored.

    Two spellings of one path are equal; relative paths in `was` are relative to `folder`, if given. Two
    teacher folders with the same weights are equal too.
    """
    moved = {key.removesuffix(WEIGHTS) for key in was if key.endswith(WEIGHTS) and was[key] == now.get(key)}
    shared = (key for key in was if key in now and key not in moved)
    return [f"{key}: {was[key]} -> {now[key]}" for key in shared if not _same(was[key], now[key], folder)]


def _same(was: Any, now: Any, folder: str) -> bool:
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(_same(one, other, folder) for one, other in zip(was, now, strict=True))
    texts = isinstance(was, str) and isinstance(now, str)
    return bool(was == now) or (texts and _real_path(was, folder) == _real_path(now, ""))


def _real_path(text: str, folder: str) -> str:
    """Return the path without links and dots; keep a suffix after a colon (data set split or Python attribute)."""
    path, colon, rest = text.partition(":")
    return os.path.realpath(os.path.join(folder, os.path.expanduser(path))) + colon + rest


def state_to_resume(folder: Path, config: Config, num_prompts: int) -> TrainerState:
    """Load the trainer state of a checkpoint. Raises CheckpointError: unreadable, or its data settings differ."""
    state = load_state(folder)
    if config.trainer.val_only:
        return state
    if config.uses_critic and not (folder / "critic").is_dir():
        raise CheckpointError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic, and {folder} has none; start a "
            "new run (trainer.experiment_name) from its huggingface folder (actor_rollout_ref.model.path)"
        )
    for key, now in data_state(config, num_prompts).items():
        if state.data.get(key) != now:
            raise CheckpointError(
                f"{key}: {folder} was written with {state.data.get(key)}, this run has {now}, and cannot resume with "
                "other batches; use trainer.resume_mode=disable or another trainer.experiment_name"
            )
    return state

"""Preflight checks of the prompts of a run: distinct, and complete for its rewards and losses."""

from __future__ import annotations

import logging

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.data.tables import short
from hybrid_gkd.errors import DataError
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.ppo.steps import make_sampler, optimizer_steps
from hybrid_gkd.scoring.builtin_rewards import DATA_SOURCES, check_math_verify, final_number, function_of_source
from hybrid_gkd.types import Task

logger = logging.getLogger(__name__)


def check_distinct(facts: Facts) -> None:
    """Raise DataError if all prompts have the same tokens although their texts differ."""
    prompts = facts.train_prompts or facts.val_prompts
    if len({prompt.text for prompt in prompts}) < 2:
        return
    for name, reader in (("token_ids", "student"), ("teacher_ids", "teacher")):
        found = [getattr(prompt, name) for prompt in prompts]
        if found[0] is not None and all(np.array_equal(found[0], ids) for ids in found):
            key = "data.val_files" if facts.config.trainer.val_only else "data.train_files"
            raise DataError(
                f"{key}: all {len(prompts)} prompts have the same tokens for the {reader}, "
                f"{short(facts.tokenizer.decode(found[0]))}, although their texts differ: its chat template drops the "
                "prompt, or data.truncation cuts it off"
            )


def check_teacher_prompts(config: Config, prompts: list[Task]) -> None:
    """Raise DataError if the teacher equals the student: its present weights, and the same prompt in all rows."""
    live = config.teaches_itself and config.actor_rollout_ref.teacher.source == "live"
    live = live and config.distillation.teacher_prompt_fn is None
    same = (task.teacher_ids is None or np.array_equal(task.teacher_ids, task.token_ids) for task in prompts)
    if live and prompts and all(same):
        raise DataError(
            f"data.train_files: no row has another prompt for the teacher in the column "
            f"{config.data.teacher_prompt_key!r} (data.teacher_prompt_key), without which "
            "actor_rollout_ref.teacher.source=live teaches nothing"
        )


def check_given_answers(config: Config, prompts: list[Task]) -> str:
    """Return the number of given completions as text. Raises DataError if a required one is missing."""
    key = config.data.response_key
    if key is None:
        return ""
    missing = [prompt for prompt in prompts if prompt.response_ids is None]
    if len(missing) == len(prompts):
        raise DataError(f"data.train_files: no row has a completion in the column {key!r} (data.response_key)")
    for needs, rule in (
        (config.trainer.warmup_steps_sft > 0, "trainer.warmup_steps_sft"),
        (config.is_sft, "distillation.enabled=false without distillation.on_policy_fraction"),
    ):
        if missing and needs:
            raise DataError(
                f"{missing[0].where}: no completion in the column {key!r} (data.response_key); {rule} trains on given "
                f"completions only ({len(missing)} of all {len(prompts)} rows have none)"
            )
    return f" ({len(prompts) - len(missing)} with a given completion)"


def check_data_sources(facts: Facts) -> None:
    """Check that by_data_source has a function for every row. Raises DataError; ConfigError: a library is missing."""
    if "by_data_source" not in (facts.reward or {}):
        return
    sources = {prompt.data_source for prompt in facts.prompts}
    if {"math", "math_dapo"} & set(map(function_of_source, sources)):
        check_math_verify()
    for prompt in facts.prompts:
        if function_of_source(prompt.data_source) is None:
            raise DataError(
                f"{prompt.where}, column {facts.config.data.reward_fn_key!r} (data.reward_fn_key): "
                f"reward.name=by_data_source has no function for {prompt.data_source!r}; allowed are "
                f"{', '.join(DATA_SOURCES)}, and names that begin with aime"
            )


def check_right_answers(facts: Facts) -> None:
    """Check that the reward gsm8k finds a number in every right answer. Raises DataError.

    Without this check, reward functions would fail after a rollout. Expressions for the reward `math` are not checked,
    since parsing takes milliseconds for each.
    """
    by_source, of_all = "by_data_source" in (facts.reward or {}), "gsm8k" in (facts.reward or {})
    if not by_source and not of_all:
        return
    for prompt in facts.prompts:
        reads_number = of_all or function_of_source(prompt.data_source) == "gsm8k"
        if reads_number and prompt.answer is not None and final_number(prompt.answer) is None:
            raise DataError(f"{prompt.where}: the gsm8k reward needs a number in every answer; got {prompt.answer!r}")


def warn_about_steps(config: Config, steps: int) -> None:
    """Warn of settings for steps that the run does not have; `steps`: their number."""
    warmup, limits = config.trainer.warmup_steps_sft, config.data.max_response_length_schedule
    if warmup >= steps > 0 and not config.is_sft:
        logger.warning(
            "trainer.warmup_steps_sft=%d: all %d steps of the run train on given completions only, without the losses "
            "of teacher and rewards", warmup, steps,
        )  # fmt: skip
    if 0 < steps < max(limits, default=0):
        logger.warning("data.max_response_length_schedule: the run has only %d steps; got %s", steps, limits)
    actor, updates = config.actor_rollout_ref.actor, optimizer_steps(config, steps)
    for key, optim, num_updates in (
        ("actor_rollout_ref.actor.optim_sft", actor.optim_sft, min(config.sft_updates, updates["actor"])),
        ("actor_rollout_ref.actor.optim", actor.optim, updates["actor"] - config.sft_updates),
        ("critic.optim", config.critic.optim, updates["critic"] if config.uses_critic else 0),
    ):
        if 0 < num_updates < optim.lr_warmup_steps:
            logger.warning(
                "%s.lr_warmup_steps=%d: the learning rate does not reach %s.lr=%g in the %d optimizer steps of the run "
                "(trainer.total_training_steps=%d)", key, optim.lr_warmup_steps, key, optim.lr, num_updates, steps,
            )  # fmt: skip


def describe_dropped_prompts(config: Config, prompts: list[Task], steps: int) -> str:
    """Return a note on prompts that the last epoch leaves out; empty if there are none or the steps are configured."""
    if config.trainer.val_only:
        return ""
    if config.algorithm.filter_groups.enable:
        return "; a step draws further prompts to replace uninformative groups (algorithm.filter_groups)"
    sampler = make_sampler(config.data, prompts)
    full, left = sampler.num_steps(config.trainer.total_epochs)
    if steps != full or not left:
        return ""
    return (
        f"; {left} of {sampler.num_prompts} prompts are left out of the last epoch, since they do not fill a batch of "
        f"{config.data.train_batch_size} (data.train_batch_size)"
    )

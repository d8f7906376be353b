"""Keys without effect in a run: one table of keys and what they need. Does not import torch.

Values that a run cannot want are errors (rules.py); these leave the run as it is, so that a warning is enough.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from hybrid_gkd.config.learning import CUSTOM
from hybrid_gkd.config.loss_rules import ARR, Rules
from hybrid_gkd.config.schema import Config
from hybrid_gkd.config.teachers import OF_SERVICE, UNNAMED, RunTeacher, has_several_teachers, run_teachers
from hybrid_gkd.losses.table import policy_loss, weighted_divergences

STRICT, IN_PROCESSES = {"gsm8k", "math", "by_data_source"}, {CUSTOM, "math", "by_data_source", "format"}
"""Reward functions that read reward.strict, and those that run in processes of their own."""
OF_CLIENT = ("n_server_workers", "num_microbatches", "connect_timeout", "max_retries")
"""Fields of a teacher's section for the client of a service, without those that other teachers use too."""


def unused_keys(
    config: Config, keys: Collection[str], *, engine: str, device: str, draws: bool, template: str
) -> dict[str, list[str]]:
    """Return reason -> those of the keys that have no effect in a run, each for its first reason.

    `engine`, `device`: with auto resolved; `draws`: whether the student generates completions to train on;
    `template`: text of all chat templates.
    """
    left, found = list(keys), dict[str, list[str]]()
    rows = (
        *_run(config, engine, device), *_teachers(config), *_rewards(config),
        *_updates(config, draws or config.trainer.val_only),
        *(_template_option(name, template) for name in config.data.apply_chat_template_kwargs),
    )  # fmt: skip
    for pattern, is_used, reason in rows:
        unused = [] if is_used else [key for key in left if re.fullmatch(rf"({pattern})(\..*)?", key)]
        if unused:
            found.setdefault(reason, []).extend(unused)
            left = [key for key in left if key not in unused]
    return found


def _template_option(name: str, template: str) -> tuple[str, object, str]:
    """Return the row of an argument of the chat templates."""
    key = f"data.apply_chat_template_kwargs.{re.escape(name)}"
    return key, re.search(rf"\b{re.escape(name)}\b", template), "no chat template reads it"


def _run(config: Config, engine: str, device: str) -> Rules:
    """Yield rows of data, validation, placement and output. A row has a regular expression of keys, whether the run
    reads them, and the reason if not."""
    data, arr, trainer = config.data, config.actor_rollout_ref, config.trainer
    rollout, separate = f"{ARR}.rollout", f"{ARR}.hybrid_engine=false"
    yield "data.truncation", not data.filter_overlong_prompts, (
        "data.filter_overlong_prompts=true leaves longer prompts out instead"
    )
    chooses = 0 < config.on_policy_fraction < 1 or any(weight != 1 for weight in data.train_weights or ())
    yield f"data.(response_key|loss_mask|excluded_spans_key)|distillation.sft_coef|{UNNAMED}.cache", (
        config.on_policy_fraction < 1 or data.response_key is None or trainer.warmup_steps_sft
    ), "with distillation.on_policy_fraction=1 the student completes all rows itself"
    yield "data.seed", data.shuffle or chooses, "needs data.shuffle=true"
    yield f"{rollout}.val_kwargs|trainer.(test_freq|log_val_generations)", data.val_files, "needs data.val_files"
    yield f"{rollout}.val_kwargs.(top_p|top_k)", arr.rollout.val_kwargs.temperature, (
        f"needs {rollout}.val_kwargs.temperature above 0; 0 is greedy"
    )
    yield f"{rollout}.(max_num_batched_tokens|engine_kwargs.vllm)", engine != "hf", f"needs {rollout}.name=vllm"
    yield f"{rollout}.gpu_memory_utilization", engine != "hf" and device == "cuda", f"needs {rollout}.name=vllm, GPUs"
    yield "rollout.nnodes", not arr.hybrid_engine, f"needs {separate}"
    others = config.uses_critic or config.uses_reward_model
    yield f"{ARR}.actor.fsdp_config.param_offload", arr.hybrid_engine or others, (
        f"with {separate} the student has its GPU for itself"
    )
    yield "ray_init.num_cpus", config.ray_init.address is None, "ray_init.address is of a running cluster"
    yield "trainer.total_epochs", trainer.total_training_steps is None, (
        f"trainer.total_training_steps={trainer.total_training_steps} replaces it"
    )
    yield "trainer.wandb", "wandb" in trainer.logger, "needs wandb in trainer.logger"
    yield "trainer.console", "console" in trainer.logger or trainer.console == "quiet", (
        "needs console in trainer.logger"
    )
    yield f"trainer.max_actor_ckpt_to_keep|{ARR}.actor.checkpoint", trainer.save_freq, (
        "trainer.save_freq=0 writes no checkpoints"
    )
    yield "trainer.snapshot_dir", config.takes_snapshots or trainer.val_only, (
        "needs trainer.snapshot_freq or trainer.max_restarts above 0"
    )


def _teachers(config: Config) -> Rules:
    """Yield rows of the teachers and of the distillation loss."""
    loss, own = config.distillation, "enabled|on_policy_fraction|sft_coef|use_task_rewards"
    yield rf"distillation.(?!({own})$).*|{UNNAMED}", loss.enabled, "needs distillation.enabled=true"
    divergences = weighted_divergences(loss.loss_mode, loss.mixed_weights, loss.loss_fn)
    yield "distillation.beta", any("beta" in row.options for _, row in divergences), "needs the divergence jsd"
    yield "distillation.teacher_key", has_several_teachers(config), (
        "needs several teachers: distillation.teacher_models"
    )
    for teacher in run_teachers(config):
        yield from _teacher(config, teacher)


def _teacher(config: Config, teacher: RunTeacher) -> Rules:
    key, section = teacher.where, teacher.section
    given, own = section.server_ip is not None, [name for name in OF_SERVICE if name != "server_port"]
    yield f"{key}.({'|'.join((*OF_SERVICE, *OF_CLIENT))})", given or section.is_local, (
        "needs a teacher service: the teacher is the student itself, or its scores are stored"
    )
    yield f"{key}.({'|'.join(own)})", not given, f"is for a service that the run starts, without {key}.server_ip"
    yield f"{key}.model.path", not given or config.distillation.cross_tokenizer != "refuse", (
        f"{key}.server_ip is used instead"
    )
    yield f"{key}.server_port", not given or any(":" not in host for host in (section.server_ip or "").split(",")), (
        f"{key}.server_ip has ports"
    )
    yield f"{key}.gpu_memory_utilization", section.backend != "hf", f"{key}.backend=hf has no such limit"
    yield f"{key}.ema_decay", section.source == "ema", f"needs {key}.source=ema"
    yield f"{key}.cache", config.data.response_key is not None, (
        "keeps the scores of given completions: needs data.response_key"
    )
    yield f"{key}.cache_gigabytes", section.cache is not None and not section.is_stored, (
        f"needs {key}.cache, and a teacher whose scores are added to it"
    )


def _rewards(config: Config) -> Rules:
    """Yield rows of the rewards."""
    section, model, functions = config.reward, config.reward_model, set(config.reward_weights)
    prompts = config.distillation.enabled and config.distillation.teacher_prompt_fn is not None
    yield "reward.timeout", prompts or functions & IN_PROCESSES, f"needs one of {', '.join(sorted(IN_PROCESSES))}"
    yield "reward.(?!timeout$).*", config.has_reward, "needs reward.answer_key, the column with the right answers"
    yield "reward.(?!timeout$).*", config.scores_rollouts or config.data.val_files, (
        "needs task rewards (distillation.use_task_rewards=true or distillation.enabled=false), or data.val_files"
    )
    yield "reward.overlong_buffer.enable", config.scores_rollouts or config.trainer.val_only, (
        "needs task rewards: distillation.use_task_rewards=true or distillation.enabled=false"
    )
    yield "reward.overlong_buffer.(len|penalty_factor)", section.overlong_buffer.enable, (
        "needs reward.overlong_buffer.enable=true"
    )
    yield "reward.name", section.name in functions or section.functions, (
        f"{', '.join(functions)} replaces it; reward.functions adds rewards"
    )
    yield "reward.strict", functions & STRICT, f"needs one of {', '.join(sorted(STRICT))}"
    yield "reward.num_workers", functions & IN_PROCESSES, f"needs one of {', '.join(sorted(IN_PROCESSES))}"
    yield "reward.score_on_error|reward.custom_reward_function", CUSTOM in functions, (
        "needs reward.custom_reward_function.path"
    )
    yield "reward_model.(?!enable$).*", model.enable, "needs reward_model.enable=true"


def _updates(config: Config, draws: bool) -> Rules:
    """Yield rows of the updates of student and critic."""
    algorithm, actor, loss = config.algorithm, config.actor_rollout_ref.actor, config.distillation
    key, critic, trains = f"{ARR}.actor", config.resolved_critic, not config.trainer.val_only
    yield (
        rf"{ARR}.rollout.(n|top_p|top_k)|data.max_response_length_schedule|algorithm.(adv_estimator|rollout_(is|rs).*)|"
        "trainer.scheduler|distillation.use_task_rewards", draws, "needs completions of the student, and all rows have "
        "given ones (data.response_key): distillation.on_policy_fraction above 0",
    )
    yield "distillation.tail", draws or loss.tail != "sampled", "without completions of the student, it is bucket"
    rewards = "distillation.use_task_rewards=true, distillation.as_reward=true or distillation.enabled=false"
    yield "algorithm.(adv_estimator|norm_adv_by_std_in_grpo|gamma|lam)", config.has_advantages, (
        f"needs advantages: {rewards}"
    )
    yield "algorithm.(kl_penalty|kl_ctrl)", algorithm.use_kl_in_reward, "needs algorithm.use_kl_in_reward=true"
    yield "algorithm.kl_ctrl.(horizon|target_kl)", algorithm.kl_ctrl.type == "adaptive", (
        "needs algorithm.kl_ctrl.type=adaptive"
    )
    yield "algorithm.filter_groups", algorithm.filter_groups.enable, "needs algorithm.filter_groups.enable=true"
    mode, by_policy = actor.policy_loss.loss_mode, loss.enabled and loss.use_policy_gradient
    yield f"{key}.(clip_ratio.*|policy_loss)", config.has_advantages or by_policy, (
        f"needs a policy loss: {rewards}, or distillation.use_policy_gradient=true"
    )
    for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        yield f"{key}.{name}", name in policy_loss(mode).options, f"policy_loss.loss_mode={mode} does not read it"
    clips = "clip_ratio_low" in policy_loss(mode).options
    yield f"{key}.clip_ratio", clips and None in (actor.clip_ratio_low, actor.clip_ratio_high), (
        f"policy_loss.loss_mode={mode} does not read it, or clip_ratio_low and clip_ratio_high replace it"
    )
    yield f"{key}.kl_loss_(coef|type)", actor.use_kl_loss, f"needs {key}.use_kl_loss=true"
    yield f"{ARR}.ref", config.uses_reference or not trains, (
        f"needs {key}.use_kl_loss=true or algorithm.use_kl_in_reward=true"
    )
    yield f"{ARR}.ref.topk", config.ref_topk, f"needs {key}.kl_loss_type=full"
    yield r"critic.(?!fsdp_config.full_determinism$).*", config.uses_critic or not trains, (
        f"needs algorithm.adv_estimator=gae, and advantages: {rewards}"
    )
    yield f"{key}.optim_sft", config.trainer.warmup_steps_sft, "needs trainer.warmup_steps_sft above 0"
    schedules = {f"{key}.optim": actor.optim, f"{key}.optim_sft": actor.optim_sft, "critic.optim": critic.optim}
    for where, optim in schedules.items():
        steps = optim.lr_warmup_steps
        yield f"{where}.lr_warmup_steps_ratio", not steps, f"{where}.lr_warmup_steps={steps} replaces it; set it to 0"
        yield f"{where}.min_lr_ratio", optim.lr_scheduler_type != "constant", (
            f"needs {where}.lr_scheduler_type=linear or cosine"
        )
    reads = config.uses_reward_model and config.reward_model.forward_max_token_len_per_gpu is None
    for where, section in ((key, actor), ("critic", critic)):
        dynamic = bool(section.use_dynamic_bsz)
        yield f"{where}.ppo_micro_batch_size_per_gpu", not dynamic, f"needs {where}.use_dynamic_bsz=false"
        yield f"{where}.ppo_max_token_len_per_gpu", dynamic or (where == key and reads), (
            f"needs {where}.use_dynamic_bsz=true"
        )

"""Rules of a configuration: those of single fields, and those between fields."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from hybrid_gkd.config.actor_rollout_ref import ActorConfig, CriticConfig, TeacherConfig
from hybrid_gkd.config.learning import ADV_ESTIMATORS, CUSTOM, MODEL, REWARD_FUNCTIONS, rejection_bounds
from hybrid_gkd.config.loss_rules import ARR, Rules, distillation_loss, given_answers
from hybrid_gkd.config.schema import Config, prompts_per_update
from hybrid_gkd.config.teachers import NAMED, UNNAMED, has_several_teachers, run_teachers
from hybrid_gkd.runtime.addresses import is_address

LENGTHS = "data.max_prompt_length + data.max_response_length"


def field_rules(section: Any, prefix: str = "") -> Rules:
    """Yield the rules in fields' metadata; null passes, and numbers are finite unless the field allows others."""
    for entry in dataclasses.fields(section):
        value, key = getattr(section, entry.name), f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from field_rules(value, f"{key}.")
        elif key == NAMED:
            for name, teacher in value.items():
                yield from field_rules(teacher, f"{key}.{name}.")
        elif isinstance(value, float) and not entry.metadata.get("may_be_infinite"):
            yield key, math.isfinite(value), "must be finite"
        if value is not None and "rule" in entry.metadata:
            yield key, entry.metadata["holds"](value), entry.metadata["rule"]


def rules_between_fields(config: Config) -> Rules:
    """Yield the rules between fields, in the order in which they are reported."""
    arr, longest = config.actor_rollout_ref, config.max_sequence_length
    val_only = config.trainer.val_only
    yield from _data(config)
    yield from _updates(config, f"{ARR}.actor", arr.actor, config.max_packed_length)
    yield from given_answers(config)
    yield (
        f"{ARR}.rollout.max_model_len", (arr.rollout.max_model_len or longest) >= longest,
        f"must be at least {LENGTHS} ({longest})",
    )
    val_kwargs = arr.rollout.val_kwargs
    yield (
        f"{ARR}.rollout.val_kwargs.n", val_kwargs.n == 1 or val_kwargs.temperature > 0,
        f"must be 1 with {ARR}.rollout.val_kwargs.temperature=0: all greedy completions of a prompt are the same",
    )
    yield from _best_metric(config)
    yield from _pools(config)
    yield (
        f"{ARR}.rollout.tensor_model_parallel_size",
        arr.rollout.name != "hf" or arr.rollout.tensor_model_parallel_size == 1, "must be 1 with rollout.name=hf",
    )
    yield (
        "trainer.resume_from_path",
        (config.trainer.resume_mode == "resume_path") == (config.trainer.resume_from_path is not None),
        "must be set together with trainer.resume_mode=resume_path",
    )
    yield from _policy_loss(config)
    yield from _lora(config)
    yield from _importance_weights(config)
    yield from _reward(config)
    yield from _reward_model(config)
    if config.distillation.enabled:
        for teacher in run_teachers(config):
            for key, holds, rule in _teacher(teacher.config):
                yield key.replace(UNNAMED, teacher.where), holds, rule.replace(UNNAMED, teacher.where)
        yield from _several_teachers(config)
        yield from distillation_loss(config)
    if config.trains_on_rewards and not val_only:
        yield "reward.answer_key", config.has_reward, (
            "must be set: task rewards need the column with the right answers; to train without them set "
            "distillation.enabled=true and distillation.use_task_rewards=false"
        )
    yield "distillation.as_reward", config.distillation.enabled or not config.distillation.as_reward, (
        "needs distillation.enabled=true"
    )
    if config.has_advantages and not val_only:
        yield from _advantages(config)
    yield from _kl_in_reward(config)
    yield from _critic(config)
    yield from _filter_groups(config)
    yield from _determinism(config)


def _determinism(config: Config) -> Rules:
    key = f"{ARR}.actor.fsdp_config.full_determinism"
    yield key, not config.full_determinism or config.trainer.scheduler == "sync", (
        "needs trainer.scheduler=sync: otherwise the order of requests to the teacher depends on time"
    )
    services = [each.where for each in run_teachers(config) if each.section.server_ip is not None]
    yield key, not (config.full_determinism and services), (
        f"needs a teacher that the run starts (model.path instead of server_ip in {', '.join(services)}): a service "
        "computes requests of several clients together, and rounds differently with each composition of its batches"
    )


def _data(config: Config) -> Rules:
    data, val_only = config.data, config.trainer.val_only
    yield "data.train_files", data.train_files or val_only, "must name at least one file"
    limits = [limit for _, limit in sorted(data.max_response_length_schedule.items())]
    yield "data.max_response_length_schedule", limits == sorted(limits), "must not decrease"
    yield (
        "data.max_response_length_schedule", max(limits, default=0) <= data.max_response_length,
        f"must have limits of at most data.max_response_length ({data.max_response_length})",
    )
    number, weights = len(data.train_files or []), data.train_weights
    yield "data.train_weights", weights is None or len(weights) == number or val_only, (
        f"must have a weight for each of the {number} entries of data.train_files"
    )
    yield "data.val_files", data.val_files or not val_only, "must name at least one file with trainer.val_only=true"


def _filter_groups(config: Config) -> Rules:
    enable, key = config.algorithm.filter_groups.enable, "algorithm.filter_groups.enable"
    size, batch = config.data.gen_batch_size or config.data.train_batch_size, config.data.train_batch_size
    yield (
        "data.gen_batch_size", size == batch or (enable and size > batch),
        f"must be data.train_batch_size ({batch}), or larger with {key}=true",
    )
    if not enable or config.trainer.val_only:
        return
    yield key, config.trains_on_rewards, (
        "needs task rewards: distillation.enabled=false or distillation.use_task_rewards=true"
    )
    yield (
        f"{ARR}.rollout.n", config.actor_rollout_ref.rollout.n > 1,
        f"must be at least 2 with {key}=true, which compares the completions of a prompt",
    )
    ahead = config.trainer.scheduler != "sync" and not config.actor_rollout_ref.hybrid_engine
    yield key, not (ahead and config.reward_model.enable), (
        "must be false with a reward model, a separate rollout pool and a trainer.scheduler other than sync: training "
        "workers would have to score and update at the same time"
    )


def _updates(config: Config, key: str, section: ActorConfig | CriticConfig, longest: int) -> Rules:
    """Yield the rules of the batches and shards of actor or critic; `longest`: tokens of its longest sequence."""
    data, size, workers = config.data, section.fsdp_config.fsdp_size, config.world_size
    prompt = longest - data.max_response_length
    yield (
        f"{key}.ppo_max_token_len_per_gpu",
        (section.ppo_max_token_len_per_gpu or 0) >= longest or not section.use_dynamic_bsz,
        f"must be at least {LENGTHS} ({prompt} + {data.max_response_length} = {longest})"
        + (", with data.max_teacher_prompt_length if that is larger" if longest > config.max_sequence_length else ""),
    )
    yield (
        f"{key}.ppo_micro_batch_size_per_gpu",
        section.use_dynamic_bsz or section.ppo_micro_batch_size_per_gpu is not None,
        f"must be set if {key}.use_dynamic_bsz is false",
    )
    yield (
        f"{key}.ppo_mini_batch_size", prompts_per_update(data.train_batch_size, section) <= data.train_batch_size,
        f"must be at most data.train_batch_size ({data.train_batch_size})",
    )
    yield (
        f"{key}.fsdp_config.fsdp_size", size == -1 or (size > 0 and workers % size == 0),
        f"must be -1 or divide the number of workers (trainer.nnodes * trainer.n_gpus_per_node = {workers})",
    )


def _advantages(config: Config) -> Rules:
    section, n, key = config.algorithm, config.actor_rollout_ref.rollout.n, "algorithm"
    name, own = section.adv_estimator, section.adv_estimator not in ADV_ESTIMATORS
    need = ADV_ESTIMATORS.get(name, "")
    alone = n == 1 and need == "group"
    yield f"{ARR}.rollout.n", not alone, f"{key}.adv_estimator={name} needs at least 2 completions per prompt"
    plain = section.norm_adv_by_std_in_grpo or name == "grpo" or own
    yield f"{key}.norm_adv_by_std_in_grpo", plain, f"has no effect with {key}.adv_estimator={name}; leave it at true"
    discounts = section.gamma == 1 or name in ("gae", "reinforce_plus_plus") or own
    yield f"{key}.gamma", discounts, f"has no effect with {key}.adv_estimator={name}; leave it at 1"
    decays = section.lam == 1 or name == "gae" or own
    yield f"{key}.lam", decays, f"has no effect with {key}.adv_estimator={name}; leave it at 1"


def _kl_in_reward(config: Config) -> Rules:
    section, key = config.algorithm, "algorithm.use_kl_in_reward"
    rewards = config.has_advantages or config.trainer.val_only
    yield key, rewards or not section.use_kl_in_reward, (
        "needs rewards: distillation.enabled=false, distillation.use_task_rewards=true or distillation.as_reward=true; "
        f"{ARR}.actor.use_kl_loss=true needs none"
    )
    yield (
        "algorithm.kl_ctrl.kl_coef", section.kl_ctrl.kl_coef > 0 or not section.adapts_kl_coef,
        "must be above 0 with algorithm.kl_ctrl.type=adaptive, which multiplies it",
    )


def _critic(config: Config) -> Rules:
    warmup, key = config.trainer.critic_warmup, "trainer.critic_warmup"
    yield key, not warmup or config.uses_critic or config.trainer.val_only, "needs algorithm.adv_estimator=gae"
    if not config.uses_critic:
        return
    alone = not config.distillation.enabled or config.distillation.as_reward
    yield key, not warmup or alone, "must be 0 with distillation.enabled=true, unless distillation.as_reward=true"
    yield from _updates(config, "critic", config.resolved_critic, config.max_sequence_length)


def _best_metric(config: Config) -> Rules:
    section, metric, key = config.trainer, config.trainer.best_metric, "trainer.best_metric"
    if metric is None or section.val_only:
        return
    n, names = config.actor_rollout_ref.rollout.val_kwargs.n, list[str]()
    if config.has_reward_functions:
        names += ["accuracy", *([f"best@{n}", f"maj@{n}"] if n > 1 else [])]
        names += [f"pass@{2**power}" for power in range(1, n.bit_length())]
    names += ["reward_model"] if config.reward_model.enable else []
    if config.distillation.enabled and not any(each.section.is_stored for each in run_teachers(config)):
        names += ["forward_kl", "reverse_kl"]
    yield (
        key, metric.startswith("val/") and metric.rpartition("/")[2] in names,
        f"must be val/<name> or val/<data source>/<name>, with a name of this run: {', '.join(names) or 'none'}",
    )
    yield key, config.data.val_files, "needs data.val_files"
    yield key, section.test_freq != 0, "needs validations: trainer.test_freq must not be 0"
    yield key, section.save_freq != 0, "needs checkpoints: trainer.save_freq must not be 0"


def _pools(config: Config) -> Rules:
    arr, own = config.actor_rollout_ref, config.rollout.n_gpus_per_node
    key, separate = "rollout.n_gpus_per_node", "actor_rollout_ref.hybrid_engine=false"
    yield key, own is None or not arr.hybrid_engine, f"needs {separate}"
    yield (
        key, own is not None or arr.hybrid_engine,
        f"must be set with {separate}; not needed with actor_rollout_ref.hybrid_engine=true",
    )
    section, workers = "trainer" if own is None else "rollout", config.rollout_world_size
    yield (
        f"{ARR}.rollout.tensor_model_parallel_size", workers % arr.rollout.tensor_model_parallel_size == 0,
        f"must divide the number of workers ({section}.nnodes * {section}.n_gpus_per_node = {workers})",
    )


def _policy_loss(config: Config) -> Rules:
    actor, key = config.actor_rollout_ref.actor, f"{ARR}.actor"
    mode, constant = actor.loss_agg_mode, "seq-mean-token-sum-norm"
    yield (
        f"{key}.loss_scale_factor", actor.loss_scale_factor is None or mode == constant,
        f"needs {key}.loss_agg_mode={constant}",
    )
    yield (
        f"{key}.kl_loss_type", not (config.ref_topk and config.distillation.enabled),
        "must not be full with distillation.enabled=true: the head supports one set of candidates, the teacher's",
    )
    yield (
        f"{key}.loss_agg_mode", actor.policy_loss.loss_mode != "gspo" or mode == "seq-mean-token-mean",
        f"must be seq-mean-token-mean with {key}.policy_loss.loss_mode=gspo, a mean over sequences",
    )


def _lora(config: Config) -> Rules:
    """Yield the rules of LoRA keys."""
    arr = config.actor_rollout_ref
    model, start = arr.model, arr.model.lora_adapter_path
    for name in ("lora_alpha", "target_modules", "exclude_modules"):
        given = getattr(model, name) is not None
        yield f"{ARR}.model.{name}", not given or model.has_lora, "needs a lora_rank above 0"
    for name in ("target_modules", "exclude_modules"):
        free = getattr(model, name) is None or start is None
        yield f"{ARR}.model.{name}", free, "must not be set with lora_adapter_path, whose adapter defines its layers"
    merges = arr.actor.checkpoint.save_merged
    yield f"{ARR}.actor.checkpoint.save_merged", not merges or model.has_lora, "needs a lora_rank above 0"


def _importance_weights(config: Config) -> Rules:
    section, rollout = config.algorithm, config.actor_rollout_ref.rollout
    threshold, key = section.rollout_is_threshold, "algorithm.rollout_is_threshold"
    yield "algorithm.rollout_is", threshold is not None or section.rollout_is == "prefix", f"needs {key}"
    yield (
        "algorithm.rollout_is", threshold is None or section.rollout_is != "token" or config.has_sampled_loss,
        "must be prefix or sequence if the loss is a divergence, which does not depend on the sampled token",
    )
    normalizes = section.rollout_is_batch_normalize
    yield "algorithm.rollout_is_batch_normalize", threshold is not None or not normalizes, f"needs {key}"
    yield key, threshold is None or threshold >= 1, "must be at least 1, the weight of an on-policy completion"
    rejects, limits = section.rollout_rs, section.rollout_rs_threshold
    both = (rejects is None) == (limits is None)
    yield "algorithm.rollout_rs_threshold", both, "must be set together with algorithm.rollout_rs"
    if rejects is not None and limits is not None:
        try:
            rejection_bounds(rejects, limits)
        except ValueError as error:
            yield "algorithm.rollout_rs", False, str(error)
    if threshold is None:
        key = "algorithm.rollout_rs"
    yield (
        key, not section.compares_logprobs or (rollout.top_p == 1 and rollout.top_k == -1),
        "needs samples of the full distribution: actor_rollout_ref.rollout.top_p=1 and top_k=-1",
    )


def _reward(config: Config) -> Rules:
    section, buffer, custom = config.reward, config.reward.overlong_buffer, config.reward.custom_reward_function
    for name, weight in section.functions.items():
        yield (
            "reward.functions", name in (*REWARD_FUNCTIONS, CUSTOM, MODEL) and weight != 0 and math.isfinite(weight),
            f"must map {', '.join(REWARD_FUNCTIONS)}, {CUSTOM} (your function) or {MODEL} (the reward model) to finite "
            f"weights other than 0, not {name}: {weight}",
        )
    if section.functions:
        yield "reward.name", section.name == "exact_match", "must not be set with reward.functions"
        yield (
            "reward.functions", (CUSTOM in section.functions) == (custom.path is not None),
            f"must have {CUSTOM} if and only if reward.custom_reward_function.path is set",
        )
    yield (
        "reward.format", ("format" in section.weights) == (section.format is not None),
        "must be set together with reward.name=format, or format in reward.functions",
    )
    yield "reward.format", section.format is None or _is_pattern(section.format), "must be a regular expression"
    yield (
        "reward.overlong_buffer.len", not buffer.enable or buffer.len <= config.data.max_response_length,
        f"must be at most data.max_response_length ({config.data.max_response_length})",
    )
    if section.functions and not config.trains_on_rewards and not config.reward_model.enable:
        rule = "must be set: reward.functions need the column with the right answers"
        yield "reward.answer_key", config.has_reward, rule


def _reward_model(config: Config) -> Rules:
    section, functions, key = config.reward_model, config.reward.functions, "reward_model.enable"
    if functions or not section.enable:
        yield "reward.functions", (MODEL in functions) == section.enable, f"must have {MODEL} if and only if {key}=true"
    if not section.enable:
        return
    yield "reward_model.model.path", section.model.path, f"must name a classifier with {key}=true"
    yield (
        "reward.functions", functions or config.reward.custom_reward_function.path is None,
        f"must set the weights of your function and the reward model, as in {{{MODEL}: 1.0, {CUSTOM}: 1.0}}",
    )
    yield "reward.answer_key", config.has_reward, "must be set: reward.functions need the column with the right answers"
    yield key, config.uses_reward_model, (
        "has no effect: needs data.val_files, distillation.use_task_rewards=true or distillation.enabled=false"
    )


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _teacher(config: Config) -> Rules:
    section, longest = config.actor_rollout_ref.teacher, config.max_reading_length
    given, ends = section.server_ip is not None, section.endpoints
    key = f"{ARR}.teacher"
    if config.teaches_itself:
        yield from _own_teacher(config)
        return
    yield (
        f"{key}.model.path", given or section.model.path is not None or section.is_stored,
        "a teacher is needed: set a model to start one, or server_ip and server_port of a running one, or cache for "
        "given completions that are scored already; distillation.enabled=false trains on rewards without one",
    )
    yield f"{key}.server_port", not given or section.server_port != 0, "must be set together with server_ip"
    yield (
        f"{key}.server_ip", not given or (len(set(ends)) == len(ends) and all(map(is_address, ends))),
        "must be host, host:port, or several different ones separated by commas",
    )
    yield (
        f"{key}.max_model_len", given or (section.max_model_len or math.inf) > longest,
        f"must be above {LENGTHS}, with data.max_teacher_prompt_length if that is larger ({longest}): vLLM generates "
        "one token to score a sequence",
    )
    yield f"{key}.keys", given or section.keys is None, "needs a running service (server_ip)"
    yield f"{key}.adapter", given or section.adapter is None, (
        f"needs a running service (server_ip); the folder of an adapter is {key}.model.lora_adapter_path"
    )
    yield f"{key}.model.lora_adapter_path", not given or section.model.lora_adapter_path is None, (
        f"must be null with {key}.server_ip, whose service has the adapter: {key}.adapter is its name"
    )
    yield f"{key}.model.lora_adapter_path", not section.is_stored or section.model.lora_adapter_path is None, (
        f"needs {key}.model.path, the adapter's model"
    )
    yield (
        f"{key}.allow_teacher_change", section.cache is None or not section.allow_teacher_change,
        f"must be false with {key}.cache, which keeps scores of one teacher",
    )
    replicas = f"{key}.num_replicas"
    yield replicas, not given or section.num_replicas is None, "is for a service that the run starts, without server_ip"
    yield (
        f"{key}.overlap_rollout", config.trainer.scheduler == "sync" or section.overlap_rollout,
        f"must be true with trainer.scheduler={config.trainer.scheduler}, with which the teacher scores during the "
        "next generation",
    )


def _several_teachers(config: Config) -> Rules:
    """Yield the rules of several teachers that do not concern one of them alone."""
    named, unnamed = config.distillation.teacher_models, config.actor_rollout_ref.teacher
    keys = [teacher.key for teacher in run_teachers(config)]
    yield (
        "distillation.ensemble", config.distillation.ensemble == "none" or len(set(keys)) < len(keys),
        f"needs at least two teachers of {NAMED} with the same key",
    )
    local = len({teacher.service for teacher in run_teachers(config) if teacher.section.is_local})
    yield (
        "distillation.teacher_sharing", config.distillation.teacher_sharing == "memory" or local > 1,
        f"needs at least two teachers of {NAMED} that this run starts (model.path), in services of their own",
    )
    if not has_several_teachers(config):
        return
    default = TeacherConfig(overlap_rollout=unnamed.overlap_rollout)
    names = [field.name for field in dataclasses.fields(default)]
    unused = [name for name in names if getattr(unnamed, name) != getattr(default, name)]
    yield f"{UNNAMED}.model.path", unnamed.is_set or not unused, (
        f"must be set, or server_ip, with {', '.join(unused)} of {UNNAMED}: each teacher of {NAMED} has its own; only "
        "overlap_rollout is for all"
    )
    mixes = config.distillation.ensemble != "none"
    templates = {teacher.key: teacher.section.chat_template for teacher in reversed(run_teachers(config))}
    for place, (name, teacher) in enumerate(named.items()):
        others = keys[:place] + keys[len(named) :]
        yield (
            f"{NAMED}.{name}.key", keys[place] not in others or mixes,
            f"must differ between teachers ({', '.join(keys)}), of which {UNNAMED} has default, unless "
            "distillation.ensemble is mixture or sum",
        )
        yield (
            f"{NAMED}.{name}.key", not (mixes and name == "teacher" and unnamed.is_set),
            f"must be of another name with distillation.ensemble: teacher is that of {UNNAMED}",
        )
        yield f"{NAMED}.{name}.source", teacher.source == "model", f"must be model: only {UNNAMED} may be the student"
        yield f"{NAMED}.{name}.weight", mixes or teacher.weight == 1, "needs distillation.ensemble=mixture or sum"
        yield (
            f"{NAMED}.{name}.overlap_rollout", teacher.overlap_rollout,
            f"must be left out: {UNNAMED}.overlap_rollout is for all teachers",
        )
    for each in run_teachers(config):
        yield (
            f"{each.where}.chat_template", each.section.chat_template == templates[each.key],
            f"must be the same for all teachers with the key {each.key}",
        )


def _own_teacher(config: Config) -> Rules:
    """Yield the rules of a teacher with the student's own weights."""
    arr = config.actor_rollout_ref
    section, key = arr.teacher, f"{ARR}.teacher.source"
    given = {"model.path": section.model.path, "model.lora_adapter_path": section.model.lora_adapter_path}
    given |= {"server_ip": section.server_ip, "cache": section.cache}
    names = [f"{ARR}.teacher.{name}" for name, value in given.items() if value is not None]
    names += [NAMED] if config.distillation.teacher_models else []
    yield key, not names, f"must be model with {', '.join(names)}: a run has one teacher"
    prompts = (config.data.teacher_prompt_key, config.distillation.teacher_prompt_fn, section.chat_template)
    other_prompt = any(each is not None for each in prompts)
    others = config.trains_on_rewards or config.sft_coef > 0 or config.trainer.warmup_steps_sft > 0
    why = "the present weights are the student"
    if section.source != "live":
        why = "these weights are the student's at first, and without rewards or given completions nothing changes it"
    yield key, other_prompt or (others and section.source != "live"), (
        f"needs another prompt for the teacher (data.teacher_prompt_key): behind the student's own prompt {why}"
    )
    yield "distillation.candidates", config.distillation.candidates == "teacher", f"must be teacher with {key}"
    if section.source == "initial":
        yield key, arr.model.lora_adapter_path is None, (
            f"must be ema or live with {ARR}.model.lora_adapter_path: the model below the adapters is not the start of "
            "this run"
        )
        yield f"{ARR}.ref.model.path", arr.ref.model.path is None, (
            f"must be null with {key}=initial, whose frozen model is the reference policy too"
        )

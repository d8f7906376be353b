"""Rules between the keys of the learning signal: losses and given completions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hybrid_gkd.config.schema import Config
from hybrid_gkd.config.teachers import run_teachers
from hybrid_gkd.losses.table import DIVERGENCES, TOKEN_WEIGHTS, UNIFORM, policy_loss

Rules = Iterator[tuple[str, object, str]]
"""Dotted key, whether its rule holds, text of the rule."""
ARR = "actor_rollout_ref"
ESTIMATORS = [name for name, row in DIVERGENCES.items() if row.signal == "sampled"]


def given_answers(config: Config) -> Rules:
    """Yield the rules of training on given completions."""
    teachers = run_teachers(config)
    for teacher in teachers:
        yield f"{teacher.where}.cache", not (teacher.section.is_stored and config.on_policy_fraction), (
            "needs a teacher (model.path or server_ip) that scores the student's completions; without one, set "
            "data.response_key and leave distillation.on_policy_fraction out"
        )
    data, loss, given = config.data, config.distillation, "data.response_key"
    yield "data.teacher_prompt_key", data.teacher_prompt_key is None or loss.enabled, "needs distillation.enabled=true"
    own_template = any(teacher.section.chat_template is not None for teacher in teachers)
    own_prompt = own_template or data.teacher_prompt_key is not None or loss.teacher_prompt_fn is not None
    own_prompt |= loss.enabled and loss.cross_tokenizer != "refuse"
    yield from _teacher_prompt_fn(config)
    yield "data.max_teacher_prompt_length", data.max_teacher_prompt_length is None or own_prompt, (
        "needs data.teacher_prompt_key, the column with the teacher's prompts, distillation.teacher_prompt_fn, or "
        f"{ARR}.teacher.chat_template, or distillation.cross_tokenizer"
    )
    if data.response_key is None:
        unused = "needs data.response_key, the column with given completions"
        yield "distillation.on_policy_fraction", loss.on_policy_fraction in (None, 1.0), unused
        yield "distillation.sft_coef", not loss.sft_coef, unused
        yield "trainer.warmup_steps_sft", not config.trainer.warmup_steps_sft, unused
        yield "data.loss_mask", data.loss_mask == "answer", unused
        yield "data.excluded_spans_key", data.excluded_spans_key is None, unused
        return
    yield "data.loss_mask", data.loss_mask == "answer" or not (loss.enabled and own_prompt), (
        f"must be answer with {ARR}.teacher.chat_template, data.teacher_prompt_key, distillation.teacher_prompt_fn or "
        "distillation.cross_tokenizer, which change the prompt"
    )
    yield "algorithm.filter_groups.enable", not config.algorithm.filter_groups.enable, f"must be false with {given}"
    yield "trainer.critic_warmup", not config.trainer.critic_warmup, f"must be 0 with {given}"
    if loss.enabled:
        estimates = [name for name in (loss.loss_mode, *loss.mixed_weights) if name in ESTIMATORS]
        rule = f"with {given}: these estimates need tokens sampled from the student"
        yield "distillation.as_reward", not loss.as_reward, f"must be false with {given}"
        yield "distillation.loss_mode", not estimates, f"must use none of {', '.join(ESTIMATORS)} {rule}"
    crossed, own = config.sft_coef > 0 or config.trainer.warmup_steps_sft > 0, config.on_policy_fraction == 1
    yield "distillation.sft_coef", crossed or own or loss.enabled, (
        "must be above 0 with distillation.enabled=false: no other loss uses given completions"
    )
    section = ("distillation", loss) if loss.enabled else (f"{ARR}.rollout", config.actor_rollout_ref.rollout)
    yield f"{section[0]}.temperature", section[1].temperature == 1 or not crossed, (
        "must be 1 with a cross-entropy of given completions (distillation.sft_coef, trainer.warmup_steps_sft)"
    )


def _teacher_prompt_fn(config: Config) -> Rules:
    """Yield the rules of teacher prompts that are built after the completions."""
    loss, key = config.distillation, "distillation.teacher_prompt_fn"
    if loss.teacher_prompt_fn is not None:
        yield key, loss.enabled, "needs distillation.enabled=true"
        yield key, config.data.teacher_prompt_key is None, "must be null with data.teacher_prompt_key; use one of them"
        yield key, not loss.as_reward, "must be null with distillation.as_reward, which needs a score of each token"
        stored = [f"{each.where}.cache" for each in run_teachers(config) if each.section.is_stored]
        yield key, not stored, f"needs a teacher service, not scores stored in {', '.join(stored)}"


def distillation_loss(config: Config) -> Rules:
    """Yield the rules that reject losses without effect, or with another effect than configured."""
    loss, key, temperature = config.distillation, "distillation", config.actor_rollout_ref.rollout.temperature
    mode, own = loss.loss_mode, loss.loss_fn is not None
    allowed = not (own and loss.use_policy_gradient)
    yield f"{key}.use_policy_gradient", allowed, "must be false with distillation.loss_fn"
    yield f"{key}.loss_mode", not own or mode == "forward_kl", "must be left out with distillation.loss_fn"
    if loss.as_reward:
        plain = mode == "forward_kl" and loss.tail == "bucket" and not own and not loss.use_policy_gradient
        yield (
            f"{key}.as_reward", plain,
            "minimises no divergence: leave loss_mode, tail, loss_fn and use_policy_gradient of this section out",
        )
    _, takes_samples = _divergences(config)
    sampled = mode in takes_samples
    yield (
        f"{key}.use_policy_gradient", not sampled or DIVERGENCES[mode].is_loss or loss.use_policy_gradient,
        f"must be true with distillation.loss_mode={mode}: as a loss, its expected gradient is 0",
    )
    yield (
        f"{key}.use_policy_gradient", sampled or not loss.use_policy_gradient,
        "needs a value of the sampled token: distillation.loss_mode k1, k2 or k3, "
        f"not {mode}, whose exact gradient is known",
    )
    yield (
        f"{key}.tail", not sampled or loss.tail == "bucket",
        f"has no effect with distillation.loss_mode={mode}; leave it at bucket",
    )
    yield (
        f"{key}.topk", loss.topk > 1 or loss.tail != "renormalise" or takes_samples,
        "must be at least 2 with distillation.tail=renormalise, which makes a single candidate certain for teacher "
        "and student alike",
    )
    yield (
        f"{key}.temperature",
        loss.temperature == temperature or not (
            loss.use_policy_gradient or loss.use_task_rewards or loss.as_reward
            or config.actor_rollout_ref.actor.use_kl_loss
        ),
        f"must be actor_rollout_ref.rollout.temperature ({temperature}) with a policy loss, which is "
        "about the policy that sampled the completions",
    )
    adds, several = loss.ensemble == "sum", f"with {key}.ensemble=sum"
    yield f"{key}.as_reward", not (adds and loss.as_reward), f"must be false {several}; a mixture has one log-ratio"
    depends_on = None if loss.weighting is None else loss.weighting.needs
    yield f"{key}.token_weights", not adds or depends_on in (None, "completion"), (
        f"must be uniform or position {several}: others depend on the scores of one teacher"
    )
    yield from _token_weights(config)
    yield from _cross_tokenizer(config)
    yield from _mixed(config)
    yield from _candidates(config)
    if loss.tail == "sampled":
        yield from _sampled_tail(config)


def _divergences(config: Config) -> tuple[set[str], set[str]]:
    """Return the names of the divergences of the loss, and of those that need sampled tokens."""
    used = DIVERGENCES.keys() & (set(config.distillation.mixed_weights) or {config.distillation.loss_mode})
    return used, {name for name in used if DIVERGENCES[name].signal == "sampled"}


def _mixed(config: Config) -> Rules:
    """Yield the rules of the sum of several divergences."""
    key, algorithm, weights = "distillation.mixed_weights", config.algorithm, config.distillation.mixed_weights
    both = (config.distillation.loss_mode == "mixed") == bool(weights)
    yield key, both, "must be set together with distillation.loss_mode=mixed"
    mixable = [name for name, row in DIVERGENCES.items() if row.is_loss]
    for name, weight in weights.items():
        yield key, name in mixable and 0 < weight < math.inf, (
            f"must give {', '.join(mixable[:-1])} or {mixable[-1]} finite weights above 0, not {name}: {weight}"
        )
    used, takes_samples = _divergences(config)
    by_token = algorithm.rollout_is_threshold is not None and algorithm.rollout_is != "sequence"
    yield key, not by_token or not takes_samples or used == takes_samples, (
        f"must not mix {', '.join(sorted(takes_samples))} with divergences over candidates with algorithm."
        "rollout_is_threshold: the weight of a sampled token would hide the divergence where the student has moved "
        "most; with algorithm.rollout_is=sequence all have one weight"
    )


def _candidates(config: Config) -> Rules:
    """Yield the rules of the student's candidates."""
    loss, key, needs = config.distillation, "distillation.candidates", "must be teacher with"
    if loss.candidates == "teacher":
        return
    used, takes_samples = _divergences(config)
    yield key, not loss.as_reward, f"{needs} distillation.as_reward, which has none"
    all_sampled = loss.loss_fn is None and used == takes_samples
    yield key, not all_sampled, f"{needs} distillation.loss_mode={loss.loss_mode}, which has none"
    cached = [f"{each.where}.cache" for each in run_teachers(config) if each.section.cache is not None]
    yield key, not cached, f"{needs} {', '.join(cached)}, which has the teacher's"


def _sampled_tail(config: Config) -> Rules:
    """Yield the rules of gradients within the tail, which are estimated from the sampled tokens."""
    loss, key, rollout = config.distillation, "distillation.tail", config.actor_rollout_ref.rollout
    used, takes_samples = _divergences(config)
    fits = loss.loss_fn is None and used - takes_samples == {"forward_kl"}
    yield key, fits, "must not be sampled with other divergences over candidates than forward_kl"
    yield key, loss.cross_tokenizer == "refuse", "must not be sampled with distillation.cross_tokenizer"
    yield (
        key, rollout.top_p == 1 and rollout.top_k == -1 and rollout.temperature == loss.temperature,
        f"sampled needs samples of the compared distribution: {ARR}.rollout.top_p=1, top_k=-1 and temperature="
        f"{loss.temperature}, as distillation.temperature",
    )


def _cross_tokenizer(config: Config) -> Rules:
    """Yield the rules of teachers with another tokenizer."""
    loss, mode = config.distillation, config.distillation.cross_tokenizer
    if mode == "refuse":
        return
    rule = f"with distillation.cross_tokenizer={mode}"
    key = "distillation.cross_tokenizer"
    yield key, not config.teaches_itself, f"must be refuse with {ARR}.teacher.source: the student has one tokenizer"
    yield "distillation.teacher_prompt_fn", loss.teacher_prompt_fn is None, f"must be null {rule}"
    yield "distillation.candidates", loss.candidates == "teacher", f"must be teacher {rule}"
    yield "distillation.ensemble", loss.ensemble == "none", f"must be none {rule}"
    selects = loss.token_weights in TOKEN_WEIGHTS and TOKEN_WEIGHTS[loss.token_weights].needs == "student"
    yield "distillation.token_weights", not selects, f"must not depend on the student's distribution {rule}"
    for teacher in () if config.teaches_itself else run_teachers(config):
        section = teacher.section
        yield f"{teacher.where}.cache", section.cache is None, f"must be null {rule}"
        yield (
            f"{teacher.where}.model.path", section.model.path is not None,
            f"must be the folder or hub id of the teacher's tokenizer {rule}, also with server_ip",
        )


def _token_weights(config: Config) -> Rules:
    """Yield the rules of weights of single tokens in the distillation term."""
    loss, key, name = config.distillation, "distillation.token_weights", config.distillation.token_weights
    yield key, name == UNIFORM or not loss.as_reward, "must be uniform with distillation.as_reward"
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    of_sequences = policy_loss(loss_mode).of_sequences and (loss.use_task_rewards or loss.use_policy_gradient)
    yield (
        key, not of_sequences or name not in TOKEN_WEIGHTS or TOKEN_WEIGHTS[name].needs != "student",
        f"must not depend on the student's distribution with {ARR}.actor.policy_loss.loss_mode={loss_mode}",
    )
    given = loss.token_weights_kwargs
    yield f"{key}_kwargs", name != UNIFORM or not given, f"must be left out with {key}=uniform, which has no arguments"
    fraction = given.get("fraction", 1.0)
    allowed = given.keys() <= {"fraction"} and isinstance(fraction, int | float) and 0 < fraction <= 1
    yield (
        f"{key}_kwargs", name not in TOKEN_WEIGHTS or allowed,
        f"must give {key}={name} no argument but a fraction above 0 and at most 1",
    )

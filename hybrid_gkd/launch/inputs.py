"""Preflight checks of the inputs of a run: models, tokenizers, teacher, data files, prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid_gkd.compat.vllm.architectures import cannot_be_served, cannot_be_split, unknown_arguments
from hybrid_gkd.compat.vllm.versions import vllm_available, vllm_version
from hybrid_gkd.config import (
    REWARD_MODEL_PATH,
    UNNAMED,
    Config,
    ModelConfig,
    RolloutConfig,
    RunTeacher,
    TeacherConfig,
    run_teachers,
)
from hybrid_gkd.data.prompts import Columns, make_prompts, read_rows
from hybrid_gkd.errors import ConfigError, DataError, ModelError, call_all, prefix_errors, rename_section
from hybrid_gkd.launch import data_checks
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.each_teacher import describe_routing, for_each_teacher, teacher_column
from hybrid_gkd.launch.plan import OWN_WEIGHTS
from hybrid_gkd.launch.presence import check_model_folder
from hybrid_gkd.models.spec import position_limit, read_config, student_spec
from hybrid_gkd.models.tokenizer import (
    check_end,
    load_tokenizer,
    num_token_ids,
    special_tokens,
    stop_token_ids,
    tokenizer_hash,
)
from hybrid_gkd.models.weight_files import check_weights
from hybrid_gkd.offload.needs import place_teachers, trained_models
from hybrid_gkd.ppo.best import check_best_metric
from hybrid_gkd.ppo.resuming import TEACHER_PATH, data_checksums, template_checksums
from hybrid_gkd.ppo.steps import total_steps
from hybrid_gkd.ppo.validation import source_of
from hybrid_gkd.scoring.reward_model_scorer import RewardTexts
from hybrid_gkd.student.checkpoint_store import MANIFEST, find_damage
from hybrid_gkd.student.logprob_model import LogprobModel, check_supported
from hybrid_gkd.student.pretrained import build_model
from hybrid_gkd.student.reward_model import check_classifier
from hybrid_gkd.teacher.client.connection import query_status
from hybrid_gkd.teacher.client.score_store import ScoreStore
from hybrid_gkd.teacher.engines.adapters import check_adapter
from hybrid_gkd.teacher.engines.engine_table import resolve_backend
from hybrid_gkd.teacher.keys import load_keys
from hybrid_gkd.teacher.protocol import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, reply_bytes
from hybrid_gkd.types import GenerationRequest, SampleId, generated_sample

logger = logging.getLogger(__name__)

MAX_SHOWN = 5
"""Maximum number of tokens listed in a message."""


def student(facts: Facts) -> str:
    """Check the student's folder, its tokenizer and end-of-text tokens, its architecture and its length limit."""
    config, model = facts.config, facts.config.actor_rollout_ref.model
    check_folder("actor_rollout_ref.model.path", model.path)
    check_length("student", model.path, config, config.max_packed_length, model.override_config)
    with prefix_errors(f"actor_rollout_ref.model.{'tokenizer_path' if model.tokenizer_path else 'path'}"):
        facts.tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    text = read_config(model.path, model.trust_remote_code, model.override_config).get_text_config()
    with prefix_errors("actor_rollout_ref.model.path"):
        facts.stop_token_ids = stop_token_ids(model.path, facts.tokenizer)
        number = max(num_token_ids(facts.tokenizer), text.vocab_size)
        check_end(model.path, "config.json or override_config", getattr(text, "eos_token_id", None), number)
    if not facts.stop_token_ids:
        rule = "defines no end-of-sequence token; set eos_token in its tokenizer_config.json"
        raise ModelError(f"actor_rollout_ref.model.path: {model.path} {rule}")
    check_architecture("actor_rollout_ref.model.path", model, LogprobModel)
    if facts.engine == "vllm":
        section, instead = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.name=hf"
        check_vllm("actor_rollout_ref.rollout", section, "actor_rollout_ref.model.path", model.path, config, instead)
    facts.spec = student_spec(config)
    facts.num_ids = min(facts.spec.num_embeddings, num_token_ids(facts.tokenizer))
    check_topk(facts)
    return (
        f"{model.path}, {facts.spec.parameters / 1e6:.1f} M parameters, {len(facts.tokenizer)} tokens in its "
        f"vocabulary, of which {facts.stop_token_ids} end a completion"
    )


def critic(facts: Facts) -> str:
    """Check the critic's folder, its tokenizer against the student's, and its length limit."""
    config, model, found = facts.config, facts.config.critic_model, "not needed"
    if config.uses_critic:
        of_student = model.path == config.actor_rollout_ref.model.path
        if not of_student:
            check_other_model("critic", "critic.model.path", model, facts)
            check_architecture("critic.model.path", model, check_supported)
        found = f"starts from the student's {model.path}" if of_student else f"starts from {model.path}"
    facts.trained = trained_models(config, facts.spec)
    return found


def reference_policy(facts: Facts) -> str:
    """Check the folder of the reference policy, its tokenizer against the student's, and its length limit."""
    config, key = facts.config, "actor_rollout_ref.ref.model.path"
    path = config.actor_rollout_ref.ref.model.path
    if not config.uses_reference:
        return "none is needed"
    if not config.has_reference_model:
        return f"the student's {config.ref_model.path} without its LoRA adapters"
    if path is None:
        return f"the student's initial weights {config.ref_model.path}"
    check_other_model("reference policy", key, config.ref_model, facts)
    check_architecture(key, config.ref_model, LogprobModel)
    return path


def reward_model(facts: Facts) -> str:
    """Check that the reward model is a classifier with one label, and that its inputs fit its length limit."""
    config, key = facts.config, REWARD_MODEL_PATH
    model = config.reward_model.model
    if not config.uses_reward_model:
        return "none is needed"
    assert model.path is not None
    check_folder(key, model.path)
    hf_config = check_classifier(config.reward_model)
    positions, field = position_limit(hf_config.get_text_config())
    limit = config.reward_model.max_length or positions
    if positions is not None and (limit or 0) > positions:
        raise ConfigError("reward_model.max_length", f"{model.path} has {positions} positions ({field})", limit)
    if config.reward_model.max_length is None:
        check_positions("reward model", model.path, config, config.max_sequence_length, (positions, field))
    with prefix_errors(key):
        own = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    same = all(of(own) == of(facts.tokenizer) for of in (tokenizer_hash, special_tokens))
    other = None if same else "tokenizer"
    if other is None and own.chat_template not in (None, facts.tokenizer.chat_template):
        other = "chat template"
    texts = RewardTexts(facts.tokenizer, own if other else None, limit)
    nothing = np.zeros(0, np.int32)
    request = GenerationRequest(id=SampleId(1, 0, 0), prompt_ids=nothing, seed=0)
    empty = generated_sample(request, nothing, version=0, status="stop", logprobs=None)
    for prompt in (*facts.train_prompts, *facts.val_prompts):
        texts.tokens(prompt, empty)  # a template that rejects a chat raises now
    facts.reward_texts = texts
    read = f"texts are encoded again for its {other}" if other else "reads the student's tokens"
    return f"{model.path}, {read}" + (f", at most {limit}" if limit is not None else "")


def check_other_model(who: str, key: str, model: ModelConfig, facts: Facts) -> None:
    """Check a model that computes log-probabilities or values of the student's tokens.

    Raises ModelError, ConfigError or CheckpointError.
    """
    check_folder(key, model.path)
    rows = check_length(who, model.path, facts.config, facts.config.max_sequence_length, model.override_config)
    check_rows(who, model.path, rows, facts)
    with prefix_errors(key):
        own = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    if tokenizer_hash(own) != tokenizer_hash(facts.tokenizer):
        raise ModelError(f"{key}: {who} and student must have the same vocabulary; {model.path} has a different one")


def teacher(facts: Facts) -> str:
    """Check that every given service answers, or the folders of the models that the run starts as teachers."""
    config = facts.config
    facts.local_teachers = place_teachers(config, device=facts.device, gpus=facts.gpus)
    return for_each_teacher(config, functools.partial(check_teacher, facts)) or "none is needed"


def check_teacher(facts: Facts, teacher: RunTeacher) -> str:
    """Check that a teacher's service answers, or the folder of its model."""
    config, section, label = teacher.config, teacher.section, teacher.label
    if config.teaches_itself:
        return OWN_WEIGHTS[section.source].format(decay=section.ema_decay)
    if section.cache is not None:
        with prefix_errors("actor_rollout_ref.teacher.cache"):
            opened = ScoreStore(section.cache, create=not section.is_stored)
            with contextlib.closing(opened) as store:
                stored = len(store)
        if section.is_stored:
            return f"not needed: {section.cache} has the scores of {stored} completions"
    if section.server_ip is not None:
        keys = load_keys(section.keys) if section.keys is not None else None
        key = "actor_rollout_ref.teacher.connect_timeout"
        ask = functools.partial(query_status, timeout=section.connect_timeout, keys=keys, timeout_key=key)
        found = call_all(functools.partial(ask, address) for address in section.endpoints)
        answers = zip(section.endpoints, found, strict=True)
        return ", ".join(f"{address} answers, {status.num_workers} worker(s)" for address, status in answers)
    path = section.model.path
    assert path is not None
    check_folder(TEACHER_PATH, path)
    needed = config.max_reading_length + 1  # vLLM generates one token in order to score
    rows = check_length("teacher", path, config, needed, {})
    if section.backend == "vllm" or (section.backend == "auto" and vllm_available()):
        check_vllm(UNNAMED, section, TEACHER_PATH, path, config, "actor_rollout_ref.teacher.backend=hf")
    if teacher.key not in facts.other_tokenizers:
        check_rows("teacher", path, rows, facts, of_teacher=teacher.key)
    check_teacher_weights(path, config)
    trusts = config.actor_rollout_ref.model.trust_remote_code
    with prefix_errors(TEACHER_PATH):
        facts.teacher_tokenizers[label] = load_tokenizer(path, trust_remote_code=trusts)
    if (adapter := section.model.lora_adapter_path) is not None:
        with prefix_errors("actor_rollout_ref.teacher.model.lora_adapter_path"):
            check_adapter(path, adapter, resolve_backend(section.backend), trust_remote_code=trusts)
    what = f"{path} with the adapter {adapter}" if adapter is not None else path
    if teacher.service != label:
        return f"{what} will be served by {teacher.service}"
    return f"the run will start {what} on {facts.local_teachers[label]}"


def teacher_template(given: str | None) -> str | None:
    """Return the teacher's chat template that replaces the student's; None for the student's.

    Raises ConfigError, ModelError.
    """
    if given is None or "{" in given:
        return given
    key = "actor_rollout_ref.teacher.chat_template"
    path = Path(given).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(key, f"the file must be UTF-8 text ({error.reason} at {error.start})", given) from error
    if not path.is_dir():
        raise ConfigError(key, "must be a file with a template, a folder with a tokenizer, or a template", given)
    template = load_tokenizer(given).chat_template
    if not isinstance(template, str):
        raise ConfigError(key, "the tokenizer in this folder has no chat template", given)
    return template


def teacher_templates(config: Config) -> dict[str, str]:
    """Return the configured chat templates by key of the teacher. Raises ConfigError as `teacher_template` does."""
    templates = dict[str, str]()
    for teacher in run_teachers(config):
        with rename_section(UNNAMED, teacher.where):
            own = teacher_template(teacher.section.chat_template)
        templates |= {teacher.key: own} if own is not None else {}
    return templates


def files(facts: Facts) -> str:
    """Read all rows, and check that each has a prompt, and an answer if rewards need one."""
    section, reward = facts.config.data, facts.config.reward
    of_completions = facts.config.distillation.teacher_prompt_fn is not None
    read = functools.partial(read_rows, unpacked_bytes=1e9 * section.max_unpacked_gigabytes)
    columns = Columns(
        prompt_key=section.prompt_key, answer_key=reward.answer_key, data_source_key=section.reward_fn_key,
        extra_info=reward.custom_reward_function.path is not None or of_completions,
        response_key=section.response_key, excluded_spans_key=section.excluded_spans_key,
        teacher_prompt_key=section.teacher_prompt_key, teacher=teacher_column(facts.config),
    )  # fmt: skip
    in_prompts = section.response_key if section.response_key == section.prompt_key else None
    of_val = dataclasses.replace(columns, response_key=in_prompts, excluded_spans_key=None)
    facts.train_rows, facts.val_rows = call_all([
        lambda: [] if facts.config.trainer.val_only
        else read(section.train_files, columns, key="data.train_files", weights=section.train_weights),
        lambda: [table.without_given() for table in read(section.val_files, of_val, key="data.val_files")]
        if section.val_files else [],
    ])  # fmt: skip
    facts.first_chat = next((table.rows[0].messages for table in facts.train_rows + facts.val_rows), None)
    parts = (f"{sum(len(t.rows) for t in tables)} rows" for tables in (facts.train_rows, facts.val_rows))
    return "{} for training, {} for validation, each with a prompt".format(*parts)


def data(facts: Facts) -> str:
    """Tokenize all prompts and check their lengths, and that they fill a training batch."""
    section, templates = facts.config.data, teacher_templates(facts.config)
    of_completions = facts.config.distillation.teacher_prompt_fn is not None
    make = functools.partial(
        make_prompts, tokenizer=facts.tokenizer, max_prompt_length=section.max_prompt_length,
        truncation=section.truncation, filter_overlong_prompts=section.filter_overlong_prompts,
        apply_chat_template_kwargs=section.apply_chat_template_kwargs,
        teacher_templates=templates, teacher_tokenizers=facts.other_tokenizers,
        keep_messages=facts.config.uses_reward_model or of_completions,
        max_response_length=section.max_response_length, loss_mask=section.loss_mask,
        max_teacher_prompt_length=section.max_teacher_prompt_length,
    )  # fmt: skip
    facts.train_prompts, facts.val_prompts = call_all([
        lambda: make(facts.train_rows, key="data.train_files") if facts.train_rows else [],
        lambda: make(facts.val_rows, key="data.val_files") if facts.val_rows else [],
    ])  # fmt: skip
    sections = {teacher.where: templates.get(teacher.key) for teacher in run_teachers(facts.config)}
    facts.settings |= template_checksums(facts.tokenizer.chat_template, sections)
    facts.settings |= data_checksums(facts.train_prompts, facts.train_rows, answers=facts.config.scores_rollouts)
    facts.train_rows, facts.val_rows = [], []
    check_rows("student", facts.config.actor_rollout_ref.model.path, facts.spec.num_embeddings, facts)
    facts.steps = total_steps(facts.config, facts.train_prompts)
    val_only = facts.config.trainer.val_only
    if max(facts.config.trainer.profile_steps, default=0) > facts.steps and not val_only:
        rule = f"must be steps of the run, which has {facts.steps}"
        raise ConfigError("trainer.profile_steps", rule, facts.config.trainer.profile_steps)
    data_checks.warn_about_steps(facts.config, facts.steps)
    data_checks.check_distinct(facts)
    data_checks.check_data_sources(facts)
    data_checks.check_right_answers(facts)
    chosen = describe_routing(facts.config, facts.train_prompts)
    data_checks.check_teacher_prompts(facts.config, facts.train_prompts)
    given = data_checks.check_given_answers(facts.config, facts.train_prompts)
    check_best_metric(facts.config.trainer, [source_of(prompt) for prompt in facts.val_prompts])
    lengths = [len(prompt.token_ids) for prompt in (*facts.train_prompts, *facts.val_prompts)]
    left = data_checks.describe_dropped_prompts(facts.config, facts.train_prompts, facts.steps)
    return (
        f"{len(facts.train_prompts)} training{given} and {len(facts.val_prompts)} validation prompts of "
        f"{min(lengths)} to {max(lengths)} tokens, {facts.steps} steps{left}{chosen}"
    )


def check_folder(key: str, path: str) -> None:
    """Check that a folder has a model, and that weights exported into a checkpoint are unchanged.

    Raises ModelError or CheckpointError.
    """
    check_model_folder(key, path)
    folder = Path(path).absolute()
    if not (folder.parent / MANIFEST).is_file():
        return
    for name, reason in find_damage(folder.parent, files=f"{folder.name}/*.safetensors").items():
        raise ModelError(f"{key}: {folder.parent / name} {reason}")


def check_length(who: str, path: str, config: Config, needed: int, override_config: dict[str, Any]) -> int:
    """Check that the longest possible sequence fits the model and its engine; return the number of embedding rows.

    Raises ConfigError or ModelError.
    """
    try:
        hf_config = read_config(path, config.actor_rollout_ref.model.trust_remote_code, override_config)
    except (OSError, ValueError) as error:
        raise ModelError(f"{who} {path}: config.json cannot be used: {error}") from error
    text = hf_config.get_text_config()
    limit, field = position_limit(text)
    check_positions(who, path, config, needed, (limit, field))
    if who == "student" and limit is not None and config.engine_length > limit:
        rule = f"the student {path} has {limit} positions ({field})"
        raise ConfigError("actor_rollout_ref.rollout.max_model_len", rule, config.engine_length)
    return int(text.vocab_size)


def check_vllm(
    where: str, section: RolloutConfig | TeacherConfig, key: str, path: str, config: Config, instead: str
) -> None:
    """Check that vLLM has the arguments of `section`, and can load the model at `path` and split it over the GPUs.

    `where`, `key`: those of the section and the path; `instead`: setting that needs no vLLM. Raises ConfigError,
    ModelError.
    """
    given, ranks = section.engine_kwargs.vllm, section.tensor_model_parallel_size
    if given and (unknown := unknown_arguments(given)):
        lacks = f"vLLM {vllm_version()} has no argument {', '.join(unknown)}"
        raise ConfigError(f"{where}.engine_kwargs.vllm", lacks, dict(given))
    hf_config = read_config(path, config.actor_rollout_ref.model.trust_remote_code, {})
    if "hf_overrides" not in given and (reason := cannot_be_served(hf_config)):
        raise ModelError(f"{key}: vLLM cannot serve {path}: {reason}; {instead} uses transformers")
    if rule := cannot_be_split(hf_config, ranks):
        raise ConfigError(f"{where}.tensor_model_parallel_size", f"{rule} ({path})", ranks)


def check_teacher_weights(path: str, config: Config) -> None:
    """Check the weights of a teacher that the run starts; shapes only where transformers has its architecture."""
    shapes: dict[str, tuple[int, ...]] = {}
    with contextlib.suppress(ModelError):  # quantised, or an architecture that only vLLM has
        trust = config.actor_rollout_ref.model.trust_remote_code
        built = build_model(path, dtype=torch.float32, trust_remote_code=trust, override_config={}, key=TEACHER_PATH)
        shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    check_weights(TEACHER_PATH, path, shapes)


def check_rows(who: str, path: str, rows: int, facts: Facts, *, of_teacher: str | None = None) -> None:
    """Limit drawn and scored ids to a model's embedding `rows`, and warn of tokens that this excludes.

    Such tokens were added to the tokenizer only, or to another model. `of_teacher`: key of the teacher whose prompts
    are checked; None checks the student's. Raises DataError: a prompt or a given completion has one; ModelError: only
    such tokens end a completion.
    """
    for prompt in facts.prompts:
        parts = {"given completion": prompt.response_ids}  # trained ids are limited for all teachers
        if of_teacher in (None, prompt.teacher):
            own = prompt.teacher_ids if of_teacher else None
            parts["prompt"] = prompt.token_ids if own is None else own
        for name, ids in parts.items():
            if ids is not None and (largest := int(ids.max(initial=0))) >= rows:
                raise DataError(
                    f"{prompt.where}: the {name} has the token "
                    f"{facts.tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}; the {who} {path} "
                    f"has only {rows} rows in its embedding (vocab_size), for ids below {rows}"
                )
    if rows >= facts.num_ids:
        return
    excluded = facts.tokenizer.convert_ids_to_tokens(list(range(rows, facts.num_ids))[:MAX_SHOWN])
    names = ", ".join(map(repr, excluded))
    what = f"the {who} {path} has {rows} rows in its embedding (vocab_size), the student more: {names}"
    if all(stop >= rows for stop in facts.stop_token_ids):
        raise ModelError(f"{what}, among them all that end a completion ({facts.stop_token_ids})")
    logger.warning("%s; tokens with the ids %d to %d are never sampled", what, rows, facts.num_ids - 1)
    facts.num_ids = rows
    check_topk(facts)


def check_topk(facts: Facts) -> None:
    """Check that a position has as many candidates as are asked for. Raises ConfigError."""
    loss, rule = facts.config.distillation, f"must be at most the {facts.num_ids} tokens with a row in every model"
    for key, topk in (
        ("distillation.topk", loss.topk if loss.enabled else 0), ("actor_rollout_ref.ref.topk", facts.config.ref_topk),
    ):
        if topk > facts.num_ids:
            raise ConfigError(key, rule, topk)
    length = facts.config.data.max_response_length
    size = reply_bytes(length, max(loss.topk, loss.given_topk))
    if loss.enabled and not facts.config.teaches_itself and size > MAX_REPLY_BYTES:
        rule = f"a teacher's reply on data.max_response_length={length} tokens takes {size} bytes, the limit is"
        raise ConfigError("distillation.topk", f"{rule} {MAX_REPLY_BYTES}; lower one of the two", loss.topk)
    if not (loss.enabled and loss.given_topk):
        return
    if loss.given_topk > facts.num_ids:
        raise ConfigError("distillation.topk", f"with distillation.candidates=union, twice it {rule}", loss.topk)
    size = 4 * (facts.config.max_reading_length + facts.config.data.max_response_length * loss.topk)
    if size > MAX_REQUEST_BYTES:
        rule = f"the longest completion takes {size} bytes in a request for scores, the limit is {MAX_REQUEST_BYTES}"
        raise ConfigError("distillation.candidates", f"{rule}; lower distillation.topk", loss.candidates)


def check_positions(who: str, path: str, config: Config, needed: int, limit: tuple[int | None, str]) -> None:
    """Raise ConfigError if the longest possible sequence exceeds a model's `position_limit`."""
    positions, field = limit
    if positions is not None and positions < needed:
        response = config.data.max_response_length
        reads_teacher_prompt = who == "teacher" or (who == "student" and config.teaches_itself)
        prompt = config.teacher_prompt_limit if reads_teacher_prompt else config.data.max_prompt_length
        rule = (
            f"prompt and response limits ({prompt} + {response}) need {needed} positions, but the {who} {path} has "
            f"{positions} ({field})"
        )
        raise ConfigError("data.max_response_length", rule, response)


def check_architecture(key: str, model: ModelConfig, wrap: Callable[[Any], object]) -> None:
    """Check that a model's computation can be reproduced exactly, by calling `wrap` on the model without weights.

    Raises ModelError, ConfigError.
    """
    built = build_model(
        model.path, dtype=torch.float32, trust_remote_code=model.trust_remote_code,
        override_config=model.override_config, key=key,
    )
    with prefix_errors(key):
        wrap(built)
    check_weights(key, model.path, {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()})

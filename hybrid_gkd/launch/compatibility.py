"""Check that tokenizer, chat template and end-of-text tokens of teacher and student match, and that the teacher assigns
a high probability to its own completions."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from concurrent.futures import wait

import numpy as np

from hybrid_gkd.config import RunTeacher
from hybrid_gkd.data.chat_template import tokenize_chats
from hybrid_gkd.errors import DataError, TeacherMismatch, prefix_errors
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.each_teacher import for_each_teacher
from hybrid_gkd.launch.inputs import check_rows
from hybrid_gkd.launch.resume import accepted_changes
from hybrid_gkd.launch.teacher import connect, opened_store
from hybrid_gkd.models.tokenizer import special_tokens, stop_token_ids, tokenizer_hash
from hybrid_gkd.ppo.resuming import TEACHER_PATH, teacher_settings
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.teacher_scorer import completion_view
from hybrid_gkd.teacher.client.score_store import ScoredBy, ScoreStore
from hybrid_gkd.teacher.protocol import ModelInfo
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.types import Reading, given_sample

logger = logging.getLogger(__name__)

NUM_PROMPTS, NUM_TOKENS = 4, 8
"""Completions that the teacher generates for the check, and tokens of each."""
LOW_CONFIDENCE = -1.5
"""Mean log-probability of the teacher's most likely token, nats, below which a warning is logged."""
MAX_SHOWN = 200
"""Maximum number of characters of a prompt in a message."""
SCORES_SECONDS = 10.0
"""Timeout for scoring these completions; later scores are ignored."""


def check_compatibility(facts: Facts) -> str:
    """Check that teachers and student have the same tokens; warn if chat templates or end-of-text tokens differ."""
    return for_each_teacher(facts.config, functools.partial(check_teacher_tokens, facts)) or "no teacher"


def check_teacher_tokens(facts: Facts, teacher: RunTeacher) -> str:
    """Compare the tokens of a teacher with the student's."""
    config, section = teacher.config, teacher.section
    if config.teaches_itself:
        student = config.actor_rollout_ref.model.path
        check_rows("student", student, facts.spec.num_embeddings, facts, of_teacher=teacher.key)
        return "the teacher is the student"
    if section.is_stored:
        with opened_store(config, facts.tokenizer) as (store, stored):
            changed = check_same_teacher(facts, teacher, stored.model)
            check_all_stored(facts, teacher, store, stored)
        if stored.num_ids > facts.num_ids:
            raise TeacherMismatch(
                f"{section.cache} has scores of {stored.num_ids} ids, but the student's embedding has only "
                f"{facts.num_ids} rows for tokens: score the completions for this student "
                "(python -m hybrid_gkd.teacher score --student)"
            )
        check_rows("teacher", stored.model.model, stored.num_ids, facts, of_teacher=teacher.key)
        return "\n".join([f"{stored} has the student's vocabulary", *changed])
    other = facts.other_tokenizers.get(teacher.key)
    if section.server_ip is not None:
        with connect(facts, teacher, section.endpoints) as client:
            model = client.model
        if other is not None:
            return "\n".join([f"{model.model} has another tokenizer", *check_same_teacher(facts, teacher, model)])
        check_rows("teacher", model.model, model.num_embeddings, facts, of_teacher=teacher.key)
        changed = check_same_teacher(facts, teacher, model)
        check_ends_and_template(facts, teacher, model.model, model.chat_template, list(model.stop_token_ids))
        return "\n".join([f"{model.model} scores the student's completions", *changed])
    own, path = facts.teacher_tokenizers[teacher.label], section.model.path
    assert path is not None
    if other is not None:
        return f"{path} has another tokenizer"
    if tokenizer_hash(own) != tokenizer_hash(facts.tokenizer):
        hint = "; distillation.cross_tokenizer=spans aligns them" if section.cache is None else ""
        raise TeacherMismatch(
            f"{TEACHER_PATH}: teacher and student must have the same vocabulary; "
            f"teacher {path} has {len(own)} tokens (hash {tokenizer_hash(own)[:12]}), student "
            f"{config.actor_rollout_ref.model.path} has {len(facts.tokenizer)} "
            f"(hash {tokenizer_hash(facts.tokenizer)[:12]}){hint}"
        )
    theirs, ours = special_tokens(own), special_tokens(facts.tokenizer)
    if differ := [f"{name}: {theirs[name]!r}, {ours[name]!r}" for name in ours if theirs[name] != ours[name]]:
        logger.warning(
            "same vocabulary, but different special tokens (teacher %s, student %s): %s; the student's are used for "
            "prompts and completions", path, config.actor_rollout_ref.model.path, "; ".join(differ),
        )  # fmt: skip
    with prefix_errors(TEACHER_PATH):
        ends = stop_token_ids(path, own)
    check_ends_and_template(facts, teacher, path, own.chat_template, ends)
    return "teacher and student have the same vocabulary"


def check_all_stored(facts: Facts, teacher: RunTeacher, store: ScoreStore, scored_by: ScoredBy) -> None:
    """Raise DataError for training rows of a run without a teacher that the store has no readable scores of."""
    tasks = [task for task in facts.train_prompts if task.teacher == teacher.key]
    given = (task for task in tasks if task.response_ids is not None)
    readings = {task.row: completion_view(task, given_sample(task, 1, 0.0)) for task in given}
    lacking = store.missing(scored_by, readings)
    if missing := [task for task in tasks if task.row not in readings or task.row in lacking]:
        raise DataError(
            f"{missing[0].where}: no readable scores in {teacher.section.cache} ({teacher.where}.cache) of {scored_by}"
            f", as for {len(missing)} of {len(tasks)} rows: score their completions with `python -m hybrid_gkd.teacher "
            f"score` and the run's keys of data, or give the run a teacher ({teacher.where}.model.path or server_ip), "
            "which rows without a completion need"
        )


def check_same_teacher(facts: Facts, teacher: RunTeacher, model: ModelInfo) -> list[str]:
    """Add a teacher to the settings of the run; return notes if it differs from the checkpoint's.

    Raises ConfigError unless its `allow_teacher_change` is set.
    """
    section = teacher.section
    name = section.model.path if section.is_local and section.model.path is not None else model.model
    found = teacher_settings(teacher.where, name, model.weights)
    facts.settings |= found
    return accepted_changes(facts.resumption, facts.config, found) if facts.resumption is not None else []


def check_ends_and_template(
    facts: Facts, teacher: RunTeacher, model: str, template: str | None, ends: list[int]
) -> None:
    """Warn if the teacher's chat template or end-of-text tokens differ from the student's.

    `ends` is empty if a service does not report them. Raises TeacherMismatch if no token ends the completions of both.
    """
    section, student = teacher.section, facts.config.actor_rollout_ref.model.path
    if not section.check_fit or not ends:
        return
    own, theirs = (f"{ids} {facts.tokenizer.convert_ids_to_tokens(ids)}" for ids in (facts.stop_token_ids, ends))
    differ = f"the teacher {model} ends its completions with the tokens {theirs}, the student {student} with {own}"
    if not set(ends) & set(facts.stop_token_ids):
        raise TeacherMismatch(
            f"actor_rollout_ref.teacher: {differ}: the student would learn to never end its completions; "
            "actor_rollout_ref.teacher.check_fit=false skips this check"
        )
    if set(ends) != set(facts.stop_token_ids):
        logger.warning("%s; completions may grow longer during training", differ)
    shown = rendered_first_prompt(facts, None), rendered_first_prompt(facts, template)
    if section.chat_template is None and shown[0] != shown[1]:
        logger.warning(
            "the chat templates differ: the teacher %s will read %r, as the student %s does; its own template gives "
            "%r (set %s.chat_template to use it)", model, shown[0], student, shown[1], teacher.where,
        )  # fmt: skip


def rendered_first_prompt(facts: Facts, template: str | None) -> str:
    """Return the first prompt in a chat template (None: the student's), or the error if the template rejects it."""
    chat = facts.first_chat or [{"role": "user", "content": "Hello"}]
    options = facts.config.data.apply_chat_template_kwargs
    try:
        (ids,) = tokenize_chats([chat], facts.tokenizer, options, "the first prompt", [template])
    except DataError as error:
        return str(error)
    text = facts.tokenizer.decode(ids)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 2 :]}"


def check_confidence(facts: Facts, teacher: RunTeacher, client: TeacherClient) -> str:
    """Let the teacher generate greedily, through its scores, and warn if it gives these completions a low probability.

    Raises TeacherError: the service cannot score.
    """
    config = facts.config
    if not teacher.section.check_fit or config.distillation.temperature != 1:
        return f"skipped ({teacher.where}.check_fit=false, or a temperature other than 1)"
    length = min(NUM_TOKENS, config.data.max_response_length)
    own = (prompt for prompt in facts.train_prompts or facts.val_prompts if prompt.teacher == teacher.key)
    prompts = [
        prompt.token_ids if prompt.teacher_ids is None else prompt.teacher_ids
        for prompt in itertools.islice(own, NUM_PROMPTS)
    ]
    ends = facts.stop_token_ids
    if teacher.key in facts.other_tokenizers:
        ends = list(client.model.stop_token_ids)
    with client.uncounted():
        logprobs = greedy_logprobs(client, prompts, length=length, stop_token_ids=ends, seconds=SCORES_SECONDS)
    if not logprobs:
        return f"no scores within {Timeout(SCORES_SECONDS)}"
    mean = float(np.mean(logprobs))
    found = f"{mean:.2f} nats per token over {len(logprobs)} tokens of greedy completions of {len(prompts)} prompts"
    if mean < LOW_CONFIDENCE:
        logger.warning(
            "the teacher gives its own greedy completions a low probability: %s, where about -0.3 is usual; likely "
            "causes are a chat template that it was not trained with (%s.chat_template), prompts unlike its training "
            "data, or untrained or damaged weights", found, teacher.where,
        )  # fmt: skip
    return found


def greedy_logprobs(
    teacher: TeacherClient, prompts: list[np.ndarray], *, length: int, stop_token_ids: list[int], seconds: float
) -> list[float]:
    """Return the log-probabilities of the teacher's most likely tokens, of up to `length` tokens per prompt.

    The first candidate of a score is the next token of the completion. Scores not received after `seconds` are left
    out.
    """
    deadline, found = time.monotonic() + seconds, list[float]()
    for _ in range(length):
        futures = teacher.submit([
            Reading(
                token_ids=np.append(prompt, np.int32(0)), positions=np.array([len(prompt)]), name=f"prompt {number}"
            )
            for number, prompt in enumerate(prompts, start=1)
        ])  # fmt: skip
        late = wait(futures, timeout=max(0.0, deadline - time.monotonic())).not_done
        if late:
            for future in late:
                future.cancel()
            break
        scores = [future.result() for future in futures]
        found += [float(score.logprobs[0, 0]) for score in scores]
        pairs = zip(prompts, (score.ids[0, :1] for score in scores), strict=True)
        prompts = [np.concatenate([prompt, token]) for prompt, token in pairs if token[0] not in stop_token_ids]
        if not prompts:
            break
    return found

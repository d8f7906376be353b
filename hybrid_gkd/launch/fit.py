"""Is this the right teacher? It has the student's tokens, chat template and ends, and is sure of its own answers."""

from __future__ import annotations

import logging
import time
from concurrent.futures import wait

import numpy as np

from hybrid_gkd.data.prompts import tokenize_chats
from hybrid_gkd.errors import DataError, TeacherMismatch, prefix_errors
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.inputs import check_rows
from hybrid_gkd.launch.resume import accepted_changes
from hybrid_gkd.launch.teacher import connect, opened_store
from hybrid_gkd.models.tokenizer import special_tokens, stop_token_ids, tokenizer_hash
from hybrid_gkd.ppo.resuming import TEACHER_PATH
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.types import Reading

logger = logging.getLogger(__name__)

NUM_PROMPTS, NUM_TOKENS = 4, 8
"""Of the answers that the teacher writes to itself, a token of each at a time."""
UNSURE = -1.5
"""Mean log-probability of the most likely token, nats, below which a teacher cannot mean what it says."""
LONGEST_SHOWN = 200
"""Characters of a prompt in a message."""
SCORES_SECONDS = 10.0
"""For these answers; what takes longer is left out."""


def fit(facts: Facts) -> str:
    """Teacher and student have the same tokens. Warns where their chat templates or ends of an answer differ."""
    config, section = facts.config, facts.config.actor_rollout_ref.teacher
    if not config.distillation.enabled:
        return "no teacher"
    if section.is_stored:
        with opened_store(config, facts.tokenizer) as (_, stored):
            facts.settings[TEACHER_PATH] = stored.model.model
        if facts.num_ids is not None and stored.num_ids > facts.num_ids:
            raise TeacherMismatch(
                f"{section.cache} has scores of {stored.num_ids} ids, and the student's embedding {facts.num_ids} rows "
                "for tokens: score the answers for this student (python -m hybrid_gkd.teacher score --student)"
            )
        check_rows("teacher", stored.model.model, stored.num_ids, facts, of_teacher=True)
        return f"{stored} has the student's vocabulary"
    if section.server_ip is not None:
        with connect(config, facts.tokenizer, section.endpoints) as client:
            model = next(iter(client.served.values()))
        check_rows("teacher", model.model, model.num_embeddings, facts, of_teacher=True)
        found = {TEACHER_PATH: model.model}
        facts.settings |= found
        changed = accepted_changes(facts.resumption, config.trainer, found) if facts.resumption is not None else []
        compare(facts, model.model, model.chat_template, list(model.stop_token_ids))
        return "\n".join([f"{model.model} scores what the student will write", *changed])
    own, path = facts.teacher_tokenizer, section.model.path
    assert path is not None
    if tokenizer_hash(own) != tokenizer_hash(facts.tokenizer):
        raise TeacherMismatch(
            f"{TEACHER_PATH}: teacher and student must have the same vocabulary; "
            f"teacher {path} has {len(own)} tokens (hash {tokenizer_hash(own)[:12]}), student "
            f"{config.actor_rollout_ref.model.path} has {len(facts.tokenizer)} "
            f"(hash {tokenizer_hash(facts.tokenizer)[:12]})"
        )
    theirs, ours = special_tokens(own), special_tokens(facts.tokenizer)
    if differ := [f"{name}: {theirs[name]!r}, {ours[name]!r}" for name in ours if theirs[name] != ours[name]]:
        logger.warning(
            "the vocabulary is the same, and its special tokens differ (teacher %s, student %s): %s; prompts and "
            "answers have the student's", path, config.actor_rollout_ref.model.path, "; ".join(differ),
        )  # fmt: skip
    with prefix_errors(TEACHER_PATH):
        ends = stop_token_ids(path, own)
    compare(facts, path, own.chat_template, ends)
    return "teacher and student have the same vocabulary"


def compare(facts: Facts, teacher: str, template: str | None, ends: list[int]) -> None:
    """Warn where the teacher's chat template or the tokens that end its answers are not the student's.

    `ends` is empty where a service does not say. Raises TeacherMismatch where no token ends the answers of both.
    """
    section, student = facts.config.actor_rollout_ref.teacher, facts.config.actor_rollout_ref.model.path
    if not section.check_fit or not ends:
        return
    own, theirs = (f"{ids} {facts.tokenizer.convert_ids_to_tokens(ids)}" for ids in (facts.stop_token_ids, ends))
    differ = f"the teacher {teacher} ends its answers with the tokens {theirs}, the student {student} with {own}"
    if not set(ends) & set(facts.stop_token_ids):
        raise TeacherMismatch(
            f"actor_rollout_ref.teacher: {differ}: the student would learn never to end; "
            "actor_rollout_ref.teacher.check_fit=false trains all the same"
        )
    if set(ends) != set(facts.stop_token_ids):
        logger.warning("%s; where the teacher does not expect the student's, answers grow", differ)
    shown = behind(facts, None), behind(facts, template)
    if section.chat_template is None and shown[0] != shown[1]:
        logger.warning(
            "the chat templates differ: the teacher %s will see %r, as the student %s does, and knows %r; "
            "actor_rollout_ref.teacher.chat_template gives it its own", teacher, shown[0], student, shown[1],
        )  # fmt: skip


def behind(facts: Facts, template: str | None) -> str:
    """The first prompt behind the student's chat template, or behind another one; a reason where it refuses it."""
    chat = facts.first_chat or [{"role": "user", "content": "Hello"}]
    options = facts.config.data.apply_chat_template_kwargs
    try:
        (ids,) = tokenize_chats([chat], facts.tokenizer, options, "the first prompt", template)
    except DataError as error:
        return str(error)
    text = facts.tokenizer.decode(ids)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN // 2]} ... {text[-LONGEST_SHOWN // 2 :]}"


def check_own_answers(facts: Facts, teacher: TeacherClient) -> str:
    """Let the teacher write greedily, through its scores, and warn where it is not sure of what it writes.

    Raises TeacherError: the service cannot score.
    """
    config = facts.config
    if not config.actor_rollout_ref.teacher.check_fit or config.distillation.temperature != 1:
        return "left out (actor_rollout_ref.teacher.check_fit, or a temperature other than 1)"
    length = min(NUM_TOKENS, config.data.max_response_length)
    prompts = [
        prompt.token_ids if prompt.teacher_ids is None else prompt.teacher_ids
        for prompt in (facts.train_prompts or facts.val_prompts)[:NUM_PROMPTS]
    ]
    ends = facts.stop_token_ids
    with teacher.uncounted():
        logprobs = greedy_logprobs(teacher, prompts, length=length, stop_token_ids=ends, seconds=SCORES_SECONDS)
    if not logprobs:
        return f"no scores within {Timeout(SCORES_SECONDS)}"
    mean = float(np.mean(logprobs))
    found = f"{mean:.2f} nats a token over {len(logprobs)} tokens of its own greedy answers to {len(prompts)} prompts"
    if mean < UNSURE:
        logger.warning(
            "the teacher is not sure of its own answers: %s, where a trained model has about -0.3; likely a chat "
            "template that it does not know (actor_rollout_ref.teacher.chat_template), prompts of another kind than it "
            "was trained on, or weights that are not trained or damaged", found,
        )  # fmt: skip
    return found


def greedy_logprobs(
    teacher: TeacherClient, prompts: list[np.ndarray], *, length: int, stop_token_ids: list[int], seconds: float
) -> list[float]:
    """Log-probabilities of the teacher's most likely tokens, of up to `length` to each prompt, one after the other.

    A score's first candidate is the next token of the answer. What has not arrived after `seconds` is left out.
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

"""Teachers with another tokenizer than the student's (`distillation.cross_tokenizer`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_gkd.config import UNNAMED, RunTeacher, run_teachers
from hybrid_gkd.errors import ModelError, prefix_errors, rename_section
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.presence import check_model_folder
from hybrid_gkd.models.spelling import Spelling
from hybrid_gkd.models.tokenizer import load_tokenizer, tokenizer_hash
from hybrid_gkd.ppo.resuming import TEACHER_PATH
from hybrid_gkd.scoring.cross_tokenizer import Aligner, CrossTokenizerScorer
from hybrid_gkd.scoring.teacher_scorer import Teacher, TeacherScorer
from hybrid_gkd.scoring.token_events import TokenEvents
from hybrid_gkd.teacher.protocol import ModelInfo


def tokenizers(facts: Facts) -> str:
    """Load the tokenizers of teachers that have another one, and check that they can be aligned with the student's.

    Raises ModelError.
    """
    config, found = facts.config, list[str]()
    if not config.distillation.enabled or config.distillation.cross_tokenizer == "refuse":
        return "teachers must have the student's"
    trusts, path = config.actor_rollout_ref.model.trust_remote_code, config.actor_rollout_ref.model.path
    for teacher in run_teachers(config):
        own_path = teacher.section.model.path
        assert own_path is not None
        with rename_section(UNNAMED, teacher.where), prefix_errors(TEACHER_PATH):
            check_model_folder(TEACHER_PATH, own_path)
            own = load_tokenizer(own_path, trust_remote_code=trusts)
            if tokenizer_hash(own) == tokenizer_hash(facts.tokenizer):
                continue
            spelling = Spelling(own, f"teacher {own_path}")
            if own.eos_token_id is None:
                raise ModelError(f"teacher {own_path}: its tokenizer has no eos_token, so no completion would end")
        with prefix_errors("actor_rollout_ref.model.path"):
            same = spelling.by_bytes.keys() & Spelling(facts.tokenizer, f"student {path}").by_bytes.keys()
        facts.other_tokenizers[teacher.key] = own
        found.append(f"{len(same)} of the {len(own)} tokens of {own_path} are tokens of the student")
    return "; ".join(found) or "the teachers have the student's"


def make_scorer(facts: Facts, teacher: RunTeacher, client: Teacher, served: ModelInfo | None) -> TeacherScorer:
    """Return the scorer of a teacher.

    If any teacher has another tokenizer, the scores of all are aligned, so that they have the same layout.
    """
    if not facts.other_tokenizers:
        return TeacherScorer(client)
    loss, own = facts.config.distillation, facts.other_tokenizers.get(teacher.key)
    assert served is not None
    student = Spelling(facts.tokenizer, "student", ends=facts.stop_token_ids)
    roles = dict[int, list[int]]()
    if own is None:
        spelling = student
    else:
        stops = served.stop_token_ids or [own.eos_token_id]  # services of other programs may not report them
        spelling, ends = Spelling(own, "teacher", ends=stops), _usual_first(facts.tokenizer, facts.stop_token_ids)
        roles = dict.fromkeys(_usual_first(own, stops), ends)
        others = spelling.specials.items()
        roles |= {
            number: [student.specials[text]] for text, number in others
            if number not in roles and student.specials.get(text) not in (None, *ends)
        }  # fmt: skip
    events = TokenEvents(spelling, student, roles, num_ids=facts.num_ids, num_columns=min(2 * loss.topk, facts.num_ids))
    aligner = Aligner(events, limit=served.max_sequence_length - 1)  # vLLM generates a token to score
    return CrossTokenizerScorer(client, aligner, spans=loss.cross_tokenizer == "spans")


def _usual_first(tokenizer: Any, ends: Sequence[int]) -> list[int]:
    """Return the tokens that end a text, that of the tokenizer first."""
    return sorted(ends, key=lambda number: (number != tokenizer.eos_token_id, number))

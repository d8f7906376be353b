"""Whether this is the right teacher: tokens, chat templates, ends of answers, and what it says of its own answers."""

import contextlib
import dataclasses
import json
import logging
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from small_tokenizers import byte_level, make_model_with, word_piece
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hybrid_gkd.config import run_teachers
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import ConfigError, DataError, ModelError, TeacherMismatch
from hybrid_gkd.launch import compatibility, doctor
from hybrid_gkd.launch import teacher as connections
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.inputs import check_rows
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.launch.teacher import opened_store
from hybrid_gkd.models.tokenizer import load_tokenizer, num_token_ids, tokenizer_hash
from hybrid_gkd.teacher.client.score_store import ScoredBy, ScoreStore
from hybrid_gkd.teacher.protocol import ModelInfo
from hybrid_gkd.testing import LocalTeacher, make_tiny_model, tail_of
from hybrid_gkd.types import Reading, Task, TopK

OTHER = "{% for m in messages %}<s>{{ m.content }}{% endfor %}A:"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Student, and teachers that differ from it in one thing each."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("student", "template", "ends"):
        make_tiny_model(folder / name)
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "What is 1?"}) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(str(folder / "template"))
    tokenizer.chat_template = OTHER
    tokenizer.save_pretrained(folder / "template")
    (folder / "ends" / "generation_config.json").write_text('{"eos_token_id": [256, 7]}', encoding="utf-8")
    return folder


def check(models, teacher, *overrides):
    return check_all(load_config([
        f"actor_rollout_ref.model.path={models}/student", f"actor_rollout_ref.teacher.model.path={models}/{teacher}",
        f"data.train_files={models}/train.jsonl", "data.train_batch_size=1", "data.max_prompt_length=32",
        "data.max_response_length=16", f"trainer.default_local_dir={models}/out", "trainer.device=cpu",
        "actor_rollout_ref.rollout.name=hf", *overrides,
    ]))  # fmt: skip


@pytest.mark.slow
def test_the_same_template_and_end_are_fine(models, caplog):
    facts = check(models, "student")
    assert facts.train_prompts[0].teacher_ids is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_another_template_is_named_with_what_the_teacher_knows(models, caplog):
    check(models, "template")
    assert f"the chat templates differ: the teacher {models}/template will read 'What is 1?<|a|>'" in caplog.text
    assert "its own template gives '<s>What is 1?A:'" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["folder", "file", "text"])
def test_a_template_for_the_teacher_replaces_the_students(models, caplog, tmp_path, how):
    (tmp_path / "template.jinja").write_text(OTHER, encoding="utf-8")
    given = {"folder": f"{models}/template", "file": f"{tmp_path}/template.jinja", "text": f"'{OTHER}'"}[how]
    facts = check(models, "template", f"actor_rollout_ref.teacher.chat_template={given}")
    (prompt,) = facts.train_prompts
    assert facts.tokenizer.decode(prompt.teacher_ids) == "<s>What is 1?A:"
    assert facts.tokenizer.decode(prompt.token_ids) == "What is 1?<|a|>"
    assert "the chat templates differ" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "token"), [("pad_token", "a"), ("bos_token", "b"), ("eos_token", "c")])
def test_other_special_tokens_of_the_same_vocabulary_are_a_warning(models, tmp_path, caplog, name, token):
    shutil.copytree(models / "student", tmp_path / "teacher")
    tokenizer = load_tokenizer(str(tmp_path / "teacher"))
    setattr(tokenizer, name, token)
    tokenizer.save_pretrained(tmp_path / "teacher")
    check(models, "student", f"actor_rollout_ref.teacher.model.path={tmp_path}/teacher")
    assert f"different special tokens (teacher {tmp_path}/teacher, student {models}/student): {name}: " in caplog.text
    ours = getattr(load_tokenizer(str(models / "student")), name)
    assert f"{name}: {token!r}, {ours!r}; the student's are used for prompts and completions" in caplog.text


@pytest.mark.slow
def test_the_same_number_of_tokens_is_not_the_same_vocabulary(models, tmp_path):
    folders = [make_tiny_model(tmp_path / token, extra_tokens=(f"<{token}>",)) for token in ("one", "two")]
    paths = [f"actor_rollout_ref.model.path={folders[0]}", f"actor_rollout_ref.teacher.model.path={folders[1]}"]
    with pytest.raises(TeacherMismatch, match=r"must have the same vocabulary; teacher .* has 261 .* student .* 261"):
        check(models, "student", *paths)


@pytest.mark.slow
def test_another_tokenizer_is_aligned_if_the_configuration_allows_it(models, tmp_path):
    """The teacher reads prompts in its own tokens and template."""
    own = byte_level(420, end="</s>")
    own.chat_template = OTHER
    teacher = make_model_with(own, tmp_path / "teacher")
    path = f"actor_rollout_ref.teacher.model.path={teacher}"
    with pytest.raises(TeacherMismatch, match=r"must have the same vocabulary.*distillation\.cross_tokenizer=spans"):
        check(models, "student", path)
    facts = check(models, "student", path, "distillation.cross_tokenizer=spans")
    (prompt,) = facts.train_prompts
    assert own.decode(prompt.teacher_ids) == "<s>What is 1?A:"
    assert prompt.teacher_ids.tolist() == own("<s>What is 1?A:").input_ids
    facts = check(models, "student", f"actor_rollout_ref.teacher.model.path={models}/student",
                  "distillation.cross_tokenizer=spans")  # fmt: skip
    assert not facts.other_tokenizers
    lower = make_model_with(word_piece(lowercase=True), tmp_path / "lower")
    config = (lower / "config.json").read_text(encoding="utf-8")  # transformers has one tokenizer for all Qwen2
    (lower / "config.json").write_text(config.replace('"qwen2"', '"llama"'), encoding="utf-8")
    with pytest.raises(ModelError, match=r"teacher\.model\.path: teacher .*lower: its tokens cannot be aligned"):
        check(models, "student", f"actor_rollout_ref.teacher.model.path={lower}", "distillation.cross_tokenizer=map")


def test_a_service_with_another_tokenizer_is_checked_against_its_own(monkeypatch):
    """By the doctor as by a run."""
    asked = []

    class Client:
        def __init__(self, endpoints, *, vocab_size, **options):
            self.num_ids = vocab_size

        def handshake(self, *, tokenizer_hash, tokenizer_size, max_sequence_length):
            asked.append((tokenizer_hash, tokenizer_size, self.num_ids))
            return SimpleNamespace(model="T", backend="hf")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(connections, "TeacherClient", Client)
    student, other = byte_level(300), byte_level(420)
    teacher = "actor_rollout_ref.teacher={server_ip: far, model: {path: x}, check_fit: false}"
    given = ["data.train_files=x", "actor_rollout_ref.model.path=x", teacher, "distillation.cross_tokenizer=spans"]
    facts = Facts(load_config(given), tokenizer=student, num_ids=290)
    (found,) = run_teachers(facts.config)
    for theirs, num_ids in ((student, 290), (other, num_token_ids(other))):
        facts.other_tokenizers = {found.key: other} if theirs is other else {}
        assert doctor.teacher_confidence(facts).startswith("skipped")
        assert asked.pop() == (tokenizer_hash(theirs), num_token_ids(theirs), num_ids)


@pytest.mark.slow
def test_a_prompt_with_a_token_that_a_model_has_no_row_for_is_named(models, tmp_path):
    """The tokenizer is longer than the embedding, which is no harm where no text has the last tokens."""
    for name in ("short", "whole"):
        make_tiny_model(tmp_path / name, extra_tokens=("<x>", "<y>"), vocab_size=260 if name == "short" else None)
    rows = [{"prompt": "call <x>"}, {"prompt": "and <y>"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    short, whole = ([f"actor_rollout_ref.{who}model.path={tmp_path}/{name}" for who in ("", "teacher.")]
                    for name in ("short", "whole"))  # fmt: skip
    check(models, "student", *short)
    data, at_fault = f"data.train_files={tmp_path}/train.jsonl", r"the prompt has the token '<y>' with the id 260; the "
    with pytest.raises(DataError, match=rf"^data\.train_files: '[^']*', row 2: {at_fault}student .*short has only 260"):
        check(models, "student", short[0], whole[1], data)
    with pytest.raises(DataError, match=rf"{at_fault}teacher .*short has only 260 rows"):
        check(models, "student", whole[0], short[1], data)
    check(models, "student", *whole, data)


@pytest.mark.slow
def test_a_given_completion_needs_a_row_in_every_teacher(models):
    """Since what is scored is the same for all teachers; a prompt only in that of its row."""
    facts = check(models, "student")
    task = Task(index=0, token_ids=np.array([5, 258], np.int32), text="", teacher="b", source="a.jsonl")
    facts.train_prompts = [task]
    check_rows("teacher", "A", 258, facts, of_teacher="a")
    with pytest.raises(DataError, match=r"^a\.jsonl, row 1: the prompt has the token '.*' with the id 258; the t"):
        check_rows("teacher", "B", 258, facts, of_teacher="b")
    facts.train_prompts = [dataclasses.replace(task, response_ids=np.array([7, 257], np.int32))]
    with pytest.raises(DataError, match=r"^a\.jsonl, row 1: the given completion has the token '.*' with the id 257"):
        check_rows("teacher", "A", 257, facts, of_teacher="a")


def test_scores_in_a_store_are_for_a_tokenizer_with_unused_ids(tmp_path):
    words = WordLevel({"a": 0, "b": 300}, unk_token="a")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="b")
    assert len(tokenizer) < num_token_ids(tokenizer)
    model = ModelInfo(
        model="t", backend="hf", vocab_size=num_token_ids(tokenizer), num_embeddings=400, max_topk=64,
        tokenizer_hash=tokenizer_hash(tokenizer), max_sequence_length=9999, any_temperature=True, weights="w",
    )  # fmt: skip
    with contextlib.closing(ScoreStore(tmp_path / "s")) as store:
        scored_by = ScoredBy(model=model, topk=64, temperature=1.0, num_ids=num_token_ids(tokenizer))
        logprobs = np.full((1, 64), -5, np.float32)
        scores = TopK(
            ids=np.arange(64, dtype=np.int32)[None], logprobs=logprobs, tail_logprobs=tail_of(logprobs),
            sampled_logprobs=logprobs[:, 0],
        )  # fmt: skip
        store.put(scored_by, Reading(token_ids=np.arange(3), positions=np.array([2])), scores)
    config = load_config([
        "data.train_files=x", "actor_rollout_ref.model.path=x", f"actor_rollout_ref.teacher.cache={tmp_path}/s",
        "data.response_key=response",
    ])  # fmt: skip
    with opened_store(config, tokenizer) as (_, found):
        assert found.model == model


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "of_teacher", "num_ids"), [
    (259, 259, 259), (288, 272, 260), (272, 288, 260), (259, 288, 259), (288, 259, 259),
])  # fmt: skip
def test_what_is_scored_are_tokens_with_a_row_in_both_models(models, tmp_path, caplog, rows, of_teacher, num_ids):
    """The tokenizer has 260. With 259 rows a model lacks the last, which is warned of where the student has it."""
    folders = [make_tiny_model(tmp_path / who, vocab_size=size) for who, size in (("s", rows), ("t", of_teacher))]
    paths = [f"actor_rollout_ref.model.path={folders[0]}", f"actor_rollout_ref.teacher.model.path={folders[1]}"]
    assert check(models, "student", *paths).num_ids == num_ids
    warned = f"{tmp_path}/t has 259 rows in its embedding (vocab_size), the student more: '<|endoftext|>'; tokens with"
    assert (warned in caplog.text) == (of_teacher < min(rows, 260))


@pytest.mark.slow
def test_a_teacher_without_a_row_for_what_ends_an_answer_is_refused(models):
    facts = dataclasses.replace(check(models, "student"), train_prompts=[])
    with pytest.raises(ModelError, match=r"T has 256 rows .*, the student more: '<\|end\|>', .*end a completion \(\["):
        check_rows("teacher", "T", 256, facts)


@pytest.mark.slow
def test_more_candidates_than_tokens_are_refused(models, tmp_path):
    with pytest.raises(ConfigError, match=r"distillation\.topk: must be at most the 259 tokens.*got 260"):
        check(models, "student", "distillation.topk=260")
    check(models, "student", "distillation.topk=259")
    teacher = make_tiny_model(tmp_path / "teacher", vocab_size=258)
    paths = (f"data.train_files={tmp_path}/train.jsonl", f"actor_rollout_ref.teacher.model.path={teacher}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n', encoding="utf-8")
    plain = "actor_rollout_ref.teacher.chat_template='{{ messages[0].content }}'"
    with pytest.raises(ConfigError, match=r"distillation\.topk: must be at most the 258 tokens.*got 259"):
        check(models, "student", *paths, plain, "distillation.topk=259")


@pytest.mark.slow
def test_a_template_that_is_none_and_prompts_that_do_not_fit_behind_it_are_named(models):
    with pytest.raises(ConfigError, match=r"teacher\.chat_template: must be a file with a template.*got 'nowhere'"):
        check(models, "student", "actor_rollout_ref.teacher.chat_template=nowhere")
    with pytest.raises(DataError, match=r"the teacher_prompt has 50 tokens, the limit is"):
        check(models, "student", f"actor_rollout_ref.teacher.chat_template='{{{{ \"{'x' * 50}\" }}}}'")


@pytest.mark.slow
def test_other_ends_are_a_warning_and_none_in_common_an_error(models, caplog):
    check(models, "ends")
    assert f"the teacher {models}/ends ends its completions with the tokens [7, 256] [" in caplog.text
    assert f"the student {models}/student with [256] [" in caplog.text
    facts = check(models, "student")
    (teacher,) = run_teachers(facts.config)
    with pytest.raises(TeacherMismatch, match=r"the teacher T ends its completions with .*\[7\] .*to never end"):
        compatibility.check_ends_and_template(facts, teacher, "T", None, [7])
    compatibility.check_ends_and_template(facts, teacher, "T", None, [])  # an older service does not say
    facts.config.actor_rollout_ref.teacher.check_fit = False
    compatibility.check_ends_and_template(facts, teacher, "T", None, [7])


def counting(reading):
    """The only scored token is most likely one more than the one before, with a log-probability of -2."""
    (position,) = reading.positions
    ids = np.array([[reading.token_ids[position - 1] + 1, 0]], np.int32)
    logprobs = np.array([[-2.0, -3.0]], np.float32)
    return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail_of(logprobs), sampled_logprobs=logprobs[:, 1])


def greedy(teacher, *prompts, **options):
    ids = [np.array(prompt, np.int32) for prompt in prompts]
    options = {"length": 3, "stop_token_ids": [9], "seconds": 60.0} | options
    return compatibility.greedy_logprobs(teacher, ids, **options)


def test_greedy_answers_are_written_through_scores_alone():
    """Completions have three tokens, fewer where one ends; the prompts grow by the generated tokens."""
    seen = []
    teacher = LocalTeacher(lambda reading: (seen.append(reading.token_ids[:-1].tolist()), counting(reading))[1])
    assert greedy(teacher, [1, 4], [7]) == [-2.0] * 5
    assert seen == [[1, 4], [7], [1, 4, 5], [7, 8], [1, 4, 5, 6]]


def test_a_teacher_that_does_not_answer_in_time_is_left_alone():
    assert greedy(LocalTeacher(counting, delay=None), [1], seconds=0.05) == []


def test_a_teacher_that_is_not_sure_of_itself_is_a_warning(caplog):
    paths = ("data.train_files", "actor_rollout_ref.model.path", "actor_rollout_ref.teacher.model.path")
    config = load_config([f"{path}=x" for path in paths])
    prompt = Task(index=0, token_ids=np.array([1], np.int32), teacher_ids=np.array([8], np.int32), text="")
    facts, (teacher,) = Facts(config, train_prompts=[prompt], stop_token_ids=[9]), run_teachers(config)
    found = compatibility.check_confidence(facts, teacher, LocalTeacher(counting))  # its own template ends at once
    assert found == "-2.00 nats per token over 1 tokens of greedy completions of 1 prompts"
    assert "the teacher gives its own greedy completions a low probability: -2.00 nats" in caplog.text
    caplog.clear()
    sure = LocalTeacher(lambda reading: dataclasses.replace(counting(reading), logprobs=np.zeros((1, 1), np.float32)))
    assert compatibility.check_confidence(facts, teacher, sure).startswith("0.00 nats")
    config.actor_rollout_ref.teacher.check_fit = False
    assert compatibility.check_confidence(facts, teacher, sure).startswith("skipped")
    assert not caplog.records

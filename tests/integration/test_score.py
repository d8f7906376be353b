"""`python -m hybrid_gkd.teacher score` with real services, and what a run without a teacher reads of the store."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from processes import TIMEOUT

from hybrid_gkd.config import run_teachers
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import DataError, TeacherError
from hybrid_gkd.launch import inputs, score
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.compatibility import check_compatibility
from hybrid_gkd.launch.plan import make_plan
from hybrid_gkd.launch.teacher import connect, with_cache
from hybrid_gkd.models.tokenizer import load_tokenizer
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.teacher_scorer import TeacherScorer
from hybrid_gkd.teacher.server.local import TeacherProcess, child_environment
from hybrid_gkd.testing import make_tiny_model
from hybrid_gkd.types import given_sample

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|a|>{{ m['content'] }}<|end|>{% else %}"
    "{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
ROWS, K = 9, 5
LENGTHS = ["data.max_prompt_length=32", "data.max_response_length=24"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("score")
    for seed, name in enumerate(("student", "teacher")):
        make_tiny_model(folder / name, seed=seed)
        tokenizer = load_tokenizer(str(folder / name))
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / name)
    rows = [{"prompt": f"What is {i} + {i}?", "text": f"It is {2 * i}." if i else None} for i in range(ROWS)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def service(folder):
    options = ["--backend=hf", "--device=cpu"]
    with TeacherProcess(
        f"{folder}/teacher", log_path=folder / "teacher.log", options=options, start_timeout=TIMEOUT
    ) as service:
        service.wait_ready()
        yield service


def arguments(folder, *more):
    return [
        "answers.jsonl", "--response-key=text", f"--out={folder / 'store'}", f"--student={folder / 'student'}",
        f"--topk={K}", *LENGTHS, *more,
    ]  # fmt: skip


def run(folder, *more):
    command = [sys.executable, "-m", "hybrid_gkd.teacher", "score", *arguments(folder, *more)]
    done = subprocess.run(command, cwd=folder, env=child_environment(), capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def config_of(folder, *more):
    return load_config([
        f"data.train_files={folder / 'answers.jsonl'}", f"actor_rollout_ref.model.path={folder / 'student'}",
        f"distillation.topk={K}", "data.train_batch_size=1", "trainer.device=cpu", "data.response_key=text",
        *LENGTHS, *more,
    ])  # fmt: skip


def test_answers_are_scored_once_and_a_run_needs_no_teacher_for_them(folder, service, monkeypatch):
    by_service = ["--addr", service.address, "--keys", str(service.keys)]
    summary = rf"scores of {ROWS - 1} completions by teacher \(weights \w+, K {K}, temperature 1\.0, \d+ token ids\), "
    assert re.search(f"{summary}{ROWS - 1} of them new", run(folder, *by_service))
    # The same weights, in a service that this command starts.
    assert re.search(f"{summary}0 of them new", run(folder, f"--ckpt-path={folder / 'teacher'}", "--backend=hf"))

    monkeypatch.chdir(folder)
    options = score.parse(arguments(folder, *by_service))
    facts = Facts(score.make_config(options))
    inputs.student(facts)
    inputs.files(facts)
    inputs.data(facts)
    pairs = [(task, given_sample(task, 1, 0.0)) for task in facts.train_prompts if task.response_ids is not None]
    assert len(pairs) == ROWS - 1
    assert facts.tokenizer.decode(pairs[0][1].tokens) == "What is 1 + 1?<|a|>It is 2.<|end|>"

    address = f"actor_rollout_ref.teacher.server_ip={service.address}"
    config = config_of(folder, address, f"actor_rollout_ref.teacher.keys={service.keys}")
    with connect(facts, run_teachers(config)[0], [service.address]) as client:
        expected = take(TeacherScorer(client), pairs)
    config = config_of(folder, f"actor_rollout_ref.teacher.cache={folder / 'store'}")
    with with_cache(config, facts.tokenizer, None, facts.num_ids) as teacher:
        scorer = TeacherScorer(teacher)
        found = take(scorer, pairs)
        first = facts.train_prompts[0]
        mask = np.arange(len(first.token_ids) + 2) >= len(first.token_ids)
        task = dataclasses.replace(first, response_ids=np.array([1, 2], np.int32), loss_mask=mask)
        with pytest.raises(TeacherError, match=r"^row 1, sample 0 has no readable scores in"):
            take(scorer, [(task, given_sample(task, 1, 0.0))])
    assert found.keys() == expected.keys()
    for each, scores in found.items():
        np.testing.assert_array_equal(scores.ids, expected[each].ids)
        for name in ("logprobs", "tail_logprobs", "sampled_logprobs"):  # their batches had other sequences
            np.testing.assert_allclose(getattr(scores, name), getattr(expected[each], name), rtol=1e-5, atol=1e-6)


def take(scorer, pairs):
    return scorer.take_scores(scorer.start(pairs), len(pairs), timeout=Timeout(TIMEOUT), check=lambda: None)


def test_the_checks_before_a_run_without_a_teacher(folder, service):
    run(folder, "--addr", service.address, "--keys", str(service.keys))
    store = f"actor_rollout_ref.teacher.cache={folder / 'store'}"
    facts = Facts(config_of(folder, store))
    facts.device = "cpu"
    inputs.student(facts)
    assert inputs.teacher(facts) == f"not needed: {folder / 'store'} has the scores of {ROWS - 1} completions"
    settings = f", K {K}, temperature 1.0, {facts.num_ids} token ids)"
    assert check_compatibility(facts).endswith(f"{settings} has the student's vocabulary")
    path = "actor_rollout_ref.teacher.model.path"
    assert facts.settings.pop(f"{path} (hash of the weights)")
    assert facts.settings == {path: "teacher"}
    inputs.critic(facts)
    plan = make_plan(facts.config, facts.trained, "cpu", facts.local_teachers)
    assert plan.memory.teachers == {}
    assert f"teacher: scores in {folder / 'store'}, top-{K}" in "\n".join(plan.places)
    facts = Facts(config_of(folder, store, "distillation.topk=4"))
    inputs.student(facts)
    with pytest.raises(TeacherError, match=r"has scores of teacher \(.*, K 5, .*\); the student needs K 4"):
        check_compatibility(facts)


@pytest.mark.parametrize(
    ("more", "missing"), [([], f"1 of {ROWS} rows"), (["data.loss_mask=all"], f"{ROWS} of {ROWS} rows")]
)
def test_rows_without_scores_are_found_before_a_run_without_a_teacher(folder, service, more, missing):
    """The first row has no completion, and other trained tokens have other scores."""
    run(folder, "--addr", service.address, "--keys", str(service.keys))
    facts = Facts(config_of(folder, f"actor_rollout_ref.teacher.cache={folder / 'store'}", *more))
    for check in (inputs.student, inputs.files, inputs.data):
        check(facts)
    rule = rf"^data\.train_files: .*answers.jsonl', row 1: no readable scores in .*store .*, as for {missing}: "
    with pytest.raises(DataError, match=rule):
        check_compatibility(facts)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "one of --ckpt-path and --addr is needed"),
        (["--ckpt-path=a", "--addr=b:1"], "one of --ckpt-path and --addr is needed"),
        (["--ckpt-path=a", "--keys=b"], "--keys needs --addr"),
    ],
)
def test_usage_errors(folder, capsys, more, message):
    with pytest.raises(SystemExit):
        score.parse(arguments(folder, *more))
    assert message in capsys.readouterr().err


def test_answers_that_cannot_be_scored_are_named(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for more, message in (
        (["--response-key=answer"], r"no row has a completion in the column 'answer'"),
        (["data.max_response_length=9", "data.filter_overlong_prompts=false"], "row 6: the response has 10 tokens"),
        (["distillation.topk=0"], "distillation.topk: must be above 0"),
        (["distillation.candidates=union"], r"distillation.candidates: must be teacher with .*teacher\.cache"),
        (["distillation.cross_tokenizer=spans"], r"must be null with distillation.cross_tokenizer=spans; got "),
    ):
        with pytest.raises(Exception, match=message):
            score.score(score.parse(arguments(folder, f"--ckpt-path={folder / 'teacher'}", *more)))


def test_the_recipe_of_the_run_is_read(folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = ["answers.jsonl", "--out=s", "--ckpt-path=teacher"]
    config = score.make_config(score.parse([*command, "--config-name=gpu_demo"]))  # several mini-batches in a rollout
    assert (config.data.prompt_key, config.data.response_key, config.data.train_batch_size) == ("prompt", "response", 1)
    more = ["data.response_key=text", "--prompt-key=question", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    config = score.make_config(score.parse([*command, *more]))
    assert (config.data.prompt_key, config.data.response_key) == ("question", "text")


def test_a_run_trains_on_a_store_without_any_teacher(folder, service, tmp_path):
    run(folder, "--addr", service.address, "--keys", str(service.keys))
    rows = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "given.jsonl").write_text("".join(rows[1:]), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "hybrid_gkd", f"data.train_files={tmp_path / 'given.jsonl'}",
            "data.response_key=text",
            f"actor_rollout_ref.model.path={folder / 'student'}", f"actor_rollout_ref.teacher.cache={folder / 'store'}",
            f"distillation.topk={K}", "data.train_batch_size=8", "trainer.device=cpu", "trainer.total_training_steps=3",
            "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.logger=[jsonl]", "trainer.save_freq=0", *LENGTHS,
            "actor_rollout_ref.rollout.name=hf", f"trainer.default_local_dir={tmp_path}",
        ],
        cwd=folder, env=child_environment(), capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = (tmp_path / "hybrid_gkd" / "gkd" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in metrics]
    assert [row["teacher/cache_hit_fraction"] for row in found] == [1.0] * 3
    assert found[-1]["actor/kl_loss"] < found[0]["actor/kl_loss"]


def test_a_cache_that_cannot_be_opened_is_named_by_its_key(folder):
    cache = "actor_rollout_ref.teacher.cache=/proc/nowhere"
    live = f"actor_rollout_ref.teacher.model.path={folder / 'teacher'}"
    for more, message in (([], " has no scores; create them"), ([live], ": cannot be opened")):
        with pytest.raises(TeacherError, match=rf"^actor_rollout_ref\.teacher\.cache: /proc/nowhere{message}"):
            inputs.teacher(Facts(config_of(folder, cache, *more), device="cpu"))

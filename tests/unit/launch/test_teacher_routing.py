"""Checks before a run with several teachers: each by its own rows, its errors by its own section."""

import json

import pytest

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import HybridGKDError
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.testing import make_tiny_model

MODELS = "distillation.teacher_models"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    for seed, name in enumerate(("student", "math", "others")):
        make_tiny_model(folder / name, seed=seed, layers=1)
    make_tiny_model(folder / "stranger", extra_tokens=("<|other|>",), layers=1)
    make_tiny_model(folder / "short", positions=16, layers=1)
    rows = [{"prompt": f"What is {i}?", "data_source": ("math", "people")[i % 2]} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def checked(folder, *overrides):
    return check_all(load_config([
        f"actor_rollout_ref.model.path={folder}/student", f"data.train_files={folder}/train.jsonl",
        f"{MODELS}.math.model_path={folder}/math", f"{MODELS}.rest.model_path={folder}/others",
        f"{MODELS}.rest.key=default", "data.train_batch_size=8", "data.max_prompt_length=32",
        "data.max_response_length=16", f"trainer.default_local_dir={folder}/out", "trainer.device=cpu",
        "actor_rollout_ref.rollout.name=hf", f"{MODELS}.math.backend=hf", f"{MODELS}.rest.backend=hf", *overrides,
    ]))  # fmt: skip


@pytest.mark.slow
def test_the_plan_has_a_line_for_each_and_rows_read_the_template_of_their_teacher(folder):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    facts = checked(folder, f"{MODELS}.rest.chat_template={template}")
    lines = str(facts.plan).splitlines()
    assert [line.partition(",")[0] for line in lines if line.startswith("teacher")] == [
        "teacher math: started by this run", "teacher rest: started by this run",
    ]  # fmt: skip
    assert facts.plan.loaded["models"] == [f"{folder}/{name}" for name in ("student", "math", "others")]
    assert set(facts.local_teachers) == {"teacher math", "teacher rest"}
    texts = [facts.tokenizer.decode(prompt.teacher_ids) for prompt in facts.train_prompts[:2]]
    assert texts == [facts.tokenizer.decode(facts.train_prompts[0].token_ids), "What is 1?:"]
    settings = {key: value for key, value in facts.settings.items() if "teacher" in key}
    assert settings["distillation.teacher_models"] == {f"{MODELS}.math": "math", f"{MODELS}.rest": "default"}
    assert settings[f"{MODELS}.math.model.path"] == f"{folder}/math"
    assert f"{MODELS}.rest.chat_template (checksum)" in settings
    assert "data.train_files (checksum of the teachers)" in settings


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "parts"), [
    (["math.model_path={}/stranger"], [f"{MODELS}.math.model.path: teacher and student must have the same vocabulary"]),
    (["rest.model_path={}/short"], ["data.max_response_length: ", "but the teacher {}/short has 16 (max"]),
    (["rest.model_path={}/nothing"], [f"{MODELS}.rest.model.path: no such folder; got '{{}}/nothing'"]),
    (["math.chat_template={}/nothing"], [f"{MODELS}.math.chat_template: must be a file with a template"]),
    (["math.server_ip=127.0.0.1", "math.server_port=1", "math.connect_timeout=0.2"], ["127.0.0.1:1", "math.connect"]),
    (["math.model_path={}/stranger", "rest.model_path={}/stranger"], [f"{MODELS}.math.model", f"{MODELS}.rest.model"]),
    (["rest.key=code"], ["row 2, column 'data_source' (distillation.teacher_key): must be the key of one", "'people'"]),
    (["code.model_path={}/math"], [f"{MODELS}.code: no row of data.train_files has its key in the column"]),
])  # fmt: skip
def test_an_error_names_the_section_of_its_teacher_or_the_row(folder, overrides, parts):
    with pytest.raises(HybridGKDError) as caught:
        checked(folder, *(f"{MODELS}.{each.format(folder)}" for each in overrides))
    for part in parts:
        assert part.format(folder) in str(caught.value)
    assert "actor_rollout_ref.teacher" not in str(caught.value)


@pytest.mark.slow
def test_teachers_of_all_rows_need_no_column(folder, tmp_path):
    rows = [{"prompt": f"What is {i}?"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    facts = checked(
        folder, f"data.train_files={tmp_path}/train.jsonl", f"{MODELS}.math.key=default", "distillation.ensemble=sum"
    )
    assert {prompt.teacher for prompt in facts.train_prompts} == {"default"}

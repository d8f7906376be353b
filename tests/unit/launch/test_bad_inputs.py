"""Inputs that would fail after minutes, or never, are refused by the checks of a run with their name."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.data import chat_template
from hybrid_gkd.data.prompts import make_prompts
from hybrid_gkd.demo.sorting import make_byte_tokenizer
from hybrid_gkd.errors import ConfigError, DataError, HybridGKDError, ModelError
from hybrid_gkd.launch import inputs, preflight
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.data_checks import check_data_sources, check_given_answers, check_right_answers
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.launch.presence import check_model_folder
from hybrid_gkd.launch.teacher import local_weights
from hybrid_gkd.models.tokenizer import load_tokenizer
from hybrid_gkd.ppo.resuming import TEACHER_WEIGHTS
from hybrid_gkd.runtime import imports
from hybrid_gkd.scoring.reward_functions import load_functions
from hybrid_gkd.testing import make_tiny_model

PATHS = ("actor_rollout_ref.model.path", "actor_rollout_ref.teacher.model.path")
NESTED = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


@pytest.fixture
def folder(tmp_path):
    make_tiny_model(tmp_path / "student")
    make_tiny_model(tmp_path / "teacher")
    write_rows(tmp_path, 3)
    return tmp_path


def write_rows(folder, number):
    rows = (json.dumps({"prompt": f"What is {row}?", "answer": "1"}) + "\n" for row in range(number))
    (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")


def check(folder, *overrides):
    return check_all(load_config([
        f"actor_rollout_ref.model.path={folder}/student", f"actor_rollout_ref.teacher.model.path={folder}/teacher",
        f"data.train_files={folder}/train.jsonl", "data.train_batch_size=1", "data.max_prompt_length=32",
        "data.max_response_length=16", f"trainer.default_local_dir={folder}/out", "trainer.device=cpu",
        "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.teacher.backend=hf", *overrides,
    ]))  # fmt: skip


def set_template(folder, template):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def test_chats_that_end_with_an_answer_are_validated_by_their_prompts(tmp_path):
    """One data set of whole chats is for both: training takes the answers."""
    chats = [[{"role": "user", "content": f"{row} + 1"}, {"role": "assistant", "content": "2"}] for row in range(3)]
    lines = (json.dumps({"prompt": chat}) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    files = [f"data.{name}_files={tmp_path}/chats.jsonl" for name in ("train", "val")]
    models = ["actor_rollout_ref.model.path=x", "actor_rollout_ref.teacher.model.path=x"]
    facts = Facts(load_config([*files, *models, "data.response_key=prompt"]))
    inputs.files(facts)
    (train,), (val,) = facts.train_rows, facts.val_rows
    prompts = [chat[:1] for chat in chats]
    assert [row.messages for row in train.rows] == [row.messages for row in val.rows] == prompts
    assert None not in [row.given for row in train.rows]
    assert [row.given for row in val.rows] == [None] * 3


def completions(facts):
    check_given_answers(facts.config, facts.train_prompts)


@pytest.mark.parametrize(
    ("at_fault", "override", "check_rows", "message"),
    [
        ({"response": None}, "distillation.enabled=false", completions, "no completion in the column 'response' "
            ".*response_key.; distillation.enabled=false .* on given completions only .1 of all 4 rows have none"),
        ({"response": ""}, "trainer.warmup_steps_sft=2", completions, "no completion .* trainer.warmup_steps_sft"),
        ({"answer": "none"}, "reward.name=gsm8k", check_right_answers, "the gsm8k reward needs a number .* got 'none'"),
        ({"data_source": "mine"}, "reward.name=by_data_source", check_data_sources, "column 'data_source' .* 'mine'"),
    ],
)
def test_a_row_is_named_by_its_file_and_its_place_there(tmp_path, at_fault, override, check_rows, message):
    rows = 4 * [{"prompt": "1+1", "response": "2", "answer": "2", "data_source": "openai/gsm8k"}]
    rows[3] = rows[3] | at_fault
    for name, part in (("first", rows[:2]), ("second", rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    config = load_config([
        f"data.train_files=[{tmp_path}/first.jsonl, {tmp_path}/second.jsonl]", "actor_rollout_ref.model.path=x",
        "actor_rollout_ref.teacher.model.path=x", "data.response_key=response", "reward.answer_key=answer", override,
    ])  # fmt: skip
    facts = Facts(config, reward=load_functions(config.reward))
    inputs.files(facts)
    facts.train_prompts = make_prompts(
        facts.train_rows, key="data.train_files", tokenizer=make_byte_tokenizer(), max_prompt_length=64,
        truncation="error", filter_overlong_prompts=False, apply_chat_template_kwargs={}, max_response_length=64,
    )  # fmt: skip
    with pytest.raises(DataError, match=rf"^data\.train_files: '[^']*/second\.jsonl', row 2[:,] {message}"):
        check_rows(facts)


@pytest.mark.slow
def test_an_endless_chat_template_has_a_deadline(folder, monkeypatch):
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.3)
    set_template(folder / "student", NESTED)
    with pytest.raises(DataError, match=r"row 1: the chat template of .*/student did not render it within 0\.3 s"):
        check(folder)


@pytest.mark.slow
def test_an_endless_template_of_the_teacher_is_named(folder, monkeypatch):
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.3)
    with pytest.raises(DataError, match=r"row 1: the chat_template of its teacher .* did not render it within"):
        check(folder, f"actor_rollout_ref.teacher.chat_template='{NESTED}'")


@pytest.mark.slow
def test_the_output_of_a_chat_template_is_bounded_by_its_input(folder):
    set_template(folder / "student", "{{ messages[0].content }}{{ 'x' * 30000000 }}")
    with pytest.raises(DataError, match=r"the chat template of .*/student makes 300000\d\d characters of \d+, the lim"):
        check(folder)


@pytest.mark.slow
@pytest.mark.parametrize("template", [
    "{{ 'A:' }}", "{% if messages[0].content == 'Hi' %}{{ messages[0].content }}{% endif %}A:",
])  # fmt: skip
def test_a_chat_template_that_drops_the_prompt_is_refused(folder, template):
    rule = r"data\.train_files: all 3 prompts have the same tokens for the {}, 'A:', although"
    with pytest.raises(DataError, match=rule.format("teacher")):
        check(folder, f'actor_rollout_ref.teacher.chat_template="{template}"')
    set_template(folder / "student", template)
    with pytest.raises(DataError, match=rule.format("student")):
        check(folder)


@pytest.mark.slow
@pytest.mark.parametrize("key", [
    "reward.custom_reward_function.path={}", "distillation.loss_fn={}:f", "distillation.token_weights={}:f",
])  # fmt: skip
def test_a_module_that_loops_at_import_has_a_deadline(folder, monkeypatch, key):
    monkeypatch.setattr(imports, "IMPORT_SECONDS", 0.3)
    (folder / "own.py").write_text("while True:\n    pass\n", encoding="utf-8")
    overrides = [key.format(folder / "own.py")]
    if "reward" in key:
        overrides += ["reward.answer_key=answer", "reward.custom_reward_function.name=f"]
    with pytest.raises(ConfigError, match=r"must be importable within 0\.3 s \(fixed\); got '.*own\.py:f'"):
        check(folder, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "classes"), [
    ("config.json", {"AutoConfig": "own.Own"}), ("config.json", {"AutoModelForCausalLM": "own.Own"}),
    ("tokenizer_config.json", {"AutoTokenizer": [None, "own.Own"]}),
])  # fmt: skip
def test_the_code_of_a_model_that_loops_has_a_deadline(folder, monkeypatch, file, classes):
    monkeypatch.setattr(imports, "IMPORT_SECONDS", 0.5)
    (folder / "student" / "own.py").write_text("while True:\n    pass\n", encoding="utf-8")
    file = folder / "student" / file
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"auto_map": classes}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"student: the model's own code \(trust_remote_code\) must load within"):
        check(folder, "actor_rollout_ref.model.trust_remote_code=true")


@pytest.mark.parametrize("override", [
    "actor_rollout_ref.rollout.temperature=1e-30", "distillation.temperature=1e-30",
    "actor_rollout_ref.rollout.temperature=1e30", "actor_rollout_ref.rollout.val_kwargs.temperature=1e-30",
    f"trainer.experiment_name={'x' * 300}", f"trainer.project_name={'é' * 128}", 'trainer.experiment_name="a\\0b"',
])  # fmt: skip
def test_values_that_no_run_can_use_are_refused_with_the_configuration(override):
    with pytest.raises(HybridGKDError, match=rf"{re.escape(override.split('=')[0])}: must be "):
        load_config([override])


@pytest.mark.slow
@pytest.mark.parametrize(("who", "key"), [
    ("student", "actor_rollout_ref.model.path"), ("teacher", "actor_rollout_ref.teacher.model.path"),
])  # fmt: skip
@pytest.mark.parametrize(("change", "rule"), [
    (lambda weight: weight.fill_(float("nan")), "has values that are not finite"),
    (lambda weight: weight.fill_(float("inf")).to(torch.bfloat16), "has values that are not finite"),
    (lambda weight: weight[:-1].contiguous(), r"has the shape \[\d+, 64\], config\.json needs \[\d+, 64\]"),
])  # fmt: skip
def test_weights_that_are_not_finite_or_misshapen_are_refused(folder, who, key, change, rule):
    file = folder / who / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: change(weights[name].clone())}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{key}: {file}: .*{name} {rule}"):
        check(folder)


@pytest.mark.slow
def test_a_shard_that_is_cut_is_named(folder):
    file = folder / "teacher" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"teacher\.model\.path: {file}: it has \d+ bytes, "):
        check(folder)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=rf"{file}: it is not a safetensors file"):
        check(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_model_folder_with_a_git_lfs_pointer_is_refused(folder, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\n"
    (folder / "teacher" / name).write_text(pointer, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"teacher\.model\.path: .*Git LFS pointers.* with {re.escape(name)}$"):
        check_model_folder("actor_rollout_ref.teacher.model.path", str(folder / "teacher"))


@pytest.mark.slow
@pytest.mark.parametrize(("who", "key"), zip(("student", "teacher"), PATHS, strict=True))
def test_a_folder_without_a_tokenizer_is_refused(folder, who, key):
    for file in (folder / who).glob("tokenizer*"):
        file.unlink()
    with pytest.raises(HybridGKDError, match=rf"{re.escape(key)}: .*/{who}: there is no tokenizer"):
        check(folder)


@pytest.mark.slow
def test_a_configuration_with_another_number_of_layers_is_refused(folder):
    file = folder / "student/config.json"
    changed = json.loads(file.read_text(encoding="utf-8")) | {"layer_types": ["full_attention"] * 9}
    file.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(ModelError, match=r"student: config\.json cannot be used: .*num_hidden_layers"):
        check(folder)
    rule = r"actor_rollout_ref\.model\.path: cannot load .*/teacher': IndexError"
    with pytest.raises(ModelError, match=rule):
        check(folder, f"{PATHS[0]}={folder}/teacher", "actor_rollout_ref.model.override_config={num_hidden_layers: 99}")


@pytest.mark.slow
@pytest.mark.parametrize("eos", [99999, [256, 99999], -1])
def test_an_end_that_is_no_token_is_refused(folder, eos):
    (folder / "student" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"model\.path: .*/student: eos_token_id .* of generation_config\.json .* 260"):
        check(folder)


@pytest.mark.slow
def test_an_end_in_override_config_that_is_no_token_is_refused(folder):
    with pytest.raises(HybridGKDError, match=r"eos_token_id 99999 of config\.json or override_config"):
        check(folder, "actor_rollout_ref.model.override_config={eos_token_id: 99999}")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["rollout", "teacher"])
def test_arguments_that_vllm_does_not_have_are_refused(folder, key):
    pytest.importorskip("vllm")
    name = "actor_rollout_ref.rollout.name=vllm" if key == "rollout" else "actor_rollout_ref.teacher.backend=vllm"
    given = f"actor_rollout_ref.{key}.engine_kwargs.vllm"
    with pytest.raises(ConfigError, match=rf"{given}: vLLM .* has no argument foo; got"):
        check(folder, name, f"{given}={{foo: 1, max_num_seqs: 4}}")


@pytest.mark.slow
def test_more_processors_than_a_machine_can_have_are_refused(folder):
    with pytest.raises(ConfigError, match=r"ray_init\.num_cpus: must be at most \d+ .*; got 1000000"):
        check(folder, "ray_init.num_cpus=1000000")


@pytest.mark.slow
def test_a_loss_that_does_not_return_has_a_deadline(folder, monkeypatch):
    monkeypatch.setattr(preflight, "CALL_SECONDS", 0.3)
    program = "def f(teacher, student, **options):\n    while True:\n        pass\n"
    (folder / "own.py").write_text(program, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"distillation\.loss_fn: must return within 0\.3 s .*; got '.*own\.py:f'"):
        check(folder, f"distillation.loss_fn={folder}/own.py:f")


@pytest.mark.slow
def test_the_weights_of_a_local_teacher_are_among_the_settings(folder):
    """The hash is empty for a model of the hub, whose files need not all be in the cache before it is loaded."""
    first = check(folder).settings[TEACHER_WEIGHTS]
    assert first == check(folder).settings[TEACHER_WEIGHTS]
    make_tiny_model(folder / "teacher", seed=5)
    assert check(folder).settings[TEACHER_WEIGHTS] != first
    config = load_config([f"{each}=x/y" for each in ("data.train_files", *PATHS)])
    assert local_weights(config) == ""

"""Which configuration each model of `python -m hybrid_gkd.evaluate` gets, and what is printed."""

import json

import pytest

from hybrid_gkd.config.loading import load_config, to_yaml
from hybrid_gkd.errors import ConfigError, SeveralErrors
from hybrid_gkd.launch.evaluate import base_config, config_for_model, parse, to_text, unique_run_names

TEACHER = "actor_rollout_ref.teacher.model.path=large"
STATE = json.dumps({"step": 2, "data": {}, "first_metrics": {}})


def base(*words):
    return base_config(parse([*words, "--data", "held out.jsonl"]))


def test_models_are_told_from_overrides_and_named_once():
    options = parse(["a/b", "runs/lr=1e-3/global_step_4", "data.prompt_key=question", "a/b", "--json", "--data", "x"])
    assert options.models == ["a/b", "runs/lr=1e-3/global_step_4"]
    assert options.overrides == ["data.prompt_key=question"]
    assert (options.json, options.data) == (True, ["x"])


@pytest.mark.parametrize("words", [["data.prompt_key=q"], ["a/b", "++actor_rollout_ref.model.path=c/d"]])
def test_a_model_is_an_argument(words, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert "as an argument" in capsys.readouterr().err


@pytest.mark.parametrize("override", ["data.val_files=y", "+data.val_files=y"])
def test_prompts_are_given_once(capsys, override):
    with pytest.raises(SystemExit):
        parse(["a/b", "--data", "x", override])
    assert "--data replaces data.val_files; use one of them" in capsys.readouterr().err


@pytest.mark.slow
def test_a_teacher_that_is_given_is_asked_unless_told_not_to():
    assert not base("a/b").distillation.enabled
    assert base("a/b", TEACHER).distillation.enabled
    assert not base("a/b", TEACHER, "distillation.enabled=false").distillation.enabled
    own = "actor_rollout_ref.teacher.source=live"  # with another prompt, whose rules need distillation
    assert base("a/b", own, "data.teacher_prompt_key=hint").distillation.enabled
    with pytest.raises(ConfigError, match=r"teacher\.source: needs another prompt for the teacher"):
        base("a/b", own)
    assert base("a/b").data.val_files == ["held out.jsonl"]
    assert base("a/b").data.train_files == []
    with pytest.raises(ConfigError, match=r"server_ip: must be host"):
        base("a/b", "actor_rollout_ref.teacher.server_ip=a b")


def test_keys_of_teachers_with_a_hyphen_and_characters_of_two_halves_are_read():
    words = ["a/b", "++data.prompt_key=question", "distillation.teacher_models.my-own.model.path=x"]
    config = base_config(parse([*words, "--data", "held 😀.jsonl"]))
    assert config.actor_rollout_ref.teacher.model.path == "x"  # one alone is the teacher
    assert (config.data.prompt_key, config.data.val_files) == ("question", ["held 😀.jsonl"])


def test_options_have_their_whole_names(capsys):
    """Else --superv would be one for the run, and for the run that it starts."""
    with pytest.raises(SystemExit):
        parse(["a/b", "--dat", "x"])
    assert "unrecognized arguments: --dat" in capsys.readouterr().err


def test_without_data_the_key_is_named():
    with pytest.raises(ConfigError, match=r"data.val_files: must name at least one file with trainer.val_only=true"):
        base_config(parse(["a/b"]))


@pytest.mark.slow
def test_a_checkpoint_is_its_export_or_its_shards_over_the_model_of_its_run(tmp_path):
    run = tmp_path / "first"
    for step in (2, 4):
        (run / f"global_step_{step}").mkdir(parents=True)
        (run / f"global_step_{step}" / "trainer_state.json").write_text(STATE, encoding="utf-8")
    (run / "global_step_4" / "huggingface").mkdir()
    began = ["data.train_files=x", "actor_rollout_ref.model.path=org/student", TEACHER]
    began = load_config([*began, "actor_rollout_ref.model.tokenizer_path=org/tok"])
    (run / "config.yaml").write_text(to_yaml(began), encoding="utf-8")
    config, models = base("a/b"), [f"{run}/global_step_4", f"{run}/global_step_2", "a/b"]
    export, shards, hub = (config_for_model(config, model) for model in models)
    assert export.actor_rollout_ref.model.path == f"{run}/global_step_4/huggingface"
    assert (export.trainer.resume_mode, hub.trainer.resume_mode) == ("disable", "disable")
    assert shards.actor_rollout_ref.model.path == "org/student"
    assert shards.actor_rollout_ref.model.tokenizer_path == "org/tok"
    assert (shards.trainer.resume_mode, shards.trainer.resume_from_path) == ("resume_path", f"{run}/global_step_2")
    assert hub.actor_rollout_ref.model.path == "a/b"
    configs = [export, shards, hub, config_for_model(config, "x/a/b")]
    names = [each.run_dir.parts[-2:] for each in unique_run_names(configs)]
    assert names == [
        ("evaluation_first_global_step_4", "validation"), ("evaluation_first_global_step_2", "validation"),
        ("evaluation_a_b", "validation"), ("evaluation_a_b_2", "validation"),
    ]


def test_a_model_of_a_run_is_found_from_another_folder_and_no_error_names_the_checkpoint(tmp_path):
    """Relative paths are those of the folder in which the run was started."""
    (tmp_path / "models" / "student").mkdir(parents=True)
    checkpoint = tmp_path / "run" / "global_step_2"
    checkpoint.mkdir(parents=True)
    began = ["data.train_files=x", "actor_rollout_ref.model.path=models/student", TEACHER]
    began = load_config([*began, "actor_rollout_ref.model.tokenizer_path=org/tok"])
    (checkpoint.parent / "config.yaml").write_text(to_yaml(began), encoding="utf-8")
    state = json.loads(STATE) | {"working_dir": str(tmp_path)}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    model = config_for_model(base(str(checkpoint)), str(checkpoint)).actor_rollout_ref.model
    assert (model.path, model.tokenizer_path) == (f"{tmp_path}/models/student", "org/tok")
    with pytest.raises(SeveralErrors) as caught:
        base(str(checkpoint), "reward.timeout=0")
    assert str(checkpoint) not in str(caught.value)


@pytest.mark.slow
def test_an_adapter_is_loaded_over_its_base_and_a_merged_model_is_preferred(tmp_path):
    adapter = tmp_path / "run" / "global_step_2" / "huggingface"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}', encoding="utf-8")
    (adapter.parent / "trainer_state.json").write_text(STATE, encoding="utf-8")
    lora = "actor_rollout_ref.model.lora_rank=4"
    config = base(str(adapter), lora)
    model = config_for_model(config, str(adapter)).actor_rollout_ref.model
    assert (model.path, model.lora_adapter_path, model.lora_rank) == ("org/base", str(adapter), 0)
    began = load_config(["data.train_files=x", "actor_rollout_ref.model.path=org/base", TEACHER, lora])
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(began), encoding="utf-8")
    shards = config_for_model(config, str(adapter.parent))
    assert shards.trainer.resume_from_path == str(adapter.parent)
    assert (shards.actor_rollout_ref.model.path, shards.actor_rollout_ref.model.lora_rank) == ("org/base", 4)
    (adapter.parent / "huggingface_merged").mkdir()
    merged = config_for_model(config, str(adapter.parent)).actor_rollout_ref.model
    assert (merged.path, merged.has_lora) == (str(adapter.parent / "huggingface_merged"), False)
    (adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="names no base model"):
        base(str(adapter))


def test_the_table_and_the_list():
    rows = {"a/b": {"val/accuracy": 0.25, "val/num_prompts": 256.0}, "c": {"val/forward_kl": 0.0123456}}
    lines = [line.split() for line in to_text(rows, as_json=False).splitlines()]
    assert lines == [
        ["model", "val/accuracy", "val/num_prompts", "val/forward_kl"], ["a/b", "0.25", "256", "—"],
        ["c", "—", "—", "0.012346"],
    ]
    sources = {"val/pass@2": 0.5, "val/forward_kl/q1": 1, "val/org/math/pass@2": 0.25, "val/org/math/forward_kl/q1": 2}
    lines = [line.split() for line in to_text({"a": sources}, as_json=False).splitlines()]
    assert lines == [["model", "data", "source", "val/pass@2"], ["a", "all", "0.5"], ["a", "org/math", "0.25"]]
    assert json.loads(to_text(rows, as_json=True)) == [{"model": name, **metrics} for name, metrics in rows.items()]

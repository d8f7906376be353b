import re

import pytest

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import ConfigError

OWN = ["actor_rollout_ref.model.path=s", "actor_rollout_ref.teacher.model.path=t", "data.train_files=x"]
TYPED = ["2.50", "0x1f", "1_000", "08", "23:59", "2e5", "off", "2024-01-02", ".5", "a #1", "a: b", "*a", "&a b", "{a}"]


@pytest.mark.parametrize("value", TYPED)
def test_a_text_on_the_command_line_is_what_was_typed(value):
    config = load_config([*OWN, f"trainer.experiment_name={value}", f"data.val_files={value}"])
    assert config.trainer.experiment_name == value
    assert config.data.val_files == [value]
    verl = load_config([*OWN[::2], f"+distillation.teacher_models.one.model_path={value}"])
    assert verl.actor_rollout_ref.teacher.model.path == value


def test_quotes_lists_sections_and_null_are_yaml():
    config = load_config([
        *OWN, "trainer.experiment_name='2.50 '", 'data.val_files=["*.jsonl", 08, no]', "trainer.wandb.tags=[1.0, on]",
        "reward={answer_key: 1_0, num_workers: 1_0}", "trainer.wandb.notes=null", "trainer.wandb.group= ",
    ])  # fmt: skip
    assert config.trainer.experiment_name == "2.50 "
    assert config.data.val_files == ["*.jsonl", "08", "no"]
    assert (config.trainer.wandb.tags, config.trainer.wandb.notes) == (["1.0", "on"], None)
    assert config.trainer.wandb.group is None
    assert (config.reward.answer_key, config.reward.num_workers) == ("1_0", 10)


def test_yaml_files_keep_texts_too(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "trainer: &t {experiment_name: 2.50, seed: 0x1f}\n"
        "data: {train_files: [08, no], val_files: 23:59, train_batch_size: 1_28}\n"
        "actor_rollout_ref: {model: {path: 1e3}, teacher: {model: {path: null}, server_ip: 10.10, server_port: 80}}\n",
        encoding="utf-8",
    )
    config = load_config(config_name="mine", config_path=tmp_path)
    assert (config.trainer.experiment_name, config.trainer.seed) == ("2.50", 31)
    assert (config.data.train_files, config.data.val_files) == (["08", "no"], ["23:59"])
    assert config.data.train_batch_size == 128
    assert config.actor_rollout_ref.model.path == "1e3"
    assert config.actor_rollout_ref.teacher.model.path is None
    assert config.actor_rollout_ref.teacher.server_ip == "10.10"


def test_merge_keys_of_yaml_files_leave_each_text_at_its_key(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "data: {prompt_key: 1_0, <<: [{train_files: 08}, {reward_fn_key: 3.0}]}\n"
        "trainer: {<<: {project_name: 1.0, experiment_name: 2.50, default_local_dir: d}, project_name: 09}\n",
        encoding="utf-8",
    )
    config = load_config(OWN[:2], config_name="mine", config_path=tmp_path)
    data, trainer = config.data, config.trainer
    assert (data.train_files, data.prompt_key, data.reward_fn_key) == (["08"], "1_0", "3.0")
    assert (trainer.project_name, trainer.experiment_name, trainer.default_local_dir) == ("09", "2.50", "d")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.val_files=${USER}.jsonl", r"data\.val_files: .*'USER' not found: .*; got '\$\{USER\}\.jsonl'"),
        ("trainer.seed=${data.seed}", r"trainer\.seed: Recursive interpolation detected: .*; got '\$\{data\.seed\}'"),
        ("trainer.seed=${no.such}", r"trainer\.seed: .*'no\.such' not found: .*; got '\$\{no\.such\}'"),
        ("data.val_files=[a, *.jsonl]", r"data\.val_files: the value is not valid YAML: .*; got '\[a, \*\.jsonl\]'"),
        *((f"{key}={{a: 1, b:2}}", rf"{key}: must have a space after each colon.*; got '\{{a: 1, b:2\}}'") for key in (
            "data.train_files", "actor_rollout_ref.model.override_config", "trainer.wandb",
        )),
        *((f"data.max_response_length_schedule={{{each}}}", "length_schedule: must have a space after each colon") for
            each in ("1:4", "1: 4, 100:8", "1:4.5")),
        ("trainer.experiment_name='a", r"trainer\.experiment_name: the value is not valid YAML: .*; got \"'a\""),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config([*OWN, override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("data.train_files={/p/a.jsonl: 0.5, b: 1, /p/a.jsonl: 0.25}", "/p/a.jsonl"),
        ("data.max_response_length_schedule={1: 4, 1: 8}", "1"),
        ("actor_rollout_ref.model.override_config={a: [{1: 2, 1: 3}]}", "1"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.a=[{1: 2, 1: 3}]", "1"),
        ("reward={functions: {math: 1, math: 2}}", "math"),
    ],
)
def test_a_name_that_is_given_twice_in_a_mapping_is_refused(tmp_path, override, name):
    key, _, value = override.partition("=")
    name = f"('{name}' is given twice|found duplicate key {name}) "  # OmegaConf finds texts
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: .*{name}.*; got '{re.escape(value)}'$"):
        load_config([*OWN, override])
    tree = "".join(f"{part}: {{" for part in key.split("."))[:-1] + value + "}" * key.count(".")
    (tmp_path / "own.yaml").write_text(f"{tree}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"own\.yaml is not valid YAML: .*{name}"):
        load_config(OWN, config_name="own", config_path=tmp_path)


def test_a_value_that_cannot_be_read_is_not_missing_too():
    with pytest.raises(ConfigError, match=r"^data\.train_files: .* is not valid YAML: 'a' is given twice at line 1"):
        load_config([*OWN[:2], "data.train_files={a: 1, a: 0.5}"])


def test_names_of_a_mapping_may_override_those_that_it_merges(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "trainer: {wandb: {<<: &a {<<: &b {group: x, notes: y}, group: z}, notes: w}}\nreward: {<<: {answer_key: 1}}\n",
        encoding="utf-8",
    )
    wandb = load_config(OWN, config_name="own", config_path=tmp_path).trainer.wandb
    assert (wandb.group, wandb.notes) == ("z", "w")


def test_files_with_weights():
    config = load_config([*OWN, "data.train_files={a.jsonl: 1, 08.jsonl: 0.25}"])
    assert (config.data.train_files, config.data.train_weights) == (["a.jsonl", "08.jsonl"], [1.0, 0.25])


@pytest.mark.parametrize("below", ["{a.jsonl: 0.5}", "[a.jsonl]", "a.jsonl"])
@pytest.mark.parametrize(("given", "weights"), [("{b.jsonl: 0.25}", [0.25]), ("[b.jsonl]", None), ("b.jsonl", None)])
def test_files_replace_those_of_the_recipe(tmp_path, below, given, weights):
    (tmp_path / "own.yaml").write_text(f"data: {{train_files: {below}}}\n", encoding="utf-8")
    models = [each for each in OWN if "train_files" not in each]
    config = load_config([*models, f"data.train_files={given}"], config_name="own", config_path=tmp_path)
    assert (config.data.train_files, config.data.train_weights) == (["b.jsonl"], weights)


def test_weights_are_given_once():
    with pytest.raises(ConfigError, match=r"^data\.train_weights: must be null if data\.train_files .*got \[0\.1\]"):
        load_config([*OWN, "data.train_files={a.jsonl: 1}", "data.train_weights=[0.1]"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_files={a.jsonl: x}", "data.train_files: must map each file to its weight, above 0.*a.jsonl"),
        ("data.train_files={a.jsonl: 2}", "data.train_files: must map each file to its weight, above 0 .*; got .*2"),
        ("data.train_weights=[0.5,0.5]", "data.train_weights: must have a weight for each of the 1 entries"),
    ],
)
def test_weights_that_are_none_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*OWN, override])


def test_a_text_that_is_not_utf_8_is_refused_by_its_key():
    """Python hands undecoded bytes of the command line on as surrogates."""
    given = "Grüße".encode("latin-1").decode(errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"trainer\.project_name: must be UTF-8 text, .*got 'Gr.udcfc.udcdfe'"):
        load_config([*OWN, f"trainer.project_name={given}"])

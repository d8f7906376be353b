"""Commands of verl, as scripts of several versions type them: what each loads to, and the tables that read them.

tests/verl_commands.json has the arguments as bash hands them to the program (HOME=/home/user), with their source.
"""

import json
import logging
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from hybrid_gkd.compat.verl.key_tables import ACCEPTED, ONLY, REFUSED, RENAMED, VALUES
from hybrid_gkd.config.loading import examine_config, load_config, to_yaml
from hybrid_gkd.config.spelling import find, is_own, markdown_page, own_keys
from hybrid_gkd.errors import ConfigError, HybridGKDError, SeveralErrors
from hybrid_gkd.launch.command_line import default_config_name, parse

ROOT = Path(__file__).parents[3]
COMMANDS = json.loads((ROOT / "tests" / "verl_commands.json").read_text(encoding="utf-8"))
ARR = "actor_rollout_ref"
OWN = [
    "data.train_files=prompts.jsonl", f"{ARR}.model.path=student", "algorithm.adv_estimator=grpo", f"{ARR}.rollout.n=4",
    f"{ARR}.actor.ppo_micro_batch_size_per_gpu=2",
]

REFUSED_HERE = (
    "reward_model.sandbox_fusion.url=http*", "reward.sandbox_fusion.url=http*",  # no code is run for a reward
    "trainer.logger=[[]swanlab]",  # no tracker that there is
    "actor_rollout_ref.rollout.name=sglang",  # no engine that there is
)
"""Arguments of these commands that are refused, with the reason in the tables; without them, all start."""


def load(*overrides):
    return load_config([*OWN, *overrides], config_name="ppo_trainer")


def known(command):
    return f"{command['version']} {command['path']}"


@pytest.mark.parametrize("command", COMMANDS, ids=known)
def test_a_command_of_verl_starts(command):
    options = parse(command["arguments"])
    name = options.config_name or default_config_name(options.overrides)
    assert name.removesuffix(".yaml") == "ppo_trainer"
    config, problems = examine_config(options.overrides, config_name=name, config_path=options.config_path)
    assert config is not None
    refused = {
        argument.partition("=")[0] for argument in options.overrides
        if any(fnmatchcase(argument, pattern) for pattern in REFUSED_HERE)
    }
    assert {problem.key for problem in problems} == refused, problems


def test_the_commands_are_of_many_versions_and_every_kind():
    folders = {Path(command["path"]).parent.name for command in COMMANDS}
    assert {"ppo_trainer", "grpo_trainer", "on_policy_distillation_trainer", "dapo"} <= folders
    assert len({command["version"] for command in COMMANDS}) >= 8
    assert all(len(command["commit"]) == 40 for command in COMMANDS)


@pytest.mark.parametrize(("key", "row"), [*VALUES.items(), *RENAMED.items()])
def test_what_is_read_as_something_else_is_read_as_keys_that_there_are(key, row):
    assert all(map(is_own, row.keys)), row.keys
    assert row.how or (row.keys and row.keys != (key,))


def test_every_other_row_has_a_reason_and_no_key_two_rows():
    keys = [*VALUES, *RENAMED, *ONLY, *REFUSED, *(key for keys in ACCEPTED.values() for key in keys)]
    assert len(keys) == len(set(keys))
    assert all(map(is_own, VALUES))
    assert all(reason.strip() for reason in [*ACCEPTED, *REFUSED.values(), *(reason for _, reason in ONLY.values())])


def test_a_row_for_a_key_that_there_is_would_not_be_read():
    own = [key for key in own_keys() if not key.endswith(".*")]
    assert not [key for key in own if find(key) is not None and key not in VALUES]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout_is_threshold=5", ("token", 5.0)), ("rollout_is=sequence", ("sequence", 3.0)),
        ("rollout_is=null", ("prefix", None)),
    ],
)
def test_a_key_counts_where_the_one_that_it_goes_with_is_in_a_file_below(override, expected, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer]\nalgorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 3}}\n",
        encoding="utf-8",
    )
    given = [*OWN, f"algorithm.rollout_correction.{override}"]
    found = load_config(given, config_name="mine", config_path=tmp_path).algorithm
    assert (found.rollout_is, found.rollout_is_threshold) == expected


@pytest.mark.parametrize(
    ("given", "section", "steps"),
    [
        (["data.train_batch_size=96", f"{ARR}.actor.ppo_mini_batch_size=32"], f"{ARR}.actor", 21),
        (["data.train_batch_size=100", f"{ARR}.actor.ppo_mini_batch_size=32", f"{ARR}.actor.ppo_epochs=2"],
         f"{ARR}.actor", 56),
        (["data.train_batch_size=96", f"{ARR}.actor.ppo_mini_batch_size=96"], f"{ARR}.actor", 7),
        (["data.train_batch_size=96", f"{ARR}.actor.ppo_mini_batch_size=null"], f"{ARR}.actor", 28),
        (["data.train_batch_size=64", f"{ARR}.actor.ppo_mini_batch_size=16", "algorithm.adv_estimator=gae"],
         "critic", 28),
        (["data.train_batch_size=64", "critic.ppo_mini_batch_size=8", "critic.ppo_epochs=3",
          "algorithm.adv_estimator=gae", f"{ARR}.actor.ppo_mini_batch_size=32"], "critic", 168),
    ],
)  # fmt: skip
def test_a_warmup_of_verls_training_steps_is_one_of_optimizer_steps(given, section, steps, caplog):
    warmup = f"{section}.optim.lr_warmup_steps"
    with caplog.at_level(logging.INFO):
        config = load(f"{warmup}=7", *given)
    found = (config.critic if section == "critic" else config.actor_rollout_ref.actor).optim.lr_warmup_steps
    assert found == steps
    line = f"{warmup}=7 is read as {warmup}={steps} (training steps in verl, optimizer steps here)"
    assert (line in caplog.messages) == (steps != 7)


@pytest.mark.slow
def test_a_warmup_in_another_recipe_and_in_a_stored_configuration_is_one_of_optimizer_steps(tmp_path):
    given = [f"{ARR}.actor.optim.lr_warmup_steps=7", "data.train_batch_size=64", f"{ARR}.actor.ppo_mini_batch_size=16"]
    config = load_config([*OWN, "distillation.enabled=false", "reward.answer_key=a", *given])
    assert config.actor_rollout_ref.actor.optim.lr_warmup_steps == 7
    (tmp_path / "stored.yaml").write_text(to_yaml(load(*given)), encoding="utf-8")
    stored = load_config(config_name="stored", config_path=tmp_path)
    assert stored.actor_rollout_ref.actor.optim.lr_warmup_steps == 28


def test_docs_page_is_the_tables():
    page = ROOT / "docs" / "verl.md"
    assert page.read_text(encoding="utf-8") == markdown_page(), (
        "run: python -m hybrid_gkd.config.spelling > docs/verl.md"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.logger=console", {"trainer.logger": ["console"]}),
        ("trainer.logger=['console','wandb']", {"trainer.logger": ["console", "wandb"]}),
        ('trainer.logger=["console","mlflow","file"]', {"trainer.logger": ["console", "jsonl"]}),
        ("trainer.experiment_name=a/b-1", {"trainer.experiment_name": "a_b-1"}),
        ("+trainer.val_before_train=False", {"trainer.val_before_train": False}),
        ("++data.seed=3", {"data.seed": 3}),
        ("trainer.val_generations_to_log_to_wandb=2", {"trainer.log_val_generations": 2}),
        ("trainer.resume_from_path=False", {"trainer.resume_from_path": None}),
        (f"{ARR}.actor.fsdp_config.model_dtype=bfloat16", {f"{ARR}.actor.fsdp_config.model_dtype": "bf16"}),
        (f"{ARR}.actor.optim.lr_warmup_steps=-1", {f"{ARR}.actor.optim.lr_warmup_steps": 0}),
        (f"{ARR}.actor.optim.warmup_style=cosine", {f"{ARR}.actor.optim.lr_scheduler_type": "cosine"}),
        (f"{ARR}.actor.checkpoint.save_contents=['model']", {f"{ARR}.actor.checkpoint.save_hf_model": False}),
        (f"{ARR}.actor.checkpoint.contents=[hf_model]", {f"{ARR}.actor.checkpoint.save_hf_model": True}),
        (f"{ARR}.rollout.val_kwargs.do_sample=False", {f"{ARR}.rollout.val_kwargs.temperature": 0.0}),
        ("distillation.loss_mode=low_var_kl", {"distillation.loss_mode": "k3", "distillation.tail": "bucket"}),
        (
            "distillation.distillation_loss.loss_mode=forward_kl_topk",
            {"distillation.loss_mode": "forward_kl", "distillation.tail": "none"},
        ),
        (
            "distillation={distillation_loss: {topk: 8, loss_max_clamp: 5}}",
            {"distillation.topk": 8, "distillation.loss_max_clamp": 5.0},
        ),
        ("distillation.teacher_model.model_path=big", {f"{ARR}.teacher.model.path": "big"}),
        ("+distillation.teacher_models.x.model_path=big", {f"{ARR}.teacher.model.path": "big"}),
        ("+ray_kwargs.ray_init.num_cpus=8", {"ray_init.num_cpus": 8}),
        (f"{ARR}.actor.kl_loss_type=low_var_kl+", {f"{ARR}.actor.kl_loss_type": "k3+"}),
        (
            "algorithm={use_kl_in_reward: true, kl_penalty: kl, kl_ctrl: {type: adaptive}}",
            {"algorithm.kl_penalty": "k1", "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.horizon": 10000},
        ),
        (f"{ARR}.actor.tis_imp_ratio_cap=2", {"algorithm.rollout_is": "token", "algorithm.rollout_is_threshold": 2.0}),
        ("algorithm.rollout_correction.rollout_is_threshold=3", {"algorithm.rollout_is_threshold": None}),
        (
            "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: 3}",
            {"algorithm.rollout_is": "token", "algorithm.rollout_is_threshold": 3.0},
        ),
        ("algorithm.rollout_correction.rollout_is=sequence", {"algorithm.rollout_is_threshold": 2.0}),
        ("algorithm.filter_groups.metric=seq_final_reward", {"algorithm.filter_groups.metric": "seq_reward"}),
        ("algorithm.filter_groups.metric=null", {"algorithm.filter_groups.metric": "seq_reward"}),
        ("algorithm.filter_groups.max_num_gen_batches=0", {"algorithm.filter_groups.max_num_gen_batches": 10}),
        ("algorithm.filter_groups.max_num_gen_batches=-1", {"algorithm.filter_groups.max_num_gen_batches": 10}),
        ("algorithm.filter_groups.max_num_gen_batches=4", {"algorithm.filter_groups.max_num_gen_batches": 4}),
        ("+reward_model.overlong_buffer.len=64", {"reward.overlong_buffer.len": 64}),
        ("+reward.reward_kwargs.overlong_buffer_cfg.enable=True", {"reward.overlong_buffer.enable": True}),
        ("custom_reward_function.path=a.py", {"reward.custom_reward_function.path": "a.py"}),
        ("distillation.distillation_loss.clip_ratio_high=0.28", {f"{ARR}.actor.clip_ratio_high": 0.28}),
    ],
)
def test_spellings_of_verl_are_read_as_ours(override, expected):
    config = load(override)
    for key, value in expected.items():
        found = config
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value
    assert "distillation_loss." not in to_yaml(config)


def test_a_micro_batch_of_all_workers_is_divided_among_them():
    given = ["trainer.nnodes=2", f"{ARR}.actor.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=4"]
    config = load_config([*OWN[:4], *given], config_name="ppo_trainer")
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 8


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [f"{ARR}.actor.optim.clip_grad=0.5", f"{ARR}.actor.grad_clip=1.0"],
            [f"{ARR}.actor.grad_clip: is given two values", f"by {ARR}.actor.optim.clip_grad (0.5)", "(1.0)"],
        ),
        (["~trainer.logger"], ["~trainer.logger", "keys cannot be deleted"]),
        (["~trainer.logger=x"], ["~trainer.logger", "keys cannot be deleted"]),
        (
            ["algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=True"],
            ["algorithm.filter_groups.metric", "before the KL is known", "seq_final_reward"],
        ),
        ([f"{ARR}.actor.strategy=megatron"], [f"{ARR}.actor.strategy", "FSDP2", "megatron"]),
        ([f"{ARR}.actor.megatron.tensor_model_parallel_size=2"], ["actor.megatron", "FSDP2"]),
        ([f"{ARR}.rollout.multi_turn.enable=True"], ["multi_turn.enable", "one turn"]),
        (["data.image_key=images"], ["data.image_key", "text only", "images"]),
        (["trainer.v1.trainer_mode=separate_async"], ["trainer.v1.trainer_mode", "trainer.scheduler"]),
        (["distillation.distillation_loss.loss_mode=abs"], ["distillation.loss_mode", "abs"]),
        (
            ["distillation.loss_mode=forward_kl_topk", "distillation.distillation_loss.log_prob_min_clamp=-10"],
            ["distillation.distillation_loss.log_prob_min_clamp", "loss_max_clamp", "-10"],
        ),
        (
            ["algorithm.rollout_correction.rollout_is=false"],
            ["algorithm.rollout_is: Invalid value 'False', expected one of ['prefix', 'token', 'sequence']"],
        ),
        (["distillation.loss_mode=[]"], ["distillation.loss_mode: has a value of the wrong type; got []"]),
        (["critic.ppo_micro_batch_size=.inf"], ["critic.ppo_micro_batch_size: has a value of the wrong type"]),
        ([f"{ARR}.actor.checkpoint.contents=-1"], [f"{ARR}.actor.checkpoint.contents: has a value of", "got -1"]),
    ],
)
def test_what_cannot_be_had_is_refused_by_name_and_reason(overrides, parts):
    with pytest.raises((ConfigError, SeveralErrors)) as caught:
        load(*overrides)
    for part in parts:
        assert part in str(caught.value)


def test_two_spellings_of_one_value_agree():
    config = load(f"{ARR}.actor.optim.clip_grad=0.5", f"{ARR}.actor.grad_clip=0.5", "data.seed=1", "data.seed=2")
    assert (config.actor_rollout_ref.actor.grad_clip, config.data.seed) == (0.5, 2)


def test_what_has_no_effect_is_said_once_for_each_reason(caplog):
    caplog.set_level(logging.INFO)
    load(f"{ARR}.rollout.load_format=safetensors", f"{ARR}.rollout.layered_summon=True", "trainer.logger=console")
    said = [record.message for record in caplog.records]
    both = f"no effect: {ARR}.rollout.load_format, {ARR}.rollout.layered_summon (the rollout engine gets"
    assert len([line for line in said if line.startswith(both)]) == 1
    assert "trainer.logger=console is read as trainer.logger=['console']" in said


def test_a_file_may_have_keys_of_verl_and_its_defaults_list(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "defaults: [ppo_trainer, _self_]\n"
        f"{ARR}: {{actor: {{ppo_micro_batch_size: 16}}, rollout: {{mode: async, prompt_length: 64}}}}\n",
        encoding="utf-8",
    )
    config = load_config(OWN[:4], config_name="mine.yaml", config_path=tmp_path)
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2
    assert (config.data.max_prompt_length, config.data.train_batch_size) == (64, 1024)
    (tmp_path / "mine.yaml").write_text("defaults: [{actor@actor_rollout_ref.actor: dp_actor}]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="defaults must be a list of file names"):
        load_config(OWN, config_name="mine", config_path=tmp_path)


def test_values_may_be_those_of_other_keys(tmp_path, monkeypatch):
    """Lengths of a rollout refer to those of the data in verl's own files."""
    (tmp_path / "mine.yaml").write_text("""
defaults: [ppo_trainer]
data: {train_files: x, max_prompt_length: 256, max_response_length: 512, train_batch_size: 64}
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  model: {path: student}
  actor:
    ppo_mini_batch_size: ${data.train_batch_size}
    ppo_micro_batch_size: ${data.train_batch_size}
    optim: {lr_warmup_steps: 10}
  rollout: {n: 4, prompt_length: "${data.max_prompt_length}", response_length: "${ data.max_response_length }"}
trainer: {n_gpus_per_node: "${oc.env:GPUS,2}", resume_mode: "${oc.env:MODE}", resume_from_path: state}
""", encoding="utf-8")
    (tmp_path / "ppo_trainer.yaml").write_bytes((ROOT / "config" / "ppo_trainer.yaml").read_bytes())
    monkeypatch.setenv("MODE", "resume_path")
    config = load_config(config_name="mine", config_path=tmp_path)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (256, 512)
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 32
    assert config.trainer.resume_from_path.endswith("state")
    for given in ("${data.train_batch_size}", "64"):
        size, steps = f"{ARR}.actor.ppo_mini_batch_size={given}", f"{ARR}.actor.optim.lr_warmup_steps=10"
        actor = load("data.train_batch_size=64", size, steps).actor_rollout_ref.actor
        assert (actor.ppo_mini_batch_size, actor.optim.lr_warmup_steps) == (64, 10)
    with pytest.raises(HybridGKDError, match=r"is computed with trainer\.n_gpus_per_node, which must be a number"):
        load("trainer.n_gpus_per_node=${nothing.there}", f"{ARR}.actor.ppo_micro_batch_size=8")


def test_a_file_before_its_base_is_overridden_by_it(tmp_path):
    (tmp_path / "base.yaml").write_text("data: {seed: 1}\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [_self_, base]\ndata: {seed: 2, train_batch_size: 300}\n", encoding="utf-8"
    )
    own = [*OWN, f"{ARR}.teacher.model.path=teacher"]
    data = load_config(own, config_name="mine", config_path=tmp_path).data
    assert (data.seed, data.train_batch_size) == (1, 300)


def test_the_recipe_of_a_command():
    data, verl = "data.train_files=a", "+algorithm.adv_estimator=gae"
    assert default_config_name([verl]) == "demo"
    assert default_config_name([data]) == "gkd"
    assert default_config_name([verl, data]) == "ppo_trainer"
    assert default_config_name([verl, data, f"{ARR}.teacher.server_ip=10.0.0.1"]) == "gkd"
    assert default_config_name([verl, data, "distillation.teacher_models.my-own.model.path=x"]) == "gkd"
    assert default_config_name([verl, data, "distillation.teacher_models.x.model_path=x"]) == "ppo_trainer"  # of verl


def test_a_folder_of_recipes_is_found_from_here_and_from_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(["--config-path=config", "--config-name=ppo_trainer.yaml"]).config_path == ROOT / "config"
    (tmp_path / "config").mkdir()
    assert parse(["-cp", "config", "-cn", "mine"]).config_path == Path("config")

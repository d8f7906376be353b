"""Keys without effect in a run: which are named, and that recipes and commands of verl cause no further warnings."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_gkd.config import unused
from hybrid_gkd.config.loading import CONFIG_DIR, RECIPES, examine_config
from hybrid_gkd.config.spelling import key_types
from hybrid_gkd.config.unused import unused_keys
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.command_line import default_config_name, parse, set_keys
from hybrid_gkd.launch.preflight import CHECKS

ARR, TEACHER, MODELS = "actor_rollout_ref", "actor_rollout_ref.teacher", "distillation.teacher_models"
OWN = ["data.train_files=prompts.jsonl", f"{ARR}.model.path=student"]
ANSWERS, HELD_OUT, GIVEN = "reward.answer_key=answer", "data.val_files=held_out.jsonl", "data.response_key=response"
FUNCTION, MODE = "reward.custom_reward_function.path=x.py", f"{ARR}.actor.policy_loss.loss_mode={{}}"
MICRO_BATCH = f"{ARR}.actor.ppo_micro_batch_size_per_gpu=2"
SEPARATE = [f"{ARR}.hybrid_engine=false", "rollout.n_gpus_per_node=1"]
COMMANDS = Path(__file__).parents[2] / "verl_commands.json"


def found(*words, **facts):
    """Return key -> reason of the keys without effect of a command line whose configuration has no errors."""
    options = parse(list(words))
    name = options.config_name or default_config_name(options.overrides)
    config, problems = examine_config(options.overrides, config_name=name, config_path=options.config_path)
    assert not problems
    usual = {"engine": "vllm", "device": "cuda", "draws": config.on_policy_fraction > 0, "template": ""}
    reasons = unused_keys(config, set_keys(config, options), **(usual | facts))
    return {key: reason for reason, keys in reasons.items() for key in keys}


DISTIL = ["--config-name=gkd", *OWN, f"{TEACHER}.model.path=teacher"]
SERVED = ["--config-name=gkd", *OWN, f"{TEACHER}.server_ip=far"]
REWARDED = ["--config-name=ppo", *OWN, ANSWERS]
SFT = ["--config-name=gkd", *OWN, GIVEN, "distillation.enabled=false"]
DRAWN = ["distillation.on_policy_fraction=0.5", ANSWERS, f"{ARR}.rollout.n=2"]
TASK_REWARDS = ["distillation.use_task_rewards=true", ANSWERS, f"{ARR}.rollout.n=2"]
BY_POLICY = ["distillation.loss_mode=k1", "distillation.use_policy_gradient=true"]
DISTILLED = ["distillation.enabled=true", f"{TEACHER}.model.path=teacher"]
OWN_RATE = f"{ARR}.actor.optim"
EFFECTS = [  # command, value without effect, what gives it one
    (DISTIL, "algorithm.adv_estimator=gae", TASK_REWARDS),
    (DISTIL, "algorithm.gamma=0.9", [*TASK_REWARDS, "algorithm.adv_estimator=gae"]),
    (DISTIL, "critic.optim.lr=1e-4", [*TASK_REWARDS, "algorithm.adv_estimator=gae"]),
    (REWARDED, "critic.optim.lr=1e-4", ["algorithm.adv_estimator=gae"]),
    (DISTIL, f"{ARR}.actor.clip_ratio=0.1", BY_POLICY),
    (DISTIL, f"{ARR}.actor.policy_loss.loss_mode=cispo", BY_POLICY),
    (SFT, f"{ARR}.actor.clip_ratio=0.1", DRAWN),
    (
        [*REWARDED, f"{ARR}.actor.clip_ratio_low=0.1", f"{ARR}.actor.clip_ratio_high=0.4"],
        f"{ARR}.actor.clip_ratio=0.3", [f"{ARR}.actor.clip_ratio_low=null"],
    ),
    ([*REWARDED, MODE.format("cispo")], f"{ARR}.actor.clip_ratio_c=3", [MODE.format("vanilla")]),
    ([*REWARDED, MODE.format("gpg")], f"{ARR}.actor.clip_ratio_low=0.1", [MODE.format("vanilla")]),
    (REWARDED, "algorithm.kl_ctrl.kl_coef=0.1", ["algorithm.use_kl_in_reward=true"]),
    (
        [*REWARDED, "algorithm.use_kl_in_reward=true"], "algorithm.kl_ctrl.target_kl=0.2",
        ["algorithm.kl_ctrl.type=adaptive"],
    ),
    (REWARDED, "algorithm.filter_groups.metric=acc", ["algorithm.filter_groups.enable=true"]),
    (DISTIL, f"{ARR}.actor.kl_loss_coef=0.1", [f"{ARR}.actor.use_kl_loss=true"]),
    (DISTIL, f"{ARR}.ref.model.path=x", [f"{ARR}.actor.use_kl_loss=true"]),
    ([*REWARDED, f"{ARR}.actor.use_kl_loss=true"], f"{ARR}.ref.topk=8", [f"{ARR}.actor.kl_loss_type=full"]),
    (DISTIL, f"{ARR}.actor.optim_sft.lr=1e-4", [GIVEN, "trainer.warmup_steps_sft=2"]),
    (DISTIL, f"{OWN_RATE}.lr_warmup_steps_ratio=0.1", [f"{OWN_RATE}.lr_warmup_steps=0"]),  # the recipe has steps
    (
        [*DISTIL, f"{OWN_RATE}.lr_scheduler_type=constant"], f"{OWN_RATE}.min_lr_ratio=0.2",
        [f"{OWN_RATE}.lr_scheduler_type=linear"],
    ),
    (DISTIL, MICRO_BATCH, [f"{ARR}.actor.use_dynamic_bsz=false"]),
    (
        [*DISTIL, MICRO_BATCH, f"{ARR}.actor.use_dynamic_bsz=false"], f"{ARR}.actor.ppo_max_token_len_per_gpu=4096",
        [f"{ARR}.actor.use_dynamic_bsz=true"],
    ),
    (SFT, f"{ARR}.rollout.n=4", DRAWN[:2]),
    (SFT, "data.max_response_length_schedule={1: 8}", DRAWN),
    (SFT, "trainer.scheduler=one_step_off", DRAWN),
    (SFT, "distillation.use_task_rewards=true", DRAWN),
    ([*DISTIL, GIVEN], "distillation.tail=sampled", DRAWN),
    ([*DISTIL, GIVEN, ANSWERS, f"{ARR}.rollout.n=2"], "distillation.use_task_rewards=true", DRAWN),
    ([*DISTIL, "distillation.on_policy_fraction=1"], GIVEN, ["trainer.warmup_steps_sft=2"]),
    ([*DISTIL, "distillation.on_policy_fraction=1", GIVEN], f"{TEACHER}.cache=scores", DRAWN),
    (DISTIL, "data.truncation=left", ["data.filter_overlong_prompts=false"]),  # the recipe filters
    ([*DISTIL, "data.shuffle=false"], "data.seed=3", [GIVEN, "distillation.on_policy_fraction=0.5"]),
    (DISTIL, "trainer.test_freq=10", [HELD_OUT]),
    ([*DISTIL, f"{ARR}.rollout.val_kwargs.temperature=0.5"], f"{ARR}.rollout.val_kwargs.n=4", [HELD_OUT]),
    (
        [*DISTIL, HELD_OUT], f"{ARR}.rollout.val_kwargs.top_p=0.9", [f"{ARR}.rollout.val_kwargs.temperature=0.6"],
    ),
    (DISTIL, "rollout.nnodes=2", SEPARATE),
    (DISTIL, "trainer.snapshot_dir=/dev/shm", ["trainer.max_restarts=3"]),
    ([*DISTIL, "ray_init.address=auto"], "ray_init.num_cpus=4", ["ray_init.address=null"]),
    ([*DISTIL, "trainer.total_training_steps=9"], "trainer.total_epochs=3", ["trainer.total_training_steps=null"]),
    ([*DISTIL, "trainer.logger=[console]"], "trainer.wandb.group=x", ["trainer.logger=[wandb]"]),
    ([*DISTIL, "trainer.logger=[]"], "trainer.console=full", ["trainer.logger=[console]"]),
    ([*DISTIL, "trainer.save_freq=0"], "trainer.max_actor_ckpt_to_keep=5", ["trainer.save_freq=9"]),
    (REWARDED, "distillation.topk=8", DISTILLED),
    (REWARDED, f"{TEACHER}.dtype=float32", DISTILLED),
    (DISTIL, "distillation.beta=0.2", ["distillation.loss_mode=jsd"]),
    (DISTIL, "distillation.teacher_key=subject", [f"{MODELS}.a.model.path=a", f"{MODELS}.b.model.path=b"]),
    (SERVED, f"{TEACHER}.dtype=float32", [f"{TEACHER}.server_ip=null", f"{TEACHER}.model.path=teacher"]),
    (SERVED, f"{TEACHER}.model.path=teacher", [f"{TEACHER}.server_ip=null"]),
    ([*SERVED, f"{TEACHER}.server_ip=far:1"], f"{TEACHER}.server_port=9", [f"{TEACHER}.server_ip=far"]),
    ([*DISTIL, f"{TEACHER}.backend=hf"], f"{TEACHER}.gpu_memory_utilization=0.5", [f"{TEACHER}.backend=vllm"]),
    (DISTIL, f"{TEACHER}.ema_decay=0.5", [
        f"{TEACHER}.model.path=null", f"{TEACHER}.source=ema", "data.teacher_prompt_key=hint",
    ]),
    (DISTIL, f"{TEACHER}.cache=scores", [GIVEN]),
    (DISTIL, f"{TEACHER}.cache_gigabytes=9", [GIVEN, f"{TEACHER}.cache=scores"]),
    (DISTIL, "reward.name=gsm8k", [ANSWERS, HELD_OUT]),
    ([*DISTIL, ANSWERS], "reward.name=gsm8k", [HELD_OUT]),
    ([*DISTIL, ANSWERS, HELD_OUT], "reward.overlong_buffer.enable=true", TASK_REWARDS),
    (REWARDED, "reward.overlong_buffer.len=64", ["reward.overlong_buffer.enable=true"]),
    ([*REWARDED, FUNCTION], "reward.name=gsm8k", ["reward.custom_reward_function.path=null"]),
    (REWARDED, "reward.strict=true", ["reward.name=gsm8k"]),
    (REWARDED, "reward.timeout=5", ["reward.name=math"]),
    (REWARDED, "reward.num_workers=5", ["reward.name=math"]),
    (REWARDED, "reward.score_on_error=0.0", [FUNCTION]),
    (REWARDED, "reward_model.max_length=99", ["reward_model.enable=true", "reward_model.model.path=judge"]),
]


@pytest.mark.parametrize(("command", "word", "more"), EFFECTS, ids=[word for _, word, _ in EFFECTS])
def test_a_value_without_effect_is_named_only_where_it_has_none(command, word, more):
    key = word.partition("=")[0]
    named = [each for each in found(*command, word) if each.startswith(key)]
    assert named
    assert not {*named} & found(*command, word, *more).keys()


@pytest.mark.parametrize(("name", "how"), [
    ("gpu_memory_utilization=0.5", {"device": "cpu"}), ("gpu_memory_utilization=0.5", {"engine": "hf"}),
    ("max_num_batched_tokens=99999", {"engine": "hf"}),
])  # fmt: skip
def test_keys_of_an_engine_or_a_gpu_depend_on_the_resolved_ones(name, how):
    word = f"{ARR}.rollout.{name}"
    assert [*found(*DISTIL, word, **how)] == [word.partition("=")[0]]
    assert not found(*DISTIL, word)


def test_an_argument_that_no_chat_template_reads_is_named():
    words = "data.apply_chat_template_kwargs={enable_thinking: false, think: true}"
    named = found(*DISTIL, words, template="{% if enable_thinking %}")
    assert named == {"data.apply_chat_template_kwargs.think": "no chat template reads it"}


def test_offloading_a_student_that_has_its_gpu_for_itself_has_no_effect():
    offload = f"{ARR}.actor.fsdp_config.param_offload"
    assert [*found("--config-name=demo", *SEPARATE, f"{offload}=true")] == [offload]
    assert not found("--config-name=demo", f"{offload}=true")


@pytest.mark.parametrize(("teacher", "name"), [
    ([f"{TEACHER}.source=initial", "data.teacher_prompt_key=hint"], "max_retries"),
    ([f"{TEACHER}.cache=scores", GIVEN], "num_microbatches"),
])  # fmt: skip
def test_a_teacher_without_a_service_has_no_keys_of_one(teacher, name):
    assert [*found("--config-name=gkd", *OWN, *teacher, f"{TEACHER}.{name}=2")] == [f"{TEACHER}.{name}"]


def test_each_of_several_teachers_has_keys_of_its_own():
    teachers = [f"{MODELS}.near.model.path=one", f"{MODELS}.far.server_ip=far", f"{MODELS}.near.dtype=float32"]
    assert [*found("--config-name=gkd", *OWN, *teachers, f"{MODELS}.far.dtype=float32")] == [f"{MODELS}.far.dtype"]


def test_the_key_of_a_single_teacher_is_named(caplog):
    caplog.set_level(logging.WARNING)
    found("--config-name=gkd", *OWN, "distillation.teacher_models.math={key: math, model_path: one}")
    assert "no effect: key and weight of distillation.teacher_models.math (a single teacher scores all" in caplog.text


def test_values_that_follow_another_key_are_not_named():
    own = [*DISTIL, "trainer.seed=5", "data.shuffle=false"]
    assert not found(*own)
    assert [*found(*own, "data.seed=6")] == ["data.seed"]


def test_defaults_and_values_that_are_off_are_never_named():
    off = ["algorithm.kl_ctrl.kl_coef=0.0", f"{ARR}.actor.kl_loss_coef=0", "trainer.test_freq=0"]
    assert not found(*REWARDED, *off, "distillation.loss_mode=forward_kl", f"{ARR}.actor.kl_loss_type=low_var_kl")


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_causes_no_warnings(recipe):
    options = parse(["--config-name", recipe, f"--config-path={CONFIG_DIR.parent / 'tests' / '..' / 'config'}"])
    config, _ = examine_config(config_name=recipe)
    assert set_keys(config, options) == []


def test_the_recipes_of_this_repository_are_known():
    assert {file.stem for file in CONFIG_DIR.glob("*.yaml")} == RECIPES


def test_values_of_a_file_of_the_user_count_as_set(tmp_path):
    text = "defaults: [gkd]\nalgorithm: {adv_estimator: gae}\ndata: {truncation: left}\n"
    (tmp_path / "one_gpu.yaml").write_text(text, encoding="utf-8")
    words = ["--config-name=one_gpu", f"--config-path={tmp_path}", *OWN, f"{TEACHER}.model.path=teacher"]
    assert [*found(*words)] == ["data.truncation", "algorithm.adv_estimator"]


def test_commands_of_verl_are_told_of_few_keys():
    """They are those that verl does not read there either."""
    named = set()
    for command in json.loads(COMMANDS.read_text(encoding="utf-8")):
        options = parse(command["arguments"])
        config, _ = examine_config(options.overrides, config_name="ppo_trainer")
        facts = {"engine": "vllm", "device": "cuda", "draws": True, "template": ""}
        reasons = unused_keys(config, set_keys(config, options), **facts)
        named |= {key for keys in reasons.values() for key in keys}
    actor = f"{ARR}.actor"
    assert named == {
        f"{actor}.kl_loss_type", f"{actor}.ppo_micro_batch_size_per_gpu", f"{actor}.clip_ratio_c", "reward.num_workers",
    }


def test_every_row_is_about_keys_that_there_are():
    config, _ = examine_config([*OWN, f"{TEACHER}.model.path=teacher"], config_name="gkd")
    rows = [*unused._run(config, "vllm", "cuda"), *unused._teachers(config), *unused._rewards(config)]
    for pattern, _, _ in [*rows, *unused._updates(config, draws=True)]:
        assert any(re.fullmatch(rf"({pattern})(\..*)?", key) for key in key_types()), pattern


def test_the_check_warns_and_counts(caplog):
    config, _ = examine_config([*OWN, f"{TEACHER}.model.path=teacher", "algorithm.adv_estimator=gae"])
    (check,) = [check for check in CHECKS if check.name == "unused keys"]
    facts = Facts(config, ["algorithm.adv_estimator", "data.train_files"], engine="vllm", device="cuda")
    facts.tokenizer = SimpleNamespace(chat_template=None)
    assert check.function(facts) == "1 of the 2 keys that were set"
    assert caplog.messages[0].startswith("no effect: algorithm.adv_estimator (needs advantages: ")
    assert caplog.records[0].levelno == logging.WARNING

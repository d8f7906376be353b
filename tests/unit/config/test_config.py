"""Configuration: strictness, precedence, messages, and every recipe under config/."""

import math

import pytest

from hybrid_gkd.config.loading import CONFIG_DIR, examine_config, load_config, to_yaml
from hybrid_gkd.errors import ConfigError, HybridGKDError, SeveralErrors, raise_all

OWN = [
    "data.train_files=prompts.jsonl",
    "actor_rollout_ref.model.path=student",
    "actor_rollout_ref.teacher.model.path=teacher",
]


@pytest.mark.parametrize("file", sorted(CONFIG_DIR.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_recipe_loads(file):
    given = [*OWN, "reward.answer_key=answer", "actor_rollout_ref.rollout.n=2"]
    text = file.read_text(encoding="utf-8")
    if "source: initial" in text:  # the student is the teacher
        given.append("actor_rollout_ref.teacher.model.path=null")
    overrides = (
        []
        if "${demo:" in text
        else [*given, "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    )
    assert load_config(overrides, config_name=file.stem).data.train_batch_size > 0


@pytest.mark.slow
def test_a_recipe_for_users_has_nothing_of_the_demo():
    """Neither its lengths, nor its files; and the names that people's scripts have are the same recipe."""
    config = load_config([*OWN, "reward.answer_key=answer"], config_name="ppo")
    assert (config.data.max_response_length, config.data.val_files, config.distillation.enabled) == (1024, [], False)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    names = ("gkd_trainer", "on_policy_distill_trainer.yaml", "gkd.yaml")
    assert [load_config(OWN, config_name=name) for name in names] == [load_config(OWN, config_name="gkd")] * 3


def test_a_checkpoint_to_continue_from_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    config = load_config([*OWN, "trainer.resume_mode=resume_path", "trainer.resume_from_path=~/run/global_step_3"])
    assert config.trainer.resume_from_path == "/home/user/run/global_step_3"


def test_null_for_the_size_of_a_request_is_the_default():
    teacher = load_config([*OWN, "actor_rollout_ref.teacher.num_microbatches=null"]).actor_rollout_ref.teacher
    assert teacher.num_microbatches == 8


def test_precedence_is_defaults_then_yaml_then_overrides(tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 7, seed: 5}\n", encoding="utf-8")
    config = load_config([*OWN, "data.seed=9"], config_name="mine", config_path=tmp_path)
    assert (config.data.train_batch_size, config.data.seed, config.data.prompt_key) == (7, 9, "prompt")


@pytest.mark.slow
def test_the_resolved_config_reads_back_to_the_same_values(tmp_path):
    own = ["data.apply_chat_template_kwargs={a: 1}", r"data.prompt_key=\${x}", r"trainer.project_name='a\\\${y} b'"]
    config = load_config([*OWN, "actor_rollout_ref.actor.optim.lr=1e-4", *own])
    assert config.data.prompt_key == "${x}"
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(config_name="config", config_path=tmp_path) == config


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.trunction=left", ["data.trunction", "no such key", "data.truncation"]),
        ("data.train_batch_size=abc", ["data.train_batch_size", "'abc'"]),
        ("data.train_batch_size=1.5", ["data.train_batch_size", "'1.5'"]),
        ("data.train_batch_size=0", ["data.train_batch_size", "above 0", "0"]),
        ("data.truncation=middel", ["data.truncation", "'middel'", "middle"]),
        ("data.val_files=[[3]]", ["data.val_files", "list of files", "3"]),
        ("data.seed=[", ["data.seed", "YAML"]),
        ("justaword", ["justaword", "dotted.key=value"]),
        *((f"trainer={value}", ["trainer: is a section", value or "None"]) for value in ("3", "", "[]")),
        ("trainer.seed=${oc.env:NO_SUCH}", ["trainer.seed", "'NO_SUCH'", "set it", "${oc.env:NAME,default}"]),
        *((key + "=1", [f"{key.lstrip('+')}: there is no such key (did you mean {close}?)"]) for key, close in {
            "+model.lora_rank": "actor_rollout_ref.model.lora_rank",
            "critic.lr": "critic.optim.lr or actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.optim_sft.lr",
            "data.files": "data.train_files or data.val_files",
            "grpo.num_generations_per_prompt": "actor_rollout_ref.rollout.n",
            "learning_rate": "actor_rollout_ref.actor.optim.lr",
            "seed": "data.seed or trainer.seed or actor_rollout_ref.rollout.seed",
        }.items()),
        ("trainer.path=1", ["trainer.path: there is no such key"]),
        ("trainer.scheduler=two_steps", ["trainer.scheduler", "two_steps", "sync"]),
        ("algorithm.rollout_is=token", ["algorithm.rollout_is", "rollout_is_threshold", "token"]),
        ("algorithm={rollout_is: token, rollout_is_threshold: 2}", ["rollout_is", "sampled token", "prefix", "token"]),
        ("algorithm.rollout_is_batch_normalize=true", ["rollout_is_batch_normalize", "rollout_is_threshold", "True"]),
        ("algorithm.rollout_rs=token_k1", ["algorithm.rollout_rs_threshold", "set together", "None"]),
        ("algorithm.rollout_is_threshold=0.5", ["algorithm.rollout_is_threshold", "at least 1", "0.5"]),
        ("trainer.logger=[mlflow]", ["trainer.logger", "wandb", "tensorboard"]),
        ("trainer.experiment_name=..", ["trainer.experiment_name", "'..'"]),
        ("trainer.resume_mode=resume_path", ["trainer.resume_from_path", "resume_path"]),
        ("trainer.resume_from_path=/a", ["trainer.resume_from_path", "trainer.resume_mode=resume_path", "got '/a'"]),
        ("actor_rollout_ref.actor.optim.betas=0.9,0.95", ["actor.optim.betas: must be a list: comma-separated"]),
        ("actor_rollout_ref.rollout.top_p=1.5", ["actor_rollout_ref.rollout.top_p", "above 0 and at most 1", "1.5"]),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0", ["val_kwargs.top_p", "above 0 and at most 1", "0"]),
        ("actor_rollout_ref.teacher.server_ip=a:99999", ["teacher.server_ip", "host:port", "99999"]),
        ("actor_rollout_ref.actor.grad_clip=.nan", ["actor.grad_clip", "above 0", "nan"]),
        ("trainer.seed=4294967296", ["trainer.seed", "below 2**32", "4294967296"]),
        ("actor_rollout_ref.actor.optim.weight_decay=.inf", ["actor.optim.weight_decay", "finite", "inf"]),
        ("trainer.logger=3", ["trainer.logger", "must be one of", "'3'"]),
        ("trainer.logger.0=wandb", ["trainer.logger"]),
        ("actor_rollout_ref.teacher.server_ip=http://a:15555", ["teacher.server_ip", "host:port", "http://a"]),
        ("actor_rollout_ref.teacher.server_ip=a:b", ["teacher.server_ip", "host:port", "a:b"]),
        ("actor_rollout_ref.teacher.server_ip=a..b", ["teacher.server_ip", "host:port", "a..b"]),
        ("ray_init.address=a..b:6379", ["ray_init.address", "host:port", "a..b:6379"]),
        ("ray_init.address=10.0.0.1", ["ray_init.address", "host:port", "10.0.0.1"]),
        ("ray_init.address=local", ["ray_init.address", "running cluster", "local"]),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.0]", ["actor.optim.betas", "below 1", "1.0"]),
        ("actor_rollout_ref.rollout.top_k=-2", ["actor_rollout_ref.rollout.top_k", "-2"]),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", ["tensor_model_parallel_size", "divide", "3"]),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=3", ["actor.fsdp_config.fsdp_size", "divide", "3"]),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=0", ["actor.fsdp_config.fsdp_size", "-1", "0"]),
        ("actor_rollout_ref.rollout.max_model_len=10", ["max_model_len", "2048", "10"]),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10", ["ppo_max_token_len_per_gpu", "2048", "10"]),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=500", ["ppo_mini_batch_size", "128", "500"]),
        ("actor_rollout_ref.actor.use_dynamic_bsz=false", ["ppo_micro_batch_size_per_gpu"]),
        ("actor_rollout_ref.teacher.model.path=null", ["actor_rollout_ref.teacher.model.path", "server_ip"]),
        ("actor_rollout_ref.teacher.server_port=70000", ["actor_rollout_ref.teacher.server_port", "70000"]),
        ("distillation.enabled=false", ["reward.answer_key"]),
        ("distillation.loss_mode=kld", ["distillation.loss_mode", "'kld'", "reverse_kl"]),
        ("distillation.beta=1.1", ["distillation.beta", "between 0 and 1", "1.1"]),
        ("distillation.loss_max_clamp=0", ["distillation.loss_max_clamp", "above 0", "0"]),
        ("distillation.loss_mode=mixed", ["distillation.mixed_weights", "loss_mode=mixed", "{}"]),
        ("distillation.mixed_weights={k2: 1}", ["distillation.mixed_weights", "loss_mode=mixed", "k2"]),
        ("distillation.loss_mode=k1", ["distillation.use_policy_gradient", "k1", "False"]),
        ("distillation.use_policy_gradient=true", ["distillation.use_policy_gradient", "forward_kl", "True"]),
        ("distillation.use_task_rewards=true", ["reward.answer_key"]),
        ("reward.name=gsm", ["reward.name", "exact_match, gsm8k, math", "'gsm'"]),
        ("reward.name=format", ["reward.format", "must be set together with reward.name=format", "None"]),
        ("reward.format='(a'", ["reward.format", "must be a regular expression", "'(a'"]),
        ("reward.functions={gsm: 1}", ["reward.functions", "length, custom (your function) or model", "gsm: 1.0"]),
        ("reward.functions={length: 0}", ["reward.functions", "finite weights other than 0", "length: 0.0"]),
        ("reward.functions={custom: 1}", ["reward.functions", "reward.custom_reward_function.path"]),
        ("reward.functions={gsm8k: 1}", ["reward.answer_key", "need the column", "None"]),
        ("actor_rollout_ref.hybrid_engine=false", ["rollout.n_gpus_per_node", "hybrid_engine=false", "None"]),
        ("rollout.n_gpus_per_node=2", ["rollout.n_gpus_per_node", "hybrid_engine=false", "2"]),
        ("rollout.nnodes=0", ["rollout.nnodes", "above 0", "0"]),
    ],
)
def test_bad_values_are_refused_by_name(override, parts):
    with pytest.raises(HybridGKDError) as caught:
        load_config([*OWN, override])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["functions={length: 1}", "name=gsm8k"], ["reward.name", "not be set with reward.functions", "gsm8k"]),
        (["functions={length: 1}", "custom_reward_function.path=my.py"], ["reward.functions", "must have custom"]),
        (["overlong_buffer={enable: true, len: 2048}"], ["reward.overlong_buffer.len", "at most", "1024", "2048"]),
    ],
)
def test_rewards_that_do_not_go_together_are_refused(overrides, parts):
    with pytest.raises(HybridGKDError) as caught:
        load_config([*OWN, *(f"reward.{override}" for override in overrides)])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("reward", ["functions={length: 1}", "custom_reward_function.path=my.py"])
def test_a_reward_that_needs_no_answers_does_without_their_column(reward):
    config = load_config([*OWN, "distillation.enabled=false", "actor_rollout_ref.rollout.n=2", f"reward.{reward}"])
    assert config.has_reward


def test_an_engine_with_gpus_of_its_own_is_cut_by_their_number():
    separate = [*OWN, "actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=3", "rollout.nnodes=2"]
    config = load_config([*separate, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"])
    assert (config.world_size, config.rollout_world_size, config.workers_per_node) == (1, 6, 4)
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size.*rollout\.nnodes.* = 6\); got 4"):
        load_config([*separate, "actor_rollout_ref.rollout.tensor_model_parallel_size=4"])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["loss_mode=mixed", "mixed_weights={k1: 1}"], ["distillation.mixed_weights", "k2 or k3", "k1: 1.0"]),
        (["loss_mode=mixed", "mixed_weights={k2: .inf}"], ["distillation.mixed_weights", "finite", "k2: inf"]),
        (["loss_mode=mixed", "mixed_weights={forward: 1}"], ["distillation.mixed_weights", "forward_kl", "forward: 1"]),
        (["loss_mode=mixed", "mixed_weights={jsd: 0}"], ["distillation.mixed_weights", "above 0", "jsd: 0.0"]),
        (["loss_mode=mixed", "mixed_weights={jsd: 1}", "use_policy_gradient=true"], ["use_policy_gradient", "mixed"]),
        (["loss_mode=k2", "tail=none"], ["distillation.tail", "k2", "none"]),
        (["loss_mode=jsd", "tail=sampled"], ["distillation.tail", "than forward_kl", "got 'sampled'"]),
        (["loss_fn=a.py:b", "tail=sampled"], ["distillation.tail", "than forward_kl"]),
        (["temperature=0.7", "tail=sampled"], ["distillation.tail", "top_k=-1 and temperature=0.7"]),
        (["topk=1", "tail=renormalise"], ["distillation.topk", "at least 2", "tail=renormalise", "got 1"]),
        (["topk=1", "tail=renormalise", "loss_mode=jsd"], ["distillation.topk", "at least 2", "got 1"]),
        (
            ["topk=1", "tail=renormalise", "loss_mode=mixed", "mixed_weights={forward_kl: 1, jsd: 1}"],
            ["distillation.topk", "at least 2", "got 1"],
        ),
        (["loss_mode=k1", "use_policy_gradient=true", "temperature=0.7"], ["temperature", "(1.0)", "0.7"]),
    ],
)
def test_losses_that_would_not_do_what_they_say_are_refused(overrides, parts):
    with pytest.raises(HybridGKDError) as caught:
        load_config([*OWN, *(f"distillation.{override}" for override in overrides)])
    for part in parts:
        assert part in str(caught.value)


def test_divergences_and_estimates_share_only_the_weight_of_a_whole_completion():
    """The weight of the sampled token is for estimates."""
    mixed = [*OWN, "distillation.loss_mode=mixed", "distillation.mixed_weights={forward_kl: 1, k3: 1}"]
    weighted = [*mixed, "algorithm.rollout_is_threshold=2"]
    for overrides in (mixed, [*weighted, "algorithm.rollout_is=sequence"]):
        load_config(overrides)
    for level in ("prefix", "token"):
        with pytest.raises(ConfigError, match=r"^distillation\.mixed_weights: must not mix k3 with divergences over"):
            load_config([*weighted, f"algorithm.rollout_is={level}"])
    load_config([*OWN, "distillation.loss_mode=mixed", "distillation.mixed_weights={k2: 1, k3: 1}",
                 "algorithm.rollout_is_threshold=2"])  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["loss_fn=my_loss"], ["distillation.loss_fn", "module:name", "my_loss"]),
        (["loss_fn=m:f", "loss_mode=jsd"], ["distillation.loss_mode", "loss_fn", "jsd"]),
        (["loss_fn=m:f", "loss_mode=k1", "use_policy_gradient=true"], ["use_policy_gradient", "loss_fn"]),
    ],
)
def test_a_loss_of_ones_own_stands_alone(overrides, parts):
    with pytest.raises(HybridGKDError) as caught:
        load_config([*OWN, *(f"distillation.{override}" for override in overrides)])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["token_weights=first"], ["distillation.token_weights", "uniform, position", "module:name", "first"]),
        (["token_weights_kwargs={fraction: 0.5}"], ["token_weights_kwargs", "left out with", "uniform", "0.5"]),
        (["token_weights=position", "token_weights_kwargs={fraction: 0}"], ["kwargs", "fraction above 0", "0"]),
        (["token_weights=position", "token_weights_kwargs={fraction: 1.5}"], ["kwargs", "at most 1", "1.5"]),
        (["token_weights=position", "token_weights_kwargs={share: 0.5}"], ["kwargs", "no argument but", "share"]),
        (["token_weights=position", "token_weights_kwargs={fraction: half}"], ["kwargs", "fraction above 0", "half"]),
        (["token_weights=position", "as_reward=true"], ["distillation.token_weights", "as_reward", "position"]),
        (
            ["token_weights=student_entropy", "loss_mode=k1", "use_policy_gradient=true"],
            ["distillation.token_weights", "loss_mode=gspo", "student_entropy"],
        ),
    ],
)
def test_token_weights_that_cannot_be_computed_are_refused(overrides, parts):
    more = ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"] if "loss_mode=gspo" in parts else []
    with pytest.raises(HybridGKDError) as caught:
        load_config([*OWN, *more, *(f"distillation.{override}" for override in overrides)])
    for part in parts:
        assert part in str(caught.value)


def test_token_weights_have_their_arguments_and_are_alone_or_not():
    config = load_config([*OWN, "distillation.token_weights=m:f", "distillation.token_weights_kwargs={power: 2}"])
    assert config.distillation.weighting.options == {"power": 2}
    assert config.distils_alone
    config = load_config([*OWN, "distillation.token_weights=confident_wrong"])
    assert config.distillation.weighting.options == {"fraction": 0.1}
    for other in ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coeff=0.01"):
        assert not load_config([*OWN, other]).distils_alone
    assert load_config(OWN).distillation.weighting is None


def test_recipes_build_on_others_by_their_defaults_list(tmp_path):
    (tmp_path / "base.yaml").write_text("data: {train_batch_size: 7, seed: 5}\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("defaults: [base]\ndata: {seed: 6}\n", encoding="utf-8")
    data = load_config(OWN, config_name="mine", config_path=tmp_path).data
    assert (data.train_batch_size, data.seed) == (7, 6)
    (tmp_path / "base.yaml").write_text("defaults: [mine]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="form a cycle: mine -> base -> mine"):
        load_config(OWN, config_name="mine", config_path=tmp_path)


def test_the_seed_of_the_run_is_that_of_data_and_sampling_unless_they_have_their_own():
    for more, seeds in (([], (5, 5)), (["data.seed=2"], (2, 5)), (["actor_rollout_ref.rollout.seed=3"], (5, 3))):
        config = load_config([*OWN, "trainer.seed=5", *more])
        assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == seeds


@pytest.mark.slow
def test_every_loss_mode_loads():
    rewards = ["distillation.use_task_rewards=true", "reward.answer_key=answer", "actor_rollout_ref.rollout.n=4"]
    for mode, *more in (
        ["forward_kl"], ["reverse_kl"], ["jsd"], ["k2"], ["k3"], ["k1", "distillation.use_policy_gradient=true"],
        ["mixed", "distillation.mixed_weights={forward_kl: 0.5, reverse_kl: 0.5}"],
        ["mixed", "distillation.mixed_weights.forward_kl=0.5", "distillation.mixed_weights.k3=0.5"],
        ["k2", "distillation.use_policy_gradient=true", "distillation.topk=1"],
        ["reverse_kl", "distillation.tail=renormalise", "distillation.topk=2"], ["jsd", "distillation.topk=1"],
        ["forward_kl", "distillation.tail=sampled", "distillation.topk=1"],
        ["mixed", "distillation.mixed_weights={forward_kl: 0.5, k3: 0.5}", "distillation.tail=sampled"],
        [
            "mixed", "distillation.mixed_weights={jsd: 0.5, k2: 0.5}", "distillation.topk=1",
            "distillation.tail=renormalise",
        ],
    ):
        config = load_config([*OWN, f"distillation.loss_mode={mode}", *more, *rewards])
        assert (config.distillation.loss_mode, config.distillation.loss_max_clamp) == (mode, None)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.adv_estimator=rloo"], ["actor_rollout_ref.rollout.n", "at least 2", "got 1"]),
        (["algorithm.adv_estimator=best"], ["algorithm.adv_estimator", "reinforce_plus_plus", "best"]),
        (["algorithm.adv_estimator=reinforce_plus_plus", "trainer.critic_warmup=2"], ["critic_warmup", "gae", "2"]),
        (
            ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=256"],
            ["critic.ppo_mini_batch_size", "data.train_batch_size (128)", "256"],
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=100"],
            ["critic.ppo_max_token_len_per_gpu", "2048", "100"],
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.use_dynamic_bsz=false"],
            ["critic.ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "None"],
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.fsdp_config.fsdp_size=2"],
            ["critic.fsdp_config.fsdp_size", "divide", "2"],
        ),
        (["algorithm.adv_estimator=remax", "algorithm.gamma=0.9"], ["algorithm.gamma", "no effect", "remax", "0.9"]),
        (["algorithm.adv_estimator=remax", "algorithm.lam=0.9"], ["algorithm.lam", "no effect", "remax", "0.9"]),
        (
            ["algorithm.adv_estimator=remax", "algorithm.norm_adv_by_std_in_grpo=false"],
            ["algorithm.norm_adv_by_std_in_grpo", "no effect", "remax", "False"],
        ),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=remax"],
            ["actor_rollout_ref.rollout.n", "at least 2", "filter_groups.enable=true", "got 1"],
        ),
        (
            ["algorithm.adv_estimator=remax", "algorithm.filter_groups.metric=f1"],
            ["algorithm.filter_groups.metric", "acc, score, seq_reward", "f1"],
        ),
        (
            ["algorithm.adv_estimator=remax", "data.gen_batch_size=256"],
            ["data.gen_batch_size", "data.train_batch_size (128)", "filter_groups.enable=true", "256"],
        ),
        (
            ["algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=2", "data.gen_batch_size=64"],
            ["data.gen_batch_size", "data.train_batch_size (128)", "64"],
        ),
        (
            ["algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=2", "distillation.enabled=true"],
            ["algorithm.filter_groups.enable", "distillation.use_task_rewards=true", "True"],
        ),
    ],
)
def test_settings_of_advantages_that_do_not_go_together(overrides, parts):
    with pytest.raises(ConfigError) as error:
        load_config([*OWN, "distillation.enabled=false", "reward.answer_key=answer", *overrides])
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("loss_scale_factor=8", ["loss_scale_factor", "seq-mean-token-sum-norm", "got 8"]),
        ("policy_loss.loss_mode=gspo", ["loss_agg_mode", "seq-mean-token-mean", "gspo", "token-mean"]),
        ("policy_loss.loss_mode=ppo", ["policy_loss.loss_mode", "vanilla", "cispo", "ppo"]),
        ("clip_ratio_c=1", ["clip_ratio_c", "above 1", "got 1"]),
        ("clip_ratio_low=0", ["clip_ratio_low", "above 0", "got 0"]),
        ("loss_agg_mode=mean", ["loss_agg_mode", "token-mean", "mean"]),
    ],
)
def test_settings_of_the_policy_loss_that_do_not_go_together(override, parts):
    with pytest.raises(ConfigError) as error:
        load_config([*OWN, f"actor_rollout_ref.actor.{override}"])
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["distillation.loss_mode=jsd"], ["distillation.as_reward", "leave loss_mode"]),
        (["distillation.temperature=0.5"], ["distillation.temperature", "rollout.temperature", "0.5"]),
        (["algorithm.adv_estimator=grpo"], ["actor_rollout_ref.rollout.n", "at least 2"]),
    ],
)
def test_settings_that_do_not_go_with_a_teacher_as_a_reward(overrides, parts):
    given = [*OWN, "distillation.as_reward=true", "algorithm.adv_estimator=reinforce_plus_plus"]
    assert load_config(given).distillation.as_reward
    with pytest.raises(ConfigError) as error:
        load_config([*given, *overrides])
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_estimators_that_need_no_group():
    for name in ("reinforce_plus_plus", "remax", "mine.py:mine"):
        load_config([*OWN, "distillation.enabled=false", "reward.answer_key=answer", f"algorithm.adv_estimator={name}"])


def test_a_run_that_only_validates_needs_no_training_files():
    models = [f"actor_rollout_ref.{name}model.path=x" for name in ("", "teacher.")]
    config = load_config([*models, "trainer.val_only=true", "data.val_files=v.jsonl"])
    assert config.data.train_files == []
    with pytest.raises(ConfigError, match=r"^data\.train_files: must be set"):
        load_config([*models, "data.val_files=v.jsonl"])


def test_a_missing_mandatory_value_and_a_missing_recipe_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.train_files: must be set; --config-name demo"):
        load_config(OWN[1:])
    with pytest.raises(ConfigError, match=r"^data\.train_files: must be set; --config-name ppo_demo"):
        load_config([OWN[1], "reward.answer_key=answer"], config_name="ppo")
    with pytest.raises(ConfigError, match=r"--config-name.*nothere"):
        load_config(OWN, config_name="nothere", config_path=tmp_path)


def test_a_file_that_the_name_of_a_recipe_means_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").touch()
    with pytest.raises(ConfigError, match=r"; --config-path \. --config-name own names own\.yaml; got 'own'$"):
        load_config(OWN, config_name="own")


def test_ray_addresses():
    for address in ("head:6379", "10.0.0.1:6379", "[fe80::1]:6379", "ray://head.example:10001", "auto"):
        assert load_config([*OWN, f"ray_init.address={address}"]).ray_init.address == address


def test_teacher_endpoints():
    given = "actor_rollout_ref.teacher.server_ip="
    one = load_config([*OWN, f"{given}10.0.0.1", "actor_rollout_ref.teacher.server_port=7"])
    assert one.actor_rollout_ref.teacher.endpoints == ["10.0.0.1:7"]
    several = load_config([*OWN, f"{given}'a, b:9,c'"])
    assert several.actor_rollout_ref.teacher.endpoints == ["a:15555", "b:9", "c:15555"]
    for wrong in ("a,,b", "a,a", "a:15555,a"):
        with pytest.raises(ConfigError, match=r"teacher\.server_ip: must be host, host:port, or several"):
            load_config([*OWN, f"{given}{wrong}"])
    with pytest.raises(ConfigError, match=r"teacher\.num_replicas: is for a service that the run starts.*got 2"):
        load_config([*OWN, f"{given}a", "actor_rollout_ref.teacher.num_replicas=2"])
    with pytest.raises(ConfigError, match=r"teacher\.keys: needs a running service"):
        load_config([*OWN, "actor_rollout_ref.teacher.keys=folder"])


def test_gradients_may_be_left_as_they_are():
    assert load_config([*OWN, "actor_rollout_ref.actor.grad_clip=.inf"]).actor_rollout_ref.actor.grad_clip == math.inf


def test_all_that_is_wrong_is_said_at_once_and_then_what_is_missing(tmp_path):
    """Keys, types, values and rules; not what follows from a value that is already refused."""
    (tmp_path / "mine.yaml").write_text("data: {trunction: left, seed: x}\nfoo: {a: 1, b: 2}\n", encoding="utf-8")
    config, problems = examine_config(
        [
            "data.train_batch_size=abc", "actor_rollout_ref.actor.ppo_mini_batch_size=500", "justaword",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=0", "trainer.experiment_name=..",
            "rollout.n_gpus_per_node=2", "trainer.project_name=kept",
        ],
        config_name="mine", config_path=tmp_path,
    )  # fmt: skip
    assert config is not None
    assert config.trainer.project_name == "kept"
    with pytest.raises(SeveralErrors) as caught:
        raise_all(problems)
    head, *lines = str(caught.value).splitlines()
    assert head == "11 errors:"
    keys = [line.split(":")[0].strip() for line in lines]
    assert keys == [
        "data.trunction", "data.seed", "foo", "data.train_batch_size", "justaword",
        "actor_rollout_ref.rollout.tensor_model_parallel_size", "trainer.experiment_name", "rollout.n_gpus_per_node",
        "missing", "actor_rollout_ref.model.path", "data.train_files", "actor_rollout_ref.teacher.model.path",
    ]


@pytest.mark.parametrize(("override", "rule"), [
    ("trainer.scheduler=one_step_off", "needs trainer.scheduler=sync"),
    ("actor_rollout_ref.teacher.server_ip=a:1", "needs a teacher that the run starts"),
])  # fmt: skip
def test_full_determinism_is_refused_where_it_cannot_be(override, rule):
    for section in ("actor_rollout_ref.actor", "critic"):
        key = f"{section}.fsdp_config.full_determinism"
        inputs = ("data.train_files", "actor_rollout_ref.model.path", "actor_rollout_ref.teacher.model.path")
        given = [f"{each}=x" for each in inputs]
        load_config([*given, f"{key}=true"])
        with pytest.raises(ConfigError, match=rf"actor\.fsdp_config\.full_determinism: {rule}"):
            load_config([*given, f"{key}=true", override])


def test_supervised_training_has_no_rewards_in_any_recipe():
    """The recipe for commands of verl has use_task_rewards and gae."""
    given = [*OWN[:2], "data.response_key=response", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    config = load_config(given, config_name="ppo_trainer")
    assert config.is_sft
    assert not config.trains_on_rewards
    assert not config.uses_critic

"""Tables of verl's keys and values and their equivalents in `Config`, used by config/spelling.py.

A key of `Config` is looked up in VALUES only. `*` matches anything. docs/verl.md is generated from the tables.
readings.py converts the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_gkd.compat.verl import readings
from hybrid_gkd.compat.verl.readings import ARR, CORRECTION, DEFAULT, OTHER_TRACKERS, Read, spelled

LOSS_MODE = Read(
    ("distillation.loss_mode", "distillation.tail"), readings.loss_mode,
    "forward_kl_topk is forward_kl with distillation.tail=none, kl is k1, mse is k2, low_var_kl is k3",
)
CONTENTS = Read((f"{ARR}.actor.checkpoint.save_hf_model",), readings.saved, "Whether hf_model is one of them")
TEACHER = f"{ARR}.teacher"

TRAINED = {f"{ARR}.actor": f"{ARR}.model", "critic": "critic.model"}
"""Section of a trained model -> section of the folder that it is loaded from."""

TRAINED_VALUES: dict[str, dict[Any, Any]] = {
    "fsdp_config.model_dtype": {"bfloat16": "bf16", "float32": "fp32"},
    "optim.min_lr_ratio": {None: DEFAULT},
}

VALUES: dict[str, Read] = {
    **{
        f"{section}.{name}": spelled(f"{section}.{name}", values)
        for section in TRAINED for name, values in TRAINED_VALUES.items()
    },
    **{f"{section}.optim.lr_warmup_steps": readings.warmup(section) for section in TRAINED},
    "algorithm.filter_groups.max_num_gen_batches": spelled(
        "algorithm.filter_groups.max_num_gen_batches", {0: DEFAULT, -1: DEFAULT}
    ),
    "algorithm.filter_groups.metric": Read(
        ("algorithm.filter_groups.metric",), readings.filter_metric,
        "null is the default, seq_final_reward is seq_reward where no KL is in the rewards",
    ),
    f"{ARR}.actor.kl_loss_type": spelled(f"{ARR}.actor.kl_loss_type", {
        "low_var_kl": "k3", "mse": "k2", "kl+": "k1+", "low_var_kl+": "k3+",
    }),
    "algorithm.kl_penalty": spelled("algorithm.kl_penalty", {"kl": "k1", "low_var_kl": "k3", "mse": "k2"}),
    f"{ARR}.rollout.top_k": spelled(f"{ARR}.rollout.top_k", {0: -1}),
    "distillation.loss_mode": LOSS_MODE,
    "reward.custom_reward_function.name": spelled("reward.custom_reward_function.name", {None: DEFAULT}),
    "trainer.experiment_name": Read(
        ("trainer.experiment_name",), readings.run_name, "/ is _, as it is the name of a folder"
    ),
    "trainer.logger": Read(
        ("trainer.logger",), readings.loggers, "A single name is a list of one, file is jsonl; beside another, "
        f"{', '.join(OTHER_TRACKERS)} are left out (a tracker of your own: module:name)"
    ),
    "trainer.profile_steps": spelled("trainer.profile_steps", {None: DEFAULT}),
    "trainer.resume_from_path": spelled("trainer.resume_from_path", {"False": None, "false": None}),
}
"""Keys of both programs with values that are spelled differently."""

SECTIONS: dict[str, str] = {
    "critic.model.fsdp_config.": "critic.fsdp_config.",
    "critic.fsdp.": "critic.fsdp_config.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "distillation.distillation_loss.": "distillation.",
    "ray_kwargs.ray_init.": "ray_init.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_manager.": "reward_model.reward_manager.",
    "reward.reward_model.": "reward_model.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "sandbox_fusion.": "reward_model.sandbox_fusion.",
}
"""Section of verl -> section here, in which its keys are looked up, in `Config` and in the tables below."""

RENAMED: dict[str, Read] = {
    f"{CORRECTION}.rollout_is": Read(
        ("algorithm.rollout_is", "algorithm.rollout_is_threshold"), readings.rollout_is,
        "Null is no weights; with it the threshold is that of verl, 2.0 unless given",
    ),
    f"{CORRECTION}.rollout_is_threshold": Read(
        ("algorithm.rollout_is_threshold",), readings.rollout_threshold,
        "Left at the default without rollout_is, as in verl"
    ),
    f"{ARR}.actor.tis_imp_ratio_cap": Read(
        ("algorithm.rollout_is", "algorithm.rollout_is_threshold"), readings.ratio_cap,
        "Above 0 the threshold of token weights"
    ),
    **{
        f"{CORRECTION}.{key}": spelled(f"algorithm.{key}")
        for key in ("rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    },
    "data.tokenizer": spelled(f"{ARR}.model.tokenizer_path"),
    "data.trust_remote_code": spelled(f"{ARR}.model.trust_remote_code"),
    **{
        f"{section}.{theirs}": row
        for section in TRAINED for theirs, row in {
            "ppo_micro_batch_size": readings.micro_batch(f"{section}.ppo_micro_batch_size_per_gpu"),
            "optim.warmup_style": spelled(f"{section}.optim.lr_scheduler_type", {None: DEFAULT}),
            "optim.clip_grad": spelled(f"{section}.grad_clip"),
        }.items()
    },
    f"{ARR}.actor.checkpoint.contents": CONTENTS,
    f"{ARR}.actor.checkpoint.save_contents": CONTENTS,
    f"{ARR}.rollout.prompt_length": spelled("data.max_prompt_length"),
    f"{ARR}.rollout.response_length": spelled("data.max_response_length"),
    f"{ARR}.rollout.checkpoint_engine.update_weights_bucket_megabytes": spelled(
        f"{ARR}.rollout.update_weights_bucket_megabytes"
    ),
    f"{ARR}.rollout.val_kwargs.do_sample": Read(
        (f"{ARR}.rollout.val_kwargs.temperature",), readings.do_sample,
        "false is temperature 0, true leaves it as it is"
    ),
    "distillation.log_prob_min_clamp": Read(
        (), readings.min_clamp,
        "No effect, as in verl, with a loss on the sampled token (k1, k2, k3); refused with another"
    ),
    "distillation.clip_ratio": spelled(f"{ARR}.actor.clip_ratio"),
    "distillation.clip_ratio_low": spelled(f"{ARR}.actor.clip_ratio_low"),
    "distillation.clip_ratio_high": spelled(f"{ARR}.actor.clip_ratio_high"),
    **{
        f"distillation.{theirs}": spelled(f"{ours}.{own}")
        for section, ours in (("teacher_model", TEACHER), ("teacher_models.*", "distillation.teacher_models.*"))
        for theirs, own in {
            f"{section}.model_path": "model.path",
            **({} if section.endswith("*") else {f"{section}.num_replicas": "num_replicas"}),
            f"{section}.inference.name": "backend",
            **{
                f"{section}.inference.{name}": name
                for name in ("tensor_model_parallel_size", "gpu_memory_utilization", "max_model_len", "dtype")
            },
        }.items()
    },
    "reward_model.num_workers": spelled("reward.num_workers"),
    "reward_model.model_path": spelled("reward_model.model.path"),
    **{
        f"reward_model.{section}.{name}": spelled(f"reward.overlong_buffer.{name}")
        for section in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
        for name in ("enable", "len", "penalty_factor")
    },
    "reward_model.reward_kwargs.max_resp_len": spelled("data.max_response_length"),
    "trainer.val_generations_to_log_to_wandb": spelled("trainer.log_val_generations"),
    "trainer.remove_previous_ckpt_in_save": Read(
        ("trainer.max_actor_ckpt_to_keep",), readings.one_checkpoint, "true is 1, false leaves it as it is"
    ),
}
"""Key of verl -> conversion to keys of `Config`."""


def _of_trained(*names: str) -> tuple[str, ...]:
    """Return the keys of every trained model; those that begin with `model.` are in the section of its folder."""
    return tuple(
        f"{model}.{name.removeprefix('model.')}" if name.startswith("model.") else f"{section}.{name}"
        for section, model in TRAINED.items() for name in names
    )


ENTROPY = ("entropy_checkpointing", "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size")

ACCEPTED: dict[str, tuple[str, ...]] = {
    "sequences are always packed, without padding": _of_trained(
        "model.use_remove_padding", "use_remove_padding", "pad_to_length", "fsdp_config.pad_to_length*"
    ),
    "log-probabilities and entropy are always computed by a fused head in chunks, without the logits of a sequence": (
        *_of_trained("model.use_fused_kernels", "use_fused_kernels", "model.fused_kernel_options.*", "model.use_liger"),
        f"{ARR}.actor.calculate_entropy", "distillation.use_chunked_topk", "distillation.chunked_topk_chunk_size",
        *(f"{ARR}.{section}{name}" for section in ("actor.", "ref.", "actor.fsdp_config.") for name in ENTROPY),
    ),
    f"log-probabilities are computed in the micro-batches of the update ({ARR}.actor.use_dynamic_bsz)": tuple(
        f"{ARR}.{role}.log_prob_{name}" for role in ("rollout", "ref")
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    ),
    "gradients are on the GPU only during an update, and FSDP2's gathered parameters are part of the memory plan": (
        _of_trained(
            "fsdp_config.grad_offload", "fsdp_config.offload_policy", "fsdp_config.forward_prefetch",
            "fsdp_config.use_orig_params", "fsdp_config.wrap_policy.*", "fsdp_config.strategy",
            "fsdp_config.use_torch_compile", "model.enable_activation_offload",
        )
    ),
    "a worker has whole sequences, without sequence parallelism": ("*.ulysses_sequence_parallel_size",),
    "the critic's values are computed in the micro-batches of its update, from token ids": (
        "critic.forward_*", "critic.model.tokenizer_path", "critic.rollout_n",
    ),
    "a critic is saved with the student": ("critic.checkpoint.contents", "critic.checkpoint.save_contents"),
    "the reference policy is sharded and computed like the student, and offloaded between its passes": (
        f"{ARR}.ref.fsdp_config.*", f"{ARR}.ref.param_offload", f"{ARR}.ref.strategy", f"{ARR}.ref.use_torch_compile",
    ),
    "the training workers compute the reward model, sharded, and offload it between its passes": (
        "reward_model.model.fsdp_config.*", "reward_model.param_offload", "reward_model.model.use_*",
        "reward_model.rollout.*", *(f"reward_model.{name}" for name in ("enable_resource_pool", "n_gpus_*", "nnodes")),
    ),
    "a reward model's micro-batches are limited by reward_model.forward_max_token_len_per_gpu": (
        "reward_model.micro_batch_size*", "reward_model.use_dynamic_bsz",
    ),
    "texts are tokenized again if the reward model's tokenizer or chat template differs from the student's": (
        "reward_model.model.input_tokenizer",
    ),
    "the rollout engine gets the student's weights before its first step, parameter by parameter": (
        f"{ARR}.rollout.load_format", f"{ARR}.rollout.layered_summon", f"{ARR}.rollout.checkpoint_engine.*",
        f"{ARR}.rollout.multi_stage_wake_up",
    ),
    "files are read in place": ("data.use_shm", *_of_trained("model.use_shm")),
    "generation has one mode: requests to the engine in the worker's process": (
        f"{ARR}.rollout.mode", f"{ARR}.rollout.agent.num_workers", f"{ARR}.rollout.micro_batch_size",
        f"{ARR}.rollout.disable_log_stats", f"{ARR}.rollout.skip_tokenizer_init", f"{ARR}.rollout.calculate_log_probs",
    ),
    "the engine gets weights with merged adapters": (f"{ARR}.model.lora.merge",),
    "vLLM's scheduling and caching do not change responses; engine_kwargs.vllm sets its arguments": (
        f"{ARR}.rollout.enable_chunked_prefill", f"{ARR}.rollout.enable_prefix_caching",
        f"{ARR}.rollout.scheduling_policy",
    ),
    "for another engine than vLLM": (f"{ARR}.rollout.engine_kwargs.sglang.*", f"{ARR}.rollout.engine_kwargs.trtllm.*"),
    "prompts are read and tokenized once, before the first step": (
        "data.return_*", "data.dataloader_num_workers", "data.filter_overlong_prompts_workers",
    ),
    "validation generates for all prompts at once and does not depend on their order": (
        "data.val_batch_size", "data.validation_shuffle",
    ),
    "the schedule is as long as the run": _of_trained("optim.total_training_steps"),
    "random orders depend on data.seed and actor_rollout_ref.rollout.seed": _of_trained(
        "data_loader_seed", "fsdp_config.seed"
    ),
    "checkpoints are written in the background if hosts have the memory": _of_trained("checkpoint.async_save"),
    "a checkpoint is loaded completely, after its files are verified": _of_trained("checkpoint.load_contents"),
    "the local teacher service configures its scoring; distillation.temperature is for student and teacher": tuple(
        f"distillation.teacher_model{name}" for name in (".inference.*", ".key", "s.*.inference.*")
    ),
    "a local teacher uses GPUs that no worker needs, or shares the workers'": (
        "distillation.n_gpus_per_node", "distillation.nnodes", "distillation.teacher_model.n_gpus_per_node",
        "distillation.teacher_model.nnodes", "distillation.teacher_model.enable_resource_pool",
        "distillation.num_workers",
    ),
    "rewards are computed during generation, and are in the metrics": (
        "reward_model.launch_reward_fn_async", "reward_model.overlong_buffer.log",
        "reward_model.reward_kwargs.overlong_buffer_cfg.log",
    ),
    "a run writes to its folder: generations.jsonl, metrics.jsonl, trace.json": (
        "trainer.rollout_data_dir", "trainer.validation_data_dir", "ray_kwargs.timeline_json_file",
        "ray_init.timeline_json_file",
    ),
    "a checkpoint has all models, and trainer.max_actor_ckpt_to_keep counts it": ("trainer.max_critic_ckpt_to_keep",),
    "there is one implementation of the workers": ("trainer.use_legacy_worker_impl", "trainer.use_v1"),
    "timeouts have other keys (docs/architecture.md)": ("trainer.ray_wait_register_center_timeout",),
    "trainer.grace_period is the time to end a run": ("trainer.esi_redundant_time",),
    "Ray counts the GPUs, and its workers run in this program's Python": (
        "ray_init.num_gpus", "ray_init.runtime_env.*",
    ),
    "only used with a disabled feature": (
        *_of_trained("profiler.*", "qat.*", "fsdp_config.qat.*", "model.mtp.*", "model.tiled_mlp.*"),
        f"{ARR}.rollout.multi_turn.*", f"{ARR}.rollout.trace.*", f"{ARR}.rollout.profiler.*", f"{ARR}.ref.profiler.*",
        f"{ARR}.actor.router_replay.*", "global_profiler.*", "transfer_queue.*", "skip.*", "trainer.v1.*",
        "algorithm.pf_ppo.*", "reward_model.use_reward_loop", "reward_model.profiler.*",
        "reward_model.sandbox_fusion.max_concurrent", "reward_model.sandbox_fusion.memory_limit_mb",
    ),
    "for Hydra": ("hydra.*",),
}
"""Reason -> keys of verl without effect here, for any value."""

NOTHING = (None, False, "", 0, -1)
FSDP2_ALONE = "models are trained with FSDP2 only"
ADAMW = "the optimizer is torch's AdamW"
PROFILER = "trainer.profile_steps runs torch's profiler"
LANGUAGE_ONLY = "prompts are text only: images and sound would be lost"
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    **{
        key: only for names, only in {
            ("strategy",): (("fsdp", "fsdp2"), FSDP2_ALONE),
            ("fsdp_config.dtype", "fsdp_config.mixed_precision.param_dtype", "model.torch_dtype"): (
                ("bfloat16", "bf16"), "the compute type is bfloat16 on GPUs"
            ),
            ("fsdp_config.mixed_precision.*",): (("float32", "fp32"), "gradients are reduced in float32"),
            ("optim.optimizer",): (("AdamW",), ADAMW),
            ("optim.optimizer_impl",): (("torch.optim",), ADAMW),
            ("optim.override_optimizer_config",): (NOTHING, ADAMW),
            ("optim.num_cycles",): ((0.5,), "cosine falls once, to min_lr_ratio"),
            ("optim.zero_indexed_step",): ((True,), "the first step of a warm-up has a rate above 0"),
            ("shuffle",): (NOTHING, "mini-batches have the order of the batch, see data.shuffle"),
            ("model.external_lib",): (NOTHING, "no module is imported; trust_remote_code runs code of the folder"),
            ("model.hf_config_path",): (NOTHING, "the configuration is that of the model's folder"),
            ("qat.enable", "fsdp_config.qat.enable"): (NOTHING, "weights are not quantized"),
            ("profiler.enable",): (NOTHING, PROFILER),
            ("model.mtp.enable",): (NOTHING, "multi-token prediction layers are not trained"),
            ("model.tiled_mlp.enabled",): (NOTHING, "the MLP is not tiled"),
        }.items() for key in _of_trained(*names)
    },
    f"{ARR}.actor.router_replay.mode": (("disabled",), "routing is not recorded"),
    f"{ARR}.model.custom_chat_template": (NOTHING, "the template is that of the tokenizer: set tokenizer_path"),
    f"{ARR}.rollout.ignore_eos": (NOTHING, "a response ends with the end-of-sequence token"),
    f"{ARR}.rollout.do_sample": ((True,), "training needs samples of the student's distribution"),
    f"{ARR}.rollout.logprobs_mode": (("processed_logprobs",), "log-probabilities are those of the sampled policy"),
    f"{ARR}.rollout.data_parallel_size": ((1, None), "every group of tensor_model_parallel_size workers is one engine"),
    f"{ARR}.rollout.expert_parallel_size": ((1, None), "engine_kwargs.vllm.enable_expert_parallel=true is vLLM's key"),
    f"{ARR}.rollout.pipeline_model_parallel_size": ((1, None), "an engine supports tensor_model_parallel_size only"),
    f"{ARR}.rollout.cudagraph_capture_sizes": (NOTHING, "engine_kwargs.vllm.compilation_config is vLLM's key"),
    f"{ARR}.rollout.quantization*": (NOTHING, "the engine has the student's own weights"),
    f"{ARR}.rollout.over_sample_rate": (NOTHING, "every started response is trained on"),
    f"{ARR}.rollout.enable_rollout_routing_replay": (NOTHING, "routing is not recorded"),
    f"{ARR}.rollout.nnodes": (NOTHING, f"{ARR}.hybrid_engine=false with rollout.nnodes gives the engine its own pool"),
    f"{ARR}.rollout.multi_turn.enable": (NOTHING, "a response is one turn"),
    f"{ARR}.rollout.trace.backend": (NOTHING, "trace.json has the spans of every run"),
    f"{ARR}.rollout.agent.default_agent_loop": (("single_turn_agent", None), "a response is one turn"),
    f"{ARR}.rollout.agent.agent_loop_config_path": (NOTHING, "a response is one turn"),
    f"{CORRECTION}.bypass_mode": (NOTHING, "ratios are relative to the student's recomputed log-probabilities"),
    f"{CORRECTION}.loss_type": (("ppo_clip",), "is for the bypass mode"),
    "critic.enable": ((None,), "there is a critic if algorithm.adv_estimator needs one"),
    "critic.model.lora_rank": (NOTHING, "all weights of the critic are trained"),
    "algorithm.use_pf_ppo": (NOTHING, "samples are not reweighted"),
    "data.image_key": (NOTHING, LANGUAGE_ONLY),
    "data.video_key": (NOTHING, LANGUAGE_ONLY),
    "data.audio_key": (NOTHING, LANGUAGE_ONLY),
    "data.custom_cls.*": (NOTHING, "prompts are files of rows: see data.train_files"),
    "data.sampler.*": (NOTHING, "the order is set by data.shuffle"),
    "data.train_max_samples": (NOTHING, "all rows are used: shorten the file"),
    "data.val_max_samples": (NOTHING, "all rows are used: shorten the file"),
    "distillation.policy_loss_mode": (("vanilla",), "the policy gradient is PPO's clipped loss"),
    "global_profiler.tool": (NOTHING, PROFILER),
    "global_profiler.steps": (NOTHING, PROFILER),
    "model_engine": (("dp", "fsdp"), FSDP2_ALONE),
    "reward_model.strategy": (("fsdp", "fsdp2"), "models are sharded with FSDP2 only"),
    **{
        f"reward_model.reward_manager{name}": (
            ("naive", "batch", "prime", "dapo"), "rewards are computed in separate processes; reward.custom_reward_"
            "function is your own function"
        ) for name in ("", ".name")
    },
    "reward_model.sandbox_fusion.url": (NOTHING, "no code is run for a reward; a custom function may run it"),
    "skip.*.enable": (NOTHING, "rollouts are not reused by later runs"),
    "trainer.default_hdfs_dir": (NOTHING, "checkpoints are written to trainer.default_local_dir"),
    "trainer.del_local_ckpt_after_load": (NOTHING, "trainer.max_actor_ckpt_to_keep removes old checkpoints"),
    "trainer.v1.trainer_mode": (("sync",), "trainer.scheduler lets generation run ahead of the update"),
    "transfer_queue.enable": (NOTHING, "sequences are transferred through Ray"),
}
"""Key of verl -> its values that match the behaviour here, and the message for any other value."""

REFUSED: dict[str, str] = {
    f"{section}.{engine}.*": FSDP2_ALONE
    for section in (f"{ARR}.*", "critic", "reward_model") for engine in ("megatron", "veomni")
}
"""Key of verl -> reason why it is rejected, for any value."""

TABLES: tuple[Mapping[str, Any], ...] = (
    VALUES, RENAMED, ONLY, REFUSED, {key: reason for reason, keys in ACCEPTED.items() for key in keys}
)
"""Tables in the order of lookup."""

"""Suggest keys of `Config` for unknown ones. Does not import torch."""

from __future__ import annotations

from hybrid_gkd.compat.verl.readings import ARR
from hybrid_gkd.config.spelling import key_types

OTHER_NAMES = {
    name: key for key, names in {
        f"{ARR}.model.path": "model_name_or_path model_name model",
        f"{ARR}.model.enable_gradient_checkpointing": "gradient_checkpointing activation_checkpointing",
        f"{ARR}.teacher.model.path": "teacher_model_name_or_path teacher.model_name teacher_model",
        f"{ARR}.actor.grad_clip": "max_grad_norm",
        f"{ARR}.actor.optim.lr": "learning_rate",
        f"{ARR}.actor.optim.lr_warmup_steps": "warmup_steps",
        f"{ARR}.actor.optim.lr_warmup_steps_ratio": "warmup_ratio",
        f"{ARR}.actor.ppo_mini_batch_size": "gradient_accumulation_steps train_global_batch_size",
        f"{ARR}.rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
        f"{ARR}.rollout.n": "num_generations num_generations_per_prompt",
        "data.max_response_length": "max_completion_length max_new_tokens max_tokens",
        "data.train_batch_size": "per_device_train_batch_size num_prompts_per_step batch_size rollout_batch_size",
        "data.train_files": "dataset dataset_name data.path",
        "data.val_files": "val_dataset eval_dataset",
        "distillation.loss_mode": "kl_type",
        "distillation.on_policy_fraction": "lmbda",
        "trainer.default_local_dir": "output_dir",
        "trainer.experiment_name": "run_name",
        "trainer.logger": "report_to",
        "trainer.nnodes": "num_nodes",
        "trainer.project_name": "project wandb_project",
        "trainer.resume_from_path": "resume_from_checkpoint",
        "trainer.save_freq": "save_steps",
        "trainer.test_freq": "eval_steps val_period",
        "trainer.total_epochs": "num_train_epochs num_epochs max_num_epochs",
        "trainer.total_training_steps": "max_steps max_num_steps",
    }.items() for name in names.split()
}  # fmt: skip
"""Name of a key in TRL, NeMo-RL or ms-swift -> the closest key of `Config`."""
MAX_KEYS = 3
"""Maximum number of keys in a suggestion: more are the same name for different things, such as path."""


def suggestion(unknown: str, sibling: str | None = None) -> str:
    """Return a note on keys that an unknown one may stand for, to be appended to a message; empty if there are none.

    `sibling` is a similar key of its section.
    """
    key, keys = unknown.replace("-", "_"), [key for key in key_types() if "*" not in key]
    section, _, name = key.rpartition(".")
    other = OTHER_NAMES.get(key) or OTHER_NAMES.get(name) or sibling
    found = (
        [each for each in keys if each == f"{ARR}.{key}"] or [each for each in keys if each.endswith(f".{key}")]
        or ([other] if other else [each for each in keys if each.rpartition(".")[2] == name])
        or [each for each in keys if each.rpartition(".")[0] == section and name in each.rpartition(".")[2]]
    )  # fmt: skip
    found.sort(key=lambda each: (each.partition(".")[0] != key.partition(".")[0], each.count(".")))
    return f" (did you mean {' or '.join(found)}?)" if 0 < len(found) <= MAX_KEYS else ""

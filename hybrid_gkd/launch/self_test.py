"""Self-test of the training signal: with the student as its own teacher the divergence must be 0, within rounding.

Two packings of the same sequences are compared at every start, when a worker loads the student: `check_packing`.
"""

from __future__ import annotations

import contextlib
import copy

from hybrid_gkd.config import AlgorithmConfig, Config, DistillationConfig, RewardConfig, RewardModelConfig
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.launch.run import Assembly
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.models.adapters import adapter_config
from hybrid_gkd.runtime.processes import temporary_folder

PROMPTS, TOKENS = 8, 64
"""Maximum number of prompts of the step, and of tokens per completion."""
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}
"""Largest divergence by device, nats per token: about the square of the rounding errors of float16 scores and, on
GPUs, of bfloat16 logits."""


def self_test(facts: Facts) -> str:
    """Take one training step with the student as its teacher, in a temporary folder.

    Raises TrainingError if the divergence is too large, and the errors of a run.
    """
    with temporary_folder("hybrid_gkd_self_test_") as folder, contextlib.ExitStack() as stack:
        own = check_all(self_test_config(facts.config, str(folder)))
        own.config.run_dir.mkdir(parents=True)
        trainer = Assembly(own, stack, Stopping()).build(own, stack)
        trainer.fit()
        found = trainer.first_metrics["actor/kl_loss"]
    tolerance = TOLERANCE[own.device]
    if not found <= tolerance:
        raise TrainingError(
            f"self-test: the student as its own teacher has a divergence of {found:.2g} nats per token, must be at "
            f"most {tolerance:g}: teacher and student compute different distributions; check the teacher's engine, "
            "both dtypes, actor_rollout_ref.model.override_config, and whether the model is supported"
        )
    return f"the student as its own teacher has a divergence of {found:.2g} nats per token, below {tolerance:g}"


def self_test_config(config: Config, folder: str) -> Config:
    """Return the configuration of the test, with the models, workers and engines of the run."""
    config = copy.deepcopy(config)
    arr, trainer, data = config.actor_rollout_ref, config.trainer, config.data
    arr.teacher.server_ip = arr.teacher.server_port = arr.teacher.keys = arr.teacher.chat_template = None
    arr.teacher.source, arr.teacher.cache = "model", None
    data.teacher_prompt_key = data.max_teacher_prompt_length = None
    arr.teacher.model.path, arr.teacher.model.lora_adapter_path, arr.teacher.adapter = arr.model.path, None, None
    if arr.model.lora_adapter_path is not None:  # new adapters of the same shape: the teacher is the base model
        own, arr.model.lora_adapter_path = adapter_config(arr.model), None
        arr.model.lora_rank, arr.model.lora_alpha = own.r, own.lora_alpha
        targets, excluded = own.target_modules, own.exclude_modules
        arr.model.target_modules = targets if isinstance(targets, str) else sorted(targets)
        arr.model.exclude_modules = sorted(excluded) if isinstance(excluded, set) else excluded
    data.train_batch_size, data.gen_batch_size, data.val_files = min(PROMPTS, data.train_batch_size), None, []
    arr.actor.ppo_mini_batch_size, arr.actor.ppo_epochs, arr.rollout.n = data.train_batch_size, 1, 1
    data.max_response_length = min(TOKENS, data.max_response_length)
    config.distillation = DistillationConfig(topk=config.distillation.topk)
    config.reward, config.reward_model = RewardConfig(), RewardModelConfig()
    config.algorithm = AlgorithmConfig()
    trainer.scheduler, trainer.total_training_steps, trainer.logger = "sync", 1, []
    trainer.save_freq = trainer.test_freq = trainer.max_restarts = trainer.snapshot_freq = 0
    trainer.resume_mode, trainer.resume_from_path, trainer.val_before_train = "disable", None, False
    trainer.default_local_dir = folder
    return config

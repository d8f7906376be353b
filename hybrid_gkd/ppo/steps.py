"""How many steps a run has, and which prompts and seeds each of them takes."""

from __future__ import annotations

import math

import numpy as np

from hybrid_gkd.config import ActorConfig, Config, CriticConfig
from hybrid_gkd.data.sampler import PromptSampler


def make_sampler(config: Config, num_prompts: int) -> PromptSampler:
    """The order of the training prompts, in generation batches. Raises DataError if they do not fill one."""
    data, key = config.data, "data.train_batch_size" if config.data.gen_batch_size is None else "data.gen_batch_size"
    return PromptSampler(num_prompts, data.gen_batch_size or data.train_batch_size, data.shuffle, data.seed, key)


def total_steps(config: Config, num_prompts: int) -> int:
    """Training steps of the whole run, all of them with a full batch; 0 with `trainer.val_only`."""
    if config.trainer.val_only:
        return 0
    full, _ = make_sampler(config, num_prompts).num_steps(config.trainer.total_epochs)
    return config.trainer.total_training_steps or full


def num_updates(config: Config, steps: int) -> int:
    """Optimizer steps of the actor in `steps` training steps."""
    return steps * _updates_per_step(config, config.actor_rollout_ref.actor)


def num_critic_updates(config: Config, steps: int) -> int:
    """Optimizer steps of the critic in `steps` training steps; 0 without one."""
    return steps * _updates_per_step(config, config.resolved_critic) if config.uses_critic else 0


def _updates_per_step(config: Config, section: ActorConfig | CriticConfig) -> int:
    prompts = config.data.train_batch_size
    return -(-prompts // (section.ppo_mini_batch_size or prompts)) * (section.ppo_epochs or 1)


def distillation_factor(config: Config, step: int, num_steps: int) -> float:
    """Of `distillation_loss_coef` at a step (1-based) of so many: 1 at the first, towards 0 after the last."""
    kind, share = config.distillation.distillation_loss_coef_schedule, (step - 1) / num_steps
    return {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[kind]


def request_seeds(seed: int, number: int, count: int) -> list[int]:
    """One 31-bit seed per sequence of a generation batch, the same on every run."""
    return (np.random.SeedSequence([seed, number]).generate_state(count) >> 1).tolist()

"""How many steps a run has, and which prompts and seeds each of them takes."""

from __future__ import annotations

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.data.sampler import PromptSampler


def make_sampler(config: Config, num_prompts: int) -> PromptSampler:
    """The order of the training prompts. Raises DataError if they do not fill one batch."""
    data = config.data
    return PromptSampler(num_prompts, data.train_batch_size, data.shuffle, data.seed)


def total_steps(config: Config, num_prompts: int) -> int:
    """Training steps of the whole run, all of them with a full batch; 0 with `trainer.val_only`."""
    if config.trainer.val_only:
        return 0
    full, _ = make_sampler(config, num_prompts).num_steps(config.trainer.total_epochs)
    return config.trainer.total_training_steps or full


def num_updates(config: Config, steps: int) -> int:
    """Optimizer steps in `steps` training steps."""
    per_epoch = -(-config.data.train_batch_size // config.mini_batch_size)
    return steps * per_epoch * config.actor_rollout_ref.actor.ppo_epochs


def request_seeds(seed: int, step: int, count: int) -> list[int]:
    """One 31-bit seed per sequence of a step, the same on every run."""
    return (np.random.SeedSequence([seed, step]).generate_state(count) >> 1).tolist()

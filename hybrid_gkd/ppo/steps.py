"""Number of steps of a run, and the prompts, seeds and limits of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from hybrid_gkd.config import Config, DataConfig, updates_per_step
from hybrid_gkd.data.sampler import PromptSampler
from hybrid_gkd.types import Task


def make_sampler(data: DataConfig, tasks: Sequence[Task]) -> PromptSampler:
    """Return the sampler of generation batches. Raises DataError: the training prompts do not fill one batch."""
    key = "data.train_batch_size" if data.gen_batch_size is None else "data.gen_batch_size"
    entries = itertools.groupby(tasks, key=lambda task: (task.entry, task.weight))
    parts = [(len(list(own)), weight) for (_, weight), own in entries]
    return PromptSampler(parts, data.gen_batch_size or data.train_batch_size, data.shuffle, data.seed, key)


def total_steps(config: Config, tasks: Sequence[Task]) -> int:
    """Return the number of training steps of the run, each with a full batch; 0 with `trainer.val_only`."""
    if config.trainer.val_only:
        return 0
    full, _ = make_sampler(config.data, tasks).num_steps(config.trainer.total_epochs)
    return config.trainer.total_training_steps or full


def optimizer_steps(config: Config, steps: int) -> dict[str, int]:
    """Return the optimizer steps of actor and critic in a run of `steps` training steps."""
    prompts, trained = config.data.train_batch_size, max(0, steps - config.trainer.critic_warmup)
    return {
        "actor": trained * updates_per_step(prompts, config.actor_rollout_ref.actor),
        "critic": steps * updates_per_step(prompts, config.resolved_critic),
    }


def drawn_rows(tasks: Sequence[Task], fraction: float, *, seed: int, number: int) -> frozenset[int]:
    """Return the rows of a generation batch that the student completes.

    They are the rows without a given completion and a fraction of the others, rounded up or down at random. The result
    depends on seed and batch number alone, so that a resumed run reproduces it.
    """
    given = [task.index for task in tasks if task.response_ids is not None]
    drawn = {task.index for task in tasks} - set(given)
    random = np.random.default_rng([seed, number, len(given)])
    count = int(fraction * len(given) + random.random())
    return frozenset(drawn.union(random.permutation(given)[:count].tolist()))


def response_limit(data: DataConfig, step: int) -> int:
    """Return the maximum number of generated tokens at a training step."""
    begun = [limit for first, limit in data.max_response_length_schedule.items() if first <= step]
    return max(begun, default=data.max_response_length)


def distillation_factor(schedule: str, step: int, num_steps: int) -> float:
    """Return the factor of `distillation_loss_coef` at a step (1-based): 1 at the first, 0 after the last."""
    done = (step - 1) / num_steps
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


def request_seeds(seed: int, number: int, count: int) -> list[int]:
    """Return one 31-bit seed per sample of a generation batch, the same in every run."""
    return (np.random.SeedSequence([seed, number]).generate_state(count) >> 1).tolist()

"""How many steps a run has, and which prompts and seeds each of them takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from hybrid_gkd.config import Config, DataConfig
from hybrid_gkd.data.sampler import PromptSampler
from hybrid_gkd.types import Task


def make_sampler(data: DataConfig, tasks: Sequence[Task]) -> PromptSampler:
    """The order of the training prompts, in generation batches. Raises DataError if they do not fill one."""
    key = "data.train_batch_size" if data.gen_batch_size is None else "data.gen_batch_size"
    files = itertools.groupby(tasks, key=lambda task: (task.file, task.weight))
    parts = [(len(list(own)), weight) for (_, weight), own in files]
    return PromptSampler(parts, data.gen_batch_size or data.train_batch_size, data.shuffle, data.seed, key)


def total_steps(config: Config, tasks: Sequence[Task]) -> int:
    """Training steps of the whole run, all of them with a full batch; 0 with `trainer.val_only`."""
    if config.trainer.val_only:
        return 0
    full, _ = make_sampler(config.data, tasks).num_steps(config.trainer.total_epochs)
    return config.trainer.total_training_steps or full


def drawn_rows(tasks: Sequence[Task], fraction: float, *, seed: int, number: int) -> frozenset[int]:
    """Rows of a generation batch that the student answers: those without a given answer, and a share of the others.

    The share is exact but for a part of a task, which is drawn. A function of seed and batch number alone, so that a
    resumed run continues exactly.
    """
    given = [task.index for task in tasks if task.response_ids is not None]
    drawn = {task.index for task in tasks} - set(given)
    random = np.random.default_rng([seed, number, len(given)])
    count = int(fraction * len(given) + random.random())
    return frozenset(drawn.union(random.permutation(given)[:count].tolist()))


def response_limit(data: DataConfig, step: int) -> int:
    """Tokens that the student may generate for a training step."""
    begun = [limit for first, limit in data.max_response_length_schedule.items() if first <= step]
    return max(begun, default=data.max_response_length)


def distillation_factor(schedule: str, step: int, num_steps: int) -> float:
    """Of `distillation_loss_coef` at a step (1-based) of so many: 1 at the first, towards 0 after the last."""
    share = (step - 1) / num_steps
    return {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[schedule]


def request_seeds(seed: int, number: int, count: int) -> list[int]:
    """One 31-bit seed per sequence of a generation batch, the same on every run."""
    return (np.random.SeedSequence([seed, number]).generate_state(count) >> 1).tolist()

"""Which prompts a training step uses: a function of the step alone, so that a resumed run continues exactly."""

from __future__ import annotations

import numpy as np

from hybrid_gkd.errors import DataError


class PromptSampler:
    """Batches of prompt indexes.

    An epoch is one permutation drawn from (seed, epoch). Its incomplete last batch is left out: the next epoch shuffles
    anew, so none is left out for good (without shuffling, the same last `num_prompts % batch_size` prompts are).
    """

    def __init__(self, num_prompts: int, batch_size: int, shuffle: bool, seed: int):
        if num_prompts < batch_size:
            raise DataError(
                f"data.train_batch_size: must be at most the number of prompts ({num_prompts}); got {batch_size}"
            )
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return self.num_prompts // self.batch_size

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Epoch (0-based) and int64 [batch_size] prompt indexes of a step (1-based)."""
        assert step >= 1, step
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        order = np.arange(self.num_prompts)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
        return epoch, order[position * self.batch_size : (position + 1) * self.batch_size]

"""Which prompts a batch has: a function of its number alone, so that a resumed run continues exactly."""

from __future__ import annotations

import numpy as np

from hybrid_gkd.errors import DataError


class PromptSampler:
    """Batches of prompt indexes.

    An epoch is one permutation drawn from (seed, epoch). Epochs follow each other without a gap: the prompts that are
    left over at the end of one begin the first batch of the next, which then takes others than these to fill it.
    """

    def __init__(
        self, num_prompts: int, batch_size: int, shuffle: bool, seed: int, key: str = "data.train_batch_size"
    ):
        """`key` of the configuration sets the batch size. Raises DataError: there are fewer prompts."""
        if num_prompts < batch_size:
            raise DataError(f"{key}: must be at most the number of prompts ({num_prompts}); got {batch_size}")
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._epoch, self._order = 0, self._draw(0)
        """The latest epoch that was asked for, and its order."""

    def num_steps(self, epochs: int) -> tuple[int, int]:
        """Full batches in so many epochs, and the prompts left over behind them."""
        return divmod(epochs * self.num_prompts, self.batch_size)

    def batch(self, number: int) -> tuple[int, np.ndarray]:
        """Epoch (0-based) of its first prompt, and int64 [batch_size] prompt indexes of a batch (1-based)."""
        assert number >= 1, number
        epoch, start = divmod((number - 1) * self.batch_size, self.num_prompts)
        found = self._order_of(epoch)[start : start + self.batch_size]
        missing = self.batch_size - len(found)
        if missing:
            found = np.concatenate([found, self._order_of(epoch + 1)[:missing]])
        return epoch, found

    def _order_of(self, epoch: int) -> np.ndarray:
        """An epoch's order follows from the one before it."""
        if epoch < self._epoch:
            self._epoch, self._order = 0, self._draw(0)
        while self._epoch < epoch:
            self._epoch += 1
            left = self._epoch * self.num_prompts % self.batch_size
            self._order = self._after(self._order[self.num_prompts - left :], self._draw(self._epoch))
        return self._order

    def _after(self, left: np.ndarray, order: np.ndarray) -> np.ndarray:
        """`order` behind the prompts `left` of the epoch before: they are not in what fills their batch."""
        if not len(left):
            return order
        fresh = np.flatnonzero(~np.isin(order, left))[: self.batch_size - len(left)]
        return np.concatenate([order[fresh], np.delete(order, fresh)])

    def _draw(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_prompts)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)

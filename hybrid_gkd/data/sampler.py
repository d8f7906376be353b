"""Which prompts a batch has: a function of its number alone, so that a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_gkd.errors import DataError


class PromptSampler:
    """Batches of prompt indexes.

    An epoch is one permutation drawn from (seed, epoch). Epochs follow each other without a gap: the prompts that are
    left over at the end of one begin the first batch of the next, which then takes others than these to fill it.

    Prompts may be in parts, of which an epoch takes a share each: an epoch is then a permutation of what is next in
    each part, whose own order is made in the same way.
    """

    def __init__(
        self, parts: int | Sequence[tuple[int, float]], batch_size: int, shuffle: bool, seed: int,
        key: str = "data.train_batch_size",
    ):  # fmt: skip
        """`parts`: the number of prompts, or the numbers and shares of parts of them, shares from above 0 to 1.

        `key` of the configuration sets the batch size. Raises DataError: an epoch has fewer prompts.
        """
        parts = [(parts, 1.0)] if isinstance(parts, int) else list(parts)
        taken = [max(1, round(number * share)) for number, share in parts]
        num_prompts = sum(taken)
        if num_prompts < batch_size:
            raise DataError(f"{key}: must be at most the number of prompts ({num_prompts}); got {batch_size}")
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._parts: list[tuple[int, PromptSampler]] = []
        """Index of the first prompt of each part, and its order, whose batches are what an epoch takes."""
        if any(share != 1 for _, share in parts):
            starts = np.cumsum([0, *(number for number, _ in parts)]).tolist()
            self._parts = [
                (start, PromptSampler(number, count, shuffle, seed + 1 + place))
                for place, (start, (number, _), count) in enumerate(zip(starts[:-1], parts, taken, strict=True))
            ]
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
        rows = np.arange(self.num_prompts)
        if self._parts:
            rows = np.concatenate([start + part.batch(epoch + 1)[1] for start, part in self._parts])
        return np.random.default_rng([self.seed, epoch]).permutation(rows) if self.shuffle else rows

"""Prompts of a batch, as a function of its number, so that a resumed run continues exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_gkd.errors import DataError


class PromptSampler:
    """Batches of prompt indices.

    An epoch is one permutation drawn from (seed, epoch). Prompts left over at the end of an epoch begin the first batch
    of the next one, which is filled with other prompts. If prompts are in parts with a weight each, an epoch is a
    permutation of the next prompts of each part, whose own order is drawn in the same way.
    """

    def __init__(
        self, parts: int | Sequence[tuple[int, float]], batch_size: int, shuffle: bool, seed: int,
        key: str = "data.train_batch_size",
    ):  # fmt: skip
        """Draw the first epoch.

        `parts`: the number of prompts, or numbers and fractions per epoch of parts of them, above 0 and at most 1.
        `key`: configuration key of the batch size. Raises DataError: an epoch has fewer prompts.
        """
        parts = [(parts, 1.0)] if isinstance(parts, int) else list(parts)
        taken = [max(1, round(number * share)) for number, share in parts]
        num_prompts = sum(taken)
        if num_prompts < batch_size:
            total = sum(number for number, _ in parts)
            by_weight = "" if num_prompts == total else f" of {total} in an epoch, by the weights of data.train_files"
            rule = f"must be at most the number of prompts ({num_prompts}{by_weight})"
            raise DataError(f"{key}: {rule}; got {batch_size}")
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._parts: list[tuple[int, PromptSampler]] = []
        """Index of the first prompt of each part, and the part's sampler, whose batches are those of epochs."""
        if any(share != 1 for _, share in parts):
            starts = np.cumsum([0, *(number for number, _ in parts)]).tolist()
            self._parts = [
                (start, PromptSampler(number, count, shuffle, seed + 1 + place))
                for place, (start, (number, _), count) in enumerate(zip(starts[:-1], parts, taken, strict=True))
            ]
        self._epoch, self._order = 0, self._draw(0)
        """Latest requested epoch, and its order."""

    def num_steps(self, epochs: int) -> tuple[int, int]:
        """Return the full batches of the given epochs, and the number of prompts left over."""
        return divmod(epochs * self.num_prompts, self.batch_size)

    def batch(self, number: int) -> tuple[int, np.ndarray]:
        """Return the epoch (0-based) of a batch's (1-based) first prompt, and prompt indices, int64 [batch_size]."""
        assert number >= 1, number
        epoch, start = divmod((number - 1) * self.batch_size, self.num_prompts)
        found = self._order_of(epoch)[start : start + self.batch_size]
        missing = self.batch_size - len(found)
        if missing:
            found = np.concatenate([found, self._order_of(epoch + 1)[:missing]])
        return epoch, found

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return an epoch's order, computed from the one before it."""
        if epoch < self._epoch:
            self._epoch, self._order = 0, self._draw(0)
        while self._epoch < epoch:
            self._epoch += 1
            left = self._epoch * self.num_prompts % self.batch_size
            self._order = self._after(self._order[self.num_prompts - left :], self._draw(self._epoch))
        return self._order

    def _after(self, left: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Return `order`, reordered such that the batch begun by prompts `left` of the last epoch has no duplicates."""
        if not len(left):
            return order
        fresh = np.flatnonzero(~np.isin(order, left))[: self.batch_size - len(left)]
        return np.concatenate([order[fresh], np.delete(order, fresh)])

    def _draw(self, epoch: int) -> np.ndarray:
        rows = np.arange(self.num_prompts)
        if self._parts:
            rows = np.concatenate([start + part.batch(epoch + 1)[1] for start, part in self._parts])
        return np.random.default_rng([self.seed, epoch]).permutation(rows) if self.shuffle else rows

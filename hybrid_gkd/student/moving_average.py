"""The exponential moving average of a model's trained parameters, as a teacher of the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hybrid_gkd.compat.torch import local_shard


class MovingAverage:
    """Moving average of this rank's parameter shards, in float32.

    It starts as a copy of them. Call `update` after each optimizer step.
    """

    def __init__(self, parameters: list[Tensor], decay: float):
        self._parameters, self.decay = parameters, decay
        self.tensors = [parameter.detach().to(torch.float32, copy=True) for parameter in parameters]
        """In the order of the parameters, with their shapes and placements."""

    def of(self, parameter: Tensor) -> Tensor:
        """Return the average of a parameter."""
        return next(own for each, own in zip(self._parameters, self.tensors, strict=True) if each is parameter)

    @torch.no_grad()
    def update(self) -> None:
        """Set each average to decay * average + (1 - decay) * parameter."""
        for own, parameter in self._local():
            own.lerp_(parameter.float(), 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the parameters the values of their averages within the context, and exactly their own ones afterwards.

        It takes the parameters' memory once more. Weights that are gathered at the time have to be freed before and
        after.
        """
        with torch.no_grad():
            kept = [parameter.clone() for _, parameter in self._local()]
            try:
                for own, parameter in self._local():
                    parameter.copy_(own)
                yield
            finally:
                for (_, parameter), value in zip(self._local(), kept, strict=True):
                    parameter.copy_(value)

    def _local(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's shards of each average and its parameter."""
        return [(local_shard(own), local_shard(each)) for own, each in zip(self.tensors, self._parameters, strict=True)]

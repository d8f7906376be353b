"""Published weights in a vLLM model that keeps them as they are: put there by its own loader once, then without it.

For each weight the loader finds out in Python where it belongs: 23 ms for the 290 of Qwen2.5-0.5B on a fast host, where
all copies take two. So the first time the places that `VLLMLayout` knows are compared with what the loader has done;
if they agree, later weights are copied there, many with one kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.rollout.verify import VLLMLayout, first_difference, refuse_unset

logger = logging.getLogger(__name__)


class InPlaceWeights:
    """Of a model for which `holds_plain_weights` is true.

    Args:
        bucket_bytes: weights of so many bytes are copied together.
    """

    def __init__(self, model: Any, *, bucket_bytes: int):
        self.model, self.bucket_bytes = model, bucket_bytes
        self._layout: VLLMLayout | None = None
        """Once it is known to be the loader's."""

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take full weights under all their names; raises WorkerError if one is missing that came the first time."""
        if self._layout is None:
            self.model.load_weights(self._compared(weights))
        else:
            self._copy(weights, self._layout)

    def _compared(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights for the loader; when it asks for the next one, it has put the one before in its place."""
        try:
            layout = VLLMLayout(self.model)
            different, names = None, set(layout.places)
        except ConfigError as error:
            different, names = str(error), set[str]()
        for name, full in weights:
            yield name, full
            names.discard(name)
            if different is None:
                try:
                    found = (first_difference(expected, held) for expected, held in layout.pairs(name, full))
                    different = next((f"{name}: {each}" for each in found if each is not None), None)
                except KeyError:
                    different = f"{name} is not where it was expected"
        if different is None and names:
            different = f"{sorted(names)[0]} is not published"
        if different is None:
            self._layout = layout
        else:
            logger.info("rollout engine: vLLM's loader takes the weights, each time: %s", different)

    def _copy(self, weights: Iterable[tuple[str, Tensor]], layout: VLLMLayout) -> None:
        names, written = set(layout.places), set[int]()
        sources, targets, size = list[Tensor](), list[Tensor](), 0
        for name, full in weights:
            names.discard(name)
            for expected, held in layout.pairs(name, full):
                if held.data_ptr() not in written:  # a tied weight comes under each of its names
                    written.add(held.data_ptr())
                    sources.append(expected)
                    targets.append(held)
                    size += held.nbytes
            if size >= self.bucket_bytes:
                torch._foreach_copy_(targets, sources)
                sources, targets, size = [], [], 0
        if targets:
            torch._foreach_copy_(targets, sources)
        if padding := layout.padding():
            torch._foreach_zero_(padding)
        refuse_unset(names)

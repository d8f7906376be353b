"""The divergences of `distillation.loss_mode`. A new one is a function in divergence.py and a row here.

The configuration checks, the objective and the table in docs/losses.md follow from it. Needs no torch: the functions
are imported when they are first used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_gkd.imports import load_object


@dataclass(frozen=True)
class Divergence:
    """One row: the function and its arguments."""

    import_path: str
    signal: Literal["topk", "sampled"]
    """topk: log-probabilities of the teacher's K candidates, [T, K]; sampled: of the sampled token, [T]."""
    options: tuple[str, ...] = ()
    """Keys of the section `distillation` that it takes as keyword arguments."""
    is_loss: bool = True
    """False: its expected gradient is 0, so that it teaches as a policy gradient only."""

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return load_object("distillation.loss_fn", self.import_path)


def user_divergence(import_path: str) -> Divergence:
    """The row of `distillation.loss_fn`."""
    return Divergence(import_path, "topk", ("tail",))


_HERE = "hybrid_gkd.losses.divergence"
DIVERGENCES: Mapping[str, Divergence] = {
    "forward_kl": Divergence(f"{_HERE}:forward_kl", "topk", ("tail",)),
    "reverse_kl": Divergence(f"{_HERE}:reverse_kl", "topk", ("tail",)),
    "jsd": Divergence(f"{_HERE}:jsd", "topk", ("tail", "beta")),
    "k1": Divergence(f"{_HERE}:k1", "sampled", is_loss=False),
    "k2": Divergence(f"{_HERE}:k2", "sampled"),
    "k3": Divergence(f"{_HERE}:k3", "sampled"),
}

"""Warnings about degenerating completions: truncation and repetition that increase quickly."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

import numpy as np

from hybrid_gkd.types import Sample

logger = logging.getLogger(__name__)

WATCHED = {
    "response_length/clip_ratio": "completions truncated at data.max_response_length",
    "response/repeated_fraction": "completion tokens repeated from earlier in the same completion",
}
"""Watched fractions of a rollout's completions or tokens, and their description in the warning."""
WINDOW, AVERAGED, FLOOR = 20, 5, 0.05
"""Steps within which a fraction must double, steps averaged at either end, and smallest fraction warned about."""
RUN = 8
"""Length in tokens of a repeated sequence that counts as a repetition."""


class Guards:
    """Warns, at most once in `WINDOW` steps, about a fraction that has doubled within them."""

    def __init__(self) -> None:
        self.recent = {name: deque[float](maxlen=WINDOW) for name in WATCHED}
        self.warned: dict[str, int] = {}
        """Step of the last warning by metric."""

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step and warn if necessary."""
        for name in WATCHED.keys() & metrics.keys():
            recent = self.recent[name]
            recent.append(metrics[name])
            if len(recent) < 2 * AVERAGED or step - self.warned.get(name, -WINDOW) < WINDOW:
                continue
            values = list(recent)
            before, now = float(np.mean(values[:AVERAGED])), float(np.mean(values[-AVERAGED:]))
            if now >= FLOOR and now >= 2 * before:
                self.warned[name] = step
                text = "step %d: %s: %.0f %%, up from %.0f %% %d steps ago (%s); see docs/troubleshooting.md"
                logger.warning(text, step, WATCHED[name], 100 * now, 100 * before, len(values) - AVERAGED, name)


def repeated_fraction(samples: list[Sample]) -> float:
    """Return the fraction of trained tokens inside a sequence of `RUN` tokens seen earlier in the same sample."""
    repeated = sum(repeated_tokens(sample.trained_ids) for sample in samples)
    return repeated / max(1, sum(sample.num_trained for sample in samples))


def repeated_tokens(ids: np.ndarray) -> int:
    """Return the number of tokens of int32 [R] inside a second or later occurrence of a sequence of `RUN` tokens."""
    if len(ids) <= RUN:
        return 0
    runs = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), RUN)
    hashes = runs @ (np.uint64(0x9E3779B97F4A7C15) ** np.arange(RUN, dtype=np.uint64))  # overflow wraps around
    order = np.argsort(hashes, kind="stable")
    again = np.zeros(len(ids), bool)
    starts = order[1:][np.diff(hashes[order]) == 0]
    for offset in range(RUN):
        again[starts + offset] = True
    return int(again.sum())

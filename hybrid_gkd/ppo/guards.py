"""Warnings about answers that begin to go wrong, which metrics show and nobody looks at in time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

import numpy as np

from hybrid_gkd.types import Sample

logger = logging.getLogger(__name__)

WATCHED = {
    "response_length/clip_ratio": "answers are cut at data.max_response_length",
    "response/repeated_fraction": "tokens of answers repeat what their answer has said before",
}
"""Shares of a rollout's answers or tokens, and what they are of."""
WINDOW, AVERAGED, FLOOR = 20, 5, 0.05
"""A share that doubles within so many steps is warned of; of the mean over some steps; from this share on."""
RUN = 8
"""Tokens that must come again in the same order to count as a repetition."""


class Guards:
    """Warns, once in `WINDOW` steps, of a share that has doubled within them."""

    def __init__(self) -> None:
        self.recent = {name: deque[float](maxlen=WINDOW) for name in WATCHED}
        self.warned: dict[str, int] = {}
        """Step of the last warning by metric."""

    def look(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step."""
        for name in WATCHED.keys() & metrics.keys():
            recent = self.recent[name]
            recent.append(metrics[name])
            if len(recent) < 2 * AVERAGED or step - self.warned.get(name, -WINDOW) < WINDOW:
                continue
            values = list(recent)
            before, now = float(np.mean(values[:AVERAGED])), float(np.mean(values[-AVERAGED:]))
            if now >= FLOOR and now >= 2 * before:
                self.warned[name] = step
                text = "step %d: %.0f %% of all %s (%s), and %d steps ago it was %.0f %%; docs/troubleshooting.md"
                logger.warning(text, step, 100 * now, WATCHED[name], name, len(values) - AVERAGED, 100 * before)


def repeated_fraction(samples: list[Sample]) -> float:
    """Return the share of the samples' trained tokens that lie in a run of 8 which their sample has had before."""
    repeated = sum(repeated_tokens(sample.trained_ids) for sample in samples)
    return repeated / max(1, sum(sample.num_trained for sample in samples))


def repeated_tokens(ids: np.ndarray) -> int:
    """Return how many tokens int32 [R] lie in a run of 8 that has come before, from its second time on."""
    if len(ids) <= RUN:
        return 0
    runs = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), RUN)
    hashes = runs @ (np.uint64(0x9E3779B97F4A7C15) ** np.arange(RUN, dtype=np.uint64))  # wraps around
    order = np.argsort(hashes, kind="stable")
    again = np.zeros(len(ids), bool)
    starts = order[1:][np.diff(hashes[order]) == 0]
    for offset in range(RUN):
        again[starts + offset] = True
    return int(again.sum())

"""Progress in the terminal."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from hybrid_gkd.types import Generation, RunInfo

PLAIN_LINE_SECONDS = 5.0
"""Without a terminal, a step that ends sooner after the last line gets no line of its own."""


class Console:
    """A progress bar; without a terminal, a line every few seconds instead."""

    def __init__(self, info: RunInfo):
        self._stream = sys.stderr
        self._total, self._start = info.total_steps, info.start_step
        self._started, self._last_line = time.monotonic(), -math.inf
        self._bar = None
        has_width = self._stream.isatty()
        with contextlib.suppress(OSError):  # not a real terminal; tqdm takes a width of its own
            # A recorder or a container may offer a terminal of no columns, on which tqdm would show nothing.
            has_width = has_width and os.get_terminal_size(self._stream.fileno()).columns > 0
        if has_width:
            self._bar = tqdm(
                total=self._total, initial=self._start, desc="step", unit="step", file=self._stream, dynamic_ncols=True
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        signal = {"actor/kl_loss": "KL", "reward/mean": "reward"}
        summary = [f"{label} {metrics[name]:.4f}" for name, label in signal.items() if name in metrics][:1]
        if "perf/tokens_per_second" in metrics:
            summary.append(f"{metrics['perf/tokens_per_second']:.0f} tokens/s")
        accuracy = [f"held-out accuracy {metrics['val/accuracy']:.1%}"] if "val/accuracy" in metrics else []
        if self._bar is not None:
            if accuracy:
                self._bar.write(f"step {step}: {accuracy[0]}", file=self._stream)
            self._bar.set_postfix_str("  ".join(summary), refresh=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()
            return
        now = time.monotonic()
        if not accuracy and step < self._total and now - self._last_line < PLAIN_LINE_SECONDS:
            return
        self._last_line = now
        parts = [f"step {step}/{self._total}", *summary, *accuracy]
        if self._start < step < self._total:
            left = (now - self._started) / (step - self._start) * (self._total - step)
            parts.append(f"{tqdm.format_interval(round(left))} left")
        print("  ".join(parts), file=self._stream, flush=True)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        """Nothing: they are long, and in generations.jsonl."""

    def close(self, *, failed: bool) -> None:
        if self._bar is not None:
            self._bar.close()

"""Console output of the steps of a run (`trainer.console`)."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from hybrid_gkd.config.flat import flat
from hybrid_gkd.reporting.logs import TIME
from hybrid_gkd.reporting.metric_table import held_out_reward
from hybrid_gkd.types import Generation, RunInfo

PLAIN_LINE_SECONDS = 5.0
"""Minimum time between two lines with trainer.console=progress and no terminal."""


class Console:
    """Shows a progress bar, a full line per step, or a short line every few seconds."""

    def __init__(self, info: RunInfo):
        self._stream, self._style = sys.stderr, info.config["trainer"]["console"]
        self._held_out = held_out_reward(flat(info.config))
        self._total, self._start = info.total_steps, info.start_step
        self._step, self._started, self._last_line = self._start, time.monotonic(), -math.inf
        self._prompt: str | None = None
        self._bar = None
        has_width = self._stream.isatty()
        with contextlib.suppress(OSError):  # not a real terminal; tqdm uses a default width
            # Recorders and containers may provide a terminal with 0 columns, on which tqdm would show nothing.
            has_width = has_width and os.get_terminal_size(self._stream.fileno()).columns > 0
        if has_width and self._style in ("auto", "progress"):
            self._bar = tqdm(
                total=self._total, initial=self._start, desc="step", unit="step", file=self._stream, dynamic_ncols=True
            )
        elif self._style == "auto":
            self._style = "full"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._step, now = step, time.monotonic()
        if step == self._start:  # a validation before training, which no step repeats
            self._started = now
        if self._style == "quiet":
            return
        signal = {
            "actor/kl_loss": "KL", "reward/all_groups": "reward", "reward/mean": "reward", "actor/sft_loss": "SFT loss",
        }  # fmt: skip
        summary = [f"{label} {metrics[name]:.4f}" for name, label in signal.items() if name in metrics][:1]
        if "perf/tokens_per_second" in metrics:
            summary.append(f"{metrics['perf/tokens_per_second']:.0f} tokens/s")
        name, form = self._held_out
        held_out = [f"held-out {name} {metrics['val/accuracy']:{form}}"] if "val/accuracy" in metrics else []
        if "val/forward_kl" in metrics:
            held_out.append(f"held-out KL {metrics['val/forward_kl']:.4f}, reverse {metrics['val/reverse_kl']:.4f}")
        if self._bar is not None:
            if held_out:
                self._bar.write(f"step {step}: {'  '.join(held_out)}", file=self._stream)
            self._bar.set_postfix_str("  ".join(summary), refresh=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()
            return
        if self._style == "full":
            summary, held_out = [format_metrics(metrics)], []
        elif not held_out and step < self._total and now - self._last_line < PLAIN_LINE_SECONDS:
            return
        self._last_line = now
        parts = [f"step {step}/{self._total}"]
        if self._start < step < self._total:
            left = (now - self._started) / (step - self._start) * (self._total - step)
            parts.append(f"{tqdm.format_interval(round(left))} left")
        self._print("  ".join([*parts, *summary, *held_out]))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        """On a terminal, show one sample: the lowest reward of the first validation, later the same prompt again.

        All samples are in generations.jsonl.
        """
        if self._bar is not None:
            sample = next((sample for sample in samples if sample.prompt == self._prompt), None)
            if sample is None:
                sample = min(samples, key=lambda sample: math.inf if sample.reward is None else sample.reward)
                self._prompt = sample.prompt
            width = self._bar.ncols or shutil.get_terminal_size().columns
            texts = {"prompt": sample.prompt, "completion": sample.response, "reference": sample.answer}
            lines = [f"  {name:10}  {' '.join(text.split())}" for name, text in texts.items() if text is not None]
            reward = "" if sample.reward is None else f", reward {sample.reward:g}"
            title = f"step {step}, one of {len(samples)} samples{reward}:"
            cut = [line if len(line) <= width else line[: width - 3] + "..." for line in lines]
            self._bar.write("\n".join([title, *cut]), file=self._stream)

    def close(self, *, failed: bool) -> None:
        is_last = self._step >= self._total
        if self._bar is not None:
            if not is_last:  # the estimate of the remaining time is void
                self._bar.bar_format = "{desc}: stopped at {n_fmt}/{total_fmt} after {elapsed}"
            self._bar.close()
        elif not is_last and self._style != "quiet":
            self._print(f"stopped at step {self._step}/{self._total}")

    def _print(self, line: str) -> None:
        print(time.strftime(TIME), line, file=self._stream, flush=True)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Format all metrics of a step in one line."""
    return " ".join(f"{name}={value:.6g}" for name, value in metrics.items())

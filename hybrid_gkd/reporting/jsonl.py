"""JSON Lines files in the run folder.

metrics.jsonl has one object per step, generations.jsonl one per logged sample, tokens.jsonl one for each of a few of
these with the candidates of teacher and student at its tokens, and lengths.jsonl one per step with the histogram of
completion lengths.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybrid_gkd.runtime.files import JsonLinesFile, encode_rows, free_path, read_json_lines
from hybrid_gkd.types import Generation, RunInfo

logger = logging.getLogger(__name__)

NAMES = ("metrics.jsonl", "generations.jsonl", "lengths.jsonl", "tokens.jsonl")
BINS = 50
"""Number of bins of the length histogram, up to data.max_response_length."""


class JsonLines:
    """Writes the files; a resumed run first drops the rows of steps that it repeats."""

    def __init__(self, info: RunInfo):
        paths = [info.run_dir / name for name in NAMES]
        for path in paths:
            if path.exists() and info.resume:
                temporary = path.with_name(path.name + ".tmp")
                kept = (row for row in read_json_lines(path) if row["step"] <= info.start_step)
                temporary.write_bytes(encode_rows(kept))
                temporary.replace(path)
            elif path.exists():
                older = path.rename(free_path(path.with_suffix(""), path.suffix))
                logger.warning("%s is from an earlier run; renamed to %s", path, older.name)
        self._files = [JsonLinesFile(path) for path in paths]
        self._metrics, self._generations, self._lengths, self._tokens = self._files
        self._config = info.config

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._metrics.append([{"step": step, **metrics}])

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        self._generations.append({"step": step, **asdict(sample)} for sample in samples)

    def log_lengths(self, lengths: Sequence[int], step: int) -> None:
        """Log the histogram: `counts[n]` completions have at least n * bin and less than (n + 1) * bin tokens."""
        width = -(-(self._config["data"]["max_response_length"] + 1) // BINS)
        counts = [0] * (max(lengths) // width + 1)
        for length in lengths:
            counts[length // width] += 1
        self._lengths.append([{"step": step, "bin": width, "counts": counts}])

    def log_tokens(self, answers: Sequence[Mapping[str, Any]], step: int) -> None:
        self._tokens.append({"step": step, **answer} for answer in answers)

    def close(self, *, failed: bool) -> None:
        for name, file in zip(NAMES, self._files, strict=True):
            with contextlib.closing(file):
                try:
                    file.append([])  # retry rows that could not be written before
                except OSError as error:
                    logger.warning("%s: lost the rows that could not be written: %s", name, error)

"""Tracker for TensorBoard: `tensorboard --logdir <run folder>/tensorboard`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hybrid_gkd.types import Generation, RunInfo

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 10


class TensorBoard:
    """Writes event files in the run folder. A later start adds a file that hides the steps it repeats."""

    def __init__(self, info: RunInfo):
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        folder = info.run_dir / "tensorboard"
        purge_step = info.start_step + info.resume
        self._writer = SummaryWriter(folder, purge_step=purge_step, flush_secs=FLUSH_SECONDS)
        logger.info("view the run in a browser: tensorboard --logdir %s", folder)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        # TensorBoard renders Markdown; four spaces make a literal block.
        blocks = [
            "\n\n".join(f"{name}\n\n    " + str(value).replace("\n", "\n    ") for name, value in asdict(each).items())
            for each in samples
        ]
        self._writer.add_text("val/generations", "\n\n---\n\n".join(blocks), step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()

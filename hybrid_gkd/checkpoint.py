"""The checkpoints of a run: names, atomic writes, which is the newest. `student/checkpoint_io.py` fills them.

    <run folder>/
      latest_checkpointed_iteration.txt     number of the newest complete checkpoint
      global_step_N/
        actor/            torch.distributed.checkpoint: weights, optimizer state
        huggingface/      config, safetensors, tokenizer
        trainer_state.json  see TrainerState

A checkpoint is written under a temporary name, synced to the disk and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_gkd.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Progress of a run."""

    step: int
    """Training steps done; the position in the data is a function of it."""
    data: dict[str, Any]
    """Settings that the position in the data also depends on; with other values a resume would train other batches."""
    first_metrics: dict[str, float]
    """Metrics of the first step and of the validation before training, for the final report."""


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run folder, of which the newest `keep` stay; None keeps all."""

    run_dir: Path
    keep: int | None

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None. Raises CheckpointError if the pointer leads nowhere."""
        pointer = self.run_dir / LATEST
        if not pointer.is_file():
            return None
        folder, replaced = self._folders(pointer.read_text().strip())
        if not folder.exists() and replaced.exists():  # a run was killed while it wrote this step anew
            os.rename(replaced, folder)
        if not (folder / "trainer_state.json").is_file():
            raise CheckpointError(f"{pointer} names {folder.name}, which is missing or incomplete")
        return folder

    @contextlib.contextmanager
    def writing(self, state: TrainerState) -> Iterator[Path]:
        """Yield a folder to write into; make it `global_step_<step>` when the block ends without an exception.

        Raises CheckpointError if the disk is full or not writable; earlier checkpoints are as they were.
        """
        final, replaced = self._folders(state.step)
        folder, pointer = (self.run_dir / f".{name}.writing" for name in (final.name, LATEST))
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            yield folder
            (folder / "trainer_state.json").write_text(json.dumps(asdict(state), indent=2))
            _sync(folder)
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():  # of a run that was resumed from an earlier step
                os.rename(final, replaced)
            os.rename(folder, final)
            pointer.write_text(f"{state.step}\n")
            _sync(pointer)
            os.replace(pointer, self.run_dir / LATEST)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoint {final}: {error}") from error
        if self.keep is not None:
            self._prune(state.step, self.keep)

    def _folders(self, step: int | str) -> tuple[Path, Path]:
        """Of a checkpoint, and where it waits while a new one of the same step takes its place."""
        return self.run_dir / f"global_step_{step}", self.run_dir / f".global_step_{step}.replaced"

    def _prune(self, newest: int, keep: int) -> None:
        names = (path.name.removeprefix("global_step_") for path in self.run_dir.glob("global_step_*"))
        steps = sorted(int(name) for name in names if name.isdecimal() and int(name) <= newest)
        for step in steps[:-keep]:
            shutil.rmtree(self.run_dir / f"global_step_{step}")


def load_state(folder: Path) -> TrainerState:
    """Read `trainer_state.json`. Raises CheckpointError."""
    file = folder / "trainer_state.json"
    try:
        return TrainerState(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        keys = "trainer.resume_mode, trainer.resume_from_path"
        raise CheckpointError(f"{keys}: {file} cannot be read: {error}") from error


def _sync(folder: Path) -> None:
    """Flush every file and folder below `folder` to the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

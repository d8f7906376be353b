"""The checkpoints of a run: names, atomic writes, checksums. `student/checkpoint_io.py` fills them.

    <run folder>/
      latest_checkpointed_iteration.txt     number of the newest complete checkpoint
      global_step_N/
        actor/              weights and optimizer state: a safetensors file of each rank, see student/shard_files.py
        huggingface/        config, safetensors, tokenizer; of LoRA, an adapter folder of peft's
        trainer_state.json  see TrainerState
        manifest.json       every other file with its size and checksum

A checkpoint is written under a temporary name, perhaps while training goes on, synced to the disk and renamed when it
is complete. It is numbers and JSON: nothing in it is executed when it is read.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.runtime.files import FileSum, ReservedSpace

logger = logging.getLogger(__name__)

LATEST, STATE, MANIFEST = "latest_checkpointed_iteration.txt", "trainer_state.json", "manifest.json"
RESERVED, UNFINISHED = ".reserved_for_a_checkpoint", ".global_step_*.writing"
"""What a killed run leaves behind: the room that it held, and a checkpoint that it had begun."""
READERS = 8
"""Files that are checked at the same time."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best validation of a run so far."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Progress of a run."""

    step: int
    """Training steps done; with `extra_batches` they are the position in the data."""
    data: dict[str, Any]
    """Settings that the position in the data also depends on; with other values a resume would train other batches."""
    first_metrics: dict[str, float]
    """Metrics of the first step and of the validation before training, for the final report."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What decided the learning, see ppo/resuming.py; empty where that is not known."""
    working_dir: str = ""
    """Folder in which relative paths of the settings begin; empty where that is not known."""
    best: Best | None = None
    """Its checkpoint is kept; None where none is asked for or known."""
    kl_coef: float | None = None
    """Of the KL in the rewards, where `algorithm.kl_ctrl.type=adaptive` changes it."""
    extra_batches: int = 0
    """Generation batches that these steps took beyond one each (`algorithm.filter_groups`)."""


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run folder, of which the newest `keep` stay, and the best; None keeps all."""

    run_dir: Path
    keep: int | None
    reserved_bytes: int = 0
    """Room that `reserve` takes on the disk for the next checkpoint."""

    def reserve(self) -> None:
        """Hold the room of one checkpoint until the next is written. Raises CheckpointError if the disk has less."""
        try:
            self._remove_unfinished()
            self._reserved.take()
        except OSError as error:
            needed = f"{self.reserved_bytes / 2**20:.0f} MiB"
            raise CheckpointError(
                f"{self.run_dir}: no room for the next checkpoint ({needed}): {error.strerror}"
            ) from error

    def release(self) -> None:
        """Give the room back. Harmless when repeated."""
        self._reserved.release()

    @property
    def _reserved(self) -> ReservedSpace:
        return ReservedSpace(self.run_dir / RESERVED, self.reserved_bytes)

    def latest(self) -> Path | None:
        """The newest checkpoint, or None. What it holds is not looked at."""
        return next(iter(self.newest_first()), None)

    def newest_first(self) -> list[Path]:
        """The checkpoint that the pointer names, be it there or not, and those of the steps before it."""
        pointer, steps = self.run_dir / LATEST, self._steps()
        if pointer.is_file() and (text := pointer.read_bytes().strip()).isdigit():
            named = int(text)
            folder, replaced = self._folders(named)
            if not folder.exists() and replaced.exists():  # a run was killed while it wrote this step anew
                os.rename(replaced, folder)
            steps = [*(step for step in steps if step < named), named]
        return [self._folders(step)[0] for step in reversed(steps)]

    @contextlib.contextmanager
    def writing(self, state: TrainerState, sums: dict[str, FileSum] | None = None) -> Iterator[Path]:
        """Yield a folder to write into; make it `global_step_<step>` when the block ends without an exception.

        `sums`, by the path in the folder: what the block has computed while it wrote; other files are read for it.
        Raises CheckpointError if the disk is full or not writable; earlier checkpoints are as they were.
        """
        folder = self.begin(state.step)
        try:
            yield folder
        except OSError as error:
            raise self._cannot_write(state.step, error) from error
        self.complete(state, sums or {})

    def begin(self, step: int) -> Path:
        """An empty folder for the files of the checkpoint after a step, until `complete`. Raises CheckpointError."""
        folder = self._unfinished(step)
        try:
            self.release()
            self._remove_unfinished()
            folder.mkdir(parents=True)
        except OSError as error:
            raise self._cannot_write(step, error) from error
        return folder

    def complete(self, state: TrainerState, sums: dict[str, FileSum]) -> None:
        """Make the folder of `begin` a checkpoint, with all its files flushed to the disk, and remove old ones."""
        (final, replaced), folder = self._folders(state.step), self._unfinished(state.step)
        pointer = self.run_dir / f".{LATEST}.writing"
        try:
            (folder / STATE).write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
            write_manifest(folder, sums)
            _sync(folder)
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():  # of a run that was resumed from an earlier step
                os.rename(final, replaced)
            os.rename(folder, final)
            pointer.write_text(f"{state.step}\n", encoding="utf-8")
            _sync(pointer)
            os.replace(pointer, self.run_dir / LATEST)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise self._cannot_write(state.step, error) from error
        if self.keep is not None:
            self._prune(state, self.keep)

    def _remove_unfinished(self) -> None:
        """A run was killed, or a write has failed."""
        for folder in self.run_dir.glob(UNFINISHED):
            shutil.rmtree(folder, ignore_errors=True)

    def _unfinished(self, step: int) -> Path:
        return self.run_dir / UNFINISHED.replace("*", str(step))

    def _cannot_write(self, step: int, error: OSError) -> CheckpointError:
        return CheckpointError(f"cannot write checkpoint {self.folder(step)}: {error}")

    def folder(self, step: int) -> Path:
        """Of the checkpoint after a step, be it there or not."""
        return self.run_dir / f"global_step_{step}"

    def _folders(self, step: int) -> tuple[Path, Path]:
        """Of a checkpoint, and where it waits while a new one of the same step takes its place."""
        return self.folder(step), self.run_dir / f".global_step_{step}.replaced"

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix("global_step_") for path in self.run_dir.glob("global_step_*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _prune(self, state: TrainerState, keep: int) -> None:
        for step in [step for step in self._steps() if step <= state.step][:-keep]:
            if state.best is None or step != state.best.step:
                try:
                    shutil.rmtree(self.folder(step))
                except OSError as error:  # the new one is complete: a file that is in use, or a link, ends no run
                    logger.warning("an old checkpoint stays: %s: %s", self.folder(step), error)


def load_state(folder: Path) -> TrainerState:
    """Read `trainer_state.json`. Raises CheckpointError."""
    file = folder / STATE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        best = values.pop("best", None)
        return TrainerState(**values, best=best and Best(**best))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def write_manifest(folder: Path, sums: dict[str, FileSum]) -> None:
    """List all files of a checkpoint; those that are not in `sums` are read. Raises OSError."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(lambda name: sums.get(name) or FileSum.of(folder / name), names)
    listed = {name: asdict(each) for name, each in zip(names, found, strict=True)}
    (folder / MANIFEST).write_text(json.dumps({"files": listed}, indent=2), encoding="utf-8")


def find_damage(folder: Path, *, files: str = "*", largest: float = math.inf) -> dict[str, str]:
    """What is wrong with the files of a checkpoint whose path in it matches a pattern, by that path.

    All sizes are compared, and the checksums of files up to `largest` bytes. Raises CheckpointError if the manifest
    cannot be read.
    """
    file = folder / MANIFEST
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["files"]
        wanted = {name: FileSum(**entry) for name, entry in listed.items() if fnmatch.fnmatchcase(name, files)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error

    def problem(name: str) -> str | None:
        try:
            size = (folder / name).stat().st_size
            if size != wanted[name].size:
                return f"has {size} bytes instead of {wanted[name].size}"
            if size <= largest and FileSum.of(folder / name) != wanted[name]:
                return "has another checksum than when it was written"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None

    with ThreadPoolExecutor(READERS) as readers:
        return {name: reason for name, reason in zip(wanted, readers.map(problem, wanted), strict=True) if reason}


def _sync(folder: Path) -> None:
    """Flush every file and folder below `folder` to the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""The checkpoints of a run: names, atomic writes, checksums. `student/checkpoint_io.py` writes their contents.

    <run folder>/
      latest_checkpointed_iteration.txt     step of the newest complete checkpoint
      global_step_N/
        actor/              weights and optimizer state: one safetensors file per rank, see student/shard_files.py
        huggingface/        config, safetensors, tokenizer; with LoRA a peft adapter folder
        huggingface_merged/ with LoRA and `checkpoint.save_merged`, the model with its adapters merged
        trainer_state.json  see TrainerState
        manifest.json       size and checksum of every other file, and a checksum of this list
      snapshot/             the same for the newest snapshot, without exports; or a link to trainer.snapshot_dir

A checkpoint is written under a temporary name, possibly in the background, flushed to disk and renamed when it is
complete. It consists of numbers and JSON: loading it executes nothing.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import math
import os
import re
import shutil
import tempfile
import zlib
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
"""Names of the file that reserves disk space, and of incomplete checkpoints; a killed run leaves them behind."""
SNAPSHOT = "snapshot"
"""Folder or link in the run folder with the newest snapshot, as the only checkpoint of a store of its own."""
EXPORT, MERGED = "huggingface", "huggingface_merged"
"""Folders of a checkpoint in Hugging Face format."""
READERS = 8
"""Number of files checked concurrently."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """Best validation of a run so far."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Progress of a run."""

    step: int
    """Completed training steps; with `extra_batches`, the position in the data."""
    data: dict[str, Any]
    """Settings that determine the batches at this position; they must not change on resume."""
    first_metrics: dict[str, float]
    """Metrics of the first step and of the validation before training, for the final table."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that determine what is learned, see ppo/resuming.py; empty if unknown."""
    validation: dict[str, Any] = field(default_factory=dict)
    """Settings that determine the validation metrics; empty if unknown."""
    working_dir: str = ""
    """Base folder of relative paths in the settings; empty if unknown."""
    best: Best | None = None
    """Best validation, whose checkpoint is kept; None without one."""
    kl_coef: float | None = None
    """Coefficient of the KL penalty in the rewards, if `algorithm.kl_ctrl.type=adaptive`."""
    extra_batches: int = 0
    """Generation batches beyond one per step (`algorithm.filter_groups`)."""


@dataclass(frozen=True)
class CheckpointStore:
    """Checkpoints of a run folder; keeps the newest `keep` and the best one, or all if `keep` is None."""

    run_dir: Path
    keep: int | None
    keeps_best: bool = True
    reserved_bytes: int = 0
    """Disk space that `reserve` allocates for the next checkpoint."""
    reserved_files: int = 0
    """Number of files, that is inodes, that `reserve` allocates."""
    _abandoned: set[int] = field(default_factory=set)
    """Steps of checkpoints that the run has not continued from, see `abandon_after`."""

    def reserve(self) -> None:
        """Reserve space and inodes for the next checkpoint. Raises CheckpointError: the disk has less."""
        try:
            self.remove_unfinished()
            self._reserved.take()
        except OSError as error:
            needed = f"{self.reserved_bytes / 2**20:.0f} MiB, {self.reserved_files} files"
            raise CheckpointError(
                f"{self.run_dir}: cannot reserve disk space for the next checkpoint ({needed}): {error.strerror}; free "
                "some and run the same command again"
            ) from error

    def release(self) -> None:
        """Free the reserved space; idempotent. A folder that cannot be written to is logged."""
        try:
            self._reserved.release()
        except OSError as error:
            logger.warning("cannot free the disk space that is reserved for a checkpoint: %s", error)

    @property
    def _reserved(self) -> ReservedSpace:
        return ReservedSpace(self.run_dir / RESERVED, self.reserved_bytes, self.reserved_files)

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None; its contents are not checked."""
        return next(iter(self.newest_first()), None)

    def newest_first(self) -> list[Path]:
        """Return the checkpoint that the pointer names, existing or not, followed by those of earlier steps.

        Without a pointer, or with one that is damaged, return all of them.
        """
        named, steps = self._named_step(), self._steps()
        if named is not None:
            folder, replaced = self._folders(named)
            if not folder.exists() and replaced.exists():  # a run was killed while it replaced this step
                os.rename(replaced, folder)
            steps = [*(step for step in steps if step < named), named]
        return [self._folders(step)[0] for step in reversed(steps)]

    def resumable(self) -> list[Path]:
        """Return the checkpoints and the snapshot of the run, newest first."""
        snapshots = CheckpointStore(self.run_dir / SNAPSHOT, keep=None).newest_first()
        return sorted([*self.newest_first(), *snapshots], key=step_in_name, reverse=True)

    def _named_step(self) -> int | None:
        """Return the step that the pointer names; None if it is missing or not one whole line, as after a full disk."""
        pointer = self.run_dir / LATEST
        if not pointer.exists():
            return None
        try:
            text = pointer.read_bytes()
        except OSError as error:
            text = str(error).encode()
        if (found := re.fullmatch(rb"(\d{1,18})\n", text)) is not None:
            return int(found[1])
        logger.warning("%s does not name a step (%r): taking the newest intact checkpoint", pointer, text[:80])
        return None

    @contextlib.contextmanager
    def writing(self, state: TrainerState, sums: dict[str, FileSum] | None = None) -> Iterator[Path]:
        """Yield a folder to write to; rename it to `global_step_<step>` at the end, or remove it after an exception.

        `sums`: checksums by path in the folder, computed while writing; other files are read to compute theirs. Raises
        CheckpointError: the disk is full or not writable; earlier checkpoints are unchanged.
        """
        folder = self.begin(state.step)
        try:
            yield folder
            self.complete(state, sums or {})
        except OSError as error:
            raise self._cannot_write(state.step, error) from error
        finally:  # a full disk has room again for metrics and logs
            shutil.rmtree(folder, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """Create an empty folder for a step's checkpoint, to be finished by `complete`. Raises CheckpointError."""
        folder = self._unfinished(step)
        try:
            self.release()
            self.remove_unfinished()
            folder.mkdir(parents=True)
        except OSError as error:
            raise self._cannot_write(step, error) from error
        return folder

    def complete(self, state: TrainerState, sums: dict[str, FileSum]) -> None:
        """Flush the folder of `begin` to disk, make it a checkpoint, and remove old ones. Raises CheckpointError."""
        (final, replaced), folder = self._folders(state.step), self._unfinished(state.step)
        try:
            (folder / STATE).write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
            write_manifest(folder, sums)
            _sync(folder)
            shutil.rmtree(replaced, ignore_errors=True)
            if final.exists():  # the run was resumed from an earlier step
                os.rename(final, replaced)
            os.rename(folder, final)
            self._move_pointer(state.step)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise self._cannot_write(state.step, error) from error
        self._abandoned.discard(state.step)
        if self.keep is not None:
            self._prune(state, self.keep)

    def abandon_after(self, step: int) -> None:
        """Call when the run resumes from a step: later checkpoints, if any, are the first to be removed."""
        self._abandoned.update(each for each in self._steps() if each > step)

    def continue_from(self, step: int) -> None:
        """Let the pointer name a checkpoint, so that the next start does not resume from a later one, whose metrics are
        dropped. Raises CheckpointError."""
        try:
            self._move_pointer(step)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.run_dir / LATEST}: {error}") from error

    def _move_pointer(self, step: int) -> None:
        temporary = self.run_dir / f".{LATEST}.writing"
        temporary.write_text(f"{step}\n", encoding="utf-8")
        _sync(temporary)
        os.replace(temporary, self.run_dir / LATEST)

    def remove_unfinished(self) -> None:
        """Remove incomplete checkpoints of killed runs and failed writes."""
        for folder in self.run_dir.glob(UNFINISHED):
            shutil.rmtree(folder, ignore_errors=True)

    def _unfinished(self, step: int) -> Path:
        return self.run_dir / UNFINISHED.replace("*", str(step))

    def _cannot_write(self, step: int, error: OSError) -> CheckpointError:
        return CheckpointError(f"cannot write checkpoint {self.folder(step)}: {error}")

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, existing or not."""
        return self.run_dir / f"global_step_{step}"

    def _folders(self, step: int) -> tuple[Path, Path]:
        """Return the folder of a checkpoint, and its temporary name while it is replaced."""
        return self.folder(step), self.run_dir / f".global_step_{step}.replaced"

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix("global_step_") for path in self.run_dir.glob("global_step_*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _prune(self, state: TrainerState, keep: int) -> None:
        steps = [step for step in self._steps() if step <= state.step]
        for step in sorted(steps, key=lambda each: (each not in self._abandoned, each))[:-keep]:
            if not self.keeps_best or state.best is None or step != state.best.step:
                try:
                    shutil.rmtree(self.folder(step))
                except OSError as error:  # a file in use or a link must not fail the run: the new one is complete
                    logger.warning("cannot remove an old checkpoint: %s: %s", self.folder(step), error)


def exports(checkpoint: Path | None) -> list[Path]:
    """Return the folders of a checkpoint in Hugging Face format, the merged model before the adapters."""
    folders = [checkpoint / name for name in (MERGED, EXPORT)] if checkpoint is not None else []
    return [folder for folder in folders if folder.is_dir()]


def step_in_name(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(folder.name.rpartition("_")[2])


def prepare_snapshots(run_dir: Path, root: str | None) -> CheckpointStore:
    """Return the store of a run's snapshots: in the run folder, or in a new folder below `root`, with a link there.

    Raises CheckpointError if it cannot be created.
    """
    place = run_dir / SNAPSHOT
    try:
        parent = run_dir if root is None else Path(root).expanduser()
        if not place.exists() or place.resolve().parent != parent.resolve():
            remove_snapshots(run_dir)
            parent.mkdir(parents=True, exist_ok=True)
            if root is None:
                place.mkdir()
            else:
                place.symlink_to(Path(tempfile.mkdtemp(prefix=f"{run_dir.name}_", dir=parent)).absolute())
    except OSError as error:
        raise CheckpointError(f"trainer.snapshot_dir: cannot make a folder for snapshots: {error}") from error
    return CheckpointStore(place, keep=1, keeps_best=False)


def remove_snapshots(run_dir: Path) -> None:
    """Remove the snapshots of a run, also below another folder. Raises CheckpointError."""
    place = run_dir / SNAPSHOT
    try:
        if place.exists():
            shutil.rmtree(place.resolve())
        place.unlink(missing_ok=True)  # of a link
    except OSError as error:
        raise CheckpointError(f"cannot remove the snapshots {place}: {error}") from error


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
    """Write the list of all files of a checkpoint; compute checksums missing in `sums`.

    Raises OSError, also if a file of `sums` is not in the folder: workers do not share it, or it was removed.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if missing := sums.keys() - set(names):
        raise FileNotFoundError(
            f"{min(missing)} was written by a worker and is not in this folder: all workers must share it, and no "
            "other process may remove files from it"
        )
    listed = {name: asdict(sums.get(name) or FileSum.of(folder / name)) for name in names}
    text = json.dumps({"crc32": _manifest_sum(listed), "files": listed}, indent=2)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _manifest_sum(listed: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(listed, sort_keys=True).encode())


def find_damage(folder: Path, *, files: str = "*", largest: float = math.inf) -> dict[str, str]:
    """Return the problems of a checkpoint's files by path, for paths that match a pattern.

    All sizes are checked, and the checksums of files up to `largest` bytes. Raises CheckpointError: the manifest cannot
    be read.
    """
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        listed = manifest["files"]
        if manifest.get("crc32", _manifest_sum(listed)) != _manifest_sum(listed):  # older ones have none
            raise ValueError("it has another checksum than when it was written")
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
    """Flush every file and folder below `folder` to disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

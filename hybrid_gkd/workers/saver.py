"""Write a worker's part of a checkpoint at once, or copy it to the host and write it in the background."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from hybrid_gkd.config import Config
from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.offload.pinned import HostCopies
from hybrid_gkd.offload.residency import Residency
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.runtime.threads import single_thread
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.student import checkpoint_io
from hybrid_gkd.student.checkpoint_store import EXPORT, MERGED
from hybrid_gkd.student.trained_model import TrainedModel

logger = logging.getLogger(__name__)

STEP_PHASES = {"critic": "critic_optimizer_step", "actor": "optimizer_step"}
"""Model -> phase in which all of its tensors are on the device."""
T = TypeVar("T")
Write = Callable[[Path], dict[str, FileSum]]
"""Function that writes files into a folder and returns their checksums by name."""


class Saver:
    """Saves and loads the trained models of a worker.

    Args:
        trained: models by folder name in a checkpoint; the actor last, since its phases follow.
        behind: reserve memory for `take_snapshot` on the host, page-locked on a GPU machine.
    """

    def __init__(
        self, config: Config, trained: dict[str, TrainedModel], residency: Residency, *, on_gpu: bool, behind: bool
    ):
        self._config, self._trained, self._residency = config, trained, residency
        self._snapshot: dict[str, Write] = {}
        """Writers of the snapshot by folder in the checkpoint."""
        self._written: Future[tuple[dict[str, FileSum], float]] | None = None
        section = config.actor_rollout_ref.actor.checkpoint
        wanted = {EXPORT: section.save_hf_model, MERGED: section.save_merged}
        self._exports = [name for name, is_wanted in wanted.items() if is_wanted]
        """Folders of the exports in the checkpoint."""
        self._copies: HostCopies | None = None
        if behind:
            self._copies = HostCopies(locked=on_gpu)
            self._thread = single_thread("checkpoint")
            # In the background, since allocating and locking this memory takes seconds. The thread gets a size and not
            # the models, since accessing their weights frees those that a forward pass has gathered.
            self._reserved = self._thread.submit(self._reserve, self._bytes_to_copy())

    def _bytes_to_copy(self) -> int:
        num_bytes = sum(map(checkpoint_io.snapshot_bytes, self._trained.values()))
        if dist.get_rank() == 0:
            actor = self._trained["actor"]
            num_bytes += sum(checkpoint_io.export_bytes(actor, merge=name == MERGED) for name in self._exports)
        return num_bytes

    def _reserve(self, num_bytes: int) -> None:
        assert self._copies is not None
        try:
            self._copies.reserve(num_bytes)
        except MemoryError as error:
            logger.warning("checkpoints are copied to pageable host memory, which is slower: %s", error)
            self._copies = HostCopies(locked=False)
            self._copies.reserve(num_bytes)

    def save(self, folder: Path, tokenizer_path: str) -> dict[str, FileSum]:
        """Write at once; return checksums of the files by path in the folder. Collective. Raises CheckpointError.

        The exports use the memory for snapshots, if there is any, whose content must be written as in `take_snapshot`.
        """
        written, copies = dict[str, FileSum](), self._empty_copies()
        for name, model in self._trained.items():
            self._residency.enter(STEP_PHASES[name], changes=False)
            written |= _under(name, checkpoint_io.save_model(model, folder / name))
        for name, export in self._gather_exports(tokenizer_path, copies):
            written |= _under(name, export(folder / name))
        return written

    def load(self, folder: Path) -> None:
        """Restore models, optimizers and schedules. Collective. Raises CheckpointError."""
        for name, model in self._trained.items():
            self._residency.enter(STEP_PHASES[name])
            checkpoint_io.load_model(model, folder / name)

    def take_snapshot(self, tokenizer_path: str | None) -> None:
        """Copy to the host what `save` would write; None: without exports. Collective.

        The previous snapshot must have been written, or be of no use because another worker failed to write its part.
        """
        copies = self._empty_copies()
        assert copies is not None, "the worker has no memory for snapshots"
        for name, model in self._trained.items():
            self._residency.enter(STEP_PHASES[name], changes=False)
            self._snapshot[name] = checkpoint_io.snapshot_model(model, copies.copy)
            copies.finish()
        if tokenizer_path is not None:
            self._snapshot |= self._gather_exports(tokenizer_path, copies)

    def _empty_copies(self) -> HostCopies | None:
        """Wait until the last snapshot is written, and drop it; return its memory, or None without any."""
        if self._written is not None:
            self._wait(self._written.exception, "an earlier checkpoint was not written")
            self._written = None
        self._snapshot = {}
        if self._copies is not None:
            self._wait(self._reserved.result, "host memory for a copy of the checkpoint was not allocated")
            self._copies.clear()
        return self._copies

    def write_snapshot(self, folder: Path) -> None:
        """Start writing the snapshot in a thread."""
        self._written = self._thread.submit(self._write, folder)

    def _write(self, folder: Path) -> tuple[dict[str, FileSum], float]:
        written, started = dict[str, FileSum](), time.monotonic()
        for name, write in self._snapshot.items():
            written |= _under(name, write(folder / name))
        return written, time.monotonic() - started

    def snapshot_written(self) -> bool:
        """Return whether the snapshot is written. Raises as `finish_snapshot` if writing failed."""
        assert self._written is not None
        return self._written.done() and bool(self._written.result())

    def finish_snapshot(self) -> tuple[dict[str, FileSum], float]:
        """Wait for the snapshot; return checksums of its files by path in the folder, and seconds.

        Raises CheckpointError.
        """
        assert self._written is not None
        return self._wait(self._written.result, "a checkpoint was not written")

    def _wait(self, wait: Callable[[float], T], problem: str) -> T:
        """Return the result of `wait`, which is called with the timeout. Raises CheckpointError at the timeout."""
        limit = Timeout(self._config.actor_rollout_ref.load_timeout, "actor_rollout_ref.load_timeout")
        try:
            return wait(limit.seconds)
        except TimeoutError:
            raise CheckpointError(f"{problem} within {limit}") from None

    def _gather_exports(self, tokenizer_path: str, copies: HostCopies | None) -> Iterator[tuple[str, Write]]:
        """Yield the folder and writer of each Hugging Face export, on rank 0 only. Collective.

        The other ranks would list and read a folder that rank 0 is writing. `copies`: memory for the weights; None
        allocates it.
        """
        arr = self._config.actor_rollout_ref
        for name in self._exports:
            export = checkpoint_io.gather_huggingface(
                self._trained["actor"], tokenizer_path=tokenizer_path, trust_remote_code=arr.model.trust_remote_code,
                merge=name == MERGED, to_host=Tensor.cpu if copies is None else copies.copy,
            )
            if copies is not None:
                copies.finish()
            if dist.get_rank() == 0:
                yield name, functools.partial(_export, export)


def _under(folder: str, sums: dict[str, FileSum]) -> dict[str, FileSum]:
    return {f"{folder}/{name}": each for name, each in sums.items()}


def _export(write: Callable[[Path], None], folder: Path) -> dict[str, FileSum]:
    """Write a folder, flush it to the disk and compute the checksums. Raises CheckpointError."""
    try:
        write(folder)
        files = [file for file in folder.rglob("*") if file.is_file()]
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        return {str(file.relative_to(folder)): FileSum.of(file) for file in files}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error

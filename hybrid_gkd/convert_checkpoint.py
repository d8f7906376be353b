"""`python -m hybrid_gkd.convert_checkpoint OLD NEW`: a checkpoint of an earlier version in today's format.

Earlier checkpoints were torch.distributed.checkpoint's, whose `.metadata` is a pickle: whoever wrote it decides what is
executed when it is read. So this is done by hand, for files that one trusts, and by nothing else.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from hybrid_gkd.errors import CheckpointError, HybridGKDError
from hybrid_gkd.student.checkpoint_io import WEIGHTS
from hybrid_gkd.student.checkpoint_store import STATE, is_old_format, write_manifest
from hybrid_gkd.student.shard_files import Part, write_shard

DESCRIPTION = (
    "Write a checkpoint of an earlier version in today's format. WARNING: this executes whatever the pickle in OLD "
    "says: only for files that you trust."
)
OLD_WEIGHTS, OLD_STATE = "model.model.", "optimizer.state.model."
"""Before the Hugging Face name of a weight, and of a weight whose optimizer state it is."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_gkd.convert_checkpoint", description=DESCRIPTION)
    parser.add_argument("old", metavar="OLD", type=Path, help="a global_step_N folder, which stays as it is")
    parser.add_argument("new", metavar="NEW", type=Path, help="the folder to write, which must not exist")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
    try:
        convert(options.old, options.new)
    except HybridGKDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.new} is written; continue from it with trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={options.new}"
    )
    return 0


def convert(old: Path, new: Path) -> None:
    """Read a checkpoint of torch.distributed.checkpoint tensor by tensor. Raises CheckpointError."""
    if not is_old_format(old):
        raise CheckpointError(f"{old} is no checkpoint of an earlier version: it has no actor/.metadata")
    if new.exists():
        raise CheckpointError(f"{new} exists already")
    folder = new.with_name(f".{new.name}.writing")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.copytree(old, folder, ignore=shutil.ignore_patterns("actor"))
        name = "rank_0_of_1.safetensors"
        written = write_shard(folder / "actor" / name, _parts(old / "actor"), updates_done=_updates_done(old / "actor"))
        json.loads((folder / STATE).read_text())
        write_manifest(folder, {f"actor/{name}": written})
        folder.rename(new)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{old} cannot be converted: {error}") from error


def _parts(actor: Path) -> list[Part]:
    parts = []
    for key, entry in dcp.FileSystemReader(actor).read_metadata().state_dict_metadata.items():
        if not isinstance(entry, dcp.metadata.TensorStorageMetadata):
            continue  # settings of the optimizer, which are the configuration's now
        if key.startswith(OLD_STATE):
            weight, _, kind = key.removeprefix(OLD_STATE).rpartition(".")
            name = f"{kind}/{weight}"
        elif key.startswith(OLD_WEIGHTS):
            name = f"{WEIGHTS}/{key.removeprefix(OLD_WEIGHTS)}"
        else:
            raise CheckpointError(f"{actor} cannot be converted: it holds {key}")
        shape, dtype = tuple(entry.size), entry.properties.dtype
        read = functools.partial(_read, actor, key, shape, dtype)
        parts.append(Part(name, dtype, shape, shape, 0, read))
    return parts


def _read(actor: Path, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    state = {key: torch.empty(shape, dtype=dtype)}
    dcp.load(state, checkpoint_id=actor, no_dist=True)
    return state[key]


def _updates_done(actor: Path) -> str:
    state: dict[str, Any] = {"updates_done": 0}
    dcp.load(state, checkpoint_id=actor, no_dist=True)
    return str(int(state["updates_done"]))


if __name__ == "__main__":
    sys.exit(main())

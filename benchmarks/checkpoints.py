"""The state of a student to the disk and back: the files of a checkpoint against torch.distributed.checkpoint's.

    python benchmarks/checkpoints.py --shape 1.5b
    python benchmarks/checkpoints.py --shape tiny --device cpu

One process with random float32 weights and both moments in the shapes of Qwen2.5. Both ways write to the disk
(fsync) and read into the same tensors, in turns; only the first computes checksums, and `check` is what a start reads
before anything is loaded. GB/s: bytes of the state by the time; what was just written is read from the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from models import SHAPES, empty_model
from torch import Tensor

from hybrid_gkd.checkpoint import find_damage, write_manifest
from hybrid_gkd.student.shard_files import Part, ShardFiles, write_shard


def write(state: dict[str, Tensor], folder: Path) -> None:
    """As the worker and the store do."""
    parts = [
        Part(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.shape), 0, lambda tensor=tensor: tensor)
        for name, tensor in state.items()
    ]
    written = write_shard(folder / "actor" / "rank_0_of_1.safetensors", parts)
    write_manifest(folder, {"actor/rank_0_of_1.safetensors": written})


def read(state: dict[str, Tensor], folder: Path) -> None:
    """As the worker does."""
    files = ShardFiles(folder / "actor")
    for name, tensor in state.items():
        files.read(name, tensor, tuple(tensor.shape), 0)


def check(state: dict[str, Tensor], folder: Path) -> None:
    """As a start does."""
    assert find_damage(folder) == {}


def seconds(action: Callable[[dict[str, Tensor], Path], object], state: dict[str, Tensor], folder: Path) -> float:
    """Of one call, with what the device has to do for it."""
    started = time.perf_counter()
    action(state, folder)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's for temporary files")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    state = {
        f"{kind}/{name}": torch.randn(parameter.shape, device=args.device)
        for name, parameter in empty_model(args.shape).named_parameters()
        for kind in ("weights", "exp_avg", "exp_avg_sq")
    }
    size = sum(tensor.nbytes for tensor in state.values())
    ways: dict[str, Callable[[dict[str, Tensor], Path], object]] = {
        "write": write, "read": read, "check": check,
        "dcp write": lambda state, folder: dcp.save(state, checkpoint_id=folder, no_dist=True),
        "dcp read": lambda state, folder: dcp.load(state, checkpoint_id=folder, no_dist=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for prefix, names in (("", ("write", "read", "check")), ("dcp ", ("dcp write", "dcp read"))):
            folder = Path(tempfile.mkdtemp(dir=args.folder, prefix=prefix.strip()))
            for name in names:
                taken[name].append(seconds(ways[name], state, folder))
            shutil.rmtree(folder)
    print(f"{args.shape} on {args.device}, {size / 1e9:.2f} GB of state, median of {args.repeats}")
    for name, found in taken.items():
        print(f"{name:10} {statistics.median(found):8.2f} s {size / 1e9 / statistics.median(found):6.2f} GB/s")


if __name__ == "__main__":
    main()

"""Measure the weight sync between separate pools: packed broadcasts against one broadcast per tensor.

    python benchmarks/weight_sync.py --shape 1.5b --gpus 2
    python benchmarks/weight_sync.py --shape 7b --gpus 4
    python benchmarks/weight_sync.py --shape tiny --gpus 2 --device cpu

One process per GPU: the first sends random bf16 weights in the shapes of Qwen2.5, the others copy them into weights of
their own, as the engine does. A pass lasts from a common start until the slowest process has all of it; the weights of
every pass are new, and receivers compare the checksums of what they got. The two ways take turns in the same processes.
GB/s: bytes of the weights by the time of a pass, which each receiver gets at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from models import SHAPES, empty_model
from torch import Tensor

from hybrid_gkd.rollout.weight_sync import WeightSync
from hybrid_gkd.rollout.weights import Layout, layout_of

WAYS = ("packed", "single")
TIMEOUT = 600.0


class Row(NamedTuple):
    """Measurements of one pass in one process."""

    way: str
    number: int
    rank: int
    seconds: float
    broadcasts: int
    checksums: dict[str, int]


def checksums(weights: dict[str, Tensor]) -> dict[str, int]:
    """By name: the sum of the bits as integers."""
    return {name: int(weight.view(torch.int16).sum(dtype=torch.int64)) for name, weight in weights.items()}


def share(rank: int, args: argparse.Namespace, ports: dict[str, int], start: Any, folder: Path) -> None:
    """One process: sends or receives in every pass, and writes a row for each to RANK.json in `folder`."""
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout = layout_of(empty_model(args.shape).named_parameters(remove_duplicate=False))
    bucket_bytes = {"packed": args.bucket_megabytes * 2**20, "single": 1}
    syncs = {
        way: WeightSync(
            ("127.0.0.1", ports[way]), rank=rank, size=args.gpus, layout=layout, dtype=torch.bfloat16, device=device,
            bucket_bytes=bucket_bytes[way], timeout=TIMEOUT,
        )
        for way in WAYS
    }  # fmt: skip
    weights, rows = own_weights(layout, device), []
    for number in range(args.warmup + args.passes):
        for way in WAYS:
            for weight in weights.values():
                weight.normal_() if rank == 0 else weight.zero_()
            synchronize(device)
            start.wait(TIMEOUT)
            started = time.perf_counter()
            if rank == 0:
                syncs[way].send(weights.items())
            else:
                for name, weight in syncs[way].receive():
                    weights[name].copy_(weight)
            synchronize(device)
            seconds = time.perf_counter() - started
            rows.append(Row(way, number, rank, seconds, len(syncs[way].buckets), checksums(weights)))
    (folder / f"{rank}.json").write_text(json.dumps(rows), encoding="utf-8")


def own_weights(layout: Layout, device: torch.device) -> dict[str, Tensor]:
    """Memory for every weight by name, in order; a tied one once."""
    weights = {}
    for names, shape, _ in layout:
        memory = torch.empty(shape, dtype=torch.bfloat16, device=device)
        weights |= dict.fromkeys(names, memory)
    return weights


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_ports() -> dict[str, int]:
    """A port of this machine at which nobody listens, for each way."""
    with contextlib.ExitStack() as stack:
        listeners = {way: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for way in WAYS}
        return {way: int(listener.getsockname()[1]) for way, listener in listeners.items()}


def report(args: argparse.Namespace, rows: list[Row]) -> str:
    """The figures as a Markdown table. Exits if a receiver got other weights than were sent."""
    sent = {row[:2]: row.checksums for row in rows if row.rank == 0}
    for row in rows:
        if wrong := [name for name, value in sent[row[:2]].items() if row.checksums[name] != value]:
            raise SystemExit(f"error: {row.way}, pass {row.number}: process {row.rank} got another {wrong[0]}")
    layout = layout_of(empty_model(args.shape).named_parameters(remove_duplicate=False))
    gigabytes = 2 * sum(shape.numel() for _, shape, _ in layout) / 1e9
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    lines = [
        f"{device} x {args.gpus}, torch {torch.__version__}, {args.shape}: {gigabytes:.3g} GB in bf16, {args.passes} "
        f"passes each; all {len(rows) - len(sent)} copies had the checksums of what was sent",
        "", "| | broadcasts | seconds, median (least to most) | GB/s |", "|---|---|---|---|",
    ]  # fmt: skip
    medians = {}
    for way, name in (("packed", f"packed, {args.bucket_megabytes} MiB"), ("single", "one tensor at a time")):
        passes: dict[int, float] = {}
        for row in rows:
            if row.way == way and row.number >= args.warmup:
                passes[row.number] = max(passes.get(row.number, 0.0), row.seconds)
        medians[way] = statistics.median(passes.values())
        broadcasts = next(row.broadcasts for row in rows if row.way == way)
        lines.append(
            f"| {name} | {broadcasts} | {medians[way]:.4f} ({min(passes.values()):.4f} to {max(passes.values()):.4f}) "
            f"| {gigabytes / medians[way]:.3g} |"
        )
    return "\n".join([*lines, "", f"packed is {medians['single'] / medians['packed']:.2f} times as fast"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--gpus", type=int, default=2, help="processes: one sends, the others receive (%(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--bucket-megabytes", type=int, default=512, help="as in the configuration (%(default)s)")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2, help="passes before that are not counted (%(default)s)")
    args = parser.parse_args()
    if args.gpus < 2:
        parser.error("--gpus: one sends and at least one receives")
    with tempfile.TemporaryDirectory() as name:
        mp.spawn(share, (args, free_ports(), mp.get_context("spawn").Barrier(args.gpus), Path(name)), args.gpus)
        rows = [Row(*row) for file in Path(name).iterdir() for row in json.loads(file.read_text(encoding="utf-8"))]
    print(report(args, rows))


if __name__ == "__main__":
    main()

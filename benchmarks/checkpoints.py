"""Measure writing and reading a student's state: the checkpoint's files against torch.distributed.checkpoint.

    python benchmarks/checkpoints.py --shape 1.5b
    python benchmarks/checkpoints.py --shape tiny --device cpu
    python benchmarks/checkpoints.py --shape 1.5b --steps 24 --save-freq 12 --prompts 64 --response-length 512
    python benchmarks/checkpoints.py --shape tiny --device cpu --steps 24 --prompts 4 --response-length 32

With --steps, the cost of checkpoints within a run: PPO on one worker with every offload, random weights and a random
reward; saved in the background, then in the foreground. A step lasts from the end of the previous one to its own,
saving included; medians without the first two steps and the last, which always saves in the foreground. "while
writing": steps that do not save, during which files are written. A save that has to wait for the previous one includes
the wait: use a larger --save-freq then.

Without --steps: one process with random float32 weights and both moments in the shapes of Qwen2.5. Both write to the
disk (fsync) and read into the same tensors, in turns; only the first computes checksums, and `check` is the
verification at a start. GB/s are bytes of the state per time; reads come from the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from models import SHAPES, empty_model, full_tokenizer, make_model
from torch import Tensor

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.launch.plan import make_plan
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import trained_models
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.student.checkpoint_store import CheckpointStore, find_damage, write_manifest
from hybrid_gkd.student.shard_files import Part, ShardFiles, write_shard
from hybrid_gkd.testing import MetricRows
from hybrid_gkd.types import Rollout, Task
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

LEFT_OUT = 2
"""Steps at the beginning of a run that do not count."""


def write(state: dict[str, Tensor], folder: Path) -> None:
    """Write a checkpoint as the worker and the store do."""
    parts = [
        Part(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.shape), 0, lambda tensor=tensor: tensor)
        for name, tensor in state.items()
    ]
    written = write_shard(folder / "actor" / "rank_0_of_1.safetensors", parts)
    write_manifest(folder, {"actor/rank_0_of_1.safetensors": written})


def read(state: dict[str, Tensor], folder: Path) -> None:
    """Read the shards as the worker does."""
    files = ShardFiles(folder / "actor")
    for name, tensor in state.items():
        files.read(name, tensor, tuple(tensor.shape), 0)


def check(state: dict[str, Tensor], folder: Path) -> None:
    """Check a checkpoint as a start does."""
    assert find_damage(folder) == {}


def seconds(action: Callable[[dict[str, Tensor], Path], object], state: dict[str, Tensor], folder: Path) -> float:
    """Seconds of one call, with the work of the device."""
    started = time.perf_counter()
    action(state, folder)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


class TimedTrainer(PPOTrainer):
    """Notes when each step ends, and whether files are being written then."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.ends: list[tuple[float, bool]] = []

    def _train_step(self, rollout: Rollout) -> None:
        super()._train_step(rollout)
        self.ends.append((time.perf_counter(), self.saving.is_writing))


def print_steps(args: argparse.Namespace, folder: Path) -> None:
    """Train twice on one group of workers."""
    tokenizer = full_tokenizer(args.shape)
    model, fsdp = make_model(folder / "model", args.shape, tokenizer), "actor_rollout_ref.actor.fsdp_config"
    total, rng = LEFT_OUT + args.steps + 1, np.random.default_rng(0)
    config = load_config([
        "data.train_files=unused", f"actor_rollout_ref.model.path={model}", f"data.train_batch_size={args.prompts}",
        "data.max_prompt_length=64", f"data.max_response_length={args.response_length}", "reward.answer_key=answer",
        "distillation.enabled=false", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.optim.lr=1e-9",
        f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true", f"trainer.total_training_steps={total}",
        f"trainer.save_freq={args.save_freq}", f"trainer.default_local_dir={folder}", f"trainer.device={args.device}",
        *(["actor_rollout_ref.rollout.name=hf"] if args.device == "cpu" else []), *args.overrides,
    ])  # fmt: skip
    prompts = [
        Task(index=i, token_ids=rng.integers(0, 200, 64).astype(np.int32), text="", answer="")
        for i in range(args.prompts)
    ]
    plan = make_plan(config, trained_models(config, student_spec(config)), args.device)
    with ray_cluster(config, args.device), contextlib.closing(
        WorkerGroup(config, device=args.device, num_updates=total, stop_token_ids=[tokenizer.eos_token_id],
                    engine_memory=plan.memory.engine_memory, copy_bytes=plan.copy_bytes)
    ) as group:
        assert group.saves_in_background, "the host has no memory for a copy of a checkpoint"
        for way in ("behind", "at once"):
            group.saves_in_background = way == "behind"
            trainer = TimedTrainer(
                config, group=group, tokenizer=tokenizer, train_prompts=prompts, val_prompts=[], tracking=MetricRows(),
                reward=lambda response, answer: float(len(response) % 7), store=CheckpointStore(folder / way, keep=1),
            )
            trainer.fit()
            print_way(way, trainer.ends, args.save_freq)
            shutil.rmtree(folder / way)


def print_way(way: str, ends: list[tuple[float, bool]], save_freq: int) -> None:
    """The medians of a run: `ends` of each step, and whether files were being written then."""
    taken: dict[str, list[float]] = {"saves": [], "while writing": [], "other": []}
    waited = 0
    for step in range(LEFT_OUT + 1, len(ends)):
        (before, writes), (end, _) = ends[step - 2 : step]
        kind = "saves" if step % save_freq == 0 else "while writing" if writes else "other"
        waited += writes and kind == "saves"
        taken[kind].append(end - before)
    medians = {kind: statistics.median(found) for kind, found in taken.items() if found}
    parts = ", ".join(f"{kind} {found:.3f} s ({len(taken[kind])})" for kind, found in medians.items())
    other = medians["other"]
    more, most = medians["saves"] - other, max(taken["saves"]) - other
    print(f"{way}: {parts}; waited for the one before: {waited}")
    ratio = medians["saves"] / other
    print(f"    step that saves / other step: {ratio:.2f}, {more:+.3f} s, at most {most:+.3f} s", flush=True)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's for temporary files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="measure steps of a run, so many")
    parser.add_argument("--save-freq", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=16, help="a step, with 4 responses each")
    parser.add_argument("--response-length", type=int, default=256)
    parser.add_argument("overrides", nargs="*", help="configuration keys, for --steps")
    args = parser.parse_args()
    if args.steps:
        # A step that saves has to be among those that count, and one before it in which no files are written.
        if not LEFT_OUT + 2 <= args.save_freq <= LEFT_OUT + args.steps:
            parser.error(f"--save-freq must be from {LEFT_OUT + 2} to --steps + {LEFT_OUT}, is {args.save_freq}")
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            print_steps(args, Path(folder))
        return
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

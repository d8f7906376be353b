"""Measure one of several optimizer steps per rollout, from the driver: with teacher scores that are there already.

    python benchmarks/optimizer_steps.py --shape 135m
    python benchmarks/optimizer_steps.py --shape 135m actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
    python benchmarks/optimizer_steps.py --shape narrow --device cpu --length 8 --mini-batches 64 2
    PYTHONPATH=/another/checkout python benchmarks/optimizer_steps.py --shape 135m

A worker on Ray with random weights, random completions of one length and random top-64 scores; one micro-batch per
step. The first rollout, in which kernels are compiled, is left out; figures are medians over the others. "between
steps" is what the worker waits for the driver: the wall-clock time without the three others.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from common import device_name
from models import SHAPES, make_model, random_scores

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.scoring.teacher_scorer import Scores
from hybrid_gkd.testing import LocalTeacher, MetricRows, NumberTokenizer, make_sample
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Sample, Task
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

TOPK, PROMPT = 64, 4
PARTS = ("compute", "optimizer_step", "copies")


def rollout(args: argparse.Namespace, number: int) -> tuple[list[Sample], Scores]:
    """Return the samples of `number` mini-batches, and their scores."""
    vocabulary, rng = SHAPES[args.shape][5], np.random.default_rng(0)
    samples, scores = [], Scores()
    for row in range(number * args.samples):
        ids = rng.integers(0, vocabulary, PROMPT + args.length).tolist()
        samples.append(make_sample(row, prompt=ids[:PROMPT], completion=ids[PROMPT:]))
        scores[samples[-1].id] = future = Future()
        future.set_result(random_scores(rng, args.length, vocabulary, TOPK))
    return samples, scores


def measure(args: argparse.Namespace, number: int) -> list[dict[str, float]]:
    """Return milliseconds per optimizer step of each rollout, by part."""
    actor, rows = "actor_rollout_ref.actor", []
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([
            "data.train_files=unused", f"actor_rollout_ref.model.path={make_model(Path(folder) / 'model', args.shape)}",
            "actor_rollout_ref.teacher.server_ip=unused", f"trainer.default_local_dir={folder}",
            f"data.max_prompt_length={PROMPT}", f"data.max_response_length={args.length}",
            f"trainer.device={args.device}", "actor_rollout_ref.rollout.name=hf", f"distillation.topk={TOPK}",
            f"data.train_batch_size={number * args.samples}", f"{actor}.ppo_mini_batch_size={args.samples}",
            f"{actor}.ppo_max_token_len_per_gpu={args.samples * (PROMPT + args.length)}", *args.overrides,
        ])  # fmt: skip
        tasks = [
            Task(index=row, token_ids=np.arange(PROMPT, dtype=np.int32), text="", answer="")
            for row in range(number * args.samples)
        ]
        with ray_cluster(config, args.device), contextlib.closing(
            WorkerGroup(config, device=args.device, num_updates=number * args.rollouts, log_folder=Path(folder))
        ) as group:
            trainer = GKDTrainer(
                config, group=group, teacher=LocalTeacher(lambda reading: None), tokenizer=NumberTokenizer(),
                train_prompts=tasks, val_prompts=[], tracking=MetricRows(), store=None, reward=None,
            )  # fmt: skip
            for _ in range(args.rollouts):
                samples, scores = rollout(args, number)
                started = time.perf_counter()
                trainer._train_as_scored(samples, scores)
                row = {"all": time.perf_counter() - started}
                found = group.device_metrics()
                row |= {part: found[f"timing/update_actor/{part}"] for part in PARTS}
                row["between steps"] = row["all"] - sum(row[part] for part in PARTS)
                rows.append({name: 1e3 * seconds / number for name, seconds in row.items()})
    return rows[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="configuration keys, dotted.key=value")
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mini-batches", type=int, nargs="+", default=[64, 2], help="per rollout")
    parser.add_argument("--samples", type=int, default=16, help="per mini-batch")
    parser.add_argument("--length", type=int, default=196, help="tokens of a completion")
    parser.add_argument("--rollouts", type=int, default=4)
    args = parser.parse_intermixed_args()
    names = ("all", *PARTS, "between steps")
    print(f"{device_name(args.device)}, {args.shape}, ms per optimizer step\n")
    print(f"| mini-batches | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for number in args.mini_batches:
        rows = measure(args, number)
        cells = [f"{statistics.median(row[name] for row in rows):.1f}" for name in names]
        print(f"| {number} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

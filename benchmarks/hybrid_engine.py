"""Measure the hybrid engine on GPUs: switches, copies, publishes, memory, throughput.

    python benchmarks/hybrid_engine.py --shape 1.5b --gpus 1
    python benchmarks/hybrid_engine.py --shape 7b --prompts 32 --new-tokens 128 --enforce-eager --steps 5
    python benchmarks/hybrid_engine.py --shape 1.5b --gpus 4 --prompts 512

Random weights in the shapes of Qwen2.5, random prompts and teacher scores; hardly any response ends early. All
figures are of one run; the first two steps, in which kernels are compiled and memory is locked, are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from models import SHAPES, make_model, random_scores
from transformers import Qwen2ForCausalLM

from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.launch.plan import make_plan
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import trained_models
from hybrid_gkd.types import GenerationRequest, MiniBatch, Sample, SampleId, SamplingParams
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

WARMUP_STEPS = 2
REFERENCE_SEQUENCES = 8
TOPK = 64


def configure(args: argparse.Namespace, folder: Path) -> Config:
    """The configuration that the command line asks for."""
    offload = str(not args.no_offload).lower()
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return load_config(
        [
            "data.train_files=unused", f"actor_rollout_ref.model.path={make_model(folder / 'model', args.shape)}",
            "actor_rollout_ref.teacher.server_ip=unused", f"trainer.default_local_dir={folder}",
            f"data.max_prompt_length={args.prompt_tokens}", f"data.max_response_length={args.new_tokens}",
            "trainer.device=cuda", f"trainer.n_gpus_per_node={args.gpus}", f"{rollout}.name=vllm",
            f"{rollout}.tensor_model_parallel_size={args.tensor_parallel}",
            f"{rollout}.gpu_memory_utilization={args.gpu_memory_utilization or 'null'}",
            f"{rollout}.enforce_eager={str(args.enforce_eager).lower()}", f"{rollout}.free_cache_engine={offload}",
            f"{actor}.fsdp_config.param_offload={offload}", f"{actor}.fsdp_config.optimizer_offload={offload}",
            f"{actor}.ppo_max_token_len_per_gpu={args.micro_batch_tokens}", f"distillation.topk={TOPK}",
            *args.overrides,
        ]
    )


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """One row of seconds and bytes per step; row i's publish and moves end step i - 1."""
    config, vocabulary = configure(args, folder), SHAPES[args.shape][5]
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            id=SampleId(1, i, 0), prompt_ids=rng.integers(0, vocabulary, args.prompt_tokens).astype(np.int32), seed=i
        )
        for i in range(args.prompts)
    ]
    rows, first = [], []
    plan = make_plan(config, trained_models(config, student_spec(config)), "cuda")
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=args.steps, stop_token_ids=[vocabulary - 1],
                    engine_memory=plan.memory.engine_memory)
    ) as group:
        for step in range(args.steps):
            row: dict[str, float] = dict(group.publish(step))
            started = time.perf_counter()
            sampling = SamplingParams(max_tokens=args.new_tokens, logprobs=step == 0)
            found = sorted((s for part in group.generate(requests, sampling) for s in part), key=lambda s: s.id)
            row["generate"] = time.perf_counter() - started
            batch = train_batch(args, found, vocabulary, rng)
            if step == 0:
                first, own = found, group.compute_logprobs(batch)
            row |= update(args, group, found, batch)
            rows.append(row | group.device_metrics())
    exact = reference_logprobs(config.actor_rollout_ref.model.path, first[:REFERENCE_SEQUENCES])
    rows[-1]["engine and actor"] = mean_difference((s.logprobs, own[s.id]) for s in first)
    rows[-1]["engine and float32"] = mean_difference((s.logprobs, exact[s.id]) for s in first if s.id in exact)
    rows[-1]["actor and float32"] = mean_difference((own[each], exact[each]) for each in exact)
    return rows


def mean_difference(pairs: Iterable[tuple[np.ndarray | None, np.ndarray]]) -> float:
    """Mean absolute difference of log-probabilities."""
    return float(np.mean(np.concatenate([np.abs(one - other) for one, other in pairs if one is not None])))


@torch.no_grad()
def reference_logprobs(path: str, samples: list[Sample]) -> dict[SampleId, np.ndarray]:
    """Return log-probabilities of the trained tokens, with the same weights in float32."""
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").cuda()
    found = {}
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64)).cuda()
        logits, chosen = model(ids[None]).logits[0, sample.positions - 1], ids[sample.positions, None]
        found[sample.id] = logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu().numpy()
    return found


Shares = list[tuple[tuple[Sample, ...], ...]]


def train_batch(args: argparse.Namespace, found: list[Sample], vocabulary: int, rng: np.random.Generator) -> Shares:
    """Worker -> micro-batches."""
    batch = [s.with_signals(teacher=random_scores(rng, s.num_trained, vocabulary, TOPK)) for s in found]
    plan = plan_micro_batches([s.num_tokens for s in found], args.gpus, args.micro_batch_tokens, None, True)
    return [tuple(tuple(batch[i] for i in members) for members in share) for share in plan]


def update(args: argparse.Namespace, group: WorkerGroup, found: list[Sample], shares: Shares) -> dict[str, float]:
    """One optimizer step on all samples."""
    new_tokens = sum(s.num_trained for s in found)
    started = time.perf_counter()
    group.update([[MiniBatch(micro_batches=share, num_tokens=new_tokens)] for share in shares])
    seconds = time.perf_counter() - started
    return {"update": seconds, "new tokens": new_tokens, "tokens": sum(s.num_tokens for s in found)}


def report(args: argparse.Namespace, rows: list[dict[str, float]]) -> str:
    """The figures as a Markdown table: medians of the counted steps, memory as their maximum."""
    counted = rows[WARMUP_STEPS:]
    figure = {name: statistics.median(row[name] for row in counted) for name in counted[0]}
    lines = [
        f"{torch.cuda.get_device_name(0)} x {args.gpus}, torch {torch.__version__}, {args.shape}, tensor parallel "
        f"{args.tensor_parallel}, {args.prompts} prompts of {args.prompt_tokens} tokens, {args.new_tokens} new tokens",
        "",
        "| what | figure |",
        "|---|---|",
        f"| switch rollout -> update -> rollout, all of it | {figure['offload'] + figure['publish']:.3f} s |",
        f"| publish | {figure['publish'] * 1000:.0f} ms |",
    ]
    moves = sorted(name for name in figure if name.startswith(("acquire", "release", "trim")))
    lines += [f"| of it, {move} | {figure[move] * 1000:.0f} ms |" for move in moves]
    copies = sorted(name for name in figure if name.startswith("perf/copy/"))
    lines += [f"| {name.removeprefix('perf/')} | {figure[name]:.1f} GB/s |" for name in copies]
    lines += [
        f"| generate | {figure['generate']:.2f} s, {figure['new tokens'] / figure['generate']:.0f} new tokens/s |",
        f"| update | {figure['update']:.2f} s, {figure['tokens'] / figure['update']:.0f} tokens/s |",
    ]
    for pair in ("engine and actor", "engine and float32", "actor and float32"):
        lines.append(f"| mean difference of log-probabilities, {pair} | {rows[-1][pair]:.4f} |")
    memory = {name: max(row.get(name, 0.0) for row in counted) for name in sorted(rows[-1]) if name.endswith("_gb")}
    lines += [f"| {name} | {value:.2f} GiB |" for name, value in memory.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="configuration keys, dotted.key=value")
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6, help="0: computed from what is free")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-offload", action="store_true", help="leave everything on the GPU")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: starts a minute faster")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        print(report(args, measure(args, Path(folder))))


if __name__ == "__main__":
    main()

"""Measure training throughput: Actor.update on packed sequences of mixed lengths, as a fraction of the matmul rate.

    python benchmarks/training.py --shape 1.5b
    python benchmarks/training.py --shape 0.5b --variants compile --profile
    python benchmarks/training.py --shape 1.5b --gpus 1 2 4 --variants compile

Forward KL to random top-64 teacher scores; prompts of 64 to 512 tokens, responses of 64 to 3,584, both uniform;
packed micro-batches of at most 16,384 tokens, the same number of tokens on each GPU. Each variant runs in processes
of its own; the first updates, which compile and allocate, are left out. Model FLOPs are those of `training_flops`, as
in perf/mfu. The card's rate is that of an 8192 x 8192 x 8192 product of random bf16 numbers in the same process.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import SHAPES, make_model, random_scores

from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.data.packing import attention_cost, plan_micro_batches
from hybrid_gkd.models.spec import model_spec, training_flops
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.testing import make_sample
from hybrid_gkd.types import MiniBatch, Sample

TOPK = 64
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
VARIANTS = {
    "eager": [f"{ACTOR}.use_torch_compile=false"],
    "compile": [f"{ACTOR}.use_torch_compile=true"],
    "eager+checkpointing": [f"{ACTOR}.use_torch_compile=false", f"{MODEL}.enable_gradient_checkpointing=true"],
    "compile+checkpointing": [f"{ACTOR}.use_torch_compile=true", f"{MODEL}.enable_gradient_checkpointing=true"],
}
KERNEL_CLASSES = [
    # class, names; the first that matches counts
    ("attention", "flash|fmha|varlen"),
    ("matrix products", "nvjet|gemm|cutlass|cublas|splitKreduce"),
    ("head", "_statistics|_gradient$|_scale$|topk"),
    ("optimizer and clipping", "adam|multi_tensor|lpnorm|foreach_norm"),
    ("collectives", "nccl"),
    ("FSDP2 copies", "split_with_sizes|chunk_cat|CatArray"),
    ("memory copies and fills", "Memcpy|Memset|FillFunctor"),
    ("casts and strided copies", "copy_kernel|direct_copy|bfloat16_copy|bfloat16tofloat32"),
    ("compiled", "triton_"),
    ("elementwise and reductions", "."),
]


def make_batch(args: argparse.Namespace, world_size: int) -> list[MiniBatch]:
    """One mini-batch, a share for each rank; the same number of tokens per rank whatever the number of ranks."""
    hidden, vocabulary = SHAPES[args.shape][0], SHAPES[args.shape][5]
    rng = np.random.default_rng(0)
    share: list[Sample] = []
    room = args.micro_batches * args.micro_batch_tokens
    while True:
        prompt, response = int(rng.integers(64, 513)), int(rng.integers(64, 3585))
        prompt, response = (max(1, n * args.max_length // 4096) for n in (prompt, response))
        if prompt + response > room:
            break
        room -= prompt + response
        prompt_ids, response_ids = (rng.integers(0, vocabulary, n).tolist() for n in (prompt, response))
        teacher = random_scores(rng, response, vocabulary, TOPK)
        share.append(make_sample(len(share), prompt=prompt_ids, completion=response_ids, teacher=teacher))
    everything = share * world_size
    plan = plan_micro_batches(
        [s.num_tokens for s in everything], world_size, args.micro_batch_tokens, None, True,
        attention_cost(hidden),
    )  # fmt: skip
    num_tokens = sum(s.num_trained for s in everything)
    return [
        MiniBatch(micro_batches=tuple(tuple(everything[i] for i in m) for m in bins), num_tokens=num_tokens)
        for bins in plan
    ]


def matmul_rate(device: torch.device, size: int = 8192) -> float:
    """Operations per second of a square bf16 product, warm."""
    if device.type == "cpu":
        size = 512
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))

    def burst() -> None:
        for _ in range(10):
            left @ right

    burst()
    return 10 * 2 * size**3 / statistics.median(seconds(burst, device) for _ in range(5))


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock time, the device's work included."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - started


def configure(args: argparse.Namespace, variant: str, model: Path, world_size: int) -> Config:
    """The configuration that the command line asks for."""
    return load_config(
        [
            "data.train_files=unused", f"{MODEL}.path={model}", "actor_rollout_ref.teacher.server_ip=unused",
            f"data.max_prompt_length={args.max_length // 8}", f"data.max_response_length={args.max_length * 7 // 8}",
            f"trainer.n_gpus_per_node={world_size}", f"distillation.topk={TOPK}",
            f"{ACTOR}.ppo_max_token_len_per_gpu={args.micro_batch_tokens}", *VARIANTS[variant], *args.overrides,
        ]
    )  # fmt: skip


def train(
    rank: int, world_size: int, variant: str, model: Path, rendezvous: Path, args: argparse.Namespace, results: Any,
) -> None:
    """One rank: measures and, as rank 0, puts the figures into `results`."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{rendezvous}",
        rank=rank, world_size=world_size,
    )  # fmt: skip
    batches = make_batch(args, world_size)
    actor = Actor(configure(args, variant, model, world_size), device=device, num_updates=100)
    samples = [sample for batch in batches for micro in batch.micro_batches for sample in micro]
    flops = training_flops(
        model_spec(str(model), trust_remote_code=False, override_config={}), [s.num_tokens for s in samples],
        sum(s.num_trained for s in samples),
    ) / world_size  # fmt: skip
    computed: list[int] = []
    actor.hf_model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: computed.append(ids[0].numel()))
    times = [seconds(lambda: actor.update(batches[rank]), device) for _ in range(args.steps)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    computed_tokens, rate = sum(computed), matmul_rate(device)
    profile = profile_update(actor, batches[rank]) if args.profile and cuda else ""
    if rank == 0:
        own = sum(sample.num_tokens for micro in batches[0].micro_batches for sample in micro)
        total = sum(sample.num_tokens for sample in samples)
        results.put(
            {
                "step": statistics.median(times[args.warmup :]), "first": times[0], "peak": peak, "flops": flops,
                "rate": rate, "tokens": total / world_size, "micro_batches": len(batches[0].micro_batches),
                "profile": profile, "padding": 1 - own * args.steps / computed_tokens,
                "device": torch.cuda.get_device_name() if cuda else "CPU",
                "spread": (min(times[args.warmup :]), max(times[args.warmup :])),
            }
        )  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def profile_update(actor: Actor, batch: MiniBatch) -> str:
    """Device time of one update by class of kernel, and the time in which no kernel ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall = seconds(lambda: actor.update(batch), actor.device)
    classes: dict[str, list[float]] = {}
    names: dict[str, float] = {}
    spans = []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = next(c for c, pattern in KERNEL_CLASSES if re.search(pattern, event.name, re.IGNORECASE))
        classes.setdefault(name, []).append(event.device_time / 1e3)
        names[event.name] = names.get(event.name, 0.0) + event.device_time / 1e3
        spans.append((event.time_range.start, event.time_range.end))
    busy, until = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    lines = [f"{wall * 1e3:9.1f} ms wall, {wall * 1e3 - busy / 1e3:.1f} ms of it without a kernel"]
    lines += [f"{sum(t):9.1f} ms {len(t):6d} {name}" for name, t in sorted(classes.items(), key=lambda c: -sum(c[1]))]
    top = sorted(names.items(), key=lambda item: -item[1])[:12]
    return "\n".join([*lines, "longest:", *(f"{t:9.1f} ms {name[:110]}" for name, t in top)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="configuration keys, dotted.key=value")
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--model", type=Path, help="folder of a model of this shape; default: random weights")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["eager", "compile"])
    parser.add_argument("--micro-batches", type=int, default=4, help="per GPU and optimizer step")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--max-length", type=int, default=4096, help="tokens of the longest sequences, about")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="steps left out")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_intermixed_args()
    lines = [
        "| variant | GPUs | update s (fastest, slowest) | tokens/s | TFLOP/s per GPU | of the matmul rate | "
        "efficiency | peak GiB | first update s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    heading = ""
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_model(Path(folder) / "model", args.shape)
        for variant in args.variants:
            single = None
            for world_size in args.gpus:
                results = mp.get_context("spawn").SimpleQueue()
                rendezvous = Path(folder) / f"{variant}{world_size}"
                mp.spawn(train, (world_size, variant, model, rendezvous, args, results), nprocs=world_size)
                r = results.get()
                speed = r["tokens"] / r["step"]
                single = single or speed
                achieved = r["flops"] / r["step"]
                heading = (
                    f"{r['device']}, torch {torch.__version__}, {args.shape}, {r['tokens']:.0f} tokens per GPU and "
                    f"update in {r['micro_batches']} micro-batches, padding {r['padding']:.1%}, "
                    f"bf16 product {r['rate'] / 1e12:.0f} TFLOP/s"
                )
                lines.append(
                    f"| {variant} | {world_size} | {r['step']:.3f} ({r['spread'][0]:.3f}, {r['spread'][1]:.3f}) | "
                    f"{speed * world_size:.0f} | {achieved / 1e12:.0f} | {achieved / r['rate']:.1%} | "
                    f"{speed / single:.1%} | {r['peak']:.1f} | {r['first']:.1f} |"
                )
                print(f"{variant}, {world_size} GPUs\n{r['profile']}\n{lines[-1]}", flush=True)
    print("\n".join(["", heading, "", *lines]))


if __name__ == "__main__":
    main()

"""What taking turns costs on GPUs: switches, copies, publishes, memory, throughput.

    python benchmarks/hybrid_engine.py --shape 1.5b --gpus 1
    python benchmarks/hybrid_engine.py --shape 7b --gpus 1 --prompts 32 --enforce-eager
    python benchmarks/hybrid_engine.py --shape 1.5b --gpus 2 --tensor-parallel 2

Random weights in the shapes of Qwen2.5, random prompts and teacher scores; hardly any response ends early. All
figures are of one run; the first two steps, in which kernels are compiled and memory is locked, are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import tiny
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_gkd.config import Config, load_config
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.types import GenerationRequest, MiniBatch, SamplingParams, Sequence, TeacherTopK, TrainSequence
from hybrid_gkd.workers.group import WorkerGroup, ray_cluster

SHAPES = {
    # name: hidden, intermediate, layers, heads, kv heads, vocabulary, tied embeddings
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
WARMUP_STEPS = 2
TOPK = 64


def empty_model(shape: str) -> Qwen2ForCausalLM:
    """The shape without memory for its weights."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[shape]
    tokenizer = tiny.make_tokenizer()
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096,
        tie_word_embeddings=tied, rope_theta=1e6, dtype="bfloat16", eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, architectures=["Qwen2ForCausalLM"],
    )
    with init_empty_weights():
        model = Qwen2ForCausalLM(config)
    model.tie_weights()  # init_empty_weights makes two parameters of a tied one
    return model


def make_model(folder: Path, shape: str) -> Path:
    """A folder of random bf16 weights."""
    model = empty_model(shape)
    generator = torch.Generator("cuda").manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():
        values = torch.ones(parameter.shape, device="cuda")
        if parameter.ndim > 1 or name.endswith("bias"):
            values.normal_(0, 0.02, generator=generator)
        weights[name] = values.to(torch.bfloat16).cpu()
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.make_tokenizer().save_pretrained(folder)
    torch.cuda.empty_cache()
    return folder


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
            f"{rollout}.gpu_memory_utilization={args.gpu_memory_utilization}",
            f"{rollout}.enforce_eager={str(args.enforce_eager).lower()}", f"{rollout}.free_cache_engine={offload}",
            f"{actor}.fsdp_config.param_offload={offload}", f"{actor}.fsdp_config.optimizer_offload={offload}",
            f"{actor}.ppo_max_token_len_per_gpu={args.micro_batch_tokens}", f"distillation.topk={TOPK}",
            *args.overrides,
        ]
    )


def random_scores(rng: np.random.Generator, count: int, vocabulary: int) -> TeacherTopK:
    """Valid scores; ids are consecutive, which costs the loss what any others do."""
    first = rng.integers(0, vocabulary - TOPK, count)
    ids = (first[:, None] + np.arange(TOPK)).astype(np.int32)
    logprobs = np.full((count, TOPK), np.log(0.9 / TOPK), np.float32)
    return TeacherTopK(ids=ids, logprobs=logprobs, sampled_logprobs=logprobs[:, 0])


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """One row of seconds and bytes per step; row i's publish and moves end step i - 1."""
    config, vocabulary = configure(args, folder), SHAPES[args.shape][5]
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(index=i, prompt_ids=rng.integers(0, vocabulary, args.prompt_tokens).astype(np.int32), seed=i)
        for i in range(args.prompts)
    ]
    rows = []
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=args.steps, stop_token_ids=[vocabulary - 1])
    ) as group:
        for step in range(args.steps):
            row: dict[str, float] = dict(group.publish(step))
            started = time.perf_counter()
            last = step == args.steps - 1
            sampling = SamplingParams(max_tokens=args.new_tokens, logprobs=last)
            found = sorted((s for part in group.generate(requests, sampling) for s in part), key=lambda s: s.index)
            row["generate"] = time.perf_counter() - started
            row |= update(args, group, found, vocabulary, rng, compare=last)
            rows.append(row | group.memory_metrics())
    return rows


def update(
    args: argparse.Namespace, group: WorkerGroup, found: list[Sequence], vocabulary: int, rng: np.random.Generator,
    *, compare: bool,
) -> dict[str, float]:
    """One optimizer step on all sequences; with `compare` also the actor's own log-probabilities."""
    row: dict[str, float] = {}
    new_tokens = sum(len(s.response_ids) for s in found)
    batch = [TrainSequence(sequence=s, teacher=random_scores(rng, len(s.response_ids), vocabulary)) for s in found]
    plan = plan_micro_batches([s.num_tokens for s in found], args.gpus, args.micro_batch_tokens, None, True)
    shares = [tuple(tuple(batch[i] for i in members) for members in share) for share in plan]
    if compare:
        own = group.compute_logprobs(shares)
        row["logprob difference"] = float(
            np.mean(np.concatenate([np.abs(s.logprobs - own[s.index]) for s in found if s.logprobs is not None]))
        )
    started = time.perf_counter()
    group.update([[MiniBatch(micro_batches=share, num_tokens=new_tokens)] for share in shares])
    row["update"] = time.perf_counter() - started
    return row | {"new tokens": new_tokens, "tokens": sum(s.num_tokens for s in found)}


def report(args: argparse.Namespace, rows: list[dict[str, float]]) -> str:
    """The figures as a Markdown table: medians of the counted steps, memory as their maximum."""
    counted = rows[WARMUP_STEPS:]
    figure = {name: statistics.median(row[name] for row in counted) for name in counted[0]}
    copy_gb = 4 * sum(p.numel() for p in empty_model(args.shape).parameters()) / args.gpus / 1e9
    lines = [
        f"{torch.cuda.get_device_name(0)} x {args.gpus}, torch {torch.__version__}, {args.shape}, tensor parallel "
        f"{args.tensor_parallel}, {args.prompts} prompts of {args.prompt_tokens} tokens, {args.new_tokens} new tokens",
        "",
        "| what | figure |",
        "|---|---|",
        f"| switch rollout -> update -> rollout, all of it | {figure['offload'] + figure['publish']:.3f} s |",
        f"| publish | {figure['publish'] * 1000:.0f} ms |",
    ]
    for move in sorted(name for name in figure if name.startswith(("acquire", "release"))):
        scale = {"actor_params": 1, "optimizer_state": 2}.get(move.split()[1])
        rate = f" ({scale * copy_gb / figure[move]:.1f} GB/s)" if scale and figure[move] > 1e-3 else ""
        lines.append(f"| {move} | {figure[move] * 1000:.0f} ms{rate} |")
    lines += [
        f"| generate | {figure['generate']:.2f} s, {figure['new tokens'] / figure['generate']:.0f} new tokens/s |",
        f"| update | {figure['update']:.2f} s, {figure['tokens'] / figure['update']:.0f} tokens/s |",
        f"| mean difference of log-probabilities, engine and actor | {rows[-1]['logprob difference']:.4f} |",
    ]
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
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-offload", action="store_true", help="leave everything on the GPU")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: starts a minute faster")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        print(report(args, measure(args, Path(folder))))


if __name__ == "__main__":
    main()

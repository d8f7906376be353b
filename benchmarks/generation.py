"""Measure generation against the GPU time of its kernels: vLLM's own code and the short paths for decode steps.

    python benchmarks/generation.py --shape 0.5b --sequences 128 256 512
    python benchmarks/generation.py --shape 1.5b --sequences 128 --lengths geometric
    python benchmarks/generation.py --sequences 256 --lengths equal    # one row, within a minute

One engine in one process, built as a run builds it, generates the same sequences (same prompts, same seeds) three ways:
with vLLM's scheduler and model runner and log-probabilities ("vLLM+lp"), with our paths through both ("ours"), and with
these and log-probabilities ("ours+lp"); and once more under torch's profiler, for the time of the kernels alone. Random
weights in the shapes of Qwen2.5; no sequence ends before its length. "same": all tokens are equal, and
log-probabilities within 2e-5. Steps: on the model runner's short path, and all others. All figures are of one run;
seconds are the best of `--repeats`, for vLLM of one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import SHAPES, make_model
from safetensors.torch import load_file

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.rollout.vllm import VLLMRolloutEngine
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.types import GenerationRequest, Sample, SampleId, SamplingParams
from hybrid_gkd.workers.process_group import GroupMember

PROMPT_TOKENS = 128


def lengths_of(kind: str, limit: int, sequences: int) -> np.ndarray:
    """Tokens of every sequence: all alike, or geometric with a quarter of the limit as their mean."""
    if kind == "equal":
        return np.full(sequences, limit)
    return np.minimum(np.random.default_rng(0).geometric(4 / limit, sequences), limit)


def generate(engine: VLLMRolloutEngine, lengths: np.ndarray, vocabulary: int, *, logprobs: bool) -> dict[str, Any]:
    """Seconds, steps, tokens and log-probabilities of one generation."""
    prompts = np.random.default_rng(1).integers(0, vocabulary, (len(lengths), PROMPT_TOKENS)).astype(np.int32)
    torch.cuda.synchronize()
    started, steps, found = time.perf_counter(), 0, list[Sample]()
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        request = GenerationRequest(id=SampleId(1, row, 0), prompt_ids=prompt, seed=row)
        engine.add([request], SamplingParams(max_tokens=int(length), logprobs=logprobs))
    while engine.has_unfinished:
        steps += 1
        found += engine.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    assert all(sample.status == "length" for sample in found)
    assert engine.llm.reset_prefix_cache()
    return {
        "seconds": seconds, "steps": steps, "tokens": {sample.id: sample.trained_ids.tolist() for sample in found},
        "logprobs": {sample.id: sample.logprobs for sample in found if logprobs},
    }


def kernel_seconds(engine: VLLMRolloutEngine, lengths: np.ndarray, vocabulary: int) -> float:
    """Seconds in which at least one kernel or copy ran, of one generation."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        generate(engine, lengths, vocabulary, logprobs=False)
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total, last = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total / 1e6


def make_engine(args: argparse.Namespace, folder: Path, model: str) -> VLLMRolloutEngine:
    config = load_config(
        [
            "data.train_files=unused", f"actor_rollout_ref.model.path={model}", "trainer.device=cuda",
            "actor_rollout_ref.teacher.server_ip=unused", f"trainer.default_local_dir={folder}",
            f"data.max_prompt_length={PROMPT_TOKENS}", f"data.max_response_length={args.new_tokens}",
            f"actor_rollout_ref.rollout.max_num_seqs={max(args.sequences)}",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6", *args.overrides,
        ]
    )
    member = GroupMember(config, role="worker", rank=0, size=1, device_type="cuda")
    member.join(member.address(), Timeout(60.0))
    engine = VLLMRolloutEngine(config, device=torch.device("cuda", 0), stop_token_ids=[])
    weights = load_file(Path(model) / "model.safetensors")
    engine.load_weights(((name, weight.cuda()) for name, weight in weights.items()), 0)
    return engine


def main() -> None:
    """Print a row for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--sequences", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--lengths", choices=["equal", "geometric"], nargs="+", default=["equal", "geometric"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="configuration keys")
    args = parser.parse_intermixed_args()
    vocabulary = SHAPES[args.shape][5]
    names = "shape lengths seqs vLLM+lp ours_s ours+lp kernels ratio tok/s same short/other"
    header = "{:6} {:10} {:>5} {:>8} {:>7} {:>8} {:>8} {:>6} {:>7} {} {}".format(*names.split())
    figures = "{:8.2f} {:7.2f} {:8.2f} {:8.2f} {:6.2f} {:7.0f}"
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(args, Path(folder), make_model(Path(folder) / "model", args.shape))
        assert engine.scheduler is not None, "the short path through the scheduler was not installed"
        assert engine.runner is not None, "the short path through the model runner was not installed"
        print(header)
        for name in args.lengths:
            for sequences in args.sequences:
                row = measure(args.repeats, engine, lengths_of(name, args.new_tokens, sequences), vocabulary)
                shown = f"{{:6}} {{:10}} {{:5d}} {figures} {{}} {{}}".format(args.shape, name, sequences, *row)
                print(shown, flush=True)


def measure(repeats: int, engine: VLLMRolloutEngine, lengths: np.ndarray, vocabulary: int) -> list[Any]:
    """The figures of one row."""
    scheduler, runner = engine.scheduler, engine.runner
    our_scheduler, our_runner = type(scheduler), type(runner)
    scheduler.__class__, runner.__class__, engine.scheduler = our_scheduler.vllm, our_runner.vllm, None
    rows = {"vLLM": [generate(engine, n, vocabulary, logprobs=True) for n in (1 + lengths // 8, lengths)][1:]}
    scheduler.__class__, runner.__class__, engine.scheduler = our_scheduler, our_runner, scheduler
    short, other = runner.short_steps, runner.full_steps
    for way, logprobs in (("ours", False), ("ours+lp", True)):
        generate(engine, 1 + lengths // 8, vocabulary, logprobs=logprobs)  # warms up
        rows[way] = [generate(engine, lengths, vocabulary, logprobs=logprobs) for _ in range(repeats)]
    steps = f"{runner.short_steps - short}/{runner.full_steps - other}"
    assert runner.short_steps > short, "no step took the short path through the model runner"
    (expected,) = rows["vLLM"]
    same = all(row["tokens"] == expected["tokens"] for row in rows["ours"] + rows["ours+lp"]) and all(
        np.allclose(row["logprobs"][name], logprobs, rtol=0, atol=2e-5)
        for row in rows["ours+lp"] for name, logprobs in expected["logprobs"].items()
    )  # fmt: skip
    kernels = kernel_seconds(engine, lengths, vocabulary)
    seconds = {way: min(row["seconds"] for row in found) for way, found in rows.items()}
    ours = seconds["ours"]
    return [*seconds.values(), kernels, ours / kernels, lengths.sum() / ours, "yes" if same else "NO", steps]


if __name__ == "__main__":
    main()

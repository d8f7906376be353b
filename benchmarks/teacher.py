"""Measure the throughput of the teacher service over TCP against the prefill of its own engine.

    python benchmarks/teacher.py --shape 1.5b
    python benchmarks/teacher.py --shape 7b --sequences 128 --accuracy-sequences 0
    python benchmarks/teacher.py --shape tiny --backend hf --sequences 24 --prompt-tokens 8 --response-tokens 56

Random weights in the shapes of Qwen2.5, random tokens. All figures are of one run, one after the other: the engine
alone in a process of its own (plain prefill, then scoring), then a server with the same settings and a client
process, then the accuracy against a transformers forward in float32.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import own_process
from models import SHAPES, full_tokenizer, make_model

from hybrid_gkd.models.tokenizer import load_tokenizer, tokenizer_hash
from hybrid_gkd.teacher.engines.engine_table import load_scoring_engine
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.teacher.server.local import TeacherProcess
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.types import Reading, TopK

TIMEOUT = 900.0
MEMORY = 0.8
ACCURACY_TOKENS = (64, 192)
"""Tokens of a prompt with its response."""


def random_readings(count: int, num_prompt: int, num_response: int, vocabulary: int) -> list[Reading]:
    """Readings whose response is scored."""
    rng, length = np.random.default_rng(0), num_prompt + num_response
    positions = np.arange(num_prompt, length)
    return [Reading(token_ids=rng.integers(0, vocabulary, length, dtype=np.int32), positions=positions)
            for _ in range(count)]  # fmt: skip


def load_vocabulary_size(folder: Path) -> int:
    """Rows of the embedding matrix."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)


def rate(readings: list[Reading], run: Callable[[list[Reading]], Any]) -> float:
    """Tokens per second of the second of two runs, the first with an eighth of the readings."""
    run(readings[: max(8, len(readings) // 8)])
    started = time.perf_counter()
    run(readings)
    return sum(reading.num_tokens for reading in readings) / (time.perf_counter() - started)


def engine_rates(options: EngineOptions, readings: list[Reading], topks: list[int]) -> dict[str, float]:
    """Tokens per second of the engine alone: plain prefill, and scoring with each K."""
    engine: Any = load_scoring_engine(options)
    prefill = vllm_prefill(engine) if engine.info.backend == "vllm" else hf_prefill(engine)
    rates = {"prefill": rate(readings, prefill)}
    for k in topks:
        rates[f"engine {k}"] = rate(readings, lambda some, k=k: engine.score(some, k, 1.0))
    rates["prefill again"] = rate(readings, prefill)
    return rates


def vllm_prefill(engine: Any) -> Callable[[list[Reading]], None]:
    from vllm import SamplingParams

    def run(readings: list[Reading]) -> None:
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        for index, reading in enumerate(readings):
            prompt = {"prompt_token_ids": reading.token_ids.tolist()}
            engine._engine.add_request(f"prefill {index}", prompt, parameters)
        while engine._engine.has_unfinished_requests():
            engine._engine.step()

    return run


def hf_prefill(engine: Any) -> Callable[[list[Reading]], None]:
    @torch.inference_mode()
    def run(readings: list[Reading]) -> None:
        engine.add(None, readings, 1, 1.0)
        while items := engine._take():
            engine._model.base_model(**engine._batch([item.input_ids for item in items]))
        engine.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def ask(
    address: str, keys: str, folder: str, readings: list[Reading], few: list[Reading], topk: int, in_flight: int,
    workers: list[int], broker: int,
) -> tuple[dict[str, Any], list[TopK]]:
    """Score `readings` in a client process after a warm-up; return its measurements and the scores of `few`."""
    tokenizer = load_tokenizer(folder)
    with TeacherClient(
        [address], topk=topk, vocab_size=len(tokenizer), request_timeout=TIMEOUT, n_server_workers=in_flight,
        keys=keys,
    ) as client:
        client.handshake(
            tokenizer_hash=tokenizer_hash(tokenizer), tokenizer_size=len(tokenizer), max_sequence_length=2
        )
        for future in client.submit(readings[: max(8, len(readings) // 8)]):
            future.result(TIMEOUT)
        client.drain_metrics()
        processes = {"worker": workers, "broker": [broker], "client": [os.getpid()]}
        before = {name: sum(map(cpu_seconds, pids)) for name, pids in processes.items()}
        started = time.perf_counter()
        for future in client.submit(readings):
            future.result(TIMEOUT)
        seconds = time.perf_counter() - started
        spent = {name: sum(map(cpu_seconds, pids)) - before[name] for name, pids in processes.items()}
        seen = client.drain_metrics()
        scores = [future.result(TIMEOUT) for future in client.submit(few)]
    figures = {
        "rate": seen.tokens / seconds,
        "reply bytes": seen.bytes_received / seen.scored_tokens,
        "request bytes": seen.bytes_sent / seen.tokens,
        "latency": [float(np.percentile(seen.latencies, each)) for each in (50, 90, 99)],
        "retries": seen.retries,
        **{f"{name} us": 1e6 * each / seen.tokens for name, each in spent.items()},
    }
    return figures, scores


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    own = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
           for child in (task / "children").read_text(encoding="utf-8").split()]  # fmt: skip
    return own + [each for child in own for each in descendants(child)]


def measure_service(
    args: argparse.Namespace, folder: Path, readings: list[Reading], few: list[Reading]
) -> tuple[dict[int, dict[str, Any]], dict[int, list[TopK]]]:
    """Figures by K, and the scores of the sequences of the accuracy check by K."""
    figures, scores = {}, {}
    options = ["--backend", args.backend, "--gpu-memory-utilization", str(MEMORY), f"--n-logprobs={max(args.topk)}"]
    teacher = TeacherProcess(str(folder), log_path=args.log, options=options)
    with teacher, own_process() as client:
        client.submit(load_tokenizer, str(folder))  # meanwhile it imports what it needs
        teacher.wait_ready()
        workers = descendants(teacher.pid)
        for k in args.topk:
            asked = client.submit(
                ask, teacher.address, str(teacher.keys), str(folder), readings, few, k, args.in_flight, workers,
                teacher.pid,
            )
            figures[k], scores[k] = asked.result(TIMEOUT)
            print(f"K = {k}: {figures[k]}", flush=True)
    return figures, scores


@torch.inference_mode()
def accuracy(
    folder: Path, few: list[Reading], scores: dict[int, list[TopK]]
) -> dict[int, str]:
    """By K, the difference of log-probabilities from a transformers forward in float32, and of the chosen sets.

    Beside it what a plain transformers forward in bfloat16 differs by on the same ids.
    """
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, rounded = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    num_ids = len(load_tokenizer(str(folder)))
    differences, plain = ({k: list[torch.Tensor]() for k in scores} for _ in range(2))
    agreement: dict[int, list[float]] = {k: [] for k in scores}
    shortfall = dict.fromkeys(scores, 0.0)
    for index, reading in enumerate(few):
        ids = torch.from_numpy(reading.token_ids.astype(np.int64)).to(device)[None]
        rows = torch.from_numpy(reading.positions - 1).to(device)
        expected, in_bf16 = (
            each(input_ids=ids, logits_to_keep=rows).logits[0].float().log_softmax(-1)
            for each in (model, rounded)
        )
        for k in scores:
            found = torch.from_numpy(scores[k][index].ids.astype(np.int64)).to(device)
            logprobs = torch.from_numpy(scores[k][index].logprobs).to(device)
            differences[k].append((expected.gather(1, found) - logprobs).abs().flatten())
            plain[k].append((expected.gather(1, found) - in_bf16.gather(1, found)).abs().flatten())
            top, best = expected[:, :num_ids].topk(k)
            agreement[k].append((found[:, :, None] == best[:, None]).any(2).float().mean().item())
            shortfall[k] = max(shortfall[k], (top[:, -1:] - expected.gather(1, found)).max().item())
    return {
        k: f"{spread(differences[k])}; ids in common {np.mean(agreement[k]):.4f}, others at most {shortfall[k]:.4f} "
        f"below the K-th; a plain forward in bfloat16: {spread(plain[k])}"
        for k in scores
    }


def spread(parts: list[torch.Tensor]) -> str:
    """Mean, quantile and largest of absolute differences."""
    each = torch.cat(parts).cpu()[:10_000_000]
    return f"mean {each.mean():.4f}, 99.9 % below {each.quantile(0.999):.4f}, max {each.max():.4f}"


def report(
    args: argparse.Namespace, rates: dict[str, float], figures: dict[int, dict[str, Any]], differences: dict[int, str]
) -> str:
    """A Markdown table."""
    prefill = max(rates["prefill"], rates["prefill again"])
    what = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    lines = [
        f"{what}, torch {torch.__version__}, {args.backend}, {args.model or args.shape}, {args.sequences} sequences of "
        f"{args.prompt_tokens} + {args.response_tokens} tokens, {args.in_flight} requests in flight",
        "",
        "| what | figure |",
        "|---|---|",
        f"| plain prefill of the engine alone, twice | {rates['prefill']:.0f}, {rates['prefill again']:.0f} tokens/s |",
    ]
    for k, seen in figures.items():
        engine = rates[f"engine {k}"]
        p50, p90, p99 = seen["latency"]
        lines += [
            f"| K = {k}: engine alone | {engine:.0f} tokens/s, {engine / prefill:.1%} of prefill |",
            f"| K = {k}: over TCP | {seen['rate']:.0f} tokens/s, {seen['rate'] / prefill:.1%} of prefill |",
            f"| K = {k}: bytes per scored token in replies (6 K + 64 = {6 * k + 64}), per token in requests | "
            f"{seen['reply bytes']:.1f}, {seen['request bytes']:.1f} |",
            f"| K = {k}: host time per token, worker, broker, client | {seen['worker us']:.2f}, "
            f"{seen['broker us']:.2f}, {seen['client us']:.2f} us |",
            f"| K = {k}: latency of a request, 50 %, 90 %, 99 % | {p50:.3f}, {p90:.3f}, {p99:.3f} s |",
            f"| K = {k}: requests sent again | {seen['retries']} |",
        ]
        if k in differences:
            lines.append(f"| K = {k}: difference from float32 | {differences[k]} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--model", type=Path, help="folder to use instead of random weights of --shape")
    parser.add_argument("--backend", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=1792)
    parser.add_argument("--topk", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--in-flight", type=int, default=8, help="requests in flight (teacher.n_server_workers)")
    parser.add_argument("--accuracy-sequences", type=int, default=4)
    parser.add_argument("--log", help="file for what the server prints")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        args.log = args.log or f"{name}/teacher.log"
        folder = args.model or make_model(Path(name) / "model", args.shape, full_tokenizer(args.shape))
        vocabulary = load_vocabulary_size(folder)
        readings = random_readings(args.sequences, args.prompt_tokens, args.response_tokens, vocabulary)
        few = random_readings(args.accuracy_sequences, *ACCURACY_TOKENS, vocabulary)
        options = EngineOptions(
            ckpt_path=str(folder), backend=args.backend, n_logprobs=max(args.topk), gpu_memory_utilization=MEMORY
        )
        with own_process() as engine:  # the GPU is free again afterwards
            rates = engine.submit(engine_rates, options, readings, args.topk).result(TIMEOUT)
        print(f"engine alone: {rates}", flush=True)
        figures, scores = measure_service(args, folder, readings, few)
        print(report(args, rates, figures, accuracy(folder, few, scores) if few else {}))


if __name__ == "__main__":
    main()

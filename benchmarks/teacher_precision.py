"""Measure how quantized teacher weights change its scores, and the loss of a student that learns from them.

    python benchmarks/teacher_precision.py
    python benchmarks/teacher_precision.py --device cpu --sequences 16

The models are the trained ones of gpu_demo, since rounding depends on the weights; they are made if they are missing.
The student completes held-out prompts at temperature 1, and the teacher scores these completions in float32
(transformers), in bfloat16 and with `quantization: fp8` (vLLM; without a GPU float32 again, as a functional test).
Differences are from the float32 scores, on ids that both have; the loss is the forward KL with its tail, as the recipe
has it, by the student's own float32 log-probabilities.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
from common import own_process
from teacher import spread
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_gkd.demo.folders import DemoPaths, Row
from hybrid_gkd.demo.gpu_demo import build_gpu_demo
from hybrid_gkd.demo.models import prompt_text
from hybrid_gkd.demo.use import visible_device
from hybrid_gkd.losses.divergence import forward_kl
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.teacher.engines.engine_table import load_scoring_engine
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.types import Reading, TopK

TOPK, NEW_TOKENS, TIMEOUT = 64, 320, 600.0
FLOAT32 = {"backend": "hf", "dtype": "float32"}
VARIANTS = {
    "cuda": {
        "bfloat16": {"backend": "vllm", "dtype": "bfloat16"},
        "fp8": {"backend": "vllm", "dtype": "bfloat16", "engine_kwargs": '{"vllm": {"quantization": "fp8"}}'},
    },
    "cpu": {"float32 again": {"backend": "vllm", "dtype": "float32"}},
}


@torch.inference_mode()
def answers(folder: Path, rows: list[Row], device: str) -> tuple[list[Reading], list[Tensor]]:
    """Return the student's completions, their readings, and its log-probabilities [R, V] of each, on the CPU."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    texts = [prompt_text(row["prompt"]) for row in rows]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt").to(device)
    torch.manual_seed(0)
    output = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, temperature=1.0)
    readings, logprobs = [], []
    for text, row in zip(texts, output[:, batch.input_ids.shape[1] :].cpu(), strict=True):
        prompt, ends = tokenizer(text).input_ids, (row == tokenizer.eos_token_id).nonzero()
        answer = row[: int(ends[0]) + 1] if len(ends) else row
        ids = torch.cat([torch.tensor(prompt), answer])
        positions = np.arange(len(prompt), len(ids))
        readings.append(Reading(token_ids=ids.numpy().astype(np.int32), positions=positions))
        logits = model(input_ids=ids[None].to(device)).logits[0, len(prompt) - 1 : -1]
        logprobs.append(logits.float().log_softmax(-1).cpu())
    return readings, logprobs


def score(folder: str, device: str, variant: dict[str, str], readings: list[Reading]) -> list[TopK]:
    """The teacher's scores, by an engine of the teacher service."""
    options = EngineOptions(
        ckpt_path=folder, device=device, n_logprobs=TOPK, gpu_memory_utilization=0.1, **variant  # type: ignore[arg-type]
    )
    return load_scoring_engine(options).score(readings, TOPK, 1.0)


def loss(scores: list[TopK], student: list[Tensor]) -> Tensor:
    """KL(teacher || student) of every answer token."""
    parts = []
    for found, logprobs in zip(scores, student, strict=True):
        ids, teacher, tail = map(torch.from_numpy, (found.ids.astype(np.int64), found.logprobs, found.tail_logprobs))
        own = logprobs.gather(1, ids)
        rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1)
        parts.append(forward_kl(teacher, own, tail="bucket", teacher_tail=tail, student_tail=rest))
    return torch.cat(parts)


def differences(scores: list[TopK], exact: list[TopK]) -> tuple[Tensor, Tensor, float]:
    """Return differences of the tokens' log-probabilities and of common ids, and the fraction of ids in common."""
    sampled, common, kept = [], [], []
    for found, right in zip(scores, exact, strict=True):
        same = found.ids[:, :, None] == right.ids[:, None, :]
        row, mine, other = same.nonzero()
        common.append(torch.from_numpy(np.abs(found.logprobs[row, mine] - right.logprobs[row, other])))
        sampled.append(torch.from_numpy(np.abs(found.sampled_logprobs - right.sampled_logprobs)))
        kept.append(same.any(2).mean())
    return torch.cat(sampled), torch.cat(common), float(np.mean(kept))


def main() -> None:
    """Print a row for each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default is what there is")
    parser.add_argument("--models", type=Path, help="a folder that python -m hybrid_gkd.demo gpu_demo has made")
    parser.add_argument("--sequences", type=int, default=256)
    args = parser.parse_args()
    device = args.device or visible_device()
    paths = DemoPaths.under(args.models.absolute()) if args.models else build_gpu_demo(device)
    rows = list(itertools.islice(read_json_lines(paths.val), args.sequences))
    with own_process() as pool:
        readings, student = pool.submit(answers, paths.student, rows, device).result(TIMEOUT)
    found = {}
    for name, variant in {"float32": FLOAT32, **VARIANTS[device]}.items():
        with own_process() as pool:  # the GPU is free again afterwards
            found[name] = pool.submit(score, str(paths.teacher), device, variant, readings).result(TIMEOUT)
    exact = loss(found["float32"], student)
    print(f"{len(readings)} answers, {len(exact)} tokens; loss in float32 {exact.mean():.5f}")
    for name in VARIANTS[device]:
        each, (sampled, common, kept) = loss(found[name], student), differences(found[name], found["float32"])
        print(f"{name}: log-probability of the answer's token: {spread([sampled])}")
        print(f"{name}: of the top {TOPK}: {spread([common])}; {kept:.2%} of the ids in common")
        print(f"{name}: loss {each.mean():.5f}; of a token: {spread([(each - exact).abs()])}")


if __name__ == "__main__":
    main()

"""Compare log-probabilities of sampled tokens under engine and student, with trained weights.

    python benchmarks/logprobs.py text.jsonl --shape 1.5b
    python benchmarks/logprobs.py text.jsonl --shape tiny --device cpu --train-steps 20

The strings of each row of the file are one text. A model with random weights in the shape of Qwen2.5 learns them for
the given number of steps with plain transformers and AdamW: a minute on an H200. Then vLLM continues the beginnings of
the last rows, and the student and a float32 model score these completions.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

import numpy as np
import torch
from hybrid_engine import mean_difference, reference_logprobs
from models import SHAPES, make_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen2ForCausalLM

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.launch.plan import make_plan
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import trained_models
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.types import GenerationRequest, SampleId, SamplingParams
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

ROWS, COLUMNS, HEAD_ROWS = 16, 1024, 4096
"""Texts of a training step, tokens of each, and tokens whose logits are held at a time."""
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, IN_FLOAT32 = 64, 64, 128, 16
VOCABULARY, END = 8000, "<end>"


def encode(file: Path) -> tuple[list[list[int]], int]:
    """Token ids of every row, by a tokenizer that is trained on the file; the id that ends a text."""
    texts = ["\n".join(value for value in row.values() if isinstance(value, str)) for row in read_json_lines(file)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    )
    end = tokenizer.token_to_id(END)
    return [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)], end


def train(path: Path, texts: list[list[int]], steps: int, device: str) -> float:
    """Train the model in the folder, bf16 over float32 weights, and save it there; the last loss, nats per token."""
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    order = np.random.default_rng(0).permutation(len(texts))
    stream = torch.tensor(np.concatenate([texts[i] for i in order]))
    size, loss = ROWS * COLUMNS, float("nan")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1, (step + 1) / 20) * max(0.1, 1 - step / steps)
        ids = stream.roll(-step * size)[: size + 1].to(device)
        with torch.autocast(device, torch.bfloat16):
            hidden = model.model(ids[:-1].view(ROWS, COLUMNS)).last_hidden_state
        leaf = hidden.detach().view(size, -1).requires_grad_()
        loss = sum(head_loss(model, rows, labels) for rows, labels in zip(
            leaf.split(HEAD_ROWS), ids[1:].split(HEAD_ROWS), strict=True
        ))  # fmt: skip
        assert leaf.grad is not None
        hidden.backward(leaf.grad.view_as(hidden))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(path)
    return loss


def head_loss(model: Qwen2ForCausalLM, hidden: Tensor, labels: Tensor) -> float:
    """Cross entropy of some rows as a share of the mean over a step, and its backward pass down to `hidden`."""
    with torch.autocast(hidden.device.type, torch.bfloat16):
        logits = model.lm_head(hidden).float()
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (ROWS * COLUMNS)
    loss.backward()
    return loss.item()


def sample(path: Path, texts: list[list[int]], end: int, args: argparse.Namespace, folder: Path) -> list[str]:
    """Rows of the table."""
    config = load_config(
        [
            "data.train_files=unused", f"actor_rollout_ref.model.path={path}", f"trainer.device={args.device}",
            "actor_rollout_ref.teacher.server_ip=unused", f"trainer.default_local_dir={folder}",
            f"data.max_prompt_length={PROMPT_TOKENS}", f"data.max_response_length={NEW_TOKENS}",
            "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=vllm", *args.overrides,
        ]
    )  # fmt: skip
    requests = [
        GenerationRequest(
            id=SampleId(1, i, 0), prompt_ids=np.array(text[: min(PROMPT_TOKENS, len(text) // 2)], np.int32), seed=i
        )
        for i, text in enumerate(texts[-PROMPTS:])
    ]
    plan = make_plan(config, trained_models(config, student_spec(config)), args.device)
    with ray_cluster(config, args.device), contextlib.closing(
        WorkerGroup(config, device=args.device, num_updates=1, stop_token_ids=[end],
                    engine_memory=plan.memory.engine_memory)
    ) as group:
        group.publish(0)
        sampling = SamplingParams(max_tokens=NEW_TOKENS, logprobs=True)
        found = sorted((s for part in group.generate(requests, sampling) for s in part), key=lambda s: s.id)
        (plan,) = plan_micro_batches([s.num_tokens for s in found], 1, 16384, None, True)
        own = group.compute_logprobs([tuple(tuple(found[i] for i in members) for members in plan)])
    pairs = [(s.logprobs, own[s.id]) for s in found]
    lines = [
        f"| sampled tokens | {sum(s.num_trained for s in found)} |",
        f"| mean of -log-probability, nats | {-np.concatenate([own[s.id] for s in found]).mean():.2f} |",
        f"| engine and student, mean | {mean_difference(pairs):.4f} |",
        f"| engine and student, largest | {max(np.abs(one - other).max() for one, other in pairs):.4f} |",
    ]
    if args.device == "cuda":
        exact = reference_logprobs(str(path), found[:IN_FLOAT32])
        engine = mean_difference((s.logprobs, exact[s.id]) for s in found if s.id in exact)
        lines.append(f"| engine and float32, mean | {engine:.4f} |")
        lines.append(f"| student and float32, mean | {mean_difference((own[i], exact[i]) for i in exact):.4f} |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSONL")
    parser.add_argument("overrides", nargs="*", help="configuration keys, dotted.key=value")
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--train-steps", type=int, default=150, help="of 16,384 tokens (%(default)s)")
    args = parser.parse_intermixed_args()
    texts, end = encode(args.file)
    if sum(map(len, texts)) <= ROWS * COLUMNS:
        parser.error(f"{args.file}: needs more than {ROWS * COLUMNS} tokens, has {sum(map(len, texts))}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = make_model(folder / "model", args.shape)
        loss = train(path, texts, args.train_steps, args.device)
        if args.device == "cuda":
            torch.cuda.empty_cache()
        lines = sample(path, texts, end, args, folder)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{device}, {args.shape}, {args.train_steps} steps of training to a loss of {loss:.2f} nats\n")
    print("\n".join(["| what | figure |", "|---|---|", *lines]))


if __name__ == "__main__":
    main()

"""The supervised baselines of benchmarks/results.py: the student on worked answers, of the data or of the teacher.

    python benchmarks/results_sft.py --models FOLDER --answers data --seed 0 --minutes 4 --steps 150 --out FOLDER

The recipe's batch size, learning rate and optimizer, as in distillation; passes over the same prompts, in another order
each time. The teacher's answers are drawn by vLLM at temperature 1, one to a prompt, right or wrong, before training;
the time that this takes, loading aside, counts as training time, as much as of the answers have been trained on.
Writes OUT/metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybrid_gkd.compat.vllm.scheduler import engine_args
from hybrid_gkd.compat.vllm.versions import device_engine_args, import_llm
from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.demo.folders import DemoPaths, Row, no_progress_bars
from hybrid_gkd.demo.models import SFTRecipe, greedy_answers, prompt_text
from hybrid_gkd.demo.sft import SFT, alone, encode
from hybrid_gkd.scoring.builtin_rewards import gsm8k
from hybrid_gkd.types import Sample

VALIDATIONS = 8
MAX_NUM_SEQS = 512
"""Answers that the teacher writes at the same time."""


def sampled_answers(
    teacher: str, prompts: list[str], *, device: str, max_tokens: int, max_model_len: int, seed: int,
    given: dict[str, Any],
) -> tuple[list[str], float]:
    """The teacher's answer to every prompt at temperature 1, and the seconds that generating them took.

    `given`: further arguments of the engine.
    """
    llm = import_llm(device)
    from vllm import SamplingParams

    arguments = device_engine_args(
        device, dtype="bfloat16", max_model_len=max_model_len, max_num_seqs=MAX_NUM_SEQS,
        hf_config=AutoConfig.from_pretrained(teacher),
    )  # fmt: skip
    arguments |= {"model": teacher, "max_model_len": max_model_len, "max_num_seqs": MAX_NUM_SEQS, "seed": seed}
    # Token ids and the scheduler of a student's engine, so that a token costs the time that it costs there.
    engine = llm(**(arguments | engine_args(given) | given), skip_tokenizer_init=True)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    ids = tokenizer([prompt_text(prompt) for prompt in prompts], add_special_tokens=False).input_ids
    sampling = SamplingParams(
        temperature=1.0, max_tokens=max_tokens, stop_token_ids=[tokenizer.eos_token_id], detokenize=False
    )
    began = time.perf_counter()
    found = engine.generate([{"prompt_token_ids": each} for each in ids], sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    answers = [list(each.outputs[0].token_ids) for each in found]
    return tokenizer.batch_decode(answers, skip_special_tokens=True), seconds


def training_rows(args: argparse.Namespace, paths: DemoPaths, config: Config) -> tuple[list[Row], float]:
    """Prompts with the answers to train on, and the seconds that each answer took."""
    rows = [json.loads(line) for line in paths.train.read_text(encoding="utf-8").splitlines()]
    if args.answers == "data":
        return rows, 0.0
    rollout = config.actor_rollout_ref.rollout  # what holds for a student's engine, where several share a card
    given = dict(rollout.engine_kwargs.vllm)
    if rollout.gpu_memory_utilization is not None:
        given["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    # In a process of its own, with which the engine's memory goes.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        job = pool.submit(
            sampled_answers, str(paths.teacher), [row["prompt"] for row in rows], device=args.device, seed=args.seed,
            max_tokens=config.data.max_response_length, max_model_len=config.max_sequence_length,
            given=given,
        )
        answers, seconds = job.result(3600)
    return [row | {"answer": answer} for row, answer in zip(rows, answers, strict=True)], seconds / len(rows)


def validate(sft: SFT, tokenizer: Any, val: list[Row], limit: int) -> float:
    """Accuracy of the greedy answers, in the type that the program generates in."""
    dtype = torch.bfloat16 if sft.device.type == "cuda" else torch.float32
    with TemporaryDirectory() as folder, no_progress_bars():
        sft.export(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(sft.device).eval()
    return share_right(model, tokenizer, val, limit)


def share_right(model: Any, tokenizer: Any, val: list[Row], limit: int) -> float:
    """Accuracy of a model's greedy answers."""
    answers = greedy_answers(model, tokenizer, val, limit=limit)
    return sum(gsm8k(text, row["answer"]) for text, row in zip(answers, val, strict=True)) / len(val)


def batches(sequences: list[Sample], size: int, seed: int) -> Any:
    """Batches without end, in a new order every pass."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(sequences))
        for start in range(0, len(order) - size + 1, size):
            yield [sequences[i] for i in order[start : start + size]]


def train(args: argparse.Namespace, config: Config, out: Path) -> None:
    """Train for so many minutes, validating at equal distances, and after as many steps as a run of the program."""
    paths, device = DemoPaths.under(args.models), torch.device(args.device)
    limit, size = config.data.max_response_length, config.data.train_batch_size
    tokenizer = AutoTokenizer.from_pretrained(paths.student)
    val = [json.loads(line) for line in paths.val.read_text(encoding="utf-8").splitlines()]
    rows, per_answer = training_rows(args, paths, config)
    optim, seconds, tokens, step = config.actor_rollout_ref.actor.optim, 0.0, 0, 0
    recipe = SFTRecipe(
        max_steps=10**9, batch_size=size, learning_rate=optim.lr, warmup_steps=optim.lr_warmup_steps,
        max_tokens=config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
    )
    with alone(device), open(out / "metrics.jsonl", "w", encoding="utf-8") as log:
        sft = SFT(paths.student, recipe, device=device)

        def say(**metrics: float) -> None:
            row = {"step": step, "minutes": seconds / 60, "answer_tokens": tokens, **metrics}
            print(json.dumps(row), file=log, flush=True)
            print(row, flush=True)

        say(**{"val/accuracy": validate(sft, tokenizer, val, limit)})
        validated, every = 0, max(1, args.steps // VALIDATIONS)
        for batch in batches(encode(rows, tokenizer), size, args.seed):
            began = time.perf_counter()
            loss = sft.step(batch).item()  # waits for the device
            # An answer has to be written once, however often it is trained on.
            new_answers = min(size, max(0, len(rows) - step * size))
            seconds += time.perf_counter() - began + per_answer * new_answers
            tokens, step = tokens + sum(s.num_trained for s in batch), step + 1
            due = min(VALIDATIONS, int(VALIDATIONS * seconds / (60 * args.minutes)))
            if due > validated or (step <= args.steps and step % every == 0):
                validated = due
                say(**{"actor/loss": loss, "val/accuracy": validate(sft, tokenizer, val, limit)})
            elif step % 20 == 0:
                say(**{"actor/loss": loss})
            if due == VALIDATIONS:
                return


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="configuration keys, dotted.key=value")
    parser.add_argument("--models", type=Path, required=True, help="a folder that hybrid_gkd.demo gpu_demo has made")
    parser.add_argument("--answers", choices=("data", "teacher"), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of training")
    parser.add_argument("--steps", type=int, required=True, help="of a run of the program")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config([f"trainer.device={args.device}", *args.overrides], config_name="gpu_demo")
    train(args, config, args.out)


if __name__ == "__main__":
    main()

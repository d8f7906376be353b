"""TRL's on-policy distillation for benchmarks/results.py: the same models, prompts, loss and rate in its trainer.

    python benchmarks/results_trl.py --models FOLDER --seed 0 --device cuda --out FOLDER
    python benchmarks/results_trl.py --config-name demo --models FOLDER --seed 0 --device cpu --out FOLDER
    python benchmarks/results_trl.py --config-name demo --models FOLDER --device cpu --out FOLDER --gold bayesian

`--gold` is GOLDTrainer, for a teacher with another tokenizer, and one of its two ways to merge tokens; else
DistillationTrainer with the forward KL over the whole vocabulary, which is what it has nearest to the recipe. Both
generate by transformers, which is compared at equal tokens, or by vLLM (`--set '{"use_vllm": true}'`) where TRL takes
the version that is installed, with the program's gpu_memory_utilization and engine_kwargs.vllm. Written for TRL 1.16.
Writes OUT/metrics.jsonl; where divergences are measured, also the student, OUT/huggingface.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peers_trl import AutocastTrainer, forward_kl, load_packed
from results_methods import VALIDATIONS
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.generation import vllm_generation

from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.demo.folders import DemoPaths
from hybrid_gkd.demo.models import greedy_answers
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.scoring.builtin_rewards import exact_match, gsm8k

MESSAGES = (("prompt", "user", "prompt"), ("completion", "assistant", "answer"))
"""Names in TRL, roles, and columns of the rows. GOLD asks for completions, and replaces them by its student's."""


def steps_of(config: Config) -> int:
    """Optimizer steps of the program's run: TRL takes one for each generation."""
    return config.trainer.total_training_steps * config.data.train_batch_size // config.mini_batch_size


class Recorder(TrainerCallback):
    """Times the steps, counts the answers' tokens and validates between steps."""

    def __init__(self, args: argparse.Namespace, config: Config, paths: DemoPaths, tokenizer: Any, log: Any):
        self.limit, self.size = config.data.max_response_length, config.mini_batch_size
        self.paths, self.tokenizer, self.log = paths, tokenizer, log
        self.export = args.out / "huggingface"
        self.compare: list[str] = []
        if config.reward.answer_key is None:  # the divergence, as the program measures it
            self.compare = [
                sys.executable, "-m", "hybrid_gkd.evaluate", str(self.export), "--config-name", args.config_name,
                "--data", str(paths.val), "--json", f"trainer.device={args.device}", "distillation.enabled=true",
                f"actor_rollout_ref.teacher.model.path={paths.teacher}", *args.overrides,
            ]  # fmt: skip
        self.every = max(1, steps_of(config) // VALIDATIONS)
        self.reward = exact_match if config.reward.name == "exact_match" else gsm8k
        self.seconds, self.tokens, self.began = 0.0, 0.0, 0.0

    def validate(self, model: Any) -> dict[str, float]:
        """Accuracy of the greedy answers; without rewards, divergences from the teacher."""
        if self.compare:
            model.save_pretrained(self.export)
            self.tokenizer.save_pretrained(self.export)
            done = subprocess.run(self.compare, stdout=subprocess.PIPE, check=True, text=True, timeout=1200)
            (found,) = json.loads(done.stdout)
            return {name: found[name] for name in ("val/forward_kl", "val/reverse_kl")}
        device = next(model.parameters()).device
        with torch.random.fork_rng(), torch.inference_mode():
            copy = AutoModelForCausalLM.from_config(model.config)
            copy.load_state_dict(model.state_dict())
            # in the type that the program generates in
            copy = copy.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
            val = list(read_json_lines(self.paths.val))
            answers = greedy_answers(copy, self.tokenizer, val, limit=self.limit, batch_size=128)
            torch.cuda.empty_cache()  # caches that grew with each token: other runs may share the GPU
            right = (self.reward(text, row["answer"]) for text, row in zip(answers, val, strict=True))
            return {"val/accuracy": sum(right) / len(val)}

    def say(self, step: int, **metrics: float) -> None:
        """One row of metrics."""
        row = {"step": step, "minutes": self.seconds / 60, "answer_tokens": self.tokens, **metrics}
        print(json.dumps(row), file=self.log, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.say(0, **self.validate(kwargs["model"]))
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every step, when TRL knows how long the answers were."""
        logs, step = kwargs["logs"], state.global_step
        if "completions/mean_length" not in logs:  # the summary at the end
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self.began
        self.tokens += logs["completions/mean_length"] * self.size
        validated = self.validate(kwargs["model"]) if step % self.every == 0 or step == state.max_steps else {}
        self.say(step, **{"actor/loss": logs["loss"]}, **validated)
        self.began = time.perf_counter()


class Gold(GOLDTrainer):  # type: ignore[misc]
    """TRL's GOLD, which logs the length of its answers as TRL's other trainers do."""

    lengths: tuple[float, ...] = ()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.lengths += ((inputs["labels"] >= 0).sum(1).float().mean().item(),)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs["completions/mean_length"] = sum(self.lengths) / len(self.lengths)
            self.lengths = ()
        super().log(logs, *args, **kwargs)


def gold(device: str, merge: str, **settings: Any) -> GOLDConfig:
    """On-policy GOLD at temperature 1: a divergence of tokens that both have, sorted probabilities of the others."""
    shared = {
        "use_uld_loss": True, "uld_use_hybrid_loss": True, "uld_token_merge_strategy": merge, "lmbda": 1.0,
        "temperature": 1.0, "top_p": 1.0, "use_cpu": device == "cpu", "bf16": device == "cuda",
        "gradient_checkpointing": False, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "max_length": None,
    }  # fmt: skip
    return GOLDConfig(**(shared | settings))


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="configuration keys, dotted.key=value")
    parser.add_argument("--models", type=Path, required=True, help="a folder that hybrid_gkd.demo gpu_demo has made")
    parser.add_argument("--train", type=Path, help="prompts, instead of those of the folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--config-name", default="gpu_demo", help="in config/ (%(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gold", choices=("observed", "bayesian"), help="GOLD, and its way to merge tokens")
    parser.add_argument("--set", type=json.loads, default={}, help="further settings of TRL, JSON")
    args = parser.parse_intermixed_args()
    config = load_config([f"trainer.device={args.device}", *args.overrides], config_name=args.config_name)
    paths, rollout = DemoPaths.under(args.models), config.actor_rollout_ref.rollout
    optim = config.actor_rollout_ref.actor.optim
    train = list(read_json_lines(args.train or paths.train))
    tokenizer = AutoTokenizer.from_pretrained(paths.student, padding_side="left")
    prompts = Dataset.from_list([
        {name: [{"role": role, "content": row[column]}] for name, role, column in MESSAGES[: 2 if args.gold else 1]}
        for row in train[: steps_of(config) * config.mini_batch_size]
    ])  # fmt: skip
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (paths.student, paths.teacher)
    )
    shared = {
        "output_dir": str(args.out / "trl"), "seed": args.seed, "max_steps": steps_of(config),
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": config.mini_batch_size // args.set.get("gradient_accumulation_steps", 1),
        "max_completion_length": config.data.max_response_length, "learning_rate": optim.lr,
        "adam_beta1": optim.betas[0], "adam_beta2": optim.betas[1], "weight_decay": optim.weight_decay,
        "warmup_steps": round(0.1 * steps_of(config)), "max_grad_norm": config.actor_rollout_ref.actor.grad_clip,
    }  # fmt: skip
    if rollout.gpu_memory_utilization is not None:
        shared["vllm_gpu_memory_utilization"] = rollout.gpu_memory_utilization
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **rollout.engine_kwargs.vllm)
    shared |= args.set
    if args.gold:
        make, settings = Gold, gold(args.device, args.gold, teacher_tokenizer_name_or_path=str(paths.teacher), **shared)
    else:
        make, settings = AutocastTrainer, forward_kl(args.device, **shared)
    args.out.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:  # TRL's vLLM takes one port for all runs of a machine
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    with open(args.out / "metrics.jsonl", "w", encoding="utf-8") as log:
        trainer = make(
            student, teacher, settings, train_dataset=prompts, processing_class=tokenizer,
            callbacks=[Recorder(args, config, paths, tokenizer, log)],
        )  # fmt: skip
        if args.device == "cpu" and trainer.use_vllm:
            trainer.vllm_generation.sync_weights = lambda: load_packed(trainer.vllm_generation)
        trainer.train()


if __name__ == "__main__":
    main()

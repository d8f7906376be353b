"""TRL's side of benchmarks/peers.py, in TRL's Python: peers_trl.py SPEC.json, with models, data and settings.

Writes a line for every step into the file `rows`: seconds, completion tokens, all tokens. Written for TRL 1.16.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from answer_lengths import force_lengths
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


def forward_kl(device: str, **settings: Any) -> DistillationConfig:
    """On-policy forward KL over the whole vocabulary at temperature 1, with nothing saved or reported."""
    shared = {
        "beta": 0.0, "temperature": 1.0, "bf16": device == "cuda", "use_cpu": device == "cpu",
        "gradient_checkpointing": False, "lr_scheduler_type": "constant_with_warmup", "max_grad_norm": 1.0,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return DistillationConfig(**(shared | settings))


class Recorder(TrainerCallback):
    """Times the steps, from the end of one to the end of the next, and counts tokens."""

    def __init__(self, file: Any, answers: int):
        self.file, self.answers = file, answers
        self.began, self.tokens = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every step, when TRL knows how long the answers were."""
        logs = kwargs["logs"]
        if "completions/mean_length" not in logs:  # the summary at the end
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        row = {
            "seconds": time.perf_counter() - self.began,
            "answer_tokens": round(logs["completions/mean_length"] * self.answers),
            "longest": round(logs["completions/max_length"]), "tokens": round(logs["num_tokens"]) - self.tokens,
        }  # fmt: skip
        self.began, self.tokens = time.perf_counter(), round(logs["num_tokens"])
        print(json.dumps(row), file=self.file, flush=True)


def load_packed(generation: Any) -> None:
    """TRL's copy of the weights for vLLM on the CPU, which has packed its own: TRL writes into them, and fails."""
    weights = ((name, tensor.detach()) for name, tensor in generation.model.named_parameters())
    arguments = {"weights_iterator": weights, "weights_path": None, "is_checkpoint_format": True}
    generation.llm.collective_rpc("reload_weights", kwargs=arguments)
    generation.llm.reset_prefix_cache()


class AutocastTrainer(DistillationTrainer):  # type: ignore[misc]
    """Compute the whole loss under autocast: accelerate wraps the student's forward, and TRL 1.16 calls others."""

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.autocast():
            return super()._compute_loss(*args, **kwargs)


def main() -> None:
    """Train."""
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    device = spec["device"]
    with open(spec["prompts"], encoding="utf-8") as file:
        texts = [json.loads(line)["prompt"] for line in file]
    own = {
        "output_dir": spec["folder"], "shuffle_dataset": False, "use_vllm": True, "vllm_mode": "colocate",
        "model_init_kwargs": {"dtype": "float32"},  # AdamW's copy; bf16 is what it computes in
        "teacher_model_init_kwargs": {"dtype": "bfloat16" if device == "cuda" else "float32"},
    }  # fmt: skip
    settings = forward_kl(device, **(own | spec["settings"]))
    with open(spec["rows"], "w", encoding="utf-8") as rows:
        trainer = (AutocastTrainer if spec["autocast"] else DistillationTrainer)(
            spec["student"], spec["teacher"], settings,
            Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
            processing_class=AutoTokenizer.from_pretrained(spec["student"], padding_side="left"),
            callbacks=[Recorder(rows, settings.per_device_train_batch_size * settings.gradient_accumulation_steps)],
        )  # fmt: skip
        generation = trainer.vllm_generation
        force_lengths(generation.llm.llm_engine)
        if device == "cpu":
            generation.sync_weights = lambda: load_packed(generation)
        trainer.train()


if __name__ == "__main__":
    main()

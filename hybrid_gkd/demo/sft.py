"""Supervised fine-tuning on solutions, with the trainer's sharded model, packed attention and fused head.

Used for the models of the demos. One process, one device.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2Tokenizer

from hybrid_gkd.config import FSDPConfig, ModelConfig, OptimConfig
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.demo.folders import Row
from hybrid_gkd.demo.models import END, SFTRecipe, prompt_text
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.student.checkpoint_io import export_huggingface
from hybrid_gkd.student.logprob_model import LogprobModel, pack_samples
from hybrid_gkd.student.sharded_model import ShardedModel
from hybrid_gkd.types import Sample, SampleId

logger = logging.getLogger(__name__)

BUCKET_BYTES = 2**29
CHECK_EVERY = 10
"""Steps between two checks of `SFTRecipe.stop_at`."""
LOG_EVERY = 10.0
"""Seconds between log lines of progress."""


@contextlib.contextmanager
def single_process(device: torch.device) -> Iterator[None]:
    """Set up a process group of this process, which the sharded model needs, and torch's deterministic algorithms."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS uses nondeterministic kernels
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    deterministic: Any = torch.utils.deterministic  # its attribute is a property of the module, unknown to mypy
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    with tempfile.NamedTemporaryFile() as meeting:
        dist.init_process_group(backend, store=dist.FileStore(meeting.name, 1), rank=0, world_size=1)
        try:
            torch.use_deterministic_algorithms(True)
            deterministic.fill_uninitialized_memory = False  # saves a kernel per new tensor
            yield
        finally:
            torch.use_deterministic_algorithms(before[0])
            deterministic.fill_uninitialized_memory = before[1]
            dist.destroy_process_group()


def encode_samples(rows: list[Row], tokenizer: Qwen2Tokenizer) -> list[Sample]:
    """Encode prompts in the chat template with their answers and the end-of-sequence token."""
    prompts = tokenizer([prompt_text(row["prompt"]) for row in rows], add_special_tokens=False).input_ids
    answers = tokenizer([row["answer"] + END for row in rows], add_special_tokens=False).input_ids
    return [
        Sample(
            id=SampleId(batch=0, row=row, number=0), tokens=np.array([*prompt, *answer], np.int32),
            loss_mask=np.arange(len(prompt) + len(answer)) >= len(prompt), versions=np.full(len(answer), -1, np.int32),
            status="given",
        )
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


class SFT:
    """A model folder in training, within `single_process`. Raises ModelError if it cannot be loaded."""

    def __init__(self, folder: Path, recipe: SFTRecipe, *, device: torch.device):
        self.folder, self.recipe, self.device = folder, recipe, device
        self.tokens = 0
        """Number of trained tokens, prompts included."""
        optim = OptimConfig(
            lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, lr_warmup_steps=recipe.warmup_steps,
            lr_scheduler_type=recipe.schedule,
        )
        self.model = ShardedModel(
            ModelConfig(path=str(folder)), wrap=LogprobModel, fsdp=FSDPConfig(reshard_after_forward=False),
            shard_size=1, device=device, bucket_bytes=BUCKET_BYTES, compile=recipe.compile, optim=optim,
            num_updates=recipe.max_steps,
        )

    def step(self, samples: list[Sample]) -> Tensor:
        """Take one optimizer step; return the mean negative log-probability of the solutions' tokens, on the device.

        Raises DeviceMemoryError as `ShardedModel.step`.
        """
        num_tokens = sum(sample.num_trained for sample in samples)
        loss = torch.zeros((), device=self.device)
        micro_batches = self._micro_batches(samples)
        for number, members in enumerate(micro_batches, start=1):
            batch, rows, ids = pack_samples(members, self.device)
            self.model.model.set_reshard_after_backward(number == len(micro_batches))
            part, _ = self.model.model(batch, rows, ids[:, None], _negative, temperature=1.0)
            (part / num_tokens).backward()
            loss += part.detach() / num_tokens
        self.model.clip_grad_norm(1.0)
        self.model.step()
        self.tokens += sum(sample.num_tokens for sample in samples)
        return loss

    @torch.no_grad()
    def confident_fraction(self, samples: list[Sample]) -> float:
        """Return the fraction of solutions whose every token has a probability above 0.5 given the tokens before it.

        Greedy decoding gives these solutions, so it is a lower bound of the accuracy.
        """
        sure = 0
        for members in self._micro_batches(samples):
            batch, rows, ids = pack_samples(members, self.device)
            logprobs, _ = self.model.model(batch, rows, ids[:, None], temperature=1.0)
            above = (logprobs[:, 0] > math.log(0.5)).cpu().split([sample.num_trained for sample in members])
            sure += sum(bool(answer.all()) for answer in above)
        self.model.reshard()
        return sure / len(samples)

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        export_huggingface(self.model, folder, tokenizer_path=str(self.folder), trust_remote_code=False)

    def _micro_batches(self, samples: list[Sample]) -> list[tuple[Sample, ...]]:
        (plan,) = plan_micro_batches([s.num_tokens for s in samples], 1, self.recipe.max_tokens, None, False)
        return [tuple(samples[i] for i in members) for members in plan]


def _negative(logprobs: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs[:, 0], {}


def train_sft(sft: SFT, name: str, batches: Iterable[list[Sample]], probe: list[Sample]) -> int:
    """Train until the recipe's limit or `stop_at` is reached; return the number of steps.

    `probe`: held-out samples for `SFTRecipe.stop_at`. Raises TrainingError: the loss is not finite.
    """
    recipe, began, logged = sft.recipe, time.monotonic(), time.monotonic()
    for number, batch in zip(range(1, recipe.max_steps + 1), batches, strict=False):
        loss = sft.step(batch)
        stop_at = recipe.stop_at if number % CHECK_EVERY == 0 else None
        enough = stop_at is not None and sft.confident_fraction(probe) >= stop_at
        if enough or number in (1, recipe.max_steps) or time.monotonic() - logged >= LOG_EVERY:
            logged, value = time.monotonic(), loss.item()
            if not math.isfinite(value):
                raise TrainingError(f"{name}: the loss of step {number} is {value}")
            throughput, rest = sft.tokens / (logged - began), ""
            if number == 1:
                warm = logged  # the first step's time includes warm-up
            else:
                rest = f", at most {(logged - warm) / (number - 1) * (recipe.max_steps - number):.0f} s left"
            logger.info(
                "%s: step %d of at most %d, loss %.4f, %.1f M tokens, %.0f tokens/s, %.0f s%s", name, number,
                recipe.max_steps, value, sft.tokens / 1e6, throughput, logged - began, rest,
            )
        if enough:
            break
    return number

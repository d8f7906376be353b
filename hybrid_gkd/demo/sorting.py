"""The sorting demo: two tiny models and data, built locally, for a complete run on a CPU without a download.

    python -m hybrid_gkd.demo [sorting|weak_teacher|solutions] [--out DIR] [--seed 0] [--force]

The task is to sort the digits of a number: "730291" -> "012379". The teacher is trained until it solves the task; the
student is smaller, and its training stops while most of its completions are still wrong. The teacher of `weak_teacher`
is trained for a third of the steps and has an accuracy of 80 %, which the student should exceed. The student of
`solutions` is its own teacher: its data have a column with the solution in the prompt ("730291=012379"), which it has
learned to copy. All models are Hugging Face folders with the same byte tokenizer.

The trainer does not use this module: it gets two model folders and two data files like any others.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.demo import models
from hybrid_gkd.demo.folders import DemoPaths, Row, build_once, cached_folder, no_progress_bars, recipe_key, write_rows
from hybrid_gkd.demo.models import END

if TYPE_CHECKING:  # torch and transformers are imported where they are used: a cached demo needs neither
    import torch
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

logger = logging.getLogger(__name__)

SOLUTION = "with_solution"
"""Column of prompts with the solution, in the data of `solutions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortingModelRecipe(models.Shape):
    """Size and supervised training of one model."""

    max_steps: int
    """Maximum number of optimizer steps; the learning rate decreases linearly over them."""
    learning_rate: float
    stop_at_accuracy: float
    """Training ends when this fraction of a sample of the training prompts is solved."""
    head_dim: int = 32
    max_length: int = 4096  # the task needs 16, other prompts may need more


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRecipe:
    """Everything that determines the content of the folder, except the seed."""

    version: int = 1
    """Number to increase when the code changes the content."""
    num_digits: int = 6
    """Digits of every prompt; with varying lengths the student would need several times as many steps."""
    num_train: int = 20_000
    num_val: int = 256
    batch_size: int = 256
    teacher: SortingModelRecipe = SortingModelRecipe(
        hidden_size=128, num_layers=2, max_steps=180, learning_rate=2e-3, stop_at_accuracy=1.01, init_seed=1
    )
    student: SortingModelRecipe = SortingModelRecipe(
        hidden_size=64, num_layers=2, max_steps=1000, learning_rate=2e-3, stop_at_accuracy=0.25, init_seed=2
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionsRecipe(DemoRecipe):
    """A student that also reads prompts with the solution; with them it is the teacher, and there is no other."""

    solution_fraction: float = 0.75
    """Fraction of its supervised rows that have the solution in the prompt."""


WEAK_TEACHER = DemoRecipe(teacher=replace(DemoRecipe().teacher, max_steps=58))
"""The same student and data, with a teacher that solves 82 % of the held-out prompts."""
RECIPES = {"sorting": DemoRecipe(), "weak_teacher": WEAK_TEACHER, "solutions": SolutionsRecipe()}


def demo_dir(seed: int = 0, recipe: DemoRecipe | None = None) -> Path:
    """Return the default folder of a demo."""
    return cached_folder(f"demo-{recipe_key(recipe or DemoRecipe(), seed)}")


def build_demo(
    out: str | Path | None = None, seed: int = 0, *, force: bool = False, recipe: DemoRecipe | None = None
) -> DemoPaths:
    """Build the demo, or return the existing one; see `build_once`."""
    recipe = recipe or DemoRecipe()
    root = Path(out).expanduser().absolute() if out is not None else demo_dir(seed, recipe)
    return build_once(root, recipe_key(recipe, seed), lambda paths: _build(paths, recipe, seed), force=force)


def _build(paths: DemoPaths, recipe: DemoRecipe, seed: int) -> None:
    import torch
    import transformers

    started = time.monotonic()
    logger.info("building the demo models in %s (about half a minute on two idle CPU cores)", paths.root.parent)
    train, val = make_data(recipe, seed)
    write_rows(paths.train, train)
    write_rows(paths.val, val)
    tokenizer = make_byte_tokenizer()
    manifest: dict[str, object] = {
        "key": recipe_key(recipe, seed),
        "task": "sort the digits",
        "seed": seed,
        "recipe": asdict(recipe),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "num_train": len(train),
        "num_val": len(val),
    }
    jobs = [("teacher", recipe.teacher, paths.teacher), ("student", recipe.student, paths.student)]
    supervised = train
    if isinstance(recipe, SolutionsRecipe):
        jobs = jobs[1:]
        plain = round((1 - recipe.solution_fraction) * len(train))
        supervised = train[:plain] + with_solutions(train[plain:])
        paths.teacher.symlink_to(paths.student.name)
    for name, model_recipe, folder in jobs:
        model, steps = _train(name, model_recipe, recipe.batch_size, supervised, tokenizer, seed)
        accuracy = greedy_accuracy(model, tokenizer, val)
        parameters = sum(p.numel() for p in model.parameters())
        logger.info("%s: %d parameters, held-out accuracy %.3f", name, parameters, accuracy)
        manifest[name] = {"parameters": parameters, "sft_steps": steps, "held_out_accuracy": accuracy}
        with no_progress_bars():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if isinstance(recipe, SolutionsRecipe):
        accuracy = greedy_accuracy(model, tokenizer, with_solutions(val))
        logger.info("the student with the solution in its prompt: held-out accuracy %.3f", accuracy)
        manifest["teacher"] = {"held_out_accuracy": accuracy}
    manifest["build_seconds"] = round(time.monotonic() - started, 1)
    paths.manifest.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def make_data(recipe: DemoRecipe, seed: int) -> tuple[list[Row], list[Row]]:
    """Return training and held-out rows with distinct prompts."""
    rng = np.random.default_rng([recipe.version, seed])
    prompts: dict[str, None] = {}  # an ordered set
    while len(prompts) < recipe.num_train + recipe.num_val:
        prompts["".join(map(str, rng.integers(0, 10, recipe.num_digits)))] = None
    rows = [{"prompt": prompt, "answer": "".join(sorted(prompt))} for prompt in prompts]
    if isinstance(recipe, SolutionsRecipe):
        rows = [row | {SOLUTION: f"{row['prompt']}={row['answer']}"} for row in rows]
    return rows[recipe.num_val :], rows[: recipe.num_val]


def with_solutions(rows: list[Row]) -> list[Row]:
    """Return the rows with the solution in their prompts."""
    return [row | {"prompt": row[SOLUTION]} for row in rows]


def make_byte_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with a token per byte and the special tokens."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return models.make_bpe_tokenizer({char: i for i, char in enumerate(alphabet)}, [])


def encode_labels(rows: list[Row], tokenizer: Qwen2Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and next-token labels [B, T], padded on the right; -100 if no response token follows."""
    import torch

    prompts = tokenizer([models.prompt_text(row["prompt"]) for row in rows], add_special_tokens=False).input_ids
    responses = tokenizer([row["answer"] + END for row in rows], add_special_tokens=False).input_ids
    pairs = list(zip(prompts, responses, strict=True))
    shape = (len(pairs), max(len(prompt) + len(response) for prompt, response in pairs))
    ids, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, -100)
    for i, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(prompt + response)
        labels[i, len(prompt) - 1 : end - 1] = torch.tensor(response)
    return ids, labels


def _train(
    name: str, recipe: SortingModelRecipe, batch_size: int, rows: list[Row], tokenizer: Qwen2Tokenizer, seed: int
) -> tuple[Qwen2ForCausalLM, int]:
    """Train a model by supervised fine-tuning; return it and the number of steps."""
    import torch
    import torch.nn.functional as F

    model = models.make_model(recipe, tokenizer, seed, intermediate_size=4 * recipe.hidden_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng = np.random.default_rng([seed, recipe.init_seed])
    ids, labels = encode_labels(rows, tokenizer)
    probe = slice(0, 256)
    for step in range(1, recipe.max_steps + 1):
        rate = min(step / 50, 1 - 0.95 * step / recipe.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate
        batch = torch.from_numpy(rng.integers(0, len(rows), batch_size))
        target = labels[batch]
        hidden = model.model(ids[batch]).last_hidden_state
        response = target >= 0
        loss = F.cross_entropy(model.lm_head(hidden[response]), target[response])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            logger.info("%s: step %d of at most %d, loss %.4f", name, step, recipe.max_steps, loss.item())
        if step % 5 == 0 and _forced_accuracy(model, ids[probe], labels[probe]) >= recipe.stop_at_accuracy:
            break
    return model, step


def _forced_accuracy(model: Qwen2ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the fraction of rows whose every response token is the most likely one, as greedy decoding needs."""
    import torch

    with torch.inference_mode():
        best = model(ids).logits.argmax(-1)
    return ((best == labels) | (labels < 0)).all(-1).float().mean().item()


def greedy_accuracy(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, rows: list[Row]) -> float:
    """Return the fraction of rows whose greedy response, decoded without special tokens and stripped, is the answer."""
    answers = models.greedy_answers(model, tokenizer, rows, limit=max(len(row["answer"]) for row in rows) + 4)
    return sum(text.strip() == row["answer"] for text, row in zip(answers, rows, strict=True)) / len(rows)

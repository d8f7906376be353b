"""Models and data of the recipe gpu_demo: word problems, for a card and ten minutes.

    python -m hybrid_gkd.demo gpu_demo [--device cuda|cpu] [--out DIR] [--seed 0] [--force]

The teacher is trained on word problems of several events (word_problems.py), whose worked solutions have 90 to 290
tokens, 154,000 of them; the student has a sixth of its parameters, and its training stops while most of its answers
are still wrong. Half of the validation prompts have templates that no training text has. Without a GPU everything is
smaller: one or two events, small numbers, models of a few hundred thousand parameters.

The same seed gives the same texts, tokenizer and initial weights. Training uses torch's deterministic algorithms, so
that on the same type of device with the same libraries it is meant to give the same models.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections import abc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_gkd.demo import models
from hybrid_gkd.demo.folders import (
    DemoPaths,
    Row,
    build_once,
    cached_folder,
    no_progress_bars,
    recipe_key,
    write_rows,
)
from hybrid_gkd.demo.models import SFTRecipe
from hybrid_gkd.demo.word_problems import NAMES, TOWNS, Problem, problems
from hybrid_gkd.errors import TrainingError

if TYPE_CHECKING:  # torch and transformers are imported where they are used: a cached demo needs neither
    from transformers import Qwen2Tokenizer

    from hybrid_gkd.types import Sample

logger = logging.getLogger(__name__)

LONGEST_BUILD = 3600.0
"""Seconds. On a GPU it takes minutes."""
PARTS = ("data", "teacher", "student")
"""Of the demo, which need nothing of each other."""
TRAIN, VAL, PROBE, TOKENIZER, STREAM = range(5)
"""What texts are for; each draws from a random state of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """Size and training of one model."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    init_seed: int
    training: SFTRecipe
    head_dim: int = 64
    """vLLM's attention takes it on GPUs and CPUs."""
    max_length: int = 2048
    """Longest sequence in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUDemoRecipe:
    """Everything that the content of the folder depends on, the seed aside."""

    levels: tuple[int, ...]
    """Events of a problem."""
    largest: int
    """The largest number that the text of an event brings in."""
    num_names: int
    """Names of people that there are."""
    num_towns: int
    """Names of towns that there are."""
    vocab_size: int
    """Tokens, the special ones included; fewer where the texts do not have as many."""
    num_train: int
    """Prompts for distillation, with their solutions. The models are trained on others, as many as they need."""
    num_val: int
    teacher: ModelRecipe
    student: ModelRecipe
    version: int = 2
    """To be raised when the code changes what is built."""

    def texts(self, purpose: int, seed: int, part: int = 0) -> Iterator[Problem]:
        """Problems without end, for a purpose; `part` numbers independent streams."""
        key = [self.version, seed, purpose, part]
        return problems(
            key, levels=self.levels, largest=self.largest, num_names=self.num_names, num_towns=self.num_towns
        )


RECIPES = {
    # On a card: 38M and 6M parameters, six layers, because the host launches kernels all the time that a step takes.
    "cuda": GPUDemoRecipe(
        levels=(5, 6, 7, 8), largest=30, num_names=len(NAMES), num_towns=len(TOWNS), vocab_size=2048,
        num_train=40_000, num_val=512,
        teacher=ModelRecipe(
            hidden_size=704, num_layers=6, intermediate_size=1920, init_seed=1,
            training=SFTRecipe(
                max_steps=1200, batch_size=128, learning_rate=1e-3, schedule="cosine", compile=True, max_tokens=65536
            ),
        ),
        student=ModelRecipe(
            hidden_size=256, num_layers=6, intermediate_size=768, init_seed=2,
            training=SFTRecipe(max_steps=1200, batch_size=128, learning_rate=1e-3, stop_at=0.05, max_tokens=65536),
        ),
    ),
    # On two cores: 0.6M and 0.1M parameters.
    "cpu": GPUDemoRecipe(
        levels=(1, 2), largest=9, num_names=12, num_towns=12, vocab_size=1024, num_train=4000, num_val=64,
        teacher=ModelRecipe(
            hidden_size=128, num_layers=3, intermediate_size=256, init_seed=1,
            training=SFTRecipe(
                max_steps=1000, batch_size=32, learning_rate=3e-3, schedule="cosine", stop_at=0.9, max_tokens=8192
            ),
        ),
        student=ModelRecipe(
            hidden_size=64, num_layers=2, intermediate_size=128, init_seed=2,
            training=SFTRecipe(max_steps=1000, batch_size=32, learning_rate=3e-3, stop_at=0.15, max_tokens=8192),
        ),
    ),
}  # fmt: skip


def gpu_demo_dir(device: str, seed: int = 0) -> Path:
    """The folder that the demo of "cuda" or "cpu" is built in unless told otherwise."""
    return cached_folder(f"gpu_demo-{device}-{recipe_key(RECIPES[device], seed)}")


def build_gpu_demo(
    device: str, out: str | Path | None = None, seed: int = 0, *, force: bool = False,
    recipe: GPUDemoRecipe | None = None,
) -> DemoPaths:
    """Build the demo on "cuda" or "cpu", or return the one already there; see `build_once`.

    Raises TrainingError if it cannot be built, which the process that builds has explained on stderr.
    """
    recipe = recipe or RECIPES[device]
    root = gpu_demo_dir(device, seed) if out is None else Path(out).expanduser().absolute()
    return build_once(root, recipe_key(recipe, seed), lambda paths: _start(paths, recipe, seed, device), force=force)


def _start(paths: DemoPaths, recipe: GPUDemoRecipe, seed: int, device: str) -> None:
    """Build in processes of their own, with which their GPU memory goes.

    On a GPU all parts are made at the same time: models this small leave most of it idle.
    """
    logger.info("building the models and data of gpu_demo in %s", paths.root.parent)
    if device == "cpu":
        logger.info(
            "without a GPU they are small: short problems, teacher and student below a million parameters, made one "
            "after the other; the lines of their training say how long each takes at most"
        )
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    children = list[Any]()
    try:
        for parts in _groups(device):
            child = context.Process(target=_make, args=(parts, paths, recipe, seed, device))
            child.start()
            children.append(child)
        while None in (codes := [child.exitcode for child in children]) and not any(codes):
            at_work = [child.sentinel for child in children if child.exitcode is None]
            if at_work and not multiprocessing.connection.wait(at_work, began + LONGEST_BUILD - time.monotonic()):
                raise TrainingError(f"building the models of gpu_demo took more than {LONGEST_BUILD:.0f} s")
        if any(codes):
            raise TrainingError("building the models of gpu_demo failed; the reason is above")
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.join(30)
    manifest: dict[str, Any] = {
        "key": recipe_key(recipe, seed), "task": "word problems", "seed": seed, "recipe": asdict(recipe),
        "device": device, "build_seconds": round(time.monotonic() - began, 1),
    }
    for part in PARTS:
        file = _part_of_manifest(paths, part)
        manifest |= json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    paths.manifest.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _groups(device: str) -> list[tuple[str, ...]]:
    """Of the parts: those of a group are made one after another in one process."""
    return [(part,) for part in PARTS] if device == "cuda" else [PARTS]


def _part_of_manifest(paths: DemoPaths, part: str) -> Path:
    return paths.root / f"{part}.json"


def _make(parts: tuple[str, ...], paths: DemoPaths, recipe: GPUDemoRecipe, seed: int, device: str) -> None:
    """What a building process does."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes that make texts are forked
    tokenizer, val = make_tokenizer(recipe, seed), make_val(recipe, seed)
    for part in parts:
        if part == "data":
            found = _make_data(paths, recipe, len(tokenizer), seed)
        else:
            found = {part: _make_model(part, paths, recipe, tokenizer, val, seed, device)}
        _part_of_manifest(paths, part).write_text(json.dumps(found), encoding="utf-8")


def _make_data(paths: DemoPaths, recipe: GPUDemoRecipe, num_tokens: int, seed: int) -> dict[str, Any]:
    import torch
    import transformers

    train, val = make_data(recipe, seed)
    write_rows(paths.train, train)
    write_rows(paths.val, val)
    logger.info("%d prompts to train on, %d held out, %d tokens", len(train), len(val), num_tokens)
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__}, "num_train": len(train),
        "num_val": len(val), "vocab_size": num_tokens,
    }  # fmt: skip


def _make_model(
    name: str, paths: DemoPaths, recipe: GPUDemoRecipe, tokenizer: Qwen2Tokenizer, val: list[Row], seed: int,
    device: str,
) -> dict[str, Any]:  # fmt: skip
    from hybrid_gkd.demo import sft

    shape, folder = getattr(recipe, name), getattr(paths, name)
    probe = sft.encode(_rows(recipe.texts(PROBE, seed), shape.training.batch_size), tokenizer)
    batches = _batches(recipe, shape, tokenizer, seed, device)
    found = train_model(name, folder, shape, tokenizer, batches, seed=seed, device=device, probe=probe)
    found |= held_out_accuracy(folder, val, device)
    logger.info("%s: %s", name, found)
    return found


def train_model(
    name: str, folder: Path, shape: ModelRecipe, tokenizer: Qwen2Tokenizer, batches: Iterator[list[Sample]], *,
    seed: int, device: str, probe: abc.Sequence[Sample] = (),
) -> dict[str, Any]:  # fmt: skip
    """Make a model, train it on the batches and write it; what a manifest says of its training.

    `probe`: as for `sft.train`.
    """
    import torch

    from hybrid_gkd.demo import sft

    began, where = time.monotonic(), torch.device(device)
    model = models.make_model(shape, tokenizer, seed)
    if device == "cuda":
        model.bfloat16()  # as most models are stored: half the size, and what a GPU computes in
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with sft.alone(where), no_progress_bars():
        training = sft.SFT(folder, shape.training, device=where)
        steps = sft.train(training, name, batches, list(probe))
        training.export(folder)
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "sft_steps": steps, "sft_tokens": training.tokens,
        "sft_seconds": round(time.monotonic() - began, 1),
    }


def held_out_accuracy(folder: Path, val: list[Row], device: str) -> dict[str, float]:
    """Share of right greedy answers: of all prompts, and of those whose template is in no training text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    limit = max(len(ids) for ids in tokenizer([row["answer"] for row in val]).input_ids) + 8
    answers = models.greedy_answers(model.to(device).eval(), tokenizer, val, limit=limit)
    right = [is_right(text, row["answer"]) for text, row in zip(answers, val, strict=True)]
    new = [known for known, row in zip(right, val, strict=True) if row["held_out_template"]]
    return {"held_out_accuracy": sum(right) / len(right), "held_out_template_accuracy": sum(new) / len(new)}


def is_right(text: str, answer: str) -> bool:
    """Whether both end with the same number behind `####`."""
    _, marker, found = text.rpartition("####")
    return bool(marker) and found.strip() == answer.rpartition("####")[2].strip()


def make_tokenizer(recipe: GPUDemoRecipe, seed: int) -> Qwen2Tokenizer:
    """`learn_tokenizer` on texts of the task."""
    texts = (f"{p.prompt}\n{p.solution}" for p in islice(recipe.texts(TOKENIZER, seed), 5000))
    return learn_tokenizer(texts, recipe.vocab_size)


def learn_tokenizer(texts: Iterator[str], vocab_size: int) -> Qwen2Tokenizer:
    """Byte-level BPE trained on texts; digits are tokens of their own, as in Qwen's tokenizers."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers
    from tokenizers.models import BPE

    base = models.make_tokenizer({}, [])
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = base.backend_tokenizer.pre_tokenizer
    num_special = len(base)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    return models.make_tokenizer(learned["vocab"], [tuple(pair) for pair in learned["merges"]])


def make_data(recipe: GPUDemoRecipe, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows for training and for validation."""
    return _rows(recipe.texts(TRAIN, seed), recipe.num_train), make_val(recipe, seed)


def make_val(recipe: GPUDemoRecipe, seed: int) -> list[Row]:
    """Rows for validation: as many with a known template as with one that is held out."""
    held_out = (p for p in recipe.texts(VAL, seed) if p.held_out)
    known = (p for p in recipe.texts(VAL, seed, 1) if not p.held_out and not p.for_training)
    rows = [*islice(held_out, recipe.num_val // 2), *islice(known, recipe.num_val - recipe.num_val // 2)]
    return [_row(p) for p in rows]


def _rows(texts: Iterator[Problem], count: int) -> list[Row]:
    return [_row(p) for p in islice((p for p in texts if p.for_training), count)]


def _row(problem: Problem) -> Row:
    return {
        "prompt": problem.prompt, "answer": problem.solution, "level": problem.level, "template": problem.template,
        "held_out_template": problem.held_out,
    }


def _batches(
    recipe: GPUDemoRecipe, shape: ModelRecipe, tokenizer: Qwen2Tokenizer, seed: int, device: str
) -> Iterator[list[Sample]]:
    """The training batches of a model: new texts for every step, on a card made by processes beside it."""
    from torch.utils.data import DataLoader

    workers = max(1, min(8, (os.cpu_count() or 1) - 2)) if device == "cuda" else 0
    batches: Any = _Batches(recipe, shape, tokenizer, seed)
    return iter(DataLoader(batches, batch_size=None, num_workers=workers, collate_fn=_as_it_is))


def _as_it_is(batch: list[Sample]) -> list[Sample]:
    return batch


class _Batches:
    """Batch `number` of a model's training, the same whoever makes it."""

    def __init__(self, recipe: GPUDemoRecipe, shape: ModelRecipe, tokenizer: Qwen2Tokenizer, seed: int):
        self.recipe, self.shape, self.tokenizer, self.seed = recipe, shape, tokenizer, seed

    def __len__(self) -> int:
        return self.shape.training.max_steps

    def __getitem__(self, number: int) -> list[Sample]:
        from hybrid_gkd.demo import sft

        purpose = STREAM + self.shape.init_seed
        rows = _rows(self.recipe.texts(purpose, self.seed, number), self.shape.training.batch_size)
        return sft.encode(rows, self.tokenizer)



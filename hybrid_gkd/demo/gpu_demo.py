"""Models and data of the recipe gpu_demo: word problems, for a GPU and ten minutes.

    python -m hybrid_gkd.demo gpu_demo [--device cuda|cpu] [--out DIR] [--seed 0] [--force]

The teacher is trained on 154,000 word problems of several events (word_problems.py) with solutions of 90 to 290 tokens;
the student has a sixth of its parameters, and its training stops while most of its completions are still wrong. Half of
the validation prompts have templates that no training text has. Without a GPU everything is smaller: one or two events,
small numbers, models of a few hundred thousand parameters.

The same seed gives the same texts, tokenizer and initial weights. Training uses torch's deterministic algorithms, so
that the same type of device and the same libraries should give the same models.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_gkd.demo import models
from hybrid_gkd.demo.folders import DemoPaths, Row, build_once, cached_folder, no_progress_bars, recipe_key, write_rows
from hybrid_gkd.demo.models import SFTRecipe
from hybrid_gkd.demo.word_problems import NAMES, TOWNS, Problem, problems
from hybrid_gkd.errors import TrainingError

if TYPE_CHECKING:  # torch and transformers are imported where they are used: a cached demo needs neither
    from transformers import Qwen2Tokenizer

    from hybrid_gkd.types import Sample

logger = logging.getLogger(__name__)

LONGEST_BUILD = 3600.0
"""Timeout of a build, seconds; on a GPU it takes minutes."""
PARTS = ("data", "teacher", "student")
"""Independent parts of the demo."""
TRAIN, VAL, PROBE, TOKENIZER, STREAM = range(5)
"""Purposes of texts; each has its own random state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe(models.Shape):
    """Size and training of one model."""

    intermediate_size: int
    training: SFTRecipe
    head_dim: int = 64
    max_length: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUDemoRecipe:
    """Everything that determines the content of the folder, except the seed."""

    levels: tuple[int, ...]
    """Numbers of events of a problem."""
    largest: int
    """Largest number in the text of an event."""
    num_names: int
    """Number of different names of people."""
    num_towns: int
    """Number of different names of towns."""
    vocab_size: int
    """Maximum number of tokens, special ones included."""
    num_train: int
    """Prompts for distillation, with their solutions. The models are trained on other problems."""
    num_val: int
    teacher: ModelRecipe
    student: ModelRecipe
    version: int = 2
    """Number to increase when the code changes the content."""

    def texts(self, purpose: int, seed: int, part: int = 0) -> Iterator[Problem]:
        """Yield problems for a purpose, without end; `part` numbers independent streams."""
        key = [self.version, seed, purpose, part]
        return problems(
            key, levels=self.levels, largest=self.largest, num_names=self.num_names, num_towns=self.num_towns
        )


RECIPES = {
    # On a GPU: 38M and 6M parameters, six layers, since the time of a step is that of kernel launches on the host.
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
    """Return the default folder of the demo for "cuda" or "cpu"."""
    return cached_folder(f"gpu_demo-{device}-{recipe_key(RECIPES[device], seed)}")


def build_gpu_demo(
    device: str, out: str | Path | None = None, seed: int = 0, *, force: bool = False,
    recipe: GPUDemoRecipe | None = None,
) -> DemoPaths:
    """Build the demo on "cuda" or "cpu", or return the existing one; see `build_once`.

    Raises TrainingError if the build fails; the building process prints the reason on stderr.
    """
    recipe = recipe or RECIPES[device]
    root = gpu_demo_dir(device, seed) if out is None else Path(out).expanduser().absolute()
    return build_once(root, recipe_key(recipe, seed), lambda paths: _start(paths, recipe, seed, device), force=force)


def _start(paths: DemoPaths, recipe: GPUDemoRecipe, seed: int, device: str) -> None:
    """Build the demo in child processes, which release their GPU memory at their end.

    On a GPU all parts are built at the same time, since such small models leave most of it idle.
    """
    logger.info("building the models and data of gpu_demo in %s", paths.root.parent)
    if device == "cpu":
        logger.info(
            "without a GPU the demo is small: short problems, teacher and student below a million parameters, trained "
            "one after the other; the training log shows the maximum remaining time"
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
    """Return groups of parts; those of a group are built one after another in one process."""
    return [(part,) for part in PARTS] if device == "cuda" else [PARTS]


def _part_of_manifest(paths: DemoPaths, part: str) -> Path:
    return paths.root / f"{part}.json"


def _make(parts: tuple[str, ...], paths: DemoPaths, recipe: GPUDemoRecipe, seed: int, device: str) -> None:
    """Build parts of the demo, as the main function of a child process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes that generate texts are forked
    tokenizer, val = make_word_tokenizer(recipe, seed), make_val(recipe, seed)
    for part in parts:
        if part == "data":
            found = _make_data(paths, recipe, len(tokenizer), seed)
        else:
            found = {part: _make_model(part, paths, recipe, tokenizer, val, seed, device)}
        _part_of_manifest(paths, part).write_text(json.dumps(found), encoding="utf-8")


def _end_with_parent() -> None:
    """Wait until the parent process has ended, however it ended; then end this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _make_data(paths: DemoPaths, recipe: GPUDemoRecipe, num_tokens: int, seed: int) -> dict[str, Any]:
    import torch
    import transformers

    train, val = make_data(recipe, seed)
    write_rows(paths.train, train)
    write_rows(paths.val, val)
    logger.info("%d training prompts, %d held-out prompts, %d tokens", len(train), len(val), num_tokens)
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__}, "num_train": len(train),
        "num_val": len(val), "vocab_size": num_tokens,
    }  # fmt: skip


def _make_model(
    name: str, paths: DemoPaths, recipe: GPUDemoRecipe, tokenizer: Qwen2Tokenizer, val: list[Row], seed: int,
    device: str,
) -> dict[str, Any]:  # fmt: skip
    """Create a model, train it and write it; return the manifest's entries about it."""
    import torch

    from hybrid_gkd.demo import sft

    shape, folder = getattr(recipe, name), getattr(paths, name)
    probe = sft.encode_samples(_rows(recipe.texts(PROBE, seed), shape.training.batch_size), tokenizer)
    batches = _batches(recipe, shape, tokenizer, seed, device)
    began, where = time.monotonic(), torch.device(device)
    model = models.make_model(shape, tokenizer, seed, intermediate_size=shape.intermediate_size)
    if device == "cuda":
        model.bfloat16()  # the usual storage type, half the size
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with sft.single_process(where), no_progress_bars():
        training = sft.SFT(folder, shape.training, device=where)
        steps = sft.train_sft(training, name, batches, probe)
        training.export(folder)
    found = {
        "parameters": sum(p.numel() for p in model.parameters()), "sft_steps": steps, "sft_tokens": training.tokens,
        "sft_seconds": round(time.monotonic() - began, 1), **held_out_accuracy(folder, val, device),
    }
    logger.info("%s: %s", name, found)
    return found


def held_out_accuracy(folder: Path, val: list[Row], device: str) -> dict[str, float]:
    """Return the fraction of right greedy completions: of all prompts, and of those with held-out templates."""
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
    """Return whether both texts end with the same number after `####`."""
    _, marker, found = text.rpartition("####")
    return bool(marker) and found.strip() == answer.rpartition("####")[2].strip()


def make_word_tokenizer(recipe: GPUDemoRecipe, seed: int) -> Qwen2Tokenizer:
    """Train a byte-level BPE on texts of the task; digits are separate tokens, as in Qwen's tokenizers."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers
    from tokenizers.models import BPE

    base = models.make_bpe_tokenizer({}, [])
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = base.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size - len(base), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    texts = (f"{p.prompt}\n{p.solution}" for p in islice(recipe.texts(TOKENIZER, seed), 5000))
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    return models.make_bpe_tokenizer(learned["vocab"], [tuple(pair) for pair in learned["merges"]])


def make_data(recipe: GPUDemoRecipe, seed: int) -> tuple[list[Row], list[Row]]:
    """Return rows for training and for validation."""
    return _rows(recipe.texts(TRAIN, seed), recipe.num_train), make_val(recipe, seed)


def make_val(recipe: GPUDemoRecipe, seed: int) -> list[Row]:
    """Return rows for validation, half of them with held-out templates."""
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
    """Return a model's training batches, with new texts for every step; with a GPU, worker processes generate them."""
    from torch.utils.data import DataLoader

    workers = max(1, min(8, (os.cpu_count() or 1) - 2)) if device == "cuda" else 0
    batches: Any = _Batches(recipe, shape, tokenizer, seed)
    return iter(DataLoader(batches, batch_size=None, num_workers=workers))


class _Batches:
    """Training batches of a model by number, independent of the process that generates them."""

    def __init__(self, recipe: GPUDemoRecipe, shape: ModelRecipe, tokenizer: Qwen2Tokenizer, seed: int):
        self.recipe, self.shape, self.tokenizer, self.seed = recipe, shape, tokenizer, seed

    def __len__(self) -> int:
        return self.shape.training.max_steps

    def __getitem__(self, number: int) -> list[Sample]:
        from hybrid_gkd.demo import sft

        purpose = STREAM + self.shape.init_seed
        rows = _rows(self.recipe.texts(purpose, self.seed, number), self.shape.training.batch_size)
        return sft.encode_samples(rows, self.tokenizer)



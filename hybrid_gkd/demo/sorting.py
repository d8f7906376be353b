"""The demo: two tiny models and data, made on this machine, for a complete run on a CPU without a download.

    python -m hybrid_gkd.demo [--out DIR] [--seed 0] [--force]

The task is to sort the digits of a number: "730291" -> "012379". The teacher is trained until it masters the
task; the student is smaller and its training is stopped while most of its answers are still wrong, so that
distillation has something to do. Both are ordinary Hugging Face folders with the same byte tokenizer.
Nothing here is used by training: the trainer sees two model folders and two data files like any other.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.errors import ConfigError, HybridGKDError

if TYPE_CHECKING:  # torch and transformers are imported where they are used: a cached demo needs neither
    import torch
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

logger = logging.getLogger(__name__)

Row = dict[str, str]

PAD, END = "<|endoftext|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """Size and supervised training of one model."""

    hidden_size: int
    num_layers: int
    max_steps: int
    """Most optimizer steps; the learning rate falls linearly over them."""
    learning_rate: float
    stop_at_accuracy: float
    """Training ends as soon as this part of a sample of the training prompts is answered correctly."""
    init_seed: int

    head_dim: int = 32
    """vLLM's CPU attention takes 32 or 64, nothing smaller."""
    max_length: int = 4096
    """Longest sequence in tokens: the task needs 16, other prompts that somebody tries the models on need more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRecipe:
    """Everything that the content of the folder depends on, the seed aside."""

    version: int = 1
    """To be raised when the code changes what is built."""
    num_digits: int = 6
    """Of every prompt; with mixed lengths the student would need several times as many steps."""
    num_train: int = 20_000
    num_val: int = 256
    batch_size: int = 256
    teacher: ModelRecipe = field(
        default_factory=lambda: ModelRecipe(
            hidden_size=128, num_layers=2, max_steps=180, learning_rate=2e-3, stop_at_accuracy=1.01, init_seed=1
        )
    )
    student: ModelRecipe = field(
        default_factory=lambda: ModelRecipe(
            hidden_size=64, num_layers=2, max_steps=1000, learning_rate=2e-3, stop_at_accuracy=0.25, init_seed=2
        )
    )

    def key(self, seed: int) -> str:
        """Short hash of the recipe and the seed."""
        return hashlib.sha256(json.dumps([asdict(self), seed], sort_keys=True).encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPaths:
    """Where the parts of a built demo are."""

    root: Path
    teacher: Path
    student: Path
    train: Path
    val: Path
    manifest: Path

    @staticmethod
    def under(root: Path) -> DemoPaths:
        return DemoPaths(
            root=root,
            teacher=root / "teacher",
            student=root / "student",
            train=root / "train.jsonl",
            val=root / "val.jsonl",
            manifest=root / "demo.json",
        )


def demo_dir(seed: int = 0, recipe: DemoRecipe | None = None) -> Path:
    """The folder a demo is built in unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "hybrid_gkd" / f"demo-{(recipe or DemoRecipe()).key(seed)}"


def build_demo(
    out: str | Path | None = None, seed: int = 0, *, force: bool = False, recipe: DemoRecipe | None = None
) -> DemoPaths:
    """Build the demo, or return the one already there; `force` builds it again.

    It is built in a temporary folder beside the final one and renamed, so an interrupted build is never
    used. Of two builds at once, both are complete and one is kept. A folder that holds anything else than
    a demo is refused, never overwritten.
    """
    recipe = recipe or DemoRecipe()
    root = Path(out).expanduser().absolute() if out is not None else demo_dir(seed, recipe)
    if _is_complete(root, recipe.key(seed)) and not force:
        return DemoPaths.under(root)
    _check_replaceable(root, recipe.key(seed), force)
    root.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.parent))
    try:
        building.chmod(0o755)  # mkdtemp gives 0o700, and other users may share the cache
        _build(DemoPaths.under(building), recipe, seed)
        _move_into_place(building, root, recipe.key(seed), force)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return DemoPaths.under(root)


def teacher_accuracy(paths: DemoPaths) -> float:
    """Held-out greedy accuracy of the teacher, measured when the demo was built."""
    return json.loads(paths.manifest.read_text())["teacher"]["held_out_accuracy"]


def _manifest_key(root: Path) -> str | None:
    """Key of the recipe and seed of a built demo; None where there is none."""
    try:
        return json.loads(DemoPaths.under(root).manifest.read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):  # absent, or somebody else's file
        return None


def _is_complete(root: Path, key: str) -> bool:
    return _manifest_key(root) == key and all(path.exists() for path in asdict(DemoPaths.under(root)).values())


def _check_replaceable(root: Path, key: str, force: bool) -> None:
    """Only an absent or empty folder, a broken copy of the same demo, or (with force) another demo may be replaced."""
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return
    found = _manifest_key(root)
    if found is None:
        raise ConfigError("--out", "must be an absent or empty folder, or one that holds a demo", str(root))
    if found != key and not force:
        raise ConfigError("--out", "holds a demo of another seed or recipe; --force replaces it", str(root))


def _move_into_place(building: Path, root: Path, key: str, force: bool) -> None:
    """Rename onto `root`; if another build was faster, keep that one."""
    replaced = Path(tempfile.mkdtemp(prefix=f".{root.name}.old.", dir=root.parent))
    try:
        if force or not _is_complete(root, key):
            with contextlib.suppress(FileNotFoundError):
                root.rename(replaced)  # onto an empty folder
        building.rename(root)
    except OSError:
        if not _is_complete(root, key):
            raise
    finally:
        shutil.rmtree(replaced, ignore_errors=True)


def _build(paths: DemoPaths, recipe: DemoRecipe, seed: int) -> None:
    import torch
    import transformers

    started = time.monotonic()
    logger.info("building the demo models in %s (about half a minute on two idle CPU cores)", paths.root.parent)
    train, val = make_data(recipe, seed)
    for file, rows in ((paths.train, train), (paths.val, val)):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    manifest: dict[str, object] = {
        "key": recipe.key(seed),
        "task": "sort the digits",
        "seed": seed,
        "recipe": asdict(recipe),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "num_train": len(train),
        "num_val": len(val),
    }
    jobs = (("teacher", recipe.teacher, paths.teacher), ("student", recipe.student, paths.student))
    for name, model_recipe, folder in jobs:
        model, steps = _train(name, model_recipe, recipe.batch_size, train, tokenizer, seed)
        accuracy = greedy_accuracy(model, tokenizer, val)
        parameters = sum(p.numel() for p in model.parameters())
        logger.info("%s: %d parameters, held-out accuracy %.3f", name, parameters, accuracy)
        manifest[name] = {"parameters": parameters, "sft_steps": steps, "held_out_accuracy": accuracy}
        with _no_progress_bars():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    manifest["build_seconds"] = round(time.monotonic() - started, 1)
    paths.manifest.write_text(json.dumps(manifest, indent=2) + "\n")


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()


def make_data(recipe: DemoRecipe, seed: int) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, all prompts distinct."""
    rng = np.random.default_rng([recipe.version, seed])
    prompts: dict[str, None] = {}  # an ordered set
    while len(prompts) < recipe.num_train + recipe.num_val:
        prompts["".join(map(str, rng.integers(0, 10, recipe.num_digits)))] = None
    rows = [{"prompt": prompt, "answer": "".join(sorted(prompt))} for prompt in prompts]
    return rows[recipe.num_val :], rows[: recipe.num_val]


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte and a few special ones, so that any text has an encoding (in Unicode form NFC).

    The class is Qwen2's own because AutoTokenizer loads every folder of a Qwen2 model with it, whatever the
    folder says; a plain PreTrainedTokenizerFast would come back with one token more than the model has.
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={char: i for i, char in enumerate(alphabet)},
        merges=[],
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _make_model(recipe: ModelRecipe, tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    num_heads = recipe.hidden_size // recipe.head_dim
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=4 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=recipe.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * seed + recipe.init_seed)
        return Qwen2ForCausalLM(config).float()


def _chat_ids(row: Row, tokenizer: Qwen2Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the response, which ends with the end-of-sequence token."""
    messages = [{"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return (
        tokenizer(prompt, add_special_tokens=False).input_ids,
        tokenizer(row["answer"] + END, add_special_tokens=False).input_ids,
    )


def _encode(rows: list[Row], tokenizer: Qwen2Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and next-token labels [B, T], padded on the right; -100 where no response token follows."""
    import torch

    pairs = [_chat_ids(row, tokenizer) for row in rows]
    shape = (len(pairs), max(len(prompt) + len(response) for prompt, response in pairs))
    ids, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, -100)
    for i, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(prompt + response)
        labels[i, len(prompt) - 1 : end - 1] = torch.tensor(response)
    return ids, labels


def _train(
    name: str, recipe: ModelRecipe, batch_size: int, rows: list[Row], tokenizer: Qwen2Tokenizer, seed: int
) -> tuple[Qwen2ForCausalLM, int]:
    """Plain supervised training; returns the model and the number of steps taken."""
    import torch
    import torch.nn.functional as F

    model = _make_model(recipe, tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng = np.random.default_rng([seed, recipe.init_seed])
    ids, labels = _encode(rows, tokenizer)
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
    """Part of the rows whose every response token is the most likely one, which is when greedy decoding gives them."""
    import torch

    with torch.inference_mode():
        best = model(ids).logits.argmax(-1)
    return ((best == labels) | (labels < 0)).all(-1).float().mean().item()


def greedy_accuracy(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, rows: list[Row]) -> float:
    """Part of the rows whose greedy response, decoded without special tokens and stripped, is the answer."""
    import torch

    prompts = [_chat_ids(row, tokenizer)[0] for row in rows]
    longest = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    limit = max(len(row["answer"]) for row in rows) + 4
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False)
    texts = tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
    return sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hybrid_gkd.demo", description="Build the demo models and data.")
    parser.add_argument("--out", help="folder to build (default: one in the user's cache)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="build again even if the demo is there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        paths = build_demo(args.out, args.seed, force=args.force)
    except HybridGKDError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(paths.manifest.read_text(), end="")
    print(paths.root)
    return 0

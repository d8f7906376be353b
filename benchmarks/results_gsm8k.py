"""Distillation between two language models of GSM8K's texts (arXiv 2110.14168): how close the student comes, no more.

    python benchmarks/results_gsm8k.py run --minutes 15   # the runs that are missing; on a GPU, else a small check
    python benchmarks/results_gsm8k.py report             # docs/results_gsm8k.md and its picture

Teacher and student are trained on the solutions of the training split, several times over, by the code that trains the
models of gpu_demo; `run` makes them first where the folder --models has none. Such small models of so few texts speak
like the solutions and need not solve a problem, so accuracy is not measured: shown is the divergence of the two on what
the student answers to questions of the test split. --train and --val are read as data.train_files; by default they are
the hub's openai/gsm8k. The runs are some of those of results.py, which trains and stores them, at its rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import results
from results_report import Panel, Stored, by_name, chart, draw, facts, read_all, spread
from results_sft import batches

from hybrid_gkd.data.prompts import Columns, read_rows
from hybrid_gkd.demo.folders import DemoPaths, Row, build_once, recipe_key, write_rows
from hybrid_gkd.demo.gpu_demo import ModelRecipe, learn_tokenizer, train_model
from hybrid_gkd.demo.models import SFTRecipe
from hybrid_gkd.demo.sft import encode
from hybrid_gkd.demo.use import visible_device

STORED = results.ROOT / "benchmarks" / "results_gsm8k"
ONLY = tuple(name for name, run in results.RUNS.items() if name.startswith("opd") and name != "opd_rewards")
"""Those that need no answers."""
SEED = 0
"""Of the models."""
METHOD = """\
GSM8K's texts (arXiv 2110.14168). Teacher and student are language models that were trained on the solutions of the
training split, the teacher for more passes; the student then learns from the teacher on its own answers to the same
questions. It is about how close the student comes: accuracy is not measured, and models this small need not solve a
problem. Divergences are those of the teacher's 64 likeliest tokens and the tail, in nats a token, on the student's own
answers (temperature 1) to questions of the test split. The learning rate is that of [Results](results.md); none was
searched for."""
PANELS = tuple(
    Panel("answer_tokens", f"val/{name}_kl", f"held-out KL({both}), nats/token")
    for name, both in (("forward", "teacher, student"), ("reverse", "student, teacher"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that the models depend on, the texts and the seed aside, and how long the runs are."""

    vocab_size: int
    num_train: int | None
    """Problems; None: all that there are."""
    num_val: int
    teacher: ModelRecipe
    student: ModelRecipe
    max_prompt_length: int
    """Longer questions are left out of the runs."""
    max_response_length: int
    steps: int


RECIPES = {
    # On a card: 27M and 4M parameters, eight passes and two: 7,473 problems are 116 batches. Few layers, as the host
    # launches kernels all the time that a step takes.
    "cuda": Recipe(
        vocab_size=4096, num_train=None, num_val=512, max_prompt_length=256, max_response_length=384, steps=150,
        teacher=ModelRecipe(
            hidden_size=640, num_layers=5, intermediate_size=1728, init_seed=1,
            training=SFTRecipe(
                max_steps=928, batch_size=64, learning_rate=1e-3, schedule="cosine", max_tokens=65536
            ),
        ),
        student=ModelRecipe(
            hidden_size=256, num_layers=4, intermediate_size=704, init_seed=2,
            training=SFTRecipe(max_steps=232, batch_size=64, learning_rate=1e-3, max_tokens=65536),
        ),
    ),
    # On two cores, as a check that everything works.
    "cpu": Recipe(
        vocab_size=1024, num_train=512, num_val=16, max_prompt_length=256, max_response_length=64, steps=10,
        teacher=ModelRecipe(
            hidden_size=128, num_layers=2, intermediate_size=256, init_seed=1,
            training=SFTRecipe(max_steps=160, batch_size=16, learning_rate=3e-3, schedule="cosine", max_tokens=8192),
        ),
        student=ModelRecipe(
            hidden_size=64, num_layers=2, intermediate_size=128, init_seed=2,
            training=SFTRecipe(max_steps=32, batch_size=16, learning_rate=3e-3, max_tokens=8192),
        ),
    ),
}  # fmt: skip


def build(root: Path, recipe: Recipe, *, train: str, val: str, device: str) -> DemoPaths:
    """The models and their texts, which are made unless they are there. Raises ConfigError: the folder holds others."""
    # In a process of its own, with which its GPU memory goes.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def make(paths: DemoPaths) -> None:
            pool.submit(fill, paths, recipe, train, val, device).result()

        return build_once(root, recipe_key(recipe, SEED), make)


def fill(paths: DemoPaths, recipe: Recipe, train: str, val: str, device: str) -> None:
    """Read the texts, learn their tokens and train both models. Raises DataError."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    rows = read(train, "--train")[: recipe.num_train]
    write_rows(paths.train, rows)
    write_rows(paths.val, read(val, "--val")[: recipe.num_val])
    tokenizer = learn_tokenizer((f"{row['prompt']}\n{row['answer']}" for row in rows), recipe.vocab_size)
    manifest: dict[str, Any] = {"key": recipe_key(recipe, SEED), "num_train": len(rows), "vocab_size": len(tokenizer)}
    sequences = encode(rows, tokenizer)
    for name, shape in (("teacher", recipe.teacher), ("student", recipe.student)):
        endless = batches(sequences, shape.training.batch_size, shape.init_seed)
        folder = getattr(paths, name)
        manifest[name] = train_model(name, folder, shape, tokenizer, endless, seed=SEED, device=device)
    manifest["build_seconds"] = round(time.monotonic() - began, 1)
    paths.manifest.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read(entry: str, key: str) -> list[Row]:
    """Questions with their solutions. Raises DataError."""
    tables = read_rows([entry], key=key, columns=Columns(prompt="question", answer="answer"))
    return [
        {"prompt": chat[0]["content"], "answer": answer}
        for table in tables for chat, answer in zip(table.messages, table.answers, strict=True)
    ]  # fmt: skip


def settings_of(paths: DemoPaths, recipe: Recipe, device: str, folder: Path, steps: int | None) -> results.Settings:
    """What the runs share: config/gpu_demo.yaml without an accuracy, with room for these texts."""
    overrides = (
        "reward.answer_key=null", "data.filter_overlong_prompts=true",
        f"data.max_prompt_length={recipe.max_prompt_length}", f"data.max_response_length={recipe.max_response_length}",
        f"{results.ROLLOUT}.val_kwargs.temperature=1",
    )  # fmt: skip
    return results.Settings(
        paths=paths, device=device, steps=steps or recipe.steps, minutes=math.inf, results=folder, overrides=overrides
    )


def run_all(args: argparse.Namespace) -> None:
    """Make the models, then the runs that are missing, as many as the minutes hold."""
    deadline = time.monotonic() + 60 * args.minutes
    device = args.device or visible_device()
    recipe = RECIPES[device]
    paths = build(args.models.absolute(), recipe, train=args.train, val=args.val, device=device)
    settings = settings_of(paths, recipe, device, args.results.absolute(), args.steps)
    overrides = (*settings.overrides, *args.overrides)
    settings = dataclasses.replace(settings, overrides=overrides, together=args.together)
    there = results.stored_runs(settings)
    results.train_missing(results.wanted(args.only, args.seeds), settings, there, deadline)


def report(found: list[Stored], docs: Path, conclusions: Path) -> None:
    """Write docs/results_gsm8k.md and its picture. Raises SystemExit where there is nothing to show or to compare."""
    titles = {name: results.RUNS[name].title for name in ONLY}
    runs = by_name(found, titles)
    lines = [
        "| run | seeds | answer tokens, M | KL(teacher, student), at first and last | KL(student, teacher) |",
        "|---|---|---|---|---|",
    ]
    for name, each in runs.items():
        curves = [[run.points(panel.axis, panel.metric) for run in each] for panel in PANELS]
        cells = [spread([run.end("answer_tokens") / 1e6 for run in each], 2)]
        cells += [f"{spread([c[0][1] for c in some], 3)} -> {spread([c[-1][1] for c in some], 3)}" for some in curves]
        lines.append(f"| {titles[name]} (`{name}`) | {len(each)} | {' | '.join(cells)} |")
    draw(chart(runs, titles, PANELS), docs / "results_gsm8k.svg")
    parts = ["# Results on GSM8K's texts", METHOD, facts(found)]
    parts += [conclusions.read_text(encoding="utf-8").strip()] if conclusions.exists() else []
    parts += ["![Held-out divergence by answer tokens](results_gsm8k.svg)", "\n".join(lines)]
    parts.append("This page is generated: `python benchmarks/results_gsm8k.py report`.")
    (docs / "results_gsm8k.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(docs / "results_gsm8k.md")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("overrides", nargs="*", help="run: configuration keys for every run, dotted.key=value")
    parser.add_argument("--models", type=Path, default=Path("gsm8k_models"), help="run: their folder (%(default)s)")
    parser.add_argument("--train", default="openai/gsm8k:main:train", help="run: a file or hub data set (%(default)s)")
    parser.add_argument("--val", default="openai/gsm8k:main:test", help="run: likewise (%(default)s)")
    parser.add_argument("--results", type=Path, default=STORED, help="folder of the stored runs (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="run: then end, also what is under way")
    parser.add_argument("--only", nargs="+", choices=ONLY, default=list(ONLY), help="run: these")
    parser.add_argument("--seeds", nargs="+", type=int, help="run: these (default: as many as the list has)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="run: default is what there is")
    parser.add_argument("--steps", type=int, help="run: training steps of each run")
    parser.add_argument("--together", type=int, default=1, help="run: so many at a time, as in results.py")
    parser.add_argument("--docs", type=Path, default=results.ROOT / "docs", help="report: where it is written")
    args = parser.parse_intermixed_args()
    if args.what == "report":
        report(read_all(args.results), args.docs, args.results / "conclusions.md")
    else:
        run_all(args)


if __name__ == "__main__":
    main()

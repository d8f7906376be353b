"""Compress a pretrained language model: models and prompts for benchmarks/results.py, and measurements of its students.

    python benchmarks/results_compress.py make FOLDER --teacher HuggingFaceTB/SmolLM2-135M-Instruct \\
        --train openai/gsm8k:main:train --val openai/gsm8k:main:test
    python benchmarks/results.py run --models FOLDER --results benchmarks/results/compress --only compress-opd ...
    python benchmarks/results_compress.py measure FOLDER --out measured.md

`make` takes some of the teacher's layers out: what is left is the student, which has the teacher's tokenizer and most
of its knowledge, and speaks badly. `measure` compares the students of finished runs with the teacher on held-out
prompts: on completions of the teacher, the forward KL over the whole vocabulary, the perplexity and how often both
have the same likeliest token; on completions of each student, the reverse KL; and greedy completions side by side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from results_methods import COMPRESS_METHODS
from results_report import spread
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hybrid_gkd.data.prompts import Columns, read_rows
from hybrid_gkd.demo.folders import DemoPaths, write_rows
from hybrid_gkd.models.tokenizer import stop_token_ids
from hybrid_gkd.runtime.files import read_json_lines

BATCH = 64
MAX_NEW_TOKENS = 256
SHOWN = 10
"""Prompts with completions side by side."""


def make(args: argparse.Namespace) -> None:
    """Write teacher, student and prompts, in the layout of a demo."""
    paths = DemoPaths.under(args.folder)
    teacher = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(args.teacher)
    manifest = {}
    for name in ("teacher", "student"):
        if name == "student":
            drop_layers(teacher, args.drop)
        folder = getattr(paths, name)
        teacher.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        manifest[name] = {"parameters": sum(p.numel() for p in teacher.parameters())}
    paths.manifest.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for file, entries, key, limit in ((paths.train, args.train, "--train", None), (paths.val, args.val, "--val", 256)):
        tables = read_rows(entries, Columns(prompt_key=args.prompt_key), key=key)
        rows = [{"prompt": row.messages[0]["content"]} for table in tables for row in table.rows]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        write_rows(file, [rows[i] for i in order[:limit]])
        print(f"{file}: {len(order[:limit])} prompts")


def drop_layers(model: Any, numbers: list[int]) -> None:
    """Take decoder layers out of a model of the Llama family, in place."""
    layers = [layer for number, layer in enumerate(model.model.layers) if number not in numbers]
    model.model.layers = torch.nn.ModuleList(layers)
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(layers)]


def measure(args: argparse.Namespace) -> None:
    """Write a table of all students and completions of some."""
    paths = DemoPaths.under(args.folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(paths.teacher, padding_side="left")
    prompts = [row["prompt"] for row in itertools.islice(read_json_lines(paths.val), args.prompts)]
    ends = stop_token_ids(str(paths.teacher), tokenizer)
    judge = Judge(load(paths.teacher, device), tokenizer, prompts, ends)
    students = {"student before": [paths.student]} | {
        COMPRESS_METHODS[name].title: sorted((paths.root / "results").glob(f"compress-{name}-[0-9]*"))
        for name in args.only
    }
    lines = [
        "| student | seeds | KL(teacher, student) | perplexity of the teacher's completions | "
        "same likeliest token, % | KL(student, teacher) |",
        "|---|---|---|---|---|---|",
    ]
    shown = {"teacher": judge.greedy(judge.teacher)}
    for title, folders in students.items():
        found = []
        for folder in folders:
            model = load(folder, device)
            found.append(judge.measure(model))
            shown.setdefault(title, judge.greedy(model))
        if found:
            cells = [spread([each[i] for each in found], 3 if i in (0, 3) else 2) for i in range(4)]
            lines.append(f"| {title} | {len(found)} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    parts = ["\n".join(lines), "## Greedy completions"]
    for number in range(min(SHOWN, len(prompts))):
        parts.append(f"**{one_line(prompts[number], 400)}**")
        parts.append("\n".join(f"- {name}: {one_line(texts[number], 300)}" for name, texts in shown.items()))
    args.out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def one_line(text: str, limit: int) -> str:
    """A text without line breaks and marks of Markdown, cut at so many characters."""
    text = " ".join(text.split()).replace("*", "\\*").replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= limit else f"{text[:limit]} …"


def load(folder: Path, device: torch.device) -> Any:
    """A model for comparisons: in float32, as differences are small."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


class Judge:
    """Compares students with a teacher on held-out prompts; the teacher's completions are drawn once."""

    def __init__(self, teacher: Any, tokenizer: Any, prompts: list[str], ends: list[int]):
        self.teacher, self.tokenizer, self.ends = teacher, tokenizer, ends
        if tokenizer.pad_token is None:
            tokenizer.pad_token_id = ends[0]  # never read
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        self.encoded = [
            tokenizer.apply_chat_template(
                chats[i : i + BATCH], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            ).to(teacher.device)
            for i in range(0, len(chats), BATCH)
        ]
        set_seed(0)
        self.completions = list(self.complete(teacher, do_sample=True))

    @torch.inference_mode()
    def complete(self, model: Any, **sampling: Any) -> Iterator[Tensor]:
        """Prompts with completions, [batch, length], in batches."""
        for batch in self.encoded:
            yield model.generate(
                **batch, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=self.ends, pad_token_id=self.ends[0],
                top_k=0, top_p=1.0, **({"temperature": 1.0} | sampling if sampling["do_sample"] else sampling),
            )  # fmt: skip

    def greedy(self, model: Any) -> list[str]:
        """Greedy completions of the first prompts."""
        batch = next(self.complete(model, do_sample=False))[:, self.encoded[0].input_ids.shape[1] :]
        return list(self.tokenizer.batch_decode(batch[:SHOWN], skip_special_tokens=True))

    def measure(self, student: Any) -> tuple[float, float, float, float]:
        """Forward KL, perplexity and agreement in % on the teacher's completions, and reverse KL on the student's."""
        forward, nll, same = self.compare(self.teacher, student, self.completions)
        set_seed(0)
        reverse, _, _ = self.compare(student, self.teacher, list(self.complete(student, do_sample=True)))
        return forward, math.exp(nll), 100 * same, reverse

    @torch.inference_mode()
    def compare(self, first: Any, second: Any, completions: list[Tensor]) -> tuple[float, float, float]:
        """KL(first, second), the second's mean negative log-likelihood, and how often both have one likeliest token.

        Means over the tokens of the completions, their ends included.
        """
        sums = torch.zeros(4, dtype=torch.float64)
        for batch, rows in zip(self.encoded, completions, strict=True):
            width = batch.input_ids.shape[1]
            drawn = rows[:, width:]
            end = torch.isin(drawn, torch.tensor(self.ends, device=drawn.device))
            inside = (end.cumsum(1) - end.long()) == 0  # up to the first end, which belongs to it
            mask = torch.cat([batch.attention_mask, inside.long()], dim=1)
            for part in range(0, len(rows), 8):
                some = slice(part, part + 8)
                one, other = (
                    model(rows[some], attention_mask=mask[some], position_ids=(mask[some].cumsum(1) - 1).clamp(min=0))
                    .logits[:, width - 1 : -1].log_softmax(-1)
                    for model in (first, second)
                )  # fmt: skip
                kept = inside[some]
                kl = (one.exp() * (one - other)).sum(-1)[kept]
                nll = -other.gather(-1, drawn[some].unsqueeze(-1)).squeeze(-1)[kept]
                same = (one.argmax(-1) == other.argmax(-1))[kept]
                sums += torch.stack([each.double().sum() for each in (kl, nll, same, kept[kept])]).cpu()
        kl, nll, same = (sums[:3] / sums[3]).tolist()
        return kl, nll, same


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("make")
    command.add_argument("folder", type=Path)
    command.add_argument("--teacher", required=True, help="folder or hub id of a model of the Llama family")
    command.add_argument("--drop", type=lambda text: [int(part) for part in text.split(",")], default=[12, 14, 16, 18],
                         help="layers that the student lacks (12,14,16,18)")
    command.add_argument("--train", nargs="+", required=True, help="prompts: whatever data.train_files may name")
    command.add_argument("--val", nargs="+", required=True)
    command.add_argument("--prompt-key", default="question", help="column with the prompt (%(default)s)")
    command = commands.add_parser("measure")
    command.add_argument("folder", type=Path)
    command.add_argument("--only", nargs="+", choices=COMPRESS_METHODS, default=list(COMPRESS_METHODS))
    command.add_argument("--prompts", type=int, default=256)
    command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    {"make": make, "measure": measure}[args.command](args)


if __name__ == "__main__":
    main()

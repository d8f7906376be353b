"""Measure the fused head and its loss against their bare matrix products and against other implementations.

    python benchmarks/head.py
    python benchmarks/head.py --tokens 2048 --hidden-sizes 2048
    python benchmarks/head.py --selected 0.3

Forward and backward from bf16 hidden states and the output embedding to their gradients, for a forward KL to a
teacher's top k. Ours reports entropy, masses, both divergences and top-k overlap, as in training; the others compute
the loss alone, without tail. The implementations take turns in random order within every repetition. A turn is a
series of calls of about --seconds, since the card lowers its clock under load. Medians; next to their ratio to the bare
products is the median of the ratios within a repetition. Peak memory excludes inputs and gradients, and for head_loss a
float32 weight gradient, which it needs for more than one chunk of rows. The implementations:

    bare       H W^T, dZ W and dZ^T H, nothing else
    head_loss  this package
    autograd   all logits kept; F.log_softmax in float32, gather
    verl       the formula of its trainer: the same, with the student's own top k for its overlap metric and clamped
               log-probabilities
    liger      the algorithm of its chunked losses, not its package: chunks of 1024 rows, float32 logits, gradients in
               the forward, compiled loss, weight gradient added up in bf16; on the same cuBLAS products

With --selected also this package's head on that fraction of the rows (distillation.token_weights):

    selected   the rows are known before, as with position
    two_stage  they follow from the student's entropy, which a first pass computes for all rows
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_gkd.config import ActorConfig, DistillationConfig
from hybrid_gkd.losses.head import head_loss, row_statistics
from hybrid_gkd.losses.selection import highest
from hybrid_gkd.losses.token_weights import num_selected
from hybrid_gkd.student.actor import make_objective

GIB = 2**30
OBJECTIVE = make_objective(DistillationConfig(loss_mode="forward_kl"), ActorConfig())
VERL_LOG_PROB_MIN = -10.0
LIGER_CHUNK_ROWS = 1024


def make_inputs(num_rows: int, hidden_size: int, args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight (logits of standard deviation 2), distinct teacher ids, teacher log-probabilities of mass 0.9."""
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, std, generator=gen)
        return values.requires_grad_()

    hidden = normal(num_rows, hidden_size, std=1.0)
    weight = normal(args.vocabulary, hidden_size, std=2 / hidden_size**0.5)
    first = torch.randint(args.vocabulary, (num_rows, 1), generator=gen, device="cuda")
    ids = (first + 997 * torch.arange(args.topk, device="cuda")) % args.vocabulary
    teacher = torch.randn(num_rows, args.topk, generator=gen, device="cuda").log_softmax(1) - 0.105
    return hidden, weight, ids, teacher


def three_products(hidden: Tensor, weight: Tensor, _ids: Tensor, _teacher: Tensor) -> None:
    """The lower bound, on random data throughout: products of zeros are faster."""
    with torch.no_grad():
        logits = hidden @ weight.T
        hidden.grad = logits @ weight
        weight.grad = logits.T @ hidden


def ours(hidden: Tensor, weight: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """The training path of a distillation loss."""
    topk = ids.shape[1]
    tail = teacher.new_full([len(teacher)], math.log1p(-math.exp(-0.105)))
    loss_fn = OBJECTIVE.loss_fn({"teacher.logprobs": teacher, "teacher.tail_logprobs": tail})
    loss, _ = head_loss(hidden, weight, ids, loss_fn, with_entropy=True, overlap_topk=topk, tail_topk=topk)
    loss.backward()
    return loss.detach()


def selected(hidden: Tensor, weight: Tensor, ids: Tensor, teacher: Tensor, *, fraction: float) -> Tensor:
    """The training path where the first rows are selected."""
    rows = torch.arange(num_selected(fraction, len(hidden)), device=hidden.device)
    return ours(hidden[rows], weight, ids[rows], teacher[rows])


def two_stage(hidden: Tensor, weight: Tensor, ids: Tensor, teacher: Tensor, *, fraction: float) -> Tensor:
    """The training path where the rows of the highest entropies are selected."""
    entropy = row_statistics(hidden, weight).entropy
    rows = highest(entropy, [len(hidden)], [num_selected(fraction, len(hidden))])
    return ours(hidden[rows], weight, ids[rows], teacher[rows])


def autograd(hidden: Tensor, weight: Tensor, ids: Tensor, teacher: Tensor) -> None:
    """All logits, one float32 log-softmax."""
    logprobs = F.log_softmax((hidden @ weight.T).float(), -1).gather(1, ids)
    (teacher.exp() * (teacher - logprobs)).sum().backward()


def verl(hidden: Tensor, weight: Tensor, ids: Tensor, teacher: Tensor) -> None:
    """forward_kl_topk on full logits."""
    logprobs = F.log_softmax((hidden @ weight.T).float(), -1)
    with torch.no_grad():
        student_ids = logprobs.topk(ids.shape[1], -1).indices
        (student_ids.unsqueeze(2) == ids.unsqueeze(1)).any(2).float().mean()
    chosen = logprobs.gather(1, ids).clamp(min=VERL_LOG_PROB_MIN)
    teacher = teacher.clamp(min=VERL_LOG_PROB_MIN)
    (teacher.exp() * (teacher - chosen)).sum().backward()


def _chunk_loss(logits: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    logprobs = F.log_softmax(logits.float(), -1).gather(1, ids)
    return (teacher.exp() * (teacher - logprobs)).sum()


def _gradient_and_loss(logits: Tensor, ids: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    gradient, loss = torch.func.grad_and_value(_chunk_loss)(logits, ids, teacher)
    return gradient, loss


compiled_gradient_and_loss = torch.compile(_gradient_and_loss)


def liger(hidden: Tensor, weight: Tensor, ids: Tensor, teacher: Tensor) -> None:
    """Chunk by chunk, gradients in the forward."""
    with torch.no_grad():
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), LIGER_CHUNK_ROWS):
            rows = slice(start, start + LIGER_CHUNK_ROWS)
            dz, _ = compiled_gradient_and_loss(hidden[rows] @ weight.T, ids[rows], teacher[rows])
            grad_hidden[rows] = dz @ weight
            grad_weight += dz.T @ hidden[rows]
        hidden.grad, weight.grad = grad_hidden, grad_weight


CONTESTANTS: dict[str, Callable[..., object]] = {
    "bare": three_products, "head_loss": ours, "autograd": autograd, "verl": verl, "liger": liger,
}  # fmt: skip


OURS = ("head_loss", "selected", "two_stage")
"""Contestants that may have a float32 weight gradient."""


def measure(num_rows: int, hidden_size: int, names: list[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Every contestant's milliseconds, their ratio to the bare products' in the same repetition, and peak GiB."""
    order = random.Random(0)
    inputs = make_inputs(num_rows, hidden_size, args)
    hidden, weight = inputs[:2]
    gradients = sum(t.numel() * t.element_size() for t in (hidden, weight))
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    calls = dict.fromkeys(names, 1)
    for repeat in range(args.warmup + args.repeats):
        for name in order.sample(names, len(names)):
            hidden.grad = weight.grad = None
            if repeat == args.warmup - 1:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls[name]):
                hidden.grad = weight.grad = None
                CONTESTANTS[name](*inputs)
            end.record()
            end.synchronize()
            took = start.elapsed_time(end) / calls[name]
            if repeat == args.warmup - 1:
                calls[name] = max(1, round(1000 * args.seconds / took))
                expected = gradients + (4 * weight.numel() if name in OURS else 0)
                peaks[name] = (torch.cuda.max_memory_allocated() - before - expected) / GIB
            elif repeat >= args.warmup:
                times[name].append(took)
    ratios = {name: [a / b for a, b in zip(times[name], times["bare"], strict=True)] for name in names}
    median = statistics.median
    return {name: {"ms": median(times[name]), "paired": median(ratios[name]), "gib": peaks[name]} for name in names}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--long", type=int, default=32768, help="rows of a second table, of head_loss alone")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[896, 1536, 2048, 4096])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn (%(default)s)")
    parser.add_argument("--selected", type=float, help="also measure the head on this fraction of the rows")
    args = parser.parse_args()
    of_selected = ["selected", "two_stage"] if args.selected else []
    for function in (selected, two_stage) if args.selected else ():
        CONTESTANTS[function.__name__] = functools.partial(function, fraction=args.selected)
    lines = [
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, V = {args.vocabulary}, K = {args.topk}, bf16; "
        "milliseconds, (times the bare products: ratio of the medians, median of the ratios), "
        "peak GiB beyond inputs and gradients",
    ]
    tables = ((args.tokens, [*args.contestants, *of_selected]), (args.long, ["bare", "head_loss", *of_selected]))
    for num_rows, names in tables:
        lines += ["", f"| T = {num_rows}, d | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for hidden_size in args.hidden_sizes:
            figures = measure(num_rows, hidden_size, names, args)
            bare = figures["bare"]["ms"]
            cells = [
                f"{f['ms']:.1f} ({f['ms'] / bare:.2f}, {f['paired']:.2f}) {f['gib']:.2f}" for f in figures.values()
            ]
            lines.append(f"| {hidden_size} | " + " | ".join(cells) + " |")
            torch.cuda.empty_cache()
    print("\n".join(lines))


if __name__ == "__main__":
    main()

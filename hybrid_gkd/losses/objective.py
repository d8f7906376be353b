"""The loss of a trained token: the sum of the terms whose signals its sample has.

All terms and their metrics are functions of the same log-probabilities, computed by one call of the fused head.

Shapes: R trained tokens of a micro-batch, r of them in a chunk of the head, K candidates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_gkd.losses import divergence
from hybrid_gkd.losses.head import LossFunction
from hybrid_gkd.losses.terms import Metrics, Signals, Student, Term, by_event, old_logprobs

POOLED = ("actor/kl_loss", "actor/distillation/")
"""Prefixes of metrics that are means over all pairs of a token and a teacher that scores it."""


class Objective:
    """The loss of a run.

    Args:
        terms: in the order of summation.
        of_sequences: whether the loss needs `with_sequence_ratios` if there are old log-probabilities.
        entropy_coeff: factor of the entropy, which is subtracted from the loss.
    """

    def __init__(self, terms: Sequence[Term], *, of_sequences: bool = False, entropy_coeff: float = 0.0):
        self.terms, self.of_sequences, self.entropy_coeff = terms, of_sequences, entropy_coeff
        self.samples_tail = any(term.samples_tail for term in terms)
        """Whether a term needs `sampled_ids`."""
        self.uses_sampled = self.samples_tail or any(term.of_sampled for term in terms)
        """Whether the last column of the log-probabilities must be the sampled token."""
        self.candidates = tuple(dict.fromkeys(term.signal for term in terms if term.of_candidates))
        """Signals whose candidates are the columns before it, as far as a micro-batch has them. The mass outside of the
        first one's candidates is the column after these (`tail_topk` of the head); that of others is computed as 1 - Q,
        see divergence.py."""
        factors = [name for term in terms for name in _factors(term)]
        self.signals = tuple(dict.fromkeys([*(term.signal for term in terms), "old_logprobs", "weights", *factors]))
        """Names of all signals that are read."""
        self.reported: dict[str, tuple[str, ...]] = {}
        """Metrics of `loss_fn` -> signals; a metric covers the tokens that have one of them; see POOLED."""
        none, row = torch.zeros(0), torch.zeros(0, 1)
        for term in terms:
            topk = {"ids": row, "logprobs": row, "tail_logprobs": none, "sampled_logprobs": none}
            nothing = {f"{term.signal}.{name}": value for name, value in topk.items()}
            nothing |= {term.signal: none, "quarter": none, "sampled_ids": none}
            for name in term.function(nothing, Student(none, row, none))[1]:
                self.reported[name] = (*self.reported.get(name, ()), term.signal)

    def with_sequence_ratios(self, signals: Signals, numbers: Tensor, sampled: Tensor) -> Signals:
        """Return the signals with sequence_log_ratio: the mean of log r over each sample, of the log-probabilities
        `sampled` [R].

        `numbers` int64 [R]: each token's sample, ascending from 0. Computed before the head's pass, whose chunks of
        rows may end within a sample.
        """
        sums = sampled.new_zeros(2, len(numbers))
        sums[0].index_add_(0, numbers, sampled - old_logprobs(signals, sampled))
        sums[1].index_add_(0, numbers, torch.ones_like(sampled))
        return {**signals, "sequence_log_ratio": (sums[0] / sums[1].clamp(min=1))[numbers]}

    def entropy_weights(self, signals: Signals, num_rows: int, device: torch.device) -> Tensor | None:
        """Return the coefficient of each row's entropy in the loss, [R], for the head; None without an entropy term."""
        if not self.entropy_coeff:
            return None
        weights = signals["weights"] if "weights" in signals else torch.ones(num_rows, device=device)
        return -self.entropy_coeff * weights

    def loss_fn(self, signals: Signals) -> LossFunction:
        """Return the head's loss function, of log-probabilities [r, ...] with the columns of `candidates`."""
        blocks = self._blocks(signals)
        terms = [term for term in self.terms if term.signal in (blocks if term.of_candidates else signals)]

        def loss_fn(logprobs: Tensor, rows: slice) -> tuple[Tensor, Metrics]:
            chunk, metrics = {name: value[rows] for name, value in signals.items()}, Metrics()
            sums: dict[str, list[Tensor]] = {}  # by the name of their weights
            for term in terms:
                known = chunk.get(f"has.{term.signal}")
                value, found = term.function(chunk, _student(term, blocks, logprobs, known))
                for name, part in found.items():
                    metrics[name] = _merged(name, metrics.get(name), part.detach(), known)
                value = value * term.coefficient
                weights, *factors = _factors(term)
                for name in factors:
                    value = value * chunk[name] if name in chunk else value
                value = value if known is None else torch.where(known, value, 0)
                sums.setdefault(weights if weights in chunk else "weights", []).append(value)
            totals = [
                torch.stack(values).sum(0) * chunk[name] if name in chunk else torch.stack(values).sum(0)
                for name, values in sums.items()
            ]
            return functools.reduce(torch.add, totals or [logprobs.sum(1) * 0]), metrics

        return loss_fn

    def keep_divergences(self, signals: Signals, found: Tensor) -> LossFunction:
        """Return a loss function of value 0 that writes into `found` [R, 2 + 3 s], for every token: forward and reverse
        KL; the student's log-probabilities of the teacher's first s candidates; and for the student's s most likely
        candidates, its log-probabilities and their columns among the teacher's."""

        def keep(logprobs: Tensor, rows: slice) -> tuple[Tensor, Metrics]:
            teacher, teacher_tail = signals["teacher.logprobs"][rows], signals["teacher.tail_logprobs"][rows]
            student, tail = logprobs[:, : teacher.shape[1]], logprobs[:, teacher.shape[1]]
            compared = Student(student[:, 0], student, tail)
            if "teacher.groups" in signals:
                compared = by_event(compared, signals["teacher.groups"][rows])
            both = divergence.compare(teacher, compared.candidates, teacher_tail, compared.tail)[:2]
            shown = (found.shape[1] - 2) // 3
            best, columns = student.topk(shown, dim=1)
            found[rows] = torch.cat([torch.stack(both, 1), student[:, :shown], best, columns], 1).to(found.dtype)
            return logprobs.new_zeros(len(logprobs)), {}

        return keep

    def _blocks(self, signals: Signals) -> dict[str, slice]:
        """Return the columns of the candidates of each signal that a micro-batch has."""
        blocks: dict[str, slice] = {}
        start = 0
        for name in self.candidates:
            if f"{name}.logprobs" in signals:
                blocks[name] = slice(start, start + signals[f"{name}.logprobs"].shape[1])
                start = blocks[name].stop + (len(blocks) == 1)  # the tail follows the first
        return blocks


def _factors(term: Term) -> tuple[str, ...]:
    """Return the name of a term's own weights, used in place of `weights` if present, and of its further factors."""
    of_sampled = ("sampled_weights",) if term.of_sampled else ()
    return f"weights/{term.name}", *of_sampled, f"{term.signal.partition('/')[0]}_weights"


def _student(term: Term, blocks: dict[str, slice], logprobs: Tensor, known: Tensor | None) -> Student:
    """Return the student's inputs of a term; rows without its signal have neutral values."""
    if known is not None:
        logprobs = torch.where(known[:, None], logprobs, -math.log(logprobs.shape[1]))
    columns = blocks.get(term.signal, slice(0, 0))
    candidates = logprobs[:, columns]
    if columns.stop == 0:
        return Student(logprobs[:, -1], candidates, None)
    tail = divergence.log_tail(candidates)[:, 0] if columns.start else logprobs[:, columns.stop]
    return Student(logprobs[:, -1], candidates, tail)


def _merged(name: str, before: Tensor | None, part: Tensor, known: Tensor | None) -> Tensor:
    """Merge a metric [r] with that of a further term, which counts in rows with its signal (`known`): the sum of POOLED
    metrics, the disjunction of booleans, else the further term's."""
    if before is None or name.startswith(POOLED):
        own = part if known is None else torch.where(known, part, torch.zeros_like(part))
        return own if before is None else before * 1.0 + own
    part = part if known is None else torch.where(known, part, before)
    return part | before if part.dtype == torch.bool else part

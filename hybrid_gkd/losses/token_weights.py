"""Weights of single tokens in the distillation term, from completions and the teacher's scores. Needs no torch.

Names are in table.py; weights that need the student's distribution are in selection.py.

Shapes: R trained tokens of a completion, K teacher candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.losses.table import TokenWeights
from hybrid_gkd.types import TopK

KEY = "distillation.token_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSignals:
    """Inputs of a weight function for one completion."""

    token_ids: np.ndarray
    """int32 [R], the trained tokens."""
    positions: np.ndarray
    """int64 [R], their positions within the completion: 0 to R - 1."""
    length: int
    """R."""
    logprobs: np.ndarray | None = None
    """float32 [R], log-probabilities of the tokens under the student that wrote them; None for a given completion."""
    teacher: TopK | None = None
    """The teacher's candidates, the mass outside, and its log-probabilities of the tokens; None for `position`."""


def position(signals: TokenSignals, *, fraction: float) -> np.ndarray:
    """Return weight 1 for the first ceil(fraction R) tokens of a completion, 0 for the others, float32 [R].

    Source: arXiv 2606.22600, in which the first 30 % of a completion teach nearly as much as all of it.
    """
    return (signals.positions < num_selected(fraction, signals.length)).astype(np.float32)


def num_selected(fraction: float, count: int) -> int:
    """Return ceil(fraction count); 0.1 * 30, which float64 rounds up, counts as 3."""
    return math.ceil(fraction * count - 1e-9)


def compute_weights(row: TokenWeights, signals: TokenSignals, case: str = "") -> np.ndarray:
    """Return the weights of a completion, float32 [R]. Raises ConfigError unless each is finite and at least 0.

    `case`: description of the completion, for the message.
    """
    try:
        weights = np.asarray(row.function(signals, **row.options))
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        rule = f"raised {type(error).__name__}{case}: {error}"
        raise ConfigError(KEY, rule, show_value=False) from error
    if weights.shape != (signals.length,):
        rule = f"must return one weight per token{case}, [{signals.length}]; got {list(weights.shape)}"
        raise ConfigError(KEY, rule, show_value=False)
    if weights.dtype.kind not in "biuf":
        raise ConfigError(KEY, f"must return real numbers{case}; got {weights.dtype}", show_value=False)
    weights = weights.astype(np.float32)
    if (wrong := weights[~(np.isfinite(weights) & (weights >= 0))]).size:
        rule = f"must return finite weights of at least 0{case}; got {wrong[0]}"
        raise ConfigError(KEY, rule, show_value=False)
    return weights


def check_token_weights(row: TokenWeights, *, topk: int, given: bool = False, other_tokenizer: bool = False) -> None:
    """Try out a function of the user's on completions of five tokens. Raises ConfigError if it fails.

    Args:
        given: the run has given completions, without `TokenSignals.logprobs`.
        other_tokenizer: a teacher may have another tokenizer, and then no log-probability of a token: NaN.
    """
    rng = np.random.default_rng(0)
    each = np.log(rng.dirichlet(np.ones(topk + 1), 5).astype(np.float32))
    teacher = TopK(
        ids=np.tile(np.arange(topk, dtype=np.int32), (5, 1)), logprobs=-np.sort(-each[:, :topk], 1),
        tail_logprobs=each[:, topk], sampled_logprobs=each[:, 0],
    )
    signals = TokenSignals(
        token_ids=np.arange(5, dtype=np.int32), positions=np.arange(5), length=5, logprobs=each[:, 0], teacher=teacher
    )
    cases = {"": signals}
    if given:
        cases[", for a given completion (logprobs=None)"] = replace(signals, logprobs=None)
    if other_tokenizer:
        unknown = replace(teacher, sampled_logprobs=np.where(np.arange(5) == 2, np.float32(np.nan), each[:, 0]))
        cases[", where teacher.sampled_logprobs is NaN (another tokenizer)"] = replace(signals, teacher=unknown)
    for case, tried in cases.items():
        compute_weights(row, tried, f" when it was tried{case}")

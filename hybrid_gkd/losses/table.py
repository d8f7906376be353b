"""Tables of loss terms, divergences (`distillation.loss_mode`, `actor.kl_loss_type`), token weights and policy losses.

A new one is a row here and a function: for a term in terms.py and student/actor.py, else in the file of its row. The
configuration checks and the objective use the tables; docs/losses.md needs a row for each divergence. Does not import
torch: the functions are imported on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_gkd.runtime.imports import load_object

TERMS = {
    "distillation": "teacher", "sft": "sft", "policy": "advantages", "reference": "reference", "value": "returns",
}
"""Terms of the losses of actor and critic -> the signal that a sample must have; for `reference` with
actor.kl_loss_type=full it is reference_topk."""


@dataclass(frozen=True)
class Divergence:
    """One row: the function and its arguments."""

    import_path: str
    signal: Literal["topk", "sampled"]
    """topk: log-probabilities of the teacher's K candidates, [T, K]; sampled: of the sampled token, [T]."""
    options: tuple[str, ...] = ()
    """Keyword arguments: keys of the section `distillation` that terms.py passes on."""
    is_loss: bool = True
    """False: its expected gradient is 0, so that it can only be used as a policy gradient."""

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return load_object("distillation.loss_fn", self.import_path)


def user_divergence(import_path: str) -> Divergence:
    """Return the row of `distillation.loss_fn`."""
    return Divergence(import_path, "topk", ("tail",))


_HERE = "hybrid_gkd.losses.divergence"
DIVERGENCES: Mapping[str, Divergence] = {
    "forward_kl": Divergence(f"{_HERE}:forward_kl", "topk", ("tail",)),
    "reverse_kl": Divergence(f"{_HERE}:reverse_kl", "topk", ("tail",)),
    "jsd": Divergence(f"{_HERE}:jsd", "topk", ("tail", "beta")),
    "k1": Divergence(f"{_HERE}:k1", "sampled", is_loss=False),
    "k2": Divergence(f"{_HERE}:k2", "sampled"),
    "k3": Divergence(f"{_HERE}:k3", "sampled"),
}


def weighted_divergences(
    loss_mode: str, mixed_weights: Mapping[str, float], loss_fn: str | None
) -> list[tuple[float, Divergence]]:
    """Return the weighted divergences of the distillation term, from the keys of the section `distillation`."""
    if loss_fn is not None:
        return [(1.0, user_divergence(loss_fn))]
    weights = mixed_weights if loss_mode == "mixed" else {loss_mode: 1.0}
    return [(weight, DIVERGENCES[name]) for name, weight in weights.items()]


KL_LOSSES: Mapping[str, Divergence] = {
    "k2": DIVERGENCES["k2"],
    "k3": DIVERGENCES["k3"],
    "k1+": Divergence(f"{_HERE}:k1_plus", "sampled"),
    "k3+": Divergence(f"{_HERE}:k3_plus", "sampled"),
    "abs": Divergence(f"{_HERE}:absolute", "sampled"),
    "full": Divergence(f"{_HERE}:reverse_kl", "topk", ("tail",)),
}
"""actor.kl_loss_type -> divergence with the reference policy as teacher; full is on its top k and the tail."""


@dataclass(frozen=True)
class TokenWeights:
    """One row: the function of weights in the distillation term, and its arguments."""

    import_path: str
    needs: Literal["completion", "teacher", "student"]
    """Inputs: the completion only; also the teacher's scores; or the student's distributions in its forward pass."""
    options: Mapping[str, Any]
    """Keyword arguments: defaults, replaced by `distillation.token_weights_kwargs`."""

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return load_object("distillation.token_weights", self.import_path)


UNIFORM = "uniform"
_SELECTION = "hybrid_gkd.losses.selection"
TOKEN_WEIGHTS: Mapping[str, TokenWeights] = {
    "position": TokenWeights("hybrid_gkd.losses.token_weights:position", "completion", {"fraction": 0.3}),
    "student_entropy": TokenWeights(f"{_SELECTION}:student_entropy", "student", {"fraction": 0.5}),
    "confident_wrong": TokenWeights(f"{_SELECTION}:confident_wrong", "student", {"fraction": 0.1}),
}
"""distillation.token_weights -> its row; uniform has none."""


def token_weights(name: str, kwargs: Mapping[str, Any]) -> TokenWeights | None:
    """Return the row of `distillation.token_weights` with its arguments; None if all tokens count the same."""
    if name == UNIFORM:
        return None
    row = TOKEN_WEIGHTS.get(name, TokenWeights(name, "teacher", {}))
    return TokenWeights(row.import_path, row.needs, {**row.options, **kwargs})


@dataclass(frozen=True)
class PolicyLoss:
    """One row: the function and its arguments."""

    import_path: str
    options: tuple[str, ...] = ()
    """Keyword arguments: keys of the section `actor`."""
    of_sequences: bool = False
    """Whether it also takes `sequence_log_ratio`, for which log-probabilities of whole sequences are computed first."""

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return load_object("actor_rollout_ref.actor.policy_loss.loss_mode", self.import_path)


_BOUNDS = ("clip_ratio_low", "clip_ratio_high")
_POLICY = "hybrid_gkd.losses.policy"
POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "vanilla": PolicyLoss(f"{_POLICY}:vanilla", (*_BOUNDS, "clip_ratio_c")),
    "gspo": PolicyLoss(f"{_POLICY}:gspo", _BOUNDS, of_sequences=True),
    "cispo": PolicyLoss(f"{_POLICY}:cispo", _BOUNDS),
    "gpg": PolicyLoss(f"{_POLICY}:gpg"),
}


def policy_loss(name: str) -> PolicyLoss:
    """Return the row of a `loss_mode`; a user's function gets the arguments of vanilla."""
    return POLICY_LOSSES[name] if name in POLICY_LOSSES else PolicyLoss(name, POLICY_LOSSES["vanilla"].options)

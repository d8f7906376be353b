"""The fused language-model head: log-probabilities of a few given ids, without ever holding [T, V].

Every loss of this package depends on the logits z only through log q_j = z_j - lse(z) of a few ids.
With a = dL/dlog q on those ids, the chain rule gives the whole gradient in logit space:

    dL/dz = scatter_add(a) + c * softmax(z),   c = -sum(a)            (each row sums to 0)

so one head serves every divergence and the policy gradient (K = 1). Logits are computed a chunk of
rows at a time, in the forward and again in the backward; between the two only the inputs and the
log-sum-exp stay alive. What it leaves out: bias, logit soft-capping, sharded weights.

Shapes: T rows (packed response tokens), D hidden size, V vocabulary, K ids per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def logprobs_of_ids(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_rows: int = 1024,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `ids` under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [T, D], last hidden states; T = 0 works (zero gradients, still part of the graph).
        weight: [V, D], the head's matrix, of the dtype of `hidden`.
        ids: int64 [T, K], each in [0, V); an id may repeat within a row.
        temperature: divides the logits; > 0.
        chunk_rows: rows whose [chunk_rows, V] float32 logits are alive at a time. Large chunks keep the
            matrix products at full speed: 1024 rows of a vocabulary of 152k are 0.6 GB.
        with_entropy: also return the entropy of every row.

    Returns:
        log-probabilities in nats, [T, K], normalised over all V, with gradients for `hidden` and `weight`;
        entropy in nats, [T], a diagnostic without gradient, or None.
        Both are float32, whatever the inputs' dtype (float64 inputs give float64): the matrix products
        run in the inputs' dtype, everything after them in float32. The weight gradient is summed over
        the chunks in float32.

    Raises:
        ValueError: shapes or dtypes do not fit, or `temperature` or `chunk_rows` is not positive.
    """
    _check(hidden, weight, ids, temperature, chunk_rows)
    return _LogprobsOfIds.apply(hidden, weight, ids, temperature, chunk_rows, with_entropy)


class _LogprobsOfIds(torch.autograd.Function):
    """Wires `_forward` and `_backward` into autograd; a fused kernel replaces those two and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, chunk_rows: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, lse, entropy = _forward(hidden, weight, ids, temperature, chunk_rows, with_entropy)
        ctx.save_for_backward(hidden, weight, ids, lse)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, lse = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[:2]
        grad_hidden, grad_weight = _backward(
            grad_logprobs, hidden, weight, ids, lse, ctx.temperature, ctx.chunk_rows, needs_grad
        )
        return grad_hidden, grad_weight, None, None, None, None


def _forward(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, chunk_rows: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-> log-probabilities [T, K], lse [T], entropy [T] or None."""
    num_rows, dtype = hidden.shape[0], _compute_dtype(hidden)
    logprobs = hidden.new_empty(ids.shape, dtype=dtype)
    lse = hidden.new_empty(num_rows, dtype=dtype)
    entropy = hidden.new_empty(num_rows, dtype=dtype) if with_entropy else None
    for rows in _chunks(num_rows, chunk_rows):
        z = _logits(hidden[rows], weight, temperature)
        lse[rows] = z.logsumexp(1)
        logprobs[rows] = z.gather(1, ids[rows]) - lse[rows, None]
        if entropy is not None:
            entropy[rows] = torch.special.entr(z.sub_(lse[rows, None]).exp_()).sum(1)
    return logprobs, lse, entropy


def _backward(
    grad_logprobs: Tensor,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    lse: Tensor,
    temperature: float,
    chunk_rows: int,
    needs_grad: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """a = grad_logprobs [T, K] -> gradients of hidden [T, D] and of weight [V, D], None where not needed."""
    scale = -grad_logprobs.sum(1, keepdim=True)
    grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    grad_weight = torch.zeros_like(weight, dtype=_compute_dtype(weight)) if needs_grad[1] else None
    for rows in _chunks(hidden.shape[0], chunk_rows):
        dz = _logits(hidden[rows], weight, temperature).sub_(lse[rows, None]).exp_().mul_(scale[rows])
        dz.scatter_add_(1, ids[rows], grad_logprobs[rows])
        dz = dz.div_(temperature).to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = dz @ weight
        if grad_weight is not None:
            grad_weight += dz.T @ hidden[rows]
    return grad_hidden, grad_weight if grad_weight is None else grad_weight.to(weight.dtype)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """z [rows, V], a fresh tensor.

    Autocast is switched off: a backward outside of it would recompute other logits than those of `lse`.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return (hidden @ weight.T).to(_compute_dtype(hidden)).div_(temperature)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    return (slice(start, start + chunk_rows) for start in range(0, num_rows, chunk_rows))


def _check(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, chunk_rows: int) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [T, D] and weight [V, D] do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must have one dtype; got {hidden.dtype} and {weight.dtype}")
    if ids.ndim != 2 or ids.shape[0] != hidden.shape[0] or ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64 [{hidden.shape[0]}, K]; got {ids.dtype} {tuple(ids.shape)}")
    if not temperature > 0 or chunk_rows < 1:
        raise ValueError(f"temperature and chunk_rows must be positive; got {temperature} and {chunk_rows}")

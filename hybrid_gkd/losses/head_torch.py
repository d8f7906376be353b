"""The kernels of the head in plain torch; those for GPUs are in head_triton.py.

Shapes: r rows of a chunk of logits, N columns that are tokens, K ids per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASKED_LOGIT = -1e30
"""Logit of an id without mass; finite, so that a log-sum-exp over such ids only is not NaN."""
TAIL_LIMIT = 80.0
"""Gradients of tails below exp(-80), almost 0 in float32, are limited, since they would be inf * 0."""


def row_statistics(
    logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool, tail_topk: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities of `ids` [r, K], log-sum-exp [r], and entropy [r] or None, of logits [r, N].

    With `tail_topk` = k > 0 the log-probabilities are [r, K + 1]: column k is the log of the mass outside of the first
    k ids, a sum of its own without a subtraction.
    """
    z = logits.to(compute_dtype(logits)) / temperature
    chosen = z.gather(1, ids)
    if tail_topk:
        outside = z.scatter(1, ids[:, :tail_topk], MASKED_LOGIT).logsumexp(1)
        lse = torch.logaddexp(chosen[:, :tail_topk].logsumexp(1), outside)
        chosen = torch.cat([chosen[:, :tail_topk], outside[:, None], chosen[:, tail_topk:]], 1)
    else:
        lse = z.logsumexp(1)
    entropy = torch.special.entr(z.sub_(lse[:, None]).exp_()).sum(1) if with_entropy else None
    return chosen - lse[:, None], lse, entropy


def logit_gradient_(
    logits: Tensor, ids: Tensor, logprobs: Tensor, lse: Tensor, grad_logprobs: Tensor, temperature: float,
    tail_topk: int = 0, entropy: Tensor | None = None, grad_entropy: Tensor | None = None,
) -> Tensor:
    """Overwrite the logits [r, N], before the temperature, with dL/dlogits; a = grad_logprobs [r, K].

    With a tail, whose column of `grad_logprobs` is t = dL/dlog(1 - Q), dL/dz is c q + a at the first k ids,
    c = -sum(a) - t, and (c + t / (1 - Q)) q + a at all others.

    With `entropy` H [r] and `grad_entropy` h = dL/dH [r], -h q (log q + H) is added to all of dL/dz.
    """
    k = tail_topk
    inside, at_ids = -grad_logprobs.sum(1, keepdim=True), grad_logprobs
    outside = inside
    if k:
        pull, tail = grad_logprobs[:, k : k + 1], logprobs[:, k : k + 1]
        outside = inside + pull * (-tail).clamp(max=TAIL_LIMIT).exp()
        at_ids = torch.cat([grad_logprobs[:, :k], grad_logprobs[:, k + 1 :]], 1)
    dz = (logits.to(lse.dtype) / temperature).sub_(lse[:, None])
    if entropy is None or grad_entropy is None:
        dz = dz.exp_().mul_(outside)
    else:
        slope, entropy = grad_entropy[:, None], entropy[:, None]
        dz = (outside - slope * (dz + entropy)).mul_(dz.exp())
        inside = inside - slope * (logprobs[:, :k] + entropy)
    dz.scatter_(1, ids[:, :k], inside * logprobs[:, :k].exp())
    return logits.copy_(dz.scatter_add_(1, ids, at_ids).div_(temperature))


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return tensor * factor in `dtype`."""
    return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))


def compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32

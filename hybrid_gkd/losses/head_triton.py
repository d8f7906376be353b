"""The head's passes over memory as Triton kernels; `hybrid_gkd.losses.head` says what they compute.

Each row of a chunk of logits is read once for its log-sum-exp, the log-probabilities of its ids and its entropy, and
once more to become dL/dlogits in place. One program takes one row. Everything is computed in float32.

Shapes: r rows of a chunk, V vocabulary, K ids per row. The rows of the logits lie `stride` apart, a multiple of 64,
so that all loads are wide; what is in a row beyond V may be overwritten.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Fastest of those tried on an H200 (2,048 to 16,384 logits, 4 to 16 warps): 4.0 and 3.7 TB/s.
STATISTICS = {"BLOCK": 4096, "num_warps": 4}
GRADIENT = {"BLOCK": 8192, "num_warps": 16}
SCALE_BLOCK = 4096
LANE = tl.constexpr(8)  # neighbouring logits that one thread loads at once
LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1.0e30)


def row_statistics(
    logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[r, V] of unit column stride, int64 [r, K] -> log-probabilities [r, K], log-sum-exp [r], entropy [r] or None."""
    logprobs = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    lse = logprobs.new_empty(len(logits))
    entropy = torch.empty_like(lse) if with_entropy else None
    _statistics[(len(logits),)](
        logits, ids.contiguous(), logprobs, lse, entropy, logits.stride(0), logits.shape[1], 1 / temperature,
        **_num_ids(ids), **STATISTICS,
    )  # fmt: skip
    return logprobs, lse, entropy


def logit_gradient_(
    logits: Tensor, ids: Tensor, logprobs: Tensor, lse: Tensor, grad_logprobs: Tensor, temperature: float
) -> Tensor:
    """Overwrites the logits [r, V], before the temperature, with dL/dlogits; a = grad_logprobs [r, K]."""
    _gradient[(len(logits),)](
        logits, ids.contiguous(), logprobs, lse, grad_logprobs.contiguous(), logits.stride(0), 1 / temperature,
        **_num_ids(ids), **GRADIENT,
    )  # fmt: skip
    return logits


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor * factor in `dtype`, for a contiguous tensor and a scalar on its device; rounded once."""
    result = torch.empty_like(tensor, dtype=dtype)
    size = tensor.numel()
    _scale[(triton.cdiv(size, SCALE_BLOCK),)](tensor, factor, result, size, BLOCK=SCALE_BLOCK)
    return result


def _num_ids(ids: Tensor) -> dict[str, Any]:
    return {"K": ids.shape[1], "K_BLOCK": triton.next_power_of_2(ids.shape[1])}


@triton.jit
def _accumulate(z, peak, mass, weighted, scale, WITH_ENTROPY: tl.constexpr):
    """One block of an online log-sum-exp, z [N, LANE]: sums of exp(z - peak) and z exp(z - peak), [N] each.

    A thread keeps peaks of its own, so that the threads of a program need not wait for each other.
    """
    larger = tl.maximum(peak, tl.max(z, 1))
    share = tl.exp2((z - larger[:, None]) * (scale * LOG2_E))
    rescale = tl.exp2((peak - larger) * (scale * LOG2_E))
    mass = mass * rescale + tl.sum(share, 1)
    if WITH_ENTROPY:
        weighted = weighted * rescale + tl.sum(share * z, 1)
    return larger, mass, weighted


@triton.jit
def _statistics(
    logits, ids, logprobs, lse_out, entropy_out, stride, vocabulary, scale,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    peak = tl.full([BLOCK // LANE], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK // LANE], tl.float32)
    weighted = tl.zeros([BLOCK // LANE], tl.float32)
    whole = vocabulary // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        z = tl.load(logits + start + lanes).to(tl.float32)
        peak, mass, weighted = _accumulate(z, peak, mass, weighted, scale, entropy_out is not None)
    if whole < vocabulary:
        z = tl.load(logits + whole + lanes, mask=whole + lanes < vocabulary, other=LOWEST).to(tl.float32)
        peak, mass, weighted = _accumulate(z, peak, mass, weighted, scale, entropy_out is not None)
    top = tl.max(peak, 0)
    share = tl.exp2((peak - top) * (scale * LOG2_E))
    total = tl.sum(mass * share, 0)
    lse = top * scale + tl.log(total)
    tl.store(lse_out + row, lse)
    if entropy_out is not None:
        tl.store(entropy_out + row, lse - tl.sum(weighted * share, 0) / total * scale)
    k = tl.arange(0, K_BLOCK)
    chosen = tl.load(ids + row * K + k, mask=k < K, other=0)
    z = tl.load(logits + chosen, mask=k < K, other=0.0).to(tl.float32)
    tl.store(logprobs + row * K + k, z * scale - lse, mask=k < K)


@triton.jit
def _gradient(
    logits, ids, logprobs, lse, grad_logprobs, stride, scale,
    K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    ids += row * K
    grad_logprobs += row * K
    k = tl.arange(0, K_BLOCK)
    chosen = tl.load(ids + k, mask=k < K, other=-1)
    factor = -tl.sum(tl.load(grad_logprobs + k, mask=k < K, other=0.0), 0)
    # An id that occurs twice: every occurrence writes the same value, made of all their gradients.
    at_ids = factor * tl.exp(tl.load(logprobs + row * K + k, mask=k < K, other=0.0))
    for other in range(K):
        at_ids += tl.where(chosen == tl.load(ids + other), tl.load(grad_logprobs + other), 0.0)

    factor *= scale
    normaliser = tl.load(lse + row) * LOG2_E
    lanes = tl.arange(0, BLOCK)
    z = tl.load(logits + lanes, mask=lanes < stride)
    for start in range(0, stride, BLOCK):  # up to the next row: what is beyond V is never read
        following = tl.load(logits + start + BLOCK + lanes, mask=start + BLOCK + lanes < stride)
        dz = factor * tl.exp2(z.to(tl.float32) * (scale * LOG2_E) - normaliser)
        tl.store(logits + start + lanes, dz.to(logits.dtype.element_ty), mask=start + lanes < stride)
        z = following
    tl.debug_barrier()  # other threads of this program have just written where the ids point
    tl.store(logits + chosen, (at_ids * scale).to(logits.dtype.element_ty), mask=k < K)


@triton.jit
def _scale(source, factor, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < size).to(tl.float32) * tl.load(factor)
    tl.store(result + at, values.to(result.dtype.element_ty), mask=at < size)

"""Triton kernels of the head; head_torch.py defines the results. All compute in float32.

One program per row of a chunk of logits. A row is read once for its statistics, and once to overwrite it with
dL/dlogits.

Shapes: r rows of a chunk, N columns that are tokens, K ids per row. The stride of the rows of logits
is a multiple of 64, so that all loads are wide; columns beyond N (no tokens, padding) may be overwritten.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_gkd.losses import head_torch

# Fastest of those tried on an H200 (2,048 to 16,384 logits, 4 to 16 warps): 4.0 and 3.7 TB/s.
STATISTICS = {"BLOCK": 4096, "num_warps": 4}
GRADIENT = {"BLOCK": 8192, "num_warps": 16}
SCALE_BLOCK = 4096
LANE = tl.constexpr(8)  # neighbouring logits that one thread loads at once
TAIL_LIMIT = tl.constexpr(head_torch.TAIL_LIMIT)
LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(head_torch.MASKED_LOGIT)


def row_statistics(
    logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool, tail_topk: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `head_torch.row_statistics`; the logits [r, N] have unit column stride and are the same afterwards."""
    columns = ids.shape[1] + (tail_topk > 0)
    logprobs = torch.empty(len(ids), columns, dtype=torch.float32, device=logits.device)
    lse = logprobs.new_empty(len(logits))
    entropy = torch.empty_like(lse) if with_entropy else None
    _statistics[(len(logits),)](
        logits, ids.contiguous(), logprobs, lse, entropy, logits.stride(0), logits.shape[1], 1 / temperature,
        max(head_torch.MASKED_LOGIT, torch.finfo(logits.dtype).min), TAIL=tail_topk, **_num_ids(ids), **STATISTICS,
    )  # fmt: skip
    return logprobs, lse, entropy


def logit_gradient_(
    logits: Tensor, ids: Tensor, logprobs: Tensor, lse: Tensor, grad_logprobs: Tensor, temperature: float,
    tail_topk: int = 0, entropy: Tensor | None = None, grad_entropy: Tensor | None = None,
) -> Tensor:
    _gradient[(len(logits),)](
        logits, ids.contiguous(), logprobs, lse, grad_logprobs.contiguous(), entropy,
        None if grad_entropy is None else grad_entropy.contiguous(), logits.stride(0), 1 / temperature,
        TAIL=tail_topk, **_num_ids(ids), **GRADIENT,
    )  # fmt: skip
    return logits


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return tensor * factor in `dtype`, for a contiguous tensor and a scalar on its device; rounded once."""
    result, size = torch.empty_like(tensor, dtype=dtype), tensor.numel()
    _scale[(triton.cdiv(size, SCALE_BLOCK),)](tensor, factor, result, size, BLOCK=SCALE_BLOCK)
    return result


def _num_ids(ids: Tensor) -> dict[str, Any]:
    return {"K": ids.shape[1], "K_BLOCK": triton.next_power_of_2(ids.shape[1])}


@triton.jit
def _accumulate(z, peak, mass, weighted, scale, WITH_ENTROPY: tl.constexpr):
    """One block of an online log-sum-exp, z [N, LANE]: sums of exp(z - peak) and z exp(z - peak), [N] each."""
    # Each thread has its own peaks, so that the threads of a program need not wait for each other.
    larger = tl.maximum(peak, tl.max(z, 1))
    share = tl.exp2((z - larger[:, None]) * (scale * LOG2_E))
    rescale = tl.exp2((peak - larger) * (scale * LOG2_E))
    mass = mass * rescale + tl.sum(share, 1)
    if WITH_ENTROPY:
        weighted = weighted * rescale + tl.sum(share * z, 1)
    return larger, mass, weighted


@triton.jit
def _statistics(
    logits, ids, logprobs, lse_out, entropy_out, stride, num_ids, scale, masked_logit,
    TAIL: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    k = tl.arange(0, K_BLOCK)
    chosen = tl.load(ids + row * K + k, mask=k < K, other=0)
    if TAIL:  # the first ids are left out of the sum, and added at the end
        at_ids = tl.load(logits + chosen, mask=k < K, other=0.0)
        tl.debug_barrier()  # an id may occur again after the first ones
        tl.store(logits + chosen, tl.zeros([K_BLOCK], tl.float32) + masked_logit, mask=k < TAIL)
        tl.debug_barrier()  # other threads of this program read what was just written
    lanes = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    peak = tl.full([BLOCK // LANE], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK // LANE], tl.float32)
    weighted = tl.zeros([BLOCK // LANE], tl.float32)
    whole = num_ids // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        z = tl.load(logits + start + lanes).to(tl.float32)
        peak, mass, weighted = _accumulate(z, peak, mass, weighted, scale, entropy_out is not None)
    if whole < num_ids:
        z = tl.load(logits + whole + lanes, mask=whole + lanes < num_ids, other=LOWEST).to(tl.float32)
        peak, mass, weighted = _accumulate(z, peak, mass, weighted, scale, entropy_out is not None)
    top = tl.max(peak, 0)
    share = tl.exp2((peak - top) * (scale * LOG2_E))
    total = tl.sum(mass * share, 0)
    lse = top * scale + tl.log(total)
    if entropy_out is not None:
        entropy = lse - tl.sum(weighted * share, 0) / total * scale
    column = k
    if TAIL:
        tl.store(logits + chosen, at_ids, mask=k < TAIL)
        z = at_ids.to(tl.float32) * scale
        outside = lse
        largest = tl.maximum(tl.max(tl.where(k < TAIL, z, LOWEST), 0), outside)
        inside = tl.sum(tl.where(k < TAIL, tl.exp(z - largest), 0.0), 0)
        lse = largest + tl.log(inside + tl.exp(outside - largest))
        tail = outside - lse
        tl.store(logprobs + row * (K + 1) + TAIL, tail)
        if entropy_out is not None:
            entropy = tl.exp(tail) * (entropy - tail) - tl.sum(tl.where(k < TAIL, tl.exp(z - lse) * (z - lse), 0.0), 0)
        logprobs += row * (K + 1)
        column = k + (k >= TAIL).to(tl.int32)
    else:
        z = tl.load(logits + chosen, mask=k < K, other=0.0).to(tl.float32) * scale
        logprobs += row * K
    tl.store(lse_out + row, lse)
    if entropy_out is not None:
        tl.store(entropy_out + row, entropy)
    tl.store(logprobs + column, z - lse, mask=k < K)


@triton.jit
def _gradient(
    logits, ids, logprobs, lse, grad_logprobs, entropy, grad_entropy, stride, scale,
    TAIL: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    ids += row * K
    columns = K
    k = tl.arange(0, K_BLOCK)
    column = k
    if TAIL:
        columns = K + 1
        column = k + (k >= TAIL).to(tl.int32)
    grad_logprobs += row * columns
    logprobs += row * columns
    chosen = tl.load(ids + k, mask=k < K, other=-1)
    inside = -tl.sum(tl.load(grad_logprobs + column, mask=k < K, other=0.0), 0)
    factor = inside
    if TAIL:
        tail_gradient = tl.load(grad_logprobs + TAIL)
        inside -= tail_gradient
        factor = inside + tail_gradient * tl.exp(tl.minimum(-tl.load(logprobs + TAIL), TAIL_LIMIT))
    # Of an id that occurs twice, every occurrence writes the same value, from the gradients of both.
    gradient = tl.zeros([K_BLOCK], tl.float32)
    is_inside = k < TAIL
    for other in range(TAIL):
        same = chosen == tl.load(ids + other)
        gradient += tl.where(same, tl.load(grad_logprobs + other), 0.0)
        is_inside |= same
    for other in range(TAIL, K):
        gradient += tl.where(chosen == tl.load(ids + other), tl.load(grad_logprobs + columns - K + other), 0.0)
    at_id = tl.load(logprobs + column, mask=k < K, other=0.0)
    pulls = tl.where(is_inside, inside, factor)
    if grad_entropy is not None:
        slope = tl.load(grad_entropy + row)
        offset = tl.load(entropy + row)
        pulls -= slope * (at_id + offset)
        slope *= scale
        offset -= tl.load(lse + row)
    at_ids = pulls * tl.exp(at_id) + gradient

    factor *= scale
    normaliser = tl.load(lse + row) * LOG2_E
    lanes = tl.arange(0, BLOCK)
    z = tl.load(logits + lanes, mask=lanes < stride)
    for start in range(0, stride, BLOCK):  # up to the next row: columns beyond N are not read
        following = tl.load(logits + start + BLOCK + lanes, mask=start + BLOCK + lanes < stride)
        pull = factor
        if grad_entropy is not None:
            pull -= slope * (z.to(tl.float32) * scale + offset)
        dz = pull * tl.exp2(z.to(tl.float32) * (scale * LOG2_E) - normaliser)
        tl.store(logits + start + lanes, dz.to(logits.dtype.element_ty), mask=start + lanes < stride)
        z = following
    tl.debug_barrier()  # other threads of this program have just written where the ids point
    tl.store(logits + chosen, (at_ids * scale).to(logits.dtype.element_ty), mask=k < K)


@triton.jit
def _scale(source, factor, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < size).to(tl.float32) * tl.load(factor)
    tl.store(result + at, values.to(result.dtype.element_ty), mask=at < size)

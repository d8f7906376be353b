"""The kernels of vllm_fp8.py, in Triton: one program for each token, whose numbers it holds in registers.

Shapes: T tokens, D hidden size, I intermediate size. Both kernels compute in float32 and return float8_e4m3 and the
scales, float32 [T, 1], by which it is multiplied: the largest magnitude of a token becomes 448, that of float8_e4m3.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(1 / (448.0 * 512.0))
"""vLLM's, for tokens of zeros."""


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, D] and residual [T, D], contiguous, weight [D] -> z / sqrt(mean(z^2) + eps) * weight with z = x + residual.

    z takes the place of `residual`, rounded to its dtype, and is rounded when the rest is computed.
    """
    assert x.is_contiguous(), x.stride()
    assert residual.is_contiguous(), residual.stride()
    values, scales = _empty(x, x.shape[1])
    if len(x):
        width = triton.next_power_of_2(x.shape[1])
        _add_norm[(len(x),)](
            x, residual, weight, values, scales, eps, SIZE=x.shape[1], WIDTH=width, num_warps=_warps(width)
        )
    return values, scales


def gate(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, 2 I], contiguous -> silu(first half) * second half, [T, I]."""
    assert x.is_contiguous(), x.stride()
    size = x.shape[1] // 2
    values, scales = _empty(x, size)
    if len(x):
        first = triton.next_power_of_2(size // 2 + 1)  # the largest power of two that is not more
        rest = 0 if first == size else triton.next_power_of_2(size - first)
        _gate[(len(x),)](x, values, scales, SIZE=size, FIRST=first, REST=rest, num_warps=_warps(2 * first))
    return values, scales


def _empty(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    values = x.new_empty(len(x), size, dtype=DTYPE)
    return values, x.new_empty(len(x), 1, dtype=torch.float32)


def _warps(numbers: int) -> int:
    """32 numbers for each thread, where that many threads are allowed."""
    return min(max(numbers // 1024, 2), 16)


@triton.jit
def _add_norm(x, residual, weight, values, scales, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    token, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside, place = columns < SIZE, token * SIZE + columns
    z = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    rounded = z.to(residual.dtype.element_ty)
    tl.store(residual + place, rounded, mask=inside)
    z = rounded.to(tl.float32)
    z *= tl.rsqrt(tl.sum(z * z, axis=0) / SIZE + eps)
    z *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(z), axis=0) / LARGEST, SMALLEST_SCALE)
    tl.store(scales + token, scale)
    _store(values + place, z, scale, inside)


@triton.jit
def _gate(x, values, scales, SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row, to, columns = x + token * 2 * SIZE, values + token * SIZE, tl.arange(0, FIRST)
    first = _product(row, columns, columns < SIZE, SIZE)
    largest = tl.max(tl.abs(first), axis=0)
    if REST > 0:
        others = FIRST + tl.arange(0, REST)
        rest = _product(row, others, others < SIZE, SIZE)
        largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=0))
    scale = tl.maximum(largest / LARGEST, SMALLEST_SCALE)
    tl.store(scales + token, scale)
    _store(to + columns, first, scale, columns < SIZE)
    if REST > 0:
        _store(to + others, rest, scale, others < SIZE)


@triton.jit
def _product(row, columns, inside, SIZE: tl.constexpr):
    gate = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * tl.load(row + SIZE + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(place, values, scale, inside):
    rounded = tl.clamp(values * (1.0 / scale), -LARGEST, LARGEST)
    tl.store(place, rounded.to(place.dtype.element_ty), mask=inside)

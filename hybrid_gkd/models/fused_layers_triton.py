"""The kernels of fused_layers.py, in Triton. All compute in float32 and round once.

Shapes: T tokens, H heads, Dh head size, D hidden size, I intermediate size; ... stands for any leading dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 2048
NORM_TILE = 2048
"""Numbers of a norm's input that a program holds at once, where a row has no more."""
NORM_PROGRAMS = 1024
"""At most so many programs share the rows of a norm's gradient, each with a sum of its own for the weight's."""
SUM_PROGRAMS, SUM_ROWS, SUM_COLUMNS = 256, 32, 128
"""At most so many programs share the rows of a sum, of so many columns each, and hold so many rows at once."""


def norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x and residual [..., D] contiguous, weight [D] -> the normalised rows of their sum times the weight, float32
    1 / sqrt(...) of each row, and the sum, which without a residual is x itself."""
    result, num_rows, tile = torch.empty_like(x), x.numel() // x.shape[-1], _norm_tile(x)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    if num_rows:
        _norm[(triton.cdiv(num_rows, tile["ROWS"]),)](
            x, residual, total, weight, result, scale, num_rows, x.shape[-1], eps, ADDS=residual is not None, **tile
        )
    return result, scale, total


def norm_backward(
    upstream: Tensor, x: Tensor, weight: Tensor, scale: Tensor, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight; the weight's summed in float32, in the same order each time.

    `beside` is what else reaches x, and is added to its gradient.
    """
    grad, num_rows, tile = torch.empty_like(x), len(scale), _norm_tile(x)
    programs = max(1, min(NORM_PROGRAMS, triton.cdiv(num_rows, tile["ROWS"])))
    sums = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        upstream, beside, x, weight, scale, grad, sums, num_rows, x.shape[-1], programs, ADDS=beside is not None, **tile
    )
    return grad, sums.sum(0).to(weight.dtype)


def column_sums(matrices: list[Tensor]) -> list[Tensor]:
    """Over the rows of each [T, n] contiguous, summed in float32, in the same order each time."""
    first, widths = matrices[0], [x.shape[1] for x in matrices]
    programs = max(1, min(SUM_PROGRAMS, triton.cdiv(len(first), SUM_ROWS)))
    sums = torch.empty(programs, sum(widths), dtype=torch.float32, device=first.device)
    for x, part in zip(matrices, sums.split(widths, 1), strict=True):
        _column_sums[(programs, triton.cdiv(x.shape[1], SUM_COLUMNS))](
            x, part, len(x), x.shape[1], sums.shape[1], programs, ROWS=SUM_ROWS, BLOCK=SUM_COLUMNS, num_warps=4
        )
    return list(sums.sum(0).to(first.dtype).split(widths))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of contiguous tensors of one shape."""
    result, size = torch.empty_like(gate), gate.numel()
    if size:
        _gated[(triton.cdiv(size, GATE_BLOCK),)](gate, up, result, size, BLOCK=GATE_BLOCK, num_warps=8)
    return result


def gated_backward(upstream: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad_gate, grad_up, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if size:
        _gated_backward[(triton.cdiv(size, GATE_BLOCK),)](
            upstream, gate, up, grad_gate, grad_up, size, BLOCK=GATE_BLOCK, num_warps=8
        )
    return grad_gate, grad_up


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    """q [B, H, T, Dh] and k [B, Hkv, T, Dh] turned by contiguous cos and sin [B, T, Dh]; the transposed map backward.

    The results are views of [B, T, H, Dh].
    """
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    batch, _, tokens, size = q.shape
    results = [torch.empty(batch, tokens, x.shape[1], size, dtype=x.dtype, device=x.device) for x in (q, k)]
    if batch * tokens:
        _rotate[(batch * tokens,)](
            q, k, cos, sin, *results, tokens, *q.stride()[:3], *k.stride()[:3], q.shape[1], k.shape[1], size // 2,
            BACKWARD=backward, Q_BLOCK=triton.next_power_of_2(q.shape[1]), K_BLOCK=triton.next_power_of_2(k.shape[1]),
            HALF_BLOCK=triton.next_power_of_2(size // 2), num_warps=2,
        )  # fmt: skip
    return results[0].transpose(1, 2), results[1].transpose(1, 2)


def _norm_tile(x: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(x.shape[-1])
    return {"ROWS": max(1, NORM_TILE // block), "BLOCK": block, "num_warps": min(16, max(4, block // 512))}


@triton.jit
def _norm(
    x, residual, total, weight, result, scale, num_rows, width, eps, ADDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        # The norm is of the sum as it is kept.
        kept = (values + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, kept, mask=inside)
        values = kept.to(tl.float32)
    # Rounded as IEEE says: the usual ones are approximations, and all of a row is multiplied by this.
    factor = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), tl.sqrt_rn(tl.sum(values * values, 1) / width + eps))
    weights = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    normalised = values * factor[:, None] * weights[None, :]
    tl.store(result + at, normalised.to(result.dtype.element_ty), mask=inside)
    tl.store(scale + rows, factor, mask=rows < num_rows)


@triton.jit
def _norm_backward(
    upstream, beside, x, weight, scale, grad, sums, num_rows, width, programs, ADDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weights = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(program * ROWS, num_rows, programs * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        factor = tl.load(scale + rows, mask=rows < num_rows, other=0.0)[:, None]
        normalised = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor
        slope = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(slope * normalised, 0)
        slope *= weights[None, :]
        along = tl.sum(slope * normalised, 1) / width
        slope = factor * (slope - normalised * along[:, None])
        if ADDS:
            slope += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + at, slope.to(grad.dtype.element_ty), mask=inside)
    tl.store(sums + program.to(tl.int64) * width + columns, total, mask=columns < width)


@triton.jit
def _column_sums(x, sums, num_rows, width, stride, programs, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(program * ROWS, num_rows, programs * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
        values = tl.load(x + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=inside, other=0.0)
        total += values.to(tl.float32)
    tl.store(sums + program.to(tl.int64) * stride + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit
def _gated(gate, up, result, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    product = g * tl.sigmoid(g) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + at, product.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(upstream, gate, up, grad_gate, grad_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    slope = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    silu = g * share
    tl.store(grad_gate + at, (slope * u * (share + silu * (1 - share))).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (slope * silu).to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_heads(
    x, result, stride, heads, half, cos1, cos2, sin1, sin2, BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr
):
    """All heads of one token: the first halves times cos1 plus the second times sin1, and the other way round."""
    head = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < heads) & (column < half)
    first = tl.load(x + head * stride + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + head * stride + half + column, mask=inside, other=0.0).to(tl.float32)
    result += head * (2 * half) + column
    tl.store(result, (first * cos1 + second * sin1).to(result.dtype.element_ty), mask=inside)
    tl.store(result + half, (second * cos2 + first * sin2).to(result.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q, k, cos, sin, q_result, k_result, tokens, q_batch, q_head, q_token, k_batch, k_head, k_token, q_heads, k_heads,
    half, BACKWARD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sequence, token = program // tokens, program % tokens
    column = tl.arange(0, HALF_BLOCK)[None, :]
    at = program * 2 * half + column
    cos1 = tl.load(cos + at, mask=column < half, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + half + at, mask=column < half, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + at, mask=column < half, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + half + at, mask=column < half, other=0.0).to(tl.float32)
    if BACKWARD:
        sin1, sin2 = sin2, -sin1
    else:
        sin1 = -sin1
    q += sequence * q_batch + token * q_token
    k += sequence * k_batch + token * k_token
    q_result += program * q_heads * 2 * half
    k_result += program * k_heads * 2 * half
    _rotate_heads(q, q_result, q_head, q_heads, half, cos1, cos2, sin1, sin2, Q_BLOCK, HALF_BLOCK)
    _rotate_heads(k, k_result, k_head, k_heads, half, cos1, cos2, sin1, sin2, K_BLOCK, HALF_BLOCK)

"""Triton kernels for the K largest logits of every row and the log-sum-exp of the others, in one pass over the logits.

The vocabulary is split into blocks of BLOCK columns. The first kernel reads the logits and computes the maximum and the
log-sum-exp of every block. The K largest logits are in the K blocks with the largest maxima, since each of these has an
element that is at least the K-th maximum. The second kernel selects these blocks and sums the others; the third reads
the selected blocks again, selects among their elements, and sums the other elements. Selection searches the K-th
largest value bit by bit in the order-preserving integer representation of floats.

Shapes: R rows, V columns (logits), N of them tokens (others are ignored), B blocks.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Columns that one program of the first kernel reads."""
MAX_TOPK = 512
"""Maximum k: more candidates of a row do not fit into the registers of one program."""


def select(logits: Tensor, inverse_temperatures: Tensor, k: int, num_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest of the first N columns of every row, in any order, and log-sum-exps of the others.

    Args:
        logits: [R, V] on a GPU, columns contiguous
        inverse_temperatures: float32 [R]; the log-sum-exps are of logits times these
        k: from 1 to MAX_TOPK, at most N / 64
        num_ids: N <= V

    Returns:
        ids int32 [R, k]; their logits float32 [R, k], not scaled; the log-sum-exps of the others in blocks without and
        with a chosen one, float32 [R, 2]
    """
    num_rows, num_columns = logits.shape
    block = 64 if k <= 64 else 32  # many small blocks and few candidates, or the other way round
    num_tiles, num_blocks = triton.cdiv(num_ids, TILE), triton.cdiv(num_ids, block)
    all_blocks = num_tiles * (TILE // block)
    assert logits.stride(1) == 1, logits.stride()
    assert 1 <= k <= min(MAX_TOPK, num_ids // 64), (k, num_ids)
    maxima, sums = logits.new_empty(2, num_rows, all_blocks, dtype=torch.float32)
    others = logits.new_empty(num_rows, 2, dtype=torch.float32)
    _block_statistics[(num_rows, num_tiles)](
        logits, logits.stride(0), inverse_temperatures, maxima, sums, num_columns, num_ids,
        TILE=TILE, BLOCK=block, num_warps=4,
    )
    blocks, ids = logits.new_empty(2, num_rows, k, dtype=torch.int32)
    values = logits.new_empty(num_rows, k, dtype=torch.float32)
    width = triton.next_power_of_2(all_blocks)
    warps = 4 if width <= 8192 else 16
    _choose_blocks[(num_rows,)](maxima, sums, blocks, others, num_blocks, all_blocks, k, WIDTH=width, num_warps=warps)
    width = triton.next_power_of_2(k * block)
    warps = 4 if width <= 8192 else 16
    _choose_elements[(num_rows,)](
        logits, logits.stride(0), inverse_temperatures, blocks, ids, values, others, num_ids, k,
        BLOCK=block, WIDTH=width, num_warps=warps,
    )
    return ids, values, others


@triton.jit
def _log_sum_exp(values, axis: tl.constexpr):
    """Along the last axis; minus infinity where there is nothing."""
    largest = tl.max(values, axis=axis, keep_dims=True)
    safe = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp(values - safe), axis=axis, keep_dims=True)
    return tl.max(safe + tl.log(total), axis=axis)  # of one value


@triton.jit
def _block_statistics(
    logits, row_stride, inverse_temperatures, maxima, sums, num_columns, num_ids,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute each block's largest allowed element, and its log-sum-exp at the row's temperature."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    z = tl.load(logits + row * row_stride + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32)
    z = tl.where(columns < num_ids, z, -float("inf"))  # after a wide load, which a mask by num_ids may prevent
    place = (row * tl.num_programs(1) + tile) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    tl.store(maxima + place, tl.max(tl.reshape(z, (TILE // BLOCK, BLOCK)), axis=1))
    scaled = tl.reshape(z * tl.load(inverse_temperatures + row), (TILE // BLOCK, BLOCK))
    tl.store(sums + place, _log_sum_exp(scaled, 1))


@triton.jit
def _places(values, valid, k):
    """Place 0 to k - 1 of the k largest of the valid float32 in an array of their own, -1 for the others."""
    bits = values.to(tl.uint32, bitcast=True)
    # The keys are positive and in the order of the values.
    keys = tl.where(valid, tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000), 0)
    threshold = tl.zeros((1,), tl.uint32)
    bit = tl.full((1,), 0x80000000, tl.uint32)
    for _ in range(32):
        candidate = threshold | bit
        enough = tl.sum((keys >= candidate).to(tl.int32), axis=0) >= k
        threshold = tl.where(enough, candidate, threshold)
        bit = bit >> 1
    above, equal = (keys > threshold).to(tl.int32), (keys == threshold).to(tl.int32)
    places = tl.where(above == 1, tl.cumsum(above, 0), tl.sum(above, axis=0) + tl.cumsum(equal, 0)) - 1
    return tl.where((above + equal > 0) & (places < k), places, -1)


@triton.jit
def _choose_blocks(maxima, sums, blocks, others, num_blocks, all_blocks, k, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, WIDTH)
    values = tl.load(maxima + row * all_blocks + index, mask=index < num_blocks, other=0.0)
    places = _places(values, index < num_blocks, k)
    tl.store(blocks + row * k + places, index, mask=places >= 0)
    rest = tl.load(sums + row * all_blocks + index, mask=(index < all_blocks) & (places < 0), other=-float("inf"))
    tl.store(others + row * 2, _log_sum_exp(rest, 0))


@triton.jit
def _choose_elements(
    logits, row_stride, inverse_temperatures, blocks, ids, values, others, num_ids, k,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, WIDTH)
    inside = index < k * BLOCK
    columns = tl.load(blocks + row * k + index // BLOCK, mask=inside, other=0) * BLOCK + index % BLOCK
    inside &= columns < num_ids
    z = tl.load(logits + row * row_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    places = _places(z, inside, k)
    tl.store(ids + row * k + places, columns, mask=places >= 0)
    tl.store(values + row * k + places, z, mask=places >= 0)
    rest = tl.where(places < 0, z * tl.load(inverse_temperatures + row), -float("inf"))
    tl.store(others + row * 2 + 1, _log_sum_exp(rest, 0))

"""Triton kernel of decode attention: one new token of each sequence against the keys and values in its blocks.

A batch of many sequences has work for the whole GPU without dividing any of them. So a program takes one sequence and
one head of keys, and what decides is how many loads are under way. Online softmax as in FlashAttention (arXiv
2205.14135). FlashAttention 3, whose tiles are made for many rows of queries, takes 1.05 to 1.7 times as long for
sequences of up to a thousand tokens (docs/performance.md).

Shapes: N sequences, H heads, K heads of keys and values, D head size, B tokens of a block.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Heads that share keys and values, padded to what a tensor core takes."""


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, *, scale: float
) -> None:
    """softmax(scale * query @ keys) @ values of every sequence, in float32 but for the products' operands.

    Args:
        query: [N, H, D], last dimension contiguous.
        keys, values: [blocks, B, K, D], last dimension contiguous, of the same strides; K divides H, at most ROWS
            times.
        block_table: int32 [N, blocks of a sequence].
        lengths: int32 [N], tokens of each sequence with the new one; where it is 0 the output is 0.
        out: [N, H, D], last dimension contiguous.
        scale: of the scores.
    """
    sequences, heads, size = query.shape
    block, kv_heads = keys.shape[1:3]
    _attend[(kv_heads, sequences)](
        query, *query.stride()[:2], keys, values, *keys.stride()[:3], block_table, block_table.stride(0), lengths, out,
        *out.stride()[:2], scale / math.log(2), BLOCK=block, GROUP=heads // kv_heads, SIZE=size, ROWS=ROWS,
        TOKENS=max(16, 8192 // size), num_warps=4 if size <= 64 else 2, num_stages=3,
    )  # fmt: skip


@triton.jit
def _attend(
    query,  # [N, H, D]
    query_stride,
    query_head_stride,
    keys,  # [blocks, B, K, D]
    values,
    block_stride,
    token_stride,
    head_stride,
    table,  # [N, blocks of a sequence]
    table_stride,
    lengths,  # [N]
    out,  # [N, H, D]
    out_stride,
    out_head_stride,
    scale,  # for powers of 2
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    row, column, place = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, TOKENS)
    own, of_row = row[:, None] < GROUP, head * GROUP + row[:, None]
    asked = tl.load(
        query + sequence * query_stride + of_row * query_head_stride + column[None, :], mask=own, other=0.0
    )
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, SIZE], tl.float32)
    for first in range(0, length, TOKENS):
        token = first + place
        inside = token < length
        block = tl.load(table + sequence * table_stride + token // BLOCK, mask=inside, other=0).to(tl.int64)
        at = block * block_stride + (token % BLOCK) * token_stride + head * head_stride
        key = tl.load(keys + at[None, :] + column[:, None], mask=inside[None, :], other=0.0)
        value = tl.load(values + at[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        score = tl.where(inside[None, :], tl.dot(asked, key) * scale, -float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(score, axis=1))
        kept = tl.exp2(before - largest)
        weight = tl.exp2(score - largest[:, None])
        total = total * kept + tl.sum(weight, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(value.dtype), value)
    found = tl.where(length > 0, mixed / total[:, None], 0.0)
    tl.store(
        out + sequence * out_stride + of_row * out_head_stride + column[None, :], found.to(out.dtype.element_ty),
        mask=own,
    )  # fmt: skip

"""A Triton kernel that prepares a decode step of vLLM's newer model runner: one launch for four of vLLM's.

It writes what vLLM's `prepare_pos_seq_lens`, `combine_sampled_and_draft_tokens`, `compute_slot_mappings` and, where
asked, `gather_block_tables` write for a batch in which every row computes one token behind its prompt.

Shapes: S rows of the runner's state, N the most rows of a batch, M blocks of a sequence at most.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 1024
"""Rows of the batch, and columns of a block table, that one program looks at."""


def prepare_decodes(rows: Tensor, states: Any, buffers: Any, tables: Any, *, copied_rows: int) -> None:
    """Prepare the next token of the sequences at `rows` of the state, int32 [count].

    Args:
        states, buffers, tables: the runner's RequestState, InputBuffers and BlockTables.
        copied_rows: of the batch, whose block tables are copied for the model; those behind the count become zeros.
            0 where they are as they were.
    """
    count, most_rows = len(rows), len(buffers.seq_lens)
    row_programs = triton.cdiv(most_rows + 1, ROWS)
    for group, table in enumerate(tables.block_tables):
        copy = tables.input_block_tables[group]
        _prepare[(row_programs + copied_rows,)](
            rows, states.num_computed_tokens.gpu, states.last_sampled_tokens, buffers.input_ids, buffers.positions,
            buffers.seq_lens, buffers.query_start_loc, tables.slot_mappings[group], table.gpu, table.gpu.stride(0),
            copy, copy.stride(0), tables.num_blocks.gpu[group], tables.kernel_block_sizes[group], count, most_rows,
            row_programs, IS_FIRST=group == 0, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "row_programs"])
def _prepare(
    rows,  # [count]
    num_computed,  # [S]
    last_tokens,  # [S, 1]
    input_ids,  # [tokens]
    positions,  # [tokens]
    seq_lens,  # [N]
    starts,  # [N + 1]
    slots,  # [tokens]
    table,  # [S, M]
    table_stride,
    copy,  # [N, M]
    copy_stride,
    num_blocks,  # [S]
    block_size,
    count,
    most_rows,
    row_programs,
    IS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < row_programs:
        place = program * ROWS + tl.arange(0, ROWS)
        is_real, exists = place < count, place < most_rows
        row = tl.load(rows + place, mask=is_real, other=0).to(tl.int64)
        position = tl.load(num_computed + row, mask=is_real, other=0)
        if IS_FIRST:
            tl.store(starts + place, tl.minimum(place, count), mask=place <= most_rows)
            tl.store(positions + place, position, mask=is_real)
            tl.store(seq_lens + place, tl.where(is_real, position + 1, 0), mask=exists)
            tl.store(input_ids + place, tl.load(last_tokens + row, mask=is_real, other=0), mask=is_real)
        block = tl.load(table + row * table_stride + position // block_size, mask=is_real, other=0).to(tl.int64)
        tl.store(slots + place, tl.where(is_real, block * block_size + position % block_size, -1), mask=exists)
    else:
        target = program - row_programs
        if target < count:
            source = tl.load(rows + target).to(tl.int64)
            number = tl.load(num_blocks + source)
            for first in range(0, number, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                blocks = tl.load(table + source * table_stride + column, mask=column < number)
                tl.store(copy + target * copy_stride + column, blocks, mask=column < number)
        else:
            for first in range(0, copy_stride, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                tl.store(copy + target * copy_stride + column, 0, mask=column < copy_stride)

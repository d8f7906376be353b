"""Triton kernels before and after the model in a decode step of vLLM's newer model runner.

`prepare_decodes` replaces vLLM's `prepare_pos_seq_lens`, `combine_sampled_and_draft_tokens`, `compute_slot_mappings`,
`gather_block_tables` and the writes of new block ids, for a batch in which every row computes one token after its
prompt. `sample_decodes` samples the same tokens as vLLM's `apply_temperature` and `gumbel_sample`, with their
log-probabilities, in one pass over the logits, and updates the runner's state as `post_update` does; it does not count
them for penalties, which sequences of such a batch do not have.

Shapes: S rows of the runner's state, N maximum rows of a batch, V columns of logits.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_block_argmax

ROWS, COLUMNS = 128, 1024
"""Rows of the batch, and columns of a block table, per program."""
PART = 1024
"""Columns of logits per program, as in vLLM, so that ties have the same winner."""
HEADER = 4
"""Number of header entries before the rows of a batch, the first of which is their count; aligns rows to 16 bytes."""


def prepare_decodes(batch: Tensor, states: Any, buffers: Any, tables: Any, *, copied_rows: int) -> None:
    """Prepare the next token of the sequences of a batch.

    Args:
        batch: int32 [HEADER + 2N], the count of sequences, from HEADER on their rows of the state, and from HEADER + N
            on the first table's block that begins with the token, -1 if the table has it
        states, buffers, tables: the runner's RequestState, InputBuffers and BlockTables
        copied_rows: number of rows of the batch whose block tables are copied for the model; rows after the count
            become zeros. 0 for unchanged rows: the id of a block is written with its first token.
    """
    most_rows = len(buffers.seq_lens)
    row_programs = triton.cdiv(most_rows + 1, ROWS)
    for group, table in enumerate(tables.block_tables):
        copy = tables.input_block_tables[group]
        _prepare[(row_programs + copied_rows,)](
            batch, states.num_computed_tokens.gpu, states.last_sampled_tokens, buffers.input_ids, buffers.positions,
            buffers.seq_lens, buffers.query_start_loc, tables.slot_mappings[group], table.gpu, table.gpu.stride(0),
            copy, copy.stride(0), tables.kernel_block_sizes[group], most_rows, row_programs,
            IS_FIRST=group == 0, ROWS=ROWS, COLUMNS=COLUMNS, HEADER=HEADER,
        )  # fmt: skip


def sample_decodes(
    logits: Tensor, batch: Tensor, positions: Tensor, states: Any, temperatures: Tensor, seeds: Tensor,
    scratch: tuple[Tensor, Tensor], out: Tensor, *, scales: bool, logprobs: bool,
) -> None:
    """Sample a token of every sequence of a batch and append it.

    Args:
        logits: [R, V], columns contiguous; rows after the batch's count are ignored
        batch: as for `prepare_decodes`
        positions: int64 [at least R], positions of the computed tokens
        states: the runner's RequestState
        temperatures, seeds: float32 and int64 [S]
        scratch: float32 [at least 3 * R * ceil(V / PART)] and int32 [at least R * ceil(V / PART)]
        out: int32 [at least 2R]: R tokens, and the bits of their log-probabilities
        scales: whether logits are divided by the temperatures here, in their own dtype as vLLM does
        logprobs: whether to compute log-probabilities of the sampling distribution
    """
    rows, vocabulary = logits.shape
    parts, tokens = triton.cdiv(vocabulary, PART), states.all_token_ids.gpu
    _draw[(rows, parts)](
        logits, logits.stride(0), batch, seeds, positions, temperatures, *scratch, vocabulary,
        SCALES=scales, LOGPROBS=logprobs, PART=PART, HEADER=HEADER, num_warps=2,
    )  # fmt: skip
    _append[(rows,)](
        logits, logits.stride(0), batch, temperatures, *scratch, out, states.num_computed_tokens.gpu,
        states.last_sampled_tokens, tokens, tokens.stride(0), states.total_len.gpu, parts,
        SCALES=scales, LOGPROBS=logprobs, WIDTH=triton.next_power_of_2(parts), HEADER=HEADER,
    )  # fmt: skip


@triton.jit
def _prepare(
    batch,  # [HEADER + 2N]
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
    block_size,
    most_rows,
    row_programs,
    IS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADER: tl.constexpr,
):
    program = tl.program_id(0)
    count = tl.load(batch)
    if program < row_programs:
        place = program * ROWS + tl.arange(0, ROWS)
        is_real, exists = place < count, place < most_rows
        row = tl.load(batch + HEADER + place, mask=is_real, other=0).to(tl.int64)
        position = tl.load(num_computed + row, mask=is_real, other=0)
        at = position // block_size
        block = tl.load(table + row * table_stride + at, mask=is_real, other=0)
        if IS_FIRST:
            tl.store(starts + place, tl.minimum(place, count), mask=place <= most_rows)
            tl.store(positions + place, position, mask=is_real)
            tl.store(seq_lens + place, tl.where(is_real, position + 1, 0), mask=exists)
            tl.store(input_ids + place, tl.load(last_tokens + row, mask=is_real, other=0), mask=is_real)
            # An id given for an earlier token is ignored.
            begins = is_real & (position % block_size == 0)
            given = tl.load(batch + HEADER + most_rows + place, mask=begins, other=-1)
            tl.store(table + row * table_stride + at, given, mask=given >= 0)
            block = tl.where(given >= 0, given, block)
        tl.store(copy + place.to(tl.int64) * copy_stride + at, block, mask=is_real)
        slot = block.to(tl.int64) * block_size + position % block_size
        tl.store(slots + place, tl.where(is_real, slot, -1), mask=exists)
    else:
        target = (program - row_programs).to(tl.int64)
        if target < count:
            source = tl.load(batch + HEADER + target).to(tl.int64)
            number = tl.load(num_computed + source) // block_size  # the next one is written above
            for first in range(0, number, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                blocks = tl.load(table + source * table_stride + column, mask=column < number)
                tl.store(copy + target * copy_stride + column, blocks, mask=column < number)
        else:
            for first in range(0, copy_stride, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                tl.store(copy + target * copy_stride + column, 0, mask=column < copy_stride)


@triton.jit
def _scaled(values, temperature, dtype: tl.constexpr):
    """Divide by the temperature, with the rounding of vLLM; temperature 0 means greedy."""
    if (temperature != 0.0) & (temperature != 1.0):
        values = (values / temperature).to(dtype).to(tl.float32)
    return values


@triton.jit
def _draw(
    logits,  # [R, V]
    row_stride,
    batch,  # [HEADER + 2N]
    seeds,  # [S]
    positions,  # [tokens]
    temperatures,  # [S]
    found,  # [3, R, parts]: maximum with noise, maximum, sum of exponentials
    winners,  # [R, parts]: column of the maximum with noise
    vocabulary,
    SCALES: tl.constexpr,
    LOGPROBS: tl.constexpr,
    PART: tl.constexpr,
    HEADER: tl.constexpr,
):
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if place >= tl.load(batch):
        return
    column = part * PART + tl.arange(0, PART)
    inside = column < vocabulary
    stored = tl.load(logits + place * row_stride + column, mask=inside, other=-float("inf"))
    values = stored.to(tl.float32)
    if SCALES:
        row = tl.load(batch + HEADER + place).to(tl.int64)
        values = _scaled(values, tl.load(temperatures + row), stored.dtype)
    value, index = gumbel_block_argmax(
        values, column, inside, place, batch + HEADER, temperatures, seeds, positions, None, 0, None, vocabulary,
        APPLY_TEMPERATURE=False, USE_FP64=False,
    )  # fmt: skip
    parts = tl.num_programs(1)
    size, at = tl.num_programs(0).to(tl.int64) * parts, place * parts + part
    tl.store(found + at, value)
    tl.store(winners + at, part * PART + index)
    if LOGPROBS:
        largest = tl.max(values, axis=0)
        safe = tl.where(largest == -float("inf"), 0.0, largest)
        tl.store(found + size + at, largest)
        tl.store(found + 2 * size + at, tl.sum(tl.exp(values - safe), axis=0))


@triton.jit
def _append(
    logits,  # [R, V]
    row_stride,
    batch,  # [HEADER + 2N]
    temperatures,  # [S]
    found,  # [3, R, parts]
    winners,  # [R, parts]
    out,  # [2R]
    num_computed,  # [S]
    last_tokens,  # [S, 1]
    tokens,  # [S, length]
    tokens_stride,
    total_len,  # [S]
    parts,
    SCALES: tl.constexpr,
    LOGPROBS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADER: tl.constexpr,
):
    place, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if place >= tl.load(batch):
        return
    row = tl.load(batch + HEADER + place).to(tl.int64)
    part = tl.arange(0, WIDTH)
    inside, at, size = part < parts, found + place * parts + part, rows.to(tl.int64) * parts
    _, winner = tl.max(tl.load(at, mask=inside, other=-float("inf")), axis=0, return_indices=True)
    token = tl.load(winners + place * parts + winner)
    tl.store(out + place, token)
    tl.store(last_tokens + row, token)
    length = tl.load(total_len + row)
    tl.store(tokens + row * tokens_stride + length, token)
    tl.store(total_len + row, length + 1)
    tl.store(num_computed + row, tl.load(num_computed + row) + 1)
    if LOGPROBS:
        maxima = tl.load(at + size, mask=inside, other=-float("inf"))
        largest = tl.max(maxima, axis=0)
        sums = tl.load(at + 2 * size, mask=inside, other=0.0)
        total = tl.sum(tl.where(maxima == -float("inf"), 0.0, sums * tl.exp(maxima - largest)), axis=0)
        stored = tl.load(logits + place * row_stride + token)
        value = stored.to(tl.float32)
        if SCALES:
            value = _scaled(value, tl.load(temperatures + row), stored.dtype)
        logprob = value - largest - tl.log(total)
        tl.store(out + rows + place, logprob.to(tl.int32, bitcast=True))

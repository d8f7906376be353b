"""The kernels of decode steps against what vLLM's write, by Triton's interpreter. CPU, seconds.

vLLM's function that adds the noise is none without a GPU: another one stands in for it.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from kernels import compiles_for_a_gpu, interpreted

triton = pytest.importorskip("triton")
tl = triton.language

STATES, MOST_ROWS, TOKENS, BLOCKS, STALE = 300, 260, 400, 1030, 77
PREPARED = [(260, 260), (129, 136), (3, 0), (1, 2)]
"""Sequences of a batch, and rows whose block tables are copied."""
SAMPLED = [(5, 8, 2500, 1.0, True), (3, 3, 1024, 0.7, True), (1, 2, 1023, 0.7, False)]
"""Sequences of a batch, rows of logits and their columns, the temperature of all but the first, log-probabilities."""


@triton.jit
def gumbel_block_argmax(
    logits, block, mask, place, rows, temperatures, seeds, positions, processed, stride, column, vocabulary,
    APPLY_TEMPERATURE: tl.constexpr, USE_FP64: tl.constexpr,
):  # fmt: skip
    """Like vLLM's `gumbel_block_argmax`, with noise that numpy can do."""
    row = tl.load(rows + place)
    if tl.load(temperatures + row) != 0.0:
        noise = (tl.load(seeds + row) * 31 + tl.load(positions + place) * 17 + block * 7) % 97
        logits = tl.where(mask, logits + noise.to(tl.float32) / 16.0, float("-inf"))
    return tl.max(logits, axis=0, return_indices=True)


def kernels():
    """The module of the kernels, with this file's noise."""
    name = "vllm.v1.worker.gpu.sample.gumbel"
    with pytest.MonkeyPatch.context() as patch:
        for parent in (name.rsplit(".", parts)[0] for parts in range(6)):
            patch.setitem(sys.modules, parent, ModuleType(parent))
        sys.modules[name].gumbel_block_argmax = gumbel_block_argmax
        patch.delitem(sys.modules, "hybrid_gkd.compat.vllm.runner_triton", raising=False)
        return importlib.import_module("hybrid_gkd.compat.vllm.runner_triton")


def on_device(values, dtype=None):
    import torch

    return SimpleNamespace(gpu=torch.tensor(values, dtype=dtype or torch.int32))


def batch_of(rows, blocks=()):
    """Return a batch for `prepare_decodes`; `blocks` are those of the first rows."""
    import torch

    header = kernels().HEADER
    batch = np.full(header + 2 * MOST_ROWS, -1, np.int32)
    batch[0], batch[header : header + len(rows)] = len(rows), rows
    batch[header + MOST_ROWS :][: len(blocks)] = blocks
    return torch.from_numpy(batch)


def compare_preparation(count, copied_rows):
    """Two groups of KV caches with blocks of 16 and 32 tokens; what nobody writes stays as it was."""
    import torch

    rng = np.random.default_rng(count)
    computed, last = rng.integers(0, 500, STATES), rng.integers(0, 9000, STATES)
    sizes = [16, 32]
    rows = rng.permutation(STATES)[:count]
    computed[rows[0]] = 160  # a block begins there in both
    tables = [rng.integers(0, 5000, (STATES, BLOCKS)) for _ in sizes]
    before = [table.copy() for table in tables]
    position = computed[rows]
    given = np.where(position % 16 == 0, 6000 + np.arange(count), 7000)  # 7000: of an earlier token
    begins = given != 7000
    tables[0][rows[begins], position[begins] // 16] = given[begins]

    def stale(*shape, dtype=torch.int32):
        return torch.full(shape, STALE, dtype=dtype)

    states = SimpleNamespace(num_computed_tokens=on_device(computed), last_sampled_tokens=torch.tensor(last)[:, None])
    buffers = SimpleNamespace(
        input_ids=stale(TOKENS), positions=stale(TOKENS, dtype=torch.int64), seq_lens=stale(MOST_ROWS),
        query_start_loc=stale(MOST_ROWS + 1),
    )
    found = SimpleNamespace(
        block_tables=[on_device(table) for table in before], kernel_block_sizes=sizes,
        input_block_tables=[stale(MOST_ROWS, BLOCKS) for _ in sizes],
        slot_mappings=stale(len(sizes), TOKENS, dtype=torch.int64),
    )
    kernels().prepare_decodes(batch_of(rows, given), states, buffers, found, copied_rows=copied_rows)

    expected = {"input_ids": last[rows], "positions": position, "seq_lens": position + 1}
    for name, values in expected.items():
        written = getattr(buffers, name).numpy()
        assert (written[:count] == values).all(), name
        behind = 0 if name == "seq_lens" else STALE  # the graph must not attend to rows that are none
        assert (written[count:] == behind).all(), name
    assert (buffers.query_start_loc.numpy() == np.minimum(np.arange(MOST_ROWS + 1), count)).all()
    for group, (size, table) in enumerate(zip(sizes, tables, strict=True)):
        assert (found.block_tables[group].gpu.numpy() == table).all()
        slots = found.slot_mappings[group].numpy()
        assert (slots[:count] == table[rows, position // size] * size + position % size).all()
        assert (slots[count:MOST_ROWS] == -1).all()
        copy = found.input_block_tables[group].numpy()
        for place in range(MOST_ROWS):
            if place >= count:
                assert (copy[place] == (0 if place < copied_rows else STALE)).all()
                continue
            wanted, last_block = np.full(BLOCKS, STALE), position[place] // size
            first = 0 if place < copied_rows else last_block
            wanted[first : last_block + 1] = table[rows[place], first : last_block + 1]
            assert (copy[place] == wanted).all()


def compare_samples(count, rows_of_logits, vocabulary, temperature, logprobs):
    """The first sequence takes its most likely token; equal logits are there more than once."""
    import torch

    rng = np.random.default_rng(vocabulary)
    rows = rng.permutation(STATES)[:count]
    temperatures = np.where(np.arange(STATES) == rows[0], 0.0, temperature)
    seeds, positions = rng.integers(0, 1000, STATES), rng.integers(0, 500, count)
    logits = torch.tensor(rng.normal(0, 3, (rows_of_logits, vocabulary)), dtype=torch.float16)  # rounded as on a GPU
    computed, lengths = rng.integers(0, 50, STATES), rng.integers(0, 60, STATES)
    states = SimpleNamespace(
        num_computed_tokens=on_device(computed), last_sampled_tokens=torch.full((STATES, 1), STALE),
        all_token_ids=on_device(np.full((STATES, 64), STALE)), total_len=on_device(lengths),
    )
    parts = -(-vocabulary // 1024)
    scratch = torch.empty(3 * rows_of_logits * parts), torch.empty(rows_of_logits * parts, dtype=torch.int32)
    out = torch.full((2 * MOST_ROWS,), STALE, dtype=torch.int32)
    kernels().sample_decodes(
        logits, batch_of(rows), torch.tensor(positions), states, torch.tensor(temperatures, dtype=torch.float32),
        torch.tensor(seeds), scratch, out, scales=temperature != 1.0, logprobs=logprobs,
    )  # fmt: skip

    divisors = torch.tensor(np.where(temperatures[rows] == 0.0, 1.0, temperatures[rows]), dtype=torch.float32)
    scaled = (logits[:count].float() / divisors[:, None]).half().double()
    noise = (seeds[rows][:, None] * 31 + positions[:, None] * 17 + np.arange(vocabulary) * 7) % 97 / 16.0
    noise[temperatures[rows] == 0.0] = 0.0
    tokens = (scaled + torch.tensor(noise)).argmax(1)
    assert out[:count].tolist() == tokens.tolist()
    behind = out[count:].split([rows_of_logits - count, count, 2 * MOST_ROWS - rows_of_logits - count])
    if logprobs:
        expected = scaled.log_softmax(1).gather(1, tokens[:, None])[:, 0]
        np.testing.assert_allclose(behind[1].view(torch.float32), expected, atol=1e-5)
    else:
        assert (behind[1] == STALE).all()
    assert (behind[0] == STALE).all()
    assert (behind[2] == STALE).all()
    for name, value in {"num_computed_tokens": computed, "total_len": lengths}.items():
        value[rows] += 1
        assert (getattr(states, name).gpu.numpy() == value).all(), name
    assert states.last_sampled_tokens[rows, 0].tolist() == tokens.tolist()
    written = states.all_token_ids.gpu.numpy()
    assert written[rows, lengths[rows] - 1].tolist() == tokens.tolist()
    assert (written != STALE).sum() == (tokens != STALE).sum()


@pytest.mark.slow
def test_kernels_under_the_interpreter():
    assert interpreted(__file__) == ["same"] * len(PREPARED + SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_preparation_compiles_for_a_gpu(is_first, tmp_path, monkeypatch):
    module = kernels()
    numbers = ("table_stride", "copy_stride", "block_size", "most_rows", "row_programs")
    types = dict.fromkeys(numbers, "i32") | dict.fromkeys(("last_tokens", "positions", "slots"), "*i64")
    sizes = {"ROWS": module.ROWS, "COLUMNS": module.COLUMNS, "HEADER": module.HEADER}
    constants = {"IS_FIRST": is_first, **sizes}
    assert compiles_for_a_gpu(module._prepare, tmp_path, monkeypatch, constants=constants, types=types, other="*i32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_draw", "_append"])
@pytest.mark.parametrize("asked", [True, False])
def test_sampling_compiles_for_a_gpu(name, asked, tmp_path, monkeypatch):
    module = kernels()
    types = {"logits": "*bf16", "temperatures": "*fp32", "found": "*fp32"}
    constants = {"SCALES": asked, "LOGPROBS": asked, "HEADER": module.HEADER}
    if name == "_draw":
        types |= dict.fromkeys(("row_stride", "vocabulary"), "i32") | {"seeds": "*i64", "positions": "*i64"}
        constants |= {"PART": module.PART}
    else:
        types |= dict.fromkeys(("row_stride", "tokens_stride", "parts"), "i32") | {"last_tokens": "*i64"}
        constants |= {"WIDTH": 256}
    kernel = getattr(module, name)
    assert compiles_for_a_gpu(kernel, tmp_path, monkeypatch, constants=constants, types=types, other="*i32")


if __name__ == "__main__":
    for case in PREPARED:
        compare_preparation(*case)
        print("same")
    for case in SAMPLED:
        compare_samples(*case)
        print("same")

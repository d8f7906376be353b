"""The kernel that prepares decode steps against what vLLM's four write, by Triton's interpreter. CPU, seconds."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

STATES, MOST_ROWS, TOKENS, BLOCKS, STALE = 300, 260, 400, 1030, 77
CASES = [(260, 260), (129, 136), (3, 0), (1, 2)]
"""Sequences of a batch, and rows whose block tables are copied."""


def compare(count, copied_rows):
    """Two groups of KV caches with blocks of 16 and 32 tokens; what nobody writes stays as it was."""
    import torch

    from hybrid_gkd.rollout.vllm_runner_triton import prepare_decodes

    rng = np.random.default_rng(count)
    computed, last = rng.integers(0, 500, STATES), rng.integers(0, 9000, STATES)
    sizes = [16, 32]
    tables = [rng.integers(0, 5000, (STATES, BLOCKS)) for _ in sizes]
    num_blocks = np.stack([rng.integers(0, BLOCKS + 1, STATES) for _ in sizes])
    rows = rng.permutation(STATES)[:count]

    def stale(*shape, dtype=torch.int32):
        return torch.full(shape, STALE, dtype=dtype)

    def on_device(values):
        return SimpleNamespace(gpu=torch.tensor(values, dtype=torch.int32))

    states = SimpleNamespace(num_computed_tokens=on_device(computed), last_sampled_tokens=torch.tensor(last)[:, None])
    buffers = SimpleNamespace(
        input_ids=stale(TOKENS), positions=stale(TOKENS, dtype=torch.int64), seq_lens=stale(MOST_ROWS),
        query_start_loc=stale(MOST_ROWS + 1),
    )
    found = SimpleNamespace(
        block_tables=[on_device(table) for table in tables], kernel_block_sizes=sizes, num_blocks=on_device(num_blocks),
        input_block_tables=[stale(MOST_ROWS, BLOCKS) for _ in sizes],
        slot_mappings=stale(len(sizes), TOKENS, dtype=torch.int64),
    )
    prepare_decodes(torch.tensor(rows, dtype=torch.int32), states, buffers, found, copied_rows=copied_rows)

    position = computed[rows]
    expected = {"input_ids": last[rows], "positions": position, "seq_lens": position + 1}
    for name, values in expected.items():
        written = getattr(buffers, name).numpy()
        assert (written[:count] == values).all(), name
        behind = 0 if name == "seq_lens" else STALE  # the graph must not attend to rows that are none
        assert (written[count:] == behind).all(), name
    assert (buffers.query_start_loc.numpy() == np.minimum(np.arange(MOST_ROWS + 1), count)).all()
    for group, (size, table) in enumerate(zip(sizes, tables, strict=True)):
        slots = found.slot_mappings[group].numpy()
        assert (slots[:count] == table[rows, position // size] * size + position % size).all()
        assert (slots[count:MOST_ROWS] == -1).all()
        copy = found.input_block_tables[group].numpy()
        for place in range(MOST_ROWS):
            number = num_blocks[group, rows[place]] if place < min(count, copied_rows) else 0
            assert (copy[place, :number] == table[rows[place] if place < count else 0, :number]).all()
            assert (copy[place, number:] == (0 if count <= place < copied_rows else STALE)).all()


@pytest.mark.slow
def test_kernel_under_the_interpreter():
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton")
    root = Path(__file__).parents[3]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["same"] * len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_kernel_compiles_for_a_gpu(is_first, tmp_path, monkeypatch):
    """The compiler wants types that the interpreter does not ask for; it needs no GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hybrid_gkd.rollout import vllm_runner_triton as module

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # what was compiled before is no test
    kernel, long = module._prepare, ("last_tokens", "positions", "slots")
    numbers = ("table_stride", "copy_stride", "block_size", "count", "most_rows", "row_programs")
    constants = {"IS_FIRST": is_first, "ROWS": module.ROWS, "COLUMNS": module.COLUMNS}
    signature = {name: "*i64" if name in long else "*i32" for name in kernel.arg_names}
    signature |= dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
    assert "ptx" in compiled.asm


if __name__ == "__main__":
    for case in CASES:
        compare(*case)
        print("same")

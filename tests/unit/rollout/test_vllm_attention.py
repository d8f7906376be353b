"""Decode attention by Triton's interpreter and compiler, and where vLLM keeps its own. CPU, seconds.

tests/gpu/test_decode_attention_on_gpu.py compares it with FlashAttention.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_gkd.models import vllm_compat
from hybrid_gkd.rollout import vllm_attention

triton = pytest.importorskip("triton")

CASES = [(14, 2, 64, 16), (4, 4, 128, 32)]
"""Heads, heads of keys, head size, tokens of a block."""
LENGTHS = [0, 1, 16, 150, 300]


@pytest.mark.parametrize("version", ["0.27.0", "0.32.0"])
def test_vllm_stays_as_it_is(monkeypatch, version):
    monkeypatch.setattr(vllm_compat, "vllm_version", lambda: version)
    assert vllm_attention.install() == f"this path was not tried with vLLM {version}"


def compare(heads, kv_heads, size, block):
    """Float32, since the interpreter rounds no bfloat16; sequences of different lengths, whose blocks lie anywhere."""
    from hybrid_gkd.rollout.vllm_attention_triton import decode_attention

    gen, count, blocks = torch.Generator().manual_seed(size), len(LENGTHS), -(-max(LENGTHS) // block)
    cache = torch.randn(count * blocks + 1, block, kv_heads, 2 * size, generator=gen)
    keys, values = cache.split(size, dim=-1)
    table = torch.randperm(count * blocks, generator=gen).int().view(count, blocks) + 1
    query, out = torch.randn(count, heads, size, generator=gen), torch.full((count, heads, size), float("nan"))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    decode_attention(query, keys, values, table, lengths, out, scale=0.3)

    assert (out[0] == 0).all()
    for sequence, length in enumerate(LENGTHS[1:], start=1):
        own = [part[table[sequence].long()].flatten(0, 1)[:length].double() for part in (keys, values)]
        own = [part.repeat_interleave(heads // kv_heads, 1) for part in own]
        weights = (torch.einsum("hd,thd->ht", query[sequence].double(), own[0]) * 0.3).softmax(1)
        expected = torch.einsum("ht,thd->hd", weights, own[1])
        torch.testing.assert_close(out[sequence].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_kernel_under_the_interpreter():
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["same"] * len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("size", vllm_attention.HEAD_SIZES)
def test_kernel_compiles_for_a_gpu(size, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hybrid_gkd.rollout.vllm_attention_triton import ROWS, _attend

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # what was compiled before is no test
    constants = {"BLOCK": 16, "GROUP": 7, "SIZE": size, "ROWS": ROWS, "TOKENS": 8192 // size}
    pointers = dict.fromkeys(("query", "keys", "values", "out"), "*bf16") | dict.fromkeys(("table", "lengths"), "*i32")
    signature = dict.fromkeys(_attend.arg_names, "i32") | pointers | {"scale": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(_attend.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(_attend, signature, values), target=GPUTarget("cuda", 90, 32))
    assert "ptx" in compiled.asm


if __name__ == "__main__":
    for case in CASES:
        compare(*case)
        print("same")

"""Decode attention by Triton's interpreter and compiler, and where vLLM keeps its own. CPU, seconds.

tests/gpu/test_decode_attention_on_gpu.py compares it with FlashAttention.
"""

import pytest
import torch
from kernels import compiles_for_a_gpu, interpreted

from hybrid_gkd.compat.vllm import versions as vllm_compat
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
    assert interpreted(__file__) == ["same"] * len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("size", vllm_attention.HEAD_SIZES)
def test_kernel_compiles_for_a_gpu(size, tmp_path, monkeypatch):
    from hybrid_gkd.rollout.vllm_attention_triton import ROWS, _attend

    constants = {"BLOCK": 16, "GROUP": 7, "SIZE": size, "ROWS": ROWS, "TOKENS": 8192 // size}
    pointers = dict.fromkeys(("query", "keys", "values", "out"), "*bf16") | dict.fromkeys(("table", "lengths"), "*i32")
    types = pointers | {"scale": "fp32"}
    assert compiles_for_a_gpu(_attend, tmp_path, monkeypatch, constants=constants, types=types)


if __name__ == "__main__":
    for case in CASES:
        compare(*case)
        print("same")

"""Decode attention in the place of FlashAttention's: the same values, and only where it is meant to be.

    bash tests/run.sh -m gpu tests/gpu/test_decode_attention_on_gpu.py
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.rollout import vllm_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BLOCK, MANY, FEW = 16, 200, 8
HEADS = [(14, 2, 64), (12, 2, 128), (32, 8, 128), (16, 1, 128)]
"""Heads, heads of keys, head size."""


def attend(forward, layer, *, sequences, longest):
    """The output of a layer for a batch of as many sequences, and keys, values and queries of it."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    gen = torch.Generator("cuda").manual_seed(sequences)
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    blocks = -(-longest // BLOCK)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, device="cuda", dtype=torch.bfloat16)

    cache = normal(sequences * blocks, BLOCK, kv_heads, 2 * size).transpose(1, 2)
    table = torch.randperm(sequences * blocks, generator=gen, device="cuda").int().view(sequences, blocks)
    lengths = torch.randint(1, longest + 1, (sequences,), generator=gen, device="cuda", dtype=torch.int32)
    batch = FlashAttentionMetadata(
        num_actual_tokens=sequences, max_query_len=1, max_seq_len=longest, seq_lens=lengths, block_table=table,
        query_start_loc=torch.arange(sequences + 1, device="cuda", dtype=torch.int32), slot_mapping=None,
        use_cascade=False, common_prefix_len=0, cu_prefix_query_lens=None, prefix_kv_lens=None, suffix_kv_lens=None,
    )  # fmt: skip
    query, out = normal(sequences, heads, size), torch.full_like(normal(sequences, heads, size), float("nan"))
    one = torch.ones((), device="cuda")
    forward(layer, SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one), query, None, None, cache, batch, out)
    return out, (query, cache, table, lengths)


def error(out, layer, inputs):
    """Against float64, relative."""
    query, cache, table, lengths = inputs
    total = 0.0
    for sequence, length in enumerate(lengths.tolist()):
        own = cache.transpose(1, 2)[table[sequence].long()].flatten(0, 1)[:length].double()
        own = own.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1)
        keys, values = own.split(layer.head_size, dim=-1)
        weights = (torch.einsum("hd,thd->ht", query[sequence].double(), keys) * layer.scale).softmax(1)
        expected = torch.einsum("ht,thd->hd", weights, values)
        total = max(total, ((out[sequence] - expected).norm() / expected.norm()).item())
    return total


def compare():
    """In a process of its own, because vLLM changes the process that imports it."""
    vllm_compat.prepare_environment("cuda")
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from hybrid_gkd.rollout import vllm_attention_triton

    flash_attention, launched, launch = FlashAttentionImpl.forward, [], vllm_attention_triton.decode_attention
    vllm_attention_triton.decode_attention = lambda *args, **kwargs: (launched.append(1), launch(*args, **kwargs))
    assert vllm_attention.install() is None
    assert vllm_attention.install() is None  # a second engine
    forward = FlashAttentionImpl.forward
    for heads, kv_heads, size in HEADS:
        plain = FlashAttentionImpl(heads, size, size**-0.5, kv_heads, None, None, "auto")
        for longest in (40, 700):
            found, inputs = attend(forward, plain, sequences=MANY, longest=longest)
            assert launched.pop(), (heads, kv_heads, size)
            theirs = error(attend(flash_attention, plain, sequences=MANY, longest=longest)[0], plain, inputs)
            assert error(found, plain, inputs) < 1.5 * theirs + 1e-4, (heads, kv_heads, size, longest)
        window = FlashAttentionImpl(heads, size, size**-0.5, kv_heads, None, 32, "auto")
        for layer, sequences in ((plain, FEW), (window, MANY)):
            found, expected = (attend(each, layer, sequences=sequences, longest=99)[0] for each in (
                forward, flash_attention,
            ))  # fmt: skip
            assert torch.equal(found, expected)
    assert not launched


def test_large_batches_have_another_kernel_with_the_same_values():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(compare).result(300.0)

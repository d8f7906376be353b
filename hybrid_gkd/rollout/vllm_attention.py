"""Decode attention of our own in vLLM's FlashAttention backend, for batches of many sequences.

In a step that computes one token of each of many sequences, attention reads all their keys and values once and does
little else. It is a third of such a step's kernels, and FlashAttention 3 needs up to 1.7 times as long for it as the
memory does. `install` lets the layers of this process use vllm_attention_triton's kernel for batches that are large
enough for it to be the faster one. All other batches, and layers that ask for more than plain causal attention, keep
FlashAttention. Both compute the same function, rounded in another order.
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid_gkd.compat.vllm import versions as vllm_compat

TRIED = ((0, 26),)
"""Versions of vLLM whose layers were tried with it on a GPU."""
ARGUMENTS = frozenset({"attention_backend", "attention_config"})
"""Of `vllm.LLM`: who gives one decides about attention."""
HEAD_SIZES = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def install() -> str | None:
    """Put the kernel in the place of FlashAttention in this process; None, or why vLLM was left as it is."""
    if reason := vllm_compat.untried(TRIED):
        return reason
    if torch.cuda.get_device_capability()[0] != 9:
        return f"ours was tried on Hopper alone, and this is {torch.cuda.get_device_name()}"
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from hybrid_gkd.rollout import vllm_attention_triton

    flash_attention = FlashAttentionImpl.forward
    if hasattr(flash_attention, "of_few"):
        return None
    enough = 3 * torch.cuda.get_device_properties(0).multi_processor_count // 2

    def is_plain(layer: Any, batch: Any, query: torch.Tensor, cache: torch.Tensor) -> bool:
        window = layer.sliding_window if batch.sliding_window is None else batch.sliding_window
        return (
            batch.rswa_prefix_lens is None and tuple(window) == (-1, -1)
            and layer.attn_type == AttentionType.DECODER and layer.alibi_slopes is None and layer.sinks is None
            and not layer.logits_soft_cap and layer.dcp_world_size == 1
            and layer.head_size in HEAD_SIZES and layer.num_queries_per_kv <= vllm_attention_triton.ROWS
            and query.dtype in DTYPES and cache.dtype == query.dtype and not layer.batch_invariant_enabled
        )  # fmt: skip

    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        batch = attn_metadata
        decodes_many = (
            batch is not None and batch.max_query_len == 1 and not batch.use_cascade
            and batch.num_actual_tokens * self.num_kv_heads >= enough
            and all(scale is None for scale in (*args, *kwargs.values()))  # of an output with fewer bits
        )  # fmt: skip
        if not decodes_many or not is_plain(self, batch, query, kv_cache):
            return flash_attention(self, layer, query, key, value, kv_cache, batch, output, *args, **kwargs)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        count = batch.num_actual_tokens
        vllm_attention_triton.decode_attention(
            query[:count], keys, values, batch.block_table, batch.seq_lens, output[:count], scale=self.scale
        )
        return output

    forward.of_few = flash_attention  # type: ignore[attr-defined]
    FlashAttentionImpl.forward = forward
    return None

"""Runs any Hugging Face decoder on sequences packed without padding into one row of T tokens.

Importing this module registers the attention implementation PACKED_ATTENTION with transformers, in which each
sequence attends causally to itself only:

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED_ATTENTION)
    hidden = model.model(**pack(sequences, device).model_kwargs()).last_hidden_state       # [1, T, D]

The sequence boundaries travel to the attention function as keyword arguments of the model's forward, under the
names of transformers' FlashAttentionKwargs. On a GPU in bfloat16 or float16 the work is done by
torch.nn.attention.varlen, elsewhere by scaled_dot_product_attention on a right-padded copy, which is
exact as well: a causal mask never looks right. Features that neither computes exactly are refused with a ModelError.

Left out: key-value caches, cross-attention. A model that mixes tokens without calling the attention function (state
spaces, convolutions, attention of its own) would mix neighbouring sequences, and cannot be noticed here:
`LogprobModel` refuses it.

Shapes: B sequences, T packed tokens, L longest sequence, H heads (Hkv of keys and values), Dh head size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from hybrid_gkd.errors import ModelError

PACKED_ATTENTION = "hybrid_gkd_packed"
_PLAIN = "hybrid_gkd_packed_plain"
"""The same for a model whose masks turned out to be causal and no more: it is not asked for them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Sequences laid end to end.

    Example: the sequences [7, 8, 9] and [5, 6] give input_ids=[[7, 8, 9, 5, 6]], position_ids=[[0, 1, 2, 0, 1]],
    cu_seqlens=[0, 3, 5], max_length=3
    """

    input_ids: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T], position of each token within its own sequence."""
    cu_seqlens: Tensor
    """int32 [B + 1], sequence b occupies the tokens cu_seqlens[b] to cu_seqlens[b + 1]."""
    max_length: int
    """Tokens of the longest sequence."""

    def model_kwargs(self) -> dict[str, Any]:
        """All keyword arguments of the model's forward."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": None,
            "use_cache": False,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }


def pack(sequences: Sequence[np.ndarray], device: torch.device | str) -> PackedBatch:
    """Lays B arrays of token ids end to end, in the order given.

    Raises:
        ValueError: no sequence, or a sequence that is empty or not one-dimensional.
    """
    arrays = [np.asarray(sequence) for sequence in sequences]
    if not arrays or any(array.ndim != 1 or not len(array) for array in arrays):
        raise ValueError(f"needs sequences of at least one token; got shapes {[array.shape for array in arrays]}")
    lengths = [len(array) for array in arrays]
    return PackedBatch(
        input_ids=to_device(np.concatenate(arrays).astype(np.int64), device)[None],
        position_ids=to_device(np.concatenate([np.arange(n) for n in lengths]), device)[None],
        cu_seqlens=to_device(np.cumsum([0, *lengths], dtype=np.int32), device),
        max_length=max(lengths),
    )


def to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """A copy on the device; a GPU makes it after its queued work, and the host does not wait for it."""
    tensor = torch.from_numpy(array)
    on_gpu = torch.device(device).type == "cuda"
    return tensor.pin_memory().to(device, non_blocking=True) if on_gpu else tensor.to(device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    Args:
        module: the attention layer.
        query: [1, H, T, Dh].
        key: [1, Hkv, T, Dh]; Hkv divides H (grouped-query attention).
        value: [1, Hkv, T, Dv].
        attention_mask: None, or the window of a sliding-window layer as `_packed_mask` returns it.
        scaling: multiplies the scores; None is Dh ** -0.5.
        sliding_window: tokens that a token may see, itself included; None is all.
        cu_seq_lens_q: int32 [B + 1], see PackedBatch.
        max_length_q: tokens of the longest sequence.
        kwargs: other arguments of the model; a feature that would change the result is refused.

    Returns:
        attention output [1, T, H, Dv], None in the place of the attention weights.

    Raises:
        ModelError: the boundaries did not arrive, or the layer asks for a feature that is not supported.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ModelError(
            f"{type(module).__name__} got no sequence boundaries: call the model with PackedBatch.model_kwargs(); if "
            "that was done, this architecture does not pass keyword arguments on to its attention"
        )
    if attention_mask is not None and attention_mask.ndim:
        raise ModelError(f"{type(module).__name__} with packed sequences does not support an attention mask")
    _refuse_unsupported(module, query, key, kwargs)
    window = sliding_window if sliding_window is not None or attention_mask is None else int(attention_mask)
    if window is not None and window >= max_length_q:
        window = None
    attend = _varlen if _varlen_can(query, value) else _padded
    return attend(query, key, value, cu_seq_lens_q, max_length_q, scaling, window), None


def _refuse_unsupported(module: torch.nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    where = f"{type(module).__name__} with packed sequences"
    for feature in ("softcap", "s_aux", "position_bias", "attention_bias", "indices", "cache"):
        if kwargs.get(feature) is not None:
            raise ModelError(f"{where} does not support {feature}")
    if kwargs.get("dropout"):
        raise ModelError(f"{where} does not support dropout; set the config's attention dropout to 0")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{where} does not support attention that is not causal")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
        raise ModelError(
            f"{where} needs one row and as many keys as queries (no cache, no cross-attention); got {shapes}"
        )


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[1, H, T, Dh] -> [B, H, L, Dh] -> attention -> [1, T, H, Dv]."""
    num_tokens, num_sequences = query.shape[2], len(cu_seqlens) - 1
    sequence = torch.arange(num_sequences, device=query.device)
    sequence = sequence.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
    position = torch.arange(num_tokens, device=query.device) - cu_seqlens[sequence]

    def unpack(packed: Tensor) -> Tensor:
        padded = packed.new_zeros(num_sequences, max_length, packed.shape[1], packed.shape[3])
        return padded.index_put((sequence, position), packed[0].transpose(0, 1)).transpose(1, 2)

    mask = None
    if window is not None:
        mask = torch.ones(max_length, max_length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    output = scaled_dot_product_attention(
        unpack(query),
        unpack(key),
        unpack(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)[sequence, position][None]


def _varlen_can(query: Tensor, value: Tensor) -> bool:
    """Whether FlashAttention, which varlen_attn calls, takes these tensors."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] == value.shape[3] <= 256
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[1, H, T, Dh] -> [1, T, H, Dv] without padding."""
    attention, takes_gqa = _varlen_function()
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if query.shape[1] != key.shape[1]:
        if takes_gqa:
            options["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attention(query, key, value, cu_seqlens, cu_seqlens, max_length, max_length, **options)[None]


@functools.cache
def _varlen_function() -> tuple[Callable[..., Any], bool]:
    """torch's varlen_attn and whether it knows enable_gqa."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def _packed_mask(*, config: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
    """The mask function that transformers calls once per kind of layer and forward: builds no mask.

    It is registered all the same, because here a model declares its kind of attention: some sliding-window models
    (phimoe) tell the window only here, and attention that is not plain causal is refused. The window travels on as a
    0-dimensional tensor on the host, in the place of the mask.

    Before each call transformers waits for the GPU, to look at the position ids. So a model without windows, for which
    the answer is always None, is asked in its first forward only.
    """
    architecture = type(config).__name__
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ModelError(
            f"{architecture} with packed sequences does not support layers of type {', '.join(sorted(other))}"
        )
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        raise ModelError(f"{architecture} with packed sequences does not support attention that is not plain causal")
    if kwargs.get("attention_mask") is not None:
        raise ModelError(f"{architecture} with packed sequences does not support an attention mask")
    if local_size is None and getattr(config, "sliding_window", None) is None:
        config._attn_implementation = _PLAIN
    return None if local_size is None else torch.tensor(local_size)


def register_packed_attention(function: Callable[..., tuple[Tensor, None]] = packed_attention) -> None:
    """Make `function`, which is `packed_attention` or wraps it, the attention of models with PACKED_ATTENTION."""
    for name in (PACKED_ATTENTION, _PLAIN):
        AttentionInterface.register(name, function)


register_packed_attention()
AttentionMaskInterface.register(PACKED_ATTENTION, _packed_mask)

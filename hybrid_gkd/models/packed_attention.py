"""Run any Hugging Face decoder on sequences packed without padding into one row of T tokens.

Importing this module registers the attention PACKED_ATTENTION with transformers, in which each sequence attends
causally to itself only. The sequence boundaries are passed as keyword arguments of the model's forward, under the
names of transformers' FlashAttentionKwargs. On a GPU in bfloat16 or float16 it uses torch.nn.attention.varlen;
elsewhere scaled_dot_product_attention on a right-padded copy, which is exact as well, since the mask is causal.
Features that neither of them computes exactly raise a ModelError.

Not supported: key-value caches, cross-attention. A model that mixes tokens without calling the attention function
(state spaces, convolutions, custom attention) cannot be detected here: `LogprobModel` rejects it.

Shapes: B sequences, T packed tokens, L longest sequence, H heads (Hkv of keys and values), Dh head size, Dv of values.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from hybrid_gkd.compat.transformers import use_attention
from hybrid_gkd.errors import ModelError

PACKED_ATTENTION = "hybrid_gkd_packed"
_PLAIN = "hybrid_gkd_packed_plain"
"""Name for models whose masks are plain causal, which are not computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Concatenated sequences."""

    input_ids: Tensor
    """int64 [1, T]."""
    position_ids: Tensor
    """int64 [1, T], position of each token within its own sequence."""
    cu_seqlens: Tensor
    """int32 [B + 1]; sequence b occupies the tokens cu_seqlens[b] to cu_seqlens[b + 1]."""
    max_length: int

    def model_kwargs(self) -> dict[str, Any]:
        """Return all keyword arguments of the model's forward."""
        return {
            "input_ids": self.input_ids, "position_ids": self.position_ids,
            "attention_mask": None, "use_cache": False,
            "cu_seq_lens_q": self.cu_seqlens, "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length, "max_length_k": self.max_length,
        }


def pack(sequences: Sequence[np.ndarray], device: torch.device | str) -> PackedBatch:
    """Concatenate arrays of token ids. Raises ValueError for no, empty or not one-dimensional arrays."""
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
    """Return a copy on the device; a GPU copies after its queued work, without blocking the host."""
    tensor = torch.from_numpy(array)
    on_gpu = torch.device(device).type == "cuda"
    return tensor.pin_memory().to(device, non_blocking=True) if on_gpu else tensor.to(device)


def packed_and_alone(
    score: Callable[[list[np.ndarray]], Tensor], config: Mapping[str, Any], *, longest: int, num_ids: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the length of a preceding sequence, and `score` of a sequence alone and packed after the preceding one.

    The preceding sequence is short, then longer than each length at which the model's computation changes, up to
    `longest` tokens. `score` takes sequences to pack and returns values of the last; `config` is a config.json.
    """
    last = np.arange(min(9, longest)) % num_ids
    alone = score([last])
    for length in sorted({min(5, longest)} | {min(limit + 1, longest) for limit in length_settings(config)}):
        yield length, alone, score([np.arange(length) % num_ids, last])


def length_settings(config: Mapping[str, Any]) -> set[int]:
    """Return fields of a config.json, at any depth, with a number of tokens at which a layer's computation changes."""
    found = set[int]()
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= length_settings(value)
        elif type(value) is int and value > 0 and re.search("window|chunk_size|original_max_position", str(name)):
            found.add(value)
    return found


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, sliding_window: int | None = None, cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer for transformers: output [1, T, H, Dv], and None for the weights.

    Args:
        query: [1, H, T, Dh].
        key: [1, Hkv, T, Dh]; Hkv divides H (grouped-query attention).
        value: [1, Hkv, T, Dv].
        attention_mask: None, or the window of a sliding-window layer as `_packed_mask` returns it.
        scaling: factor of the scores; None is Dh ** -0.5.
        sliding_window: number of tokens that a token attends to, itself included; None is all.
        cu_seq_lens_q, max_length_q: see PackedBatch.

    Raises ModelError if the boundaries are missing, or the layer needs an unsupported feature.
    """
    where = type(module).__name__
    if cu_seq_lens_q is None or max_length_q is None:
        raise ModelError(
            f"{where} got no sequence boundaries: call the model with PackedBatch.model_kwargs(); if that is the case, "
            "this architecture does not pass keyword arguments to its attention"
        )
    features = ("softcap", "s_aux", "position_bias", "attention_bias", "indices", "cache")
    _refuse(where, {
        "an attention mask": attention_mask is not None and attention_mask.ndim > 0,
        **{name: kwargs.get(name) is not None for name in features},
        "dropout; set the config's attention dropout to 0": bool(kwargs.get("dropout")),
        "attention that is not causal": False in (kwargs.get("is_causal"), getattr(module, "is_causal", True)),
    })
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
        raise ModelError(
            f"{where} with packed sequences needs one row and as many keys as queries (no cache, no cross-attention); "
            f"got {shapes}"
        )
    window = sliding_window if sliding_window is not None or attention_mask is None else int(attention_mask)
    if window is not None and window >= max_length_q:
        window = None
    # Requirements of FlashAttention, which varlen_attn calls.
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[3] == value.shape[3] <= 256
    attend = _varlen if flash else _padded
    return attend(query, key, value, cu_seq_lens_q, max_length_q, scaling, window), None


def _refuse(where: str, features: dict[str, bool]) -> None:
    """Raise ModelError for the first present feature."""
    for feature, present in features.items():
        if present:
            raise ModelError(f"{where} with packed sequences does not support {feature}")


def _padded(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_length: int, scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute [1, H, T, Dh] -> [B, H, L, Dh] -> attention -> [1, T, H, Dv]."""
    num_tokens, num_sequences = query.shape[2], len(cu_seqlens) - 1
    sequence = torch.arange(num_sequences, device=query.device)
    sequence = sequence.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
    position = torch.arange(num_tokens, device=query.device) - cu_seqlens[sequence]

    def unpack(packed: Tensor) -> Tensor:
        padded = packed.new_zeros(num_sequences, max_length, packed.shape[1], packed.shape[3])
        return padded.index_put((sequence, position), packed.squeeze(0).transpose(0, 1)).transpose(1, 2)

    mask = None
    if window is not None:
        mask = torch.ones(max_length, max_length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    output = scaled_dot_product_attention(
        unpack(query), unpack(key), unpack(value), attn_mask=mask, is_causal=mask is None, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)[sequence, position][None]


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_length: int, scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute [1, H, T, Dh] -> [1, T, H, Dv] without padding."""
    # Not tensor[0], whose gradient would be copied into a tensor of zeros.
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    attention, asks_for_gqa = _varlen_function()
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if asks_for_gqa and query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    return attention(query, key, value, cu_seqlens, cu_seqlens, max_length, max_length, **options)[None]


@functools.cache
def _varlen_function() -> tuple[Callable[..., Any], bool]:
    """Return torch's varlen_attn, and whether it has the argument enable_gqa; torch 2.11 does not need it."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def _packed_mask(*, config: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Tensor | None:
    """Check the kind of attention and build no mask; transformers calls it once per layer type and forward.

    Some sliding-window models (phimoe) declare their window only here; it is returned as a 0-dimensional tensor on the
    host. Before each call transformers synchronizes with the GPU to read the position ids. A model without windows, for
    which the result is always None, is therefore checked in its first forward only.
    """
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    _refuse(type(config).__name__, {
        f"layers of type {', '.join(sorted(other))}": bool(other),
        "attention that is not plain causal": use_vmap or "allow_is_bidirectional_skip" in kwargs,
        "an attention mask": kwargs.get("attention_mask") is not None,
    })
    if local_size is None and getattr(config, "sliding_window", None) is None:
        use_attention(config, _PLAIN)
    return None if local_size is None else torch.tensor(local_size)


def register_packed_attention(function: Callable[..., tuple[Tensor, None]] = packed_attention) -> None:
    """Register `packed_attention`, or a function around it, as the attention of models with PACKED_ATTENTION."""
    for name in (PACKED_ATTENTION, _PLAIN):
        AttentionInterface.register(name, function)


register_packed_attention()
AttentionMaskInterface.register(PACKED_ATTENTION, _packed_mask)

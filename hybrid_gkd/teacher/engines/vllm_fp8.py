"""Layers of a vLLM teacher whose products take fp8: what they compute and its rounding to fp8 as one kernel.

A product with weights in fp8 rounds its input to fp8 too, every token by its own largest value. vLLM does so in a
kernel of its own, so that what a norm or a gated MLP computes is written in bfloat16, read twice, and written again.
`install` lets these layers round their result themselves, in vllm_fp8_triton.py, and hand it on as vLLM's
`QuantizedActivation`. They compute in float32 and round once instead of twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hybrid_gkd.compat.vllm import versions as vllm_compat

logger = logging.getLogger(__name__)

TRIED = ((0, 26),)
"""Versions of vLLM whose layers were tried with it on a GPU."""
LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Of vLLM, which hand on the results of their norms and gates to one product each, and read nothing else of them."""


def install(model: nn.Module) -> int:
    """Let the layers of vLLM's `model` round for the products that follow; how many of its products are given fp8.

    0 where they do not take it: products in more bits, or in fp8 of another kind. Where they might and vLLM is of a
    version that this was not tried with, that is logged. Nothing may be compiled.
    """
    layers: list[Any] = [layer for layer in model.modules() if type(layer).__name__ in LAYERS]
    if not any(_kernel(layer.mlp.down_proj) for layer in layers):
        return 0
    if reason := vllm_compat.untried(TRIED):
        logger.info("fp8: vLLM rounds in kernels of its own: %s", reason)
        return 0
    pairs = [pair for layer in layers for pair in _pairs(layer)]
    for module, forward, product in pairs:
        module.forward = functools.partial(forward, module.forward, module)
        key = _input_key(product)
        _kernel(product).input_quant_key = lambda key=key: key
    return len(pairs)


def _pairs(layer: Any) -> list[tuple[Any, Callable[..., Any], Any]]:
    """Modules of a decoder layer whose result a product in fp8 takes: the module, what takes its place, the product."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    found: list[tuple[Any, Callable[..., Any], Any]] = []
    before_attention = layer.input_layernorm, layer.self_attn.qkv_proj
    before_mlp = layer.post_attention_layernorm, layer.mlp.gate_up_proj
    for norm, product in (before_attention, before_mlp):
        if type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None and _input_key(product):
            found.append((norm, _normalised, product))
    gate, product = layer.mlp.act_fn, layer.mlp.down_proj
    if type(gate) is SiluAndMul and _input_key(product):
        found.append((gate, _gated, product))
    return found


def _kernel(product: Any) -> Any:
    """Of a product in fp8; None in more bits."""
    return getattr(getattr(product, "quant_method", None), "fp8_linear", None)


def _input_key(product: Any) -> Any:
    """vLLM's name of fp8 with a scale for each token, if that is what a product rounds its input to; else None."""
    from vllm.model_executor.kernels.linear.scaled_mm import CutlassFP8ScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

    kernel = _kernel(product)
    if type(kernel) is not CutlassFP8ScaledMMLinearKernel:
        return None
    return kFp8DynamicTokenSym if kernel.config.activation_quant_key == kFp8DynamicTokenSym else None


def _normalised(own: Callable[..., Any], norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """In the place of a norm's `own` forward, where it gets a residual; that becomes the sum, in place."""
    if residual is None:
        return own(x)
    from hybrid_gkd.teacher.engines import vllm_fp8_triton

    values, scales = vllm_fp8_triton.add_norm(x, residual, norm.weight, norm.variance_epsilon)
    return _activation(values, scales, x), residual


def _gated(_own: Callable[..., Any], _gate: Any, x: Tensor) -> Any:
    """In the place of the forward of silu(first half) * second half."""
    from hybrid_gkd.teacher.engines import vllm_fp8_triton

    values, scales = vllm_fp8_triton.gate(x)
    return _activation(values, scales, x)


def _activation(values: Tensor, scales: Tensor, x: Tensor) -> Any:
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

    return QuantizedActivation(values, scales, x.dtype, values.shape, kFp8DynamicTokenSym)

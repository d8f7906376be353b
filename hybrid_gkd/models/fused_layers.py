"""Layers of Hugging Face models computed by one kernel where the architecture's own code takes several.

    fuse_layers(model)      # right after it was built: its parameters and their names stay

Root-mean-square norms, the product of a SiLU gate and another factor, and rotary position embeddings are memory traffic
and launches, nothing else. On a GPU each becomes one kernel forward and one backward (fused_layers_triton.py), which
computes in float32 and rounds once, at the end. Residuals are added in the kernels of the norms, and projections of the
same input are one step of autograd, so that the products add up that input's gradient. Elsewhere, and where
torch.compile fuses, only the norms change: they are torch's. What a layer computes is tried out, so that one which
computes something else stays as it is.

Shapes: T packed tokens, H heads, Dh head size, D hidden size, I intermediate size.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybrid_gkd.models.usual_layers import PROJECTIONS, is_gated_mlp, is_residual_block, is_rms_norm, is_rotary

LARGEST_NORM = 16384
"""Widest row that a program of the norm's kernels holds at once."""
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What layers call projections that read the same input."""
ROTARY = "apply_rotary_pos_emb"
"""What transformers calls the function in the module of each architecture."""


def fuse_layers(model: nn.Module) -> None:
    """Let norms, gated MLPs and rotary embeddings be one kernel each, and what is around them less, where usual."""
    fuse_norms(model)
    fuse_gates(model)
    fuse_rotary(model)
    fuse_residuals(model)
    fuse_projections(model)


def fuse_norms(model: nn.Module) -> None:
    """Put `RMSNorm` in the place of the architecture's own, which takes eight kernels. Parameters keep their names."""
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if type(module).__name__.endswith("RMSNorm") and isinstance(eps, float) and is_rms_norm(module, eps):
            norm = RMSNorm(module.weight.shape, eps, device="meta")
            norm.weight = module.weight
            model.set_submodule(name, norm)


def fuse_gates(model: nn.Module) -> None:
    """Give modules that compute down_proj(silu(gate_proj(x)) * up_proj(x)) a class whose forward does it."""
    for module in model.modules():
        if all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS):
            module.__class__ = _gated_class(type(module), module)


def fuse_rotary(model: nn.Module) -> None:
    """Replace the function that rotates queries and keys in the modules that define the model's layers.

    It serves all models of these architectures in this process.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        own = getattr(sys.modules[name], ROTARY, None)
        if callable(own) and not isinstance(own, functools.partial) and is_rotary(own):
            setattr(sys.modules[name], ROTARY, functools.partial(_rotary, own))


def fuse_residuals(model: nn.Module) -> None:
    """Give blocks x + mlp(norm(x)) of x = x + attention(norm(x)), of `RMSNorm` and `GatedMLP`, a class that does it."""
    parts = {
        "self_attn": nn.Module, "mlp": GatedMLP, "input_layernorm": RMSNorm, "post_attention_layernorm": RMSNorm,
    }  # fmt: skip
    for module in model.modules():
        fits = all(isinstance(getattr(module, name, None), part) for name, part in parts.items())
        if fits and not isinstance(module, ResidualBlock) and is_residual_block(module):
            kind = type(module)
            if kind not in _residual_classes:
                _residual_classes[kind] = type(kind.__name__, (ResidualBlock, kind), {})
            module.__class__ = _residual_classes[kind]


def fuse_projections(model: nn.Module) -> None:
    """Let `SharedLinear` compute linear layers that read the same input."""
    for module in model.modules():
        for names in SAME_INPUT:
            found: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(each) is nn.Linear for each in found) and len({each.in_features for each in found}) == 1:
                siblings = Siblings(found)
                for place, each in enumerate(found):
                    each.__class__ = SharedLinear
                    each.siblings, each.place = siblings, place


def forget_projections(model: nn.Module) -> None:
    """After a forward pass that was given up: drop results that were not asked for, and what they keep in memory."""
    for module in model.modules():
        if isinstance(module, SharedLinear):
            module.siblings.forget()


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_kernel(x):
            return super().forward(x)
        normalised: Tensor = _Norm.apply(x, self.weight, self.eps)
        return normalised

    def has_kernel(self, x: Tensor) -> bool:
        """Whether the kernels compute it."""
        fits = len(self.normalized_shape) == 1 and x.shape[-1] <= LARGEST_NORM and x.dtype == self.weight.dtype
        return fits and _has_kernels(x)


class GatedMLP(nn.Module):
    """What a class of `fuse_gates` has before the architecture's own."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if not _has_kernels(x):
            own: Tensor = super().forward(x)
            return own
        projected: Tensor = self.down_proj(self.gated(x))
        return projected

    def gated(self: Any, x: Tensor) -> Tensor:
        """What the last projection reads."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        product: Tensor = _Gate.apply(gate.contiguous(), up.contiguous())
        return product

    def added(self: Any, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), of the same shape; where the last projection is a plain one, it adds as well."""
        down = self.down_proj
        if not _has_kernels(x) or type(down) is not nn.Linear or getattr(down, "bias", None) is not None:
            return residual + self(x)
        gated = self.gated(x)
        rows = torch.addmm(residual.flatten(0, -2), gated.flatten(0, -2), down.weight.T)
        return rows.view(residual.shape)


class ResidualBlock(nn.Module):
    """What a class of `fuse_residuals` has before the architecture's own."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        norms = self.input_layernorm, self.post_attention_layernorm
        if args or not all(norm.has_kernel(hidden_states) for norm in norms):
            own: Tensor = super().forward(hidden_states, *args, **kwargs)
            return own
        (first, eps), (second, other_eps) = ((norm.weight, norm.eps) for norm in norms)
        normalised, residual = _AddNorm.apply(hidden_states, None, first, eps)
        attended, _ = self.self_attn(hidden_states=normalised, **kwargs)
        normalised, residual = _AddNorm.apply(attended, residual, second, other_eps)
        result: Tensor = self.mlp.added(residual, normalised)
        return result


class SharedLinear(nn.Linear):
    """One of several linear layers that read the same input: the first that is called computes all of them."""

    siblings: Siblings
    place: int
    """Among them."""

    def forward(self, x: Tensor) -> Tensor:
        if not _has_kernels(x) or self.siblings.apart:
            return super().forward(x)
        return self.siblings.project(self.place, x)


class Siblings:
    """The results for the newest input of `SharedLinear` layers, until each of them is asked for."""

    def __init__(self, layers: list[Any]):
        self.layers = layers
        self.apart = False
        """Whether they turned out to read different inputs."""
        self._input: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    def project(self, place: int, x: Tensor) -> Tensor:
        """The result of the layer at this place."""
        if x is not self._input:
            self.apart = bool(self._results)
            tensors = [tensor for layer in self.layers for tensor in (layer.weight, layer.bias)]
            self._input, self._results = x, dict(enumerate(_Project.apply(x, *tensors)))
        result = self._results.pop(place)
        if not self._results:
            self.forget()
        return result

    def forget(self) -> None:
        self._input, self._results = None, {}


_residual_classes: dict[type, type] = {}
"""Class of an architecture -> one with `ResidualBlock` before it."""
_gated_classes: dict[type, type] = {}
"""Class of an architecture -> one with `GatedMLP` before it, or itself if it computes something else."""


def _gated_class(kind: type, module: nn.Module) -> type:
    if kind not in _gated_classes:
        fits = not issubclass(kind, GatedMLP) and is_gated_mlp(module)
        _gated_classes[kind] = type(kind.__name__, (GatedMLP, kind), {}) if fits else kind
    return _gated_classes[kind]


def _rotary(own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    """See `is_rotary`; what does not have the usual shapes goes to the architecture's own function."""
    fits = not args and not kwargs and q.ndim == k.ndim == 4 and cos.ndim == sin.ndim == 3
    if fits:
        tokens = (q.shape[0], q.shape[2])
        fits = (k.shape[0], k.shape[2]) == tokens and q.shape[3] == k.shape[3] and q.dtype == k.dtype == cos.dtype
        fits = fits and cos.shape == sin.shape == (*tokens, q.shape[3]) and cos.is_contiguous() and sin.is_contiguous()
    if not fits or not _has_kernels(q):
        return own(q, k, cos, sin, *args, **kwargs)
    return _Rotary.apply(q, k, cos, sin)


def _has_kernels(x: Tensor) -> bool:
    """Whether the kernels compute for this tensor: on a GPU, in at most float32, and nothing else fuses."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and not torch.compiler.is_compiling()


def _kernels() -> Any:
    from hybrid_gkd.models import fused_layers_triton  # a machine without a GPU may have no Triton

    return fused_layers_triton


class _Norm(torch.autograd.Function):
    """Of x [..., D] and weight [D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        result, scale, _ = _kernels().norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        return *_kernels().norm_backward(upstream.contiguous(), x, weight, scale), None


class _AddNorm(torch.autograd.Function):
    """The norm of x + residual, or without one of x, and that sum; x and residual are [..., D], weight is [D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        other = None if residual is None else residual.contiguous()
        result, scale, total = _kernels().norm(x.contiguous(), weight, eps, other)
        ctx.save_for_backward(total, weight, scale)
        ctx.adds = residual is not None
        return result, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, beside: Tensor) -> tuple[Tensor | None, ...]:
        grad, grad_weight = _kernels().norm_backward(upstream.contiguous(), *ctx.saved_tensors, beside.contiguous())
        return grad, grad if ctx.adds else None, grad_weight, None


class _Project(torch.autograd.Function):
    """The products of x [..., D] with several weights [n, D], each followed by its bias [n] or None among `tensors`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = tensors[::2], tensors[1::2]
        ctx.save_for_backward(x, *weights)
        pairs = zip(weights, biases, strict=True)
        return tuple(nn.functional.linear(x, weight, bias) for weight, bias in pairs)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_input, *of_tensors = ctx.needs_input_grad
        rows, slopes = x.reshape(-1, x.shape[-1]), [each.reshape(-1, each.shape[-1]).contiguous() for each in upstream]
        grad = slopes[0] @ weights[0] if of_input else None
        for slope, weight in zip(slopes[1:], weights[1:], strict=True):
            if grad is not None:
                grad.addmm_(slope, weight)
        found: list[Tensor | None] = [slope.T @ rows if of_tensors[2 * i] else None for i, slope in enumerate(slopes)]
        biased = [i for i in range(len(slopes)) if of_tensors[2 * i + 1]]
        sums = dict(zip(biased, _kernels().column_sums([slopes[i] for i in biased]), strict=True)) if biased else {}
        of_all = [each for i, of_weight in enumerate(found) for each in (of_weight, sums.get(i))]
        return None if grad is None else grad.view(x.shape), *of_all


class _Gate(torch.autograd.Function):
    """silu(gate) * up, both [..., I]; keeps these two alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _kernels().gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        return _kernels().gated_backward(upstream.contiguous(), *ctx.saved_tensors)


class _Rotary(torch.autograd.Function):
    """Of queries [B, H, T, Dh] and keys [B, Hkv, T, Dh], by cos and sin [B, T, Dh], which get no gradient.

    The results are laid out as [B, T, H, Dh], as attention over packed tokens reads them.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _kernels().rotate(q, k, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        return *_kernels().rotate(grad_q, grad_k, *ctx.saved_tensors, backward=True), None, None

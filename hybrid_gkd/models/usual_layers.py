"""What layers of an architecture compute, tried out with small numbers on the CPU."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""What gated MLPs call theirs."""


@torch.no_grad()
def is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Whether the output of a module is x / sqrt(mean(x^2) + eps) * weight."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or len(inspect.signature(module.forward).parameters) != 1:
        return False
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    weight = trial.get_parameter("weight")
    weight.copy_(torch.linspace(0.5, 1.5, weight.numel()).reshape(weight.shape))
    x = torch.linspace(-1, 1, 3 * weight.numel()).reshape(3, *weight.shape) * math.sqrt(eps)  # so that eps counts
    return torch.allclose(trial(x), nn.functional.rms_norm(x, weight.shape, weight, eps), rtol=1e-5)


@torch.no_grad()
def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module computes down_proj(silu(gate_proj(x)) * up_proj(x)), by one with small projections."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    trial: Any = copy.copy(module)
    trial._modules = dict(module._modules)
    weights = [torch.linspace(-1, 1 + i, 12).reshape(3, 4) for i in range(3)]
    for name, weight in zip(PROJECTIONS, (weights[0], weights[1], weights[2].T), strict=True):
        trial._modules[name] = projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="cpu")
        projection.weight.copy_(weight)
    x = torch.linspace(-2, 3, 20).reshape(5, 4)
    try:
        found = trial(x)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # more than three projections: not the usual one
        return False
    gated = nn.functional.silu(x @ weights[0].T) * (x @ weights[1].T)
    return isinstance(found, Tensor) and torch.allclose(found, gated @ weights[2], rtol=1e-5)


class _Attention(nn.Module):
    """In the place of an attention layer: keeps what it was called with."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight, self.given = weight, dict[str, Any]()

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        self.given = kwargs
        return hidden_states @ self.weight, None


@torch.no_grad()
def is_residual_block(module: Any) -> bool:
    """Whether a block computes x + mlp(norm(x)) of x = x + attention(norm(x)), and calls the attention with all it got.

    By one whose `self_attn`, `mlp`, `input_layernorm` and `post_attention_layernorm` are small.
    """
    norms = ("input_layernorm", "post_attention_layernorm")
    trial = copy.copy(module)
    small: dict[str, Any] = {name: nn.Linear(4, 4, bias=False, device="cpu") for name in (*norms, "mlp")}
    for number, each in enumerate(small.values()):
        each.weight.copy_(torch.linspace(-1, 1 + number, 16).reshape(4, 4))
    small["self_attn"] = _Attention(torch.linspace(-2, 1, 16).reshape(4, 4))
    trial._modules = module._modules | small
    x, taken = torch.linspace(-2, 3, 20).reshape(1, 5, 4), inspect.signature(module.forward).parameters.values()
    names = ["cu_seq_lens_q" if each.kind is inspect.Parameter.VAR_KEYWORD else each.name for each in taken]
    given = {name: name for name in names if name != "hidden_states"}
    try:
        found = type(module).forward(trial, x, **given)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # something else is computed with them
        return False
    if not isinstance(found, Tensor) or trial.self_attn.given != given:
        return False
    attended = x + trial.self_attn(small[norms[0]](x))[0]
    return torch.allclose(found, attended + small["mlp"](small[norms[1]](attended)), rtol=1e-5)


@torch.no_grad()
def is_rotary(function: Callable[..., Any]) -> bool:
    """Whether a function (q, k, cos, sin) returns x * cos + (-second half of x, first half of x) * sin of q and k."""
    q, k = torch.linspace(-1, 2, 48).reshape(1, 2, 3, 8), torch.linspace(-3, 1, 24).reshape(1, 1, 3, 8)
    cos, sin = torch.linspace(-1, 1, 24).reshape(1, 3, 8), torch.linspace(0.5, -1, 24).reshape(1, 3, 8)
    try:
        found = function(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError):  # other arguments, other shapes
        return False

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    pair = isinstance(found, tuple) and len(found) == 2
    return pair and all(
        got.shape == want.shape and torch.allclose(got, rotated(want)) for got, want in zip(found, (q, k), strict=True)
    )

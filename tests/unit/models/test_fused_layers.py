"""Fused layers: recognised where they are the usual ones, and kernels that compute what the architectures do."""

import copy
import functools
import gc
import statistics
import sys
import weakref

import pytest
import torch
from kernels import compiles_for_a_gpu, interpreted
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_gkd.models.fused_layers import (
    ROTARY,
    GatedMLP,
    ResidualBlock,
    RMSNorm,
    SharedLinear,
    Siblings,
    _AddNorm,
    _Gate,
    _kernels,
    _Norm,
    _Project,
    _Rotary,
    forget_projections,
    fuse_layers,
    fuse_projections,
)  # fmt: skip

NUM_TOKENS = 11


def make_model(model_type, **fields):
    config = AutoConfig.for_model(
        model_type, vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1, bos_token_id=None, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def module_of(model):
    return sys.modules[type(model).__module__]


def rotary_of(model):
    """The architecture's own function, also where a model of it was fused in this process before."""
    found = getattr(module_of(model), ROTARY)
    return found.args[0] if isinstance(found, functools.partial) else found


@pytest.mark.parametrize(
    ("model_type", "norms", "gates", "blocks", "shared", "rotary"),
    [
        ("qwen2", 5, 2, 2, 10, True), ("llama", 5, 2, 2, 10, True), ("qwen3", 9, 2, 2, 10, True),
        ("mistral", 5, 2, 2, 10, True),
        ("granite", 5, 2, 0, 10, True),  # multiplies what is added to the residual
        ("olmo2", 9, 2, 0, 10, True),  # norms behind attention and MLP
        ("gemma", 0, 0, 0, 10, True),  # adds 1 to the weights of its norms; its gate is GELU
        ("phi3", 5, 0, 0, 0, True),  # one matrix for gate and factor, and for queries, keys and values
        ("glm", 5, 0, 0, 6, False),  # one matrix for gate and factor; turns neighbouring numbers
        ("stablelm", 0, 2, 0, 10, True),  # layer norms of torch; rotates a part of a head
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_usual_layers_are_recognised_and_compute_the_same(
    model_type, norms, gates, blocks, shared, rotary, monkeypatch
):
    model = make_model(model_type, **{"residual_multiplier": 0.5} if model_type == "granite" else {})
    own, names, ids = rotary_of(model), list(model.state_dict()), torch.arange(20)[None]
    monkeypatch.setattr(module_of(model), ROTARY, own)
    expected = model(ids).logits
    for _ in range(2):  # a second model of the architecture finds the function replaced
        fuse_layers(model)
    modules = list(model.modules())
    assert sum(type(module) is RMSNorm for module in modules) == norms
    assert sum(isinstance(module, GatedMLP) for module in modules) == gates
    assert sum(isinstance(module, ResidualBlock) for module in modules) == blocks
    assert sum(type(module) is SharedLinear for module in modules) == shared
    now = getattr(module_of(model), ROTARY)
    assert (now is not own) == rotary
    assert not rotary or now.args == (own,)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(ids).logits, expected)


def test_layers_that_read_the_same_input_are_computed_at_once_and_others_by_themselves(monkeypatch):
    monkeypatch.setattr("hybrid_gkd.models.fused_layers._has_kernels", lambda x: True)
    layers = [torch.nn.Linear(4, width, bias=False) for width in (3, 2)]
    plain, siblings = copy.deepcopy(layers), Siblings(layers)
    for place, each in enumerate(layers):
        each.__class__, each.siblings, each.place = SharedLinear, siblings, place
    one, other = (torch.randn(1, 5, 4, requires_grad=True) for _ in range(2))
    for inputs, apart in (((one, one), False), ((other, one), True), ((one, one), True)):
        found, want = ([layer(x) for layer, x in zip(each, inputs, strict=True)] for each in (layers, plain))
        assert siblings.apart == apart
        trained = [*set(inputs), *(layer.weight for layer in layers)]
        expected = [*set(inputs), *(layer.weight for layer in plain)]
        got = torch.autograd.grad(sum(each.square().sum() for each in found), trained)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(got, torch.autograd.grad(sum(each.square().sum() for each in want), expected))


def test_results_that_nobody_asks_for_keep_nothing_in_memory_once_they_are_forgotten(monkeypatch):
    """Of a forward pass that ran out of memory between two projections: its whole graph hangs on them."""
    monkeypatch.setattr("hybrid_gkd.models.fused_layers._has_kernels", lambda x: True)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 3, bias=False) for name in ("q_proj", "k_proj", "v_proj")})
    fuse_projections(model)
    hidden = torch.randn(5, 4, requires_grad=True) * 2
    kept = weakref.ref(hidden)
    model["q_proj"](hidden)
    del hidden
    assert kept() is not None
    forget_projections(model)
    gc.collect()
    assert kept() is None
    other = torch.randn(5, 4)
    torch.testing.assert_close(model["k_proj"](other), other @ model["k_proj"].weight.T)
    assert not model["k_proj"].siblings.apart


def exact_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def add_norm(x, residual, weight):
    return torch.cat(_AddNorm.apply(x, residual, weight, 1e-5), -1)


def exact_add_norm(x, residual, weight):
    return torch.cat([exact_norm(x + residual, weight), x + residual], -1)


def project(x, *tensors):
    return torch.cat(_Project.apply(x, *tensors), -1)


def exact_project(x, *tensors):
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return torch.cat([torch.nn.functional.linear(x, *pair) for pair in pairs], -1)


def exact_rotary(q, k, cos, sin):
    def rotated(x):
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    return torch.cat([rotated(q), rotated(k)], 1)


def rotate(q, k, cos, sin):
    return torch.cat(_Rotary.apply(q, k, cos, sin), 1)


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def heads(number, size):
    """[B, H, T, Dh] as a projection leaves it: a view of [B, T, H Dh]."""
    return normal(2, NUM_TOKENS, number * size).view(2, NUM_TOKENS, number, size).transpose(1, 2)


def cases():
    """Function of the kernels, the same in float64 and plain torch, its inputs, how many of them have gradients."""
    for width in (64, 896, 5000):
        yield lambda x, w: _Norm.apply(x, w, 1e-5), exact_norm, [normal(3, NUM_TOKENS, width), normal(width)], 2
    yield lambda x, w: _Norm.apply(x, w, 1e-5), exact_norm, [normal(NUM_TOKENS, 6, 128).transpose(0, 1), normal(128)], 2
    for width in (64, 896):
        inputs = [normal(3, NUM_TOKENS, width), normal(3, NUM_TOKENS, width), normal(width)]
        yield add_norm, exact_add_norm, inputs, 3
        inputs = [normal(3, NUM_TOKENS, width), normal(width)]
        yield lambda x, w: add_norm(x, None, w), lambda x, w: exact_add_norm(x, 0, w), inputs, 2
    for rows in (NUM_TOKENS, 150):
        tensors = [tensor for width in (130, 64, 5) for tensor in (normal(width, 48), normal(width))]
        yield project, exact_project, [normal(2, rows, 48), *tensors], 7
    inputs = [normal(2, NUM_TOKENS, 48), normal(130, 48), normal(64, 48)]
    yield lambda x, a, b: project(x, a, None, b, None), lambda x, a, b: exact_project(x, a, None, b, None), inputs, 3
    for shape in ((1, NUM_TOKENS, 333), (1, 5, 4864)):
        yield _Gate.apply, lambda g, u: torch.nn.functional.silu(g) * u, [normal(*shape), normal(*shape)], 2
    for number, keys, size in ((14, 2, 64), (3, 1, 80), (4, 4, 8)):
        angles = [normal(2, NUM_TOKENS, size) for _ in range(2)]
        yield rotate, exact_rotary, [heads(number, size), heads(keys, size), *angles], 2


def compare(device, dtype, tolerance):
    """The largest error of any output or gradient, each as a share of its largest value; raises beyond `tolerance`."""
    torch.manual_seed(0)
    for number, (function, exact, inputs, trained) in enumerate(cases()):
        given = [x.to(device, dtype) for x in inputs]
        copies = [x.double() for x in given]
        for tensor in (*given[:trained], *copies[:trained]):
            tensor.requires_grad_()
        found, want = function(*given), exact(*copies)
        assert found.dtype == dtype
        direction = torch.randn(want.shape, dtype=torch.float64).to(device, dtype)
        found = [found, *torch.autograd.grad(found, given[:trained], direction)]
        want = [want, *torch.autograd.grad(want, copies[:trained], direction.double())]
        for which, (got, value) in enumerate(zip(found, want, strict=True)):
            assert got.shape == value.shape
            error = (got.double() - value).abs().max() / value.abs().max()
            assert error < tolerance, f"case {number}, result {which}: {error}"


def compare_models(device, dtype, model_type):
    """The gradients of models with fused layers are no further from those in float64 than without them.

    In the median of several weights: with one of them either way may be a fifth further away by chance.
    """
    model = make_model(model_type).to(device, dtype)
    ids = torch.arange(2 * NUM_TOKENS, device=device).reshape(2, NUM_TOKENS)
    before, own = getattr(module_of(model), ROTARY), rotary_of(model)
    setattr(module_of(model), ROTARY, own)
    models = {"fused": copy.deepcopy(model), "without": model, "exact": copy.deepcopy(model).double()}
    fuse_layers(models["fused"])
    of_fused = getattr(module_of(model), ROTARY)
    ratios = []
    try:
        for _ in range(9):
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            gradients, distances = {}, {}
            for name, each in models.items():
                each.load_state_dict(model.state_dict())
                setattr(module_of(model), ROTARY, of_fused if name == "fused" else own)
                loss = each(ids).logits.double().log_softmax(-1)[..., 7].sum()
                gradients[name] = torch.autograd.grad(loss, list(each.parameters()))
            for name in ("fused", "without"):
                pairs = zip(gradients[name], gradients["exact"], strict=True)
                distances[name] = sum(float((got.double() - want).square().sum()) for got, want in pairs)
            ratios.append((distances["fused"] / distances["without"]) ** 0.5)
    finally:
        setattr(module_of(model), ROTARY, before)
    assert 0 < statistics.median(ratios) <= 1.1, ratios


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 8e-3)])
def test_kernels_under_the_interpreter(dtype, tolerance):
    pytest.importorskip("triton")
    assert interpreted(__file__, dtype, tolerance) == ["same"]


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    kernels = _kernels()
    tensors = (
        "x", "weight", "result", "upstream", "grad", "gate", "up", "grad_gate", "grad_up", "q", "k", "cos", "sin",
        "q_result", "k_result", "residual", "total", "beside",
    )  # fmt: skip
    types = dict.fromkeys(tensors, "*bf16") | {"eps": "fp32", "scale": "*fp32", "sums": "*fp32"}
    norm = {"ROWS": 2, "BLOCK": 1024}
    rotary = {"Q_BLOCK": 16, "K_BLOCK": 2, "HALF_BLOCK": 32}
    for kernel, constants in (
        *((kernels._norm, {"ADDS": adds, **norm}) for adds in (True, False)),
        *((kernels._norm_backward, {"ADDS": adds, **norm}) for adds in (True, False)),
        (kernels._column_sums, {"ROWS": kernels.SUM_ROWS, "BLOCK": kernels.SUM_COLUMNS}),
        (kernels._gated, {"BLOCK": 2048}), (kernels._gated_backward, {"BLOCK": 2048}),
        (kernels._rotate, {"BACKWARD": False, **rotary}), (kernels._rotate, {"BACKWARD": True, **rotary}),
    ):  # fmt: skip
        assert compiles_for_a_gpu(kernel, tmp_path, monkeypatch, constants=constants, types=types)


if __name__ == "__main__":
    import hybrid_gkd.models.fused_layers as fused

    fused._has_kernels = lambda x: x.dtype != torch.float64
    compare("cpu", getattr(torch, sys.argv[1]), float(sys.argv[2]))
    for kind in ("qwen2", "qwen3") if sys.argv[1] == "float32" else ():  # the interpreter cuts bfloat16 off
        compare_models("cpu", torch.float32, kind)
    print("same")

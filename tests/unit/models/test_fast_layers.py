"""Layers that other libraries compute: which are replaced, and that they compute what the architecture's own do."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_gkd.models import fast_layers
from hybrid_gkd.models.fast_layers import use_liger, use_torch_norms


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


@pytest.mark.parametrize(
    ("model_type", "norms"),
    [
        ("qwen2", 5), ("llama", 5), ("qwen3", 9), ("mistral", 5), ("granite", 5), ("olmo2", 9), ("phi3", 5),
        ("gemma", 0),  # adds 1 to its weights
        ("stablelm", 0),  # layer norms of torch
    ],
)  # fmt: skip
def test_usual_norms_are_torchs_and_compute_the_same(model_type, norms):
    model, ids = make_model(model_type), torch.arange(20)[None]
    names, expected = list(model.state_dict()), model(ids).logits
    for _ in range(2):
        use_torch_norms(model)
        assert sum(type(module) is torch.nn.RMSNorm for module in model.modules()) == norms
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(ids).logits, expected)


@pytest.fixture
def patched(monkeypatch):
    """Return the calls of a stand-in for Liger."""
    came, parts = [], ModuleType("liger_kernel.transformers.monkey_patch")

    def apply(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, model=None):
        came.append((rope, cross_entropy, fused_linear_cross_entropy, rms_norm, model))

    parts.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": apply}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parts.__name__, parts)
    monkeypatch.setattr(fast_layers.importlib.util, "find_spec", lambda name: object())
    return came


def test_liger_computes_layers_and_no_loss(patched):
    model = make_model("qwen2")
    assert use_liger(model) is None
    assert patched == [(True, False, False, True, model)]


@pytest.mark.parametrize(("kind", "gate"), [("granite", "silu"), ("qwen2", "gelu")])
def test_what_liger_would_compute_otherwise_stays(kind, gate, patched):
    model = SimpleNamespace(config=SimpleNamespace(model_type=kind, hidden_act=gate))
    assert use_liger(model) == f"Liger has no kernels for {kind} with {gate}"
    assert not patched


def test_without_liger_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(fast_layers.importlib.util, "find_spec", lambda name: None)
    assert use_liger(None) == "liger-kernel is not installed: pip install hybrid_gkd[liger]"

"""Models with Liger's kernels on a GPU: as exact as without them, and less memory kept.

    bash tests/run.sh -m gpu tests/gpu/test_fast_layers_on_gpu.py
"""

import copy
import statistics
import sys

import pytest
import torch

from hybrid_gkd.models.fast_layers import use_liger, use_torch_norms
from tests.unit.models.test_fast_layers import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
pytest.importorskip("liger_kernel")
ROTARY = "apply_rotary_pos_emb"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_gradients_are_no_further_from_float64(model_type, dtype, monkeypatch):
    """In the median of several weights: with one of them either way may be a fifth further away by chance."""
    model = make_model(model_type).to("cuda", dtype)
    module, ids = sys.modules[type(model).__module__], torch.arange(22, device="cuda").reshape(2, 11)
    own = getattr(module, ROTARY)
    monkeypatch.setattr(module, ROTARY, own)
    models = {"liger": copy.deepcopy(model), "without": model, "exact": copy.deepcopy(model).double()}
    use_torch_norms(models["liger"])
    assert use_liger(models["liger"]) is None
    of_liger = getattr(module, ROTARY)
    assert of_liger is not own
    ratios = []
    for _ in range(9):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        gradients, distances = {}, {}
        for name, each in models.items():
            each.load_state_dict(model.state_dict())
            setattr(module, ROTARY, of_liger if name == "liger" else own)
            loss = each(ids).logits.double().log_softmax(-1)[..., 7].sum()
            gradients[name] = torch.autograd.grad(loss, list(each.parameters()))
        for name in ("liger", "without"):
            pairs = zip(gradients[name], gradients["exact"], strict=True)
            distances[name] = sum(float((got.double() - want).square().sum()) for got, want in pairs)
        ratios.append((distances["liger"] / distances["without"]) ** 0.5)
    assert 0 < statistics.median(ratios) <= 1.1, ratios


def test_less_is_kept_for_the_backward_pass(monkeypatch):
    """The gate after its activation function is not kept."""
    num_tokens, kept = 2048, []
    ids = torch.randint(0, 300, (1, num_tokens), device="cuda")
    for liger in (False, True):
        model = make_model("mistral").to("cuda", torch.bfloat16)
        module = sys.modules[type(model).__module__]
        monkeypatch.setattr(module, ROTARY, getattr(module, ROTARY))
        if liger:
            assert use_liger(model) is None
        before = torch.cuda.memory_allocated()
        hidden = model.model(ids).last_hidden_state
        kept.append(torch.cuda.memory_allocated() - before)
        del hidden, model
    assert kept[0] - kept[1] >= 2 * num_tokens * 96 * 2  # two blocks, the intermediate size, bfloat16

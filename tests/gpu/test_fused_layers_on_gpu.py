"""The kernels of fused layers on a GPU: exact, the same each time, and less memory kept than by the architectures.

    bash tests/run.sh -m gpu tests/gpu/test_fused_layers_on_gpu.py
"""

import pytest
import torch

from hybrid_gkd.models.fused_layers import RMSNorm, fuse_layers
from tests.unit.models.test_fused_layers import compare, compare_models, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_kernels_against_float64(dtype, tolerance):
    compare("cuda", dtype, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_models_with_fused_layers_are_as_exact(model_type, dtype):
    compare_models("cuda", dtype, model_type)


def test_gradients_are_the_same_each_time():
    """The sums of the norms' weight gradients have a fixed order."""
    x, norm = torch.randn(20000, 896, device="cuda", requires_grad=True), RMSNorm(896, 1e-5, device="cuda")
    first, *others = (torch.autograd.grad(norm(x).cos().sum(), [x, norm.weight]) for _ in range(3))
    assert all(torch.equal(one, other) for each in others for one, other in zip(first, each, strict=True))


def test_less_is_kept_for_the_backward_pass():
    """Of a block: the gate behind its activation function is not."""
    num_tokens, kept = 2048, []
    ids = torch.randint(0, 300, (1, num_tokens), device="cuda")
    for fused in (False, True):
        model = make_model("mistral").to("cuda", torch.bfloat16)
        if fused:
            fuse_layers(model)
        before = torch.cuda.memory_allocated()
        hidden = model.model(ids).last_hidden_state
        kept.append(torch.cuda.memory_allocated() - before)
        del hidden, model
    assert kept[0] - kept[1] >= 2 * num_tokens * 96 * 2  # two blocks, the intermediate size, bfloat16

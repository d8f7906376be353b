"""Attention over packed sequences on a GPU.

    bash tests/run.sh -m gpu tests/gpu/test_packed_attention_on_gpu.py
"""

import pytest
import torch

from hybrid_gkd.models.packed_attention import _padded, _varlen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = [1, 700, 33, 64, 1500, 2, 128]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (12, 2, 128), (4, 4, 64)])
def test_outputs_and_gradients_against_float64(heads, kv_heads, size, window):
    torch.manual_seed(0)
    boundaries = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0, dtype=torch.int32)
    tensors = [
        torch.randn(1, sum(LENGTHS), number, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for number in (heads, kv_heads, kv_heads)
    ]
    direction = torch.randn(1, sum(LENGTHS), heads, size, device="cuda", dtype=torch.bfloat16)

    def results(attend, dtype):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        output = attend(*inputs, boundaries, max(LENGTHS), size**-0.5, window)
        return [output, *torch.autograd.grad(output, inputs, direction.to(dtype))]

    for got, want in zip(results(_varlen, torch.bfloat16), results(_padded, torch.float64), strict=True):
        assert got.shape == want.shape
        assert 0 < float((got.double() - want).norm() / want.norm()) < 0.01

"""Layers that round their result to fp8, by Triton's interpreter and compiler, and where vLLM keeps its own. Seconds.

tests/gpu/test_teacher_engines.py compares a teacher's scores with and without them.
"""

from types import SimpleNamespace

import pytest
import torch
from kernels import compiles_for_a_gpu, interpreted
from torch import nn

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.teacher.engines import vllm_fp8

triton = pytest.importorskip("triton")

SIZES = [64, 896, 4864, 8960]
TOKENS = 3


def compare(size):
    """In float32 in the place of fp8, where the interpreter loses the carry: 127.9 would be 64."""
    from hybrid_gkd.teacher.engines import vllm_fp8_triton as kernels

    kernels.DTYPE = torch.float32
    torch.manual_seed(size)
    x, residual, weight = torch.randn(TOKENS, size), torch.randn(TOKENS, size), torch.rand(size) + 0.5
    total = x + residual
    values, scales = kernels.add_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    check(values, scales, torch.nn.functional.rms_norm(total.double(), (size,), weight.double(), 1e-5))

    x = torch.randn(TOKENS, 2 * size)
    x[1] = 0
    gate, up = x.double().chunk(2, 1)
    check(*kernels.gate(x), torch.nn.functional.silu(gate) * up)


def check(values, scales, expected):
    largest = expected.abs().amax(1, keepdim=True)
    assert values.shape == expected.shape
    torch.testing.assert_close(values.double() * scales, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scales.double(), (largest / 448).clamp(min=1 / (448 * 512)), rtol=1e-5, atol=0)
    assert (values.abs() <= 448).all()


class Qwen2DecoderLayer(nn.Module):
    """Named as vLLM's."""

    def __init__(self, *, fp8):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.down_proj = nn.Linear(2, 2)
        self.mlp.down_proj.quant_method = SimpleNamespace(**({"fp8_linear": object()} if fp8 else {}))


@pytest.mark.parametrize("version", ["0.27.0", "0.32.0"])
def test_vllm_stays_as_it_is_in_a_version_that_was_not_tried(monkeypatch, caplog, version):
    monkeypatch.setattr(vllm_compat, "vllm_version", lambda: version)
    caplog.set_level("INFO")
    assert vllm_fp8.install(nn.Sequential(Qwen2DecoderLayer(fp8=True))) == 0
    told = f"fp8: vLLM rounds in kernels of its own: this path was not tried with vLLM {version}"
    assert caplog.messages == [told]


def test_products_in_more_bits_are_left_alone_without_a_word(caplog):
    caplog.set_level("INFO")
    assert vllm_fp8.install(nn.Sequential(Qwen2DecoderLayer(fp8=False))) == 0
    assert not caplog.messages


@pytest.mark.slow
def test_kernels_under_the_interpreter():
    assert interpreted(__file__) == ["same"] * len(SIZES)


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path, monkeypatch):
    from hybrid_gkd.teacher.engines.vllm_fp8_triton import _add_norm, _gate

    types = {"eps": "fp32", "values": "*fp8e4nv", "scales": "*fp32"}
    for kernel, constants in (
        (_add_norm, {"SIZE": 1536, "WIDTH": 2048}), (_gate, {"SIZE": 8960, "FIRST": 8192, "REST": 1024}),
        (_gate, {"SIZE": 8192, "FIRST": 8192, "REST": 0}),
    ):  # fmt: skip
        assert compiles_for_a_gpu(kernel, tmp_path, monkeypatch, constants=constants, types=types, other="*bf16")


if __name__ == "__main__":
    for size in SIZES:
        compare(size)
        print("same")

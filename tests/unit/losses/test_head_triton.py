"""The head's Triton kernels against their plain-torch counterparts, run by Triton's interpreter. CPU, seconds."""

import pytest
from kernels import compiles_for_a_gpu, interpreted

CASES = [
    # rows, vocabulary, ids per row, temperature, dtype
    (3, 5000, 64, 1.0, "bfloat16"),
    (2, 4096, 1, 0.7, "float32"),
    (4, 777, 5, 1.5, "float32"),
    (2, 9001, 256, 0.7, "bfloat16"),
    (1, 8, 8, 1.0, "float32"),
    (2, 1, 1, 0.7, "bfloat16"),  # nothing outside of the ids
]


@pytest.mark.slow
def test_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    assert interpreted(__file__) == ["same"] * len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("tail", [0, 63])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_kernels_compile_for_a_gpu(tail, with_entropy, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from hybrid_gkd.losses import head_triton

    types = {
        "logits": "*bf16", "ids": "*i64", "logprobs": "*fp32", "lse": "*fp32", "lse_out": "*fp32",
        "entropy": "*fp32", "entropy_out": "*fp32", "grad_logprobs": "*fp32", "grad_entropy": "*fp32",
        "scale": "fp32", "masked_logit": "fp32",
    }  # fmt: skip
    without = {} if with_entropy else {"entropy": None, "entropy_out": None, "grad_entropy": None}
    kernels = {head_triton._statistics: head_triton.STATISTICS, head_triton._gradient: head_triton.GRADIENT}
    for kernel, sizes in kernels.items():
        constants = {"TAIL": tail, "K": 64, "K_BLOCK": 64, "BLOCK": sizes["BLOCK"], **without}
        warps = {"num_warps": sizes["num_warps"]}
        assert compiles_for_a_gpu(kernel, tmp_path, monkeypatch, constants=constants, types=types, **warps)


def compare(rows, vocabulary, num_ids, temperature, dtype):
    import torch

    from hybrid_gkd.losses import head, head_torch, head_triton

    gen = torch.Generator().manual_seed(vocabulary)
    dtype = getattr(torch, dtype)
    values = 4 * torch.randn(rows, vocabulary, generator=gen)

    def in_buffer():
        wider = torch.zeros(vocabulary + 37, 1)  # by rows that are no tokens
        logits = head._logits_buffer(torch.zeros(rows, 1, dtype=dtype), wider, rows).fill_(99)
        return logits[:, :vocabulary].copy_(values)

    logits = in_buffer()
    ids = torch.randint(vocabulary, (rows, num_ids), generator=gen)
    ids[0] = ids[0, 0]  # repeated
    grad_logprobs = torch.randn(rows, num_ids, generator=gen)
    got = head_triton.row_statistics(logits, ids, temperature, True)
    want = head_torch.row_statistics(logits, ids, temperature, True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert head_triton.row_statistics(logits, ids, temperature, False)[2] is None
    dz = [
        module.logit_gradient_(in_buffer(), ids, *want[:2], grad_logprobs, temperature)
        for module in (head_triton, head_torch)
    ]
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5  # the interpreter cuts the last bits off
    torch.testing.assert_close(*dz, rtol=rtol, atol=1e-6)
    slopes = {"entropy": want[2], "grad_entropy": torch.linspace(-1, 2, rows)}
    dz = [
        module.logit_gradient_(in_buffer(), ids, *want[:2], grad_logprobs, temperature, **slopes)
        for module in (head_triton, head_torch)
    ]
    torch.testing.assert_close(*dz, rtol=rtol, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    compare_with_tail(values.to(dtype), in_buffer, grad_logprobs, temperature, rtol)
    factor = torch.tensor(0.3)
    scaled = [module.scaled(dz[1].contiguous(), factor, dtype) for module in (head_triton, head_torch)]
    torch.testing.assert_close(*scaled, rtol=rtol, atol=0)
    print("same")


def compare_with_tail(values, in_buffer, grad_logprobs, temperature, rtol):
    """The first k ids are distinct, the last one is the first of them, or outside of them."""
    import torch

    from hybrid_gkd.losses import head_torch, head_triton

    rows, num_ids = grad_logprobs.shape
    ids = torch.stack([torch.randperm(values.shape[1])[:num_ids] for _ in range(rows)])
    k = max(1, num_ids - 1)
    if num_ids > 1:
        ids[0, -1] = ids[0, 0]
    grad = torch.cat([grad_logprobs, torch.full((rows, 1), -0.3)], 1)
    results = []
    for backend in (head_triton, head_torch):
        logits = in_buffer()
        statistics = backend.row_statistics(logits, ids, temperature, True, k)
        assert torch.equal(logits, values)
        known = ids, *statistics[:2], grad, temperature, k
        statistics[0].clamp_(min=-100)  # a mass of nothing is some -1e30
        gradient = backend.logit_gradient_(logits, *known).clone()
        slopes = {"entropy": statistics[2], "grad_entropy": torch.linspace(-1, 2, rows)}
        results.append((*statistics, gradient, backend.logit_gradient_(in_buffer(), *known, **slopes)))
    for a, b in zip(results[0][:3], results[1][:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0][3], results[1][3], rtol=rtol, atol=1e-6)
    torch.testing.assert_close(results[0][4], results[1][4], rtol=rtol, atol=1e-2 if rtol > 1e-3 else 1e-5)


if __name__ == "__main__":
    for case in CASES:
        compare(*case)

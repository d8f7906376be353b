"""The fused head's kernels against float64 autograd on full logits.

    bash tests/run.sh -m gpu tests/gpu/test_head_on_gpu.py
"""

import math

import pytest
import torch

from hybrid_gkd.losses.divergence import forward_kl, reverse_kl
from hybrid_gkd.losses.head import head_loss, row_statistics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RELATIVE_ERROR = {
    # loss, gradient of hidden, gradient of weight
    torch.bfloat16: (2e-3, 3e-2, 3e-2),  # the logits and their gradient are rounded to 8 bits
    torch.float32: (1e-5, 3e-5, 3e-5),
}


def inputs(rows, dim, vocab, num_ids, dtype, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=gen, device="cuda").to(dtype)
    weight = (torch.randn(vocab, dim, generator=gen, device="cuda") * (3 / dim**0.5)).to(dtype)
    ids = torch.stack([torch.randperm(vocab, generator=gen, device="cuda")[:num_ids] for _ in range(rows)])
    teacher = torch.randn(rows, num_ids, generator=gen, device="cuda").log_softmax(1) - 0.1  # P < 1
    return hidden.requires_grad_(), weight.requires_grad_(), ids, teacher


def run(hidden, weight, ids, teacher, **options):
    def loss_fn(logprobs, rows):
        return forward_kl(teacher[rows], logprobs, tail="bucket"), {"mass": logprobs.detach().exp().sum(1)}

    loss, parts = head_loss(hidden, weight, ids, loss_fn, with_entropy=True, **options)
    return loss, *torch.autograd.grad(loss, (hidden, weight)), parts


def reference(hidden, weight, ids, teacher, temperature):
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logprobs = (exact[0] @ exact[1].T / temperature).log_softmax(1)
    loss = forward_kl(teacher.double(), logprobs.gather(1, ids), tail="bucket").sum()
    entropy = -(logprobs.exp() * logprobs).sum().detach()
    return loss, *torch.autograd.grad(loss, exact), entropy


def full_logits(hidden, weight, ids, teacher, temperature):
    """Return the results of plain autograd on logits in the inputs' dtype."""
    logprobs = ((hidden @ weight.T).float() / temperature).log_softmax(1).gather(1, ids)
    loss = forward_kl(teacher, logprobs, tail="bucket").sum()
    return loss, *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize(
    ("rows", "dim", "vocab", "num_ids", "chunk_rows", "temperature"),
    [
        (300, 896, 151936, 64, None, 1.0),
        (300, 2048, 151936, 64, 128, 1.0),
        (130, 512, 50257, 256, 37, 0.7),  # a vocabulary that is a multiple of nothing
        (64, 64, 4096, 1, None, 1.5),
        (5, 64, 333, 7, 2, 1.0),
    ],
)
def test_against_float64(dtype, rows, dim, vocab, num_ids, chunk_rows, temperature):
    data = inputs(rows, dim, vocab, num_ids, dtype)
    loss, grad_hidden, grad_weight, parts = run(*data, chunk_rows=chunk_rows, temperature=temperature)
    want_loss, want_hidden, want_weight, entropy = reference(*data, temperature)
    assert grad_hidden.dtype == grad_weight.dtype == dtype
    pairs = ((loss, want_loss), (grad_hidden, want_hidden), (grad_weight, want_weight))
    errors = [((got - want).norm() / want.norm()).item() for got, want in pairs]
    print(f"{dtype} {rows}x{dim}x{vocab} K={num_ids}: relative errors " + " ".join(f"{e:.1e}" for e in errors))
    assert all(error < bound for error, bound in zip(errors, RELATIVE_ERROR[dtype], strict=True)), errors
    kept = full_logits(*data, temperature)
    plain = [((got - want).norm() / want.norm()).item() for got, (_, want) in zip(kept, pairs, strict=True)]
    print("    all logits kept, in the same dtype: " + " ".join(f"{e:.1e}" for e in plain))
    assert all(error < 2 * other + 3e-5 for error, other in zip(errors, plain, strict=True)), (errors, plain)
    torch.testing.assert_close(parts["entropy"].double(), entropy, rtol=RELATIVE_ERROR[dtype][0], atol=0)


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize("tail_topk", [None, 63])
def test_a_loss_of_the_entropy(dtype, tail_topk):
    hidden, weight, ids, _ = inputs(300, 896, 50257, 64, dtype)
    weights = torch.linspace(-1, 2, 300, device="cuda")

    def loss_fn(logprobs, rows):
        return -logprobs[:, 0], {}

    loss, _ = head_loss(
        hidden, weight, ids, loss_fn, temperature=0.8, entropy_weights=weights,
        **({} if tail_topk is None else {"tail_topk": tail_topk}),
    )
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logprobs = (exact[0] @ exact[1].T / 0.8).log_softmax(1)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    want = (weights * entropy).sum() - logprobs.gather(1, ids[:, :1]).sum()
    found, expected = torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, exact)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip((loss, *found), (want, *expected), strict=True)]
    print(f"{dtype} tail_topk={tail_topk}: relative errors " + " ".join(f"{e:.1e}" for e in errors))
    assert all(error < bound for error, bound in zip(errors, RELATIVE_ERROR[dtype], strict=True)), errors


def test_repeated_ids():
    hidden, weight, _, teacher = inputs(20, 64, 5000, 6, torch.float32)
    ids = torch.randint(3, (20, 6), device="cuda") + 4094  # within and beyond the first block
    loss, grad_hidden, grad_weight, _ = run(hidden, weight, ids, teacher)
    for got, want in zip((loss, grad_hidden, grad_weight), reference(hidden, weight, ids, teacher, 1.0), strict=False):
        assert (got - want).norm() < 3e-5 * want.norm()


def test_logit_gradients_sum_to_zero_per_row():
    """With weight = identity the gradient of the hidden states is dL/dz."""
    logits, _, ids, teacher = inputs(50, 3000, 3000, 64, torch.float32)
    _, dz, _, _ = run(logits, torch.eye(3000, device="cuda").requires_grad_(), ids, teacher, chunk_rows=16)
    assert dz.abs().max() > 0.01
    torch.testing.assert_close(dz.sum(1), torch.zeros(50, device="cuda"), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize(
    ("divergence", "tail_mass", "teacher_tail_mass"),
    [(forward_kl, 1e-3, 0.095), (forward_kl, 1e-9, 0.095), (reverse_kl, 0.5, 1e-9), (reverse_kl, 1e-3, 1e-20)],
)
def test_the_mass_outside_of_the_ids(dtype, divergence, tail_mass, teacher_tail_mass):
    """Value, and logit gradients inside and outside of the ids, of a student and a teacher with so little outside."""
    logits, _, ids, teacher = inputs(50, 3000, 3000, 64, torch.float32)
    teacher = teacher.log_softmax(1) + math.log1p(-teacher_tail_mass)
    teacher_tail = torch.full((50,), math.log(teacher_tail_mass), device="cuda")
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, value=True)
    with torch.no_grad():
        within, rest = ((logits / 0.8).masked_fill(m, -torch.inf).logsumexp(1, keepdim=True) for m in (~inside, inside))
        logits = logits + inside * 0.8 * (rest - within - math.log(tail_mass))
    logits = logits.to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    logprobs = (exact / 0.8).log_softmax(1)
    tail = logprobs.masked_fill(inside, -torch.inf).logsumexp(1)
    p = torch.cat([teacher, teacher_tail[:, None]], 1).double().log_softmax(1)
    q = torch.cat([logprobs.gather(1, ids), tail[:, None]], 1)
    want = ((p.exp() * (p - q)) if divergence is forward_kl else (q.exp() * (q - p))).sum()

    def loss_fn(q, rows):
        tails = {"teacher_tail": teacher_tail[rows], "student_tail": q[:, 64]}
        return divergence(teacher[rows], q[:, :64], tail="bucket", **tails), {}

    identity = torch.eye(3000, device="cuda", dtype=dtype)
    got, parts = head_loss(
        logits, identity, ids, loss_fn, temperature=0.8, chunk_rows=16, with_entropy=True, tail_topk=64
    )
    bounds = RELATIVE_ERROR[dtype]
    assert abs(got - want) < bounds[0] * want
    entropy = -(logprobs.exp() * logprobs).sum().detach()
    torch.testing.assert_close(parts["entropy"].double(), entropy, rtol=bounds[0], atol=0)
    (found,), (expected,) = torch.autograd.grad(got, logits), torch.autograd.grad(want, exact)
    for part in (inside, ~inside):
        error = (found - expected)[part].norm() / expected[part].norm()
        assert error < bounds[1], error


def test_the_cut_into_chunks_changes_nothing():
    data = inputs(512, 256, 50257, 16, torch.bfloat16)
    whole = run(*data)
    for chunk_rows in (64, 100):
        parts = run(*data, chunk_rows=chunk_rows)
        # Products of other sizes may add in another order, and the logits are rounded to 8 bits.
        for got, want, bound in zip(parts[:3], whole[:3], (1e-4, 1e-2, 1e-2), strict=True):
            assert (got - want).float().norm() <= bound * want.float().norm()


def test_not_a_number_surfaces():
    hidden, weight, ids, teacher = inputs(20, 64, 5000, 6, torch.bfloat16)
    with torch.no_grad():
        hidden[7, 3] = torch.nan
    loss, grad_hidden, grad_weight, _ = run(hidden, weight, ids, teacher)
    assert loss.isnan()
    assert grad_hidden[7].isnan().all()
    assert grad_hidden[:7].isfinite().all()
    assert grad_weight.isnan().all()


def test_memory_does_not_grow_with_the_rows():
    def peak(rows):
        hidden, weight, ids, teacher = inputs(rows, 64, 50257, 8, torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(hidden, weight, ids, teacher, chunk_rows=256)
        return torch.cuda.max_memory_allocated() - before

    peak(256)  # cuBLAS takes its workspace
    assert peak(4096) < peak(512) + 16 * 2**20


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
@pytest.mark.parametrize("chunk_rows", [None, 128])
def test_rows_that_are_no_tokens_are_not_there(dtype, chunk_rows):
    hidden, weight, ids, teacher = inputs(300, 896, 151936, 64, dtype)
    num_ids, ids = 151669, ids % 151669
    with torch.no_grad():
        weight[num_ids:] *= 20
    got = run(hidden, weight, ids, teacher, chunk_rows=chunk_rows, num_ids=num_ids)
    alone = weight.detach()[:num_ids].clone().requires_grad_()
    want = run(hidden, alone, ids, teacher, chunk_rows=chunk_rows)
    for mine, other in zip((*got[:2], got[2][:num_ids], *got[3].values()), (*want[:3], *want[3].values()), strict=True):
        assert (mine - other).norm() <= 2 * RELATIVE_ERROR[dtype][0] * other.norm()  # each of the two is rounded
    assert (got[2][num_ids:] == 0).all()


@pytest.mark.parametrize("dtype", RELATIVE_ERROR)
def test_statistics_of_rows_are_those_of_the_logits_as_they_are_rounded(dtype):
    """Over several chunks, of a matrix with rows that are no tokens."""
    hidden, weight, _, _ = inputs(700, 896, 151936, 4, dtype)
    found = row_statistics(hidden, weight, temperature=0.8, chunk_rows=256, num_ids=151669)
    logits = (hidden @ weight.T)[:, :151669].detach().double()
    logprobs = (logits / 0.8).log_softmax(1)
    top = logprobs.gather(1, found.top_ids[:, None])[:, 0]
    torch.testing.assert_close(top, logprobs.amax(1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.top_logprobs.double(), top, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.entropy.double(), -(logprobs.exp() * logprobs).sum(1), rtol=1e-3, atol=1e-3)

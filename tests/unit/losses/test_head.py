"""The fused head against plain autograd on full logits. CPU, a few seconds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_gkd.losses import head
from hybrid_gkd.losses.head import head_loss, logprobs_of_ids

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def inputs(rows, dim, vocab, num_ids, dtype=torch.float64, seed=0):
    """hidden [T, D], weight [V, D], ids [T, K] (repeats allowed), an upstream gradient [T, K]."""
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=gen, dtype=torch.float64)
    weight = torch.randn(vocab, dim, generator=gen, dtype=torch.float64)
    ids = torch.randint(vocab, (rows, num_ids), generator=gen)
    grad = torch.randn(rows, num_ids, generator=gen, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ids, grad.to(dtype)


def naive(hidden, weight, ids, temperature):
    logits = hidden @ weight.T / temperature
    return logits.log_softmax(-1).gather(1, ids)


def kl(grad):
    """A loss of log-probabilities whose gradient differs from row to row and is not constant."""

    def loss_fn(logprobs, rows):
        loss = (grad[rows] * logprobs + 0.3 * logprobs.exp()).sum(1)
        return loss, {"mass": logprobs.detach().exp().sum(1)}

    return loss_fn


def assert_same(hidden, weight, ids, grad, *, temperature=1.0, chunk_rows=None):
    tolerance = TOLERANCE[hidden.dtype]
    got, parts = head_loss(hidden, weight, ids, kl(grad), temperature=temperature, chunk_rows=chunk_rows)
    loss, want_parts = kl(grad)(naive(hidden, weight, ids, temperature), slice(None))
    if len(hidden):
        torch.testing.assert_close(parts["mass"], want_parts["mass"].sum(), rtol=tolerance, atol=tolerance)
    got_grads = torch.autograd.grad(got * 1.7, (hidden, weight))
    want_grads = torch.autograd.grad(loss.sum() * 1.7, (hidden, weight))
    assert got.dtype == hidden.dtype
    for a, b in zip((got, *got_grads), (loss.sum(), *want_grads), strict=True):
        scale = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * (1 + scale) * max(1, len(hidden)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_ids", [1, 5, 23])
@pytest.mark.parametrize("chunk_rows", [1, 6, 13, None])
def test_equals_full_logits(dtype, num_ids, chunk_rows):
    assert_same(*inputs(13, 8, 23, num_ids, dtype), chunk_rows=chunk_rows)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9),
    dim=st.integers(1, 7),
    vocab=st.integers(1, 19),
    num_ids=st.integers(1, 19),
    chunk_rows=st.integers(1, 11),
    temperature=st.floats(0.2, 5),
    seed=st.integers(0, 999),
)
def test_any_sizes(rows, dim, vocab, num_ids, chunk_rows, temperature, seed):
    assert_same(*inputs(rows, dim, vocab, num_ids, seed=seed), temperature=temperature, chunk_rows=chunk_rows)


def forward_kl_bucket(teacher):
    """Forward KL with the tail bucket: all of the student's mass matters although P < 1."""

    def loss_fn(logprobs, rows):
        p = teacher[rows].exp()
        tail, student_tail = 1 - p.sum(1), 1 - logprobs.exp().sum(1)
        return (p * (teacher[rows] - logprobs)).sum(1) + tail * (tail / student_tail).log(), {}

    return loss_fn


def teacher_logprobs(rows, num_ids, mass=0.8):
    gen = torch.Generator().manual_seed(5)
    return (torch.rand(rows, num_ids, generator=gen, dtype=torch.float64)).log_softmax(1) + math.log(mass)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9), vocab=st.integers(2, 19), k=st.integers(0, 18), chunk_rows=st.integers(1, 11),
    temperature=st.floats(0.2, 5), seed=st.integers(0, 999),
)
def test_a_loss_of_the_entropy(rows, vocab, k, chunk_rows, temperature, seed):
    """Its gradient reaches all logits, those of the ids included, with and without a tail."""
    k = min(k, vocab - 1)
    hidden, weight, ids, grad = inputs(rows, 5, vocab, k + 2, seed=seed)
    ids[:, :k] = distinct_ids(rows, vocab, seed)[:, :k]
    ids = ids[:, :-1]
    grad = grad if k else grad[:, :1]
    weights = torch.linspace(-1, 2, rows, dtype=torch.float64)
    got, parts = head_loss(
        hidden, weight, ids, kl(grad), temperature=temperature, chunk_rows=chunk_rows, tail_topk=k,
        entropy_weights=weights,
    )
    naively = naive_with_tail(hidden, weight, ids, k, temperature) if k else naive(hidden, weight, ids, temperature)
    q = (hidden @ weight.T / temperature).log_softmax(-1)
    entropy = -(q.exp() * q).sum(1)
    want = kl(grad)(naively, slice(None))[0].sum() + (weights * entropy).sum()
    found, expected = ((x, *torch.autograd.grad(x, (hidden, weight))) for x in (got, want))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert "entropy" not in parts


@pytest.mark.slow
def test_gradcheck():
    hidden, weight, _, _ = inputs(5, 4, 9, 1)
    ids = torch.stack([torch.randperm(9)[:3] for _ in range(5)])
    loss_fn = forward_kl_bucket(teacher_logprobs(5, 3))
    assert torch.autograd.gradcheck(
        lambda h, w: head_loss(h, w, ids, loss_fn, temperature=0.8, chunk_rows=2)[0], (hidden, weight)
    )


def test_logit_gradients_sum_to_zero_per_row():
    logits, _, _, _ = inputs(6, 12, 12, 1)
    ids = torch.stack([torch.randperm(12)[:4] for _ in range(6)])
    loss_fn = forward_kl_bucket(teacher_logprobs(6, 4))
    loss, _ = head_loss(logits, torch.eye(12, dtype=torch.float64), ids, loss_fn, chunk_rows=4)
    (dz,) = torch.autograd.grad(loss, logits)
    assert dz.abs().max() > 0.01
    torch.testing.assert_close(dz.sum(1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-13)


def test_with_repeated_ids():
    hidden, weight, _, _ = inputs(3, 4, 11, 1)
    assert_same(hidden, weight, torch.full((3, 5), 7), torch.rand(3, 5, dtype=torch.float64))


def distinct_ids(rows, vocab, seed=0):
    return torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)).argsort(1)


def naive_with_tail(hidden, weight, ids, k, temperature=1.0):
    """The log-probabilities and, as column k, log(1 - Q) from a sum over what is outside of the first k ids."""
    logits = hidden @ weight.T / temperature
    logprobs = logits.log_softmax(-1)
    tail = logprobs.scatter(1, ids[:, :k], -math.inf).logsumexp(1, keepdim=True)
    found = logprobs.gather(1, ids)
    return torch.cat([found[:, :k], tail, found[:, k:]], 1)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9), vocab=st.integers(2, 19), k=st.integers(1, 18), num_others=st.integers(0, 3),
    chunk_rows=st.integers(1, 11), temperature=st.floats(0.2, 5), seed=st.integers(0, 999),
)
def test_the_mass_outside_of_the_ids(rows, vocab, k, num_others, chunk_rows, temperature, seed):
    """Columns beyond the first k may repeat one of them, or each other, or lie outside."""
    k = min(k, vocab - 1)
    hidden, weight, ids, grad = inputs(rows, 5, vocab, k + 1 + num_others, seed=seed)
    ids[:, :k] = distinct_ids(rows, vocab, seed)[:, :k]
    ids = ids[:, :-1]
    got, parts = head_loss(
        hidden, weight, ids, kl(grad), temperature=temperature, chunk_rows=chunk_rows, with_entropy=True, tail_topk=k
    )
    loss, _ = kl(grad)(naive_with_tail(hidden, weight, ids, k, temperature), slice(None))
    found, want = ((x, *torch.autograd.grad(x, (hidden, weight))) for x in (got, loss.sum()))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    if rows:
        entropy = torch.distributions.Categorical(logits=(hidden @ weight.T / temperature).detach()).entropy()
        torch.testing.assert_close(parts["entropy"], entropy.sum())


def test_nothing_outside_of_the_ids():
    hidden, weight, _, grad = inputs(3, 4, 7, 8)
    ids = distinct_ids(3, 7)

    def without_tail(logprobs, rows):
        assert (logprobs[:, 7].exp() == 0).all()
        return kl(grad[:, :7])(logprobs[:, :7], rows)

    got, parts = head_loss(hidden, weight, ids, without_tail, with_entropy=True, tail_topk=7)
    want, want_parts = head_loss(hidden, weight, ids, kl(grad[:, :7]), with_entropy=True)
    torch.testing.assert_close(parts, want_parts)
    found, expected = ((x, *torch.autograd.grad(x, (hidden, weight))) for x in (got, want))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("rows", "weight_learns", "chunks"), [(200, True, 1), (201, True, 2), (100, False, 1), (400, False, 2)]
)
def test_chunks_take_what_they_may_and_a_single_one_the_place_of_the_sum(rows, weight_learns, chunks, monkeypatch):
    """100 vocabulary entries of float32, so 400 bytes a row; the weight has 800 numbers, its gradient 3,200 bytes."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 200 * 400 - 3200)
    hidden, weight, ids, grad = inputs(rows, 8, 100, 3, torch.float32)
    weight.requires_grad_(weight_learns)
    seen = []

    def loss_fn(logprobs, part):
        seen.append(len(logprobs))
        return kl(grad)(logprobs, part)

    head_loss(hidden, weight, ids, loss_fn)
    assert sum(seen) == rows
    assert len(seen) == chunks
    assert max(seen) <= 200


@pytest.mark.parametrize("chunk_rows", [None, 5])
@pytest.mark.parametrize(("tail_topk", "overlap_topk"), [(0, 0), (4, 4)])
def test_rows_that_are_no_tokens_are_not_there(chunk_rows, tail_topk, overlap_topk):
    """However likely they are: the numbers and gradients are those of the matrix without them, and theirs are 0."""
    hidden, weight, *_ = inputs(13, 8, 30, 1)
    num_ids, ids = 23, distinct_ids(13, 23)[:, :6]
    with torch.no_grad():
        weight[num_ids:] *= 20
    grad = torch.randn(13, 6 + (tail_topk > 0), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {
        "temperature": 0.7, "chunk_rows": chunk_rows, "with_entropy": True, "tail_topk": tail_topk,
        "overlap_topk": overlap_topk, "entropy_weights": torch.linspace(-1, 1, 13),
    }  # fmt: skip
    got, parts = head_loss(hidden, weight, ids, kl(grad), num_ids=num_ids, **options)
    got.backward()
    alone = [x.detach().clone().requires_grad_() for x in (hidden, weight[:num_ids])]
    want, want_parts = head_loss(*alone, ids, kl(grad), **options)
    want.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(parts, want_parts)
    torch.testing.assert_close(hidden.grad, alone[0].grad)
    torch.testing.assert_close(weight.grad[:num_ids], alone[1].grad)
    assert weight.grad.shape == weight.shape
    assert (weight.grad[num_ids:] == 0).all()
    found = logprobs_of_ids(hidden, weight, ids, num_ids=num_ids)
    logits = hidden.detach() @ weight.detach()[:num_ids].T
    torch.testing.assert_close(found, logits.log_softmax(1).gather(1, ids))


@pytest.mark.parametrize("chunk_rows", [None, 100])
def test_memory_that_nothing_has_been_written_to_is_not_used(chunk_rows):
    """A vocabulary that is no multiple of anything, in bfloat16, where torch.empty gives not-a-numbers."""
    hidden, weight, ids, grad = inputs(300, 64, 5000, 16, torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        tensors = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight / 8)]
        torch.use_deterministic_algorithms(True)
        try:
            loss, _ = head_loss(*tensors, ids, kl(grad), chunk_rows=chunk_rows)
            (0.3 * loss).backward()
        finally:
            torch.use_deterministic_algorithms(False)
        results.append([x.grad.double() for x in tensors])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() < 0.01 * want.norm()


def test_without_rows():
    hidden, weight, ids, grad = inputs(0, 8, 23, 4, torch.float32)
    loss, parts = head_loss(hidden, weight, ids, kl(grad), with_entropy=True, overlap_topk=4)
    assert parts == {}
    assert loss == 0
    loss.backward()
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("frozen", [["hidden"], ["weight"], ["hidden", "weight"]])
def test_of_frozen_inputs(frozen):
    hidden, weight, ids, grad = inputs(5, 4, 9, 2)
    for name in frozen:
        {"hidden": hidden, "weight": weight}[name].requires_grad_(False)
    loss, _ = head_loss(hidden, weight, ids, kl(grad), chunk_rows=2)
    assert loss.requires_grad == (len(frozen) < 2)
    if loss.requires_grad:
        loss.backward()
    assert (hidden.grad is None) == ("hidden" in frozen)
    assert (weight.grad is None) == ("weight" in frozen)


def test_without_grad_mode():
    hidden, weight, ids, grad = inputs(5, 4, 9, 2)
    want, _ = head_loss(hidden, weight, ids, kl(grad))
    with torch.no_grad():
        got, _ = head_loss(hidden, weight, ids, kl(grad))
    assert torch.equal(got, want)
    assert not got.requires_grad


def test_tied_embeddings_add_up():
    _, weight, ids, grad = inputs(5, 4, 9, 2)
    tokens = torch.tensor([1, 3, 3, 0, 8])
    (got,) = torch.autograd.grad(head_loss(weight[tokens], weight, ids, kl(grad), chunk_rows=2)[0], weight)
    loss, _ = kl(grad)(naive(weight[tokens], weight, ids, 1.0), slice(None))
    torch.testing.assert_close(got, torch.autograd.grad(loss.sum(), weight)[0])


def test_a_loss_that_is_not_a_number_surfaces():
    hidden, weight, ids, grad = inputs(5, 4, 9, 2)
    grad[3, 0] = torch.nan
    loss, _ = head_loss(hidden, weight, ids, kl(grad), chunk_rows=2)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad[3].isnan().all()
    assert hidden.grad[:2].isfinite().all()
    assert weight.grad.isnan().all()


def test_a_loss_must_be_one_per_row():
    hidden, weight, ids, _ = inputs(5, 4, 9, 2)
    with pytest.raises(ValueError, match=r"the loss must be one value per row, \[5\]; got \[5, 2\]"):
        head_loss(hidden, weight, ids, lambda logprobs, rows: (logprobs, {}))
    with pytest.raises(ValueError, match=r"mass must be one value per row, \[5\]; got \[5, 2\]"):
        head_loss(hidden, weight, ids, lambda logprobs, rows: (logprobs[:, 0], {"mass": logprobs}))


@pytest.mark.parametrize(("chunk_rows", "tail_topk"), [(None, 0), (7, 0), (7, 5)])
def test_overlap_of_the_top_k(chunk_rows, tail_topk, monkeypatch):
    monkeypatch.setattr(head, "OVERLAP_ROWS", 7)
    hidden, weight, _, _ = inputs(20, 8, 23, 1)
    logits = hidden @ weight.T
    ids = torch.randint(23, (20, 6))
    ids[:, :5] = torch.stack([torch.randperm(23)[:5] for _ in range(20)])
    ids[0, :5] = logits[0].topk(5).indices.flip(0)
    ids[3, :5] = logits[3].topk(8).indices[-5:]
    want = [len(set(ids[i, :5].tolist()) & set(logits[i].topk(5).indices.tolist())) / 5 for i in range(0, 20, 3)]
    assert want[:2] == [1.0, 0.4]
    zeros = kl(torch.zeros(20, 7 if tail_topk else 6))
    _, parts = head_loss(hidden, weight, ids, zeros, chunk_rows=chunk_rows, overlap_topk=5, tail_topk=tail_topk)
    assert parts["overlap_rows"] == 7
    torch.testing.assert_close(parts["overlap_ratio"], torch.tensor(sum(want)))


def test_entropy():
    hidden, weight, ids, grad = inputs(11, 8, 23, 2)
    _, parts = head_loss(hidden, weight, ids, kl(grad), temperature=0.5, chunk_rows=4, with_entropy=True)
    want = torch.distributions.Categorical(logits=(hidden @ weight.T / 0.5).detach()).entropy()
    torch.testing.assert_close(parts["entropy"], want.sum())
    assert not parts["entropy"].requires_grad


def test_in_bfloat16():
    hidden, weight, ids, grad = inputs(40, 16, 50, 3, torch.bfloat16)
    loss, _ = head_loss(hidden, weight, ids, kl(grad.float()), chunk_rows=7)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    want, _ = kl(grad.double())(naive(*exact, ids, 1.0), slice(None))
    assert abs(loss - want.sum()) < 0.01 * want.abs().sum()
    got_grads = torch.autograd.grad(loss, (hidden, weight))
    for a, b in zip(got_grads, torch.autograd.grad(want.sum(), exact), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() < 0.02 * b.norm()


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("backward", [False, True])
def test_full_logits_never_exist(backward):
    rows, dim, vocab, chunk_rows = 64, 4, 50, 8
    hidden, weight, ids, grad = inputs(rows, dim, vocab, 3)
    with LargestTensor() as largest:
        if backward:
            head_loss(hidden, weight, ids, kl(grad), chunk_rows=chunk_rows, with_entropy=True)
            head_loss(hidden, weight, ids[:, :2], kl(grad), chunk_rows=chunk_rows, with_entropy=True, tail_topk=2)
        else:
            logprobs_of_ids(hidden, weight, ids, chunk_rows=chunk_rows)
    assert largest.numel <= chunk_rows * 64  # rows of the buffer are padded to 64 logits


@pytest.mark.parametrize("chunk_rows", [None, 7])
def test_logprobs(chunk_rows):
    hidden, weight, ids, _ = inputs(20, 8, 23, 5)
    got = logprobs_of_ids(hidden, weight, ids, temperature=0.7, chunk_rows=chunk_rows)
    torch.testing.assert_close(got, naive(hidden, weight, ids, 0.7).detach())
    assert not got.requires_grad
    assert logprobs_of_ids(hidden[:0], weight, ids[:0]).shape == (0, 5)


def test_the_whole_vocabulary_sums_to_one():
    hidden, weight, _, _ = inputs(5, 8, 23, 1)
    logprobs = logprobs_of_ids(hidden, weight, torch.arange(23).expand(5, 23))
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(5, dtype=torch.float64))


@pytest.mark.slow
def test_the_weight_gradient_is_summed_in_float32():
    """1,024 chunks of one row: a bfloat16 sum would lose most of the small terms."""
    hidden, weight, ids, _ = inputs(1024, 4, 6, 1, torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (want,) = torch.autograd.grad(naive(*exact, ids, 1.0).sum(), exact[1])
    loss, _ = head_loss(hidden, weight, ids, lambda logprobs, rows: (logprobs.sum(1), {}), chunk_rows=1)
    (got,) = torch.autograd.grad(loss, weight)
    assert (got - want).norm() < 0.01 * want.norm()


def test_autocast_does_not_reach_the_head():
    hidden, weight, ids, grad = inputs(6, 8, 23, 3, torch.float32)
    want, _ = head_loss(hidden, weight, ids, kl(grad))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = head_loss(hidden, weight, ids, kl(grad))
    assert torch.equal(got, want)
    assert torch.equal(torch.autograd.grad(got, weight)[0], torch.autograd.grad(want, weight)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 5)}, "must have the same D"),
        ({"weight": torch.zeros(7, 4, dtype=torch.bfloat16)}, "one dtype"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int64)}, "int64 \\[2, K\\]"),
        ({"ids": torch.zeros(2, 1, dtype=torch.int32)}, "int64"),
        ({"ids": torch.zeros(2, dtype=torch.int64)}, "int64"),
        ({"temperature": 0.0}, "positive"),
        ({"temperature": float("nan")}, "positive"),
        ({"chunk_rows": 0}, "positive"),
    ],
)
def test_refuses(change, message):
    good = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(7, 4), "ids": torch.zeros(2, 1, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        logprobs_of_ids(**(good | change))

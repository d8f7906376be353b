"""The fused head against plain autograd on full logits. CPU, a few seconds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_gkd.losses.head import _backward, logprobs_of_ids

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


def assert_same(hidden, weight, ids, grad, *, temperature=1.0, chunk_rows=1024):
    tolerance = TOLERANCE[hidden.dtype]
    got, _ = logprobs_of_ids(hidden, weight, ids, temperature=temperature, chunk_rows=chunk_rows)
    want = naive(hidden, weight, ids, temperature)
    got_grads = torch.autograd.grad(got, (hidden, weight), grad)
    want_grads = torch.autograd.grad(want, (hidden, weight), grad)
    assert got.dtype == hidden.dtype
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        scale = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * (1 + scale))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_ids", [1, 5, 23])
@pytest.mark.parametrize("chunk_rows", [1, 6, 7, 13, 1024])
def test_equals_full_logits(dtype, num_ids, chunk_rows):
    assert_same(*inputs(13, 8, 23, num_ids, dtype), chunk_rows=chunk_rows)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 2.0])
def test_temperature(temperature):
    assert_same(*inputs(9, 8, 17, 4), temperature=temperature, chunk_rows=4)


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


def test_the_whole_vocabulary_sums_to_one():
    hidden, weight, _, _ = inputs(5, 8, 23, 1)
    logprobs, _ = logprobs_of_ids(hidden, weight, torch.arange(23).expand(5, 23))
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(5, dtype=torch.float64))


def test_repeated_ids_accumulate():
    hidden, weight, _, _ = inputs(3, 4, 11, 1)
    assert_same(hidden, weight, torch.full((3, 5), 7), torch.rand(3, 5, dtype=torch.float64))


def test_expanded_upstream_gradient():
    """sum() hands the backward an expanded tensor, not a contiguous one."""
    hidden, weight, ids, _ = inputs(4, 5, 9, 3)
    got = torch.autograd.grad(logprobs_of_ids(hidden, weight, ids, chunk_rows=3)[0].sum(), hidden)[0]
    torch.testing.assert_close(got, torch.autograd.grad(naive(hidden, weight, ids, 1.0).sum(), hidden)[0])


def test_gradcheck():
    hidden, weight, ids, _ = inputs(5, 4, 7, 3)
    assert torch.autograd.gradcheck(
        lambda h, w: logprobs_of_ids(h, w, ids, temperature=0.8, chunk_rows=2)[0], (hidden, weight)
    )


def test_logit_gradients_sum_to_zero_per_row():
    """With weight = identity the hidden states are the logits, so their gradient is dL/dz."""
    logits, _, ids, grad = inputs(6, 12, 12, 4)
    logprobs, _ = logprobs_of_ids(logits, torch.eye(12, dtype=torch.float64), ids, chunk_rows=4)
    (dz,) = torch.autograd.grad(logprobs, logits, grad)
    torch.testing.assert_close(dz.sum(1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy(temperature):
    hidden, weight, ids, _ = inputs(11, 8, 23, 2)
    _, entropy = logprobs_of_ids(hidden, weight, ids, temperature=temperature, chunk_rows=4, with_entropy=True)
    logits = (hidden @ weight.T / temperature).detach()
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())
    assert not entropy.requires_grad
    assert logprobs_of_ids(hidden, weight, ids)[1] is None


def test_entropy_does_not_change_the_gradient():
    hidden, weight, ids, grad = inputs(5, 4, 9, 2)
    with_entropy = torch.autograd.grad(logprobs_of_ids(hidden, weight, ids, with_entropy=True)[0], hidden, grad)[0]
    without = torch.autograd.grad(logprobs_of_ids(hidden, weight, ids)[0], hidden, grad)[0]
    assert torch.equal(with_entropy, without)


def test_entropy_of_a_certain_row_is_zero():
    logits = torch.tensor([[0.0, -1e4, -1e4]])
    _, entropy = logprobs_of_ids(logits, torch.eye(3), torch.zeros(1, 1, dtype=torch.int64), with_entropy=True)
    assert entropy.item() == 0


def test_no_rows():
    hidden, weight, ids, _ = inputs(0, 8, 23, 4, torch.float32)
    logprobs, entropy = logprobs_of_ids(hidden, weight, ids, with_entropy=True)
    assert logprobs.shape == (0, 4)
    assert entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    hidden, weight, ids, grad = inputs(5, 4, 9, 2)
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    logprobs_of_ids(hidden, weight, ids)[0].backward(grad)
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_bfloat16_matches_float32_logits_of_the_same_product():
    hidden, weight, ids, grad = inputs(40, 16, 50, 3, torch.bfloat16)
    logprobs, _ = logprobs_of_ids(hidden, weight, ids, chunk_rows=7)
    want = (hidden @ weight.T).float().log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(logprobs, want, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(logprobs, (hidden, weight), grad.float())
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    want_grads = torch.autograd.grad(naive(*exact, ids, 1.0), exact, grad.double())
    for a, b in zip(got, want_grads, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() < 0.02 * b.norm()


def test_the_weight_gradient_is_summed_in_float32():
    """1,024 chunks of one row: a bfloat16 sum would lose most of the small terms."""
    hidden, weight, ids, _ = inputs(1024, 4, 6, 1, torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (want,) = torch.autograd.grad(naive(*exact, ids, 1.0).sum(), exact[1])
    (got,) = torch.autograd.grad(logprobs_of_ids(hidden, weight, ids, chunk_rows=1)[0].sum(), weight)
    assert (got - want).norm() < 0.01 * want.norm()


def test_autocast_does_not_split_forward_and_backward():
    hidden, weight, ids, grad = inputs(6, 8, 23, 3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = logprobs_of_ids(hidden, weight, ids)
    torch.testing.assert_close(logprobs, naive(hidden, weight, ids, 1.0), rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(logprobs, hidden, grad)
    torch.testing.assert_close(got, torch.autograd.grad(naive(hidden, weight, ids, 1.0), hidden, grad))


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


def test_full_logits_never_exist():
    rows, dim, vocab, chunk_rows = 64, 4, 50, 8
    hidden, weight, ids, grad = inputs(rows, dim, vocab, 3)
    saved = []
    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            logprobs_of_ids(hidden, weight, ids, chunk_rows=chunk_rows, with_entropy=True)
        with torch.no_grad():  # called by hand: the autograd engine runs outside of the dispatch mode
            _backward(grad, *saved, 1.0, chunk_rows, (True, True))
    assert largest.numel == chunk_rows * vocab
    assert [tuple(tensor.shape) for tensor in saved] == [(rows, dim), (vocab, dim), (rows, 3), (rows,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 5)}, "do not fit"),
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

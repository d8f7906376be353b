"""The divergences against closed forms and against plain autograd on full logits. CPU, a few seconds."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_gkd.losses import divergence
from hybrid_gkd.losses.divergence import TAIL_FLOOR, forward_kl, jsd, k1, k2, k3, reverse_kl, score_weight, support_mass
from hybrid_gkd.losses.head import head_loss, logprobs_of_ids
from hybrid_gkd.losses.table import KL_LOSSES

CLOSE = {"rtol": 1e-6, "atol": 1e-7}
VERL_KL = json.loads((Path(__file__).parents[1] / "scoring" / "verl_kl.json").read_text(encoding="utf-8"))
"""`how` in the file says how the numbers were made."""

TAILS = ["bucket", "none", "renormalise"]
LOSSES = ["forward_kl", "reverse_kl", "jsd 0.1", "jsd 0.5", "jsd 0.9"]
each_loss_and_tail = pytest.mark.parametrize(("loss", "tail"), [(loss, tail) for loss in LOSSES for tail in TAILS])


def log(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def compute(loss, teacher, student, tail):
    name, _, beta = loss.partition(" ")
    return getattr(divergence, name)(teacher, student, tail=tail, **({"beta": float(beta)} if beta else {}))


def naive(loss, teacher, logits, ids, tail):
    """Straight from the table of formulas, on probabilities; nothing shared with the product code."""
    p, q = teacher.exp().gather(1, ids), logits.softmax(-1).gather(1, ids)
    if tail == "renormalise":
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    if tail == "bucket":
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    forward, reverse = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    if loss == "forward_kl":
        return forward
    if loss == "reverse_kl":
        return reverse
    beta = float(loss.split()[1])
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def problem(rows=7, vocab=29, topk=5, seed=0, scale=2.0):
    """Teacher log-probabilities [T, V], student logits [T, V] with gradient, the teacher's top-k ids [T, K]."""
    gen = torch.Generator().manual_seed(seed)
    teacher = (scale * torch.randn(rows, vocab, generator=gen, dtype=torch.float64)).log_softmax(-1)
    logits = scale * torch.randn(rows, vocab, generator=gen, dtype=torch.float64)
    return teacher, logits.requires_grad_(), teacher.topk(topk, -1).indices


def student_of(logits, ids):
    return logits.log_softmax(-1).gather(1, ids)


def gradient(value, logits):
    return torch.autograd.grad(value.sum(), logits, retain_graph=True)[0]


LOG2, LOG3 = math.log(2), math.log(3)


# p = (1/2, 1/4) with tail 1/4, q as given.
@pytest.mark.parametrize(
    ("loss", "tail", "q", "want"),
    [
        ("forward_kl", "bucket", [0.25, 0.5], 0.25 * LOG2),  # 1/2 log 2 - 1/4 log 2 + 1/4 log 1
        ("forward_kl", "none", [0.25, 0.5], 0.25 * LOG2),
        ("forward_kl", "renormalise", [0.25, 0.5], LOG2 / 3),  # 2/3 log 2 - 1/3 log 2
        ("forward_kl", "bucket", [0.125, 0.125], 1.25 * LOG2 - 0.25 * LOG3),  # 1/2 log 4 + 1/4 log 2 + 1/4 log 1/3
        ("forward_kl", "none", [0.125, 0.125], 1.25 * LOG2),
        ("forward_kl", "renormalise", [0.125, 0.125], 5 / 3 * LOG2 - LOG3),  # 2/3 log 4/3 + 1/3 log 2/3
        ("reverse_kl", "bucket", [0.25, 0.5], 0.25 * LOG2),  # -1/4 log 2 + 1/2 log 2 + 1/4 log 1
        ("reverse_kl", "none", [0.125, 0.125], -0.375 * LOG2),  # 1/8 log 1/4 + 1/8 log 1/2: below 0
        ("reverse_kl", "bucket", [0.125, 0.125], 0.75 * LOG3 - 0.375 * LOG2),  # the same + 3/4 log 3
        ("reverse_kl", "renormalise", [0.125, 0.125], LOG3 - 1.5 * LOG2),  # 1/2 log 3/4 + 1/2 log 3/2
        # m = (3/8, 3/8, 1/4): 1/2 (1/2 log 4/3 + 1/4 log 2/3) + 1/2 (1/4 log 2/3 + 1/2 log 4/3)
        ("jsd 0.5", "bucket", [0.25, 0.5], 1.25 * LOG2 - 0.75 * LOG3),
    ],
)
def test_closed_forms(loss, tail, q, want):
    assert compute(loss, log([0.5, 0.25]), log(q), tail).item() == pytest.approx(want, abs=1e-12)


def test_closed_form_gradient_of_the_bucket():
    """d/dlog q_j of -p_j log q_j - (1-P) log(1-Q) is -p_j + (1-P) q_j / (1-Q)."""
    q = log([0.125, 0.125]).requires_grad_()
    forward_kl(log([0.5, 0.25]), q, tail="bucket").sum().backward()
    torch.testing.assert_close(q.grad, torch.tensor([[-0.5 + 0.25 / 6, -0.25 + 0.25 / 6]], dtype=torch.float64))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tail", TAILS)
def test_whole_vocabulary_gives_the_full_divergence(loss, tail):
    teacher, logits, _ = problem()
    ids = torch.arange(29).flip(0).expand(7, 29)
    p, q = teacher.exp(), logits.softmax(-1)
    beta = float(loss.split()[1]) if " " in loss else {"forward_kl": 1.0, "reverse_kl": 0.0}[loss]
    other = {"forward_kl": q, "reverse_kl": p}.get(loss, beta * p + (1 - beta) * q)
    want = beta * (p * (p / other).log()).sum(-1) + (1 - beta) * (q * (q / other).log()).sum(-1)
    got = compute(loss, teacher.gather(1, ids), student_of(logits, ids), tail)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient(got, logits), gradient(want, logits), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("head", ["fused", "log_softmax"])
@each_loss_and_tail
@pytest.mark.parametrize("topk", [1, 5, 28])
def test_value_and_logit_gradient_equal_naive(loss, tail, head, topk):
    teacher, logits, ids = problem(topk=topk)
    want, p = naive(loss, teacher, logits, ids, tail), teacher.gather(1, ids)
    if head == "fused":
        got, want = head_loss(
            logits, torch.eye(29, dtype=torch.float64), ids, lambda q, rows: (compute(loss, p[rows], q, tail), {}),
            chunk_rows=3,
        )[0], want.sum()
    else:
        got = compute(loss, p, student_of(logits, ids), tail)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    found = gradient(got, logits)
    torch.testing.assert_close(found, gradient(want, logits), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.sum(-1), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    loss=st.sampled_from(LOSSES), tail=st.sampled_from(TAILS), rows=st.integers(1, 5), vocab=st.integers(2, 37),
    topk=st.integers(1, 36), seed=st.integers(0, 10_000), scale=st.floats(0.1, 4),
)
def test_any_sizes_equal_naive(loss, tail, rows, vocab, topk, seed, scale):
    teacher, logits, ids = problem(rows, vocab, min(topk, vocab - 1), seed, scale)
    got = compute(loss, teacher.gather(1, ids), student_of(logits, ids), tail)
    want = naive(loss, teacher, logits, ids, tail)
    if tail == "bucket":  # exact only above the floor, and log(1 - sum) itself loses digits near it
        tails = 1 - torch.stack([support_mass(x.log_softmax(-1).gather(1, ids)) for x in (teacher, logits)])
        kept = tails.amin(0) > 10 * TAIL_FLOOR
        got, want = got[kept], want[kept]
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(gradient(got, logits), gradient(want, logits), rtol=1e-7, atol=1e-9)


@each_loss_and_tail
def test_gradcheck_with_a_mass_below_one(loss, tail):
    teacher, logits, ids = problem(rows=3, vocab=9, topk=3)
    assert (support_mass(teacher.gather(1, ids)) < 0.95).all()
    assert torch.autograd.gradcheck(
        lambda z: compute(loss, teacher.gather(1, ids), student_of(z, ids), tail), (logits,)
    )


def test_plain_sum_weighs_the_softmax_by_the_teachers_mass():
    """dL/dz = P q - p on S, P q outside; q - p would be right for P = 1 only."""
    teacher, logits, ids = problem()
    p = torch.zeros_like(teacher).scatter(1, ids, teacher.exp().gather(1, ids))
    grad = gradient(forward_kl(teacher.gather(1, ids), student_of(logits, ids), tail="none"), logits)
    torch.testing.assert_close(grad, p.sum(-1, keepdim=True) * logits.softmax(-1).detach() - p)


def test_bucket_moves_the_tail_by_the_difference_of_the_masses():
    """dL/dz = q - p on S and q (P - Q) / (1 - Q) outside: the tail rises where the teacher has more of it."""
    teacher, logits, ids = problem()
    q, inside = logits.softmax(-1).detach(), torch.zeros_like(teacher).scatter(1, ids, 1.0).bool()
    mass_p, mass_q = (support_mass(x.gather(1, ids))[:, None] for x in (teacher, q.log()))
    want = torch.where(inside, q - teacher.exp(), q * (mass_p - mass_q) / (1 - mass_q))
    grad = gradient(forward_kl(teacher.gather(1, ids), student_of(logits, ids), tail="bucket"), logits)
    torch.testing.assert_close(grad, want)


def test_the_expected_gradient_with_sampled_tokens_is_that_of_the_whole_vocabulary(monkeypatch):
    monkeypatch.setattr(divergence, "TAIL_RATIO_LIMIT", 1e9)
    teacher, logits, ids = problem(scale=1.0)
    student = logits.log_softmax(-1)
    tails = [x.scatter(1, ids, -torch.inf).logsumexp(1) for x in (teacher, student)]
    want = gradient((teacher.exp() * (teacher - student)).sum(1), logits)
    p, q = (torch.cat([x.gather(1, ids), tail[:, None]], 1) for x, tail in zip((teacher, student), tails, strict=True))
    got = gradient((p.exp() * (p - q)).sum(1), logits)
    assert (got - want).abs().max() > 1e-2  # the bucket alone
    for token in range(teacher.shape[1]):
        more = divergence.within_tail(teacher[:, token], student[:, token], *tails, (ids != token).all(1))
        assert (more == 0).all()
        got = got + student[:, token].detach().exp()[:, None] * gradient(more, logits)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_sampled_token_that_the_teacher_finds_impossible_has_a_bounded_finite_gradient():
    """Also one of which rounding leaves the teacher no tail, and tokens of S, where nothing is added."""
    inf, outside = torch.inf, torch.tensor([True, True, False])
    teacher, teacher_tail = torch.tensor([-inf, -30.0, -1.0]), torch.tensor([-1.0, -inf, -inf])
    student = torch.tensor([-3.0, -60.0, -1.0], requires_grad=True)
    student_tail = torch.tensor([-2.0, -59.0, -inf], requires_grad=True)
    more = divergence.within_tail(teacher, student, teacher_tail, student_tail, outside)
    slope, slope_of_tail = torch.autograd.grad(more.sum(), (student, student_tail))
    assert slope.tolist() == (-slope_of_tail).tolist()
    assert slope.tolist() == pytest.approx([math.e, 0, 0])  # positive: less likely after a step


def test_renormalise_leaves_the_students_mass_alone():
    """Raising all of S together changes nothing, unlike with the bucket."""
    teacher, logits, ids = problem()
    for tail, change in (("renormalise", False), ("bucket", True)):
        grad = gradient(compute("reverse_kl", teacher.gather(1, ids), student_of(logits, ids), tail), logits)
        along = grad.gather(1, ids).sum(-1)
        assert (along.abs() > 1e-3).any() == change, tail


def descend(loss, tail, steps=600):
    """Student after Adam on logits, from close to the teacher; both [V], and the mass on S, K = 2."""
    teacher = torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64).log()
    logits = (teacher + torch.tensor([[0.3, -0.2, 0.1, 0.0]])).detach().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        student = logits.log_softmax(-1)
        compute(loss, teacher[:, :2], student[:, :2], tail).sum().backward()
        optimizer.step()
    return logits.softmax(-1).detach()[0], teacher.exp()[0]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_with_the_bucket_descent_ends_at_the_teacher(loss):
    student, teacher = descend(loss, "bucket")
    torch.testing.assert_close(student[:2], teacher[:2], rtol=0, atol=5e-3)


@pytest.mark.slow
def test_without_a_tail_the_mass_leaves_as_documented():
    """The defect of a plain sum: forward drives all of the mass into S, reverse to q = p / e, out of S."""
    student, teacher = descend("forward_kl", "none")
    torch.testing.assert_close(student[:2], teacher[:2] / teacher[:2].sum(), rtol=0, atol=0.02)
    student, teacher = descend("reverse_kl", "none")
    torch.testing.assert_close(student[:2], teacher[:2] / math.e, rtol=0, atol=5e-3)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    loss=st.sampled_from(LOSSES), seed=st.integers(0, 10_000), topk=st.integers(1, 11), scale=st.floats(0.01, 8),
    tail=st.sampled_from(["bucket", "renormalise"]),
)
def test_not_negative(loss, seed, topk, scale, tail):
    teacher, logits, ids = problem(rows=3, vocab=11, topk=topk, seed=seed, scale=scale)
    assert (compute(loss, teacher.gather(1, ids), student_of(logits, ids), tail) > -1.01 * TAIL_FLOOR).all()


@settings(max_examples=50, deadline=None)
@given(loss=st.sampled_from(LOSSES), seed=st.integers(0, 10_000), topk=st.integers(1, 11))
def test_bucket_is_a_lower_bound_of_the_full_divergence(loss, seed, topk):
    teacher, logits, ids = problem(rows=3, vocab=11, topk=topk, seed=seed)
    student, everything = logits.log_softmax(-1), torch.arange(11).expand(3, 11)
    full = naive(loss, teacher, logits, everything, "none")
    assert (compute(loss, teacher.gather(1, ids), student.gather(1, ids), "bucket") <= full + 2e-5).all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
def test_student_equal_to_teacher_is_the_optimum(loss, tail):
    teacher, _, ids = problem()
    logits = teacher.clone().requires_grad_()
    value = compute(loss, teacher.gather(1, ids), student_of(logits, ids), tail)
    torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(value, logits), torch.zeros_like(logits), rtol=0, atol=1e-12)


def test_jsd_tends_to_the_two_divergences():
    """JSD / beta -> forward and JSD / (1 - beta) -> reverse; at the ends themselves the two exactly."""
    teacher, logits, ids = problem()
    arguments = teacher.gather(1, ids), student_of(logits.detach(), ids)
    for tail in TAILS[::2]:
        forward, reverse = forward_kl(*arguments, tail=tail), reverse_kl(*arguments, tail=tail)
        torch.testing.assert_close(jsd(*arguments, beta=1e-7, tail=tail) / 1e-7, forward, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(jsd(*arguments, beta=1 - 1e-7, tail=tail) / 1e-7, reverse, rtol=1e-4, atol=1e-6)
        assert torch.equal(jsd(*arguments, beta=0.0, tail=tail), forward)
        assert torch.equal(jsd(*arguments, beta=1.0, tail=tail), reverse)
    swapped = jsd(arguments[1], arguments[0], beta=0.7, tail="bucket")
    torch.testing.assert_close(jsd(*arguments, beta=0.3, tail="bucket"), swapped)


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("tail_mass", [0.1, 1e-3, 1e-5, 1e-7, 1e-9])
def test_the_floor_is_above_the_noise_of_a_float32_head(tail_mass, offset):
    """Nearly all of the mass on one of 1,000 tokens: the tail is right to within about the floor."""
    gen = torch.Generator().manual_seed(0)
    rest = torch.randn(64, 999, generator=gen).log_softmax(-1) + math.log(tail_mass)
    logits = torch.cat([torch.full((64, 1), math.log1p(-tail_mass)), rest], 1) + offset
    ids = torch.tensor([[0, 5]]).expand(64, 2)
    exact = 1 - support_mass(logits.double().log_softmax(-1).gather(1, ids))
    student = logprobs_of_ids(logits, torch.eye(1000), ids)
    assert ((1 - support_mass(student)).double() - exact).abs().max() < 2 * TAIL_FLOOR


def confident(tail_mass, offset, rows=64, vocab=1000, topk=8):
    """float32 logits [T, V] of a student with that mass outside of `ids` [T, K + 1], whose last column is the first."""
    gen = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(vocab, generator=gen)[:topk] for _ in range(rows)])
    inside, rest = (torch.randn(rows, n, generator=gen, dtype=torch.float64) for n in (topk, vocab))
    rest = rest.scatter(1, ids, -math.inf).log_softmax(-1) + math.log(tail_mass)
    logits = rest.scatter(1, ids, (2 * inside).log_softmax(-1) + math.log1p(-tail_mass)) + offset
    return logits.float().requires_grad_(), torch.cat([ids, ids[:, :1]], 1)


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("tail_mass", [1e-3, 1e-5, 1e-7, 1e-9, 1e-20])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_heads_tail_is_exact_in_float32(loss, tail_mass, offset):
    """Value and logit gradients, those outside of S by themselves, to 2e-5 of float64; the teacher has 1 % outside."""
    logits, ids = confident(tail_mass, offset)
    teacher = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).log_softmax(-1) + math.log(0.99)
    exact = logits.detach().double().requires_grad_()
    student = exact.log_softmax(-1)
    inside = torch.zeros_like(student).scatter(1, ids, 1.0).bool()
    student_tail = student.masked_fill(inside, -math.inf).logsumexp(-1)
    teacher_tail = (1 - support_mass(teacher.double())).log()
    p = torch.cat([teacher.double(), teacher_tail[:, None]], 1).exp()
    q = torch.cat([student.gather(1, ids[:, :8]), student_tail[:, None]], 1).exp()
    beta = float(loss.split()[1]) if " " in loss else {"forward_kl": 1.0, "reverse_kl": 0.0}[loss]
    m = {"forward_kl": q, "reverse_kl": p}.get(loss, beta * p + (1 - beta) * q)
    want = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
    want = want.sum() - 0.1 * student.gather(1, ids[:, 8:]).sum()  # and the sampled token, which is one of S

    name, _, _ = loss.partition(" ")
    options = {"tail": "bucket"} | ({"beta": beta} if " " in loss else {})

    def loss_fn(q, rows):
        tails = {"teacher_tail": teacher_tail[rows], "student_tail": q[:, 8]}
        value = getattr(divergence, name)(teacher[rows], q[:, :8], **tails, **options)
        return value - 0.1 * q[:, 9], {}

    got, _ = head_loss(logits, torch.eye(1000), ids, loss_fn, chunk_rows=20, tail_topk=8)
    assert abs(got.item() - want.item()) < 2e-5 * abs(want.item())
    found, expected = gradient(got, logits).double(), gradient(want, exact)
    for part in (inside, ~inside):
        error = (found - expected)[part].norm() / expected[part].norm()
        assert error < 2e-5, error


def test_without_the_heads_tail_the_pull_on_it_fades_below_the_floor():
    """The documented bounds hold: sign, (1 - Q) / TAIL_FLOOR of its size, gradient error at most 3 (1 - P) per row."""
    teacher = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).log_softmax(-1) + math.log(0.99)

    def loss_fn(q, rows):
        student_tail = q[:, 8] if q.shape[1] > 8 else None
        return forward_kl(teacher[rows], q[:, :8], tail="bucket", student_tail=student_tail), {}

    for tail_mass in (1e-7, 1e-9):
        logits, ids = confident(tail_mass, 0.0)
        inside = torch.zeros(64, 1000).scatter(1, ids, 1.0).bool()
        grads = [
            gradient(head_loss(logits, torch.eye(1000), ids[:, :8], loss_fn, tail_topk=topk)[0], logits)
            for topk in (0, 8)
        ]
        pulls = [grad.masked_fill(inside, 0.0).sum(1) for grad in grads]
        assert (pulls[1] < 0).all()
        torch.testing.assert_close(pulls[0] / pulls[1], torch.full((64,), tail_mass / TAIL_FLOOR), rtol=0.01, atol=0)
        assert (grads[0] - grads[1]).abs().sum(1).max() < 3 * 0.01


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tail_mass", [0.0, 1e-45, 1e-38])
def test_a_student_without_anything_outside(loss, tail_mass):
    """log(1 - Q) of -1e30, or so small that its exponential is none: finite, and without a pull that explodes."""
    logits = torch.tensor([[1.0, 2.0, -1e30 if tail_mass == 0 else math.log(tail_mass)]], requires_grad=True)
    name, _, beta = loss.partition(" ")
    options = {"tail": "bucket"} | ({"beta": float(beta)} if beta else {})
    teacher = torch.tensor([[0.5, 0.4]]).log()

    def loss_fn(q, rows):
        return getattr(divergence, name)(teacher, q[:, :2], student_tail=q[:, 2], **options), {}

    value, _ = head_loss(logits, torch.eye(3), torch.tensor([[0, 1]]), loss_fn, tail_topk=2)
    assert value.isfinite()
    grad = gradient(value, logits)
    assert grad.abs().max() < 3


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tail", TAILS)
def test_teacher_mass_of_one_and_slightly_above(loss, tail):
    """float16 rounding of the teacher: finite, and close to the value without rounding."""
    exact = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log()
    above = exact.half() + torch.tensor(1e-3, dtype=torch.float16)
    assert above.double().exp().sum() > 1
    student = torch.tensor([[0.5, 0.4]]).log().requires_grad_()
    for teacher in (exact.float(), above):
        value = compute(loss, teacher, student, tail)
        assert value.dtype == torch.float32
        assert gradient(value, student).isfinite().all()
    want = compute(loss, exact, student.double(), tail)
    assert value.item() == pytest.approx(want.item(), abs=5e-3)


@pytest.mark.parametrize("student_mass", [1.0, 1.0 + 1e-6, 1 - 1e-8])
def test_gradient_survives_a_student_without_a_tail(student_mass):
    """The teacher has 10 % outside S, the student nothing: the pull towards the tail is strong, finite, and of the
    slope 1 / floor, not cut off."""
    teacher = torch.tensor([[0.6, 0.3]]).log()
    student = (torch.tensor([[0.7, 0.3]], dtype=torch.float64) * student_mass).log().float().requires_grad_()
    loss = forward_kl(teacher, student, tail="bucket")
    loss.sum().backward()
    assert math.isfinite(loss.item())
    want = -teacher.exp() + 0.1 / TAIL_FLOOR * student.detach().exp()
    torch.testing.assert_close(student.grad, want, rtol=1e-4, atol=0)
    assert (student.grad > 0).all()


@pytest.mark.slow
def test_float32_logits_learn_the_tail_back():
    """Descent from a student that is certain within S reaches the teacher's tail mass."""
    teacher = torch.tensor([[0.6, 0.3, 0.05, 0.05]]).log()
    logits = torch.tensor([[9.0, 8.5, -2.0, -2.0]], requires_grad=True)
    ids = torch.tensor([[0, 1]])
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        forward_kl(teacher[:, :2], student_of(logits, ids), tail="bucket").sum().backward()
        optimizer.step()
    torch.testing.assert_close(logits.softmax(-1), teacher.exp(), rtol=0, atol=0.01)


def test_no_clamp_kills_the_gradient_of_an_unlikely_token():
    """The student gives the teacher's favourite e^-40: the pull on it is the strongest there can be, not 0."""
    teacher = torch.tensor([[0.99, 0.005]]).log()
    logits = torch.tensor([[-40.0, 0.0, 0.0]], requires_grad=True)
    grad = gradient(forward_kl(teacher, student_of(logits, torch.tensor([[0, 1]])), tail="bucket"), logits)
    assert grad[0, 0].item() == pytest.approx(-0.99, abs=1e-5)


def test_estimators_by_hand():
    teacher, student = log([0.5, 0.1, 0.2])[0], log([0.25, 0.4, 0.2])[0]
    torch.testing.assert_close(k1(teacher, student), torch.tensor([-LOG2, 2 * LOG2, 0], dtype=torch.float64))
    torch.testing.assert_close(k2(teacher, student), torch.tensor([LOG2**2 / 2, 2 * LOG2**2, 0], dtype=torch.float64))
    torch.testing.assert_close(
        k3(teacher, student), torch.tensor([1 - LOG2, 2 * LOG2 - 0.75, 0], dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_estimators_in_expectation_over_the_students_samples():
    """Values: k1 and k3 are unbiased for KL(q || p). Gradients as losses: k1 none, k2 reverse, k3 forward."""
    teacher, logits, _ = problem(rows=4, vocab=11)
    everything = torch.arange(11).expand(4, 11)
    student = logits.log_softmax(-1)
    q = student.exp().detach()
    reverse, forward = (naive(loss, teacher, logits, everything, "none") for loss in ("reverse_kl", "forward_kl"))
    for estimator, value, want in ((k1, True, None), (k2, False, reverse), (k3, True, forward)):
        losses = (q * estimator(teacher, student)).sum(-1)  # the expectation, drawn from a q that does not move
        if value:
            torch.testing.assert_close(losses, reverse)
        want_grad = torch.zeros_like(logits) if want is None else gradient(want, logits)
        torch.testing.assert_close(gradient(losses, logits), want_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_score_weight_gives_the_gradient_of_the_estimators_expectation(name):
    teacher, logits, _ = problem(rows=4, vocab=11)
    student = logits.log_softmax(-1)
    log_ratio = student - teacher
    value = {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}[name]
    weight = score_weight(name, teacher, student)
    assert not weight.requires_grad
    descent = (student.exp().detach() * weight * student).sum(-1)  # a step on what was drawn from q
    want = gradient((student.exp() * value).sum(-1), logits)  # q moves as well
    torch.testing.assert_close(gradient(descent, logits), want, rtol=1e-9, atol=1e-12)
    if name != "k2":
        reverse = gradient((student.exp() * log_ratio).sum(-1), logits)
        torch.testing.assert_close(want, reverse, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["k3", "k3+"])
def test_k3_of_a_log_ratio_beyond_20_is_that_of_20(kind):
    """Finite in float32, where exp(89) is not; below 20 no value is limited and no gradient is lost."""
    log_ratio = torch.tensor([-300.0, -25.0, -19.0, 0.5, 15.0, 19.5, 30.0, 95.0])
    student = torch.full_like(log_ratio, -3.0, requires_grad=True)
    values = KL_LOSSES[kind].function(student.detach() + log_ratio, student)
    (gradients,) = torch.autograd.grad(values.sum(), student)
    bounded = log_ratio.double().clamp(-20, 20)
    torch.testing.assert_close(values, (bounded.expm1() - bounded).float())
    within = torch.where(log_ratio.abs() < 20, 1 - log_ratio.exp(), 0)
    torch.testing.assert_close(gradients, -log_ratio if kind == "k3+" else within, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tail", ["bucket", "none", "renormalise"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_candidate_without_any_probability_leaves_a_loss_finite(loss, tail):
    """It counts as e^-80, which moves no loss that weighs it with the side that has no mass there."""
    everything = log([0.6, 0.3, 0.05, 0.02], [0.1, 0.2, 0.3, 0.1])
    holed = everything.masked_fill(torch.tensor([[0, 0, 0, 1], [1, 0, 0, 1]], dtype=torch.bool), -math.inf)
    for teacher, student in ((holed, everything), (everything, holed), (holed, holed)):
        student = student.clone().requires_grad_()
        values = compute(loss, teacher, student, tail)
        assert values.isfinite().all()
        assert torch.autograd.grad(values.sum(), student)[0].isfinite().all()
        filled = [each.detach().clamp(min=-80) for each in (teacher, student)]
        torch.testing.assert_close(values, compute(loss, *filled, tail))
    for estimator in (k1, k2, k3):
        assert estimator(holed[1], everything[1]).isfinite().all()


def test_support_mass():
    torch.testing.assert_close(support_mass(log([0.5, 0.25], [0.1, 0.0625])), torch.tensor([0.75, 0.1625]).double())


@pytest.mark.parametrize("loss", LOSSES)
def test_no_rows(loss):
    assert compute(loss, torch.zeros(0, 4), torch.zeros(0, 4), "bucket").shape == (0,)


def test_refuses():
    with pytest.raises(ValueError, match=r"\(2, 3\) \(teacher\) and \(2, 1\) \(student\)"):
        forward_kl(torch.zeros(2, 3), torch.zeros(2, 1), tail="none")
    with pytest.raises(ValueError, match=r"must both be \[T, K\]"):
        reverse_kl(torch.zeros(2), torch.zeros(2), tail="none")
    with pytest.raises(ValueError, match="'renormalize'"):
        forward_kl(torch.zeros(2, 3), torch.zeros(2, 3), tail="renormalize")
    with pytest.raises(ValueError, match="beta"):
        jsd(torch.zeros(2, 3), torch.zeros(2, 3), beta=1.5, tail="none")
    with pytest.raises(ValueError, match="one shape"):
        k2(torch.zeros(2), torch.zeros(1))


@pytest.mark.parametrize("kind", VERL_KL["losses"])
def test_the_kl_to_a_reference_has_verls_values_and_gradients(kind):
    student, reference = (torch.tensor(np.concatenate(VERL_KL[name])) for name in ("logprobs", "ref_logprobs"))
    values = KL_LOSSES[kind].function(reference, student.requires_grad_())
    (gradients,) = torch.autograd.grad(values.sum(), student)
    for found, expected in ((values, "values"), (gradients, "gradients")):
        torch.testing.assert_close(found, torch.tensor(VERL_KL["losses"][kind][expected]).double(), **CLOSE)


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+", "abs"])
def test_in_the_mean_over_its_samples_a_loss_has_the_gradient_of_its_distance(kind):
    """KL(q || p), and of abs twice the total variation distance; k1 would have none, k3 has another one's."""
    generator = torch.Generator().manual_seed(0)
    p, logits = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    p, q = p.log_softmax(0), logits.requires_grad_().log_softmax(0)
    (found,) = torch.autograd.grad((q.exp().detach() * KL_LOSSES[kind].function(p, q)).sum(), logits, retain_graph=True)
    distance = (q.exp() - p.exp()).abs() if kind == "abs" else q.exp() * (q - p)
    torch.testing.assert_close(found, torch.autograd.grad(distance.sum(), logits)[0])

"""forward_kl against closed forms and against plain autograd on full logits. CPU, a few seconds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_gkd.losses.divergence import STUDENT_TAIL_FLOOR, forward_kl, support_mass
from hybrid_gkd.losses.head import logprobs_of_ids

TAILS = ["bucket", "none", "renormalise"]


def log(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def problem(rows=7, vocab=29, topk=5, seed=0, scale=2.0):
    """Teacher log-probabilities [T, V], student logits [T, V] with gradient, the teacher's top-k ids [T, K]."""
    gen = torch.Generator().manual_seed(seed)
    teacher = (scale * torch.randn(rows, vocab, generator=gen, dtype=torch.float64)).log_softmax(-1)
    logits = scale * torch.randn(rows, vocab, generator=gen, dtype=torch.float64)
    return teacher, logits.requires_grad_(), teacher.topk(topk, -1).indices


def naive_forward_kl(teacher, logits, ids, tail):
    """Straight from the table of the design, on probabilities; nothing shared with the product code."""
    p, q = teacher.exp().gather(1, ids), logits.softmax(-1).gather(1, ids)
    if tail == "renormalise":
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    loss = (p * (p / q).log()).sum(-1)
    if tail == "bucket":
        p_tail, q_tail = 1 - p.sum(-1), 1 - q.sum(-1)
        loss = loss + p_tail * (p_tail / q_tail).log()
    return loss


# p = (1/2, 1/4), q = (1/4, 1/2), tails 1/4 and 1/4.
@pytest.mark.parametrize(
    ("tail", "want"),
    [
        ("bucket", 0.25 * math.log(2)),  # 1/2 log 2 - 1/4 log 2 + 1/4 log 1
        ("none", 0.25 * math.log(2)),
        ("renormalise", math.log(2) / 3),  # 2/3 log 2 - 1/3 log 2
    ],
)
def test_closed_form_equal_tails(tail, want):
    assert forward_kl(log([0.5, 0.25]), log([0.25, 0.5]), tail=tail).item() == pytest.approx(want, abs=1e-12)


# p = (1/2, 1/4), q = (1/8, 1/8), tails 1/4 and 3/4.
@pytest.mark.parametrize(
    ("tail", "want"),
    [
        ("bucket", 1.25 * math.log(2) - 0.25 * math.log(3)),  # 1/2 log 4 + 1/4 log 2 + 1/4 log 1/3
        ("none", 1.25 * math.log(2)),
        ("renormalise", 5 / 3 * math.log(2) - math.log(3)),  # 2/3 log 4/3 + 1/3 log 2/3
    ],
)
def test_closed_form_different_tails(tail, want):
    assert forward_kl(log([0.5, 0.25]), log([0.125, 0.125]), tail=tail).item() == pytest.approx(want, abs=1e-12)


def test_closed_form_gradient_of_the_bucket():
    """d/dlog q_j of -p_j log q_j - (1-P) log(1-Q) is -p_j + (1-P) q_j / (1-Q)."""
    q = log([0.125, 0.125]).requires_grad_()
    forward_kl(log([0.5, 0.25]), q, tail="bucket").sum().backward()
    torch.testing.assert_close(q.grad, torch.tensor([[-0.5 + 0.25 / 6, -0.25 + 0.25 / 6]], dtype=torch.float64))


@pytest.mark.parametrize("tail", TAILS)
def test_whole_vocabulary_gives_the_full_divergence(tail):
    teacher, logits, _ = problem()
    ids = torch.arange(29).flip(0).expand(7, 29)
    want = torch.nn.functional.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="none").sum(-1)
    got = forward_kl(teacher.gather(1, ids), logits.log_softmax(-1).gather(1, ids), tail=tail)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    (got_grad,) = torch.autograd.grad(got.sum(), logits)
    torch.testing.assert_close(got_grad, logits.softmax(-1) - teacher.exp(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("head", ["fused", "log_softmax"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("topk", [1, 5, 28])
def test_value_and_logit_gradient_equal_naive(tail, head, topk):
    teacher, logits, ids = problem(topk=topk)
    if head == "fused":
        student, _ = logprobs_of_ids(logits, torch.eye(29, dtype=torch.float64), ids, chunk_rows=3)
    else:
        student = logits.log_softmax(-1).gather(1, ids)
    got = forward_kl(teacher.gather(1, ids), student, tail=tail)
    want = naive_forward_kl(teacher, logits, ids, tail)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    (got_grad,) = torch.autograd.grad(got.sum(), logits)
    (want_grad,) = torch.autograd.grad(want.sum(), logits)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got_grad.sum(-1), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)


def test_plain_sum_weighs_the_softmax_by_the_teachers_mass():
    """dL/dz = P q - p on S, P q outside; q - p would be right for P = 1 only."""
    teacher, logits, ids = problem()
    p = torch.zeros_like(teacher).scatter(1, ids, teacher.exp().gather(1, ids))
    student, _ = logprobs_of_ids(logits, torch.eye(29, dtype=torch.float64), ids)
    (grad,) = torch.autograd.grad(forward_kl(teacher.gather(1, ids), student, tail="none").sum(), logits)
    torch.testing.assert_close(grad, p.sum(-1, keepdim=True) * logits.softmax(-1).detach() - p)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    topk=st.integers(1, 11),
    scale=st.floats(0.01, 8),
    tail=st.sampled_from(["bucket", "renormalise"]),
)
def test_not_negative(seed, topk, scale, tail):
    teacher, logits, ids = problem(rows=3, vocab=11, topk=topk, seed=seed, scale=scale)
    loss = forward_kl(teacher.gather(1, ids), logits.log_softmax(-1).gather(1, ids), tail=tail)
    assert (loss > -1.01 * STUDENT_TAIL_FLOOR).all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), topk=st.integers(1, 11))
def test_bucket_is_a_lower_bound_of_the_full_divergence(seed, topk):
    teacher, logits, ids = problem(rows=3, vocab=11, topk=topk, seed=seed)
    student = logits.log_softmax(-1)
    full = (teacher.exp() * (teacher - student)).sum(-1)
    assert (forward_kl(teacher.gather(1, ids), student.gather(1, ids), tail="bucket") <= full + 1e-9).all()


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
def test_student_equal_to_teacher_is_the_optimum(tail):
    teacher, _, ids = problem()
    logits = teacher.clone().requires_grad_()
    loss = forward_kl(teacher.gather(1, ids), logits.log_softmax(-1).gather(1, ids), tail=tail)
    torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tail", TAILS)
def test_teacher_mass_slightly_above_one(tail):
    """float16 rounding of the teacher: finite, close to the value without rounding, no gradient for a tail."""
    teacher = torch.tensor([[0.6, 0.3997]], dtype=torch.float64).log().half()
    assert teacher.double().exp().sum() > 1 - 1e-3
    teacher = teacher + torch.tensor(1e-3, dtype=torch.float16)
    assert teacher.double().exp().sum() > 1
    student = torch.tensor([[0.5, 0.4]]).log().requires_grad_()
    loss = forward_kl(teacher, student, tail=tail)
    loss.sum().backward()
    want = naive_forward_kl(log([0.6, 0.4]), torch.tensor([[0.5, 0.4, 0.1]]).log(), torch.tensor([[0, 1]]), "none")
    if tail == "renormalise":
        want = forward_kl(log([0.6, 0.4]), student.double().detach(), tail=tail)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), abs=5e-3)
    if tail == "bucket":
        torch.testing.assert_close(student.grad, -teacher.float().exp())


@pytest.mark.parametrize("student_mass", [1.0, 1.0 + 1e-6, 1 - 1e-8])
def test_gradient_survives_a_student_without_a_tail(student_mass):
    """The teacher has 10 % outside S, the student nothing: the pull towards the tail is strong, finite, and of the
    slope 1 / floor, not cut off."""
    teacher = torch.tensor([[0.6, 0.3]]).log()
    student = (torch.tensor([[0.7, 0.3]], dtype=torch.float64) * student_mass).log().float().requires_grad_()
    loss = forward_kl(teacher, student, tail="bucket")
    loss.sum().backward()
    assert math.isfinite(loss.item())
    want = -teacher.exp() + 0.1 / STUDENT_TAIL_FLOOR * student.detach().exp()
    torch.testing.assert_close(student.grad, want, rtol=1e-4, atol=0)
    assert (student.grad > 0).all()


def test_float32_logits_learn_the_tail_back():
    """Descent from a student that is certain within S reaches the teacher's tail mass."""
    teacher = torch.tensor([[0.6, 0.3, 0.05, 0.05]]).log()
    logits = torch.tensor([[9.0, 8.5, -2.0, -2.0]], requires_grad=True)
    ids = torch.tensor([[0, 1]])
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(400):
        student, _ = logprobs_of_ids(logits, torch.eye(4), ids)
        optimizer.zero_grad()
        forward_kl(teacher[:, :2], student, tail="bucket").sum().backward()
        optimizer.step()
    torch.testing.assert_close(logits.softmax(-1), teacher.exp(), rtol=0, atol=0.01)


def test_support_mass():
    torch.testing.assert_close(support_mass(log([0.5, 0.25], [0.1, 0.0625])), torch.tensor([0.75, 0.1625]).double())


def test_no_rows():
    assert forward_kl(torch.zeros(0, 4), torch.zeros(0, 4), tail="bucket").shape == (0,)


def test_refuses():
    with pytest.raises(ValueError, match=r"\(2, 3\) \(teacher\) and \(2, 1\) \(student\)"):
        forward_kl(torch.zeros(2, 3), torch.zeros(2, 1), tail="none")
    with pytest.raises(ValueError, match="'renormalize'"):
        forward_kl(torch.zeros(2, 3), torch.zeros(2, 3), tail="renormalize")

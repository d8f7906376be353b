"""The teacher's tail from its logits to the gradient: engine, protocol, objective and head against float64. CPU."""

import math

import numpy as np
import pytest
import torch

from hybrid_gkd.config import ActorConfig, DistillationConfig
from hybrid_gkd.losses import divergence
from hybrid_gkd.losses.divergence import compare, forward_kl, jsd, reverse_kl
from hybrid_gkd.losses.head import head_loss
from hybrid_gkd.losses.topk import top_logprobs
from hybrid_gkd.student.actor import make_objective
from hybrid_gkd.teacher import protocol
from hybrid_gkd.types import TopK

ROWS, VOCAB, TOPK = 64, 500, 20
MODES = {
    "forward_kl": {"forward_kl": 1.0}, "reverse_kl": {"reverse_kl": 1.0}, "jsd": {"jsd": 1.0},
    "mixed": {"forward_kl": 0.3, "reverse_kl": 0.5, "jsd": 0.2},
}
each_mode = pytest.mark.parametrize("mode", MODES)


def with_tail(logits, ids, mass):
    """The same logits with that mass outside of `ids`."""
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, value=True)
    within, rest = (logits.masked_fill(m, -math.inf).logsumexp(1, keepdim=True) for m in (~inside, inside))
    return torch.where(inside, logits - within + math.log1p(-mass), logits - rest + math.log(mass))


def problem(case):
    """Teacher's and student's logits [T, V], float32."""
    gen = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, ROWS, VOCAB, generator=gen, dtype=torch.float64)
    if case == "sharp":  # the teacher's tails are 1e-12 to 1e-2, and many of the student's near 1
        teacher, student = 12 * teacher, 12 * (0.7 * teacher + 0.7 * student)
    else:
        ids = teacher.topk(TOPK).indices
        teacher, student = with_tail(teacher, ids, float(case)), with_tail(student, ids, 0.5)
    return teacher.float(), student.float().requires_grad_()


def sent(logits, topk=TOPK, temperature=1.0):
    """The scores of a teacher with these logits, as they come out of the client."""
    temperatures = torch.full((len(logits),), temperature)
    targets = torch.zeros(len(logits), dtype=torch.int64)
    found = top_logprobs(logits, lambda rows: rows, targets, temperatures, topk, logits.shape[1])
    names = ("ids", "logprobs", "tail_logprobs", "sampled_logprobs")
    scores = TopK(**{name: part.numpy() for name, part in zip(names, found, strict=True)})
    frames = protocol.encode_message(protocol.ScoreResult(id="a", attempt=1), protocol.result_arrays([scores]))
    header = protocol.decode_header(bytes(frames[0]))
    (scores,) = protocol.unpack_result(
        header, [bytes(frame) for frame in frames[1:]], topk=topk, vocab_size=logits.shape[1],
        num_scored=[len(logits)],
    )
    return scores


def product(mode, scores, student, temperature=1.0):
    """Value and logit gradient of what a run computes, and the reported sums."""
    weights = {"loss_mode": mode} if mode != "mixed" else {"loss_mode": mode, "mixed_weights": MODES[mode]}
    objective = make_objective(DistillationConfig(**weights), ActorConfig())
    ids = torch.from_numpy(scores.ids).long()
    names = ("logprobs", "tail_logprobs", "sampled_logprobs")
    signals = {f"teacher.{name}": torch.from_numpy(getattr(scores, name)) for name in names}
    value, parts = head_loss(
        student, torch.eye(student.shape[1]), ids, objective.loss_fn(signals), temperature=temperature, chunk_rows=20,
        tail_topk=ids.shape[1],
    )
    return value, torch.autograd.grad(value, student)[0], parts


def outcomes(logits, ids):
    """Log-probabilities of `ids` and of everything else together, in logarithms throughout."""
    logprobs = logits.log_softmax(1)
    rest = logprobs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), rest], 1)


def reference(mode, teacher, student, ids, temperature=1.0):
    """The same from full logits in float64; nothing shared with the product code."""
    student = student.detach().double().requires_grad_()
    p, q = (outcomes(logits / temperature, ids) for logits in (teacher.double(), student))
    m = torch.log((p.exp() + q.exp()) / 2)
    values = {
        "forward_kl": (p.exp() * (p - q)).sum(), "reverse_kl": (q.exp() * (q - p)).sum(),
        "jsd": ((p.exp() * (p - m)).sum() + (q.exp() * (q - m)).sum()) / 2,
    }
    value = sum(weight * values[name] for name, weight in MODES[mode].items())
    return value, torch.autograd.grad(value, student)[0], values


@each_mode
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("case", ["sharp", "0.3", "1e-4", "1e-9", "1e-20"])
def test_values_and_gradients_equal_full_logits(mode, case, temperature):
    """Within what float16 does to the candidates, 1/2048 of each log-probability."""
    teacher, student = problem(case)
    scores = sent(teacher, temperature=temperature)
    value, grad, parts = product(mode, scores, student, temperature)
    ids = torch.from_numpy(scores.ids).long()
    want, want_grad, both = reference(mode, teacher, student, ids, temperature)
    assert value.item() == pytest.approx(want.item(), rel=2e-4)
    assert (grad - want_grad).norm() < 1e-3 * want_grad.norm()
    for name in ("forward_kl", "reverse_kl"):
        assert parts[f"actor/distillation/{name}"].item() == pytest.approx(both[name].item(), rel=5e-4)
    mass = outcomes(teacher.double() / temperature, ids)[:, :-1].exp().sum().item()
    assert parts["actor/distillation/teacher_mass"].item() == pytest.approx(mass, rel=1e-6)


def test_without_the_teachers_tail_sharp_logits_are_wrong():
    """1 minus rounded candidates, at least 1e-6, is what a caller without it gets: the test above can fail."""
    teacher, student = problem("sharp")
    scores = sent(teacher)
    ids = torch.from_numpy(scores.ids).long()
    want, want_grad, _ = reference("reverse_kl", teacher, student, ids)
    q = student.log_softmax(1)
    value = reverse_kl(torch.from_numpy(scores.logprobs), q.gather(1, ids), tail="bucket").sum()
    (grad,) = torch.autograd.grad(value, student)
    assert abs(value - want) > 0.1 * want
    assert (grad - want_grad).norm() > 0.2 * want_grad.norm()


def test_closed_form_of_a_teacher_that_is_nearly_certain():
    """p = (1 - 1e-9, 1e-9), q = (1/2, 1/2); without the teacher's tail the second is taken to be 1e-6."""
    p, q = torch.tensor([[math.log1p(-1e-9)]]), torch.tensor([[math.log(0.5)]])
    tails = {"teacher_tail": torch.tensor([math.log(1e-9)]), "student_tail": q[:, 0]}
    exact = 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-9)
    assert exact == pytest.approx(9.67, abs=0.01)
    assert reverse_kl(p, q, tail="bucket", **tails).item() == pytest.approx(exact, rel=1e-6)
    assert reverse_kl(p, q, tail="bucket").item() == pytest.approx(6.21, abs=0.01)
    assert forward_kl(p, q, tail="bucket", **tails).item() == pytest.approx(math.log(2), rel=1e-6)
    # m = (3/4, 1/4): 1/2 (log 4/3) + 1/2 (1/2 log 2/3 + 1/2 log 2)
    want = 0.5 * math.log(4 / 3) + 0.25 * math.log(4 / 3)
    assert jsd(p, q, beta=0.5, tail="bucket", **tails).item() == pytest.approx(want, rel=1e-5)


@each_mode
def test_the_whole_vocabulary_leaves_no_tail(mode):
    """log 0 on both sides: the full divergence."""
    teacher, student = (logits[:, :30] for logits in problem("0.3"))
    student = student.detach().requires_grad_()
    scores = sent(teacher, topk=30)
    assert (scores.tail_logprobs == -np.inf).all()
    value, grad, parts = product(mode, scores, student)
    p, q = teacher.double().log_softmax(1), student.detach().double().requires_grad_()
    log_q = q.log_softmax(1)
    m = torch.log((p.exp() + log_q.exp()) / 2)
    values = {
        "forward_kl": (p.exp() * (p - log_q)).sum(), "reverse_kl": (log_q.exp() * (log_q - p)).sum(),
        "jsd": ((p.exp() * (p - m)).sum() + (log_q.exp() * (log_q - m)).sum()) / 2,
    }
    want = sum(weight * values[name] for name, weight in MODES[mode].items())
    assert value.item() == pytest.approx(want.item(), rel=5e-4)
    (want_grad,) = torch.autograd.grad(want, q)
    assert (grad - want_grad).norm() < 1e-3 * want_grad.norm()
    assert parts["actor/distillation/teacher_mass"].item() == ROWS


def test_a_student_with_more_than_the_teacher_can_have():
    """reverse_kl is infinite: counted as if the teacher had e^-80 there, and the student's tail is pushed down."""
    p, q = torch.tensor([[0.0]]), torch.tensor([[0.0, 0.0]], requires_grad=True)
    logprobs = q.log_softmax(1)
    tails = {"teacher_tail": torch.tensor([-math.inf]), "student_tail": logprobs[:, 1]}
    value = reverse_kl(p, logprobs[:, :1], tail="bucket", **tails)
    assert value.item() == pytest.approx(math.log(0.5) + 0.5 * 80, rel=1e-6)
    (grad,) = torch.autograd.grad(value, q)
    torch.testing.assert_close(grad, torch.tensor([[-20.0, 20.0]]))
    for function, options in ((forward_kl, {}), (jsd, {"beta": 0.5})):
        value = function(p, logprobs[:, :1], tail="bucket", **options, **tails)
        assert value.item() > 0
        assert value.isfinite()


@pytest.mark.parametrize("mass", [0.5, 1e-3, 1e-9])
def test_the_rounding_of_the_candidates_does_not_make_a_divergence_negative(mass):
    """A student equal to the teacher: what float16 leaves is of second order, (1/2048)^2, not a negative 1e-4."""
    logits = problem("0.3")[0].double()
    teacher = with_tail(logits, logits.topk(TOPK).indices, mass)
    scores = sent(teacher.float())
    q = outcomes(teacher, torch.from_numpy(scores.ids).long()).float()
    tails = torch.from_numpy(scores.tail_logprobs), q[:, -1]
    found = compare(torch.from_numpy(scores.logprobs), q[:, :-1], *tails)
    for values in (found.forward_kl, found.reverse_kl):
        assert (values.abs() < 3e-6).all()
    sums = torch.from_numpy(scores.logprobs).exp().sum(1) + tails[0].exp()
    assert (sums - 1).abs().max() > 3e-5  # there was something to correct


def test_a_student_without_anything_outside_is_still_pulled():
    """A tail below e^-80 counts as that in value, and keeps its gradient."""
    p, tail = torch.tensor([[math.log(0.9)]]), torch.tensor([-300.0], requires_grad=True)
    tails = {"teacher_tail": torch.tensor([math.log(0.1)]), "student_tail": tail}
    value = forward_kl(p, torch.tensor([[0.0]]), tail="bucket", **tails)
    assert value.item() == pytest.approx(0.9 * math.log(0.9) + 0.1 * (math.log(0.1) + 80), rel=1e-6)
    assert torch.autograd.grad(value, tail)[0].item() == pytest.approx(-0.1)


def test_a_loss_of_ones_own_takes_the_teachers_tail_or_not():
    student_tail, teacher_tail = torch.zeros(1), torch.ones(1)

    def older(teacher_logprobs, student_logprobs, *, tail, student_tail=None): ...

    def newer(teacher_logprobs, student_logprobs, *, tail, teacher_tail, student_tail): ...

    def any_of_them(*logprobs, **options): ...

    taken = [set(divergence.tails_for(each, teacher_tail, student_tail)) for each in (older, newer, any_of_them)]
    assert taken == [{"student_tail"}, {"student_tail", "teacher_tail"}, {"student_tail", "teacher_tail"}]

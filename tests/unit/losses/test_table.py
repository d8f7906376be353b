"""The table of divergences, its documentation, and what a user may put in its place."""

import inspect
from pathlib import Path

import pytest
import torch

from hybrid_gkd.config import ActorConfig, DistillationConfig
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.losses import divergence
from hybrid_gkd.losses.divergence import check_loss_fn
from hybrid_gkd.losses.table import DIVERGENCES, TERMS
from hybrid_gkd.student.actor import make_objective
from hybrid_gkd.types import SIGNALS

PAGE = (Path(__file__).parents[3] / "docs" / "losses.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_row_fits_its_function_and_the_documentation(name):
    row = DIVERGENCES[name]
    keywords = {p.name for p in inspect.signature(row.function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    tails = {"teacher_tail", "student_tail"}
    assert keywords - tails == set(row.options)
    assert keywords & tails == (tails if row.signal == "topk" else set())
    assert f"\n| `{name}` |" in PAGE
    assert all(hasattr(DistillationConfig(), option) for option in row.options)


@pytest.mark.parametrize("tail", ["bucket", "none", "renormalise"])
def test_built_in_losses_pass_the_check_for_ones_own(tail):
    for name in ("forward_kl", "reverse_kl"):
        check_loss_fn(getattr(divergence, name), tail=tail)


def squared(teacher_logprobs, student_logprobs, *, tail, student_tail=None):
    """A loss of one's own: mean squared difference of the log-probabilities."""
    return (teacher_logprobs - student_logprobs).square().mean(-1)


def mixes_rows(teacher_logprobs, student_logprobs, **_):
    difference = (teacher_logprobs - student_logprobs).square().mean(-1)
    return difference / difference.sum()


BAD = {
    "one value per row": lambda t, s, **_: (t - s).square().mean(),
    "no gradient": lambda t, s, **_: t.sum(-1),
    "of a row must depend on that row alone": mixes_rows,
    "divided by the number of rows": lambda t, s, **_: (t - s).square().sum(-1) / len(s),
    "raised TypeError": lambda t, s: t,
    "not finite": lambda t, s, **_: (s - s).sum(-1) / 0,
}


@pytest.mark.parametrize("reason", BAD)
def test_a_loss_that_the_head_cannot_cut_into_chunks_is_refused(reason):
    expected = "that row alone" if reason.startswith("divided") else reason
    with pytest.raises(ConfigError, match=expected) as caught:
        check_loss_fn(BAD[reason], tail="bucket")
    assert "distillation.loss_fn" in str(caught.value)


def test_the_objective_trains_on_a_loss_of_ones_own(tmp_path):
    check_loss_fn(squared, tail="bucket")
    objective = make_objective(DistillationConfig(loss_fn=f"{__file__}:squared"), ActorConfig())
    teacher, student = torch.randn(2, 3, 5).log_softmax(-1)
    signals = {"teacher.logprobs": teacher[:, :4], "teacher.tail_logprobs": teacher[:, 4]}
    loss, parts = objective.loss_fn(signals)(student, slice(None))
    assert torch.equal(loss, squared(teacher[:, :4], student[:, :4], tail="bucket"))
    assert torch.equal(parts["actor/kl_loss"], loss)
    assert not objective.uses_sampled


def test_terms_read_signals_that_there_are():
    loss = DistillationConfig(use_task_rewards=True)
    objective = make_objective(loss, ActorConfig(use_kl_loss=True))
    assert [term.name for term in objective.terms] == ["distillation", "policy", "reference"]
    assert all(term.signal == TERMS[term.name] for term in objective.terms)
    assert set(TERMS.values()) <= SIGNALS.keys()
    known = SIGNALS.keys() | {f"weights/{name}" for name in TERMS}
    own = {f"{term.signal}_weights" for term in objective.terms}
    assert set(objective.signals) - own <= known

"""The loss of a run, through the fused head, against full logits and autograd. CPU, a few seconds."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_gkd.config import ActorConfig, DistillationConfig, PolicyLossConfig
from hybrid_gkd.losses.head import head_loss
from hybrid_gkd.losses.objective import Objective
from hybrid_gkd.losses.table import DIVERGENCES, KL_LOSSES, policy_loss
from hybrid_gkd.losses.terms import distillation, policy, reference, sft
from hybrid_gkd.losses.terms import policy_loss as bound
from hybrid_gkd.reporting.metric_table import check_names
from hybrid_gkd.student.actor import make_objective

VOCAB, DIM = 31, 8
MODES = {
    "forward_kl": {},
    "forward_kl sampled": {"loss_mode": "forward_kl", "tail": "sampled"},
    "forward_kl none": {"loss_mode": "forward_kl", "tail": "none"},
    "reverse_kl": {},
    "reverse_kl renormalise": {"loss_mode": "reverse_kl", "tail": "renormalise"},
    "jsd": {"beta": 0.3},
    "mixed": {"mixed_weights": {"forward_kl": 0.5, "reverse_kl": 0.3, "k2": 0.2}},
    "k1": {"use_policy_gradient": True},
    "k2": {},
    "k3": {},
    "k2 policy": {"loss_mode": "k2", "use_policy_gradient": True},
    "k3 policy": {"loss_mode": "k3", "use_policy_gradient": True},
    "forward_kl and rewards": {"loss_mode": "forward_kl", "use_task_rewards": True, "distillation_loss_coef": 0.4},
    "k1 and rewards": {"loss_mode": "k1", "use_policy_gradient": True, "use_task_rewards": True},
    "ppo": {"loss_mode": "forward_kl", "enabled": False},
}
each_mode = pytest.mark.parametrize("mode", MODES)


def config(mode):
    return DistillationConfig(**({"loss_mode": mode} | MODES[mode]))


class Problem:
    """Hidden states, a head, a teacher, sampled tokens, advantages; all float64 and random."""

    def __init__(self, rows=13, topk=6, seed=0, temperature=1.0):
        gen = torch.Generator().manual_seed(seed)
        self.hidden, self.weight, self.teacher_hidden = (
            torch.randn(n, DIM, generator=gen, dtype=torch.float64) for n in (rows, VOCAB, rows)
        )
        self.temperature = temperature
        self.teacher = (self.teacher_hidden @ self.weight.T / temperature).log_softmax(-1)
        self.topk_ids = self.teacher.topk(topk, -1).indices
        self.sampled = torch.randint(VOCAB, (rows,), generator=gen)
        self.sampled[: rows // 2] = self.topk_ids[: rows // 2, 0]  # an id that the head gets twice
        self.drawn = torch.where(torch.arange(rows) % 5 == 4, -1, self.sampled)  # of the others they are given
        self.advantages = torch.randn(rows, generator=gen, dtype=torch.float64)
        self.old_noise = 0.3 * torch.randn(rows, generator=gen, dtype=torch.float64)
        self.importance = torch.ones(rows, dtype=torch.float64)
        self.own_importance = torch.ones(rows, dtype=torch.float64)  # of the sampled token alone
        self.hidden.requires_grad_()
        self.weight.requires_grad_()

    def student(self):
        return (self.hidden @ self.weight.T / self.temperature).log_softmax(-1)

    def old_logprobs(self):
        return self.student().gather(1, self.sampled[:, None])[:, 0].detach() + self.old_noise

    def signals(self, loss, rows=slice(None)):
        values = {}
        if loss.enabled:
            values |= {"teacher.ids": self.topk_ids, "sampled_ids": self.drawn}
            values["teacher.logprobs"] = self.teacher.gather(1, self.topk_ids)
            outside = self.teacher.scatter(1, self.topk_ids, -torch.inf)
            values["teacher.tail_logprobs"] = outside.logsumexp(1)
            values["teacher.sampled_logprobs"] = self.teacher.gather(1, self.sampled[:, None])[:, 0]
        if not loss.enabled or loss.use_task_rewards:
            values["advantages"] = self.advantages
        values |= {
            "old_logprobs": self.old_logprobs(), "weights": self.importance, "sampled_weights": self.own_importance,
            "quarter": torch.arange(len(self.hidden)) % 4,
        }
        return {name: value[rows] for name, value in values.items()}

    def product(self, loss, *, chunk_rows=5, rows=slice(None)):
        objective = make_objective(loss, ActorConfig())
        ids = [self.topk_ids] if loss.enabled else []
        ids += [self.sampled[:, None]] if objective.uses_sampled else []
        return head_loss(
            self.hidden[rows], self.weight, torch.cat(ids, 1)[rows],
            objective.loss_fn(self.signals(loss, rows)), temperature=self.temperature, chunk_rows=chunk_rows,
            tail_topk=self.topk_ids.shape[1] if loss.enabled else 0,
        )

    def naive(self, loss):
        """[R], from full distributions and the formulas; nothing shared with the product code."""
        student, teacher = self.student(), self.teacher
        q_full, p_full = student.exp(), teacher.exp()
        q, p = q_full.gather(1, self.topk_ids), p_full.gather(1, self.topk_ids)
        if loss.tail in ("bucket", "sampled"):
            q, p = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], 1) for x in (q, p))
        if loss.tail == "renormalise":
            q, p = (x / x.sum(-1, keepdim=True) for x in (q, p))
        m = loss.beta * p + (1 - loss.beta) * q
        log_ratio = (teacher - student).gather(1, self.sampled[:, None])[:, 0]
        values = {
            "forward_kl": (p * (p / q).log()).sum(-1),
            "reverse_kl": (q * (q / p).log()).sum(-1),
            "jsd": loss.beta * (p * (p / m).log()).sum(-1) + (1 - loss.beta) * (q * (q / m).log()).sum(-1),
            "k1": -log_ratio,
            "k2": log_ratio**2 / 2,
            "k3": log_ratio.exp() - 1 - log_ratio,
        }
        if loss.tail == "sampled":
            q_x, p_x = (x.gather(1, self.sampled[:, None])[:, 0] for x in (q_full, p_full))
            outside = (self.drawn >= 0) & ~(self.topk_ids == self.drawn[:, None]).any(1)
            slope = (p[:, -1] / q[:, -1]).clamp(max=10) - (p_x / q_x).clamp(max=10)
            slope, within = torch.where(outside, slope.detach(), 0), (q_x / q[:, -1]).log()
            values["forward_kl"] = values["forward_kl"] + slope * (within - within.detach())
        values["mixed"] = sum(values[name] * weight for name, weight in loss.mixed_weights.items())
        ratio = (student.gather(1, self.sampled[:, None])[:, 0] - self.old_logprobs()).exp()

        def policy(advantages):
            return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

        total = torch.zeros(len(student), dtype=torch.float64)
        if loss.enabled:
            value = values[loss.loss_mode]
            if loss.use_policy_gradient:  # the value and, but for the constant slope of k1, its slope in log q
                slope = {"k1": torch.zeros_like(log_ratio), "k2": -log_ratio, "k3": 1 - log_ratio.exp()}[loss.loss_mode]
                value = policy(-(value + slope).detach()) - slope.detach()
            of_sampled = loss.loss_mode in ("k1", "k2", "k3", "mixed")
            total = total + loss.distillation_loss_coef * value * (self.own_importance if of_sampled else 1)
        if not loss.enabled or loss.use_task_rewards:
            total = total + policy(self.advantages) * self.own_importance
        return total * self.importance

    def grads(self, value):
        return torch.autograd.grad(value, (self.hidden, self.weight))


def assert_equal(problem, loss):
    value, _ = problem.product(loss)
    want = problem.naive(loss).sum()
    torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-9)
    for got, expected in zip(problem.grads(value), problem.grads(want), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


@each_mode
def test_value_and_gradients_equal_full_logits(mode):
    assert_equal(Problem(), config(mode))


@each_mode
def test_importance_weights_are_factors_of_every_loss(mode):
    problem = Problem()
    problem.importance = torch.linspace(0, 2, len(problem.sampled), dtype=torch.float64)
    assert_equal(problem, config(mode))


@each_mode
def test_the_sampled_tokens_own_importance_is_a_factor_of_losses_of_that_token(mode):
    problem = Problem()
    problem.importance = torch.linspace(0, 2, len(problem.sampled), dtype=torch.float64)
    problem.own_importance = torch.linspace(2, 0.5, len(problem.sampled), dtype=torch.float64)
    assert_equal(problem, config(mode))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(list(MODES)), rows=st.integers(1, 9), topk=st.integers(1, 30), seed=st.integers(0, 999),
    temperature=st.floats(0.5, 2),
)
def test_any_sizes_and_temperatures(mode, rows, topk, seed, temperature):
    problem = Problem(rows, topk, seed, temperature)
    mass = torch.stack([x.exp().gather(1, problem.topk_ids).sum(-1) for x in (problem.teacher, problem.student())])
    log_ratio = (problem.teacher - problem.student()).gather(1, problem.sampled[:, None])
    # The plain formula loses digits closer to the floor of the tail, and where k3 adds a large ratio and takes it away.
    if (1 - mass).amin() > 1e-4 and log_ratio.amax() < 12:
        assert_equal(problem, config(mode))


@pytest.mark.parametrize("mode", [mode for mode in MODES if not {"rewards", "none", "ppo"} & set(mode.split())])
def test_one_temperature_on_both_sides(mode):
    """A student with the teacher's logits is at the optimum at every temperature."""
    loss = config(mode)
    for temperature in (0.5, 1.0, 3.0):
        problem = Problem(temperature=temperature)
        problem.hidden = problem.teacher_hidden.clone().requires_grad_()
        problem.old_noise.zero_()
        value, _ = problem.product(loss)
        assert value.item() == pytest.approx(0, abs=1e-9)
        for grad in problem.grads(value):
            torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-9)


@each_mode
def test_the_cut_into_chunks_and_micro_batches_does_not_matter(mode):
    problem, loss = Problem(), config(mode)
    whole, reported = problem.product(loss, chunk_rows=13)
    grads = problem.grads(whole)
    cuts = [slice(0, 1), slice(1, 8), slice(8, 8), slice(8, 13)]  # one of them empty
    parts = [problem.product(loss, chunk_rows=2, rows=rows) for rows in cuts]
    torch.testing.assert_close(sum(value for value, _ in parts), whole, rtol=1e-13, atol=1e-13)
    for got, want in zip(problem.grads(sum(value for value, _ in parts)), grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for name, value in reported.items():
        assert value.item() == pytest.approx(sum(sums[name].item() for _, sums in parts if sums)), name


@each_mode
def test_logit_gradients_sum_to_zero_per_row(mode):
    problem, loss = Problem(), config(mode)
    logits = (problem.hidden @ problem.weight.T).detach()
    problem.hidden, problem.weight = logits.requires_grad_(), torch.eye(VOCAB, dtype=torch.float64)
    value, _ = problem.product(loss)
    (dz,) = torch.autograd.grad(value, problem.hidden)
    assert dz.abs().max() > 1e-3
    assert dz.sum(-1).abs().max() < 1e-14 * VOCAB * dz.abs().max()


@each_mode
def test_what_is_reported_is_known_before_and_documented(mode):
    problem, loss = Problem(), config(mode)
    objective = make_objective(loss, ActorConfig())
    _, reported = problem.product(loss)
    assert sorted(objective.reported) == sorted(reported)
    check_names(reported)
    assert all(not value.requires_grad for value in reported.values())


def test_reported_values():
    problem = Problem()
    _, reported = problem.product(config("k3"))
    for name, logprobs in (("student", problem.student()), ("teacher", problem.teacher)):
        mass = logprobs.detach().exp().gather(1, problem.topk_ids).sum()
        assert reported[f"actor/distillation/{name}_mass"].item() == pytest.approx(mass.item())
    for name in ("forward_kl", "reverse_kl"):  # in every mode, so that runs with different losses can be compared
        want = problem.naive(DistillationConfig(loss_mode=name)).sum().item()
        assert reported[f"actor/distillation/{name}"].item() == pytest.approx(want)
    rows = problem.naive(DistillationConfig(loss_mode="forward_kl"))
    for quarter in range(4):  # of row r it is r mod 4 here
        found = reported[f"actor/distillation/forward_kl/q{quarter + 1}"].item()
        assert found == pytest.approx(rows[quarter::4].sum().item())
    entropies = []
    for logprobs in (problem.student(), problem.teacher):
        p = logprobs.detach().exp().gather(1, problem.topk_ids)
        p = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1)
        entropies.append(-(p * p.log()).sum().item())
    assert reported["actor/distillation/teacher_entropy"].item() == pytest.approx(entropies[1])
    assert reported["actor/distillation/entropy_gap"].item() == pytest.approx(entropies[0] - entropies[1])


def test_without_old_logprobs_the_policy_is_the_one_being_trained():
    """The exact policy gradient -A d log q, and nothing is clipped."""
    problem, loss = Problem(), config("ppo")
    objective = make_objective(loss, ActorConfig())
    loss_fn = objective.loss_fn({"advantages": problem.advantages})
    value, reported = head_loss(problem.hidden, problem.weight, problem.sampled[:, None], loss_fn)
    want = -(problem.advantages * problem.student().gather(1, problem.sampled[:, None])[:, 0]).sum()
    for got, expected in zip(problem.grads(value), problem.grads(want), strict=True):
        torch.testing.assert_close(got, expected)
    assert reported["actor/pg_clipfrac"].item() == reported["actor/ppo_kl"].item() == 0


def test_a_ratio_of_sequences_that_chunks_of_the_head_cut():
    """The precomputation has whole sequences; the loss is that of the formula over each."""
    problem, loss = Problem(), config("ppo")
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gspo"), clip_ratio_low=0.1, clip_ratio_high=0.3)
    objective = make_objective(loss, actor)
    sampled = problem.student().gather(1, problem.sampled[:, None])[:, 0]
    lengths = [4, 1, len(sampled) - 5]
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    signals = objective.with_sequence_ratios(problem.signals(loss), numbers, sampled.detach())
    value, reported = head_loss(
        problem.hidden, problem.weight, problem.sampled[:, None], objective.loss_fn(signals), chunk_rows=3,
        temperature=problem.temperature,
    )
    means = [part.mean().expand(len(part)) for part in (sampled - problem.old_logprobs()).split(lengths)]
    ratio = (torch.cat(means).detach() + sampled - sampled.detach()).exp()
    want = -torch.minimum(ratio * problem.advantages, ratio.clamp(0.9, 1.3) * problem.advantages)
    want = (want * problem.importance).sum()
    torch.testing.assert_close(value, want)
    for got, expected in zip(problem.grads(value), problem.grads(want), strict=True):
        torch.testing.assert_close(got, expected)
    assert objective.of_sequences
    assert sorted(objective.reported) == sorted(reported)


def test_a_factor_of_the_teacher_leaves_rewards_alone_and_as_a_reward_it_has_no_loss():
    problem, loss = Problem(), config("forward_kl")
    loss.use_task_rewards = True
    want = problem.naive(loss).sum() - 0.75 * (
        problem.naive(config("forward_kl")) * loss.distillation_loss_coef / config("forward_kl").distillation_loss_coef
    ).sum()
    ids = torch.cat([problem.topk_ids, problem.sampled[:, None]], 1)

    def compute(section, signals):
        return head_loss(
            problem.hidden, problem.weight, ids, make_objective(section, ActorConfig()).loss_fn(signals), chunk_rows=5,
            temperature=problem.temperature, tail_topk=problem.topk_ids.shape[1],
        )

    weights = torch.full_like(problem.importance, 0.25)
    value, _ = compute(loss, {**problem.signals(loss), "teacher_weights": weights})
    torch.testing.assert_close(value, want)
    policy = problem.naive(config("ppo")).sum()
    value, reported = compute(dataclasses.replace(loss, as_reward=True), problem.signals(loss))
    torch.testing.assert_close(value, policy)
    for got, expected in zip(problem.grads(value), problem.grads(policy), strict=True):
        torch.testing.assert_close(got, expected)
    assert reported["actor/kl_loss"] > 0


def test_entropy_counts_with_the_weight_of_its_token():
    problem, loss = Problem(), config("ppo")
    objective, cpu = make_objective(loss, ActorConfig(entropy_coeff=0.3)), torch.device("cpu")
    torch.testing.assert_close(objective.entropy_weights(problem.signals(loss), 13, cpu), -0.3 * problem.importance)
    assert objective.entropy_weights({}, 2, cpu).tolist() == pytest.approx([-0.3, -0.3])
    assert make_objective(loss, ActorConfig()).entropy_weights({}, 2, cpu) is None


@pytest.mark.parametrize("mode", ["forward_kl", "k2"])
def test_a_clamped_token_is_counted_and_has_no_gradient(mode):
    problem, loss = Problem(), config(mode)
    each = problem.naive(loss)
    loss.loss_max_clamp = each.median().item()
    value, reported = problem.product(loss)
    assert value.item() == pytest.approx(each.clamp(max=loss.loss_max_clamp).sum().item())
    assert reported["actor/distillation/clamp_share"].item() == 6
    assert reported["actor/kl_loss"].item() == pytest.approx(each.sum().item())  # reported as it is
    kept = each[each <= loss.loss_max_clamp].sum()
    for got, want in zip(problem.grads(value), problem.grads(kept), strict=True):
        torch.testing.assert_close(got, want)


def test_a_clamped_advantage_still_teaches():
    problem, loss = Problem(), config("k1")
    problem.old_noise.zero_()
    loss.loss_max_clamp = 0.1
    value, _ = problem.product(loss)
    log_q, log_p = (x.gather(1, problem.sampled[:, None])[:, 0] for x in (problem.student(), problem.teacher))
    want = ((log_q - log_p).detach().clamp(-0.1, 0.1) * log_q).sum()
    for got, expected in zip(problem.grads(value), problem.grads(want), strict=True):
        torch.testing.assert_close(got, expected)


def test_no_clamp_by_default():
    assert DistillationConfig().loss_max_clamp is None
    assert "actor/distillation/clamp_share" not in make_objective(DistillationConfig(), ActorConfig()).reported


class Exact:
    """A student of free logits [1, V], and every token as a row that counts as often as the student samples it."""

    def __init__(self, mode, seed=0, spread=1.0):
        gen = torch.Generator().manual_seed(seed)
        self.teacher, self.logits = torch.randn(2, 1, 7, generator=gen, dtype=torch.float64)
        self.teacher = self.teacher.log_softmax(-1)
        self.logits = (self.teacher + spread * (2 * torch.rand(1, 7, generator=gen, dtype=torch.float64) - 1))
        self.logits.requires_grad_()
        self.mode = mode
        loss = DistillationConfig(loss_mode=mode, use_policy_gradient=True)
        self.objective = make_objective(loss, ActorConfig())

    def product(self, old=None):
        """The expected loss; `old` [1, V] is the policy that the tokens were sampled from, by default the student."""
        logprobs = self.logits.log_softmax(-1)
        sampled_from = logprobs.detach() if old is None else old
        ids = torch.arange(7)[:, None]
        signals = {
            "teacher.logprobs": self.teacher.amax(-1, keepdim=True).expand(7, 1),
            "teacher.tail_logprobs": (1 - self.teacher.amax(-1).exp()).log().expand(7),
            "teacher.sampled_logprobs": self.teacher[0], "weights": sampled_from[0].exp(),
        } | ({} if old is None else {"old_logprobs": old[0]})
        first = self.teacher.argmax(-1, keepdim=True).expand(7, 1)
        eye = torch.eye(7, dtype=torch.float64)
        return head_loss(
            self.logits.expand(7, 7), eye, torch.cat([first, ids], 1), self.objective.loss_fn(signals), tail_topk=1
        )

    def closed_form(self):
        """KL(q || p), or of k2 E_q[(log q - log p)^2 / 2], by sums over the vocabulary."""
        logprobs = self.logits.log_softmax(-1)
        log_ratio = logprobs - self.teacher
        return (logprobs.exp() * (log_ratio.square() / 2 if self.mode == "k2" else log_ratio)).sum()

    def gradient(self, value):
        return torch.autograd.grad(value, self.logits)[0]


each_estimator = pytest.mark.parametrize("mode", ["k1", "k2", "k3"])


@each_estimator
@pytest.mark.parametrize("stale", [False, True])
def test_a_policy_gradient_is_the_gradient_of_the_estimators_expectation(mode, stale):
    problem = Exact(mode)
    old = None
    if stale:  # not by so much that a ratio would be clipped
        old = (problem.logits.detach() + torch.linspace(-0.08, 0.08, 7, dtype=torch.float64)).log_softmax(-1)
    value, _ = problem.product(old)
    want = problem.gradient(problem.closed_form())
    assert want.abs().max() > 1e-2
    torch.testing.assert_close(problem.gradient(value), want, rtol=1e-9, atol=1e-12)


@each_estimator
def test_a_policy_gradient_reports_the_estimators_mean(mode):
    problem = Exact(mode)
    value, reported = problem.product()
    assert value.item() == pytest.approx(problem.closed_form().item())
    log_ratio = (problem.logits.log_softmax(-1) - problem.teacher).detach()
    each = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}[mode]
    assert reported["actor/kl_loss"].item() == pytest.approx(each.sum().item())


@pytest.mark.slow
@each_estimator
@pytest.mark.parametrize("seed", range(3))
def test_descent_on_a_policy_gradient_reaches_the_teacher(mode, seed):
    problem = Exact(mode, seed)
    assert (problem.logits.softmax(-1) - problem.teacher.exp()).abs().max() > 0.02
    for _ in range(200):
        gradient = problem.gradient(problem.product()[0])
        with torch.no_grad():
            problem.logits -= 4 * gradient
    torch.testing.assert_close(problem.logits.softmax(-1), problem.teacher.exp(), rtol=0, atol=1e-6)


@each_estimator
def test_a_clamped_advantage_keeps_its_direction(mode):
    problem = Problem(rows=40)
    problem.old_noise.zero_()
    loss = DistillationConfig(loss_mode=mode, use_policy_gradient=True, loss_max_clamp=0.1)
    value, reported = problem.product(loss)
    log_q, log_p = (x.gather(1, problem.sampled[:, None])[:, 0] for x in (problem.student(), problem.teacher))
    weight = (log_q - log_p).detach()
    weight = weight + weight**2 / 2 if mode == "k2" else weight
    want = (weight.clamp(-0.1, 0.1) * log_q).sum()
    for got, expected in zip(problem.grads(value), problem.grads(want), strict=True):
        torch.testing.assert_close(got, expected)
    assert reported["actor/distillation/clamp_share"].item() == (weight.abs() > 0.1).sum().item()


@pytest.mark.parametrize("topk", [6, VOCAB])
def test_the_kl_to_a_reference_on_its_candidates_equals_full_logits(topk):
    """And beside rewards; with the whole vocabulary it is the KL itself."""
    problem, loss = Problem(topk=topk), config("ppo")
    actor = ActorConfig(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=0.5)
    scores = problem.signals(config("forward_kl"))
    signals = problem.signals(loss) | {
        f"reference_topk.{name}": scores[f"teacher.{name}"] for name in ("logprobs", "tail_logprobs")
    }
    objective = make_objective(loss, actor)
    value, reported = head_loss(
        problem.hidden, problem.weight, torch.cat([problem.topk_ids, problem.sampled[:, None]], 1),
        objective.loss_fn(signals), temperature=problem.temperature, chunk_rows=5, tail_topk=topk,
    )
    q, p = (each.exp().gather(1, problem.topk_ids) for each in (problem.student(), problem.teacher))
    if topk < VOCAB:
        q, p = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], 1) for each in (q, p))
    kl = (q * (q / p).log()).sum(-1)
    if topk == VOCAB:
        torch.testing.assert_close(kl, (problem.student().exp() * (problem.student() - problem.teacher)).sum(-1))
    want = (problem.naive(loss) + 0.5 * kl).sum()
    torch.testing.assert_close(value, want)
    for got, expected in zip(problem.grads(value), problem.grads(want), strict=True):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(reported["actor/ref_kl"], kl.sum().detach())
    assert sorted(objective.reported) == sorted(reported)


def test_a_term_with_candidates_of_its_own_beside_the_teachers():
    """A second teacher would be such a term: the head knows the mass outside of the first candidates only."""
    problem = Problem()
    own_ids = problem.teacher.topk(9, -1).indices[:, 5:]
    logprobs = problem.teacher.gather(1, own_ids)
    terms = [
        distillation([(1.0, DIVERGENCES["forward_kl"])], tail="bucket", beta=0.5, coefficient=0.3),
        reference(KL_LOSSES["full"], 0.5),
    ]
    signals = problem.signals(config("forward_kl")) | {
        "reference_topk.logprobs": logprobs, "reference_topk.tail_logprobs": (1 - logprobs.exp().sum(1)).log(),
    }
    objective = Objective(terms)
    assert objective.candidates == ("teacher", "reference_topk")
    value, _ = head_loss(
        problem.hidden, problem.weight, torch.cat([problem.topk_ids, own_ids], 1), objective.loss_fn(signals),
        tail_topk=problem.topk_ids.shape[1], chunk_rows=5,
    )
    q, p = (each.exp().gather(1, own_ids) for each in (problem.student(), problem.teacher))
    q, p = (torch.cat([each, 1 - each.sum(1, keepdim=True)], 1) for each in (q, p))
    want = 0.3 * problem.naive(config("forward_kl")).sum() + 0.5 * (q * (q / p).log()).sum()
    torch.testing.assert_close(value, want)
    for got, expected in zip(problem.grads(value), problem.grads(want), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("estimator", ["", "k3"])
def test_rows_that_lack_a_signal_are_exactly_out_of_its_term(estimator):
    """Also where the student finds a token so unlikely that anything compared with it would be infinite."""
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    loss = bound(policy_loss("vanilla"), bounds)
    kind, own = ("k3", loss) if estimator else ("forward_kl", None)
    objective = Objective([
        distillation([(1.0, DIVERGENCES[kind])], tail="bucket", beta=0.5, coefficient=1.0, policy=own, estimator=kind),
        sft(), policy(loss), reference(KL_LOSSES["k3"], 0.5),
    ])  # fmt: skip
    gen = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 4, 6, generator=gen).log_softmax(-1)
    student[1:3, -1] = -200.0
    has = {
        "teacher": [True, False, True, False], "advantages": [False, True, True, False],
        "reference": [True, False, False, False], "old_logprobs": [True, False, True, True],
        "sft": [False, True, True, False],
    }
    teacher[2, -1] = -199.0
    values = {
        "teacher.logprobs": teacher[:, :3], "teacher.tail_logprobs": teacher[:, 3],
        "teacher.sampled_logprobs": teacher[:, 5], "advantages": torch.ones(4), "reference": teacher[:, 5],
        "old_logprobs": student[:, -1] + 0.1, "sft": torch.tensor([0.5] * 4),
    }

    def compute(rows, signals):
        logprobs = student[rows][:, [0, 1, 2, 3, 5]].clone().requires_grad_()
        value, metrics = objective.loss_fn(signals)(logprobs, slice(None))
        (gradient,) = torch.autograd.grad(value.sum(), logprobs)
        return value.detach(), gradient, metrics

    def neutral(name, value):
        known = torch.tensor(has[name.split(".")[0]]).reshape(-1, *[1] * (value.ndim - 1))
        return torch.where(known, value, -1.0 if "." in name else 0.0)

    mixed = {name: neutral(name, value) for name, value in values.items()}
    mixed |= {f"has.{name}": torch.tensor(known) for name, known in has.items()}
    together, slopes, metrics = compute(slice(None), mixed)
    assert torch.equal(slopes[3], torch.zeros(5))
    for row in range(4):
        own = {name: value[row : row + 1] for name, value in values.items() if has[name.split(".")[0]][row]}
        alone, slope, found = compute(slice(row, row + 1), own)
        assert torch.equal(together[row], alone[0])
        assert torch.equal(slopes[row], slope[0])
        for name, value in metrics.items():
            assert value[row] == (found[name][0] if name in found else 0), name

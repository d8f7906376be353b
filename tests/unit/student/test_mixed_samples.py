"""Any trained tokens and mixture of signals in a micro-batch, against a dense computation in float64. CPU, one rank.

The dense one runs each sample by itself through the plain model, takes full logits, and writes every term out.
"""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from hybrid_gkd.errors import TrainingError
from hybrid_gkd.losses import head
from hybrid_gkd.student import sharded_model
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.critic import Critic
from hybrid_gkd.testing import make_sample, make_tiny_model, single_process_group, tiny_config
from hybrid_gkd.types import MiniBatch, TopK
from hybrid_gkd.workers.aggregation import with_loss_weights
from hybrid_gkd.workers.batches import mean_metrics

ACTOR, VOCAB, K = "actor_rollout_ref.actor", 259, 4
COEF, KL_COEF, ENTROPY, CONSTANT = 0.4, 0.5, 0.01, 7
TEACHERS = {"teacher": 1.0, "teacher/a": 1.0, "teacher/b": 0.7}
"""Weight of each teacher's term, by signal; the last two are those of a sum."""
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TEACHER = ["actor_rollout_ref.teacher.server_ip=unused", f"distillation.distillation_loss_coef={COEF}"]
REWARDS = ["reward.answer_key=answer", "actor_rollout_ref.rollout.n=2"]
SUM = [
    TEACHER[1], "distillation.ensemble=sum", *(f"distillation.teacher_models.{name}.{key}" for name, weight in (
        ("a", 1), ("b", 0.7)
    ) for key in ("server_ip=unused", "key=default", f"weight={weight}")),
]  # fmt: skip
KINDS = {
    "divergence": [*TEACHER, *REWARDS, "distillation.use_task_rewards=true", f"{ACTOR}.use_kl_loss=true"],
    "policy gradient": [
        *TEACHER, *REWARDS, "distillation.use_task_rewards=true", "distillation.loss_mode=k3",
        "distillation.use_policy_gradient=true",
    ],
    "teacher alone": TEACHER,
    "sum of teachers": SUM,
    "sum, tail sampled": [*SUM, "distillation.tail=sampled"],
    "gspo": [
        *REWARDS, "distillation.enabled=false", f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=full", f"actor_rollout_ref.ref.topk={K}",
    ],
}


def load(model, *overrides):
    config = tiny_config(
        f"distillation.topk={K}", f"data.max_response_length={CONSTANT}", f"{ACTOR}.grad_clip=1e9",
        f"{ACTOR}.kl_loss_coef={KL_COEF}", f"{ACTOR}.entropy_coeff={ENTROPY}", "critic.grad_clip=1e9", *overrides,
        model=model,
    )  # fmt: skip
    for section in (config.actor_rollout_ref.actor, config.critic):
        section.fsdp_config.model_dtype, section.optim.lr = "fp64", 0.0
    return config


def norm(self, hidden):
    """Normalise in the type of `hidden`: transformers does it in float32, which rounds differently in other batches."""
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return configuration and trained model of each kind, in float64 at a learning rate of 0; and the plain model."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)
    with pytest.MonkeyPatch.context() as patch, single_process_group():
        patch.setitem(sharded_model.DTYPES, "fp64", torch.float64)
        patch.setattr(head, "OVERLAP_ROWS", 10**6)  # of more rows it takes a sample
        patch.setattr(modeling_qwen2.Qwen2RMSNorm, "forward", norm)
        found = {}
        for kind, overrides in KINDS.items():
            mode = "seq-mean-token-mean" if kind == "gspo" else "token-mean"
            config = load(folder, *overrides, f"{ACTOR}.loss_agg_mode={mode}")
            found[kind] = config, Actor(config, device=torch.device("cpu"), num_updates=10**6)
        config = load(folder, *REWARDS, "distillation.enabled=false", "algorithm.adv_estimator=gae")
        found["critic"] = config, Critic(config, device=torch.device("cpu"), num_updates=10**6)
        plain = AutoModelForCausalLM.from_pretrained(folder).double()
        yield lambda kind: (*found[kind], plain)


@st.composite
def mini_batches(draw, names):
    """Samples with any loss mask, each with any of the signals of these names; and cuts into micro-batches."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    with_weights, samples = draw(st.booleans()), []
    for row in range(draw(st.integers(1, 4))):
        tokens = rng.integers(0, 256, draw(st.integers(2, 9))).tolist()
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
        chosen = draw(st.sets(st.sampled_from(names)))
        samples.append(make_sample(
            row, prompt=tokens[:1], completion=tokens[1:], loss_mask=mask,
            status=draw(st.sampled_from(["stop", "given"])), **random_signals(rng, sum(mask), chosen, with_weights),
        ))  # fmt: skip
    cuts = sorted(draw(st.lists(st.integers(0, len(samples)), max_size=4)))  # twice the same: an empty micro-batch
    bounds = [0, *cuts, len(samples)]
    return samples, list(itertools.pairwise(bounds)), draw(st.integers(0, len(cuts)))


def random_signals(rng, count, chosen, with_weights):
    """`count` tokens of each chosen signal, and of what goes with it."""

    def values(low, high):
        return rng.uniform(low, high, count).astype(np.float32)

    def topk():
        ids = np.array([rng.permutation(VOCAB)[:K] for _ in range(count)], np.int32).reshape(count, K)
        shares = rng.dirichlet(np.ones(K + 2), count)
        each = np.log(np.c_[shares[:, :K], shares[:, K:].sum(1), shares[:, K]]).astype(np.float32)
        return TopK(ids=ids, logprobs=each[:, :K], tail_logprobs=each[:, K], sampled_logprobs=each[:, K + 1])

    signals = {name: topk() for name in TEACHERS if name in chosen}
    if signals:
        signals["teacher_weights"] = np.full(count, 0.5, np.float32)
    if "returns" in chosen:
        signals |= {"returns": values(-2, 2), "values": values(-1, 1)}
    if "reference_topk" in chosen:
        signals["reference_topk"] = topk()
    signals |= {name: values(-8, -4) for name in ("old_logprobs", "reference") if name in chosen}
    signals |= {"advantages": values(-2, 2)} if "advantages" in chosen else {}
    if with_weights:
        signals |= {"weights": values(0.2, 2) * (rng.random(count) > 0.3), "sampled_weights": values(0.3, 1.5)}
    return signals


def tensor(array):
    return torch.from_numpy(np.asarray(array)).double()


class Dense:
    """Terms of a kind at each trained token of each sample, from full logits."""

    def __init__(self, kind, samples, model):
        self.kind, self.samples = kind, samples
        self.values, self.parts, self.overlap = [], [], []  # of a sample: by term, by metric
        for sample in samples:
            logits = model(tensor(sample.tokens).long()[None]).logits[0]
            self.add(sample, logits[sample.positions - 1].log_softmax(-1))

    def add(self, sample, q):
        chosen = q.gather(1, tensor(sample.trained_ids).long()[:, None])[:, 0]
        old = chosen.detach() if "old_logprobs" not in sample.signals else tensor(sample.array("old_logprobs"))
        values, parts = {"entropy": -(q.exp() * q).sum(1)}, {}

        def policy(advantages):
            log_ratio = chosen - old
            if self.kind == "gspo":
                log_ratio = chosen - chosen.detach() + log_ratio.detach().mean()
            ratio = log_ratio.exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            clipped = ratio.clamp(0.8, 1.2) * advantages < ratio * advantages
            parts["actor/pg_clipfrac"] = clipped | (parts.get("actor/pg_clipfrac", clipped))
            parts["actor/ppo_kl"] = old - chosen
            return loss

        def within_tail(scores, p, q):
            ids = tensor(sample.trained_ids).long()[:, None]
            outside = ~(tensor(scores.ids).long() == ids).any(1) & (sample.status != "given")
            p_x = tensor(scores.sampled_logprobs)
            slope = (p - q).exp().clamp(max=10) - (p_x - chosen).exp().clamp(max=10)
            return torch.where(outside, slope.detach() * (chosen - q - (chosen - q).detach()), 0)

        def distillation(scores, suffix):
            p, own = tensor(scores.logprobs), q.gather(1, tensor(scores.ids).long())
            if suffix != "/b":
                self.overlap.append((own >= q.topk(K).values[:, -1:]).double().mean(1))
            found = {"student_mass": own.exp().sum(1), "teacher_mass": p.exp().sum(1)}
            p, own = (torch.cat([each, (1 - each.exp().sum(1, keepdim=True)).log()], 1) for each in (p, own))
            found["forward_kl"] = value = (p.exp() * (p - own)).sum(1)
            if self.kind == "sum, tail sampled":
                value = value + within_tail(scores, p[:, -1], own[:, -1])
            quarter = torch.arange(len(value)) * 4 // max(1, len(value))
            found |= {f"forward_kl/q{n + 1}": value[quarter == n] for n in range(4)}
            found["reverse_kl"] = (own.exp() * (own - p)).sum(1)
            found["teacher_entropy"] = -(p.exp() * p).sum(1)
            found["entropy_gap"] = (p.exp() * p).sum(1) - (own.exp() * own).sum(1)
            loss = value
            if self.kind == "policy gradient":
                log_ratio = chosen - tensor(scores.sampled_logprobs)
                value = (-log_ratio).exp() - 1 + log_ratio
                loss = policy(-log_ratio.detach()) + (value - log_ratio).detach()
            if suffix:
                of_teacher = {"kl_loss": value, **{name: found[name] for name in ("forward_kl", "reverse_kl")}}
                parts.update({f"actor/distillation{suffix}/{name}": each for name, each in of_teacher.items()})
            found = {"actor/kl_loss": value, **{f"actor/distillation/{name}": each for name, each in found.items()}}
            parts.update({name: torch.cat([parts.get(name, each[:0]), each]) for name, each in found.items()})
            return loss

        for name in list(TEACHERS)[1:] if self.kind.startswith("sum") else ["teacher"]:
            if name in sample.signals and self.kind != "gspo":
                value = TEACHERS[name] * COEF * distillation(sample.topk(name), name.removeprefix("teacher"))
                values[name] = value * tensor(sample.array("teacher_weights"))
        if "advantages" in sample.signals and self.kind in ("divergence", "policy gradient", "gspo"):
            values["policy"] = parts["actor/pg_loss"] = policy(tensor(sample.array("advantages")))
        if "reference" in sample.signals and self.kind == "divergence":
            log_ratio = tensor(sample.array("reference")) - chosen
            parts["actor/ref_kl"] = log_ratio.exp() - 1 - log_ratio
            values["reference"] = KL_COEF * parts["actor/ref_kl"]
        if "reference_topk" in sample.signals and self.kind == "gspo":
            scores = sample.topk("reference_topk")
            p, own = tensor(scores.logprobs), q.gather(1, tensor(scores.ids).long())
            p, own = (torch.cat([each, (1 - each.exp().sum(1, keepdim=True)).log()], 1) for each in (p, own))
            parts["actor/ref_kl"] = (own.exp() * (own - p)).sum(1)
            values["reference"] = KL_COEF * parts["actor/ref_kl"]
        of_sampled = ["policy", *(["teacher"] if self.kind == "policy gradient" else [])]
        of_sampled += ["reference"] if self.kind == "divergence" else []
        if "sampled_weights" in sample.signals:
            own = tensor(sample.array("sampled_weights"))
            values |= {name: values[name] * own for name in of_sampled if name in values}
        self.values.append(values)
        self.parts.append(parts)

    def loss(self, mode):
        return sum(
            factor * dense_mean([each.get(term) for each in self.values], self.samples, mode)
            for term, factor in dict.fromkeys((*TEACHERS, "policy", "reference"), 1).items() | {("entropy", -ENTROPY)}
        )

    def metrics(self):
        found = {"actor/entropy": [values["entropy"] for values in self.values]}
        for name in {name for parts in self.parts for name in parts}:
            found[name] = [parts[name] for parts in self.parts if name in parts]
        found["actor/distillation/overlap_ratio"] = self.overlap
        found = {name: torch.cat(each).double() for name, each in found.items() if each}
        return {name: value.mean().item() for name, value in found.items() if len(value)}


def dense_mean(values, samples, mode):
    """Return one term's loss from its values at the tokens of each sample, None for samples without the term."""
    total, lengths = 0.0, []
    for value, sample in zip(values, samples, strict=True):
        weights = tensor(sample.signals.get("weights", np.ones(sample.num_trained)))
        length = 0 if value is None else int((weights > 0).sum())
        if length:
            lengths.append(length)
            part = (value * weights).sum()
            total = total + (part / length if mode == "seq-mean-token-mean" else part)
    if not lengths:
        return total
    number = sum(lengths) if mode == "token-mean" else len(lengths)
    return total / (number * CONSTANT if mode == "seq-mean-token-sum-norm" else number)


def trained(model, samples, cuts, first):
    """Metrics and gradients by name of a mini-batch, of whose micro-batches so many go ahead of the update."""
    num_tokens, grads = sum(sample.num_trained for sample in samples), {}

    def keep_gradients():
        grads.update({name: weight.grad.full_tensor() for name, weight in model.hf_model.named_parameters()})

    parts = [tuple(samples[start:stop]) for start, stop in cuts]
    if first:
        model.accumulate(MiniBatch(micro_batches=tuple(parts[:first]), num_tokens=num_tokens))
    batch = MiniBatch(micro_batches=tuple(parts[first:]), num_tokens=num_tokens)
    return model.update(batch, before_step=keep_gradients), grads


def assert_equal(found, grads, want, parameters, metrics):
    for name, gradient in zip(parameters, torch.autograd.grad(want, parameters.values()), strict=True):
        assert (grads[name] - gradient).norm() < 1e-5 * (1 + gradient.norm()), name
    extra = {"actor/loss", "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/grad_norm", "critic/lr"}
    assert found.keys() - extra == metrics.keys()
    for name, value in metrics.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    drawn=mini_batches((*TEACHERS, "advantages", "old_logprobs", "reference", "reference_topk")),
)
def test_any_mixture_of_signals_is_the_dense_computation(models, kind, mode, drawn):
    config, actor, plain = models(kind)
    samples, cuts, first = drawn
    assume(any(sample.num_trained for sample in samples))
    dense = Dense(kind, samples, plain)
    try:
        weighted = with_loss_weights(config, samples, mode)
    except TrainingError:
        assert not any((sample.signals.get("weights", np.ones(sample.num_trained)) > 0).any() for sample in samples)
        return
    found, grads = trained(actor, weighted, cuts, first)
    want = dense.loss(mode)
    assert found["actor/loss"] == pytest.approx(want.item(), rel=1e-5, abs=1e-5)
    assert_equal(found, grads, want, dict(plain.named_parameters()), dense.metrics())


def test_weights_are_known_before_the_teachers_of_a_sum_have_answered(models):
    """The denominator of each teacher's term is the number of tokens of its rows."""
    config, _, _ = models("sum of teachers")
    rng, chosen = np.random.default_rng(0), [{"a"}, {"a", "b"}, {"b"}]
    later = [make_sample(row, prompt=[1], completion=[2] * (row + 1), **{
        f"weights/distillation/{name}": np.zeros(row + 1, np.float32) for name in {"a", "b"} - own
    }) for row, own in enumerate(chosen)]  # fmt: skip
    scored = [
        sample.with_signals(**random_signals(rng, sample.num_trained, {f"teacher/{name}" for name in own}, False))
        for sample, own in zip(later, chosen, strict=True)
    ]
    for samples in (later, scored):
        found = with_loss_weights(config, samples)
        for name, wanted in (("a", [6 / 3, 6 / 3, 0]), ("b", [0, 6 / 5, 6 / 5])):
            factors = [sample.array(f"weights/distillation/{name}") for sample in found]
            assert np.concatenate(factors) == pytest.approx(np.repeat(wanted, [1, 2, 3]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "critic"])
@settings(max_examples=20, deadline=None)
@given(drawn=st.lists(mini_batches((*TEACHERS, "advantages", "reference_topk", "returns")), min_size=2, max_size=3))
def test_metrics_of_several_optimizer_steps_are_means_over_all_of_their_tokens(models, kind, drawn):
    """Steps have the metrics of one step on all samples, as nothing is learned; they differ in tokens and signals."""
    _, model, _ = models(kind)
    steps = [samples for samples, _, _ in drawn if any(sample.num_trained for sample in samples)]
    assume(steps)
    found = mean_metrics(pickle.loads(pickle.dumps([trained(model, each, [(0, len(each))], 0)[0] for each in steps])))
    together = [sample for each in steps for sample in each]
    want = trained(model, together, [(0, len(together))], 0)[0]
    not_of_tokens = {"actor/grad_norm", "actor/lr", "critic/grad_norm", "critic/lr"}
    ends = {f"actor/kl_loss/{end}_update" for end in ("first", "last")}
    assert found.keys() - ends == want.keys()
    for name in want.keys() - not_of_tokens:
        assert found[name] == pytest.approx(want[name], rel=1e-5, abs=1e-5), name


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(mode=st.sampled_from(MODES), drawn=mini_batches(("returns", "advantages")))
def test_a_critic_learns_from_the_samples_that_have_returns(models, mode, drawn):
    config, critic, plain = models("critic")
    samples, cuts, first = drawn
    assume(any(sample.num_trained for sample in samples))
    head = dict(critic.hf_model.lm_head.named_parameters())
    with torch.no_grad():
        head["weight"].to_local().copy_(torch.linspace(-1, 1, 32))
    weight = torch.linspace(-1, 1, 32).double()
    values, parts = [], []
    for sample in samples:
        states = plain.model(tensor(sample.tokens).long()[None]).last_hidden_state[0, sample.positions - 1]
        if "returns" not in sample.signals:
            values.append(None)
            continue
        value, old, returns = states @ weight, *(tensor(sample.array(name)) for name in ("values", "returns"))
        bounded = old + (value - old).clamp(-0.5, 0.5)
        larger = (bounded - returns) ** 2 > (value - returns) ** 2
        loss = torch.where(larger, bounded - returns, value - returns) ** 2 / 2
        values.append(loss * tensor(sample.signals.get("sampled_weights", np.ones(len(loss)))))
        parts.append(larger & ((value - old).abs() > 0.5))
    try:
        weighted = with_loss_weights(config, samples, mode)
    except TrainingError:
        return
    want = dense_mean(values, samples, mode)
    parameters = {name: each for name, each in plain.named_parameters() if name.startswith("model.")}
    if not torch.is_tensor(want):  # nothing to learn
        want = sum(each.sum() * 0 for each in parameters.values())
    found, grads = trained(critic, weighted, cuts, first)
    clipped = torch.cat([torch.zeros(0), *parts]).double()
    metrics = {"critic/vf_clipfrac": clipped.mean().item()} if len(clipped) else {}
    assert found["critic/vf_loss"] == pytest.approx(want.item(), rel=1e-5, abs=1e-5)
    assert_equal(found, grads, want, parameters, metrics)

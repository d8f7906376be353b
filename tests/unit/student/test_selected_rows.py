"""Tokens that are not selected are neither computed nor learned from. CPU, one rank, float64.

What an actor computes with `distillation.token_weights` is compared with samples that are masked by hand, for which
entropies and probabilities come from the full logits of the plain model.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.losses import head
from hybrid_gkd.ppo.token_weighting import Weighting
from hybrid_gkd.student import logprob_model, sharded_model
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.testing import make_sample, make_tiny_model, single_process_group, tail_of, tiny_config
from hybrid_gkd.types import MiniBatch, TopK
from hybrid_gkd.workers.aggregation import with_loss_weights

ACTOR, KEY, VOCAB, K = "actor_rollout_ref.actor", "distillation.token_weights", 259, 4
REFERENCE = f"{ACTOR}.use_kl_loss=true"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """An actor at a learning rate of 0 by its overrides, and the plain model."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=1)
    with pytest.MonkeyPatch.context() as patch, single_process_group():
        patch.setitem(sharded_model.DTYPES, "fp64", torch.float64)

        def make(*overrides):
            config = tiny_config(f"distillation.topk={K}", f"{ACTOR}.grad_clip=1e9", *overrides, model=folder)
            section = config.actor_rollout_ref.actor
            section.fsdp_config.model_dtype, section.optim.lr = "fp64", 0.0
            return config, Actor(config, device=torch.device("cpu"), num_updates=10**6)

        yield make, AutoModelForCausalLM.from_pretrained(folder).double()


def make_samples(*, reference=False):
    """Four samples with scores; of the third a token in the middle is not trained on."""
    rng, samples = np.random.default_rng(0), []
    for row, length in enumerate((7, 1, 10, 0)):
        tokens = rng.integers(0, 256, 3 + length).tolist()
        mask = [False] * 3 + [not (row == 2 and place == 4) for place in range(length)]
        count = sum(mask)
        ids = np.array([rng.permutation(VOCAB)[:K] for _ in range(count)], np.int32).reshape(count, K)
        logprobs = np.log(-np.sort(-rng.dirichlet(np.ones(K + 1), count), 1)[:, :K]).astype(np.float32)
        teacher = TopK(
            ids=ids, logprobs=logprobs, tail_logprobs=tail_of(logprobs), sampled_logprobs=np.zeros(count, np.float32)
        )
        signals = {"reference": rng.uniform(-8, -4, count).astype(np.float32)} if reference else {}
        samples.append(make_sample(
            row, prompt=tokens[:3], completion=tokens[3:], loss_mask=mask, teacher=teacher, **signals
        ))  # fmt: skip
    return samples


def naive_selection(plain, sample, name, fraction):
    """bool [R], from full distributions: the tokens with the highest scores."""
    with torch.no_grad():
        logits = plain(torch.as_tensor(sample.tokens).long()[None]).logits[0, sample.positions - 1, :VOCAB]
    scores = []
    for row, q in enumerate(logits.softmax(-1).numpy()):
        top, teacher = int(q.argmax()), sample.topk("teacher")
        outside = min(math.exp(teacher.logprobs[row, -1]), math.exp(teacher.tail_logprobs[row]))
        p = dict(zip(teacher.ids[row].tolist(), np.exp(teacher.logprobs[row].astype(float)), strict=True))
        entropy = -sum(each * math.log(each) for each in q)
        scores.append(entropy if name == "student_entropy" else q[top] * (1 - p.get(top, outside)))
    order = sorted(range(len(scores)), key=lambda row: -scores[row])
    return np.isin(np.arange(len(scores)), order[: math.ceil(fraction * len(scores) - 1e-9)])


def masked(sample, kept):
    """The same by hand: as long as before, other tokens are not trained on."""
    mask = np.zeros(sample.num_tokens, bool)
    mask[sample.positions[kept]] = True
    return make_sample(
        sample.id.row, prompt=sample.tokens[:3], completion=sample.tokens[3:], loss_mask=mask,
        teacher=sample.topk("teacher").only(kept),
    )  # fmt: skip


def trained(actor, samples, cuts=((0, 4),)):
    """Metrics, and gradients by name, of a mini-batch in these micro-batches."""
    grads = {}

    def keep_gradients():
        grads.update({name: weight.grad.full_tensor() for name, weight in actor.hf_model.named_parameters()})

    batch = MiniBatch(
        micro_batches=tuple(tuple(samples[start:stop]) for start, stop in cuts),
        num_tokens=sum(sample.num_trained for sample in samples),
    )
    return actor.update(batch, before_step=keep_gradients), grads


def assert_same(found, expected):
    """Metrics but the quarters, which are those of a completion or of what is left of it; gradients."""
    metrics, grads = found
    wanted, want_grads = expected
    names, want_names = ({name for name in each if "/q" not in name} for each in (metrics, wanted))
    assert names == want_names
    for name in names:
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-6, abs=1e-9), name
    for name, gradient in want_grads.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.fixture
def head_rows(monkeypatch):
    """Rows of each call of the head with gradients, and of each pass without."""
    seen = {"head": [], "statistics": []}

    def counting(name, function):
        def call(hidden, *args, **kwargs):
            seen[name].append(len(hidden))
            return function(hidden, *args, **kwargs)

        return call

    monkeypatch.setattr(logprob_model, "head_loss", counting("head", head.head_loss))
    monkeypatch.setattr(logprob_model, "row_statistics", counting("statistics", head.row_statistics))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_position_is_masking_by_hand(world, head_rows, fraction):
    make, _ = world
    config, actor = make(f"{KEY}=position", f"{KEY}_kwargs.fraction={fraction}")
    samples = make_samples()
    weighed = [Weighting(config).before_scoring(sample) for sample in samples]
    by_hand = [masked(s, np.arange(s.num_trained) < math.ceil(fraction * s.num_trained - 1e-9)) for s in samples]
    numbers = [3, 1, 3, 0] if fraction < 1 else [7, 1, 9, 0]
    assert [sample.num_trained for sample in weighed] == [sample.num_trained for sample in by_hand] == numbers
    if fraction < 1:
        assert [sample.num_tokens for sample in weighed] == [6, 4, 6, 3]  # what follows is cut
    found = trained(actor, with_loss_weights(config, weighed))
    uniform, _ = make()
    assert_same(found, trained(actor, with_loss_weights(uniform, by_hand)))
    assert head_rows == {"head": [sum(numbers)] * 2, "statistics": []}


@pytest.mark.parametrize("signals", [["teacher"], ["teacher/a", "teacher/b"]])
def test_position_with_a_store_selects_after_scoring(signals):
    """The store has scores of whole completions, of one teacher or of several."""
    models = ["distillation.teacher_models.a.cache=s", "distillation.teacher_models.b.model_path=x"]
    several = [*models, "distillation.teacher_models.a.model_path=y", "distillation.ensemble=sum",
               "distillation.teacher_models.a.key=default", "distillation.teacher_models.b.key=default"]  # fmt: skip
    one = ["actor_rollout_ref.teacher.model.path=x", "actor_rollout_ref.teacher.cache=s"]
    config = load_config([
        "data.train_files=x", "actor_rollout_ref.model.path=x", f"{KEY}=position", f"{KEY}_kwargs.fraction=0.3",
        *(one if len(signals) == 1 else several),
    ])  # fmt: skip
    weighting, sample = Weighting(config), make_samples()[2]
    sample = dataclasses.replace(sample, signals=dict.fromkeys(signals, sample.topk("teacher")))
    assert weighting.before_scoring(sample).num_trained == 9
    assert weighting.after_scoring(sample).num_trained == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["student_entropy", "confident_wrong"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_selection_by_the_student_is_masking_by_hand(world, head_rows, name, mode):
    make, plain = world
    samples, agg = make_samples(), f"{ACTOR}.loss_agg_mode={mode}"
    config, actor = make(f"{KEY}={name}", f"{KEY}_kwargs.fraction=0.4", agg)
    found = trained(actor, with_loss_weights(config, samples))
    assert head_rows == {"head": [3 + 1 + 4], "statistics": [17]}
    uniform, plain_actor = make(agg)
    by_hand = [masked(sample, naive_selection(plain, sample, name, 0.4)) for sample in samples]
    assert_same(found, trained(plain_actor, with_loss_weights(uniform, by_hand)))
    again = trained(actor, with_loss_weights(config, samples), cuts=((0, 1), (1, 1), (1, 3), (3, 4)))
    assert_same(again, found)


@pytest.mark.slow
def test_tokens_that_are_left_out_of_the_loss_are_not_selected(world):
    make, plain = world
    config, actor = make(f"{KEY}=student_entropy", f"{KEY}_kwargs.fraction=0.5")
    sample = make_samples()[0]
    best = naive_selection(plain, sample, "student_entropy", 2 / 7)
    weights = np.where(best, 0, 1).astype(np.float32)
    found = trained(actor, with_loss_weights(config, [sample.with_signals(weights=weights)]), cuts=((0, 1),))
    left = masked(sample, ~best)
    kept = naive_selection(plain, left, "student_entropy", 0.5)
    uniform, plain_actor = make()
    expected = trained(plain_actor, with_loss_weights(uniform, [masked(left, kept)]), cuts=((0, 1),))
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["position", "student_entropy"])
def test_a_term_without_tokens_has_no_metric(world, name):
    """Given completions without distillation.sft_coef have no cross-entropy."""
    make, _ = world
    config, actor = make(f"{KEY}={name}", f"{KEY}_kwargs.fraction=0.4", "data.response_key=response")
    assert "actor/sft_loss" in actor.objective.reported
    metrics, _ = trained(actor, with_loss_weights(config, make_samples()))
    assert metrics["actor/kl_loss"] > 0
    assert "actor/sft_loss" not in metrics


@pytest.mark.parametrize("name", ["position", "student_entropy"])
def test_another_term_keeps_all_tokens(world, head_rows, name):
    """The loss is the sum of both terms, each divided by its own number of tokens."""
    make, plain = world
    samples = make_samples(reference=True)
    config, actor = make(f"{KEY}={name}", f"{KEY}_kwargs.fraction=0.4", REFERENCE)
    weighed = [Weighting(config).before_scoring(sample) for sample in samples]
    loss, grads = trained(actor, with_loss_weights(config, weighed))
    assert head_rows["head"] == [17]
    head_rows["head"].clear()
    kept = [
        naive_selection(plain, each, name, 0.4) if name == "student_entropy"
        else np.arange(each.num_trained) < math.ceil(0.4 * each.num_trained)
        for each in samples
    ]  # fmt: skip
    uniform, plain_actor = make(REFERENCE)
    by_hand = [masked(sample, each) for sample, each in zip(samples, kept, strict=True)]
    alone, alone_grads = trained(plain_actor, with_loss_weights(uniform, by_hand))
    without_teacher = [
        make_sample(
            s.id.row, prompt=s.tokens[:3], completion=s.tokens[3:], loss_mask=s.loss_mask,
            reference=s.array("reference"),
        )
        for s in samples
    ]  # fmt: skip
    other, other_grads = trained(plain_actor, with_loss_weights(uniform, without_teacher))
    assert loss["actor/loss"] == pytest.approx(alone["actor/loss"] + other["actor/loss"], rel=1e-6)
    for parameter, gradient in grads.items():
        torch.testing.assert_close(gradient, alone_grads[parameter] + other_grads[parameter], rtol=1e-5, atol=1e-7)


def test_uniform_weights_need_no_statistics(world, head_rows):
    make, _ = world
    config, actor = make()
    trained(actor, with_loss_weights(config, make_samples()))
    assert head_rows == {"head": [17], "statistics": []}

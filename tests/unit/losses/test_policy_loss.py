"""Policy losses against values computed by hand, and against numbers that verl's and TRL's functions gave."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_gkd.errors import ConfigError, TrainingError
from hybrid_gkd.losses.policy import check_policy_loss, cispo, gspo, vanilla
from hybrid_gkd.losses.table import policy_loss
from hybrid_gkd.testing import make_sample, tiny_config
from hybrid_gkd.workers.aggregation import with_loss_weights

VERL = json.loads(Path(__file__).with_name("verl_policy_losses.json").read_text(encoding="utf-8"))
TRL = json.loads(Path(__file__).with_name("trl_policy_losses.json").read_text(encoding="utf-8"))
"""`how` in the files says how the numbers were made."""
LENGTHS = [len(row) for row in VERL["logprobs"]]
FROM_TRL = {
    # its loss: what it is here, and the bounds that it was given
    "grpo": ("vanilla seq-mean-token-mean", {}),
    "bnpo": ("vanilla token-mean", {}),
    "dr_grpo": ("vanilla seq-mean-token-sum-norm", {}),
    "dapo": ("vanilla token-mean", {}),
    "dapo delta": ("vanilla token-mean", {"clip_ratio_c": 2.0}),
    "gspo": ("gspo seq-mean-token-mean", {}),
    "cispo": ("cispo token-mean", {"clip_ratio_low": 1.0}),  # TRL's has no lower bound
    "rloo": ("vanilla seq-mean-token-sum", {}),
}

# ratio, advantage -> loss, dloss/dlogprob, clipped (clip_ratio 0.2)
CASES = [
    (1.0, 2.0, -2.0, -2.0, False),  # first mini-batch: the plain policy gradient
    (1.1, 2.0, -2.2, -2.2, False),
    (1.5, 2.0, -2.4, 0.0, True),  # already far enough up
    (0.5, 2.0, -1.0, -1.0, False),  # wrong way: the pessimistic branch keeps its gradient
    (0.5, -2.0, 1.6, 0.0, True),  # already far enough down
    (1.5, -2.0, 3.0, 3.0, False),
    (1.5, 0.0, 0.0, 0.0, False),
]


def column(index):
    return torch.tensor([case[index] for case in CASES], dtype=torch.float64)


def test_values_and_gradients_by_hand():
    old = torch.linspace(-3, -1, len(CASES), dtype=torch.float64)
    logprobs = (old + column(0).log()).requires_grad_()
    loss, clipped = vanilla(logprobs, old, column(1), clip_ratio_low=0.2, clip_ratio_high=0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss, column(2))
    torch.testing.assert_close(logprobs.grad, column(3))
    assert clipped.tolist() == [case[4] for case in CASES]
    assert not (logprobs.grad[clipped]).any()


def test_equals_the_formula_of_the_paper():
    gen = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 200, generator=gen, dtype=torch.float64)
    ratio = (logprobs - old).exp()
    want = -torch.minimum(ratio * advantages, ratio.clamp(0.7, 1.3) * advantages)
    torch.testing.assert_close(vanilla(logprobs, old, advantages, clip_ratio_low=0.3, clip_ratio_high=0.3)[0], want)


def test_no_tokens():
    logprobs = torch.zeros(0, requires_grad=True)
    loss, clipped = vanilla(logprobs, torch.zeros(0), torch.zeros(0), clip_ratio_low=0.2, clip_ratio_high=0.2)
    loss.sum().backward()
    assert loss.shape == clipped.shape == logprobs.grad.shape == (0,)


def test_refuses():
    with pytest.raises(ValueError, match="all be"):
        vanilla(torch.zeros(3, 1), torch.zeros(3), torch.zeros(3), clip_ratio_low=0.2, clip_ratio_high=0.2)
    with pytest.raises(ValueError, match="all be"):
        vanilla(torch.zeros(3), torch.zeros(3), torch.zeros(1), clip_ratio_low=0.2, clip_ratio_high=0.2)
    with pytest.raises(ValueError, match="clip_ratio"):
        vanilla(torch.zeros(3), torch.zeros(3), torch.zeros(3), clip_ratio_low=0.2, clip_ratio_high=0.0)


def flat(rows):
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def config(*overrides):
    return tiny_config("data.max_response_length=5", *overrides)


def mini_batch(weights=None):
    found = []
    for index, length in enumerate(LENGTHS):
        signals = {} if weights is None else {"weights": weights[index]}
        found.append(make_sample(index, prompt=[0], completion=[0] * length, **signals))
    return found


def factors(mode, weights=None, *more):
    """The factors of all tokens, divided by what the workers divide by."""
    section = config(f"actor_rollout_ref.actor.loss_agg_mode={mode}", *more)
    items = with_loss_weights(section, mini_batch(weights))
    each = [item.signals.get("weights", np.ones(item.num_trained)) for item in items]
    return torch.from_numpy(np.concatenate(each).astype(np.float64)) / sum(LENGTHS)


def loss_and_gradient(case, logprobs, old, advantages, settings):
    """Return loss and gradient of all tokens, by "<policy loss> <aggregation>", from those of each response."""
    name, mode = case.split()
    row = policy_loss(name)
    options = {key: settings[key] for key in row.options}
    logprobs, old, numbers = flat(logprobs).requires_grad_(), flat(old), np.repeat(range(6), LENGTHS)
    if row.of_sequences:
        means = [part.mean() for part in (logprobs.detach() - old).split(LENGTHS)]
        options["sequence_log_ratio"] = torch.stack(means)[numbers]
    loss, _ = row.function(logprobs, old, flat(advantages), **options)
    total = (loss * factors(mode)).sum()
    total.backward()
    return total.item(), logprobs.grad


@pytest.mark.parametrize("case", VERL["losses"])
def test_same_loss_and_gradient_as_verl(case):
    want = VERL["losses"][case]
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0} | want["settings"]
    loss, gradient = loss_and_gradient(case, VERL["logprobs"], VERL["old_logprobs"], VERL["advantages"], settings)
    # verl's constant norm leaves out the mean over sequences that the name speaks of, and TRL has.
    scale = len(LENGTHS) if case.endswith("seq-mean-token-sum-norm") else 1
    assert loss * scale == pytest.approx(want["loss"], rel=1e-6)
    torch.testing.assert_close(gradient * scale, flat(want["gradient"]), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", TRL["losses"])
def test_same_loss_and_gradient_as_trl(name):
    want, (case, bounds) = TRL["losses"][name], FROM_TRL[name]
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": math.inf} | bounds
    # TRL's rloo clips the ratio of the whole response: the same as long as the weights are those that drew it.
    old = TRL["logprobs" if name == "rloo" else "old_logprobs"]
    advantages = [[value] * length for value, length in zip(TRL["advantages"], LENGTHS, strict=True)]
    loss, gradient = loss_and_gradient(case, TRL["logprobs"], old, advantages, settings)
    if name != "rloo":  # whose value sums no tokens
        assert loss == pytest.approx(want["loss"], rel=1e-6)
    torch.testing.assert_close(gradient, flat(want["gradient"]), rtol=1e-6, atol=1e-9)


def test_dual_clip_bounds_a_ratio_that_only_grows():
    logprobs = torch.tensor([2.0, 2.0, 100.0, 1.0], requires_grad=True)
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    loss, clipped = vanilla(logprobs, torch.zeros(4), torch.tensor([-2.0, 2.0, -1.0, -1.0]), **bounds)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([6.0, -2.6, 3.0, torch.e]))
    assert clipped.tolist() == [True, True, True, False]
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 0.0, 0.0, torch.e]))


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    logprobs = torch.tensor([1.0, -1.0, 0.1], requires_grad=True)
    loss, clipped = cispo(logprobs, torch.zeros(3), torch.ones(3), clip_ratio_low=0.2, clip_ratio_high=0.3)
    loss.sum().backward()
    assert clipped.tolist() == [True, True, False]
    torch.testing.assert_close(logprobs.grad, -torch.tensor([1.3, 0.8, math.exp(0.1)]))


def test_the_mean_over_a_sequence_has_the_gradient_of_its_ratio():
    logprobs = torch.tensor([-0.3, -0.7, -0.2], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-0.4, -0.5, -0.4], dtype=torch.float64)
    mean = (logprobs - old).mean()
    ratio = mean.detach().expand(3)
    loss, _ = gspo(
        logprobs, old, torch.full_like(old, 2.0), clip_ratio_low=0.5, clip_ratio_high=0.5, sequence_log_ratio=ratio
    )
    (got,) = torch.autograd.grad(loss.mean(), logprobs)
    (want,) = torch.autograd.grad(-2 * mean.exp(), logprobs)
    torch.testing.assert_close(got, want)


def test_tokens_without_weight_count_in_no_mean():
    weights = [np.ones(n, np.float32) for n in LENGTHS]
    weights[0][:] = 0
    weights[1][2:] = 0
    weights[3] *= 2
    kept = [0, 2, *LENGTHS[2:]]
    losses = torch.arange(sum(LENGTHS), dtype=torch.float64)
    parts = [p * torch.from_numpy(w) for p, w in zip(losses.split(LENGTHS), weights, strict=True)]
    sums, rows = [p.sum() for p in parts], [n for n in kept if n]
    want = {
        "token-mean": sum(sums) / sum(kept),
        "seq-mean-token-sum": sum(sums) / 5,
        "seq-mean-token-mean": sum(s / n for s, n in zip(sums[1:], rows, strict=True)) / 5,
        "seq-mean-token-sum-norm": sum(sums) / 5 / 5,
    }
    for mode, value in want.items():
        assert (losses * factors(mode, weights)).sum().item() == pytest.approx(value.item(), rel=1e-6), mode
    scaled = factors("seq-mean-token-sum-norm", weights, "actor_rollout_ref.actor.loss_scale_factor=100")
    torch.testing.assert_close(scaled, factors("seq-mean-token-sum-norm", weights) / 20)


def test_the_mean_over_tokens_needs_no_factors_and_no_token_at_all_is_refused():
    items = mini_batch()
    assert with_loss_weights(config(), items) is items
    with pytest.raises(TrainingError, match="no token of the 6 completions"):
        with_loss_weights(config(), mini_batch([np.zeros(n, np.float32) for n in LENGTHS]))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_term_of_some_samples_is_a_mean_over_those_alone(mode):
    section = config(f"actor_rollout_ref.actor.loss_agg_mode={mode}")
    weights = [np.ones(n, np.float32) for n in LENGTHS]
    weights[1][0] = 0
    rewarded = [
        item.with_signals(returns=weights[i], **({"advantages": weights[i]} if i in (1, 3) else {}))
        for i, item in enumerate(mini_batch(weights))
    ]
    found = with_loss_weights(section, rewarded)
    alone = with_loss_weights(section, [rewarded[1], rewarded[3]])
    scale = (LENGTHS[1] + LENGTHS[3]) / sum(LENGTHS)  # what the workers divide by
    assert all(item.signals.keys() - {"advantages"} == {"returns", "weights", "weights/policy"} for item in found)
    for item, own in zip([found[1], found[3]], alone, strict=True):
        np.testing.assert_allclose(item.array("weights/policy") * scale, own.array("weights"), rtol=1e-6)
    assert not any(found[i].array("weights/policy").any() for i in (0, 2, 4, 5))
    whole = with_loss_weights(section, mini_batch(weights))
    for item, own in zip(found, whole, strict=True):  # the other terms, of all of them or of none
        assert np.array_equal(item.array("weights"), own.array("weights"))


def test_a_mini_batch_is_refused_where_no_token_is_left_in_any_term():
    weights = [np.ones(n, np.float32) for n in LENGTHS]
    weights[0][:] = 0
    items = mini_batch(weights)
    items[0] = items[0].with_signals(advantages=weights[0])
    with pytest.raises(TrainingError, match="no token of the 6 completions"):
        with_loss_weights(config(), items)
    with_loss_weights(config("actor_rollout_ref.actor.entropy_coeff=0.1"), items)
    items[1] = items[1].with_signals(advantages=weights[1])
    assert with_loss_weights(config(), items)[1].array("weights/policy").all()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return (logprobs * advantages).mean(), advantages > 0", r"must return a loss \[T\] and a bool"),
        ("return -logprobs * advantages.mean(), advantages > 0", "row must depend on that row alone"),
        ("return advantages, advantages > 0", "no gradient"),
        ("return -logprobs / 0 * advantages, advantages > 0", "not finite"),
        ("return -logprobs", "raised"),
        ("return -logprobs * advantages, advantages > 0", None),
    ],
)
def test_a_policy_loss_of_ones_own_is_tried_out(tmp_path, code, message):
    (tmp_path / "mine.py").write_text(
        f"def mine(logprobs, old_logprobs, advantages, **bounds):\n    {code}\n", encoding="utf-8"
    )
    row = policy_loss(f"{tmp_path}/mine.py:mine")
    options = dict.fromkeys(row.options, 2.0)
    if message is None:
        return check_policy_loss(row.function, options)
    with pytest.raises(ConfigError, match=f"policy_loss.loss_mode: .*{message}"):
        check_policy_loss(row.function, options)

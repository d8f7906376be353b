"""The critic: its values are those of a plain model with a linear map, it learns, and it resumes. CPU, one rank."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd.errors import ModelError
from hybrid_gkd.student.checkpoint_io import load_model, save_model
from hybrid_gkd.student.critic import Critic
from hybrid_gkd.testing import make_sample, make_tiny_model, single_process_group, tiny_config
from hybrid_gkd.types import MiniBatch

CPU = torch.device("cpu")
RETURN = 1.5


def make_config(model, *overrides):
    return tiny_config(
        "distillation.enabled=false", "reward.answer_key=answer", "algorithm.adv_estimator=gae", "critic.optim.lr=1e-2",
        *overrides, model=model,
    )  # fmt: skip


def micro_batch(seed, values=None):
    """Three samples of odd lengths, one with a single trained token."""
    rng, items = np.random.default_rng(seed), []
    for index, length in enumerate((5, 1, 12)):
        prompt, completion = (rng.integers(0, 256, n, np.int32).tolist() for n in (4 + index, length))
        item = make_sample(index, prompt=prompt, completion=completion, returns=np.full(length, RETURN, np.float32))
        old = values[item.id] if values else np.zeros(length, np.float32)
        items.append(item.with_signals(values=old))
    return tuple(items)


def learn(critic, seed):
    items = micro_batch(seed)
    items = micro_batch(seed, critic.compute_values((items,)))
    return critic.update(MiniBatch(micro_batches=(items,), num_tokens=18))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_values_are_those_of_the_state_before_each_token(tied, tmp_path):
    folder = make_tiny_model(tmp_path, tied=tied)
    with single_process_group():
        critic = Critic(make_config(folder), device=CPU, num_updates=1)
        names = {name: tuple(tensor.shape) for name, tensor in critic.named_parameters()}
        assert names["lm_head.weight"] == (1, 64)  # the vocabulary's head is not kept
        found = critic.compute_values((micro_batch(0),))
        assert all((values == 0).all() for values in found.values())
        with torch.no_grad():
            weight, bias = critic.hf_model.lm_head.parameters()
            weight.to_local().copy_(torch.linspace(-1, 1, 64))
            bias.to_local().fill_(0.25)
        found = critic.compute_values((micro_batch(0)[:1], micro_batch(0)[1:]))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for item in micro_batch(0):
        ids = torch.from_numpy(item.tokens.astype(np.int64))
        with torch.no_grad():
            states = plain.model(ids[None]).last_hidden_state[0, item.positions - 1]
        np.testing.assert_allclose(
            found[item.id], states @ torch.linspace(-1, 1, 64) + 0.25, rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
def test_it_learns_the_returns_and_goes_on_to_the_last_digit_after_a_resume(tmp_path):
    for dtype in ("fp32", "bf16"):  # the head is float32 in both
        config = make_config(
            make_tiny_model(tmp_path / dtype), f"critic.fsdp_config.model_dtype={dtype}",
            "critic.optim.lr_scheduler_type=linear", "critic.cliprange_value=.inf",
        )
        with single_process_group():
            whole, resumed = (Critic(config, device=CPU, num_updates=40) for _ in range(2))
            curve = [learn(whole, 0)["critic/vf_loss"] for _ in range(20)]
            assert curve[0] == pytest.approx(RETURN**2 / 2)
            assert curve[-1] < 0.1 * curve[0]
            save_model(whole, tmp_path / f"critic_{dtype}")
            load_model(resumed, tmp_path / f"critic_{dtype}")
            assert [learn(whole, step) for step in (1, 2)] == [learn(resumed, step) for step in (1, 2)]
            assert whole.hf_model.lm_head.weight.dtype == torch.float32
            for name, weight in whole.named_parameters():
                assert torch.equal(weight.full_tensor(), dict(resumed.named_parameters())[name].full_tensor()), name


@pytest.mark.slow
def test_an_empty_micro_batch_changes_nothing(tmp_path):
    """A rank that has none of the sequences takes part all the same."""
    config = make_config(make_tiny_model(tmp_path))
    with single_process_group():
        one, other = (Critic(config, device=CPU, num_updates=2) for _ in range(2))
        items = micro_batch(0)
        found = [
            critic.update(MiniBatch(micro_batches=cut, num_tokens=18))
            for critic, cut in ((one, (items,)), (other, ((), items)))
        ]
    assert found[0] == pytest.approx(found[1])


def test_a_folder_that_cannot_be_loaded_is_named_with_its_own_key(tmp_path):
    config = make_config(make_tiny_model(tmp_path), "critic.model.path=/nowhere/to/be/found")
    with single_process_group(), pytest.raises(ModelError, match=r"^critic\.model\.path: .*nowhere"):
        Critic(config, device=CPU, num_updates=1)

"""The private parts that compat uses exist in the installed torch, transformers and Ray.

wandb: tests/unit/reporting/test_dashboard.py, against a server. vLLM: test_vllm_llm.py and tests/integration.
"""

import importlib

import pytest
import ray
import torch
from ray._private.services import get_node_ip_address
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from hybrid_gkd.compat.ray import is_cancelled, on_loopback
from hybrid_gkd.compat.torch import ShardAdamW, abandon_backward, copy_each, local_shard, scale_each
from hybrid_gkd.compat.transformers import block_classes, mixes_in_attention_only, unneeded_keys, use_attention
from hybrid_gkd.testing import single_process_group


def interrupt(*_):
    raise InterruptedError


def test_a_backward_pass_of_fsdp2_is_abandoned():
    given = torch.ones(2, 3)
    with single_process_group():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        expected = torch.autograd.grad(model(given).sum(), [*model.parameters()])
        for module in (*model, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        model.set_requires_gradient_sync(False)  # gradients that wait to be reduced
        model(given).sum().backward()
        handle = model[0].register_forward_hook(lambda module, inputs, output: output.register_hook(interrupt) and None)
        with pytest.raises(InterruptedError):
            model(given).sum().backward()
        handle.remove()
        abandon_backward(model)
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        model(given).sum().backward()
        found = [parameter.grad.full_tensor() for parameter in model.parameters()]
    torch.testing.assert_close(found, [*expected])


def test_tensors_are_copied_to_others_of_another_type():
    sources = [torch.arange(3.0), torch.ones(2, 2)]
    targets = [torch.empty_like(each, dtype=torch.bfloat16) for each in sources]
    copy_each(targets, sources)
    assert [each.float().tolist() for each in targets] == [each.tolist() for each in sources]


def test_tensors_are_multiplied_in_place():
    tensors = [torch.arange(3.0), torch.ones(2, 2)]
    scale_each(tensors, torch.tensor(0.5))
    assert [each.tolist() for each in tensors] == [[0, 0.5, 1], [[0.5, 0.5], [0.5, 0.5]]]


@pytest.mark.parametrize("fused", [True, False])
def test_steps_on_local_shards_are_those_of_torch(fused, monkeypatch):
    module, types = importlib.import_module("torch.optim.adam"), []
    adam = module.adam
    monkeypatch.setattr(module, "adam", lambda *lists, **how: (types.append(type(lists[0][0])), adam(*lists, **how)))
    with single_process_group():
        models = [fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (1,))) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        for model, kind in zip(models, (torch.optim.AdamW, ShardAdamW), strict=True):
            optimizer = kind(model.parameters(), fused=fused, foreach=not fused)
            for _ in range(2):
                model(torch.ones(2, 3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = [[local_shard(each.detach()).tolist() for each in model.parameters()] for model in models]
    assert found[0] == found[1]
    assert [issubclass(each, DTensor) for each in types] == [True, True, False, False]
    assert {type(values["exp_avg"]) for values in optimizer.state.values()} == {DTensor}


def test_a_model_says_what_it_is_made_of():
    calls = []

    def attention(module, query, key, value, mask, **kwargs):
        calls.append(query.shape)
        return query.transpose(1, 2), None

    config = Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    assert block_classes(model) == {"Qwen2DecoderLayer"}
    assert mixes_in_attention_only(model)
    model._is_stateful = True
    assert not mixes_in_attention_only(model)
    model._keys_to_ignore_on_load_unexpected = ["extra"]
    assert [*unneeded_keys(model)] == ["extra"]
    AttentionInterface.register("counted", attention)
    use_attention(model.config, "counted")
    model(torch.ones(1, 3, dtype=torch.long))
    assert len(calls) == 2


@pytest.mark.skipif(ray.is_initialized(), reason="then the cluster's address is Ray's")
def test_ray_takes_the_loopback_address():
    before = get_node_ip_address()
    with on_loopback():
        assert get_node_ip_address() in {"127.0.0.1", "::1"}
    assert get_node_ip_address() == before


def test_a_process_that_is_no_worker_is_not_cancelled_and_starts_no_cluster():
    before = ray.is_initialized()
    assert not is_cancelled()
    assert ray.is_initialized() == before

"""Compiled decoder blocks: the same numbers, and no compilation after the first pass. CPU."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd.models.fast_layers import use_torch_norms
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION, pack, register_packed_attention
from hybrid_gkd.student.sharded_model import compile_blocks
from hybrid_gkd.testing import make_tiny_model


@pytest.fixture
def graphs(monkeypatch):
    """Compile to plain torch operations, which takes seconds instead of a minute; count the graphs."""
    compiled = []
    compile_ = torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    yield compiled
    torch._dynamo.reset()
    register_packed_attention()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_equal_eager_ones_and_compile_once(tmp_path, graphs, checkpointing):
    folder = make_tiny_model(tmp_path, layers=3)
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED_ATTENTION)
    use_torch_norms(eager)
    if checkpointing:
        eager.gradient_checkpointing_enable({"use_reentrant": False})
    eager.train()
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled)
    rng = np.random.default_rng(0)
    num_graphs = []
    for lengths in ([7, 5], [30, 2, 9], [2], [64]):
        batch = pack([rng.integers(0, 256, n) for n in lengths], "cpu")
        gradients = []
        for model in (eager, compiled):
            hidden = model.model(**batch.model_kwargs()).last_hidden_state
            hidden.square().sum().backward()
            gradients.append([hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
            model.zero_grad(set_to_none=True)
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        num_graphs.append(len(graphs))
    assert num_graphs == [4] * 4  # before and behind the attention, first for one length, then for any; not per block
    assert list(compiled.state_dict()) == list(eager.state_dict())  # names that are published and saved

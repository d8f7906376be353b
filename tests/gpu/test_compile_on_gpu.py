"""Compiled decoder blocks in bf16 on one GPU: the numbers of the eager ones, and no compilation after the first pass.

    bash tests/run.sh -m gpu tests/gpu/test_compile_on_gpu.py
"""

import copy

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_gkd.models.fast_layers import use_torch_norms
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION, pack, register_packed_attention
from hybrid_gkd.student.sharded_model import compile_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_equal_eager_ones_and_compile_once(checkpointing):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, attn_implementation=PACKED_ATTENTION,
    )  # fmt: skip
    eager = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16).train()
    if checkpointing:
        eager.gradient_checkpointing_enable({"use_reentrant": False})
    use_torch_norms(eager)
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled)
    torch._dynamo.utils.counters.clear()
    num_graphs = []
    rng = np.random.default_rng(0)
    try:
        for lengths in ([700, 300], [2], [64, 2, 900, 5], [4096]):
            batch = pack([rng.integers(0, 1000, n) for n in lengths], "cuda")
            direction = torch.randn(1, sum(lengths), 512, device="cuda", dtype=torch.bfloat16)
            outputs = []
            for model in (eager, compiled):
                hidden = model.model(**batch.model_kwargs()).last_hidden_state
                (hidden * direction).sum().backward()
                outputs.append([hidden.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()])
                model.zero_grad(set_to_none=True)
            for got, want in zip(*outputs, strict=True):
                assert (got - want).float().norm() < 0.03 * want.float().norm()
            num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        torch._dynamo.reset()
        register_packed_attention()
    assert num_graphs[0] > 0
    assert num_graphs == [num_graphs[0]] * 4

"""Packed runs against one sequence at a time, on tiny random models of several architectures. CPU, some seconds.

transformers computes norms and the softmax of eager attention in float32 whatever the model's dtype, so the
float64 comparison uses sdpa and norms that stay in float64.
"""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from hybrid_gkd.errors import ModelError
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION, _packed_mask, _padded, pack, packed_attention

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED_LAYERS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention"],
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-sliding": Qwen2Config(**SIZES, **MIXED_LAYERS),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral-sliding": MistralConfig(**SIZES, sliding_window=4),
    "mistral-wide": MistralConfig(**SIZES, sliding_window=13),
    "phimoe-sliding": PhimoeConfig(**SIZES, sliding_window=4, num_local_experts=2),  # window told to the mask only
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
}
LENGTHS = [5, 1, 13, 7]


class Float64RMSNorm(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def build(config, dtype, attention):
    torch.manual_seed(0)
    config = type(config)(**config.to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).base_model.eval()
    with torch.no_grad():
        for weight in model.parameters():  # larger than the initialisation, so that attention is not uniform
            weight.add_(torch.randn_like(weight), alpha=0.3)
    if dtype == torch.float64:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(parent, name, Float64RMSNorm(child))
    return model


def sequences(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, length).astype(np.int32) for length in LENGTHS]


def run_packed(model, batch):
    return model(**batch.model_kwargs()).last_hidden_state[0]


def run_separately(model, token_ids):
    rows = [model(input_ids=torch.as_tensor(ids.astype(np.int64))[None], use_cache=False) for ids in token_ids]
    return torch.cat([row.last_hidden_state[0] for row in rows])


def gradients(model, hidden):
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad((weights * hidden).sum(), [p for _, p in named], allow_unused=True)
    return {name: grad for (name, _), grad in zip(named, grads, strict=True) if grad is not None}


@pytest.mark.parametrize(
    ("name", "dtype", "reference", "tolerance"),
    [
        *((name, torch.float32, "eager", 1e-5) for name in CONFIGS),
        # phimoe has a router that computes in float32
        *((name, torch.float64, "sdpa", 1e-12) for name in CONFIGS if name != "phimoe-sliding"),
    ],
)
def test_equals_one_sequence_at_a_time(name, dtype, reference, tolerance):
    token_ids = sequences()
    packed, separate = build(CONFIGS[name], dtype, PACKED_ATTENTION), build(CONFIGS[name], dtype, reference)
    got, want = run_packed(packed, pack(token_ids, "cpu")), run_separately(separate, token_ids)
    scale = want.abs().max().item()
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * scale)
    got_grads, want_grads = gradients(packed, got), gradients(separate, want)
    assert got_grads.keys() == want_grads.keys()
    assert len(got_grads) > 10
    for key, grad in want_grads.items():
        torch.testing.assert_close(got_grads[key], grad, rtol=0, atol=10 * tolerance * (1 + grad.abs().max().item()))


def test_the_window_matters():
    """Otherwise the sliding-window cases above would prove nothing."""
    token_ids = sequences()
    narrow, wide = (
        run_separately(build(CONFIGS[f"mistral-{w}"], torch.float32, "eager"), token_ids) for w in ("sliding", "wide")
    )
    assert (narrow - wide).abs().max() > 0.1


def test_order_does_not_matter():
    model, token_ids, order = build(CONFIGS["qwen2"], torch.float64, PACKED_ATTENTION), sequences(), [2, 0, 3, 1]
    straight = run_packed(model, pack(token_ids, "cpu")).split(LENGTHS)
    permuted = run_packed(model, pack([token_ids[i] for i in order], "cpu")).split([LENGTHS[i] for i in order])
    for place, index in enumerate(order):
        torch.testing.assert_close(permuted[place], straight[index], rtol=0, atol=1e-12)


def test_neighbours_do_not_leak():
    model, token_ids = build(CONFIGS["llama"], torch.float64, PACKED_ATTENTION), sequences()
    changed = [*token_ids[:2], (token_ids[2] + 1) % 50, token_ids[3]]
    before, after = (run_packed(model, pack(ids, "cpu")).split(LENGTHS) for ids in (token_ids, changed))
    for index in (0, 1, 3):
        assert torch.equal(before[index], after[index])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen2-sliding", "gpt2"])
def test_gradient_checkpointing(name, use_reentrant):
    config = type(CONFIGS[name])(**CONFIGS[name].to_dict())
    if name == "gpt2":
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    batch = pack(sequences(), "cpu")
    plain, checkpointed = (build(config, torch.float64, PACKED_ATTENTION).train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        checkpointed.enable_input_require_grads()
    hidden = [run_packed(model, batch) for model in (plain, checkpointed)]
    torch.testing.assert_close(hidden[0], hidden[1], rtol=0, atol=1e-12)
    for model, states in zip((plain, checkpointed), hidden, strict=True):
        states.pow(2).sum().backward()
        assert model.training
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_a_block_diagonal_mask(kv_heads, window):
    lengths, heads, head_dim, scaling = [3, 1, 7], 4, 8, 0.2
    gen = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 11, head_dim, generator=gen, dtype=torch.float64)
    key, value = torch.randn(2, 1, kv_heads, 11, head_dim, generator=gen, dtype=torch.float64)
    sequence = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    position = torch.arange(11)
    distance = position[:, None] - position[None]
    visible = (sequence[:, None] == sequence[None]) & (distance >= 0) & (distance < (window or 99))
    scores = query @ key.repeat_interleave(heads // kv_heads, 1).transpose(2, 3) * scaling
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    want = (weights @ value.repeat_interleave(heads // kv_heads, 1)).transpose(1, 2)
    cu_seqlens = torch.tensor([0, 3, 4, 11], dtype=torch.int32)
    got = _padded(query, key, value, cu_seqlens, 7, scaling, window)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_pack():
    batch = pack([np.array([7, 8, 9], np.int32), [5, 6]], "cpu")
    assert batch.input_ids.tolist() == [[7, 8, 9, 5, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert (batch.input_ids.dtype, batch.position_ids.dtype, batch.cu_seqlens.dtype) == (
        torch.int64,
        torch.int64,
        torch.int32,
    )
    assert batch.max_length == 3
    kwargs = batch.model_kwargs()
    assert kwargs["use_cache"] is False
    assert kwargs["attention_mask"] is None


@pytest.mark.parametrize("bad", [[], [[]], [[1], []], [[[1, 2]]]])
def test_pack_refuses(bad):
    with pytest.raises(ValueError, match="at least one token"):
        pack(bad, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (Gemma2Config(**SIZES, head_dim=8), "Gemma2Attention.* softcap"),
        (GptOssConfig(**SIZES, head_dim=8, num_local_experts=2), "GptOssAttention.* s_aux"),
        (Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2, intermediate_size_mlp=48), "chunked_attention"),
        (Qwen3NextConfig(**SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"]), "linear_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_refuses_architectures_it_cannot_run_exactly(config, feature):
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).base_model
    with pytest.raises(ModelError, match=feature):
        run_packed(model, pack(sequences(), "cpu"))


def test_refuses_dropout_in_training_only():
    model = build(LlamaConfig(**SIZES, attention_dropout=0.1), torch.float32, PACKED_ATTENTION)
    run_packed(model, pack(sequences(), "cpu"))
    with pytest.raises(ModelError, match="dropout"):
        run_packed(model.train(), pack(sequences(), "cpu"))


def test_refuses_a_call_without_boundaries():
    model = build(CONFIGS["llama"], torch.float32, PACKED_ATTENTION)
    with pytest.raises(ModelError, match=r"PackedBatch\.model_kwargs"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(1, 26), (1, 1, 26, 26)])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_refuses_an_attention_mask(name, shape):
    model = build(CONFIGS[name], torch.float32, PACKED_ATTENTION)
    kwargs = pack(sequences(), "cpu").model_kwargs() | {"attention_mask": torch.ones(shape, dtype=torch.int64)}
    with pytest.raises(ModelError, match="attention mask"):
        model(**kwargs)


@pytest.mark.parametrize(("name", "asked"), [("llama", 1), ("mistral-sliding", 3)])
def test_a_model_without_windows_is_asked_for_its_mask_once(name, asked):
    """To ask, transformers looks at the position ids, and on a GPU waits for them."""
    requests = []

    def mask(**kwargs):
        requests.append(kwargs)
        return _packed_mask(**kwargs)

    model = build(CONFIGS[name], torch.float32, PACKED_ATTENTION)
    AttentionMaskInterface.register(PACKED_ATTENTION, mask)
    try:
        outputs = [run_packed(model, pack(sequences(), "cpu")) for _ in range(3)]
    finally:
        AttentionMaskInterface.register(PACKED_ATTENTION, _packed_mask)
    assert len(requests) == asked
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_refuses_several_rows_and_other_attention():
    module, rows = torch.nn.Module(), torch.zeros(2, 1, 3, 4)
    boundaries: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3}
    with pytest.raises(ModelError, match="one row"):
        packed_attention(module, rows, rows, rows, None, **boundaries)
    with pytest.raises(ModelError, match="as many keys as queries"):
        packed_attention(module, rows[:1], rows[:1, :, :2], rows[:1, :, :2], None, **boundaries)
    with pytest.raises(ModelError, match="not causal"):
        packed_attention(module, rows[:1], rows[:1], rows[:1], None, is_causal=False, **boundaries)

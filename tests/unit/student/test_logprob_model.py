"""Which architectures the student may have, on tiny random models. CPU, a few seconds."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    Gemma3TextConfig,
    Gemma4Config,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OpenAIGPTConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RecurrentGemmaConfig,
    XGLMConfig,
)

from hybrid_gkd.errors import ModelError
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION, pack
from hybrid_gkd.student import logprob_model as logprob_model_module
from hybrid_gkd.student.logprob_model import LogprobModel, check_packing
from hybrid_gkd.student.pretrained import build_model

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}
GPT_SIZES: dict[str, Any] = {
    "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT_SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def logprob_model(config):
    return LogprobModel(AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        MistralConfig(**SIZES),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, head_dim=8),
        Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=16),
        Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
        MixtralConfig(**SIZES, num_local_experts=4),
        PhimoeConfig(**SIZES, num_local_experts=2),
        Gemma3TextConfig(**SIZES, head_dim=8),
        Phi3Config(**SIZES),
        Olmo2Config(**SIZES),
        GraniteConfig(**SIZES),
        GPT2Config(**GPT_SIZES, **NO_DROPOUT),
        OPTConfig(**OPT_SIZES, dropout=0.0, attention_dropout=0.0, layerdrop=0.0),
    ],
    ids=lambda config: config.model_type,
)
def test_accepts(config):
    logprob_model(config)


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4),
        Mamba2Config(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=4, head_dim=16, n_groups=1
        ),
        RecurrentGemmaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            lru_width=32, attention_window_size=8,
        ),
        XGLMConfig(vocab_size=50, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
        CodeGenConfig(**GPT_SIZES, rotary_dim=4),
        OpenAIGPTConfig(**{name: value for name, value in GPT_SIZES.items() if not name.endswith("token_id")}),
    ],
    ids=lambda config: config.model_type,
)
def test_refuses_what_would_mix_packed_sequences(config):
    with pytest.raises(ModelError, match=rf"^{config.model_type}: packed sequences would leak .*attention interface"):
        logprob_model(config)


@pytest.mark.parametrize(
    "name", ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logits_scaling", "logit_scale"]
)
def test_refuses_logits_that_are_changed_behind_the_head(name):
    with pytest.raises(ModelError, match=rf"llama: config\.{name} changes the logits"):
        logprob_model(LlamaConfig(**SIZES, **{name: 30.0}))
    logprob_model(LlamaConfig(**SIZES, **{name: None}))


def test_refuses_logits_that_are_changed_where_text_is_a_part_of_the_model():
    text = {**SIZES, "pad_token_id": 0, "head_dim": 8, "vocab_size_per_layer_input": 50}
    config = Gemma4Config(text_config={**text, "final_logit_softcapping": 30.0})
    with torch.device("meta"), pytest.raises(ModelError, match=r"gemma4_text: .*softcapping changes"):
        logprob_model(config)


def test_refuses_a_head_with_a_bias():
    with pytest.raises(ModelError, match="phi: the output embedding must be a linear layer without bias"):
        logprob_model(PhiConfig(**SIZES))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (GPT2Config(**GPT_SIZES), "resid_pdrop, embd_pdrop, attn_pdrop"),
        (GPT2Config(**GPT_SIZES, **NO_DROPOUT | {"embd_pdrop": 0.2}), "embd_pdrop"),
        (OPTConfig(**OPT_SIZES), "dropout"),  # in functions, not in modules
        (OPTConfig(**OPT_SIZES, dropout=0.0, layerdrop=0.1), "layerdrop"),
        (LlamaConfig(**SIZES, attention_dropout=0.1), "attention_dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_refuses_dropout(config, fields):
    with pytest.raises(ModelError, match=rf"{config.model_type}: .*dropout.*model\.override_config: {fields}\b"):
        logprob_model(config)


def test_dropout_can_be_overridden(tmp_path):
    GPT2LMHeadModel(GPT2Config(**GPT_SIZES)).save_pretrained(tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    with pytest.raises(ModelError, match="resid_pdrop"):
        LogprobModel(build_model(str(tmp_path), **options, override_config={}))
    LogprobModel(build_model(str(tmp_path), **options, override_config=NO_DROPOUT))


LONG_ROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5 + 3 * i for i in range(4)],
    "original_max_position_embeddings": 20,
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=8), Qwen3MoeConfig(**SIZES, **EXPERTS),
        PhimoeConfig(**SIZES, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_the_same_log_probabilities_in_two_packings(config):
    check_packing(logprob_model(config), config, longest=40, device=CPU)


@pytest.mark.parametrize("longest", [20, 21, 40])
def test_a_length_from_which_a_model_computes_otherwise_is_tried_as_far_as_sequences_reach(longest):
    config = LlamaConfig(**SIZES | {"initializer_range": 0.5}, rope_parameters=LONG_ROPE)
    model = logprob_model(config)
    if longest == 20:
        check_packing(model, config, longest=longest, device=CPU)
        return
    with pytest.raises(ModelError, match=r"llama: .* [\d.]+ nats .*after one of 21 tokens; .* fewer than 21 tokens"):
        check_packing(model, config, longest=longest, device=CPU)


def test_attention_across_the_ends_of_sequences_is_found(monkeypatch):
    config = LlamaConfig(**SIZES | {"initializer_range": 0.5})
    model = logprob_model(config)
    as_one = lambda sequences, device: pack([np.concatenate(sequences)], device)  # noqa: E731
    monkeypatch.setattr(logprob_model_module, "pack", as_one)
    with pytest.raises(ModelError, match=r"after one of 5 tokens; .*: use another model$"):
        check_packing(model, config, longest=40, device=CPU)

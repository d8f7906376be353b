"""Properties of a model that the packing engine detects when it loads it. CPU, tiny random models."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hybrid_gkd.models.packed_attention import length_settings
from hybrid_gkd.teacher.engines import base
from hybrid_gkd.teacher.engines.hf import HFScoringEngine
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.testing import make_tokenizer


def test_lengths_from_which_a_layer_computes_otherwise_are_found_at_any_depth():
    rope = {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 20, "factor": 7}}
    config = {"sliding_window": 32, "hidden_size": 64, "rope_parameters": rope, "attention_chunk_size": None}
    assert length_settings(config) == {20, 32}


@pytest.mark.parametrize("unknown", [True, False])
def test_a_neighbour_beyond_a_limit_of_the_model_is_tried(tmp_path, monkeypatch, caplog, unknown):
    """LongRoPE without its limit, as it would be in a model whose limit nobody knows."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0 + 4 * i for i in range(8)],
        "original_max_position_embeddings": 24,
    }  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, rope_parameters=rope, initializer_range=0.5,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if unknown:
        monkeypatch.setattr(base, "position_limit", lambda text: (64, "max_position_embeddings"))
    engine = HFScoringEngine(EngineOptions(ckpt_path=str(tmp_path), device="cpu", max_model_len=40))
    assert engine.info.max_sequence_length == (40 if unknown else 24)
    assert ("does not keep packed sequences apart" in caplog.text) == unknown
    assert ("sequences may have 24 tokens (original_max_position_embeddings" in caplog.text) != unknown

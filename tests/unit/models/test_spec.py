"""Facts of a config.json that models of a run must agree on: lengths and rotary embeddings."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config, PhimoeConfig, Qwen2Config

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION, pack
from hybrid_gkd.models.spec import overrides_for_engine, position_limit, read_config

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [2.0, 5.0, 9.0, 14.0]


def longrope(short=SHORT, long=LONG, **more):
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **more}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Qwen2Config(**SIZES), 64),
        (Phi3Config(**SIZES, rope_parameters=longrope(), original_max_position_embeddings=20), 20),
        (Phi3Config(**SIZES, rope_parameters=longrope(LONG), original_max_position_embeddings=20), 64),
        (Phi3Config(**SIZES, rope_parameters=longrope(), original_max_position_embeddings=80), 64),
        (LlamaConfig(**SIZES, rope_parameters=longrope(original_max_position_embeddings=12)), 12),
        (PhimoeConfig(
            **SIZES, rope_parameters=longrope(
                LONG, short_mscale=1.0, long_mscale=1.2, original_max_position_embeddings=24
            ),
        ), 24),
        (Gemma3TextConfig(**SIZES, head_dim=8, rope_parameters={
            "full_attention": longrope(original_max_position_embeddings=30),
            "sliding_attention": {"rope_type": "default"},
        }), 30),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 4.0}), 64),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "factor": 4.0}), 64),
        (Qwen2Config(**SIZES, dual_chunk_attention_config={"chunk_size": 48, "local_size": 8}), 40),
    ],
)  # fmt: skip
def test_the_longest_sequence_is_where_values_begin_to_depend_on_a_setting(config, limit):
    assert position_limit(config)[0] == limit


@pytest.mark.parametrize(
    "rope", [longrope(original_max_position_embeddings=20), {"rope_type": "dynamic", "factor": 4.0}],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
@torch.no_grad()
def test_up_to_the_limit_a_sequence_is_the_same_beside_any_neighbour_and_beyond_it_is_not(rope):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, rope_parameters=rope, initializer_range=0.5)
    limit, _ = position_limit(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).eval()
    own = np.arange(9)

    def beside(length):
        neighbour = np.arange(length) % 50
        return model(**pack([neighbour, own], "cpu").model_kwargs()).logits[0, -len(own) :]

    alone = model(**pack([own], "cpu").model_kwargs()).logits[0]
    torch.testing.assert_close(beside(limit), alone)
    assert (beside(limit + 1) - alone).abs().max() > 0.01


def test_a_scaling_of_the_model_card_keeps_what_else_the_rotary_embedding_has(tmp_path):
    before = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    LlamaConfig(**SIZES, rope_parameters=before).save_pretrained(tmp_path)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    yarn = {**before, **scaling, "rope_type": "yarn"}
    for given, expected in (
        ({"rope_scaling": scaling}, yarn),
        ({"rope_parameters": scaling | {"rope_theta": 1e6}}, yarn | {"rope_theta": 1e6}),
        ({"rope_theta": 7.0}, {**before, "rope_theta": 7.0}),
        ({"rope_scaling": scaling, "rope_theta": 7.0}, yarn | {"rope_theta": 7.0}),
        ({"rope_theta": 7.0, "rope_scaling": None}, {**before, "rope_theta": 7.0}),
    ):
        config = read_config(str(tmp_path), False, given | {"rms_norm_eps": 1e-3})
        assert config.rope_parameters == expected
        assert config.rms_norm_eps == 1e-3
        assert overrides_for_engine(config, given) == {"rope_parameters": expected}
    assert overrides_for_engine(config, {"rms_norm_eps": 1e-3}) == {"rms_norm_eps": 1e-3}


def test_layers_of_several_kinds_are_changed_by_name(tmp_path):
    Gemma3TextConfig(**SIZES, head_dim=8).save_pretrained(tmp_path)
    linear = {"rope_type": "linear", "factor": 8.0}
    rope = read_config(str(tmp_path), False, {"rope_scaling": {"full_attention": linear}}).rope_parameters
    assert rope["full_attention"] == linear | {"rope_theta": 1e6}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    for given in ({"rope_scaling": linear}, {"rope_theta": 7.0}):
        with pytest.raises(ConfigError, match=r"override_config: .* each kind of layers: rope_parameters=\{"):
            read_config(str(tmp_path), False, given)


@pytest.mark.parametrize("rope", [{"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 8.0}])
def test_a_scaling_that_lacks_a_parameter_is_refused_by_its_name(rope, tmp_path):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"invalid rope_scaling .*: KeyError: .*'(factor|low_freq_factor)'"):
        read_config(str(tmp_path), False, {"rope_scaling": rope})

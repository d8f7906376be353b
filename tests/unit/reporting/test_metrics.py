from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config

from hybrid_gkd.models.spec import ModelSpec, student_spec, training_flops
from hybrid_gkd.ppo.step_metrics import peak_flops
from hybrid_gkd.reporting.metric_table import METRICS, check_names, markdown_table
from hybrid_gkd.testing import make_tiny_model, tiny_config


def test_every_metric_is_documented():
    for name, (unit, description) in METRICS.items():
        assert name.count("/") >= 1, name
        assert description, name
        assert "|" not in description + unit, f"{name}: breaks the table of docs/metrics.md"


def test_a_metric_that_may_leave_0_to_1_is_no_fraction():
    rewards = ("val/accuracy", "val/best@n", "val/maj@n", "val/pass@k", "reward/mean", "critic/vf_explained_var")
    assert {METRICS[name][0] for name in rewards} == {""}


def test_check_names_accepts_the_table():
    check_names(METRICS)
    check_names({})


def test_check_names_names_every_stranger():
    with pytest.raises(AssertionError, match="actor/kl_lost, zzz"):
        check_names({"zzz": 1.0, "actor/kl_lost": 1.0, "actor/kl_loss": 1.0})


def test_docs_page_is_the_table():
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == markdown_table(), "run: python -m hybrid_gkd.metrics > docs/metrics.md"


def test_the_peak_is_that_of_all_gpus_and_only_where_each_is_known():
    assert peak_flops(["NVIDIA H200"] * 4) == 4 * 989e12
    assert peak_flops(["NVIDIA H200", "NVIDIA L4"]) == 1110e12
    for unknown in ("cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 NVL", "NVIDIA L40"):
        assert peak_flops(["NVIDIA H200", unknown]) == 0
    assert peak_flops([]) == 0


def test_operations_are_those_of_the_formula():
    size = ModelSpec(
        parameters=1400, kv_bytes_per_token=0, embedding_parameters=400, head_parameters=200, attention_width=30
    )
    assert training_flops(size, [10, 20], 12) == 6 * 1000 * 30 + 6 * 200 * 12 + 6 * 30 * 500


def student(path, *overrides):
    return student_spec(
        tiny_config(*overrides, model=path)
    )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_operations_of_a_student_are_what_torch_counts(tied, tmp_path):
    """Heads of another size than hidden size / heads. torch counts attention as if it were not causal: twice."""
    Qwen3Config(
        vocab_size=640, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=tied,
    ).save_pretrained(tmp_path)
    size = student(tmp_path)
    assert (size.head_parameters, size.attention_width) == (640 * 128, 3 * 4 * 64)
    model = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(tmp_path), attn_implementation="eager")
    length = 96
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None]).logits.sum().backward()
    causal = 6 * size.attention_width * length**2
    assert training_flops(size, [length], length) + causal == pytest.approx(counter.get_total_flops(), rel=5e-3)


def test_the_student_is_the_one_that_is_trained(tmp_path):
    make_tiny_model(tmp_path, layers=2, hidden=64)
    one, two = student(tmp_path, "actor_rollout_ref.model.override_config.num_hidden_layers=1"), student(tmp_path)
    assert (one.head_parameters, 2 * one.attention_width) == (two.head_parameters, two.attention_width)
    weights = [size.parameters - size.embedding_parameters for size in (one, two)]
    assert weights[0] < weights[1] < 2 * weights[0]


def test_a_mixture_of_experts_has_no_known_operations(tmp_path):
    MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    ).save_pretrained(tmp_path)
    assert student(tmp_path).has_experts

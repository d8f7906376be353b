"""Knowledge of vLLM's models without importing it, compared with vLLM itself."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hybrid_gkd.compat.vllm import architectures
from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.compat.vllm.architectures import cannot_be_served, cannot_be_split, known_architectures

pytestmark = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
ASKED = [
    "LlamaForCausalLM", "SmolLM3ForCausalLM", "ArceeForCausalLM", "GPTNeoForCausalLM", "XGLMForCausalLM", "NoneSuch"
]  # fmt: skip
VLLM = """
import json, sys
from types import SimpleNamespace
from hybrid_gkd.compat.vllm import versions as vllm_compat

vllm_compat.import_llm("cpu")
from vllm.model_executor.models import ModelRegistry

config = SimpleNamespace(hf_config=None, model_impl="auto", _get_transformers_backend_cls=lambda: "served")
resolve = lambda name: name in ModelRegistry.models or ModelRegistry._try_resolve_transformers(name, config) is not None
print(json.dumps([sorted(ModelRegistry.models), [resolve(name) for name in json.loads(sys.argv[1])]]))
"""


def served(*names, **fields):
    return cannot_be_served(SimpleNamespace(architectures=list(names), **fields)) is None


@pytest.mark.parametrize(
    ("heads", "pairs", "ranks", "rule"),
    [
        (8, 8, 1, None), (8, 8, 4, None), (8, 2, 4, None), (40, 10, 5, None), (None, None, 3, None),
        (6, 2, 4, "must divide the model's 6 attention heads"),
        (40, 10, 4, "must divide the model's 10 key-value heads, or be a multiple of them"),
    ],
)  # fmt: skip
def test_tensor_parallelism_needs_whole_heads_of_each_rank(heads, pairs, ranks, rule):
    text = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=pairs)
    assert cannot_be_split(SimpleNamespace(get_text_config=lambda: text), ranks) == rule


@pytest.mark.slow
def test_vllm_itself_says_the_same():
    command = [sys.executable, "-c", VLLM, json.dumps(ASKED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    own, answers = json.loads(done.stdout.splitlines()[-1])
    assert set(own) == known_architectures()
    assert [served(name) for name in ASKED] == answers == [True, True, True, False, False, False]


def test_what_is_not_known_is_left_to_vllm(monkeypatch):
    assert cannot_be_served(SimpleNamespace(architectures=["NoneSuch"])) == (
        "its architecture NoneSuch is in neither vLLM nor transformers"
    )
    assert served("NoneSuch", auto_map={"AutoModelForCausalLM": "code.NoneSuch"})
    assert served()
    monkeypatch.setattr(architectures, "has_plugins", lambda: True)
    assert served("NoneSuch")

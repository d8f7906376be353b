"""Arguments and hooks with which vLLM's engines are built. The engines themselves: tests/integration."""

import subprocess
import sys

import pytest

from hybrid_gkd.compat.vllm import versions as vllm_compat

pytestmark = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
LOADING = """
from types import SimpleNamespace
from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.compat.vllm.llm import load_llm

vllm_compat.import_llm("cpu")
from vllm.model_executor.models import ModelRegistry, registry
from vllm.utils import jit_monitor
from vllm.v1.worker import gpu_worker

warmup, activate = gpu_worker.warmup_kernels, jit_monitor.activate

def build(**arguments):
    assert gpu_worker.warmup_kernels is not warmup
    assert gpu_worker.warmup_kernels("runner", "execute", "sample") is None
    jit_monitor.activate(mode="warn", verbose=False)
    assert not jit_monitor.is_active()
    return arguments

def no_process(*args):
    raise AssertionError("a process was started")

registry._run_in_subprocess = no_process
ours = {"model": "m", "seed": 0, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"},
        "hf_overrides": {"head_dtype": "float32"}}
found = load_llm(build, ours, {"seed": 3, "compilation_config": {"mode": 3}, "hf_overrides": {"rope_theta": 1e6}},
                 SimpleNamespace(architectures=["Qwen2ForCausalLM", "NoSuchForCausalLM"]))
assert found == {"model": "m", "seed": 3, "compilation_config": {"mode": 3, "cudagraph_mode": "NONE"},
                 "hf_overrides": {"head_dtype": "float32", "rope_theta": 1e6}}, found
assert load_llm(build, ours, {"compilation_config": 3}, SimpleNamespace())["compilation_config"] == 3
assert (gpu_worker.warmup_kernels, jit_monitor.activate) == (warmup, activate)
as_it_is = []
load_llm(lambda **_: as_it_is.extend((gpu_worker.warmup_kernels, jit_monitor.activate)), ours,
         {"jit_monitor_mode": "error"}, SimpleNamespace())
assert as_it_is == [warmup, activate]
assert ModelRegistry.models["Qwen2ForCausalLM"].inspect_model_cls().architecture == "Qwen2ForCausalLM"
"""


@pytest.mark.slow
def test_an_engine_is_built_without_what_nobody_asks_for(tmp_path):
    """In a process of its own: vLLM changes the one that imports it. It has seen no model before."""
    environment = {"VLLM_CACHE_ROOT": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOADING], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


BESIDE = """
from types import SimpleNamespace
from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.compat.vllm.llm import load_llm

vllm_compat.import_llm("cpu")
from transformers import Starcoder2Model
from vllm.model_executor.models.transformers import base

def decorate(**_):
    base.support_torch_compile(dynamic_arg_dims={"input_ids": 1}, enable_if=lambda config: True)(Starcoder2Model)
    return Starcoder2Model.__call__, Starcoder2Model.__init__, Starcoder2Model.__bases__

before, name = (Starcoder2Model.__call__, Starcoder2Model.__init__, Starcoder2Model.__bases__), SimpleNamespace()
assert load_llm(decorate, {}, {}, name, alone=False) == before
assert load_llm(decorate, {}, {}, name) != before
"""


@pytest.mark.slow
def test_vllm_beside_the_student_leaves_the_classes_of_transformers_as_they_are(tmp_path):
    environment = {"VLLM_CACHE_ROOT": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]

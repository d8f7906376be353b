"""Which engines keep vLLM's own model runner. What the other one computes is compared on a GPU, by same_tokens.py."""

from types import SimpleNamespace

import pytest

from hybrid_gkd.compat.vllm import runner
from hybrid_gkd.compat.vllm import versions as vllm_compat


def engine_with(runner):
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    executor = SimpleNamespace(driver_worker=worker)
    return SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor)))


@pytest.mark.parametrize(
    ("version", "engine", "reason"),
    [
        ("0.27.0", engine_with(object()), "the fast path was not tested with vLLM 0.27.0"),
        ("0.26.0+cu129", engine_with(SimpleNamespace()), "the model runner is types.SimpleNamespace"),
        ("0.26.1", SimpleNamespace(engine_core=SimpleNamespace()), "this vLLM is built differently: "),
    ],
)
def test_engine_stays_as_it_is(monkeypatch, version, engine, reason):
    monkeypatch.setattr(vllm_compat, "vllm_version", lambda: version)
    assert runner.install(engine).startswith(reason)

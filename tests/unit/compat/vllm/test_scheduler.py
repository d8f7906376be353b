"""Which engines keep vLLM's own scheduler. What the other one does: tests/integration/test_rollout_scheduler.py."""

from types import SimpleNamespace

import pytest

from hybrid_gkd.compat.vllm import fast_scheduler as scheduler
from hybrid_gkd.compat.vllm import versions as vllm_compat


class Scheduler:
    def __init__(self, vllm_config, **arguments):
        self.vllm_config = vllm_config


class AsyncScheduler(Scheduler):
    pass


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM that was tried, and whose schedulers have nothing."""
    monkeypatch.setattr(vllm_compat, "vllm_version", lambda: "0.26.0+cu129")
    parts = SimpleNamespace(Scheduler=Scheduler, AsyncScheduler=AsyncScheduler)
    monkeypatch.setattr(scheduler, "_parts_of_vllm", lambda: parts)


def plain_config(**changes):
    config = SimpleNamespace(
        speculative_config=None, kv_transfer_config=None, ec_transfer_config=None, kv_events_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=False, policy="fcfs"),
        model_config=SimpleNamespace(disable_cascade_attn=True, is_encoder_decoder=False),
    )  # fmt: skip
    vars(config).update(changes)
    return config


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("config", "log_stats", "kind", "reason"),
    [
        (plain_config(), False, Scheduler, "the scheduler has no running, requests"),
        (plain_config(speculative_config=1), True, Scheduler, "the engine uses speculative decoding, statistics"),
        (
            plain_config(scheduler_config=SimpleNamespace(async_scheduling=True, policy="priority")), False,
            AsyncScheduler, "the engine uses priorities",
        ),
        (
            plain_config(aux_output_config=SimpleNamespace(enable_return_routed_experts=True)), False, Scheduler,
            "the engine uses routed experts",
        ),
        (plain_config(model_config=SimpleNamespace()), False, Scheduler, "this vLLM is built differently: "),
    ],
)  # fmt: skip
def test_an_engine_that_does_more_has_vllms_own(config, log_stats, kind, reason, caplog):
    cache = SimpleNamespace(has_mamba_layers=False)
    made = scheduler.RolloutScheduler(config, kv_cache_config=cache, include_finished_set=False, log_stats=log_stats)
    assert type(made) is kind
    assert made.vllm_config is config
    assert f"slower: {reason}" in caplog.text
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=made))
    assert scheduler.short_path(SimpleNamespace(engine_core=core)) is None


def nothing():
    raise ImportError("no such part")


@pytest.mark.usefixtures("vllm")
def test_a_vllm_that_was_not_tried_is_asked_for_nothing(monkeypatch, caplog):
    assert scheduler.engine_args({}) == {"scheduler_cls": scheduler.RolloutScheduler}
    assert scheduler.engine_args({"scheduler_cls": "mine"}) == {}
    assert "slower: engine_kwargs.vllm.scheduler_cls is given" in caplog.text
    monkeypatch.setattr(scheduler, "_parts_of_vllm", nothing)
    assert scheduler.engine_args({}) == {}
    assert "slower: this vLLM is built differently: no such part" in caplog.text
    monkeypatch.setattr(vllm_compat, "vllm_version", lambda: "0.29.1")
    assert scheduler.engine_args({}) == {}
    assert "slower: the fast path was not tested with vLLM 0.29.1" in caplog.text

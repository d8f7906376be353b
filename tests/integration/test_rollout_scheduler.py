"""The short path of the rollout scheduler on the CPU: vLLM's synchronous scheduler and its older model runner."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
from same_tokens import check_cases, check_two_ranks

from hybrid_gkd.models import vllm_compat
from hybrid_gkd.rollout import vllm_scheduler
from hybrid_gkd.testing import make_tiny_model

pytestmark = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
TIMEOUT = 900.0


def in_own_process(function, *args, **kwargs):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result(TIMEOUT)


def test_both_schedulers_give_the_same_tokens(tmp_path):
    in_own_process(check_cases, make_tiny_model(tmp_path / "model", num_words=200), "cpu")


@pytest.mark.usefixtures("only_tensor_parallel_engine")
def test_so_do_two_ranks_of_tensor_parallelism(tmp_path):
    check_two_ranks(make_tiny_model(tmp_path / "model", num_words=200), "cpu", TIMEOUT)


def leave_unknown_ones_alone():
    vllm_compat.prepare_environment("cpu")
    from vllm.v1.core.sched.scheduler import Scheduler

    other = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace())))
    empty = object.__new__(Scheduler)
    lacking = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=empty)))
    elsewhere = SimpleNamespace(engine_core=SimpleNamespace())  # the core is in another process
    reasons = [vllm_scheduler.install(engine) for engine in (other, lacking, elsewhere)]
    vllm_compat.vllm_version = lambda: "0.29.1"
    reasons.append(vllm_scheduler.install(other))
    return reasons, type(empty) is Scheduler


def test_a_scheduler_that_is_not_known_stays_as_it_is():
    (other, lacking, elsewhere, untried), is_untouched = in_own_process(leave_unknown_ones_alone)
    assert other == "the scheduler is SimpleNamespace"
    assert lacking.startswith("the scheduler has no running, requests")
    assert elsewhere.startswith("this vLLM is built differently: ")
    assert untried == "this path was not tried with vLLM 0.29.1"
    assert is_untouched

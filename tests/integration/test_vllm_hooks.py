"""The scorer in the places that the installed vLLM has for it, in both generations of model runners."""

import inspect
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.errors import ModelError
from hybrid_gkd.teacher.engines.vllm_engine import EXTRA_ARGS_KEY, RowScorer

pytestmark = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
TIMEOUT = 900.0
VOCABULARY, NUM_IDS, LENGTH = 50, 41, 9
ROWS = np.array([1, 3, 4, 7, 8])
HIDDEN = torch.randn(2, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(0))
TARGETS = np.arange(len(ROWS))
# Steps of the spans (request, first position, tokens): one alone, chunks of both, a preempted one from its start.
STEPS = [[("a", 0, 9)], [("b", 0, 4)], [("b", 4, 2), ("a", 0, 5)], [("a", 0, 7), ("b", 6, 3)], [("a", 7, 2)]]
COMPLETE = [["a"], [], [], ["b"], ["a"]]


def sampling_params():
    how = {"rows": ROWS.tobytes(), "targets": TARGETS.tobytes(), "k": 4, "temperature": 2.0, "num_ids": NUM_IDS}
    return SimpleNamespace(extra_args={EXTRA_ARGS_KEY: how})


def scorer():
    return RowScorer(lambda hidden: hidden, None)


def hidden_states(spans):
    """Return the concatenated hidden states of the requests of a step."""
    return torch.cat([HIDDEN["ab".index(name)][first : first + count] for name, first, count in spans])


def check(found, names):
    assert list(found) == names
    for name, (ids, logprobs, (tail, sampled), *_) in found.items():
        expected = (HIDDEN["ab".index(name), ROWS, :NUM_IDS] / 2).log_softmax(1)
        top, places = expected.topk(4)
        assert torch.equal(ids, places.int())
        torch.testing.assert_close(logprobs, top)
        torch.testing.assert_close(tail, expected.scatter(1, places, -torch.inf).logsumexp(1))
        torch.testing.assert_close(sampled, expected[range(len(TARGETS)), TARGETS])


def use_newer_runner():
    vllm_compat.prepare_environment("cpu")
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    worker = object.__new__(PromptLogprobsWorker)
    vllm_compat.install_scorer(SimpleNamespace(prompt_logprobs_worker=worker), scorer())
    for name in "ab":
        worker.add_request(name, 0, sampling_params())
    for spans, names in zip(STEPS, COMPLETE, strict=True):
        counts = [count for _, _, count in spans]
        batch = SimpleNamespace(
            req_ids=[name for name, _, _ in spans],
            num_computed_prefill_tokens_np=np.array([first for _, first, _ in spans]),
            num_scheduled_tokens=np.array(counts),
            query_start_loc_np=np.cumsum([0, *counts]),
        )
        check(worker.compute_prompt_logprobs(None, hidden_states(spans), batch, None, None, None), names)
    worker.remove_request("a")
    worker.remove_request("b")


def use_older_runner():
    vllm_compat.prepare_environment("cpu")
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner = object.__new__(CPUModelRunner)
    runner.requests = {name: SimpleNamespace(sampling_params=sampling_params()) for name in "ab"}
    runner.input_batch, runner.query_start_loc = SimpleNamespace(), SimpleNamespace()
    vllm_compat.install_scorer(runner, scorer())
    for spans, names in zip(STEPS, COMPLETE, strict=True):
        counts = [count for _, _, count in spans]
        for name, first, _ in spans:
            runner.requests[name].num_computed_tokens = first
        runner.input_batch.req_id_to_index = {name: i for i, (name, _, _) in enumerate(spans)}
        runner.query_start_loc.np = np.cumsum([0, *counts])
        scheduled = {name: count for name, _, count in spans}
        check(runner._get_prompt_logprobs_dict(hidden_states(spans), scheduled), names)


def miss_what_is_not_there():
    vllm_compat.prepare_environment("cpu")
    from vllm.v1.engine.logprobs import LogprobsProcessor

    version = vllm_compat.vllm_version()

    class Worker:
        def add_request(self, req_id, sampling_params):
            raise NotImplementedError

    with pytest.raises(ModelError, match=rf"vLLM {version} is built differently: expected Worker\.add_request\(req_id"):
        vllm_compat.install_scorer(SimpleNamespace(prompt_logprobs_worker=Worker()), scorer())
    with pytest.raises(ModelError, match=rf"vLLM {version} .* SimpleNamespace\._get_prompt_logprobs_dict"):
        vllm_compat.install_scorer(SimpleNamespace(), scorer())
    del LogprobsProcessor._update_prompt_logprobs
    with pytest.raises(ModelError, match=rf"vLLM {version} .* LogprobsProcessor\._update_prompt_logprobs"):
        vllm_compat.keep_raw_prompt_logprobs()


def find_what_is_taken_when_it_is_there():
    """Without these vllm_compat would go on, and say or do less."""
    vllm_compat.prepare_environment("cpu")
    from vllm.config import CacheConfig
    from vllm.device_allocator import cumem
    from vllm.model_executor.layers.fused_moe import fused_moe_method_base
    from vllm.v1.worker import gpu_worker

    assert "kv_cache_max_concurrency" in CacheConfig.__dataclass_fields__
    for module, what in (
        (cumem, "pointer_to_data"), (gpu_worker, vllm_compat.MEMORY_GREW_MESSAGE),
        (fused_moe_method_base, "moe_kernel"),
    ):  # fmt: skip
        assert what in inspect.getsource(module), (module, what)


def test_hooks():
    """In a process of its own, because vLLM changes the process that imports it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for function in (
            use_newer_runner, use_older_runner, miss_what_is_not_there, find_what_is_taken_when_it_is_there
        ):
            pool.submit(function).result(TIMEOUT)

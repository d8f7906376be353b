"""vLLM as rollout engine on a GPU: it schedules a step while another one is running, and it sleeps.

    bash tests/run.sh -m gpu tests/gpu/test_rollout_engines_on_gpu.py
"""

import engines
import numpy as np
import pytest
from engines import MAX_TOKENS, SEEDS, EngineProcess

from hybrid_gkd.types import GenerationRequest, SampleId, SamplingParams

pytestmark = pytest.mark.gpu
REQUESTS = [
    GenerationRequest(id=SampleId(3, row, 0), prompt_ids=np.arange(row % 7 + 1, dtype=np.int32) + row, seed=row)
    for row in range(14)
]


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    overrides = ["actor_rollout_ref.rollout.gpu_memory_utilization=0.2"]
    started = EngineProcess(tmp_path_factory.mktemp("engines"), ["vllm"], "cuda", overrides)
    yield lambda function, *args: started.call(function, "vllm", *args)
    started.pool.shutdown()


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 12])
def test_paused_samples_are_prefixes_also_of_what_a_step_under_way_computes(call, steps, logprobs):
    sampling = SamplingParams(max_tokens=MAX_TOKENS, logprobs=logprobs)
    call(engines.load, SEEDS[0], 1)
    expected = call(engines.draw, REQUESTS, sampling)
    call(engines.load, SEEDS[0], 2)  # the prefix cache is empty, as before
    finished, paused, more = call(engines.draw_and_pause, REQUESTS, sampling, steps)
    assert not more
    assert finished.keys() | paused.keys() == expected.keys()
    assert len(finished) + len(paused) == len(expected)
    assert steps < 12 or any(sample.num_trained for sample in paused.values())
    for each, sample in (finished | paused).items():
        assert sample.tokens.tolist() == expected[each].tokens[: sample.num_tokens].tolist()
        if logprobs:
            np.testing.assert_allclose(sample.logprobs, expected[each].logprobs[: sample.num_trained], atol=1e-3)
    call(engines.load, SEEDS[0], 3)
    again = call(engines.draw, REQUESTS, sampling)
    assert {each: sample.tokens.tolist() for each, sample in again.items()} == {
        each: sample.tokens.tolist() for each, sample in expected.items()
    }


def test_an_engine_sleeps_after_a_pause_and_generates_with_new_weights(call):
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    call(engines.load, SEEDS[1], 4)
    expected = call(engines.draw, REQUESTS, sampling)
    call(engines.load, SEEDS[0], 5)
    call(engines.draw_and_pause, REQUESTS, sampling, 9)
    assert call(sleep_and_wake, SEEDS[1], 6) == (True, None, 6)
    found = call(engines.draw, REQUESTS, sampling)
    for each, sample in found.items():
        assert sample.tokens.tolist() == expected[each].tokens.tolist()
        assert set(sample.versions.tolist()) == {6}


def sleep_and_wake(engine, seed, version):
    engine.sleep()
    asleep = engine.weight_version
    engine.wake_weights()
    engines.load(engine, seed, version)
    engine.wake_kv_cache()
    return engine.can_sleep, asleep, engine.weight_version

"""One service for several LoRA adapters of one model: engines, the service's command, and a run with three teachers."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from adapters import make_adapters
from transformers import AutoModelForCausalLM

from hybrid_gkd.compat.vllm.versions import vllm_available
from hybrid_gkd.teacher.engines.engine_table import load_scoring_engine
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.types import Reading

TIMEOUT = 300.0  # seconds; ends a test that hangs
TOLERANCE = 1e-4  # of both engines in float32, as in test_scoring_engines.py
MODELS = {None: "base", "a": "a-merged", "b": "b-merged"}
needs_vllm = pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_adapters(tmp_path_factory.mktemp("adapters"))


def make_readings(seed, count=3):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 250, rng.integers(12, 40), dtype=np.int32) for _ in range(count)]
    return [Reading(token_ids=each, positions=np.arange(5, len(each))) for each in ids]


def score_in_turns(folder, backend):
    """Requests of all adapters alternate, so that vLLM's batches mix them and the other engine sorts them."""
    engine = load_scoring_engine(EngineOptions(
        ckpt_path=str(folder / "base"), backend=backend, device="cpu", max_model_len=64, n_logprobs=9,
        adapters=tuple((name, str(folder / name)) for name in ("b", "a")),
    ))  # fmt: skip
    for seed in range(4):
        for name in MODELS:
            engine.add((seed, name), make_readings(seed), 9, 1.0, None, name)
    found = {}
    while engine.num_tokens:
        found |= dict(engine.step())
    return engine.info, found


def check_scores(found, reading, logits):
    """Compare the scores of a reading with the log-softmax of a merged model's logits [L, V]."""
    expected = logits[reading.positions - 1].double().log_softmax(-1).numpy()
    top = -np.sort(-expected, axis=1)[:, :9]
    np.testing.assert_allclose(np.take_along_axis(expected, found.ids, 1), top, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found.logprobs, top, rtol=0, atol=TOLERANCE)
    chosen = expected[np.arange(len(top)), reading.token_ids[reading.positions]]
    np.testing.assert_allclose(found.sampled_logprobs, chosen, rtol=0, atol=TOLERANCE)
    return expected


@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=needs_vllm)])
def test_each_adapter_scores_as_the_merged_model(backend, folder):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:  # vLLM changes its process
        info, found = pool.submit(score_in_turns, folder, backend).result(TIMEOUT)
    assert [each.name for each in info.adapters] == ["b", "a"]
    assert len({info.weights, *(each.weights for each in info.adapters)}) == 3
    seen = {}
    for name, path in MODELS.items():
        model = AutoModelForCausalLM.from_pretrained(folder / path, dtype=torch.float32).eval()
        for seed in range(4):
            for reading, scores in zip(make_readings(seed), found[seed, name], strict=True):
                with torch.inference_mode():
                    logits = model(input_ids=torch.from_numpy(reading.token_ids[None].astype(np.int64))).logits[0]
                seen[name] = check_scores(scores, reading, logits)
    assert all(np.abs(seen[name] - seen[None]).max() > 0.1 for name in "ab")  # the adapters matter

"""The scoring engines on a GPU, in bfloat16, against a transformers forward in float32."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from adapters import SETTINGS, make_adapter
from transformers import AutoModelForCausalLM

from hybrid_gkd.compat.vllm.versions import vllm_available
from hybrid_gkd.losses.topk import top_logprobs
from hybrid_gkd.teacher.engines.engine_table import load_scoring_engine
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.testing import make_tiny_model
from hybrid_gkd.types import Reading

pytestmark = pytest.mark.gpu
TIMEOUT = 600.0
EMBEDDINGS, TOLERANCE = 40011, 0.02
"""Mean difference; single ones depend on how much bfloat16 costs this model, so on a plain forward in it."""
# name: (number of readings, K, temperature)
JOBS = {"one": (5, 1, 1.0), "few": (9, 64, 0.7), "many": (9, 256, 1.0), "more than the kernels take": (3, 600, 1.0)}
ADAPTER_JOBS = ["one", "few"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, hidden=256, layers=4, std=0.05, num_words=39000, vocab_size=EMBEDDINGS)
    return str(folder)


def make_readings(count):
    """Every other one is scored at a part of the positions behind its beginning, the others at all of them."""
    rng, readings = np.random.default_rng(count), []
    for index, (first, others) in enumerate(rng.integers(1, 900, (count, 2))):
        positions = np.arange(first, first + others)
        if index % 2:
            positions = np.sort(rng.permutation(positions)[: 1 + others // 2])
        token_ids = rng.integers(0, 39000, first + others, dtype=np.int32)
        readings.append(Reading(token_ids=token_ids, positions=positions))
    return readings


def score_all(folder, backend):
    """All jobs at once, so that requests with different K and temperature share a step."""
    engine = load_scoring_engine(EngineOptions(
        ckpt_path=folder, backend=backend, dtype="bfloat16", n_logprobs=600, gpu_memory_utilization=0.3
    ))  # fmt: skip
    for name, (count, k, temperature) in JOBS.items():
        engine.add(name, make_readings(count), k, temperature)
    found = {}
    while engine.num_tokens:
        found |= dict(engine.step())
    return found, engine.info.vocab_size


backends = pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=pytest.mark.skipif(
    not vllm_available(), reason="vLLM is not installed"))])  # fmt: skip


def in_process(function, *arguments):
    """vLLM changes its process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result(TIMEOUT)


def load_twice(path):
    return [AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda().eval()
            for dtype in (torch.float32, torch.bfloat16)]  # fmt: skip


@backends
def test_close_to_float32(model_path, backend):
    found, num_ids = in_process(score_all, model_path, backend)
    models = load_twice(model_path)
    for name in JOBS:
        check_job(name, found[name], models, num_ids)


def check_job(job, found, models, num_ids):
    """Compare scores with a forward pass of the first model, in float32; the second one is rounded to bfloat16."""
    count, k, temperature = JOBS[job]
    for reading, score in zip(make_readings(count), found, strict=True):
        expected, rounded = (logprobs(model, reading, temperature, num_ids) for model in models)
        worst = max(TOLERANCE, 2 * float(np.abs(rounded - expected).max()))
        top = -np.sort(-expected, axis=1)[:, :k]
        chosen = np.take_along_axis(expected, score.ids, 1)
        sampled = expected[np.arange(len(score.ids)), reading.token_ids[reading.positions]]
        assert ((score.ids >= 0) & (score.ids < num_ids)).all(), job
        assert (np.diff(np.sort(score.ids, axis=1), axis=1) > 0).all(), job
        assert (chosen >= top[:, -1:] - worst).all(), job
        assert np.abs(score.logprobs - chosen).mean() < TOLERANCE, job
        np.testing.assert_allclose(score.logprobs, chosen, atol=worst, rtol=0, err_msg=job)
        np.testing.assert_allclose(score.sampled_logprobs, sampled, atol=worst, rtol=0, err_msg=job)
        others = expected.astype(np.float64)
        np.put_along_axis(others, score.ids, -np.inf, 1)  # what the engine chose, which rounding may have swapped
        tail = np.logaddexp.reduce(others, 1)
        np.testing.assert_allclose(score.tail_logprobs, tail, atol=worst, rtol=0, err_msg=job)


def score_with_adapters(folder, backend, adapters):
    """Requests of the model alone and of each adapter alternate, so that steps mix them."""
    engine = load_scoring_engine(EngineOptions(
        ckpt_path=folder, backend=backend, dtype="bfloat16", n_logprobs=64, gpu_memory_utilization=0.3,
        adapters=adapters,
    ))  # fmt: skip
    for job in ADAPTER_JOBS:
        count, k, temperature = JOBS[job]
        for name in (None, *dict(adapters)):
            engine.add((job, name), make_readings(count), k, temperature, None, name)
    found = {}
    while engine.num_tokens:
        found |= dict(engine.step())
    return found, engine.info.vocab_size


@backends
def test_each_adapter_scores_as_the_merged_model(model_path, backend, tmp_path):
    adapters = []
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        folder = make_adapter(model_path, tmp_path / name, seed=seed, merged=tmp_path / f"{name}-merged", **settings)
        adapters.append((name, str(folder)))
    found, num_ids = in_process(score_with_adapters, model_path, backend, tuple(adapters))
    for name in (None, *SETTINGS):
        models = load_twice(model_path if name is None else tmp_path / f"{name}-merged")
        for job in ADAPTER_JOBS:
            check_job(job, found[job, name], models, num_ids)
            if name is not None:
                apart = [a.sampled_logprobs - b.sampled_logprobs
                         for a, b in zip(found[job, name], found[job, None], strict=True)]  # fmt: skip
                assert np.abs(np.concatenate(apart)).mean() > 10 * TOLERANCE  # the adapter matters


@torch.inference_mode()
def logprobs(model, reading, temperature, num_ids):
    ids = torch.from_numpy(reading.token_ids.astype(np.int64)).cuda()
    logits = model(input_ids=ids[None]).logits[0, reading.positions - 1, :num_ids].float()
    return (logits / temperature).log_softmax(-1).cpu().numpy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 64, 65, 256, 512, 513])
def test_kernels_choose_what_a_sort_would(dtype, k):
    generator = torch.Generator("cuda").manual_seed(k)
    logits = (4 * torch.randn(2100, 151937, device="cuda", generator=generator)).to(dtype)[:, :-1]  # odd row stride
    logits[5, 1000:1300] += 30  # the largest in few blocks
    logits[7, 3000 : 3000 + k] += 64  # a tail far below float32's 1e-7
    logits[8, 151665:] += 40  # nearly all of the mass on columns that stand for no token
    targets = torch.randint(151665, (2100,), device="cuda", generator=generator)
    temperatures = torch.rand(2100, device="cuda", generator=generator) + 0.5
    found = top_logprobs(logits, lambda rows: rows, targets, temperatures, k, 151665)
    tokens = logits[:, :151665]
    expected = (tokens.float() / temperatures[:, None]).log_softmax(1)
    torch.testing.assert_close(found.logprobs, expected.topk(k).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(expected.gather(1, found.ids.long()), found.logprobs, atol=1e-4, rtol=0)
    others = (tokens.double() / temperatures[:, None].double()).log_softmax(1).scatter(1, found.ids.long(), -torch.inf)
    torch.testing.assert_close(found.tail.double(), others.logsumexp(1), atol=1e-4, rtol=0)
    assert found.tail[7] < -15
    torch.testing.assert_close(found.sampled, expected.gather(1, targets[:, None])[:, 0], atol=1e-4, rtol=0)
    assert (found.ids.sort(dim=1).values.diff(dim=1) > 0).all()

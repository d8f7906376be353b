"""Contract of every rollout engine: the program's own on the CPU, and the one of docs/examples/my_engine.py."""

import dataclasses

import documented
import engines
import numpy as np
import pytest
import torch
from engines import MAX_NUM_SEQS, MAX_TOKENS, NUM_IDS, SEEDS, STOP_TOKENS, EngineProcess

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout.engine import generate_samples
from hybrid_gkd.types import GenerationRequest, SampleId, SamplingParams

needs_vllm = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
ALL = [pytest.param("vllm", marks=needs_vllm), "hf", "own"]
INTERRUPTIBLE = [pytest.param("vllm", marks=needs_vllm), "own"]
DRAWN, GREEDY = SamplingParams(max_tokens=MAX_TOKENS, logprobs=True), SamplingParams(max_tokens=9, temperature=0.0)
VERSION = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def process(folder):
    own = folder / "my_engine.py"
    own.write_text(documented.example(own.name), encoding="utf-8")
    names = {"hf": "hf", "own": f"{own}:MyEngine"} | ({"vllm": "vllm"} if vllm_compat.vllm_available() else {})
    started = EngineProcess(folder, list(names.values()))
    yield lambda function, name, *args: started.call(function, names[name], *args)
    started.pool.shutdown()


@pytest.fixture
def call(process, name):
    """`call(function, *args)` -> function(engine, *args), with the weights of the first seed as version 5."""
    assert process(engines.load, name, SEEDS[0], VERSION) == VERSION
    return lambda function, *args: process(function, name, *args)


@pytest.fixture(scope="module")
def models(process, folder):
    from transformers import AutoModelForCausalLM

    return {seed: AutoModelForCausalLM.from_pretrained(folder / str(seed)) for seed in SEEDS}


def make_requests(number):
    """Prompts of 1 to 7 tokens, two requests each."""
    prompts = [np.arange(row % 7 + 1, dtype=np.int32) + 3 * row for row in range(number // 2)]
    return [
        GenerationRequest(id=SampleId(3, row, number), prompt_ids=prompt, seed=10 * row + number)
        for row, prompt in enumerate(prompts) for number in range(2)
    ]  # fmt: skip


def completions(samples):
    return {each: sample.trained_ids.tolist() for each, sample in samples.items()}


@torch.no_grad()
def reference_logprobs(model, sample):
    ids = torch.from_numpy(sample.tokens.astype(np.int64))
    rows = model(ids[None]).logits[0, sample.positions - 1, :NUM_IDS].log_softmax(-1)
    return rows.gather(1, ids[sample.positions, None])[:, 0].numpy()


@pytest.mark.parametrize("name", ALL)
def test_samples_are_complete_and_say_which_request_they_are_of(call, models):
    requests = make_requests(14)
    samples = call(engines.draw, requests, DRAWN)
    assert samples.keys() == {request.id for request in requests}
    for request in requests:
        sample, prompt = samples[request.id], len(request.prompt_ids)
        written = sample.tokens[prompt:]
        assert sample.tokens.dtype == np.int32
        assert sample.tokens[:prompt].tolist() == request.prompt_ids.tolist()
        assert sample.loss_mask.tolist() == [False] * prompt + [True] * len(written)
        assert (sample.versions.dtype, sample.versions.tolist()) == (np.int32, [VERSION] * len(written))
        assert not np.isin(written[:-1], STOP_TOKENS).any()
        assert (written < NUM_IDS).all()
        if sample.status == "length":
            assert (len(written), written[-1] in STOP_TOKENS) == (MAX_TOKENS, False)
        else:
            assert (sample.status, written[-1] in STOP_TOKENS) == ("stop", True)
        assert sample.logprobs.dtype == np.float32
        np.testing.assert_allclose(sample.logprobs, reference_logprobs(models[SEEDS[0]], sample), atol=1e-4)
    assert {sample.status for sample in samples.values()} == {"stop", "length"}


@pytest.mark.parametrize("name", [name for name in ALL if name != "own"])  # the example refuses top_p and top_k
@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.6}])
def test_log_probabilities_are_those_under_the_distribution_that_is_sampled_from(call, models, limits):
    """At temperature 2, over the tokens that top_k or top_p leaves."""
    requests = make_requests(8)
    for sample in call(engines.draw, requests, dataclasses.replace(DRAWN, temperature=2.0, **limits)).values():
        with torch.no_grad():
            logits = models[SEEDS[0]](torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0]
        probabilities = (logits[sample.positions - 1, :NUM_IDS] / 2).softmax(-1).numpy()
        for row, token, logprob in zip(probabilities, sample.trained_ids, sample.logprobs, strict=True):
            order = np.argsort(-row)
            kept = order[: limits.get("top_k") or np.searchsorted(row[order].cumsum(), limits["top_p"]) + 1]
            assert token in kept
            np.testing.assert_allclose(logprob, np.log(row[token] / row[kept].sum()), atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_greedy_completions_are_those_of_transformers(call, models):
    requests = make_requests(8)
    samples = call(engines.draw, requests, GREEDY)
    for request in requests:
        ids = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        expected = models[SEEDS[0]].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, eos_token_id=STOP_TOKENS,
            pad_token_id=257, suppress_tokens=list(range(NUM_IDS, NUM_IDS + 16)),
        )
        assert samples[request.id].tokens.tolist() == expected[0].tolist()
        assert samples[request.id].logprobs is None


@pytest.mark.parametrize("name", INTERRUPTIBLE)
def test_a_completion_depends_on_its_own_seed_alone(call):
    requests = make_requests(10)
    samples = completions(call(engines.draw, requests, DRAWN))
    assert len({tuple(each) for each in samples.values()}) == len(samples)
    some = completions(call(engines.draw, requests[7:2:-1], DRAWN))
    assert some == {each: samples[each] for each in some}
    other = [dataclasses.replace(request, seed=request.seed + 500) for request in requests]
    assert all(samples[each] != found for each, found in completions(call(engines.draw, other, DRAWN)).items())


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_paused_samples_are_prefixes_of_those_that_were_to_come(call, name, logprobs):
    """Each request comes back once. The engine generates the same afterwards, other requests or more of them."""
    requests, sampling = make_requests(14), dataclasses.replace(DRAWN, logprobs=logprobs)
    expected = call(engines.draw, requests, sampling)
    finished, paused, more = call(engines.draw_and_pause, requests, sampling, 1 if name == "hf" else 11)
    assert not more
    assert finished
    assert finished.keys() | paused.keys() == expected.keys()
    assert not finished.keys() & paused.keys()
    assert completions(finished) == {each: expected[each].trained_ids.tolist() for each in finished}
    for request in requests:
        sample, whole = paused.get(request.id), expected[request.id]
        if sample is None:
            continue
        length = sample.num_trained
        assert sample.status == "paused"
        assert (sample.prompt_length, sample.num_tokens) == (len(request.prompt_ids), len(request.prompt_ids) + length)
        assert sample.tokens.tolist() == whole.tokens[: sample.num_tokens].tolist()
        assert sample.versions.tolist() == [VERSION] * length
        if logprobs:
            np.testing.assert_allclose(sample.logprobs, whole.logprobs[:length], atol=1e-5)
        else:
            assert sample.logprobs is None
    begun = [sample for sample in paused.values() if sample.num_trained]
    assert bool(begun) == (name != "hf")
    assert len(begun) <= (len(paused) if name == "own" else MAX_NUM_SEQS)
    assert completions(call(engines.draw, requests, sampling)) == completions(expected)


@pytest.mark.parametrize("name", INTERRUPTIBLE)
def test_a_paused_sample_continues_as_the_prompt_of_a_request(call):
    requests = make_requests(4)
    whole = call(engines.draw, requests, GREEDY)
    _, paused, _ = call(engines.draw_and_pause, requests, GREEDY, 4)
    assert paused
    for each, sample in paused.items():
        rest = dataclasses.replace(GREEDY, max_tokens=GREEDY.max_tokens - sample.num_trained)
        again = call(engines.draw, [GenerationRequest(id=each, prompt_ids=sample.tokens, seed=0)], rest)
        assert again[each].tokens.tolist() == whole[each].tokens.tolist()


@pytest.mark.parametrize("name", ALL)
def test_an_engine_generates_with_the_weights_that_were_loaded_last(call, models):
    requests = make_requests(6)
    before = call(engines.draw, requests, DRAWN)
    call(draw_two_and_pause, requests)
    assert call(engines.load, SEEDS[1], VERSION + 2) == VERSION + 2
    after = call(engines.draw, requests, DRAWN)
    assert {version for sample in before.values() for version in sample.versions.tolist()} == {VERSION}
    for sample in after.values():
        assert set(sample.versions.tolist()) == {VERSION + 2}
        np.testing.assert_allclose(sample.logprobs, reference_logprobs(models[SEEDS[1]], sample), atol=1e-4)


def draw_two_and_pause(engine, requests):
    """A running generation must be paused before new weights are loaded."""
    engine.add(requests[:2], DRAWN)
    engine.step()
    engine.pause()


@pytest.mark.parametrize("name", ALL)
def test_an_engine_compares_its_weights(call):
    call(compare, SEEDS[0])
    with pytest.raises(WorkerError, match=r"model\.embed_tokens\.weight"):
        call(compare, SEEDS[1])


def compare(engine, seed):
    engine.verify_weights(iter(engines.weights(seed)))


@pytest.mark.parametrize("name", ALL)
def test_an_engine_on_the_cpu_does_not_sleep(call):
    description, dtype, weight_bytes, can_sleep, sleeping_bytes = call(facts)
    assert description
    assert dtype == torch.float32
    assert weight_bytes > 0
    assert not can_sleep
    assert sleeping_bytes == (0, 0)


def facts(engine):
    return engine.description, engine.dtype, engine.weight_bytes, engine.can_sleep, engine.sleeping_bytes()


@needs_vllm
@pytest.mark.parametrize("name", ["vllm"])
def test_vllm_computes_the_same_whether_it_has_all_requests_or_as_many_as_it_can_take(call):
    (steps, added), (same, all_at_once) = call(schedules, make_requests(40))
    assert same == steps
    assert set(all_at_once) == {0}
    assert len(added) == 40
    assert len(set(added)) >= 2


def schedules(engine, requests):
    """Return the tokens of each request by step, and the step of its addition: as needed, and all at once."""
    vllm, scheduler, steps, added, asked = engine.engine, engine.scheduler, [], [], []
    schedule, add = scheduler.schedule, vllm.add_request

    def recorded(*args):
        output = schedule(*args)
        steps.append([
            (int(name.partition("-")[0]) - int(asked[0][0]), count)
            for name, count in output.num_scheduled_tokens.items()
        ])  # fmt: skip
        return output

    def counted(*args):
        added.append(len(steps))
        asked.append(args)
        add(*args)

    scheduler.schedule, vllm.add_request = recorded, counted
    try:
        for _ in generate_samples(engine, requests, dataclasses.replace(DRAWN, logprobs=False)):
            pass
        found = [(list(steps), list(added))]
        assert engine.llm.reset_prefix_cache()
        again, steps[:], added[:], asked[:] = list(asked), [], [], []
        for name, *rest in again:
            vllm.add_request(str(int(name) + 1000), *rest)
        while vllm.has_unfinished_requests():
            vllm.step()
    finally:
        del scheduler.schedule, vllm.add_request
    return [*found, (steps, added)]

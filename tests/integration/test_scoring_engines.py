"""Both scoring engines, in float32, against a plain transformers forward of one reading at a time."""

import dataclasses
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from hybrid_gkd.compat.vllm.versions import vllm_available
from hybrid_gkd.errors import ModelError
from hybrid_gkd.models.packed_attention import pack
from hybrid_gkd.teacher.engines import hf_engine
from hybrid_gkd.teacher.engines.engine_table import load_scoring_engine
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.teacher.engines.vllm_engine import RowScorer
from hybrid_gkd.testing import make_tiny_model, make_tokenizer
from hybrid_gkd.types import Reading

TIMEOUT = 900.0  # seconds; ends a test that hangs
NUM_IDS = 250  # of a student that has fewer rows
TOKENS = 260  # of the tokenizer, with one that transformers adds for a Qwen2 model
EMBEDDINGS = 331  # of the model: odd, and more than the tokenizer has
TOLERANCE = 1e-4
needs_vllm = pytest.mark.skipif(not vllm_available(), reason="vLLM is not installed")
# (number of readings, longest part before the scored tokens and of them, K, temperature)
JOBS = {
    "one candidate": (3, 40, 1, 1.0),
    "many readings": (40, 60, 64, 1.0),
    "temperature": (9, 40, 5, 0.6),
    "all ids": (4, 30, TOKENS, 1.3),
    "several engine steps": (4, 900, 7, 1.0),
    "a student with fewer rows": (9, 40, 7, 1.0),
}


# ... and the number of given ids
GIVEN_JOBS = {"given": (9, 40, 5, 0.6, 5), "given and others": (9, 400, 12, 1.0, 5)}


def with_given(readings, num_given):
    """The least likely token of a random order is as good as any."""
    rng = np.random.default_rng(7)
    sets = [[rng.permutation(NUM_IDS)[:num_given] for _ in reading.positions] for reading in readings]
    return [
        dataclasses.replace(reading, given_ids=np.array(ids, np.int32))
        for reading, ids in zip(readings, sets, strict=True)
    ]


def make_readings(count, longest, seed=0):
    """The first reading has only its last token scored, the second all but the first, the third has just two tokens."""
    rng = np.random.default_rng(seed)
    readings = []
    for index in range(count):
        first = 1 if index in (1, 2) else rng.integers(longest // 2, longest)
        length = first + (1 if index in (0, 2) else rng.integers(longest // 2, longest))
        token_ids = rng.integers(0, EMBEDDINGS, length, dtype=np.int32)
        token_ids[first:] %= NUM_IDS  # what is read may be any row, what is scored is a token
        readings.append(Reading(token_ids=token_ids, positions=np.arange(first, length)))
    return readings


def ids_of(name):
    return NUM_IDS if name == "a student with fewer rows" else None


def scattered(reading, seed):
    """The same tokens, of which some anywhere are scored, the last scored one as well, and more follow it."""
    rng = np.random.default_rng(seed)
    chosen = rng.random(len(reading.positions)) < 0.5
    chosen[-1] = True
    token_ids = np.concatenate([reading.token_ids, rng.integers(0, EMBEDDINGS, 17, dtype=np.int32)])
    return Reading(token_ids=token_ids, positions=reading.positions[chosen])


def score_all(folder, backend, tp_size):
    """All jobs at once on one engine, as (name -> scores); then their scattered readings, likewise."""
    options = EngineOptions(
        ckpt_path=folder, backend=backend, device="cpu", n_logprobs=TOKENS, tp_size=tp_size, max_model_len=2048
    )
    engine = load_scoring_engine(options)
    for name, (count, longest, k, temperature) in JOBS.items():
        engine.add(name, make_readings(count, longest), k, temperature, ids_of(name))
    found = drain(engine)
    engine.sleep()  # the same calls as on a GPU, without an effect
    engine.wake()
    for name, (count, longest, k, temperature) in JOBS.items():
        readings = [scattered(each, seed) for seed, each in enumerate(make_readings(count, longest))]
        engine.add(name, readings, k, temperature, ids_of(name))
    assert engine.num_tokens == sum(each.num_tokens for job in JOBS.values() for each in make_readings(*job[:2]))
    assert engine.info.any_temperature
    assert engine.info.max_topk == TOKENS
    assert engine.info.num_embeddings == EMBEDDINGS
    assert engine.info.vocab_size == TOKENS
    some = drain(engine)
    for name, (count, longest, k, temperature, num_given) in GIVEN_JOBS.items():
        engine.add(name, with_given(make_readings(count, longest), num_given), k, temperature, NUM_IDS)
    engine.add("without", make_readings(3, 9), 7, 1.0, NUM_IDS)  # between others
    given = drain(engine)
    assert given.pop("without")[0].ids.shape[1] == 7
    return found, some, given


def drain(engine):
    found = {}
    while engine.num_tokens:
        found |= dict(engine.step())
    return found


def in_own_process(function, *arguments):
    """vLLM changes the process that it runs in."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result(TIMEOUT)


def load_with_shifted_rows(folder):
    add_request = RowScorer.add_request

    def one_row_early(self, request_id, extra_args):
        add_request(self, request_id, extra_args)
        for request in self._requests.values():
            request.rows = np.arange(len(request.rows))

    RowScorer.add_request = one_row_early
    load_scoring_engine(EngineOptions(ckpt_path=folder, backend="vllm", device="cpu", max_model_len=64))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=EMBEDDINGS))


@pytest.fixture(scope="module")
def reference(model_path):
    return Reference(model_path)


class Reference:
    """Float64 log-probabilities [R, N] of a reading's tokens by the shortest way there is."""

    def __init__(self, folder, **options):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()

    @torch.inference_mode()
    def __call__(self, reading, temperature, num_ids):
        ids = torch.from_numpy(reading.token_ids.astype(np.int64))
        logits = self._model(input_ids=ids[None]).logits[0, reading.positions - 1, :num_ids].double()
        return (logits / temperature).log_softmax(-1).numpy()


def check(found, reference, jobs=JOBS, tokens=TOKENS):
    assert list(found)
    assert set(found) == set(jobs)
    for name, (count, longest, k, temperature) in jobs.items():
        assert len(found[name]) == count
        num_ids = ids_of(name) or tokens
        for reading, score in zip(make_readings(count, longest), found[name], strict=True):
            expected, targets = reference(reading, temperature, num_ids), reading.token_ids[reading.positions]
            top = -np.sort(-expected, axis=1)[:, :k]
            assert score.ids.dtype == np.int32
            assert score.ids.shape == (len(targets), k), name
            assert ((score.ids >= 0) & (score.ids < num_ids)).all(), name
            assert (np.diff(np.sort(score.ids, axis=1), axis=1) > 0).all(), name
            close = {"atol": TOLERANCE, "rtol": 0, "err_msg": name}
            np.testing.assert_allclose(score.logprobs, top, **close)
            np.testing.assert_allclose(np.take_along_axis(expected, score.ids, 1), top, **close)
            others = expected.copy()
            np.put_along_axis(others, score.ids, -np.inf, 1)
            np.testing.assert_allclose(score.tail_logprobs, np.logaddexp.reduce(others, 1), **close)
            np.testing.assert_allclose(score.sampled_logprobs, expected[np.arange(len(targets)), targets], **close)


def check_given(found, reference):
    """The given ids and the most likely others, with their log-probabilities and the exact tail."""
    assert set(found) == set(GIVEN_JOBS)
    for name, (count, longest, k, temperature, num_given) in GIVEN_JOBS.items():
        for reading, score in zip(with_given(make_readings(count, longest), num_given), found[name], strict=True):
            expected = reference(reading, temperature, NUM_IDS)
            ranked = expected.copy()
            np.put_along_axis(ranked, reading.given_ids, np.inf, 1)
            chosen = np.argsort(-ranked, axis=1)[:, :k]
            close = {"atol": TOLERANCE, "rtol": 0, "err_msg": name}
            top = -np.sort(-np.take_along_axis(expected, chosen, 1), axis=1)
            np.testing.assert_allclose(score.logprobs, top, **close)
            np.testing.assert_allclose(np.take_along_axis(expected, score.ids, 1), top, **close)
            assert all(set(ids) <= set(row) for ids, row in zip(reading.given_ids, score.ids, strict=True))
            np.put_along_axis(expected, score.ids, -np.inf, 1)
            np.testing.assert_allclose(score.tail_logprobs, np.logaddexp.reduce(expected, 1), **close)


def check_scattered(all_rows, some_rows):
    """Scores of the same tokens at some of the positions are these rows of the scores at all of them.

    But for the last bits: a product of fewer rows with the head may add up in another order, and swap neighbours.
    """
    assert all_rows.keys() == some_rows.keys()
    for name, scores in some_rows.items():
        readings = make_readings(*JOBS[name][:2])
        for seed, (reading, every, some) in enumerate(zip(readings, all_rows[name], scores, strict=True)):
            rows = np.isin(reading.positions, scattered(reading, seed).positions)
            assert some.ids.shape == every.ids[rows].shape
            assert (some.ids != every.ids[rows]).mean() < 1e-3
            for part in ("logprobs", "tail_logprobs", "sampled_logprobs"):
                np.testing.assert_allclose(getattr(some, part), getattr(every, part)[rows], rtol=1e-6, atol=1e-6)


def test_hf(model_path, reference):
    found, some, given = score_all(model_path, "hf", 1)
    check(found, reference)
    check_given(given, reference)
    check_scattered(found, some)


@needs_vllm
def test_vllm(model_path, reference):
    """Arguments that it does not know are refused before."""
    found, some, given = in_own_process(refused_and_score_all, model_path)
    check(found, reference)
    check_given(given, reference)
    check_scattered(found, some)


def refused_and_score_all(folder):
    wrong = '{"vllm": {"no_such_argument": 1}}'
    with pytest.raises(ModelError, match=r"cannot load the model: .*no_such_argument"):
        load_scoring_engine(EngineOptions(ckpt_path=folder, backend="vllm", device="cpu", engine_kwargs=wrong))
    return score_all(folder, "vllm", 1)


@needs_vllm
def test_vllm_that_hands_out_other_rows_is_refused(model_path):
    with pytest.raises(ModelError, match=r"vLLM 0\.\S+ is built differently: expected its greedy tokens"):
        in_own_process(load_with_shifted_rows, model_path)


@needs_vllm
@pytest.mark.usefixtures("only_tensor_parallel_engine")
def test_vllm_tensor_parallel(model_path, reference):
    found, some, given = in_own_process(score_all, model_path, "vllm", 2)
    check(found, reference)
    check_given(given, reference)
    check_scattered(found, some)


@pytest.mark.parametrize(
    ("config_class", "options", "padded"),
    [
        (Gemma2Config, {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, True),
        (GraniteConfig, {"logits_scaling": 0.5}, False),
    ],
)
def test_hf_with_capped_attention_and_logits(tmp_path, caplog, config_class, options, padded):
    """Unsupported attention is padded; a head whose logits are changed afterwards is left to the model."""
    make_tokenizer().save_pretrained(tmp_path)
    config = config_class(
        vocab_size=EMBEDDINGS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, bos_token_id=0, eos_token_id=0,
        **options,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = load_scoring_engine(EngineOptions(ckpt_path=str(tmp_path), backend="hf", device="cpu", n_logprobs=9))
    assert ("sequences are padded" in caplog.text) == padded
    found = {"mixed": engine.score(make_readings(20, 60), 9, 0.7)}
    check(found, Reference(tmp_path, attn_implementation="eager"), {"mixed": (20, 60, 9, 0.7)},
          tokens=engine.info.vocab_size)  # fmt: skip


def test_clear_forgets_what_was_queued(model_path, reference):
    engine = load_scoring_engine(EngineOptions(ckpt_path=model_path, backend="hf", device="cpu", n_logprobs=5))
    engine.add("first", make_readings(3, 20), 5, 1.0)
    engine.add("second", make_readings(3, 20), 5, 1.0)
    engine.step()
    assert engine.clear() == ["first", "second"]
    assert engine.num_tokens == 0
    job = (6, 20, 5, 1.0)
    check({"third": engine.score(make_readings(*job[:2]), *job[2:])}, reference, {"third": job})


def test_one_long_sequence_does_not_make_all_others_as_long(model_path, monkeypatch):
    """Attention without a GPU pads: 4,000 tokens among a hundred of 100 took 1.8 GB and 30 times as long."""
    monkeypatch.setattr(hf_engine, "TOKENS_PER_FORWARD", 600)
    engine = load_scoring_engine(EngineOptions(ckpt_path=model_path, backend="hf", device="cpu", n_logprobs=5))
    forwards = []

    def recorded(inputs, device):
        forwards.append([len(ids) + 1 for ids in inputs])  # the last token is scored, and no input
        return pack(inputs, device)

    monkeypatch.setattr(hf_engine, "pack", recorded)
    lengths = [20] * 10 + [200] + [20] * 20 + [900]
    readings = [Reading(token_ids=np.ones(length, np.int32), positions=np.arange(1, length)) for length in lengths]
    assert len(engine.score(readings, 5, 1.0)) == len(lengths)
    assert list(itertools.chain(*forwards)) == lengths
    assert all(len(each) == 1 or max(each) * len(each) <= 600 for each in forwards)
    assert len(forwards) == 4


def test_folder_without_a_model_is_named(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(Exception, match=str(Path(tmp_path))):
        load_scoring_engine(EngineOptions(ckpt_path=str(tmp_path), backend="hf", device="cpu"))


@pytest.mark.parametrize(
    ("backend", "given", "message"),
    [
        ("hf", '{"vllm": {"quantization": "fp8"}}', "--engine-kwargs vllm: must be hf"),
        ("vllm", '{"vllm": {"enable_prefix_caching": true}}', "--engine-kwargs vllm enable_prefix_caching: has an opt"),
        ("hf", '{"hf": {"no_such_argument": 1}}', "cannot be loaded: .*no_such_argument"),
    ],
)
def test_arguments_reach_their_engine_or_are_refused(backend, given, message, model_path):
    options = EngineOptions(ckpt_path=model_path, backend=backend, device="cpu", max_model_len=64, engine_kwargs=given)
    with pytest.raises(ModelError, match=message):
        load_scoring_engine(options)

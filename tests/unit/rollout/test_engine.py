"""The table of rollout engines, and an engine of the user's own."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import ApertusConfig, ApertusForCausalLM

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.errors import ConfigError, WorkerError
from hybrid_gkd.rollout import engine as rollout_engine
from hybrid_gkd.rollout.engine import KEY, ROLLOUT_ENGINES, RolloutEngine, generate_samples, make_engine, resolve_engine
from hybrid_gkd.runtime.imports import load_object
from hybrid_gkd.testing import make_tiny_model, tiny_config
from hybrid_gkd.types import GenerationRequest, SampleId, SamplingParams

OWN_ENGINE = """
import torch
from hybrid_gkd.rollout.engine import RolloutEngine

class Parrot(RolloutEngine):
    description, dtype, weight_bytes = "parrot 1.0", torch.float32, 0

    def __init__(self, config, *, device, stop_token_ids):
        self.stop_token_ids = stop_token_ids
"""


def configure(name):
    return tiny_config(f"{KEY}={name}")


@pytest.mark.slow
def test_the_configuration_takes_the_names_of_the_table():
    for name, import_path in ROLLOUT_ENGINES.items():
        assert configure(name).actor_rollout_ref.rollout.name == name
        assert RolloutEngine in load_object(KEY, import_path).__mro__
    with pytest.raises(ConfigError, match=rf"{KEY}: .*vllm, hf"):
        configure("vlm")


def test_an_engine_of_the_users_own_is_built_and_never_sleeps(tmp_path):
    (tmp_path / "parrot.py").write_text(OWN_ENGINE, encoding="utf-8")
    name = f"{tmp_path}/parrot.py:Parrot"
    assert resolve_engine(name) == name
    engine = make_engine(configure(name), device=torch.device("cpu"), stop_token_ids=[7])
    assert (engine.description, engine.stop_token_ids, engine.can_sleep) == ("parrot 1.0", [7], False)


class ScriptedEngine(RolloutEngine):
    """Step i finishes `ends[i]` samples and has computed `computed[i]` tokens of the others."""

    description, weight_version, computed_tokens = "scripted", 3, 0

    def __init__(self, ends, computed=()):
        self.script = list(zip(ends, computed or [0] * len(ends), strict=True))

    def add(self, requests, sampling):
        self.left = list(requests)

    @property
    def has_unfinished(self):
        return bool(self.script)

    def step(self):
        ends, self.computed_tokens = self.script.pop(0)
        finished, self.left = self.left[:ends], self.left[ends:]
        return [self.sample(request, [7], status="stop", logprobs=None) for request in finished]


def numbers_yielded(engine, requests):
    ids = [SampleId(1, 0, number) for number in range(requests)]
    asked = [GenerationRequest(id=each, prompt_ids=np.array([5], np.int32), seed=0) for each in ids]
    for part in generate_samples(engine, asked, SamplingParams(max_tokens=9)):
        yield [sample.id.number for sample in part]


def test_samples_that_finish_soon_after_each_other_are_yielded_together(monkeypatch):
    ends = [0, 2, 0, 1, 1]
    monkeypatch.setattr(rollout_engine, "GROUPING_SECONDS", 1000.0)
    assert list(numbers_yielded(ScriptedEngine(ends), 4)) == [[0, 1, 2, 3]]
    monkeypatch.setattr(rollout_engine, "GROUPING_SECONDS", 0.0)
    assert list(numbers_yielded(ScriptedEngine(ends), 4)) == [[0, 1], [2], [3]]


def test_an_engine_shows_progress_as_long_as_it_computes(monkeypatch):
    """One that computes nothing shows none, so that the trainer's timeout ends it."""
    monkeypatch.setattr(rollout_engine, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(rollout_engine, "GROUPING_SECONDS", 0.0)
    assert list(numbers_yielded(ScriptedEngine([0] * 6 + [1], [4, 5, 6, 6, 6, 7, 0]), 1)) == [[]] * 4 + [[0]]


def test_an_engine_that_loses_samples_is_not_waited_for():
    with pytest.raises(WorkerError, match=r"the rollout engine lost 3 of 5 samples"):
        list(numbers_yielded(ScriptedEngine([2]), 5))


def test_an_engine_that_draws_what_is_no_token_is_named():
    engine = ScriptedEngine([])
    request = GenerationRequest(id=SampleId(1, 0, 0), prompt_ids=np.array([5], np.int32), seed=0)
    for engine.num_ids in (None, 10):
        assert engine.sample(request, [7, 9], status="stop", logprobs=None).num_trained == 2
    with pytest.raises(WorkerError, match=rf"{KEY}: scripted sampled id 10; token ids are below 10"):
        engine.sample(request, [10, 9], status="stop", logprobs=None)


def test_weights_come_before_the_first_token():
    engine = ScriptedEngine([1])
    engine.weight_version = None
    with pytest.raises(AssertionError, match="undefined until they are published"):
        list(numbers_yielded(engine, 1))


@pytest.mark.parametrize(
    ("name", "reason"), [("nowhere:Engine", "ModuleNotFoundError"), ("json:Engine", "class of json")]
)
def test_an_import_path_that_leads_nowhere_is_refused_before_anything_starts(name, reason):
    with pytest.raises(ConfigError, match=rf"{KEY}: .*{reason}"):
        resolve_engine(name)


@pytest.mark.slow
def test_transformers_generates_to_the_limit_where_no_token_ends_a_response(tmp_path):
    model = make_tiny_model(tmp_path)
    ends = f"actor_rollout_ref.model.override_config.eos_token_id={list(range(3, 250))}"
    config = tiny_config(f"{KEY}=hf", ends, model=model)
    engine = make_engine(config, device=torch.device("cpu"), stop_token_ids=[])
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 1)]
    requests = [GenerationRequest(id=SampleId(1, i, 0), prompt_ids=ids, seed=i) for i, ids in enumerate(prompts)]
    engine.load_weights(engine.model.state_dict().items(), 0)
    found = [each for part in generate_samples(engine, requests, SamplingParams(max_tokens=64)) for each in part]
    assert [(each.num_trained, each.status) for each in found] == [(64, "length")] * 2


def test_transformers_takes_buffers_that_a_folder_has(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ApertusForCausalLM(ApertusConfig(vocab_size=259, **sizes))
    model.save_pretrained(tmp_path)
    config = tiny_config(f"{KEY}=hf", model=tmp_path)
    engine = make_engine(config, device=torch.device("cpu"), stop_token_ids=[])
    weights = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    assert weights.keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    engine.load_weights(weights.items(), 0)
    engine.verify_weights(weights.items())


def test_an_engine_falls_asleep_beside_a_process_that_takes_memory_meanwhile():
    worker = SimpleNamespace(sleep=mock.Mock(side_effect=AssertionError(vllm_compat.MEMORY_GREW_MESSAGE)))
    sleep = worker.sleep
    vllm_compat.tolerate_memory_growth(worker)
    worker.sleep(level=2)
    sleep.assert_called_once_with(level=2)
    sleep.side_effect = AssertionError("something else")
    with pytest.raises(AssertionError, match="something else"):
        worker.sleep(level=2)


@pytest.mark.slow
@pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
def test_an_engine_that_sleeps_knows_its_memory_from_the_list_of_vllms_allocator():
    from vllm.device_allocator import cumem

    assert vllm_compat.sleeping_bytes() == (0, 0)  # there is no allocator on the CPU
    allocator = cumem.CuMemAllocator()
    with mock.patch.object(cumem.CuMemAllocator, "instance", allocator):
        assert vllm_compat.sleeping_bytes() == (0, 0)
        for address, (tag, size) in enumerate([("weights", 20), ("weights", 3), ("kv_cache", 50), ("default", 1)]):
            allocator.current_tag = tag
            allocator._python_malloc_callback((0, size, address, 7))  # as its C extension calls it
        assert vllm_compat.sleeping_bytes() == (24, 50)
        with mock.patch.multiple(cumem, unmap_and_release=mock.Mock(), gc=mock.Mock()):
            allocator.sleep(())
        assert vllm_compat.sleeping_bytes() == (24, 50)


@pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
def test_vllm_says_that_its_memory_grew_in_the_words_that_are_expected():
    (place,) = find_spec("vllm").submodule_search_locations
    assert vllm_compat.MEMORY_GREW_MESSAGE in Path(place, "v1", "worker", "gpu_worker.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("max_num_seqs", "number", "last"),
    [(1, 1, [1]), (6, 4, [2, 4, 6]), (256, 35, [240, 248, 256]), (1000, 59, [960, 992, 1000])],
)
def test_graphs_are_captured_for_as_many_sequences_as_there_are(max_num_seqs, number, last):
    sizes = vllm_compat.decode_graph_args("cuda", max_num_seqs)["compilation_config"]["cudagraph_capture_sizes"]
    assert len(sizes) == len(set(sizes)) == number
    assert sizes[-len(last) :] == last
    assert vllm_compat.decode_graph_args("cpu", max_num_seqs) == {}

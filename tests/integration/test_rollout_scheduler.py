"""The short path of the rollout scheduler on the CPU: vLLM's synchronous scheduler and its older model runner."""

import contextlib
import multiprocessing
import os
import random
import socket
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from same_tokens import MANY, check_cases, check_two_ranks, make_llm
from transformers import AutoModelForCausalLM

from hybrid_gkd.compat.vllm import scheduler as short_scheduler
from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.rollout import vllm as rollout_vllm
from hybrid_gkd.rollout.vllm import VLLMRolloutEngine
from hybrid_gkd.testing import make_tiny_model
from hybrid_gkd.types import GenerationRequest, SamplingParams

pytestmark = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
TIMEOUT = 900.0
ENDS = [[], [0, 1], [], [2], [3]]
STEPS_THAT_COMPUTE = 5


def in_own_process(function, *args, **kwargs):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result(TIMEOUT)


def test_both_schedulers_give_the_same_tokens(tmp_path):
    in_own_process(check_cases, make_tiny_model(tmp_path / "model", num_words=200), "cpu")


@pytest.mark.usefixtures("only_tensor_parallel_engine")
def test_so_do_two_ranks_of_tensor_parallelism(tmp_path):
    check_two_ranks(make_tiny_model(tmp_path / "model", num_words=200), "cpu", TIMEOUT)


def schedules(folder):
    """What each step computes of which request: all of them given at once, and as `steps` gives them."""
    vllm_compat.prepare_environment("cpu")
    from vllm import SamplingParams

    llm = make_llm(folder, "cpu", caching=True, blocks=MANY, more={})
    engine, scheduler, steps = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler, []
    schedule, add, added = scheduler.schedule, engine.add_request, []

    def recorded(*args):
        output = schedule(*args)
        steps.append({name.partition("-")[0]: count for name, count in output.num_scheduled_tokens.items()})
        return output

    def counted(name, *args):
        added.append((int(name), len(steps)))
        add(name, *args)

    scheduler.schedule, engine.add_request = recorded, counted
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 150) for _ in range(rng.randrange(5, 200))] for _ in range(40)]
    lengths = [rng.randrange(3, 40) for _ in prompts]
    found, asked = [], [
        (str(i), prompt, SamplingParams(max_tokens=length, seed=i, ignore_eos=True, detokenize=False, skip_clone=True))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    for way in ("at once", "as needed"):
        steps.clear(), added.clear()
        if way == "at once":
            for name, prompt, sampling in asked:
                engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        for _ in VLLMRolloutEngine.steps(SimpleNamespace(engine=engine), iter(asked if way == "as needed" else [])):
            pass
        assert llm.reset_prefix_cache()
        found.append((list(steps), list(added)))
    return found


def test_a_step_computes_the_same_whether_it_has_all_requests_or_as_many_as_it_can_take(tmp_path):
    found = in_own_process(schedules, make_tiny_model(tmp_path / "model", num_words=200))
    (steps, all_at_once), (same, as_needed) = found
    assert same == steps
    assert {step for _, step in all_at_once} == {0}
    assert [name for name, _ in as_needed] == list(range(40))
    assert len({step for _, step in as_needed}) >= 4


def stand_still(folder):
    """What `generate` yields from an engine whose steps compute nothing any more after the first ones."""
    vllm_compat.prepare_environment("cpu")
    llm = make_llm(folder, "cpu", caching=False, blocks=MANY, more={})
    rollout_vllm.PROGRESS_SECONDS = 0.0
    engine, step, steps, found = llm.llm_engine, llm.llm_engine.step, iter(range(100)), []

    def stopping():
        number = next(steps)
        if number == 50:
            raise InterruptedError
        return step() if number < STEPS_THAT_COMPUTE else []

    engine.step = stopping
    rollout = SimpleNamespace(engine=engine, stop_token_ids=[])
    rollout.steps = partial(VLLMRolloutEngine.steps, rollout)
    requests = [GenerationRequest(index=0, prompt_ids=np.arange(3, 9, dtype=np.int32), seed=0)]
    with contextlib.suppress(InterruptedError):
        found.extend(VLLMRolloutEngine.generate(rollout, requests, SamplingParams(max_tokens=100), 0))
    return found


def test_an_engine_that_computes_nothing_shows_no_progress(tmp_path):
    """So that the timeout of the trainer ends it."""
    found = in_own_process(stand_still, make_tiny_model(tmp_path / "model", num_words=200))
    assert found
    assert found == [[]] * len(found)
    assert len(found) <= STEPS_THAT_COMPUTE


def handed_on(seconds):
    """The numbers of the sequences that `generate` yields together, where step i ends those of ENDS[i]."""
    vllm_compat.prepare_environment("cpu")
    rollout_vllm.TOGETHER_SECONDS = seconds
    answer = SimpleNamespace(token_ids=[5], finish_reason="stop", logprobs=None)
    rollout = SimpleNamespace(engine=None, stop_token_ids=[], scheduler=None)
    rollout.steps = lambda asked: (
        [SimpleNamespace(request_id=str(each), finished=True, outputs=[answer]) for each in ended] for ended in ENDS
    )
    rollout._to_sequence = partial(VLLMRolloutEngine._to_sequence, rollout)
    prompt = np.arange(3, 9, dtype=np.int32)
    requests = [GenerationRequest(index=i, prompt_ids=prompt, seed=0) for ended in ENDS for i in ended]
    parts = VLLMRolloutEngine.generate(rollout, requests, SamplingParams(max_tokens=9), 0)
    return [[sequence.index for sequence in part] for part in parts]


def test_sequences_that_end_soon_after_each_other_are_handed_on_together():
    assert in_own_process(handed_on, 1000.0) == [[0, 1, 2, 3]]
    assert in_own_process(handed_on, 0.0) == [[0, 1], [2], [3]]


def leave_unknown_ones_alone():
    vllm_compat.prepare_environment("cpu")
    from vllm.v1.core.sched.scheduler import Scheduler

    other = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace())))
    empty = object.__new__(Scheduler)
    lacking = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=empty)))
    elsewhere = SimpleNamespace(engine_core=SimpleNamespace())  # the core is in another process
    reasons = [short_scheduler.install(engine) for engine in (other, lacking, elsewhere)]
    vllm_compat.vllm_version = lambda: "0.29.1"
    reasons.append(short_scheduler.install(other))
    return reasons, type(empty) is Scheduler


def test_a_scheduler_that_is_not_known_stays_as_it_is():
    (other, lacking, elsewhere, untried), is_untouched = in_own_process(leave_unknown_ones_alone)
    assert other == "the scheduler is SimpleNamespace"
    assert lacking.startswith("the scheduler has no running, requests")
    assert elsewhere.startswith("this vLLM is built differently: ")
    assert untried == "this path was not tried with vLLM 0.29.1"
    assert is_untouched


def scheduler_of(folder, port, fast_paths):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "HF_HUB_OFFLINE": "1"}
    config = load_config([
        "data.train_files=unused", f"actor_rollout_ref.model.path={folder}", "trainer.device=cpu",
        "actor_rollout_ref.teacher.server_ip=unused", "data.max_prompt_length=24", "data.max_response_length=24",
        "actor_rollout_ref.rollout.max_num_seqs=4", f"actor_rollout_ref.rollout.fast_paths={fast_paths}",
    ])  # fmt: skip
    dist.init_process_group("gloo")
    engine = VLLMRolloutEngine(config, device=torch.device("cpu"), stop_token_ids=[])
    engine.load_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())
    requests = [GenerationRequest(index=i, prompt_ids=np.arange(3, 9 + i, dtype=np.int32), seed=i) for i in range(3)]
    parts = engine.generate(requests, SamplingParams(max_tokens=9, logprobs=True), 0)
    found = {each.index: (each.response_ids.tolist(), each.logprobs.tolist()) for part in parts for each in part}
    return type(engine.engine.engine_core.engine_core.scheduler).__name__, found


def test_without_fast_paths_the_scheduler_is_vllms_and_answers_are_the_same(tmp_path):
    folder, results = str(make_tiny_model(tmp_path / "model")), []
    for fast_paths in ("true", "false"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results.append(in_own_process(scheduler_of, folder, port, fast_paths))
    (ours, fast), (theirs, plain) = results
    assert (ours, theirs) == ("DecodeScheduler", "Scheduler")
    assert fast == plain

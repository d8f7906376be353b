"""The short path of the rollout scheduler on the CPU: vLLM's synchronous scheduler and its older model runner."""

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from same_tokens import check_cases, check_two_ranks
from transformers import AutoModelForCausalLM

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.rollout.engine import generate_samples
from hybrid_gkd.rollout.vllm import VLLMRolloutEngine
from hybrid_gkd.testing import make_tiny_model, tiny_config
from hybrid_gkd.types import GenerationRequest, SampleId, SamplingParams

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


def schedulers_of(folder, port):
    """With the fast paths and without: the scheduler's class, and what is generated."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "HF_HUB_OFFLINE": "1"}
    dist.init_process_group("gloo")
    weights, results = AutoModelForCausalLM.from_pretrained(folder).state_dict(), []
    prompts = [np.arange(3, 9 + i, dtype=np.int32) for i in range(3)]
    requests = [GenerationRequest(id=SampleId(1, i, 0), prompt_ids=ids, seed=i) for i, ids in enumerate(prompts)]
    for fast_paths in ("true", "false"):
        config = tiny_config(
            "data.max_prompt_length=24", "data.max_response_length=24", "actor_rollout_ref.rollout.max_num_seqs=4",
            f"actor_rollout_ref.rollout.fast_paths={fast_paths}", model=folder,
        )  # fmt: skip
        engine = VLLMRolloutEngine(config, device=torch.device("cpu"), stop_token_ids=[])
        engine.load_weights(weights.items(), 1)
        parts = generate_samples(engine, requests, SamplingParams(max_tokens=9, logprobs=True))
        found = {each.id: (each.tokens.tolist(), each.logprobs.tolist()) for part in parts for each in part}
        parts = generate_samples(engine, requests, SamplingParams(max_tokens=24, temperature=0.0, repetitions=3))
        found |= {s.id._replace(number=1): (s.trained_ids.tolist(), s.status) for part in parts for s in part}
        results.append((type(engine.engine.engine_core.engine_core.scheduler).__name__, found))
    return results


def test_without_fast_paths_the_scheduler_is_vllms_and_answers_are_the_same(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (ours, fast), (theirs, plain) = in_own_process(schedulers_of, str(make_tiny_model(tmp_path / "model")), port)
    assert (ours, theirs) == ("DecodeScheduler", "Scheduler")
    assert fast == plain
    looping = [tokens for tokens, status in fast.values() if status == "repetition"]
    assert looping
    for tokens in looping:  # ended at once
        assert goes_round(tokens)
        assert not goes_round(tokens[:-1])


def goes_round(tokens):
    """Whether the end is three times the same."""
    return any(tokens[-size:] * 3 == tokens[-3 * size :] for size in range(1, len(tokens) // 3 + 1))

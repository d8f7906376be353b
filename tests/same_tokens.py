"""The short paths through vLLM's scheduler and model runner against vLLM's own: the same requests, in one engine.

In a process of its own, because vLLM changes the process that imports it.
"""

import contextlib
import multiprocessing
import os
import random
import socket
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from hybrid_gkd.compat.vllm import fast_scheduler as short_scheduler
from hybrid_gkd.compat.vllm import runner as short_runner
from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.workers.process_group import LOOPBACK

# Several answers to a prompt that share its blocks, and answers of many lengths; greedy ones have no seed.
JOBS = (
    {"n": 1, "lengths": (5, 200), "logprobs": False, "temperature": 1.0},
    {"n": 2, "lengths": (80, 150), "logprobs": True, "temperature": 1.0},
    {"n": 1, "lengths": (5, 60), "logprobs": True, "temperature": 0.0},
)
RUNNER_JOBS = (
    {"n": 2, "lengths": (5, 100), "logprobs": True, "temperature": 0.7, "top_p": 0.9},
    {"n": 2, "lengths": (40, 60), "logprobs": False, "temperature": 0.7},
)
"""Features of the model runner's fast path, which exists on GPUs only."""
PROMPTS, STOP_TOKENS = 8, [7, 11]
MANY, FEW = 60, 6
"""Blocks of the KV cache: with few of them sequences lose their place."""
CASES = ((True, MANY), (False, FEW), (True, FEW))


def check_two_ranks(folder, device, timeout):
    """`check_rank` in two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for rank in [pool.submit(check_rank, rank, folder, port, device) for rank in range(2)]:
            rank.result(timeout)


def check_rank(rank, folder, port, device):
    """`compare` as one of two ranks that share the model, tensor parallel, and run the same requests."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOOPBACK)
    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    vllm_compat.prepare_environment(device)
    more = {
        "tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,
    }  # fmt: skip
    short, _, preemptions = compare(folder, device, caching=True, blocks=FEW, more=more)
    assert preemptions > 0
    assert short > 0


def check_cases(folder, device):
    """`compare` with and without prefix caching, with a large and a small KV cache."""
    vllm_compat.prepare_environment(device)
    from vllm.distributed import cleanup_dist_env_and_memory

    for caching, blocks in CASES:
        short, full, preemptions = compare(folder, device, caching=caching, blocks=blocks)
        cleanup_dist_env_and_memory()
        assert (preemptions > 0) == (blocks == FEW)
        assert short > (4 * full if blocks == MANY else 0)


def compare(folder, device, *, caching, blocks, more=None):
    """Tokens of all jobs are equal, and log-probabilities. Returns how many steps were short and preempted.

    On a GPU every job takes the model runner's short path, which adds up in another order: so log-probabilities may
    differ there by the rounding of float32.
    """
    more = {**(more or {}), **short_scheduler.engine_args({})}
    prompts = PROMPTS if device == "cuda" else PROMPTS // 2  # two cores are slow
    llm = make_llm(folder, device, caching=caching, blocks=blocks, more=more)
    core = llm.llm_engine.engine_core.engine_core
    assert short_scheduler.short_path(llm.llm_engine) is core.scheduler
    jobs = JOBS + RUNNER_JOBS if device == "cuda" else JOBS
    with vllms_own_methods(core.scheduler):
        expected = [generate(llm, job, prompts, own=False) for job in jobs]
    if device == "cuda":
        assert short_runner.install(llm.llm_engine) is None
        assert "the model runner is" in short_runner.install(llm.llm_engine)  # a second time
    runner, runner_steps = short_runner.model_runner(llm.llm_engine), 0
    preemptions = []
    preempt = core.scheduler._preempt_request
    core.scheduler._preempt_request = lambda *args, **kwargs: (preemptions.append(args), preempt(*args, **kwargs))
    for job, before in zip(jobs, expected, strict=True):
        found = generate(llm, job, prompts, own=True)
        if device == "cuda":
            assert runner.short_steps > runner_steps, job
            runner_steps = runner.short_steps
        assert found.keys() == before.keys()
        for name, (tokens, reason, logprobs) in before.items():
            assert found[name][:2] == (tokens, reason), (job, name)
            np.testing.assert_allclose(found[name][2], logprobs, rtol=0, atol=2e-5 * (device == "cuda"))
    assert not core.scheduler._finished_logprobs
    return core.scheduler.short_steps, core.scheduler.full_steps, len(preemptions)


@contextlib.contextmanager
def vllms_own_methods(scheduler):
    """Within it the scheduler is vLLM's: log-probabilities of two engines differ by some thousandths on a GPU."""
    methods = vars(short_scheduler.FastDecodeScheduler)
    names = [name for name in methods if name[0] != "_" and hasattr(scheduler.vllm, name)]
    assert {"add_request", "schedule", "update_from_output"} <= {*names}
    for name in names:
        setattr(scheduler, name, getattr(scheduler.vllm, name).__get__(scheduler))
    yield
    for name in names:
        delattr(scheduler, name)


def make_llm(folder, device, *, caching, blocks, more):
    from vllm import LLM

    size = {"num_gpu_blocks_override": blocks * 8, "gpu_memory_utilization": 0.1}  # of 16 tokens
    if device == "cpu":
        block_bytes = 128 * 2 * 2 * 32 * 4  # tokens, keys and values, layers, head size, float32
        size = {"kv_cache_memory_bytes": blocks * block_bytes, "dtype": "float32", "enforce_eager": True}
        size |= vllm_compat.seeded_sampling_args(device)
    return LLM(
        str(folder), enable_prefix_caching=caching, max_model_len=512, max_num_seqs=12, max_num_batched_tokens=512,
        disable_log_stats=True, generation_config="vllm", logprobs_mode="processed_logprobs", skip_tokenizer_init=True,
        seed=0, **size, **more,
    )


def generate(llm, job, prompts, *, own):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, rng, found = llm.llm_engine, random.Random(0), {}
    for prompt in range(prompts):
        tokens = [rng.randrange(3, 150) for _ in range(rng.randrange(5, 200))]
        for answer in range(job["n"]):
            seed = prompt * 100 + answer
            sampling = SamplingParams(
                max_tokens=rng.randrange(*job["lengths"]), temperature=job["temperature"], stop_token_ids=STOP_TOKENS,
                top_p=job.get("top_p", 1.0),
                seed=seed if job["temperature"] else None, detokenize=False, flat_logprobs=True,
                logprobs=0 if job["logprobs"] else None, output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(seed), {"prompt_token_ids": tokens}, sampling)
    while engine.has_unfinished_requests():
        for output in filter(lambda output: output.finished, engine.step()):
            answer, logprobs = output.outputs[0], np.empty(0)
            if job["logprobs"] and own:
                logprobs = engine.engine_core.engine_core.scheduler.take_logprobs(output.request_id)
            elif job["logprobs"]:
                logprobs = np.asarray(answer.logprobs.logprobs, np.float32)
            found[output.request_id] = list(answer.token_ids), str(answer.finish_reason), logprobs
    assert llm.reset_prefix_cache()
    return found

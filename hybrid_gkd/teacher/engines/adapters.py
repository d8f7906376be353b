"""LoRA adapters of a scoring engine's model. A request names one of them, or none for the model itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hybrid_gkd.compat.vllm.versions import LORA_RANKS, lora_engine_args
from hybrid_gkd.errors import ConfigError, ModelError, prefix_errors, rename_section
from hybrid_gkd.models.adapters import (
    ADAPTER_PATH,
    MODEL,
    WEIGHTS_FILE,
    adapted_layers,
    adapter_weights,
    open_adapter,
    read_adapter,
)
from hybrid_gkd.models.spec import model_spec
from hybrid_gkd.teacher.engines.options import EngineOptions

PREFIX = "served_"
"""Prefix of the names of adapters in PEFT's modules, so that none is the name of another module or attribute."""


def check_adapters(options: EngineOptions, backend: str) -> None:
    """Check the adapters of an engine. Raises ModelError with the option."""
    for name, count in Counter(name for name, _ in options.adapters).items():
        if count > 1:
            raise ModelError(f"--adapters {name}: must be one folder, {count} are given")
    for name, folder in options.adapters:
        with prefix_errors(f"--adapters {name}"):
            check_adapter(options.ckpt_path, folder, backend, trust_remote_code=options.trust_remote_code)


def check_adapter(model: str, folder: str, backend: str, *, trust_remote_code: bool) -> int:
    """Check that an engine can apply the adapter in a folder to a model; return its rank. Nothing is loaded.

    Raises ModelError: it is no plain LoRA adapter, has other shapes, changes the embedding or the output head, or is
    beyond what vLLM can serve.
    """
    try:
        with rename_section(f"{MODEL}.", f"{folder}: the adapter's "), rename_section(ADAPTER_PATH, folder):
            model_spec(model, trust_remote_code=trust_remote_code, lora=folder)
    except ConfigError as error:
        raise ModelError(str(error)) from error
    config, _ = read_adapter(folder)
    if backend == "vllm" and config.r > LORA_RANKS[-1]:
        raise ModelError(f"{folder}: the adapter's rank must be at most {LORA_RANKS[-1]} with vLLM, it is {config.r}")
    if backend == "vllm" and (config.rank_pattern or config.alpha_pattern):
        raise ModelError(f"{folder}: an adapter with rank_pattern or alpha_pattern needs the backend hf")
    return int(config.r)


def lora_arguments(adapters: tuple[tuple[str, str], ...], device: str) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for adapters, pairs of name and folder."""
    from safetensors import safe_open

    names, rank = list[str](), 0
    for _, folder in adapters:
        rank = max(rank, read_adapter(folder)[0].r)
        with safe_open(Path(folder, WEIGHTS_FILE), framework="pt") as file:
            names += file.keys()
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in names}
    return lora_engine_args(device, len(adapters), rank, layers)


def add_adapter(hf_model: Any, name: str, folder: str) -> None:
    """Add an adapter, checked by `check_adapter`, to a model of transformers in place."""
    from peft import inject_adapter_in_model

    config, _ = read_adapter(folder)
    config.inference_mode = True
    inject_adapter_in_model(config, hf_model, adapter_name=f"{PREFIX}{name}")
    weights = adapter_weights(hf_model, f"{PREFIX}{name}")
    for key, saved in open_adapter(folder, weights).items():
        weights[key].data.copy_(saved[:])


def select_adapter(hf_model: Any, name: str | None) -> None:
    """Activate one adapter of a transformers model; None: deactivate all."""
    for layer in adapted_layers(hf_model).values():
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(f"{PREFIX}{name}")

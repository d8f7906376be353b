"""LoRA adapters of PEFT: their configuration, and their layers in a student's model.

scale * B @ A is added to the frozen weights W of a layer, with B [out, r], A [r, in] and scale = alpha / r
(arXiv:2106.09685). Only A and B are trained.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_gkd.config import ModelConfig
from hybrid_gkd.errors import ConfigError, ModelError, describe_error

logger = logging.getLogger(__name__)

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "default"
"""Name of the only adapter in PEFT."""
SAVED_PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""
MODEL = "actor_rollout_ref.model"
ADAPTER_PATH = f"{MODEL}.lora_adapter_path"
DEFAULT_ALPHA = 16
NOT_PLAIN = (
    "modules_to_save", "use_dora", "lora_bias", "fan_in_fan_out", "trainable_token_indices", "layer_replication",
    "target_parameters", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip
"""Fields of PEFT's configuration that extend an adapter beyond B @ A."""


def adapter_config(model: ModelConfig) -> Any:
    """Return PEFT's LoraConfig of a model's adapters; None without adapters.

    Raises ConfigError: the adapter folder cannot be trained, or contradicts the configuration.
    """
    if not model.has_lora:
        return None
    from peft import LoraConfig

    if model.lora_adapter_path is not None:
        return _given_config(model, model.lora_adapter_path)
    targets = model.target_modules if model.target_modules is not None else "all-linear"
    return LoraConfig(
        r=model.lora_rank, lora_alpha=model.lora_alpha or DEFAULT_ALPHA, target_modules=targets,
        exclude_modules=model.exclude_modules, task_type="CAUSAL_LM", base_model_name_or_path=model.path,
    )


def _given_config(model: ModelConfig, folder: str) -> Any:
    found, dropout = read_adapter(folder)
    for name, given, own in (("lora_rank", model.lora_rank or None, found.r),
                             ("lora_alpha", model.lora_alpha, found.lora_alpha)):  # fmt: skip
        if given is not None and given != own:
            raise ConfigError(f"{MODEL}.{name}", f"must be left out or be {own}, as {folder} has it", given)
    if dropout:
        logger.warning(
            "%s: lora_dropout %g of %s is ignored, since with dropout the student would differ from the rollout policy",
            ADAPTER_PATH, dropout, folder,
        )
    found.inference_mode, found.base_model_name_or_path = False, model.path
    return found


def read_adapter(folder: str) -> tuple[Any, float]:
    """Return PEFT's LoraConfig of an adapter folder, without dropout, and its dropout.

    Raises ConfigError: it is not a LoRA adapter, or more than B @ A.
    """
    from peft import LoraConfig

    key = ADAPTER_PATH
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not Path(folder, name).is_file():
            raise ConfigError(key, f"must be a PEFT folder with {CONFIG_FILE} and {WEIGHTS_FILE}", folder)
    try:
        kind = json.loads(Path(folder, CONFIG_FILE).read_text(encoding="utf-8")).get("peft_type")
        found = LoraConfig.from_pretrained(folder) if kind == "LORA" else None
    except Exception as error:  # whatever PEFT raises for a broken file
        raise ConfigError(key, f"{CONFIG_FILE} cannot be read: {describe_error(error)}", folder) from error
    if found is None:
        raise ConfigError(key, f"must be a LoRA adapter, not one of type {kind}", folder)
    beyond = [name for name in NOT_PLAIN if getattr(found, name, None)]
    beyond += ["bias"] if found.bias != "none" else []
    beyond += [] if isinstance(found.init_lora_weights, bool) else ["init_lora_weights"]  # may change the base
    if beyond:
        raise ConfigError(key, f"must be a LoRA adapter without {', '.join(beyond)}", folder)
    dropout, found.lora_dropout = found.lora_dropout, 0.0
    return found, dropout


def add_adapters(hf_model: Any, config: Any, dtype: torch.dtype) -> None:
    """Replace the layers that `config` targets by layers with adapters, and freeze all other weights.

    The adapters are of type `dtype` and on the meta device. The model keeps its class, and modules their names; the
    weights of a layer with adapters move below `base_layer`. Raises ConfigError: the targets do not exist, or cannot
    have adapters.
    """
    from peft import inject_adapter_in_model

    key = f"{MODEL}.target_modules"
    if config.target_modules == "all-linear" and any(p.ndim == 3 for p in hf_model.parameters()):
        raise ConfigError(
            key, f"the experts of {type(hf_model).__name__} are not linear layers, so all-linear would skip them; "
            "name the layers to adapt, such as [q_proj,k_proj,v_proj,o_proj]", "all-linear",
        )  # fmt: skip
    targets, excluded = config.target_modules, config.exclude_modules
    names = [name for name, _ in hf_model.named_modules()]
    try:
        inject_adapter_in_model(config, hf_model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(key, describe_error(error), targets) from error
    layers = adapted_layers(hf_model)
    for name, layer in layers.items():
        if type(layer).__name__ != "Linear" or not isinstance(layer.base_layer, nn.Linear):
            raise ConfigError(key, f"only linear layers can have adapters, but {name} is not linear", targets)
        if layer is hf_model.get_output_embeddings():
            raise ConfigError(key, f"the output head ({name}) cannot have an adapter", targets)
    for entry in targets if isinstance(targets, list | set) else []:
        if not any(_ends_with(name, entry) for name in layers):
            raise ConfigError(key, "the model has no such layer, or it is excluded", entry)
    for entry in [excluded] if isinstance(excluded, str) else excluded or []:
        matches = functools.partial(re.fullmatch, entry) if isinstance(excluded, str) else None
        if not any(matches(name) if matches else _ends_with(name, entry) for name in names):
            raise ConfigError(f"{MODEL}.exclude_modules", "the model has no such layer", entry)
    for layer in layers.values():
        for part in (*layer.lora_A.values(), *layer.lora_B.values()):
            part.to(dtype)
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)


def _ends_with(name: str, entry: str) -> bool:
    return name == entry or name.endswith(f".{entry}")


def adapted_layers(hf_model: Any) -> dict[str, Any]:
    """Return name -> PEFT layer with `base_layer`, `lora_A`, `lora_B` and `scaling`, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in hf_model.named_modules() if isinstance(module, BaseTunerLayer)}


def adapter_weights(hf_model: Any, adapter: str = ADAPTER) -> dict[str, nn.Parameter]:
    """Return name -> A or B, named as in PEFT's files without `SAVED_PREFIX`; empty for a model without the adapter."""
    own = f".{adapter}."
    found = hf_model.named_parameters()
    return {name.replace(own, "."): weight for name, weight in found if is_adapter(name) and own in name}


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_weights(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights named as in the model (`named_parameters`, `state_dict`) under their names without LoRA.

    Adapters are left out; weights of a model without LoRA are unchanged.
    """
    for name, weight in named:
        if not is_adapter(name):
            yield name.replace(".base_layer.", "."), weight


def open_adapter(folder: str, weights: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Return lazily read values of `adapter_weights`, by name. Raises ModelError if the file has other weights."""
    from safetensors import SafetensorError, safe_open

    file = Path(folder, WEIGHTS_FILE)
    try:
        opened = safe_open(file, framework="pt", device="cpu")
        saved = {name.removeprefix(SAVED_PREFIX): opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{ADAPTER_PATH}: cannot read {file}: {error}") from error
    for name in sorted(weights.keys() | saved.keys()):
        shapes = [list(weights[name].shape) if name in weights else None,
                  list(saved[name].get_shape()) if name in saved else None]  # fmt: skip
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"{ADAPTER_PATH}: {file} does not match the model: {name} is "
                f"{shapes[1] or 'missing'} in the file and {shapes[0] or 'not a weight'} in the model"
            )
    return saved

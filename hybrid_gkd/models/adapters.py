"""LoRA adapters as peft describes them: which ones a student is to have, and layers with them in its model.

The weights W of a layer stay as they are, and scale * B @ A is added to them, with B [out, r], A [r, in] and
scale = alpha / r (arXiv:2106.09685). Only A and B are trained.
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
"""peft's name of the only adapter."""
SAVED_PREFIX = "base_model.model."
"""Before the name of a module, in files of peft."""
MODEL = "actor_rollout_ref.model"
DEFAULT_ALPHA = 16
NOT_PLAIN = (
    "modules_to_save", "use_dora", "lora_bias", "fan_in_fan_out", "trainable_token_indices", "layer_replication",
    "target_parameters", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip
"""Fields of peft's configuration that make more of an adapter than B @ A."""


def adapter_config(model: ModelConfig) -> Any:
    """peft's LoraConfig of the adapters that a model is to have; None where it is to have none.

    Raises ConfigError: the folder to start from has none that can be trained, or the configuration contradicts it.
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
    from peft import LoraConfig

    key = f"{MODEL}.lora_adapter_path"
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not Path(folder, name).is_file():
            raise ConfigError(key, f"must be a folder of peft's with {CONFIG_FILE} and {WEIGHTS_FILE}", folder)
    try:
        kind = json.loads(Path(folder, CONFIG_FILE).read_text(encoding="utf-8")).get("peft_type")
        found = LoraConfig.from_pretrained(folder) if kind == "LORA" else None
    except Exception as error:  # whatever a broken file makes peft raise
        raise ConfigError(key, f"{CONFIG_FILE} cannot be read: {describe_error(error)}", folder) from error
    if found is None:
        raise ConfigError(key, f"must hold a LoRA adapter, not one of the kind {kind}", folder)
    beyond = [name for name in NOT_PLAIN if getattr(found, name, None)]
    beyond += ["bias"] if found.bias != "none" else []
    beyond += [] if isinstance(found.init_lora_weights, bool) else ["init_lora_weights"]  # may change the base
    if beyond:
        raise ConfigError(key, f"must hold a LoRA adapter of matrices alone, without {', '.join(beyond)}", folder)
    for name, given, own in (("lora_rank", model.lora_rank or None, found.r),
                             ("lora_alpha", model.lora_alpha, found.lora_alpha)):  # fmt: skip
        if given is not None and given != own:
            raise ConfigError(f"{MODEL}.{name}", f"must be left out or be {own}, as {folder} has it", given)
    if found.lora_dropout:
        logger.warning(
            "%s: lora_dropout %g of %s is left out: with dropout the student is not the policy that sampled",
            key, found.lora_dropout, folder,
        )
    found.lora_dropout, found.inference_mode, found.base_model_name_or_path = 0.0, False, model.path
    return found


def add_adapters(hf_model: Any, config: Any, dtype: torch.dtype) -> None:
    """Put layers with adapters in the place of the layers that `config` targets; all other weights are frozen.

    The adapters are of type `dtype` and on the meta device. The model keeps its class, and modules their names; the
    weights of a layer with adapters move below `base_layer`. Raises ConfigError: the targets are not there, or cannot
    have adapters.
    """
    from peft import inject_adapter_in_model

    key = f"{MODEL}.target_modules"
    if config.target_modules == "all-linear" and any(p.ndim == 3 for p in hf_model.parameters()):
        raise ConfigError(
            key, f"{type(hf_model).__name__} holds its experts in weights that are no linear layers, so all-linear "
            "would leave most of it out; name the layers to adapt, such as [q_proj,k_proj,v_proj,o_proj]", "all-linear",
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
            raise ConfigError(key, f"only linear layers can have adapters, and {name} is none", targets)
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
    """Name -> layer of peft, which has `base_layer`, `lora_A`, `lora_B` and `scaling`, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in hf_model.named_modules() if isinstance(module, BaseTunerLayer)}


def adapter_weights(hf_model: Any) -> dict[str, nn.Parameter]:
    """Name -> A or B, as peft names them in its files behind `SAVED_PREFIX`; empty for a model without adapters."""
    found = hf_model.named_parameters()
    return {name.replace(f".{ADAPTER}.", "."): weight for name, weight in found if is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_weights(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights by their names in the model (`named_parameters`, `state_dict`), under those that they have without LoRA.

    Adapters are left out. Those of a model without LoRA come as they are.
    """
    for name, weight in named:
        if not is_adapter(name):
            yield name.replace(".base_layer.", "."), weight


def open_adapter(folder: str, weights: dict[str, nn.Parameter]) -> dict[str, Any]:
    """The lazily read values of `adapter_weights`, by name. Raises ModelError if the file has others."""
    from safetensors import SafetensorError, safe_open

    file = Path(folder, WEIGHTS_FILE)
    try:
        opened = safe_open(file, framework="pt", device="cpu")
        saved = {name.removeprefix(SAVED_PREFIX): opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{MODEL}.lora_adapter_path: cannot read {file}: {error}") from error
    for name in sorted(weights.keys() | saved.keys()):
        shapes = [list(weights[name].shape) if name in weights else None,
                  list(saved[name].get_shape()) if name in saved else None]  # fmt: skip
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"{MODEL}.lora_adapter_path: {file} does not fit the model: {name} is "
                f"{shapes[1] or 'missing'} there and {shapes[0] or 'not a weight'} in the model"
            )
    return saved

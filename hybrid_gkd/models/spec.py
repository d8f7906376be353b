"""Sizes and limits of a model, from its config.json and without its weights."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hybrid_gkd.config import Config, ModelConfig
from hybrid_gkd.errors import ConfigError, ModelError, describe_error
from hybrid_gkd.runtime.hub import check_hub
from hybrid_gkd.runtime.imports import gc_paused, model_code


@dataclass(frozen=True)
class ModelSpec:
    parameters: int
    kv_bytes_per_token: int
    """Bytes of keys and values of one token in 16 bits."""
    activation_bytes_per_token: int = 0
    """Lower bound of the activations for the backward pass of one token in 16 bits, see `_kept_values`."""
    forward_bytes_per_token: int = 0
    """Activations of a token in a forward pass without gradients: two hidden, three intermediate of a block's MLP."""
    logits_bytes_per_token: int = 0
    """Bytes of two copies of the logits in 16 bits for a model that changes its logits (`changed_logits`); 0 for
    others, whose logits can be computed for a few rows at a time."""
    embedding_parameters: int = 0
    """Parameters of the input embedding and the output head; counted once if they are tied."""
    stored_itemsize: int = 4
    """Bytes of one parameter in the model's stored type."""
    head_parameters: int = 0
    """Parameters of the output head: vocabulary times hidden size."""
    attention_width: int = 0
    """Number of heads times head size, summed over the layers."""
    has_experts: bool = False
    """True for a mixture of experts."""
    num_embeddings: int = 0
    """Rows of the input embedding: the number of ids that the model can read."""
    adapter_parameters: int = 0
    """Parameters of LoRA adapters, not included in `parameters`; 0 if the weights themselves are trained."""

    @property
    def trained_parameters(self) -> int:
        return self.adapter_parameters or self.parameters


def model_spec(
    path: str, override_config: Mapping[str, Any] = MappingProxyType({}), *, trust_remote_code: bool,
    checkpointing: bool = False, lora: ModelConfig | str | None = None, classifier: bool = False,
) -> ModelSpec:
    """Return the spec of a causal LM (or a classifier, see `auto_class`) with the adapters of `lora`, if any: a
    student's section, or the folder of an adapter.

    Raises ModelError for an unusable configuration or adapters, ConfigError as `read_config` and `add_adapters`.
    """
    with gc_paused():
        import torch

    try:
        config = read_config(path, trust_remote_code, override_config)
        with torch.device("meta"), model_code(path, trust_remote_code):
            model = auto_class(config, classifier).from_config(config, trust_remote_code=trust_remote_code)
        ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
        stored = getattr(config, "dtype", None) or torch.float32  # a string if another library parsed config.json
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        width = text.hidden_size
        intermediate = getattr(text, "intermediate_size", None) or 4 * width
        kept = _kept_values(text.num_hidden_layers, width, intermediate, checkpointing)
        parameters = sum(p.numel() for p in model.parameters())
        embedding_parameters = sum(p.numel() for p in torch.nn.ModuleList(ends).parameters())
        return ModelSpec(
            parameters=parameters,
            kv_bytes_per_token=2 * 2 * text.num_hidden_layers * heads * head_dim,
            activation_bytes_per_token=2 * kept,
            forward_bytes_per_token=2 * (2 * width + 3 * intermediate),
            logits_bytes_per_token=2 * 2 * text.vocab_size if changed_logits(text) else 0,
            embedding_parameters=embedding_parameters,
            stored_itemsize=(getattr(torch, stored) if isinstance(stored, str) else stored).itemsize,
            head_parameters=text.vocab_size * text.hidden_size,
            attention_width=text.num_hidden_layers * text.num_attention_heads * head_dim,
            has_experts=any("expert" in name and value for name, value in text.to_dict().items()),
            num_embeddings=text.vocab_size,
            adapter_parameters=_adapter_parameters(model, lora) if lora is not None else 0,
        )
    except (ConfigError, ModelError):
        raise
    except Exception as error:  # whatever a model with inconsistent sizes raises
        raise ModelError(f"{path}: the model's configuration cannot be used: {describe_error(error)}") from error


def _kept_values(layers: int, width: int, intermediate: int, checkpointing: bool) -> int:
    """Return a lower bound of the numbers per token that a backward pass has in memory at once.

    For T tokens, hidden size D and intermediate size I, a block keeps six tensors [T, D] for its gradients (the input
    and the output of both norms, the queries and the output of the attention), and three [T, I] (the gate before its
    activation function, the other factor, and their product). Not counted are keys and values and, without Liger's
    kernels (fast_layers.py), the gate after its activation function.

    Without activation checkpointing all blocks keep theirs. With it a block keeps its input [T, D], and the backward
    pass recomputes one block at a time: that one holds all nine, the first of which is its input.
    """
    block = 6 * width + 3 * intermediate
    return (layers - 1) * width + block if checkpointing else layers * block


def changed_logits(text_config: Any) -> str | None:
    """Return the configuration field by which a model scales or caps its logits, if any."""
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    names = (*caps, "logits_scaling", "logit_scale")
    return next((name for name in names if getattr(text_config, name, None) not in (None, 1.0)), None)


CLASSIFIERS = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
}
"""Suffix of a classifier's architecture -> the class of transformers that loads it."""


def auto_class(hf_config: Any, classifier: bool) -> Any:
    """Return the class of transformers that loads a causal LM, or the folder's classifier with one label.

    Raises ValueError: it is not a classifier, or has several labels.
    """
    import transformers

    if not classifier:
        return transformers.AutoModelForCausalLM
    names = getattr(hf_config, "architectures", None) or ["none"]
    found = next((auto for end, auto in CLASSIFIERS.items() if names[0].endswith(end)), None)
    if found is None:
        raise ValueError(f"must be a classifier (...{' or ...'.join(CLASSIFIERS)}); its architecture is {names[0]}")
    if hf_config.num_labels != 1:
        raise ValueError(f"must have one label, whose logit is the score; it has {hf_config.num_labels}")
    return getattr(transformers, found)


def _adapter_parameters(model: Any, lora: ModelConfig | str) -> int:
    """Add adapters to a model, compare them with those of a folder if there is one, and count them; 0 without LoRA."""
    import torch

    from hybrid_gkd.models import adapters

    folder = lora if isinstance(lora, str) else lora.lora_adapter_path
    config = adapters.read_adapter(lora)[0] if isinstance(lora, str) else adapters.adapter_config(lora)
    if config is None:
        return 0
    adapters.add_adapters(model, config, torch.float32)
    weights = adapters.adapter_weights(model)
    if folder is not None:
        adapters.open_adapter(folder, weights)
    return sum(weight.numel() for weight in weights.values())


def read_config(path: str, trust_remote_code: bool, override_config: Mapping[str, Any]) -> Any:
    """Read a model's configuration from a folder, the hub, or the hub's cache if it is not reachable.

    Raises OSError or ValueError for a missing or unusable configuration; ModelError as `model_code`; ConfigError for a
    field or value of `override_config`.
    """
    from transformers import AutoConfig

    if trust_remote_code or not os.path.isdir(path):  # a folder may refer to code on the hub
        check_hub()
    try:
        with model_code(path, trust_remote_code):
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ModelError):
        raise
    except Exception as error:  # the types of transformers' validation, such as of num_hidden_layers and layer_types
        raise ValueError(describe_error(error)) from error
    key = "actor_rollout_ref.model.override_config"
    for name, value in override_config.items():
        in_rope = name in ROPE_FIELDS and getattr(config, "rope_parameters", None) is not None
        if not in_rope and not hasattr(config, name):
            raise ConfigError(key, f"{path} has no such field", name)
        try:
            if in_rope:
                _override_rope(config, name, value)
            else:
                setattr(config, name, value)
        except Exception as error:  # transformers has its own type errors
            raise ConfigError(key, f"invalid {name} for {path}: {describe_error(error)}", value) from error
    return config


ROPE_FIELDS = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor")
"""Names in model cards and config.json of the fields that transformers 5 keeps in `rope_parameters`."""


def _override_rope(config: Any, name: str, value: Any) -> None:
    """Change `rope_parameters`; a scaling keeps base and fraction of rotated dimensions unless they are given.

    Raises ValueError: the layer types have separate parameters, and `value` does not name one.
    """
    before, scaling = config.rope_parameters, name in ("rope_scaling", "rope_parameters")
    kinds = [kind for kind, parameters in before.items() if isinstance(parameters, Mapping)]
    changes = (value or {}) if scaling else {name: value}
    if kinds and not set(kinds).issuperset(changes):
        raise ValueError(f"it has parameters for each kind of layers: rope_parameters={{{kinds[0]}: {{...}}, ...}}")

    def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        kept = {field: old[field] for field in ROPE_FIELDS if field in old} if scaling else old
        return {**kept, **new}

    if kinds:
        config.rope_parameters = {
            kind: changed(before[kind], changes[kind]) if kind in changes else before[kind] for kind in before
        }
    else:
        config.rope_parameters = changed(before, changes)
    config.standardize_rope_params()
    config.validate_rope()


def overrides_for_engine(config: Any, override_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `override_config` for a program that sets single fields, with the RoPE fields merged by `read_config`."""
    others = {name: value for name, value in override_config.items() if name not in ROPE_FIELDS}
    changed = len(others) < len(override_config) and getattr(config, "rope_parameters", None) is not None
    return {**others, "rope_parameters": config.rope_parameters} if changed else dict(override_config)


def position_limit(text_config: Any) -> tuple[int | None, str]:
    """Return the longest sequence for which all programs compute the same, and its field; None for any length.

    Beyond `max_position_embeddings` dynamic NTK changes its frequencies with the longest sequence of a batch. LongRoPE
    has two sets of factors: transformers uses the second one for a whole batch if one sequence is longer than
    `original_max_position_embeddings`, vLLM for all sequences if its max_model_len is. Chunked attention
    (`dual_chunk_attention_config`), which only vLLM implements, equals plain attention within a chunk.
    """
    field = "max_position_embeddings"
    found = [(getattr(text_config, field, None), field)]
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, Mapping) and (each.get("rope_type") or each.get("type")) in ("longrope", "su"):
            field, other = "original_max_position_embeddings", getattr(text_config, "max_position_embeddings", None)
            original = each.get(field) or getattr(text_config, field, other)
            same = all(each.get(f"short_{name}") == each.get(f"long_{name}") for name in ("factor", "mscale"))
            found += [] if same else [(original, f"{field} of its LongRoPE")]
    chunks = getattr(text_config, "dual_chunk_attention_config", None)
    if chunks:
        found.append((chunks["chunk_size"] - chunks["local_size"], "chunk_size - local_size of its attention"))
    known = [(limit, field) for limit, field in found if limit is not None]
    return min(known, default=(None, "none"), key=lambda each: each[0])


def student_spec(config: Config) -> ModelSpec:
    """Return the spec of the configured student."""
    model = config.actor_rollout_ref.model
    return model_spec(
        model.path, model.override_config, trust_remote_code=model.trust_remote_code,
        checkpointing=model.enable_gradient_checkpointing, lora=model,
    )


def critic_spec(config: Config, student: ModelSpec) -> ModelSpec:
    """Return the spec of the configured critic: a causal LM without its head, unless that is tied to the embedding."""
    model, found = config.critic_model, student
    if model != dataclasses.replace(config.actor_rollout_ref.model, tokenizer_path=None):
        found = model_spec(
            model.path, model.override_config, trust_remote_code=model.trust_remote_code,
            checkpointing=model.enable_gradient_checkpointing,
        )
    head = found.embedding_parameters - found.head_parameters
    return dataclasses.replace(
        found, parameters=found.parameters - head, embedding_parameters=found.embedding_parameters - head
    )


def reward_model_spec(config: Config) -> ModelSpec:
    """Return the spec of the configured reward model. Raises as `model_spec`."""
    model = config.reward_model.model
    assert model.path is not None
    return model_spec(model.path, trust_remote_code=model.trust_remote_code, classifier=True)


def training_flops(spec: ModelSpec, lengths: Iterable[int], response_tokens: int) -> float:
    """Return the operations of forward and backward without recomputation; not for mixtures of experts.

    Two per weight and token forward and four backward; the head on response tokens only; causal attention. For N
    weights besides embeddings and head, sequences of n tokens (`lengths`), R response tokens: 6 N sum(n) + 6 V D R + 6
    H Dh layers sum(n^2). Sliding windows are ignored. With LoRA the N weights and the head are frozen, which leaves two
    backward, and the adapters are added.
    """
    lengths = list(lengths)
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    weights = spec.parameters - spec.embedding_parameters
    per_weight = 4.0 if spec.adapter_parameters else 6.0
    products = per_weight * (weights * tokens + spec.head_parameters * response_tokens)
    return products + 6.0 * (spec.adapter_parameters * tokens + spec.attention_width * squares)

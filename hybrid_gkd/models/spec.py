"""Facts about a model from its config.json, without its weights."""

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
from hybrid_gkd.runtime.imports import gc_paused


@dataclass(frozen=True)
class ModelSpec:
    parameters: int
    kv_bytes_per_token: int
    """Keys and values of one token in 16 bits."""
    activation_bytes_per_token: int = 0
    """Activations for the backward pass of one token in 16 bits, at least: see `_kept_values`."""
    forward_bytes_per_token: int = 0
    """The same of a forward pass that keeps nothing: of a block's MLP, two and three of them."""
    logits_bytes_per_token: int = 0
    """Of a model that changes its logits (`changed_logits`) two copies in 16 bits, before and after the change; 0 of
    others, whose logits can be computed for a few rows at a time."""
    embedding_parameters: int = 0
    """Of the input embedding and the output head; counted once where they are tied."""
    stored_itemsize: int = 4
    """Bytes of one parameter in the model's stored type."""
    head_parameters: int = 0
    """Of the output head: vocabulary times hidden size."""
    attention_width: int = 0
    """Heads times their size, summed over the layers."""
    has_experts: bool = False
    """A mixture of experts, of which a token uses a part."""
    num_embeddings: int = 0
    """Rows of the input embedding: the token ids that the model can read."""
    adapter_parameters: int = 0
    """Of LoRA adapters, which are not among `parameters`; 0 where the weights themselves are trained."""

    @property
    def trained_parameters(self) -> int:
        return self.adapter_parameters or self.parameters


def model_spec(
    path: str, override_config: Mapping[str, Any] = MappingProxyType({}), *, trust_remote_code: bool,
    checkpointing: bool = False, lora: ModelConfig | None = None, classifier: bool = False,
) -> ModelSpec:
    """Of a causal LM (or, see `auto_class`, a classifier) and the adapters that `lora` gives it, if any.

    Raises ModelError for a configuration or adapters that cannot be used, ConfigError as `read_config` and
    `add_adapters`.
    """
    with gc_paused():
        import torch

    try:
        config = read_config(path, trust_remote_code, override_config)
        with torch.device("meta"):
            model = auto_class(config, classifier).from_config(config, trust_remote_code=trust_remote_code)
        ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
        stored = getattr(config, "dtype", None) or torch.float32  # text where another library read config.json
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
    except Exception as error:  # whatever a model raises whose numbers do not fit together
        raise ModelError(f"{path}: the model's configuration cannot be used: {describe_error(error)}") from error


def _kept_values(layers: int, width: int, intermediate: int, checkpointing: bool) -> int:
    """Numbers per token that a backward pass has in memory at once, at least.

    Of T tokens, hidden size D and intermediate size I, the operations of a block keep for their gradients

    - six of [T, D]: the input and the output of both norms, the queries and the output of the attention;
    - three of [T, I]: the gate before its activation function, the other factor, and the product of the two.

    Left out are keys and values and, without Liger's kernels (fast_layers.py), the gate behind its activation function.

    Without activation checkpointing all blocks keep theirs. With it a block keeps its input [T, D], and the backward
    pass computes one block at a time anew: that one holds all nine, the first of which is its input.
    """
    block = 6 * width + 3 * intermediate
    return (layers - 1) * width + block if checkpointing else layers * block


def changed_logits(text_config: Any) -> str | None:
    """The field by which a model scales or caps its logits behind the head, if it does."""
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    names = (*caps, "logits_scaling", "logit_scale")
    return next((name for name in names if getattr(text_config, name, None) not in (None, 1.0)), None)


CLASSIFIERS = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
}
"""How the architecture of a classifier ends -> the class of transformers that loads it."""


def auto_class(hf_config: Any, classifier: bool) -> Any:
    """The class of transformers that loads a causal LM, or the classifier with one label that a folder has.

    Raises ValueError: it is no classifier, or has several labels.
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


def _adapter_parameters(model: Any, lora: ModelConfig) -> int:
    """Give a model its adapters, compare them with those to start from, and count them; 0 without LoRA."""
    import torch

    from hybrid_gkd.models import adapters

    config = adapters.adapter_config(lora)
    if config is None:
        return 0
    adapters.add_adapters(model, config, torch.float32)
    weights = adapters.adapter_weights(model)
    if lora.lora_adapter_path is not None:
        adapters.open_adapter(lora.lora_adapter_path, weights)
    return sum(weight.numel() for weight in weights.values())


def read_config(path: str, trust_remote_code: bool, override_config: Mapping[str, Any]) -> Any:
    """A model's configuration: of a folder, or of the hub, and of its cache where it does not answer.

    Raises OSError or ValueError if there is none to be used; ConfigError for a field or value of `override_config`.
    """
    from transformers import AutoConfig

    if trust_remote_code or not os.path.isdir(path):  # a folder may name code on the hub
        check_hub()
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
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
        except Exception as error:  # transformers checks types with errors of its own
            raise ConfigError(key, f"{path} does not take this {name}: {describe_error(error)}", value) from error
    return config


ROPE_FIELDS = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor")
"""How model cards and config.json name what transformers 5 has in `rope_parameters` alone."""


def _override_rope(config: Any, name: str, value: Any) -> None:
    """Change `rope_parameters`; a scaling leaves base and share of the rotated dimensions as they are, if not given.

    Raises ValueError: layers of several kinds have parameters of their own, and `value` does not say which.
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


def overrides_for_engine(config: Any, override_config: Mapping[str, Any]) -> dict[str, Any]:
    """`override_config` for a program that sets each field as it is: a configuration of `read_config` has it whole."""
    others = {name: value for name, value in override_config.items() if name not in ROPE_FIELDS}
    changed = len(others) < len(override_config) and getattr(config, "rope_parameters", None) is not None
    return {**others, "rope_parameters": config.rope_parameters} if changed else dict(override_config)


def position_limit(text_config: Any) -> tuple[int | None, str]:
    """The longest sequence of which every program computes the same, and the field that says so; None is any.

    Beyond `max_position_embeddings` dynamic NTK changes its frequencies with the longest sequence of a batch. LongRoPE
    has two sets of factors: transformers takes the second for a whole batch as soon as one of its sequences is longer
    than `original_max_position_embeddings`, vLLM for all sequences if its max_model_len is. Attention in chunks
    (`dual_chunk_attention_config`), which vLLM alone computes, is plain attention within a chunk.
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
    """The spec of the configured student."""
    model = config.actor_rollout_ref.model
    return model_spec(
        model.path, model.override_config, trust_remote_code=model.trust_remote_code,
        checkpointing=model.enable_gradient_checkpointing, lora=model,
    )


def critic_spec(config: Config, student: ModelSpec) -> ModelSpec:
    """The spec of the configured critic: a causal LM without its head, where that is not tied to its embedding."""
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
    """The spec of the configured reward model. Raises as `model_spec`."""
    model = config.reward_model.model
    assert model.path is not None
    return model_spec(model.path, trust_remote_code=model.trust_remote_code, classifier=True)


def training_flops(spec: ModelSpec, lengths: Iterable[int], response_tokens: int) -> float:
    """Operations of forward and backward, without recomputation; not for mixtures of experts.

    Two per weight and token forward and four backward; the head on response tokens only; attention causal. For N
    weights beside embeddings and head, sequences of n tokens (`lengths`), R response tokens: 6 N sum(n) + 6 V D R +
    6 H Dh layers sum(n^2). Attention counts as if no layer had a window. With LoRA the N weights and the head are
    frozen, which leaves two backward, and the adapters come on top.
    """
    lengths = list(lengths)
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    weights = spec.parameters - spec.embedding_parameters
    per_weight = 4.0 if spec.adapter_parameters else 6.0
    products = per_weight * (weights * tokens + spec.head_parameters * response_tokens)
    return products + 6.0 * (spec.adapter_parameters * tokens + spec.attention_width * squares)

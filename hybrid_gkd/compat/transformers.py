"""Private attributes of transformers' models and configurations, which say what nothing public does.

PreTrainedModel and PreTrainedConfig give every model a default of each. Tried with transformers 5.17 and 5.19; each
function raises AttributeError without the attribute.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def block_classes(model: Any) -> set[str]:
    """Names of the classes of the blocks that must stay on one device: `_no_split_modules`."""
    return set(model._no_split_modules or ())


def mixes_in_attention_only(model: Any) -> bool:
    """Whether tokens see each other in transformers' attention interface only.

    `_supports_attention_backend` says that the attention goes through it, `_is_stateful` that another layer mixes too.
    """
    return bool(model._supports_attention_backend and not model._is_stateful)


def unneeded_keys(model: Any) -> Collection[str]:
    """Patterns of names that a checkpoint may have beyond the model: `_keys_to_ignore_on_load_unexpected`."""
    return model._keys_to_ignore_on_load_unexpected or ()


def use_attention(config: Any, name: str) -> None:
    """Have the model of this configuration use a registered attention from its next call on.

    `set_attn_implementation` of the model does it in public; here is only the configuration, and its
    `_attn_implementation`.
    """
    assert config._attn_implementation is not None, type(config)
    config._attn_implementation = name

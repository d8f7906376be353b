"""Private attributes of transformers' models and configurations without a public equivalent.

PreTrainedModel and PreTrainedConfig define a default of each. Tested with transformers 5.17 and 5.19; each function
raises AttributeError without the attribute.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def block_classes(model: Any) -> set[str]:
    """Return the class names of blocks that must stay on one device: `_no_split_modules`."""
    return set(model._no_split_modules or ())


def mixes_in_attention_only(model: Any) -> bool:
    """Return whether tokens are mixed only by transformers' attention interface.

    `_supports_attention_backend`: the attention uses the interface; `_is_stateful`: another layer mixes tokens too.
    """
    return bool(model._supports_attention_backend and not model._is_stateful)


def unneeded_keys(model: Any) -> Collection[str]:
    """Return patterns of names that a checkpoint may have beyond the model: `_keys_to_ignore_on_load_unexpected`."""
    return model._keys_to_ignore_on_load_unexpected or ()


def use_attention(config: Any, name: str) -> None:
    """Make the model of this configuration use a registered attention from its next call on.

    The public method is `set_attn_implementation` of the model; only the configuration is available here, and its
    `_attn_implementation`.
    """
    assert config._attn_implementation is not None, type(config)
    config._attn_implementation = name

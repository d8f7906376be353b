"""Verification of an engine's weights against the actor's, value by value, and vLLM's weight layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hybrid_gkd.errors import ConfigError, WorkerError

PLAIN_METHODS = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's quantisation methods that do not transform a weight."""
Pairs = Callable[[str, Tensor], list[tuple[Tensor, Tensor]]]
"""Maps a weight's name and full tensor to (expected, held) tensors of the engine. Raises KeyError: unknown name."""


@torch.no_grad()
def verify(weights: Iterable[tuple[str, Tensor]], names: Iterable[str], pairs: Pairs) -> None:
    """Compare the actor's full tensors with the engine's weights.

    `weights` is exhausted before an error is raised, because gathering is collective. `names` is read after that.

    Raises WorkerError: a weight differs, is unknown to the engine, or was never set; the message names the first.
    """
    problem, taken = None, set[str]()
    for name, full in weights:
        taken.add(name)
        if problem is None:
            try:
                found = next(filter(None, itertools.starmap(first_difference, pairs(name, full))), None)
            except KeyError:
                found = "the engine has no weight of this name"
            problem = found and f"actor_rollout_ref.rollout.verify_weights: {name} in the rollout engine: {found}"
    if problem:
        raise WorkerError(problem)
    check_all_set(set(names) - taken)


def check_all_set(names: set[str]) -> None:
    """Check that no weights are left over after a publish. Raises WorkerError: `names` is not empty."""
    if names:
        raise WorkerError(f"publish left weights of the rollout engine unset: {sorted(names)[:3]}")


def first_difference(expected: Tensor, held: Tensor) -> str | None:
    """Return a description of the first difference; None if all values are equal (0 equals -0, NaN equals nothing)."""
    if expected.shape != held.shape:
        return f"shape {list(held.shape)}, but the actor has {list(expected.shape)}"
    expected = expected.to(held.dtype)
    differs = expected != held
    count = int(differs.sum())
    if not count:
        return None
    first = int(differs.cpu().numpy().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), expected.shape)]
    values = held[tuple(index)].item(), expected[tuple(index)].item()
    return f"{count} of {held.numel()} values differ, first {index}: {values[0]}, but the actor has {values[1]}"


def tensor_parallel_share(full: Tensor, shape: torch.Size, *, rank: int, ranks: int) -> Tensor:
    """Return the part of a full weight that tensor-parallel rank `rank` of `ranks` holds as a tensor of `shape`.

    A weight is replicated or split into equal parts along one dimension. With fewer parts than ranks (key and value
    heads), neighbouring ranks hold the same part. If `shape` is not such a part, the full weight is returned.
    """
    cut = [dim for dim in range(full.ndim) if full.ndim == len(shape) and full.shape[dim] != shape[dim]]
    if len(cut) != 1:
        return full
    parts, rest = divmod(full.shape[cut[0]], shape[cut[0]])
    if rest or ranks % parts:
        return full
    return full.chunk(parts, cut[0])[rank // (ranks // parts)]


class VLLMLayout:
    """Maps Hugging Face weight names to the tensors of an unquantised vLLM model on this tensor-parallel rank.

    Raises ConfigError: the layout of a weight is unknown.
    """

    def __init__(self, model: Any):
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.places: dict[str, tuple[Any, str, int | None]] = {}
        """Hugging Face name -> module, attribute, and index within a merged tensor (None: the whole tensor)."""
        self.buffers: dict[str, Tensor] = dict(model.named_buffers())
        """Buffers by name, including vLLM's own, which are not published."""
        self.wholes: dict[str, list[str]] = {}
        """Name of a merged tensor -> names of its parts; the Hugging Face model may have it merged as well."""
        merged: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        for path, module in model.named_modules(remove_duplicate=False):
            attributes = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
            if attributes:
                parent, _, own_name = path.rpartition(".")
                parts = merged.get(own_name, [own_name])
                self._check_layout(path, module, parts)
                for attribute in attributes:
                    names = [".".join(filter(None, (parent, part, attribute))) for part in parts]
                    for index, name in enumerate(names):
                        self.places[name] = module, attribute, index if len(parts) > 1 else None
                    if own_name not in parts:
                        self.wholes[f"{path}.{attribute}"] = names

    def _check_layout(self, path: str, module: Any, parts: list[str]) -> None:
        method = type(getattr(module, "quant_method", None)).__name__
        merged_in_original = len(parts) != len(getattr(module, "output_partition_sizes", parts))
        if method not in PLAIN_METHODS or (merged_in_original and self.ranks > 1):
            raise ConfigError(
                "actor_rollout_ref.rollout.verify_weights",
                f"is not available for this model: unknown layout of {path} ({type(module).__name__}, {method}) "
                f"with tensor_model_parallel_size={self.ranks}", True,
            )

    def pairs(self, name: str, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's part of a full weight, paired with each tensor that holds it. Raises KeyError: unknown."""
        if name in self.buffers:
            return [(full, self.buffers[name])]
        for part in self.wholes.pop(name, ()):
            module, attribute, _ = self.places.pop(part)
            self.places[name] = module, attribute, None
        module, attribute, index = self.places[name]
        tensor: Tensor = getattr(module, attribute).detach()
        copies = [tensor] if tensor.numel() else []
        if attribute == "weight" and hasattr(module, "cpu_linear"):
            # The CPU backend computes with a packed copy. Its product with the identity returns the weights exactly.
            columns = tensor.shape[1] if tensor.numel() else module.input_size_per_partition
            copies.append(module.cpu_linear(torch.eye(columns, dtype=tensor.dtype), tensor, None).T)
        if not copies:
            raise KeyError(attribute)
        if hasattr(module, "shard_indices"):  # vocabulary-parallel: the remaining rows are padding
            indices = module.shard_indices
            shard = full[indices.org_vocab_start_index : indices.org_vocab_end_index]
            return [(shard, copy[: indices.num_org_elements]) for copy in copies]
        if index is not None:
            copies = [copy.split(module.output_partition_sizes)[index] for copy in copies]
        sizes = getattr(module, "output_partition_sizes", [])
        if index is None and len(sizes) > 1 and sum(sizes) * self.ranks == len(full):  # a part of every section
            parts = full.split([size * self.ranks for size in sizes])
            full = torch.cat([part.chunk(self.ranks)[self.rank] for part in parts])
        return [(tensor_parallel_share(full, copy.shape, rank=self.rank, ranks=self.ranks), copy) for copy in copies]


def holds_plain_weights(model: Any) -> bool:
    """Return whether a vLLM model keeps all weights unquantised and derives nothing from them at loading."""
    for module in model.modules():
        derives = hasattr(module, "process_weights_after_loading") and type(module).__name__ != "Attention"
        if derives or type(getattr(module, "quant_method", None)).__name__ not in PLAIN_METHODS:
            return False
    return True

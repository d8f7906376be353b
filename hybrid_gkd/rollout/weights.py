"""Gathering of full weights from shards, bucket by bucket. Depends on torch only, not on an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybrid_gkd.compat.torch import copy_each

# torch 2.13 renames all_gather_into_tensor to all_gather_single.
all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Names = tuple[str, ...]
"""Names of one tensor: several if weights are tied."""
Layout = list[tuple[Names, torch.Size, torch.dtype | None]]
"""Names, shapes and own types (None: that of the engine) of the weights in transfer order; tied weights occur once."""
Sized = TypeVar("Sized", Tensor, torch.Size)


def unique_tensors(named: Iterable[tuple[str, Tensor]]) -> list[tuple[Names, Tensor]]:
    """Return every tensor once, with all its names, in order."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def layout_of(named_parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]] = ()) -> Layout:
    """Return the layout of parameters, which are cast for the engine, and of buffers, which keep their types."""
    cast: Layout = [(names, tensor.shape, None) for names, tensor in unique_tensors(named_parameters)]
    return cast + [(names, tensor.shape, tensor.dtype) for names, tensor in unique_tensors(buffers)]


def num_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def split_buckets(weights: list[tuple[Names, Sized]], length: int) -> list[list[tuple[Names, Sized]]]:
    """Split the weights, in order, into buckets of at most `length` elements; a larger weight gets its own bucket."""
    buckets: list[list[tuple[Names, Sized]]] = []
    filled = 0
    for names, weight in weights:
        if not buckets or filled + weight.numel() > length:
            buckets.append([])
            filled = 0
        buckets[-1].append((names, weight))
        filled += weight.numel()
    return buckets


def identity_shard(name: str, parameter: Tensor) -> Tensor:
    return parameter


@torch.no_grad()
def gather_in_buckets(
    named_parameters: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, bucket_bytes: int,
    shard_of: Callable[[str, Tensor], Tensor] = identity_shard,
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors in `dtype` with their names, in order, with one collective per bucket of parameters.

    A parameter with several names is gathered once and yielded under each name in a row. Memory is not reused: the
    receiver may keep the tensors. Without gathering and casting, a tensor is the parameter itself. Collective: every
    rank must exhaust the iterator.

    Args:
        named_parameters: plain tensors, or DTensors sharded by FSDP2 in dimension 0 (with or without replicas), all
            over the same ranks.
        dtype: type to which the shards are cast before they are gathered.
        bucket_bytes: full size of a bucket; a larger parameter gets its own bucket.
        shard_of: maps first name and parameter to the tensor to gather, sharded in the same way; called per bucket.
    """
    for bucket in split_buckets(unique_tensors(named_parameters), bucket_bytes // dtype.itemsize):
        full = _gather([shard_of(names[0], parameter) for names, parameter in bucket], dtype)
        for (names, _), tensor in zip(bucket, full, strict=True):
            yield from ((name, tensor) for name in names)


def _shard_of(parameter: Tensor) -> tuple[Tensor, dist.ProcessGroup | None]:
    """Return this rank's shard and the group of all shards; None as group if the shard is the whole parameter."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), None
    *outer, last = parameter.placements
    # Subclasses of Shard have another row order.
    assert type(last) is Shard, parameter.placements
    assert last.dim == 0, parameter.placements
    assert all(isinstance(placement, Replicate) for placement in outer), parameter.placements
    group = parameter.device_mesh.get_group(len(outer))
    return parameter.to_local(), group if dist.get_world_size(group) > 1 else None


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Cast tensors to `dtype` with few kernels; tensors that have it are returned as they are."""
    found = [each if each.dtype == dtype else torch.empty_like(each, dtype=dtype) for each in tensors]
    pairs = [(new, old) for new, old in zip(found, tensors, strict=True) if new is not old]
    if pairs:
        copy_each([new for new, _ in pairs], [old for _, old in pairs])
    return found


def _gather(parameters: list[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    shards, (group, *others) = zip(*map(_shard_of, parameters), strict=True)
    assert all(other == group for other in others)
    if group is None:
        yield from _cast(shards, dtype)
        return
    ranks = dist.get_world_size(group)
    # Elements of a rank's shard, padded to the number of rows that `torch.chunk` gives to the first ranks.
    lengths = [-(-parameter.shape[0] // ranks) * math.prod(parameter.shape[1:]) for parameter in parameters]
    piece = torch.empty(sum(lengths), dtype=dtype, device=shards[0].device)
    for shard, part in zip(shards, piece.split(lengths), strict=True):
        part[: shard.numel()].copy_(shard.reshape(-1))
        part[shard.numel() :].zero_()
    gathered = piece.new_empty(ranks * piece.numel())
    all_gather(gathered, piece, group=group)
    # Only the last ranks' shards are padded, so the concatenated shards without the tail are the tensor.
    for parameter, parts in zip(parameters, gathered.view(ranks, -1).split(lengths, dim=1), strict=True):
        yield parts.reshape(-1)[: parameter.numel()].view(parameter.shape)

"""Full weights from shards, a bucket at a time. Knows torch and its process groups, but no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybrid_gkd.compat.torch import copy_each

# The older name is deprecated since torch 2.13, where the newer one is first found.
all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Names = tuple[str, ...]
"""Of one tensor: several where weights are tied."""
Layout = list[tuple[Names, torch.Size]]
"""Weights in the order in which they travel, a tied one once."""
Sized = TypeVar("Sized", Tensor, torch.Size)


def unique_tensors(named: Iterable[tuple[str, Tensor]]) -> list[tuple[Names, Tensor]]:
    """Every tensor once, with all its names, in order."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def layout_of(named_parameters: Iterable[tuple[str, Tensor]]) -> Layout:
    return [(names, tensor.shape) for names, tensor in unique_tensors(named_parameters)]


def num_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def cut(weights: list[tuple[Names, Sized]], length: int) -> list[list[tuple[Names, Sized]]]:
    """Runs of neighbours with at most `length` elements; a larger weight is alone."""
    buckets: list[list[tuple[Names, Sized]]] = []
    filled = 0
    for names, weight in weights:
        if not buckets or filled + weight.numel() > length:
            buckets.append([])
            filled = 0
        buckets[-1].append((names, weight))
        filled += weight.numel()
    return buckets


def itself(name: str, parameter: Tensor) -> Tensor:
    return parameter


@torch.no_grad()
def gather_in_buckets(
    named_parameters: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, bucket_bytes: int,
    shard_of: Callable[[str, Tensor], Tensor] = itself,
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors in `dtype` under their names, in order, with one collective per bucket of parameters.

    A parameter under several names is gathered once and handed out under all of them in a row. No memory is
    used twice: the receiver may keep a tensor for as long as it likes. Where there is nothing to gather and
    nothing to cast, a tensor is the parameter itself. Collective: every rank has to take every tensor.

    Args:
        named_parameters: plain tensors, or DTensors that FSDP2 sharded in dimension 0 (with replicas or not), all over
            the same ranks.
        dtype: the shards are cast to it before they are gathered.
        bucket_bytes: full size of a bucket; a larger parameter gets a bucket of its own.
        shard_of: first name and parameter -> what is gathered for it, sharded in the same way; called bucket by bucket.
    """
    for bucket in cut(unique_tensors(named_parameters), bucket_bytes // dtype.itemsize):
        full = _gather([shard_of(names[0], parameter) for names, parameter in bucket], dtype)
        for (names, _), tensor in zip(bucket, full, strict=True):
            yield from ((name, tensor) for name in names)


def _shard_of(parameter: Tensor) -> tuple[Tensor, dist.ProcessGroup | None]:
    """This rank's part, and the group that has the others; None where the part is the whole."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), None
    *outer, last = parameter.placements
    # A subclass of Shard lays its rows out in another order.
    assert type(last) is Shard, parameter.placements
    assert last.dim == 0, parameter.placements
    assert all(isinstance(placement, Replicate) for placement in outer), parameter.placements
    group = parameter.device_mesh.get_group(len(outer))
    return parameter.to_local(), group if dist.get_world_size(group) > 1 else None


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Copies in `dtype`, many made by one kernel; those that have it are themselves."""
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
    # Elements of a rank's part, padded to the rows that `torch.chunk` gives to the first ranks.
    lengths = [-(-parameter.shape[0] // ranks) * math.prod(parameter.shape[1:]) for parameter in parameters]
    piece = torch.empty(sum(lengths), dtype=dtype, device=shards[0].device)
    for shard, part in zip(shards, piece.split(lengths), strict=True):
        part[: shard.numel()].copy_(shard.reshape(-1))
        part[shard.numel() :].zero_()
    gathered = piece.new_empty(ranks * piece.numel())
    all_gather(gathered, piece, group=group)
    # Only the last ranks' parts are padded, so without its tail the sequence of parts is the tensor.
    for parameter, parts in zip(parameters, gathered.view(ranks, -1).split(lengths, dim=1), strict=True):
        yield parts.reshape(-1)[: parameter.numel()].view(parameter.shape)

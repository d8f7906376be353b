"""Full weights from shards, a bucket at a time. Knows torch and its process groups, but no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

# The older name is deprecated since torch 2.13, where the newer one is first found.
all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One weight, under all its names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class _Shard(WeightSpec):
    """This rank's part of one parameter; without a group it is the whole."""

    local: Tensor
    group: dist.ProcessGroup | None

    def padded_length(self) -> int:
        """Elements of one rank's part where the first ranks have as many rows as `torch.chunk` gives them."""
        assert self.group is not None
        return -(-self.shape[0] // dist.get_world_size(self.group)) * math.prod(self.shape[1:])


def unique_tensors(named: Iterable[tuple[str, Tensor]]) -> list[tuple[tuple[str, ...], Tensor]]:
    """Every tensor once, with all its names (several where weights are tied), in order."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def layout_of(named_parameters: Iterable[tuple[str, Tensor]]) -> list[WeightSpec]:
    """The weights in order, a tied one once under all its names."""
    return [WeightSpec(names=names, shape=tuple(tensor.shape)) for names, tensor in unique_tensors(named_parameters)]


def num_bytes(model: torch.nn.Module) -> int:
    """Of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


Spec = TypeVar("Spec", bound=WeightSpec)


def cut(layout: list[Spec], length: int) -> list[list[Spec]]:
    """Runs of neighbours with at most `length` elements; a larger weight is alone."""
    buckets: list[list[Spec]] = []
    filled = 0
    for spec in layout:
        if not buckets or filled + spec.length > length:
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += spec.length
    return buckets


@torch.no_grad()
def gather_in_buckets(
    named_parameters: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, bucket_bytes: int
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
    """
    shards = [_shard_of(names, parameter) for names, parameter in unique_tensors(named_parameters)]
    for bucket in cut(shards, bucket_bytes // dtype.itemsize):
        yield from _gather(bucket, dtype)


def _shard_of(names: tuple[str, ...], parameter: Tensor) -> _Shard:
    parameter, shape = parameter.detach(), tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return _Shard(names=names, local=parameter, shape=shape, group=None)
    *outer, last = parameter.placements
    # A subclass of Shard lays its rows out in another order.
    assert type(last) is Shard, (names, parameter.placements)
    assert last.dim == 0, (names, parameter.placements)
    assert all(isinstance(placement, Replicate) for placement in outer), (names, parameter.placements)
    group = parameter.device_mesh.get_group(len(outer))
    return _Shard(
        names=names, local=parameter.to_local(), shape=shape, group=group if dist.get_world_size(group) > 1 else None
    )


def _gather(bucket: list[_Shard], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    group = bucket[0].group
    assert all(shard.group == group for shard in bucket)
    if group is None:
        for shard in bucket:
            full = shard.local.to(dtype)
            yield from ((name, full) for name in shard.names)
        return
    lengths = [shard.padded_length() for shard in bucket]
    piece = torch.empty(sum(lengths), dtype=dtype, device=bucket[0].local.device)
    for shard, part in zip(bucket, piece.split(lengths), strict=True):
        length = shard.local.numel()
        part[:length].copy_(shard.local.reshape(-1))
        part[length:].zero_()
    ranks = dist.get_world_size(group)
    gathered = piece.new_empty(ranks * piece.numel())
    all_gather(gathered, piece, group=group)
    # Only the last ranks' parts are padded, so without its tail the sequence of parts is the tensor.
    for shard, parts in zip(bucket, gathered.view(ranks, -1).split(lengths, dim=1), strict=True):
        full = parts.reshape(-1)[: shard.length].view(shard.shape)
        yield from ((name, full) for name in shard.names)

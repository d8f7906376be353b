"""Publishing weights: full tensors from shards, a bucket at a time, and the comparison with what arrived.

Knows torch and its process groups, but no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybrid_gkd.errors import WorkerError

# The older name is deprecated since torch 2.13, where the newer one is first found.
all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """This rank's part of one parameter; without a group it is the whole."""

    names: list[str]
    local: Tensor
    shape: torch.Size
    group: dist.ProcessGroup | None

    def padded_length(self) -> int:
        """Elements of one rank's part where the first ranks have as many rows as `torch.chunk` gives them."""
        assert self.group is not None
        rows, row_length = self.shape[0], self.shape[1:].numel()
        return -(-rows // dist.get_world_size(self.group)) * row_length


@torch.no_grad()
def gather_in_buckets(
    named_parameters: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors in `dtype` under their names, in order, with one collective per bucket of parameters.

    A parameter under several names is gathered once and handed out under all of them in a row. No memory is
    used twice: the taker may keep a tensor for as long as it likes. Where there is nothing to gather and
    nothing to cast, a tensor is the parameter itself. Collective: every rank has to take every tensor.

    Args:
        named_parameters: plain tensors, or DTensors that FSDP2 sharded in dimension 0 (with replicas or not).
        dtype: what the shards are cast to before they are gathered.
        bucket_bytes: full size of what is gathered at once; a larger parameter gets a bucket of its own.
    """
    names: dict[int, list[str]] = {}
    parameters: list[Tensor] = []
    for name, parameter in named_parameters:
        if id(parameter) not in names:
            parameters.append(parameter)
        names.setdefault(id(parameter), []).append(name)
    shards = [_shard_of(names[id(parameter)], parameter) for parameter in parameters]
    for bucket in _cut(shards, bucket_bytes // dtype.itemsize):
        yield from _gather(bucket, dtype)


def _shard_of(names: list[str], parameter: Tensor) -> _Shard:
    parameter = parameter.detach()
    if not isinstance(parameter, DTensor):
        return _Shard(names=names, local=parameter, shape=parameter.shape, group=None)
    *outer, last = parameter.placements
    # A subclass of Shard lays its rows out in another order.
    assert type(last) is Shard, (names, parameter.placements)
    assert last.dim == 0, (names, parameter.placements)
    assert all(isinstance(placement, Replicate) for placement in outer), (names, parameter.placements)
    group = parameter.device_mesh.get_group(len(outer))
    return _Shard(
        names=names, local=parameter.to_local(), shape=parameter.shape,
        group=group if dist.get_world_size(group) > 1 else None,
    )


def _cut(shards: list[_Shard], bucket_length: int) -> Iterator[list[_Shard]]:
    """Runs of neighbours that share a process group and together have at most `bucket_length` elements."""
    bucket: list[_Shard] = []
    length = 0
    for shard in shards:
        if bucket and (length + shard.shape.numel() > bucket_length or shard.group != bucket[0].group):
            yield bucket
            bucket, length = [], 0
        bucket.append(shard)
        length += shard.shape.numel()
    if bucket:
        yield bucket


def _gather(bucket: list[_Shard], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    group = bucket[0].group
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
        full = parts.reshape(-1)[: shard.shape.numel()].view(shard.shape)
        yield from ((name, full) for name in shard.names)


Pairs = Callable[[str, Tensor], list[tuple[Tensor, Tensor]]]
"""A weight's name and full tensor -> what an engine should hold of it, beside what it holds. KeyError: unknown."""


@torch.no_grad()
def verify(weights: Iterable[tuple[str, Tensor]], pairs: Pairs) -> None:
    """Compare every weight with what an engine holds of it, value by value.

    All weights are taken before an error is raised, since handing them out is collective.

    Raises:
        WorkerError: names the first weight that differs, or that the engine does not have.
    """
    problem = None
    for name, full in weights:
        if problem is not None:
            continue
        try:
            differences = (first_difference(expected, held) for expected, held in pairs(name, full))
            found = next((difference for difference in differences if difference), None)
        except KeyError:
            found = "the engine has no weight of this name"
        if found:
            problem = f"actor_rollout_ref.rollout.verify_weights: {name} in the rollout engine: {found}"
    if problem is not None:
        raise WorkerError(problem)


def first_difference(expected: Tensor, held: Tensor) -> str | None:
    """None where all values are equal (0 and -0 are, NaN never is); else a description of where they are not."""
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
    """The part of a full weight that tensor-parallel rank `rank` of `ranks` holds as a tensor of `shape`.

    Either all of it, or one dimension is cut into equal parts. With fewer parts than ranks (key and value
    heads) neighbouring ranks hold the same one. Where `shape` is no such part, all of it is returned.
    """
    cut = [dim for dim in range(full.ndim) if full.ndim == len(shape) and full.shape[dim] != shape[dim]]
    if len(cut) != 1 or full.shape[cut[0]] % shape[cut[0]]:
        return full
    length = shape[cut[0]]
    parts = full.shape[cut[0]] // length
    if ranks % parts:
        return full
    return full.narrow(cut[0], rank // (ranks // parts) * length, length)

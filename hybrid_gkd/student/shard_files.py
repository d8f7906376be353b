"""Sharded tensors as safetensors files: each rank writes one file, any number of ranks read them.

A safetensors file has a JSON header and the values. `__metadata__` in the header has an index with the shape of the
whole tensor and the first row of this part, for every tensor of the file. Loading executes nothing.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid_gkd.errors import CheckpointError, describe_error
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.runtime.threads import single_thread

PIECE_BYTES = 64 * 2**20
"""Size of the pieces that are read, copied to the host and written: the host memory of a rank besides its tensors."""
TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Part:
    """Rows of a tensor that one rank writes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of this part."""
    whole: tuple[int, ...]
    """Shape of the whole tensor; may differ in the first dimension only."""
    first_row: int
    values: Callable[[], Tensor]
    """Function that returns the values, called when this part is written."""


def write_shard(file: Path, parts: Iterable[Part], **facts: str) -> FileSum:
    """Write a file and flush it to disk; `facts` go into its header. Raises OSError.

    Values are written piece by piece, while a second thread computes the checksum; the library's own writer would hold
    all of them on the host twice.
    """
    # Larger types first, so that every tensor is aligned to its type's size.
    ordered = sorted(parts, key=lambda part: (-part.dtype.itemsize, part.name))
    index = {part.name: {"whole": part.whole, "first_row": part.first_row} for part in ordered}
    header: dict[str, Any] = {"__metadata__": {**facts, "index": json.dumps(index)}}
    end = 0
    for part in ordered:
        begin, end = end, end + math.prod(part.shape) * part.dtype.itemsize
        header[part.name] = {"dtype": TYPE_NAMES[part.dtype], "shape": part.shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    start = len(head).to_bytes(8, "little") + head
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as out, single_thread("checksum") as summing:
        out.write(start)
        checksum = summing.submit(zlib.crc32, start)
        for piece in (piece for part in ordered for piece in _pieces(part.values())):
            checksum = summing.submit(zlib.crc32, piece, checksum.result())
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
        return FileSum(size=out.tell(), crc32=checksum.result())


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, on the host."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for piece in values.split(PIECE_BYTES):
        yield memoryview(piece.cpu().numpy())


class ShardFiles:
    """Lazy reader of the files of all ranks in a folder.

    All methods raise CheckpointError: a file cannot be read, or its contents do not match the request.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        """First row and lazily read values of each part, by tensor name."""
        self._whole: dict[str, tuple[int, ...]] = {}
        self.facts: dict[str, str] = {"index": ""}
        """Facts given to `write_shard`."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} cannot be loaded: it has no safetensors files")
        for file in files:
            try:
                opened = safe_open(file, framework="pt", device="cpu")
                self.facts = opened.metadata() or {}
                for name, entry in json.loads(self.facts["index"]).items():
                    self._parts.setdefault(name, []).append((entry["first_row"], opened.get_slice(name)))
                    self._whole[name] = tuple(entry["whole"])
            except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
                reason = describe_error(error) if "index" in self.facts else "its header has no index of its tensors"
                raise CheckpointError(f"{file} cannot be loaded: {reason}") from error

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._whole)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        if name not in self._whole:
            raise CheckpointError(f"{self._folder} cannot be loaded: it has no {name}")
        return self._whole[name]

    @torch.no_grad()
    def read(self, name: str, into: Tensor, whole: tuple[int, ...], first_row: int) -> None:
        """Read the rows from `first_row` of a tensor of shape `whole` into `into`."""
        if self.shape(name) != whole:
            raise CheckpointError(f"{self._folder} cannot be loaded: {name} is {self.shape(name)} instead of {whole}")
        if not whole:
            into.copy_(self._parts[name][0][1][...])
            return
        step = max(1, PIECE_BYTES // max(1, math.prod(whole[1:]) * into.element_size()))
        last_row, filled = first_row + into.shape[0], 0
        for begin, part in self._parts[name]:
            start, stop = max(begin, first_row), min(begin + part.get_shape()[0], last_row)
            for row in range(start, stop, step):
                end = min(row + step, stop)
                into[row - first_row : end - first_row].copy_(part[row - begin : end - begin])
            filled += max(0, stop - start)
        if filled != into.shape[0]:
            raise CheckpointError(
                f"{self._folder} cannot be loaded: {filled} rows of {name} where {into.shape[0]} are needed; a file is "
                "missing, or belongs to another checkpoint"
            )

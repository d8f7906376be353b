"""Tensors that ranks hold in parts, as safetensors files: each rank writes one, and any number of ranks read them.

A safetensors file is a JSON header and the values. Under `__metadata__` the header has an index: of every tensor of
the file, the shape of the whole tensor and the row at which this part of it begins. Nothing in it can be executed.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.runtime.files import FileSum

PIECE_BYTES = 64 * 2**20
"""Read, copied to the host and written at once: all that a rank holds on the host beside its tensors."""
TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Part:
    """The rows of a tensor that one rank writes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of this part."""
    whole: tuple[int, ...]
    """Shape of the whole tensor, which differs in the first dimension at most."""
    first_row: int
    values: Callable[[], Tensor]
    """Called when it is this part's turn."""


def write_shard(file: Path, parts: Iterable[Part], **facts: str) -> FileSum:
    """Write a file and flush it to the disk; `facts` go into its header. Raises OSError.

    The header comes first, so the values are written as they come, piece by piece, while the checksum is computed in a
    second thread: the library's own writer would hold all of them on the host, twice.
    """
    # Larger types first, so that every tensor begins at a multiple of its type's size.
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
    with open(file, "wb") as out, ThreadPoolExecutor(1) as summing:
        out.write(start)
        checksum = summing.submit(zlib.crc32, start)
        for piece in (piece for part in ordered for piece in _pieces(part.values())):
            checksum = summing.submit(zlib.crc32, piece, checksum.result())
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
        return FileSum(size=out.tell(), crc32=checksum.result())


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, on the host."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for piece in values.split(PIECE_BYTES):
        yield memoryview(piece.cpu().numpy())


class ShardFiles:
    """The files of all ranks of one folder, of which only what is asked for is read.

    Raises CheckpointError in all methods: a file cannot be read, or what it has is not what is asked for.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        """Name -> first row and lazily read values of each part."""
        self._whole: dict[str, tuple[int, ...]] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} cannot be loaded: it has no safetensors files")
        for file in files:
            try:
                opened = safe_open(file, framework="pt", device="cpu")
                self.facts: dict[str, str] = opened.metadata()
                """Those of `write_shard`."""
                for name, entry in json.loads(self.facts["index"]).items():
                    self._parts.setdefault(name, []).append((entry["first_row"], opened.get_slice(name)))
                    self._whole[name] = tuple(entry["whole"])
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{file} cannot be loaded: {error}") from error

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._whole)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        if name not in self._whole:
            raise CheckpointError(f"{self._folder} cannot be loaded: it has no {name}")
        return self._whole[name]

    @torch.no_grad()
    def read(self, name: str, into: Tensor, whole: tuple[int, ...], first_row: int) -> None:
        """Fill `into`, the rows from `first_row` on of a tensor of the shape `whole`."""
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
                "missing, or one of another checkpoint is in between"
            )

"""Check the safetensors files of a model folder by their headers and samples of their values, without loading them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hybrid_gkd.errors import ModelError
from hybrid_gkd.models.fingerprint import MAX_HEADER_BYTES, local_folder

FLOATS = {
    "F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0xFF << 23), "F16": ("<u2", 0x1F << 10), "BF16": ("<u2", 0xFF << 7),
}  # fmt: skip
"""Type -> unsigned integer of its size, and the bits of its exponent, all of which are set in infinities and NaN."""
SAMPLES, SAMPLE_BYTES = 3, 4096
"""Number and size of evenly spread samples of each tensor."""


def check_weights(key: str, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the weights of a local model; do nothing for one that is not local or has no safetensors files.

    `shapes`: those of the model's tensors by name; others are not compared. Raises ModelError, with the configuration
    key `key`: a file is missing, damaged, or has another shape or values that are not finite.
    """
    folder = local_folder(path)
    files = _files(key, folder) if folder is not None else []
    is_complete = os.path.isdir(path)  # the hub's cache may lack files, which are downloaded later
    for file in files if is_complete else filter(Path.is_file, files):
        try:
            with file.open("rb", buffering=0) as content:
                _check_file(content, file.stat().st_size, shapes)
        except OSError as error:
            raise ModelError(f"{key}: {file} cannot be read: {error.strerror}") from error
        except ModelError as error:
            raise ModelError(f"{key}: {file}: {error}") from error


def _files(key: str, folder: Path) -> list[Path]:
    """Return the safetensors files that are loaded. Raises ModelError: the index cannot be read."""
    if (single := folder / "model.safetensors").is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{key}: {index} is no index of safetensors files: {type(error).__name__}: {error}") from error


def _check_file(content: BinaryIO, size: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    length = int.from_bytes(content.read(8), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelError("it is not a safetensors file")
    try:
        header = json.loads(content.read(length))
        header.pop("__metadata__", None)
        found = {name: _Tensor(**entry) for name, entry in header.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"its header cannot be read: {error}") from error
    start, end = 8 + length, max((each.data_offsets[1] for each in found.values()), default=0)
    if size != start + end:
        raise ModelError(f"it has {size} bytes, its header describes {start + end}")
    for name, tensor in found.items():
        if list(shapes.get(name, tensor.shape)) != tensor.shape:
            raise ModelError(f"{name} has the shape {tensor.shape}, config.json needs {list(shapes[name])}")
        if not tensor.is_finite(content, start):
            raise ModelError(f"{name} has values that are not finite")


class _Tensor:
    """Entry of a header."""

    def __init__(self, dtype: str, shape: list[int], data_offsets: list[int]):
        self.dtype, self.shape, self.data_offsets = dtype, shape, data_offsets
        begin, end = data_offsets
        if dtype in FLOATS and end - begin != math.prod(shape) * np.dtype(FLOATS[dtype][0]).itemsize:
            raise ValueError(f"a tensor {dtype} of shape {shape} has {end - begin} bytes")

    def is_finite(self, content: BinaryIO, start: int) -> bool:
        """Return whether sampled values are finite; True for types other than `FLOATS`."""
        if self.dtype not in FLOATS:
            return True
        kind, exponent = FLOATS[self.dtype]
        begin, end = self.data_offsets
        for number in range(SAMPLES):
            at = max(0, end - begin - SAMPLE_BYTES) * number // (SAMPLES - 1) // 8 * 8
            wanted = min(SAMPLE_BYTES, end - begin - at)
            values: Any = np.frombuffer(os.pread(content.fileno(), wanted, start + begin + at), kind)
            if ((values & exponent) == exponent).any():
                return False
        return True

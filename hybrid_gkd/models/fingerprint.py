"""Which weights a model folder has, from samples of its files: two models may have the same name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
"""Of files with a model's weights."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Read of each file, evenly spread: training changes nearly all weights."""


def local_folder(path: str) -> Path | None:
    """The folder of a model: `path`, or where the hub's cache has the model of this name; None if it is not there."""
    if os.path.isdir(path):
        return Path(path)
    from huggingface_hub import try_to_load_from_cache  # takes a moment

    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def fingerprint(path: str) -> str:
    """Hash of config.json, and of name, size and samples of every weight file; empty if the model is not here.

    Equal for copies of a folder on different machines.
    """
    folder, found = local_folder(path), hashlib.sha256()
    files = sorted(folder.iterdir()) if folder is not None else []
    for file in files:
        if file.name != "config.json" and file.suffix not in WEIGHT_SUFFIXES:
            continue
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb", buffering=0) as content:
            for number in range(SAMPLES):
                content.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                found.update(content.read(SAMPLE_BYTES))
    return found.hexdigest() if files else ""

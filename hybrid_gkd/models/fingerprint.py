"""Fingerprint of a model folder's weights, from samples of its files; distinguishes models of the same name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
"""Suffixes of files with a model's weights."""
CONFIGS = ("config.json", "adapter_config.json")
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Number and size of evenly spread samples of each file; training changes nearly all weights."""
MAX_HEADER_BYTES = 100 * 2**20
"""Maximum size of the header of a safetensors file."""


def local_folder(path: str) -> Path | None:
    """Return the folder of a model: `path`, or its folder in the hub's cache; None if there is none."""
    if os.path.isdir(path):
        return Path(path)
    from huggingface_hub import try_to_load_from_cache  # takes a moment

    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def fingerprint(path: str) -> str:
    """Return a hash of a model's or adapter's config, and of name, size, safetensors header and samples of each weight
    file.

    Equal for copies of a folder on different machines; empty if the model is not local.
    """
    folder, found = local_folder(path), hashlib.sha256()
    files = sorted(folder.iterdir()) if folder is not None else []
    for file in files:
        if file.name not in CONFIGS and file.suffix not in WEIGHT_SUFFIXES:
            continue
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb", buffering=0) as content:
            if file.suffix == ".safetensors":
                found.update(content.read(min(MAX_HEADER_BYTES, int.from_bytes(content.read(8), "little"))))
            for number in range(SAMPLES):
                content.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                found.update(content.read(SAMPLE_BYTES))
    return found.hexdigest() if files else ""

"""Environment variables for a block, and a folder for the temporary files of its processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in the block, or remove those with None."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ |= {name: value for name, value in variables.items() if value is not None}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def temporary_folder() -> Iterator[None]:
    """Put temporary files of this process and its children into a folder that is removed after the block.

    vLLM leaves sockets and rendezvous files behind. Kernels that torch compiles stay where the next run finds them.
    """
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    with (
        tempfile.TemporaryDirectory(prefix="hybrid_gkd_", ignore_cleanup_errors=True) as folder,
        environment({"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": kernels}),
    ):
        tempfile.tempdir = None  # Python's copy of the variable
        try:
            yield
        finally:
            tempfile.tempdir = None

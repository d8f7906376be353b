"""Environment variables for a block."""

from __future__ import annotations

import contextlib
import os
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

"""Restrict a local Ray cluster to the loopback interface, for which Ray has no option."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make Ray processes that are started in the block listen on 127.0.0.1 only, as on macOS.

    Sets `ENABLE_RAY_CLUSTER` in ray._private.ray_constants, whose environment variable is read at import. Tested with
    Ray 2.56 and 2.60; without the constant it logs a warning and changes nothing.
    """
    import ray
    from ray._private import ray_constants

    if not hasattr(ray_constants, "ENABLE_RAY_CLUSTER"):
        logger.warning("Ray %s listens on all interfaces, see docs/security.md", ray.__version__)
        yield
        return
    there, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = there

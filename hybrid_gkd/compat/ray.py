"""Restrict a local Ray cluster to the loopback interface and to a token of its own, for which Ray has no options; ask
whether a call is cancelled, which older versions cannot tell.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_gkd.runtime.environment import environment

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


@contextlib.contextmanager
def private_token(file: Path) -> Iterator[None]:
    """Write a new token to `file`, readable by this user only; all Ray processes of the block require it.

    Ray's own token is the same for all clusters of a user, in a file that others can read. Resets what Ray has cached
    of its environment variables (`ray._raylet`). Tested with Ray 2.60.
    """
    from ray import _raylet

    raylet: Any = _raylet  # without types

    def reread() -> None:
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()

    with open(file, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as written:
        written.write(secrets.token_hex(32))
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")  # the last one would replace the file
    variables = dict.fromkeys(names) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    try:
        with environment(variables):
            reread()
            yield
    finally:
        reread()


def is_cancelled() -> bool:
    """Return whether the driver has cancelled the present call of this worker; before Ray 2.54 never."""
    import ray

    if not ray.is_initialized():  # else Ray would be started here
        return False
    context = ray.get_runtime_context()
    in_call = context.worker.mode == ray.WORKER_MODE  # not in the driver
    return in_call and hasattr(context, "is_canceled") and context.is_canceled()

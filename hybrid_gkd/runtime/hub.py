"""Check once whether the model hub is reachable, instead of one timeout per library and file."""

from __future__ import annotations

import functools
import logging
import os
import threading

logger = logging.getLogger(__name__)

HUB_SECONDS = 5.0
"""Timeout of the check, name resolution and proxies included."""
OFFLINE = "HF_HUB_OFFLINE"


@functools.cache
def check_hub() -> None:
    """Request the hub once; if it does not reply, put this process and its children into offline mode.

    Call it before a library receives the name of a model or data set that is not a folder.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS).status_code)
        except Exception as error:  # whatever the hub's transport raises
            found.append(f"{type(error).__name__}: {error}")

    # In a thread: an unreachable name server has timeouts of its own, which no library exposes.
    asking = threading.Thread(target=ask, name="hub", daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    answer = found[0] if found else f"nothing in {HUB_SECONDS:g} s"
    if isinstance(answer, int) and answer < 500:
        return
    os.environ[OFFLINE] = "1"  # for child processes
    constants.HF_HUB_OFFLINE = True  # read from the environment once, at the import
    logger.warning(
        "the hub %s is not reachable (%s); setting %s=1: models and data sets are read from the local cache only",
        constants.ENDPOINT, answer, OFFLINE,
    )  # fmt: skip

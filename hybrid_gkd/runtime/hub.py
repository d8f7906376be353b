"""A hub that does not answer is asked once, and not again and again by each library for each file."""

from __future__ import annotations

import functools
import logging
import os
import threading

logger = logging.getLogger(__name__)

HUB_SECONDS = 5.0
"""Timeout of the look whether the hub answers at all, names and proxies included."""
OFFLINE = "HF_HUB_OFFLINE"


@functools.cache
def look_at_hub() -> None:
    """Ask the hub once for a sign of life; without one, this process and those that it starts read its cache alone.

    Call it before a library is handed the name of a model or data set that is no folder.
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

    # In a thread: a name server that is out of reach has timeouts of its own, which no library passes on.
    asking = threading.Thread(target=ask, name="hub", daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    answer = found[0] if found else f"nothing in {HUB_SECONDS:g} s"
    if isinstance(answer, int) and answer < 500:
        return
    os.environ[OFFLINE] = "1"  # for the processes that are started from now on
    constants.HF_HUB_OFFLINE = True  # read from the environment once, at the import
    logger.warning(
        "the hub %s does not answer (%s), so this run has %s=1: models and data sets come from the hub's cache alone",
        constants.ENDPOINT, answer, OFFLINE,
    )  # fmt: skip

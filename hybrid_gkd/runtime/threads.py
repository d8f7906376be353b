"""Background threads that are not necessary: a failed run can be saved also where the system refuses threads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from hybrid_gkd.errors import describe_error

logger = logging.getLogger(__name__)
T = TypeVar("T")


class CallingThread(Executor):
    """Executor that computes in the thread that submits."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def single_thread(name: str) -> Executor:
    """Return an executor with one running thread, or with none, which is logged, if the system refuses it."""
    executor = ThreadPoolExecutor(1, name)
    try:
        executor.submit(int)
    except RuntimeError as error:  # the limit of processes and threads
        warn_of_refusal("files are written by the thread that needs them", str(error))
        return CallingThread()
    return executor


@functools.cache
def warn_of_refusal(consequence: str, refusal: str) -> None:
    """Log, once in a process, what follows from a refused thread, and the limits."""
    logger.warning("%s: %s", consequence, describe_error(RuntimeError(refusal)))

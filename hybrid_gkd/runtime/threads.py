"""A background thread that is not necessary: a failed run can be saved also where the system refuses threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

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
    """Return an executor with one running thread, or with none if the operating system refuses it."""
    executor = ThreadPoolExecutor(1, name)
    try:
        executor.submit(int)
    except RuntimeError:  # the limit of processes and threads
        return CallingThread()
    return executor

"""Log waits that take longer than 10 s, and again every 30 s.

    with waiting("the teacher at 10.0.0.5:15555", Timeout(600.0, "actor_rollout_ref.teacher.request_timeout")):
        ...
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hybrid_gkd.runtime.threads import warn_of_refusal

logger = logging.getLogger(__name__)

FIRST_SECONDS = 10.0
EVERY_SECONDS = 30.0


@dataclass(frozen=True)
class Timeout:
    """Maximum duration of a wait; as text with the configuration key that sets it."""

    seconds: float
    key: str = ""
    """Configuration key; empty for a fixed timeout."""

    def __str__(self) -> str:
        return f"{self.rounded} s ({self.key or 'fixed'})"

    @property
    def rounded(self) -> str:
        return f"{self.seconds:.0f}" if self.seconds >= 10 else f"{self.seconds:.2g}"


class Wait:
    """A wait in progress; see `waiting`."""

    def __init__(self, whom: str, timeout: Timeout | None, detail: Callable[[], str], since: float | None):
        self.whom, self._timeout, self._detail = whom, timeout, detail
        self.started = self._timeout_began = time.monotonic() if since is None else since
        self._over = threading.Event()
        self.was_logged = False

    def restart_timeout(self) -> None:
        """Restart an inactivity timeout after progress."""
        self._timeout_began = time.monotonic()

    def __str__(self) -> str:
        detail = self._detail()
        since = f"since {clock_time(self.started)}, for {time.monotonic() - self.started:.0f} s now"
        until = ""
        if self._timeout is not None:
            limit = f"{self._timeout.key}={self._timeout.rounded}" if self._timeout.key else str(self._timeout)
            until = f", until {clock_time(self._timeout_began + self._timeout.seconds)} ({limit})"
        return f"waiting for {self.whom}{': ' if detail else ''}{detail}; {since}{until}"

    def log_until_over(self) -> None:
        pause = FIRST_SECONDS
        while not self._over.wait(pause):
            logger.info("%s", str(self))  # formatted now, not when a handler processes the record
            self.was_logged, pause = True, EVERY_SECONDS

    def end(self) -> None:
        self._over.set()


@contextlib.contextmanager
def waiting(
    whom: str, timeout: Timeout | None = None, detail: Callable[[], str] = lambda: "", since: float | None = None
) -> Iterator[Wait]:
    """Log what the block waits for if it takes long, and its duration at the end unless it raises.

    Args:
        whom: the awaited party, such as "the teacher at host:port".
        timeout: timeout kept by the block or by a library it calls; None if a library has its own.
        detail: returns what is still missing; called from another thread before every log line.
        since: start of the wait by time.monotonic; None: now.
    """
    wait = Wait(whom, timeout, detail, since)
    try:
        threading.Thread(target=wait.log_until_over, name="waiting", daemon=True).start()
    except RuntimeError as error:  # the wait itself needs no thread, for example to save a failed run
        warn_of_refusal("long waits are not logged", str(error))
    try:
        yield wait
    finally:
        wait.end()
    if wait.was_logged:
        logger.info("waited %.0f s for %s", time.monotonic() - wait.started, whom)


class _Overdue(BaseException):
    """Raised in code that a timer interrupts; code that catches Exception does not catch it."""


@contextlib.contextmanager
def interrupted_after(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Interrupt third-party code in the block after `seconds` and raise `error()`. Blocks must not be nested.

    Works for Python code in the main thread only: a call into a C library ends first, and other threads have no timer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise _Overdue

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, if the code catches it
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Overdue:
        raise error() from None
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


def clock_time(at: float) -> str:
    """Return a time.monotonic value as local wall-clock time, such as 13:20:05."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + at))

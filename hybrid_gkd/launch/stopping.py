"""Signals that end a run: Ctrl-C, SIGTERM (a cluster takes the machine), SIGHUP (the terminal is closed).

During training the first one lets the step in hand end and be saved, within trainer.grace_period. A second one, and
any that comes before or after training, ends the run at once: an exception that unwinds what was started. Once that
goes on, further ones change nothing, so that nothing is left behind half stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from hybrid_gkd.runtime.waiting import Timeout

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPING_SECONDS = 20.0
"""Stopping takes less; when it hangs, a further signal ends this process alone, and what it started ends with it."""


class Stopping:
    """What the signals of this process ask for. Until `install`, none of them is looked at."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        """128 + the first signal; None: there was none."""
        self._grace_period: float | None = None
        """While training."""
        self._is_saved = threading.Event()
        self._unwinds_since: float | None = None
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def install(self) -> None:
        """Take the signals of this process, but for those that its parent has it ignore, such as nohup's."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def requested(self) -> bool:
        """Whether the run is to end after the step in hand."""
        return self.exit_code is not None

    @contextlib.contextmanager
    def after_the_step(self, grace_period: float) -> Iterator[None]:
        """In the block the first signal is a request, which `requested` tells; it has this many seconds to be met."""
        self._grace_period = grace_period or None
        try:
            yield
        finally:
            self._grace_period = None
            self._is_saved.set()

    def withdraw(self) -> None:
        """A request that came with the last step has nothing left to end: the run is complete."""
        if self.exit_code is not None:
            logger.warning("%s came with the last step: the run is complete", signal.Signals(self.exit_code - 128).name)
        self.exit_code = None

    @contextlib.contextmanager
    def unwinding_after(self) -> Iterator[None]:
        """However the block ends, what was started is stopped next, and no signal interrupts that."""
        self._unwinds_since = None  # an earlier run of this process has been stopped by now
        try:
            yield
        finally:
            self._unwinds_since = self._unwinds_since or time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.exit_code is None
        self.exit_code = code = 128 + number if self.exit_code is None else self.exit_code
        if number == signal.SIGHUP:
            self._leave_terminal()
        # Threads do the talking: the main one may have been interrupted while it held the lock of a log.
        if self._unwinds_since is not None:
            if time.monotonic() > self._unwinds_since + STOPPING_SECONDS:
                os._exit(code)
            _in_thread(logger.warning, "what this run has started is being stopped")
        elif is_first and self._grace_period is not None:
            _in_thread(self._end_after, self._grace_period, number)
        else:
            self._unwinds_since = time.monotonic()
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(code)

    def _end_after(self, grace_period: float, number: int) -> None:
        """A second signal comes by itself when the grace period is over."""
        timeout = Timeout(grace_period, "trainer.grace_period")
        logger.warning(
            "%s: the run ends when the step in hand is done and saved, within %s; a second signal ends it at once",
            signal.Signals(number).name, timeout,
        )  # fmt: skip
        if not self._is_saved.wait(grace_period):
            logger.warning("the step in hand was not done and saved within %s", timeout)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)

    def _leave_terminal(self) -> None:
        """Write to nowhere instead of a terminal that is gone."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)


def _in_thread(function: object, *args: object) -> None:
    threading.Thread(target=function, args=args, name="signal", daemon=True).start()  # type: ignore[arg-type]

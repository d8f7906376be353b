"""Signals that end a run: Ctrl-C, SIGTERM (preemption by a scheduler), SIGHUP (closed terminal).

During training the first signal lets the current step finish and be saved, within trainer.grace_period. A second one,
or one outside of training, ends the run at once by an exception, which shuts everything down. Further signals during
the shutdown are ignored, so that no process is left behind.
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

from hybrid_gkd.runtime.signals import handle_signals
from hybrid_gkd.runtime.waiting import Timeout

logger = logging.getLogger(__name__)

STOPPING_SECONDS = 20.0
"""Time after which the shutdown counts as hung; a further signal then kills this process and with it its children."""


class Stopping:
    """State of the signals of this process; inactive until `install`."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        """128 + number of the first signal; None without a signal."""
        self._grace_period: float | None = None
        """Seconds for the current step to finish; None outside of training."""
        self._is_saved = threading.Event()
        self._shutdown_since: float | None = None
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def install(self) -> None:
        handle_signals(self._handle)

    def requested(self) -> bool:
        """Return whether the run should end after the current step."""
        return self.exit_code is not None

    @property
    def signal_name(self) -> str:
        """Return the name of the first signal."""
        assert self.exit_code is not None
        return signal.Signals(self.exit_code - 128).name

    @contextlib.contextmanager
    def deferred_to_step_end(self, grace_period: float) -> Iterator[None]:
        """Treat the first signal in the block as a request (`requested`); end the run after `grace_period` seconds."""
        self._grace_period = grace_period or None
        self._is_saved.clear()
        try:
            yield
        finally:
            self._grace_period = None
            self._is_saved.set()

    def cancel_request(self) -> None:
        """Drop a request that arrived during the last step, since the run is complete."""
        if self.exit_code is not None:
            logger.warning("%s during the last step: the run is complete", self.signal_name)
        self.exit_code = None

    @contextlib.contextmanager
    def uninterrupted_shutdown(self) -> Iterator[None]:
        """Begin the shutdown at the end of the block, normal or not; no signal interrupts it.

        The message of an exception of a signal names it, for run.log and starts.jsonl.
        """
        self._shutdown_since = None  # an earlier run of this process has been shut down
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as ended:  # Ray replaces one that is raised while it waits
            ended.args = (f"ended by {self.signal_name}",) if self.requested() else ended.args
            raise
        finally:
            self._shutdown_since = self._shutdown_since or time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.exit_code is None
        self.exit_code = code = 128 + number if self.exit_code is None else self.exit_code
        if number == signal.SIGHUP:
            self._redirect_terminal()
        # Log in other threads: the main one may have been interrupted while it held the lock of a log handler.
        if self._shutdown_since is not None:
            if time.monotonic() > self._shutdown_since + STOPPING_SECONDS:
                os._exit(code)
            _in_thread(logger.warning, "the run is shutting down")
        elif is_first and self._grace_period is not None:
            _in_thread(self._end_after, self._grace_period, number)
        else:
            self._shutdown_since = time.monotonic()
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(code)

    def _end_after(self, grace_period: float, number: int) -> None:
        """Send the second signal when the grace period is over."""
        timeout = Timeout(grace_period, "trainer.grace_period")
        logger.warning(
            "%s: the run ends after the current step is finished and saved, within %s; a second signal ends it at once",
            signal.Signals(number).name, timeout,
        )  # fmt: skip
        if not self._is_saved.wait(grace_period):
            logger.warning("the current step was not finished and saved within %s", timeout)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)

    def _redirect_terminal(self) -> None:
        """Redirect output from a closed terminal to /dev/null."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)


def _in_thread(function: object, *args: object) -> None:
    threading.Thread(target=function, args=args, name="signal", daemon=True).start()  # type: ignore[arg-type]

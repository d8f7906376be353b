"""Handlers of the signals that end a program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle the signals of this process, except those that it inherited as ignored, for example from nohup."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


@contextlib.contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle_signals` for the block; then restore the handlers, also if the block has replaced them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handle_signals(handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

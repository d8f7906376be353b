"""Standard streams of this program's processes: closed ones are opened, and the end of a reader is no error."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def prepare() -> None:
    """Open standard streams that the parent has closed as /dev/null, and drop output whose reader has ended.

    Otherwise the first file that is opened would get the number of the closed stream, and the output of libraries; and
    `| head`, or a `tee` that the same Ctrl-C ends, would fail a command whose work is done. Standard output prints ?
    for characters that its encoding lacks, instead of raising an error.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            os.set_inheritable(number, True)
            if null != number:
                os.close(null)
            stream = open(number, "w" if number else "r", closefd=False, encoding="utf-8")  # noqa: SIM115 (until the end)
            setattr(sys, name, stream)
    sys.stdout, sys.stderr = _without_reader(sys.stdout, "replace"), _without_reader(sys.stderr, sys.stderr.errors)


class _Output(io.FileIO):
    """A file descriptor for writing that drops what no process can read any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _without_reader(stream: Any, errors: str | None) -> io.TextIOWrapper:
    """Return a stream to the same file that drops output once the reader has ended; `errors` as in `open`."""
    raw: Any = _Output(stream.fileno(), "w", closefd=False)
    unbuffered = stream.write_through  # PYTHONUNBUFFERED
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw), stream.encoding, errors, line_buffering=stream.line_buffering,
        write_through=unbuffered,
    )  # fmt: skip

"""Shared by all tests."""

import atexit
import fcntl
import gc
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

# Nothing in the tests may wait for a hub that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

# A shell has the commands that it runs in the background ignore Ctrl-C, and so would the runs that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while torch and transformers are imported: a third of what that takes is collections that find nothing

LOCK_SECONDS = 600.0
"""Longer than any test that holds it."""


def pytest_collection_finish():
    gc.freeze()  # what has been imported and collected stays: to look through it takes a tenth of the unit tests
    gc.enable()
    atexit.register(gc.unfreeze)  # after pytest's own last collection; else libraries report what is not freed as leaks


@pytest.fixture
def only_tensor_parallel_engine():
    """No test beside has another one: the shared memory of vLLM's ranks on CPUs has one name in all processes."""
    deadline = time.monotonic() + LOCK_SECONDS
    with open(Path(tempfile.gettempdir()) / f"hybrid_gkd_tests_{os.getuid()}.lock", "w", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, f"{lock.name} was held for {LOCK_SECONDS:.0f} s"
                time.sleep(0.2)
        yield

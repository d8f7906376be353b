"""Shared by all tests."""

import fcntl
import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

# Nothing in the tests may wait for a hub that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

# A shell has the commands that it runs in the background ignore Ctrl-C, and so would the runs that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while torch and transformers are imported: a third of what that takes is collections that find nothing


def pytest_collection_finish():
    gc.enable()


@pytest.fixture
def only_tensor_parallel_engine():
    """No test beside has another one: the shared memory of vLLM's ranks on CPUs has one name in all processes."""
    with open(Path(tempfile.gettempdir()) / f"hybrid_gkd_tests_{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

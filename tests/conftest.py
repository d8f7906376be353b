"""Shared by all tests."""

import gc
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

# Nothing in the tests may wait for a hub that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

# A shell has the commands that it runs in the background ignore Ctrl-C, and so would the runs that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while torch and transformers are imported: a third of what that takes is collections that find nothing


def pytest_collection_finish():
    gc.enable()

"""Shared by all tests."""

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests import their helpers by name

# Nothing in the tests may wait for a hub that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

gc.disable()  # while torch and transformers are imported: a third of what that takes is collections that find nothing


def pytest_collection_finish():
    gc.enable()

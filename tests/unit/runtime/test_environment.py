"""Environment variables of a block."""

import os

from hybrid_gkd.runtime.environment import environment


def test_variables_are_set_in_the_block_only(monkeypatch):
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("REMOVED", "2")
    monkeypatch.delenv("ADDED", raising=False)
    with environment({"GIVEN": "3", "REMOVED": None, "ADDED": "4"}):
        assert (os.environ["GIVEN"], os.environ["ADDED"], "REMOVED" in os.environ) == ("3", "4", False)
    assert (os.environ["GIVEN"], os.environ["REMOVED"], "ADDED" in os.environ) == ("1", "2", False)

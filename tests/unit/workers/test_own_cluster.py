"""The process group of a run's own Ray cluster, with plain processes in the place of Ray's."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hybrid_gkd.runtime.processes import members
from hybrid_gkd.workers import own_cluster
from hybrid_gkd.workers.own_cluster import SIGNALS, joining_group, own_group

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")


def sleeper():
    return subprocess.Popen(["sleep", "600"], preexec_fn=lambda: None)


@pytest.mark.slow
def test_what_is_started_in_the_block_is_in_the_group_and_is_gone_after_it(monkeypatch):
    monkeypatch.setattr(own_cluster, "END_SECONDS", 0.0)
    with own_group() as group:
        with joining_group(group):
            inside = sleeper()
        outside = sleeper()
        try:
            assert members(group) == {group, inside.pid}
        finally:
            outside.kill()
            outside.wait()
    assert members(group) == set()
    assert inside.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_processes_start_is_delivered_when_they_have(number):
    came = []
    before = signal.signal(number, lambda *_: came.append(number))
    try:
        with joining_group(None):
            signal.raise_signal(number)
            signal.signal(signal.SIGTERM, lambda *_: came.append("a handler of Ray's"))
            assert came == []
        assert came == [number]
        signal.raise_signal(number)
        assert came == [number] * 2
    finally:
        signal.signal(number, before)


@pytest.mark.slow
def test_the_group_ends_with_a_run_that_is_killed(tmp_path):
    code = """
import subprocess, sys, time
from hybrid_gkd.workers.own_cluster import joining_group, own_group
with own_group() as group, joining_group(group):
    subprocess.Popen(["sleep", "600"], preexec_fn=lambda: None)
    print(group, flush=True)
    time.sleep(600)
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    group = int(run.stdout.readline())
    assert len(members(group)) == 2
    run.kill()
    run.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while members(group):
        assert time.monotonic() < deadline
        time.sleep(0.05)

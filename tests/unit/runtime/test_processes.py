"""Waiting for the end of processes by their ids."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_gkd.runtime.processes import members, wait_for_processes

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


def test_running_processes_are_waited_for_and_those_that_have_ended_are_not():
    """A zombie has ended: what it held is free."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert wait_for_processes({process.pid, 2**22 + 1}, 0.2) == {process.pid}
    process.kill()
    assert wait_for_processes({process.pid}, 60.0) == set()
    process.communicate()


def test_a_name_that_the_kernel_cuts_within_a_character_is_no_obstacle(tmp_path):
    program = tmp_path / "a训练服务器模型"
    shutil.copy(shutil.which("sleep"), program)
    process = subprocess.Popen([program, "60"], process_group=0)
    try:
        assert wait_for_processes({process.pid}, 0.2) == {process.pid}
        assert members(process.pid) == {process.pid}
    finally:
        process.kill()
        process.wait()

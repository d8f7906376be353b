"""Waiting for the end of processes by their ids."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_gkd.runtime.processes import members, temporary_folder, wait_for_processes

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


def test_a_temporary_folder_is_gone_after_the_block(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with contextlib.suppress(KeyboardInterrupt), temporary_folder("a b_") as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "file").touch()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_is_removed_if_its_process_is_killed(tmp_path):
    code = """
import os, signal
from hybrid_gkd.runtime.processes import temporary_folder
with temporary_folder("a b_") as folder:
    (folder / "file").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, timeout=60)
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""The process group and the folder of a run's own Ray cluster, with plain processes in the place of Ray's."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.runtime.processes import members
from hybrid_gkd.runtime.signals import SIGNALS
from hybrid_gkd.workers import own_cluster
from hybrid_gkd.workers.own_cluster import joining_group, own_group, private_folder

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")


def sleeper():
    return subprocess.Popen(["sleep", "600"], preexec_fn=lambda: None)


@pytest.mark.slow
def test_what_is_started_in_the_block_is_in_the_group_and_is_gone_after_it(monkeypatch, tmp_path):
    monkeypatch.setattr(own_cluster, "END_SECONDS", 0.0)
    with own_group(tmp_path, tmp_path) as group:
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
@pytest.mark.parametrize("ended", [False, True])
def test_group_and_folder_end_with_a_run_that_is_killed_and_its_log_says_so(tmp_path, ended):
    """Unless the run has recorded its end itself. A process of the group creates the folder until it is killed."""
    folder, run_dir = tmp_path / "ray", tmp_path / "a run"
    folder.mkdir()
    run_dir.mkdir()
    rows = [{"start": 1.0}, *([{"end": 2.0, "error": None}] if ended else [])]
    (run_dir / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    code = f"""
import pathlib, subprocess, sys, time
from hybrid_gkd.workers.own_cluster import joining_group, own_group
with own_group(pathlib.Path({str(folder)!r}), pathlib.Path({str(run_dir)!r})) as group, joining_group(group):
    subprocess.Popen(["sh", "-c", 'while :; do mkdir -p "$0"; done', {str(folder / "r")!r}], preexec_fn=lambda: None)
    print(group, flush=True)
    time.sleep(600)
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    group = int(run.stdout.readline())
    assert len(members(group)) >= 2  # mkdir comes and goes
    run.kill()
    run.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while members(group) or folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    recorded = [json.loads(line) for line in (run_dir / "starts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert recorded[: len(rows)] == rows
    if ended:
        assert len(recorded) == len(rows)
        assert not (run_dir / "run.log").exists()
        return
    (end,) = recorded[1:]
    assert end["error"] == own_cluster.KILLED
    assert abs(end["end"] - time.time()) < 120
    assert (run_dir / "run.log").read_text(encoding="utf-8").endswith(f" ERROR run failed: {own_cluster.KILLED}\n")


def another_user_connects(path):
    """Return whether a process of a user who owns nothing can connect to a socket."""
    child = os.fork()
    if child == 0:  # a new interpreter may be out of that user's reach
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            socket.socket(socket.AF_UNIX).connect(str(path))
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def test_the_folder_is_of_this_user_alone(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.parent == Path("/tmp")
    assert not folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_cannot_connect_to_a_socket_of_the_folder():
    """Whatever its mode is, and that of the folders between; outside of the folder they can."""
    reached = {}
    with private_folder() as folder, private_folder() as opened:
        opened.chmod(0o777)
        for where in (folder, opened):
            (where / "r").mkdir()
            (where / "r").chmod(0o777)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(where / "r" / "socket"))
                (where / "r" / "socket").chmod(0o777)
                listener.listen()
                reached[where] = another_user_connects(where / "r" / "socket")
    assert reached == {folder: False, opened: True}


def test_a_file_system_without_modes_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "later"))
    monkeypatch.setattr(own_cluster.stat, "S_IMODE", lambda mode: 0o777)
    with pytest.raises(WorkerError, match=rf"RAY_TMPDIR: .* {tmp_path}/later/gkd_\w+ is 777 instead of 700"):
        with private_folder():
            pass
    assert not list((tmp_path / "later").iterdir())

"""A refused process or thread is one error with the limit, and does not prevent a failed run from being saved."""

import errno
import logging
import os
import resource
import threading

import pytest
import torch

from hybrid_gkd import process_limits as module
from hybrid_gkd.errors import ConfigError, describe_error
from hybrid_gkd.launch import preflight
from hybrid_gkd.launch.command_line import run_command
from hybrid_gkd.process_limits import ProcessLimit, process_limits
from hybrid_gkd.runtime import waiting as waits
from hybrid_gkd.runtime.threads import single_thread, warn_of_refusal
from hybrid_gkd.student.shard_files import Part, write_shard

LIMIT = ProcessLimit("ulimit -u", 512, 510)
REFUSED = (
    RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    RuntimeError("pthread_create failed: Resource temporarily unavailable"),
)  # fmt: skip


@pytest.fixture
def no_threads(monkeypatch):
    def start(self):
        raise REFUSED[0]

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(module, "process_limits", lambda: [LIMIT])


@pytest.mark.parametrize("groups", ["0::/run\n", "9:name=systemd:/\n8:pids:/run\n"])
def test_limits_of_the_user_and_of_all_control_groups_are_read(groups, tmp_path, monkeypatch):
    controller = "pids" if "pids" in groups else ""
    inner = tmp_path / "sys/fs/cgroup" / controller / "run"
    for folder, most, used in ((inner, "200", "7"), (inner.parent, "max", "9")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pids.max").write_text(most + "\n", encoding="utf-8")
        (folder / "pids.current").write_text(used + "\n", encoding="utf-8")
    for process in ("self", "1", "2"):
        for thread in ("1", "2", "3"):
            (tmp_path / "proc" / process / "task" / thread).mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups, encoding="utf-8")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    of_group = ProcessLimit(str(inner / "pids.max"), 200, 7)
    for user, of_user in ((0, []), (os.getuid() + 1, [ProcessLimit("ulimit -u", 64, 0)])):  # root is exempt
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        assert process_limits(tmp_path) == [*of_user, of_group]
    monkeypatch.setattr(os, "getuid", (tmp_path / "proc/1").stat().st_uid.__int__)
    assert module._threads_of_user(tmp_path) == 6
    assert str(of_group).endswith("run/pids.max is 200, 7 in use")


@pytest.mark.parametrize("error", REFUSED)
def test_a_refused_process_is_one_line_with_the_limit(error, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "process_limits", lambda: [LIMIT])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def refused(stopping):
        raise error

    assert run_command(refused, debug=False) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: no new process or thread in hybrid_gkd.launch.command_line.run_command: ")
    assert "limit of processes and threads is reached (ulimit -u is 512, 510 in use): raise it" in line
    assert "traceback: /" in line


def test_other_errors_have_no_limits():
    assert describe_error(RuntimeError("planted")) == "RuntimeError: planted"
    assert describe_error(FileNotFoundError(errno.ENOENT, "nothing")) == "FileNotFoundError: [Errno 2] nothing"


def test_a_socket_that_is_unavailable_has_no_limits_unless_they_are_nearly_reached(monkeypatch):
    for used, has_limits in ((100, False), (500, True)):
        monkeypatch.setattr(module, "process_limits", lambda used=used: [LIMIT._replace(used=used)])
        assert ("ulimit" in describe_error(REFUSED[1])) is has_limits
        assert "ulimit" in describe_error(REFUSED[0])


def test_waits_and_checkpoint_files_need_no_thread(no_threads, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    warn_of_refusal.cache_clear()
    for _ in range(2):
        with waits.waiting("the workers"):
            pass
    assert caplog.text.count("long waits are not logged: RuntimeError: can't start new thread; the limit") == 1
    values = torch.arange(4.0)
    part = Part("weight", torch.float32, (4,), (4,), 0, lambda: values)
    written = write_shard(tmp_path / "0.safetensors", [part])
    assert written.size == (tmp_path / "0.safetensors").stat().st_size
    assert caplog.text.count("files are written by the thread that needs them: RuntimeError: can't start") == 1
    failed = single_thread("test").submit(int, "none")
    assert isinstance(failed.exception(), ValueError)


def test_a_limit_that_ray_cannot_start_with_is_refused_by_name(monkeypatch):
    needed = preflight.START_THREADS + preflight.THREADS_PER_WORKER * 2
    for most, is_refused in ((needed + 9, True), (needed + 10, False)):
        monkeypatch.setattr(preflight, "process_limits", lambda most=most: [ProcessLimit("ulimit -u", most, 10)])
        if is_refused:
            rule = rf"^ulimit -u: a run with 2 worker\(s\) .* {needed} processes .* 10 in use; .* got {most}$"
            with pytest.raises(ConfigError, match=rule):
                preflight.check_process_limits(2)
        else:
            preflight.check_process_limits(2)

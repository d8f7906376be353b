"""Folders outside of the run's own that cannot be written to: a line with the folder and the variable that moves it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.launch.command_line import run_command
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.launch.system_folders import check_folders, try_to_write

NOWHERE = "/proc/nowhere"  # not even root can write there
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_temporary_files_that_cannot_be_written_are_an_error_with_the_variable(monkeypatch, variable):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, NOWHERE)
    with pytest.raises(ConfigError, match=rf"^{variable}: temporary files cannot be written to {NOWHERE}: .*; set it"):
        check_folders()


def test_a_home_that_cannot_be_written_is_a_warning_with_the_variables(monkeypatch, caplog):
    monkeypatch.setenv("HOME", NOWHERE)
    monkeypatch.setenv("TMPDIR", "/tmp/made/later")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert "temporary files in /tmp/made/later" in check_folders()
    assert f"HOME: {NOWHERE} cannot be written to" in caplog.text
    assert "TRITON_CACHE_DIR" in caplog.text


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch, capsys):
    def no_entry(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    monkeypatch.setattr(Stopping, "install", lambda stopping: None)
    assert run_command(lambda stopping: 0, debug=False) == 1
    assert "error: HOME: must be set to a folder for the caches" in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "length", "most"), [("RAY_TMPDIR", 29, 28), ("TMPDIR", 71, 70)])
def test_a_folder_that_is_too_long_for_a_socket_is_named_with_its_length(monkeypatch, variable, length, most):
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    check_folders()
    monkeypatch.setenv(variable, "/tmp/" + "\u00e9" * ((length - 5) // 2) + "x" * ((length - 5) % 2))
    expected = rf"^{variable}: must have at most {most} bytes, .* 107 .* has {length}; set it to a shorter"
    with pytest.raises(ConfigError, match=expected):
        check_folders()
    monkeypatch.setenv(variable, "/tmp/" + "x" * (most - 5))
    check_folders()


def test_ray_of_its_own_needs_a_shorter_folder_than_a_cluster_that_is_there(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp/" + "x" * 40)
    check_folders(starts_ray=False)
    with pytest.raises(ConfigError, match=r"^TMPDIR: must have at most 28 bytes, .* has 45; set RAY_TMPDIR or it to"):
        check_folders()
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    check_folders()


def test_the_nearest_folder_that_exists_is_written_to(tmp_path):
    assert try_to_write(tmp_path / "a" / "b") == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_demo_in_a_home_that_cannot_be_written_is_one_line():
    command = [sys.executable, "-m", "hybrid_gkd", "--dry-run"]
    environment = {"HOME": NOWHERE, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: HOME: the demo cannot be built there: ")
    assert NOWHERE in line
    assert "XDG_CACHE_HOME" in line

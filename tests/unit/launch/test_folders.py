"""Folders outside of the run's own that cannot be written to: a line with the folder and the variable that moves it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.launch.folders import check_folders, try_to_write

NOWHERE = "/proc/nowhere"  # not even root can write there
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_temporary_files_that_cannot_be_written_are_an_error_with_the_variable(monkeypatch, variable):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, NOWHERE)
    with pytest.raises(ConfigError, match=rf"^{variable}: temporary files cannot be written to {NOWHERE}: .*; set it"):
        check_folders()


def test_a_home_that_cannot_be_written_is_a_warning_with_the_variables(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("HOME", NOWHERE)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "made" / "later"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert str(tmp_path) in check_folders()
    assert f"HOME: {NOWHERE} cannot be written to" in caplog.text
    assert "TRITON_CACHE_DIR" in caplog.text


def test_the_nearest_folder_that_exists_is_written_to(tmp_path):
    assert try_to_write(tmp_path / "a" / "b") == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_demo_in_a_home_that_cannot_be_written_is_one_line():
    command = [sys.executable, "-m", "hybrid_gkd", "--dry-run"]
    environment = {"HOME": NOWHERE, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: HOME: the demo cannot be built there: ")
    assert NOWHERE in line
    assert "XDG_CACHE_HOME" in line

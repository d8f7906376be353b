"""Environment variables and temporary files of a block."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hybrid_gkd.runtime.environment import environment, temporary_folder


def test_variables_are_set_in_the_block_only(monkeypatch):
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("REMOVED", "2")
    monkeypatch.delenv("ADDED", raising=False)
    with environment({"GIVEN": "3", "REMOVED": None, "ADDED": "4"}):
        assert (os.environ["GIVEN"], os.environ["ADDED"], "REMOVED" in os.environ) == ("3", "4", False)
    assert (os.environ["GIVEN"], os.environ["REMOVED"], "ADDED" in os.environ) == ("1", "2", False)


def test_temporary_files_of_all_processes_of_a_block_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with temporary_folder():
        Path(tempfile.mkdtemp(), "file").touch()
        subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp()"], check=True, timeout=60)
        (own,) = tmp_path.iterdir()
        assert len(list(own.iterdir())) == 2
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tmp_path}/torchinductor_")
    assert not list(tmp_path.iterdir())
    assert tempfile.gettempdir() == str(tmp_path)

"""A file beside the run that is named like a module of Python or of a package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid_gkd

ROOT = str(Path(hybrid_gkd.__file__).parent.parent)
USERS = 'raise SystemExit("the user\'s file was imported")\n'


def program(cwd, *arguments, pythonpath=ROOT, python=(sys.executable,)):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [*python, "-m", "hybrid_gkd", *arguments], cwd=cwd, env=environment | {"PYTHONPATH": pythonpath},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("python", [(sys.executable,), (sys.executable, "-P")])
def test_what_lies_in_the_working_folder_takes_no_module_s_place(python, tmp_path):
    for name in ("tokenize", "logging", "secrets", "omegaconf"):
        (tmp_path / f"{name}.py").write_text(USERS, encoding="utf-8")
    done = program(tmp_path, "actor_rollout_ref.model.path=./student", "there.is.no.such.key=1", python=python)
    assert "there is no such key" in done.stderr
    assert "no such folder; got './student'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("pythonpath", [f"{ROOT}:.", f":{ROOT}", "{folder}:" + ROOT])
def test_a_folder_that_python_looks_into_first_is_refused_by_the_file_s_name(pythonpath, tmp_path):
    (tmp_path / "logging").mkdir()
    (tmp_path / "logging" / "__init__.py").write_text(USERS, encoding="utf-8")
    (tmp_path / "queue").mkdir()  # without __init__.py it takes no module's place
    done = program(tmp_path, "--help", pythonpath=pythonpath.format(folder=tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: PYTHONPATH: {tmp_path}/logging/__init__.py has the name of a module of Python's")
    (tmp_path / "logging" / "__init__.py").unlink()
    assert program(tmp_path, "--help", pythonpath=pythonpath.format(folder=tmp_path)).returncode == 0


def test_other_programs_that_import_the_package_keep_their_path(tmp_path):
    code = "import sys; before = [*sys.path]\nimport hybrid_gkd\nprint(before == sys.path)\n"
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"

"""Module search path of a run's processes: the working directory comes last.

Python and Ray put it first, so that a file there, such as `tokenize.py` or `datasets.py`, would replace a module of the
standard library or of a package. The user's own modules are still found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

PROGRAM, RAY_WORKER = "hybrid_gkd", "default_worker.py"
SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable that keeps the working directory and a script's folder out of sys.path."""


def arrange() -> None:
    """Put the working directory last in sys.path of this program's processes; children find it through PYTHONPATH.

    Other programs that import this package are not affected. Raises SystemExit: a folder of PYTHONPATH has a file named
    like a module of the standard library, which every process would import instead.
    """
    if any(os.path.basename(word) == RAY_WORKER for word in sys.orig_argv):
        put_last(sys.path[0])  # the driver's working directory
    elif is_own_program():
        put_last(os.getcwd())
        os.environ[SAFE_PATH] = "1"
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        folders = value.split(os.pathsep) if (value := os.environ.get("PYTHONPATH")) else []
        if root not in folders and os.path.basename(root) not in ("site-packages", "dist-packages"):
            folders.insert(0, root)
            os.environ["PYTHONPATH"] = os.pathsep.join(folders)
        if file := hides_a_module(folders):
            raise SystemExit(
                f"error: PYTHONPATH: {file} has the name of a module of Python's standard library, which it would "
                "replace in every process; rename it, or remove its folder from PYTHONPATH"
            )


def is_own_program() -> bool:
    """Return whether this process is `python -m hybrid_gkd` or one of its further commands."""
    given = sys.orig_argv
    return "-m" in given and given[given.index("-m") + 1].partition(".")[0] == PROGRAM


def put_last(folder: str) -> None:
    """Move a folder to the end of sys.path, under any of its names."""
    real = os.path.realpath(folder)
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != real] + [folder]


def hides_a_module(folders: Iterable[str]) -> str | None:
    """Return a file in the folders ("": the working directory) that hides a module of the standard library, or None."""
    own = os.path.realpath(os.path.dirname(os.__file__))
    for folder in folders:
        if os.path.realpath(folder) == own:
            continue
        for name in sys.stdlib_module_names:
            for file in (f"{name}.py", os.path.join(name, "__init__.py")):
                if os.path.isfile(path := os.path.join(folder, file)):
                    return os.path.abspath(path)
    return None

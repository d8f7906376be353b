"""Where the processes of a run look for modules: the folder that the run was started in comes last.

Python and Ray put it first, so that a file there, `tokenize.py` or `datasets.py` say, would take the place of a module
of the standard library or of a package, in whatever imports it. Modules of the user's own are still found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

PROGRAM, RAY_WORKER = "hybrid_gkd", "default_worker.py"
SAFE_PATH = "PYTHONSAFEPATH"
"""The variable by which Python leaves the working folder, and that of a script, out of sys.path."""


def arrange() -> None:
    """Put the working folder last in a process of this program, and keep Python from putting it first in its children,
    which find this package through PYTHONPATH.

    Of other programs that import this package nothing is changed. Raises SystemExit: a folder of PYTHONPATH has a file
    named like a module of the standard library, which Python would import for it in every process.
    """
    given = sys.orig_argv
    if any(os.path.basename(word) == RAY_WORKER for word in given):
        put_last(sys.path[0])  # of the driver, from the machine where that is
    elif "-m" in given and given[given.index("-m") + 1].partition(".")[0] == PROGRAM:
        put_last(os.getcwd())
        os.environ[SAFE_PATH] = "1"
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        folders = value.split(os.pathsep) if (value := os.environ.get("PYTHONPATH")) else []
        if root not in folders and os.path.basename(root) not in ("site-packages", "dist-packages"):
            folders.insert(0, root)
            os.environ["PYTHONPATH"] = os.pathsep.join(folders)
        if file := hides_a_module(folders):
            raise SystemExit(
                f"error: PYTHONPATH: {file} has the name of a module of Python's standard library, in whose place "
                "every process of the run would import it; rename it, or take its folder out"
            )


def put_last(folder: str) -> None:
    """Move a folder, under whatever name, to the end of sys.path."""
    real = os.path.realpath(folder)
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != real] + [folder]


def hides_a_module(folders: Iterable[str]) -> str | None:
    """A file in one of the folders, which are not Python's own, that it would import for a module of the standard
    library; "" is here."""
    own = os.path.realpath(os.path.dirname(os.__file__))
    for folder in folders:
        if os.path.realpath(folder) == own:
            continue
        for name in sys.stdlib_module_names:
            for file in (f"{name}.py", os.path.join(name, "__init__.py")):
                if os.path.isfile(path := os.path.join(folder, file)):
                    return os.path.abspath(path)
    return None

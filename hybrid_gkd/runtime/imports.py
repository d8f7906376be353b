"""A user's own loss, reward, rollout engine or tracker: `package.module:name` or `path/to/file.py:name`.

A module must be importable from where the program was started. And `quick_imports`, for large packages, and
`how_to_install`, for those that are missing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_gkd.errors import ConfigError


def is_import_path(value: str) -> bool:
    """Whether a configuration value names something of the user's own instead of a built-in one."""
    return ":" in value


def load_object(key: str, import_path: str) -> Any:
    """The object that `import_path` names; the module or file is executed.

    Raises ConfigError, for the configuration key `key`: no such module or file, it fails to import, or it does not hold
    a callable of that name.
    """
    source, _, name = import_path.rpartition(":")
    file = Path(source).expanduser() if source.endswith(".py") or "/" in source else None
    if file is not None and not (file.suffix == ".py" and file.is_file()):
        raise ConfigError(key, "must be an existing Python file", source)
    try:
        module = importlib.import_module(source) if file is None else _execute(file)
    except Exception as error:  # whatever the user's code raises
        rule = f"must be importable, but raised {type(error).__name__}: {error}"
        raise ConfigError(key, rule, import_path) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(key, f"must name a function or class of {source}", import_path)
    return found


def _execute(file: Path) -> Any:
    # Our own prefix: a file named json.py must not replace the module of that name.
    name = f"hybrid_gkd_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import large packages in it: torch, transformers and vLLM together then take two thirds of the time.

    Python's garbage collector is off, which would walk again and again through all that has been imported.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:  # else this is a block within another one
            gc.enable()


def keep_loaded() -> None:
    """Exempt what is in memory now from garbage collection until the process ends.

    A full pass of the collector looks at every object there is and holds up all threads meanwhile, for tenths of a
    second where torch and a model are loaded.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries report what is never freed as leaks


def how_to_install(*packages: str) -> str:
    """The command that adds packages to the environment of this interpreter, which has no pip where uv made it."""
    with_pip = [sys.executable, "-m", "pip", "install"]
    with_uv = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*(with_uv if importlib.util.find_spec("pip") is None else with_pip), *packages])

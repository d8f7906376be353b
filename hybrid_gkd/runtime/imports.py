"""Import user-defined functions and classes: `package.module:name` or `path/to/file.py:name`.

A module must be importable from the folder in which the program was started.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_gkd.errors import ConfigError, ModelError
from hybrid_gkd.runtime.waiting import Timeout, interrupted_after

IMPORT_SECONDS = 60.0
"""Timeout for the import of a user's module, or of a model's."""


def is_import_path(value: str) -> bool:
    """Return whether a configuration value names a user-defined object instead of a built-in one."""
    return ":" in value


def load_object(key: str, import_path: str) -> Any:
    """Return the object that `import_path` names, after executing its module or file.

    Raises ConfigError for the configuration key `key`: the module or file does not exist, fails to import, or does not
    define a callable of that name.
    """
    source, _, name = import_path.rpartition(":")
    file = Path(source).expanduser() if source.endswith(".py") or "/" in source else None
    if file is not None and not (file.suffix == ".py" and file.is_file()):
        raise ConfigError(key, "must be an existing Python file", source)
    try:
        rule = f"must be importable within {Timeout(IMPORT_SECONDS)}"
        with interrupted_after(IMPORT_SECONDS, lambda: ConfigError(key, rule, import_path)):
            module = importlib.import_module(source) if file is None else _execute(file)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        rule = f"must be importable, but raised {type(error).__name__}: {error}"
        raise ConfigError(key, rule, import_path) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(key, f"must name a function or class of {source}", import_path)
    return found


def model_code(path: str, trusted: bool) -> contextlib.AbstractContextManager[None]:
    """Limit the time in which a block loads a model's own code. Raises ModelError; see `interrupted_after`."""
    rule = f"the model's own code (trust_remote_code) must load within {Timeout(IMPORT_SECONDS)}"
    error = functools.partial(ModelError, f"{path}: {rule}")
    return interrupted_after(IMPORT_SECONDS, error) if trusted else contextlib.nullcontext()


def _execute(file: Path) -> Any:
    # With a prefix: a file named json.py must not replace the standard module.
    name = f"hybrid_gkd_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection while large packages are imported.

    Importing torch, transformers and vLLM then takes a third less time, because the collector would traverse all
    imported objects again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:  # blocks may be nested
            gc.enable()


def freeze_gc() -> None:
    """Exempt all objects in memory from garbage collection until the process ends.

    A full collection traverses every object and stops all threads, for tenths of a second once torch and a model are
    loaded.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries report the frozen objects as leaks


def install_command(*packages: str) -> str:
    """Return the shell command that installs packages into the environment of this interpreter, with pip or uv."""
    with_pip = [sys.executable, "-m", "pip", "install"]
    with_uv = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*(with_uv if importlib.util.find_spec("pip") is None else with_pip), *packages])

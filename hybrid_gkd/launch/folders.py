"""The folders that a run writes to beside its own, and the variables that move them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from hybrid_gkd.errors import ConfigError

logger = logging.getLogger(__name__)


def check_folders() -> str:
    """Temporary files can be written. Raises ConfigError; a home folder without caches is a warning."""
    # Ray looks at these and has no other place; TMPDIR is everybody's.
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    temporary, home = Path(os.environ.get(variable) or "/tmp"), Path.home()
    try:
        try_to_write(temporary)
    except OSError as error:
        rule = f"temporary files cannot be written to {temporary}: {error.strerror}; set it to a folder that takes them"
        raise ConfigError(variable, rule, show_value=False) from error
    try:
        try_to_write(home)
    except OSError as error:
        logger.warning(
            "HOME: %s cannot be written to (%s), where vLLM, Triton and the Hub have their caches; if one of them "
            "fails, set HOME, or VLLM_CACHE_ROOT, TRITON_CACHE_DIR and HF_HOME", home, error.strerror,
        )  # fmt: skip
    return f"temporary files in {temporary}, home {home}"


def try_to_write(folder: Path) -> Path:
    """Write a file to the folder or, where it is still to be made, to its nearest parent, which is returned.

    Raises OSError.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
    return folder

"""The folders that a run writes to beside its own, and the variables that move them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from hybrid_gkd.errors import ConfigError

logger = logging.getLogger(__name__)

SOCKET_BYTES = 107
"""The longest path of a socket on Linux."""
RAY_BYTES = len("/ray/session_2026-01-31_12-00-00_000000_4194304/sockets/plasma_store")
VLLM_BYTES = len("/00000000-0000-0000-0000-000000000000")
"""What Ray and vLLM put behind the folder of their sockets."""


def check_folders(*, starts_ray: bool = True) -> str:
    """Temporary files can be written, and sockets made. Raises ConfigError; a home without caches is a warning."""
    # Ray looks at these and has no other place; TMPDIR is everybody's.
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    temporary, home = Path(os.environ.get(variable) or "/tmp"), Path.home()
    try:
        try_to_write(temporary)
    except OSError as error:
        rule = f"temporary files cannot be written to {temporary}: {error.strerror}; set it to a folder that takes them"
        raise ConfigError(variable, rule, show_value=False) from error
    if starts_ray:
        check_socket_folder(variable, temporary, SOCKET_BYTES - RAY_BYTES)
    check_socket_folder("TMPDIR", Path(os.environ.get("TMPDIR") or "/tmp"), SOCKET_BYTES - VLLM_BYTES)
    try:
        try_to_write(home)
    except OSError as error:
        logger.warning(
            "HOME: %s cannot be written to (%s), where vLLM, Triton and the Hub have their caches; if one of them "
            "fails, set HOME, or VLLM_CACHE_ROOT, TRITON_CACHE_DIR and HF_HOME", home, error.strerror,
        )  # fmt: skip
    return f"temporary files in {temporary}, home {home}"


def check_socket_folder(variable: str, folder: Path, most: int) -> None:
    """Raises ConfigError: its path is too long for the sockets of Ray or vLLM."""
    length = len(os.fsencode(folder.absolute()))
    if length > most:
        shorter = "RAY_TMPDIR or it" if variable == "TMPDIR" and most == SOCKET_BYTES - RAY_BYTES else "it"
        raise ConfigError(
            variable, f"must have at most {most} bytes, as a socket's path has {SOCKET_BYTES} at most and Ray and vLLM "
            f"make theirs below it; it has {length}; set {shorter} to a shorter folder, such as /tmp", str(folder),
        )  # fmt: skip


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

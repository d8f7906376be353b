"""Check the temporary and home folders that libraries write to, and the variables that set them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from hybrid_gkd.errors import ConfigError

logger = logging.getLogger(__name__)

SOCKET_BYTES = 107
"""Maximum length of a socket path on Linux."""
RAY_BYTES = len("/gkd_12345678/r/session_2026-01-31_12-00-00_000000_4194304/sockets/plasma_store")
VLLM_BYTES = len("/00000000-0000-0000-0000-000000000000")
"""Length of the socket names that Ray and vLLM append to their folder."""


def check_folders(*, starts_ray: bool = True) -> str:
    """Check that temporary files and sockets can be created; warn if the home folder, used for caches, is not writable.

    Raises ConfigError.
    """
    # Ray reads RAY_TMPDIR, then TMPDIR; other libraries read TMPDIR only.
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    temporary, home = Path(os.environ.get(variable) or "/tmp"), home_folder()
    try:
        try_to_write(temporary)
    except OSError as error:
        rule = f"temporary files cannot be written to {temporary}: {error.strerror}; set it to a writable folder"
        raise ConfigError(variable, rule, show_value=False) from error
    if starts_ray:
        check_socket_folder(variable, temporary, SOCKET_BYTES - RAY_BYTES)
    check_socket_folder("TMPDIR", Path(os.environ.get("TMPDIR") or "/tmp"), SOCKET_BYTES - VLLM_BYTES)
    try:
        try_to_write(home)
    except OSError as error:
        logger.warning(
            "HOME: %s cannot be written to (%s), but holds the caches of vLLM, Triton and the hub; if one of them "
            "fails, set HOME, or VLLM_CACHE_ROOT, TRITON_CACHE_DIR and HF_HOME", home, error.strerror,
        )  # fmt: skip
    return f"temporary files in {temporary}, home {home}"


def home_folder() -> Path:
    """Return the user's home folder. Raises ConfigError: there is none, as in containers with ids of their own."""
    try:
        return Path.home()
    except RuntimeError as error:
        rule = "must be set to a folder for the caches of this program and its libraries: this user has no home folder"
        raise ConfigError("HOME", rule, show_value=False) from error


def check_socket_folder(variable: str, folder: Path, most: int) -> None:
    """Raise ConfigError if the path is too long for the sockets of Ray or vLLM."""
    length = len(os.fsencode(folder.absolute()))
    if length > most:
        shorter = "RAY_TMPDIR or it" if variable == "TMPDIR" and most == SOCKET_BYTES - RAY_BYTES else "it"
        raise ConfigError(
            variable, f"must have at most {most} bytes, since Ray and vLLM create sockets below it, whose paths have "
            f"at most {SOCKET_BYTES} bytes; it has {length}; set {shorter} to a shorter path, such as /tmp",
            str(folder),
        )  # fmt: skip


def try_to_write(folder: Path) -> Path:
    """Write a temporary file to the folder or, if it does not exist, to its nearest existing parent, which is returned.

    Raises OSError.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
    return folder

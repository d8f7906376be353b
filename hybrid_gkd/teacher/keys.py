"""CURVE keys: the service admits clients by their public keys, and they recognise it by its own.

    FOLDER/server/   server.key, server.key_secret    for `serve --keys FOLDER/server`
                     clients/NAME.key                 public keys that are let in; read at every connection
    FOLDER/NAME/     NAME.key, NAME.key_secret,       for the trainer, `join` and `status`
                     server.key

Key files are those of pyzmq (`zmq.auth`).
"""

from __future__ import annotations

import logging
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq.auth

from hybrid_gkd.errors import TeacherError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """One side's key pair and the server's public key, each 40 characters of Z85."""

    folder: Path
    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        """Of zmq.auth: whether the owner of a public key may connect to this server; asked for every connection."""
        if key == self.public:  # the service's own workers
            return True
        for path in (self.folder / "clients").glob("*.key"):
            try:
                if key == _load(path)[0]:
                    return True
            except TeacherError as error:
                log.warning("%s", error)
        log.warning("a connection was refused: its key is not in %s", self.folder / "clients")
        return False


def make_keys(folder: Path, client: str = "client") -> list[Path]:
    """Make the server's keys where there are none, and one more client's; returns the new folders.

    Raises TeacherError rather than overwrite anything.
    """
    if client == "server" or not client or client.startswith(".") or "/" in client:
        raise TeacherError(f"--client {client!r}: expected a plain name other than server")
    server, own = folder / "server", folder / client
    if own.exists():
        raise TeacherError(f"{own} exists and is not overwritten; --client NAME makes keys for one more client")
    made = [own] if server.exists() else [server, own]
    try:
        for each in made:
            each.mkdir(parents=True, mode=0o700)
            for path in zmq.auth.create_certificates(each, each.name):
                Path(path).chmod(0o600)
        (server / "clients").mkdir(mode=0o700, exist_ok=True)
        shutil.copy(server / "server.key", own)
        shutil.copy(own / f"{client}.key", server / "clients")
    except OSError as error:
        raise TeacherError(f"--out {folder}: cannot write keys: {error}") from error
    return made


def load_keys(folder: str | Path) -> Keys:
    """The keys of one side. Raises TeacherError naming the file that is missing, open to others or no key."""
    folder = Path(folder)
    secrets = sorted(folder.glob("*.key_secret"))
    if len(secrets) != 1:
        found = ", ".join(path.name for path in secrets) or "none"
        raise TeacherError(
            f"{folder}: a folder of keys holds one .key_secret file, found {found}; "
            "python -m hybrid_gkd.teacher keys makes one folder for the server and one for each client"
        )
    if stat.S_IMODE(secrets[0].stat().st_mode) & 0o077:
        raise TeacherError(f"{secrets[0]}: others can read this secret key; chmod 600 it, or better make a new one")
    public, secret = _load(secrets[0])
    if secret is None:
        raise TeacherError(f"{secrets[0]}: there is no secret key in this file")
    return Keys(folder=folder, public=public, secret=secret, server_public=_load(folder / "server.key")[0])


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        keys = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise TeacherError(f"{path}: not a key file: {error}") from error
    for key in keys:
        if key is not None and len(key) != 40:
            raise TeacherError(f"{path}: a key has 40 characters, found {len(key)}")
    return keys

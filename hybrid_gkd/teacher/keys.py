"""CURVE keys of a teacher service, its clients and its workers.

    FOLDER/server/   server.key, server.key_secret    for `serve --keys FOLDER/server`
                     clients/NAME.key                 public keys of clients
                     workers/NAME.key                 public keys of workers; both are read at every connection
    FOLDER/NAME/     NAME.key, NAME.key_secret,       for the trainer and `status` (a client), or for `join` (a worker)
                     server.key

Key files have the format of pyzmq (`zmq.auth`). Every folder has a .gitignore that keeps it out of repositories.
"""

from __future__ import annotations

import logging
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq.auth

from hybrid_gkd.errors import TeacherError

log = logging.getLogger(__name__)


Role = Literal["clients", "workers"]
"""Role of a key's owner; also the subfolder of the server's keys that lists the key."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """One side's key pair and the server's public key, each 40 characters of Z85."""

    folder: Path
    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes


class AllowList:
    """Allow-list of public keys by role: the service's own key, and those in clients/ and workers/."""

    def __init__(self, keys: Keys):
        self.keys = keys
        self._banned: set[bytes] = set()

    def callback(self, domain: Role, key: bytes) -> bool:
        """Return whether the owner of a public key may connect in this role; called by zmq.auth per connection."""
        name = self.name(domain, key)
        if key in self._banned:
            log.warning("connection refused: %s is banned for an invalid message", name)
        elif name is None:
            log.warning("connection refused: its key is not in %s", self.keys.folder / domain)
        return name is not None and key not in self._banned

    def name(self, role: Role, key: bytes) -> str | None:
        """Return the file that lists a public key; None if it is not allowed."""
        if key == self.keys.public:  # the service's own workers, and the process that started it
            return "server.key"
        for path in (self.keys.folder / role).glob("*.key"):
            try:
                if key == _load(path)[0]:
                    return f"{role}/{path.name}"
            except TeacherError as error:
                log.warning("%s", error)
        return None

    def ban(self, key: bytes) -> None:
        """Refuse a key until the service is restarted."""
        if key != self.keys.public:
            self._banned.add(key)


def make_keys(folder: Path, *, client: str | None = None, worker: str | None = None) -> list[Path]:
    """Create missing server keys and the keys of one more client or worker; return the new folders.

    Without a name, create keys of a client named client and a worker named worker. Raises TeacherError: a folder
    exists already or cannot be written.
    """
    if client is None and worker is None:
        client, worker = "client", "worker"
    roles: list[tuple[str | None, Role]] = [(client, "clients"), (worker, "workers")]
    wanted = [(name, role) for name, role in roles if name is not None]
    server = folder / "server"
    for name, role in wanted:
        if name in ("", "server") or name.startswith(".") or "/" in name:
            raise TeacherError(f"--{role[:-1]} {name!r}: expected a plain name other than server")
        if (folder / name).exists():
            options = "--client NAME or --worker NAME creates keys for one more"
            raise TeacherError(f"{folder / name} exists and is not overwritten; {options}")
    made = [] if server.exists() else [server]
    made += [folder / name for name, _ in wanted]
    try:
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700)
            (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        for each in made:
            each.mkdir(mode=0o700)
            (each / ".gitignore").write_text("*\n", encoding="utf-8")  # for copies of this folder alone
            for path in zmq.auth.create_certificates(each, each.name):
                Path(path).chmod(0o600)
        for name, role in wanted:
            (server / role).mkdir(mode=0o700, exist_ok=True)
            shutil.copy(server / "server.key", folder / name)
            shutil.copy(folder / name / f"{name}.key", server / role)
    except OSError as error:
        raise TeacherError(f"{folder}: cannot write keys: {error}") from error
    return made


def load_keys(folder: str | Path) -> Keys:
    """Load the keys of one side. Raises TeacherError naming the file: missing, readable by others, or not a key."""
    folder = Path(folder)
    secrets = sorted(folder.glob("*.key_secret"))
    if len(secrets) != 1:
        found = ", ".join(path.name for path in secrets) or "none"
        raise TeacherError(
            f"{folder}: a folder of keys must have one .key_secret file, found {found}; create keys with "
            "python -m hybrid_gkd.teacher keys"
        )
    if stat.S_IMODE(secrets[0].stat().st_mode) & 0o077:
        raise TeacherError(f"{secrets[0]}: others can read this secret key; chmod 600 it, or better create a new one")
    public, secret = _load(secrets[0])
    if secret is None:
        raise TeacherError(f"{secrets[0]}: no secret key in this file")
    return Keys(folder=folder, public=public, secret=secret, server_public=_load(folder / "server.key")[0])


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        keys = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise TeacherError(f"{path}: not a key file: {error}") from error
    for key in keys:
        if key is not None and len(key) != 40:
            raise TeacherError(f"{path}: a key must have 40 characters, found {len(key)}")
    return keys

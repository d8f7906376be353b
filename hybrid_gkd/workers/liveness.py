"""Detect within seconds that Ray's own processes have ended; Ray ends the driver after a minute, without an error.

The workers outlive the control store: a call to them still works, so that the student can be saved. They end with the
raylet of their machine.
"""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import ray

from hybrid_gkd.errors import WorkerError

logger = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
"""Seconds between two checks, and timeout of each connection."""
OWN_PATIENCE, GIVEN_PATIENCE = 2.0, 40.0
"""Seconds without an answer after which a process counts as ended: of the run's own cluster, and of a given one, whose
control store may be restarted. Ray's own limit is 60 s."""
CONTROL_STORE, RAYLET = "control store (gcs_server)", "raylet"
LOG_LINES = 10


class RayLost(WorkerError):
    """A process of Ray has ended, without which the run cannot continue."""


class Liveness:
    """Checks whether Ray's processes accept connections.

    Args:
        addresses: host and port by name of the process.
        patience: seconds without an answer after which a process counts as ended.
        folder: of Ray's session, if the run has started it.
    """

    def __init__(self, addresses: dict[str, tuple[str, int]], patience: float, folder: Path | None = None):
        self._addresses, self._patience, self._folder = addresses, patience, folder
        self._silent_since: dict[str, float] = {}
        self._next_check = 0.0
        self.lost: str | None = None
        """Name of the first process that has ended."""

    def check(self, *, raylet_only: bool = False, at_once: bool = False) -> None:
        """Check the processes, at most once a second. Raises RayLost the first time that one has ended.

        Later calls do nothing, so that the waits of the shutdown end by their own deadlines. `raylet_only`: leave
        the end of the control store to a later call. `at_once`: check now, and count a refused connection as the end.
        """
        now = time.monotonic()
        if self.lost is not None or (now < self._next_check and not at_once):
            return
        self._next_check = now + EVERY_SECONDS
        for name, (host, port) in self._addresses.items():
            try:
                socket.create_connection((host, port), timeout=EVERY_SECONDS).close()
                self._silent_since.pop(name, None)
            except OSError as error:
                # Errors other than a refusal come from the network, or from a process that is only slow.
                refused_patience = 0.0 if at_once else self._patience
                patience = refused_patience if isinstance(error, ConnectionRefusedError) else GIVEN_PATIENCE
                over = now - self._silent_since.setdefault(name, now) >= patience
                if over and (name == RAYLET or not raylet_only):
                    self.lost = name
                    self._log_last_lines(name)
                    raise RayLost(f"Ray's {name} at {host}:{port} has ended: {error}") from error

    def _log_last_lines(self, name: str) -> None:
        """Log the last lines of the process's own log files, which are removed at the end of the run."""
        stem = "raylet" if name == RAYLET else "gcs_server"
        for file in sorted(self._folder.glob(f"r/session_2*/logs/{stem}.*")) if self._folder else ():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            logger.debug("the last lines of %s:\n%s", file.name, "\n".join(lines))


_watched: list[Liveness] = []
"""The cluster that this process is connected to."""


def watch_ray(folder: Path | None) -> None:
    """Let `check_ray` check the cluster of this process. `folder`: of its session, if the run has started it."""
    context = ray.get_runtime_context()
    (here,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    host, _, port = context.gcs_address.rpartition(":")
    addresses = {
        CONTROL_STORE: (host.strip("[]"), int(port)), RAYLET: (here["NodeManagerAddress"], here["NodeManagerPort"]),
    }
    _watched.append(Liveness(addresses, OWN_PATIENCE if folder else GIVEN_PATIENCE, folder))


def forget_ray() -> None:
    _watched.clear()


def check_ray(*, raylet_only: bool = False, at_once: bool = False) -> None:
    """Raise RayLost the first time that a process of Ray has ended; see `Liveness.check`."""
    for each in _watched:
        each.check(raylet_only=raylet_only, at_once=at_once)


def raylet_lost(reason: str) -> RayLost:
    """Record that Ray counts the raylet of this machine as ended, also if it still accepts connections."""
    for each in _watched:
        each.lost = each.lost or RAYLET
    return RayLost(f"Ray's {RAYLET} on this machine has ended: {reason}")


def lost_process() -> str | None:
    """Return the name of the process of Ray that has ended."""
    return next((each.lost for each in _watched if each.lost), None)

"""Store of teacher scores on disk, for given completions, which are the same in every epoch and every run.

A store is a folder with an SQLite file. The key of an entry covers the teacher's weights, K, temperature, and the
reading's tokens and scored positions. The value is the reply of the service as received, with a checksum per array,
and is validated like a reply when it is read. SQLite's write-ahead log limits the loss at a kill to the last entries.
Several processes of one machine may share a store. It must be on a local disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.runtime.waiting import waiting
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.protocol import ModelInfo
from hybrid_gkd.types import Reading, TopK

log = logging.getLogger(__name__)
T = TypeVar("T")

FILE = "scores.sqlite3"
BUSY_SECONDS = 30.0
"""Timeout of waiting for another process that writes."""
NO_SCORES = "has no scores; create them: python -m hybrid_gkd.teacher score"
NOT_WRITABLE = "; its folder must be writable, also to read it"
DAMAGED = "; the file is damaged: delete it, and its completions are scored again"
REMEDIES = {
    sqlite3.SQLITE_CANTOPEN: NOT_WRITABLE, sqlite3.SQLITE_READONLY: NOT_WRITABLE,
    sqlite3.SQLITE_CORRUPT: DAMAGED, sqlite3.SQLITE_NOTADB: DAMAGED,
}  # fmt: skip
"""Texts after errors of SQLite, by their primary code."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS teachers (
    weights TEXT, topk INTEGER, temperature REAL, num_ids INTEGER, model TEXT,
    UNIQUE (weights, topk, temperature, num_ids)
);
CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, scores BLOB);
"""


@dataclass(frozen=True, kw_only=True)
class ScoredBy:
    """Teacher and settings on which the stored scores of a reading depend."""

    model: ModelInfo
    """Description of the teacher; its `weights` identify it."""
    topk: int
    temperature: float
    num_ids: int
    """Number of scored token ids, from 0."""

    def __post_init__(self) -> None:
        """Check that the weights can be identified. Raises TeacherError."""
        if not self.model.weights:
            raise TeacherError(
                f"the teacher {self.model.model} reports no fingerprint of its weights, so its scores cannot be "
                "stored; update the teacher service"
            )

    def __str__(self) -> str:
        settings = f"K {self.topk}, temperature {self.temperature!r}, {self.num_ids} token ids"
        return f"{self.model.model} (weights {self.model.weights[:12]}, {settings})"

    def key(self, reading: Reading) -> bytes:
        """Return the key of a reading's entry."""
        settings = f"{self.model.weights} {self.topk} {self.temperature!r} {self.num_ids} "
        key = hashlib.blake2b(settings.encode(), digest_size=20)
        for array, dtype in ((reading.token_ids, "<i4"), (reading.positions, "<i8")):
            key.update(f"{len(array)} ".encode() + np.ascontiguousarray(array, dtype).tobytes())
        return key.digest()


class ScoreStore:
    """Store of scores in a folder. Thread-safe; must be closed.

    Args:
        folder: folder of the store.
        max_bytes: file size above which nothing is added.
        create: create the store if it is missing.

    Raises TeacherError: it cannot be opened, or is missing.
    """

    def __init__(self, folder: str | Path, max_bytes: float = float("inf"), *, create: bool = True):
        self.folder, self.max_bytes = Path(folder).expanduser(), max_bytes
        self._lock = threading.Lock()
        self._recorded = set[tuple[Any, ...]]()
        """Teachers that are in the table."""
        if not create and not (self.folder / FILE).exists():
            raise TeacherError(f"{self.folder} {NO_SCORES}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                self.folder / FILE, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            with self._errors("cannot be opened"):
                self._database.execute("PRAGMA journal_mode=WAL")
                self._database.execute("PRAGMA synchronous=NORMAL")
                self._database.executescript(SCHEMA)
            self._inode = os.stat(self.folder / FILE).st_ino
        except (OSError, sqlite3.Error) as error:
            raise TeacherError(f"{self.folder}: cannot be opened as a store of scores: {error}") from error

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Convert SQLite's errors to TeacherError: a full disk, a damaged file, a lock held by another process."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0)  # errors of Python's module have none
            remedy = REMEDIES.get(code & 0xFF, "")  # the other bits are details
            raise TeacherError(f"{self.folder / FILE} {what}: {error}{remedy}") from error

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @property
    def num_bytes(self) -> int:
        """Size of the file, bytes."""
        with self._lock, self._errors("cannot be read"):
            query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
            return int(self._database.execute(query).fetchone()[0])

    def __len__(self) -> int:
        with self._lock, self._errors("cannot be read"):
            return int(self._database.execute("SELECT COUNT(*) FROM entries").fetchone()[0])

    def teachers(self) -> list[ScoredBy]:
        """Return the teachers with scores in the store, oldest first. Raises TeacherError."""
        with self._lock, self._errors("cannot be read"):
            columns = "SELECT model, topk, temperature, num_ids FROM teachers ORDER BY rowid"
            rows = self._database.execute(columns).fetchall()
        try:
            return [
                ScoredBy(model=msgspec.json.decode(model, type=ModelInfo), topk=k, temperature=temperature, num_ids=ids)
                for model, k, temperature, ids in rows
            ]
        except msgspec.DecodeError as error:
            raise TeacherError(f"{self.folder / FILE}: cannot decode the description of a teacher: {error}") from error

    def missing(self, scored_by: ScoredBy, readings: Mapping[T, Reading]) -> dict[T, Reading]:
        """Return the readings without scores; damaged entries count as missing, and their number is logged."""
        found, damaged, num_read = dict[T, Reading](), list[str](), 0
        with waiting("the stored scores", detail=lambda: f"{num_read} of {len(readings)} are read"):
            for name, reading in readings.items():
                try:
                    scores = self.get(scored_by, reading)
                except TeacherError as error:
                    damaged.append(f"{reading.name}: {error}")
                    scores = None
                if scores is None:
                    found[name] = reading
                num_read += 1
        if damaged:
            log.warning("%s: %d stored scores are damaged, the first of %s", self.folder, len(damaged), damaged[0])
        return found

    def get(self, scored_by: ScoredBy, reading: Reading) -> TopK | None:
        """Return the scores of a reading; None without an entry. Raises TeacherError: the entry is damaged."""
        query = "SELECT scores FROM entries WHERE key = ?"
        with self._lock, self._errors("cannot be read"):
            row = self._database.execute(query, (scored_by.key(reading),)).fetchone()
        if row is None:
            return None
        try:
            header, *frames = msgspec.msgpack.decode(row[0], type=list[bytes])
            result = protocol.decode_header(header)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise TeacherError(f"the entry cannot be decoded: {error}") from error
        if not isinstance(result, protocol.ScoreResult):
            raise TeacherError("the entry is not a score result")
        (scores,) = protocol.unpack_result(
            result, frames, topk=scored_by.topk, vocab_size=scored_by.num_ids, num_scored=[len(reading.positions)]
        )
        return scores

    def put(self, scored_by: ScoredBy, reading: Reading, scores: TopK) -> bool:
        """Store scores, replacing older ones; return False if the store is full. Raises TeacherError.

        The first scores of a teacher record it, so that a teacher without scores is not one of the store.
        """
        if not self._is_there():
            raise TeacherError(f"{self.folder / FILE} was deleted or replaced while it was in use")
        if self.num_bytes >= self.max_bytes:
            return False
        result = protocol.ScoreResult(id="stored", attempt=0, server=f"the store {self.folder}")
        frames = map(bytes, protocol.encode_message(result, protocol.result_arrays([scores])))
        blob = msgspec.msgpack.encode(list(frames))
        model = scored_by.model
        teacher = (model.weights, scored_by.topk, scored_by.temperature, scored_by.num_ids)
        with self._lock, self._errors("cannot be written"):
            if teacher not in self._recorded:
                described = msgspec.json.encode(model).decode()
                self._database.execute("INSERT OR IGNORE INTO teachers VALUES (?, ?, ?, ?, ?)", (*teacher, described))
                self._recorded.add(teacher)
            self._database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", (scored_by.key(reading), blob))
        return True

    def _is_there(self) -> bool:
        """Return whether the open file is still that of the folder; SQLite would go on in a deleted one."""
        try:
            return os.stat(self.folder / FILE).st_ino == self._inode
        except FileNotFoundError:
            return False

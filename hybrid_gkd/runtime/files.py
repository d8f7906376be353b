"""File names, checksums, JSON Lines files and reserved disk space."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 4 * 2**20
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def free_path(stem: Path, suffix: str = "") -> Path:
    """Return `<stem>.N<suffix>` with the smallest N >= 1 for which nothing exists."""
    return next(p for n in itertools.count(1) if not (p := Path(f"{stem}.{n}{suffix}")).exists())


def share_as_folder(folder: Path) -> None:
    """Give everything below `folder` its read and write bits, since safetensors creates private files.

    Raises OSError.
    """
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(mode if path.is_dir() else mode & 0o666)


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file has only the address of its content, as Git leaves it without Git LFS.

    False for one that cannot be read, which is reported where it is needed.
    """
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and CRC-32 of a file, to detect accidental damage.

    CRC-32 is the fastest checksum in Python's library: 2.1 GB/s on a core, against 0.9 GB/s for SHA-256 and BLAKE2b.
    """

    size: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """Read a file and compute its checksum. Raises OSError."""
        size = crc32 = 0
        with path.open("rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                size, crc32 = size + len(block), zlib.crc32(block, crc32)
        return cls(size, crc32)


class JsonLinesFile:
    """An append-only file whose rows reach the operating system at once; a partial row is never left behind.

    Rows that cannot be written because the disk is full are kept and written with the next ones.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def append(self, rows: Iterable[Any]) -> None:
        """Write rows. Raises OSError, and ValueError for a number that JSON cannot represent."""
        self._unwritten += encode_rows(rows)
        data, start = memoryview(self._unwritten), self.size()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file.truncate(start)
            raise
        self._unwritten = b""

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


class ReservedSpace:
    """Disk space reserved for later writes by a placeholder file, and inodes by a folder of empty files beside it."""

    def __init__(self, path: Path, num_bytes: int, num_files: int = 0):
        self._path, self._num_bytes, self._num_files = path, num_bytes, num_files
        self._files = path.with_name(f"{path.name}.files")

    def take(self) -> None:
        """Reserve both; space only where the file system can. Raises OSError if the disk is too full."""
        self.release()
        try:
            if self._num_files:
                self._files.mkdir()
            for number in range(self._num_files):
                (self._files / str(number)).touch()
            self._take_bytes()
        except OSError:
            self.release()
            raise

    def _take_bytes(self) -> None:
        # Not os.posix_fallocate, which writes all blocks where the file system does not know how to reserve them.
        fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if not self._num_bytes or fallocate is None:
            return
        with self._path.open("wb") as file:
            if fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(self._num_bytes)) == 0:
                return
            code = ctypes.get_errno()
        self._path.unlink()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(code, os.strerror(code), str(self._path))

    def release(self) -> None:
        """Free the space; may be called repeatedly."""
        self._path.unlink(missing_ok=True)
        if self._files.exists():
            shutil.rmtree(self._files)


def encode_rows(rows: Iterable[Any]) -> bytes:
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    # A lone surrogate, which a tokenizer may decode to, has no UTF-8 form.
    return "".join(lines).encode("utf-8", errors="replace")


def cut_unfinished_line(path: Path) -> bool:
    """Truncate a file after its last newline, since a killed process may leave a partial line.

    Returns whether anything was removed. Raises OSError.
    """
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - READ_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        file.truncate(end)
    return end < size


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the rows of a file, without a line that a crash cut short."""
    with path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def is_in_memory(folder: Path) -> bool:
    """Return whether files in a folder, which may not exist yet, take host memory, as in /dev/shm."""
    device = os.stat(next(filter(os.path.exists, (folder, *folder.absolute().parents)))).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    rows = (line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())
    return any(row[2] == number and row[row.index("-") + 1] in ("tmpfs", "ramfs") for row in rows)

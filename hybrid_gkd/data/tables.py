"""Read tables from the entries of data.train_files: files, patterns, folders, hub data sets.

Text files are read as streams with the standard library, which keeps values as written. Messages name the configuration
key, the entry, the row (1-based) and the value.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import glob
import io
import itertools
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from hybrid_gkd.errors import DataError, call_all
from hybrid_gkd.runtime.files import is_lfs_pointer
from hybrid_gkd.runtime.hub import check_hub

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Suffix after that of a text file -> pyarrow's name of the codec."""
OTHER_SUFFIXES = {".zip", ".bz2", ".xz", ".tsv", ".txt", ".arrow"}
"""Suffixes of unsupported files, whose names are not hub data sets."""
HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[^:]*))?(:(?P<split>[^:]+))?")
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` of the datasets library writes for a data set, and for a dictionary of splits."""
UNPACKED_BYTES = 4e9
"""Default of `data.max_unpacked_gigabytes`, in bytes."""
READ_BYTES = 2**20
Table = tuple[list[str], list[dict[str, Any]]]
"""Names of all columns, and rows with the requested columns."""


class EveryColumn:
    """Container of all names, to request all columns."""

    def __contains__(self, name: object) -> bool:
        return True


@dataclass(frozen=True)
class Source:
    """A table that can be read."""

    name: str
    read: Callable[[str, Container[str]], Table]
    """Function of the beginning of messages, and the names of the requested columns."""
    of_arrow: bool = True
    """True for tables of Arrow, whose nested objects have null for the fields of other rows; false for text files."""


def find_sources(entries: list[str], key: str, unpacked_bytes: float = UNPACKED_BYTES) -> list[Source]:
    """Return the tables of the entries of a configuration key; patterns in the order of matching names.

    Reads no rows and downloads nothing. Raises DataError for each entry that does not exist or is a Git LFS pointer.
    `unpacked_bytes`: limit of the size of a compressed file's text.
    """
    return list(itertools.chain(*call_all(functools.partial(_find, entry, key, unpacked_bytes) for entry in entries)))


def _find(entry: str, key: str, unpacked_bytes: float) -> list[Source]:
    path, name = Path(entry).expanduser(), entry.lower()
    folder, colon, split = entry.rpartition(":")
    if path.is_file():
        if is_lfs_pointer(path):
            raise DataError(f"{key}: must be the file itself, not its Git LFS pointer (git lfs pull); got {entry!r}")
        return [Source(entry, _file_reader(path, entry, key, unpacked_bytes), path.suffix.lower() == ".parquet")]
    if path.is_dir():
        return [Source(entry, _folder_reader(path, None))]
    if colon and Path(folder).expanduser().is_dir():
        return [Source(entry, _folder_reader(Path(folder).expanduser(), split))]
    if glob.has_magic(entry) and ":" not in entry:
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise DataError(f"{key}: the pattern matches no file: {entry!r}")
        return [source for match in matches for source in _find(match, key, unpacked_bytes)]
    if entry.startswith(("/", ".", "~")) or name.endswith((*SUFFIXES, *COMPRESSED, *OTHER_SUFFIXES)):
        raise DataError(f"{key}: file not found: {entry!r}")
    hub = HUB_NAME.fullmatch(entry)
    if hub is None:
        rule = "file not found, and not the name of a hub data set, org/name[:config][:split]"
        raise DataError(f"{key}: {rule}: {entry!r}")
    return [Source(entry, _library_reader(hub["name"], hub["config"] or None, hub["split"] or "train"))]


def short_names(names: list[str]) -> list[str]:
    """Return table names without suffixes, and with as many path components as needed to be distinct."""
    suffixes = tuple(COMPRESSED) + SUFFIXES
    paths = []
    for name in names:
        while name.endswith(suffixes):
            name = name[: name.rindex(".")]
        paths.append([part for part in name.split("/") if part] or [name])
    shown = [1] * len(paths)
    while True:
        short = ["/".join(path[-count:]) for path, count in zip(paths, shown, strict=True)]
        longer = [
            count + 1 if short.count(name) > 1 and count < len(path) else count
            for name, path, count in zip(short, paths, shown, strict=True)
        ]
        if longer == shown:
            return short
        shown = longer


def _file_reader(path: Path, entry: str, key: str, unpacked_bytes: float) -> Callable[[str, Container[str]], Table]:
    codec = COMPRESSED.get(path.suffix.lower())
    suffix = Path(path.stem if codec else path.name).suffix.lower()
    if suffix not in SUFFIXES or (codec and suffix == ".parquet"):
        endings = f"{', '.join(SUFFIXES)}, or {' or '.join(COMPRESSED)} after that of a text file"
        raise DataError(f"{key}: must end in one of {endings}; got {entry!r}")
    if suffix == ".parquet":
        return functools.partial(_read_parquet, path)
    parse, newline = (_read_csv, "") if suffix == ".csv" else (_read_json, None)

    def read(where: str, wanted: Container[str]) -> Table:
        with _open_text(path, codec, where, unpacked_bytes, newline) as file:
            return parse(file, where, wanted)

    return read


def _folder_reader(folder: Path, split: str | None) -> Callable[[str, Container[str]], Table]:
    """Return a reader of a folder of `save_to_disk`, or of files in a layout that the datasets library detects."""
    if (folder / SAVED).is_file() or (folder / SAVED_SPLITS).is_file():
        return lambda where, wanted: _read_saved(folder, split, where, wanted)
    return _library_reader(str(folder), None, split or "train")


def read_table(source: Source, where: str, wanted: Container[str]) -> Table:
    """Read a table. Raises DataError if it cannot be read, for any reason."""
    try:
        return source.read(where, wanted)
    except DataError:
        raise
    # Errors of pyarrow, fsspec and the hub: all mean that the data is unreadable.
    except Exception as error:
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise DataError(f"{where}: cannot be read: {reason}") from error


def _check_distinct(names: list[str], wanted: Container[str], where: str) -> None:
    """Raise DataError if two of the wanted columns have one name."""
    if twice := [name for name, number in Counter(names).items() if number > 1 and name in wanted]:
        raise DataError(f"{where}: must not have two columns of one name; got {twice[0]!r}")


def _read_parquet(path: Path, where: str, wanted: Container[str]) -> Table:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as parquet:
        names = parquet.schema_arrow.names
        _check_distinct(names, wanted, where)
        return names, parquet.read(columns=[name for name in names if name in wanted]).to_pylist()


class _Unpacked(io.RawIOBase):
    """The text of a compressed file as a stream of bytes. Raises DataError beyond `limit` bytes."""

    def __init__(self, packed: Any, where: str, limit: float):
        self._packed, self._where, self._limit, self._size = packed, where, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._packed.read(len(buffer))
        buffer[: len(block)] = block
        self._size += len(block)
        if self._size > self._limit:
            rule = f"its text must have at most {self._limit / 1e9:g} GB (data.max_unpacked_gigabytes)"
            raise DataError(f"{self._where}: {rule}; it has more")
        return len(block)


@contextlib.contextmanager
def _open_bytes(path: Path, codec: str | None, where: str, limit: float) -> Iterator[BinaryIO]:
    if codec is None:
        with path.open("rb") as file:
            yield file
        return
    import pyarrow

    with pyarrow.OSFile(str(path)) as packed, pyarrow.CompressedInputStream(packed, codec) as stream:
        yield io.BufferedReader(_Unpacked(stream, where, limit), READ_BYTES)


@contextlib.contextmanager
def _open_text(path: Path, codec: str | None, where: str, limit: float, newline: str | None) -> Iterator[TextIO]:
    """Open a text file, without a byte order mark. Raises DataError with the place of what is not UTF-8."""
    try:
        with _open_bytes(path, codec, where, limit) as file:
            with io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
                yield text
    except UnicodeDecodeError as error:
        with _open_bytes(path, codec, where, limit) as file:
            raise _not_utf8(file, where) from error


def _not_utf8(file: BinaryIO, where: str) -> DataError:
    """Read a file again, and return the error with line and byte of the first sequence that is not UTF-8."""
    start = 0
    for number, line in enumerate(file, 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            rule = f"must be UTF-8 text; got 0x{line[error.start]:02x} at byte {start + error.start}"
            return DataError(f"{where}, line {number}: {rule}")
        start += len(line)
    raise AssertionError("the file has changed")


def _read_json(file: TextIO, where: str, wanted: Container[str]) -> Table:
    """Parse rows from one object per line, from one list of objects, or from one object on several lines.

    The first of these is read line by line.
    """
    rest = filter(str.strip, file)
    first = next(rest, "")
    if not first:
        raise DataError(f"{where}: the file is empty")
    lines: Iterator[str] = itertools.chain([first], rest)
    values: Iterable[Any] | None = None
    if not isinstance(_json_object(first.strip(), f"{where}, row 1"), dict):
        text = first + file.read()
        lines = filter(str.strip, io.StringIO(text))
        try:
            whole = json.loads(text)
            values = whole if isinstance(whole, list) else [_json_object(text.strip(), f"{where}, row 1")]
        except json.JSONDecodeError as error:
            if text.lstrip().startswith("[") and error.msg != "Extra data":
                raise
    if values is None:
        values = (_json_object(line.strip(), f"{where}, row {row}") for row, line in enumerate(lines, 1))
    names: dict[str, None] = {}
    rows = []
    for row, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise DataError(f"{where}: cannot be read: row {row} is not a JSON object; got {short(value)}")
        names |= dict.fromkeys(value)
        rows.append({name: value[name] for name in value if name in wanted})
        try:
            json.dumps(rows[-1], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            bad = error.object[max(0, error.start - 20) : error.end]
            raise DataError(f"{where}, row {row}: must not have half of a surrogate pair; got {short(bad)}") from error
    return list(names), rows


def _json_object(line: str, where: str) -> Any:
    """Return the JSON object of `line`, or `line` itself if it is not an object."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise DataError(f"{where}: must not have two fields of one name; got {short(line)}")
        return fields

    try:
        value = json.loads(line, object_pairs_hook=distinct)
    except json.JSONDecodeError:
        return line
    return value if isinstance(value, dict) else line


def _read_csv(file: TextIO, where: str, wanted: Container[str]) -> Table:
    csv.field_size_limit(sys.maxsize)  # a long prompt may exceed the default, 128 KiB
    # Strict: else an unclosed quote would make the rest of the file one field.
    reader = csv.reader(file, strict=True)
    lines = (fields for fields in reader if fields and not (len(fields) == 1 and fields[0].isspace()))
    header: list[str] = []
    rows: list[dict[str, Any]] = []
    try:
        header = next(lines, [])
        if not header:
            raise DataError(f"{where}: the file is empty")
        _check_distinct(header, wanted, where)
        columns = [(name, header.index(name)) for name in header if name in wanted]
        for fields in lines:
            if len(fields) != len(header):
                rule = f"must have {len(header)} fields, as the header has; got {len(fields)}: {short(fields)}"
                raise DataError(f"{where}, row {len(rows) + 1}: {rule}")
            rows.append({name: fields[column] for name, column in columns})
    except csv.Error as error:
        place = f"row {len(rows) + 1}" if header else "the header"
        raise DataError(f"{where}: cannot be read: {place}: {error}") from error
    return header, rows


def _library_reader(name: str, config: str | None, split: str) -> Callable[[str, Container[str]], Table]:
    """Return a reader of a hub data set, or of a folder, by the datasets library."""

    def read(where: str, wanted: Container[str]) -> Table:
        if not os.path.isdir(name):
            check_hub()
        import datasets

        try:
            return _read_dataset(lambda: datasets.load_dataset(name, config, split=split), wanted)
        except datasets.exceptions.DatasetGenerationError:  # it does not name the file
            for file in sorted(filter(Path.is_file, Path(name).rglob("*"))):
                if file.name.endswith((*SUFFIXES, *(end + codec for end in SUFFIXES for codec in COMPRESSED))):
                    (source,) = find_sources([str(file)], where)
                    read_table(source, f"{where}: {file.relative_to(name)}", wanted)
            raise

    return read


def _read_saved(folder: Path, split: str | None, where: str, wanted: Container[str]) -> Table:
    """Read a folder of `save_to_disk`: of several splits the requested one, `train`, or the only one."""
    import datasets

    splits = (
        json.loads((folder / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]
        if (folder / SAVED_SPLITS).is_file()
        else []
    )
    if splits:
        split = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
        if split is None or split not in splits:
            raise DataError(f"{where}: its splits are {', '.join(splits)}; append one of them after a colon")
        folder = folder / split
    elif split is not None:
        raise DataError(f"{where}: the folder has one data set without splits, not {split!r}")
    return _read_dataset(lambda: datasets.load_from_disk(str(folder)), wanted)


def _read_dataset(load: Callable[[], Any], wanted: Container[str]) -> Table:
    """Load a data set without progress bars, and without log lines about errors, which are raised."""
    import datasets

    verbosity, had_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        dataset = load()
        names = dataset.column_names
        return names, list(dataset.select_columns([name for name in names if name in wanted]))
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


def of_json(value: object) -> Any:
    """Return the value of a JSON text, None for an empty text, and whatever is not JSON as it is."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        return json.loads(value)
    return value if value.strip() else None


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

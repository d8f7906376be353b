"""Folders of demo models and data: paths, and atomic builds. Does not import torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.runtime.files import share_as_folder
from hybrid_gkd.runtime.processes import temporary_folder

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPaths:
    """Paths of a built demo."""

    root: Path
    teacher: Path
    student: Path
    train: Path
    val: Path
    manifest: Path

    @staticmethod
    def under(root: Path) -> DemoPaths:
        return DemoPaths(
            root=root, teacher=root / "teacher", student=root / "student", train=root / "train.jsonl",
            val=root / "val.jsonl", manifest=root / "demo.json",
        )  # fmt: skip


def recipe_key(recipe: Any, seed: int) -> str:
    """Return a short hash of a recipe (a dataclass) and the seed."""
    return hashlib.sha256(json.dumps([asdict(recipe), seed], sort_keys=True).encode()).hexdigest()[:10]


def cached_folder(name: str) -> Path:
    """Return a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "hybrid_gkd" / name


def build_once(root: Path, key: str, fill: Callable[[DemoPaths], None], *, force: bool = False) -> DemoPaths:
    """Let `fill` build a demo whose manifest has `key`, or return the existing one; `force` rebuilds it.

    It is built in a temporary folder and renamed, so that an interrupted build is never used. Of two concurrent builds
    one is kept. Raises ConfigError for a folder with other contents, which is never overwritten.
    """
    if is_complete(root, key) and not force:
        return DemoPaths.under(root)
    _check_replaceable(root, key, force)
    root.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{root.name}.", root.parent) as building:
        building.chmod(0o755)  # other users may share the cache
        fill(DemoPaths.under(building))
        share_as_folder(building)
        move_into_place(building, root, key, force)
    return DemoPaths.under(root)


def write_rows(file: Path, rows: list[Row]) -> None:
    """Write rows as JSON, one object per line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def manifest_key(root: Path) -> str | None:
    """Return the key of a built demo's recipe and seed; None without one."""
    try:
        return json.loads(DemoPaths.under(root).manifest.read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, KeyError, TypeError):  # absent, or a foreign file
        return None


def is_complete(root: Path, key: str) -> bool:
    """Return whether the demo of this recipe and seed exists."""
    return manifest_key(root) == key and all(path.exists() for path in asdict(DemoPaths.under(root)).values())


def _check_replaceable(root: Path, key: str, force: bool) -> None:
    """Raise ConfigError unless the folder is absent, empty, a broken copy of the demo, or (with force) another demo."""
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return
    found = manifest_key(root)
    if found is None:
        raise ConfigError("--out", "must be an absent or empty folder, or a demo", str(root))
    if found != key and not force:
        raise ConfigError("--out", "has a demo of another seed or recipe; --force replaces it", str(root))


def move_into_place(building: Path, root: Path, key: str, force: bool) -> None:
    """Rename onto `root`; if another build was faster, keep that one."""
    with temporary_folder(f".{root.name}.old.", root.parent) as replaced:
        try:
            if force or not is_complete(root, key):
                with contextlib.suppress(FileNotFoundError):
                    root.rename(replaced)  # onto an empty folder
            building.rename(root)
        except OSError:
            if not is_complete(root, key):
                raise


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars in the block."""
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()

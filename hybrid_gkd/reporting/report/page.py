"""The page: one file without any network, from a template, the plotting library and the data of the runs.

What comes from data or models is JSON in it, which the page's script shows as text; a policy in its head allows no
other script, no other source and no connection.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from hybrid_gkd.reporting.metrics import METRICS
from hybrid_gkd.reporting.report.run_folder import POINTS, RunFolder

REPORT = "report.html"
SCRIPTS = ("plots.js", "answers.js", "page.js")


def page_data(runs: Sequence[RunFolder], *, live: bool = False) -> bytes:
    """JSON of the runs, read anew, that can stand within HTML; `live`: the page is to ask for newer JSON."""
    for run in runs:
        run.refresh()
    found = [run.data() for run in runs]
    for data, label in zip(found, labels([run.path for run in runs]), strict=True):
        data["label"] = label
    keys = dict.fromkeys(key for data in found for key in data["config"])
    values = {key: [data["config"].get(key) for data in found] for key in keys}
    named = {name for data in found for name in data["metrics"]}
    page = {
        "runs": found, "names": {name: METRICS[name] for name in METRICS if name in named}, "live": live,
        "differing": {key: each for key, each in values.items() if any(value != each[0] for value in each)},
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    text = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # The only character by which text could end the element that it stands in.
    return text.replace("<", "\\u003c").encode("utf-8", errors="replace")


def labels(folders: Sequence[Path]) -> list[str]:
    """Short names that tell the folders apart: of their last parts as many as that takes, those that differ."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        ends = [folder.parts[-depth:] for folder in folders]
        if len(set(ends)) == len(ends):
            break
    columns = [column for column in zip(*ends, strict=False) if len(folders) == 1 or len(set(column)) > 1]
    return ["/".join(parts) for parts in zip(*columns, strict=True)]


def html(data: bytes, *, live: bool = False) -> bytes:
    """The page around `data`; `live`: it may ask the server that it came from for more."""
    before, after = _around(live)
    return before + data + after


@functools.cache
def _around(live: bool) -> tuple[bytes, bytes]:
    """The page before and behind its data."""
    folder = files(__package__)
    library, style = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("vega.min.js", "page.css"))
    script = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (library, script))
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    connect = "; connect-src 'self'" if live else ""
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:{connect}"
    parts = {"policy": policy, "style": style, "library": library, "script": script}
    before, after = folder.joinpath("page.html").read_text(encoding="utf-8").split("@data@")
    for name, text in parts.items():
        before, after = (part.replace(f"@{name}@", text) for part in (before, after))
    return before.encode(), after.encode()


def write_report(run: RunFolder) -> Path:
    """Write report.html of a run folder as it is now, in place of the one before. Raises OSError."""
    path = run.path / REPORT
    replace(path, html(page_data([run])))
    return path


def replace(path: Path, content: bytes) -> None:
    """Write a file that is never seen in parts. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Readers of run folders; of several, with fewer points each, so that the page does not grow by all of them."""
    points = max(100, 2 * POINTS // (len(folders) + 1) // 2 * 2)
    return [RunFolder(folder, points) for folder in folders]


def is_run_folder(folder: Path) -> bool:
    """Whether something of a run is there."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "config.yaml", "run.log"))

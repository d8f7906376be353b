"""The report page: one offline HTML file with the template, the plotting library and the data of the runs.

Data of runs is embedded as JSON, which the page's script displays as text. A content security policy forbids other
scripts, sources and connections.
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

from hybrid_gkd.reporting.metric_table import METRICS, entry_of
from hybrid_gkd.reporting.report.headline import headline
from hybrid_gkd.reporting.report.run_folder import POINTS, RunFolder

REPORT = "report.html"
SCRIPTS = ("plots.js", "answers.js", "page.js")


def page_data(runs: Sequence[RunFolder], *, live: bool = False) -> bytes:
    """Read the runs; return their data as JSON, escaped for HTML. `live`: whether the page polls for updates."""
    for run in runs:
        run.refresh()
    found = [run.data() for run in runs]
    for run, data, label in zip(runs, found, labels([run.path for run in runs]), strict=True):
        data |= {"label": label, "headline": headline(run, data["config"], data["state"])}
    keys = dict.fromkeys(key for data in found for key in data["config"])
    values = {key: [data["config"].get(key) for data in found] for key in keys}
    named = {name for data in found for name in data["metrics"]}
    page = {
        "runs": found, "names": {name: METRICS.get(entry_of(name)) for name in sorted(named)}, "live": live,
        "differing": {key: each for key, each in values.items() if any(value != each[0] for value in each)},
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    text = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Only this character could end the surrounding HTML element.
    return text.replace("<", "\\u003c").encode("utf-8", errors="replace")


def labels(folders: Sequence[Path]) -> list[str]:
    """Return short distinct labels of the folders: the differing ones of their last path components."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        ends = [folder.parts[-depth:] for folder in folders]
        if len(set(ends)) == len(ends):
            break
    columns = [column for column in zip(*ends, strict=False) if len(folders) == 1 or len(set(column)) > 1]
    return ["/".join(parts) for parts in zip(*columns, strict=True)]


def html(data: bytes, *, live: bool = False) -> bytes:
    """Return the page with `data`; `live`: whether it may connect to its server for updates."""
    before, after = _around(live)
    return before + data + after


@functools.cache
def _around(live: bool) -> tuple[bytes, bytes]:
    """Return the parts of the page before and after its data."""
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


def write_report(runs: Sequence[RunFolder], path: Path) -> Path:
    """Write the page of the runs, replacing an older one atomically; return its path. Raises OSError."""
    content = html(page_data(runs))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def open_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Return readers of run folders; several ones get fewer points each, to limit the size of the page."""
    points = max(100, 2 * POINTS // (len(folders) + 1) // 2 * 2)
    return [RunFolder(folder, points) for folder in folders]


def is_run_folder(folder: Path) -> bool:
    """Return whether the folder has files of a run."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "config.yaml", "run.log"))

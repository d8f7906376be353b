"""Command line `python -m hybrid_gkd.report`: the report of one or several runs, as a file or served."""

from __future__ import annotations

import argparse
import os
import select
import sys
from pathlib import Path

from hybrid_gkd.reporting.report.page import REPORT, is_run_folder, open_runs, write_report
from hybrid_gkd.reporting.report.run_folder import RunFolder

COMPARISON = "comparison.html"
"""File name of the report of several runs; differs from a run's own report, which may be in the same folder."""
EVERY_SECONDS = 30.0
"""Seconds between two reports of an active run."""
FOLLOW = "--until-end-of-input"
"""Internal option of a run's report process: update the report until standard input ends, with the run."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_gkd.report",
        description="Write an HTML report of run folders: report.html in the folder of a single run, or "
        "comparison.html in the current folder for several runs. It is one file that works offline. It contains "
        "prompts, completions and paths of the runs.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write")
    parser.add_argument(
        "--serve", type=int, metavar="PORT",
        help="serve a live page at http://127.0.0.1:PORT, on this machine only, until Ctrl-C",
    )
    parser.add_argument(FOLLOW, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.runs = list({folder.resolve(): folder for folder in options.runs}.values())
    for folder in options.runs:
        if not is_run_folder(folder):
            parser.error(f"{folder} is not a run folder: it has no metrics.jsonl, config.yaml or run.log")
    if options.serve is not None and options.output is not None:
        parser.error("--output is not used with --serve, which writes no file; use one of them")
    if options.serve is not None and not 0 <= options.serve < 65536:
        parser.error(f"--serve: must be a port from 0 (any free port) to 65535; got {options.serve}")
    try:
        if options.until_end_of_input:
            keep_report(options.runs[0])
        elif options.serve is not None:
            from hybrid_gkd.reporting.report.server import serve_report

            serve_report(options.runs, options.serve)
        else:
            print(write(options.runs, options.output))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write(folders: list[Path], output: Path | None) -> Path:
    """Write the page of the runs; return its path. Raises OSError."""
    runs = open_runs(folders)
    return write_report(runs, output or (runs[0].path / REPORT if len(runs) == 1 else Path.cwd() / COMPARISON))


def keep_report(folder: Path) -> None:
    """Write the report now, after changes every 30 s, and when standard input ends. Raises OSError."""
    os.nice(19)  # lowest priority
    run, seen = RunFolder(folder), None
    while True:
        written = [file.stat().st_mtime_ns for file in sorted(folder.glob("*.jsonl"))]
        if written != seen:
            write_report([run], run.path / REPORT)
            seen = written
        if select.select([sys.stdin], [], [], EVERY_SECONDS)[0]:
            break
    write_report([run], run.path / REPORT)

"""`python -m hybrid_gkd.report`: the report of one run, or of several on shared axes; as a file or served."""

from __future__ import annotations

import argparse
import os
import select
import sys
from pathlib import Path

from hybrid_gkd.reporting.report.page import REPORT, html, is_run_folder, open_runs, page_data, replace, write_report
from hybrid_gkd.reporting.report.run_folder import RunFolder

COMPARISON = "comparison.html"
"""Of several runs; another name than a run's own report, which the folder here may have."""
EVERY_SECONDS = 30.0
"""Between two reports of a run that goes on."""
FOLLOW = "--until-end-of-input"
"""What a run starts this program with: keep its report until standard input ends, as it does when the run has."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_gkd.report",
        description="A page with what run folders hold: of one run as report.html in its folder, of several to compare "
        "them as comparison.html here. It is one file, opens without a network, and shows the prompts, answers and "
        "paths of the runs to whom it is given.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument(
        "--serve", type=int, metavar="PORT",
        help="show the page at http://127.0.0.1:PORT, to this machine alone, with what the runs write until Ctrl-C",
    )
    parser.add_argument(FOLLOW, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for folder in options.runs:
        if not is_run_folder(folder):
            parser.error(f"{folder} is no run folder: it has no metrics.jsonl, config.yaml or run.log")
    if options.serve is not None and not 0 <= options.serve < 65536:
        parser.error(f"--serve: must be a port from 0 (any that is free) to 65535; got {options.serve}")
    try:
        if options.until_end_of_input:
            keep_report(options.runs[0])
        elif options.serve is not None:
            from hybrid_gkd.reporting.report.serving import serve

            serve(options.runs, options.serve)
        else:
            print(write(options.runs, options.output))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write(folders: list[Path], output: Path | None) -> Path:
    """Write the page of the runs; where it is. Raises OSError."""
    runs = open_runs(folders)
    path = output or (runs[0].path / REPORT if len(runs) == 1 else Path.cwd() / COMPARISON)
    replace(path, html(page_data(runs)))
    return path


def keep_report(folder: Path) -> None:
    """Write the report now, every 30 s if there is something new, and when standard input ends. Raises OSError."""
    os.nice(19)  # the run comes first
    run, seen = RunFolder(folder), None
    while True:
        written = [file.stat().st_mtime_ns for file in sorted(folder.glob("*.jsonl"))]
        if written != seen:
            write_report(run)
            seen = written
        if select.select([sys.stdin], [], [], EVERY_SECONDS)[0]:
            break
    write_report(run)

"""Command line: `python -m hybrid_gkd [--config-name NAME] [dotted.key=value ...]`.

Without a configuration name, and without a model or data of one's own, the demo runs (config/demo.yaml).
"""

from __future__ import annotations

import signal
import sys
import traceback

from hybrid_gkd.config import Config
from hybrid_gkd.config_loading import to_yaml
from hybrid_gkd.demo.use import demo_teacher_accuracy
from hybrid_gkd.errors import HybridGKDError
from hybrid_gkd.imports import quick_imports
from hybrid_gkd.launch.command_line import load, parse
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.reporting.logs import log_to_console


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    log_to_console()
    stopping = Stopping()
    stopping.install()
    try:
        config = load(options)
        if options.dry_run:
            return dry_run(config)
        train(config, stopping)
    except HybridGKDError as error:
        if options.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # of a disk or folder that nobody has thought of; run.log has the traceback
        if options.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as ended:  # Ray makes a SystemExit(1) of one that is raised while it waits
        if stopping.exit_code is None:
            print(f"error: Ray ended the run: {getattr(ended, 'ray_terminate_msg', ended)}", file=sys.stderr)
            return 1
    if stopping.exit_code is not None:
        name = signal.Signals(stopping.exit_code - 128).name
        print(f"ended by {name}; everything that this run had started is stopped", file=sys.stderr)
    return stopping.exit_code or 0


def dry_run(config: Config) -> int:
    """Print the resolved configuration and what every check before a run finds; the exit code, 1 if one failed."""
    from hybrid_gkd.launch.checks import Facts, Report
    from hybrid_gkd.launch.preflight import CHECKS

    print(to_yaml(config))
    report = Report()
    report.walk(CHECKS, Facts(config))
    return 1 if report.failed else 0


def train(config: Config, stopping: Stopping) -> None:
    """Train and print the final table."""
    with quick_imports():
        from hybrid_gkd.launch import run

    run.train(config, teacher_accuracy=demo_teacher_accuracy(config), stopping=stopping)


if __name__ == "__main__":
    sys.exit(main())

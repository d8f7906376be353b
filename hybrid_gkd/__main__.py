"""Command line: `python -m hybrid_gkd [--config-name NAME] [dotted.key=value ...]`.

Without a configuration name, model and data, the demo runs (config/demo.yaml).
"""

from __future__ import annotations

import argparse
import sys

from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import to_yaml
from hybrid_gkd.demo.use import demo_teacher_accuracy
from hybrid_gkd.launch.command_line import SUPERVISE, changed_from_recipe, load, parse, run_command, set_keys
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.runtime.imports import gc_paused


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.supervise and not options.dry_run:
        from hybrid_gkd.launch.supervise import supervise

        return supervise(options, [each for each in arguments if each != SUPERVISE])
    return run_command(lambda stopping: start(options, stopping), debug=options.debug)


def start(options: argparse.Namespace, stopping: Stopping) -> int:
    """Execute the parsed command line; return the exit code. Raises HybridGKDError."""
    config = load(options)
    if options.dry_run:
        return dry_run(config, options)
    run_training(config, options, stopping)
    return 0


def dry_run(config: Config, options: argparse.Namespace) -> int:
    """Print the resolved configuration and the results of all checks; return the exit code, 1 if one failed."""
    from hybrid_gkd.launch.checks import Facts, Report
    from hybrid_gkd.launch.preflight import CHECKS

    print(to_yaml(config))
    report = Report()
    report.run_all(CHECKS, Facts(config, set_keys(config, options)))
    return 1 if report.failed else 0


def run_training(config: Config, options: argparse.Namespace, stopping: Stopping) -> None:
    """Train and print the final table; on a terminal also print the next steps."""
    with gc_paused():
        from hybrid_gkd.launch import run

    recipe, changed = changed_from_recipe(config, options)
    accuracy, keys = demo_teacher_accuracy(config), set_keys(config, options)
    table = run.run(
        config, teacher_accuracy=accuracy, recipe=recipe, changed=changed, set_keys=keys, stopping=stopping
    )
    print(table, flush=True)
    run.suggest_next_steps(config)


if __name__ == "__main__":
    sys.exit(main())

"""Command line: `python -m hybrid_gkd [--config-name NAME] [dotted.key=value ...]`.

Without a configuration name, and without a model or data of one's own, the demo runs (config/demo.yaml).
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from hybrid_gkd.config import Config
from hybrid_gkd.config_loading import CONFIG_DIR, load_config, to_yaml
from hybrid_gkd.errors import HybridGKDError

terminated: list[int] = []
"""Exit code for the signal that has ended the run."""
OWN_INPUT = ("data.train_files=", "actor_rollout_ref.model.path=", "actor_rollout_ref.teacher.model.path=")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("hybrid_gkd").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, terminate)
    try:
        name = options.config_name or default_config_name(options.overrides)
        config = load_config(options.overrides, config_name=name, config_path=options.config_path)
        if options.dry_run:
            dry_run(config)
        else:
            train(config)
    except HybridGKDError as error:
        if options.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything that this run had started is stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as ended:
        if terminated:
            return terminated[0]
        if ended.code == signal.SIGTERM:  # so Ray's own handler ends a process while Ray starts
            return 128 + signal.SIGTERM
        print(f"error: Ray ended the run: {getattr(ended, 'ray_terminate_msg', ended)}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str], prog: str = "python -m hybrid_gkd") -> argparse.Namespace:
    """The command line as a namespace; exits on a usage error."""
    parser = argparse.ArgumentParser(
        prog=prog, description="On-policy distillation of a student from a teacher.",
        epilog="Every key is documented in hybrid_gkd/config.py.",
    )
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="override a configuration key")
    parser.add_argument("--config-path", default=CONFIG_DIR, type=Path, help="folder of YAML files (%(default)s)")
    parser.add_argument("--config-name", help="a YAML file there; default: demo, or gkd with your own model or data")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the plan")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_intermixed_args(arguments)


def default_config_name(overrides: list[str]) -> str:
    """`gkd` where the user brings a model or data, else `demo`."""
    return "gkd" if any(override.startswith(OWN_INPUT) for override in overrides) else "demo"


def dry_run(config: Config) -> None:
    """Print what would happen."""
    from hybrid_gkd.launch.run import resolve_device
    from hybrid_gkd.offload.budget import plan
    from hybrid_gkd.rollout.vllm import resolve_engine

    engine = resolve_engine(config.actor_rollout_ref.rollout.name)
    print(to_yaml(config))
    print(plan(config, device=resolve_device(config), engine=engine))


def train(config: Config) -> None:
    """Build the demo if it is used, train, print the final table."""
    from hybrid_gkd.demo import sorting as demo
    from hybrid_gkd.launch.run import run
    from hybrid_gkd.reporting.final_table import final_table

    teacher_accuracy = None
    paths, teacher = demo.DemoPaths.under(demo.demo_dir()), config.actor_rollout_ref.teacher.model.path
    if build_demo(config) and config.data.val_files == [str(paths.val)] and teacher == str(paths.teacher):
        teacher_accuracy = demo.teacher_accuracy(paths)
    print(final_table(run(config, teacher_accuracy=teacher_accuracy)))


def build_demo(config: Config) -> bool:
    """Build the demo if `config` uses it and it is not there yet; whether it does."""
    from hybrid_gkd.demo import sorting as demo

    arr, root = config.actor_rollout_ref, demo.DemoPaths.under(demo.demo_dir()).root
    used = (arr.model.path, arr.teacher.model.path, *config.data.train_files, *config.data.val_files)
    uses = any(Path(path).is_relative_to(root) for path in used if path)
    if uses:
        demo.build_demo()
    return uses


def terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run as Ctrl-C does: through the context managers that stop what was started."""
    terminated.append(128 + signum)  # Ray makes a SystemExit(1) of one that is raised while it waits
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())

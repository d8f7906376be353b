"""Argument parsing, configuration loading and error handling shared by the commands."""

from __future__ import annotations

import argparse
import errno
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from hybrid_gkd.config import NAMED, UNNAMED, Config
from hybrid_gkd.config.flat import differences, flat, references
from hybrid_gkd.config.loading import CONFIG_DIR, examine_config
from hybrid_gkd.config.suggestions import suggestion
from hybrid_gkd.demo.use import used_demos
from hybrid_gkd.errors import ConfigError, HybridGKDError, call_all, raise_all
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.launch.system_folders import home_folder
from hybrid_gkd.reporting.logs import describe_unexpected, log_to_console, silence_console

logger = logging.getLogger(__name__)

OWN_INPUT = ("data.train_files=", "actor_rollout_ref.model.path=", "actor_rollout_ref.teacher.model.path=")
OF_VERL = ("algorithm.adv_estimator=", "critic.model.path=")
TEACHER = re.compile(r"actor_rollout_ref\.teacher\.|distillation\.teacher_models\.[\w-]+\.(model\.path|server_ip)=")
"""Keys of a teacher in this program's spelling; verl has model_path."""
VERL = "ppo_trainer"
"""Recipe for commands in the style of verl."""


SUPERVISE = "--supervise"
RUN_SWITCHES = MappingProxyType({
    "--dry-run": "print the resolved configuration and the results of all checks",
    SUPERVISE: "restart the run from its newest saved state when it ends by a fault",
})  # fmt: skip


def parse(
    arguments: list[str], prog: str = "python -m hybrid_gkd", switches: Mapping[str, str] = RUN_SWITCHES
) -> argparse.Namespace:
    """Parse the command line; exit on a usage error. `switches`: further flags and their help texts."""
    parser = make_parser(prog, "On-policy distillation of a student from a teacher.")
    for name, text in switches.items():
        parser.add_argument(name, action="store_true", help=text)
    return parser.parse_intermixed_args(arguments)


class _Parser(argparse.ArgumentParser):
    """A parser that suggests keys for unknown options, as other trainers have --learning_rate."""

    def error(self, message: str) -> NoReturn:
        for name in re.findall(r" --([\w.-]+)", message.partition("unrecognized arguments:")[2]):
            if hint := suggestion(name):
                message += f"\n  --{name}: keys are given as dotted.key=value{hint}"
        super().error(message)


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every command that takes a run's configuration."""
    epilog = "Every key is documented in hybrid_gkd/config/."
    parser = _Parser(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="override a configuration key")
    parser.add_argument(
        "--config-path", "-cp", default=CONFIG_DIR, type=_folder, help="folder of YAML files (%(default)s)"
    )
    parser.add_argument(
        "--config-name", "-cn", help="a YAML file there; default: demo, with your own model or data gkd, or "
        "ppo_trainer with an advantage estimator and without a teacher"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--quiet", action="store_true", help="show warnings, errors and the result only")
    return parser


def _folder(path: str) -> Path:
    """Return the folder relative to the working directory or, if there is none, to this repository, as verl does."""
    given = Path(path).expanduser()
    beside = CONFIG_DIR.parent / given
    return beside if not given.is_dir() and beside.is_dir() else given


def run_command(command: Callable[[Stopping], int], *, debug: bool) -> int:
    """Run a command with console logging; return the exit code, also after a signal. Errors are printed in one line."""
    log_to_console()
    stopping, code = Stopping(), 0
    stopping.install()
    try:
        home_folder()  # an error here names HOME; libraries would fail later without it
        code = command(stopping)
    except Exception as error:
        if debug:
            traceback.print_exc()
        # An OSError with a number: a problem of a disk or folder, unless it is a refused process.
        of_folder = isinstance(error, OSError) and error.errno not in (None, errno.EAGAIN)
        expected = isinstance(error, HybridGKDError) or of_folder
        print(f"error: {error if expected else describe_unexpected(error)}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as ended:  # Ray replaces one that is raised while it waits by SystemExit(1)
        if stopping.exit_code is None:
            by_ray = getattr(ended, "ray_terminate_msg", None)
            reason = f"Ray ended the run: {by_ray}" if by_ray else f"the run was ended by {ended!r}"
            print(f"error: {reason}", file=sys.stderr)
            return 1
    if stopping.exit_code is not None:
        print(f"ended by {stopping.signal_name}; all processes of this run are stopped", file=sys.stderr)
    return stopping.exit_code or code


def load(options: argparse.Namespace) -> Config:
    """Load the configuration of the command line, and build the demo if it is used. Raises HybridGKDError."""
    name = options.config_name or default_config_name(options.overrides)
    overrides = [*options.overrides, "trainer.console=quiet"] if options.quiet else options.overrides
    if options.config_name is None and name == VERL:
        logger.info("advantage estimator without a teacher: using --config-name %s", name)
    config, problems = examine_config(overrides, config_name=name, config_path=options.config_path)
    demos = used_demos(config) if config is not None else {}
    if config is not None and (problems or demos):  # before the demo is built, which takes minutes
        from hybrid_gkd.launch.presence import check_paths_exist  # imports readers of all file formats

        call_all([lambda: raise_all(problems), lambda: check_paths_exist(config, demos)])
    raise_all(problems)
    assert config is not None
    if config.trainer.console == "quiet":
        silence_console()
    for build in demos.values():
        try:
            build()
        except OSError as error:
            rule = f"the demo cannot be built there: {error}; set it, or XDG_CACHE_HOME, to a writable folder"
            raise ConfigError("HOME", rule, show_value=False) from error
    return config


def changed_from_recipe(config: Config, options: argparse.Namespace) -> tuple[str, dict[str, list[Any]]]:
    """Return the recipe of a command line and the changes to it: dotted key -> [recipe value, value of this run]."""
    name = options.config_name or default_config_name(options.overrides)
    recipe, _ = examine_config([], config_name=name, config_path=options.config_path)
    return name, differences(flat(asdict(recipe or _defaults())), flat(asdict(config)))


def set_keys(config: Config, options: argparse.Namespace) -> list[str]:
    """Return the keys whose values differ from the default and from this repository's recipe: those that the user set.

    Keys that are turned off (0, false, or null in place of a default value) are left out, and those that have the value
    of another key by default.
    """
    name = options.config_name or default_config_name(options.overrides)
    recipe, _ = examine_config(config_name=name, config_path=options.config_path, only_recipes=True)
    default = _defaults()
    defaults, chosen, values = (flat(asdict(each)) for each in (default, recipe or default, config))
    sources, found = references(flat(asdict(Config()))), list[str]()
    for key, value in values.items():
        usual = defaults.get(re.sub(rf"^{re.escape(NAMED)}\.[\w-]+", UNNAMED, key))
        followed = values[sources[key]] if key in sources else usual
        if value not in (usual, chosen.get(key), followed) and (value or usual is None):
            found.append(key)
    return found


def _defaults() -> Config:
    """Return the configuration of an empty command line without a recipe."""
    config, _ = examine_config()
    assert config is not None
    return config


def default_config_name(overrides: list[str]) -> str:
    """Return `gkd` if the user names a model or data, `ppo_trainer` for a command in the style of verl, else `demo`."""
    given = [override.lstrip("+") for override in overrides]
    if not any(override.startswith(OWN_INPUT) for override in given):
        return "demo"
    of_verl = any(override.startswith(OF_VERL) for override in given)
    return VERL if of_verl and not any(map(TEACHER.match, given)) else "gkd"

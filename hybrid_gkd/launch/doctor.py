"""Check a run without training: `python -m hybrid_gkd.doctor [--config-name NAME] [dotted.key=value ...]`

Takes the arguments of a run. Runs the checks of preflight.py, then places the workers on Ray without loading a model
and runs an all-reduce between them; with --self-test it then takes one step with the student as its own teacher. The
exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

from hybrid_gkd.config import RunTeacher, run_teachers
from hybrid_gkd.errors import HybridGKDError, flatten_errors
from hybrid_gkd.launch.checks import Check, Facts, Report
from hybrid_gkd.launch.command_line import load, parse, run_command, set_keys
from hybrid_gkd.launch.compatibility import check_confidence
from hybrid_gkd.launch.each_teacher import for_each_teacher
from hybrid_gkd.launch.plan import check_free_memory
from hybrid_gkd.launch.preflight import CHECKS
from hybrid_gkd.launch.self_test import self_test
from hybrid_gkd.launch.teacher import connect, refuse_teacher_gpu
from hybrid_gkd.reporting.logs import silence_console
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

ALL_REDUCE_SECONDS = 60.0
"""Timeout of the first collective of a pool, in which workers import torch and connect to each other."""


SELF_TEST = "take one training step with the student as its own teacher and check that the divergence is 0"


def teacher_confidence(facts: Facts) -> str:
    """Check the confidence of teacher services; a teacher that the run starts is checked after it has loaded."""

    def check(teacher: RunTeacher) -> str:
        if teacher.section.server_ip is None:
            return "checked by the run"
        with connect(facts, teacher, teacher.section.endpoints) as client:
            return check_confidence(facts, teacher, client)

    return for_each_teacher(facts.config, check)


class PlacedWorkers:
    """Workers placed on Ray as in a run, without models, and the checks that need them."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack
        self.checks = (
            Check("placement", self.place),
            Check("GPU memory", self.free_memory, after=("placement", "plan")),
            Check("all-reduce", self.all_reduce, after=("placement",)),
        )

    def place(self, facts: Facts) -> str:
        """Place the workers and describe their GPUs. Raises WorkerError, ConfigError."""
        config = facts.config
        self._stack.enter_context(ray_cluster(config, facts.device))
        self.logs = Path(tempfile.mkdtemp(prefix="hybrid_gkd_doctor_"))
        # Kept after an error of a check, which names its files, but not after an interruption.
        self._stack.push(lambda kind, *_: shutil.rmtree(self.logs, ignore_errors=True) if kind else None)
        group = WorkerGroup(config, device=facts.device, load=False, log_folder=self.logs)
        self.group = self._stack.enter_context(contextlib.closing(group))
        refuse_teacher_gpu(facts.local_teachers, group.placements)
        return "\n".join(f"{place.worker}: {place}" for place in group.placements)

    def free_memory(self, facts: Facts) -> str:
        """Raise ConfigError if other processes use memory that the run needs."""
        if facts.device != "cuda":
            return "no worker has a GPU"
        check_free_memory(facts.plan.memory, self.group.placements)
        return "the free memory of each worker's GPU is enough for every phase"

    def all_reduce(self, facts: Facts) -> str:
        """Raise WorkerError naming the workers that did not answer."""
        self.group.all_reduce(Timeout(ALL_REDUCE_SECONDS))
        shutil.rmtree(self.logs, ignore_errors=True)
        return "; ".join(f"{pool.size} {pool.role}(s) reach each other" for pool in self.group.pools)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code, also after a signal."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments, "python -m hybrid_gkd.doctor", {"--self-test": SELF_TEST})
    return run_command(lambda stopping: examine(options), debug=options.debug)


def examine(options: argparse.Namespace) -> int:
    """Run the checks and print their results; return the exit code, 1 if one failed."""
    silence_console("hybrid_gkd.runtime.waiting")  # the results of the checks are printed
    try:
        config = load(options)
    except HybridGKDError as error:
        for each in flatten_errors([error]):
            print(f"FAIL configuration: {each}")
        return 1
    report, facts = Report(), Facts(config, set_keys(config, options))
    report.run_all(CHECKS, facts)
    if any(teacher.section.server_ip is not None for teacher in run_teachers(config)):
        report.run_all([Check("teacher confidence", teacher_confidence, after=("compatibility", "data"))], facts)
    with contextlib.ExitStack() as stack:
        report.run_all(PlacedWorkers(stack).checks, facts)
    if options.self_test:
        report.run_all([Check("self-test", self_test, after=tuple(report.failed))], facts)
    return 1 if report.failed else 0

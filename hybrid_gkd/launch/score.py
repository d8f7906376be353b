"""Score given completions for runs without a teacher: `python -m hybrid_gkd.teacher score FILE ... --out STORE`

Data are read with the configuration, checks and client of a run; the command line overrides single keys. Completions
already in the store are not scored again, so the same command resumes an interrupted one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hybrid_gkd.config import Config, run_teachers
from hybrid_gkd.config.loading import examine_config, load_config
from hybrid_gkd.config.teachers import OF_SERVICE, UNNAMED
from hybrid_gkd.errors import TeacherMismatch
from hybrid_gkd.launch import inputs
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.command_line import run_command
from hybrid_gkd.launch.compatibility import check_compatibility
from hybrid_gkd.launch.completion_file import Progress
from hybrid_gkd.launch.teacher import connect
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.scoring.teacher_scorer import Scores, Teacher, TeacherScorer, completion_view
from hybrid_gkd.teacher.client.score_store import ScoredBy, ScoreStore
from hybrid_gkd.teacher.engines.options import EngineOptions, positive
from hybrid_gkd.teacher.server.local import TeacherProcess
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.types import Reading, SampleId, TopK, given_sample

logger = logging.getLogger(__name__)

OVERRIDE = re.compile(r"\+*[a-z_]+(\.[\w-]+)+=.*", re.DOTALL)
READ_HERE = ("server_port", "start_timeout", "max_model_len")
SERVICE = re.compile(rf"\+*{re.escape(UNNAMED)}\.({'|'.join(name for name in OF_SERVICE if name not in READ_HERE)})\b")
"""Overrides for the service that a run starts, which this command does not read."""
STORE = re.compile(rf"\+*{re.escape(UNNAMED)}\.cache(_gigabytes)?=")
"""Overrides for the store of a run."""
READINGS_WAITING = 512
"""Maximum number of readings that are queued or in flight."""


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    options = parse(arguments)
    return run_command(lambda stopping: score(options), debug=options.debug)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line, with `files` separate from `overrides`; exit on a usage error."""
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_gkd.teacher score",
        description="Score given completions once, for runs with actor_rollout_ref.teacher.cache=STORE. Prompts and "
        "completions are read as in a run: give the same data.* keys as dotted.key=value.",
    )
    add = parser.add_argument
    add("words", nargs="+", metavar="FILE", help="as data.train_files, and dotted.key=value for keys of the run")
    add("--out", required=True, metavar="STORE", help="folder, on a local disk")
    add("--response-key", help="column with the completion, as data.response_key; default: that of the recipe, or "
        "response")
    add("--prompt-key", help="column with the prompt, as data.prompt_key")
    add("--student", metavar="MODEL", help="as actor_rollout_ref.model.path: sets tokenizer and chat template; "
        "default: --ckpt-path")
    add("--topk", type=positive, help="as distillation.topk")
    add("--temperature", type=float, help="as distillation.temperature")
    add("--config-name", "-cn", default="gkd", help="the recipe of the run (%(default)s)")
    add("--ckpt-path", metavar="MODEL", help="teacher, started on this machine for the duration of the command")
    add("--addr", metavar="HOST:PORT", help="instead: one or several running services, separated by commas")
    add("--keys", metavar="FOLDER", help="keys of this client, with --addr")
    add("--workers", type=positive, default=1, help="number of model replicas, with --ckpt-path")
    add("--debug", action="store_true", help="show the traceback of an error")
    EngineOptions.add_to(parser, without=("ckpt_path", "n_logprobs", "adapters"))
    options = parser.parse_intermixed_args(arguments)
    options.overrides = [word for word in options.words if OVERRIDE.fullmatch(word)]
    options.files = [word for word in options.words if not OVERRIDE.fullmatch(word)]
    if not options.files:
        parser.error("a FILE with prompts and completions is needed")
    if (options.ckpt_path is None) == (options.addr is None):
        parser.error("one of --ckpt-path and --addr is needed: the teacher's model, or a running service")
    if options.student is None and options.ckpt_path is None:
        parser.error("--student is needed with --addr: its tokenizer encodes the completions")
    if options.keys is not None and options.addr is None:
        parser.error("--keys needs --addr")
    own = {"workers", *(each.name for each in dataclasses.fields(EngineOptions))} - {"ckpt_path"}
    given = [f"--{name.replace('_', '-')}" for name in sorted(own & vars(options).keys())
             if getattr(options, name) != parser.get_default(name)]  # fmt: skip
    if options.addr is not None and given:
        parser.error(f"{', '.join(given)}: for the service that --ckpt-path starts, not with --addr")
    if ignored := [override for override in options.overrides if SERVICE.match(override)]:
        parser.error(f"{', '.join(ignored)}: the service has options of this command instead, see --help")
    if ignored := [override for override in options.overrides if STORE.match(override)]:
        parser.error(f"{', '.join(ignored)}: the store is that of --out, without a limit of its size")
    return options


def make_config(options: argparse.Namespace) -> Config:
    """Return the configuration of a run on the same data. Raises ConfigError."""
    (recipe, _), teacher = examine_config(config_name=options.config_name), "actor_rollout_ref.teacher"
    response_key = options.response_key or (recipe.data.response_key if recipe else None) or "response"
    given = {
        "data.prompt_key": options.prompt_key, "distillation.topk": options.topk,
        "distillation.temperature": options.temperature,
        "actor_rollout_ref.model.trust_remote_code": options.trust_remote_code or None,
    }  # fmt: skip
    keys = {key: value for key, value in given.items() if value is not None} | {
        "actor_rollout_ref.model.path": options.student or options.ckpt_path, "data.train_files": options.files,
        "data.response_key": response_key, "trainer.logger": [], "distillation.enabled": True,
        # Null replaces the recipe's: the teacher is that of the command line.
        f"{teacher}.source": "model", f"{teacher}.model.path": options.ckpt_path, f"{teacher}.server_ip": options.addr,
        f"{teacher}.keys": options.keys, f"{teacher}.backend": options.backend, f"{teacher}.cache": options.out,
    }  # fmt: skip
    known = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
    config = load_config([*known, *options.overrides], config_name=options.config_name)
    config.distillation.teacher_models = {}  # the given teacher scores all completions
    config.data.train_batch_size = 1  # any number of rows will do
    return config


def score(options: argparse.Namespace) -> int:
    """Score the completions that the store does not have. Raises HybridGKDError."""
    facts = Facts(make_config(options))
    facts.device, facts.gpus = "cuda" if torch.cuda.is_available() else "cpu", torch.cuda.device_count()
    for check in (inputs.student, inputs.teacher, inputs.files, inputs.data, check_compatibility):
        logger.info("%s: %s", check.__name__.removeprefix("check_"), check(facts))
    tasks = [task for task in facts.train_prompts if task.response_ids is not None]
    samples = [(task, given_sample(task, 1, 0.0)) for task in tasks]
    readings = {sample.id: completion_view(task, sample) for task, sample in samples}
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(ScoreStore(options.out)))
        client, check_teacher = stack.enter_context(connect_or_start(options, facts))
        loss = facts.config.distillation
        scored_by = ScoredBy(model=client.model, topk=loss.topk, temperature=loss.temperature, num_ids=facts.num_ids)
        check_one_teacher(store, scored_by)
        num_new = score_missing(store, scored_by, client, readings, facts, check_teacher)
        print(
            f"{options.out}: scores of {len(readings)} completions by {scored_by}, {num_new} of them new; "
            f"{store.num_bytes / 1e9:.3f} GB", flush=True,
        )  # fmt: skip
    return 0


def check_one_teacher(store: ScoreStore, scored_by: ScoredBy) -> None:
    """Raise TeacherMismatch if the store has scores of another teacher, from which a run could not choose."""
    for each in store.teachers():
        alike = (each.topk, each.temperature) == (scored_by.topk, scored_by.temperature)
        if alike and (each.model.weights, each.num_ids) != (scored_by.model.weights, scored_by.num_ids):
            raise TeacherMismatch(
                f"--out: {store.folder} has scores of {each}, and would get those of {scored_by}; a run without a "
                "teacher needs a store with the scores of one: score into another folder"
            )


@contextlib.contextmanager
def connect_or_start(
    options: argparse.Namespace, facts: Facts
) -> Iterator[tuple[TeacherClient, Callable[[], None]]]:
    """Connect to the given service, or start one for the duration of the block; return the client and its check.

    The check restarts a started service that was killed, and raises if it has ended. Raises TeacherError.
    """
    config, (teacher,) = facts.config, run_teachers(facts.config)
    if options.addr is not None:
        endpoints = config.actor_rollout_ref.teacher.endpoints
        with connect(facts, teacher, endpoints) as client:
            yield client, lambda: None
        return
    engine = dataclasses.replace(
        EngineOptions.parsed(options), n_logprobs=config.distillation.topk, adapters=teacher.adapters,
        max_model_len=options.max_model_len or config.teacher_length,
    )
    service = TeacherProcess(
        options.ckpt_path, log_path=Path(options.out) / "teacher.log",
        options=[*engine.command_line(), f"--workers={options.workers}"],
        start_timeout=config.actor_rollout_ref.teacher.start_timeout,
    )
    with service as local:
        local.wait_ready()
        with connect(facts, teacher, [local.address], local.keys, replicas=options.workers) as client:
            yield client, local.check


def score_missing(
    store: ScoreStore, scored_by: ScoredBy, client: Teacher, readings: dict[SampleId, Reading], facts: Facts,
    check: Callable[[], None],
) -> int:  # fmt: skip
    """Score the readings that the store does not have; return their number.

    `check` raises if the teacher has ended. Raises TeacherError.
    """
    missing = store.missing(scored_by, readings)
    scorer, scores = TeacherScorer(client), Scores()
    timeout = Timeout(facts.config.actor_rollout_ref.teacher.request_timeout, f"{UNNAMED}.request_timeout")
    progress = Progress(Counter(each.row for each in missing), len(readings), lambda: f"{scored_by}")

    def settle() -> None:
        for each, found in scorer.take_scores(scores, 1, timeout=timeout, check=check).items():
            assert isinstance(found, TopK)
            store.put(scored_by, missing[each], found)
            progress.add(each.row, missing[each].num_tokens)
        progress.show()

    with contextlib.closing(progress):
        for each, reading in missing.items():
            [scores[each]] = client.submit([reading])
            if len(scores) == READINGS_WAITING:
                settle()
        while scores:
            settle()
        progress.show(last=True)
    return len(missing)

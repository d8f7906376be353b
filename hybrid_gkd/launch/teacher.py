"""Connect to the teacher of a run: a given service, a stored one, or one that the run starts on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hybrid_gkd.config import (
    UNNAMED,
    Config,
    RunTeacher,
    TeacherConfig,
    has_several_teachers,
    run_teachers,
    summed_teachers,
)
from hybrid_gkd.errors import ConfigError, rename_section
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.other_tokenizer import make_scorer
from hybrid_gkd.launch.plan import RunPlan
from hybrid_gkd.models.tokenizer import num_token_ids, tokenizer_hash
from hybrid_gkd.offload.budget import TeacherPlacement
from hybrid_gkd.runtime.processes import temporary_folder
from hybrid_gkd.scoring.cached_teacher import CachedTeacher, stored_teacher
from hybrid_gkd.scoring.teacher_mixture import MixtureScorer, SumScorer
from hybrid_gkd.scoring.teacher_router import TeacherRouter
from hybrid_gkd.scoring.teacher_scorer import Teacher, TeacherScorer
from hybrid_gkd.scoring.teacher_turns import TeacherInTurn, Turns
from hybrid_gkd.teacher.client.connection import StudentNeeds
from hybrid_gkd.teacher.client.score_store import ScoredBy, ScoreStore
from hybrid_gkd.teacher.engines.engine_table import resolve_backend, weights_fingerprint
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.teacher.server.local import TeacherProcess
from hybrid_gkd.teacher.server.supervisor import visible_gpus
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.workers.liveness import check_ray
from hybrid_gkd.workers.placement import Placement, threads_per_process

logger = logging.getLogger(__name__)


def connect(
    facts: Facts, teacher: RunTeacher, endpoints: list[str], keys: Path | None = None, *, replicas: int = 1
) -> TeacherClient:
    """Connect to servers and check that they match the student, or the teacher's own tokenizer if it has another one.

    `keys`: replace the configured ones; `replicas`: number of model replicas at each server. Raises TeacherError.
    """
    config, section = teacher.config, teacher.section
    other = facts.other_tokenizers.get(teacher.key)
    tokenizer = other or facts.tokenizer
    num_tokens = num_token_ids(tokenizer)
    assert section.num_microbatches is not None  # null has been replaced by the default
    client = TeacherClient(
        endpoints, topk=config.distillation.topk, temperature=config.distillation.temperature,
        vocab_size=facts.num_ids if other is None else num_tokens,
        connect_timeout=section.connect_timeout,
        request_timeout=section.request_timeout, max_retries=section.max_retries,
        # One request at a time: then every batch of the engine is one request.
        n_server_workers=1 if config.full_determinism else section.n_server_workers * replicas,
        num_microbatches=section.num_microbatches,
        keys=keys or section.keys, section=teacher.where, allow_change=section.allow_teacher_change,
        given_topk=config.distillation.given_topk, adapter=teacher.adapter,
    )
    try:
        served = client.handshake(
            tokenizer_hash=tokenizer_hash(tokenizer), tokenizer_size=num_tokens,
            max_sequence_length=config.max_reading_length,
        )
    except BaseException:
        client.close()
        raise
    logger.info("%s: %s at %s, engine %s", teacher.label, served.model, endpoints[0], served.backend)
    return client


@contextlib.contextmanager
def opened_store(config: Config, tokenizer: Any) -> Iterator[tuple[ScoreStore, ScoredBy]]:
    """Open the score store of a run without a teacher, and select its teacher.

    Raises TeacherError: they do not match.
    """
    section, loss = config.actor_rollout_ref.teacher, config.distillation
    assert section.cache is not None
    needs = StudentNeeds(
        tokenizer_hash=tokenizer_hash(tokenizer), tokenizer_size=num_token_ids(tokenizer),
        max_sequence_length=config.max_reading_length, topk=loss.topk, temperature=loss.temperature,
    )
    with contextlib.closing(ScoreStore(section.cache, create=False)) as store:
        yield store, stored_teacher(store, needs)


@contextlib.contextmanager
def with_cache(config: Config, tokenizer: Any, client: TeacherClient | None, num_ids: int) -> Iterator[Teacher]:
    """Return the teacher with the store of `actor_rollout_ref.teacher.cache` in front of it, if configured.

    Without a client the store is the teacher. `num_ids`: number of ids to score. Raises TeacherError: the store cannot
    be opened or does not match.
    """
    section, loss = config.actor_rollout_ref.teacher, config.distillation
    if section.cache is None:
        assert client is not None
        yield client
        return
    if client is None:
        with opened_store(config, tokenizer) as (store, stored):
            yield CachedTeacher(store, stored, client=None)
        return
    scored_by = ScoredBy(model=client.model, topk=loss.topk, temperature=loss.temperature, num_ids=num_ids)
    with contextlib.closing(ScoreStore(section.cache, 1e9 * section.cache_gigabytes)) as store:
        yield CachedTeacher(store, scored_by, client=client)


def local_weights(config: Config) -> str:
    """Return the hash by which a service of the run would identify its weights; empty for a model of the hub, of which
    not all files need be in the cache."""
    section = config.actor_rollout_ref.teacher
    assert section.model.path is not None
    if not os.path.isdir(section.model.path):
        return ""
    arguments = json.dumps(asdict(section.engine_kwargs))
    options = EngineOptions(ckpt_path=section.model.path, dtype=section.dtype, engine_kwargs=arguments)
    return weights_fingerprint(options, resolve_backend(section.backend), section.model.lora_adapter_path)


def make_teacher_process(teacher: RunTeacher, plan: RunPlan, num_threads: int, turns: str = "") -> TeacherProcess:
    """Return the context manager of a teacher's service, which loads in the background. Raises ConfigError.

    `num_threads`: CPU threads of each replica on a machine without a GPU; `turns`: folder of the turns of several.
    """
    config, section, place = teacher.config, teacher.section, plan.memory.teachers[teacher.label]
    assert section.model.path is not None
    environment = teacher_environment(section, place, plan.memory.device, num_threads)
    engine = EngineOptions(
        ckpt_path=section.model.path, adapters=teacher.adapters, backend=section.backend, dtype=section.dtype,
        n_logprobs=max(config.distillation.topk, config.distillation.given_topk), max_model_len=config.teacher_length,
        tp_size=section.tensor_model_parallel_size, device="cuda" if place.gpus else "cpu",
        gpu_memory_utilization=plan.memory.teacher_fraction(plan.gpu_bytes, teacher.label),
        engine_kwargs=json.dumps(asdict(section.engine_kwargs)), turns=turns if place.takes_turns else None,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
    )
    return TeacherProcess(
        section.model.path, port=section.server_port or 0,
        options=[*engine.command_line(), f"--workers={place.replicas}"],
        environment=environment, start_timeout=section.start_timeout,
        log_path=config.run_dir / "logs" / f"{teacher.label.replace(' ', '_')}.log",
    )


def teacher_environment(
    section: TeacherConfig, place: TeacherPlacement, device: str, num_threads: int
) -> dict[str, str]:
    """Return the environment variables that set a local teacher's GPUs or number of CPU threads.

    Raises ConfigError if a local teacher needs more GPUs than there are.
    """
    if place.gpus:
        gpus = visible_gpus()
        if not gpus:
            raise ConfigError("actor_rollout_ref.teacher.device", "no CUDA device is visible", section.device)
        if len(gpus) < len(place.gpus):
            needed, key = len(place.gpus), "actor_rollout_ref.teacher.tensor_model_parallel_size"
            rule = f"all replicas (num_replicas) together need {needed} GPUs, {len(gpus)} are visible"
            raise ConfigError(key, rule, section.tensor_model_parallel_size)
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index] for index in place.gpus)}
    return {"OMP_NUM_THREADS": str(num_threads)} if device == "cpu" else {}


class RunTeachers:
    """The teachers of a run: services that it starts, which load in the background, and clients of all.

    Running services are connected at once. Raises TeacherError, ConfigError.

    Args:
        facts: results of the checks.
        stack: closing it ends services and connections.
        loading: configuration with which models load.
    """

    def __init__(self, facts: Facts, stack: contextlib.ExitStack, loading: Config):
        self.facts, self.stack, self.places = facts, stack, facts.plan.memory.teachers
        self.clients: dict[str, TeacherClient] = {}
        """Connected teachers by label."""
        self.processes: dict[str, TeacherProcess] = {}
        """Services of this run by label of their first teacher."""
        num_threads, taken = threads_per_process(facts.config), set[int]()
        takes_turns, folder = any(place.takes_turns for place in self.places.values()), ""
        if takes_turns:
            folder = str(stack.enter_context(temporary_folder("hybrid_gkd_turns_")))
        for teacher in run_teachers(loading):
            with rename_section(UNNAMED, teacher.where):
                if teacher.label in self.places:
                    gpus = set(self.places[teacher.label].gpus)
                    if gpus & taken or takes_turns:
                        self.wait_ready()  # vLLM sizes its cache by the free memory, which must not change during that
                    taken |= gpus
                    process = make_teacher_process(teacher, facts.plan, num_threads, folder)
                    self.processes[teacher.label] = stack.enter_context(process)
                elif teacher.section.server_ip is not None:
                    self._connect(teacher, teacher.section.endpoints)

    def check(self) -> None:
        """Raise TeacherError if a service of this run has ended, WorkerError if Ray has.

        Called during waits for a teacher, in which idle workers would not report a failure.
        """
        check_ray()
        for process in self.processes.values():
            process.check()

    def wait_ready(self) -> None:
        """Wait for the services of this run. Raises TeacherError."""
        for teacher in run_teachers(self.facts.config):
            if teacher.label in self.processes:
                with rename_section(UNNAMED, teacher.where):
                    self.processes[teacher.label].wait_ready()

    def connect(self) -> None:
        """Connect to the services of this run once they are ready. Raises TeacherError."""
        self.wait_ready()
        for teacher in run_teachers(self.facts.config):
            local = self.processes.get(teacher.service)
            if local is not None:
                self._connect(teacher, [local.address], local.keys, replicas=self.places[teacher.service].replicas)

    def _connect(self, teacher: RunTeacher, endpoints: list[str], keys: Path | None = None, replicas: int = 1) -> None:
        client = connect(self.facts, teacher, endpoints, keys, replicas=replicas)
        self.clients[teacher.label] = self.stack.enter_context(client)

    def scorer(self) -> TeacherScorer:
        """Return the scorer of all teachers, with their stores of scores. Raises TeacherError."""
        groups, facts = defaultdict[str, dict[str, tuple[float, TeacherScorer]]](dict), self.facts
        turns: Turns | None = None
        for teacher in run_teachers(facts.config):
            with rename_section(UNNAMED, teacher.where):
                client = self.clients.get(teacher.label)
                cached = with_cache(teacher.config, facts.tokenizer, client, facts.num_ids)
                scores = self.stack.enter_context(cached)
                if teacher.service in self.places and self.places[teacher.service].takes_turns:
                    seconds = max(each.section.request_timeout for each in run_teachers(facts.config))
                    turns = turns or self.stack.enter_context(contextlib.closing(Turns(seconds)))
                    scores = TeacherInTurn(scores, turns)
                served = client.model if client is not None else None
                own = make_scorer(facts, teacher, scores, served)
            if not has_several_teachers(facts.config):
                return own
            groups[teacher.key][teacher.name] = teacher.weight, own
        if summed_teachers(facts.config):
            return TeacherRouter({key: SumScorer(group) for key, group in groups.items()})
        return TeacherRouter({
            key: MixtureScorer(group) if len(group) > 1 else next(iter(group.values()))[1]
            for key, group in groups.items()
        })


def refuse_teacher_gpu(teachers: Mapping[str, TeacherPlacement], placements: list[Placement]) -> None:
    """Raise ConfigError if Ray assigned the GPU of a local teacher to a worker."""
    gpus = [gpu for teacher in teachers.values() if not teacher.shares_gpu for gpu in teacher.gpus]
    if not any(place.gpu for place in placements):
        return
    host = socket.gethostname()
    ids = {f"{host} {torch.cuda.get_device_properties(index).uuid}": index for index in gpus}
    for place in placements:
        if place.gpu in ids:
            raise ConfigError(
                "actor_rollout_ref.teacher.server_ip",
                f"{place.worker} ({place}) was assigned GPU {ids[place.gpu]}, on which this run starts its teacher; "
                "start the teacher as a service on GPUs that Ray does not manage, and set its address here", None,
            )

"""Connect to the teacher of a run: a given service, a stored one, or one that the run starts on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.launch.plan import RunPlan
from hybrid_gkd.models.spec import read_config
from hybrid_gkd.models.tokenizer import num_token_ids, tokenizer_hash
from hybrid_gkd.offload.budget import TeacherPlacement
from hybrid_gkd.scoring.cached_teacher import CachedTeacher, stored_teacher
from hybrid_gkd.scoring.teacher_scorer import Teacher
from hybrid_gkd.teacher.client.connection import StudentNeeds
from hybrid_gkd.teacher.client.score_store import ScoredBy, ScoreStore
from hybrid_gkd.teacher.engines.engine_table import resolve_backend, weights_fingerprint
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.teacher.server.local import TeacherProcess
from hybrid_gkd.teacher.server.supervisor import visible_gpus
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.workers.placement import Placement, threads_per_process

logger = logging.getLogger(__name__)


def connect(
    config: Config, tokenizer: Any, endpoints: list[str], keys: Path | None = None, *, replicas: int = 1,
    num_ids: int | None = None,
) -> TeacherClient:
    """Connect to servers and check that they match the student. Raises TeacherError.

    `keys`: replace the configured ones; `replicas`: of the model at each server; `num_ids`: number of ids to score if
    fewer than the student's.
    """
    section, model = config.actor_rollout_ref.teacher, config.actor_rollout_ref.model
    hf_config = read_config(model.path, model.trust_remote_code, model.override_config)
    num_tokens = num_token_ids(tokenizer)
    assert section.num_microbatches is not None  # null has been replaced by the default
    client = TeacherClient(
        endpoints, topk=config.distillation.topk, temperature=config.distillation.temperature,
        vocab_size=num_ids or min(hf_config.get_text_config().vocab_size, num_tokens),
        connect_timeout=section.connect_timeout,
        request_timeout=section.request_timeout, max_retries=section.max_retries,
        # One request at a time: then every batch of the engine is one request.
        n_server_workers=1 if config.full_determinism else section.n_server_workers * replicas,
        num_microbatches=section.num_microbatches,
        keys=keys or section.keys, allow_change=section.allow_teacher_change,
        given_topk=config.distillation.given_topk,
    )
    try:
        served = client.handshake(
            tokenizer_hash=tokenizer_hash(tokenizer), tokenizer_size=num_tokens,
            max_sequence_length=config.max_reading_length,
        )
    except BaseException:
        client.close()
        raise
    logger.info("teacher: %s at %s, engine %s", served.model, endpoints[0], served.backend)
    return client


@contextlib.contextmanager
def opened_store(config: Config, tokenizer: Any) -> Iterator[tuple[ScoreStore, ScoredBy]]:
    """Open the score store of a run without a teacher, and select its teacher.

    Raises TeacherError: they do not match.
    """
    section, loss = config.actor_rollout_ref.teacher, config.distillation
    assert section.cache is not None
    needs = StudentNeeds(
        tokenizer_hash=tokenizer_hash(tokenizer), tokenizer_size=len(tokenizer),
        max_sequence_length=config.max_reading_length, topk=loss.topk, temperature=loss.temperature,
    )
    with contextlib.closing(ScoreStore(section.cache)) as store:
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
    model = next(iter(client.served.values()))
    scored_by = ScoredBy(model=model, topk=loss.topk, temperature=loss.temperature, num_ids=num_ids)
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
    return weights_fingerprint(options, resolve_backend(section.backend))


def make_teacher_process(config: Config, plan: RunPlan) -> TeacherProcess:
    """Return the context manager of the run's teacher service, which loads in the background. Raises ConfigError."""
    section, place = config.actor_rollout_ref.teacher, plan.memory.teacher
    assert section.model.path is not None
    assert place is not None
    environment = teacher_environment(config, place, plan.memory.device)
    options = [
        f"--backend={section.backend}", f"--device={'cuda' if place.gpus else 'cpu'}",
        f"--gpu-memory-utilization={plan.memory.teacher_fraction(plan.gpu_bytes)}",
        f"--tp-size={section.tensor_model_parallel_size}", f"--workers={place.replicas}",
        f"--max-model-len={config.teacher_length}", f"--dtype={section.dtype}",
        f"--engine-kwargs={json.dumps(asdict(section.engine_kwargs))}",
    ]
    if config.actor_rollout_ref.model.trust_remote_code:
        options.append("--trust-remote-code")
    return TeacherProcess(
        section.model.path, port=section.server_port or 0, options=options,
        n_logprobs=max(config.distillation.topk, config.distillation.given_topk),
        environment=environment, start_timeout=section.start_timeout, log_path=config.run_dir / "logs" / "teacher.log",
    )


def teacher_environment(config: Config, place: TeacherPlacement, device: str) -> dict[str, str]:
    """Return the environment variables that set its GPUs or its number of CPU threads.

    Raises ConfigError if a local teacher needs more GPUs than there are.
    """
    section = config.actor_rollout_ref.teacher
    if place.gpus:
        gpus = visible_gpus()
        if not gpus:
            raise ConfigError("actor_rollout_ref.teacher.device", "no CUDA device is visible", section.device)
        if len(gpus) < len(place.gpus):
            needed, key = len(place.gpus), "actor_rollout_ref.teacher.tensor_model_parallel_size"
            rule = f"all replicas (num_replicas) together need {needed} GPUs, {len(gpus)} are visible"
            raise ConfigError(key, rule, section.tensor_model_parallel_size)
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index] for index in place.gpus)}
    return {"OMP_NUM_THREADS": str(threads_per_process(config))} if device == "cpu" else {}


def refuse_teacher_gpu(teacher: TeacherPlacement | None, placements: list[Placement]) -> None:
    """Raise ConfigError if Ray assigned the GPU of a local teacher to a worker."""
    if teacher is None or teacher.shares_gpu or not any(place.gpu for place in placements):
        return
    host = socket.gethostname()
    ids = {f"{host} {torch.cuda.get_device_properties(index).uuid}": index for index in teacher.gpus}
    for place in placements:
        if place.gpu in ids:
            raise ConfigError(
                "actor_rollout_ref.teacher.server_ip",
                f"{place.worker} ({place}) was assigned GPU {ids[place.gpu]}, on which this run starts its teacher; "
                "start the teacher as a service on GPUs that Ray does not manage, and set its address here", None,
            )

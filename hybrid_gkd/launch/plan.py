"""The plan of a run, made once before anything starts: workers, memory by phase, time, room for checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import socket
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_gkd.config import CheckpointConfig, Config
from hybrid_gkd.config.loading import examine_config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.models.fingerprint import WEIGHT_SUFFIXES, local_folder
from hybrid_gkd.offload.budget import GIB, LocalTeacher, Memory, has_phase
from hybrid_gkd.offload.needs import TrainedModel, exported_bytes, plan_memory
from hybrid_gkd.offload.residency import FROZEN
from hybrid_gkd.reporting.starts import STARTS
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.student.checkpoint_store import RESERVED, UNFINISHED
from hybrid_gkd.workers.placement import Placement

SPARE = 0.1
"""Of a GPU: offloads are called unnecessary only where so much stays free, since activations are "at least"."""


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What a run takes of its machines, by its configuration and by what the checks have found."""

    memory: Memory
    gpu_bytes: int | None
    """Memory of this machine's first GPU; None without one, or where the workers use none."""
    card_bytes: int | None
    """Of each worker's GPU; those of a given cluster are known when it has placed the workers."""
    shares: dict[str, float]
    """Of such a GPU: of the rollout engine and of a local teacher; empty while it is not known."""
    phases: dict[str, dict[str, float]]
    """Phase -> owner -> bytes on each worker; without `card_bytes` the shares of a GPU are left out."""
    host: dict[str, float]
    """Owner -> bytes on the host of each worker that trains."""
    loaded: dict[str, Any]
    """What starts.jsonl keeps, so that the time to load can be told before the next start."""
    places: tuple[str, ...]
    """Workers, rollout engine, batch and teacher, a line each."""
    times: tuple[str, ...]
    """Steps and loading, a line each."""
    checkpoint_bytes: int
    """Of one checkpoint."""
    steps: int | None
    """Of the whole run, where they are known."""

    @property
    def copy_bytes(self) -> float | None:
        """What a worker takes of its host where training goes on while a checkpoint is written; None: it does not."""
        return sum(self.host.values()) if "checkpoint" in self.host else None

    def __str__(self) -> str:
        return "\n".join([*self.places, *memory_lines(self), *self.times])


def make_plan(
    config: Config, trained: tuple[TrainedModel, ...], device: str, teacher: LocalTeacher | None = None, *,
    engine: str = "none", gpu_bytes: int | None = None, steps: int | None = None, steps_done: int = 0,
) -> RunPlan:
    """Raises ConfigError: a phase does not fit into this machine's GPU; ModelError: a model's own cannot be read.

    The GPUs of a given cluster are known when the workers are placed, see `check_free_memory`.
    """
    memory, shares = plan_memory(config, trained, device, teacher), dict[str, float]()
    card_bytes = gpu_bytes if config.ray_init.address is None else None
    if card_bytes is not None:
        memory.check(card_bytes)
        shares["rollout engine"] = memory.share_of_engine(card_bytes)
        if teacher is not None:
            shares["local teacher"] = memory.share_of_teacher(card_bytes)
    loaded = what_is_loaded(config, device=device, engine=engine)
    times = (time_plan(config, steps, steps_done),) if steps else ()
    return RunPlan(
        memory=memory, gpu_bytes=gpu_bytes, card_bytes=card_bytes, shares=shares,
        phases=memory.phases(card_bytes), host=memory.host(saves=config.saves_while_training(steps)), loaded=loaded,
        places=placement_plan(config, device=device, engine=engine),
        times=(*times, loading_plan(loaded, config.experiment_dir.parent)), steps=steps,
        checkpoint_bytes=checkpoint_bytes(config.actor_rollout_ref.actor.checkpoint, trained),
    )  # fmt: skip


def placement_plan(config: Config, *, device: str, engine: str) -> tuple[str, ...]:
    """Workers, rollout engine, batch and teacher, a line each."""
    arr = config.actor_rollout_ref
    pools = f"workers: {config.world_size} on {device} ({config.trainer.nnodes} node(s))"
    if not arr.hybrid_engine:
        pools += f" that train, {config.rollout_world_size} ({config.rollout.nnodes} node(s)) that generate"
    lines = [
        pools,
        f"rollout engine: {engine}, tensor parallel {arr.rollout.tensor_model_parallel_size}",
        f"batch: {config.data.train_batch_size} prompts x {arr.rollout.n} responses, up to "
        f"{config.data.max_prompt_length} + {config.data.max_response_length} tokens, "
        f"{config.mini_batch_size} prompts per optimizer step",
    ]
    refill = config.algorithm.filter_groups
    if refill.enable:
        lines.append(
            f"refill: groups without a signal ({refill.metric}) are left out, at most {refill.max_num_gen_batches} "
            f"generation batches of {config.data.gen_batch_size or config.data.train_batch_size} prompts a step"
        )
    if config.distillation.enabled:
        where = ", ".join(arr.teacher.endpoints) if arr.teacher.server_ip else "started by this run"
        where = f"scores in {arr.teacher.cache}" if arr.teacher.is_stored else where
        loss = config.distillation.loss_fn or config.distillation.loss_mode
        lines.append(f"teacher: {where}, top-{config.distillation.topk}, {loss}, tail {config.distillation.tail}")
    return tuple(lines)


def memory_lines(plan: RunPlan) -> list[str]:
    """Memory of each worker by phase, and vLLM's shares of a GPU."""
    memory, spec = plan.memory, plan.memory.specs["student"]
    adapters = f" below {spec.adapter_parameters / 1e6:.1f} M in adapters" if spec.adapter_parameters else ""
    others = [name for name in memory.specs if name not in ("student", "reference")]
    lines = [
        f"student: {spec.parameters / 1e6:.1f} M parameters{adapters}, {memory.engine.token:.0f} bytes of KV cache a "
        "token per worker",
        *(f"{name}: {memory.specs[name].parameters / 1e6:.1f} M parameters" for name in others),
        "memory of each worker by phase, GiB (activations: at least):",
    ]
    lines += [f"  {phase:21s} {in_gib(owners, 8)}" for phase, owners in plan.phases.items()]
    lines.append(host_line(plan))
    if plan.card_bytes is not None:
        shares = ", ".join(f"{name} {share:g}" for name, share in plan.shares.items())
        lines.append(f"shares of a GPU of {plan.card_bytes / GIB:.1f} GiB (gpu_memory_utilization): {shares}")
        lines += room_without_offloads(memory, plan.card_bytes, plan.shares["rollout engine"])
    elif memory.device == "cuda":
        lines.append("KV cache and shares of a GPU: computed when the cluster has placed the workers")
    return lines


def host_line(plan: RunPlan) -> str:
    """What each worker that trains takes of its host's memory."""
    return f"host memory of each worker that trains, GiB: {in_gib(plan.host)}"


def in_gib(owners: dict[str, float], width: int = 0) -> str:
    """The sum of sizes, and each of them."""
    parts = ", ".join(f"{name} {value / GIB:.3f}" for name, value in owners.items())
    return f"{sum(owners.values()) / GIB:{width}.3f} = {parts or 'none'}"


def room_without_offloads(memory: Memory, total: int, share: float) -> list[str]:
    """A line that names the student's offloads which a GPU of `total` bytes can do without; none if it needs them.

    The rollout engine keeps its share: a smaller KV cache might cost more than the copies.
    """
    keys = {"param_offload": ("actor_params", FROZEN), "optimizer_offload": ("optimizer_state",)}
    offloads = [key for key, owners in keys.items() if memory.moves[owners[0]]]
    for off in filter(None, (offloads, offloads[:-1])):  # an update needs the parameters in any case
        moves = memory.moves | {owner: False for key in off for owner in keys[key] if owner in memory.moves}
        other = dataclasses.replace(memory, moves=moves)
        with contextlib.suppress(ConfigError):  # it does not fit
            other.check(total)
            phases = other.phases(total)
            largest = max(sum(owners.values()) for phase, owners in phases.items() if phase != "rollout")
            if other.share_of_engine(total) == share and largest <= (1 - SPARE) * total:
                settings = " ".join(f"actor_rollout_ref.actor.fsdp_config.{key}=false" for key in off)
                return [
                    f"offloads that this GPU does not need: {settings} saves each step their copies; then no phase but "
                    f"the rollout holds more than {largest / GIB:.1f} GiB"
                ]
    return []


def time_plan(config: Config, steps: int, done: int) -> str:
    """How long the steps will take, where an earlier run in this folder with the same settings tells it.

    `steps`: of the whole run, of which `done` are behind.
    """
    taken = earlier_step_seconds(config)
    todo = f"steps: {steps - done}"
    if taken is None:
        return f"{todo}; how long they take is known after a run with these settings in {config.run_dir}"
    total = datetime.timedelta(seconds=round((steps - done) * taken))
    return f"{todo}, about {total} at {taken:.2f} s each, as in the run there"


def earlier_step_seconds(config: Config) -> float | None:
    """Mean time of a step, validation and checkpoints included, of the run in the run folder; None without one."""
    metrics = config.run_dir / "metrics.jsonl"
    earlier, problems = examine_config(config_name="config", config_path=config.run_dir)
    if earlier is None or problems or _pace(earlier) != _pace(config) or not metrics.is_file():
        return None
    rows = list(read_json_lines(metrics))
    names = ("timing/step", "timing/testing", "timing/save_checkpoint")
    seconds = [sum(row.get(name, 0.0) for name in names) for row in rows if "timing/step" in row]
    return statistics.mean(seconds[1:] or seconds) if seconds else None  # the first one also warms up


def loading_plan(loaded: dict[str, Any], project: Path) -> str:
    """The weights that a start reads, and how long the last start of the project that loaded the same took."""
    sizes = {path: _weight_bytes(path) for path in loaded["models"]}
    missing = [path for path, size in sizes.items() if not size]
    total = sum(sizes.values())
    size = f"{total / GIB:.1f} GiB" if total > GIB / 10 else f"{total / 2**20:.1f} MiB"
    known = f"{size} of weights to read" if total else ""
    fetched = f"not on this machine yet: {', '.join(missing)}" if missing else ""
    last = _last_loading(project, loaded)
    took = "how long it takes is known after a start with these models"
    if last is not None:
        when = datetime.datetime.fromtimestamp(last[0]).strftime("%Y-%m-%d %H:%M")
        took = f"it took {last[1]:.0f} s last time ({when})"
    return f"loading: {'; '.join(filter(None, (known, fetched, took)))}"


def what_is_loaded(config: Config, *, device: str, engine: str) -> dict[str, Any]:
    """See `RunPlan.loaded`; the models are folders or hub ids."""
    arr, workers = config.actor_rollout_ref, [config.world_size, config.rollout_world_size]
    own_teacher = config.distillation.enabled and arr.teacher.is_local
    paths = [arr.model.path] + [arr.teacher.model.path or ""] * own_teacher
    paths += [config.critic_model.path] * config.uses_critic
    paths += [config.reward_model.model.path or ""] * config.uses_reward_model
    paths += [config.ref_model.path] * config.has_reference_model
    models = [os.path.abspath(path) if os.path.isdir(path) else path for path in paths]
    return {"host": socket.gethostname(), "device": device, "engine": engine, "workers": workers, "models": models}


def _weight_bytes(path: str) -> int:
    """Of a model's files on this machine; 0 for a hub id whose weights are not there."""
    folder = local_folder(path)
    for suffix in WEIGHT_SUFFIXES:  # a folder may have the same weights in several formats
        files = list(folder.glob(f"*{suffix}")) if folder is not None else []
        if files:
            return sum(file.stat().st_size for file in files)
    return 0


def _last_loading(project: Path, loaded: dict[str, Any]) -> tuple[float, float] | None:
    """When the last start of a project that loaded the same began, and the seconds until it could train."""
    found = list[tuple[float, float]]()
    for file in project.glob(f"*/{STARTS}"):
        start: dict[str, Any] = {}
        for row in read_json_lines(file):
            start = row if "start" in row else start
            if "ready" in row and start.get("loaded") == loaded:
                found.append((start["start"], row["ready"] - start["start"]))
    return max(found, default=None)


def _pace(config: Config) -> list[Any]:
    """The settings that decide how long a step takes."""
    trainer = config.trainer
    other = [trainer.nnodes, trainer.n_gpus_per_node, trainer.scheduler, trainer.device, config.rollout]
    other += [trainer.test_freq, trainer.save_freq, trainer.critic_warmup]
    sections = [config.data, config.actor_rollout_ref, config.critic, config.algorithm, config.distillation]
    return [*sections, config.reward_model, *other]


def check_free_memory(memory: Memory, placements: list[Placement], *, beside_teacher: bool = False) -> None:
    """Refuse a GPU that is too small for a phase, or of which others hold too much. Raises ConfigError with the sizes.

    The placements are measured before the workers load; with `beside_teacher` a local teacher that shares a GPU has its
    memory already, or takes it meanwhile.
    """
    on_gpus = [place for place in placements if place.gpu is not None]
    for role, total_bytes in dict.fromkeys((place.role, place.total_bytes) for place in on_gpus):
        memory.check(total_bytes, role)
    computed = memory.engine_share is None  # then from what is free
    ignored = ({"kv_cache"} if computed else set()) | ({"teacher"} if beside_teacher else set())
    for place in on_gpus:
        for phase, owners in memory.phases(place.total_bytes).items():
            needed = sum(value for name, value in owners.items() if name not in ignored)
            if has_phase(place.role, phase) and needed > place.free_bytes:
                raise ConfigError(
                    "trainer.n_gpus_per_node",
                    f"{place.worker} ({place}) needs {needed / GIB:.1f} GiB in the phase {phase}; another process, "
                    "perhaps a teacher, holds what is not free: stop it, or leave this GPU out of CUDA_VISIBLE_DEVICES",
                    show_value=False,
                )


def checkpoint_bytes(section: CheckpointConfig, trained: Sequence[TrainedModel]) -> int:
    """Bytes of one checkpoint: of each model weights or adapters and both moments, and the Hugging Face folders."""
    student = trained[0]
    adapters = student.master if student.spec.adapter_parameters and section.save_hf_model else 0
    return 3 * sum(model.master for model in trained) + adapters + exported_bytes(section, student.spec)


def disk_bytes(config: Config, one: int, *, steps: int | None) -> int:
    """Bytes that have to be free for the checkpoints of a run, in addition to those already in its folder.

    An old checkpoint is removed when the next is complete, so for a moment there is one more than are kept, and the
    best one beside them. Where all are kept, there has to be room for the next one. What a killed run has reserved or
    begun to write makes room for it. `one`: of a checkpoint; `steps`: of the whole run, None where that is not known.
    """
    trainer = config.trainer
    if trainer.save_freq == 0 or trainer.val_only:
        return 0
    goes_on = trainer.resume_mode != "disable"  # else the run folder is moved aside
    freed = _file_bytes(config.run_dir, RESERVED, f"{UNFINISHED}/**/*") if goes_on else 0
    keeps_best = trainer.best_metric is not None
    if trainer.max_actor_ckpt_to_keep is None or (trainer.save_freq == -1 and not keeps_best):
        return max(0, one - freed)
    number = trainer.max_actor_ckpt_to_keep + 1 + keeps_best
    if steps is not None:
        frequencies = [trainer.save_freq, *([trainer.test_freq] if keeps_best else [])]
        number = min(number, sum(math.ceil(steps / each) if each > 0 else 1 for each in frequencies))
    present = _file_bytes(config.run_dir, "global_step_*/**/*") if goes_on else 0
    return max(0, max(one, number * one - present) - freed)


def _file_bytes(folder: Path, *patterns: str) -> int:
    total = 0
    for file in itertools.chain.from_iterable(map(folder.glob, patterns)):
        with contextlib.suppress(FileNotFoundError):  # another run may be removing it
            total += file.stat().st_size
    return total

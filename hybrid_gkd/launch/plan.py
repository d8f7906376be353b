"""The plan of a run, made once before the start: workers, memory by phase, time, disk space for checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import socket
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hybrid_gkd.config import CheckpointConfig, Config, RunTeacher, has_several_teachers, run_teachers
from hybrid_gkd.config.loading import examine_config
from hybrid_gkd.config.teachers import has_base_of, service_differences
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.models.fingerprint import WEIGHT_SUFFIXES, local_folder
from hybrid_gkd.offload.budget import GIB, Memory, TeacherPlacement, has_phase
from hybrid_gkd.offload.needs import TrainedSpec, exported_bytes, plan_memory
from hybrid_gkd.offload.residency import FROZEN
from hybrid_gkd.reporting.starts import STARTS, read_starts
from hybrid_gkd.runtime.files import is_in_memory, read_json_lines
from hybrid_gkd.student.checkpoint_store import RESERVED, SNAPSHOT, UNFINISHED
from hybrid_gkd.workers.placement import Placement

FREE_FRACTION = 0.1
"""Fraction of a GPU that must stay free before offloads are called unnecessary; activations are lower bounds."""
TOKENIZER_BYTES = 32 * 2**20
"""Disk space for the files of a checkpoint that hold no tensors."""
EXPORTED_FILES = 64
"""Maximum number of files of a checkpoint besides those of the workers."""
OWN_WEIGHTS = {
    "initial": "the student's initial weights", "ema": "the student's moving average (decay {decay:g})",
    "live": "the student's present weights behind another prompt",
}  # fmt: skip
"""teacher.source -> description of a teacher without a service."""


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Resources that a run takes, from its configuration and the results of the checks."""

    memory: Memory
    gpu_bytes: int | None
    """Memory of this machine's first GPU; None without one, or if the workers use none."""
    card_bytes: int | None
    """Memory of each worker's GPU; None for a given cluster until the workers are placed."""
    host: dict[str, float]
    """Owner -> bytes of host memory for all training workers of the first node; other nodes need no more."""
    copy_bytes: tuple[float, ...] | None
    """Host memory of each training worker, by rank, if checkpoints are written in the background, else None."""
    loaded: dict[str, Any]
    """Models and workers, kept in starts.jsonl to predict the loading time of later starts."""
    places: tuple[str, ...]
    """Lines about workers, rollout engine, batch and teacher."""
    times: tuple[str, ...]
    """Lines about steps and loading."""
    checkpoint_bytes: int
    """Disk space of one checkpoint."""

    @property
    def phases(self) -> dict[str, dict[str, float]]:
        """Return phase -> owner -> bytes on each worker; without `card_bytes` the fractions of a GPU are left out."""
        return self.memory.phases(self.card_bytes)

    def __str__(self) -> str:
        return "\n".join([*self.places, *memory_lines(self), *self.times])


def make_plan(
    config: Config, trained: tuple[TrainedSpec, ...], device: str,
    teachers: Mapping[str, TeacherPlacement] = MappingProxyType({}), *,
    engine: str = "none", gpu_bytes: int | None = None, steps: int | None = None, steps_done: int = 0,
) -> RunPlan:
    """Make the plan of a run, with local `teachers` by label.

    The GPUs of a given cluster are checked after the workers are placed, see `check_free_memory`. Raises ConfigError: a
    phase does not fit into this machine's GPU; ModelError: a model's configuration cannot be read.
    """
    memory = plan_memory(config, trained, device, teachers)
    card_bytes = gpu_bytes if config.ray_init.address is None else None
    if card_bytes is not None:
        memory.check(card_bytes)
    saves, snapshots = config.saves_while_training(steps), snapshots_in_memory(config, trained)
    host = [owners | snapshots for owners in memory.host(saves=saves)]
    first_node = host[: config.trainer.n_gpus_per_node]
    loaded = describe_loading(config, device=device, engine=engine)
    times = (duration_line(config, steps, steps_done),) if steps else ()
    return RunPlan(
        memory=memory, gpu_bytes=gpu_bytes, card_bytes=card_bytes,
        host={name: sum(each[name] for each in first_node) for name in host[0]},
        copy_bytes=tuple(sum(each.values()) for each in host) if saves else None, loaded=loaded,
        places=placement_lines(config, device=device, engine=engine),
        times=(*times, loading_line(loaded, config.experiment_dir.parent)),
        checkpoint_bytes=checkpoint_bytes(config.actor_rollout_ref.actor.checkpoint, trained),
    )  # fmt: skip


def placement_lines(config: Config, *, device: str, engine: str) -> tuple[str, ...]:
    """Return lines about workers, rollout engine, batch and teacher."""
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
            f"group filtering: uninformative groups ({refill.metric}) are replaced, with at most "
            f"{refill.max_num_gen_batches} generation batches of "
            f"{config.data.gen_batch_size or config.data.train_batch_size} prompts per step"
        )
    for teacher in run_teachers(config):
        section = teacher.section
        where = ", ".join(section.endpoints) if section.server_ip else describe_service(config, teacher)
        where += f" with its adapter {section.adapter}" if section.server_ip and section.adapter else ""
        where = f"scores in {section.cache}" if section.is_stored else where
        where = OWN_WEIGHTS.get(section.source, where).format(decay=section.ema_decay)
        where += f", key {teacher.key}" if has_several_teachers(config) else ""
        ensemble = config.distillation.ensemble
        where += f", weight {teacher.weight:g} ({ensemble})" if ensemble != "none" else ""
        loss = config.distillation.loss_fn or config.distillation.loss_mode
        topk = f"top-{config.distillation.topk}"
        topk += f" of {config.distillation.candidates}" if config.distillation.given_topk else ""
        lines.append(f"{teacher.label}: {where}, {topk}, {loss}, tail {config.distillation.tail}")
    return tuple(lines)


def describe_service(config: Config, teacher: RunTeacher) -> str:
    """Describe the service of a local teacher, and why it does not share an earlier service of the same model."""
    folder = teacher.section.model.lora_adapter_path
    adapter = f" with the adapter {folder}" if folder is not None else ""
    if teacher.service != teacher.label:
        return f"served by {teacher.service}{adapter}"
    for other in itertools.takewhile(lambda each: each.label != teacher.label, run_teachers(config)):
        differ = service_differences(other, teacher)
        if has_base_of(other, teacher) and differ and (other.adapters or teacher.adapters):
            return f"started by this run{adapter}, not served by {other.service} (other {', '.join(differ)})"
    return f"started by this run{adapter}"


def memory_lines(plan: RunPlan) -> list[str]:
    """Return lines about the memory of each worker by phase, and vLLM's fractions of a GPU."""
    memory, spec = plan.memory, plan.memory.specs["student"]
    adapters = f" below {spec.adapter_parameters / 1e6:.1f} M in adapters" if spec.adapter_parameters else ""
    others = [name for name in memory.specs if name not in ("student", "reference")]
    lines = [
        f"student: {spec.parameters / 1e6:.1f} M parameters{adapters}, {memory.engine.token:.0f} bytes of KV cache "
        "per token and worker",
        *(f"{name}: {memory.specs[name].parameters / 1e6:.1f} M parameters" for name in others),
        "memory of each worker by phase, GiB (activations are lower bounds):",
    ]
    lines += [f"  {phase:21s} {format_gib(owners, 8)}" for phase, owners in plan.phases.items()]
    lines.append(host_line(plan))
    if plan.card_bytes is not None:
        fractions = {"rollout engine": memory.engine_fraction(plan.card_bytes)}
        fractions |= {f"local {label}": memory.teacher_fraction(plan.card_bytes, label) for label in memory.teachers}
        text = ", ".join(f"{name} {fraction:g}" for name, fraction in fractions.items())
        lines.append(f"fractions of a GPU of {plan.card_bytes / GIB:.1f} GiB (gpu_memory_utilization): {text}")
        lines += unnecessary_offloads(memory, plan.card_bytes)
    elif memory.device == "cuda":
        lines.append("KV cache and fractions of a GPU: computed after the cluster has placed the workers")
    return lines


def host_line(plan: RunPlan) -> str:
    """Return a line about the host memory of a node's training workers."""
    return f"host memory of the first node's training workers, GiB: {format_gib(plan.host)}"


def format_gib(owners: dict[str, float], width: int = 0) -> str:
    """Format the sum of sizes in bytes and its summands, in GiB."""
    parts = ", ".join(f"{name} {value / GIB:.3f}" for name, value in owners.items())
    return f"{sum(owners.values()) / GIB:{width}.3f} = {parts or 'none'}"


def unnecessary_offloads(memory: Memory, total: int) -> list[str]:
    """Return a line about offloads of the student that a GPU of `total` bytes does not need; empty if it needs them.

    The rollout engine keeps its fraction, because a smaller KV cache might cost more than the copies.
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
            if other.engine_fraction(total) == memory.engine_fraction(total) and largest <= (1 - FREE_FRACTION) * total:
                settings = " ".join(f"actor_rollout_ref.actor.fsdp_config.{key}=false" for key in off)
                return [
                    f"unnecessary offloads on this GPU: {settings} saves their copies in each step; all phases but the "
                    f"rollout then need at most {largest / GIB:.1f} GiB"
                ]
    return []


def duration_line(config: Config, steps: int, done: int) -> str:
    """Return a line about the duration of the steps, from an earlier run in this folder with the same settings.

    `steps`: number of steps of the whole run; `done`: number of completed steps.
    """
    taken = earlier_step_seconds(config)
    todo = f"steps: {steps - done}"
    if taken is None:
        return f"{todo}; no duration known: no earlier run with these settings in {config.run_dir}"
    total = datetime.timedelta(seconds=round((steps - done) * taken))
    return f"{todo}, about {total} at {taken:.2f} s each, as in the earlier run"


def earlier_step_seconds(config: Config) -> float | None:
    """Return the mean time of a step, validation and checkpoints included, of an earlier run in the folder, or None."""
    metrics = config.run_dir / "metrics.jsonl"
    earlier, problems = examine_config(config_name="config", config_path=config.run_dir)
    if earlier is None or problems or _speed_settings(earlier) != _speed_settings(config) or not metrics.is_file():
        return None
    rows = list(read_json_lines(metrics))
    names = ("timing/step", "timing/testing", "timing/save_checkpoint")
    seconds = [sum(row.get(name, 0.0) for name in names) for row in rows if "timing/step" in row]
    return statistics.mean(seconds[1:] or seconds) if seconds else None  # the first step includes warm-up


def loading_line(loaded: dict[str, Any], project: Path) -> str:
    """Return a line about the weights to read, and the duration of the last start with the same models."""
    sizes = {path: _weight_bytes(path) for path in loaded["models"]}
    missing = [path for path, size in sizes.items() if not size]
    total = sum(sizes.values())
    size = f"{total / GIB:.1f} GiB" if total > GIB / 10 else f"{total / 2**20:.1f} MiB"
    known = f"{size} of weights to read" if total else ""
    fetched = f"to be downloaded: {', '.join(missing)}" if missing else ""
    last = _last_loading(project, loaded)
    took = "no duration known: no earlier start with these models"
    if last is not None:
        when = datetime.datetime.fromtimestamp(last[0]).strftime("%Y-%m-%d %H:%M")
        took = f"it took {last[1]:.0f} s last time ({when})"
    return f"loading: {'; '.join(filter(None, (known, fetched, took)))}"


def describe_loading(config: Config, *, device: str, engine: str) -> dict[str, Any]:
    """Return the value of `RunPlan.loaded`; models are folders or hub ids."""
    arr, workers = config.actor_rollout_ref, [config.world_size, config.rollout_world_size]
    teachers = [teacher.section for teacher in run_teachers(config)]
    paths = [arr.model.path, *(section.model.path or "" for section in teachers if section.is_local)]
    paths += [config.critic_model.path] * config.uses_critic
    paths += [config.reward_model.model.path or ""] * config.uses_reward_model
    paths += [config.ref_model.path] * config.has_reference_model
    models = [os.path.abspath(path) if os.path.isdir(path) else path for path in paths]
    return {"host": socket.gethostname(), "device": device, "engine": engine, "workers": workers, "models": models}


def _weight_bytes(path: str) -> int:
    """Return the size of a model's weight files on this machine; 0 for a hub id that is not downloaded."""
    folder = local_folder(path)
    for suffix in WEIGHT_SUFFIXES:  # a folder may have the same weights in several formats
        files = list(folder.glob(f"*{suffix}")) if folder is not None else []
        if files:
            return sum(file.stat().st_size for file in files)
    return 0


def _last_loading(project: Path, loaded: dict[str, Any]) -> tuple[float, float] | None:
    """Return begin and duration in seconds of the last start of a project with the same models."""
    starts = (start for file in project.glob(f"*/{STARTS}") for start in read_starts(file.parent))
    same = (start for start in starts if "ready" in start and start.get("loaded") == loaded)
    return max(((start["start"], start["ready"] - start["start"]) for start in same), default=None)


def _speed_settings(config: Config) -> list[Any]:
    """Return the settings that determine the duration of a step."""
    trainer = config.trainer
    other = [trainer.nnodes, trainer.n_gpus_per_node, trainer.scheduler, trainer.device, config.rollout]
    other += [trainer.test_freq, trainer.save_freq, trainer.critic_warmup]
    sections = [config.data, config.actor_rollout_ref, config.critic, config.algorithm, config.distillation]
    return [*sections, config.reward_model, *other]


def check_free_memory(memory: Memory, placements: list[Placement], *, beside_teacher: bool = False) -> None:
    """Check that each worker's GPU is large enough for every phase, and that other processes leave enough of it free.

    The placements are measured before the workers load. `beside_teacher`: ignore the memory of a local teacher on the
    same GPU, which may be allocated already. Raises ConfigError with the sizes.
    """
    on_gpus = [place for place in placements if place.gpu is not None]
    for role, total_bytes in dict.fromkeys((place.role, place.total_bytes) for place in on_gpus):
        memory.check(total_bytes, role)
    computed = memory.configured_fraction is None  # then from the free memory
    ignored = ({"kv_cache"} if computed else set()) | (memory.teachers.keys() if beside_teacher else set())
    for place in on_gpus:
        for phase, owners in memory.phases(place.total_bytes).items():
            needed = sum(value for name, value in owners.items() if name not in ignored)
            if has_phase(place.role, phase) and needed > place.free_bytes:
                raise ConfigError(
                    "trainer.n_gpus_per_node",
                    f"{place.worker} ({place}) needs {needed / GIB:.1f} GiB in the phase {phase}, but another process, "
                    "perhaps a teacher, uses this GPU: stop it, or remove the GPU from CUDA_VISIBLE_DEVICES",
                    show_value=False,
                )


def check_host_memory(config: Config, host: dict[str, float], free_bytes: int) -> None:
    """Check that a machine has the host memory for a second copy of the student's weights, if that is the teacher.

    `host`: see `RunPlan.host`; `free_bytes`: free memory of the machine. Raises ConfigError with the sizes.
    """
    if not config.teaches_itself or not (config.has_moving_average or config.has_reference_model):
        return
    workers, source = config.trainer.n_gpus_per_node, config.actor_rollout_ref.teacher.source
    needed = sum(size for owner, size in host.items() if owner not in ("checkpoint", "snapshots"))
    if needed > free_bytes:
        raise ConfigError(
            "actor_rollout_ref.teacher.source",
            f"with a second copy of the student's weights {workers} training worker(s) need {needed / GIB:.1f} GiB of "
            f"host memory, but {free_bytes / GIB:.1f} GiB are free; live needs no copy, and with LoRA "
            "(actor_rollout_ref.model.lora_rank) it is small", source,
        )  # fmt: skip


def check_sleeping_teachers(config: Config, teachers: Mapping[str, TeacherPlacement], free_bytes: int) -> None:
    """Check that this machine has the host memory for the teachers that sleep while another one scores.

    `teachers`: by label; `free_bytes`: free memory of the machine. Raises ConfigError with the sizes.
    """
    places = ((teacher.section.model.path or "", teachers.get(teacher.label)) for teacher in run_teachers(config))
    sizes = [_weight_bytes(path) * each.replicas for path, each in places if each and each.takes_turns and each.gpus]
    needed = sum(sizes) - min(sizes, default=0)
    if needed > free_bytes:
        raise ConfigError(
            "distillation.teacher_sharing",
            f"the models of sleeping teachers need {needed / GIB:.1f} GiB of host memory, "
            f"{free_bytes / GIB:.1f} GiB are free", config.distillation.teacher_sharing,
        )  # fmt: skip


def checkpoint_bytes(section: CheckpointConfig, trained: Sequence[TrainedSpec]) -> int:
    """Return the size of a checkpoint: weights or adapters and both Adam moments of each model, exports, tokenizer."""
    return sum(model.saved for model in trained) + exported_bytes(section, trained[0]) + TOKENIZER_BYTES


def checkpoint_files(config: Config) -> int:
    """Return an upper estimate of the files of one checkpoint: of each worker, of the exports, and folders."""
    return 2 * config.world_size + EXPORTED_FILES


def disk_bytes(config: Config, one: int, *, steps: int | None) -> int:
    """Return the bytes that must be free for the checkpoints of a run, beyond those already in its folder.

    An old checkpoint is removed after the next one is complete, so that one more than the kept ones exists at times,
    and the best one besides. If all are kept, the next one must fit. Space reserved or partly written by a killed run
    is reused. `one`: bytes of a checkpoint; `steps`: of the whole run, None if unknown.
    """
    trainer = config.trainer
    if trainer.save_freq == 0 or trainer.val_only:
        return 0
    resumes = trainer.resume_mode != "disable"  # else the run folder is renamed
    freed = _file_bytes(config.run_dir, RESERVED, f"{UNFINISHED}/**/*") if resumes else 0
    keeps_best = trainer.best_metric is not None
    if trainer.max_actor_ckpt_to_keep is None or (trainer.save_freq == -1 and not keeps_best):
        return max(0, one - freed)
    number = trainer.max_actor_ckpt_to_keep + 1 + keeps_best
    if steps is not None:
        frequencies = [trainer.save_freq, *([trainer.test_freq] if keeps_best else [])]
        number = min(number, sum(math.ceil(steps / each) if each > 0 else 1 for each in frequencies))
    present = _file_bytes(config.run_dir, "global_step_*/**/*") if resumes else 0
    return max(0, max(one, number * one - present) - freed)


def room_for_snapshots(config: Config, trained: Sequence[TrainedSpec]) -> int:
    """Return the bytes that must be free for two snapshots, the newest and the next one.

    0 without `trainer.snapshot_freq`: such snapshots end when the disk is full.
    """
    return _snapshot_bytes(config, trained) if config.trainer.snapshot_freq and config.takes_snapshots else 0


def _snapshot_bytes(config: Config, trained: Sequence[TrainedSpec]) -> int:
    """Return the bytes of two snapshots, beyond those already in the run folder."""
    return max(0, 2 * sum(model.saved for model in trained) - _file_bytes(config.run_dir, f"{SNAPSHOT}/**/*"))


def snapshots_in_memory(config: Config, trained: Sequence[TrainedSpec]) -> dict[str, float]:
    """Return each worker's part of two snapshots' bytes as an owner of host memory, if `snapshot_dir` is in memory."""
    place = config.trainer.snapshot_dir
    if place is None or not config.takes_snapshots or not is_in_memory(Path(place).expanduser()):
        return {}
    return {"snapshots": _snapshot_bytes(config, trained) / config.world_size}


def _file_bytes(folder: Path, *patterns: str) -> int:
    total = 0
    for file in itertools.chain.from_iterable(map(folder.glob, patterns)):
        with contextlib.suppress(FileNotFoundError):  # another run may be removing it
            total += file.stat().st_size
    return total

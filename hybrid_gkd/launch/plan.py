"""The plan of a run as text: workers, memory by phase, time; and the room that its checkpoints and GPUs need."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import socket
import statistics
from pathlib import Path
from typing import Any

from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import examine_config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.launch.inputs import WEIGHT_SUFFIXES
from hybrid_gkd.models.spec import ModelSpec, critic_spec, reward_model_spec
from hybrid_gkd.offload import budget
from hybrid_gkd.offload.budget import GIB
from hybrid_gkd.reporting.starts import STARTS
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.student.checkpoint_store import RESERVED, UNFINISHED
from hybrid_gkd.workers.placement import Placement

SPARE = 0.1
"""Of a GPU: offloads are called unnecessary only where so much stays free, since activations are "at least"."""


def placement_plan(config: Config, *, device: str, engine: str) -> str:
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
        loss = config.distillation.loss_fn or config.distillation.loss_mode
        lines.append(f"teacher: {where}, top-{config.distillation.topk}, {loss}, tail {config.distillation.tail}")
    return "\n".join(lines)


def memory_plan(config: Config, spec: ModelSpec, *, device: str, steps: int | None = None) -> str:
    """Memory of each worker by phase, and vLLM's shares of a GPU.

    Raises:
        ConfigError: a phase does not fit into this machine's GPU. Those of a given cluster are known when the workers
            are placed, see `check_free_memory`.
        ModelError: the configuration of a local teacher cannot be read.
    """
    total = gpu_bytes(config, device)
    _, token = budget.engine_bytes(config, spec, device)
    adapters = f" below {spec.adapter_parameters / 1e6:.1f} M in adapters" if spec.adapter_parameters else ""
    lines = [
        f"student: {spec.parameters / 1e6:.1f} M parameters{adapters}, {token:.0f} bytes of KV cache a token per "
        "worker",
        "memory of each worker by phase, GiB (activations: at least):",
    ]
    if config.uses_critic:
        lines.insert(1, f"critic: {critic_spec(config, spec).parameters / 1e6:.1f} M parameters")
    if config.uses_reward_model:
        lines.insert(1, f"reward model: {reward_model_spec(config).parameters / 1e6:.1f} M parameters")
    for phase, owners in budget.phase_bytes(config, spec, device=device, total_bytes=total).items():
        parts = ", ".join(f"{name} {value / GIB:.3f}" for name, value in owners.items())
        lines.append(f"  {phase:21s} {sum(owners.values()) / GIB:8.3f} = {parts}")
    lines.append(host_plan(config, spec, device=device, steps=steps))
    if total is not None:
        shares = [f"rollout engine {budget.engine_share(config, spec, total):g}"]
        if config.distillation.enabled and config.actor_rollout_ref.teacher.server_ip is None:
            shares.append(f"local teacher {budget.teacher_share(config, total_bytes=total):g}")
        lines.append(f"shares of a GPU of {total / GIB:.1f} GiB (gpu_memory_utilization): {', '.join(shares)}")
        budget.check_memory(config, spec, total_bytes=total)
        lines += room_without_offloads(config, spec, total)
    elif device == "cuda":
        lines.append("KV cache and shares of a GPU: computed when the cluster has placed the workers")
    return "\n".join(lines)


def room_without_offloads(config: Config, spec: ModelSpec, total: int) -> list[str]:
    """A line that names the student's offloads which a GPU of `total` bytes can do without; none if it needs them.

    The rollout engine keeps its share: a smaller KV cache might cost more than the copies.
    """
    arr = config.actor_rollout_ref
    fsdp, share = arr.actor.fsdp_config, budget.engine_share(config, spec, total)
    keys = ("param_offload", "optimizer_offload") if arr.hybrid_engine else ("optimizer_offload",)
    offloads = [key for key in keys if getattr(fsdp, key)]
    for off in filter(None, (offloads, offloads[:-1])):  # an update needs the parameters in any case
        changes: dict[str, Any] = dict.fromkeys(off, False)
        actor = dataclasses.replace(arr.actor, fsdp_config=dataclasses.replace(fsdp, **changes))
        other = dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(arr, actor=actor))
        with contextlib.suppress(ConfigError):  # it does not fit
            budget.check_memory(other, spec, total_bytes=total)
            phases = budget.phase_bytes(other, spec, device="cuda", total_bytes=total)
            largest = max(sum(owners.values()) for phase, owners in phases.items() if phase != "rollout")
            if budget.engine_share(other, spec, total) == share and largest <= (1 - SPARE) * total:
                settings = " ".join(f"actor_rollout_ref.actor.fsdp_config.{key}=false" for key in off)
                return [
                    f"offloads that this GPU does not need: {settings} saves each step their copies; then no phase but "
                    f"the rollout holds more than {largest / GIB:.1f} GiB"
                ]
    return []


def host_plan(config: Config, spec: ModelSpec, *, device: str, steps: int | None) -> str:
    """What each worker that trains takes of its host's memory, a line."""
    owners = budget.host_bytes(config, spec, device=device, steps=steps)
    parts = ", ".join(f"{name} {value / GIB:.3f}" for name, value in owners.items())
    return f"host memory of each worker that trains, GiB: {sum(owners.values()) / GIB:.3f} = {parts or 'none'}"


def memory_by_phase(config: Config, spec: ModelSpec, *, device: str) -> dict[str, dict[str, float]]:
    """Phase -> owner -> bytes on each worker; without what depends on the GPUs of a given cluster."""
    found = budget.phase_bytes(config, spec, device=device, total_bytes=gpu_bytes(config, device))
    return {phase: dict(owners) for phase, owners in found.items()}


def gpu_bytes(config: Config, device: str) -> int | None:
    """Memory of this machine's first GPU, if the workers will run here."""
    import torch

    on_this_machine = device == "cuda" and config.ray_init.address is None
    return torch.cuda.get_device_properties(0).total_memory if on_this_machine else None


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


def loading_plan(config: Config, *, device: str, engine: str) -> str:
    """The weights that a start reads, and how long the last start that loaded the same took."""
    sizes = {path: _weight_bytes(path) for path in _models(config)}
    missing = [path for path, size in sizes.items() if not size]
    total = sum(sizes.values())
    size = f"{total / GIB:.1f} GiB" if total > GIB / 10 else f"{total / 2**20:.1f} MiB"
    known = f"{size} of weights to read" if total else ""
    fetched = f"not on this machine yet: {', '.join(missing)}" if missing else ""
    last = _last_loading(config, what_is_loaded(config, device=device, engine=engine))
    took = "how long it takes is known after a start with these models"
    if last is not None:
        when = datetime.datetime.fromtimestamp(last[0]).strftime("%Y-%m-%d %H:%M")
        took = f"it took {last[1]:.0f} s last time ({when})"
    return f"loading: {'; '.join(filter(None, (known, fetched, took)))}"


def what_is_loaded(config: Config, *, device: str, engine: str) -> dict[str, Any]:
    """What starts.jsonl keeps of a start, so that the time to load can be told before the next one."""
    workers = [config.world_size, config.rollout_world_size]
    models = [os.path.abspath(path) if os.path.isdir(path) else path for path in _models(config)]
    return {"host": socket.gethostname(), "device": device, "engine": engine, "workers": workers, "models": models}


def _models(config: Config) -> list[str]:
    """Folders or hub ids of the models that a start loads."""
    arr = config.actor_rollout_ref
    own_teacher = config.distillation.enabled and arr.teacher.server_ip is None
    others = [arr.teacher.model.path or ""] * own_teacher + [config.critic_model.path] * config.uses_critic
    others += [config.reward_model.model.path or ""] * config.uses_reward_model
    return [arr.model.path, *others, *[config.ref_model.path] * config.has_reference_model]


def _weight_bytes(path: str) -> int:
    """Of a model's files on this machine; 0 for a hub id whose weights are not there."""
    folder = path
    if not os.path.isdir(path):
        from huggingface_hub import try_to_load_from_cache  # takes a moment

        found = try_to_load_from_cache(path, "config.json")
        folder = os.path.dirname(found) if isinstance(found, str) else ""
    for suffix in WEIGHT_SUFFIXES:  # a folder may have the same weights in several formats
        files = list(Path(folder).glob(f"*{suffix}")) if folder else []
        if files:
            return sum(file.stat().st_size for file in files)
    return 0


def _last_loading(config: Config, loaded: dict[str, Any]) -> tuple[float, float] | None:
    """When the last start of this project that loaded the same began, and the seconds until it could train."""
    found = list[tuple[float, float]]()
    for file in config.experiment_dir.parent.glob(f"*/{STARTS}"):
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
    other += [trainer.test_freq, trainer.save_freq]
    other.append(trainer.critic_warmup)
    sections = [config.data, config.actor_rollout_ref, config.critic, config.algorithm, config.distillation]
    return [*sections, config.reward_model, *other]


def check_free_memory(
    config: Config, spec: ModelSpec, placements: list[Placement], *, beside_teacher: bool = False
) -> None:
    """Refuse a GPU that is too small for a phase, or of which others hold too much. Raises ConfigError with the sizes.

    The placements are measured before the workers load; with `beside_teacher` a local teacher that shares a GPU has its
    memory already, or takes it meanwhile.
    """
    for role, total_bytes in dict.fromkeys((place.role, place.total_bytes) for place in placements if place.gpu):
        budget.check_memory(config, spec, total_bytes=total_bytes, role=role)
    computed = config.actor_rollout_ref.rollout.gpu_memory_utilization is None  # then from what is free
    ignored = ({"kv_cache"} if computed else set()) | ({"teacher"} if beside_teacher else set())
    for place in placements:
        if place.gpu is None:
            continue
        for phase, owners in budget.phase_bytes(config, spec, device="cuda", total_bytes=place.total_bytes).items():
            needed = sum(value for name, value in owners.items() if name not in ignored)
            if budget.has_phase(place.role, phase) and needed > place.free_bytes:
                raise ConfigError(
                    "trainer.n_gpus_per_node",
                    f"{place.worker} ({place}) needs {needed / GIB:.1f} GiB in the phase {phase}; another process, "
                    "perhaps a teacher, holds what is not free: stop it, or leave this GPU out of CUDA_VISIBLE_DEVICES",
                    show_value=False,
                )


def checkpoint_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of one checkpoint: of each model weights or adapters and both moments, and the Hugging Face folders."""
    section = config.actor_rollout_ref.actor.checkpoint
    trained = [3 * model.itemsize * model.spec.trained_parameters for model in budget.trained_models(config, spec)]
    exported = spec.stored_itemsize * spec.parameters
    if spec.adapter_parameters:
        adapters = section.save_hf_model * trained[0] // 3
        return sum(trained) + adapters + section.save_merged * exported
    return sum(trained) + (section.save_hf_model or section.save_merged) * exported


def disk_bytes(config: Config, spec: ModelSpec, *, steps: int | None) -> int:
    """Bytes that have to be free for the checkpoints of a run, in addition to those already in its folder.

    An old checkpoint is removed when the next is complete, so for a moment there is one more than are kept, and the
    best one beside them. Where all are kept, there has to be room for the next one. What a killed run has reserved or
    begun to write makes room for it. `steps`: of the whole run, None where that is not known.
    """
    trainer, one = config.trainer, checkpoint_bytes(config, spec)
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

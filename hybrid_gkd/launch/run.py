"""One run from a configuration: check everything, start what is needed, train, stop what was started.

Order: inputs are checked before anything starts (models, tokenizers, data, run folder, a given teacher's
handshake); the local teacher and the workers then load side by side.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hybrid_gkd.checkpoint import CheckpointStore, load_state
from hybrid_gkd.config import Config, to_dict, to_yaml
from hybrid_gkd.data.prompts import load_prompts
from hybrid_gkd.errors import CheckpointError, ConfigError, ModelError, TeacherMismatch
from hybrid_gkd.files import free_path
from hybrid_gkd.models.spec import read_config, student_spec
from hybrid_gkd.models.tokenizer import first_line, load_tokenizer, tokenizer_hash
from hybrid_gkd.offload.budget import GIB, check_free_memory, disk_bytes, plan, teacher_share, teacher_shares_gpu
from hybrid_gkd.ppo.rewards import Reward, load_reward
from hybrid_gkd.ppo.trainer import PPOTrainer, num_updates, state_to_resume, total_steps
from hybrid_gkd.reporting.final_table import RunSummary
from hybrid_gkd.reporting.trace import recording
from hybrid_gkd.reporting.trackers import Tracking, load_trackers
from hybrid_gkd.rollout.vllm import resolve_engine
from hybrid_gkd.teacher.server.local import LocalTeacher
from hybrid_gkd.teacher.server.supervisor import visible_gpus
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Prompt, RunInfo
from hybrid_gkd.workers.group import WorkerGroup, ray_cluster
from hybrid_gkd.workers.placement import Placement, threads_per_process

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")


def run(config: Config, *, teacher_accuracy: float | None = None) -> RunSummary:
    """Train as `config` says.

    Args:
        config: checked configuration.
        teacher_accuracy: what the teacher reaches on the validation prompts, where that is known.

    Raises:
        HybridGKDError: see the tree in errors.py; everything that was started has been stopped.
    """
    started = time.monotonic()
    device = resolve_device(config)
    engine = resolve_engine(config.actor_rollout_ref.rollout.name)
    load_trackers(config.trainer.logger)  # one that cannot be imported shows now
    inputs = Inputs(config)
    steps = total_steps(config, len(inputs.train_prompts))
    check_disk(config, disk_bytes(config, student_spec(config), steps=steps))
    logger.info("%s", plan(config, device=device, engine=engine))  # refuses what this machine's GPUs cannot hold
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_run_folder(config))
        clock = stack.enter_context(recording(config.run_dir))
        store = CheckpointStore(config.run_dir, keep=config.trainer.max_actor_ckpt_to_keep)
        resume_from = find_checkpoint(config, store)
        if resume_from is not None:
            state_to_resume(resume_from, config, len(inputs.train_prompts))
        (config.run_dir / "config.yaml").write_text(to_yaml(config))
        teacher, local, shares_gpu = None, None, False
        if config.distillation.enabled:
            local = start_local_teacher(config, device, stack)
            if local is None:
                teacher = stack.enter_context(connect(config, inputs, config.actor_rollout_ref.teacher.endpoints))
        stack.enter_context(ray_cluster(config, device))
        if local is not None:
            local.check()  # a port in use shows now, before the workers load
            shares_gpu = device == "cuda" and teacher_shares_gpu(config)
            if shares_gpu:
                local.wait_ready()  # vLLM sizes its cache by the free memory, which must not change meanwhile
        group = stack.enter_context(
            contextlib.closing(
                WorkerGroup(
                    config, device=device, num_updates=num_updates(config, steps),
                    stop_token_ids=inputs.stop_token_ids,
                    on_placed=lambda placements: check_placement(config, placements, teacher_loaded=shares_gpu),
                )
            )
        )
        if local is not None:
            local.wait_ready()
            teacher = stack.enter_context(connect(config, inputs, [local.address]))
        describe(config, group)
        log = stack.enter_context(start_tracking(config, steps, resume_from))
        arguments: dict[str, Any] = {
            "group": group, "tokenizer": inputs.tokenizer, "train_prompts": inputs.train_prompts,
            "val_prompts": inputs.val_prompts, "reward": inputs.reward, "tracking": log, "store": store,
            "resume_from": resume_from, "clock": clock,
        }
        if local is not None:
            arguments |= {"check_teacher": local.check, "shares_gpu": shares_gpu}
        trainer = GKDTrainer(config, teacher=teacher, **arguments) if teacher else PPOTrainer(config, **arguments)
        trainer.fit()
    return summarise(trainer, started, teacher_accuracy)


def start_tracking(config: Config, steps: int, resume_from: Path | None) -> Tracking:
    """The trackers of `trainer.logger`. Raises ConfigError if one cannot start."""
    info = RunInfo(
        project_name=config.trainer.project_name,
        experiment_name=config.trainer.experiment_name,
        run_dir=config.run_dir,
        config=to_dict(config),
        total_steps=steps,
        start_step=load_state(resume_from).step if resume_from else 0,
        resume=resume_from is not None,
    )
    return Tracking(config.trainer.logger, info)


class Inputs:
    """Everything that is read before anything starts.

    Raises:
        ModelError, DataError, ConfigError, TeacherMismatch: what is wrong with them.
    """

    def __init__(self, config: Config):
        arr = config.actor_rollout_ref
        check_model_folder("actor_rollout_ref.model.path", arr.model.path)
        check_length("student", arr.model.path, config, config.max_sequence_length, arr.model.override_config)
        try:
            self.tokenizer = load_tokenizer(
                arr.model.tokenizer_path or arr.model.path, trust_remote_code=arr.model.trust_remote_code
            )
        except ModelError as error:
            key = "tokenizer_path" if arr.model.tokenizer_path else "path"
            raise ModelError(f"actor_rollout_ref.model.{key}: {error}") from error
        self.stop_token_ids = find_stop_token_ids(arr.model.path, self.tokenizer)
        self.reward: Reward | None = None
        if config.reward.answer_key is not None:
            custom = config.reward.custom_reward_function
            self.reward = load_reward(config.reward.name, custom.path, custom.name if custom.path else None)
        if config.distillation.enabled and arr.teacher.server_ip is None:
            self._check_local_teacher(config)
        self.train_prompts = self._load(config, "data.train_files", config.data.train_files)
        self.val_prompts = self._load(config, "data.val_files", config.data.val_files)
        total_steps(config, len(self.train_prompts))  # fewer prompts than one batch is an error now, not later

    def _check_local_teacher(self, config: Config) -> None:
        path = config.actor_rollout_ref.teacher.model.path
        assert path is not None
        check_model_folder("actor_rollout_ref.teacher.model.path", path)
        needed = config.max_sequence_length + 1  # vLLM has to generate a token to score
        check_length("teacher", path, config, needed, {})
        teacher = load_tokenizer(path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
        if tokenizer_hash(teacher) != tokenizer_hash(self.tokenizer):
            raise TeacherMismatch(
                "actor_rollout_ref.teacher.model.path: teacher and student must have the same vocabulary; "
                f"teacher {path} has {len(teacher)} tokens (hash {tokenizer_hash(teacher)[:12]}), student "
                f"{config.actor_rollout_ref.model.path} has {len(self.tokenizer)} "
                f"(hash {tokenizer_hash(self.tokenizer)[:12]})"
            )

    def _load(self, config: Config, key: str, files: list[str]) -> list[Prompt]:
        data = config.data
        if not files:
            return []
        return load_prompts(
            files, key=key, prompt_key=data.prompt_key, answer_key=config.reward.answer_key,
            tokenizer=self.tokenizer, max_prompt_length=data.max_prompt_length, truncation=data.truncation,
            filter_overlong_prompts=data.filter_overlong_prompts,
            apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        )


def resolve_device(config: Config) -> str:
    """`trainer.device` with auto resolved. Raises ConfigError if CUDA was asked for and is not there."""
    available = torch.cuda.is_available()
    if config.trainer.device == "cuda" and not available and config.ray_init.address is None:
        raise ConfigError("trainer.device", "no CUDA device is visible", "cuda")
    device = config.trainer.device
    if device == "auto":
        device = "cuda" if available else "cpu"
    workers = config.workers_per_node
    if device == "cuda" and config.ray_init.address is None and torch.cuda.device_count() < workers:
        own_pool = "" if config.actor_rollout_ref.hybrid_engine else ", rollout.n_gpus_per_node"
        rule = f"this machine has {torch.cuda.device_count()} GPUs"
        raise ConfigError(f"trainer.n_gpus_per_node{own_pool}", rule, workers)
    return device


def check_model_folder(key: str, path: str) -> None:
    """A path that is no folder must at least look like a hub id. Raises ModelError."""
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelError(f"{key}: the folder has no config.json; got {path!r}")
        if not any(file.suffix in WEIGHT_SUFFIXES for file in Path(path).iterdir()):
            raise ModelError(f"{key}: the folder has no weights ({', '.join(WEIGHT_SUFFIXES)}); got {path!r}")
    elif looks_local:
        raise ModelError(f"{key}: no such folder; got {path!r}")


def check_length(who: str, path: str, config: Config, needed: int, override_config: dict[str, Any]) -> None:
    """The longest possible sequence must fit the model. Raises ConfigError or ModelError."""
    try:
        hf_config = read_config(path, config.actor_rollout_ref.model.trust_remote_code, override_config)
    except (OSError, ValueError) as error:
        raise ModelError(f"{who} {path}: config.json cannot be used: {error}") from error
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and limit < needed:
        data = config.data
        raise ConfigError(
            "data.max_response_length",
            f"prompt limit and response limit together ({data.max_prompt_length} + {data.max_response_length}) need "
            f"{needed} positions, but the {who} {path} has {limit}",
            data.max_response_length,
        )


def find_stop_token_ids(path: str, tokenizer: Any) -> list[int]:
    """End-of-sequence ids of the tokenizer and of generation_config.json. Raises ModelError if there are none."""
    from transformers import GenerationConfig

    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    try:
        configured = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the file is optional
        configured = None
    except ValueError as error:
        raise ModelError(
            f"actor_rollout_ref.model.path: generation_config.json of {path} cannot be used: {first_line(error)}"
        ) from error
    ids += configured if isinstance(configured, list) else [] if configured is None else [configured]
    if not ids:
        raise ModelError(f"actor_rollout_ref.model.path: {path} defines no end-of-sequence token")
    return sorted(set(ids))


def check_disk(config: Config, needed: int) -> str:
    """Write to where the run folder is or will be, and compare the free space with what the checkpoints will take.

    Args:
        config: the whole configuration.
        needed: bytes that have to be free.

    Returns:
        What was found.

    Raises:
        ConfigError: it cannot be written to, or is too small.
    """
    folder = config.run_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            "trainer.default_local_dir", f"must be a folder that this user can write to: {error}", str(config.run_dir)
        ) from error
    if free < needed:
        raise ConfigError(
            "trainer.default_local_dir",
            f"the checkpoints of this run will take {needed / GIB:.1f} GiB more and {folder} has {free / GIB:.1f} GiB "
            "free; make room, name a larger disk, or lower trainer.max_actor_ckpt_to_keep", str(config.run_dir),
        )  # fmt: skip
    return f"{folder} can be written to, {free / GIB:.1f} GiB free, the checkpoints will take {needed / GIB:.2f} more"


@contextlib.contextmanager
def locked_run_folder(config: Config) -> Iterator[None]:
    """Create the run folder for this process alone.

    With `trainer.resume_mode=disable` an earlier run of the same name is moved aside, never overwritten.

    Raises:
        ConfigError: another process is writing there, or it cannot be created.
    """
    run_dir = config.run_dir
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir.parent / f".{run_dir.name}.lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError("trainer.default_local_dir", f"cannot be written to: {error}", show_value=False) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "trainer.experiment_name", f"another process is training in {run_dir}", run_dir.name
            ) from None
        if config.trainer.resume_mode == "disable" and run_dir.exists():
            aside = run_dir.rename(free_path(run_dir))
            logger.info("earlier run of this name moved to %s", aside)
        run_dir.mkdir(exist_ok=True)
        yield


def find_checkpoint(config: Config, store: CheckpointStore) -> Path | None:
    """The checkpoint to continue from."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        assert trainer.resume_from_path is not None
        folder = Path(trainer.resume_from_path)
        if not (folder / "trainer_state.json").is_file():
            raise CheckpointError(f"trainer.resume_from_path: no complete checkpoint there; got {str(folder)!r}")
        return folder
    folder_or_none = store.latest() if trainer.resume_mode == "auto" else None
    if folder_or_none is not None:
        logger.info("continuing from %s (trainer.resume_mode=auto)", folder_or_none)
    return folder_or_none


def start_local_teacher(config: Config, device: str, stack: contextlib.ExitStack) -> LocalTeacher | None:
    """Start a teacher on this machine unless one is given. It loads in the background. Raises ConfigError."""
    teacher = config.actor_rollout_ref.teacher
    if teacher.server_ip is not None:
        return None
    assert teacher.model.path is not None
    environment = teacher_environment(config, device)
    teacher_device = device if teacher.device == "auto" else teacher.device
    options = {
        "--backend": teacher.backend,
        "--device": teacher_device,
        "--tp-size": str(teacher.tensor_model_parallel_size),
        "--gpu-memory-utilization": str(_teacher_share(config, teacher_device)),
        "--max-model-len": str(teacher.max_model_len or config.max_sequence_length + 1),
    }
    flags = ["--trust-remote-code"] if config.actor_rollout_ref.model.trust_remote_code else []
    local = LocalTeacher(
        teacher.model.path,
        port=teacher.server_port or 0,
        n_logprobs=config.distillation.topk,
        options=[*(part for option in options.items() for part in option), *flags],
        environment=environment,
        start_timeout=teacher.start_timeout,
        log_path=config.run_dir / "logs" / "teacher.log",
    )
    return stack.enter_context(local)


def teacher_environment(config: Config, device: str) -> dict[str, str]:
    """What a local teacher sees of this machine: GPUs of this process, or its share of the cores.

    Raises:
        ConfigError: it is to have more GPUs than there are.
    """
    own = config.actor_rollout_ref.teacher.device
    if (device if own == "auto" else own) == "cuda":
        gpus, wanted = visible_gpus(), teacher_gpus(config)
        if not gpus:
            raise ConfigError("actor_rollout_ref.teacher.device", "no CUDA device is visible", own)
        if len(gpus) < len(wanted):
            raise ConfigError(
                "actor_rollout_ref.teacher.tensor_model_parallel_size", f"this machine shows {len(gpus)} GPUs",
                len(wanted),
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index] for index in wanted)}
    return {"OMP_NUM_THREADS": str(threads_per_process(config))} if device == "cpu" else {}


def _teacher_share(config: Config, device: str) -> float:
    if device != "cuda":
        return 0.9  # not used
    return teacher_share(config, total_bytes=torch.cuda.get_device_properties(0).total_memory)


def teacher_gpus(config: Config) -> list[int]:
    """GPUs of a local teacher, as this process counts: after the workers', or, if there are too few, theirs."""
    size = config.actor_rollout_ref.teacher.tensor_model_parallel_size
    first_free = config.workers_per_node
    first = first_free if torch.cuda.device_count() >= first_free + size else 0
    return list(range(first, first + size))


def connect(config: Config, inputs: Inputs, endpoints: list[str]) -> TeacherClient:
    """A client that has checked that this teacher fits this student."""
    teacher, model = config.actor_rollout_ref.teacher, config.actor_rollout_ref.model
    hf_config = read_config(model.path, model.trust_remote_code, model.override_config)
    client = TeacherClient(
        endpoints,
        topk=config.distillation.topk,
        temperature=config.distillation.temperature,
        vocab_size=hf_config.get_text_config().vocab_size,
        connect_timeout=teacher.connect_timeout,
        request_timeout=teacher.request_timeout,
        max_retries=teacher.max_retries,
        n_server_workers=teacher.n_server_workers,
        num_microbatches=teacher.num_microbatches,
        keys=teacher.keys,
    )
    try:
        server = client.handshake(
            tokenizer_hash=tokenizer_hash(inputs.tokenizer),
            tokenizer_size=len(inputs.tokenizer),
            max_sequence_length=config.max_sequence_length,
        )
    except BaseException:
        client.close()
        raise
    logger.info("teacher: %s at %s, engine %s", server.model.model, server.address, server.model.backend)
    return client


def check_placement(config: Config, placements: list[Placement], *, teacher_loaded: bool) -> None:
    """Say which worker got which GPU.

    Raises:
        ConfigError: the GPU is too small, or others, or the run's own teacher, hold what the worker needs.
    """
    for place in placements:
        logger.info("%s: %s", place.worker, place)
    refuse_teacher_gpu(config, placements)
    if any(place.gpu for place in placements):
        check_free_memory(config, student_spec(config), placements, teacher_loaded=teacher_loaded)


def refuse_teacher_gpu(config: Config, placements: list[Placement]) -> None:
    """Raises ConfigError if Ray gave a worker the GPU that a local teacher was to have for itself."""
    teacher = config.actor_rollout_ref.teacher
    local = config.distillation.enabled and teacher.server_ip is None and teacher.device != "cpu"
    if not local or teacher_shares_gpu(config) or not any(place.gpu for place in placements):
        return
    host = socket.gethostname()
    ids = {index: f"{host} {torch.cuda.get_device_properties(index).uuid}" for index in teacher_gpus(config)}
    for place in placements:
        for index, gpu in ids.items():
            if place.gpu == gpu:
                raise ConfigError(
                    "actor_rollout_ref.teacher.server_ip",
                    f"{place.worker} ({place}) got GPU {index}, on which this run starts its teacher; start the "
                    "teacher as a service on GPUs that Ray does not manage, and name its address here", None,
                )


def describe(config: Config, group: WorkerGroup) -> None:
    """Say what runs."""
    first = group.description[0]
    logger.info(
        "student: %s, %d worker(s) on %s, torch %s, rollout engine %s",
        config.actor_rollout_ref.model.path, group.size, first["device"], first["torch"], first["engine"],
    )
    logger.info("run folder: %s", config.run_dir)


def summarise(trainer: PPOTrainer, started: float, teacher_accuracy: float | None) -> RunSummary:
    """What the run has to show."""
    run_dir = trainer.config.run_dir
    huggingface = trainer.checkpoint / "huggingface" if trainer.checkpoint else None
    metrics = run_dir / "metrics.jsonl"
    return RunSummary(
        steps=trainer.step,
        wall_seconds=time.monotonic() - started,
        teacher_accuracy=teacher_accuracy,
        student_accuracy_before=trainer.first_metrics.get("val/accuracy"),
        student_accuracy_after=trainer.last_metrics.get("val/accuracy"),
        kl_first=trainer.first_metrics.get("actor/kl_loss"),
        kl_last=trainer.last_metrics.get("actor/kl_loss"),
        checkpoint=trainer.checkpoint,
        huggingface=huggingface if huggingface and huggingface.is_dir() else None,
        metrics=metrics if metrics.is_file() else None,
        config=run_dir / "config.yaml",
    )

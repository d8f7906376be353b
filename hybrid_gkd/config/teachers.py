"""The teachers of a run: actor_rollout_ref.teacher, and those of distillation.teacher_models."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

from hybrid_gkd.config.actor_rollout_ref import NamedTeacherConfig, TeacherConfig
from hybrid_gkd.config.schema import Config

logger = logging.getLogger(__name__)

UNNAMED, NAMED = "actor_rollout_ref.teacher", "distillation.teacher_models"
DEFAULT_TEACHER = "default"
"""Key of the teacher of all rows that no other teacher scores."""
OF_SERVICE = (
    "backend", "dtype", "device", "engine_kwargs", "tensor_model_parallel_size", "num_replicas",
    "gpu_memory_utilization", "max_model_len", "server_port", "start_timeout",
)  # fmt: skip
"""Fields of a teacher's section for the service that a run starts; the others are for its client."""


@dataclass(frozen=True)
class RunTeacher:
    """A teacher of a run."""

    key: str
    """Value of the column distillation.teacher_key in its rows, or DEFAULT_TEACHER."""
    where: str
    """Dotted key of its section."""
    config: Config
    """Configuration of a run with this teacher alone."""
    service: str = ""
    """Label of the teacher whose service scores its rows: its own, unless it shares one."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders of all adapters of the service, if it is its own and the run starts it."""

    @property
    def section(self) -> TeacherConfig:
        """Return its section."""
        return self.config.actor_rollout_ref.teacher

    @property
    def name(self) -> str:
        """Return its name below distillation.teacher_models; that of actor_rollout_ref.teacher is "teacher"."""
        return self.where.rpartition(".")[2]

    @property
    def label(self) -> str:
        """Return its name in messages: "teacher", or "teacher <name>" if it is one of distillation.teacher_models."""
        return "teacher" if self.where == UNNAMED else f"teacher {self.name}"

    @property
    def adapter(self) -> str | None:
        """Return the name by which the service knows its adapter; None without one."""
        section = self.section
        given, own = section.server_ip is not None, section.model.lora_adapter_path is not None
        return section.adapter if given else self.name if own else None

    @property
    def weight(self) -> float:
        """Return its weight with distillation.ensemble."""
        return self.section.weight if isinstance(self.section, NamedTeacherConfig) else 1.0


def run_teachers(config: Config) -> list[RunTeacher]:
    """Return the teachers of a run, empty without distillation; actor_rollout_ref.teacher comes last."""
    named, arr = config.distillation.teacher_models, config.actor_rollout_ref
    if not config.distillation.enabled:
        return []
    if not named:
        return _with_services([RunTeacher(DEFAULT_TEACHER, UNNAMED, config)])
    alone = dataclasses.replace(config, distillation=dataclasses.replace(config.distillation, teacher_models={}))
    found = [
        RunTeacher(section.key or name, f"{NAMED}.{name}", dataclasses.replace(
            alone, actor_rollout_ref=dataclasses.replace(arr, teacher=section)
        )) for name, section in named.items()
    ]  # fmt: skip
    return _with_services([*found, *([RunTeacher(DEFAULT_TEACHER, UNNAMED, alone)] if arr.teacher.is_set else [])])


def _with_services(teachers: list[RunTeacher]) -> list[RunTeacher]:
    """Let local teachers of one model and the same service settings share a service if any of them has an adapter."""
    found = list[RunTeacher]()
    for teacher in teachers:
        same = [each for each in teachers if has_base_of(each, teacher) and not service_differences(each, teacher)]
        adapters = tuple((each.name, path) for each in same if (path := each.section.model.lora_adapter_path))
        first = same[0] if adapters else teacher
        own = adapters if first is teacher else ()
        found.append(dataclasses.replace(teacher, service=first.label, adapters=own))
    return found


def has_base_of(teacher: RunTeacher, other: RunTeacher) -> bool:
    """Return whether this run starts both teachers with one model, adapters aside."""
    one, two = teacher.section, other.section
    return one.is_local and two.is_local and one.model.path == two.model.path


def service_differences(teacher: RunTeacher, other: RunTeacher) -> list[str]:
    """Return the fields of OF_SERVICE in which two teachers differ."""
    return [name for name in OF_SERVICE if getattr(teacher.section, name) != getattr(other.section, name)]


def has_several_teachers(config: Config) -> bool:
    """Return whether rows choose among teachers."""
    return config.distillation.enabled and bool(config.distillation.teacher_models)


def summed_teachers(config: Config) -> list[RunTeacher]:
    """Return the teachers that have a term of the loss each, with distillation.ensemble=sum; else none."""
    return run_teachers(config) if config.distillation.ensemble == "sum" and has_several_teachers(config) else []


def distillation_terms(config: Config) -> dict[str, str]:
    """Return term of the loss -> its signal: of all teachers together, or of each of `summed_teachers`."""
    found = {f"distillation/{each.name}": f"teacher/{each.name}" for each in summed_teachers(config)}
    return found or {"distillation": "teacher"}


def use_only_teacher(config: Config) -> None:
    """Make a single teacher of distillation.teacher_models that of actor_rollout_ref.teacher, as in verl."""
    named, unnamed = config.distillation.teacher_models, config.actor_rollout_ref.teacher
    if len(named) != 1 or unnamed.is_set:
        return
    ((name, own),), default = named.items(), TeacherConfig()
    if own.key not in (None, DEFAULT_TEACHER) or own.weight != 1:
        logger.warning("no effect: key and weight of %s.%s (a single teacher scores all rows)", NAMED, name)
    names = [entry.name for entry in dataclasses.fields(TeacherConfig)]
    changed = {name: getattr(own, name) for name in names if getattr(own, name) != getattr(default, name)}
    config.actor_rollout_ref.teacher = dataclasses.replace(unnamed, **changed)
    config.distillation.teacher_models = {}

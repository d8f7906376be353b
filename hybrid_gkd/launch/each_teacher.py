"""Run a check for each teacher, and check that each one has rows to score."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

from hybrid_gkd.config import DEFAULT_TEACHER, UNNAMED, Config, RunTeacher, has_several_teachers, run_teachers
from hybrid_gkd.data.routing import TeacherColumn
from hybrid_gkd.errors import ConfigError, call_all, rename_section
from hybrid_gkd.types import Task


def for_each_teacher(config: Config, check: Callable[[RunTeacher], str]) -> str:
    """Call a check for each teacher; return its results, with several teachers a line for each.

    Raises all errors together; each names the section of its teacher.
    """

    def named(teacher: RunTeacher) -> str:
        with rename_section(UNNAMED, teacher.where):
            found = check(teacher)
        return f"{teacher.label}: {found}" if has_several_teachers(config) else found

    return "\n".join(call_all(functools.partial(named, teacher) for teacher in run_teachers(config)))


def teacher_column(config: Config) -> TeacherColumn | None:
    """Return the column that names each row's teacher; None where all teachers score all rows."""
    keys = tuple(dict.fromkeys(teacher.key for teacher in run_teachers(config)))
    is_needed = has_several_teachers(config) and keys != (DEFAULT_TEACHER,)
    return TeacherColumn(config.distillation.teacher_key, keys) if is_needed else None


def describe_routing(config: Config, train_prompts: list[Task]) -> str:
    """Return the number of training rows of each of several teachers. Raises ConfigError: one has none."""
    if not has_several_teachers(config) or config.trainer.val_only:
        return ""
    rows = Counter(prompt.teacher for prompt in train_prompts)
    for teacher in run_teachers(config):
        if not rows[teacher.key]:
            column = config.distillation.teacher_key
            rule = f"no row of data.train_files has its key in the column {column!r} (distillation.teacher_key)"
            raise ConfigError(teacher.where, rule, teacher.key)
    return "; by teacher: " + ", ".join(f"{key} {number}" for key, number in rows.items())

"""The teacher of each row, with several teachers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_gkd.config import DEFAULT_TEACHER, NAMED
from hybrid_gkd.data.tables import short
from hybrid_gkd.errors import DataError


@dataclass(frozen=True)
class TeacherColumn:
    """Column with the key of each row's teacher."""

    name: str
    keys: tuple[str, ...]
    """Keys of the teachers; DEFAULT_TEACHER among them scores the rows without one of the others."""

    def key_of(self, values: dict[str, Any], where: str) -> str:
        """Return the key of a row's teacher. Raises DataError."""
        value = values.get(self.name)
        key = value if value in self.keys else DEFAULT_TEACHER
        if key not in self.keys:
            raise DataError(
                f"{where}, column {self.name!r} (distillation.teacher_key): must be the key of one of {NAMED}: "
                f"{', '.join(self.keys)}; got {short(value)}"
            )
        return key

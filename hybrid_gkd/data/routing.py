"""The teacher of each row, with several teachers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_gkd.config import DEFAULT_TEACHER, NAMED
from hybrid_gkd.data.tables import missing_column, short
from hybrid_gkd.errors import DataError


@dataclass(frozen=True)
class TeacherColumn:
    """Column with the key of each row's teacher."""

    name: str
    keys: tuple[str, ...]
    """Keys of the teachers; DEFAULT_TEACHER among them scores the rows without one of the others."""

    def read(self, names: list[str], rows: list[dict[str, Any]], where: str) -> list[str]:
        """Return the key of each row's teacher; `names`: columns of the table. Raises DataError."""
        if self.name not in names:
            raise missing_column(self.name, "distillation.teacher_key", names, where)
        found = [each if each in self.keys else DEFAULT_TEACHER for each in (values.get(self.name) for values in rows)]
        for row, (key, values) in enumerate(zip(found, rows, strict=True), 1):
            if key not in self.keys:
                raise DataError(
                    f"{where}, row {row}, column {self.name!r} (distillation.teacher_key): must be the key of one of "
                    f"{NAMED}: {', '.join(self.keys)}; got {short(values.get(self.name))}"
                )
        return found

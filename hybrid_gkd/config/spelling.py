"""Translate the keys of verl's commands to keys of `Config`, by the tables of compat/verl/key_tables.py.

`python -m hybrid_gkd.config.spelling > docs/verl.md` writes the tables as a page. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybrid_gkd.compat.verl.key_tables import ACCEPTED, NOTHING, ONLY, REFUSED, RENAMED, SECTIONS, TABLES, VALUES
from hybrid_gkd.compat.verl.readings import Look, Read
from hybrid_gkd.config.actor_rollout_ref import NamedTeacherConfig
from hybrid_gkd.config.schema import Config
from hybrid_gkd.config.teachers import NAMED
from hybrid_gkd.errors import ConfigError

REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")
"""A value that refers to another key."""


@functools.cache
def key_types() -> dict[str, Any]:
    """Return the type of every key of `Config`; a named teacher's keys have `*` for its name."""
    return dict(_key_types(Config))


def _key_types(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, kind in typing.get_type_hints(section).items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(kind):
            yield from _key_types(kind, f"{key}.")
            continue
        yield key, kind
        if key == NAMED:
            yield from _key_types(NamedTeacherConfig, f"{key}.*.")


def own_keys() -> Iterator[str]:
    """Yield every key of `Config`; those of dictionaries are followed by the key with `.*`."""
    for key, kind in key_types().items():
        yield key
        if typing.get_origin(kind) is dict and key != NAMED:
            yield f"{key}.*"


@functools.cache
def _own() -> tuple[frozenset[str], tuple[str, ...]]:
    keys = list(own_keys())
    return frozenset(keys), tuple(key for key in keys if key.endswith(".*"))


def any_name(key: str) -> str:
    """Return the key with `*` for the name of a teacher in distillation.teacher_models."""
    parts = key.split(".")
    return ".".join([NAMED, "*", *parts[3:]]) if key.startswith(f"{NAMED}.") and len(parts) > 3 else key


def is_own(key: str) -> bool:
    """Return whether it is a key of `Config`."""
    keys, open_ended = _own()
    return any_name(key) in keys or any(fnmatchcase(key, pattern) for pattern in open_ended)


def is_single(key: str) -> bool:
    """Return whether it is a key of `Config` without keys of the user's own below."""
    keys, _ = _own()
    return key in keys and key != NAMED and f"{key}.*" not in keys


def moved(key: str) -> str:
    """Return the key with its section renamed to ours, if verl's name differs."""
    old = next((section for section in SECTIONS if key.startswith(section)), None)
    return key if old is None or is_own(key) else f"{SECTIONS[old]}{key.removeprefix(old)}"


def find(key: str) -> tuple[Mapping[str, Any], Any] | None:
    """Return the table and the row of a key; None if it has none, or is a key of `Config` for all values."""
    if is_own(key):
        return (VALUES, VALUES[key]) if key in VALUES else None
    for table in TABLES:
        pattern = key if key in table else next((p for p in table if "*" in p and fnmatchcase(key, p)), None)
        if pattern is not None:
            return table, table[pattern]
    return None


@dataclass
class SpellingReader:
    """Translates the keys of one source: a command line, or a YAML file.

    `given`: all keys of the source with their values; `below`: returns the value of a key of `Config` before this
    source.
    """

    given: list[tuple[str, Any]]
    below: Look
    lines: list[str] = field(default_factory=list)
    """Log lines about ignored and translated keys."""
    _set_by: dict[str, tuple[str, Any]] = field(default_factory=dict)
    _accepted: dict[str, list[str]] = field(default_factory=dict)
    _reading: list[str] = field(default_factory=list)

    def read(self, key: str, value: Any) -> dict[str, Any]:
        """Return what a key sets, by keys of `Config`; keys that are not verl's are returned unchanged.

        Raises ConfigError: the key is rejected, or a key of `Config` gets different values from two spellings.
        """
        here = moved(key)
        found = find(here)
        result = {here: value} if found is None else self._apply(key, value, *found)
        if here not in result and any(map(_refers_to, result.values(), result)):
            return {}  # a key of verl that refers to its own target
        for own, new in result.items():
            before, old = self._set_by.setdefault(own, (key, new))
            if before != key and old != new:
                rule = f"is given two values, by {before} ({old}) and by {key} ({new})"
                raise ConfigError(own, rule, show_value=False)
            self._set_by[own] = (key, new)
        if result != {key: value} and (found is None or isinstance(found[1], Read)):
            became = ", ".join(f"{own}={new}" for own, new in result.items()) or "the default"
            why = f" ({found[1].why})" if found is not None and found[1].why else ""
            self.lines.append(f"{key}={value} is read as {became}{why}")
        return result

    def summary(self) -> list[str]:
        """Return `lines` and a line for each reason why keys have no effect."""
        return [*self.lines, *(f"no effect: {', '.join(keys)} ({reason})" for reason, keys in self._accepted.items())]

    def _apply(self, key: str, value: Any, table: Mapping[str, Any], row: Any) -> dict[str, Any]:
        if isinstance(row, Read):
            try:
                return self._read(key, value, row)
            except ValueError as error:
                raise ConfigError(key, str(error), value) from None
            except (TypeError, OverflowError):  # for example a list instead of a number
                raise ConfigError(key, "has a value of the wrong type", value) from None
        if table is REFUSED:
            raise ConfigError(key, row, value)
        if table is ONLY:
            values, row = row
            if not any(value == each for each in values) and value not in ([], {}):
                what = "is not supported" if values is NOTHING else f"must be {' or '.join(map(str, values))}"
                raise ConfigError(key, f"{what}: {row}", value)
        self._accepted.setdefault(row, []).append(key)
        return {}

    def _look(self, key: str) -> Any:
        for given, value in reversed(self.given):
            if given == key:
                return self._resolved(value)
            row = (find(moved(given)) or (None, None))[1]
            if row is None and moved(given) == key:
                return self._resolved(value)
            if isinstance(row, Read) and key in row.keys and given not in self._reading:
                result = self._read(given, value, row)
                if key in result and not _refers_to(result[key], key):
                    return self._resolved(result[key])
        return self.below(key)

    def _resolved(self, value: Any) -> Any:
        """Return a value with `${...}` replaced, if possible; an unresolved one is reported after reading all keys."""
        if not isinstance(value, str) or "${" not in value:
            return value
        if (reference := REFERENCE.fullmatch(value)) and reference[1] not in self._reading:
            self._reading.append(reference[1])
            try:
                return self._look(reference[1])
            finally:
                self._reading.pop()
        try:
            return OmegaConf.create({"value": value})["value"]
        except OmegaConfBaseException:
            return value

    def _read(self, key: str, value: Any, row: Read) -> dict[str, Any]:
        """Apply a row; while a key is read, `_look` ignores it and finds the values of other keys."""
        self._reading.append(key)
        try:
            try:
                found = row.reading(value, self._look)
            except ValueError:  # of a text `${...}`, where the reading computes with a number
                if (resolved := self._resolved(value)) == value:
                    raise
                found = row.reading(resolved, self._look)
            own = ".".join(key.split(".")[:3])  # the section of a named teacher
            return {name.replace(f"{NAMED}.*", own): new for name, new in found.items()}
        finally:
            self._reading.pop()


def _refers_to(value: Any, key: str) -> bool:
    reference = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return reference is not None and reference[1] == key


def markdown_page() -> str:
    """Return the text of docs/verl.md."""
    read = _without_twins({key: (_code(row.keys), row.how) for key, row in {**VALUES, **RENAMED}.items()})
    only = _without_twins({key: (_code(values), "") for key, (values, _) in ONLY.items()})
    accepted = _without_twins({key: ("", "") for keys in ACCEPTED.values() for key in keys})
    renamed = [(f"{old}*", f"`{new}*`") for old, new in SECTIONS.items()]
    renamed += [(key, keys) for key, (keys, how) in read.items() if not how]
    converted: dict[tuple[str, str], list[str]] = {}
    for key, (keys, how) in read.items():
        if how:
            converted.setdefault(("the same key" if keys == f"`{key}`" else keys, how), []).append(key)
    by_value: dict[str, list[str]] = {}
    for key, (values, _) in only.items():
        by_value.setdefault(values, []).append(key)
    lines = [
        "# Coming from verl", "", *INTRODUCTION, "",
        "| topic | behavior |", "|---|---|", *map(_row, BEHAVIOR), "",
        "This page is generated: `python -m hybrid_gkd.config.spelling > docs/verl.md`. A `*` matches anything. Rows",
        "of `actor_rollout_ref.actor` and `.model` apply to `critic` and `critic.model` too, and those of",
        "`distillation.teacher_model.inference.*` to `distillation.teacher_models.*.inference.*`.", "",
        "## Different computations", "", "| key | verl | here |", "|---|---|---|", *map(_row, COMPUTED), "",
        "## Renamed", "", "| section here | key of verl: key here |", "|---|---|",
        *_table(renamed, by=lambda _, target: _section(target), cell=lambda key, target: f"`{key}`: {target}"), "",
        "## Converted", "", "| verl | here | value |", "|---|---|---|",
        *(_row((", ".join(f"`{key}`" for key in keys), *row)) for row, keys in converted.items()), "",
        "## Accepted values", "", "| value; others are rejected, with the reason | verl |", "|---|---|",
        *(_row((values, ", ".join(f"`{key}`" for key in keys))) for values, keys in by_value.items() if len(keys) > 1),
        _row(("those given", "; ".join(f"`{keys[0]}`: {value}" for value, keys in by_value.items() if len(keys) == 1))),
        _row(("any, without effect; the reason is logged", _code(tuple(accepted)))),
        _row(("none", _code(tuple(REFUSED)))),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _twin(text: str) -> str:
    """Return a text with the actor's keys in place of the critic's, and one teacher's in place of several teachers'."""
    text = text.replace("critic.model.", "actor_rollout_ref.model.").replace("critic.", "actor_rollout_ref.actor.")
    return text.replace("teacher_models.*", "teacher_model")


def _without_twins(rows: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Leave out rows that repeat those of their twin, `_twin`."""
    return {
        key: row for key, row in rows.items()
        if _twin(key) == key or rows.get(_twin(key)) != tuple(_twin(text) for text in row)
    }  # fmt: skip


def _section(target: str) -> str:
    """Return the section of a key in backticks, such as `data` or `actor_rollout_ref.teacher`."""
    first, *rest = target.strip("`*.").split(".")
    return f"`{first}.{rest[0]}`" if first == "actor_rollout_ref" else f"`{first}`"


def _table(pairs: Iterable[tuple[str, str]], *, by: Callable[..., str], cell: Callable[..., str]) -> list[str]:
    """Return one row of a table for each value of `by`, with the cells of its pairs in a list."""
    rows: dict[str, list[str]] = {}
    for pair in pairs:
        rows.setdefault(by(*pair), []).append(cell(*pair))
    return [_row((name, ", ".join(cells))) for name, cells in rows.items()]


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(values: tuple[Any, ...]) -> str:
    if values is NOTHING:
        return "off"
    return ", ".join(f"`{'null' if value is None else value}`" for value in values)


INTRODUCTION = """
Commands of verl's `examples/ppo_trainer`, `grpo_trainer` and `on_policy_distillation_trainer`, for dense language
models on FSDP, run with unchanged arguments: `bash run_gkd.sh` replaces `python3 -m verl.trainer.main_ppo`. Most keys
of verl are [keys here](../hybrid_gkd/config/); a key that is neither there nor below is rejected, with the closest one.
""".strip().splitlines()

BEHAVIOR = (
    (
        "recipe", "a command with an advantage estimator (or a critic) uses `ppo_trainer`: verl's defaults that affect "
        "the learning signal. A teacher in this program's spelling (`actor_rollout_ref.teacher.*`) or another "
        "`--config-name` changes the recipe",
    ),
    (
        "spelling", "`+` and `++` before a key have no effect; `~` cannot delete keys. `--config-path` (`-cp`) "
        "is relative to the working directory, or else to this repository; `--config-name` (`-cn`) may end in `.yaml`. "
        "Your YAML files may have verl's keys, and a defaults list of file names with `_self_`. If a key is given in "
        "two spellings, the values must be equal",
    ),
    (
        "log", "each converted value, and each reason why keys have no effect, is logged at the start; `--dry-run` and "
        "`config.yaml` show the spelling of this program",
    ),
    (
        "warm-up", "`optim.lr_warmup_steps` counts training steps in verl, and optimizer steps here. With the recipe "
        "`ppo_trainer` it is converted and logged; with another one it is a number of optimizer steps",
    ),
)  # fmt: skip
"""Topic and behavior."""

COMPUTED = (
    (
        "`forward_kl_topk`", "negative rows of the sum over the candidates are 0, without a gradient",
        "they keep value and gradient; `distillation.tail=bucket` is never negative",
    ),
    (
        "`k3` (`low_var_kl`)", "clipped at 10, without a gradient beyond", "has a gradient up to a log-ratio of 20 "
        "([losses.md](losses.md#estimators-from-the-sampled-token)); `algorithm.kl_penalty` as in verl",
    ),
    (
        "`distillation.distillation_loss_coef`", "with task rewards only",
        "always a factor of the distillation: alone, it scales the gradient before clipping",
    ),
    (
        "`loss_agg_mode=seq-mean-*`", "divides by all completions of the mini-batch, also rejected ones",
        "divides by those that keep a token after `rollout_rs`",
    ),
    (
        "`seq-mean-token-sum-norm`", "before 0.9 divides by `loss_scale_factor` only",
        "as 0.9: also by the number of completions",
    ),
    ("rewards", "stricter about where an answer stands", "`reward.strict=true` ([rewards.md](rewards.md))"),
)  # fmt: skip
"""Key with a different computation, in verl and here."""

if __name__ == "__main__":
    print(markdown_page(), end="")

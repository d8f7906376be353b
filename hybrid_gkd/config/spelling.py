"""Translate the keys of verl's commands to keys of `Config`, by the tables of compat/verl/key_tables.py.

`python -m hybrid_gkd.config.spelling > docs/verl.md` writes the tables as a page. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hybrid_gkd.compat.verl.key_tables import ACCEPTED, NOTHING, ONLY, REFUSED, RENAMED, SECTIONS, TABLES, VALUES
from hybrid_gkd.compat.verl.readings import Look, Read
from hybrid_gkd.config.schema import Config
from hybrid_gkd.errors import ConfigError

TEACHERS = "distillation.teacher_models."


def own_keys(section: Any = None, prefix: str = "") -> Iterator[str]:
    """Yield every key of `Config`; those of dictionaries are followed by the key with `.*`."""
    section = Config() if section is None else section
    for entry in dataclasses.fields(section):
        value, key = getattr(section, entry.name), f"{prefix}{entry.name}"
        if dataclasses.is_dataclass(value):
            yield from own_keys(value, f"{key}.")
        else:
            yield key
            if isinstance(value, dict):
                yield f"{key}.*"


@functools.cache
def _own() -> tuple[frozenset[str], tuple[str, ...]]:
    keys = list(own_keys())
    return frozenset(keys), tuple(key for key in keys if key.endswith(".*"))


def is_own(key: str) -> bool:
    """Return whether it is a key of `Config`."""
    keys, open_ended = _own()
    return key in keys or any(fnmatchcase(key, pattern) for pattern in open_ended)


def is_single(key: str) -> bool:
    """Return whether it is a key of `Config` without keys of the user's own below."""
    keys, _ = _own()
    return key in keys and f"{key}.*" not in keys


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
            self._one_teacher(key)
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

    def _one_teacher(self, key: str) -> None:
        names = [given.split(".")[2] for given, _ in self.given if given.startswith(TEACHERS)]
        if key.startswith(TEACHERS) and key.split(".")[2] != names[0]:
            rule = f"a run has one teacher, but {TEACHERS}{names[0]} is set too; remove one of them"
            raise ConfigError(f"{TEACHERS}{key.split('.')[2]}", rule, show_value=False)

    def _look(self, key: str) -> Any:
        for given, value in reversed(self.given):
            if given == key:
                return value
            row = (find(moved(given)) or (None, None))[1]
            if row is None and moved(given) == key:
                return value
            if isinstance(row, Read) and key in row.keys and given not in self._reading:
                result = self._read(given, value, row)
                if key in result:
                    return result[key]
        return self.below(key)

    def _read(self, key: str, value: Any, row: Read) -> dict[str, Any]:
        """Apply a row; a key that looks up its own result finds the values of other keys."""
        self._reading.append(key)
        try:
            return row.reading(value, self._look)
        finally:
            self._reading.pop()


def markdown_page() -> str:
    """Return the text of docs/verl.md."""
    read = {**VALUES, **RENAMED}
    lines = [
        "# Coming from verl", "", *INTRODUCTION, "",
        "This page is generated: `python -m hybrid_gkd.config.spelling > docs/verl.md`. A `*` matches anything.", "",
        "## Renamed sections", "", "| verl | here |", "|---|---|",
        *(f"| `{old}*` | `{new}*` |" for old, new in SECTIONS.items()), "",
        "## Converted", "", "| verl | here | value |", "|---|---|---|",
        *(f"| `{key}` | {_code(row.keys)} | {row.how} |" for key, row in read.items()), "",
        "## Different computations", "", *COMPUTED, "",
        "## Accepted without effect", "", "| reason | verl |", "|---|---|",
        *(f"| {reason} | {_code(keys)} |" for reason, keys in ACCEPTED.items()), "",
        "## Accepted with certain values", "", "All others are rejected, with the reason.", "",
        "| verl | value | reason |", "|---|---|---|",
        *(f"| `{key}` | {_code(values)} | {reason} |" for key, (values, reason) in ONLY.items()), "",
        "## Rejected", "", "| verl | reason |", "|---|---|", *(f"| `{key}` | {why} |" for key, why in REFUSED.items()),
    ]
    return "\n".join(lines) + "\n"


def _code(values: tuple[Any, ...]) -> str:
    if values is NOTHING:
        return "off"
    return ", ".join(f"`{'null' if value is None else value}`" for value in values)


INTRODUCTION = """
Commands of verl's `examples/ppo_trainer`, `grpo_trainer` and `on_policy_distillation_trainer`, for dense language
models on FSDP, run with unchanged arguments: `bash run_gkd.sh` replaces `python3 -m verl.trainer.main_ppo`.

- **Recipe.** A command with an advantage estimator (or a critic) uses the recipe `ppo_trainer`: those of verl's
  defaults that affect the learning signal. A teacher in this program's spelling (`actor_rollout_ref.teacher.*`) or
  another `--config-name` changes the recipe.
- **Spelling.** `+` and `++` before a key are allowed and have no effect. `--config-path` (`-cp`) is a folder relative
  to the working directory, or else to this repository; `--config-name` (`-cn`) may end in `.yaml`. Your own YAML files
  may have verl's keys, and a defaults list of file names with `_self_`. Keys cannot be deleted with `~`.
- **Log.** Each converted value is logged at the start, and each reason for which keys have no effect. `--dry-run` and
  `config.yaml` show the spelling of this program.
- **Duplicates.** If a key is given in two spellings, the values must be equal.
- **Warm-up.** `optim.lr_warmup_steps` counts training steps in verl, where all mini-batches of a step have one rate,
  and optimizer steps here. In a command of verl (with the recipe `ppo_trainer`) it is converted and logged; with
  another recipe it is a number of optimizer steps.
- **All other keys** are in [the configuration](../hybrid_gkd/config/): most keys of verl are keys here. A key that is
  neither there nor below is rejected, with the closest existing key.
""".strip().splitlines()

COMPUTED = """
- `forward_kl_topk` is a sum over the teacher's candidates, which can be negative. verl sets negative rows to 0, without
  a gradient; here they keep value and gradient. `distillation.tail=bucket` is never negative.
- `k3` (`low_var_kl`) is clipped at 10 in verl, without a gradient beyond; here it has one up to a log-ratio of 20
  ([losses.md](losses.md)). `algorithm.kl_penalty` has verl's limit.
- `distillation.distillation_loss_coef` only applies with task rewards in verl; here it is always a factor of the
  distillation. Without task rewards a value other than 1 scales the gradient, before it is clipped.
- The modes `seq-mean-*` of `loss_agg_mode` divide by the responses that keep a token. verl divides by all responses of
  the mini-batch, including those excluded by `rollout_rs`.
- `seq-mean-token-sum-norm` divides by the number of responses and by `loss_scale_factor`, as in verl 0.9; older
  versions divide only by the latter, so that their loss is larger by the number of responses.
- Rewards: `reward.strict` in [rewards.md](rewards.md) describes where verl requires more than the right answer.
""".strip().splitlines()
"""Keys with a different computation."""

if __name__ == "__main__":
    print(markdown_page(), end="")

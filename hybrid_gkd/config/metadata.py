"""Rules of single values, stored as metadata of the fields of schema.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hybrid_gkd.runtime.addresses import is_ray_address
from hybrid_gkd.runtime.imports import is_import_path

MAY_BE_INFINITE = {"may_be_infinite": True}


def rule(text: str, holds: Callable[[Any], bool]) -> dict[str, Any]:
    """Return field metadata with the rule of a value, as text and as a function; null always passes."""
    return {"rule": text, "holds": holds}


def names(*choices: str, or_own: bool = False) -> dict[str, Any]:
    """Return field metadata: one or a list of these names; with `or_own` also the import path of a custom object."""

    def holds(value: Any) -> bool:
        given = [value] if isinstance(value, str) else value
        return all(each in choices or (or_own and is_import_path(each)) for each in given)

    return rule(f"must be one of {', '.join(choices)}{', or module:name of a custom one' if or_own else ''}", holds)


POSITIVE = rule("must be above 0", lambda value: value > 0)
ABOVE_ONE = rule("must be above 1", lambda value: value > 1)
NOT_NEGATIVE = rule("must be at least 0", lambda value: value >= 0)
FRACTION = rule("must be between 0 and 1", lambda value: 0 <= value <= 1)
FRACTIONS = rule("must be above 0 and at most 1 each", lambda value: all(0 < fraction <= 1 for fraction in value))
NUCLEUS = rule("must be above 0 and at most 1", lambda value: 0 < value <= 1)
TOP_K = rule("must be -1 or above 0", lambda value: value == -1 or value > 0)
DECAY_RATES = rule("must be at least 0 and below 1 each", lambda value: all(0 <= beta < 1 for beta in value))
DECAY = rule("must be above 0 and below 1", lambda value: 0 < value < 1)
SEED = rule("must be at least 0 and below 2**32", lambda value: 0 <= value < 2**32)
FREQUENCY = rule("must be -1, 0 or more", lambda value: value >= -1)
STEPS = rule("must be steps, which count from 1", lambda value: all(step >= 1 for step in value))
LENGTH_SCHEDULE = rule(
    "must map steps to limits, whole numbers from 1 on, as in {1: 512, 100: 1024}",
    lambda value: all(type(each) is int and each >= 1 for each in (*value, *value.values())),
)
PORT = rule("must be a port, 0 to 65535", lambda value: 0 <= value < 65536)
TEMPERATURE = rule("must be from 0.01 to 10000", lambda value: 0.01 <= value <= 1e4)
TEMPERATURE_OR_GREEDY = rule("must be 0, or from 0.01 to 10000", lambda value: value == 0 or 0.01 <= value <= 1e4)
NAME_BYTES = 200
"""Maximum length of a folder's name; file systems allow 255 bytes, and suffixes are added."""
FOLDER_NAME = rule(
    f"must be a plain folder name of at most {NAME_BYTES} bytes",
    lambda value: value.isprintable() and value not in ("", ".", "..") and "/" not in value
    and len(os.fsencode(value)) <= NAME_BYTES,
)
MODULES = rule(
    "must be a name or a list of names",
    lambda value: isinstance(value, str | list) and bool(value) and all(isinstance(v, str) and v for v in value),
)
RAY_ADDRESS = rule("must be host:port of a running cluster, or auto for the one on this machine", is_ray_address)
IMPORT_PATH = rule("must be module:name or file.py:name", is_import_path)
TRACKERS = names("console", "jsonl", "tensorboard", "trackio", "wandb", or_own=True)

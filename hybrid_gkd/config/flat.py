"""Flat configurations: dotted key -> JSON value, for comparisons."""

from __future__ import annotations

import math
import re
from typing import Any


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to dotted keys; a number that JSON cannot represent becomes text."""
    if isinstance(tree, float) and not math.isfinite(tree):
        return {prefix: str(tree)}
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def references(values: dict[str, Any]) -> dict[str, str]:
    """Return the keys of a flat configuration that are `${another.key}` and nothing else, with that key."""
    return {key: found[1] for key, value in values.items() if (found := re.fullmatch(r"\$\{([\w.]+)\}", str(value)))}


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, each with `[before, after]`; null if the key is missing."""
    keys = [*after, *(key for key in before if key not in after)]
    return {key: [before.get(key), after.get(key)] for key in keys if before.get(key) != after.get(key)}

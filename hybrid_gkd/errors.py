"""Every error that this package raises on purpose.

The command line prints the message of a HybridGKDError without a traceback (unless --debug is
given). Broken invariants of our own stay plain assertions.
"""

from __future__ import annotations

import copyreg
from typing import Any


class HybridGKDError(Exception):
    """An error with a message for the user: what, where, what to do. It survives pickling, between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew without the constructor, whose arguments need not be `args`."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(HybridGKDError):
    """A configuration key has an unusable value; the message is `<dotted.key>: <rule>; got <value>`."""

    def __init__(self, key: str, rule: str, value: object = None, *, show_value: bool = True):
        self.key = key
        super().__init__(f"{key}: {rule}" + (f"; got {value!r}" if show_value else ""))


class DataError(HybridGKDError):
    """A data file is missing, empty, lacks a column, or a row breaks a rule."""


class ModelError(HybridGKDError):
    """A model or tokenizer folder cannot be used."""


class CheckpointError(HybridGKDError):
    """A checkpoint cannot be written or read."""


class DeviceMemoryError(HybridGKDError):
    """A memory owner (parameters, optimizer state, engine weights, KV cache) does not fit into what is free."""


class WorkerError(HybridGKDError):
    """A training or rollout worker died, missed its deadline or raised."""


class TrainingError(HybridGKDError):
    """The learning signal of a step is not usable: a loss of NaN, nothing to train on."""


class TeacherError(HybridGKDError):
    """Anything about the teacher service."""


class TeacherUnreachable(TeacherError):
    """No teacher answered the handshake within the connect timeout."""


class TeacherMismatch(TeacherError):
    """Teacher and student do not fit together: vocabulary, K, length, temperature."""


class TeacherTimeout(TeacherError):
    """A request was not answered before its deadline."""


class TeacherRefused(TeacherError):
    """The service refused a request; the message holds its reason."""


class BadTeacherReply(TeacherError):
    """A reply that must not reach a loss: NaN, a bad id, a mass above 1."""

"""Every error that this package raises on purpose.

    HybridGKDError                  message fit for a user: what, where, what to do
    ├── ConfigError                 a key: its dotted name, the rule, the value
    ├── DataError                   a data file or a row of it
    ├── ModelError                  a model or tokenizer folder
    ├── CheckpointError             a checkpoint that cannot be written or read
    ├── DeviceMemoryError           a memory owner (parameters, KV cache, ...) does not fit into what is free
    ├── WorkerError                 a training or rollout worker died, missed its deadline or raised
    ├── TrainingError               the learning signal is not usable (NaN loss, nothing to train on)
    └── TeacherError                anything about the teacher service
        ├── TeacherUnreachable      no answer to the handshake within the connect timeout
        ├── TeacherMismatch         teacher and student do not fit (vocabulary, K, length, temperature)
        ├── TeacherTimeout          a request was not answered before its deadline
        ├── TeacherRefused          the service answered that it will not score the request
        └── BadTeacherReply         a reply that must not reach a loss (NaN, bad id, mass above 1, ...)

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


class DataError(HybridGKDError): ...


class ModelError(HybridGKDError): ...


class CheckpointError(HybridGKDError): ...


class DeviceMemoryError(HybridGKDError): ...


class WorkerError(HybridGKDError): ...


class TrainingError(HybridGKDError): ...


class TeacherError(HybridGKDError): ...


class TeacherUnreachable(TeacherError): ...


class TeacherMismatch(TeacherError): ...


class TeacherTimeout(TeacherError): ...


class TeacherRefused(TeacherError): ...


class BadTeacherReply(TeacherError): ...

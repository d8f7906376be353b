"""Every error that this package raises on purpose.

    HybridGKDError                  message fit for a user: what, where, what to do
    ├── ConfigError                 a key: its dotted name, the rule, the value
    ├── DataError                   a data file or a row of it
    ├── ModelError                  a model or tokenizer folder
    ├── CheckpointError             a checkpoint that cannot be written or read
    ├── DeviceMemoryError           a memory owner of the GPU does not fit into what is free
    ├── WorkerError                 a training or rollout worker died, hung or failed
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

from typing import Any


class HybridGKDError(Exception):
    """Base of every error that carries a message for the user.

    All of them survive pickling, since they cross from the workers' processes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew without the constructor, whose arguments need not be `args`."""
        return _without_init, (type(self), self.args), self.__dict__


class ConfigError(HybridGKDError):
    """A configuration key has an unusable value.

    The message has the form ``<dotted.key>: <rule>; got <value>``.
    """

    def __init__(self, key: str, rule: str, value: object = None, *, show_value: bool = True):
        self.key = key
        super().__init__(f"{key}: {rule}" + (f"; got {value!r}" if show_value else ""))


class DataError(HybridGKDError):
    """A data file is missing, empty, lacks a column, or a row breaks a rule."""


class ModelError(HybridGKDError):
    """A model or tokenizer cannot be used."""


class CheckpointError(HybridGKDError):
    """A checkpoint cannot be written or read."""


class DeviceMemoryError(HybridGKDError):
    """A memory owner (parameters, optimizer state, engine weights, KV cache) does not fit into what is free."""


class WorkerError(HybridGKDError):
    """A worker died, missed its deadline or raised."""


class TrainingError(HybridGKDError):
    """The learning signal of a step is not usable."""


class TeacherError(HybridGKDError):
    """Base of everything that can go wrong between the trainer and the teacher service."""


class TeacherUnreachable(TeacherError):
    """No teacher answered the handshake within the connect timeout."""


class TeacherMismatch(TeacherError):
    """Teacher and student do not fit together."""


class TeacherTimeout(TeacherError):
    """A request was not answered before its deadline."""


class TeacherRefused(TeacherError):
    """The service refused a request; the message holds its reason."""


class BadTeacherReply(TeacherError):
    """A reply failed a check and was not passed on."""


def _without_init(cls: type[HybridGKDError], args: tuple[Any, ...]) -> HybridGKDError:
    return cls.__new__(cls, *args)

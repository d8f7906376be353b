"""Every error that this package raises on purpose.

    HybridGKDError                  message fit for a user: what, where, what to do
    ├── SeveralErrors               all that is wrong with what was given, a line each
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

import contextlib
import copyreg
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_CAUSE = 600
"""Characters of a library's error in a message."""


class HybridGKDError(Exception):
    """An error with a message for the user: what, where, what to do. It survives pickling, between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew without the constructor, whose arguments need not be `args`."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(HybridGKDError):
    """A configuration key has an unusable value; the message is `<dotted.key>: <rule>; got <value>`."""

    def __init__(self, key: str, rule: str, value: object = None, *, show_value: bool = True, missing: bool = False):
        self.key, self.missing = key, missing
        super().__init__(f"{key}: {rule}" + (f"; got {value!r}" if show_value else ""))


class SeveralErrors(HybridGKDError):
    """Several errors at once, each message once; what is missing follows what is wrong."""

    def __init__(self, errors: list[HybridGKDError]):
        self.errors = sorted(errors, key=is_missing)
        lines = [f"  {error}" for error in self.errors]
        lines.insert(sum(not is_missing(error) for error in self.errors), "missing:")
        super().__init__("\n".join([f"{len(errors)} things have to be changed:", *lines]).removesuffix("\nmissing:"))


def is_missing(error: HybridGKDError) -> bool:
    """Whether it is about a key that was not given."""
    return isinstance(error, ConfigError) and error.missing


def all_of(errors: Iterable[HybridGKDError]) -> list[HybridGKDError]:
    """The single errors, without those that say the same."""
    single = [part for error in errors for part in (error.errors if isinstance(error, SeveralErrors) else [error])]
    return list({str(error): error for error in single}.values())


def raise_all(errors: Iterable[HybridGKDError]) -> None:
    """Raise the only error as it is, several as SeveralErrors; nothing where there is none."""
    single = all_of(errors)
    if single:
        raise single[0] if len(single) == 1 else SeveralErrors(single)


def call_all(functions: Iterable[Callable[[], T]]) -> list[T]:
    """Call each, whichever fail; raise their HybridGKDErrors together, or return the results."""
    results, errors = list[T](), list[HybridGKDError]()
    for function in functions:
        try:
            results.append(function())
        except HybridGKDError as error:
            errors.append(error)
    raise_all(errors)
    return results


def in_words(error: BaseException) -> str:
    """Type and message of a library's error in one line, cut in the middle where it is very long.

    All lines count: of an error that a library collects from its fields, the first is a number of them.
    """
    text = " ".join(str(error).split())
    if len(text) > LONGEST_CAUSE:
        text = f"{text[: LONGEST_CAUSE // 2]} ... {text[-LONGEST_CAUSE // 2 :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class DataError(HybridGKDError): ...


class ModelError(HybridGKDError): ...


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Begin the message of a ModelError or TeacherError of the block with a key of the configuration."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    except TeacherError as error:
        raise TeacherError(f"{key}: {error}") from error


class CheckpointError(HybridGKDError): ...


class DeviceMemoryError(HybridGKDError):
    weights_changed = False
    """Whether some may have: it happened within an optimizer step."""


class WorkerError(HybridGKDError): ...


class TrainingError(HybridGKDError): ...


class TeacherError(HybridGKDError): ...


class TeacherUnreachable(TeacherError): ...


class TeacherMismatch(TeacherError): ...


class TeacherTimeout(TeacherError): ...


class TeacherRefused(TeacherError): ...


class BadTeacherReply(TeacherError): ...

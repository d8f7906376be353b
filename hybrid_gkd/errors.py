"""Every error that this package raises on purpose.

    HybridGKDError                  message fit for a user: what, where, what to do
    ├── SeveralErrors               several errors of the input, one line each
    ├── ConfigError                 a configuration key: its dotted name, the rule, the value
    ├── DataError                   a data file or a row of it
    ├── ModelError                  a model or tokenizer folder
    ├── CheckpointError             a checkpoint that cannot be written or read
    ├── DeviceMemoryError           a memory owner (parameters, KV cache, ...) does not fit into what is free
    ├── WorkerError                 a training or rollout worker died, timed out or raised
    ├── TrainingError               the learning signal is not usable (NaN loss, nothing to train on)
    └── TeacherError                an error of the teacher service
        ├── TeacherUnreachable      no reply to the handshake within the connect timeout
        ├── TeacherMismatch         teacher and student are incompatible (vocabulary, K, length, temperature)
        ├── TeacherTimeout          no reply to a request before its deadline
        ├── TeacherRefused          the service rejected the request
        └── BadTeacherReply         a reply that must not reach a loss (NaN, bad id, mass above 1, ...)

The command line prints the message of a HybridGKDError without a traceback, unless --debug is given. Broken
invariants of this package are plain assertions.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hybrid_gkd.process_limits import describe_refusal

T = TypeVar("T")
MAX_CAUSE_CHARACTERS = 600
"""Maximum number of characters of a library's error in a message."""


class HybridGKDError(Exception):
    """An error with a message for the user: what, where, what to do. It can be pickled and sent between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error without its constructor, whose arguments may differ from `args`."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(HybridGKDError):
    """An unusable value of a configuration key; the message is `<dotted.key>: <rule>; got <value>`."""

    def __init__(self, key: str, rule: str, value: object = None, *, show_value: bool = True, missing: bool = False):
        self.key, self.missing = key, missing
        super().__init__(f"{key}: {rule}" + (f"; got {value!r}" if show_value else ""))


class SeveralErrors(HybridGKDError):
    """Several errors as one; missing keys are listed after wrong ones."""

    def __init__(self, errors: list[HybridGKDError]):
        self.errors = sorted(errors, key=is_missing)
        lines = [f"  {error}" for error in self.errors]
        lines.insert(sum(not is_missing(error) for error in self.errors), "missing:")
        super().__init__("\n".join([f"{len(errors)} errors:", *lines]).removesuffix("\nmissing:"))


def is_missing(error: HybridGKDError) -> bool:
    """Return whether the error is about a key that was not given."""
    return isinstance(error, ConfigError) and error.missing


def flatten_errors(errors: Iterable[HybridGKDError]) -> list[HybridGKDError]:
    """Return the single errors behind the given ones, without duplicates."""
    single = [part for error in errors for part in (error.errors if isinstance(error, SeveralErrors) else [error])]
    return list({str(error): error for error in single}.values())


def raise_all(errors: Iterable[HybridGKDError]) -> None:
    """Raise a single error as it is and several as SeveralErrors; do nothing without errors."""
    single = flatten_errors(errors)
    if single:
        raise single[0] if len(single) == 1 else SeveralErrors(single)


def call_all(functions: Iterable[Callable[[], T]]) -> list[T]:
    """Call every function and return their results; raise their HybridGKDErrors together after the last call."""
    results, errors = list[T](), list[HybridGKDError]()
    for function in functions:
        try:
            results.append(function())
        except HybridGKDError as error:
            errors.append(error)
    raise_all(errors)
    return results


def describe_error(error: BaseException) -> str:
    """Return type and message of a library's error in one line, shortened in the middle if it is very long.

    All lines are kept, because the first line of a validation error often only counts the others. Process limits
    follow the error of a refused process or thread.
    """
    text = " ".join(str(error).split())
    if len(text) > MAX_CAUSE_CHARACTERS:
        text = f"{text[: MAX_CAUSE_CHARACTERS // 2]} ... {text[-MAX_CAUSE_CHARACTERS // 2 :]}"
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return "; ".join(filter(None, (described, describe_refusal(error))))


class DataError(HybridGKDError): ...


class ModelError(HybridGKDError): ...


@contextlib.contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    """Prefix the message of a ModelError or TeacherError of the block with a configuration key."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    except TeacherError as error:
        raise TeacherError(f"{key}: {error}") from error


@contextlib.contextmanager
def rename_section(old: str, new: str) -> Iterator[None]:
    """Replace a dotted section in the errors of the block, so that they name the section of one of several teachers."""
    try:
        yield
    except HybridGKDError as error:
        errors = flatten_errors([error])
        for each in errors:
            each.args = (str(each).replace(old, new), *each.args[1:])
        raise_all(errors)


class CheckpointError(HybridGKDError): ...


class DeviceMemoryError(HybridGKDError):
    weights_changed = False
    """True if the error occurred within an optimizer step, so that some weights may have changed."""


class WorkerError(HybridGKDError): ...


class TrainingError(HybridGKDError): ...


class TeacherError(HybridGKDError): ...


class TeacherUnreachable(TeacherError): ...


class TeacherMismatch(TeacherError): ...


class TeacherTimeout(TeacherError): ...


class TeacherRefused(TeacherError): ...


class BadTeacherReply(TeacherError): ...

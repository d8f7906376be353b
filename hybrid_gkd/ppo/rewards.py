"""Rule rewards: functions (response, answer) -> float on plain text, and how a user brings their own.

A reward of one's own is a function in a Python file:

    reward.custom_reward_function.path=/home/me/my_reward.py reward.custom_reward_function.name=score

    def score(response: str, answer: str) -> float: ...
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from decimal import Decimal

from hybrid_gkd.errors import ConfigError, DataError, TrainingError
from hybrid_gkd.imports import load_object
from hybrid_gkd.waiting import Timeout

Reward = Callable[[str, str], float]

# 1,234.50 | 18 | .5, with a sign unless it is the minus of a difference such as 7-4.
_NUMBER = re.compile(
    r"(?:(?<![\w.])-\$?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])-?\.[0-9]+"
)


def exact_match(response: str, answer: str) -> float:
    """1.0 if response and answer are the same text, surrounding white space aside, else 0.0."""
    return float(response.strip() == answer.strip())


def gsm8k(response: str, answer: str) -> float:
    """1.0 if the response's final number equals the answer's, else 0.0.

    The final number of a text is the one that follows its last `####` (the notation of GSM8K, arXiv 2110.14168),
    or the last number of the text if it has no `####`. Thousands commas and a dollar sign are ignored and the
    comparison is numerical: "1,200.0" equals "1200". A response without a number gets 0.0.

    Raises:
        DataError: the answer holds no number.
    """
    truth = final_number(answer)
    if truth is None:
        raise DataError(f"the gsm8k reward needs a number in every answer; got {answer!r}")
    return float(final_number(response) == truth)


def final_number(text: str) -> Decimal | None:
    """See `gsm8k`; None where there is no number."""
    _, marker, conclusion = text.rpartition("####")
    found = _NUMBER.findall(conclusion)
    if not found:
        return None
    return Decimal(found[0 if marker else -1].replace(",", "").replace("$", ""))


BUILTIN_REWARDS: dict[str, Reward] = {"exact_match": exact_match, "gsm8k": gsm8k}


def load_reward(name: str, path: str | None, function: str | None, timeout: float = math.inf) -> Reward:
    """The reward of the section `reward`: a built-in name, or a function of a Python file, which is executed.

    Raises ConfigError: an unknown name, a file that is missing or fails to import, a function that the file lacks. A
    user's function that raises, takes longer than `timeout` seconds, or returns something else than a finite number,
    raises TrainingError when it is called.
    """
    if path is None:
        if function is not None:
            raise ConfigError("reward.custom_reward_function.path", f"is needed to find {function!r}", path)
        if name not in BUILTIN_REWARDS:
            raise ConfigError("reward.name", f"must be one of {', '.join(BUILTIN_REWARDS)}", name)
        return BUILTIN_REWARDS[name]
    import_path = f"{path}:{function}"
    return _checked(load_object("reward.custom_reward_function.path", import_path), import_path, timeout)


class _TimeIsUp(BaseException):
    """No Exception, which the function that it interrupts may catch."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _TimeIsUp in the block after so many seconds, and then every second, should the block catch it.

    By SIGALRM, which ends a sleep, a wait for a socket or process, and a loop in Python. C code that never returns to
    Python is not interrupted; a block that uses SIGALRM itself has to keep a timeout of its own. Raises TrainingError
    in another thread than the main one, where Python handles no signals.
    """
    if seconds == math.inf:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise TrainingError("reward.timeout is kept in the main thread only; set it to .inf to train in another thread")

    def expire(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # also where the alarm interrupts the line above
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _checked(function: Callable[[str, str], object], label: str, timeout: float) -> Reward:
    @functools.wraps(function)
    def reward(response: str, answer: str) -> float:
        try:
            with _limited(timeout):
                value = function(response, answer)
        except _TimeIsUp as error:
            at, limit = traceback.extract_tb(error.__traceback__)[-2], Timeout(timeout, "reward.timeout")
            raise TrainingError(
                f"the reward {label} did not return within {limit} for the answer {answer[:80]!r} and a response that "
                f"starts with {response[:80]!r}; it was at {at.filename}:{at.lineno}"
            ) from error
        except TrainingError:
            raise
        except Exception as error:
            raise TrainingError(
                f"the reward {label} raised {type(error).__name__}: {error} for a response that starts with "
                f"{response[:80]!r}"
            ) from error
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise TrainingError(
                f"the reward {label} must return a finite number; it returned {value!r} for a response "
                f"that starts with {response[:80]!r}"
            )
        return float(value)

    return reward

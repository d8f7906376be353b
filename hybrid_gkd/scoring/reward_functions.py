"""Reward functions in one form, the built-in ones and a user's own, and what they find.

A function of the user's own is called by the names of its parameters: (response, answer), whatever the two are called,
or as in verl `compute_score(data_source, solution_str, ground_truth, extra_info)`, or with all responses of a rollout
at once `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`. Each may be async. Imported by the
processes that compute rewards: no torch.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.config import CUSTOM, MODEL
from hybrid_gkd.errors import ConfigError, DataError
from hybrid_gkd.runtime.imports import install_command, load_object
from hybrid_gkd.scoring.builtin_rewards import BUILTIN_REWARDS, Response

if TYPE_CHECKING:
    from hybrid_gkd.config import RewardConfig

KEY = "reward.custom_reward_function"
ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Parameters of a function of one response."""
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Parameters of a function of all responses of a rollout."""
NOT_IN_TIME = "did not return in time (reward.timeout)"
"""Why there is no score of a function that took too long."""
NUMBER = (numbers.Real, np.bool_)
"""What comparisons of numpy's numbers give is none of Python's."""
AT_ONCE = 64
"""Responses for which an async function is awaited at a time in one process."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a function says of a response."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers, of a function that returns a dictionary."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no score: "raised ValueError: ..."."""

    reason: str
    of_data: bool = False
    """The row is wrong, not the response."""


Outcome = Score | Failure


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, loaded."""

    name: str
    """In `reward.functions` and in metrics."""
    label: str
    """In messages: the name, or file and function."""
    compute: Callable[[Sequence[Response]], list[Outcome]]
    """Of at most `at_once` responses."""
    at_once: float = 1
    can_hang: bool = False
    """It is computed in a process of its own."""

    @property
    def is_own(self) -> bool:
        return self.name == CUSTOM

    @property
    def needs_all(self) -> bool:
        """Whether it has to see all responses of a rollout together."""
        return self.at_once == math.inf


def load_functions(section: RewardConfig) -> dict[str, RewardFunction]:
    """By name, those whose weighted sum is the reward, without the reward model.

    Raises ConfigError: a file that is missing or fails to import, a function that it lacks or that takes other
    parameters, a package that is not installed.
    """
    names = [name for name in section.weights if name != MODEL]
    functions = {name: _own(section) if name == CUSTOM else _builtin(name, section) for name in names}
    can_hang = [function.label for function in functions.values() if function.can_hang]
    if can_hang and importlib.util.find_spec("pebble") is None:
        rule = f"is computed in processes of the package pebble: {install_command('pebble>=5.1')}"
        raise ConfigError("reward", f"{can_hang[0]} {rule}", show_value=False)
    return functions


def _builtin(name: str, section: RewardConfig) -> RewardFunction:
    row = BUILTIN_REWARDS[name]
    return RewardFunction(name, name, one_by_one(row.make(section)), can_hang=row.can_hang)


def _own(section: RewardConfig) -> RewardFunction:
    custom = section.custom_reward_function
    label = f"{custom.path}:{custom.name}"
    function = load_object(f"{KEY}.path", label)
    names = accepted_names(function, label, set(custom.reward_kwargs))
    if not names and section.answer_key is None:
        raise ConfigError("reward.answer_key", f"{label} needs the column with the right answers")
    call = functools.partial(_call, function, names, custom.reward_kwargs)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if set(names) & set(BATCH):
        return RewardFunction(CUSTOM, label, functools.partial(_all, call, is_async), math.inf, can_hang=True)
    if is_async:
        compute = functools.partial(_awaited, call, section.timeout)
        return RewardFunction(CUSTOM, label, compute, AT_ONCE, can_hang=True)
    return RewardFunction(CUSTOM, label, one_by_one(call), can_hang=True)


def accepted_names(function: Callable[..., Any], label: str, given: set[str]) -> tuple[str, ...]:
    """Those of `ONE` or of `BATCH` that a function is called with; () for response and answer, by position.

    `given`: names of further arguments. Raises ConfigError for a function that cannot be called in any of these ways.
    """
    rule = (
        f"{label} must take (response, answer), ({', '.join(ONE)}), or for all responses of a rollout "
        f"({', '.join(BATCH)}); further parameters need a default or a value in {KEY}.reward_kwargs"
    )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}.name", rule, show_value=False) from error
    by_position = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}
    by_name = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {name for name, parameter in parameters.items() if parameter.kind in by_name}
    if not takes_any and given - known:
        raise ConfigError(f"{KEY}.reward_kwargs", f"must be parameters of {label}", sorted(given - known))
    needed = [
        name for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind in by_position | by_name and name not in given
    ]  # fmt: skip
    for names in (ONE, BATCH):
        if set(needed) <= set(names) & known and (takes_any or names[1] in known):
            return names if takes_any else tuple(name for name in names if name in known)
    in_order = all(parameters[name].kind in by_position for name in needed)
    if len(needed) == 2 and in_order and not {*ONE[::3], *BATCH[::3]} & set(needed):  # first: something else in verl
        return ()
    raise ConfigError(f"{KEY}.name", rule, f"({', '.join(map(str, parameters.values()))})")


def _call(function: Callable[..., Any], names: tuple[str, ...], further: dict[str, Any], asked: Any) -> Any:
    """`asked`: a response, or all of them for a batch function."""
    if not names:
        return function(asked.text, asked.right_answer, **further)
    if isinstance(asked, Response):
        values = _arguments(asked)
    else:
        columns = zip(*map(_arguments, asked), strict=True)
        values = tuple(list(column) for column in columns)
    by_name = dict(zip(ONE if isinstance(asked, Response) else BATCH, values, strict=True))
    return function(**{name: by_name[name] for name in names}, **further)


def _arguments(response: Response) -> tuple[Any, ...]:
    """In the order of `ONE`."""
    return response.data_source, response.text, response.answer, response.extra_info or {}


def one_by_one(call: Callable[[Response], object]) -> Callable[[Sequence[Response]], list[Outcome]]:
    """The form of all functions, of one that takes a response."""
    return lambda responses: [_guarded(call, response) for response in responses]


def _guarded(call: Callable[[Response], object], response: Response) -> Outcome:
    try:
        return checked(call(response))
    except Exception as error:  # whatever a function raises
        return _failure(error)


def _all(
    call: Callable[[Sequence[Response]], Any], is_async: bool, responses: Sequence[Response]
) -> list[Outcome]:
    try:
        found = _runner().run(call(responses)) if is_async else call(responses)
        values = list(found)
    except Exception as error:
        return [_failure(error)] * len(responses)
    if len(values) != len(responses):
        return [Failure(f"returned {len(values)} scores for {len(responses)} responses")] * len(responses)
    return [checked(value) for value in values]


def _awaited(call: Callable[[Response], Any], timeout: float, responses: Sequence[Response]) -> list[Outcome]:
    async def one(response: Response) -> Outcome:
        limit = asyncio.timeout(None if timeout == math.inf else timeout)
        try:
            async with limit:
                return checked(await call(response))
        except Exception as error:  # whatever a function raises
            return Failure(NOT_IN_TIME) if limit.expired() else _failure(error)

    async def together() -> list[Outcome]:
        return list(await asyncio.gather(*map(one, responses)))

    return _runner().run(together())


@functools.cache
def _runner() -> asyncio.Runner:
    """One event loop for the life of the process: a client that a function keeps belongs to its loop."""
    return asyncio.Runner()


def checked(value: object) -> Outcome:
    """What a function has returned, as a score; a failure where that is none."""
    found: Any = value.get("score") if isinstance(value, Mapping) else value
    if not isinstance(found, NUMBER) or not math.isfinite(found):
        rule = "must return a finite number, or a dictionary with one under 'score'"
        return Failure(f"{rule}; it returned {value!r:.200}")
    metrics = {}
    if isinstance(value, Mapping):
        numeric = {str(k): v for k, v in value.items() if k != "score" and isinstance(v, NUMBER)}
        metrics = {name: float(number) for name, number in numeric.items()}
    return Score(float(found), metrics)


def _failure(error: Exception) -> Failure:
    if isinstance(error, DataError):
        return Failure(str(error), of_data=True)
    at = traceback.extract_tb(error.__traceback__)[-1]
    return Failure(f"raised {type(error).__name__}: {error} (at {at.filename}:{at.lineno})")

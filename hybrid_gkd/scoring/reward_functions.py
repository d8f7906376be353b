"""Loading of reward functions, built-in and custom, behind one interface.

A custom function is called according to its parameters: with two positional ones as (response, answer); with verl's as
`compute_score(data_source, solution_str, ground_truth, extra_info)`; with verl's batch parameters, for all completions
of a rollout at once, as `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`. Each may be async.
Reward processes import this module: no torch.
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
"""verl's parameters of a function of one completion."""
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""verl's parameters of a function of all completions of a rollout."""
TIMED_OUT = "timed out (reward.timeout)"
"""Reason of a failure by timeout."""
NUMBER = (numbers.Real, np.bool_)
"""Types of a score; numpy's bool is not registered as a number."""
LARGEST = float(np.finfo(np.float32).max)
"""Largest absolute value that is finite as a reward of a token, which is a float32."""
MAX_CONCURRENT = 64
"""Completions for which an async function is awaited concurrently in one process."""


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a reward function for one completion."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Additional numbers from a function that returns a dictionary."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Missing score of a completion, with the reason ("raised ValueError: ...")."""

    reason: str
    is_data_error: bool = False
    """Whether the row of the data is at fault, not the completion."""


Outcome = Score | Failure


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function."""

    name: str
    """Name in `reward.functions` and in metrics."""
    label: str
    """Name in messages: `name`, or file and function."""
    compute: Callable[[Sequence[Response]], list[Outcome]]
    """Function of at most `at_once` completions."""
    at_once: float = 1
    can_hang: bool = False
    """Whether it runs in a separate process."""

    @property
    def needs_all(self) -> bool:
        """Whether one call must get all completions of a rollout."""
        return self.at_once == math.inf


def load_functions(section: RewardConfig) -> dict[str, RewardFunction]:
    """Load the configured reward functions by name, without the reward model.

    Raises ConfigError: a file is missing or cannot be imported, it lacks the function, the function takes other
    parameters, or a package is not installed.
    """
    names = [name for name in section.weights if name != MODEL]
    functions = {name: _custom(section) if name == CUSTOM else _builtin(name, section) for name in names}
    can_hang = [function.label for function in functions.values() if function.can_hang]
    if can_hang and importlib.util.find_spec("pebble") is None:
        rule = f"runs in separate processes and needs the package pebble: {install_command('pebble>=5.1')}"
        raise ConfigError("reward", f"{can_hang[0]} {rule}", show_value=False)
    return functions


def _builtin(name: str, section: RewardConfig) -> RewardFunction:
    row = BUILTIN_REWARDS[name]
    return RewardFunction(name, name, one_by_one(row.make(section)), can_hang=row.can_hang)


def _custom(section: RewardConfig) -> RewardFunction:
    custom = section.custom_reward_function
    label = f"{custom.path}:{custom.name}"
    function = load_object(f"{KEY}.path", label)
    names = accepted_names(function, label, set(custom.reward_kwargs))
    if not names and section.answer_key is None:
        raise ConfigError("reward.answer_key", f"{label} needs the column with the reference answers")
    call = functools.partial(_call, function, names, custom.reward_kwargs)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if set(names) & set(BATCH):
        return RewardFunction(CUSTOM, label, functools.partial(_all, call, is_async), math.inf, can_hang=True)
    if is_async:
        compute = functools.partial(_awaited, call, section.timeout)
        return RewardFunction(CUSTOM, label, compute, MAX_CONCURRENT, can_hang=True)
    return RewardFunction(CUSTOM, label, one_by_one(call), can_hang=True)


def accepted_names(function: Callable[..., Any], label: str, given: set[str]) -> tuple[str, ...]:
    """Return the names of `ONE` or `BATCH` to call a function with; () for positional (response, answer).

    `given`: names of additional keyword arguments. Raises ConfigError: the function fits none of these signatures.
    """
    rule = (
        f"{label} must take (response, answer), ({', '.join(ONE)}), or for all completions of a rollout "
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
    if len(needed) == 2 and in_order and not {*ONE[::3], *BATCH[::3]} & set(needed):  # those are not (response, answer)
        return ()
    raise ConfigError(f"{KEY}.name", rule, f"({', '.join(map(str, parameters.values()))})")


def _call(function: Callable[..., Any], names: tuple[str, ...], kwargs: dict[str, Any], inputs: Any) -> Any:
    """Call a custom function with one `Response`, or with a list of them if it is a batch function."""
    if not names:
        return function(inputs.text, inputs.right_answer, **kwargs)
    if isinstance(inputs, Response):
        values = _arguments(inputs)
    else:
        columns = zip(*map(_arguments, inputs), strict=True)
        values = tuple(list(column) for column in columns)
    by_name = dict(zip(ONE if isinstance(inputs, Response) else BATCH, values, strict=True))
    return function(**{name: by_name[name] for name in names} | kwargs)


def _arguments(response: Response) -> tuple[Any, ...]:
    """Return the arguments in the order of `ONE`."""
    return response.data_source, response.text, response.answer, response.extra_info or {}


def one_by_one(call: Callable[[Response], object]) -> Callable[[Sequence[Response]], list[Outcome]]:
    """Wrap a function of one completion as a function of several that returns outcomes."""
    return lambda responses: [_outcome(call, response) for response in responses]


def _outcome(call: Callable[[Response], object], response: Response) -> Outcome:
    try:
        return as_outcome(call(response))
    except Exception as error:  # whatever a function raises
        return _failure(error)


def _all(call: Callable[[Sequence[Response]], Any], is_async: bool, responses: Sequence[Response]) -> list[Outcome]:
    try:
        found = _runner().run(call(responses)) if is_async else call(responses)
        values = list(found)
    except Exception as error:
        return [_failure(error)] * len(responses)
    if len(values) != len(responses):
        return [Failure(f"returned {len(values)} scores for {len(responses)} completions")] * len(responses)
    return [as_outcome(value) for value in values]


def _awaited(call: Callable[[Response], Any], timeout: float, responses: Sequence[Response]) -> list[Outcome]:
    async def one(response: Response) -> Outcome:
        limit = asyncio.timeout(None if timeout == math.inf else timeout)
        try:
            async with limit:
                return as_outcome(await call(response))
        # SystemExit too: it would leave the other calls in the event loop, whose errors the next completions would get.
        except BaseException as error:
            return Failure(TIMED_OUT) if limit.expired() else _failure(error)

    async def together() -> list[Outcome]:
        return list(await asyncio.gather(*map(one, responses)))

    return _runner().run(together())


@functools.cache
def _runner() -> asyncio.Runner:
    """Return the process's event loop; clients that a function keeps between calls are bound to their loop."""
    return asyncio.Runner()


def as_outcome(value: object) -> Outcome:
    """Convert a function's return value to a `Score`, or to a `Failure` if it is not a finite number."""
    found: Any = value.get("score") if isinstance(value, Mapping) else value
    if not isinstance(found, NUMBER) or not _is_finite(found):
        rule = "must return a finite number, or a dictionary with one under 'score'"
        return Failure(f"{rule}; it returned {value!r:.200}")
    metrics = {}
    if isinstance(value, Mapping):
        numeric = {str(k): v for k, v in value.items() if k != "score" and isinstance(v, NUMBER)}
        if not all(map(_is_finite, numeric.values())):
            return Failure(f"must return finite numbers; it returned {value!r:.200}")
        metrics = {name: float(number) for name, number in numeric.items()}
    return Score(float(found), metrics)


def _is_finite(number: Any) -> bool:
    return bool(-LARGEST <= number <= LARGEST)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, DataError):
        return Failure(str(error), is_data_error=True)
    at = traceback.extract_tb(error.__traceback__)[-1]
    return Failure(f"raised {type(error).__name__}: {error} (at {at.filename}:{at.lineno})")

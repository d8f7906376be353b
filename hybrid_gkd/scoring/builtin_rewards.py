"""Built-in reward functions of a completion and the reference answer, and their table.

To add one, write a function and a row in `BUILTIN_REWARDS`, and add its name to `REWARD_FUNCTIONS` in
config/learning.py. reward_functions.py loads a user's own functions. Reward processes import this module: no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from hybrid_gkd.errors import ConfigError, DataError
from hybrid_gkd.runtime.imports import install_command

if TYPE_CHECKING:
    from hybrid_gkd.config import OverlongBufferConfig, RewardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Input of a reward function: a completion and the columns of its row."""

    text: str
    """Decoded completion without special tokens."""
    answer: str | None = None
    """Reference answer; None without the column `reward.answer_key`."""
    data_source: str | None = None
    extra_info: dict[str, Any] | None = None
    limit_fraction: float = 0.0
    """Number of tokens divided by `data.max_response_length`."""

    @property
    def right_answer(self) -> str:
        """Reference answer. Raises DataError: there is none."""
        if self.answer is None:
            raise DataError("no reference answer (reward.answer_key) to compute the reward from")
        return self.answer


# 1,234.50 | 18 | .5, with a sign unless it is the minus of a difference such as 7-4.
_NUMBER = re.compile(
    r"(?:(?<![\w.])-\$?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])-?\.[0-9]+"
)


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER_LINE = re.compile(r"answer[ *]*:([^\n]+)", re.IGNORECASE)


def exact_match(response: str, answer: str) -> float:
    """Return 1.0 if response and answer are equal after stripping and not empty, else 0.0."""
    return float(response.strip() == answer.strip() != "")


def gsm8k(response: str, answer: str, *, strict: bool = False) -> float:
    """Return 1.0 if the response's final number equals the answer's, else 0.0.

    The final number of a text is the one that follows its last `####` (the notation of GSM8K, arXiv 2110.14168),
    or the last number of the text if it has no `####`. Thousands commas and a dollar sign are ignored and the
    comparison is numerical: "1,200.0" equals "1200". A response without a number gets 0.0; with `strict`, so does one
    without `####`.

    Raises DataError: the answer contains no number.
    """
    truth = final_number(answer)
    if truth is None:
        raise DataError(f"the gsm8k reward needs a number in every answer; got {answer!r}")
    return float(final_number(response) == truth and (not strict or "####" in response))


def final_number(text: str) -> Decimal | None:
    """Return the final number of a text as `gsm8k` defines it; None without a number."""
    _, marker, conclusion = text.rpartition("####")
    found = _NUMBER.findall(conclusion)
    if not found:
        return None
    return Decimal(found[0 if marker else -1].replace(",", "").replace("$", ""))


def math(response: str, answer: str, *, strict: bool = False) -> float:
    """Return 1.0 if the response's last mathematical expression equals the answer, else 0.0; uses math-verify.

    The expression is the content of the last \\boxed{}, else what follows "the answer is" or the like, else the last
    expression of the text. With `strict`, a response without a \\boxed{} gets 0.0. LaTeX, plain numbers and plain
    expressions are compared symbolically: 1/2 equals 0.5 and \\frac{1}{2}. A comparison of more than 5 s gives 0.0.

    Raises DataError: the answer contains no expression.
    """
    import math_verify  # optional dependency; the import takes a second

    boxed = last_boxed(response)
    right = math_verify.parse(f"\\boxed{{{last_boxed(answer) or answer}}}")
    if not right:
        raise DataError(f"the math reward needs an expression in every answer; got {answer!r}")
    if boxed is None and strict:
        return 0.0
    # Given several boxes, the library would compare the set of their contents.
    found = math_verify.parse(response if boxed is None else f"\\boxed{{{boxed}}}")
    return float(math_verify.verify(right, found))


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{}, up to its closing brace; None without one."""
    _, *boxes = _BOX.split(text)
    depth = 1
    for end, letter in enumerate(boxes[-1] if boxes else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return boxes[-1][:end]
    return None


def math_dapo(response: str, answer: str, *, strict: bool = False) -> dict[str, float]:
    """Return `math` as `score` -1.0 or 1.0 and `acc` 0.0 or 1.0, as verl scores the data sets of DAPO.

    Their prompts ask for a last line "Answer: ...", which is read instead of a box. With `strict`, a response without
    such a line is wrong. Raises DataError as `math` does.
    """
    lines = _ANSWER_LINE.findall(response)
    if not lines:
        return _dapo(not strict and math(response, answer))
    line = lines[-1].strip(" *$").rstrip(" *$.")
    return _dapo(math(line if last_boxed(line) else f"\\boxed{{{line}}}", answer))


def _dapo(right: float) -> dict[str, float]:
    return {"score": 2 * float(right) - 1, "acc": float(right)}


DATA_SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math", "math_dapo": "math_dapo", "numina_aops_forum": "math",
    "numina_synthetic_math": "math", "numina_amc_aime": "math", "numina_synthetic_amc": "math",
    "numina_cn_k12": "math", "numina_olympiads": "math",
}  # fmt: skip
"""Reward function by data source, for by_data_source; data sources that begin with aime use math_dapo."""


def function_of_source(data_source: str | None) -> str | None:
    """Return the name of the reward function of a data source; None if it is unknown."""
    return "math_dapo" if (data_source or "").startswith("aime") else DATA_SOURCES.get(data_source or "")


def lowest_score(name: str, response: Response) -> float | dict[str, float]:
    """Return the score of a built-in reward function for a wrong response; used after a timeout."""
    dapo = name == "by_data_source" and function_of_source(response.data_source) == "math_dapo"
    return _dapo(0.0) if dapo else 0.0


Compute = Callable[[Response], float | dict[str, float]]


def _compares(function: Callable[..., float]) -> Callable[[RewardConfig], Compute]:
    return lambda section: lambda response: function(response.text, response.right_answer, strict=section.strict)


def check_math_verify() -> None:
    """Check the dependency of the reward math. Raises ConfigError: math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        rule = f"math needs the package math-verify: {install_command('math-verify[antlr4_13_2]>=0.8')}"
        raise ConfigError("reward.name", rule, show_value=False)


def _math(section: RewardConfig) -> Compute:
    check_math_verify()
    return _compares(math)(section)


def _by_data_source(section: RewardConfig) -> Compute:
    functions: dict[str, Callable[..., Any]] = {"gsm8k": gsm8k, "math": math, "math_dapo": math_dapo}

    def compute(response: Response) -> float | dict[str, float]:
        name = function_of_source(response.data_source)
        if name is None:
            raise DataError(
                f"the reward by_data_source has no function for the data source {response.data_source!r}; known data "
                f"sources: {', '.join(DATA_SOURCES)}, aime*"
            )
        return functions[name](response.text, response.right_answer, strict=section.strict)

    return compute


def _format(section: RewardConfig) -> Compute:
    pattern = re.compile(section.format or "", re.DOTALL)
    return lambda response: float(pattern.search(response.text.strip()) is not None)


@dataclass(frozen=True)
class Builtin:
    """Entry of `BUILTIN_REWARDS`."""

    make: Callable[[RewardConfig], Compute]
    """Builds the function. Raises ConfigError: a dependency is missing."""
    can_hang: bool = False
    """Whether it may hang on some responses: it then runs in a separate process, and scores 0 after a timeout."""


BUILTIN_REWARDS: dict[str, Builtin] = {
    "exact_match": Builtin(lambda section: lambda response: exact_match(response.text, response.right_answer)),
    "gsm8k": Builtin(_compares(gsm8k)),
    "math": Builtin(_math, can_hang=True),
    "by_data_source": Builtin(_by_data_source, can_hang=True),
    "format": Builtin(_format, can_hang=True),
    "length": Builtin(lambda section: lambda response: -response.limit_fraction),
}


def overlong_penalty(num_tokens: int, max_response_length: int, buffer: OverlongBufferConfig) -> float:
    """Return the length penalty, at most 0: equation 13 of arXiv 2503.14476 (DAPO) times `penalty_factor`."""
    beyond = num_tokens - (max_response_length - buffer.len)
    return -buffer.penalty_factor * max(beyond / buffer.len, 0.0)

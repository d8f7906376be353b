"""The built-in rewards: functions of a response and the right answer, and their table.

One more is a function and a row in `BUILTIN_REWARDS`, with its name in `REWARD_FUNCTIONS` of config/learning.py. A
user's own is loaded by reward_functions.py. Imported by the processes that compute rewards: no torch.
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
    """What a reward function is asked about."""

    text: str
    """Without special tokens."""
    answer: str | None = None
    """The right one; None where `reward.answer_key` names no column."""
    data_source: str | None = None
    extra_info: dict[str, Any] | None = None
    share_of_limit: float = 0.0
    """Its tokens divided by `data.max_response_length`."""

    @property
    def right_answer(self) -> str:
        """For a function that cannot do without. Raises DataError."""
        if self.answer is None:
            raise DataError("there is no answer to compute a reward from")
        return self.answer


# 1,234.50 | 18 | .5, with a sign unless it is the minus of a difference such as 7-4.
_NUMBER = re.compile(
    r"(?:(?<![\w.])-\$?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])-?\.[0-9]+"
)


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER_LINE = re.compile(r"answer[ *]*:([^\n]+)", re.IGNORECASE)


def exact_match(response: str, answer: str) -> float:
    """1.0 if response and answer are the same text, surrounding white space aside, else 0.0; nothing is no answer."""
    return float(response.strip() == answer.strip() != "")


def gsm8k(response: str, answer: str, *, strict: bool = False) -> float:
    """1.0 if the response's final number equals the answer's, else 0.0.

    The final number of a text is the one that follows its last `####` (the notation of GSM8K, arXiv 2110.14168),
    or the last number of the text if it has no `####`. Thousands commas and a dollar sign are ignored and the
    comparison is numerical: "1,200.0" equals "1200". A response without a number gets 0.0, with `strict` also one
    without `####`.

    Raises:
        DataError: the answer holds no number.
    """
    truth = final_number(answer)
    if truth is None:
        raise DataError(f"the gsm8k reward needs a number in every answer; got {answer!r}")
    return float(final_number(response) == truth and (not strict or "####" in response))


def final_number(text: str) -> Decimal | None:
    """See `gsm8k`; None where there is no number."""
    _, marker, conclusion = text.rpartition("####")
    found = _NUMBER.findall(conclusion)
    if not found:
        return None
    return Decimal(found[0 if marker else -1].replace(",", "").replace("$", ""))


def math(response: str, answer: str, *, strict: bool = False) -> float:
    """1.0 if the response's last mathematical expression equals the answer, else 0.0; with the library math-verify.

    That is the content of the last \\boxed{}; without one what follows "the answer is" or the like, else the last
    expression. With `strict` a response without a \\boxed{} gets 0.0. LaTeX and plain numbers and expressions are
    read, and compared as expressions: 1/2 is 0.5 and \\frac{1}{2}. One that takes the library more than 5 s is wrong.

    Raises:
        DataError: the answer holds no expression.
    """
    import math_verify  # optional, and takes a second

    boxed = last_boxed(response)
    right = math_verify.parse(f"\\boxed{{{last_boxed(answer) or answer}}}")
    if not right:
        raise DataError(f"the math reward needs an expression in every answer; got {answer!r}")
    if boxed is None and strict:
        return 0.0
    # Of several boxes the library would make the set of their contents.
    found = math_verify.parse(response if boxed is None else f"\\boxed{{{boxed}}}")
    return float(math_verify.verify(right, found))


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{}, up to the brace that closes it; None without one."""
    _, *boxes = _BOX.split(text)
    depth = 1
    for end, letter in enumerate(boxes[-1] if boxes else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return boxes[-1][:end]
    return None


def math_dapo(response: str, answer: str, *, strict: bool = False) -> dict[str, float]:
    """`math` as a score of -1.0 or 1.0, beside `acc`, which is 0.0 or 1.0: what verl gives data sets for DAPO.

    Their prompts ask for a last line "Answer: ...", which is read in the place of a box. With `strict` a response
    without such a line is wrong. Raises as `math`.
    """
    lines = _ANSWER_LINE.findall(response)
    if not lines:
        return _dapo(not strict and math(response, answer))
    line = lines[-1].strip(" *$").rstrip(".$")
    return _dapo(math(line if last_boxed(line) else f"\\boxed{{{line}}}", answer))


def _dapo(right: float) -> dict[str, float]:
    return {"score": 2 * float(right) - 1, "acc": float(right)}


DATA_SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math", "math_dapo": "math_dapo", "numina_aops_forum": "math",
    "numina_synthetic_math": "math", "numina_amc_aime": "math", "numina_synthetic_amc": "math",
    "numina_cn_k12": "math", "numina_olympiads": "math",
}  # fmt: skip
"""Function of the rows of a data set, for by_data_source; those whose names begin with aime are math_dapo."""


def function_of_source(data_source: str | None) -> str | None:
    """Name of the reward for the rows of a data set; None where none is known."""
    return "math_dapo" if (data_source or "").startswith("aime") else DATA_SOURCES.get(data_source or "")


def wrong_answer(name: str, response: Response) -> float | dict[str, float]:
    """What a built-in reward gives a response that is no right answer, for one that took too long."""
    dapo = name == "by_data_source" and function_of_source(response.data_source) == "math_dapo"
    return _dapo(0.0) if dapo else 0.0


Compute = Callable[[Response], float | dict[str, float]]


def _compares(function: Callable[..., float]) -> Callable[[RewardConfig], Compute]:
    return lambda section: lambda response: function(response.text, response.right_answer, strict=section.strict)


def check_math_verify() -> None:
    """Raises ConfigError: the library of the reward math is missing."""
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
                f"the reward by_data_source knows no function for the data source {response.data_source!r}; it knows "
                f"{', '.join(DATA_SOURCES)}, and aime..."
            )
        return functions[name](response.text, response.right_answer, strict=section.strict)

    return compute


def _format(section: RewardConfig) -> Compute:
    pattern = re.compile(section.format or "", re.DOTALL)
    return lambda response: float(pattern.search(response.text.strip()) is not None)


@dataclass(frozen=True)
class Builtin:
    """A row of the table."""

    make: Callable[[RewardConfig], Compute]
    """Raises ConfigError: what it needs is missing."""
    can_hang: bool = False
    """On some responses: it is computed in a process of its own, and a response that takes too long gets 0."""


BUILTIN_REWARDS: dict[str, Builtin] = {
    "exact_match": Builtin(lambda section: lambda response: exact_match(response.text, response.right_answer)),
    "gsm8k": Builtin(_compares(gsm8k)),
    "math": Builtin(_math, can_hang=True),
    "by_data_source": Builtin(_by_data_source, can_hang=True),
    "format": Builtin(_format, can_hang=True),
    "length": Builtin(lambda section: lambda response: -response.share_of_limit),
}


def overlong_penalty(num_tokens: int, max_response_length: int, buffer: OverlongBufferConfig) -> float:
    """At most 0: eq. 13 of arXiv 2503.14476 (DAPO) times `penalty_factor`, of a response of so many tokens."""
    beyond = num_tokens - (max_response_length - buffer.len)
    return -buffer.penalty_factor * max(beyond / buffer.len, 0.0)

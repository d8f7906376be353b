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
from hybrid_gkd.runtime.imports import how_to_install

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


def exact_match(response: str, answer: str) -> float:
    """1.0 if response and answer are the same text, surrounding white space aside, else 0.0; nothing is no answer."""
    return float(response.strip() == answer.strip() != "")


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


def math(response: str, answer: str) -> float:
    """1.0 if the response's last mathematical expression equals the answer, else 0.0; with the library math-verify.

    LaTeX (in \\boxed{} or dollar signs) and plain numbers and expressions are read, and compared as expressions: 1/2 is
    0.5 and \\frac{1}{2}. An expression that takes the library more than 5 s is wrong.

    Raises:
        DataError: the answer holds no expression.
    """
    import math_verify  # optional, and takes a second

    truth = math_verify.parse(f"\\boxed{{{answer}}}") if "\\boxed" not in answer else math_verify.parse(answer)
    if not truth:
        raise DataError(f"the math reward needs an expression in every answer; got {answer!r}")
    return float(math_verify.verify(truth, math_verify.parse(response)))


DATA_SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math", "math_dapo": "math", "numina_aops_forum": "math",
    "numina_synthetic_math": "math", "numina_amc_aime": "math", "numina_synthetic_amc": "math",
    "numina_cn_k12": "math", "numina_olympiads": "math",
}  # fmt: skip
"""Function of the rows of a data set, for by_data_source; those whose names begin with aime are math."""


def function_of_source(data_source: str | None) -> str | None:
    """Name of the reward for the rows of a data set; None where none is known."""
    return "math" if (data_source or "").startswith("aime") else DATA_SOURCES.get(data_source or "")


def _by_data_source(response: Response) -> float:
    name = function_of_source(response.data_source)
    if name is None:
        raise DataError(
            f"the reward by_data_source knows no function for the data source {response.data_source!r}; it knows "
            f"{', '.join(DATA_SOURCES)}, and aime..."
        )
    return {"gsm8k": gsm8k, "math": math}[name](response.text, response.right_answer)


Compute = Callable[[Response], float]


def _compares(function: Callable[[str, str], float]) -> Callable[[RewardConfig], Compute]:
    return lambda section: lambda response: function(response.text, response.right_answer)


def check_math_verify() -> None:
    """Raises ConfigError: the library of the reward math is missing."""
    if importlib.util.find_spec("math_verify") is None:
        rule = f"math needs the package math-verify: {how_to_install('math-verify[antlr4_13_2]>=0.8')}"
        raise ConfigError("reward.name", rule, show_value=False)


def _math(section: RewardConfig) -> Compute:
    check_math_verify()
    return lambda response: math(response.text, response.right_answer)


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
    "exact_match": Builtin(_compares(exact_match)),
    "gsm8k": Builtin(_compares(gsm8k)),
    "math": Builtin(_math, can_hang=True),
    "by_data_source": Builtin(lambda section: _by_data_source, can_hang=True),
    "format": Builtin(_format, can_hang=True),
    "length": Builtin(lambda section: lambda response: -response.share_of_limit),
}


def overlong_penalty(num_tokens: int, max_response_length: int, buffer: OverlongBufferConfig) -> float:
    """At most 0: eq. 13 of arXiv 2503.14476 (DAPO) times `penalty_factor`, of a response of so many tokens."""
    beyond = num_tokens - (max_response_length - buffer.len)
    return -buffer.penalty_factor * max(beyond / buffer.len, 0.0)

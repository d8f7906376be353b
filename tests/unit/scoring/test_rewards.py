"""The built-in rewards on real notation."""

import dataclasses
import subprocess
import sys

import pytest

from hybrid_gkd.config import OverlongBufferConfig, RewardConfig
from hybrid_gkd.config.learning import REWARD_FUNCTIONS
from hybrid_gkd.errors import ConfigError, DataError
from hybrid_gkd.scoring.builtin_rewards import (
    BUILTIN_REWARDS,
    DATA_SOURCES,
    Response,
    exact_match,
    gsm8k,
    math,
    overlong_penalty,
)
from hybrid_gkd.scoring.reward_functions import load_functions


def test_exact_match():
    assert exact_match(" 42\n", "42") == 1.0
    assert exact_match("42.0", "42") == 0.0
    assert exact_match("", " \n") == 0.0  # saying nothing is never right


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("48 + 24 = 72\n#### 72", "Natalia sold 48/2 = 24\n#### 72", 1.0),
        ("#### 72", "72", 1.0),
        ("so she sold 72 clips.", "#### 72", 1.0),
        ("72 clips, not 73", "#### 72", 0.0),
        ("#### 72 clips in 2 months", "#### 72", 1.0),
        ("#### 1\nno wait\n#### 72", "#### 72", 1.0),
        ("72\n####", "#### 72", 0.0),  # a conclusion without a number is no answer
        ("#### $1,200.00", "#### 1200", 1.0),
        ("#### 1200", "#### 1,200", 1.0),
        ("it costs 1,234,567.5 dollars", "#### 1234567.50", 1.0),
        ("one of 1, 2, 3", "#### 3", 1.0),
        ("of 1,2,3", "#### 3", 1.0),
        ("#### -5", "#### -5", 1.0),
        ("#### -$5", "#### -5", 1.0),
        ("#### 5", "#### -5", 0.0),
        ("7-4", "#### 4", 1.0),
        ("0.1 + 0.2 = 0.3", "#### .3", 1.0),
        ("#### 72.", "#### 72", 1.0),
        ("I do not know", "#### 72", 0.0),
        ("", "#### 72", 0.0),
    ],
)
def test_gsm8k(response, answer, reward):
    assert gsm8k(response, answer) == reward


def test_gsm8k_needs_a_number_in_the_answer():
    with pytest.raises(DataError, match="'yes'"):
        gsm8k("#### 72", "yes")


def test_every_builtin_reward_is_known_to_the_configuration():
    assert set(BUILTIN_REWARDS) == set(REWARD_FUNCTIONS)
    assert set(DATA_SOURCES.values()) - {"math_dapo"} <= set(BUILTIN_REWARDS)
    for name, needs_answer in REWARD_FUNCTIONS.items():
        compute = BUILTIN_REWARDS[name].make(RewardConfig(name=name, format="x"))
        without = Response(text="42", data_source="openai/gsm8k", limit_fraction=0.5)
        if needs_answer:
            with pytest.raises(DataError, match="no reference answer"):
                compute(without)
        else:
            assert compute(without) in (0.0, -0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("the answer is 0.5", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0.0),
        (r"hence $x = 3$", "3", 1.0),
        (r"\boxed{2\sqrt{2}}", r"The answer is \boxed{\sqrt{8}}", 1.0),
        ("I do not know", "72", 0.0),
        (r"Assume \boxed{x = 7}. Then \boxed{9}, no: \fbox{\sqrt{16}}", "4", 1.0),  # the last of several boxes
        (r"Assume \boxed{x = 7}. Then \boxed{9}, no: \fbox{\sqrt{16}}", "9", 0.0),
        (r"\boxed{5} and \boxed{6}", r"First \boxed{5}, in all \boxed{6}", 1.0),
        (r"\boxed{5}, which is $2 + 3$, as 7 was wrong", "5", 1.0),
    ],
)
def test_math(response, answer, reward):
    assert math(response, answer) == reward


@pytest.mark.slow
def test_math_needs_an_expression_in_the_answer():
    with pytest.raises(DataError, match="needs an expression in every answer; got ''"):
        math("72", "")


def test_math_without_its_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^reward\.name: math needs the package math-verify: .*pip install "):
        BUILTIN_REWARDS["math"].make(RewardConfig(name="math"))


def test_processes_without_their_library_say_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^reward: format runs in .*: uv pip install .* 'pebble>=5\.1'$"):
        load_functions(RewardConfig(name="format", format="x"))


@pytest.mark.slow
def test_a_row_is_judged_as_its_data_set_needs():
    judge = BUILTIN_REWARDS["by_data_source"].make(RewardConfig())
    of_math = Response(text="0.5", answer=r"\frac{1}{2}", data_source="aime2024")
    assert judge(of_math) == {"score": 1.0, "acc": 1.0}
    assert judge(dataclasses.replace(of_math, data_source="openai/gsm8k")) == 0.0  # its last number is 2
    with pytest.raises(DataError, match="has no function for the data source 'mine'; known data sources: openai/gsm"):
        judge(dataclasses.replace(of_math, data_source="mine"))


@pytest.mark.parametrize(
    ("source", "text", "loose", "strict"),
    [
        ("math_dapo", r"From \boxed{8} follows\n**Answer:** $\frac{14}{2}$.", 1.0, 1.0),
        ("math_dapo", "**Answer: 7**.", 1.0, 1.0),
        ("math_dapo", "Answer: **$7$**.", 1.0, 1.0),
        ("math_dapo", "Answer: 8", -1.0, -1.0),
        ("aime2025", r"hence \boxed{7}", 1.0, -1.0),
        ("aime2025", r"Answer: \boxed{7}\nas 8 is too much", 1.0, 1.0),
        ("HuggingFaceH4/MATH-500", r"hence \boxed{7}", 1.0, 1.0),
        ("HuggingFaceH4/MATH-500", "hence $7$", 1.0, 0.0),
        ("openai/gsm8k", "#### 7", 1.0, 1.0),
        ("openai/gsm8k", "it is 7", 1.0, 0.0),
    ],
)
def test_rows_of_verls_data_sets_have_its_scores(source, text, loose, strict):
    """-1 and 1 with `acc` for DAPO's; with `reward.strict` an answer has to be marked."""
    for section, score in ((RewardConfig(), loose), (RewardConfig(strict=True), strict)):
        judge = BUILTIN_REWARDS["by_data_source"].make(section)
        found = judge(Response(text=text, answer="7", data_source=source))
        of_dapo = {"score": score, "acc": (score + 1) / 2}
        assert found == (of_dapo if source.startswith(("math_dapo", "aime")) else score)


def test_format_looks_for_a_pattern_in_the_stripped_response():
    judge = BUILTIN_REWARDS["format"].make(RewardConfig(format="^<think>.*</think>.+$"))
    assert judge(Response(text=" <think>a\nb</think>42\n")) == 1.0
    assert judge(Response(text="a <think>a</think>42")) == 0.0


@pytest.mark.parametrize(("num_tokens", "penalty"), [(1, 0.0), (12, 0.0), (14, -0.25), (16, -0.5), (20, -1.0)])
def test_overlong_penalty_is_that_of_dapo(num_tokens, penalty):
    """0 up to 12 = 20 - 8 tokens, then (12 - tokens) / 8, arXiv 2503.14476, equation 13."""
    assert overlong_penalty(num_tokens, 20, OverlongBufferConfig(len=8)) == penalty
    assert overlong_penalty(num_tokens, 20, OverlongBufferConfig(len=8, penalty_factor=0.5)) == penalty / 2


@pytest.mark.slow
def test_needs_no_torch():
    code = "import sys, hybrid_gkd.scoring.reward_pool, hybrid_gkd.ppo.advantages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Rule rewards on real notation, and loading a user's own from a file."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_gkd.errors import ConfigError, DataError, TrainingError
from hybrid_gkd.ppo.rewards import exact_match, gsm8k, load_reward


def test_exact_match():
    assert exact_match(" 42\n", "42") == 1.0
    assert exact_match("42.0", "42") == 0.0


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


def test_builtin_rewards():
    assert load_reward("gsm8k", None, None) is gsm8k
    with pytest.raises(ConfigError, match=r"^reward.name: must be one of exact_match, gsm8k; got 'gsm8'$"):
        load_reward("gsm8", None, None)
    with pytest.raises(ConfigError, match=r"^reward.custom_reward_function.path: .* 'score'"):
        load_reward("gsm8k", None, "score")


@pytest.fixture
def write(tmp_path):
    def write(text, name="my_reward.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_own_reward(write):
    path = write(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Rule:\n    weight: float = 0.5\n"
        "def score(response: str, answer: str):\n    return Rule().weight * (response == answer)\n"
    )
    reward = load_reward("ignored", path, "score")
    assert reward("a", "a") == 0.5
    assert reward("a", "b") == 0.0
    assert isinstance(reward("a", "a"), float)


def test_a_file_named_like_a_module_does_not_replace_it(write):
    load_reward("", write("def score(response, answer): return 1", "json.py"), "score")
    assert "dumps" in vars(sys.modules["json"])


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"function\.path: must be an existing Python file; got '.*/no\.py'$"):
        load_reward("", str(tmp_path / "no.py"), "score")


def test_file_that_is_not_python(write):
    with pytest.raises(ConfigError, match="existing Python file"):
        load_reward("", write("x", "reward.txt"), "score")


def test_file_that_does_not_import(write):
    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero") as caught:
        load_reward("", write("1 / 0"), "score")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("function", ["score", "LIMIT", None, ""])
def test_missing_function(write, function):
    with pytest.raises(ConfigError, match=r"^reward.*path: must name a function or class of .*; got "):
        load_reward("", write("LIMIT = 3"), function)


@pytest.mark.parametrize("value", ["None", "'1'", "float('nan')", "float('inf')", "1j", "[1.0]"])
def test_unusable_value(write, value):
    reward = load_reward("", write(f"def score(response, answer): return {value}"), "score")
    with pytest.raises(TrainingError, match=r"my_reward\.py:score must return a finite number"):
        reward("the response", "the answer")


def test_a_function_that_raises_is_named(write):
    reward = load_reward("", write("def score(response, answer): return int(response)"), "score")
    with pytest.raises(TrainingError, match=r"my_reward\.py:score raised ValueError: .* that starts with 'the resp"):
        reward("the response", "the answer")


ENDLESS = {
    "sleeps": "    time.sleep(1000)",
    "spins": "    while True: pass",
    "catches every Exception": "    try:\n        time.sleep(1000)\n    except Exception:\n        return 1.0",
    "waits for a process": "    subprocess.run(['sleep', '1000'])",
    "searches without end": "    re.match('(a+)+b', 'a' * 100)",
}


@pytest.mark.parametrize("body", ENDLESS.values(), ids=list(ENDLESS))
def test_a_function_that_does_not_end_is_named_with_the_answer_and_the_key(write, body):
    head = "import re, subprocess, time\ndef score(response, answer):\n"
    reward = load_reward("", write(head + body), "score", timeout=0.05)
    handler = signal.getsignal(signal.SIGALRM)
    limit = r"0\.05 s \(reward\.timeout\)"
    with pytest.raises(
        TrainingError,
        match=rf"my_reward\.py:score did not return within {limit} for the answer 'the answer' and a response that "
        r"starts with 'the response'; it was at .*\.py:\d+$",
    ):
        reward("the response", "the answer")
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
def test_a_function_that_catches_everything_is_interrupted_again(write):
    body = "import time\ndef score(response, answer):\n    try: time.sleep(1000)\n    except: time.sleep(1000)"
    with pytest.raises(TrainingError, match=r"reward\.timeout"):
        load_reward("", write(body), "score", timeout=0.01)("", "")


def test_a_function_that_ends_in_time_is_not_interrupted_later(write):
    reward = load_reward("", write("def score(response, answer): return 1"), "score", timeout=0.05)
    assert reward("", "") == 1.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_timeout_needs_the_main_thread(write):
    path = write("def score(response, answer): return 1")
    with ThreadPoolExecutor() as pool:
        with pytest.raises(TrainingError, match=r"reward\.timeout is kept in the main thread only; set it to \.inf"):
            pool.submit(load_reward("", path, "score", timeout=1.0), "", "").result()
        assert pool.submit(load_reward("", path, "score"), "", "").result() == 1.0


@pytest.mark.parametrize("value", ["True", "1", "np.float32(1)", "np.int64(1)"])
def test_numbers_of_any_kind(write, value):
    reward = load_reward("", write(f"import numpy as np\ndef score(response, answer): return {value}"), "score")
    assert reward("", "") == 1.0


def test_needs_no_torch():
    code = "import sys, hybrid_gkd.ppo.rewards, hybrid_gkd.ppo.advantages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

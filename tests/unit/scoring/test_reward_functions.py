"""A user's own reward from a file: how it is called, what it may return, and the errors of one that is wrong."""

import math
import sys

import pytest

from hybrid_gkd.config import CustomRewardFunction, RewardConfig
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.scoring.builtin_rewards import Response
from hybrid_gkd.scoring.reward_functions import Failure, Score, load_functions

ASKED = Response(text="the response", answer="the answer", data_source="sums", extra_info={"index": 3})


@pytest.fixture
def load(tmp_path):
    """The function `score` of a file with this text."""

    def load(text, name="score", file="my_reward.py", **changes):
        path = tmp_path / file
        path.write_text(text, encoding="utf-8")
        kwargs = changes.pop("reward_kwargs", {})
        custom = CustomRewardFunction(path=str(path), name=name, reward_kwargs=kwargs)
        changes = {"answer_key": "answer"} | changes
        return load_functions(RewardConfig(custom_reward_function=custom, **changes))["custom"]

    return load


ALL = "data_source, solution_str, ground_truth, extra_info"
BATCH = "data_sources, solution_strs, ground_truths, extra_infos"


@pytest.mark.parametrize(
    "parameters",
    [
        "response, answer", "text, truth, /", ALL, f"*, {ALL}", f"{ALL}=None, url=None", "solution_str, **others",
        "**all",
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_of_one_response(load, parameters, kind):
    function = load(f"{kind} score({parameters}):\n    return {{'score': 1, 'seen': repr(locals()), 'length': 2.5}}")
    assert function.at_once == (64 if kind == "async def" else 1)
    assert function.compute([ASKED]) == [Score(1.0, {"length": 2.5})]


def test_it_gets_what_the_row_has(load):
    body = f"def score({ALL}, factor):\n    assert extra_info == {{'index': 3}}\n"
    body += "    return {'score': factor * len(data_source), 'same': solution_str == ground_truth}"
    function = load(body, reward_kwargs={"factor": 0.5})
    assert function.compute([ASKED]) == [Score(2.0, {"same": 0.0})]
    without = Response(text="x")
    assert load(f"def score({ALL}):\n    return extra_info == {{}} and ground_truth is data_source is None").compute(
        [without]
    ) == [Score(1.0)]


def test_a_value_of_ones_own_is_in_the_place_of_the_rows(load):
    function = load(f"def score({ALL}): return len(data_source)", reward_kwargs={"data_source": "openai/gsm8k"})
    assert function.compute([ASKED]) == [Score(12.0)]


@pytest.mark.parametrize("more", ["float('nan')", "float('inf')", "10**400"])
def test_a_further_number_has_to_be_finite_too(load, more):
    (found,) = load(f"def score({ALL}): return {{'score': 1, 'acc': {more}}}").compute([ASKED])
    assert isinstance(found, Failure)
    assert "must return finite numbers; it returned {'score': 1, 'acc': " in found.reason


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_of_all_responses_together(load, kind):
    function = load(f"{kind} score({BATCH}):\n    return [len(solution_strs), ground_truths[1] == 'b']")
    assert function.needs_all
    assert function.compute([ASKED, Response(text="", answer="b")]) == [Score(2.0), Score(1.0)]
    reason = "returned 2 scores for 3 completions"
    assert function.compute([ASKED] * 3) == [Failure(reason)] * 3


@pytest.mark.parametrize(
    "parameters", ["", "response", "response, answer, third", f"{ALL}, url", "data_source, solutions", "*responses"]
)
def test_a_function_that_takes_something_else_is_refused(load, parameters):
    with pytest.raises(ConfigError, match=r"function\.name: .*my_reward\.py:score must take \(response, answer\), "):
        load(f"def score({parameters}): return 1")


def test_further_arguments_must_be_parameters(load):
    with pytest.raises(ConfigError, match=r"reward_kwargs: must be parameters of .*:score; got \['url'\]"):
        load("def score(response, answer): return 1", reward_kwargs={"url": "x"})


def test_a_function_of_two_texts_needs_answers(load):
    with pytest.raises(ConfigError, match=r"^reward\.answer_key: .*:score needs the column with the reference answers"):
        load("def score(response, answer): return 1", answer_key=None)
    assert load(f"def score({ALL}): return 1", answer_key=None).compute([ASKED]) == [Score(1.0)]


def test_an_object_with_an_async_call(load):
    text = "class Judge:\n    async def __call__(self, response, answer): return 0.5\nscore = Judge()"
    assert load(text).compute([ASKED, ASKED]) == [Score(0.5), Score(0.5)]


@pytest.mark.slow
def test_async_functions_wait_together_and_each_has_its_own_timeout(load):
    """Each response but the last waits for the others; a loop that is kept serves the next call too."""
    text = (
        "import asyncio\nbarrier = asyncio.Barrier(3)\n"
        "async def score(response, answer):\n"
        "    if response == 'hangs': await asyncio.Event().wait()\n"
        "    await barrier.wait()\n    return 1"
    )
    function = load(text, timeout=0.2)
    for _ in range(2):
        found = function.compute([*[ASKED] * 3, Response(text="hangs", answer="")])
        assert found == [*[Score(1.0)] * 3, Failure("timed out (reward.timeout)")]


@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt", "asyncio.CancelledError"])
def test_an_async_function_that_ends_its_process_fails_for_that_completion_alone(load, error):
    """The event loop is kept between calls, and with it what the other completions of a call have left there."""
    function = load(
        "import asyncio\n"
        "async def score(response, answer):\n"
        f"    if response == 'ends': raise {error}\n"
        "    return 1"
    )
    ends = Response(text="ends", answer="")
    failed, *others = function.compute([ends, ends, ASKED, ends])
    assert failed.reason.startswith(f"raised {error.removeprefix('asyncio.').partition('(')[0]}: ")
    assert others == [failed, Score(1.0), failed]
    assert function.compute([ASKED]) == [Score(1.0)]


def test_a_file_named_like_a_module_does_not_replace_it(load):
    load("def score(response, answer): return 1", file="json.py")
    assert "dumps" in vars(sys.modules["json"])


def test_missing_file():
    custom = CustomRewardFunction(path="/no.py")
    with pytest.raises(ConfigError, match=r"function\.path: must be an existing Python file; got '/no\.py'$"):
        load_functions(RewardConfig(custom_reward_function=custom))


def test_file_that_is_not_python(load):
    with pytest.raises(ConfigError, match="existing Python file"):
        load("x", file="reward.txt")


def test_file_that_does_not_import(load):
    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero") as caught:
        load("1 / 0")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("function", ["score", "LIMIT", ""])
def test_missing_function(load, function):
    with pytest.raises(ConfigError, match=r"^reward.*path: must name a function or class of .*; got "):
        load("LIMIT = 3", function)


@pytest.mark.parametrize("value", ["True", "1", "np.float32(1)", "np.int64(1)", "np.True_"])
def test_numbers_of_any_kind(load, value):
    function = load(f"import numpy as np\ndef score(response, answer): return {value}")
    assert function.compute([ASKED]) == [Score(1.0)]
    function = load(f"import numpy as np\ndef score(response, answer): return {{'score': 0, 'acc': {value}, 'a': ''}}")
    assert function.compute([ASKED])[0].metrics == {"acc": 1.0}


@pytest.mark.parametrize(
    "value", ["None", "'1'", "float('nan')", "float('inf')", "1j", "[1.0]", "{'reward': 1}", "-1e39", "10**400"]
)
def test_what_is_no_score(load, value):
    """Nor is a number that would be infinite as a float32, which rewards of tokens are."""
    [failure] = load(f"def score(response, answer): return {value}").compute([ASKED])
    assert failure.reason.startswith("must return a finite number, or a dictionary with one under 'score'; it ret")


def test_a_function_that_raises_is_named_with_the_line(load):
    [failure] = load("def score(response, answer):\n    return int(response)").compute([ASKED])
    assert failure.reason.startswith("raised ValueError: invalid literal")
    assert failure.reason.endswith("my_reward.py:2)")


def test_the_default_timeout_is_finite():
    assert math.isfinite(RewardConfig().timeout)

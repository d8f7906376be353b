"""Rewards of responses: weights, penalties, what becomes of failures, and the processes, which are real."""

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
from processes import TIMEOUT, is_alive, wait_until

from hybrid_gkd.config import RewardConfig
from hybrid_gkd.errors import DataError, TrainingError
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring import reward_pool
from hybrid_gkd.scoring.builtin_rewards import Response
from hybrid_gkd.scoring.reward_functions import TIMED_OUT, Failure, RewardFunction, load_functions
from hybrid_gkd.scoring.rewards import RewardScorer, token_rewards
from hybrid_gkd.scoring.scorer import completed_future
from hybrid_gkd.testing import NumberTokenizer, make_sample, tiny_config
from hybrid_gkd.types import Task


@pytest.fixture
def make(tmp_path):
    """A scorer of `reward.*`; `text` is the file of a function of the user's own."""
    scorers = []

    def make(*overrides, text=None, clock=None):
        if text is not None:
            (tmp_path / "my_reward.py").write_text(textwrap.dedent(text), encoding="utf-8")
            overrides = [f"reward.custom_reward_function.path={tmp_path / 'my_reward.py'}", *overrides]
        config = tiny_config(
            "distillation.enabled=false", "data.max_response_length=8", "actor_rollout_ref.rollout.n=2",
            "reward.answer_key=answer", "reward.num_workers=1", *overrides,
        )  # fmt: skip
        scorers.append(RewardScorer(load_functions(config.reward), NumberTokenizer(), config, clock=clock))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def pair(row, *ids, answer="7", source=None):
    prompt = Task(
        index=row, token_ids=np.zeros(1, np.int32), text="", answer=answer, data_source=source, extra_info={"row": row}
    )
    return prompt, make_sample(row, prompt=prompt.token_ids, completion=ids)


def test_builtin_functions_that_are_quick_start_no_process(make):
    scorer, before = make("reward.functions={gsm8k: 1.0, length: 0.5}"), multiprocessing.active_children()
    pairs = [pair(0, 7), pair(1, 1, 2, 3, 4)]
    scorer.begin(pairs)
    assert scorer.scores(pairs) == [1 - 0.5 / 8, -0.25]
    assert scorer.metrics(pairs) == {"reward/gsm8k/mean": 0.5, "reward/length/mean": -2.5 / 8}
    assert multiprocessing.active_children() == before


@pytest.mark.slow
def test_the_wait_is_timed_where_the_trainer_waits(make):
    pools = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=1")
    filtered = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score")
    for overrides, timed in ((), True), (pools, True), (filtered, True), ((*pools, *filtered), False):
        clock = Clock()
        scorer = make("reward.name=gsm8k", *overrides, clock=clock)
        scorer.validation_scores([pair(0, 7)])
        assert clock.take() == {}
        scorer.rewards([pair(1, 7)])
        assert set(clock.take()) == ({"timing/reward"} if timed else set())


def test_an_answer_of_dapo_that_takes_too_long_is_wrong_and_validation_counts_what_is_right(make, monkeypatch):
    class Pool:
        """The responses of one source come too late."""

        num_done = 0

        def __init__(self, section):
            pass

        def submit(self, function, responses):
            late = [response.data_source == "math_dapo" for response in responses]
            outcomes = zip(late, function.compute(responses), strict=True)
            return [completed_future(Failure(TIMED_OUT) if is_late else outcome) for is_late, outcome in outcomes]

        def close(self):
            pass

    monkeypatch.setattr(reward_pool, "RewardPool", Pool)
    pairs = [pair(0, 7, source="aime2024"), pair(1, 7, source="math_dapo")]
    found = make("reward.name=by_data_source").validation_scores(pairs)
    assert found == {"rewards": [1.0, -1.0], "by_functions": [1.0, 0.0]}


def test_a_score_is_at_the_last_token_and_nowhere_without_one():
    assert [each.tolist() for each in token_rewards([0.5, -1.0, 2.0], [2, 0, 1])] == [[0, 0.5], [], [2]]


def test_one_function_has_no_metrics_of_its_own(make):
    scorer = make("reward.name=gsm8k")
    assert scorer.rewards([pair(0, 7)]) == [1.0]
    assert scorer.metrics([pair(0, 7)]) == {}


def test_long_responses_have_a_penalty_in_training(make):
    scorer = make("reward.name=gsm8k", "reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=4")
    pairs = [pair(0, 7), pair(1, 1, 2, 3, 4, 5, 7)]
    assert scorer.scores(pairs) == [1.0, 1.0]
    assert scorer.rewards(pairs) == [1.0, 0.5]
    assert scorer.metrics(pairs) == {"reward/overlong/mean": -0.25}


def test_a_row_without_an_answer_is_named(make):
    rule = r"^row 4 of the data: no reference answer \(reward\.answer_key\) to compute the reward from$"
    with pytest.raises(DataError, match=rule):
        make().scores([pair(3, 7, answer=None)])


@pytest.mark.slow
def test_a_response_is_computed_once_while_others_are_still_generated(make, tmp_path):
    """Completions handed to begin() are not computed again, and a sample that is gone is forgotten."""
    scorer = make(text=f"""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            with open({str(tmp_path / "calls")!r}, "a") as file:
                file.write(f"{{extra_info['row']}} ")
            return {{"score": len(solution_str.split()), "even": extra_info["row"] % 2 == 0}}
        """)  # fmt: skip
    pairs = [pair(0, 7), pair(1, 7, 7), pair(2, 7, 7, 7)]
    scorer.begin(pairs[:2])
    assert scorer.scores(pairs) == scorer.scores(pairs) == [1.0, 2.0, 3.0]
    assert (tmp_path / "calls").read_text(encoding="utf-8").split() == ["0", "1", "2"]
    assert scorer.metrics(pairs) == {"reward/even/mean": pytest.approx(2 / 3), "reward/failures": 0.0}
    del pairs
    assert scorer.scores([pair(0, 7, 7, 7, 7)]) == [4.0]


@pytest.mark.slow
def test_several_functions_of_each_kind(make):
    scorer = make(
        "reward.functions={custom: 2.0, gsm8k: 1.0, format: 0.5}", "reward.format=^7",
        text="""
            def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
                return [len(solution_strs) for _ in solution_strs]
            """,
    )  # fmt: skip
    pairs = [pair(0, 7), pair(1, 8)]
    scorer.begin(pairs)  # the function of all responses waits for the last
    assert scorer.scores(pairs) == [4 + 1 + 0.5, 4.0]
    found = scorer.metrics(pairs)
    assert found == {
        "reward/custom/mean": 2.0, "reward/gsm8k/mean": 0.5, "reward/format/mean": 0.5, "reward/failures": 0.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_further_number_named_like_a_component_is_no_part_of_its_mean(make):
    scorer = make(
        "reward.functions={custom: 1.0, length: 0.5}",
        "reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=4",
        text="""
            def compute_score(response, answer):
                return {"score": 1, "length": len(response), "overlong": 2, "words": 3}
            """,
    )  # fmt: skip
    pairs = [pair(0, 7), pair(1, 1, 2, 3, 4, 5, 7)]
    scorer.scores(pairs)
    assert scorer.metrics(pairs) == {
        "reward/custom/mean": 1.0, "reward/length/mean": -3.5 / 8, "reward/overlong/mean": -0.25,
        "reward/custom/length/mean": 6.0, "reward/custom/overlong/mean": 2.0, "reward/words/mean": 3.0,
        "reward/failures": 0.0,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("some", "warned"), [("7", True), ("7 8", False), ("9", False)])
def test_an_accuracy_of_some_held_out_completions_only_is_warned_of(make, caplog, some, warned):
    scorer = make(
        "reward.functions={custom: 1.0}",
        text=f"""
            def compute_score(solution_str, ground_truth):
                return {{"score": -1}} | ({{"acc": 1}} if solution_str in "{some}".split() else {{}})
            """,
    )  # fmt: skip
    found = scorer.validation_scores([pair(0, 7), pair(1, 8)])
    assert found["by_functions"] == [1.0 if text in some.split() else -1.0 for text in "78"]
    assert ("returned acc for 1 of 2 held-out completions; val/accuracy has the score of" in caplog.text) == warned


@pytest.mark.slow
def test_numbers_of_the_same_name_are_means_of_their_own_functions_over_the_completions_that_have_one(make):
    scorer = make(
        "reward.functions={custom: 1.0, by_data_source: 1.0}",
        text="""
            def compute_score(solution_str, ground_truth):
                return {"score": 1, "acc": 0.25} | ({"words": 3} if solution_str == "7" else {})
            """,
    )  # fmt: skip
    pairs = [pair(0, 7, source="openai/gsm8k"), pair(1, 8, source="math_dapo")]
    scorer.scores(pairs)
    found = scorer.metrics(pairs)
    assert {name: found[f"reward/{name}/mean"] for name in ("custom/acc", "by_data_source/acc", "words")} == {
        "custom/acc": 0.25, "by_data_source/acc": 0.0, "words": 3.0,
    }  # fmt: skip
    assert "reward/acc/mean" not in found


HANGS = """
    import os, re, subprocess, time
    def compute_score(response, answer):
        if response == "1": return 0.5
        if response == "2": subprocess.run(["sleep", "1000"])
        if response == "3": re.match("(a+)+b", "a" * 100)
        if response == "4": os.kill(os.getpid(), 9)
        if response == "5": raise SystemExit("enough")
        if response == "6":
            while True:
                try: time.sleep(1000)
                except BaseException: pass
        return float("nan")
    """


@pytest.mark.slow
def test_a_failure_ends_the_run_and_names_row_answer_and_place(make):
    scorer = make("reward.timeout=0.1", text=HANGS)
    pairs = [pair(0, 1), pair(5, 2)]
    expected = (
        r"^row 6 of the data: the reward \S+my_reward\.py:compute_score timed out \(reward\.timeout\) at "
        r"\S+my_reward\.py:5; reference answer '7', completion '2'$"
    )
    with pytest.raises(TrainingError, match=expected):
        scorer.scores(pairs)


@pytest.mark.slow
def test_a_failure_counts_as_a_fixed_score_and_its_process_is_replaced(make, caplog):
    scorer = make("reward.timeout=0.1", "reward.score_on_error=-1", text=HANGS)
    pairs = [pair(row, row) for row in range(1, 8)]
    with caplog.at_level(logging.WARNING):
        assert scorer.scores(pairs) == [0.5, *[-1.0] * 6]
    said = [record.getMessage() for record in caplog.records]
    assert ["my_reward.py:5;" in said[0], "my_reward.py:6;" in said[1], "(exit code -9)" in said[2]] == [True] * 3
    assert said[3:] == ["6 completions have no score; the first 3 are listed above"]
    assert scorer.metrics(pairs) == {"reward/failures": pytest.approx(6 / 7)}
    assert scorer.scores([pair(9, 1)]) == [0.5]


@pytest.mark.slow
def test_an_async_function_fails_on_its_own_responses_and_on_no_others_of_its_process(make):
    scorer = make("reward.timeout=0.5", "reward.score_on_error=-1", text="""
        import os, time
        async def compute_score(response, answer):
            if response == "2": os._exit(5)
            if response == "3": time.sleep(1000)
            return 1.0
        """)  # fmt: skip
    assert scorer.scores([pair(row, row) for row in range(1, 5)]) == [1.0, -1.0, -1.0, 1.0]


@pytest.mark.slow
def test_a_process_that_has_ended_has_no_score_at_once_and_nothing_is_left_of_it(make, tmp_path, caplog):
    """Also where it calls that success, and where no timeout would end the wait."""
    scorer = make("reward.score_on_error=-1", "reward.timeout=.inf", text=f"""
        import os, subprocess
        def compute_score(response, answer):
            started = subprocess.Popen(["sleep", "1000"])
            open({str(tmp_path / "group")!r}, "w").write(str(os.getpgid(started.pid)))
            os._exit(0)
        """)  # fmt: skip
    assert scorer.scores([pair(5, 1)]) == [-1.0]
    assert "row 6 of the data" in caplog.text
    assert "terminated its process (exit code 0)" in caplog.text
    group = int((tmp_path / "group").read_text(encoding="utf-8"))
    wait_until(lambda: not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if in_group(pid, group)])


@pytest.mark.slow
def test_processes_that_end_at_any_moment_are_replaced_but_not_for_ever(make, tmp_path, monkeypatch):
    """One that has nothing to do, whose library then takes all of them for lost; and all, before they do anything."""
    pools = []

    class Recorded(reward_pool.ProcessPool):
        def __init__(self, **options):
            super().__init__(**options)
            pools.append(self)

    def kill_idle():
        os.kill(int((tmp_path / "pid").read_text(encoding="utf-8")), signal.SIGKILL)
        wait_until(lambda: not pools[-1].active)

    monkeypatch.setattr(reward_pool, "ProcessPool", Recorded)
    monkeypatch.setattr(reward_pool, "MOST_BREAKS", 1)
    scorer = make(text=f"""
        import os
        if os.path.exists({str(tmp_path / "gone")!r}): os._exit(3)
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        def compute_score(response, answer): return 1
        """)  # fmt: skip
    assert scorer.scores([pair(0, 1)]) == [1.0]
    kill_idle()
    assert scorer.scores([pair(0, 1), pair(1, 1)]) == [1.0, 1.0]
    assert len(pools) == 2
    (tmp_path / "gone").touch()
    kill_idle()
    with pytest.raises(TrainingError, match=r"the reward processes have ended: .*All workers expired"):
        scorer.scores([pair(row, 1) for row in range(3)])


def test_what_is_lost_with_a_pool_is_computed_by_no_more_at_once_than_before(monkeypatch):
    pools = []

    class Idle:
        def __init__(self, **_):
            self.sizes, self.tasks = [], []
            pools.append(self)

        def schedule(self, _, args, timeout):
            self.sizes.append(len(args[1]))
            self.tasks.append(Future())
            return self.tasks[-1]

    monkeypatch.setattr(reward_pool, "ProcessPool", Idle)
    monkeypatch.setattr(reward_pool, "_retire", lambda pool: None)
    function = RewardFunction("custom", "mine", lambda responses: [], at_once=3, can_hang=True)
    pool = reward_pool.RewardPool(RewardConfig(num_workers=2))
    for number in (1, 3, 1):  # two processes begin at once, and a response waits
        pool.submit(function, [Response(text="1")] * number)
    assert [each.sizes for each in pools] == [[1, 3]]
    pools[0].tasks[0].set_exception(BrokenProcessPool("all have ended"))
    assert [each.sizes for each in pools] == [[1, 3], [1, 3]]


@pytest.mark.slow
def test_a_pattern_without_end_is_a_wrong_response(make):
    scorer = make("reward.name=format", "reward.format='^(\\d+ ?)+$'", "reward.timeout=0.1")
    assert scorer.scores([pair(0, 1), pair(1, *[11111111] * 8, -1)]) == [1.0, 0.0]


@pytest.mark.slow
def test_a_process_that_cannot_load_the_function_says_so(make, tmp_path):
    scorer = make(text="def compute_score(response, answer): return 1")
    (tmp_path / "my_reward.py").unlink()
    with pytest.raises(TrainingError, match=r"could not be loaded in the reward process: .*existing Python"):
        scorer.scores([pair(0, 1)])


RUN = """
import sys, time
from hybrid_gkd.config import CustomRewardFunction, RewardConfig
from hybrid_gkd.scoring import reward_pool
from hybrid_gkd.scoring.reward_functions import load_functions
from hybrid_gkd.scoring.reward_pool import RewardPool
from hybrid_gkd.scoring.builtin_rewards import Response

section = RewardConfig(
    answer_key="a", num_workers=2, custom_reward_function=CustomRewardFunction(path=sys.argv[1])
)
function = load_functions(section)["custom"]
pool = RewardPool(section)
pool.submit(function, [Response(text=text, answer="") for text in ("2", "3")])
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path, number):
    """Not the process that holds the interpreter's lock, nor what the other one has started."""
    file = tmp_path / "my_reward.py"
    file.write_text(textwrap.dedent(HANGS), encoding="utf-8")
    run = subprocess.Popen([sys.executable, "-c", RUN, str(file)], start_new_session=True)
    try:
        wait_until(lambda: {"sleep", "sh"} <= {name for name, _ in descendants(run.pid)})
        pids = [pid for _, pid in descendants(run.pid)]
        assert len(pids) >= 5  # two processes with their guards, and the sleep
    finally:
        os.kill(run.pid, number)
        run.wait(TIMEOUT)
    wait_until(lambda: not [pid for pid in pids if is_alive(pid)])


def in_group(pid, group):
    try:
        return os.getpgid(pid) == group and is_alive(pid)
    except ProcessLookupError:
        return False


def descendants(pid):
    """(name, pid) of all processes below one."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = re.search(r"\((.*)\) \S+ (\d+)", file.read_text(encoding="utf-8", errors="replace")).groups()
        except OSError:
            continue
        parents[int(file.parent.name)] = (name, int(rest))
    found, below = [], {pid}
    while new := {child for child, (_, parent) in parents.items() if parent in below} - {p for _, p in found}:
        found += [(parents[child][0], child) for child in new]
        below = new
    return found

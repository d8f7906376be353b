"""Spans, what is computed from them, the files they are written to and the trace that is made of those."""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading

import pytest

from hybrid_gkd.reporting.trace import trace_recording, write_trace
from hybrid_gkd.runtime import spans
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.runtime.spans import Clock, Span, SpanFile, hidden_seconds, seconds, working_for


class Times:
    """Stands in for time.monotonic: the given times, one after the other."""

    def __init__(self, monkeypatch):
        self.coming = []
        monkeypatch.setattr("hybrid_gkd.runtime.spans.time.monotonic", lambda: self.coming.pop(0))

    def spans(self, clock, *spans):
        """Record spans (name, start, end)."""
        for name, start, end in spans:
            self.coming += [start, end]
            with clock.span(name):
                pass


def read_spans(path):
    return [Span(*row) for row in read_json_lines(path) if not isinstance(row[-1], dict)]


@pytest.fixture
def times(monkeypatch):
    return Times(monkeypatch)


@pytest.mark.parametrize(
    ("own", "requests", "expected"),
    [
        ([("gen", 0, 10)], [(2, 8)], 1.0),
        ([("gen", 0, 4), ("update_actor", 6, 8)], [(2, 10)], 0.5),
        ([("gen", 0, 4), ("update_actor", 2, 6)], [(0, 8)], 0.75),  # generation in another thread
        ([("gen", 0, 4)], [(0, 4), (2, 6), (3, 8)], 0.5),  # requests that overlap count once
        ([("gen", 0, 2), ("update_actor", 8, 10)], [(0, 1), (9, 10)], 1.0),  # nothing in between
        ([("sync_rollout_weights", 0, 8), ("testing", 0, 8), ("wait_prev_gen", 0, 8)], [(0, 8)], 0.0),
        ([], [(0, 1)], 0.0),
        # The next batch is generated during the wait, which costs time all the same.
        ([("gen", 0, 10), ("wait_prev_teacher", 4, 6), ("update_actor", 6, 10)], [(1, 9)], 0.75),
        ([("gen", 0, 10), ("wait_prev_teacher", 3, 4), ("wait_prev_teacher", 5, 7)], [(1, 9)], 0.625),
        ([("gen", 0, 10), ("wait_prev_teacher", 0, 10)], [(1, 9)], 0.0),
    ],
)
def test_hidden_fraction(times, own, requests, expected):
    clock = Clock()
    times.spans(clock, *own)
    clock.requests(requests, until=20)
    assert clock.overlap() == {"teacher/hidden_fraction": expected}


def test_without_requests_there_is_no_hidden_fraction(times):
    clock = Clock()
    assert clock.overlap() == {}
    times.spans(clock, ("gen", 0, 1))
    assert clock.overlap() == {}
    times.spans(clock, ("gen", 2, 3))
    clock.requests([], until=3)
    assert clock.overlap() == {}


def test_what_is_not_known_yet_counts_in_the_next_report_and_nothing_twice(times):
    clock = Clock()
    times.spans(clock, ("gen", 0, 4), ("update_actor", 6, 9))
    clock.requests([(2, 5), (3, 7)], until=5)  # a request that began at 5 is still under way
    assert clock.overlap() == {"teacher/hidden_fraction": pytest.approx(2 / 3)}  # of 2 to 5
    assert clock.overlap() == {}
    times.spans(clock, ("gen", 10, 12))
    clock.requests([(5, 8), (14, 16)], until=13)
    assert clock.overlap() == {"teacher/hidden_fraction": pytest.approx(2 / 3)}  # of 5 to 8, behind the update
    clock.requests([(13, 14)], until=30)
    assert clock.overlap() == {"teacher/hidden_fraction": 0.0}


def test_other_is_the_time_without_a_span_of_this_thread(times):
    clock = Clock()
    times.coming += [5]
    assert clock.untimed() == {}  # what came before is no step's
    times.spans(clock, ("gen", 6, 10))
    times.coming += [11, 12, 13, 14, 15]  # a span within another counts once; then the report
    with clock.span("testing"), clock.span("sync_rollout_weights"):
        pass
    assert clock.untimed() == {"timing/other": 3.0}
    background = threading.Thread(target=lambda: times.spans(clock, ("gen", 16, 30)))
    background.start()
    background.join(60)
    times.coming += [31]
    assert clock.untimed() == {"timing/other": 16.0}


def test_interval_arithmetic_agrees_with_sets():
    rng = random.Random(0)

    def some():
        pairs = [sorted(rng.sample(range(40), 2)) for _ in range(rng.randrange(6))]
        return [(a, b) for a, b in pairs], {x for a, b in pairs for x in range(a, b)}

    for _ in range(500):
        (first, one), (second, two), (third, three) = some(), some(), some()
        assert seconds(first) == len(one)
        assert seconds(first, second) == len(one & two)
        assert seconds(first, without=second) == len(one - two)
        assert seconds(first, second, without=third) == len((one & two) - three)


def test_timing_is_the_sum_of_the_spans_and_threads_have_lanes():
    found = []
    clock = Clock(sink=found.append)

    def work():
        with clock.span("gen"):
            pass

    work()
    with clock.span("update_actor"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [(span.row, span.name, span.lane) for span in found] == [
        ("trainer", "gen", 0), ("trainer", "gen", 1), ("trainer", "update_actor", 0)
    ]
    timing = clock.take()
    for name in ("gen", "update_actor"):
        total = sum(span.end - span.start for span in found if span.name == name)
        assert timing[f"timing/{name}"] == pytest.approx(total, abs=1e-6)
    assert clock.take() == {}


def test_requests_under_way_at_once_are_in_lanes_of_their_own():
    found = []
    clock = Clock(sink=found.append)
    assert clock.requests([(0, 4), (1, 2), (2, 3), (3.5, 6)], until=7) == 6
    assert clock.take() == {"timing/get_teacher_knowledge": 6}
    assert [(span.row, span.name, span.lane) for span in found] == [("teacher", "request", n) for n in (0, 1, 1, 1)]


def test_spans_and_requests_carry_the_step_of_the_thread_that_makes_them():
    found = []
    clock = Clock(sink=found.append)

    def ahead():
        with working_for(4), clock.span("gen"):
            pass

    with working_for(3), clock.span("update_actor"):
        thread = threading.Thread(target=ahead)
        thread.start()
        thread.join()
    with clock.span("testing"):
        pass
    clock.requests([(5, 6), (1, 2)], until=7, steps=[4, None])
    assert [(span.name, span.step) for span in found] == [
        ("gen", 4), ("update_actor", 3), ("testing", None), ("request", None), ("request", 4)
    ]


def test_numbers_are_sampled_at_the_end_of_a_span_but_not_after_an_error():
    found = []
    clock = Clock("worker 0", found.append, step=lambda: 7, sample=lambda: {"GPU memory, GiB": 2.5})
    with clock.span("gen"):
        pass
    span, counters = found
    assert span.step == 7
    assert (counters.row, counters.values) == ("worker 0", {"GPU memory, GiB": 2.5})
    assert counters.at >= span.end
    with contextlib.suppress(RuntimeError), clock.span("update_actor"):
        raise RuntimeError("the device failed")
    assert [each.row for each in found[2:]] == ["worker 0"]


def test_requests_that_are_under_way_at_a_report_count_once():
    """One of two seconds begins every second, so that there always is one; reports come every five seconds."""
    clock = Clock()
    counted = [
        clock.requests([(end - 2, end) for end in range(now - 4, now + 1)], until=now - 1) for now in range(7, 28, 5)
    ]
    assert counted == [6, 5, 5, 5, 5]
    assert clock.take() == {"timing/get_teacher_knowledge": 26}


def test_the_trainer_is_busy_only_outside_its_waits():
    own = [Span("trainer", "update_actor", 0, 4), Span("trainer", "wait_prev_teacher", 1, 3)]
    others = [Span("worker 0", "gen", 0, 9), Span("teacher", "request", 0, 9)]
    assert hidden_seconds([(0.5, 9)], [*own, *others]) == 1.5  # 0.5 to 1 and 3 to 4


def test_spans_of_a_file_are_there_at_once_and_after_a_restart(tmp_path):
    path = tmp_path / "logs" / "worker_0.spans.jsonl"
    SpanFile(path)
    assert not path.exists()  # a process that did nothing
    first = SpanFile(path)
    first(Span("worker 0", "gen", 1.0, 2.5))
    (found,) = read_spans(path)
    assert found.end - found.start == pytest.approx(1.5, abs=1e-5)
    with path.open("a", encoding="utf-8") as file:
        file.write('["worker 0", "gen", 1\n')  # cut short
    second = SpanFile(path)
    second(Span("worker 0", "gen", 3.0, 4.0, 1))
    starts = [span.start for span in read_spans(path)]
    assert len(starts) == 2
    assert starts[1] - starts[0] == pytest.approx(2.0, abs=0.1)  # wall clocks, read twice
    for file in (first, second):
        file.close()


def test_the_size_is_bounded_and_the_newest_spans_are_there(tmp_path):
    file = SpanFile(tmp_path / "worker_0.spans.jsonl", max_bytes=5000)
    for step in range(500):
        file(Span("worker 0", "gen", step, step + 1))
    file.close()
    paths = [tmp_path / "worker_0.old.spans.jsonl", tmp_path / "worker_0.spans.jsonl"]
    assert sorted(tmp_path.iterdir()) == paths
    assert all(path.stat().st_size < 5100 for path in paths)
    starts = [span.start for path in paths for span in read_spans(path)]
    assert [b - a for a, b in itertools.pairwise(starts)] == [pytest.approx(1, abs=1e-5)] * (len(starts) - 1)
    assert len(starts) > 70


def test_a_full_disk_costs_the_spans_and_not_the_run(tmp_path, caplog):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    (tmp_path / "trainer.spans.jsonl").symlink_to("/dev/full")
    clock = Clock(sink=SpanFile(tmp_path / "trainer.spans.jsonl"))
    for _ in range(3):
        with clock.span("gen"):
            pass
    (record,) = caplog.records
    assert record.name == spans.logger.name
    assert "trainer.spans.jsonl cannot be written, the run continues without it" in record.message


def test_a_trace_has_the_rows_of_all_processes_on_one_clock(tmp_path):
    with contextlib.suppress(RuntimeError), trace_recording(tmp_path) as clock:
        with clock.span("gen"):
            for rank, role in enumerate(["actor worker", "rollout worker"]):
                file = SpanFile(tmp_path / "logs" / f"{role.split()[0]}_{rank}.spans.jsonl")
                with Clock(f"{role} {rank}", file).span("gen"):
                    pass
                file.close()
        clock.requests([(1, 2)], until=3)
        with working_for(5), clock.span("update_actor"):
            clock.count({"throughput, tokens/s": 1000.0})
        raise RuntimeError("a run that fails has a trace too")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert sorted(rows, key=rows.get) == ["trainer", "teacher", "actor worker 0", "rollout worker 1"]
    of = {event["pid"]: event for event in events if event["ph"] == "X" and event["name"] == "gen"}
    outer = of.pop(rows["trainer"])
    for inner in of.values():
        assert outer["ts"] - 1e4 < inner["ts"] <= inner["ts"] + inner["dur"] < outer["ts"] + outer["dur"] + 1e4
    assert [event["dur"] for event in events if event["name"] == "request"] == [1e6]
    (update,) = (event for event in events if event["name"] == "update_actor")
    (curve,) = (event for event in events if event["ph"] == "C")
    assert update["args"] == {"step": 5}
    assert (curve["name"], curve["pid"], curve["args"]) == ("throughput, tokens/s", 1, {"value": 1000.0})
    assert update["ts"] - 1e4 < curve["ts"] < update["ts"] + update["dur"] + 1e4
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_without_spans_gets_no_trace(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no run folder with spans: it has no logs/\*\.spans\.jsonl"):
        write_trace(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_makes_the_trace_of_a_run_that_still_goes_on(tmp_path):
    with contextlib.closing(SpanFile(tmp_path / "logs" / "worker_0.spans.jsonl")) as file:
        file(Span("worker 0", "gen", 1.0, 2.0))
        command = [sys.executable, "-m", "hybrid_gkd.reporting.trace", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))[-1]["dur"] == 1e6
    done = subprocess.run([*command[:-1], str(tmp_path / "nothere")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "nothere" in done.stderr.splitlines()[-1]


def test_a_disk_that_is_full_at_the_end_does_not_end_the_run(tmp_path, caplog):
    with trace_recording(tmp_path / "gone") as clock:
        pass
    assert clock.overlap() == {}
    assert "cannot write trace.json" in caplog.text
    with pytest.raises(OSError, match="gone"):
        write_trace(tmp_path / "gone")

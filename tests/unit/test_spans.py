"""Spans, what is computed from them, and the trace file."""

import itertools
import json
import math
import os
import random
import threading

import pytest

from hybrid_gkd.reporting import trace
from hybrid_gkd.reporting.trace import TraceFile, read_trace
from hybrid_gkd.spans import Clock, Span, Spans, busy, gaps, intersect, merge, seconds


def worker(rank, name, start, end):
    return Span(f"worker {rank}", name, start, end)


def overlap(spans, requests, *, until=math.inf, workers_until=math.inf):
    clock = Clock()
    clock.sources.append(lambda: Spans(spans, workers_until))
    clock.requests(requests, until=until)
    return clock.overlap()


@pytest.mark.parametrize(
    ("spans", "requests", "expected"),
    [
        ([worker(0, "gen", 0, 10)], [(2, 8)], 1.0),
        ([worker(0, "gen", 0, 4), worker(0, "update_actor", 6, 8)], [(2, 10)], 0.5),
        ([worker(0, "gen", 0, 4), worker(1, "gen", 2, 6)], [(0, 8)], 0.75),  # the pool is busy while one is
        ([worker(0, "gen", 0, 4)], [(0, 4), (2, 6), (3, 8)], 0.5),  # requests that overlap count once
        ([worker(0, "gen", 0, 2), worker(0, "update_actor", 8, 10)], [(0, 1), (9, 10)], 1.0),  # nothing in between
        ([worker(0, "update_actor", 0, 8), worker(0, "wait_prev_teacher", 2, 6)], [(0, 8)], 0.5),
        ([worker(0, "sync_rollout_weights", 0, 8), worker(0, "initialize", 0, 8)], [(0, 8)], 0.0),
        ([], [(0, 1)], 0.0),
    ],
)
def test_hidden_fraction(spans, requests, expected):
    assert overlap(spans, requests) == {"teacher/hidden_fraction": expected}


@pytest.mark.parametrize(
    ("waits", "generated", "expected"),
    [
        ([(4, 6)], [(0, 10)], 0.75),  # the next batch is generated beside the wait, which costs time all the same
        ([(4, 6)], [(0, 4), (6, 10)], 0.75),  # on the hybrid engine nobody generates meanwhile
        ([(3, 4), (5, 7)], [(0, 10)], 0.625),
        ([(0, 10)], [(0, 10)], 0.0),
        ([], [(0, 10)], 1.0),
    ],
)
def test_what_the_trainer_waited_for_is_not_hidden_by_a_pool_that_generates(waits, generated, expected):
    clock = Clock()
    work = [Span("rollout worker 0", "gen", *interval) for interval in generated]
    clock.sources.append(lambda: Spans(work, math.inf))
    clock.collect(Spans([Span("trainer", "wait_prev_teacher", *interval) for interval in waits], math.inf))
    clock.collect(Spans([Span("trainer", name, 0, 10) for name in ("gen", "wait_prev_gen", "update_actor")], math.inf))
    clock.requests([(1, 9)], until=10)
    assert clock.overlap() == {"teacher/hidden_fraction": expected}


def test_a_wait_of_the_trainer_is_recorded_by_its_span_and_counts_once(monkeypatch):
    now = iter([2.0, 6.0])
    monkeypatch.setattr("hybrid_gkd.spans.time.monotonic", lambda: next(now))
    clock, untils = Clock(), iter([4.0, 8.0])
    clock.sources.append(lambda: Spans([Span("rollout worker 0", "gen", 0, 8)], next(untils)))
    with clock.span("wait_prev_teacher"):
        pass
    clock.requests([(0, 8)], until=8)
    assert clock.overlap() == {"teacher/hidden_fraction": 0.5}  # of 0 to 4
    assert clock.overlap() == {"teacher/hidden_fraction": 0.5}  # of 4 to 8
    assert clock._spans == []


def test_without_requests_there_is_no_hidden_fraction():
    assert overlap([worker(0, "gen", 0, 1)], []) == {}
    assert Clock().overlap() == {}


def test_what_is_not_known_yet_counts_in_the_next_report_and_nothing_twice():
    clock, parts = Clock(), [Spans([worker(0, "gen", 0, 4)], 5), Spans([worker(0, "update_actor", 4, 9)], 20)]
    clock.sources.append(lambda: parts.pop(0))
    clock.requests([(2, 8)], until=8)  # the worker has told until 5: gen hides 2 of these 3 seconds
    assert clock.overlap() == {"teacher/hidden_fraction": pytest.approx(2 / 3)}
    clock.requests([(12, 14)], until=10)  # a request that began at 10 is still under way
    assert clock.overlap() == {"teacher/hidden_fraction": 1.0}  # 5 to 8, behind the update
    parts.append(Spans([], 30))
    clock.requests([(10, 12)], until=30)
    assert clock.overlap() == {"teacher/hidden_fraction": 0.0}


def test_a_run_without_a_teacher_keeps_no_spans():
    clock = Clock()
    clock.sources.append(lambda: Spans([worker(0, "gen", 0, 1)] * 100, 2))
    for _ in range(3):
        assert clock.overlap() == {}
    assert len(clock._spans) == 0


def test_interval_arithmetic_agrees_with_sets():
    rng = random.Random(0)

    def some():
        pairs = [sorted(rng.sample(range(40), 2)) for _ in range(rng.randrange(6))]
        return [(a, b) for a, b in pairs], {x for a, b in pairs for x in range(a, b)}

    for _ in range(500):
        (first, one), (second, two) = some(), some()
        assert seconds(first) == len(one)
        assert seconds(intersect(first, second)) == len(one & two)
        assert seconds(intersect(first, gaps(second))) == len(one - two)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(merge(first)))


def test_timing_is_the_sum_of_the_spans_and_threads_have_lanes(tmp_path):
    clock = Clock(trace=TraceFile(tmp_path / "trace.json"))

    def work():
        with clock.span("gen"):
            pass

    work()
    with clock.span("update_actor"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    clock.close()
    events = [event for event in read_trace(clock.trace.path) if event["ph"] == "X"]
    assert [(event["name"], event["tid"]) for event in events] == [("gen", 0), ("gen", 1), ("update_actor", 0)]
    timing = clock.take()
    for name in ("gen", "update_actor"):
        total = sum(event["dur"] for event in events if event["name"] == name) / 1e6
        assert timing[f"timing/{name}"] == pytest.approx(total, abs=1e-6)
    assert clock.take() == {}


def test_requests_under_way_at_once_are_in_lanes_of_their_own(tmp_path):
    clock = Clock(trace=TraceFile(tmp_path / "trace.json"))
    assert clock.requests([(0, 4), (1, 2), (2, 3), (3.5, 6)], until=7) == 6
    clock.close()
    assert clock.take() == {"timing/get_teacher_knowledge": 6}
    events = [event for event in read_trace(clock.trace.path) if event["ph"] == "X"]
    assert [event["tid"] for event in events] == [0, 1, 1, 1]


def test_requests_that_are_under_way_at_a_report_count_once():
    """One of two seconds begins every second, so that there always is one; reports come every five seconds."""
    clock = Clock()
    counted = [
        clock.requests([(end - 2, end) for end in range(now - 4, now + 1)], until=now - 1) for now in range(7, 28, 5)
    ]
    assert counted == [6, 5, 5, 5, 5]
    assert clock.take() == {"timing/get_teacher_knowledge": 26}


def test_a_trace_that_has_no_end_can_be_read_and_an_earlier_one_is_kept(tmp_path):
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    file.write([worker(0, "gen", 1.0, 2.0)])
    assert not path.read_text().rstrip().endswith("]")
    first = read_trace(path)
    assert first[0]["args"] == {"name": "worker 0"}
    assert first[-1]["dur"] == 1e6
    path.write_text(path.read_text() + ',\n{"name": "gen", "args": {}')  # killed while it wrote
    assert read_trace(path) == first
    TraceFile(path).close()  # a run that failed before it did anything
    assert read_trace(path) == first
    TraceFile(path).write([worker(1, "gen", 1.0, 2.0)])
    assert read_trace(path)[0]["args"] == {"name": "worker 1"}
    assert read_trace(tmp_path / "trace.1.json") == first


def test_the_size_is_bounded_and_the_newest_spans_are_there(tmp_path):
    file = TraceFile(tmp_path / "trace.json", max_bytes=5000)
    for step in range(500):
        file.write([worker(0, "gen", step, step + 1)])
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.old.json"]
    last = [json.loads(path.read_text()) for path in (tmp_path / "trace.old.json", tmp_path / "trace.json")]
    assert all((tmp_path / name).stat().st_size < 5500 for name in ("trace.json", "trace.old.json"))
    assert [events[0]["name"] for events in last] == ["process_name", "process_name"]  # each opens by itself
    starts = [event["ts"] for events in last for event in events if event["ph"] == "X"]
    assert [b - a for a, b in itertools.pairwise(starts)] == [pytest.approx(1e6)] * (len(starts) - 1)


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path, caplog):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    file = TraceFile(tmp_path / "trace.json")
    file.write([worker(0, "gen", 0, 1)])
    file._file.close()
    file._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 (what a full disk answers)
    file._file.truncate = lambda size: None
    for _ in range(2):
        file.write([worker(0, "gen", 0, 1)])
    file.close()
    assert [record.message for record in caplog.records if record.name == trace.logger.name] != []
    assert len(caplog.records) == 1


def test_a_worker_is_busy_only_outside_its_own_waits():
    spans = [worker(0, "update_actor", 0, 4), worker(1, "update_actor", 0, 4), worker(1, "wait_prev_teacher", 1, 3)]
    assert busy(spans) == [(0, 4)]
    assert busy([*spans, worker(0, "wait_prev_teacher", 2, 4)]) == [(0, 2), (3, 4)]

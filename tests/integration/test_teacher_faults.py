"""Short versions of what benchmarks/teacher_faults.py runs at length."""

import faults
import fuzz
import pytest

pytestmark = pytest.mark.alone


def test_killed_workers_cost_no_sequence():
    seen = faults.kill_workers(5)
    assert seen["kills"] == 5
    assert seen["requeued"] >= 5
    assert seen["retries of the client"] == 0


def test_the_client_finds_a_restarted_broker():
    assert faults.restart_broker(1)["sequences"] > 0


def test_the_work_of_a_stopped_worker_goes_elsewhere():
    assert faults.stop_worker()["retries of the client"] == 0


def test_a_request_in_a_hanging_engine_goes_elsewhere():
    assert faults.hang_engine(hedge_seconds=1.0)["retries of the client"] == 0


def test_a_worker_that_returns_nonsense_gets_no_more_work():
    assert faults.spoil_replies()["bad replies"] >= 3


def test_a_worker_whose_engine_hangs_ends():
    assert "waited 3." in faults.hang_only_engine()["the client's error"]


def test_a_client_that_never_reads_does_not_block_the_others():
    assert faults.deaf_client(2000)["requests of the other"] > 0


@pytest.mark.parametrize("attack", [fuzz.fuzz_broker, fuzz.fuzz_worker, fuzz.fuzz_client])
def test_bad_messages_neither_end_nor_mislead_the_receiver(attack):
    assert attack(20_000)["bad messages"] >= 20_000

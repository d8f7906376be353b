"""Effects of the first and the second signal during training, before it and during the shutdown."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from hybrid_gkd.launch import doctor
from hybrid_gkd.launch import stopping as stopping_module
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.runtime.signals import SIGNALS

ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit, signal.SIGHUP: SystemExit}


@pytest.fixture
def stopping():
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    installed = Stopping()
    installed.install()
    yield installed
    for number, handler in handlers.items():
        signal.signal(number, handler)


def wait_for_threads():
    for thread in threading.enumerate():
        if thread.name == "signal":
            thread.join(60)
            assert not thread.is_alive()


def test_the_doctor_has_no_switch_of_a_run(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--dry-run"])
    assert "unrecognized arguments: --dry-run\n" in capsys.readouterr().err


def test_options_of_other_trainers_are_refused_with_the_key(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--model_name_or_path=a/b", "--learning-rate", "1e-5", "--seeds"])
    keys = ("model_name_or_path", "model.path"), ("learning-rate", "actor.optim.lr")
    form = "keys are given as dotted.key=value"
    hints = "".join(f"\n  --{name}: {form} (did you mean actor_rollout_ref.{key}?)" for name, key in keys)
    assert capsys.readouterr().err.endswith(f"--model_name_or_path=a/b --learning-rate --seeds{hints}\n")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_doctor_with_its_code_and_no_traceback(stopping, monkeypatch, number):
    monkeypatch.setattr(doctor, "load", lambda options: signal.raise_signal(number))
    assert doctor.main([]) == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_the_doctor_s_code_is_that_of_a_signal_whose_exception_a_library_has_swallowed(stopping, monkeypatch, number):
    def examine(options):
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            signal.raise_signal(number)
        return 0

    monkeypatch.setattr(doctor, "examine", examine)
    assert doctor.main([]) == 128 + number


def test_an_interrupted_doctor_leaves_no_folder(stopping, monkeypatch, tmp_path):
    """The folder of the workers' logs is kept only after an error, which names its files."""

    def place(*args, **kwargs):
        assert len(list(tmp_path.iterdir())) == 1
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(doctor, "ray_cluster", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(doctor, "WorkerGroup", place)
    facts = mock.Mock(device=None)
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:
        doctor.PlacedWorkers(stack).place(facts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", SIGNALS)
def test_before_training_the_first_signal_ends_the_run(stopping, number):
    with pytest.raises(ENDS[number]):
        signal.raise_signal(number)
    assert stopping.exit_code == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_during_training_the_first_signal_is_a_request_and_the_second_ends_the_run(stopping, number, caplog):
    assert not stopping.requested()

    def train():
        with stopping.uninterrupted_shutdown(), stopping.deferred_to_step_end(60.0):
            signal.raise_signal(number)
            assert stopping.requested()
            signal.raise_signal(number)

    with pytest.raises(ENDS[number], match=f"ended by {number.name}"):
        train()
    assert stopping.exit_code == 128 + number
    wait_for_threads()
    assert f"{number.name}: the run ends after the current step is finished and saved, within 60 s" in caplog.text


def test_a_second_run_of_the_process_is_ended_like_the_first(stopping):
    with stopping.uninterrupted_shutdown():
        pass
    with pytest.raises(KeyboardInterrupt), stopping.uninterrupted_shutdown(), stopping.deferred_to_step_end(0.0):
        signal.raise_signal(signal.SIGINT)


def test_a_grace_period_that_is_over_ends_the_run_and_says_so(stopping, caplog):
    """Its training with other workers, too, after which the first one ended."""
    with stopping.deferred_to_step_end(60.0):
        pass

    def train():
        with stopping.deferred_to_step_end(0.05):
            signal.raise_signal(signal.SIGTERM)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                time.sleep(0.01)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 128 + signal.SIGTERM
    assert "not finished and saved within 0.05 s (trainer.grace_period)" in caplog.text


def test_a_step_that_is_saved_in_time_is_not_ended(stopping):
    with stopping.deferred_to_step_end(60.0):
        signal.raise_signal(signal.SIGTERM)
    wait_for_threads()
    assert stopping.exit_code == 128 + signal.SIGTERM


def test_a_signal_at_the_last_step_leaves_a_complete_run(stopping, caplog):
    with stopping.deferred_to_step_end(60.0):
        signal.raise_signal(signal.SIGTERM)
        stopping.cancel_request()
    wait_for_threads()
    assert stopping.exit_code is None
    assert "SIGTERM during the last step: the run is complete" in caplog.text


def test_without_a_grace_period_the_first_signal_ends_the_run(stopping):
    with pytest.raises(KeyboardInterrupt), stopping.deferred_to_step_end(0.0):
        signal.raise_signal(signal.SIGINT)


def test_no_signal_interrupts_the_stopping(stopping, caplog):
    """Neither after a signal that has ended the run, nor after another end."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    wait_for_threads()
    assert "the run is shutting down" in caplog.text
    other = Stopping()
    other.install()
    with other.uninterrupted_shutdown():
        pass
    signal.raise_signal(signal.SIGTERM)
    assert other.exit_code == 128 + signal.SIGTERM


def test_a_stopping_that_hangs_is_ended_by_a_further_signal(stopping, monkeypatch):
    monkeypatch.setattr(stopping_module, "STOPPING_SECONDS", -1.0)
    codes = []
    monkeypatch.setattr(stopping_module.os, "_exit", codes.append)
    with stopping.uninterrupted_shutdown():
        pass
    signal.raise_signal(signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM]


def test_a_signal_that_the_parent_has_it_ignore_stays_ignored():
    """`nohup` sets signals to be ignored."""
    code = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from hybrid_gkd.launch.stopping import Stopping
Stopping().install()
signal.raise_signal(signal.SIGHUP)
print("still there")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "still there\n", result.stderr

"""The exit code of a run that was ended from outside."""

import signal
import sys

import pytest

from hybrid_gkd import __main__ as command_line
from hybrid_gkd.launch import run as training
from hybrid_gkd.launch.command_line import parse
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.runtime.signals import SIGNALS

ARGUMENTS = ["data.train_files=unused", "actor_rollout_ref.model.path=unused", "distillation.enabled=false"]
PPO = ["reward.answer_key=answer", "actor_rollout_ref.rollout.n=2"]


@pytest.fixture
def run(monkeypatch):
    """The command line with a run that ends as given; its exit code."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def call(end):
        monkeypatch.setattr(command_line, "run_training", end)
        return command_line.main([*ARGUMENTS, *PPO])

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_the_exit_code(run, number, capsys):
    assert run(lambda config, options, stopping: signal.raise_signal(number)) == 128 + number
    assert capsys.readouterr().err == f"ended by {number.name}; all processes of this run are stopped\n"


def test_a_run_that_has_ended_after_its_step_has_the_same_exit_code(run):
    def end(config, options, stopping):
        with stopping.deferred_to_step_end(60.0):
            signal.raise_signal(signal.SIGTERM)

    assert run(end) == 128 + signal.SIGTERM


def test_a_sigterm_that_ray_hides_is_still_the_exit_code(run):
    def end(config, options, stopping):
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None  # what Ray makes of it while it waits

    assert run(end) == 128 + signal.SIGTERM


def test_an_exit_that_ray_has_decided_on_is_an_error_with_its_reason(run, capsys):
    def end(config, options, stopping):
        error = SystemExit(1)
        error.ray_terminate_msg = "the raylet died"
        raise error

    assert run(end) == 1
    assert "error: Ray ended the run: the raylet died" in capsys.readouterr().err


def test_an_exit_of_code_that_the_run_has_called_is_not_one_of_ray(run, capsys):
    assert run(lambda config, options, stopping: sys.exit(3)) == 1
    assert "error: the run was ended by SystemExit(3)" in capsys.readouterr().err


def test_the_run_gets_the_keys_that_the_user_set(monkeypatch):
    seen = []
    monkeypatch.setattr(training, "run", lambda config, **given: seen.append(given["set_keys"]))
    monkeypatch.setattr(training, "suggest_next_steps", lambda config: None)
    options = parse([*ARGUMENTS, *PPO, "distillation.topk=8", "--config-name=ppo"])
    command_line.start(options, Stopping())
    files = ["data.train_files", "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.n"]
    assert seen == [[*files, "distillation.topk", "reward.answer_key"]]

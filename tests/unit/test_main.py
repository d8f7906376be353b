"""The exit code of a run that was ended from outside."""

import signal

import pytest

from hybrid_gkd import __main__ as command_line
from hybrid_gkd.launch.command_line import terminated

ARGUMENTS = ["data.train_files=unused", "actor_rollout_ref.model.path=unused", "distillation.enabled=false"]
PPO = ["reward.answer_key=answer", "actor_rollout_ref.rollout.n=2"]


@pytest.fixture
def run(monkeypatch):
    """The command line with a run that ends as given; its exit code."""
    terminated.clear()
    handler = signal.getsignal(signal.SIGTERM)

    def call(end):
        monkeypatch.setattr(command_line, "train", end)
        return command_line.main([*ARGUMENTS, *PPO])

    yield call
    signal.signal(signal.SIGTERM, handler)
    terminated.clear()


def test_a_sigterm_that_ray_hides_is_still_the_exit_code(run):
    def end(config):
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise SystemExit(1) from None  # what Ray makes of it while it waits

    assert run(end) == 128 + signal.SIGTERM


def test_an_exit_that_ray_has_decided_on_is_an_error_with_its_reason(run, capsys):
    def end(config):
        error = SystemExit(1)
        error.ray_terminate_msg = "the raylet died"
        raise error

    assert run(end) == 1
    assert "error: Ray ended the run: the raylet died" in capsys.readouterr().err


def test_a_sigterm_while_ray_starts_is_the_exit_code(run):
    def end(config):
        raise SystemExit(signal.SIGTERM)  # of Ray's own handler

    assert run(end) == 128 + signal.SIGTERM

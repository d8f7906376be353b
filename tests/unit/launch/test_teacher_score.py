"""Arguments of `python -m hybrid_gkd.teacher score` that would be ignored."""

import pytest

from hybrid_gkd.launch.score import parse

SERVICE, OWN = ["--addr=far:15555", "--student=small"], ["--ckpt-path=large"]


@pytest.mark.parametrize(("arguments", "message"), [
    ([*SERVICE, "--workers=2", "--dtype=float32"], "--dtype, --workers: for the service that --ckpt-path starts"),
    ([*SERVICE, "--trust-remote-code"], "--trust-remote-code: for the service that --ckpt-path starts"),
    (
        [*OWN, "actor_rollout_ref.teacher.dtype=float32", "actor_rollout_ref.teacher.engine_kwargs.vllm.seed=1"],
        "actor_rollout_ref.teacher.dtype=float32, actor_rollout_ref.teacher.engine_kwargs.vllm.seed=1: the service has",
    ),
])  # fmt: skip
def test_what_has_no_effect_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit):
        parse(["answers.jsonl", "--out=scores", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("arguments", [
    [*OWN, "--workers=2", "--dtype=float32", "--trust-remote-code", "actor_rollout_ref.teacher.start_timeout=9"],
    [*SERVICE, "actor_rollout_ref.teacher.server_port=3", "actor_rollout_ref.teacher.device_map=1"],
])  # fmt: skip
def test_what_has_an_effect_is_accepted(arguments):
    assert parse(["answers.jsonl", "--out=scores", *arguments]).files == ["answers.jsonl"]

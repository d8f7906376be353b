"""Arguments of `python -m hybrid_gkd.teacher score`: those that would be ignored, and the configuration of a run."""

import pytest

from hybrid_gkd.config import run_teachers
from hybrid_gkd.launch.score import make_config, parse

SERVICE, OWN = ["--addr=far:15555", "--student=small"], ["--ckpt-path=large"]


@pytest.mark.parametrize(("arguments", "message"), [
    ([*SERVICE, "--workers=2", "--dtype=float32"], "--dtype, --workers: for the service that --ckpt-path starts"),
    ([*SERVICE, "--trust-remote-code"], "--trust-remote-code: for the service that --ckpt-path starts"),
    (
        [*OWN, "actor_rollout_ref.teacher.dtype=float32", "actor_rollout_ref.teacher.engine_kwargs.vllm.seed=1"],
        "actor_rollout_ref.teacher.dtype=float32, actor_rollout_ref.teacher.engine_kwargs.vllm.seed=1: the service has",
    ),
    (
        [*OWN, "actor_rollout_ref.teacher.cache=elsewhere", "+actor_rollout_ref.teacher.cache_gigabytes=1"],
        "cache=elsewhere, +actor_rollout_ref.teacher.cache_gigabytes=1: the store is that of --out, without a limit",
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


@pytest.mark.parametrize("recipe", [
    "distillation: {enabled: false}",
    "actor_rollout_ref: {teacher: {server_ip: far, keys: secret, cache: other_scores}}",
    "actor_rollout_ref: {teacher: {source: ema}}\ndata: {teacher_prompt_key: hint}",
])  # fmt: skip
def test_the_teacher_is_that_of_the_command_line_with_any_recipe(tmp_path, recipe):
    (tmp_path / "own.yaml").write_text(f"defaults: [gkd]\n{recipe}\n", encoding="utf-8")
    options = ["answers.jsonl", "--out=scores", f"--config-name={tmp_path / 'own'}"]

    config = make_config(parse([*options, *OWN, "--backend=hf", "--trust-remote-code"]))
    (teacher,) = run_teachers(config)
    section = teacher.section
    assert (section.model.path, section.server_ip, section.keys, section.source) == ("large", None, None, "model")
    assert (section.backend, config.actor_rollout_ref.model.trust_remote_code) == ("hf", True)

    (teacher,) = run_teachers(make_config(parse([*options, *SERVICE])))
    assert (teacher.section.endpoints, teacher.section.model.path) == (["far:15555"], None)

"""A LoRA run as a user starts it: merged weights verified in the engine, shards and adapter folder validated alike."""

import json

import pytest
from test_command_line import HF, arguments, rows_of, run, run_here, world  # noqa: F401, a fixture

from hybrid_gkd.launch import evaluate


def test_a_run_with_adapters_is_what_its_checkpoint_and_its_adapter_folder_are(world, tmp_path, capsys):  # noqa: F811
    code, _, errors = run(arguments(
        world, tmp_path, "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.verify_weights=true",
        "actor_rollout_ref.teacher.backend=hf", "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.optim.lr=0.5",  # far from where it began, so that it cannot be taken for the base
    ))  # fmt: skip
    assert code == 0, errors
    folder, rows = tmp_path / "hybrid_gkd" / "gkd", rows_of(tmp_path)
    assert "frozen_params" in (folder / "run.log").read_text(encoding="utf-8")
    assert rows[2]["memory/update/frozen_params_gb"] > rows[2]["memory/update/actor_params_gb"] > 0
    trained = folder / "global_step_2"
    files = {file.name for file in (trained / "huggingface").iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    before, after = (rows[step]["val/forward_kl"] for step in (0, 2))
    assert abs(before - after) > 0.1
    models = [str(trained), str(trained / "huggingface")]
    settings = ["--config-path", str(folder), "--config-name", "config", "--data", f"{world}/val.jsonl", "--json"]
    settings += ["distillation.enabled=true", f"trainer.default_local_dir={tmp_path}/out", *HF]
    code, text, errors = run_here(capsys, [*models, *settings], evaluate.main)
    assert code == 0, errors
    for found, model in zip(json.loads(text), models, strict=True):
        assert found["model"] == model
        assert found["val/forward_kl"] == pytest.approx(after, rel=1e-3)

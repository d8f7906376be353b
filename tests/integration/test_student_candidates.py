"""Candidates of the student with real workers and a real teacher service."""

import json
import os
import subprocess
import sys

import documented
import pytest

from hybrid_gkd.testing import make_tiny_model

K = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models and eight prompts."""
    folder = tmp_path_factory.mktemp("user")
    for seed, name in enumerate(("student", "teacher")):
        make_tiny_model(folder / name, seed=seed, layers=1)
    rows = "".join(json.dumps({"prompt": f"What is {i} + {i}?"}) + "\n" for i in range(8))
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("candidates", "width", "backend"), [("student", K, "hf"), ("union", 2 * K, "hf")])
def test_teacher_and_student_are_compared_on_the_students_tokens(folder, candidates, width, backend):
    """With the student's candidates; then with both one's."""
    keys = [
        "distillation.loss_mode=reverse_kl", f"distillation.candidates={candidates}",
        f"distillation.topk={K}", "trainer.total_training_steps=3",
        f"actor_rollout_ref.model.path={folder}/student", f"actor_rollout_ref.teacher.model.path={folder}/teacher",
        f"data.train_files={folder}/train.jsonl", f"data.val_files={folder}/val.jsonl", "data.train_batch_size=8",
        "data.max_prompt_length=32", "data.max_response_length=8", "trainer.device=cpu", "trainer.test_freq=3",
        f"actor_rollout_ref.teacher.backend={backend}", "actor_rollout_ref.rollout.name=hf", "trainer.save_freq=0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        f"trainer.default_local_dir={folder}/outputs", f"trainer.experiment_name={candidates}",
    ]  # fmt: skip
    words = [sys.executable, "-m", "hybrid_gkd", *keys]
    environment = {**os.environ, "PYTHONPATH": str(documented.ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=540)
    assert done.returncode == 0, done.stderr
    lines = (folder / "outputs" / "hybrid_gkd" / candidates / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    assert rows[3]["actor/kl_loss"] < rows[1]["actor/kl_loss"]
    assert rows[3]["val/reverse_kl"] < rows[0]["val/reverse_kl"]
    for step in (1, 2, 3):
        assert rows[step]["teacher/bytes_per_token"] > 6 * width + 8
        overlap = rows[step]["actor/distillation/overlap_ratio"]
        assert overlap > 0.99 if candidates == "student" else overlap < 0.9

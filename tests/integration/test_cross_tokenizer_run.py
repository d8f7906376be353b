"""The command of a teacher with another tokenizer, with real workers and a real teacher."""

import json
import os
import subprocess
import sys

import documented
import pytest
from small_tokenizers import byte_level, make_model_with

from hybrid_gkd.testing import CHAT_TEMPLATE, make_tiny_model


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_with_other_tokens(tmp_path):
    """Words of the teacher, bytes of the student; the teacher has its own chat template and end-of-text token."""
    tokenizer = byte_level(420, end="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|a|>", "Answer:")
    student = make_tiny_model(tmp_path / "student", seed=1)
    teacher = make_model_with(tokenizer, tmp_path / "teacher", seed=2, std=0.05)
    rows = "".join(json.dumps({"prompt": f"the weather of {i}"}) + "\n" for i in range(16))
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    (command,) = (each for each in documented.commands() if "distillation.cross_tokenizer=spans" in each)
    short = [
        f"actor_rollout_ref.model.path={student}", f"actor_rollout_ref.teacher.model.path={teacher}",
        "data.val_files=val.jsonl", "data.train_batch_size=8", "data.max_prompt_length=48",
        "data.max_response_length=16", "distillation.topk=32", "trainer.device=cpu", "trainer.save_freq=-1",
        "actor_rollout_ref.teacher.backend=hf", "actor_rollout_ref.rollout.name=hf", "trainer.test_freq=10",
        "trainer.total_training_steps=10", "actor_rollout_ref.actor.optim.lr=5e-3", "trainer.total_epochs=5",
        "trainer.experiment_name=run", f"trainer.default_local_dir={tmp_path}/outputs",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "hybrid_gkd", *documented.arguments(command), *short], capture_output=True, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(documented.ROOT)}, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "outputs" / "hybrid_gkd" / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = {row["step"]: row for row in map(json.loads, lines)}
    kinds = [[found[step][f"teacher/tokens/{kind}_fraction"] for kind in ("matched", "span", "unscored")]
             for step in range(1, 11)]  # fmt: skip
    assert all(sum(fractions) == pytest.approx(1) for fractions in kinds)
    assert all(matched > 0.5 and unscored < 0.1 for matched, _, unscored in kinds)  # special tokens without counterpart
    assert any(span > 0 for _, span, _ in kinds)
    assert found[10]["actor/kl_loss"] < 0.5 * found[1]["actor/kl_loss"]
    assert min(found[step]["val/forward_kl"] for step in (0, 10)) > 0

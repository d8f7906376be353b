"""The recipe of a teacher whose prompts are built from completions, with real workers and a real teacher."""

import json
import os
import subprocess
import sys

import documented
import pytest

from hybrid_gkd.testing import make_tiny_model

REWARD = """
def compute_score(solution_str, ground_truth):
    return float(sum(solution_str.encode()) % 2)
"""


@pytest.mark.slow
def test_a_teacher_with_a_solution_scores_what_is_wrong(tmp_path):
    """A resumed run computes the same, up to the order of sums."""
    student, teacher = (make_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("student", "teacher")))
    rows = "".join(json.dumps({"prompt": f"What is {i} + {i}?", "answer": str(2 * i)}) + "\n" for i in range(8))
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    (tmp_path / "my_prompts.py").write_text(documented.example("my_prompts.py"), encoding="utf-8")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    (command,) = (each for each in documented.commands() if "my_prompts.py:with_a_solution" in each)

    def run(name, *more):
        short = [
            f"actor_rollout_ref.model.path={student}", f"actor_rollout_ref.teacher.model.path={teacher}",
            "reward.name=exact_match", "reward.custom_reward_function.path=reward.py", "reward.num_workers=1",
            "data.train_batch_size=4", "data.max_prompt_length=32", "data.max_response_length=8",
            "data.max_teacher_prompt_length=120", "trainer.device=cpu", "actor_rollout_ref.teacher.backend=hf",
            "actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=3", "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=null", "trainer.test_freq=3", f"trainer.experiment_name={name}",
            f"trainer.default_local_dir={tmp_path}/outputs",
        ]  # fmt: skip
        words = [sys.executable, "-m", "hybrid_gkd", *documented.arguments(command), *short, *more]
        environment = {**os.environ, "PYTHONPATH": str(documented.ROOT)}
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=540)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "outputs" / "hybrid_gkd" / name
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return folder, {row["step"]: row for row in map(json.loads, lines)}

    folder, whole = run("whole")
    for step in (1, 2, 3):
        assert 0 < whole[step]["teacher/unscored_fraction"] < 1
        assert whole[step]["actor/kl_loss"] > 0
    assert min(whole[step]["val/forward_kl"] for step in (0, 3)) > 0  # of other prompts after each validation
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_2"]
    _, resumed = run("resumed", *resume)
    assert resumed.keys() == {3}
    for name in (name for name in resumed[3] if name.startswith(("actor/", "teacher/unscored", "val/"))):
        assert resumed[3][name] == pytest.approx(whole[3][name], rel=1e-3, abs=1e-6), name

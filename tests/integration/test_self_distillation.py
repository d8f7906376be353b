"""The recipes of a student that is its own teacher, with real workers."""

import json
import re

from test_recipes import HF, assert_panels_are_of_what_was_reported, environment, metrics, run  # noqa: F401, a fixture

from hybrid_gkd.testing import make_tiny_model

RECIPE = ("--config-name", "self_distillation", HF)


def test_the_student_with_the_solution_teaches_the_one_without(environment, tmp_path):  # noqa: F811
    """In half of the recipe's steps; after all of them the rise was 56 points in one run."""
    table = run(environment, tmp_path, *RECIPE, "trainer.total_training_steps=40", "trainer.save_freq=0")
    assert float(re.search(r"accuracy: teacher +([\d.]+)%", table)[1]) >= 95
    folder = tmp_path / "hybrid_gkd" / "self_distillation"
    rows = metrics(folder)
    assert rows[40]["val/accuracy"] >= rows[0]["val/accuracy"] + 0.2
    assert rows[40]["val/forward_kl"] <= rows[0]["val/forward_kl"] / 2
    assert rows[40]["teacher/tokens_per_second"] > 0
    assert not (folder / "logs" / "teacher.log").exists()
    assert "the student's initial weights" in (folder / "run.log").read_text(encoding="utf-8")
    assert_panels_are_of_what_was_reported(folder, rows)


def test_a_run_with_a_moving_average_resumes_to_the_same_numbers(environment, tmp_path):  # noqa: F811
    """On two workers, which save a part of the average each, with two optimizer steps per rollout."""
    short = [
        *RECIPE, "actor_rollout_ref.teacher.source=ema", "actor_rollout_ref.teacher.ema_decay=0.7",
        "trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null",
        "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.val_before_train=false",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant", "trainer.test_freq=0", "trainer.logger=[jsonl]",
    ]  # fmt: skip
    run(environment, tmp_path, *short, "trainer.n_gpus_per_node=2")
    folder = tmp_path / "hybrid_gkd" / "self_distillation"
    whole = metrics(folder)
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_2"]
    run(environment, tmp_path, *short, *resume, "trainer.n_gpus_per_node=2", "trainer.experiment_name=resumed")
    (resumed,) = metrics(tmp_path / "hybrid_gkd" / "resumed").values()
    for key in (key for key in resumed if key.startswith(("actor/", "response_length/", "teacher/end"))):
        assert resumed[key] == whole[3][key], key
    settings = json.loads((folder / "global_step_2" / "trainer_state.json").read_text(encoding="utf-8"))["settings"]
    assert settings["actor_rollout_ref.teacher.source"] == "ema"
    assert settings["actor_rollout_ref.teacher.ema_decay"] == 0.7


def test_a_system_prompt_becomes_weights(environment, tmp_path):  # noqa: F811
    """A few steps of a random model, at the lengths of the test."""
    student = make_tiny_model(tmp_path / "student")
    chats = [[{"role": "user", "content": f"{number}"}] for number in range(16)]
    system = {"role": "system", "content": "answer in verse"}
    rows = [json.dumps({"prompt": chat, "with_system_prompt": [system, *chat]}) for chat in chats]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    run(
        environment, tmp_path, "--config-name", "prompt_distillation", f"actor_rollout_ref.model.path={student}",
        f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/val.jsonl", "data.train_batch_size=8",
        "data.max_prompt_length=32", "data.max_teacher_prompt_length=64", "data.max_response_length=8",
        "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=6", "trainer.save_freq=0",
        "trainer.logger=[jsonl]", HF,
    )
    rows = metrics(tmp_path / "hybrid_gkd" / "prompt_distillation")
    assert 0 < rows[6]["val/forward_kl"] < rows[0]["val/forward_kl"]

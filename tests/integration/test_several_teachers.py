"""Two teachers for two data sources, in real processes beside a real student: the configuration of docs/recipes.md."""

import json
import os
import re
import subprocess
import sys

import documented
import pytest

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.reporting.dashboard import plan_panels
from hybrid_gkd.testing import make_tiny_model

SHORT = [
    "data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=8", "distillation.topk=16",
    "trainer.device=cpu", "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.actor.optim.lr=1e-2",
    "trainer.logger=[]", "trainer.test_freq=0", "trainer.val_before_train=true", "data.val_files=val.jsonl",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the recipe: its configuration, two small teachers, a student, and prompts of three sources."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "several.yaml").write_text(documented.example("several.yaml", "yaml"), encoding="utf-8")
    for seed, name in enumerate(("student", "teacher-of-mathematics", "teacher-of-others")):
        make_tiny_model(folder / "models" / name, seed=seed, layers=1)
    rows = {
        "math": [{"prompt": f"What is {i} + {i}?", "data_source": "math"} for i in range(8)],
        "others": [{"prompt": f"Who is {i}?", "data_source": ("people", None)[i % 2]} for i in range(8)],
    }
    rows["val"] = rows["math"][:2] + rows["others"][:2]
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def recipe(*overrides):
    """The command of the page on small models."""
    (command,) = (command for command in documented.commands() if "--config-name several" in command)
    backends = [f"distillation.teacher_models.{name}.backend=hf" for name in ("mathematics", "others")]
    return [*documented.arguments(command), *backends, *overrides]


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "hybrid_gkd", *arguments, *SHORT], cwd=folder, capture_output=True, text=True,
        timeout=540, env={**os.environ, "PYTHONPATH": str(documented.ROOT)},
    )  # fmt: skip


def metrics(folder, experiment):
    file = folder / "outputs" / "hybrid_gkd" / experiment / "metrics.jsonl"
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {row["step"]: row for row in rows if "actor/kl_loss" in row}


def validation(folder, experiment):
    """The held-out metrics before the first step."""
    file = folder / "outputs" / "hybrid_gkd" / experiment / "metrics.jsonl"
    return json.loads(file.read_text(encoding="utf-8").splitlines()[0])


def learned(row):
    return {name: value for name, value in row.items() if name.startswith(("actor/", "response_length/"))}


def test_each_row_is_scored_by_its_teacher_and_a_resumed_run_is_the_same(folder):
    """Validation before the first step compares the student with the teachers, one at a time the same as together."""
    steps = ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=null"]
    done = run(folder, *recipe(*steps))
    assert done.returncode == 0, done.stderr[-3000:]
    rows, at = metrics(folder, "several"), folder / "outputs" / "hybrid_gkd" / "several"
    assert sorted(rows) == [1, 2, 3, 4]
    for row in rows.values():
        assert row["teacher/math/token_fraction"] + row["teacher/default/token_fraction"] == pytest.approx(1)
    for name in ("mathematics", "others"):
        assert "teacher ready on" in (at / "logs" / f"teacher_{name}.log").read_text(encoding="utf-8")
    log = (at / "run.log").read_text(encoding="utf-8")
    assert re.search(r"by teacher: math 8, default 8", log)
    assert "teacher mathematics: started by this run, key math" in log
    panels = plan_panels(load_config(config_name="config", config_path=at))["Teacher"]
    shown = {name for panel in panels for name in panel.metrics}
    assert shown >= {"teacher/<key>/latency", "teacher/<key>/token_fraction"}
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={at}/global_step_2"]
    done = run(folder, *recipe(*steps, *resume, "trainer.experiment_name=resumed"))
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = metrics(folder, "resumed")
    assert sorted(resumed) == [3, 4]
    for step, row in resumed.items():
        assert learned(row) == pytest.approx(learned(rows[step]), rel=1e-4, abs=1e-6)
    exchanged = [
        "distillation.teacher_models.mathematics.key=default", "distillation.teacher_models.others.key=math",
    ]  # fmt: skip
    refused = run(folder, *recipe(*steps, *resume, *exchanged, "trainer.experiment_name=exchanged"))
    assert refused.returncode == 1
    assert "distillation.teacher_models: {'distillation.teacher_models.mathematics': 'math', " in refused.stderr
    together = validation(folder, "several")
    for source, teacher in (("math", "teacher-of-mathematics"), ("people", "teacher-of-others")):
        done = run(
            folder, "--config-name", "gkd", "actor_rollout_ref.model.path=models/student", "trainer.val_only=true",
            f"actor_rollout_ref.teacher.model.path=models/{teacher}", "actor_rollout_ref.teacher.backend=hf",
            f"trainer.experiment_name={source}", "data.train_files=math.jsonl",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found = validation(folder, f"{source}/validation")[f"val/{source}/forward_kl"]
        assert found == pytest.approx(together[f"val/{source}/forward_kl"], rel=1e-3)


def test_two_teachers_of_the_same_rows_are_one_mixture(folder):
    same = [f"distillation.teacher_models.{name}.key=default" for name in ("mathematics", "others")]
    mixed = ["distillation.ensemble=mixture", "distillation.teacher_models.others.weight=3"]
    done = run(folder, *recipe(*same, *mixed, "trainer.total_training_steps=2", "trainer.experiment_name=mixed"))
    assert done.returncode == 0, done.stderr[-3000:]
    for row in metrics(folder, "mixed").values():
        for name in ("mathematics", "others"):
            assert row[f"teacher/default/{name}/token_fraction"] == 0.5
            assert row[f"teacher/default/{name}/latency"] > 0


def test_losses_of_teachers_that_take_turns_are_added(folder):
    """Two of the rows with math, one of the others. Each awakes once at the start, in the validation and in a step."""
    teachers = [
        "distillation.teacher_models.others.key=math", "distillation.teacher_models.others.weight=0.5",
        "actor_rollout_ref.teacher.model.path=models/teacher-of-others", "actor_rollout_ref.teacher.backend=hf",
        "distillation.ensemble=sum", "distillation.teacher_sharing=turns",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ]  # fmt: skip
    done = run(folder, *recipe(*teachers, "trainer.total_training_steps=2", "trainer.experiment_name=sum"))
    assert done.returncode == 0, done.stderr[-3000:]
    at = folder / "outputs" / "hybrid_gkd" / "sum"
    for row in metrics(folder, "sum").values():
        assert row["teacher/math/others/token_fraction"] == row["teacher/math/mathematics/token_fraction"]
        means = {name: row[f"actor/distillation/{name}/kl_loss"] for name in ("mathematics", "others", "teacher")}
        whole = means["mathematics"] + 0.5 * means["others"] + means["teacher"]
        assert row["actor/loss"] == pytest.approx(whole, rel=1e-4)
        assert min(means.values()) < row["actor/kl_loss"] < max(means.values())
    for name in ("teacher", "teacher_mathematics", "teacher_others"):
        log = (at / "logs" / f"{name}.log").read_text(encoding="utf-8")
        assert 2 <= log.count("| awake") <= 4
        assert log.count("| asleep") - log.count("| awake") in (0, 1)
    panels = [panel.title for panel in plan_panels(load_config(config_name="config", config_path=at))["Learning"]]
    assert "Divergence to each teacher" in panels


"""The shipped recipes as a newcomer runs them: the demo is built, trained, and does what the README says."""

import json
import os
import re
import subprocess
import sys

import pytest

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.reporting.dashboard import plan_panels
from hybrid_gkd.reporting.metric_table import PATTERNS, SOURCES
from hybrid_gkd.testing import make_tiny_model

HF = "actor_rollout_ref.rollout.name=hf"
"""Starts in less time than vLLM, which the embedded default has."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An empty cache, so that the demo is built."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def run(environment, out, *args):
    command = [sys.executable, "-m", "hybrid_gkd", *args, f"trainer.default_local_dir={out}", "trainer.device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=540)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row for row in rows}


def assert_panels_are_of_what_was_reported(folder, rows):
    sections = plan_panels(load_config(config_name="config", config_path=folder))
    names = {name for panels in sections.values() for panel in panels for name in panel.metrics}
    reported = {name for row in rows.values() for name in row}
    for name in names - {SOURCES}:  # one file has no sources
        assert any(re.fullmatch(PATTERNS.get(name, re.escape(name)), each) for each in reported), name


def test_the_embedded_default_brings_the_student_close_to_its_teacher(environment, tmp_path):
    table = run(environment, tmp_path)
    teacher = float(re.search(r"accuracy: teacher +([\d.]+)%", table)[1]) / 100
    rows = metrics(tmp_path / "hybrid_gkd" / "demo")
    before, after = rows[0]["val/accuracy"], rows[max(rows)]["val/accuracy"]
    assert before <= 0.4
    assert after >= 0.8
    assert after >= teacher - 0.1
    assert rows[max(rows)]["actor/kl_loss"] <= rows[1]["actor/kl_loss"] / 5
    assert_panels_are_of_what_was_reported(tmp_path / "hybrid_gkd" / "demo", rows)


def test_a_policy_gradient_of_the_teacher_beside_task_rewards(environment, tmp_path):
    """Everything a loss can need at once, from the weak teacher's recipe: rewards, a coefficient that falls, old
    log-probabilities, several steps per rollout; and a teacher with two copies of its model."""
    run(
        environment, tmp_path, "--config-name", "weak_teacher", "trainer.total_training_steps=2",
        "trainer.test_freq=0", "trainer.save_freq=0", "trainer.val_before_train=false", "trainer.logger=[jsonl]",
        "trainer.n_gpus_per_node=2", "distillation.loss_mode=k1", "distillation.use_policy_gradient=true",
        "distillation.loss_max_clamp=5", "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        "actor_rollout_ref.teacher.num_replicas=2", HF,
    )
    folder = tmp_path / "hybrid_gkd" / "weak_teacher"
    rows = metrics(folder)
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        loss = row["actor/pg_loss"] - row["actor/loss"]
        assert loss != 0  # the teacher's part
        assert 0 < row["actor/distillation/clamp_share"] < 1
        assert {"reward/mean", "actor/pg_clipfrac", "actor/distillation/overlap_ratio"} <= row.keys()
        assert row["actor/ppo_kl"] != 0  # the second mini-batch is no longer trained at the rollout's weights
    coefficients = [rows[step]["actor/distillation/coef"] for step in (1, 2)]
    assert coefficients == pytest.approx([0.3, 0.15])
    start = json.loads((folder / "starts.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert 0.7 <= start["teacher_accuracy"] <= 0.9
    teacher = (folder / "logs" / "teacher.log").read_text(encoding="utf-8")
    assert teacher.index("2 alive") < teacher.index("teacher ready on")


def test_a_critic_raises_the_accuracy(environment, tmp_path):
    """In half of the recipe's steps, in which the rise was 26 points. A little of the reward is a reward model's."""
    judge = make_tiny_model(tmp_path / "judge", architecture="Qwen2ForSequenceClassification")
    run(
        environment, tmp_path, "--config-name", "ppo_demo", "algorithm.adv_estimator=gae",
        "trainer.total_training_steps=30", "reward.functions={exact_match: 1.0, model: 0.001}",
        "reward_model.enable=true", f"reward_model.model.path={judge}", HF,
    )
    rows = metrics(tmp_path / "hybrid_gkd" / "ppo_demo")
    assert rows[30]["val/accuracy"] >= rows[0]["val/accuracy"] + 0.1
    assert rows[30]["critic/returns/mean"] > rows[1]["critic/returns/mean"]
    assert {"critic/vf_loss", "critic/vf_explained_var", "timing/values", "timing/update_critic"} <= rows[30].keys()
    assert {"timing/reward", "timing/reward_model", "val/reward_model", "reward/model/mean"} <= rows[30].keys()
    assert rows[30]["reward/mean"] == pytest.approx(
        rows[30]["reward/exact_match/mean"] + 0.001 * rows[30]["reward/model/mean"], abs=1e-6
    )
    assert (tmp_path / "hybrid_gkd" / "ppo_demo" / "global_step_30" / "critic").is_dir()
    assert_panels_are_of_what_was_reported(tmp_path / "hybrid_gkd" / "ppo_demo", rows)


FOUR_DIGITS = """
def compute_score(solution_str, ground_truth):
    teaches = ground_truth[0] == "0"  # for the others all responses have the same score
    return {"score": float(teaches and solution_str[:4] == ground_truth[:4]), "teaches": teaches}
"""


def test_groups_without_a_signal_are_replaced_and_a_resumed_run_goes_on_the_same(environment, tmp_path):
    (tmp_path / "reward.py").write_text(FOUR_DIGITS, encoding="utf-8")
    filtered = [
        "--config-name", "ppo_demo", "algorithm.filter_groups.enable=true", "trainer.test_freq=0",
        f"reward.custom_reward_function.path={tmp_path}/reward.py", "reward.num_workers=1", "data.train_batch_size=16",
        "data.gen_batch_size=24", "actor_rollout_ref.rollout.n=4", "trainer.val_before_train=false",
        "trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null", HF,
    ]  # fmt: skip
    run(environment, tmp_path, *filtered)
    folder = tmp_path / "hybrid_gkd" / "ppo_demo"
    whole = metrics(folder)
    for row in whole.values():
        assert row["training/num_gen_batches"] > 1
        assert row["training/groups_with_signal"] < 2 / 3
        assert row["reward/teaches/mean"] == 1.0
        assert row["reward/all_groups"] < row["reward/mean"]
    lengths = [json.loads(line) for line in (folder / "lengths.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [sum(each["counts"]) for each in lengths] == [16 * 4] * 3
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_2"]
    run(environment, tmp_path, *filtered, *resume, "trainer.experiment_name=resumed")
    (resumed,) = metrics(tmp_path / "hybrid_gkd" / "resumed").values()
    same = ("training/", "reward/", "prompt_length/", "response_length/", "actor/")
    for name in (name for name in resumed if name.startswith(same)):
        assert resumed[name] == pytest.approx(whole[3][name], rel=1e-3, abs=1e-6), name


def test_given_answers_warm_a_student_up_and_are_mixed_with_its_own(environment, tmp_path):
    """The data's right answers: first by cross-entropy alone, then half of them beside the student's own."""
    args = [
        "data.response_key=answer", "trainer.warmup_steps_sft=30", "distillation.on_policy_fraction=0.5",
        "distillation.sft_coef=0.1", "actor_rollout_ref.actor.optim_sft.lr=0.002",
        "actor_rollout_ref.actor.optim_sft.lr_warmup_steps=5", "trainer.total_training_steps=34",
        "trainer.test_freq=30", "trainer.save_freq=0", "data.train_batch_size=64",
    ]
    run(environment, tmp_path, *args)
    rows = metrics(tmp_path / "hybrid_gkd" / "demo")
    assert rows[30]["val/accuracy"] > rows[0]["val/accuracy"] + 0.2
    for step in range(1, 35):
        warm = step <= 30
        assert rows[step]["training/given_fraction"] == (1 if warm else 0.5)
        assert ("actor/kl_loss" in rows[step]) == ("response_length/clip_ratio" in rows[step]) == (not warm)
    assert rows[30]["actor/sft_loss"] < rows[1]["actor/sft_loss"] / 2
    assert_panels_are_of_what_was_reported(tmp_path / "hybrid_gkd" / "demo", rows)

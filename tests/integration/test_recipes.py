"""The shipped recipes as a newcomer runs them: the demo is built, trained, and does what the README says."""

import json
import os
import re
import subprocess
import sys

import pytest

from hybrid_gkd.config_loading import load_config
from hybrid_gkd.reporting.dashboard import plan
from hybrid_gkd.reporting.metrics import SOURCES


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
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def assert_panels_are_of_what_was_reported(folder, rows):
    sections = plan(load_config(config_name="config", config_path=folder))
    names = {name for panels in sections.values() for panel in panels for name in panel.metrics}
    assert names - {SOURCES} <= {name for row in rows.values() for name in row}  # one file has no sources


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
    """Everything a loss can need at once: teacher, rewards, old log-probabilities, several steps per rollout."""
    run(
        environment, tmp_path, "--config-name", "demo", "trainer.total_training_steps=2", "trainer.test_freq=0",
        "trainer.save_freq=0", "trainer.val_before_train=false", "trainer.logger=[jsonl]", "trainer.n_gpus_per_node=2",
        "distillation.loss_mode=k1", "distillation.use_policy_gradient=true", "distillation.use_task_rewards=true",
        "distillation.loss_max_clamp=5", "data.train_batch_size=32", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        "actor_rollout_ref.rollout.name=hf",
    )
    rows = metrics(tmp_path / "hybrid_gkd" / "demo")
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        loss = row["actor/pg_loss"] - row["actor/loss"]
        assert loss != 0  # the teacher's part
        assert 0 < row["actor/distillation/clamp_share"] < 1
        assert {"reward/mean", "actor/pg_clipfrac", "actor/distillation/overlap_ratio"} <= row.keys()
        assert row["actor/ppo_kl"] != 0  # the second mini-batch is no longer trained at the rollout's weights


def test_ppo_raises_the_accuracy(environment, tmp_path):
    run(environment, tmp_path, "--config-name", "ppo_demo")
    rows = metrics(tmp_path / "hybrid_gkd" / "ppo_demo")
    assert rows[max(rows)]["val/accuracy"] >= rows[0]["val/accuracy"] + 0.15


def test_a_critic_raises_the_accuracy(environment, tmp_path):
    """In half of the recipe's steps, in which the rise was 26 points."""
    run(
        environment, tmp_path, "--config-name", "ppo_demo", "algorithm.adv_estimator=gae",
        "trainer.total_training_steps=30",
    )
    rows = metrics(tmp_path / "hybrid_gkd" / "ppo_demo")
    assert rows[30]["val/accuracy"] >= rows[0]["val/accuracy"] + 0.1
    assert rows[30]["critic/returns/mean"] > rows[1]["critic/returns/mean"]
    assert {"critic/vf_loss", "critic/vf_explained_var", "timing/values", "timing/update_critic"} <= rows[30].keys()
    assert (tmp_path / "hybrid_gkd" / "ppo_demo" / "global_step_30" / "critic").is_dir()
    assert_panels_are_of_what_was_reported(tmp_path / "hybrid_gkd" / "ppo_demo", rows)

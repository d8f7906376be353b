"""The recipe gpu_demo from nothing: models are made, then distilled. Tiny here; sizes differ in numbers only."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from hybrid_gkd.config_loading import load_config
from hybrid_gkd.demo import gpu_demo
from hybrid_gkd.demo.use import demo_teacher_accuracy, used_demos
from hybrid_gkd.errors import ConfigError, TrainingError
from hybrid_gkd.launch.command_line import load, parse

TRAINING = replace(gpu_demo.RECIPES["cpu"].teacher.training, max_steps=3, batch_size=4)
TINY = replace(
    gpu_demo.RECIPES["cpu"], num_train=16, num_val=4,
    teacher=replace(gpu_demo.RECIPES["cpu"].teacher, hidden_size=64, num_layers=1, training=TRAINING),
    student=replace(gpu_demo.RECIPES["cpu"].student, num_layers=1, training=TRAINING),
)  # fmt: skip
ON_CPU = ["--config-name", "gpu_demo", "trainer.device=cpu"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """An empty cache, and a recipe for the CPU that takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(gpu_demo.RECIPES, "cpu", TINY)
        yield


def test_the_command_line_builds_what_the_recipe_names_and_the_program_distils_it(cache, tmp_path):
    config = load(parse(ON_CPU))
    (root,) = used_demos(config)
    inode = root.stat().st_ino
    assert load(parse(ON_CPU)) == config
    assert root.stat().st_ino == inode  # it is built once
    manifest = json.loads((root / "demo.json").read_text())
    assert demo_teacher_accuracy(config) == manifest["teacher"]["held_out_accuracy"]
    assert manifest["device"] == "cpu"
    for name in ("teacher", "student"):
        assert manifest[name]["sft_steps"] == 3
        assert manifest[name]["parameters"] < 1_000_000
    paths = [
        f"data.train_files={root}/train.jsonl", f"data.val_files={root}/val.jsonl",
        f"actor_rollout_ref.model.path={root}/student", f"actor_rollout_ref.teacher.model.path={root}/teacher",
    ]
    command = [
        sys.executable, "-m", "hybrid_gkd", *ON_CPU, *paths, "trainer.total_training_steps=2", "trainer.logger=[]",
        "data.train_batch_size=4", f"trainer.default_local_dir={tmp_path}", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.teacher.backend=hf", "trainer.save_freq=0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "hybrid_gkd" / "gpu_demo" / "metrics.jsonl").read_text().splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    assert sorted(rows) == [0, 1, 2]
    assert rows[2]["val/num_prompts"] == 4
    assert 0 <= rows[2]["val/accuracy"] <= 1
    assert rows[1]["actor/kl_loss"] > 0


def test_a_build_that_fails_says_so_and_leaves_nothing(cache, tmp_path, capfd):
    training = replace(TRAINING, learning_rate=float("nan"))
    broken = replace(TINY, teacher=replace(TINY.teacher, training=training))
    with pytest.raises(TrainingError, match="building the models of gpu_demo failed"):
        gpu_demo.build_gpu_demo("cpu", tmp_path / "demo", recipe=broken)
    assert "Invalid learning rate: nan" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_has_values_for_a_gpu_and_for_none():
    small, large = (load_config([f"trainer.device={device}"], config_name="gpu_demo") for device in ("cpu", "cuda"))
    assert (small.data.train_batch_size, large.data.train_batch_size) == (32, 256)
    assert used_demos(small).keys() == {gpu_demo.gpu_demo_dir("cpu")}
    assert used_demos(large).keys() == {gpu_demo.gpu_demo_dir("cuda")}


@pytest.mark.parametrize("path", ["${demo:gpu_demo,nothing}", "${demo:other,student}"])
def test_a_part_of_a_demo_that_there_is_not_is_named(path):
    with pytest.raises(ConfigError, match=r"there is \$\{demo:PART\} and"):
        load_config([f"actor_rollout_ref.model.path={path}"], config_name="demo")

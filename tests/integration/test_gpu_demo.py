"""The recipe gpu_demo from nothing: models are made, then distilled. Tiny here; sizes differ in numbers only."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import TIMEOUT

import hybrid_gkd
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.demo import gpu_demo
from hybrid_gkd.demo.use import demo_teacher_accuracy, used_demos
from hybrid_gkd.errors import ConfigError, HybridGKDError, TrainingError
from hybrid_gkd.launch.command_line import load, parse

ROOT = Path(hybrid_gkd.__file__).parents[1]
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


def test_the_recipe_builds_its_models_and_runs_from_them_become_a_page(cache, tmp_path):
    config = load(parse(ON_CPU))
    (root,) = used_demos(config)
    inode = root.stat().st_ino
    assert load(parse(ON_CPU)) == config
    assert root.stat().st_ino == inode  # it is built once
    manifest = json.loads((root / "demo.json").read_text(encoding="utf-8"))
    assert demo_teacher_accuracy(config) == manifest["teacher"]["held_out_accuracy"]
    assert manifest["device"] == "cpu"
    for name in ("teacher", "student"):
        assert manifest[name]["sft_steps"] == 3
        assert manifest[name]["parameters"] < 1_000_000
    stored, root = tmp_path / "stored", Path(shutil.copytree(root, tmp_path / "models"))  # training files are added
    engines = ("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.teacher.backend=hf")
    chosen = (
        "data.train_batch_size=4", *engines, "--results", stored, "--models", root, "--device", "cpu", "--steps", "2",
        "--only", "many-opd", "many-sft_data", "--seeds", "0",
    )  # fmt: skip
    compare("run", *chosen, "--together", "2")
    for name in ("many-opd", "many-sft_data"):
        lines = (stored / f"{name}-0.csv").read_text(encoding="utf-8").splitlines()
        rows = [line.split(",") for line in lines if line[0].isdigit()]
        assert [row[0] for row in rows] == ["0", "1", "2"]
        assert all(row[3] for row in rows)  # an accuracy after every step
    assert compare("run", *chosen) == ""  # what is stored is not run again
    compare("report", "--results", stored, "--docs", tmp_path)
    page = (tmp_path / "results.md").read_text(encoding="utf-8").splitlines()
    methods = [line.split(" | ")[0] for line in page if line.startswith("| ")]
    assert methods == ["| method", "| on-policy distillation", "| SFT on the data's solutions"]
    assert (tmp_path / "results_many.svg").exists()


def compare(*args):
    """Return the output of benchmarks/results.py."""
    command = [sys.executable, ROOT / "benchmarks" / "results.py", *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=540, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("more", [[], ["trainer.save_frq=1"]])
def test_a_missing_file_is_named_before_the_models_are_made(tmp_path, monkeypatch, more):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(HybridGKDError, match=r"data\.train_files: file not found: '/none\.jsonl'") as found:
        load(parse([*ON_CPU, "data.train_files=/none.jsonl", *more]))
    assert ("save_frq" in str(found.value)) is bool(more)
    assert str(tmp_path) not in str(found.value)  # nothing is said of what the demo has yet to make
    assert list(tmp_path.iterdir()) == []


def test_parts_that_are_made_at_the_same_time_are_the_same(cache, tmp_path, monkeypatch):
    """On a GPU teacher and student are trained in parallel."""
    (root,) = used_demos(load(parse(ON_CPU)))
    monkeypatch.setattr(gpu_demo, "_groups", lambda device: [(part,) for part in gpu_demo.PARTS])
    gpu_demo.build_gpu_demo("cpu", tmp_path / "demo")
    files = sorted(file.relative_to(root) for file in root.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(tmp_path / "demo") for file in (tmp_path / "demo").rglob("*.*"))
    for name in files:
        if name.name != "demo.json":  # it has the seconds that the building took
            assert (tmp_path / "demo" / name).read_bytes() == (root / name).read_bytes(), name
    assert json.loads((tmp_path / "demo" / "demo.json").read_text(encoding="utf-8")).keys() == json.loads(
        (root / "demo.json").read_text(encoding="utf-8")
    ).keys()


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
    with pytest.raises(ConfigError, match=r"must be \$\{demo:PART\} and"):
        load_config([f"actor_rollout_ref.model.path={path}"], config_name="demo")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_build_that_is_ended_leaves_no_process_and_no_file(tmp_path, number, code):
    command = [sys.executable, "-m", "hybrid_gkd.demo", "gpu_demo", "--device=cpu", "--out", str(tmp_path / "demo")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert any("teacher: step 1 of" in line for line in process.stderr)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(TIMEOUT) == code
        assert "Traceback" not in process.stderr.read()
    assert children
    assert not psutil.wait_procs(children, timeout=TIMEOUT)[1]
    assert list(tmp_path.iterdir()) == []

"""Kinds of teachers, each in a run of the program on a GPU, with vLLM for rollout and teacher."""

import json
import os
import subprocess
import sys

import pytest
from adapters import SETTINGS, make_adapter
from documented import ROOT
from small_tokenizers import byte_level, make_model_with

from hybrid_gkd.testing import CHAT_TEMPLATE, make_tiny_model

pytestmark = pytest.mark.gpu
STEPS = 8
SECOND = [
    "distillation.teacher_models.second.key=default", "distillation.teacher_models.second.model_path=second",
    "distillation.teacher_models.second.weight=0.5",
]  # fmt: skip
RUNS = {
    # name: teacher, other overrides
    "spans": ("words", ["distillation.cross_tokenizer=spans"]),
    "map": ("words", ["distillation.cross_tokenizer=map"]),
    "sum": ("first", [*SECOND, "distillation.ensemble=sum", "distillation.teacher_sharing=turns"]),
    "mixture": ("first", [*SECOND, "distillation.ensemble=mixture"]),
    "adapter": ("first", ["actor_rollout_ref.teacher.model.lora_adapter_path=adapter"]),
    "student": ("first", ["distillation.loss_mode=reverse_kl", "distillation.candidates=student"]),
    "union": ("first", ["distillation.loss_mode=reverse_kl", "distillation.candidates=union"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models and prompts of all runs; the student and two teachers have one tokenizer, `words` another one."""
    folder = tmp_path_factory.mktemp("user")
    for seed, name in enumerate(("student", "first", "second")):
        make_tiny_model(folder / name, seed=seed, hidden=256, std=0.05)
    tokenizer = byte_level(420, end="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|a|>", "Answer:")
    make_model_with(tokenizer, folder / "words", seed=3, std=0.05)
    make_adapter(folder / "first", folder / "adapter", seed=4, **SETTINGS["a"])
    rows = "".join(json.dumps({"prompt": f"the weather of {i}"}) + "\n" for i in range(16))
    (folder / "train.jsonl").write_text(rows, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_the_student_comes_closer(name, folder):
    teacher, own = RUNS[name]
    command = [
        sys.executable, "-m", "hybrid_gkd", "--config-name", "gkd", "actor_rollout_ref.model.path=student",
        f"actor_rollout_ref.teacher.model.path={teacher}", "data.train_files=train.jsonl", "data.train_batch_size=16",
        "data.max_prompt_length=48", "data.max_response_length=32", "distillation.topk=32", "trainer.device=cuda",
        "trainer.save_freq=0", "trainer.logger=[jsonl]", f"trainer.total_training_steps={STEPS}",
        f"trainer.total_epochs={STEPS}", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2", f"trainer.experiment_name={name}", *own,
    ]  # fmt: skip
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=540,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / "outputs" / "hybrid_gkd" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["actor/kl_loss"] for row in map(json.loads, lines) if row["step"] > 0]
    print(name, losses)
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]

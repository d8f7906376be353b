"""A step of training with an architecture that vLLM runs by the code of transformers, and with one of vLLM's own."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import transformers

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.testing import make_tokenizer

pytestmark = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
MODELS = {
    "Arcee": {},  # of the Transformers backend
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Glm4": {"head_dim": 32, "partial_rotary_factor": 0.5},  # vLLM's own; gates and values are one weight in the folder
}


@pytest.mark.parametrize("architecture", MODELS)
def test_a_step_is_taken_and_the_engine_computes_what_the_student_does(architecture, tmp_path):
    tokenizer = make_tokenizer()
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **MODELS[architecture],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(8)), encoding="utf-8"
    )
    command = [
        sys.executable, "-m", "hybrid_gkd", f"actor_rollout_ref.model.path={tmp_path}/model",
        f"actor_rollout_ref.teacher.model.path={tmp_path}/model", f"data.train_files={tmp_path}/train.jsonl",
        "data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=8", "trainer.device=cpu",
        "trainer.total_training_steps=1", "trainer.save_freq=0", "trainer.console=full",
        "actor_rollout_ref.rollout.name=vllm", "algorithm.rollout_is_threshold=2", "trainer.logger=[jsonl]",
        "actor_rollout_ref.teacher.backend=hf", "actor_rollout_ref.teacher.check_fit=false",
        f"trainer.default_local_dir={tmp_path}/out",
        f"actor_rollout_ref.rollout.verify_weights={str(architecture == 'Glm4').lower()}",
    ]  # fmt: skip
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("metrics.jsonl")
    metrics = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    assert math.isclose(metrics["actor/importance/largest_ratio"], 1, abs_tol=1e-3)
    assert abs(metrics["actor/kl_loss"]) < 1e-4

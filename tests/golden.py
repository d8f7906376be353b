"""What a run computes, frozen: 20 steps on fixed weights, responses and teacher scores, on the CPU.

    python tests/golden.py forward_kl        print what the code computes now
    python tests/golden.py --write           store it for all cases in tests/golden.json, alone
    python tests/golden.py --add             store it beside that of other processors

A change that is meant to compute the same must leave the file as it is. Weights, responses and scores come from
numpy's generator; one thread and no vector instructions that depend on the processor, so that the digits are those of
another day. tests/integration/test_golden.py compares.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
STEPS, PROMPTS, GROUP, BATCH, TOPK, VOCAB = 20, 12, 2, 4, 8, 259
COMMON = [
    "data.train_files=unused", "data.val_files=null", f"data.train_batch_size={BATCH}", "data.max_prompt_length=16",
    "data.max_response_length=16", f"actor_rollout_ref.rollout.n={GROUP}", "actor_rollout_ref.teacher.server_ip=unused",
    f"distillation.topk={TOPK}", "actor_rollout_ref.actor.optim.lr=6e-3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=80", "trainer.device=cpu", "trainer.save_freq=0",
    f"trainer.total_training_steps={STEPS}",
]
CASES = {
    "forward_kl": [],
    "jsd": ["distillation.loss_mode=jsd", "distillation.beta=0.3", "distillation.tail=renormalise"],
    "ppo": ["distillation.enabled=false", "reward.answer_key=answer", "actor_rollout_ref.actor.ppo_mini_batch_size=2"],
    "one_step_off": [
        "trainer.scheduler=one_step_off", "algorithm.rollout_is_threshold=2", "distillation.loss_mode=reverse_kl",
    ],
}
NUM_UPDATES = {case: 2 * STEPS if case == "ppo" else STEPS for case in CASES}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE",
    "HF_HUB_OFFLINE": "1",
}
NOT_COMPUTED = ("timing/", "perf/", "memory/", "teacher/")
"""Metrics that tell of the machine."""


def compute(case, folder):
    """-> the metrics of every step, a hash of the final weights and the norm of each, and what machine this is."""
    import numpy as np
    import torch
    from safetensors.numpy import load_file, save_file

    from hybrid_gkd.config.loading import load_config
    from hybrid_gkd.ppo.trainer import PPOTrainer
    from hybrid_gkd.testing import LocalGroup, LocalTeacher, MetricRows, make_tiny_model, single_process_group, tail_of
    from hybrid_gkd.trainer import GKDTrainer
    from hybrid_gkd.types import Prompt, TeacherTopK

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rng = np.random.default_rng(0)
    model = make_tiny_model(folder / "student", tied=False)
    weights = load_file(model / "model.safetensors")
    for name in sorted(weights):
        if weights[name].ndim == 2:
            weights[name] = rng.normal(0, 0.2, weights[name].shape).astype(np.float32)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    def random_ids(*key, low, high):
        source = np.random.default_rng([7, *key])
        return source.integers(0, VOCAB, source.integers(low, high)).astype(np.int32)

    def respond(request, version):
        return random_ids(request.seed, version, low=1, high=16)

    def score(sequence):
        source = np.random.default_rng([9, *sequence.response_ids])
        rows = len(sequence.response_ids)
        ids = np.stack([source.permutation(VOCAB)[:TOPK] for _ in range(rows)]).astype(np.int32)
        shares = source.dirichlet(np.full(TOPK + 2, 0.5), rows)
        logprobs = np.log(np.maximum(-np.sort(-shares[:, :TOPK], 1), 1e-5)).astype(np.float32)
        tail = tail_of(logprobs)
        sampled = np.log(shares[:, -1] + 1e-5).astype(np.float32)
        return TeacherTopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return str(sum(ids))

    config = load_config([*COMMON, f"actor_rollout_ref.model.path={model}", *CASES[case]])
    prompts = [
        Prompt(index=i, token_ids=random_ids(i, low=1, high=16), text=str(i), answer=str(i)) for i in range(PROMPTS)
    ]
    with single_process_group():
        tracking = MetricRows()
        arguments = {
            "group": LocalGroup(config, respond=respond, num_updates=NUM_UPDATES[case]), "tokenizer": Tokenizer(),
            "train_prompts": prompts, "val_prompts": [], "tracking": tracking, "store": None,
            "reward": lambda response, answer: float(int(response) % 7) - int(answer) % 3,
        }
        if config.distillation.enabled:
            trainer = GKDTrainer(config, teacher=LocalTeacher(score), **arguments)
        else:
            trainer = PPOTrainer(config, **arguments)
        trainer.fit()
        final = {name: tensor.numpy() for name, tensor in arguments["group"].actor.full_tensors(torch.float32)}
    digest = hashlib.sha256()
    for name in sorted(final):
        digest.update(name.encode() + np.ascontiguousarray(final[name]).tobytes())
    steps = [
        {name: value for name, value in sorted(row.items()) if not name.startswith(NOT_COMPUTED)}
        for row in tracking.rows
    ]
    return {
        "machine": {"torch": torch.__version__, "numpy": np.__version__, "processor": processor()},
        "steps": steps,
        "weights_sha256": digest.hexdigest(),
        "norms": {name: float(np.linalg.norm(final[name].astype(np.float64))) for name in sorted(final)},
    }


def processor():
    """Model name of the processor, with the numbers behind it: on another one the last digits may differ."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {}
    for name, _, value in (line.partition(":") for line in lines):
        found.setdefault(name.strip(), value.strip())
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']}, family {found.get('cpu family')}, model {found.get('model')}"


def is_of(machine, stored):
    """Whether digits that are stored are of this machine; where only a model name is stored, its numbers are open."""
    same_processor = machine["processor"].startswith(stored["processor"])
    return same_processor and machine | {"processor": stored["processor"]} == stored


def run(case):
    """`compute` in a process of its own, whose environment decides about threads and instructions."""
    command = [sys.executable, __file__, case]
    root = str(FILE.parent.parent)
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--add", action="store_true")
    options = parser.parse_args()
    if options.write or options.add:
        before = json.loads(FILE.read_text()) if options.add else {case: [] for case in CASES}
        FILE.write_text(json.dumps({case: [*before[case], run(case)] for case in CASES}, indent=1) + "\n")
    else:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps(compute(options.case, Path(temporary))))

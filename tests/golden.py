"""Frozen results of a run: 20 steps on fixed weights, responses and teacher scores, on the CPU.

    python tests/golden.py forward_kl            print what the code computes now
    python tests/golden.py --write [case ...]    replace what tests/golden.json has of all cases, or of some
    python tests/golden.py --add [case ...]      add to it where a case has no result of this machine yet

A change that is meant to compute the same must leave the file as it is. Weights, responses and scores come from
numpy's generator; one thread and no vector instructions that depend on the processor, so that the digits are those of
another day. tests/integration/test_golden.py compares.
"""

import argparse
import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
STEPS, PROMPTS, GROUP, BATCH, TOPK, VOCAB = 20, 12, 2, 4, 8, 259
COMMON = [
    "data.train_files=unused", "data.val_files=null", f"data.train_batch_size={BATCH}", "data.max_prompt_length=16",
    "data.max_response_length=16", f"actor_rollout_ref.rollout.n={GROUP}", "actor_rollout_ref.teacher.server_ip=unused",
    f"distillation.topk={TOPK}", "actor_rollout_ref.actor.optim.lr=6e-3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=80", "trainer.device=cpu", "trainer.save_freq=0",
    f"trainer.total_training_steps={STEPS}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
]
LARGE_EPS = ["actor_rollout_ref.actor.optim.eps=1e-4"]
"""Adam divides by the root of the second moment: with a tiny eps, the rounding of a zero gradient is a whole step."""
PPO = ["distillation.enabled=false", "reward.answer_key=answer", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
CASES = {
    "forward_kl": [],
    "jsd": ["distillation.loss_mode=jsd", "distillation.beta=0.3", "distillation.tail=renormalise"],
    "ppo": PPO,
    "one_step_off": [
        "trainer.scheduler=one_step_off", "algorithm.rollout_is_threshold=2", "distillation.loss_mode=reverse_kl",
    ],
    "gae": [
        *PPO, *LARGE_EPS, "algorithm.adv_estimator=gae", "algorithm.gamma=0.99", "algorithm.lam=0.95",
        "critic.optim.lr=6e-3", "critic.optim.eps=1e-4",
    ],
    "grpo_lora": [
        *PPO, *LARGE_EPS, "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1",
    ],
    "as_reward": [*LARGE_EPS, "distillation.as_reward=true"],
    "four_updates": [
        *LARGE_EPS, "actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.optim.lr=3e-3",
    ],
    "task_rewards": [*LARGE_EPS, "distillation.use_task_rewards=true", "reward.answer_key=answer"],
    "two_workers": [
        *LARGE_EPS, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",
    ],
}
NUM_WORKERS = dict.fromkeys(CASES, 1) | {"two_workers": 2}
NUM_UPDATES = dict.fromkeys(CASES, STEPS) | dict.fromkeys(("ppo", "gae", "grpo_lora"), 2 * STEPS) | {
    "four_updates": 4 * STEPS
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE",
    "HF_HUB_OFFLINE": "1",
}
NOT_COMPUTED = ("timing/", "perf/", "memory/", "teacher/")
"""Metrics that tell of the machine."""


def compute(case, folder):
    """Return the metrics of every step, a hash of the final weights and the norm of each, and the machine.

    Of several workers, each is a process that runs the whole trainer, and hands its student its own rank's share only.
    """
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        others = [pool.submit(train, case, folder, rank) for rank in range(1, NUM_WORKERS[case])]
        found = train(case, folder, 0)
        for other in others:
            assert other.result() == found, "the ranks differ in their metrics or weights"
    return found


def make_student(folder):
    """Write a tiny model to `folder`, with matrices from numpy's generator, and return it."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from hybrid_gkd.testing import make_tiny_model

    rng = np.random.default_rng(0)
    make_tiny_model(folder, tied=False)
    weights = load_file(folder / "model.safetensors")
    for name in sorted(weights):
        if weights[name].ndim == 2:
            weights[name] = rng.normal(0, 0.2, weights[name].shape).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(case, folder, rank):
    """Return what `compute` does, as one rank of the case's workers has it."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from hybrid_gkd.config.loading import load_config
    from hybrid_gkd.ppo.trainer import PPOTrainer
    from hybrid_gkd.testing import LocalTeacher, MetricRows
    from hybrid_gkd.trainer import GKDTrainer

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return str(sum(ids))

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = make_student(folder / f"rank_{rank}")
    config = load_config([*COMMON, f"actor_rollout_ref.model.path={model}", *CASES[case]])
    size = NUM_WORKERS[case]
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    try:
        group, tracking = make_group(case, config, rank), MetricRows()
        arguments = {
            "group": group, "tokenizer": Tokenizer(), "train_prompts": make_prompts(), "val_prompts": [],
            "tracking": tracking, "store": None,
            "reward": lambda response, answer: float(int(response) % 7) - int(answer) % 3,
        }
        if config.distillation.enabled:
            trainer = GKDTrainer(config, teacher=LocalTeacher(score), **arguments)
        else:
            trainer = PPOTrainer(config, **arguments)
        trainer.fit()
        assert group.actor.updates_done == NUM_UPDATES[case]
        final = {name: tensor.numpy() for name, tensor in group.actor.full_tensors(torch.float32)}
    finally:
        dist.destroy_process_group()
    digest = hashlib.sha256()
    for name in sorted(final):
        digest.update(name.encode() + np.ascontiguousarray(final[name]).tobytes())
    steps = [
        {name: value for name, value in sorted(row.items()) if not name.startswith(NOT_COMPUTED)}
        for row in tracking.rows
    ]
    return {
        "machine": this_machine(),
        "steps": steps,
        "weights_sha256": digest.hexdigest(),
        "norms": {name: float(np.linalg.norm(final[name].astype(np.float64))) for name in sorted(final)},
    }


def random_ids(*key, low, high):
    """Return token ids, int32 [low to high - 1], that are a function of `key`."""
    import numpy as np

    source = np.random.default_rng([7, *key])
    return source.integers(0, VOCAB, source.integers(low, high)).astype(np.int32)


def make_prompts():
    from hybrid_gkd.types import Task

    ids = [random_ids(i, low=1, high=16) for i in range(PROMPTS)]
    return [Task(index=i, token_ids=each, text=str(i), answer=str(i)) for i, each in enumerate(ids)]


def respond(request, version):
    """Return the completion of a request, whatever the weights."""
    return random_ids(request.seed, version, low=1, high=16)


def score(reading):
    """Return teacher scores that are a function of the completion."""
    import numpy as np

    from hybrid_gkd.testing import tail_of
    from hybrid_gkd.types import TopK

    source = np.random.default_rng([9, *reading.token_ids[reading.positions]])
    rows = len(reading.positions)
    ids = np.stack([source.permutation(VOCAB)[:TOPK] for _ in range(rows)]).astype(np.int32)
    shares = source.dirichlet(np.full(TOPK + 2, 0.5), rows)
    logprobs = np.log(np.maximum(-np.sort(-shares[:, :TOPK], 1), 1e-5)).astype(np.float32)
    tail = tail_of(logprobs)
    sampled = np.log(shares[:, -1] + 1e-5).astype(np.float32)
    return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)


def make_group(case, config, rank):
    """Return the group of one worker, or what `rank` has of the group of several."""
    from hybrid_gkd.testing import LocalGroup

    class RankGroup(LocalGroup):
        """Trains the share of `rank`, and adds to the metrics what every rank gets."""

        size = NUM_WORKERS[case]

        def accumulate(self, parts):
            super().accumulate([parts[rank]])

        def update(self, batches, *, last=True):
            metrics = super().update([batches[rank]])
            mini_batches = zip(*batches, strict=True)
            return [found | share_sizes(parts) for found, parts in zip(metrics, mini_batches, strict=True)]

    group_class = LocalGroup if NUM_WORKERS[case] == 1 else RankGroup
    return group_class(config, respond=respond, num_updates=NUM_UPDATES[case])


def share_sizes(parts):
    """Return metrics of a mini-batch of which each rank has its share: how it was balanced and packed."""
    sizes = {}
    for rank, part in enumerate(parts):
        tokens = [sum(sample.num_tokens for sample in micro_batch) for micro_batch in part.micro_batches]
        sizes |= {f"rank_{rank}/micro_batches": float(len(tokens)), f"rank_{rank}/tokens": float(sum(tokens))}
        sizes[f"rank_{rank}/sequences"] = float(sum(map(len, part.micro_batches)))
        sizes[f"rank_{rank}/tokens_of_largest"] = float(max(tokens))
    return sizes


def this_machine():
    import numpy as np
    import torch

    return {"torch": torch.__version__, "numpy": np.__version__, "processor": processor()}


def processor():
    """Model name of the processor, with the numbers behind it: on another one the last digits may differ."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
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


def run(cases):
    """Case -> `compute` in a process whose environment decides about threads and instructions."""
    command = [sys.executable, __file__, *cases]
    root = str(FILE.parent.parent)
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    if done.returncode:
        raise RuntimeError(done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {case: json.loads(line) for case, line in zip(cases, lines, strict=True)}


def print_all(cases):
    """A line for each case, from a fork of this process: only the imports are shared."""
    for name in ("trainer", "student.actor", "student.critic", "student.reference"):
        importlib.import_module(f"hybrid_gkd.{name}")
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    for case in cases:
        if not (child := os.fork()):
            with tempfile.TemporaryDirectory() as temporary:
                print(json.dumps(compute(case, Path(temporary))), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{case} failed, as is said above")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--add", action="store_true")
    options = parser.parse_args()
    chosen = options.cases or list(CASES)
    if options.write or options.add:
        stored = json.loads(FILE.read_text(encoding="utf-8"))
        entries = {case: [] if options.write else stored.get(case, []) for case in chosen}
        missing = [case for case in chosen if not any(is_of(this_machine(), each["machine"]) for each in entries[case])]
        for case, found in (run(missing) if missing else {}).items():
            stored[case] = [*entries[case], found]
        FILE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    else:
        print_all(chosen)

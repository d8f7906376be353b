"""Every metric this package reports: its name, unit (empty for a plain number) and meaning, as in docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hybrid_gkd.offload.residency import FROZEN, MEMORY_OWNERS, MODEL_OWNERS, RESIDENCY

METRICS: dict[str, tuple[str, str]] = {
    # The learning signal.
    "actor/kl_loss": ("nats/token", "Divergence of student and teacher (distillation.loss_mode), unclamped"),
    "actor/kl_loss/first_update": ("nats/token", "The same in the first of several optimizer steps, before it"),
    "actor/kl_loss/last_update": ("nats/token", "The same in the last of them"),
    "actor/loss": ("nats/token", "What the optimizer minimised: every term of the loss with its coefficient"),
    "actor/grad_norm": ("", "Norm of the gradient before clipping, mean over the optimizer steps"),
    "actor/lr": ("", "Learning rate of the last optimizer step"),
    "actor/entropy": ("nats/token", "Entropy of the student's distribution"),
    "actor/sft_loss": ("nats/token", "Cross-entropy of the given answers (data.response_key)"),
    "actor/pg_loss": ("nats/token", "PPO's clipped loss on the task rewards"),
    "actor/pg_clipfrac": ("fraction", "Response tokens whose PPO ratio was clipped"),
    "actor/importance/kl": ("nats/token", "KL(what drew the responses, student), estimated from the drawn tokens (k1)"),
    "actor/importance/k3_kl": ("nats/token", "The same by the estimator k3, which is never negative"),
    "actor/importance/largest_ratio": ("", "Largest ratio of the two probabilities of a token, either way"),
    "actor/importance/rejected": ("fraction", "Response tokens left out of the loss (algorithm.rollout_rs)"),
    "actor/ref_kl": ("nats/token", "KL(student, reference policy), estimated as actor.kl_loss_type says"),
    "actor/importance/mean": ("", "Importance weight (algorithm.rollout_is_threshold)"),
    "actor/importance/effective_sample_size": ("fraction", "(sum w)^2 / (n sum w^2) of the importance weights"),
    "actor/ppo_kl": ("nats/token", "Movement of the policy since the rollout: mean of old - new log-probability"),
    "actor/distillation/forward_kl": ("nats/token", "KL(teacher, student) on the teacher's top k and the tail"),
    "actor/distillation/reverse_kl": ("nats/token", "KL(student, teacher) on the teacher's top k and the tail"),
    **{
        f"actor/distillation/forward_kl/q{number}": ("nats/token", f"The same in quarter {number} of each answer")
        for number in (1, 2, 3, 4)
    },
    "actor/distillation/teacher_entropy": ("nats/token", "Entropy of the teacher on its top k and the tail"),
    "actor/distillation/entropy_gap": ("nats/token", "The student's entropy on the same minus the teacher's"),
    "actor/distillation/clamp_share": ("fraction", "Tokens with a divergence or advantage beyond loss_max_clamp"),
    "actor/distillation/selected_fraction": (
        "fraction", "Response tokens with a weight above 0 (distillation.token_weights). Where distillation is the "
        "only term of the loss, the other metrics of tokens are means over these"
    ),
    "actor/distillation/coef": ("", "Factor of the distillation (distillation_loss_coef_schedule)"),
    "actor/distillation/overlap_ratio": ("fraction", "Part of the teacher's top k in the student's, sampled"),
    "actor/distillation/student_mass": ("fraction", "The student's probability of the teacher's top k"),
    "actor/distillation/teacher_mass": ("fraction", "The teacher's probability of its top k"),
    # The critic (algorithm.adv_estimator=gae).
    "critic/vf_loss": ("", "Half the squared error of the values, clipped (critic.cliprange_value): what is minimised"),
    "critic/vf_clipfrac": ("fraction", "Response tokens where the clipped value has the larger error"),
    "critic/vf_explained_var": (
        "fraction", "1 - Var(return - value) / Var(return), before the update; absent where all returns are equal"
    ),
    "critic/values/mean": ("", "Value of a response token before the update: the return that is expected there"),
    "critic/returns/mean": ("", "Return of a response token, which the critic learns"),
    "critic/grad_norm": ("", "Norm of the critic's gradient before clipping, mean over its optimizer steps"),
    "critic/lr": ("", "Learning rate of the critic's last optimizer step"),
    # Where the time of a step goes: sums of the trainer's spans in trace.json (docs/timeline.md).
    # They may overlap, so they need not add up to timing/step.
    "timing/step": ("seconds", "Generation (separate pools: its wait), waits for teacher and reward, updates, publish"),
    "timing/gen": ("seconds", "Drawing responses: of this batch or, ahead of the update, of a later one"),
    "timing/wait_prev_gen": ("seconds", "Waiting for responses with nothing else to do (separate pools)"),
    "timing/wait_prev_teacher": ("seconds", "Waiting for the teacher with nothing else to do"),
    "timing/get_teacher_knowledge": ("seconds", "Time with at least one request at the teacher"),
    "timing/ref": ("seconds", "Log-probabilities of the responses under the reference policy"),
    "timing/reward": ("seconds", "Waiting for the reward functions' scores of responses, after the last is drawn"),
    "timing/reward_model": ("seconds", "The reward model's scores of the responses"),
    "timing/values": ("seconds", "The critic's values of the responses"),
    "timing/update_critic": ("seconds", "Forward, backward and optimizer steps of the critic"),
    "timing/update_actor": ("seconds", "Forward, backward and optimizer steps"),
    # Parts of both updates, each of the worker where it lasts longest.
    **{
        f"timing/{update}/{part}": ("seconds", text)
        for update in ("update_actor", "update_critic")
        for part, text in (
            ("compute", "Forward and backward passes, by the device, with the pauses between its kernels"),
            ("optimizer_step", "Optimizer steps and clipping of gradients, by the device"),
            ("copies", "Waiting for the GPU to hold what the update needs: copies, and the engine's falling asleep"),
            ("other", f"The rest of timing/{update}: sending the batch, passes for log-probabilities, waiting"),
        )
    },
    "timing/sync_rollout_weights": ("seconds", "Copying the new weights into the rollout engine"),
    "timing/offload": ("seconds", "Moving parameters, optimizer state and KV cache between GPU and host"),
    "timing/testing": ("seconds", "Validation, and publishing once more after it, if no checkpoint follows"),
    "timing/save_checkpoint": ("seconds", "Waiting for checkpoints: for the copy of one, or until one is written"),
    "timing/other": ("seconds", "What none of these rows has, since the report before: preparing batches, reporting"),
    "timing/elapsed": ("seconds", "Time of training up to here, that of the starts before a resume included"),
    # The teacher service, seen from the trainer.
    "teacher/latency": ("seconds", "From sending a request to its reply, median over the requests of the step"),
    "teacher/latency_p95": ("seconds", "The same, 95th percentile"),
    "teacher/latency_p99": ("seconds", "The same, 99th percentile"),
    "teacher/tokens_per_second": ("tokens/second", "Tokens scored per second of timing/get_teacher_knowledge"),
    "teacher/end_logprob": ("nats", "The teacher's log-probability of the end of an answer that the student ended"),
    "teacher/retries": ("", "Requests that were sent again"),
    "teacher/bytes_per_token": ("bytes/token", "Size of the replies per scored token"),
    "teacher/queue_length": ("requests", "Requests of all clients that waited for a teacher worker, mean"),
    "teacher/engine_busy": ("fraction", "Part of the last ten seconds with a request, mean over workers"),
    "teacher/cache_hit_fraction": (
        "fraction", "Given answers whose scores were in actor_rollout_ref.teacher.cache; absent without given answers"
    ),
    "teacher/hidden_fraction": (
        "fraction", "Share of the time with a request at the teacher in which the trainer was generating or updating, "
        "and not waiting for the teacher; from its spans since the report before"
    ),
    "perf/tokens_per_second": ("tokens/second", "Prompt and response tokens per second of timing/step"),
    "perf/mfu": (
        "fraction", "Model FLOP/s utilization: forward and backward of the step's tokens, without recomputation, per "
        "second of timing/update_actor/compute, of the GPUs' dense bf16 peak. Absent on the CPU, unknown GPUs and "
        "mixtures of experts"
    ),
    "perf/max_memory_allocated_gb": ("GiB", "torch's peak of the step, any GPU; without an engine that sleeps"),
    "perf/max_host_memory_gb": ("GiB", "Largest host memory of a worker process so far"),
    **{
        f"perf/copy/{owner}_{direction}": ("GB/s", f"Speed of the last copy of {owner} {where} the GPU")
        for owner in (*(owner for owners in MODEL_OWNERS.values() for owner in owners), FROZEN)
        for direction, where in (("in", "to"), ("out", "from"))
    },
    "memory/update/sleeping_engine_gb": (
        "GiB", "What vLLM keeps on the GPU while it sleeps, as it was built; and what other processes took meanwhile"
    ),
    "memory/rollout/actor_rest_gb": (
        "GiB", "In torch's allocator after a publish beyond vLLM's own, first generation included: what the student "
        "did not free"
    ),
    # What is on the device when a phase begins, on the worker that has most of it. Absent: not there.
    **{
        f"memory/{phase}/{owner}_gb": ("GiB", f"{owner} on the device when the phase {phase} begins")
        for phase in RESIDENCY
        for owner in MEMORY_OWNERS
    },
    # The batch.
    "response_length/mean": ("tokens", "Mean response length"),
    "response_length/max": ("tokens", "Longest response"),
    "response_length/min": ("tokens", "Shortest response"),
    "response/repeated_fraction": ("fraction", "Response tokens in a run of 8 that the response has had before"),
    "response/ended_fraction": ("fraction", "Responses ended as they repeated themselves (rollout.end_repetitions)"),
    "response_length/clip_ratio": ("fraction", "Responses cut at data.max_response_length"),
    "prompt_length/mean": ("tokens", "Mean prompt length"),
    "prompt_length/max": ("tokens", "Longest prompt"),
    "reward/mean": ("", "Mean reward of the responses that are trained on (PPO, or distillation.use_task_rewards)"),
    "reward/all_groups": (
        "", "The same of all responses of the step's generation batches, also of groups without a signal "
        "(algorithm.filter_groups): how good the student is at these prompts"
    ),
    "reward/teacher": ("nats/token", "log p - log q of the sampled tokens (distillation.as_reward), mean, unclamped"),
    "reward/kl": ("nats/token", "KL(student, reference policy) in the rewards (algorithm.use_kl_in_reward)"),
    "reward/kl_coef": ("", "Its coefficient in this step (algorithm.kl_ctrl)"),
    "reward/greedy": ("", "Mean reward of the greedy answers (algorithm.adv_estimator=remax)"),
    "reward/std": ("", "Standard deviation of the responses' rewards"),
    "reward/<name>/mean": (
        "", "Mean of one of several functions (reward.functions), without its weight; of a further number that a "
        "function of your own returns; of the penalty on long responses (overlong). Of a reward model the score "
        "(model, beside functions), and the share of texts that lost their end (model_truncated)"
    ),
    "reward/failures": (
        "fraction", "Responses on which a function raised or did not return in time, and another score counts; where "
        "functions are computed in processes"
    ),
    "training/global_step": ("steps", "Training steps done"),
    "training/epoch": ("epochs", "Pass over the prompt data that the batch begins in"),
    "training/num_gen_batches": ("", "Generation batches that the step took (algorithm.filter_groups)"),
    "training/groups_with_signal": (
        "fraction", "Groups of these batches whose responses differ in algorithm.filter_groups.metric"
    ),
    "training/given_fraction": ("fraction", "Tasks trained on with their given answer (data.response_key)"),
    "training/staleness": ("steps", "Age of the weights that wrote the responses, the oldest of the batch"),
    # Validation, in the steps that have one.
    "val/accuracy": (
        "fraction", "Mean reward of the answers to held-out prompts by functions (without a reward model's part), of a "
        "function that returns a number acc beside it the mean of that: with built-in rules, the share that is right. "
        "Of n answers to each (actor_rollout_ref.rollout.val_kwargs.n) what is also called mean@n, and pass@1"
    ),
    "val/reward_model": ("", "Mean score of the reward model for the answers to held-out prompts, without its weight"),
    "val/best@n": ("fraction", "Reward of the best of a prompt's n answers, mean over prompts"),
    "val/maj@n": ("fraction", "Reward of the final answer that most of a prompt's n answers have, mean over prompts"),
    "val/pass@k": (
        "fraction", "Expected reward of the best of k answers to a prompt, k = 2, 4, ... up to n; estimated from n "
        "without bias, which for rewards of 0 and 1 is the estimator of arXiv 2107.03374"
    ),
    "val/forward_kl": (
        "nats/token", "KL(teacher, student) on the teacher's top k and the tail, on the answers to held-out prompts as "
        "the student draws them with actor_rollout_ref.rollout.val_kwargs (greedy by default); with a teacher"
    ),
    "val/reverse_kl": ("nats/token", "KL(student, teacher), of the same answers"),
    **{
        f"val/{name}/q{number}": ("nats/token", f"val/{name} in the {which} quarter of each answer's tokens")
        for name in ("forward_kl", "reverse_kl")
        for number, which in enumerate(("first", "second", "third", "last"), 1)
    },
    "val/response_length": ("tokens", "Mean response length on held-out prompts"),
    "val/response_length/clip_ratio": ("fraction", "Answers to held-out prompts cut at data.max_response_length"),
    "val/num_prompts": ("prompts", "Held-out prompts asked"),
    "val/<data source>/...": (
        "", "Each of these for the prompts of one data source, where there are several. It is named by the column "
        "data.reward_fn_key, or else by the name of the file"
    ),
}

PATTERNS = {
    "val/best@n": r"val/best@\d+", "val/maj@n": r"val/maj@\d+", "val/pass@k": r"val/pass@\d+",
    "reward/<name>/mean": "reward/.+/mean",
}  # fmt: skip
"""Entries that stand for several names -> regular expression of these."""
SOURCES = "val/<data source>/..."
"""The entry that stands for all metrics of a data source; see `data_source_of`."""


def check_names(metrics: Iterable[str]) -> None:
    """Refuse a name that the table does not have: a typing error, or a metric that nobody documented."""
    unknown = sorted(name for name in metrics if _in_table(data_source_of(name)[1]) not in METRICS)
    assert not unknown, f"metrics without an entry in hybrid_gkd/reporting/metrics.py: {', '.join(unknown)}"


def data_source_of(name: str) -> tuple[str, str]:
    """`val/org/math/accuracy` -> ("org/math", "val/accuracy"); of any other name ("", the name itself)."""
    room, *parts = name.split("/")
    for start in range(1, len(parts) if room == "val" else 0):
        short = "/".join([room, *parts[start:]])
        if _in_table(name) not in METRICS and _in_table(short) in METRICS:
            return "/".join(parts[:start]), short
    return "", name


def _in_table(name: str) -> str:
    """`val/best@8` -> `val/best@n`."""
    return next((entry for entry, pattern in PATTERNS.items() if re.fullmatch(pattern, name)), name)


def markdown_table() -> str:
    """The table as the text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "The same names in the console, in `metrics.jsonl` and in Weights & Biases. A step reports those that",
        "apply to it. What `actor/*` says of tokens is the mean over the response tokens of the batch, on all GPUs",
        "and in all optimizer steps that the batch is cut into; so is `critic/vf_*`. A value that is not finite",
        "ends the run.",
        "",
        "This page is generated: `python -m hybrid_gkd.metrics > docs/metrics.md`.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in METRICS.items()]
    return "\n".join(lines) + "\n"

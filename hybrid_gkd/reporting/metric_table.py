"""Table of all metrics: name, unit (empty for a plain number) and meaning; the source of docs/metrics.md."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hybrid_gkd.config.learning import REWARD_FUNCTIONS
from hybrid_gkd.offload.residency import EMA, FROZEN, MEMORY_OWNERS, MODEL_OWNERS, RESIDENCY

UPDATES = ("update_actor", "update_critic")
TEMPLATES: dict[str, tuple[str, tuple[str, str]]] = {}
"""Name of an expanded metric -> its template, which is one row of docs/metrics.md."""


def _expand(name: str, unit: str, meaning: str, **values: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return an entry for each combination of the values, which replace `<key>` in name and meaning."""
    entries = {}
    for chosen in itertools.product(*values.values()):
        full_name, full_meaning = name, meaning
        for key, value in zip(values, chosen, strict=True):
            full_name, full_meaning = (text.replace(f"<{key}>", value) for text in (full_name, full_meaning))
        entries[full_name] = unit, full_meaning
        TEMPLATES[full_name] = name, (unit, meaning)
    return entries


METRICS: dict[str, tuple[str, str]] = {
    # The learning signal.
    "actor/kl_loss": (
        "nats/token", "Distillation divergence (distillation.loss_mode) before loss_max_clamp; with "
        "distillation.ensemble=sum this and actor/distillation/* are means over all teachers' tokens"
    ),
    **_expand(
        "actor/kl_loss/<which>_update", "nats/token", "actor/kl_loss at the <which> optimizer step of a rollout",
        which=("first", "last"),
    ),
    "actor/loss": ("nats/token", "Total loss: all terms with their coefficients"),
    "actor/grad_norm": ("", "Gradient norm before clipping, mean over the optimizer steps"),
    "actor/lr": ("", "Learning rate of the last optimizer step"),
    "actor/entropy": ("nats/token", "Entropy of the student's distribution"),
    "actor/sft_loss": ("nats/token", "SFT loss: cross-entropy of the given completions (data.response_key)"),
    "actor/pg_loss": ("nats/token", "PPO's clipped policy loss on the task rewards"),
    "actor/pg_clipfrac": ("fraction", "Completion tokens whose PPO ratio was clipped"),
    "actor/importance/kl": ("nats/token", "KL(rollout policy, trainer policy), estimator k1 on the sampled tokens"),
    "actor/importance/k3_kl": ("nats/token", "KL(rollout policy, trainer policy), estimator k3 (never negative)"),
    "actor/importance/largest_ratio": ("", "Largest probability ratio of trainer and rollout policy, either way"),
    "actor/importance/rejected": ("fraction", "Completion tokens rejected from the loss (algorithm.rollout_rs)"),
    "actor/ref_kl": ("nats/token", "KL(student, reference policy), estimator actor.kl_loss_type"),
    "actor/importance/mean": ("", "Mean importance weight (algorithm.rollout_is_threshold)"),
    "actor/importance/effective_sample_size": ("fraction", "(sum w)^2 / (n sum w^2) of the importance weights"),
    "actor/ppo_kl": ("nats/token", "Approximate KL(old policy, policy): mean of old - new log-probability"),
    "actor/distillation/forward_kl": ("nats/token", "KL(teacher, student) on the teacher's top-k and the tail"),
    "actor/distillation/reverse_kl": ("nats/token", "KL(student, teacher) on the teacher's top-k and the tail"),
    **_expand(
        "actor/distillation/forward_kl/q<n>", "nats/token",
        "actor/distillation/forward_kl in quarter <n> of the trained tokens of each completion", n="1234",
    ),
    "actor/distillation/<name>/<divergence>": (
        "nats/token", "One of several teachers with distillation.ensemble=sum: kl_loss, forward_kl and reverse_kl, "
        "means over the tokens that it scored"
    ),
    "actor/distillation/teacher_entropy": ("nats/token", "Teacher entropy on its top-k and the tail"),
    "actor/distillation/entropy_gap": ("nats/token", "Student entropy on the same partition minus teacher entropy"),
    "actor/distillation/clamp_share": ("fraction", "Tokens whose divergence or advantage is clamped (loss_max_clamp)"),
    "actor/distillation/selected_fraction": (
        "fraction", "Completion tokens with a weight above 0 (distillation.token_weights). If distillation is the only "
        "term of the loss, the other token-level metrics are means over these"
    ),
    "actor/distillation/coef": ("", "Distillation coefficient (distillation_loss_coef_schedule)"),
    "actor/distillation/overlap_ratio": (
        "fraction", "Part of the teacher's (ensemble=sum: the first one's) top-k that is also in the student's top-k, "
        "on sampled positions"
    ),
    "actor/distillation/student_mass": ("fraction", "Student probability mass on the teacher's top-k"),
    "actor/distillation/teacher_mass": ("fraction", "Teacher probability mass on its top-k"),
    # The critic (algorithm.adv_estimator=gae).
    "critic/vf_loss": ("", "Critic loss: half the squared value error, clipped (critic.cliprange_value)"),
    "critic/vf_clipfrac": ("fraction", "Completion tokens where the clipped value has the larger error"),
    "critic/vf_explained_var": (
        "", "1 - Var(return - value) / Var(return) before the update, at most 1; absent if all returns are equal"
    ),
    "critic/values/mean": ("", "Mean value (expected return) of a completion token before the update"),
    "critic/returns/mean": ("", "Mean return of a completion token, the critic's target"),
    "critic/grad_norm": ("", "Critic gradient norm before clipping, mean over its optimizer steps"),
    "critic/lr": ("", "Learning rate of the critic's last optimizer step"),
    # Sums of the trainer's spans in trace.json (docs/observing.md). timing/step is the sum of the phases that
    # ppo/step_metrics.py lists; the others are parts of these, or overlap with them, or are outside of the step.
    "timing/step": (
        "seconds", "Step time: generation (separate pools: the wait for it), waits for teacher and rewards, passes of "
        "other models, updates, weight sync; not validation, checkpoints and timing/other"
    ),
    "timing/gen": ("seconds", "Generation, of this batch or of a later one (with a scheduler that runs ahead)"),
    "timing/wait_prev_gen": ("seconds", "Exposed wait for generation (separate pools)"),
    "timing/wait_prev_teacher": ("seconds", "Exposed wait for teacher scores"),
    "timing/get_teacher_knowledge": ("seconds", "Time with at least one teacher request in flight"),
    "timing/ref": ("seconds", "Log-probabilities under the reference policy"),
    "timing/reward": ("seconds", "Wait for reward functions after the last completion"),
    "timing/reward_model": ("seconds", "Scores of the reward model"),
    "timing/values": ("seconds", "Values of the critic"),
    "timing/update_critic": ("seconds", "Critic update: forward, backward and optimizer steps"),
    "timing/update_actor": ("seconds", "Actor update: forward, backward and optimizer steps"),
    # Parts of both updates, each the maximum over the workers.
    **{
        name: entry
        for part, text in (
            ("compute", "Device time of forward and backward passes, including gaps between kernels and waits for the "
             "teacher"),
            ("optimizer_step", "Device time of optimizer steps and gradient clipping"),
            ("copies", "Wait until the update's state is on the GPU: host-to-device copies, and the engine's sleep"),
            ("other", "Remainder of timing/<update>: sending the batch, passes for log-probabilities, waits"),
        )
        for name, entry in _expand(f"timing/<update>/{part}", "seconds", text, update=UPDATES).items()
    },
    "timing/sync_rollout_weights": ("seconds", "Weight sync to the rollout engine"),
    "timing/offload": ("seconds", "Copies of parameters, optimizer state and KV cache between GPU and host"),
    "timing/testing": ("seconds", "Validation; a second weight sync after it counts in the next timing/gen"),
    "timing/save_checkpoint": ("seconds", "Exposed time of checkpoints: copying the state, or waiting for a write"),
    "timing/snapshot": ("seconds", "The same of a snapshot to restart from"),
    "timing/other": ("seconds", "Time since the last report outside of all phases: batching, reporting"),
    "reliability/restarts": ("", "Restarts after faults so far (trainer.max_restarts)"),
    "reliability/seconds_lost": (
        "seconds", "Time lost by these faults: repeated steps, and from each fault until the workers were ready again"
    ),
    "reliability/steps_repeated": ("", "Steps since the newest saved state that these restarts have repeated"),
    "timing/elapsed": ("seconds", "Training time so far, including starts before a resume"),
    # The teacher service, as measured by the trainer.
    "teacher/latency": ("seconds", "Request latency, median over the requests of the step"),
    **_expand("teacher/latency_p<q>", "seconds", "Request latency, <q>th percentile", q=("95", "99")),
    "teacher/tokens_per_second": ("tokens/second", "Teacher throughput: tokens per timing/get_teacher_knowledge"),
    "teacher/end_logprob": ("nats", "Teacher log-probability of the end-of-text token of completions that have one"),
    "teacher/retries": ("", "Requests sent again"),
    "teacher/bytes_per_token": ("bytes/token", "Reply size per scored token"),
    "teacher/queue_length": ("requests", "Mean number of requests, of all clients, waiting for a teacher worker"),
    "teacher/engine_busy": ("fraction", "Utilization of the scoring engines over ten seconds, mean over workers"),
    "teacher/cache_hit_fraction": (
        "fraction", "Given completions whose scores were in actor_rollout_ref.teacher.cache; absent without any"
    ),
    "teacher/<key>/latency": (
        "seconds", "teacher/latency of one of several teachers (distillation.teacher_models); with "
        "distillation.ensemble those with one key are teacher/<key>/<name>/"
    ),
    "teacher/<key>/token_fraction": (
        "fraction", "Part of the step's scored tokens that this teacher scored, without those of a cache"
    ),
    "teacher/unscored_fraction": (
        "fraction", "Samples of the rollout without teacher, for which distillation.teacher_prompt_fn returned None"
    ),
    **_expand(
        "teacher/tokens/<how>_fraction", "fraction", "Completion tokens with distillation.cross_tokenizer: those that "
        "are one token of the teacher; those in spans; those without effect: with cross_tokenizer=map in spans, beyond "
        "the teacher's length, special tokens without counterpart", how=("matched", "span", "unscored"),
    ),
    "teacher/hidden_fraction": (
        "fraction", "Fraction of timing/get_teacher_knowledge that overlaps with generation or updates and not with a "
        "wait for the teacher, since the last report"
    ),
    "perf/tokens_per_second": ("tokens/second", "Throughput: prompt and completion tokens per timing/step"),
    "perf/mfu": (
        "fraction", "Model FLOP/s utilization: FLOPs of forward and backward on the step's tokens, without "
        "recomputation, per timing/update_actor/compute, relative to the GPUs' dense bf16 peak. Absent on CPUs, "
        "unknown GPUs and for mixture-of-experts models"
    ),
    "perf/max_memory_allocated_gb": (
        "GiB", "Peak of torch's allocator in the step, maximum over GPUs, without a sleeping engine"
    ),
    "perf/max_host_memory_gb": ("GiB", "Peak host memory of a worker process so far"),
    **_expand(
        "perf/copy/<owner>_<direction>", "GB/s", "Bandwidth of the last copy of <owner> to (in) or from (out) the GPU",
        owner=(*itertools.chain(*MODEL_OWNERS.values()), FROZEN, EMA), direction=("in", "out"),
    ),
    "memory/update/sleeping_engine_gb": (
        "GiB", "GPU memory of the sleeping vLLM engine, measured at its construction, plus memory that other processes "
        "have taken since"
    ),
    "memory/rollout/actor_rest_gb": (
        "GiB", "Residual memory of the trainer: in torch's allocator after a weight sync, beyond vLLM's own and its "
        "first generation"
    ),
    # Memory by owner at the start of a phase, maximum over the workers. Absent: not on the device.
    **_expand(
        "memory/<phase>/<owner>_gb", "GiB", "<owner> on the device at the start of phase <phase>",
        phase=RESIDENCY, owner=MEMORY_OWNERS,
    ),
    # The batch.
    **_expand("response_length/<statistic>", "tokens", "Trained tokens of a sample", statistic=("mean", "max", "min")),
    "response/repeated_fraction": (
        "fraction", "Completion tokens inside a sequence of 8 tokens that occurred before in the same completion"
    ),
    "response/ended_fraction": ("fraction", "Completions stopped because of repetition (rollout.end_repetitions)"),
    "response_length/clip_ratio": ("fraction", "Completions truncated at data.max_response_length"),
    **_expand("prompt_length/<statistic>", "tokens", "Length of prompts", statistic=("mean", "max")),
    "reward/mean": ("", "Mean reward of the completions trained on (PPO, or distillation.use_task_rewards)"),
    "reward/all_groups": (
        "", "Mean reward of all completions of the step's generation batches, before group filtering "
        "(algorithm.filter_groups)"
    ),
    "reward/teacher": ("nats/token", "Mean log p - log q of the sampled tokens, unclamped (distillation.as_reward)"),
    "reward/kl": ("nats/token", "KL(student, reference policy) in the rewards (algorithm.use_kl_in_reward)"),
    "reward/kl_coef": ("", "Coefficient of the KL penalty in this step (algorithm.kl_ctrl)"),
    "reward/greedy": ("", "Mean reward of the greedy completions (algorithm.adv_estimator=remax)"),
    "reward/std": ("", "Standard deviation of the rewards"),
    "reward/<name>/mean": (
        "", "Mean of a reward component, without its weight: a function of several (reward.functions), an additional "
        "number of a function, over the completions that have one (after the function's name if a component has its "
        "name, and acc with custom and by_data_source), the penalty on long completions (overlong), the score of a "
        "reward model besides functions (model), the fraction of texts truncated for it (model_truncated)"
    ),
    "reward/failures": (
        "fraction", "Completions with a default score because a reward function raised an error or timed out; for "
        "functions in separate processes"
    ),
    "training/global_step": ("steps", "Completed training steps"),
    "training/epoch": ("epochs", "Epoch in which the batch starts"),
    "training/num_gen_batches": ("", "Generation batches of the step (algorithm.filter_groups)"),
    "training/groups_with_signal": (
        "fraction", "Informative groups: groups of the generation batches whose completions differ in "
        "algorithm.filter_groups.metric"
    ),
    "training/given_fraction": ("fraction", "Tasks trained on their given completion (data.response_key)"),
    "training/staleness": ("steps", "Age of the weights that generated the completions, maximum over the batch"),
    # Validation, in the steps that have one.
    "val/accuracy": (
        "", "Mean reward by reward functions on held-out prompts, without the reward model; for functions that return "
        "a number acc, the mean of acc. With exact_match, gsm8k, math or by_data_source alone it is the fraction of "
        "right answers; reward.functions are summed with their weights. With n samples per prompt "
        "(actor_rollout_ref.rollout.val_kwargs.n) it is mean@n and pass@1"
    ),
    "val/reward_model": ("", "Mean score of the reward model on held-out prompts, without its weight"),
    "val/best@n": ("", "Best reward of a prompt's n completions, mean over prompts"),
    "val/maj@n": ("", "Reward of the majority answer among a prompt's n completions, mean over prompts"),
    "val/pass@k": (
        "", "Expected best reward of k completions of a prompt, k = 2, 4, ... up to n: unbiased estimate from "
        "n completions; for rewards of 0 and 1 the estimator of arXiv 2107.03374"
    ),
    "val/forward_kl": (
        "nats/token", "KL(teacher, student) on the teacher's top-k and the tail, on the student's completions of "
        "held-out prompts (actor_rollout_ref.rollout.val_kwargs, greedy by default); with a teacher, of "
        "distillation.ensemble the mixture"
    ),
    "val/reverse_kl": ("nats/token", "KL(student, teacher) on the same completions"),
    **_expand(
        "val/<divergence>/q<n>", "nats/token", "val/<divergence> in quarter <n> of each completion",
        divergence=("forward_kl", "reverse_kl"), n="1234",
    ),
    "val/response_length": ("tokens", "Mean completion length on held-out prompts"),
    "val/response_length/clip_ratio": ("fraction", "Held-out completions truncated at data.max_response_length"),
    "val/num_prompts": ("prompts", "Number of held-out prompts"),
    "val/<data source>/...": (
        "", "Any val/* metric for one data source, if there are several. Data sources come from the column "
        "data.reward_fn_key; by default, the source is the file name"
    ),
}

PATTERNS = {
    "val/best@n": r"val/best@\d+", "val/maj@n": r"val/maj@\d+", "val/pass@k": r"val/pass@\d+",
    "reward/<name>/mean": "reward/.+/mean", "teacher/<key>/latency": "teacher/.+/latency",
    "teacher/<key>/token_fraction": "teacher/.+/token_fraction",
    "actor/distillation/<name>/<divergence>": "actor/distillation/[^/]+/(kl_loss|forward_kl|reverse_kl)",
}  # fmt: skip
"""Regular expressions of entries with a placeholder."""
SOURCES = "val/<data source>/..."
"""Entry for all metrics of a data source; see `data_source_of`."""


def check_names(metrics: Iterable[str]) -> None:
    """Check that all names are documented in `METRICS`; raises AssertionError."""
    unknown = sorted(name for name in metrics if entry_of(name) not in METRICS)
    assert not unknown, f"metrics without an entry in hybrid_gkd/reporting/metric_table.py: {', '.join(unknown)}"


def entry_of(name: str) -> str:
    """Return the entry of a metric: `val/best@n` for `val/org/math/best@8`."""
    return _in_table(data_source_of(name)[1])


def data_source_of(name: str) -> tuple[str, str]:
    """Split `val/org/math/accuracy` into ("org/math", "val/accuracy"); return ("", name) for any other name."""
    prefix, *parts = name.split("/")
    for start in range(1, len(parts) if prefix == "val" else 0):
        short = "/".join([prefix, *parts[start:]])
        if _in_table(name) not in METRICS and _in_table(short) in METRICS:
            return "/".join(parts[:start]), short
    return "", name


def held_out_reward(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return a name and a format for `val/accuracy` of a flat configuration: a percentage where it is the fraction of
    right answers, else a number, which may be negative or above 1."""
    is_sum = any(key.startswith("reward.functions.") for key in config)
    is_own = is_sum or config.get("reward.custom_reward_function.path") is not None
    is_fraction = not is_own and REWARD_FUNCTIONS.get(config.get("reward.name", "exact_match"), False)
    return ("accuracy", ".1%") if is_fraction else ("reward", ".4f")


def _in_table(name: str) -> str:
    """Return the entry of a name: `val/best@n` for `val/best@8`."""
    return next((entry for entry, pattern in PATTERNS.items() if re.fullmatch(pattern, name)), name)


def markdown_table() -> str:
    """Return the text of docs/metrics.md."""
    rows = dict(TEMPLATES.get(name, (name, entry)) for name, entry in METRICS.items())
    lines = [
        "# Metrics",
        "",
        "Metrics have the same names on the console, in `metrics.jsonl` and in Weights & Biases; a step reports those",
        "that apply to it. Token-level metrics of `actor/*` and `critic/vf_*` are means over the completion tokens of",
        "the batch, on all GPUs and in all optimizer steps. A value that is not finite stops the run. `<phase>` and",
        "`<owner>` are rows and columns of the [residency table](architecture.md#residency), `<n>` is 1 to 4,",
        "`<which>` is `first` or `last`, `<update>` is `update_actor` or `update_critic`, `<divergence>` is",
        "`forward_kl` or `reverse_kl`, `<statistic>` is `mean`, `max` or `min`, `<q>` is 95 or 99.",
        "This page is generated: `python -m hybrid_gkd.metrics > docs/metrics.md`.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
    ]
    for names in _groups(rows):
        meaning = "; ".join(rows[name][1] for name in names)
        shown = re.sub(r"(<\w+>)", r"`\1`", meaning)  # a bare <n> would be an HTML tag
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {rows[names[0]][0]} | {shown} |")
    return "\n".join(lines) + "\n"


def _groups(rows: dict[str, tuple[str, str]]) -> list[list[str]]:
    """Join neighbours with one unit, one parent and short meanings, which fit into a row."""
    groups: list[list[str]] = []
    for name, (unit, meaning) in rows.items():
        last = groups[-1] if groups else []
        texts = [*(rows[each][1] for each in last), meaning]
        alike = all(rows[each][0] == unit and each.rpartition("/")[0] == name.rpartition("/")[0] for each in last)
        if last and alike and len("; ".join(texts)) <= 200 and not any(";" in text for text in texts):
            last.append(name)
        else:
            groups.append([name])
    return groups

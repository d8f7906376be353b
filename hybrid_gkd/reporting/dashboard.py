"""Weights & Biases dashboard as code: a workspace, and a report with the same sections.

    python -m hybrid_gkd.reporting.dashboard --project hybrid_gkd [--entity my-team] [--config RUN/config.yaml]

creates or updates both; with --json it prints the workspace without a login. An online run creates the workspace itself
if the project has none (trainer.wandb.workspace).
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid_gkd.compat.wandb import app_url, find_view, workspace_json
from hybrid_gkd.config import CUSTOM, MODEL, Config, has_several_teachers, run_teachers, updates_per_step
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.offload.residency import RESIDENCY
from hybrid_gkd.ppo.learning_signal import needs_greedy_samples
from hybrid_gkd.reporting.metric_table import METRICS, PATTERNS, SOURCES
from hybrid_gkd.reporting.starts import rows_of_starts
from hybrid_gkd.scoring.builtin_rewards import BUILTIN_REWARDS

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "hybrid_gkd"
"""Name of the workspace and of the report; an existing workspace is found by it."""
API_SECONDS = 20
"""Timeout of one request to the server."""


class Panel(NamedTuple):
    """A plot of metrics over steps; a metric that none of SECTIONS names gets one of its own in the section REST."""

    title: str
    metrics: tuple[str, ...]
    """Names in `METRICS`; a name ending in / or * is a prefix."""
    stacked: bool = False


SEVERAL_SAMPLES = tuple(name for name in PATTERNS if name.startswith("val/"))
SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Held-out accuracy or reward", ("val/accuracy",)),
        Panel("Held-out score of the reward model", ("val/reward_model",)),
        Panel("Held-out divergence", ("val/forward_kl", "val/reverse_kl")),
        Panel("Held-out divergence by quarter of the completion", ("val/forward_kl/", "val/reverse_kl/")),
        Panel("Held-out best@n, maj@n, pass@k", SEVERAL_SAMPLES),
        Panel("Held-out metrics by data source", (SOURCES,)),
        Panel("Distillation loss", ("actor/kl_loss",)),
        Panel("Divergence to each teacher", ("actor/distillation/<name>/<divergence>",)),
        Panel("Forward and reverse KL", ("actor/distillation/forward_kl", "actor/distillation/reverse_kl")),
        Panel("Forward KL by quarter of the completion", ("actor/distillation/forward_kl/",)),
        Panel("Distillation loss at the first and last optimizer step of a rollout", ("actor/kl_loss/",)),
        Panel("Teacher entropy and entropy gap", (
            "actor/distillation/teacher_entropy", "actor/distillation/entropy_gap",
        )),
        Panel("Distillation coefficient", ("actor/distillation/coef",)),
        Panel("SFT cross-entropy", ("actor/sft_loss",)),
        Panel("Fraction of given completions", ("training/given_fraction",)),
        Panel("KL to the reference policy", ("actor/ref_kl",)),
        Panel("Total loss", ("actor/loss",)),
        Panel("Overlap and mass of the teacher's top-k", (
            "actor/distillation/overlap_ratio", "actor/distillation/student_mass", "actor/distillation/teacher_mass",
        )),
        Panel("Fraction of tokens clamped by loss_max_clamp", ("actor/distillation/clamp_share",)),
        Panel("Fraction of tokens selected by token_weights", ("actor/distillation/selected_fraction",)),
        Panel("Entropy", ("actor/entropy",)),
        Panel("Gradient norm", ("actor/grad_norm",)),
        Panel("Learning rate", ("actor/lr",)),
        Panel("Staleness", ("training/staleness",)),
        Panel("KL of rollout and trainer policy", ("actor/importance/kl", "actor/importance/k3_kl")),
        Panel("Largest probability ratio of rollout and trainer policy", ("actor/importance/largest_ratio",)),
        Panel("Mean importance weight", ("actor/importance/mean",)),
        Panel("Effective sample size and rejected tokens", (
            "actor/importance/effective_sample_size", "actor/importance/rejected",
        )),
    ),
    "Time": (
        Panel("Step time by phase", (
            "timing/gen", "timing/wait_prev_gen", "timing/wait_prev_teacher", "timing/reward", "timing/reward_model",
            "timing/values", "timing/update_critic", "timing/ref", "timing/update_actor", "timing/sync_rollout_weights",
            "timing/other",
        ), stacked=True),
        Panel("Step time", ("timing/step",)),
        Panel("Generation time", ("timing/gen",)),
        Panel("Actor update time by part", ("timing/update_actor/",), stacked=True),
        Panel("Critic update time by part", ("timing/update_critic/",), stacked=True),
        Panel("Throughput", ("perf/tokens_per_second",)),
        Panel("Model FLOP/s utilization (MFU)", ("perf/mfu",)),
        Panel("Overlapped fraction of teacher time", ("teacher/hidden_fraction",)),
        Panel("Offload time", ("timing/offload",)),
        Panel("Offload bandwidth", ("perf/copy/",)),
        Panel("Validation and checkpoints", ("timing/testing", "timing/save_checkpoint", "timing/snapshot")),
        Panel("Restarts and repeated steps", ("reliability/restarts", "reliability/steps_repeated")),
        Panel("Time lost by faults", ("reliability/seconds_lost",)),
    ),
    "Memory": (
        Panel("Peak memory", ("perf/max_memory_allocated_gb", "perf/max_host_memory_gb")),
        *(
            Panel(f"GPU memory at the start of phase {phase}", (f"memory/{phase}/",), stacked=True)
            for phase in RESIDENCY
        ),
    ),
    "Teacher": (
        Panel("Latency", ("teacher/latency*",)),
        Panel("Request time and exposed wait", ("timing/get_teacher_knowledge", "timing/wait_prev_teacher")),
        Panel("Queue length", ("teacher/queue_length",)),
        Panel("Score cache hits", ("teacher/cache_hit_fraction",)),
        Panel("Samples without teacher", ("teacher/unscored_fraction",)),
        Panel("Tokens by alignment (another tokenizer)", ("teacher/tokens/",)),
        Panel("Retries", ("teacher/retries",)),
        Panel("Teacher throughput", ("teacher/tokens_per_second",)),
        Panel("Latency of each teacher", ("teacher/<key>/latency",)),
        Panel("Tokens by teacher", ("teacher/<key>/token_fraction",)),
        Panel("Engine utilization", ("teacher/engine_busy",)),
        Panel("Reply size", ("teacher/bytes_per_token",)),
    ),
    "Completions": (
        Panel("Completion length", ("response_length/mean", "response_length/max", "response_length/min")),
        Panel("Truncated fraction", ("response_length/clip_ratio",)),
        Panel("Repetition", ("response/repeated_fraction", "response/ended_fraction")),
        Panel("Teacher log-probability of the end-of-text token", ("teacher/end_logprob",)),
        Panel("Held-out completion length", ("val/response_length",)),
        Panel("Held-out truncated fraction", ("val/response_length/clip_ratio",)),
        Panel("Prompt length", ("prompt_length/",)),
    ),
    "PPO": (
        Panel("Reward", ("reward/mean", "reward/std", "reward/greedy")),
        Panel("Reward before group filtering", ("reward/all_groups",)),
        Panel("Informative groups", ("training/groups_with_signal",)),
        Panel("Generation batches per step", ("training/num_gen_batches",)),
        Panel("Reward components", ("reward/<name>/mean",)),
        Panel("Teacher reward", ("reward/teacher",)),
        Panel("KL penalty in the reward", ("reward/kl",)),
        Panel("KL penalty coefficient", ("reward/kl_coef",)),
        Panel("Reward function failures", ("reward/failures",)),
        Panel("Policy loss", ("actor/pg_loss",)),
        Panel("Policy clip fraction", ("actor/pg_clipfrac*",)),
        Panel("Approximate KL to the old policy", ("actor/ppo_kl",)),
        Panel("Critic: values and returns", ("critic/values/mean", "critic/returns/mean")),
        Panel("Critic: explained variance", ("critic/vf_explained_var",)),
        Panel("Critic: loss", ("critic/vf_loss",)),
        Panel("Critic: clip fraction", ("critic/vf_clipfrac",)),
        Panel("Critic: gradient norm", ("critic/grad_norm",)),
        Panel("Critic: learning rate", ("critic/lr",)),
    ),
}  # fmt: skip
NAMES_OF = {**PATTERNS, SOURCES: r"val/.+/(accuracy|reward_model|forward_kl|reverse_kl)"}
"""Regular expressions of the metric names behind the placeholders in `METRICS`."""
REST, CONFIGURATION = "More metrics", "Configuration"
"""Last sections: one panel for each metric without a panel, and the configuration."""


_distils = operator.attrgetter("distillation.enabled")
_filters_groups = operator.attrgetter("algorithm.filter_groups.enable")
_is_hybrid = operator.attrgetter("actor_rollout_ref.hybrid_engine")


def _on_gpu(run: Config) -> bool:
    """Return whether a run uses GPUs; assumed for device=auto (`load_run` resolves it for a started run)."""
    return run.trainer.device != "cpu"


def _has_service(run: Config) -> bool:
    return _distils(run) and not run.teaches_itself


def _validates(run: Config) -> bool:
    return bool(run.data.val_files)


def _compares_in_validation(run: Config) -> bool:
    return _validates(run) and _distils(run) and not any(each.section.is_stored for each in run_teachers(run))


def _has_policy_loss(run: Config) -> bool:
    return run.has_advantages or run.distillation.use_policy_gradient


def _has_parts(run: Config) -> bool:
    """Return whether the reward has several components or additional metrics."""
    detailed = {CUSTOM, MODEL, "by_data_source"} & run.reward_weights.keys()  # these may return additional metrics
    return bool(detailed) or len(run.reward_weights) > 1 or run.reward.overlong_buffer.enable


def _can_fail(run: Config) -> bool:
    """Return whether a reward function runs in a separate process."""
    names = run.reward_weights.keys() - {MODEL}
    return any(name == CUSTOM or BUILTIN_REWARDS[name].can_hang for name in names)


HELD: dict[str, Callable[[Config], bool]] = {
    "critic": lambda run: run.uses_critic,
    "ref": lambda run: run.has_reference_model,
    "reward_model": lambda run: run.uses_reward_model,
    "frozen": lambda run: run.actor_rollout_ref.model.has_lora,
    "ema_": lambda run: run.has_moving_average,
    "engine": _is_hybrid,
    "kv_cache": _is_hybrid,
    "/rollout/": _is_hybrid,
}
"""Predicates by part of a memory metric's name: whether training workers have the owner or phase."""


def _is_held(name: str) -> Callable[[Config], bool]:
    """Return the predicate of a memory or copy metric."""
    tests = [_on_gpu, *(test for part, test in HELD.items() if part in name)]
    return lambda run: all(test(run) for test in tests)


REPORTED: dict[str, Callable[[Config], bool]] = {
    "actor/distillation/clamp_share": lambda run: _distils(run) and run.distillation.loss_max_clamp is not None,
    "actor/distillation/coef": (
        lambda run: _distils(run) and run.distillation.distillation_loss_coef_schedule != "constant"
    ),
    "actor/distillation/selected": lambda run: run.distillation.weighting is not None,
    "actor/distillation/<name>/": lambda run: run.distillation.ensemble == "sum",
    "actor/distillation/": _distils,
    "actor/kl_loss/": lambda run: (
        _distils(run) and updates_per_step(run.data.train_batch_size, run.actor_rollout_ref.actor) > 1
    ),
    "actor/kl_loss": _distils,
    "actor/sft_loss": lambda run: run.data.response_key is not None
    and (run.sft_coef > 0 or run.trainer.warmup_steps_sft > 0),
    "training/given_fraction": lambda run: run.data.response_key is not None,
    "teacher/cache_hit_fraction": lambda run: any(each.section.cache is not None for each in run_teachers(run))
    and run.data.response_key is not None,
    "teacher/unscored_fraction": lambda run: _distils(run) and run.distillation.teacher_prompt_fn is not None,
    "teacher/tokens/": lambda run: _distils(run) and run.distillation.cross_tokenizer != "refuse",
    "response/ended_fraction": (
        lambda run: run.actor_rollout_ref.rollout.end_repetitions is not None and not run.is_sft
    ),
    "actor/ref_kl": lambda run: run.actor_rollout_ref.actor.use_kl_loss,
    "actor/importance/mean": lambda run: run.algorithm.rollout_is_threshold is not None,
    "actor/importance/effective": lambda run: run.algorithm.rollout_is_threshold is not None,
    "actor/importance/rejected": lambda run: run.algorithm.rollout_rs is not None,
    "actor/importance/": lambda run: run.algorithm.compares_logprobs,
    "actor/pg_loss": lambda run: run.has_advantages,
    **dict.fromkeys(("actor/pg_clipfrac", "actor/ppo_kl"), _has_policy_loss),
    **dict.fromkeys(("critic/", "timing/update_critic", "timing/values"), lambda run: run.uses_critic),
    "reward/<name>/mean": lambda run: run.trains_on_rewards and _has_parts(run),
    "reward/failures": lambda run: run.trains_on_rewards and _can_fail(run),
    "reward/greedy": lambda run: run.trains_on_rewards and needs_greedy_samples(run),
    "reward/kl": lambda run: run.algorithm.use_kl_in_reward,
    "reward/teacher": lambda run: _distils(run) and run.distillation.as_reward,
    **dict.fromkeys(
        ("reward/all_groups", "training/num_gen_batches", "training/groups_with_signal"), _filters_groups
    ),
    "reward/": lambda run: run.trains_on_rewards,
    "reliability/": lambda run: run.trainer.max_restarts > 0,
    "teacher/<key>/": has_several_teachers,
    **dict.fromkeys(("teacher/queue_length", "teacher/engine_busy", "teacher/bytes_per_token"), _has_service),
    **dict.fromkeys(("teacher/", "timing/get_teacher_knowledge", "timing/wait_prev_teacher"), _distils),
    "timing/ref": lambda run: run.uses_reference,
    "timing/reward_model": lambda run: run.uses_reward_model and run.scores_rollouts,
    "timing/reward": lambda run: (
        run.has_reward_functions and run.scores_rollouts and (_is_hybrid(run) or not _filters_groups(run))
    ),
    # The save of the last step ends after the last report.
    "timing/save_checkpoint": lambda run: run.trainer.save_freq > 0 or run.trainer.best_metric is not None,
    "timing/snapshot": lambda run: run.takes_snapshots,
    "timing/testing": _validates,
    "timing/wait_prev_gen": lambda run: not _is_hybrid(run),
    "val/accuracy": lambda run: _validates(run) and run.has_reward_functions,
    "val/reward_model": lambda run: _validates(run) and run.uses_reward_model,
    **dict.fromkeys(("val/forward_kl", "val/reverse_kl"), _compares_in_validation),
    **dict.fromkeys(
        ("timing/gen", "training/staleness", "response_length/clip_ratio", "response/repeated"),
        lambda run: not run.is_sft,
    ),
    **dict.fromkeys(SEVERAL_SAMPLES, lambda run: (
        _validates(run) and run.has_reward_functions and run.actor_rollout_ref.rollout.val_kwargs.n > 1
    )),
    "val/": _validates,
    **{name: _is_held(name) for name in METRICS if name.startswith(("memory/", "perf/copy/"))},
    **dict.fromkeys(("perf/mfu", "perf/max_memory_allocated_gb", "timing/offload"), _on_gpu),
}
"""Predicates by prefix of a metric's name: whether a run reports it. The first match counts; default: True."""


def reports(run: Config | None, name: str) -> bool:
    """Return whether a run with this configuration can report the metric; None stands for any run."""
    return run is None or next((test(run) for start, test in REPORTED.items() if name.startswith(start)), True)


def plan_panels(run: Config | None = None) -> dict[str, list[Panel]]:
    """Return the panels by section, restricted to the metrics that the run can report, with full names."""
    left = [name for name in METRICS if reports(run, name)]
    found: dict[str, list[Panel]] = {}
    for section, panels in SECTIONS.items():
        for panel in panels:
            names = tuple(name for name in METRICS if _matches(name, panel) and reports(run, name))
            if panel.stacked and run is not None and not _is_hybrid(run):  # these generate in the background
                names = tuple(name for name in names if name != "timing/gen")
            # A prefix covers metrics without a panel so far; a full name may be in several panels.
            names = tuple(name for name in names if name in left or name in panel.metrics)
            left = [name for name in left if name not in names]
            if names:
                found.setdefault(section, []).append(panel._replace(metrics=names))
    if left:
        found[REST] = [Panel(name, (name,)) for name in left]
    return found


def _matches(name: str, panel: Panel) -> bool:
    return any(name == each or (each[-1] in "/*" and name.startswith(each.rstrip("*"))) for each in panel.metrics)


def build_workspace(entity: str, project: str, run: Config | None = None) -> Workspace:
    """Build the workspace without sending it."""
    import wandb_workspaces.workspaces as ws

    closed = (REST, CONFIGURATION)
    sections = [
        ws.Section(name=name, panels=panels, is_open=name not in closed) for name, panels in _sections(run).items()
    ]
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def make_report(entity: str, project: str, run: Config | None = None) -> Any:
    """Build the report (wandb_workspaces.reports.v2.Report) without sending it."""
    import wandb_workspaces.reports.v2 as wr

    blocks: list[Any] = [wr.TableOfContents()]
    for name, panels in _sections(run).items():
        runset = wr.Runset(entity=entity, project=project)
        blocks += [wr.H1(text=name), wr.PanelGrid(runsets=[runset], panels=panels)]
    return wr.Report(entity=entity, project=project, title=NAME, blocks=blocks, width="fluid")


def _sections(run: Config | None) -> dict[str, list[Any]]:
    """Return the panels of each section, as objects of wandb_workspaces: plots, samples after the first section, and
    at the end the configuration keys that differ."""
    import wandb_workspaces.reports.v2 as wr

    found: dict[str, list[Any]] = {}
    for name, panels in plan_panels(run).items():
        found[name] = [_plot(panel) for panel in panels]
        if len(found) == 1 and reports(run, "val/"):
            found["Samples"] = [wr.WeavePanelSummaryTable(table_name="val/generations")]
    return found | {CONFIGURATION: [wr.RunComparer(diff_only="split")]}


def _plot(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    units = {METRICS[name][0] for name in panel.metrics} - {""}
    patterns = [NAMES_OF[name] for name in panel.metrics if name in NAMES_OF]
    return wr.LinePlot(
        title=panel.title, x="Step", y=[name for name in panel.metrics if name not in NAMES_OF],
        metric_regex="|".join(patterns) or None, title_y=units.pop() if len(units) == 1 else None,
        plot_type="stacked-area" if panel.stacked else "line",
    )


def save_workspace(entity: str, project: str, run: Config | None = None, *, update: bool) -> str | None:
    """Create the workspace, or with `update` replace the sections of an existing one.

    Return its address; None if an existing one is kept. Raises the library's errors.
    """
    import wandb
    import wandb_workspaces.workspaces as ws

    api = wandb.Api(timeout=API_SECONDS)
    made, there = build_workspace(entity, project, run), find_view(api, entity, project, "project-view", NAME)
    if there is not None and not update:
        return None
    if there is not None:
        name = there["name"].removeprefix("nw-").removesuffix("-v")
        made, sections = ws.Workspace.from_url(f"{app_url(api)}/{entity}/{project}?nw={name}"), made.sections
        made.sections = sections
    made.save()
    return str(made.url)


def save_report(entity: str, project: str, run: Config | None = None) -> str:
    """Create the report, or replace the blocks of an existing one; return its address. Raises the library's errors."""
    import wandb
    import wandb_workspaces.reports.v2 as wr

    api = wandb.Api(timeout=API_SECONDS)
    made, there = make_report(entity, project, run), find_view(api, entity, project, "runs", NAME)
    if there is not None:
        address = f"{app_url(api)}/{entity}/{project}/reports/{NAME}--{there['id'].rstrip('=')}"
        made, blocks = wr.Report.from_url(address), made.blocks
        made.blocks = blocks
    made.save()
    return str(made.url)


def specification(entity: str, project: str, run: Config | None = None) -> dict[str, Any]:
    """Return the workspace as plain data."""
    found: dict[str, Any] = json.loads(workspace_json(build_workspace(entity, project, run)))
    return found


def load_run(file: Path) -> Config:
    """Load a run's configuration; resolve trainer.device=auto to the device of its last start (starts.jsonl)."""
    run = load_config(config_name=file.name, config_path=file.parent)
    if run.trainer.device == "auto":
        devices = [row["loaded"]["device"] for row in rows_of_starts(file.parent) if "loaded" in row]
        run.trainer.device = devices[-1] if devices else "auto"
    return run


def main(arguments: list[str] | None = None) -> int:
    prog, description = "python -m hybrid_gkd.reporting.dashboard", (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--project", required=True, help="project of the runs (trainer.project_name)")
    parser.add_argument("--entity", help="user or team (default: that of the login)")
    parser.add_argument("--config", type=Path, help="config.yaml of a run: show only panels that such a run can fill")
    parser.add_argument("--json", action="store_true", help="print the workspace without sending it")
    options = parser.parse_args(arguments)
    try:
        run = load_run(options.config) if options.config else None
        if options.json:
            print(json.dumps(specification(options.entity or "entity", options.project, run), indent=1))
            return 0
        import wandb

        entity = options.entity or wandb.Api(timeout=API_SECONDS).default_entity
        print(save_workspace(entity, options.project, run, update=True))
        print(save_report(entity, options.project, run))
    except Exception as error:  # wandb raises various errors: no login, unknown project, no network
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

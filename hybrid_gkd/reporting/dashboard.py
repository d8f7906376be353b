"""The dashboard of a run in Weights & Biases, as code: a workspace, and a report with the same sections.

    python -m hybrid_gkd.reporting.dashboard --project hybrid_gkd [--entity my-team] [--config RUN/config.yaml]

makes both, or brings the workspace of that name up to date; with --json it prints what it would send, without a login.
An online run makes the workspace itself where the project has none (trainer.wandb.workspace).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid_gkd.compat.wandb import app_url, find_view, workspace_json
from hybrid_gkd.config import CUSTOM, MODEL, Config, updates_per_step
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.offload.residency import RESIDENCY
from hybrid_gkd.ppo.learning_signal import needs_greedy_samples
from hybrid_gkd.reporting.metrics import METRICS, PATTERNS, SOURCES
from hybrid_gkd.reporting.starts import STARTS
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.scoring.builtin_rewards import BUILTIN_REWARDS

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "hybrid_gkd"
"""Of the workspace, by which an existing one is found, and of the report."""
API_SECONDS = 20
"""For one request to the server."""


class Panel(NamedTuple):
    """A plot of metrics over steps."""

    title: str
    metrics: tuple[str, ...]
    """Names in METRICS; one that ends in / or * stands for all that begin so."""
    stacked: bool = False


SEVERAL_ANSWERS = tuple(name for name in PATTERNS if name.startswith("val/"))
SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Held-out accuracy", ("val/accuracy",)),
        Panel("Held-out score of the reward model", ("val/reward_model",)),
        Panel("Held-out divergence", ("val/forward_kl", "val/reverse_kl")),
        Panel("Held-out divergence by quarter of the answers", ("val/forward_kl/", "val/reverse_kl/")),
        Panel("Several answers to a held-out prompt", SEVERAL_ANSWERS),
        Panel("Held-out, by data source", (SOURCES,)),
        Panel("Divergence, what is minimised", ("actor/kl_loss",)),
        Panel("Divergence, both directions", ("actor/distillation/forward_kl", "actor/distillation/reverse_kl")),
        Panel("Divergence by quarter of the answers", ("actor/distillation/forward_kl/",)),
        Panel("Divergence before the first and the last step of a rollout", ("actor/kl_loss/",)),
        Panel("Entropy of the teacher, and the student's above it", (
            "actor/distillation/teacher_entropy", "actor/distillation/entropy_gap",
        )),
        Panel("Coefficient of the distillation", ("actor/distillation/coef",)),
        Panel("Cross-entropy of given answers", ("actor/sft_loss",)),
        Panel("Given answers", ("training/given_fraction",)),
        Panel("KL to the reference policy", ("actor/ref_kl",)),
        Panel("Loss", ("actor/loss",)),
        Panel("Overlap and mass of the teacher's top k", (
            "actor/distillation/overlap_ratio", "actor/distillation/student_mass", "actor/distillation/teacher_mass",
        )),
        Panel("Tokens beyond loss_max_clamp", ("actor/distillation/clamp_share",)),
        Panel("Tokens selected by distillation.token_weights", ("actor/distillation/selected_fraction",)),
        Panel("Entropy", ("actor/entropy",)),
        Panel("Gradient norm", ("actor/grad_norm",)),
        Panel("Learning rate", ("actor/lr",)),
        Panel("Staleness", ("training/staleness",)),
        Panel("Importance weights", ("actor/importance/",)),
    ),
    "Time": (
        Panel("The step, part by part", (
            "timing/gen", "timing/wait_prev_gen", "timing/wait_prev_teacher", "timing/reward", "timing/reward_model",
            "timing/values", "timing/update_critic", "timing/ref", "timing/update_actor", "timing/sync_rollout_weights",
            "timing/other",
        ), stacked=True),
        Panel("The step", ("timing/step",)),
        Panel("The actor's update, part by part", ("timing/update_actor/",), stacked=True),
        Panel("The critic's update, part by part", ("timing/update_critic/",), stacked=True),
        Panel("Tokens per second", ("perf/tokens_per_second",)),
        Panel("Model FLOP/s utilization", ("perf/mfu",)),
        Panel("Teacher's time hidden behind other work", ("teacher/hidden_fraction",)),
        Panel("Copies between GPU and host", ("timing/offload",)),
        Panel("Speed of these copies", ("perf/copy/",)),
        Panel("Validation and checkpoints", ("timing/testing", "timing/save_checkpoint")),
    ),
    "Memory": (
        Panel("Largest", ("perf/max_memory_allocated_gb", "perf/max_host_memory_gb")),
        *(
            Panel(f"On the GPU when the phase {phase} begins", (f"memory/{phase}/",), stacked=True)
            for phase in RESIDENCY
        ),
    ),
    "Teacher": (
        Panel("Latency", ("teacher/latency*",)),
        Panel("Time with a request, and waiting for it", ("timing/get_teacher_knowledge", "timing/wait_prev_teacher")),
        Panel("Queue", ("teacher/queue_length",)),
        Panel("Scores that were kept", ("teacher/cache_hit_fraction",)),
        Panel("Retries", ("teacher/retries",)),
        Panel("Throughput", ("teacher/tokens_per_second",)),
        Panel("Load", ("teacher/engine_busy",)),
        Panel("Size of replies", ("teacher/bytes_per_token",)),
    ),
    "Answers": (
        Panel("Length", ("response_length/mean", "response_length/max", "response_length/min")),
        Panel("Share cut", ("response_length/clip_ratio",)),
        Panel("Repetitions", ("response/repeated_fraction", "response/ended_fraction")),
        Panel("The teacher's log-probability of the end of an answer", ("teacher/end_logprob",)),
        Panel("Held-out length", ("val/response_length",)),
        Panel("Held-out share cut", ("val/response_length/clip_ratio",)),
        Panel("Prompt length", ("prompt_length/",)),
    ),
    "PPO": (
        Panel("Reward", ("reward/mean", "reward/std", "reward/greedy")),
        Panel("Reward, groups without a signal included", ("reward/all_groups",)),
        Panel("Groups with a signal", ("training/groups_with_signal",)),
        Panel("Generation batches of a step", ("training/num_gen_batches",)),
        Panel("Reward, part by part", ("reward/<name>/mean",)),
        Panel("Reward from the teacher", ("reward/teacher",)),
        Panel("KL in the reward", ("reward/kl",)),
        Panel("Coefficient of the KL in the reward", ("reward/kl_coef",)),
        Panel("Responses on which a reward function failed", ("reward/failures",)),
        Panel("Policy loss", ("actor/pg_loss",)),
        Panel("Share clipped", ("actor/pg_clipfrac*",)),
        Panel("Movement of the policy", ("actor/ppo_kl",)),
        Panel("Critic: values and returns", ("critic/values/mean", "critic/returns/mean")),
        Panel("Critic: explained variance", ("critic/vf_explained_var",)),
        Panel("Critic: loss", ("critic/vf_loss",)),
        Panel("Critic: share clipped", ("critic/vf_clipfrac",)),
        Panel("Critic: gradient norm", ("critic/grad_norm",)),
        Panel("Critic: learning rate", ("critic/lr",)),
    ),
}  # fmt: skip
NAMES_OF = {**PATTERNS, SOURCES: r"val/.+/(accuracy|reward_model|forward_kl|reverse_kl)"}
"""Entries of METRICS that stand for several names -> regular expression of those in a panel."""
REST = "Everything else"
"""The last section: a panel for each metric that no other panel shows."""


def _distils(run: Config) -> bool:
    return run.distillation.enabled


def _validates(run: Config) -> bool:
    return bool(run.data.val_files)


def _several_updates(run: Config) -> bool:
    return updates_per_step(run.data.train_batch_size, run.actor_rollout_ref.actor) > 1


def _has_policy_loss(run: Config) -> bool:
    return run.has_advantages or run.distillation.use_policy_gradient


def _has_parts(run: Config) -> bool:
    """Whether a reward has numbers beside its own."""
    own = {CUSTOM, MODEL} & run.reward_weights.keys()  # these tell more than their score
    return bool(own) or len(run.reward_weights) > 1 or run.reward.overlong_buffer.enable


def _can_fail(run: Config) -> bool:
    """Whether a reward function is computed in processes."""
    names = run.reward_weights.keys() - {MODEL}
    return any(name == CUSTOM or BUILTIN_REWARDS[name].can_hang for name in names)


def _leaves_groups_out(run: Config) -> bool:
    return run.algorithm.filter_groups.enable


def _on_gpu(run: Config) -> bool:
    """With auto it is not known: for a run that was started see `load_run`."""
    return run.trainer.device != "cpu"


def _is_hybrid(run: Config) -> bool:
    return run.actor_rollout_ref.hybrid_engine


HELD: dict[str, Callable[[Config], bool]] = {
    "critic": lambda run: run.uses_critic,
    "ref": lambda run: run.has_reference_model,
    "reward_model": lambda run: run.uses_reward_model,
    "frozen": lambda run: run.actor_rollout_ref.model.has_lora,
    "engine": _is_hybrid,
    "kv_cache": _is_hybrid,
    "/rollout/": _is_hybrid,
}
"""Part of the names of memory owners and phases -> whether a worker that trains has them."""


def _is_held(name: str) -> Callable[[Config], bool]:
    """Whether a run reports a metric of memory, or of copies of it."""
    tests = [_on_gpu, *(test for part, test in HELD.items() if part in name)]
    return lambda run: all(test(run) for test in tests)


REPORTED: dict[str, Callable[[Config], bool]] = {
    "actor/distillation/clamp_share": lambda run: _distils(run) and run.distillation.loss_max_clamp is not None,
    "actor/distillation/coef": (
        lambda run: _distils(run) and run.distillation.distillation_loss_coef_schedule != "constant"
    ),
    "actor/distillation/selected": lambda run: run.distillation.weighting is not None,
    "actor/distillation/": _distils,
    "actor/kl_loss/": lambda run: _distils(run) and _several_updates(run),
    "actor/kl_loss": _distils,
    "actor/sft_loss": lambda run: run.data.response_key is not None
    and (run.sft_coef > 0 or run.trainer.warmup_steps_sft > 0),
    "training/given_fraction": lambda run: run.data.response_key is not None,
    "teacher/cache_hit_fraction": lambda run: run.actor_rollout_ref.teacher.cache is not None
    and run.data.response_key is not None,
    "response/ended_fraction": lambda run: run.actor_rollout_ref.rollout.end_repetitions is not None,
    "actor/ref_kl": lambda run: run.actor_rollout_ref.actor.use_kl_loss,
    "actor/importance/mean": lambda run: run.algorithm.rollout_is_threshold is not None,
    "actor/importance/effective": lambda run: run.algorithm.rollout_is_threshold is not None,
    "actor/importance/rejected": lambda run: run.algorithm.rollout_rs is not None,
    "actor/importance/": lambda run: run.algorithm.compares_logprobs,
    "actor/pg_loss": lambda run: run.has_advantages,
    "actor/pg_clipfrac": _has_policy_loss,
    "actor/ppo_kl": _has_policy_loss,
    "critic/": lambda run: run.uses_critic,
    "reward/<name>/mean": lambda run: run.trains_on_rewards and _has_parts(run),
    "reward/failures": lambda run: run.trains_on_rewards and _can_fail(run),
    "reward/greedy": lambda run: run.trains_on_rewards and needs_greedy_samples(run),
    "reward/kl": lambda run: run.algorithm.use_kl_in_reward,
    "reward/teacher": lambda run: _distils(run) and run.distillation.as_reward,
    "reward/all_groups": _leaves_groups_out,
    "reward/": lambda run: run.trains_on_rewards,
    "teacher/": _distils,
    "timing/get_teacher_knowledge": _distils,
    "timing/ref": lambda run: run.uses_reference,
    "timing/reward_model": lambda run: run.uses_reward_model and run.trains_on_rewards,
    "timing/reward": lambda run: (
        run.has_reward_functions and run.trains_on_rewards and (_is_hybrid(run) or not _leaves_groups_out(run))
    ),
    # That of the last step is written when the last report is out.
    "timing/save_checkpoint": lambda run: run.trainer.save_freq > 0 or run.trainer.best_metric is not None,
    "timing/testing": _validates,
    "timing/update_critic": lambda run: run.uses_critic,
    "timing/values": lambda run: run.uses_critic,
    "timing/wait_prev_teacher": _distils,
    "timing/wait_prev_gen": lambda run: not _is_hybrid(run),
    "val/accuracy": lambda run: _validates(run) and run.has_reward_functions,
    "val/reward_model": lambda run: _validates(run) and run.uses_reward_model,
    "val/forward_kl": lambda run: _distils(run) and _validates(run),
    "val/reverse_kl": lambda run: _distils(run) and _validates(run),
    **{
        name: (
            lambda run: _validates(run) and run.has_reward_functions and run.actor_rollout_ref.rollout.val_kwargs.n > 1
        )
        for name in SEVERAL_ANSWERS
    },
    "training/num_gen_batches": _leaves_groups_out,
    "training/groups_with_signal": _leaves_groups_out,
    "val/": _validates,
    **{name: _is_held(name) for name in METRICS if name.startswith(("memory/", "perf/copy/"))},
    "perf/mfu": _on_gpu,
    "perf/max_memory_allocated_gb": _on_gpu,
    "timing/offload": _on_gpu,
}
"""Beginning of a metric's name -> whether a run reports it; the first that fits counts, and without one it does."""


def reports(run: Config | None, name: str) -> bool:
    """Whether a run with this configuration can report the metric; None is any run."""
    return run is None or next((test(run) for start, test in REPORTED.items() if name.startswith(start)), True)


def plan(run: Config | None = None) -> dict[str, list[Panel]]:
    """Sections with their panels, metrics by their full names, for what the run can report."""
    left = [name for name in METRICS if reports(run, name)]
    found: dict[str, list[Panel]] = {}
    for section, panels in SECTIONS.items():
        for panel in panels:
            names = tuple(name for name in METRICS if _matches(name, panel) and reports(run, name))
            # A pattern stands for what has no panel of its own; a name may be in several.
            names = tuple(name for name in names if name in left or name in panel.metrics)
            left = [name for name in left if name not in names]
            if names:
                found.setdefault(section, []).append(panel._replace(metrics=names))
    if left:
        found[REST] = [Panel(name, (name,)) for name in left]
    return found


def _matches(name: str, panel: Panel) -> bool:
    return any(name == each or (each[-1] in "/*" and name.startswith(each.rstrip("*"))) for each in panel.metrics)


def make_workspace(entity: str, project: str, run: Config | None = None) -> Workspace:
    """The workspace, not sent yet."""
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=name, panels=list(_plots(panels)), is_open=name != REST) for name, panels in plan(run).items()
    ]
    sections[1:1] = [ws.Section(name="Samples", panels=[_samples()], is_open=True)] if reports(run, "val/") else []
    sections.append(ws.Section(name="Configuration", panels=[_configurations()], is_open=False))
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def make_report(entity: str, project: str, run: Config | None = None) -> Any:
    """The report (wandb_workspaces.reports.v2.Report), not sent yet."""
    import wandb_workspaces.reports.v2 as wr

    sections = {name: list(_plots(panels)) for name, panels in plan(run).items()}
    if reports(run, "val/"):
        sections["Samples"] = [_samples()]
    sections["Configuration"] = [_configurations()]
    blocks: list[Any] = [wr.TableOfContents()]
    for name, found in sections.items():
        runset = wr.Runset(entity=entity, project=project)
        blocks += [wr.H1(text=name), wr.PanelGrid(runsets=[runset], panels=found)]
    return wr.Report(entity=entity, project=project, title=NAME, blocks=blocks, width="fluid")


def _plots(panels: list[Panel]) -> Iterator[Any]:
    import wandb_workspaces.reports.v2 as wr

    for panel in panels:
        units = {METRICS[name][0] for name in panel.metrics} - {""}
        patterns = [NAMES_OF[name] for name in panel.metrics if name in NAMES_OF]
        yield wr.LinePlot(
            title=panel.title, x="Step", y=[name for name in panel.metrics if name not in NAMES_OF],
            metric_regex="|".join(patterns) or None, title_y=units.pop() if len(units) == 1 else None,
            plot_type="stacked-area" if panel.stacked else "line",
        )


def _samples() -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.WeavePanelSummaryTable(table_name="val/generations")


def _configurations() -> Any:
    """In which keys the runs that are shown differ."""
    import wandb_workspaces.reports.v2 as wr

    return wr.RunComparer(diff_only="split")


def save_workspace(entity: str, project: str, run: Config | None = None, *, update: bool) -> str | None:
    """Make the workspace, or with `update` overwrite the sections of the one that is there; its address, None if one
    was left as it is. Raises what the library raises."""
    import wandb
    import wandb_workspaces.workspaces as ws

    api = wandb.Api(timeout=API_SECONDS)
    made, there = make_workspace(entity, project, run), find_view(api, entity, project, "project-view", NAME)
    if there is not None and not update:
        return None
    if there is not None:
        name = there["name"].removeprefix("nw-").removesuffix("-v")
        made, sections = ws.Workspace.from_url(f"{app_url(api)}/{entity}/{project}?nw={name}"), made.sections
        made.sections = sections
    made.save()
    return str(made.url)


def save_report(entity: str, project: str, run: Config | None = None) -> str:
    """Make the report, or replace the blocks of the one that is there; its address. Raises what the library raises."""
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
    """The workspace as it would be sent: plain data."""
    found: dict[str, Any] = json.loads(workspace_json(make_workspace(entity, project, run)))
    return found


def load_run(file: Path) -> Config:
    """A run's configuration; what trainer.device=auto was for its last start is in starts.jsonl beside it."""
    run, starts = load_config(config_name=file.name, config_path=file.parent), file.parent / STARTS
    if run.trainer.device == "auto" and starts.is_file():
        devices = [row["loaded"]["device"] for row in read_json_lines(starts) if "loaded" in row]
        run.trainer.device = devices[-1] if devices else "auto"
    return run


def main(arguments: list[str] | None = None) -> int:
    prog, description = "python -m hybrid_gkd.reporting.dashboard", (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--project", required=True, help="the project of the runs (trainer.project_name)")
    parser.add_argument("--entity", help="user or team; default: the one of the login")
    parser.add_argument("--config", type=Path, help="config.yaml of a run: only panels of what such a run can report")
    parser.add_argument("--json", action="store_true", help="print the workspace and send nothing")
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
    except Exception as error:  # whatever wandb raises: no login, no such project, no network
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

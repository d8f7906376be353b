"""Best validation of a run by `trainer.best_metric`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from hybrid_gkd.config import TrainerConfig
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.student.checkpoint_store import Best, CheckpointStore, TrainerState

LOWEST = ("forward_kl", "reverse_kl")
"""Last components of the metrics that are minimized; all others are maximized."""


def new_best(metric: str | None, metrics: Mapping[str, float], step: int, best: Best | None) -> Best | None:
    """Return the validation of `step` if it beats `best`; None otherwise, or without its metric: none is configured, or
    no completion was scored."""
    if metric is None or metric not in metrics:
        return None
    value, sign = metrics[metric], -1 if metric.endswith(LOWEST) else 1
    if best is not None and sign * value <= sign * best.value:
        return None
    return Best(metric=metric, value=value, step=step)


def best_to_resume(metric: str | None, state: TrainerState, store: CheckpointStore) -> Best | None:
    """Return the best validation of a resumed run; None if it used another metric or its checkpoint is missing."""
    best = state.best
    return best if best and best.metric == metric and store.folder(best.step).is_dir() else None


def is_comparable(metric: str, changed: Collection[str]) -> bool:
    """Return whether a validation metric does not depend on the settings that changed.

    Divergences do not depend on rewards, and other metrics not on the teacher.

    Args:
        changed: lines of `changed_settings`, of `validation_settings`.
    """
    is_divergence = re.sub(r"/q\d$", "", metric).endswith(LOWEST)
    others = re.compile("reward" if is_divergence else r"distillation\.|[^: ]*\.teacher")
    return all(others.match(line) for line in changed)


def check_best_metric(trainer: TrainerConfig, sources: Collection[str]) -> None:
    """Check the data source in `trainer.best_metric`. Raises ConfigError: the validation prompts do not have it."""
    metric = trainer.best_metric
    if metric is None or trainer.val_only:
        return
    source = metric.removeprefix("val/").removesuffix(metric.rpartition("/")[2]).removesuffix("/")
    if source and (source not in sources or len(set(sources)) == 1):
        known = ", ".join(sorted(set(sources)))
        rule = f"must name one of the data sources {known}"
        if len(set(sources)) == 1:
            rule = "must be a metric over all prompts (val/<name>): there is only one data source"
        raise ConfigError("trainer.best_metric", rule, metric)

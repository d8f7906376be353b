"""Which validation of a run was the best, by `trainer.best_metric`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hybrid_gkd.config import TrainerConfig
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.student.checkpoint_store import Best, CheckpointStore, TrainerState

LOWEST = ("forward_kl", "reverse_kl")
"""Last parts of the metrics whose lowest value is the best; of all others that may be named it is the highest."""


def new_best(metric: str | None, metrics: Mapping[str, float], step: int, best: Best | None) -> Best | None:
    """The validation of `step`, if it is better than the best one before; None if not, or if none is asked for."""
    if metric is None:
        return None
    value, sign = metrics[metric], -1 if metric.endswith(LOWEST) else 1
    if best is not None and sign * value <= sign * best.value:
        return None
    return Best(metric=metric, value=value, step=step)


def best_to_resume(metric: str | None, state: TrainerState, store: CheckpointStore) -> Best | None:
    """The best validation of a run that continues; None if it was by another metric, or its checkpoint is not there."""
    best = state.best
    return best if best and best.metric == metric and store.folder(best.step).is_dir() else None


def check_best_metric(trainer: TrainerConfig, sources: Collection[str]) -> None:
    """Raises ConfigError if the metric is of a data source that the validation prompts do not have."""
    metric = trainer.best_metric
    if metric is None or trainer.val_only:
        return
    source = metric.removeprefix("val/").removesuffix(metric.rpartition("/")[2]).removesuffix("/")
    if source and (source not in sources or len(set(sources)) == 1):
        known = ", ".join(sorted(set(sources)))
        rule = "must be of all prompts (val/<name>)" if len(set(sources)) == 1 else f"must be of a data source: {known}"
        raise ConfigError("trainer.best_metric", rule, metric)

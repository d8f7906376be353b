"""What a configuration has to do with the demo. Builds nothing."""

from __future__ import annotations

from pathlib import Path

from hybrid_gkd.config import Config
from hybrid_gkd.demo.sorting import DemoPaths, demo_dir, teacher_accuracy


def demo_path(part: str) -> str:
    """`${demo:student}` in YAML: where the demo keeps its student."""
    return str(getattr(DemoPaths.under(demo_dir()), part))


def uses_demo(config: Config) -> bool:
    """Whether a model or a file of the configuration is the demo's."""
    arr, root = config.actor_rollout_ref, DemoPaths.under(demo_dir()).root
    used = (arr.model.path, arr.teacher.model.path, *config.data.train_files, *config.data.val_files)
    return any(Path(path).is_relative_to(root) for path in used if path)


def demo_teacher_accuracy(config: Config) -> float | None:
    """The teacher's accuracy on the validation prompts where both are the demo's; None where it is not known."""
    paths, teacher = DemoPaths.under(demo_dir()), config.actor_rollout_ref.teacher.model.path
    known = teacher == str(paths.teacher) and config.data.val_files == [str(paths.val)]
    return teacher_accuracy(paths) if known else None

"""What a configuration has to do with the demos: where they are, which it uses. Builds nothing until it is asked to.

In YAML, `${demo:student}` is the sorting demo's student, `${demo:weak_teacher,student}` that of the one with a weak
teacher, `${demo:gpu_demo,student}` that of the word problems, for the device of the configuration; `${by_device:a,b}`
is a with a GPU and b without one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_gkd.config import Config
from hybrid_gkd.demo import sorting
from hybrid_gkd.demo.folders import DemoPaths, teacher_accuracy
from hybrid_gkd.demo.gpu_demo import RECIPES, build_gpu_demo, gpu_demo_dir


def demo_path(*names: str, _root_: Any) -> str:
    """Where a demo keeps a part: ("student",) of the sorting demo, ("gpu_demo", "student") of another.

    Raises ValueError for a demo or a part that there is not.
    """
    *demo, part = names
    name = ",".join(demo) or "sorting"
    if name not in ("gpu_demo", *sorting.RECIPES) or part not in DemoPaths.__slots__:
        known = "${demo:PART} and, as DEMO, weak_teacher and gpu_demo of ${demo:DEMO,PART}"
        raise ValueError(f"${{demo:{','.join(names)}}}: there is {known}")
    root = gpu_demo_dir(_device(_root_)) if name == "gpu_demo" else sorting.demo_dir(recipe=sorting.RECIPES[name])
    return str(getattr(DemoPaths.under(root), part))


def by_device(on_gpu: Any, without: Any, *, _root_: Any) -> Any:
    """One of two values."""
    return on_gpu if _device(_root_) == "cuda" else without


def _device(root: Any) -> str:
    return visible_device() if root.trainer.device == "auto" else root.trainer.device


def visible_device() -> str:
    """cuda where a GPU is visible, as `trainer.device=auto` has it."""
    import torch  # takes seconds, for recipes that ask for the device alone

    return "cuda" if torch.cuda.is_available() else "cpu"


def used_demos(config: Config) -> dict[Path, Callable[[], DemoPaths]]:
    """Folder -> what builds it, of the demos whose models or files the configuration names."""
    known: dict[Path, Callable[[], DemoPaths]] = {
        sorting.demo_dir(recipe=recipe): partial(sorting.build_demo, recipe=recipe)
        for recipe in sorting.RECIPES.values()
    }
    known |= {gpu_demo_dir(device): partial(build_gpu_demo, device) for device in RECIPES}
    arr = config.actor_rollout_ref
    paths = [arr.model.path, arr.teacher.model.path, *config.data.train_files, *config.data.val_files]
    return {root: build for root, build in known.items() if any(Path(p).is_relative_to(root) for p in paths if p)}


def demo_teacher_accuracy(config: Config) -> float | None:
    """The teacher's accuracy on the validation prompts where both are a demo's; None where it is not known."""
    teacher = config.actor_rollout_ref.teacher.model.path
    for paths in map(DemoPaths.under, used_demos(config)):
        if teacher == str(paths.teacher) and config.data.val_files == [str(paths.val)]:
            return teacher_accuracy(paths)
    return None

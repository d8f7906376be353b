"""Resolvers of demo paths in configurations, and the demos that a configuration uses.

In YAML, `${demo:PART}` is a path of the sorting demo and `${demo:DEMO,PART}` one of another demo: weak_teacher,
solutions, or gpu_demo for the configured device. PART is a field of DemoPaths, such as student. `${by_device:a,b}` is a
with a GPU and b without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_gkd.config import Config
from hybrid_gkd.demo import sorting
from hybrid_gkd.demo.folders import DemoPaths
from hybrid_gkd.demo.gpu_demo import RECIPES, build_gpu_demo, gpu_demo_dir


def demo_path(*names: str, _root_: Any) -> str:
    """Return the path of a part of a demo: ("student",) of the sorting demo, ("gpu_demo", "student") of another one.

    Raises ValueError for an unknown demo or part.
    """
    *demo, part = names
    name = ",".join(demo) or "sorting"
    if name not in ("gpu_demo", *sorting.RECIPES) or part not in DemoPaths.__slots__:
        known = "${demo:PART} and, as DEMO, weak_teacher, solutions and gpu_demo of ${demo:DEMO,PART}"
        raise ValueError(f"${{demo:{','.join(names)}}}: must be {known}")
    root = gpu_demo_dir(_device(_root_)) if name == "gpu_demo" else sorting.demo_dir(recipe=sorting.RECIPES[name])
    return str(getattr(DemoPaths.under(root), part))


def by_device(on_gpu: Any, without: Any, *, _root_: Any) -> Any:
    """Return the first value with a GPU, else the second one."""
    return on_gpu if _device(_root_) == "cuda" else without


def _device(root: Any) -> str:
    return visible_device() if root.trainer.device == "auto" else root.trainer.device


def visible_device() -> str:
    """Return cuda if a GPU is visible, else cpu, as `trainer.device=auto`."""
    import torch  # takes seconds

    return "cuda" if torch.cuda.is_available() else "cpu"


def used_demos(config: Config) -> dict[Path, Callable[[], DemoPaths]]:
    """Return folder -> build function of the demos whose models or files the configuration uses."""
    known: dict[Path, Callable[[], DemoPaths]] = {
        sorting.demo_dir(recipe=recipe): partial(sorting.build_demo, recipe=recipe)
        for recipe in sorting.RECIPES.values()
    }
    known |= {gpu_demo_dir(device): partial(build_gpu_demo, device) for device in RECIPES}
    arr = config.actor_rollout_ref
    teachers = (arr.teacher, *config.distillation.teacher_models.values())
    paths = [arr.model.path, *(teacher.model.path for teacher in teachers)]
    paths += [*config.data.train_files, *config.data.val_files]
    return {root: build for root, build in known.items() if any(Path(p).is_relative_to(root) for p in paths if p)}


def demo_teacher_accuracy(config: Config) -> float | None:
    """Return the teacher's accuracy on the validation prompts if both are a demo's; None if unknown."""
    arr = config.actor_rollout_ref
    for paths in map(DemoPaths.under, used_demos(config)):
        of_demo = arr.teacher.model.path == str(paths.teacher)
        if config.teaches_itself and config.data.teacher_prompt_key == sorting.SOLUTION:
            of_demo = arr.model.path == str(paths.student)
        if of_demo and config.data.val_files == [str(paths.val)]:
            return json.loads(paths.manifest.read_text(encoding="utf-8"))["teacher"]["held_out_accuracy"]
    return None

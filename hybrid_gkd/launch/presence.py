"""Check that configured models and files exist. Loads nothing and needs no torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from pathlib import Path

from hybrid_gkd.config import REWARD_MODEL_PATH, Config, run_teachers
from hybrid_gkd.data.tables import find_sources
from hybrid_gkd.errors import ModelError, call_all
from hybrid_gkd.models.fingerprint import WEIGHT_SUFFIXES
from hybrid_gkd.runtime.files import is_lfs_pointer


def check_paths_exist(config: Config, demos: Collection[Path]) -> None:
    """Check that configured files and folders exist, except below `demos`, which may have to be built first.

    Raises ModelError, DataError.
    """

    def expected(path: str) -> bool:
        return not any(Path(path).is_relative_to(demo) for demo in demos)

    model, data = config.actor_rollout_ref.model, config.data
    train_files, val_files = (list(filter(expected, files)) for files in (data.train_files, data.val_files))
    looks: list[Callable[[], object]] = []
    if expected(model.path):
        looks.append(lambda: check_model_folder("actor_rollout_ref.model.path", model.path))
    looks.append(lambda: config.trainer.val_only or find_sources(train_files, "data.train_files"))
    looks.append(lambda: find_sources(val_files, "data.val_files"))
    for teacher in run_teachers(config):
        path = teacher.section.model.path
        if teacher.section.server_ip is None and path is not None and expected(path):
            looks.append(functools.partial(check_model_folder, f"{teacher.where}.model.path", path))
    scores = config.reward_model.model.path
    if config.uses_reward_model and scores is not None:
        looks.append(lambda: check_model_folder(REWARD_MODEL_PATH, scores))
    call_all(looks)


def check_model_folder(key: str, path: str) -> None:
    """Check that a folder has a model, or that the path looks like a hub id. Raises ModelError."""
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "adapter_config.json")):
            raise ModelError(
                f"{key}: the folder has a LoRA adapter but no model; set it to the base model and, for a student "
                f"or teacher, model.lora_adapter_path of its section to the folder; got {path!r}"
            )
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelError(f"{key}: the folder has no config.json; got {path!r}")
        if not any(file.suffix in WEIGHT_SUFFIXES for file in Path(path).iterdir()):
            raise ModelError(f"{key}: the folder has no weights ({', '.join(WEIGHT_SUFFIXES)}); got {path!r}")
        if pointers := [file.name for file in sorted(Path(path).iterdir()) if file.is_file() and is_lfs_pointer(file)]:
            raise ModelError(
                f"{key}: must have the files themselves, not their Git LFS pointers (git lfs pull); got {path!r} with "
                f"{', '.join(pointers)}"
            )
    elif looks_local:
        raise ModelError(f"{key}: no such folder; got {path!r}")

"""Look for the models and files that a configuration names, within a second: loads nothing, and needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from hybrid_gkd.config import REWARD_MODEL_PATH, Config
from hybrid_gkd.data.tables import find_sources
from hybrid_gkd.errors import ModelError, call_all
from hybrid_gkd.models.fingerprint import WEIGHT_SUFFIXES
from hybrid_gkd.ppo.resuming import TEACHER_PATH


def check_presence(config: Config, demos: Collection[Path] = ()) -> None:
    """Look for all that the configuration names, but for what lies in `demos`, folders that may still have to be built.

    Raises ModelError, DataError.
    """

    def expected(path: str) -> bool:
        return not any(Path(path).is_relative_to(demo) for demo in demos)

    model, teacher, data = config.actor_rollout_ref.model, config.actor_rollout_ref.teacher, config.data
    train_files, val_files = (list(filter(expected, files)) for files in (data.train_files, data.val_files))
    looks: list[Callable[[], object]] = []
    if expected(model.path):
        looks.append(lambda: check_model_folder("actor_rollout_ref.model.path", model.path))
    looks.append(lambda: config.trainer.val_only or find_sources(train_files, "data.train_files"))
    looks.append(lambda: find_sources(val_files, "data.val_files"))
    path = teacher.model.path
    if config.distillation.enabled and teacher.server_ip is None and path is not None and expected(path):
        looks.append(lambda: check_model_folder(TEACHER_PATH, path))
    scores = config.reward_model.model.path
    if config.uses_reward_model and scores is not None:
        looks.append(lambda: check_model_folder(REWARD_MODEL_PATH, scores))
    call_all(looks)


def check_model_folder(key: str, path: str) -> None:
    """A path that is no folder must at least look like a hub id. Raises ModelError."""
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "adapter_config.json")):
            raise ModelError(
                f"{key}: the folder holds a LoRA adapter and no model; name its base model here, and for a student the "
                f"folder as actor_rollout_ref.model.lora_adapter_path; got {path!r}"
            )
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelError(f"{key}: the folder has no config.json; got {path!r}")
        if not any(file.suffix in WEIGHT_SUFFIXES for file in Path(path).iterdir()):
            raise ModelError(f"{key}: the folder has no weights ({', '.join(WEIGHT_SUFFIXES)}); got {path!r}")
    elif looks_local:
        raise ModelError(f"{key}: no such folder; got {path!r}")

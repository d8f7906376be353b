"""The checkpoint that a run continues from: the newest one that is intact and belongs to it."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_gkd.config import Config, TrainerConfig
from hybrid_gkd.errors import CheckpointError, ConfigError
from hybrid_gkd.ppo.resuming import changed_settings, state_to_resume
from hybrid_gkd.student.checkpoint_store import CheckpointStore, TrainerState, find_damage, load_state

logger = logging.getLogger(__name__)

SMALL_BYTES = 2**20
"""Files whose checksum is compared at once."""
EXPORT = "huggingface"
"""How the folders begin that nothing continues from: damage there is told and no more."""


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on."""

    folder: Path
    state: TrainerState
    remarks: list[str]
    """Checkpoints that were left out and why; what was changed in the configuration."""


def find_resumption(config: Config, settings: dict[str, Any], *, num_prompts: int, steps: int) -> Resumption | None:
    """The newest intact checkpoint of the run, or the given one; None for a new run. Nothing is changed or loaded.

    Raises CheckpointError if the given one is damaged, if all are, or if it belongs to other data;
    ConfigError if what is to be learned differs from what the checkpoint has learned.
    """
    section, given = config.trainer, config.trainer.resume_from_path
    if section.resume_mode == "disable":
        return None
    folders = [Path(given)] if given is not None else CheckpointStore(config.experiment_dir, keep=None).newest_first()
    remarks: list[str] = []
    for folder in folders:
        try:
            remarks += check_checkpoint(folder, steps=sys.maxsize if section.val_only else steps)
        except CheckpointError as error:
            if given is not None:
                raise CheckpointError(f"trainer.resume_from_path: {error}") from error
            remarks.append(f"left out: {error}")
            continue
        state = state_to_resume(folder, config, num_prompts)
        resumption = Resumption(folder, state, remarks)
        remarks += accepted_changes(resumption, section, settings)
        return resumption
    if folders:
        raise CheckpointError(
            f"{config.experiment_dir} has no intact checkpoint to continue from; trainer.resume_mode=disable starts "
            "anew and keeps the folder under another name\n" + "\n".join(remarks)
        )
    return None


def check_checkpoint(folder: Path, *, steps: int) -> list[str]:
    """Compare the files with their checksums; remarks. One after the last of `steps` is not going to be loaded, so its
    large files are not read.

    Raises CheckpointError that names the first file which is damaged.
    """
    found = find_damage(folder, largest=SMALL_BYTES)
    if all(name.startswith(EXPORT) for name in found) and load_state(folder).step < steps:
        logger.info("checking the files of %s", folder)
        found = find_damage(folder)
    for name, reason in found.items():
        if not name.startswith(EXPORT):
            raise CheckpointError(f"{folder / name} {reason}")
    return [f"{folder / name} {reason}; the run does not need it to continue" for name, reason in found.items()]


def accepted_changes(resumption: Resumption, trainer: TrainerConfig, settings: dict[str, Any]) -> list[str]:
    """A remark that lists the settings which are not those of the checkpoint, if there are any and it is trained on.

    Raises ConfigError unless `trainer.allow_changed_config` accepts them.
    """
    state = resumption.state
    # The student's path was part of `data` once.
    changed = changed_settings(state.data | state.settings, settings, folder=state.working_dir)
    if not changed or trainer.val_only:
        return []
    text = f"{resumption.folder} was trained with other settings (was -> is):\n" + "\n".join(changed)
    if trainer.allow_changed_config:
        return [text]
    raise ConfigError(
        "trainer.allow_changed_config",
        f"{text}\ntrue goes on from step {state.step} with the new settings, if there are steps left; "
        "another trainer.experiment_name starts a run of its own", show_value=False,
    )

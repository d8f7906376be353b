"""Find the checkpoint that a run resumes from: the newest intact one of the same run."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_gkd.config import Config, run_teachers
from hybrid_gkd.errors import CheckpointError, ConfigError
from hybrid_gkd.ppo.resuming import changed_settings, state_to_resume
from hybrid_gkd.student.checkpoint_store import EXPORT, MERGED, CheckpointStore, TrainerState, find_damage, load_state

logger = logging.getLogger(__name__)

SMALL_BYTES = 2**20
"""Maximum size of files whose checksums are verified first."""


@dataclass(frozen=True)
class Resumption:
    """Checkpoint to resume from."""

    folder: Path
    state: TrainerState
    remarks: list[str]
    """Notes on skipped checkpoints and on changed settings."""


def find_resumption(config: Config, settings: dict[str, Any], *, num_prompts: int, steps: int) -> Resumption | None:
    """Return the newest intact checkpoint of the run, or the given one; None for a new run. Changes nothing.

    Raises CheckpointError: the given one or all are damaged, or belong to other data; ConfigError: settings of the
    learning signal differ from those of the checkpoint.
    """
    section, given = config.trainer, config.trainer.resume_from_path
    if section.resume_mode == "disable":
        return None
    folders = [Path(given)] if given is not None else CheckpointStore(config.experiment_dir, keep=None).resumable()
    remarks: list[str] = []
    for folder in folders:
        try:
            remarks += check_checkpoint(folder, steps=sys.maxsize if section.val_only else steps)
        except CheckpointError as error:
            if given is not None:
                raise CheckpointError(f"trainer.resume_from_path: {error}") from error
            remarks.append(f"skipped: {error}")
            continue
        state = state_to_resume(folder, config, num_prompts)
        resumption = Resumption(folder, state, remarks)
        remarks += accepted_changes(resumption, config, settings)
        return resumption
    if folders:
        raise CheckpointError(
            f"{config.experiment_dir} has no intact checkpoint to resume from; trainer.resume_mode=disable starts a "
            "new run and keeps the folder under another name\n" + "\n".join(remarks)
        )
    return None


def check_checkpoint(folder: Path, *, steps: int) -> list[str]:
    """Verify the checksums of a checkpoint; return notes on damage to its exports, which resuming does not need.

    Large files are verified only if training continues, that is before the last of `steps`. Raises CheckpointError that
    names the first damaged file.
    """
    found = find_damage(folder, largest=SMALL_BYTES)
    if all(map(_is_exported, found)) and load_state(folder).step < steps:
        logger.info("verifying the checksums of %s", folder)
        found = find_damage(folder)
    for name, reason in found.items():
        if not _is_exported(name):
            raise CheckpointError(f"{folder / name} {reason}")
    return [f"{folder / name} {reason}; not needed to resume" for name, reason in found.items()]


def _is_exported(name: str) -> bool:
    return name.startswith((f"{EXPORT}/", f"{MERGED}/"))


def accepted_changes(resumption: Resumption, config: Config, settings: dict[str, Any]) -> list[str]:
    """Return a note on the settings that differ from the checkpoint's; empty without any, or if nothing is trained.

    Raises ConfigError unless `trainer.allow_changed_config` is set, or `actor_rollout_ref.teacher.allow_teacher_change`
    for another teacher.
    """
    state = resumption.state
    # Older checkpoints have the student's path in `data`.
    changed = changed_settings(state.data | state.settings, settings, folder=state.working_dir)
    if not changed or config.trainer.val_only:
        return []
    text = f"{resumption.folder} was trained with other settings (was -> is):\n" + "\n".join(changed)
    all_teachers = run_teachers(config)
    teachers = [each for line in changed for each in all_teachers if line.startswith(f"{each.where}.model.path")]
    others = len(teachers) < len(changed) and not config.trainer.allow_changed_config
    keys = ["trainer.allow_changed_config"] if others else []
    refused = (each.where for each in teachers if not each.section.allow_teacher_change)
    keys += [f"{where}.allow_teacher_change" for where in dict.fromkeys(refused)]
    if not keys:
        return [text]
    raise ConfigError(
        " and ".join(keys),
        "\n".join([
            *resumption.remarks, text,
            f"true resumes from step {state.step} with the new settings, if steps are left; "
            "another trainer.experiment_name starts a new run",
        ]), show_value=False,
    )

"""Checkpoints: what a run needs to go on as if it had never stopped, and a folder that others can load.

    <run folder>/
      latest_checkpointed_iteration.txt     number of the newest complete checkpoint
      global_step_N/
        actor/            torch.distributed.checkpoint: weights, optimizer state; random states per rank
        huggingface/      config, safetensors, tokenizer
        trainer_state.json  step, optimizer steps, what the position in the data depends on

A checkpoint is written under a temporary name, synced to the disk and renamed when it is complete, so that
an interrupted write leaves the previous one untouched.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.models.tokenizer import first_line

if TYPE_CHECKING:
    from hybrid_gkd.config import Config
    from hybrid_gkd.student.actor import Actor

LATEST = "latest_checkpointed_iteration.txt"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where the run is."""

    step: int
    """Training steps done; the position in the data is a function of it."""
    data: dict[str, Any]
    """What the position in the data also depends on; a resume with other values would train other batches."""
    first_metrics: dict[str, float]
    """Metrics of the first step and of the validation before training, for the final report."""


class CheckpointStore:
    """The checkpoints of one run folder.

    Args:
        run_dir: the run folder.
        keep: how many to keep; None keeps all.
    """

    def __init__(self, run_dir: Path, *, keep: int | None):
        self.run_dir = run_dir
        self.keep = keep

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None. Raises CheckpointError if the pointer leads nowhere."""
        pointer = self.run_dir / LATEST
        if not pointer.is_file():
            return None
        folder = self.run_dir / f"global_step_{pointer.read_text().strip()}"
        replaced = _replaced(folder)
        if not folder.exists() and replaced.exists():  # a run was killed while it wrote this step anew
            os.rename(replaced, folder)
        if not (folder / "trainer_state.json").is_file():
            raise CheckpointError(f"{pointer} names {folder.name}, which is missing or incomplete")
        return folder

    @contextlib.contextmanager
    def writing(self, state: TrainerState) -> Iterator[Path]:
        """Yield a folder to write into; make it `global_step_<step>` when the block ends without an exception.

        Raises:
            CheckpointError: the disk is full or not writable; earlier checkpoints are as they were.
        """
        final = self.run_dir / f"global_step_{state.step}"
        folder = self.run_dir / f".{final.name}.writing"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            yield folder
            (folder / "trainer_state.json").write_text(json.dumps(asdict(state), indent=2))
            _sync(folder)
            shutil.rmtree(_replaced(final), ignore_errors=True)
            if final.exists():  # of a run that was resumed from an earlier step
                os.rename(final, _replaced(final))
            os.rename(folder, final)
            _write_atomically(self.run_dir / LATEST, f"{state.step}\n")
            shutil.rmtree(_replaced(final), ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoint {final}: {error}") from error
        self._prune(state.step)

    def _prune(self, newest: int) -> None:
        if self.keep is None:
            return
        suffixes = [path.name.removeprefix("global_step_") for path in self.run_dir.glob("global_step_*")]
        steps = sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())
        for step in [step for step in steps if step <= newest][: -self.keep]:
            shutil.rmtree(self.run_dir / f"global_step_{step}")


def _replaced(folder: Path) -> Path:
    """Where a checkpoint waits while a new one of the same step takes its place."""
    return folder.with_name(f".{folder.name}.replaced")


def load_state(folder: Path) -> TrainerState:
    """Read `trainer_state.json`. Raises CheckpointError."""
    file = folder / "trainer_state.json"
    try:
        return TrainerState(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"trainer.resume_mode, trainer.resume_from_path: {file} cannot be read: {error}"
        ) from error


def save_actor(actor: Actor, folder: Path, *, tokenizer_path: str, config: Config) -> None:
    """Write this rank's part of `actor/`, and on rank 0 `huggingface/`. Collective."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(actor.model, actor.optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state, "updates_done": actor.updates_done},
        checkpoint_id=folder / "actor",
    )
    torch.save(_random_states(), folder / "actor" / f"random_states_rank_{dist.get_rank()}.pt")
    if actor.config.checkpoint.save_hf_model:
        _save_huggingface(actor, folder / "huggingface", tokenizer_path=tokenizer_path, config=config)
    dist.barrier()


def load_actor(actor: Actor, folder: Path) -> None:
    """Restore what `save_actor` wrote, also onto another number of ranks. Collective. Raises CheckpointError."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(actor.model, actor.optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "updates_done": 0}
    try:
        dcp.load(state, checkpoint_id=folder / "actor")
    except dcp.api.CheckpointException as error:  # no Exception; holds what each rank raised
        causes = {first_line(cause) for cause, _ in error.failures.values()}
        raise CheckpointError(f"{folder / 'actor'} cannot be loaded: {'; '.join(sorted(causes))}") from None
    except Exception as error:
        raise CheckpointError(f"{folder / 'actor'} cannot be loaded: {first_line(error)}") from error
    set_state_dict(
        actor.model, actor.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    actor.updates_done = state["updates_done"]
    file = folder / "actor" / f"random_states_rank_{dist.get_rank()}.pt"
    if file.is_file():
        _restore_random_states(torch.load(file, weights_only=True))
    else:
        logger.warning("%s is missing (another number of workers?): random states start from the seed", file)


def _save_huggingface(actor: Actor, folder: Path, *, tokenizer_path: str, config: Config) -> None:
    import torch.distributed as dist

    from hybrid_gkd.models.tokenizer import load_tokenizer

    tied = set(getattr(actor.hf_model, "_tied_weights_keys", None) or ())
    if not getattr(actor.hf_model.config, "tie_word_embeddings", False):
        tied = set()
    weights = {}
    for name, tensor in actor.full_tensors(actor.hf_model.stored_dtype):
        if dist.get_rank() == 0 and name not in tied:
            weights[name] = tensor.cpu()
    if dist.get_rank() == 0:
        actor.hf_model.save_pretrained(folder, state_dict=weights)
        exported = copy.deepcopy(actor.hf_model.config)
        exported.dtype = actor.hf_model.stored_dtype  # save_pretrained names the type of the master weights
        exported.save_pretrained(folder)
        trust_remote_code = config.actor_rollout_ref.model.trust_remote_code
        load_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code).save_pretrained(folder)


def _random_states() -> dict[str, Any]:
    import numpy as np
    import torch

    _, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    import numpy as np
    import torch

    random.setstate(states["python"])
    keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


def _sync(folder: Path) -> None:
    """Flush every file and folder below `folder` to the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_atomically(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.writing")
    temporary.write_text(text)
    _sync(temporary)
    os.replace(temporary, file)

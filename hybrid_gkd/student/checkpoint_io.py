"""A sharded model's part of a checkpoint, and its export as a Hugging Face folder. All functions are collective."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.models.tokenizer import first_line, load_tokenizer
from hybrid_gkd.student.sharded_model import ShardedModel


def save_model(model: ShardedModel, folder: Path) -> None:
    """Write this rank's weights, optimizer state and number of updates."""
    dcp.save(_state_of(model), checkpoint_id=folder)


def load_model(model: ShardedModel, folder: Path) -> None:
    """Restore the state of `save_model`, also on another number of ranks. Raises CheckpointError."""
    state = _state_of(model)
    try:
        dcp.load(state, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:  # no Exception; holds the exception of each rank
        causes = {first_line(cause) for cause, _ in error.failures.values()}
        raise CheckpointError(f"{folder} cannot be loaded: {'; '.join(sorted(causes))}") from None
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be loaded: {first_line(error)}") from error
    set_state_dict(
        model.model, model.optimizer or (), model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    model.updates_done = state["updates_done"]


def _state_of(model: ShardedModel) -> dict[str, Any]:
    weights, optimizer = get_state_dict(model.model, model.optimizer or ())
    return {"model": weights, "optimizer": optimizer, "updates_done": model.updates_done}


def export_huggingface(model: ShardedModel, folder: Path, *, tokenizer_path: str, trust_remote_code: bool) -> None:
    """On rank 0, write a folder that transformers and vLLM load: weights in their stored type, config, tokenizer."""
    hf_model = model.hf_model
    ties = getattr(hf_model.config, "tie_word_embeddings", False)
    tied = (getattr(hf_model, "_tied_weights_keys", None) or ()) if ties else ()
    is_first, named = dist.get_rank() == 0, model.full_tensors(hf_model.stored_dtype)
    weights = {name: tensor.cpu() for name, tensor in named if is_first and name not in tied}
    if is_first:
        hf_model.save_pretrained(folder, state_dict=weights)
        exported = copy.deepcopy(hf_model.config)
        exported.dtype = hf_model.stored_dtype  # save_pretrained names the type of the master weights
        exported.save_pretrained(folder)
        load_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code).save_pretrained(folder)

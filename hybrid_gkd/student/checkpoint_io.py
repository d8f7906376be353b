"""A sharded model's part of a checkpoint, and its export as a Hugging Face folder."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.files import FileSum
from hybrid_gkd.models.adapters import adapter_weights
from hybrid_gkd.models.tokenizer import load_tokenizer
from hybrid_gkd.rollout.weights import unique_tensors
from hybrid_gkd.student.loading import local_rows
from hybrid_gkd.student.lora import export_adapter
from hybrid_gkd.student.shard_files import Part, ShardFiles, write_shard
from hybrid_gkd.student.sharded_model import ShardedModel

WEIGHTS = "weights"
"""Tensors are named `weights/<Hugging Face name>`, `exp_avg/<Hugging Face name>` and so on by the optimizer's names.
With LoRA they are the adapters, under peft's names: the weights below them are those of the model that is given."""


def save_model(model: ShardedModel, folder: Path) -> dict[str, FileSum]:
    """Write this rank's rows of weights and optimizer state, each row by one rank; the file's name and checksum.

    Collective. Raises CheckpointError on all ranks if one of them cannot write.
    """
    name = f"rank_{dist.get_rank()}_of_{dist.get_world_size()}.safetensors"
    parts = [part for name, tensor in _tensors(model).items() if (part := _part(name, tensor)) is not None]
    reason, written = None, None
    try:
        written = write_shard(folder / name, parts, updates_done=str(model.updates_done))
    except OSError as error:
        reason = f"cannot write {folder / name}: {error}"
    # The others must not wait for this rank in the next collective. On the host: on a GPU the first collective takes
    # half a GiB for NCCL, which a single worker otherwise never needs.
    failed = torch.tensor(float(written is None))
    dist.all_reduce(failed)
    if written is None or failed.item():
        raise CheckpointError(reason or f"cannot write {folder}: another worker has failed")
    return {name: written}


def load_model(model: ShardedModel, folder: Path) -> None:
    """Restore the state of `save_model`, also on another number of ranks. Raises CheckpointError."""
    files = ShardFiles(folder)
    for name, tensor in _weights(model).items():
        _fill(files, f"{WEIGHTS}/{name}", tensor)
    if model.optimizer is not None:
        _load_optimizer(model, model.optimizer, files)
    model.updates_done = int(files.facts["updates_done"])


def _load_optimizer(model: ShardedModel, optimizer: torch.optim.Optimizer, files: ShardFiles) -> None:
    """The optimizer's state, on new tensors, which the optimizer puts where it wants them."""
    names = {id(parameter): name for name, parameter in _weights(model).items()}
    kinds = sorted({name.partition("/")[0] for name in files.names()} - {WEIGHTS})
    optimizer.state.clear()  # before there are new ones: it is most of a model's memory
    state: dict[int, dict[str, Tensor]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        present = {kind: f"{kind}/{names[id(parameter)]}" for kind in kinds}
        present = {kind: name for kind, name in present.items() if name in files.names()}  # none before the first step
        if present:
            state[number] = {}
        for kind, name in present.items():
            tensor = torch.zeros(()) if files.shape(name) == () else torch.zeros_like(parameter)
            _fill(files, name, tensor)
            state[number][kind] = tensor
    # Rates and decay are those of this run's configuration.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _weights(model: ShardedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each once, under the first of its Hugging Face names; or the adapters."""
    if model.adapters is not None:
        return dict(adapter_weights(model.hf_model))
    found = unique_tensors(model.hf_model.state_dict(keep_vars=True).items())
    return {names[0]: tensor for names, tensor in found}


def _tensors(model: ShardedModel) -> dict[str, Tensor]:
    weights = _weights(model)
    tensors = {f"{WEIGHTS}/{name}": tensor for name, tensor in weights.items()}
    state = {} if model.optimizer is None else model.optimizer.state
    for name, weight in weights.items():
        tensors |= {f"{kind}/{name}": value for kind, value in state.get(weight, {}).items()}
    return tensors


def _part(name: str, tensor: Tensor) -> Part | None:
    """What this rank writes: its rows if it is the first of those that have them."""
    local, first_row = _rows(tensor)
    place = tensor.device_mesh.get_coordinate() if isinstance(tensor, DTensor) else [dist.get_rank(), 0]
    assert place is not None
    if not local.numel() or any(place[:-1]):  # the last dimension of the mesh shards, a first one replicates
        return None
    return Part(name, local.dtype, tuple(local.shape), tuple(tensor.shape), first_row, lambda: local)


def _fill(files: ShardFiles, name: str, tensor: Tensor) -> None:
    local, first_row = _rows(tensor)
    files.read(name, local, tuple(tensor.shape), first_row)


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's memory, and the row of the whole tensor at which it begins."""
    local, rows = local_rows(tensor)
    return local, (rows.start or 0) if isinstance(rows, slice) else 0


def export_huggingface(
    model: ShardedModel, folder: Path, *, tokenizer_path: str, trust_remote_code: bool, merge: bool = False
) -> None:
    """On rank 0, write a folder that transformers and vLLM load: weights in their stored type, config, tokenizer.

    With LoRA it is peft's folder of the adapters, or with `merge` the whole model. Collective.
    """
    if model.adapters is not None and not merge:
        export_adapter(model.hf_model, model.adapters.config, folder, bucket_bytes=model.bucket_bytes)
    else:
        _export_weights(model, folder)
    if dist.get_rank() == 0:
        load_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code).save_pretrained(folder)


def _export_weights(model: ShardedModel, folder: Path) -> None:
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

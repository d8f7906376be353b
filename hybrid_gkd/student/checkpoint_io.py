"""Saving and loading of a sharded model in a checkpoint, and export as a Hugging Face folder."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.models.adapters import adapter_weights, base_weights
from hybrid_gkd.models.tokenizer import load_tokenizer
from hybrid_gkd.rollout.weights import unique_tensors
from hybrid_gkd.runtime.files import FileSum, share_as_folder
from hybrid_gkd.student.lora import gather_adapter, write_adapter
from hybrid_gkd.student.pretrained import local_rows
from hybrid_gkd.student.shard_files import Part, ShardFiles, write_shard
from hybrid_gkd.student.sharded_model import ShardedModel

WEIGHTS, AVERAGE = "weights", "ema"
"""Prefixes of weights and of their moving average. Tensors are named `weights/<Hugging Face name>`,
`exp_avg/<Hugging Face name>` and so on for the optimizer state. With LoRA, they are the adapters under peft's names;
base weights are not saved."""


def snapshot_model(
    model: ShardedModel, to_host: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Callable[[Path], dict[str, FileSum]]:
    """Take this rank's rows of weights and optimizer state; each row belongs to one rank. `to_host` may copy them.

    Returns a function that writes them to a folder and returns the file's name and checksum. That function is not
    collective and raises CheckpointError.
    """
    name = f"rank_{dist.get_rank()}_of_{dist.get_world_size()}.safetensors"
    parts = [part for key, tensor in _tensors(model).items() if (part := _part(key, tensor, to_host)) is not None]
    facts = {"updates_done": str(model.updates_done)}

    def write(folder: Path) -> dict[str, FileSum]:
        try:
            return {name: write_shard(folder / name, parts, **facts)}
        except OSError as error:
            raise CheckpointError(f"cannot write {folder / name}: {error}") from error

    return write


def snapshot_bytes(model: ShardedModel) -> int:
    """Return the bytes of a snapshot of `snapshot_model`, including two optimizer moments per weight."""

    def of(tensors: dict[str, Tensor]) -> int:
        parts = [_part(name, tensor, lambda local: local) for name, tensor in tensors.items()]
        return sum(part.values().nbytes for part in parts if part is not None)

    return 3 * of(_weights(model)) + of(_averages(model))


def export_bytes(model: ShardedModel, *, merge: bool = False) -> int:
    """Return the bytes of the weights that `gather_huggingface` gathers on rank 0."""
    if model.adapters is not None and not merge:
        return sum(weight.numel() * weight.itemsize for weight in adapter_weights(model.hf_model).values())
    weights = base_weights(model.hf_model.named_parameters())
    return int(model.hf_model.stored_dtype.itemsize * sum(weight.numel() for _, weight in weights))


def save_model(model: ShardedModel, folder: Path) -> dict[str, FileSum]:
    """Write this rank's rows of weights and optimizer state; return the file's name and checksum. Collective.

    Each row is written by one rank. Raises CheckpointError on all ranks if one of them cannot write.
    """
    reason, written = None, None
    try:
        written = snapshot_model(model)(folder)
    except CheckpointError as error:
        reason = str(error)
    # The other ranks must not wait for a failed one in the next collective. On the host, because the first collective
    # on a GPU makes NCCL allocate half a GiB, which a single worker otherwise never needs.
    failed = torch.tensor(float(written is None))
    dist.all_reduce(failed)
    if written is None or failed.item():
        raise CheckpointError(reason or f"cannot write {folder}: another worker failed")
    return written


def load_model(model: ShardedModel, folder: Path) -> None:
    """Restore the state saved by `save_model`, on any number of ranks. Raises CheckpointError."""
    files = ShardFiles(folder)
    for name, tensor in _weights(model).items():
        _fill(files, f"{WEIGHTS}/{name}", tensor)
    if model.optimizer is not None:
        _load_optimizer(model, model.optimizer, files)
    for name, tensor in _averages(model).items():
        _fill(files, name, tensor)
    model.updates_done = int(files.facts["updates_done"])


def _load_optimizer(model: ShardedModel, optimizer: torch.optim.Optimizer, files: ShardFiles) -> None:
    """Load the optimizer state into new tensors."""
    names = {id(parameter): name for name, parameter in _weights(model).items()}
    kinds = sorted({name.partition("/")[0] for name in files.names()} - {WEIGHTS, AVERAGE})
    optimizer.state.clear()  # first, because the state is most of a model's memory
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
    # Learning rate and weight decay follow this run's configuration.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _weights(model: ShardedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, each once under its first Hugging Face name; or the adapters."""
    # state_dict also reshards weights that a failed pass left gathered.
    state = model.hf_model.state_dict(keep_vars=True)
    if model.adapters is not None:
        return dict(adapter_weights(model.hf_model))
    return {names[0]: tensor for names, tensor in unique_tensors(state.items())}


def _tensors(model: ShardedModel) -> dict[str, Tensor]:
    weights = _weights(model)
    tensors = {f"{WEIGHTS}/{name}": tensor for name, tensor in weights.items()}
    state = {} if model.optimizer is None else model.optimizer.state
    for name, weight in weights.items():
        tensors |= {f"{kind}/{name}": value for kind, value in state.get(weight, {}).items()}
    return tensors | _averages(model)


def _averages(model: ShardedModel) -> dict[str, Tensor]:
    """Return the moving average of the trained parameters; empty without one."""
    if (average := model.average) is None:
        return {}
    trained = {name: weight for name, weight in _weights(model).items() if weight.requires_grad}
    return {f"{AVERAGE}/{name}": average.of(weight) for name, weight in trained.items()}


def _part(name: str, tensor: Tensor, to_host: Callable[[Tensor], Tensor]) -> Part | None:
    """Return this rank's rows if it is the first rank that holds them; otherwise None."""
    local, first_row = _rows(tensor)
    place = tensor.device_mesh.get_coordinate() if isinstance(tensor, DTensor) else [dist.get_rank(), 0]
    assert place is not None
    if not local.numel() or any(place[:-1]):  # the last mesh dimension shards, a first one replicates
        return None
    values = to_host(local.detach())
    return Part(name, local.dtype, tuple(local.shape), tuple(tensor.shape), first_row, lambda: values)


def _fill(files: ShardFiles, name: str, tensor: Tensor) -> None:
    local, first_row = _rows(tensor)
    files.read(name, local, tuple(tensor.shape), first_row)


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's local tensor and its first row in the whole tensor."""
    local, rows = local_rows(tensor)
    return local, (rows.start or 0) if isinstance(rows, slice) else 0


def export_huggingface(model: ShardedModel, folder: Path, **options: Any) -> None:
    """Gather with `gather_huggingface` and its options, and write the folder. Collective."""
    gather_huggingface(model, **options)(folder)


def gather_huggingface(
    model: ShardedModel, *, tokenizer_path: str, trust_remote_code: bool, merge: bool = False,
    to_host: Callable[[Tensor], Tensor] = Tensor.cpu,
) -> Callable[[Path], None]:
    """Gather the weights in their stored type to the host of rank 0. Collective.

    Returns a function that writes, on rank 0 only, a folder for transformers and vLLM: weights, config, tokenizer. With
    LoRA it is a peft adapter folder, or with `merge` the whole model.
    """
    is_first, hf_model = dist.get_rank() == 0, model.hf_model
    write: Callable[[dict[str, Tensor], Path], None]
    if model.adapters is not None and not merge:
        write, left_out = functools.partial(write_adapter, model.adapters.config), set[str]()
        gathered = gather_adapter(hf_model, bucket_bytes=model.bucket_bytes)
    else:
        write, left_out = functools.partial(_write_weights, hf_model), set(hf_model.all_tied_weights_keys)
        gathered = model.full_tensors(hf_model.stored_dtype)
    weights = {name: to_host(tensor) for name, tensor in gathered if is_first and name not in left_out}

    def export(folder: Path) -> None:
        if is_first:
            tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code)
            write(weights, folder)
            tokenizer.save_pretrained(folder)
            has_config = (folder / GENERATION_CONFIG_NAME).is_file()  # adapters have none
            if has_config and tokenizer.eos_token_id is not None:
                _add_end_token(tokenizer.eos_token_id, folder)
            share_as_folder(folder)

    return export


def _add_end_token(token: int, folder: Path) -> None:
    """Add the tokenizer's end token to generation_config.json; vLLM reads the tokenizer, transformers does not."""
    fields = GenerationConfig.from_pretrained(folder).to_dict()
    ends = fields["eos_token_id"] if isinstance(fields["eos_token_id"], list) else [fields["eos_token_id"]]
    if token not in ends:
        fields["eos_token_id"] = [end for end in ends if end is not None] + [token]
        # Without the private field that makes transformers read the tokens from config.json.
        GenerationConfig(**{name: value for name, value in fields.items() if name[0] != "_"}).save_pretrained(folder)


def _write_weights(hf_model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    hf_model.save_pretrained(folder, state_dict=weights)
    exported = copy.deepcopy(hf_model.config)
    exported.dtype = hf_model.stored_dtype  # save_pretrained writes the type of the master weights
    exported.save_pretrained(folder)

"""Sharded loading of models: no process ever holds the whole weights.

    model = build_model(path, ...)          # parameters on the meta device, buffers real
    fully_shard(...)                        # shards on the meta device
    materialize(root, device)               # empty shards on the device
    load_shards(model, path)                # each rank reads its own rows from the safetensors files

A rank holds its shards and, while it reads, the rows of one of them. Only a checkpoint that transformers must rename or
convert, or that is not in safetensors, is loaded whole on rank 0's host and broadcast tensor by tensor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hybrid_gkd.compat.transformers import unneeded_keys
from hybrid_gkd.errors import ConfigError, ModelError, describe_error
from hybrid_gkd.models.adapters import base_weights
from hybrid_gkd.models.fast_layers import use_torch_norms
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION
from hybrid_gkd.models.spec import auto_class, read_config
from hybrid_gkd.rollout.weights import unique_tensors
from hybrid_gkd.runtime.imports import model_code

PATH_KEY = "actor_rollout_ref.model.path"
logger = logging.getLogger(__name__)
Weight = tuple[tuple[str, ...], Tensor]
"""All names (several if weights are tied) of a parameter or persistent buffer, and the tensor."""


def build_model(
    path: str, *, dtype: torch.dtype, trust_remote_code: bool, override_config: dict[str, Any], key: str = PATH_KEY,
    classifier: bool = False,
) -> Any:
    """Build the causal LM (or classifier) of `path` with packed attention: parameters on the meta device, buffers real.

    Its attribute `stored_dtype` is the type of the weights in the folder, which an export keeps. `key` is the
    configuration key of the path, for messages.

    Raises ModelError: there is no such model or its weights are quantised; ConfigError as `read_config` does.
    """
    from accelerate import init_empty_weights
    from transformers import GenerationConfig

    try:
        hf_config = read_config(path, trust_remote_code, override_config)
        if getattr(hf_config, "quantization_config", None) is not None:
            rule = "has quantised weights, which cannot be trained; use the model before quantisation"
            raise ModelError(f"{key}: {path!r} {rule}")
        stored = getattr(hf_config, "dtype", None) or torch.float32  # a string if another library read config.json
        with init_empty_weights(include_buffers=False), model_code(path, trust_remote_code):
            model = auto_class(hf_config, classifier).from_config(
                hf_config, dtype=dtype, attn_implementation=PACKED_ATTENTION, trust_remote_code=trust_remote_code
            )
    except (ConfigError, ModelError):
        raise
    except Exception as error:  # whatever a model with missing fields or inconsistent sizes raises
        raise ModelError(f"{key}: cannot load {path!r}: {describe_error(error)}") from error
    model.stored_dtype = getattr(torch, stored) if isinstance(stored, str) else stored
    model.tie_weights()  # init_empty_weights splits tied parameters
    use_torch_norms(model)
    if classifier:
        return model
    with contextlib.suppress(OSError):  # optional file; by default derived from config.json
        model.generation_config = _saveable(GenerationConfig.from_pretrained(path), model.generation_config, path)
    return model


def classifier_head(model: Any) -> nn.Linear:
    """Return the linear map from the last hidden state to a classifier's logit. Raises ModelError: there is none."""
    for name in ("score", "classifier"):
        if isinstance(head := getattr(model, name, None), nn.Linear) and head.out_features == 1:
            return head
    raise ModelError(f"{type(model).__name__}: must have a linear head with one output, score or classifier")


def _saveable(found: Any, derived: Any, path: str) -> Any:
    """Return a folder's generation config if transformers can save it, otherwise `derived`.

    Invalid ones, which transformers loads but does not save, mostly set a temperature without `do_sample`; that field
    is added.
    """
    for sampling in (found.do_sample, True):
        found.do_sample = sampling
        try:
            found.validate(strict=True)
            return found
        except ValueError as error:
            reason = describe_error(error)
    logger.warning("%s: generation_config.json is invalid and not exported: %s", path, reason)
    return derived


def materialize(root: nn.Module, device: torch.device) -> None:
    """Allocate the parameter shards of the root FSDP module on `device`, uninitialized; buffers keep their values.

    Parameters keep their identity, which FSDP2 and tied modules rely on; `to_empty` ensures that for DTensors only.
    """
    buffers = [
        (module, name, buffer) for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    moved = {id(buffer): buffer.to(device) for _, _, buffer in buffers}
    root.to_empty(device=device)
    for module, name, buffer in buffers:
        setattr(module, name, moved[id(buffer)])


def load_shards(model: Any, path: str, *, key: str = PATH_KEY, new: Container[str] = ()) -> None:
    """Load the parameters and persistent buffers of a materialised model, each rank its own rows. Collective.

    The model is a result of `build_model`, not the root FSDP module; `path` and `key` are the same as there. Adapters
    are not changed. Weights named in `new` are zeroed, even if the folder has them. Raises ModelError: a file cannot be
    read, or a weight is missing, unexpected or of another shape.
    """
    weights = []
    for names, tensor in unique_tensors(base_weights(model.state_dict(keep_vars=True).items())):
        if names[0] in new:
            local_rows(tensor)[0].zero_()
        else:
            weights.append((names, tensor))
    try:
        checkpoint = {name: each for name, each in _open_checkpoint(path).items() if name not in new}
        reason = _mismatch(model, weights, checkpoint)
        if reason is None:
            for names, tensor in weights:
                _fill(names, tensor, [checkpoint[name] for name in names if name in checkpoint], key)
            return
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{key}: cannot read the weights of {path!r}: {error}") from error
    _load_through_host(model, weights, path, reason, key)


@torch.no_grad()
def _fill(names: tuple[str, ...], tensor: Tensor, sources: list[Any], key: str) -> None:
    """Copy this rank's rows from the first of `sources`, sliceable like tensors; the others must be equal."""
    local, rows = local_rows(tensor)
    if not local.numel():
        return
    first, *others = (source[rows] for source in sources)
    if not all(torch.equal(first, other) for other in others):
        raise ModelError(
            f"{key}: the configuration ties {' and '.join(names)}, but their weights differ; "
            f"set {key.rpartition('.')[0]}.override_config.tie_word_embeddings=false to keep both"
        )
    local.copy_(first)


def local_rows(tensor: Tensor) -> tuple[Tensor, Any]:
    """Return this rank's local tensor, sharing memory with FSDP2, and its rows of the whole tensor (torch.chunk)."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, slice(None) if tensor.ndim else ...
    *_, placement = tensor.placements  # only the last mesh dimension shards; a first one replicates
    assert placement == Shard(0), tensor.placements
    local, rows, mesh_dim = tensor.to_local(), tensor.shape[0], tensor.device_mesh.ndim - 1
    chunk = math.ceil(rows / tensor.device_mesh.size(mesh_dim))
    start = min(tensor.device_mesh.get_local_rank(mesh_dim) * chunk, rows)
    stop = min(start + chunk, rows)
    assert stop - start == local.shape[0], (start, stop, tensor.placements)
    return local, slice(start, stop)


def check_head(model: Any, path: str) -> None:
    """Check that a local folder has the head of a classifier. Raises ModelError: it is missing. Downloads nothing."""
    if not os.path.isdir(path):
        return
    try:
        there = set(_open_checkpoint(path))
        own = set(map(id, classifier_head(model).parameters()))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights: {error}") from error
    missing = [name for name, parameter in model.named_parameters() if id(parameter) in own and name not in there]
    if there and missing:
        files = ", ".join(map(str, _safetensors_files(path)))
        raise ModelError(f"the classification head is missing: there is no {missing[0]} in {files}")


def _safetensors_files(path: str) -> list[Any]:
    """Return the safetensors files of a folder or a hub id; may download them."""
    from transformers.utils import cached_file

    try:
        return [cached_file(path, "model.safetensors")]
    except OSError:
        try:
            index = cached_file(path, "model.safetensors.index.json")
        except OSError:
            return []
        with open(index, encoding="utf-8") as file:
            return [cached_file(path, name) for name in sorted(set(json.load(file)["weight_map"].values()))]


def _open_checkpoint(path: str) -> dict[str, Any]:
    """Return lazily read tensors by name, over all safetensors files."""
    checkpoint: dict[str, Any] = {}
    for file in _safetensors_files(path):
        opened = safe_open(file, framework="pt", device="cpu")
        checkpoint |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, not a mapping
    return checkpoint


def _mismatch(model: Any, weights: list[Weight], checkpoint: dict[str, Any]) -> str | None:
    """Return why the checkpoint cannot be read by name; None if it can."""
    if not checkpoint:
        return "it has no safetensors files"
    unused = set(checkpoint)
    for names, tensor in weights:
        present = [name for name in names if name in checkpoint]
        if not present:
            return f"{names[0]} is not in it"
        for name in present:
            if tuple(checkpoint[name].get_shape()) != tuple(tensor.shape):
                return f"{name} has shape {checkpoint[name].get_shape()} instead of {list(tensor.shape)}"
        unused.difference_update(present)
    # As in transformers, ignore weights that the architecture declares unneeded and buffers saved by old versions.
    patterns = [*unneeded_keys(model), r"rotary_emb\.inv_freq$"]
    unused = {name for name in unused if not any(re.search(pattern, name) for pattern in patterns)}
    return f"the model has no {min(unused)}" if unused else None


def _load_through_host(model: Any, weights: list[Weight], path: str, reason: str, key: str) -> None:
    """Load, rename and convert the whole model with transformers on rank 0's host; broadcast each tensor."""
    state: dict[str, Tensor] = {}
    device = local_rows(weights[0][1])[0].device
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        logger.warning(
            "%s cannot be read in shards (%s): loading the whole model into this host's memory with transformers",
            path, reason,
        )
        try:
            state = _load_whole(model, path, weights)
        except Exception as error:  # transformers raises various errors; the other ranks wait for the outcome
            outcome[0] = str(error)
    dist.broadcast_object_list(outcome, src=0, device=device)
    if outcome[0] is not None:
        raise ModelError(f"{key}: cannot load the weights of {path!r}: {outcome[0]}")
    for names, tensor in weights:
        if dist.get_rank() == 0:
            whole = state.pop(names[0]).to(device, tensor.dtype).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(whole, src=0)
        _fill(names, tensor, [whole], key)


def _load_whole(model: Any, path: str, weights: list[Weight]) -> dict[str, Tensor]:
    """Load the whole model; return tensors by name, one name per weight. Raises ModelError."""
    loaded, info = type(model).from_pretrained(
        path, config=model.config, dtype=model.dtype, attn_implementation=PACKED_ATTENTION,
        output_loading_info=True, ignore_mismatched_sizes=True,  # reported in the error below
    )
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ModelError(f"{kind} weights: {', '.join(names[:8])}{more}")
    state = loaded.state_dict()
    for (first, *others), _ in weights:
        for name in others:
            if not torch.equal(state[first], state.pop(name)):
                raise ModelError(f"the configuration ties {first} and {name}, but their weights differ")
    return state

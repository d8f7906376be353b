"""A student whose weights are never whole in one place: built without memory, sharded, then read row by row.

    model = build_model(path, ...)          # parameters on the meta device, buffers real
    fully_shard(...)                        # shards on the meta device
    materialize(root, device)               # empty shards on the device
    load_shards(model, path)                # each rank reads its own rows from the safetensors files

A rank holds its shards and, while it reads, the rows of one of them. Only a checkpoint that transformers has to
rename or convert (and one that is not in safetensors) is loaded whole, on rank 0's host, and handed out tensor
by tensor.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hybrid_gkd.errors import ModelError
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION
from hybrid_gkd.models.spec import read_config
from hybrid_gkd.models.tokenizer import first_line
from hybrid_gkd.rollout.weights import unique_tensors

PATH_KEY = "actor_rollout_ref.model.path"
logger = logging.getLogger(__name__)


def build_model(
    path: str, *, dtype: torch.dtype, trust_remote_code: bool, override_config: dict[str, Any]
) -> Any:
    """The causal LM that `path` describes, with packed attention; parameters on the meta device, buffers real.

    Its attribute `stored_dtype` is the type of the weights in the folder, which an export keeps.

    Raises:
        ModelError: there is no such model, or its weights are quantised.
        ConfigError: `override_config` names a field that the model's configuration does not have, or gives one a value
            that it does not take.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        hf_config = read_config(path, trust_remote_code, override_config)
        if getattr(hf_config, "quantization_config", None) is not None:
            raise ModelError(f"{PATH_KEY}: {path!r} holds quantised weights, which cannot be trained")
        stored = getattr(hf_config, "dtype", None) or torch.float32  # text where another library read config.json
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation=PACKED_ATTENTION, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise ModelError(f"{PATH_KEY}: cannot load {path!r}: {error}") from error
    model.stored_dtype = getattr(torch, stored) if isinstance(stored, str) else stored
    model.tie_weights()  # init_empty_weights makes two parameters of a tied one
    fuse_norms(model)
    with contextlib.suppress(OSError):  # not every folder has one; then it follows from config.json
        model.generation_config = _saveable(GenerationConfig.from_pretrained(path), model.generation_config, path)
    return model


def _saveable(found: Any, derived: Any, path: str) -> Any:
    """A folder's generation_config.json, which transformers loads also where it would refuse to save it.

    Most such files have a temperature and no `do_sample`, and mean that one should sample. Where that does not help,
    an export has the one derived from config.json.
    """
    for sampling in (found.do_sample, True):
        found.do_sample = sampling
        try:
            found.validate(strict=True)
            return found
        except ValueError as error:
            reason = first_line(error)
    logger.warning("%s: generation_config.json is left out of exports: %s", path, reason)
    return derived


def fuse_norms(model: nn.Module) -> None:
    """Put torch's RMSNorm, one kernel on a GPU, in the place of the architecture's own, which takes eight.

    It computes in float32 and rounds once, at the end. Parameters keep their names. Norms of the name that compute
    something else, which is tried out, stay as they are.
    """
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if type(module).__name__.endswith("RMSNorm") and isinstance(eps, float) and _is_rms_norm(module, eps):
            norm = nn.RMSNorm(module.weight.shape, eps, device="meta")
            norm.weight = module.weight
            model.set_submodule(name, norm)


@torch.no_grad()
def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Whether the output of a module is x / sqrt(mean(x^2) + eps) * weight."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or len(inspect.signature(module.forward).parameters) != 1:
        return False
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    weight = trial.get_parameter("weight")
    weight.copy_(torch.linspace(0.5, 1.5, weight.numel()).reshape(weight.shape))
    x = torch.linspace(-1, 1, 3 * weight.numel()).reshape(3, *weight.shape) * math.sqrt(eps)  # so that eps counts
    return torch.allclose(trial(x), nn.functional.rms_norm(x, weight.shape, weight, eps), rtol=1e-5)


def materialize(root: nn.Module, device: torch.device) -> None:
    """Give the parameter shards of the root FSDP module undefined memory on `device`; buffers keep their values.

    The parameters stay the objects that FSDP2 and tied modules know, which `to_empty` does for DTensors only.
    """
    buffers = [
        (module, name, buffer)
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    moved = {id(buffer): buffer.to(device) for _, _, buffer in buffers}
    root.to_empty(device=device)
    for module, name, buffer in buffers:
        setattr(module, name, moved[id(buffer)])


def load_shards(model: Any, path: str) -> None:
    """Fill the parameters and persistent buffers of a materialised model. Collective.

    Args:
        model: of `build_model`, with the parameters that `fully_shard` and `materialize` left: each rank fills
            its own rows. It must not be the root FSDP module itself.
        path: the same as for `build_model`.

    Raises:
        ModelError: a file cannot be read, or a weight is missing, unexpected or of another shape.
    """
    weights = _weights(model)
    with contextlib.ExitStack() as stack:
        try:
            checkpoint = _open_checkpoint(path, stack)
            reason = "it has no safetensors files" if checkpoint is None else _mismatch(model, weights, checkpoint)
            if reason is None and checkpoint is not None:
                for weight in weights:
                    weight.fill([checkpoint[name] for name in weight.names if name in checkpoint])
                return
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"{PATH_KEY}: cannot read the weights of {path!r}: {error}") from error
    _load_through_host(model, weights, path, str(reason))


@dataclass(frozen=True)
class _Weight:
    """A parameter or persistent buffer, under all of its names (more than one where weights are tied)."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def local(self) -> Tensor:
        """This rank's rows; memory that FSDP2 reads too."""
        tensor = self.tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def fill(self, sources: list[Any]) -> None:
        """Copy this rank's rows from the first of `sources` (sliced like a tensor); the others must be equal."""
        local = self.local
        if not local.numel():
            return
        start, stop = local_rows(self.tensor)
        local.copy_(_rows(sources[0], local.ndim, start, stop))
        for source in sources[1:]:
            if not torch.equal(_rows(sources[0], local.ndim, start, stop), _rows(source, local.ndim, start, stop)):
                raise ModelError(
                    f"{PATH_KEY}: the configuration ties {' and '.join(self.names)}, but their weights differ; "
                    "actor_rollout_ref.model.override_config.tie_word_embeddings=false would keep both"
                )


def _rows(source: Any, ndim: int, start: int, stop: int) -> Tensor:
    return source[start:stop] if ndim else source[...]


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """The rows of the whole tensor that this rank holds: FSDP2 cuts the first dimension as torch.chunk does."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.ndim else 1
    *_, placement = tensor.placements  # only the last mesh dimension shards; a first one replicates
    assert placement == Shard(0), tensor.placements
    rows, mesh_dim = tensor.shape[0], tensor.device_mesh.ndim - 1
    chunk = math.ceil(rows / tensor.device_mesh.size(mesh_dim))
    start = min(tensor.device_mesh.get_local_rank(mesh_dim) * chunk, rows)
    stop = min(start + chunk, rows)
    assert stop - start == tensor.to_local().shape[0], (start, stop, tensor.placements)
    return start, stop


def _weights(model: nn.Module) -> list[_Weight]:
    """The tensors of a checkpoint of the model, each once."""
    return [_Weight(names, tensor) for names, tensor in unique_tensors(model.state_dict(keep_vars=True).items())]


def _open_checkpoint(path: str, stack: contextlib.ExitStack) -> dict[str, Any] | None:
    """Name -> lazily read tensor, over all safetensors files; None if there are none.

    `path` is a folder or a hub id; files that are not in the hub's cache are downloaded.
    """
    from transformers.utils import cached_file

    try:
        files = [cached_file(path, "model.safetensors")]
    except OSError:
        try:
            index = cached_file(path, "model.safetensors.index.json")
        except OSError:
            return None
        with open(index, encoding="utf-8") as file:
            files = [cached_file(path, name) for name in sorted(set(json.load(file)["weight_map"].values()))]
    checkpoint: dict[str, Any] = {}
    for file in files:
        opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        checkpoint |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, not a mapping
    return checkpoint


def _mismatch(model: Any, weights: Iterable[_Weight], checkpoint: dict[str, Any]) -> str | None:
    """Why the checkpoint cannot be read by name, or None."""
    unused = set(checkpoint)
    for weight in weights:
        present = [name for name in weight.names if name in checkpoint]
        if not present:
            return f"{weight.names[0]} is not in it"
        for name in present:
            if tuple(checkpoint[name].get_shape()) != tuple(weight.tensor.shape):
                return f"{name} has shape {checkpoint[name].get_shape()} instead of {list(weight.tensor.shape)}"
        unused.difference_update(present)
    # As transformers does: weights that the architecture declares unneeded, and buffers that old versions saved.
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    unused = {name for name in unused if not any(re.search(pattern, name) for pattern in patterns)}
    return f"the model has no {min(unused)}" if unused else None


def _load_through_host(model: Any, weights: list[_Weight], path: str, reason: str) -> None:
    """Let transformers load, rename and convert the whole model on rank 0's host; broadcast each tensor."""
    state: dict[str, Tensor] = {}
    device = weights[0].local.device
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        logger.warning(
            "%s cannot be read shard by shard (%s): transformers loads it, which holds the whole model in this "
            "host's memory",
            path, reason,
        )
        try:
            state = _load_whole(model, path, weights)
        except Exception as error:  # whatever a broken folder makes transformers raise; the other ranks wait to be told
            outcome[0] = str(error)
    dist.broadcast_object_list(outcome, src=0, device=device)
    if outcome[0] is not None:
        raise ModelError(f"{PATH_KEY}: cannot load the weights of {path!r}: {outcome[0]}")
    for weight in weights:
        local = weight.local
        if dist.get_rank() == 0:
            whole = state.pop(weight.names[0]).to(device, local.dtype).contiguous()
        else:
            whole = torch.empty(weight.tensor.shape, dtype=local.dtype, device=device)
        dist.broadcast(whole, src=0)
        weight.fill([whole])


def _load_whole(model: Any, path: str, weights: Iterable[_Weight]) -> dict[str, Tensor]:
    """Name -> tensor, one name per weight. Raises ModelError."""
    loaded, info = type(model).from_pretrained(
        path, config=model.config, dtype=model.dtype, attn_implementation=PACKED_ATTENTION,
        output_loading_info=True, ignore_mismatched_sizes=True,  # to be told which, in the error below
    )
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info[f"{kind}_keys"]))
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ModelError(f"{kind} weights: {', '.join(names[:8])}{more}")
    state = loaded.state_dict()
    for weight in weights:
        for name in weight.names[1:]:
            if not torch.equal(state[weight.names[0]], state.pop(name)):
                raise ModelError(f"the configuration ties {weight.names[0]} and {name}, but their weights differ")
    return state

"""LoRA adapters of a sharded student: initialization, merging, and export as a peft folder."""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybrid_gkd.models.adapters import (
    ADAPTER,
    SAVED_PREFIX,
    WEIGHTS_FILE,
    adapted_layers,
    adapter_weights,
    open_adapter,
)
from hybrid_gkd.rollout.weights import gather_in_buckets
from hybrid_gkd.student.pretrained import local_rows


@torch.no_grad()
def initialize_adapters(hf_model: Any, *, seed: int, folder: str | None) -> None:
    """Initialize the adapters of a materialised model, each rank its own rows, independent of the number of ranks.

    They are loaded from a peft `folder`. Without one they are initialized as in peft: A uniform within 1 / sqrt(in), B
    zero, so that the model is unchanged. Raises ModelError: the folder has other adapters.
    """
    weights = adapter_weights(hf_model)
    saved = open_adapter(folder, weights) if folder is not None else None
    for name, weight in weights.items():
        local, rows = local_rows(weight)
        if not local.numel():
            continue
        if saved is not None:
            local.copy_(saved[name][rows])
        elif ".lora_A." in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
            values = torch.rand(weight.shape, generator=generator) * 2 - 1
            local.copy_(values[rows] / math.sqrt(weight.shape[1]))
        else:
            local.zero_()


class Adapters:
    """Layers of a sharded model with adapters, by the Hugging Face name of their weight."""

    def __init__(self, hf_model: Any, config: Any):
        self.config = config
        """peft's configuration."""
        self._layers = {f"{name}.weight": layer for name, layer in adapted_layers(hf_model).items()}

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the shard of a weight with its adapter merged, W + scale * B @ A; unchanged without one. Collective.

        A rank has the same rows of W [out, in] and B [out, r], so only the small A [r, in] is gathered.
        """
        weight = weight.detach()
        layer = self._layers.get(name)
        if layer is None:
            return weight
        assert isinstance(weight, DTensor)
        down, up = layer.lora_A[ADAPTER].weight.full_tensor(), layer.lora_B[ADAPTER].weight
        assert up.placements == weight.placements, (up.placements, weight.placements)
        product = up.to_local().float() @ down.float()
        local = weight.to_local() + layer.scaling[ADAPTER] * product
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters within the context.

        peft's own switch would change which parameters require gradients, which must be fixed under FSDP2.
        """
        for layer in self._layers.values():
            layer.scale_layer(0.0)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.unscale_layer()


def gather_adapter(hf_model: Any, *, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole adapters under peft's file names. Collective."""
    weights = adapter_weights(hf_model)
    dtype = next(iter(weights.values())).dtype
    for name, tensor in gather_in_buckets(weights.items(), dtype=dtype, bucket_bytes=bucket_bytes):
        yield f"{SAVED_PREFIX}{name}", tensor


def write_adapter(config: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter folder for peft, transformers and vLLM; `config`: peft's configuration."""
    exported = copy.deepcopy(config)
    exported.inference_mode = True
    base = exported.base_model_name_or_path
    exported.base_model_name_or_path = str(Path(base).absolute()) if Path(base).exists() else base
    exported.save_pretrained(str(folder))
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / WEIGHTS_FILE, metadata={"format": "pt"})

"""The critic: a sharded model with a value head. Depends on neither Ray nor vLLM.

Shapes: R trained tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_gkd.config import Config
from hybrid_gkd.losses.value import clipped_value_loss
from hybrid_gkd.models.packed_attention import PackedBatch
from hybrid_gkd.student.logprob_model import (
    by_sample,
    check_supported,
    count_tokens,
    hidden_states,
    join_signals,
    pack_samples,
)
from hybrid_gkd.student.pretrained import PATH_KEY
from hybrid_gkd.student.trained_model import TrainedModel
from hybrid_gkd.types import Sample, SampleId

READ_SIGNALS = ("values", "returns", "weights", "weights/value", "sampled_weights")
"""Signals that the loss reads."""


class ValueModel(nn.Module):
    """A causal LM whose output embedding is replaced by a linear map to one value.

    Raises ModelError: the architecture mixes packed sequences or has dropout.
    """

    def __init__(self, model: Any):
        super().__init__()
        check_supported(model)
        hidden_size = model.get_output_embeddings().in_features
        model.set_output_embeddings(nn.Linear(hidden_size, 1, device="meta", dtype=torch.float32))
        self.model: Any = model

    def forward(self, batch: PackedBatch, rows: Tensor) -> Tensor:
        """Return the values at the packed positions `rows` [R], float32 [R]: before the token that each predicts."""
        head = self.model.get_output_embeddings()
        values: Tensor = head(hidden_states(self.model, batch, rows).float()).sum(1)  # FSDP2 warns about views
        return values


class Critic(TrainedModel):
    """One rank of the critic. Raises ModelError: it cannot be loaded or its architecture is not supported."""

    prefix, loss_name, section = "critic", "critic/vf_loss", "critic"

    def __init__(self, config: Config, *, device: torch.device, num_updates: int):
        section = config.critic
        self.cliprange = section.cliprange_value
        super().__init__(
            config.critic_model, wrap=ValueModel, fsdp=section.fsdp_config, shard_size=config.critic_shard_size,
            device=device, optim=section.optim, num_updates=num_updates, grad_clip=section.grad_clip,
            seed=config.trainer.seed, new_head=True,
            path_key=PATH_KEY if section.model.path is None else "critic.model.path",
        )

    def _loss(self, micro_batch: tuple[Sample, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        batch, rows, _ = pack_samples(micro_batch, self.device)
        values = self.model(batch, rows)
        signals = join_signals(micro_batch, READ_SIGNALS, self.device)
        if "returns" not in signals:
            return values.sum() * 0, {}
        loss, clipped = clipped_value_loss(values, signals["values"], signals["returns"], cliprange=self.cliprange)
        for name in ("weights/value" if "weights/value" in signals else "weights", "sampled_weights"):
            loss = loss * signals[name] if name in signals else loss
        if (known := signals.get("has.returns")) is not None:
            loss, clipped = torch.where(known, loss, 0), clipped & known
        tokens = count_tokens(micro_batch, ["returns"], self.device)
        return loss.sum(), {"critic/vf_clipfrac": clipped.sum(), "tokens": tokens}

    def _reported(self) -> dict[str, str | None]:
        return {"critic/vf_loss": None, "critic/vf_clipfrac": "tokens"}

    @torch.no_grad()
    def compute_values(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        """Return the value before each trained token, float32 [R] per sample."""
        self._seed()
        result: dict[SampleId, np.ndarray] = {}
        for micro_batch in micro_batches:
            batch, rows, _ = pack_samples(micro_batch, self.device)
            result |= by_sample(micro_batch, self.model(batch, rows))
        self.reshard()
        return result

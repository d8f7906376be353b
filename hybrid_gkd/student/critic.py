"""The critic: a sharded model whose head gives one value per token. Knows neither Ray nor vLLM.

Shapes: R response tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_gkd.config import Config
from hybrid_gkd.losses.value import clipped_value_loss
from hybrid_gkd.models.packed_attention import PackedBatch
from hybrid_gkd.student.loading import PATH_KEY
from hybrid_gkd.student.logprob_model import by_sequence, concat, hidden_states, pack_responses, refuse_unsupported
from hybrid_gkd.student.trained_model import TrainedModel
from hybrid_gkd.types import TrainSequence


class ValueModel(nn.Module):
    """A causal LM whose output embedding is replaced by a linear map to one value.

    Raises ModelError if the architecture mixes packed sequences or has dropout.
    """

    def __init__(self, model: Any):
        super().__init__()
        refuse_unsupported(model)
        hidden_size = model.get_output_embeddings().in_features
        model.set_output_embeddings(nn.Linear(hidden_size, 1, device="meta", dtype=torch.float32))
        self.model: Any = model

    def forward(self, batch: PackedBatch, rows: Tensor) -> Tensor:
        """Values at the packed positions `rows` [R], float32 [R]: of the state before the token that each predicts."""
        head = self.model.get_output_embeddings()
        values: Tensor = head(hidden_states(self.model, batch, rows).float()).sum(1)  # not a view, which FSDP2 warns of
        return values


class Critic(TrainedModel):
    """One rank of the critic. Raises ModelError if it cannot be loaded or its architecture not be trained exactly."""

    prefix, loss_name, section = "critic", "critic/vf_loss", "critic"

    def __init__(self, config: Config, *, device: torch.device, num_updates: int):
        section = config.critic
        self.cliprange = section.cliprange_value
        super().__init__(
            config.critic_model, wrap=ValueModel, fsdp=section.fsdp_config, shard_size=config.critic_shard_size,
            device=device, bucket_bytes=0, optim=section.optim, num_updates=num_updates, grad_clip=section.grad_clip,
            seed=config.trainer.seed, new_head=True,
            path_key=PATH_KEY if section.model.path is None else "critic.model.path",
        )

    def _loss(self, micro_batch: tuple[TrainSequence, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        batch, rows, _ = pack_responses(micro_batch, self.device)
        values = self.model(batch, rows)
        joined = functools.partial(concat, device=self.device)
        old, returns = (
            joined([getattr(item, name) for item in micro_batch]) if micro_batch else torch.zeros_like(values)
            for name in ("values", "returns")
        )
        loss, clipped = clipped_value_loss(values, old, returns, cliprange=self.cliprange)
        for name in ("loss_weights", "sampled_weights"):
            weights = [value for item in micro_batch if (value := getattr(item, name)) is not None]
            if weights:
                loss = loss * joined(weights)
        return loss.sum(), {"critic/vf_clipfrac": clipped.sum()}

    def _names(self) -> list[str]:
        return ["critic/vf_loss", "critic/vf_clipfrac"]

    @torch.no_grad()
    def compute_values(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """Sequence index -> float32 [R], what the critic expects before each response token."""
        self._seed()
        result: dict[int, np.ndarray] = {}
        for micro_batch in micro_batches:
            batch, rows, _ = pack_responses(micro_batch, self.device)
            result |= by_sequence(micro_batch, self.model(batch, rows))
        self.reshard()
        return result

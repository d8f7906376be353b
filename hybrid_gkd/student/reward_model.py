"""The reward model: a frozen classifier that scores a text by its last logit. Depends on neither Ray nor vLLM.

Shapes: B texts of a micro-batch, T packed tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_gkd.config import REWARD_MODEL_PATH, Config, ModelConfig, RewardModelConfig
from hybrid_gkd.errors import prefix_errors
from hybrid_gkd.models.packed_attention import PackedBatch, pack, to_device
from hybrid_gkd.student.logprob_model import check_no_leaks, hidden_states
from hybrid_gkd.student.pretrained import build_model, check_head, classifier_head
from hybrid_gkd.student.sharded_model import ShardedModel
from hybrid_gkd.types import RewardText


class ScoreModel(nn.Module):
    """A classifier whose forward pass returns one logit per text. Raises ModelError: it mixes packed sequences."""

    def __init__(self, model: Any):
        super().__init__()
        check_no_leaks(model)
        model.eval()  # some classifiers have dropout before the head
        self.model: Any = model

    def forward(self, batch: PackedBatch, rows: Tensor) -> Tensor:
        """Return logits at the packed positions `rows` [B], float32 [B]; the head computes in float32."""
        head = classifier_head(self.model)
        bias = None if head.bias is None else head.bias.float()
        logits = nn.functional.linear(hidden_states(self.model, batch, rows).float(), head.weight.float(), bias)
        return logits.sum(1)


class RewardModel(ShardedModel):
    """One rank of the reward model.

    Raises ModelError: it cannot be loaded, its head is missing, or its architecture is not supported.
    """

    section, token_limit = "reward_model", "forward_max_token_len_per_gpu"

    def __init__(self, config: Config, *, device: torch.device):
        section = config.reward_model.model
        assert section.path is not None
        super().__init__(
            ModelConfig(path=section.path, trust_remote_code=section.trust_remote_code), wrap=ScoreModel,
            shard_size=config.shard_size, device=device, classifier=True, path_key=REWARD_MODEL_PATH,
        )
        by_sequence = "ForSequenceClassification" in type(self.hf_model).__name__
        self.padding = self.hf_model.config.get_text_config().pad_token_id if by_sequence else None
        """Padding token id of transformers' sequence classifiers, which score the last token that is not padding."""

    @torch.no_grad()
    def compute_scores(self, micro_batches: tuple[tuple[RewardText, ...], ...]) -> dict[int, float]:
        """Return scores by index of the text. Empty micro-batches of a rank participate in the collectives."""
        found: dict[int, float] = {}
        for micro_batch in micro_batches:
            texts = [text.token_ids for text in micro_batch] or [np.zeros(2, np.int32)]
            starts = np.cumsum([0, *map(len, texts)])
            rows = [start + self._last(ids) for start, ids in zip(starts[:-1], texts, strict=True)]
            scores = self.model(pack(texts, self.device), to_device(np.array(rows), self.device))
            found |= dict(zip([text.index for text in micro_batch], scores.tolist(), strict=False))
        self.reshard()
        return found

    def _last(self, ids: np.ndarray) -> int:
        """Return the position of the token whose logit is the score."""
        real = np.flatnonzero(ids != self.padding) if self.padding is not None else [len(ids) - 1]
        return int(real[-1]) if len(real) else 0


def check_classifier(section: RewardModelConfig) -> Any:
    """Check the reward model's folder; return its transformers configuration.

    Raises ModelError: it is not a classifier with one label and a head, or its architecture is not supported.
    """
    path = section.model.path
    assert path is not None
    model = build_model(
        path, dtype=torch.float32, trust_remote_code=section.model.trust_remote_code, override_config={},
        key=REWARD_MODEL_PATH, classifier=True,
    )
    with prefix_errors(f"{REWARD_MODEL_PATH}: {path}"):
        ScoreModel(model)
        check_head(model, path)
    return model.config

"""From the losses of tokens to the loss of a mini-batch: `loss_agg_mode` as a factor of each token's loss.

Workers divide the sum over a mini-batch's response tokens by their number N over all ranks, known before the first
backward. Every mode is that mean with factors, so none depends on the cut into micro-batches, packing or ranks.

Shapes: R_i response tokens of sequence i, B sequences and N tokens of a mini-batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.types import TrainSequence


def with_loss_weights(
    config: Config, sequences: list[TrainSequence], mode: str | None = None
) -> list[TrainSequence]:
    """The sequences of ONE whole mini-batch with the factors of a mode in their `loss_weights`.

    `mode` is `actor.loss_agg_mode` unless another one is given.

    Tokens whose weight is 0 are not trained on: they count neither in lengths nor in means, nor do sequences without
    any other. Lengths are kept tokens:

        token-mean               N / (kept tokens): each token counts the same
        seq-mean-token-sum       N / B
        seq-mean-token-mean      N / (B R_i)
        seq-mean-token-sum-norm  N / (B L), L a constant; Dr. GRPO, arXiv 2503.20783, with L = max_response_length

    Raises TrainingError: no token is left.
    """
    actor = config.actor_rollout_ref.actor
    mode = mode or actor.loss_agg_mode
    lengths = [len(item.sequence.response_ids) for item in sequences]
    kept = [
        length if item.loss_weights is None else int(np.count_nonzero(item.loss_weights))
        for item, length in zip(sequences, lengths, strict=True)
    ]
    num_tokens, num_kept, num_sequences = sum(lengths), sum(kept), sum(number > 0 for number in kept)
    if mode == "token-mean" and num_kept == num_tokens:
        return sequences
    if not num_kept:
        raise TrainingError(f"none of the {num_tokens} response tokens of a mini-batch has a weight above 0")
    constant = actor.loss_scale_factor or config.data.max_response_length
    denominators = {
        "token-mean": [num_kept] * len(kept),
        "seq-mean-token-sum": [num_sequences] * len(kept),
        "seq-mean-token-mean": [num_sequences * max(number, 1) for number in kept],
        "seq-mean-token-sum-norm": [num_sequences * constant] * len(kept),
    }[mode]
    found = []
    for item, length, denominator in zip(sequences, lengths, denominators, strict=True):
        weights = np.ones(length, np.float32) if item.loss_weights is None else item.loss_weights
        found.append(dataclasses.replace(item, loss_weights=weights * np.float32(num_tokens / denominator)))
    return found

"""Aggregate token losses over a mini-batch: `loss_agg_mode` as a factor of each token's loss.

Workers divide the sum over a mini-batch's trained tokens by their number N over all ranks, known before the first
backward. Every mode is that mean with factors, so none depends on the sizes of micro-batches, packing or ranks.

Shapes: R_i trained tokens of sample i, B samples and N tokens of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_gkd.config import Config, distillation_terms
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.losses.table import TERMS, TokenWeights
from hybrid_gkd.losses.token_weights import num_selected
from hybrid_gkd.types import Sample


def with_loss_weights(config: Config, samples: list[Sample], mode: str | None = None) -> list[Sample]:
    """Return the samples of ONE whole mini-batch with the factors of a mode in their `weights`.

    `mode`: None takes `actor.loss_agg_mode`.

    Tokens with weight 0 are not trained on: they count neither in lengths nor in means; a sample without other tokens
    does not count either. Lengths are numbers of kept tokens:

        token-mean               N / (kept tokens): each token counts the same
        seq-mean-token-sum       N / B
        seq-mean-token-mean      N / (B R_i)
        seq-mean-token-sum-norm  N / (B L), L a constant; Dr. GRPO, arXiv 2503.20783, with L = max_response_length

    A term whose signal exists only for some of the samples is a mean over those: its factors are `weights/<term>`, 0
    for the others. A signal that no sample has may still arrive for all. A teacher's does not arrive for samples that
    have `weights/distillation` of 0 (with distillation.ensemble=sum: the weights of its own term).

    With `distillation.token_weights` a distillation term is divided by the sum of the weights instead of the number
    of tokens; its factors include the weights that are already known.

    Raises TrainingError: no token is left in any term.
    """
    actor, row = config.actor_rollout_ref.actor, config.distillation.weighting
    mode, constant = mode or actor.loss_agg_mode, actor.loss_scale_factor or config.data.max_response_length
    ones = [np.ones(sample.num_trained, np.float32) for sample in samples]
    weights = [s.array("weights") if "weights" in s.signals else one for s, one in zip(samples, ones, strict=True)]
    num_tokens, kept = sum(map(len, weights)), [int(np.count_nonzero(each)) for each in weights]
    counted: dict[str, Sequence[float]] = {} if mode == "token-mean" and sum(kept) == num_tokens else {"weights": kept}
    left: list[float] = [sum(kept)] if actor.entropy_coeff else []
    of_teachers = distillation_terms(config)
    for term, signal in (TERMS | of_teachers | ({"reference": "reference_topk"} if config.ref_topk else {})).items():
        known = [signal in sample.signals for sample in samples]
        sums: Sequence[float] = kept
        if term in of_teachers:
            unscored = [f"weights/{term}" in sample.signals for sample in samples]
            if not any(known) and (row is not None or any(unscored)):
                known = [not each for each in unscored]  # the teacher's scores of the others arrive later
            if row is not None:
                sums = _sums(row, samples, weights)
        if any(known):
            own = [number if has else 0 for number, has in zip(sums, known, strict=True)]
            left.append(sum(own))
            some_lack_it = any(len(each) for each, has in zip(weights, known, strict=True) if not has)
            if some_lack_it or sums is not kept:
                counted[f"weights/{term}"] = own
    if not any(left or kept):
        keys = "distillation.token_weights and algorithm.rollout_rs set the weights"
        raise TrainingError(f"no token of the {len(samples)} completions of a mini-batch has a weight above 0; {keys}")
    if not counted:
        return samples
    factors = {name: _factors(own, mode, num_tokens, constant) for name, own in counted.items()}
    found = []
    for i, sample in enumerate(samples):
        own_factors = {name: weights[i] * each[i] for name, each in factors.items()}
        if "token_weights" in sample.signals:
            for name in own_factors.keys() & {f"weights/{term}" for term in of_teachers}:
                own_factors[name] *= sample.array("token_weights")
        found.append(sample.with_signals(**own_factors))
    return found


def _sums(row: TokenWeights, samples: list[Sample], weights: list[np.ndarray]) -> list[float]:
    """Return the sum of the token weights of each sample, over its tokens whose `weights` [R_i] are not 0."""
    sums = list[float]()
    for sample, each in zip(samples, weights, strict=True):
        kept = each != 0
        if row.needs == "student":
            sums.append(num_selected(row.options["fraction"], int(kept.sum())))
        else:
            own = sample.array("token_weights") if "token_weights" in sample.signals else np.ones(len(each))
            sums.append(float(own[kept].sum(dtype=np.float64)))
    return sums


def _factors(kept: Sequence[float], mode: str, num_tokens: int, constant: float) -> list[np.float32]:
    """Return the factor of each sample from its kept tokens or their sum of weights; 0 without kept tokens."""
    num_kept, num_samples = sum(kept), sum(number > 0 for number in kept)
    denominators: dict[str, list[float]] = {
        "token-mean": [num_kept] * len(kept),
        "seq-mean-token-sum": [num_samples] * len(kept),
        "seq-mean-token-mean": [num_samples * number for number in kept],
        "seq-mean-token-sum-norm": [num_samples * constant] * len(kept),
    }
    pairs = zip(kept, denominators[mode], strict=True)
    return [np.float32(num_tokens / denominator if number else 0) for number, denominator in pairs]

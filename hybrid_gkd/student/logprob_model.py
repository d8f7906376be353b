"""A causal LM as log-probabilities of given ids, the packing of samples for it, and the architectures it refuses.

Shapes: T packed tokens of a micro-batch, R of them are trained on, K ids per trained token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_gkd.compat.transformers import mixes_in_attention_only
from hybrid_gkd.errors import ModelError
from hybrid_gkd.losses.head import LossFunction, RowStatistics, head_loss, logprobs_of_ids, row_statistics
from hybrid_gkd.losses.terms import QUARTERS
from hybrid_gkd.losses.topk import TopLogprobs, top_logprobs
from hybrid_gkd.models.packed_attention import PackedBatch, pack, packed_and_alone, to_device
from hybrid_gkd.models.spec import changed_logits
from hybrid_gkd.types import Sample, SampleId, Signal, TopK

LARGEST_DIFFERENCE, LARGEST_IN_FLOAT32 = 0.5, 1e-3
"""Nats, mean over the tokens of a sequence, between two packings. Rounding of bfloat16 is 0.03 (12 random layers), and
sequences that see each other are 4 nats apart (SmolLM2-135M)."""


class LogprobModel(nn.Module):
    """A causal LM whose forward pass returns log-probabilities of given ids, or a loss of them, instead of logits.

    The head runs inside this module's forward, so FSDP2, which shards the embedding, the last norm and the
    head as this module's own parameters, has gathered the output embedding when it is used.

    Args:
        num_ids: ids that are tokens, from 0 on: rows of the head beyond take no part. None: all rows are.

    Raises ModelError if the architecture mixes packed sequences, changes the logits behind the head, or has dropout.
    """

    def __init__(self, model: Any, num_ids: int | None = None):
        super().__init__()
        self.model: Any = model
        refuse_unsupported(model)
        _refuse_head(model)
        rows = model.get_output_embeddings().out_features
        self.num_ids = rows if num_ids is None else min(num_ids, rows)

    def forward(
        self, batch: PackedBatch, rows: Tensor, ids: Tensor, loss_fn: LossFunction | None = None, *,
        temperature: float, topk: int = 0, with_overlap: bool = True, entropy_weights: Tensor | None = None,
        prepare: Callable[[Tensor], LossFunction] | None = None, choose: bool = False,
        overlap_mask: Tensor | None = None,
        select: Callable[[RowStatistics], tuple[Tensor | None, LossFunction]] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]] | TopLogprobs:
        """Log-probabilities of `ids` [R, K] at the packed positions `rows` [R], float32 [R, K], and no metrics.

        With `loss_fn` the result of `head_loss`, the first `topk` ids being the teacher's. `prepare` makes the loss
        function from the log-probabilities [R] of the last ids, for one that depends on those of other rows. With
        `choose` the `topk` most likely ids, and the log-probabilities of `ids` [R, 1] beside them. `select` makes the
        loss function from the student's distribution at all rows, and chooses those [r] that the loss is computed of
        (None: all of them): one further matrix product of all rows, and three of those.
        """
        hidden = hidden_states(self.model, batch, rows)
        weight = self.model.get_output_embeddings().weight
        how: dict[str, Any] = {"temperature": temperature, "num_ids": self.num_ids}
        if choose:
            return _top_logprobs(hidden, weight, ids[:, 0], k=topk, **how)
        if prepare is not None:
            loss_fn = prepare(logprobs_of_ids(hidden, weight, ids[:, -1:], **how)[:, 0])
        if select is not None:
            selected, loss_fn = select(row_statistics(hidden, weight, **how))
            if selected is not None:
                hidden, ids = hidden[selected], ids[selected]
                overlap_mask = None if overlap_mask is None else overlap_mask[selected]
        if loss_fn is None:
            return logprobs_of_ids(hidden, weight, ids, **how), {}
        return head_loss(
            hidden, weight, ids, loss_fn, with_entropy=True, overlap_topk=topk if with_overlap else 0,
            overlap_mask=overlap_mask, tail_topk=topk, entropy_weights=entropy_weights, **how,
        )


def _top_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, k: int, num_ids: int
) -> TopLogprobs:
    if not len(hidden):
        none = hidden.new_empty(0, k, dtype=torch.float32)
        return TopLogprobs(none.int(), none, none.sum(1), none.sum(1))
    temperatures = torch.full((len(hidden),), temperature, device=hidden.device)
    return top_logprobs(hidden, lambda states: states @ weight.T, targets, temperatures, k, num_ids)


def refuse_leaks(model: Any) -> None:
    """Raises ModelError if the architecture mixes packed sequences."""
    # A layer that mixes tokens outside the attention function is never told where a sequence ends.
    if not mixes_in_attention_only(model):
        raise ModelError(
            f"{model.config.model_type}: packed sequences would leak into each other; the architecture must mix tokens "
            "in transformers' attention interface only (_supports_attention_backend, not _is_stateful)"
        )


def refuse_unsupported(model: Any) -> None:
    """Raises ModelError if the architecture mixes packed sequences or has dropout."""
    refuse_leaks(model)
    config = model.config
    kind = config.model_type
    # With dropout the student is not the policy that sampled, and a step depends on the cut into micro-batches.
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name]  # for torch's function
        if isinstance(module, nn.Dropout):
            rates = [module.p]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            fields = [name for name, value in config.to_dict().items() if "drop" in name and value]
            raise ModelError(
                f"{kind}: {type(module).__name__} has dropout, which is not supported; fields to set to 0.0 through "
                f"actor_rollout_ref.model.override_config: {', '.join(fields) or 'none known'}"
            )


def _refuse_head(model: Any) -> None:
    """Raises ModelError if the logits are not the product of the last hidden state and a matrix."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()  # of Gemma 4 a part of the whole
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ModelError(f"{config.model_type}: the output embedding must be a linear layer without bias")
    if name := changed_logits(config):
        raise ModelError(
            f"{config.model_type}: config.{name} changes the logits behind the head, which is not supported; "
            f"got {getattr(config, name)}"
        )


def pack_samples(micro_batch: Sequence[Sample], device: torch.device) -> tuple[PackedBatch, Tensor, Tensor]:
    """Packed inputs, the rows [R] whose hidden state predicts a trained token, and the trained tokens [R].

    An empty micro-batch has R = 0: its rank takes part in the collectives and adds nothing.
    """
    if not micro_batch:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return pack([np.zeros(2, np.int32)], device), nothing, nothing  # one token would compile anew
    starts = np.cumsum([0, *(sample.num_tokens for sample in micro_batch[:-1])])
    rows = [start + sample.positions - 1 for start, sample in zip(starts, micro_batch, strict=True)]
    ids = [sample.trained_ids for sample in micro_batch]
    batch = pack([sample.tokens for sample in micro_batch], device)
    return batch, concat(rows, device, torch.int64), concat(ids, device, torch.int64)


def join_signals(micro_batch: Sequence[Sample], names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Signals of the trained tokens of a micro-batch, end to end, see `Signals` in losses/terms.py; ids are int64.

    Where a sample lacks one that others have, its tokens have neutral values: 1 for weights, 0, or as candidates the
    first K ids, each as likely as all other ids together.
    """
    lengths = [sample.num_trained for sample in micro_batch]
    joined: dict[str, Tensor] = {}
    for name in names:
        found = [sample.signals.get(name) for sample in micro_batch]
        known = [each is not None for each in found]
        if not any(known):
            continue
        if not all(known):
            joined[f"has.{name}"] = concat([np.repeat(known, lengths)], device, torch.bool)
        example = found[known.index(True)]
        signals = [
            _neutral(name, example, length) if each is None else each
            for each, length in zip(found, lengths, strict=True)
        ]
        if isinstance(example, TopK):
            for part in (field.name for field in fields(TopK)):
                dtype = torch.int64 if part == "ids" else torch.float32
                joined[f"{name}.{part}"] = concat([getattr(each, part) for each in signals], device, dtype)
        else:
            joined[name] = concat(signals, device)
    return joined


def _neutral(name: str, example: Signal | None, length: int) -> Signal:
    """A signal of as many tokens."""
    if not isinstance(example, TopK):
        return np.full(length, "weights" in name, np.float32)
    k = example.ids.shape[1]
    each = np.full((length, k + 2), -math.log(k + 1), np.float32)
    ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
    return TopK(ids=ids, logprobs=each[:, :k], tail_logprobs=each[:, k], sampled_logprobs=each[:, k + 1])


def quarter_of_tokens(length: int) -> np.ndarray:
    """Which quarter of an answer of so many tokens each of them is in, 0 to 3, [R]."""
    return np.arange(length) * QUARTERS // max(1, length)


def count_tokens(
    micro_batch: Sequence[Sample], signals: Sequence[str], device: torch.device, *, quarter: int | None = None
) -> Tensor:
    """How many trained tokens, or those in a quarter, are of samples that have one of the signals, float64 []."""
    lengths = [sample.num_trained for sample in micro_batch if not sample.signals.keys().isdisjoint(signals)]
    if quarter is not None:  # of the numbers r from 0 to R - 1, those with floor(4 r / R) = quarter
        lengths = [-(-(quarter + 1) * length // QUARTERS) + (-quarter * length // QUARTERS) for length in lengths]
    number = float(sum(lengths))
    return torch.full((), number, dtype=torch.float64, device=device)


def count_rows(quarters: Tensor, *, quarter: int | None = None) -> Tensor:
    """Return the number of rows, or of those in a quarter, float64 []; `quarters` [r] says which one each is in."""
    return (quarters >= 0 if quarter is None else quarters == quarter).sum(dtype=torch.float64)


def hidden_states(model: Any, batch: PackedBatch, rows: Tensor) -> Tensor:
    """Of the last layer of a causal LM, [R, D]."""
    decoder = getattr(model, model.base_model_prefix)
    states: Tensor = decoder(**batch.model_kwargs()).last_hidden_state.squeeze(0)[rows]
    return states


def by_sample(micro_batch: Sequence[Sample], values: Tensor) -> dict[SampleId, np.ndarray]:
    """Values [R, ...] of the trained tokens of a micro-batch -> those of each sample, on the host."""
    parts = values.cpu().split([sample.num_trained for sample in micro_batch])
    return {sample.id: part.numpy() for sample, part in zip(micro_batch, parts, strict=True)}


@torch.no_grad()
def check_packing(model: Any, hf_config: Any, *, longest: int, device: torch.device) -> None:
    """Compare log-probabilities of a sequence alone and packed, those of one policy in two packings. Collective.

    Raises ModelError: a sharded `LogprobModel` computes others beside other neighbours, of up to `longest` tokens.
    """
    def score(sequences: list[np.ndarray]) -> Tensor:
        batch, start = pack(sequences, device), sum(map(len, sequences[:-1]))
        rows = torch.arange(start, start + len(sequences[-1]) - 1, device=device)
        with torch.compiler.set_stance("force_eager"):  # these lengths do not come again
            logprobs, _ = model(batch, rows, batch.input_ids[0, rows + 1][:, None], temperature=1.0)
        return logprobs

    exact = device.type == "cpu" and next(model.parameters()).dtype == torch.float32  # GPUs compute in bfloat16
    num_ids, largest = hf_config.get_text_config().vocab_size, LARGEST_IN_FLOAT32 if exact else LARGEST_DIFFERENCE
    for length, alone, packed in packed_and_alone(score, hf_config.to_dict(), longest=longest, num_ids=num_ids):
        differences = (packed - alone).abs()
        if not float(differences.mean()) <= largest:  # NaN too
            raise ModelError(
                f"{hf_config.model_type}: the log-probabilities of a sequence change by up to "
                f"{float(differences.max()):.2g} nats (mean {float(differences.mean()):.2g}) where it is packed behind "
                f"one of {length} tokens; rounding must stay below {largest:g}, or the loss depends on how a batch is "
                f"packed: take another model"
                + (f", or sequences of fewer than {length} tokens (data.max_prompt_length, data.max_response_length)"
                   if length > 5 else "")
            )  # fmt: skip


@torch.no_grad()
def sampled_logprobs(
    model: Any, micro_batches: tuple[tuple[Sample, ...], ...], *, temperature: float, device: torch.device
) -> dict[SampleId, np.ndarray]:
    """Of each sample float32 [R], a sharded `LogprobModel`'s log-probabilities of its trained tokens."""
    result: dict[SampleId, np.ndarray] = {}
    for micro_batch in micro_batches:
        batch, rows, ids = pack_samples(micro_batch, device)
        logprobs, _ = model(batch, rows, ids[:, None], temperature=temperature)
        result |= by_sample(micro_batch, logprobs[:, 0])
    return result


@torch.no_grad()
def top_candidates(
    model: Any, micro_batches: tuple[tuple[Sample, ...], ...], *, temperature: float, device: torch.device, k: int
) -> dict[SampleId, TopK]:
    """Of each sample the k most likely ids at its trained tokens, as a teacher says them."""
    result: dict[SampleId, TopK] = {}
    for micro_batch in micro_batches:
        batch, rows, ids = pack_samples(micro_batch, device)
        found = model(batch, rows, ids[:, None], temperature=temperature, topk=k, choose=True)
        values = [by_sample(micro_batch, each) for each in found]
        for sample in micro_batch:
            chosen, logprobs, tail, sampled = (each[sample.id] for each in values)
            result[sample.id] = TopK(ids=chosen, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)
    return result


def concat(arrays: list[Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Arrays of the samples of a micro-batch, end to end."""
    return to_device(np.concatenate(arrays), device).to(dtype)

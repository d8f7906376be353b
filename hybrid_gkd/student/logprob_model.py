"""A causal LM that returns log-probabilities of given ids, packing of samples, and checks of the architecture.

Shapes: T packed tokens of a micro-batch, R of them trained, K ids per trained token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_gkd.compat.transformers import mixes_in_attention_only
from hybrid_gkd.errors import ModelError
from hybrid_gkd.losses.head import LossFunction, RowStatistics, head_loss, logprobs_of_ids, row_statistics
from hybrid_gkd.losses.topk import TopLogprobs, top_logprobs
from hybrid_gkd.models.packed_attention import PackedBatch, pack, packed_and_alone, to_device
from hybrid_gkd.models.spec import changed_logits
from hybrid_gkd.types import QUARTERS, Sample, SampleId, Signal, TopK

if TYPE_CHECKING:
    from hybrid_gkd.student.sharded_model import ShardedModel

LARGEST_DIFFERENCE, LARGEST_IN_FLOAT32 = 0.5, 1e-3
"""Largest mean difference between two packings of a sequence, nats/token. Rounding in bfloat16 gives 0.03 (12 random
layers); sequences that attend to each other differ by 4 nats (SmolLM2-135M)."""


class LogprobModel(nn.Module):
    """A causal LM whose forward pass returns log-probabilities of given ids, or a loss of them, instead of logits.

    The head runs inside this module's forward, because FSDP2 shards embedding, last norm and head as this module's own
    parameters and gathers them for its forward.

    Args:
        num_ids: number of token ids; rows of the head beyond have probability 0. None: all rows are tokens.

    Raises ModelError: the architecture mixes packed sequences, changes the logits after the head, or has dropout.
    """

    def __init__(self, model: Any, num_ids: int | None = None):
        super().__init__()
        self.model: Any = model
        check_supported(model)
        _check_head(model)
        rows = model.get_output_embeddings().out_features
        self.num_ids = rows if num_ids is None else min(num_ids, rows)

    def forward(
        self, batch: PackedBatch, rows: Tensor, ids: Tensor, loss_fn: LossFunction | None = None, *,
        temperature: float, topk: int = 0, with_overlap: bool = True, entropy_weights: Tensor | None = None,
        prepare: Callable[[Tensor], LossFunction] | None = None, choose: bool = False,
        overlap_mask: Tensor | None = None,
        select: Callable[[RowStatistics], tuple[Tensor | None, LossFunction]] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]] | TopLogprobs:
        """Return log-probabilities of `ids` [R, K] at the packed positions `rows` [R], float32 [R, K], and no metrics.

        With `loss_fn`, return the result of `head_loss`; the first `topk` ids are the teacher's. `prepare` builds the
        loss function from the log-probabilities [R] of the last ids, for losses that depend on other rows. With
        `choose`, return the `topk` most likely ids and the log-probabilities of `ids` [R, 1]. `select` chooses the
        rows [r] of the loss (None: all) and builds its loss function from the student's distribution at all rows, at
        the cost of one further matrix product over all rows and three over the selected ones.
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


def check_no_leaks(model: Any) -> None:
    """Check that packed sequences stay separate. Raises ModelError: the architecture mixes them."""
    # A layer that mixes tokens outside the attention function does not get the sequence boundaries.
    if not mixes_in_attention_only(model):
        raise ModelError(
            f"{model.config.model_type}: packed sequences would leak into each other; the architecture must mix tokens "
            "in transformers' attention interface only (_supports_attention_backend, not _is_stateful)"
        )


def check_supported(model: Any) -> None:
    """Check the architecture. Raises ModelError: it mixes packed sequences or has dropout."""
    check_no_leaks(model)
    config = model.config
    kind = config.model_type
    # With dropout, the student differs from the rollout policy, and a step depends on the micro-batches.
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name]  # for torch.nn.functional.dropout
        if isinstance(module, nn.Dropout):
            rates = [module.p]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            fields = [name for name, value in config.to_dict().items() if "drop" in name and value]
            raise ModelError(
                f"{kind}: {type(module).__name__} has dropout, which is not supported; fields to set to 0.0 through "
                f"actor_rollout_ref.model.override_config: {', '.join(fields) or 'none known'}"
            )


def _check_head(model: Any) -> None:
    """Check the head. Raises ModelError: the logits are not the product of the last hidden state and a matrix."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()  # Gemma 4 has a nested text config
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ModelError(f"{config.model_type}: the output embedding must be a linear layer without bias")
    if name := changed_logits(config):
        raise ModelError(
            f"{config.model_type}: config.{name} changes the logits after the head, which is not supported; "
            f"got {getattr(config, name)}"
        )


def pack_samples(micro_batch: Sequence[Sample], device: torch.device) -> tuple[PackedBatch, Tensor, Tensor]:
    """Return packed inputs, rows [R] whose hidden state predicts a trained token, and the trained tokens [R].

    An empty micro-batch has R = 0: its rank only participates in the collectives.
    """
    if not micro_batch:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return pack([np.zeros(2, np.int32)], device), nothing, nothing  # a single token would trigger a recompilation
    starts = np.cumsum([0, *(sample.num_tokens for sample in micro_batch[:-1])])
    rows = [start + sample.positions - 1 for start, sample in zip(starts, micro_batch, strict=True)]
    ids = [sample.trained_ids for sample in micro_batch]
    batch = pack([sample.tokens for sample in micro_batch], device)
    return batch, concat(rows, device, torch.int64), concat(ids, device, torch.int64)


def join_signals(micro_batch: Sequence[Sample], names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Concatenate the signals of a micro-batch's trained tokens, see `Signals` in losses/terms.py; ids are int64.

    Samples without a signal that others have get neutral values: 1 for weights, otherwise 0; as candidates the first K
    ids, each with the same probability as the tail.
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
            for part in example.parts():
                dtype = torch.int64 if part in ("ids", "groups") else torch.float32
                joined[f"{name}.{part}"] = concat([getattr(each, part) for each in signals], device, dtype)
        else:
            joined[name] = concat(signals, device)
    return joined


def _neutral(name: str, example: Signal | None, length: int) -> Signal:
    """Return a neutral signal of `length` tokens."""
    if not isinstance(example, TopK):
        return np.full(length, "weights" in name, np.float32)
    k = example.ids.shape[1]
    each = np.full((length, k + 2), -math.log(k + 1), np.float32)
    ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
    return TopK(
        ids=ids, logprobs=each[:, :k], tail_logprobs=each[:, k], sampled_logprobs=each[:, k + 1],
        groups=None if example.groups is None else ids,
    )


def count_tokens(
    micro_batch: Sequence[Sample], signals: Sequence[str], device: torch.device, *, quarter: int | None = None
) -> Tensor:
    """Count the trained tokens (of a quarter) of samples that have one of the signals, float64 []."""
    lengths = [sample.num_trained for sample in micro_batch if not sample.signals.keys().isdisjoint(signals)]
    if quarter is not None:  # number of r in [0, R) with floor(4 r / R) = quarter
        lengths = [-(-(quarter + 1) * length // QUARTERS) + (-quarter * length // QUARTERS) for length in lengths]
    number = float(sum(lengths))
    return torch.full((), number, dtype=torch.float64, device=device)


def count_rows(quarters: Tensor, *, quarter: int | None = None) -> Tensor:
    """Return the number of rows, or of those in a quarter, float64 []; `quarters` [r]: the quarter of each row."""
    return (quarters >= 0 if quarter is None else quarters == quarter).sum(dtype=torch.float64)


def hidden_states(model: Any, batch: PackedBatch, rows: Tensor) -> Tensor:
    """Return the last hidden states of a causal LM at `rows`, [R, D]."""
    decoder = getattr(model, model.base_model_prefix)
    states: Tensor = decoder(**batch.model_kwargs()).last_hidden_state.squeeze(0)[rows]
    return states


def by_sample(micro_batch: Sequence[Sample], values: Tensor) -> dict[SampleId, np.ndarray]:
    """Split values [R, ...] of a micro-batch's trained tokens by sample, on the host."""
    parts = values.cpu().split([sample.num_trained for sample in micro_batch])
    return {sample.id: part.numpy() for sample, part in zip(micro_batch, parts, strict=True)}


@torch.no_grad()
def check_packing(model: Any, hf_config: Any, *, longest: int, device: torch.device) -> None:
    """Compare log-probabilities of a sequence computed alone and packed behind others. Collective.

    Raises ModelError: the results of a sharded `LogprobModel` depend on the packing, for neighbours of up to `longest`
    tokens.
    """
    def score(sequences: list[np.ndarray]) -> Tensor:
        batch, start = pack(sequences, device), sum(map(len, sequences[:-1]))
        rows = torch.arange(start, start + len(sequences[-1]) - 1, device=device)
        with torch.compiler.set_stance("force_eager"):  # do not compile for these lengths
            logprobs, _ = model(batch, rows, batch.input_ids[0, rows + 1][:, None], temperature=1.0)
        return logprobs

    exact = device.type == "cpu" and next(model.parameters()).dtype == torch.float32  # GPUs compute in bfloat16
    num_ids, largest = hf_config.get_text_config().vocab_size, LARGEST_IN_FLOAT32 if exact else LARGEST_DIFFERENCE
    for length, alone, packed in packed_and_alone(score, hf_config.to_dict(), longest=longest, num_ids=num_ids):
        differences = (packed - alone).abs()
        if not float(differences.mean()) <= largest:  # NaN too
            raise ModelError(
                f"{hf_config.model_type}: the log-probabilities of a sequence change by up to "
                f"{float(differences.max()):.2g} nats (mean {float(differences.mean()):.2g}) where it is packed after "
                f"one of {length} tokens; rounding must stay below {largest:g}, or the loss depends on how a batch is "
                f"packed: use another model"
                + (f", or sequences of fewer than {length} tokens (data.max_prompt_length, data.max_response_length)"
                   if length > 5 else "")
            )  # fmt: skip


@torch.no_grad()
def sampled_logprobs(
    sharded: ShardedModel, micro_batches: tuple[tuple[Sample, ...], ...], *, temperature: float
) -> dict[SampleId, np.ndarray]:
    """Return a `LogprobModel`'s log-probabilities of the trained tokens, float32 [R] per sample."""
    result: dict[SampleId, np.ndarray] = {}
    for micro_batch in micro_batches:
        batch, rows, ids = pack_samples(micro_batch, sharded.device)
        logprobs, _ = sharded.model(batch, rows, ids[:, None], temperature=temperature)
        result |= by_sample(micro_batch, logprobs[:, 0])
    sharded.reshard()
    return result


@torch.no_grad()
def top_candidates(
    sharded: ShardedModel, micro_batches: tuple[tuple[Sample, ...], ...], *, temperature: float, k: int
) -> dict[SampleId, TopK]:
    """Return the k most likely ids at the trained tokens of each sample, in the format of a teacher's scores."""
    result: dict[SampleId, TopK] = {}
    for micro_batch in micro_batches:
        batch, rows, ids = pack_samples(micro_batch, sharded.device)
        found = sharded.model(batch, rows, ids[:, None], temperature=temperature, topk=k, choose=True)
        values = [by_sample(micro_batch, each) for each in found]
        for sample in micro_batch:
            chosen, logprobs, tail, sampled = (each[sample.id] for each in values)
            result[sample.id] = TopK(ids=chosen, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)
    sharded.reshard()
    return result


def concat(arrays: list[Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Concatenate arrays of the samples of a micro-batch on the device."""
    return to_device(np.concatenate(arrays), device).to(dtype)

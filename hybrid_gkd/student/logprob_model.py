"""A causal LM as log-probabilities of given ids, the packing of sequences for it, and the architectures it refuses.

Shapes: T packed tokens of a micro-batch, R of them predict response tokens, K ids per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_gkd.errors import ModelError
from hybrid_gkd.losses.head import LossFunction, head_loss, logprobs_of_ids
from hybrid_gkd.losses.topk import TopLogprobs, top_logprobs
from hybrid_gkd.models.packed_attention import PackedBatch, pack, to_device
from hybrid_gkd.models.spec import changed_logits
from hybrid_gkd.types import TeacherTopK, TrainSequence


class LogprobModel(nn.Module):
    """A causal LM whose forward pass returns log-probabilities of given ids, or a loss of them, instead of logits.

    The head runs inside this module's forward, so FSDP2, which shards the embedding, the last norm and the
    head as this module's own parameters, has gathered the output embedding when it is used.

    Raises ModelError if the architecture mixes packed sequences, changes the logits behind the head, or has dropout.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model: Any = model
        refuse_unsupported(model)
        _refuse_head(model)

    def forward(
        self, batch: PackedBatch, rows: Tensor, ids: Tensor, loss_fn: LossFunction | None = None, *,
        temperature: float, topk: int = 0, with_overlap: bool = True, entropy_weights: Tensor | None = None,
        prepare: Callable[[Tensor], LossFunction] | None = None, num_ids: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]] | TopLogprobs:
        """Log-probabilities of `ids` [R, K] at the packed positions `rows` [R], float32 [R, K], and no metrics.

        With `loss_fn` the result of `head_loss`, the first `topk` ids being the teacher's. `prepare` makes the loss
        function from the log-probabilities [R] of the last ids, for one that depends on those of other rows. With
        `num_ids` the `topk` most likely of the ids below it, and the log-probabilities of `ids` [R, 1] beside them.
        """
        hidden = hidden_states(self.model, batch, rows)
        weight = self.model.get_output_embeddings().weight
        if num_ids is not None:
            return _top_logprobs(hidden, weight, ids[:, 0], temperature=temperature, k=topk, num_ids=num_ids)
        if prepare is not None:
            loss_fn = prepare(logprobs_of_ids(hidden, weight, ids[:, -1:], temperature=temperature)[:, 0])
        if loss_fn is None:
            return logprobs_of_ids(hidden, weight, ids, temperature=temperature), {}
        return head_loss(
            hidden, weight, ids, loss_fn, temperature=temperature, with_entropy=True,
            overlap_topk=topk if with_overlap else 0, tail_topk=topk, entropy_weights=entropy_weights,
        )


def _top_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, k: int, num_ids: int
) -> TopLogprobs:
    if not len(hidden):
        none = hidden.new_empty(0, k, dtype=torch.float32)
        return TopLogprobs(none.int(), none, none.sum(1), none.sum(1))
    temperatures = torch.full((len(hidden),), temperature, device=hidden.device)
    return top_logprobs(hidden, lambda states: states @ weight.T, targets, temperatures, k, min(num_ids, len(weight)))


def refuse_leaks(model: Any) -> None:
    """Raises ModelError if the architecture mixes packed sequences."""
    # A layer that mixes tokens outside the attention function is never told where a sequence ends.
    if not model._supports_attention_backend or model._is_stateful:
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
        raise ModelError(f"{config.model_type}: config.{name} changes the logits, which is not supported")


def pack_responses(micro_batch: tuple[TrainSequence, ...], device: torch.device) -> tuple[PackedBatch, Tensor, Tensor]:
    """Packed inputs, the rows [R] whose hidden state predicts a response token, and the response tokens [R].

    An empty micro-batch has R = 0: its rank takes part in the collectives and adds nothing.
    """
    if not micro_batch:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return pack([np.zeros(2, np.int32)], device), nothing, nothing  # one token would compile anew
    sequences = [item.sequence for item in micro_batch]
    batch = pack([np.concatenate([s.prompt_ids, s.response_ids]) for s in sequences], device)
    ends = np.cumsum([s.num_tokens for s in sequences])  # the last token of a sequence predicts none
    rows = [np.arange(end - len(s.response_ids), end) - 1 for s, end in zip(sequences, ends, strict=True)]
    tokens = [s.response_ids for s in sequences]
    return batch, concat(rows, device, torch.int64), concat(tokens, device, torch.int64)


def hidden_states(model: Any, batch: PackedBatch, rows: Tensor) -> Tensor:
    """Of the last layer of a causal LM, [R, D]."""
    decoder = getattr(model, model.base_model_prefix)
    states: Tensor = decoder(**batch.model_kwargs()).last_hidden_state.squeeze(0)[rows]
    return states


def by_sequence(micro_batch: tuple[TrainSequence, ...], values: Tensor) -> dict[int, np.ndarray]:
    """Values [R] of the response tokens of a micro-batch -> sequence index -> those of each sequence, on the host."""
    lengths = [len(item.sequence.response_ids) for item in micro_batch]
    parts = zip(micro_batch, values.cpu().split(lengths), strict=True)
    return {item.sequence.index: part.numpy() for item, part in parts}


@torch.no_grad()
def sampled_logprobs(
    model: Any, micro_batches: tuple[tuple[TrainSequence, ...], ...], *, temperature: float, device: torch.device
) -> dict[int, np.ndarray]:
    """Sequence index -> float32 [R], a sharded `LogprobModel`'s log-probabilities of the response tokens."""
    result: dict[int, np.ndarray] = {}
    for micro_batch in micro_batches:
        batch, rows, ids = pack_responses(micro_batch, device)
        logprobs, _ = model(batch, rows, ids[:, None], temperature=temperature)
        result |= by_sequence(micro_batch, logprobs[:, 0])
    return result


@torch.no_grad()
def top_candidates(
    model: Any, micro_batches: tuple[tuple[TrainSequence, ...], ...], *, temperature: float, device: torch.device,
    k: int, num_ids: int,
) -> dict[int, TeacherTopK]:
    """Sequence index -> the k most likely of the ids below `num_ids` at each response token, as a teacher says them."""
    result: dict[int, TeacherTopK] = {}
    for micro_batch in micro_batches:
        batch, rows, ids = pack_responses(micro_batch, device)
        found = model(batch, rows, ids[:, None], temperature=temperature, topk=k, num_ids=num_ids)
        values = [by_sequence(micro_batch, each) for each in found]
        for index in values[0]:
            chosen, logprobs, tail, sampled = (each[index] for each in values)
            result[index] = TeacherTopK(ids=chosen, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)
    return result


def concat(arrays: list[Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Arrays of the sequences of a micro-batch, end to end."""
    return to_device(np.concatenate(arrays), device).to(dtype)

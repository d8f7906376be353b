"""The K most likely ids of hidden states, and log-probabilities of these, of all others and of the sampled token.

Some of the K may be given: they are candidates however unlikely they are.

A model's matrix often has more rows than its tokenizer has tokens. Log-probabilities are normalised over tokens only,
since a student with the same tokenizer may have another number of rows.

The tail is the log-sum-exp of the ids that are not chosen. 1 minus the mass of the candidates would be only rounding
below 1e-7, and reverse_kl takes its logarithm.

Shapes: R rows, D hidden size, V columns of logits, K candidates, C of them given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

HEAD_ROWS = 1024
"""Rows of logits held at a time: 0.6 GiB in float32 for a vocabulary of 152k."""


class TopLogprobs(NamedTuple):
    """int32 [R, K], most likely first; float32 [R, K]; float32 [R] each, of all other ids and of the sampled tokens."""

    ids: Tensor
    logprobs: Tensor
    tail: Tensor
    sampled: Tensor

    def first(self, k: int) -> TopLogprobs:
        """Return the first k candidates only; the others are added to the tail."""
        if k == self.ids.shape[1]:
            return self
        tail = torch.cat([self.tail[:, None], self.logprobs[:, k:]], dim=1).logsumexp(1)
        return TopLogprobs(self.ids[:, :k], self.logprobs[:, :k], tail, self.sampled)


class Shard(NamedTuple):
    """Part of the vocabulary whose logits a tensor-parallel rank computes."""

    first_id: int
    num_columns: int
    """Columns beyond these are padding."""
    gather: Callable[[Tensor], Tensor]
    """[R, n] of every rank -> [R, ranks * n], rank after rank."""


def top_logprobs(
    hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, temperatures: Tensor, k: int, num_ids: int,
    shard: Shard | None = None, given: Tensor | None = None,
) -> TopLogprobs:
    """Return the k most likely of the ids below `num_ids`, normalised over these.

    Args:
        hidden: [R, D] with R >= 1
        head: hidden [r, D] -> logits [r, V], or those of the shard
        targets: int64 [R], ids of the sampled tokens, normally below `num_ids`
        temperatures: float32 [R], logits are divided by them
        k: 1 <= k <= num_ids
        given: int64 [R, C], C <= k, distinct ids below `num_ids`: these and the k - C most likely others are chosen
    """
    first_id, width = (0, None) if shard is None else (shard.first_id, shard.num_columns)
    inverse, targets, num_ids = temperatures.reciprocal(), targets - first_id, num_ids - first_id
    own = None if given is None else given - first_id
    chunks = [slice(start, start + HEAD_ROWS) for start in range(0, len(hidden), HEAD_ROWS)]
    parts = [
        _of_logits(
            head(hidden[rows])[:, :width], targets[rows], inverse[rows], k, num_ids, None if own is None else own[rows]
        )
        for rows in chunks
    ]
    ids, values, others, sampled = map(torch.cat, zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
    if shard is not None:  # k candidates of every rank, bits viewed as floats: not every backend gathers integers
        other = others.logsumexp(1, keepdim=True)
        numbers = torch.cat([(ids + first_id).view(torch.float32), values, other, sampled], dim=1)
        gathered = shard.gather(numbers).unflatten(1, (-1, 2 * k + 2)).split([k, k, 1, 1], dim=2)
        ids, values = gathered[0].flatten(1).view(torch.int32), gathered[1].flatten(1)
        others, sampled = gathered[2].flatten(1), gathered[3][..., 0].amax(1, keepdim=True)
        if given is not None:  # before the others, so that they are among the first k
            is_given = (ids[:, :, None] == given[:, None]).any(2) & (values > -torch.inf)
            order = values.masked_fill(is_given, torch.inf).argsort(dim=1, descending=True)
            ids, values = ids.gather(1, order), values.gather(1, order)
            others = torch.cat([others, values[:, k:] * inverse[:, None]], dim=1)
            ids, values = ids[:, :k], values[:, :k]
    values, order = values.sort(dim=1, descending=True)
    scaled = values * inverse[:, None]
    tail = torch.cat([others, scaled[:, k:]], dim=1).logsumexp(1, keepdim=True)  # all ranks together have more than k
    normalizer = torch.logaddexp(tail, scaled[:, :k].logsumexp(1, keepdim=True))
    logprobs, sampled = scaled[:, :k] - normalizer, sampled * inverse[:, None] - normalizer
    return TopLogprobs(ids.gather(1, order)[:, :k], logprobs, (tail - normalizer)[:, 0], sampled[:, 0])


def _of_logits(
    logits: Tensor, targets: Tensor, inverse: Tensor, k: int, num_ids: int, given: Tensor | None
) -> tuple[Tensor, ...]:
    """Return ids int32 [r, k] in any order, their logits float32 [r, k], others float32 [r, n], targets' logits [r, 1].

    The log-sum-exp of all other ids below `num_ids` at the temperature is that of the n `others`. A shard with fewer
    than k candidates returns minus infinity for the rest, and for targets outside of it; given ids outside of it are
    ignored.
    """
    num_columns = logits.shape[1]
    num_ids = max(0, min(num_ids, num_columns))
    ids, values, others = _select(logits, inverse, min(k, num_ids), num_ids, given)
    sampled = logits.gather(1, targets.clamp(0, num_columns - 1)[:, None]).float()
    sampled.masked_fill_(((targets < 0) | (targets >= num_columns))[:, None], -torch.inf)
    missing = (0, k - ids.shape[1])
    return pad(ids, missing), pad(values, missing, value=-torch.inf), others, sampled


def _select(
    logits: Tensor, inverse: Tensor, k: int, num_ids: int, given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first three results of `_of_logits`."""
    ranked = logits if given is None else _raised(logits, given)
    if logits.device.type == "cuda":
        from hybrid_gkd.losses import topk_triton

        if 1 <= k <= topk_triton.MAX_TOPK and 64 * k <= num_ids:
            with torch.cuda.device_of(logits):  # Triton launches on the current device
                ids, values, others = topk_triton.select(ranked, inverse, k, num_ids)
            return ids, values if given is None else logits.gather(1, ids.long()).float(), others
    logits, ranked = logits[:, :num_ids].float(), ranked[:, :num_ids].float()
    values, ids = ranked.topk(k, dim=1, sorted=False)
    values = values if given is None else logits.gather(1, ids)
    others = (logits * inverse[:, None]).scatter_(1, ids, -torch.inf)
    return ids.int(), values, others.logsumexp(1, keepdim=True)


def _raised(logits: Tensor, given: Tensor) -> Tensor:
    """Return the logits with the largest number of their type at the given ids, as far as they have these columns."""
    columns = given.clamp(0, logits.shape[1] - 1)
    values = logits.gather(1, columns).masked_fill_(columns == given, torch.finfo(logits.dtype).max)
    return logits.scatter_reduce(1, columns, values, "amax")

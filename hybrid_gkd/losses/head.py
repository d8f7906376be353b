"""The fused language-model head: log-probabilities of a few given ids, from the logits of a chunk of rows at a time.

Every loss of this package depends on the logits z only through log q_j = z_j - lse(z) of a few ids. With a = dL/dlog q
on those ids, the chain rule gives the whole gradient in logit space:

    dL/dz = scatter_add(a) + c * softmax(z),   c = -sum(a)            (each row sums to 0)

so one head serves every divergence and the policy gradient (K = 1). The mass outside of the ids can be one more
outcome; its gradient changes c outside of the ids. The entropy H = -sum(q log q), which needs all ids, adds -h q (log q
+ H) with h = dL/dH, row by row, in the same pass. Gradients are computed in the forward pass, in which dL/dz overwrites
a chunk's logits; nearly all of the time is three matrix products. The products and the logits have the inputs' dtype;
everything else is float32, including the sum of the weight gradient over the chunks. Logits of the given ids are
rounded like all others: with exact ones over a log-sum-exp of rounded ones their mass could exceed 1.

Not supported: bias, logit soft-capping, sharded weights.

A matrix often has more rows than the tokenizer has tokens. The products include them, since their sizes suit the
hardware. The kernels get the logits of tokens only, and dL/dz is 0 in the other columns.

Shapes: T rows (packed trained tokens), D hidden size, V rows of the matrix, N of them tokens, K ids per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid_gkd.losses import head_torch

CHUNK_BYTES = 2**31
"""Maximum memory of a chunk's logits beyond that of the weight's gradient, which is allocated after they are freed:
8,600 rows of a vocabulary of 152k in bfloat16 at a hidden size of 1,536. A single chunk needs no float32 sum of that
gradient, which each further chunk would read and write, and may use its memory: 10,100 rows."""
STATISTICS_BYTES = 2**29
"""Memory of a chunk's logits in `row_statistics`, which has no sum over the chunks: 1,700 such rows."""
OVERLAP_ROWS = 32
"""Maximum number of rows, evenly spaced, in which the student's own top k are searched."""
LossFunction = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""(log-probabilities [r, K], slice of their rows) -> (loss [r], metrics {name: [r]})."""


class RowStatistics(NamedTuple):
    """The student's distribution at the given rows."""

    entropy: Tensor
    """float32 [T], nats."""
    top_ids: Tensor
    """int64 [T], the most likely tokens."""
    top_logprobs: Tensor
    """float32 [T], their log-probabilities."""


def head_loss(
    hidden: Tensor, weight: Tensor, ids: Tensor, loss_fn: LossFunction, *, temperature: float = 1.0,
    chunk_rows: int | None = None, with_entropy: bool = False, overlap_topk: int = 0,
    overlap_mask: Tensor | None = None, tail_topk: int = 0, entropy_weights: Tensor | None = None,
    num_ids: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum a row-local loss of the log-probabilities of `ids` under softmax(hidden @ weight[:N].T / temperature).

    Args:
        hidden: [T, D], last hidden states; with T = 0 loss and gradients are zero and part of the graph.
        weight: [V, D], the head's matrix, of the dtype of `hidden`.
        ids: int64 [T, K], each in [0, N); an id may repeat within a row.
        loss_fn: called for every chunk. Its log-probabilities are in nats, normalised over all N, float32 (float64 for
            float64 inputs) and receive a gradient. Row i of its loss may depend on row i only.
        chunk_rows: rows whose logits are in memory at a time; None takes equal chunks, see CHUNK_BYTES.
        with_entropy: also report "entropy", in nats.
        overlap_topk: k > 0: the first k columns of `ids` are the teacher's top k. Reports "overlap_ratio", the fraction
            of them in the student's own top k, over a sample of "overlap_rows" rows.
        overlap_mask: bool [T], rows counted in "overlap_ratio" and "overlap_rows"; None: all.
        tail_topk: k > 0: the first k columns of `ids` differ within a row. Inserts the log of the mass outside of them,
            exact however small it is, after column k - 1; about -1e30 if there are no ids outside.
        entropy_weights: [T]: adds sum(entropy_weights * entropy) to the loss; they receive no gradient.
        num_ids: N, the first rows of the matrix, which are tokens; None: V.

    Returns the loss, a scalar with gradients for `hidden` and `weight`, and the metrics, summed over rows, without
    gradient. Raises ValueError: shapes or dtypes do not match, or `temperature` or `chunk_rows` is not positive.
    """
    needs_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
    if chunk_rows is None:
        chunk_rows = _even_chunk_rows(hidden, weight, needs_grad[1])
    num_ids = len(weight) if num_ids is None else num_ids
    _check(hidden, weight, ids, temperature, chunk_rows, num_ids)
    total = hidden.new_zeros((), dtype=head_torch.compute_dtype(hidden))
    grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    grad_weight: Tensor | None = None
    parts: dict[str, Tensor] = {}
    reports: list[Tensor] = []
    sample: list[Tensor] = []
    stride = max(1, -(-len(hidden) // OVERLAP_ROWS))
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        kernels, buffer = _kernels(hidden), _logits_buffer(hidden, weight, chunk_rows)
        # With a single chunk, the backward pass computes the weight's gradient, which then needs no float32 copy.
        whole_dz = buffer if needs_grad[1] and len(hidden) <= chunk_rows else None
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, start + chunk_rows)
            dz = torch.mm(hidden[rows], weight.T, out=buffer[: len(hidden[rows])])  # logits, overwritten by dL/dlogits
            logits = dz[:, :num_ids]
            of_entropy = None if entropy_weights is None else entropy_weights[rows].to(total.dtype)
            wanted = with_entropy or of_entropy is not None
            logprobs, lse, entropy = kernels.row_statistics(logits, ids[rows], temperature, wanted, tail_topk)
            loss, gradient, parts = _differentiate(loss_fn, logprobs, rows, any(needs_grad))
            total += loss.sum()
            if of_entropy is not None:
                total += (of_entropy * entropy).sum()
            if with_entropy:
                parts["entropy"] = entropy
            if parts:
                reports.append(torch.stack([value.detach().to(total.dtype) for value in parts.values()]))
            if overlap_topk:
                sample.append(logits[-start % stride :: stride].clone())
            if gradient is None:
                continue
            slopes = {} if of_entropy is None else {"entropy": entropy, "grad_entropy": of_entropy}
            kernels.logit_gradient_(
                logits, ids[rows], logprobs.detach(), lse, gradient, temperature, tail_topk, **slopes
            )
            if num_ids < len(weight):
                dz[:, num_ids:] = 0
            if grad_hidden is not None:
                torch.mm(dz, weight, out=grad_hidden[rows])
            if needs_grad[1] and whole_dz is None:
                grad_weight = _add_product(grad_weight, dz.T, hidden[rows])
        sums = dict(zip(parts, torch.cat(reports, 1).sum(1), strict=True)) if reports else {}
        sums |= _overlap(sample, ids[::stride, :overlap_topk], None if overlap_mask is None else overlap_mask[::stride])
    return _AttachGradients.apply(total, hidden, weight, grad_hidden, grad_weight, whole_dz), sums


def logprobs_of_ids(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None,
    num_ids: int | None = None,
) -> Tensor:
    """Return the log-probabilities of `ids`, [T, K], without gradient; arguments and errors as in `head_loss`."""
    result = hidden.new_empty(ids.shape, dtype=head_torch.compute_dtype(hidden))

    def keep(logprobs: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        result[rows] = logprobs
        return logprobs.new_zeros(len(logprobs)), {}

    with torch.no_grad():
        head_loss(hidden, weight, ids, keep, temperature=temperature, chunk_rows=chunk_rows, num_ids=num_ids)
    return result


@torch.no_grad()
def row_statistics(
    hidden: Tensor, weight: Tensor, *, temperature: float = 1.0, chunk_rows: int | None = None,
    num_ids: int | None = None,
) -> RowStatistics:
    """Compute entropy and most likely token of softmax(hidden @ weight[:N].T / temperature), without gradient.

    Costs one of the three matrix products of `head_loss`. Arguments: as there.
    """
    chunk_rows = chunk_rows or max(1, STATISTICS_BYTES // (len(weight) * weight.element_size()))
    num_ids = len(weight) if num_ids is None else num_ids
    dtype = head_torch.compute_dtype(hidden)
    found = RowStatistics(*(hidden.new_empty(len(hidden), dtype=each) for each in (dtype, torch.int64, dtype)))
    with torch.autocast(hidden.device.type, enabled=False):
        kernels, buffer = _kernels(hidden), _logits_buffer(hidden, weight, chunk_rows)
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = torch.mm(hidden[rows], weight.T, out=buffer[: len(hidden[rows])])[:, :num_ids]
            found.top_ids[rows] = logits.argmax(1)
            logprobs, _, entropy = kernels.row_statistics(logits, found.top_ids[rows, None], temperature, True)
            found.top_logprobs[rows], found.entropy[rows] = logprobs[:, 0], entropy
    return found


class _AttachGradients(torch.autograd.Function):
    """Gives a scalar gradients that are computed already, or that follow from dL/dlogits of all rows."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, hidden: Tensor, weight: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None,
        dz: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(grad_hidden, grad_weight, dz, None if dz is None else hidden)
        ctx.weight_dtype = weight.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, dz, hidden = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * upstream
        if grad_weight is not None:
            grad_weight = _kernels(grad_weight).scaled(grad_weight, upstream, ctx.weight_dtype)
        if dz is not None:  # scale the smaller matrix
            with torch.autocast(dz.device.type, enabled=False):
                grad_weight = dz.T @ (hidden * upstream)
        return None, grad_hidden, grad_weight, None, None, None


def _differentiate(
    loss_fn: LossFunction, logprobs: Tensor, rows: slice, needs_grad: bool
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Return the loss [r], its gradient for the log-probabilities [r, K] or None, and the metrics of `loss_fn`."""
    with torch.set_grad_enabled(needs_grad):
        loss, parts = loss_fn(logprobs.requires_grad_(needs_grad), rows)
        for what, value in {"the loss": loss, **parts}.items():
            if value.shape != logprobs.shape[:1]:
                raise ValueError(f"{what} must be one value per row, [{len(logprobs)}]; got {list(value.shape)}")
        gradient = torch.autograd.grad(loss.sum(), logprobs)[0] if needs_grad else None
    return loss.detach(), gradient, dict(parts)


def _kernels(tensor: Tensor) -> Any:
    """Return the module with row_statistics, logit_gradient_ and scaled: Triton's on a GPU, else torch's."""
    if tensor.is_cuda and tensor.dtype != torch.float64:
        from hybrid_gkd.losses import head_triton

        return head_triton
    return head_torch


def _logits_buffer(hidden: Tensor, weight: Tensor, chunk_rows: int) -> Tensor:
    """Return a buffer [chunk, V] whose rows start at multiples of 128 bytes, for a vocabulary of any size."""
    vocabulary = weight.shape[0]
    buffer = hidden.new_empty(min(hidden.shape[0], chunk_rows), -(-vocabulary // 64) * 64)
    buffer[:, vocabulary:] = 0  # finite, since the CPU's bfloat16 products multiply the padding by 0
    return buffer[:, :vocabulary]


def _overlap(sample: list[Tensor], teacher_ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Return the fraction of `teacher_ids` [n, k] in the top k of the logits [n, N], summed over rows; their number.

    `mask` [n]: rows that count; None: all. All ids whose logit equals the k-th largest count as inside.
    """
    if not sample:
        return {}
    logits = torch.cat(sample)
    smallest = logits.topk(teacher_ids.shape[1], sorted=False).values.amin(1, keepdim=True)
    shares = (logits.gather(1, teacher_ids) >= smallest).float().mean(1)
    if mask is not None:
        return {"overlap_ratio": (shares * mask).sum(), "overlap_rows": mask.float().sum()}
    num_rows = torch.full((), len(logits), dtype=torch.float32, device=logits.device)
    return {"overlap_ratio": shares.sum(), "overlap_rows": num_rows}


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right in float32 (float64 for float64); overwrites `total`."""
    dtype = head_torch.compute_dtype(left)
    if left.dtype == dtype:
        return left @ right if total is None else total.addmm_(left, right)
    if left.is_cuda:  # sums within the product are float32 too
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    product = (left @ right).to(dtype)
    return product if total is None else total.add_(product)


def _even_chunk_rows(hidden: Tensor, weight: Tensor, needs_weight_gradient: bool) -> int:
    """Return the rows per chunk: about equal chunks within the memory limit."""
    num_rows, row_bytes = len(hidden), weight.shape[0] * weight.element_size()
    if needs_weight_gradient and 0 < num_rows <= (CHUNK_BYTES + 4 * weight.numel()) // row_bytes:
        return num_rows
    most = max(1, (CHUNK_BYTES + weight.numel() * weight.element_size()) // row_bytes)
    rows = -(-num_rows // max(1, -(-num_rows // most)))
    return max(1, min(most, -(-rows // 128) * 128))


def _check(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, chunk_rows: int, num_ids: int) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}"
        raise ValueError(f"hidden [T, D] and weight [V, D] must have the same D: {shapes}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must have one dtype; got {hidden.dtype} and {weight.dtype}")
    if ids.ndim != 2 or ids.shape[0] != hidden.shape[0] or ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64 [{hidden.shape[0]}, K]; got {ids.dtype} {tuple(ids.shape)}")
    if not temperature > 0 or chunk_rows < 1:
        raise ValueError(f"temperature and chunk_rows must be positive; got {temperature} and {chunk_rows}")
    if not 1 <= num_ids <= len(weight):
        raise ValueError(f"num_ids must be from 1 to the {len(weight)} rows of weight; got {num_ids}")

"""The teacher's top-k: against a sort of the whole log-softmax, in shards, and its GPU kernels in an interpreter."""

import importlib.util
import math

import pytest
import torch
from kernels import interpreted

from hybrid_gkd.losses import topk
from hybrid_gkd.losses.topk import Shard, top_logprobs

ROWS, HIDDEN, COLUMNS = 23, 6, 41


def case(seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = scale * torch.randn(COLUMNS, HIDDEN, generator=generator)
    targets = torch.randint(COLUMNS, (ROWS,), generator=generator)
    temperatures = torch.rand(ROWS, generator=generator) + 0.5
    return hidden, weight, targets, temperatures


def expect(found, k, num_ids, hidden, weight, targets, temperatures, given=None):
    """Given ids come first in the choice, and not in the order."""
    logits = (hidden @ weight.T / temperatures[:, None]).double()
    logprobs = (logits - logits[:, :num_ids].logsumexp(1, keepdim=True)).float()
    chosen = logprobs[:, :num_ids] if given is None else logprobs[:, :num_ids].scatter(1, given, torch.inf)
    chosen = chosen.topk(k).indices
    top, order = logprobs.gather(1, chosen).sort(dim=1, descending=True)
    ids = chosen.gather(1, order)
    assert found.ids.dtype == torch.int32
    assert torch.equal(found.ids.long(), ids)  # no ties in this case
    torch.testing.assert_close(found.logprobs, top, atol=1e-5, rtol=0)
    tail = logprobs[:, :num_ids].double().scatter(1, ids, -torch.inf).logsumexp(1).float()
    torch.testing.assert_close(found.tail, tail, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.sampled, logprobs.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)


def given_ids(num_given, num_ids):
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(num_ids, generator=generator)[:num_given] for _ in range(ROWS)])


GIVEN = [(3, 3, 41), (3, 7, 41), (1, 41, 41), (4, 8, 25)]
"""C, K, number of ids that count."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_given", "k", "num_ids"), GIVEN)
def test_given_ids_are_candidates_however_unlikely(monkeypatch, num_given, k, num_ids, dtype):
    monkeypatch.setattr(topk, "HEAD_ROWS", 4)
    hidden, weight, targets, temperatures = case()
    logits = (hidden @ weight.T).to(dtype)
    given = given_ids(num_given, num_ids)
    found = top_logprobs(logits, lambda rows: rows, targets, temperatures, k, num_ids, given=given)
    if dtype == torch.float32:
        expect(found, k, num_ids, hidden, weight, targets, temperatures, given)
    assert all(set(wanted) <= set(ids) for wanted, ids in zip(given.tolist(), found.ids.tolist(), strict=True))


@pytest.mark.parametrize(("k", "num_ids"), [(1, 41), (5, 41), (41, 41), (7, 30), (30, 30)])
@pytest.mark.parametrize("head_rows", [4, 1024])
def test_top_logprobs(monkeypatch, k, num_ids, head_rows):
    """Only the first num_ids columns count: the others are no tokens, however large they are."""
    monkeypatch.setattr(topk, "HEAD_ROWS", head_rows)
    hidden, weight, targets, temperatures = case()
    weight[num_ids:] *= 9
    found = top_logprobs(hidden, lambda rows: rows @ weight.T, targets, temperatures, k, num_ids)
    expect(found, k, num_ids, hidden, weight, targets, temperatures)


@pytest.mark.parametrize(("k", "num_ids"), [(1, 41), (5, 41), (41, 41), (13, 25), (3, 11)])
@pytest.mark.parametrize("num_given", [0, 1, 3])
def test_shards_of_the_vocabulary(k, num_ids, num_given):
    """Three ranks: the last one's part is padded, and may hold none of the ids that can be chosen."""
    hidden, weight, targets, temperatures = case()
    given = given_ids(min(num_given, k), num_ids) if num_given else None
    arguments = (hidden, weight, targets, temperatures, given)
    firsts, width = (0, 16, 32), 16
    sent = []
    for first in firsts:  # what every rank would send
        part = torch.nn.functional.pad(weight[first : first + width], (0, 0, 0, max(0, first + width - COLUMNS)))
        shard = Shard(first_id=first, num_columns=min(width, COLUMNS - first), gather=sent.append)
        with pytest.raises(AttributeError):  # nothing came back
            top_logprobs(hidden, lambda rows, part=part: rows @ part.T + 9.0 * (part == 0).all(1), targets,
                         temperatures, k, num_ids, shard, given)  # fmt: skip
    shard = Shard(first_id=0, num_columns=width, gather=lambda own: torch.cat(sent, dim=1))
    found = top_logprobs(hidden, lambda rows: rows @ weight[:width].T, targets, temperatures, k, num_ids, shard, given)
    expect(found, k, num_ids, *arguments)


def test_a_tail_far_below_float32():
    """Sharp logits: 1 minus the sum of the candidates would be 0, or noise of either sign."""
    hidden, weight, targets, temperatures = case(scale=20.0)
    found = top_logprobs(hidden, lambda rows: rows @ weight.T, targets, temperatures, 5, COLUMNS)
    logprobs = (hidden @ weight.T / temperatures[:, None]).double().log_softmax(1)
    tail = logprobs.sort(descending=True).values[:, 5:].logsumexp(1)
    assert tail.median() < math.log(1e-9)
    torch.testing.assert_close(found.tail.double(), tail, atol=2e-4, rtol=0)  # of logits of 200 in float32


def test_fewer_candidates_leave_more_to_the_tail():
    hidden, weight, targets, temperatures = case()
    arguments = (hidden, lambda rows: rows @ weight.T, targets, temperatures)
    many, few = (top_logprobs(*arguments, k, COLUMNS) for k in (9, 4))
    for got, want in zip(many.first(4), few, strict=True):
        torch.testing.assert_close(got, want)
    assert all(torch.equal(got, want) for got, want in zip(few.first(4), few, strict=True))


INTERPRETED = """
import torch
from hybrid_gkd.losses.topk_triton import select
generator = torch.Generator().manual_seed(0)
for num_columns, num_ids, k in ((5000, 5000, 1), (9001, 8999, 64), (17001, 16400, 256)):
    logits = 3 * torch.randn(3, num_columns, generator=generator)
    logits[0] = logits[0].round()  # many ties
    logits[1, 100:400] += 20  # the largest in few blocks
    logits[2, 7 : 7 + k] += 60  # next to nothing is left for the others
    logits[:, num_ids:] = 99  # no tokens
    inverse = torch.tensor([1.0, 0.5, 2.0])
    ids, values, others = select(logits, inverse, k, num_ids)
    assert torch.equal(values.sort(descending=True).values, logits[:, :num_ids].topk(k).values), (num_columns, k)
    assert torch.equal(logits.gather(1, ids.long()), values)
    assert all(len(set(row)) == k for row in ids.tolist())
    expected = (logits * inverse[:, None])[:, :num_ids].scatter(1, ids.long(), -torch.inf).logsumexp(1)
    assert (others.logsumexp(1) - expected).abs().max() < 1e-5
    if k == 64:  # given ids have the largest number in place of their logits
        given = torch.randperm(num_ids, generator=generator)[: k // 2].repeat(3, 1)
        raised = logits.scatter(1, given, torch.finfo(logits.dtype).max)
        ids, _, others = select(raised, inverse, k, num_ids)
        assert all(set(some) <= set(row) for some, row in zip(given.tolist(), ids.tolist()))
        expected = (logits * inverse[:, None])[:, :num_ids].scatter(1, ids.long(), -torch.inf).logsumexp(1)
        assert (others.logsumexp(1) - expected).abs().max() < 1e-5
print("right")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
def test_kernels_in_the_interpreter():
    assert interpreted("-c", INTERPRETED) == ["right"]

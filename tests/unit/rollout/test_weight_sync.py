"""Weights from pool to pool: real gloo groups, whose members are threads here."""

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout.weight_sync import WeightSync
from hybrid_gkd.rollout.weights import layout_of, split_buckets

SHAPES = {"embedding": (11, 4), "scale": (3,), "square": (7, 5), "one": (1,), "large": (60, 50)}


def make_weights(seed=0, dtype=torch.float32):
    """Named weights of odd shapes, one of them tied under two names."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return [*weights.items(), ("head", weights["embedding"])]


def handed_out(weights):
    """Yield weights as the actor does: a tied one under all its names in a row."""
    return [(name, dict(weights)[name]) for names, *_ in layout_of(weights) for name in names]


@pytest.fixture
def members():
    """Make the members of a group of `size`, each in its thread; members, and an executor for their calls."""
    with ThreadPoolExecutor(4) as executor:

        def make(size, *, bucket_bytes=200, timeout=60.0, dtype=torch.float32, forming=60.0, buffers=()):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = probe.getsockname()
            options = {
                "size": size, "layout": layout_of(make_weights(), buffers), "dtype": dtype,
                "device": torch.device("cpu"), "bucket_bytes": bucket_bytes, "timeout": forming,
            }
            futures = [executor.submit(WeightSync, address, rank=rank, **options) for rank in range(size)]
            formed = [future.result(90) for future in futures]
            for member in formed:
                member.timeout = timeout  # of what follows: to form may take longer than a test may wait
            return formed, executor

        yield make


@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_receiver_gets_every_weight_exactly_under_all_names(members, bucket_bytes, dtype):
    (sender, *receivers), executor = members(3, bucket_bytes=bucket_bytes, dtype=dtype)
    for seed in (1, 2):  # the group lasts
        sent = make_weights(seed, dtype)
        sending = executor.submit(sender.send, iter(handed_out(sent)))
        for receiving in [executor.submit(lambda r=r: list(r.receive())) for r in receivers]:
            received = receiving.result(60)  # all of it kept: no memory is used twice
            assert [name for name, _ in received] == [name for name, _ in handed_out(sent)]
            for name, tensor in received:
                assert tensor.dtype == dtype
                assert torch.equal(tensor, dict(sent)[name])
        sending.result(60)


def test_buffers_keep_their_types(members):
    """Router biases of some models are float32 beside weights in bfloat16."""
    buffers = [("bias", torch.tensor([1.001, -0.0037, 12.34])), ("scale", torch.tensor([0.1])),
               ("steps", torch.tensor([2**40 + 1]))]  # fmt: skip
    (sender, receiver), executor = members(2, dtype=torch.bfloat16, buffers=buffers)
    sending = executor.submit(sender.send, iter([*handed_out(make_weights(dtype=torch.bfloat16)), *buffers]))
    received = dict(executor.submit(lambda: list(receiver.receive())).result(60))
    sending.result(60)
    assert received["square"].dtype == torch.bfloat16
    for name, tensor in buffers:
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


@pytest.mark.slow
def test_a_receiver_that_takes_nothing_ends_the_sending_at_the_timeout(members):
    (sender, receiver), _ = members(2, timeout=0.3)
    with pytest.raises(WorkerError, match=r"weight sync (not complete|failed)"):
        sender.send(iter(handed_out(make_weights())))
    with pytest.raises(WorkerError, match=r"weight sync (not complete|failed)"):
        list(receiver.receive())


def test_a_sender_that_sends_nothing_ends_the_receiving_at_the_timeout(members):
    (_, receiver), _ = members(2, timeout=0.3)
    with pytest.raises(WorkerError, match=r"weight sync (not complete|failed)"):
        list(receiver.receive())


def test_a_cancelled_call_ends_long_before_the_timeout(members, monkeypatch):
    (sender, _), executor = members(2, timeout=600.0, forming=5.0)  # by then gloo drops what nobody takes
    monkeypatch.setattr("hybrid_gkd.rollout.weight_sync.is_cancelled", lambda: True)
    with pytest.raises(WorkerError, match="weight sync cancelled: another worker of the group has failed"):
        executor.submit(sender.send, iter(handed_out(make_weights()))).result(60)


@pytest.mark.slow
def test_a_member_that_never_comes_is_an_error_that_names_the_address():
    options = {"layout": [], "dtype": torch.float32, "device": torch.device("cpu"), "bucket_bytes": 100}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with pytest.raises(WorkerError, match=r"cannot form the weight sync group at 127\.0\.0\.1:"):
            WeightSync(probe.getsockname(), rank=1, size=2, timeout=0.3, **options)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=12), st.integers(1, 30))
def test_buckets_keep_the_order_and_the_limit(lengths, limit):
    layout = [((str(n),), torch.Size([length])) for n, length in enumerate(lengths)]
    buckets = split_buckets(layout, limit)
    assert [weight for bucket in buckets for weight in bucket] == layout
    for bucket in buckets:
        assert len(bucket) == 1 or sum(shape.numel() for _, shape in bucket) <= limit
    for first, second in itertools.pairwise(buckets):
        assert sum(shape.numel() for _, shape in (*first, second[0])) > limit

"""Pure parts of publishing: comparison, the shares of tensor parallelism, and what needs no collective.

Publishing into vLLM's own layers is in tests/gpu/test_hybrid_engine.py: on a CPU they keep no plain weights.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout.verify import first_difference, tensor_parallel_share, verify
from hybrid_gkd.rollout.vllm_weights import InPlaceWeights
from hybrid_gkd.rollout.weights import gather_in_buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bit", range(16))
def test_every_flipped_bit_is_found(dtype, bit):
    weight = random(5, 3, dtype=dtype)
    held = weight.clone()
    assert first_difference(weight, held) is None
    bits = held.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[4, 1] ^= torch.tensor(1 << bit).to(bits.dtype)
    assert "1 of 15 values differ, first [4, 1]" in first_difference(weight, held)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_leaves_a_sum_unchanged_is_found(dtype):
    weight = random(6, 4, dtype=dtype)
    assert "first [1, 0]" in first_difference(weight, weight[[0, 2, 1, 3, 4, 5]])
    assert "first [0, 2]" in first_difference(weight, weight[:, [0, 1, 3, 2]])
    assert first_difference(weight, weight.T.clone()) == "shape [4, 6], but the actor has [6, 4]"


def test_nan_is_a_difference_and_the_sign_of_zero_is_none():
    weight = torch.zeros(3)
    assert first_difference(weight, -weight) is None
    weight[1] = torch.nan
    assert "first [1]" in first_difference(weight, weight.clone())


def test_a_wider_type_holds_the_same_values():
    weight = random(3, dtype=torch.bfloat16)
    assert first_difference(weight, weight.float()) is None
    assert first_difference(weight, weight.float() + 1e-6) is not None


@given(ranks=st.sampled_from([1, 2, 4, 8]), parts=st.sampled_from([1, 2, 4, 8]), dim=st.sampled_from([0, 1]))
def test_shares_of_tensor_parallelism(ranks, parts, dim):
    """`parts` equal parts over `ranks` ranks, neighbours sharing one where there are fewer; one part is a replica."""
    if parts > ranks:
        return
    full = random(8, 8)
    cut = full.chunk(parts, dim)
    for rank in range(ranks):
        share = tensor_parallel_share(full, cut[0].shape, rank=rank, ranks=ranks)
        assert torch.equal(share, cut[rank * parts // ranks])


@pytest.mark.parametrize("shape", [(3, 8), (4, 4), (64,), (16, 8)])
def test_a_shape_that_is_no_share_is_reported_as_such(shape):
    full, held = random(8, 8), random(*shape)
    share = tensor_parallel_share(full, held.shape, rank=1, ranks=2)
    assert "but the actor has [8, 8]" in first_difference(share, held)


def test_verify_takes_all_weights_and_names_the_first_that_differs():
    held = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    taken = []

    def weights(**changed):
        for name in ("a", "b", "c"):
            taken.append(name)
            yield name, changed.get(name, torch.ones(2))

    verify(weights(), held, lambda name, full: [(full, held[name])])
    with pytest.raises(WorkerError, match=r"verify_weights: b in .* 2 of 2 values differ, first \[0\]: 1\.0.* 0\.0"):
        verify(weights(b=torch.zeros(2), c=torch.zeros(2)), held, lambda name, full: [(full, held[name])])
    with pytest.raises(WorkerError, match="a in the rollout engine: the engine has no weight of this name"):
        verify(weights(), {}, lambda name, full: [(full, {}[name])])
    with pytest.raises(WorkerError, match=r"left weights of the rollout engine unset: \['d'\]"):
        verify(weights(), ["a", "b", "c", "d"], lambda name, full: [(full, held[name])])
    assert taken == ["a", "b", "c"] * 4


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_plain_tensors_are_only_cast(bucket_bytes):
    tensors = {"x": random(3, 2), "y": random(5), "scalar": torch.tensor(1.5)}
    named = [*tensors.items(), ("tied", tensors["x"])]
    found = list(gather_in_buckets(named, dtype=torch.bfloat16, bucket_bytes=bucket_bytes))
    assert [name for name, _ in found] == ["x", "tied", "y", "scalar"]
    assert found[0][1] is found[1][1]
    for name, tensor in found:
        assert torch.equal(tensor, dict(named)[name].to(torch.bfloat16))


class Engine(torch.nn.Module):
    """As vLLM keeps weights: queries, keys and values in one tensor, rows behind the vocabulary, a tied head."""

    order = ("q_proj", "k_proj", "v_proj")
    """In which the loader puts their rows."""

    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self.embed = torch.nn.Embedding(8, 4)
        self.embed.shard_indices = SimpleNamespace(
            org_vocab_start_index=0, org_vocab_end_index=5, num_org_elements=5
        )
        self.qkv_proj = torch.nn.Linear(4, 9)
        self.qkv_proj.output_partition_sizes = [4, 3, 2] if self.order[0] == "q_proj" else [2, 3, 4]
        self.head, self.norm, self.loads = self.embed, torch.nn.LayerNorm(4, bias=False), 0
        for parameter in self.parameters():
            parameter.detach().fill_(torch.nan)

    def load_weights(self, weights):
        self.loads += 1
        for name, full in weights:
            module, _, attribute = name.partition(".")
            if module in self.order:
                rows = dict(q_proj=4, k_proj=3, v_proj=2)
                first = sum(rows[each] for each in self.order[: self.order.index(module)])
                getattr(self.qkv_proj, attribute).detach()[first : first + rows[module]] = full
            elif module == "embed":
                self.embed.weight.detach()[:5], self.embed.weight.detach()[5:] = full, 0
            elif module == "norm":
                self.norm.weight.detach().copy_(full)


class OtherEngine(Engine):
    order = ("v_proj", "k_proj", "q_proj")


def weights_of(seed):
    torch.manual_seed(seed)
    embed, rows = torch.randn(5, 4), {"q_proj": 4, "k_proj": 3, "v_proj": 2}
    projections = {f"{name}.weight": torch.randn(count, 4) for name, count in rows.items()}
    biases = {f"{name}.bias": torch.randn(count) for name, count in rows.items()}
    return {"embed.weight": embed, "head.weight": embed, **projections, **biases, "norm.weight": torch.randn(4)}


@pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
@pytest.mark.parametrize("kind", [Engine, OtherEngine])
def test_weights_are_copied_to_where_the_loader_has_put_them_or_by_it(kind, bucket_bytes, monkeypatch):
    """The layout knows queries first: where the loader has another order, it goes on loading."""
    for name, value in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(f"vllm.distributed.get_tensor_model_parallel_{name}", lambda value=value: value)
    engine, expected = kind(), kind()
    in_place = InPlaceWeights(engine, bucket_bytes=bucket_bytes)
    for seed in range(3):
        expected.load_weights(weights_of(seed).items())
        in_place.load(iter(weights_of(seed).items()))
        for name, value in expected.state_dict().items():
            assert torch.equal(engine.state_dict()[name], value), name
        for parameter in engine.parameters():
            parameter.detach().fill_(torch.nan)  # as memory that was given back
    assert engine.loads == (1 if kind is Engine else 3)
    if kind is Engine:
        fewer = weights_of(3)
        del fewer["k_proj.bias"]
        with pytest.raises(WorkerError, match=r"left weights of the rollout engine unset: \['k_proj\.bias'\]"):
            in_place.load(fewer.items())

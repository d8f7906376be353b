"""Pure parts of publishing: comparison, the shares of tensor parallelism, and what needs no collective.

Publishing into vLLM's own layers is in tests/gpu/test_hybrid_engine.py: on a CPU they keep no plain weights.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout.verify import VLLMLayout, first_difference, tensor_parallel_share, verify
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


@pytest.mark.parametrize("merged_in_the_folder", [False, True])
def test_a_weight_that_vllm_merges_is_found_under_the_names_of_either_folder(merged_in_the_folder, monkeypatch):
    """Some folders have gate and up as one weight, some as two; vLLM says the same of both. Rank 1 of 2."""
    tensor_parallel = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: 1, get_tensor_model_parallel_world_size=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed", tensor_parallel)
    gate, up = random(6, 4), random(6, 4) + 1
    model = torch.nn.ModuleDict({"gate_up_proj": torch.nn.Linear(4, 6, bias=False)})
    model.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    model.gate_up_proj.output_partition_sizes = [3, 3]
    with torch.no_grad():
        model.gate_up_proj.weight.copy_(torch.cat([gate[3:], up[3:]]))
    weights = [("gate_proj.weight", gate), ("up_proj.weight", up)]
    if merged_in_the_folder:
        weights = [("gate_up_proj.weight", torch.cat([gate, up]))]
    layout = VLLMLayout(model)
    for _ in range(2):
        verify(weights, layout.places, layout.pairs)
    with pytest.raises(WorkerError, match="left weights of the rollout engine unset"):
        verify(weights[1:], layout.places, layout.pairs)
    weights[-1][1][5] += 1
    with pytest.raises(WorkerError, match=f"{weights[-1][0]} in the rollout engine: 4 of"):
        verify(weights, layout.places, layout.pairs)

"""The sharded model by itself: its schedule, and a frozen one. CPU, one rank."""

import pytest
import torch

from hybrid_gkd.config import FSDPConfig, ModelConfig, OptimConfig
from hybrid_gkd.models.packed_attention import pack
from hybrid_gkd.student.logprob_model import LogprobModel
from hybrid_gkd.student.sharded_model import GROUP_BYTES, ShardedModel, block_groups, learning_rate
from hybrid_gkd.testing import make_tiny_model, single_process_group


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5)]),
    ],
)
def test_learning_rate_warms_up_and_follows_the_schedule(kind, expected):
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type=kind, min_lr_ratio=0.2)
    found = [learning_rate(optim, update, 6) for update in range(6)]
    assert found == pytest.approx(expected)


def test_a_warm_up_may_be_a_share_of_the_run_and_steps_win_over_it():
    share = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.5)
    assert [learning_rate(share, update, 8) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    both = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.5, lr_warmup_steps=1)
    assert learning_rate(both, 1, 8) == 1.0


def test_small_blocks_are_gathered_together_and_a_large_one_alone():
    def sizes(millions):
        blocks = [torch.nn.Linear(1000, 1000 * millions, bias=False, device="meta") for _ in range(7)]
        groups = block_groups(blocks)
        assert [block for group in groups for block in group] == blocks
        return [len(group) for group in groups]

    assert GROUP_BYTES == 2**28
    assert sizes(millions=40) == [3, 3, 1]
    assert sizes(millions=100) == [1, 1, 1, 1, 1, 1, 1]
    assert sizes(millions=1) == [7]


def test_a_frozen_model_has_weights_and_log_probabilities_but_no_optimizer(tmp_path):
    folder = make_tiny_model(tmp_path)
    with single_process_group():
        frozen = ShardedModel(
            ModelConfig(path=str(folder)), wrap=LogprobModel, fsdp=FSDPConfig(), shard_size=1,
            device=torch.device("cpu"), bucket_bytes=2**20, optim=None,
        )
        assert frozen.optimizer_tensors() == []
        assert len(frozen.parameters()) == len({id(p) for p in frozen.hf_model.parameters()})
        names = [name for name, _ in frozen.full_tensors(torch.bfloat16)]
        assert sorted(names) == sorted(frozen.hf_model.state_dict())
        ids = torch.arange(5)
        with torch.no_grad():
            found, _ = frozen.model(pack([ids.numpy()], "cpu"), ids, ids[:, None], temperature=1.0)
        assert found.shape == (5, 1)
        with pytest.raises(AssertionError, match="has no optimizer"):
            frozen.step()

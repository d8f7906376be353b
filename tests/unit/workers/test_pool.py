"""Which calls are taken for stuck after a failure, without Ray."""

import pytest

from hybrid_gkd.config import Config
from hybrid_gkd.workers.pool import Pool


@pytest.mark.parametrize(
    ("method", "fsdp_size", "expected"),
    [
        ("compute_logprobs", -1, [0, 1, 3]), ("compute_logprobs", 2, [3]), ("compute_logprobs", 1, []),
        ("publish", 2, [3]), ("accumulate", 2, [0, 1, 3]), ("accumulate", 1, [0, 1, 3]),
        ("update", 1, [0, 1, 3]), ("compute_values", 1, [0, 1, 3]), ("save_checkpoint", 1, [0, 1, 3]),
        ("generate", -1, [3]), ("finish_snapshot", -1, []),
    ],
)  # fmt: skip
def test_those_wait_for_a_failed_worker_who_share_weights_or_gradients_with_it(method, fsdp_size, expected, tmp_path):
    config = Config()
    config.trainer.n_gpus_per_node = 4
    config.actor_rollout_ref.actor.fsdp_config.fsdp_size = fsdp_size
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    pool, other = (Pool(config, role=role, log_folder=tmp_path) for role in ("actor worker", "rollout worker"))
    pool.mark_stuck_peers(method, 2, {rank: (pool, rank) for rank in range(4)} | {4: (other, 3)})
    assert sorted(pool.stuck_calls) == expected

"""The memory plan: what the residency table and the offload keys add up to."""

import pytest

from hybrid_gkd.config import load_config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.plan import GIB, Size, check_memory, phase_bytes

SEVEN_B = Size(parameters=7_615_616_512, kv_bytes_per_token=57_344)
CARD = 140 * GIB
FSDP = "actor_rollout_ref.actor.fsdp_config"


def config(*overrides):
    return load_config(
        [
            "data.train_files=unused", "actor_rollout_ref.model.path=unused",
            "actor_rollout_ref.teacher.server_ip=elsewhere", "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
            *overrides,
        ]
    )


def test_seven_billion_on_one_card_fit_with_offload_and_are_refused_without():
    check_memory(config(f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"), SEVEN_B, total_bytes=CARD)
    with pytest.raises(ConfigError, match=r"optimizer_offload.*phase rollout.*optimizer_state 56\.7.*has 140\.0"):
        check_memory(config(), SEVEN_B, total_bytes=CARD)


def test_each_phase_holds_what_the_table_says_and_what_may_not_move():
    moving = phase_bytes(
        config(f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"), SEVEN_B, device="cuda", total_bytes=CARD
    )
    assert set(moving["rollout"]) == {"engine_weights", "kv_cache"}
    assert set(moving["update"]) == {"actor_params", "gradients", "sleeping engine"}
    assert moving["optimizer_step"]["optimizer_state"] == 8 * SEVEN_B.parameters
    assert sum(moving["rollout"].values()) == pytest.approx(0.6 * CARD)
    staying = phase_bytes(
        config("actor_rollout_ref.rollout.free_cache_engine=false"), SEVEN_B, device="cuda", total_bytes=CARD
    )
    assert all({"actor_params", "optimizer_state", "kv_cache"} <= set(tenants) for tenants in staying.values())


def test_shards_and_tensor_parallel_engines_split_the_bytes():
    two = config("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    tenants = phase_bytes(two, SEVEN_B, device="cuda", total_bytes=None)["publish"]
    assert tenants["actor_params"] == 2 * SEVEN_B.parameters
    assert tenants["engine_weights"] == SEVEN_B.parameters
    assert "kv_cache" not in tenants
    replicated = config("trainer.n_gpus_per_node=2", f"{FSDP}.fsdp_size=1")
    assert phase_bytes(replicated, SEVEN_B, device="cuda", total_bytes=None)["publish"]["actor_params"] == (
        4 * SEVEN_B.parameters
    )


def test_nothing_moves_on_the_cpu():
    tenants = phase_bytes(config(), SEVEN_B, device="cpu", total_bytes=None)["rollout"]
    assert set(tenants) == {"actor_params", "optimizer_state", "engine_weights"}

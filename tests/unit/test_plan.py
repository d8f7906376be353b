"""The memory plan: what the residency table and the offload keys add up to."""

import pytest
import tiny

from hybrid_gkd.config import load_config
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.plan import GIB, Size, check_memory, phase_bytes, rollout_share, teacher_share

SEVEN_B = Size(parameters=7_615_616_512, kv_bytes_per_token=57_344, activation_bytes_per_token=4_386_816)
CARD = 140 * GIB
FSDP = "actor_rollout_ref.actor.fsdp_config"


OFFLOAD = (f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true")
COMPUTED = "actor_rollout_ref.rollout.gpu_memory_utilization=null"
MANY = "actor_rollout_ref.rollout.max_num_seqs=4096"


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
    # A smaller engine would fit beside them, but then the update does not.
    with pytest.raises(ConfigError, match=r"optimizer_offload.*phase update.*activations 6\d\..*has 140\.0"):
        check_memory(config(COMPUTED), SEVEN_B, total_bytes=CARD)


def test_each_phase_holds_what_the_table_says_and_what_may_not_move():
    moving = phase_bytes(
        config(f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"), SEVEN_B, device="cuda", total_bytes=CARD
    )
    assert set(moving["rollout"]) == {"engine_weights", "kv_cache"}
    assert set(moving["update"]) == {"actor_params", "gradients", "activations", "sleeping engine"}
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


def test_pools_of_their_own_hold_what_is_theirs():
    pools = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=2")
    separate = config(*pools, COMPUTED, MANY, f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true")
    phases = phase_bytes(separate, SEVEN_B, device="cuda", total_bytes=CARD)
    assert set(phases["rollout"]) == {"engine_weights", "kv_cache"}
    assert sum(phases["rollout"].values()) == pytest.approx(0.92 * CARD)  # the card is the engine's alone
    assert set(phases["update"]) == {"actor_params", "gradients", "activations"}
    assert set(phases["optimizer_step"]) == {"actor_params", "gradients", "optimizer_state"}
    assert phases["publish"] == {"actor_params": 2 * SEVEN_B.parameters}  # they stay: nobody else wants the room
    check_memory(separate, SEVEN_B, total_bytes=CARD)


def test_nothing_moves_on_the_cpu():
    tenants = phase_bytes(config(), SEVEN_B, device="cpu", total_bytes=None)["rollout"]
    assert set(tenants) == {"actor_params", "optimizer_state", "engine_weights"}


def test_the_engine_takes_what_is_free_beside_what_stays():
    free = CARD - GIB
    assert rollout_share(config(*OFFLOAD, COMPUTED, MANY), SEVEN_B, total_bytes=CARD, free_bytes=free) == 0.92
    assert rollout_share(config(*OFFLOAD, COMPUTED, MANY), SEVEN_B, total_bytes=CARD, free_bytes=CARD // 2) == 0.45
    kept = config(OFFLOAD[0], COMPUTED, MANY)  # the optimizer state stays: 56.7 GiB
    assert rollout_share(kept, SEVEN_B, total_bytes=CARD, free_bytes=free) == pytest.approx(0.54)
    resident = config("actor_rollout_ref.rollout.free_cache_engine=false", COMPUTED, MANY)
    small = Size(parameters=494_000_000, kv_bytes_per_token=12_288)  # 7.4 GiB with gradients and moments
    assert rollout_share(resident, small, total_bytes=CARD, free_bytes=free) == pytest.approx(0.44)


def test_the_engine_takes_no_more_than_its_sequences_can_use():
    # Weights 14.2, 256 sequences of 1024 + 1024 tokens and a block 29.8, workspace 8 GiB.
    assert rollout_share(config(*OFFLOAD, COMPUTED), SEVEN_B, total_bytes=CARD, free_bytes=CARD - GIB) == 0.38
    two = config(
        *OFFLOAD, COMPUTED, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    )
    assert rollout_share(two, SEVEN_B, total_bytes=CARD, free_bytes=CARD - GIB) == 0.22
    longer = config(*OFFLOAD, COMPUTED, "actor_rollout_ref.rollout.max_model_len=4096")
    assert rollout_share(longer, SEVEN_B, total_bytes=CARD, free_bytes=CARD - GIB) == 0.58


def test_a_share_that_cannot_hold_the_engine_is_refused_with_the_numbers():
    rule = r"gpu_memory_utilization.*0\.1 of a GPU of 140\.0 GiB is 14\.0 GiB, but .*weights take 14\.2 GiB"
    with pytest.raises(ConfigError, match=rule):
        check_memory(
            config(*OFFLOAD, "actor_rollout_ref.rollout.gpu_memory_utilization=0.1"), SEVEN_B, total_bytes=CARD
        )
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization"):
        rollout_share(config(*OFFLOAD, COMPUTED), SEVEN_B, total_bytes=CARD, free_bytes=16 * GIB)


def test_a_teacher_on_the_same_card_gets_what_it_needs_and_the_engine_the_rest(tmp_path, monkeypatch):
    teacher = tiny.make_model(tmp_path, tied=True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    one_gpu = load_config(
        [
            "data.train_files=unused", "actor_rollout_ref.model.path=unused",
            f"actor_rollout_ref.teacher.model.path={teacher}", *OFFLOAD, MANY,
        ]
    )
    assert teacher_share(one_gpu, total_bytes=CARD) == 0.05  # 6 GiB of workspace
    phases = phase_bytes(one_gpu, SEVEN_B, device="cuda", total_bytes=CARD)
    assert phases["rollout"]["teacher"] == pytest.approx(0.05 * CARD)
    assert sum(phases["rollout"].values()) == pytest.approx(0.97 * CARD, abs=0.02 * CARD)
    check_memory(one_gpu, SEVEN_B, total_bytes=CARD)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert teacher_share(one_gpu, total_bytes=CARD) == 0.9

"""The plan: what the residency table, the offload keys and the checkpoints add up to."""

import dataclasses
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    Qwen2Config,
)

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.errors import ConfigError, ModelError
from hybrid_gkd.launch.plan import (
    TOKENIZER_BYTES,
    check_free_memory,
    check_sleeping_teachers,
    checkpoint_bytes,
    disk_bytes,
    make_plan,
    memory_lines,
    room_for_snapshots,
)
from hybrid_gkd.models.fast_layers import use_torch_norms
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION, pack
from hybrid_gkd.models.spec import ModelSpec, model_spec, student_spec
from hybrid_gkd.offload.budget import GIB, SLEEPING_ENGINE_BYTES
from hybrid_gkd.offload.needs import place_teacher, place_teachers, plan_memory, trained_models, with_planned_caches
from hybrid_gkd.student.checkpoint_store import RESERVED, SNAPSHOT, UNFINISHED
from hybrid_gkd.teacher.engines.engine_table import load_scoring_engine
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.testing import make_tiny_model, make_tokenizer
from hybrid_gkd.types import Reading
from hybrid_gkd.workers.group import host_memory_suffices
from hybrid_gkd.workers.placement import Placement, free_host_bytes

SEVEN_B = ModelSpec(
    parameters=7_615_616_512, kv_bytes_per_token=57_344, activation_bytes_per_token=4_386_816,
    embedding_parameters=1_089_994_752, stored_itemsize=2,
)
SHAPES = {
    # Qwen2.5: hidden, intermediate, layers, heads, kv heads, vocabulary, tied embeddings
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
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


def memory(given, spec, device="cuda", *, gpus=1):
    """Return the memory of a run whose student has this spec, on a machine with this number of GPUs."""
    return plan_memory(given, trained_models(given, spec), device, place_teachers(given, device=device, gpus=gpus))


def share_of(given, spec, *, free=CARD - GIB):
    """Return the fraction of a rollout engine on a GPU with this number of free bytes."""
    return memory(given, spec).engine_memory.fraction(total_bytes=CARD, free_bytes=free)


def plan_of(given, spec, device, **options):
    return make_plan(given, trained_models(given, spec), device, **options)


def checkpoint_size(given, spec):
    """Without the tokenizer."""
    return -TOKENIZER_BYTES + checkpoint_bytes(given.actor_rollout_ref.actor.checkpoint, trained_models(given, spec))


@pytest.mark.slow
def test_seven_billion_on_one_card_fit_with_offload_and_are_refused_without():
    memory(config(f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"), SEVEN_B).check(CARD)
    with pytest.raises(ConfigError, match=r"optimizer_offload.*phase rollout.*optimizer_state 56\.7.*has 140\.0"):
        memory(config(), SEVEN_B).check(CARD)
    # A smaller engine would fit beside them, but then the update does not.
    with pytest.raises(ConfigError, match=r"optimizer_offload.*phase update.*activations 6\d\..*has 140\.0"):
        memory(config(COMPUTED), SEVEN_B).check(CARD)


def seven_b_with_adapters(tmp_path, rank):
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES["7b"]
    Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied, dtype="bfloat16",
    ).save_pretrained(tmp_path)
    own = config(f"actor_rollout_ref.model.path={tmp_path}", f"actor_rollout_ref.model.lora_rank={rank}")
    return student_spec(own)


@pytest.mark.slow
def test_seven_billion_with_adapters_fit_on_one_card_without_any_offload(tmp_path):
    """Rank 32: (3584 + 3584) * 2 + (3584 + 512) * 2 + (3584 + 18944) * 3 columns and rows a layer, 28 layers."""
    lora = ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.enable_gradient_checkpointing=true")
    spec = seven_b_with_adapters(tmp_path, 32)
    assert spec.parameters == SEVEN_B.parameters
    assert spec.adapter_parameters == 32 * 28 * (2 * 7168 + 2 * 4096 + 3 * 22528) == 80_740_352
    memory(config(*lora), spec).check(CARD)
    phases = memory(config(*lora), spec).phases(CARD)
    for owner, expected in [("actor_params", 4), ("optimizer_state", 8), ("gradients", 4)]:
        assert phases["optimizer_step"][owner] == expected * spec.adapter_parameters
    assert phases["optimizer_step"]["frozen_params"] == 2 * spec.parameters
    # A card of 80 GiB, where the engine takes half: it stays below with nothing moved, and above without LoRA.
    small = (*lora, "actor_rollout_ref.rollout.gpu_memory_utilization=0.5")
    checkpointing = dataclasses.replace(spec, activation_bytes_per_token=2 * (33 * 3584 + 3 * 18944))
    memory(config(*small), checkpointing).check(80 * GIB)
    with pytest.raises(ConfigError, match=r"optimizer_state 56\.7"):
        memory(config(*small), dataclasses.replace(checkpointing, adapter_parameters=0)).check(80 * GIB)
    moving = memory(config(*lora, *OFFLOAD), spec).phases(CARD)
    assert set(moving["rollout"]) == {"engine_weights", "kv_cache"}
    assert memory(config(), spec, "cpu").phases(None)["update"]["frozen_params"] == 4 * spec.parameters


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_small_unless_it_is_to_be_merged(tmp_path):
    spec, lora = seven_b_with_adapters(tmp_path, 32), "actor_rollout_ref.model.lora_rank=32"
    checkpoint = "actor_rollout_ref.actor.checkpoint"
    assert checkpoint_size(config(lora), spec) == 16 * spec.adapter_parameters
    assert checkpoint_size(config(lora, f"{checkpoint}.save_hf_model=false"), spec) == 12 * spec.adapter_parameters
    merged = checkpoint_size(config(lora, f"{checkpoint}.save_merged=true"), spec)
    assert merged == 16 * spec.adapter_parameters + 2 * spec.parameters


def test_each_phase_holds_what_the_table_says_and_what_may_not_move():
    moving = memory(config(f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true"), SEVEN_B).phases(CARD)
    assert set(moving["rollout"]) == {"engine_weights", "kv_cache"}
    assert set(moving["update"]) == {
        "actor_params", "gradients", "gathered_params", "activations", "sleeping engine"
    }
    assert moving["optimizer_step"]["optimizer_state"] == 8 * SEVEN_B.parameters
    assert sum(moving["rollout"].values()) == pytest.approx(0.6 * CARD)
    staying = memory(config("actor_rollout_ref.rollout.free_cache_engine=false"), SEVEN_B).phases(CARD)
    assert all({"actor_params", "optimizer_state", "kv_cache"} <= set(owners) for owners in staying.values())


def test_shards_and_tensor_parallel_engines_split_the_bytes():
    two = config("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    owners = memory(two, SEVEN_B).phases(None)["publish"]
    assert owners["actor_params"] == 2 * SEVEN_B.parameters
    assert owners["engine_weights"] == SEVEN_B.parameters
    assert "kv_cache" not in owners
    replicated = config("trainer.n_gpus_per_node=2", f"{FSDP}.fsdp_size=1")
    assert memory(replicated, SEVEN_B).phases(None)["publish"]["actor_params"] == (
        4 * SEVEN_B.parameters
    )


def test_pools_of_their_own_hold_what_is_theirs():
    pools = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=2")
    separate = config(*pools, COMPUTED, MANY, f"{FSDP}.param_offload=true", f"{FSDP}.optimizer_offload=true")
    phases = memory(separate, SEVEN_B).phases(CARD)
    assert set(phases["rollout"]) == {"engine_weights", "kv_cache"}
    assert sum(phases["rollout"].values()) == pytest.approx(0.92 * CARD)  # the card is the engine's alone
    assert set(phases["update"]) == {"actor_params", "gradients", "gathered_params", "activations"}
    assert set(phases["optimizer_step"]) == {"actor_params", "gradients", "optimizer_state"}
    assert phases["publish"] == {"actor_params": 2 * SEVEN_B.parameters}  # they stay: nobody else wants the room
    memory(separate, SEVEN_B).check(CARD)


def test_nothing_moves_on_the_cpu():
    owners = memory(config(), SEVEN_B, "cpu").phases(None)["rollout"]
    assert set(owners) == {"actor_params", "optimizer_state", "engine_weights"}


def test_the_engine_takes_what_is_free_beside_what_stays():
    free = CARD - GIB
    assert share_of(config(*OFFLOAD, COMPUTED, MANY), SEVEN_B, free=free) == 0.92
    assert share_of(config(*OFFLOAD, COMPUTED, MANY), SEVEN_B, free=CARD // 2) == 0.45
    kept = config(OFFLOAD[0], COMPUTED, MANY)  # the optimizer state stays: 56.7 GiB
    assert share_of(kept, SEVEN_B, free=free) == pytest.approx(0.54)
    resident = config("actor_rollout_ref.rollout.free_cache_engine=false", COMPUTED, MANY)
    small = ModelSpec(parameters=494_000_000, kv_bytes_per_token=12_288)  # 7.4 GiB with gradients and moments
    assert share_of(resident, small, free=free) == pytest.approx(0.44)


def test_the_engine_takes_no_more_than_its_sequences_can_use():
    # Weights 14.2, 256 sequences of 1024 + 1024 tokens and a block 29.8, workspace 8 GiB.
    assert share_of(config(*OFFLOAD, COMPUTED), SEVEN_B) == 0.38
    two = config(
        *OFFLOAD, COMPUTED, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    )
    assert share_of(two, SEVEN_B) == 0.22
    longer = config(*OFFLOAD, COMPUTED, "actor_rollout_ref.rollout.max_model_len=4096")
    assert share_of(longer, SEVEN_B) == 0.58


def test_a_share_that_cannot_hold_the_engine_is_refused_with_the_numbers():
    rule = r"gpu_memory_utilization.*0\.1 of a GPU of 140\.0 GiB is 14\.0 GiB, but .*weights take 14\.2 GiB"
    with pytest.raises(ConfigError, match=rule):
        memory(config(*OFFLOAD, "actor_rollout_ref.rollout.gpu_memory_utilization=0.1"), SEVEN_B).check(CARD)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization"):
        share_of(config(*OFFLOAD, COMPUTED), SEVEN_B, free=16 * GIB)


@pytest.mark.slow
def test_a_teacher_on_the_same_card_gets_what_it_needs_and_the_engine_the_rest(tmp_path):
    teacher = make_tiny_model(tmp_path, tied=True)
    one_gpu = load_config(
        [
            "data.train_files=unused", "actor_rollout_ref.model.path=unused",
            f"actor_rollout_ref.teacher.model.path={teacher}", *OFFLOAD, MANY,
        ]
    )
    assert memory(one_gpu, SEVEN_B).teacher_fraction(CARD) == 0.05  # 6 GiB of workspace
    phases = memory(one_gpu, SEVEN_B).phases(CARD)
    assert phases["rollout"]["teacher"] == pytest.approx(0.05 * CARD)
    assert sum(phases["rollout"].values()) == pytest.approx(0.97 * CARD, abs=0.02 * CARD)
    memory(one_gpu, SEVEN_B).check(CARD)
    one_gpu.actor_rollout_ref.teacher.max_model_len = 2**24  # vLLM refuses a cache that does not hold one such sequence
    token = model_spec(str(teacher), trust_remote_code=False, override_config={}).kv_bytes_per_token
    for dtype, cache in (("auto", 2**24 * token), ("float32", 2**25 * token)):
        one_gpu.actor_rollout_ref.teacher.dtype = dtype
        share = memory(one_gpu, SEVEN_B).teacher_fraction(CARD)
        assert share * CARD == pytest.approx(6 * GIB + cache, abs=0.012 * CARD)
    assert str(place_teacher(one_gpu, device="cuda", gpus=1)) == "GPU 0, shared with workers"
    assert memory(one_gpu, SEVEN_B, gpus=2).teacher_fraction(CARD) == 0.9
    assert str(place_teacher(one_gpu, device="cuda", gpus=2)) == "GPU 1"
    one_gpu.trainer.n_gpus_per_node = 2
    both = place_teacher(one_gpu, device="cuda", gpus=2)
    assert (str(both), both.replicas) == ("GPU 0, 1, shared with workers", 2)
    one_gpu.actor_rollout_ref.teacher.tensor_model_parallel_size = 2
    assert place_teacher(one_gpu, device="cuda", gpus=2).replicas == 1
    one_gpu.trainer.n_gpus_per_node = one_gpu.actor_rollout_ref.teacher.tensor_model_parallel_size = 1
    one_gpu.trainer.device = "cpu"
    assert str(place_teacher(one_gpu, device="cpu", gpus=1)) == "the CPU"
    one_gpu.actor_rollout_ref.teacher.device = "cuda"  # beside workers that use no GPU
    assert memory(one_gpu, SEVEN_B, "cpu").teacher_fraction(CARD) == 0.9
    assert str(place_teacher(one_gpu, device="cpu", gpus=1)) == "GPU 0"


@pytest.mark.slow
def test_engine_and_teacher_load_side_by_side_where_the_plan_can_size_their_caches(tmp_path, monkeypatch):
    teacher, rollout = "actor_rollout_ref.teacher", "actor_rollout_ref.rollout"
    model = make_tiny_model(tmp_path, tied=True)
    token = model_spec(str(model), trust_remote_code=False, override_config={}).kv_bytes_per_token
    monkeypatch.setattr("hybrid_gkd.offload.needs.vllm_available", lambda: True)

    def planned(*overrides, total=CARD):
        one_gpu = load_config(
            [
                "data.train_files=unused", "actor_rollout_ref.model.path=unused", f"{teacher}.model.path={model}",
                *OFFLOAD, f"{teacher}.engine_kwargs.vllm.quantization=fp8", *overrides,
            ]
        )
        return one_gpu, with_planned_caches(one_gpu, memory(one_gpu, SEVEN_B), total)

    before, found = planned()
    given, own = found.actor_rollout_ref.rollout, found.actor_rollout_ref.teacher
    sequences = 256 * (2048 + 128) * SEVEN_B.kv_bytes_per_token
    assert given.engine_kwargs.vllm == {"kv_cache_memory_bytes": sequences}
    assert memory(before, SEVEN_B).phases(CARD)["rollout"]["kv_cache"] == sequences  # the plan shows what is given
    assert own.engine_kwargs.vllm == {"quantization": "fp8", "kv_cache_memory_bytes": 32768 * token}
    assert given.gpu_memory_utilization == 0.38
    assert before.actor_rollout_ref.rollout.gpu_memory_utilization is None  # what the user gave stays as it is
    plain = planned(f"{teacher}.backend=hf")[1].actor_rollout_ref
    assert plain.rollout == given
    assert "kv_cache_memory_bytes" not in plain.teacher.engine_kwargs.vllm
    for override in (
        f"{rollout}.gpu_memory_utilization=0.5", f"{teacher}.gpu_memory_utilization=0.5",
        f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes=1000", f"{rollout}.free_cache_engine=false",
        f"{teacher}.max_model_len=20000", f"{rollout}.max_num_seqs=2048",
    ):  # fmt: skip
        assert planned(override)[1] is None, override
    assert planned(total=68 * GIB)[1] is not None
    assert planned(total=60 * GIB)[1] is None  # the engine gets what is left beside teacher and 6 GiB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "dtype", "backend", "has_vllm", "itemsize"),
    [
        ("float32", "auto", "hf", True, 4), ("float32", "auto", "auto", False, 4), ("float32", "auto", "auto", True, 2),
        ("float32", "bfloat16", "hf", True, 2), ("bfloat16", "auto", "hf", True, 2),
    ],
)  # fmt: skip
def test_a_teacher_takes_the_bytes_of_the_type_that_its_engine_loads(
    tmp_path, monkeypatch, stored, dtype, backend, has_vllm, itemsize
):
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES["1.5b"]
    Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied, dtype=stored,
    ).save_pretrained(tmp_path)  # fmt: skip
    monkeypatch.setattr("hybrid_gkd.offload.needs.vllm_available", lambda: has_vllm)
    teacher = "actor_rollout_ref.teacher"
    shared = config(
        f"{teacher}.server_ip=null", f"{teacher}.model.path={tmp_path}", f"{teacher}.dtype={dtype}",
        f"{teacher}.backend={backend}",
    )
    spec = model_spec(str(tmp_path), trust_remote_code=False, override_config={})
    uses_vllm = backend == "auto" and has_vllm
    tokens = 32768 * spec.kv_bytes_per_token if uses_vllm else 16384 * spec.forward_bytes_per_token
    expected = itemsize * (spec.parameters + tokens / 2) + 6 * GIB
    assert memory(shared, SEVEN_B).teacher_fraction(CARD) * CARD == pytest.approx(expected, abs=0.012 * CARD)


def placed(role="worker", total=CARD, free=None):
    """A worker on a GPU of its own."""
    return Placement(
        role=role, host="a", pid=1, visible_devices="0", device="H200", gpu=f"a {role}",
        total_bytes=total, free_bytes=total - GIB if free is None else free,
    )


def test_a_card_that_is_too_small_is_not_blamed_on_others():
    small = config(*OFFLOAD, "actor_rollout_ref.rollout.gpu_memory_utilization=0.1")
    with pytest.raises(ConfigError, match=r"0\.1 of a GPU of 140\.0 GiB is 14\.0 GiB, but the engine's weights"):
        check_free_memory(memory(small, SEVEN_B), [placed()])
    with pytest.raises(ConfigError, match=r"in the phase update a GPU would have to hold .* it has 80\.0"):
        check_free_memory(memory(config(*OFFLOAD), SEVEN_B), [placed(total=80 * GIB)])
    with pytest.raises(ConfigError, match=r"another process, perhaps a teacher, uses"):
        check_free_memory(memory(config(*OFFLOAD), SEVEN_B), [placed(free=20 * GIB)])
    check_free_memory(memory(config(*OFFLOAD), SEVEN_B), [placed()])


def test_a_card_has_to_hold_the_phases_of_its_own_worker_alone():
    pools = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=1", "trainer.n_gpus_per_node=1")
    separate = config(*pools, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048")
    check_free_memory(memory(separate, SEVEN_B), [placed("actor worker"), placed("rollout worker", 48 * GIB)])
    small = [placed("actor worker", 48 * GIB), placed("rollout worker", 48 * GIB)]
    with pytest.raises(ConfigError, match=r"in the phase update .* it has 48\.0"):
        check_free_memory(memory(separate, SEVEN_B), small)


@pytest.mark.slow
def test_the_update_holds_what_fsdp_gathers():
    """All of it for all micro-batches without `reshard_after_forward`, on one GPU too; else embedding and head."""
    for gpus in (1, 2):
        base = (*OFFLOAD, f"trainer.n_gpus_per_node={gpus}")
        keeps = memory(config(*base, f"{FSDP}.reshard_after_forward=false"), SEVEN_B).phases(CARD)
        assert keeps["update"]["gathered_params"] == 2 * SEVEN_B.parameters
        frees = memory(config(*base), SEVEN_B).phases(CARD)
        assert frees["update"]["gathered_params"] == 2 * SEVEN_B.embedding_parameters
        assert [phase for phase in keeps if "gathered_params" in keeps[phase]] == ["update"]
    assert "gathered_params" not in memory(config(), SEVEN_B, "cpu").phases(None)["update"]
    # 28.4 GiB of parameters, as much of gradients, 66.9 of activations, 2 of the engine: 14.2 more do not fit into 135.
    memory(config(*OFFLOAD), SEVEN_B).check(135 * GIB)
    with pytest.raises(ConfigError, match=r"reshard_after_forward.*phase update.*gathered_params 14\.2"):
        memory(config(*OFFLOAD, f"{FSDP}.reshard_after_forward=false"), SEVEN_B).check(135 * GIB)


@pytest.mark.slow
def test_activations_are_those_of_the_largest_micro_batch_that_there_can_be():
    def tokens(*overrides):
        given = config("data.max_prompt_length=500", "data.max_response_length=524", *overrides)
        phases = memory(given, SEVEN_B).phases(CARD)
        return phases["update"]["activations"] / SEVEN_B.activation_bytes_per_token

    actor = "actor_rollout_ref.actor"
    fixed = f"{actor}.use_dynamic_bsz=false"
    assert tokens(f"{actor}.ppo_max_token_len_per_gpu=2048") == 2048
    assert tokens(f"{actor}.ppo_mini_batch_size=3") == 3 * 1024
    assert tokens(f"{actor}.ppo_mini_batch_size=3", "trainer.n_gpus_per_node=2") == 2 * 1024
    assert tokens(fixed, f"{actor}.ppo_micro_batch_size_per_gpu=4", f"{actor}.ppo_max_token_len_per_gpu=2048") == 4096
    assert tokens(fixed, f"{actor}.ppo_micro_batch_size_per_gpu=4", f"{actor}.ppo_mini_batch_size=2") == 2048


@pytest.mark.slow
def test_forward_passes_over_a_batch_are_counted_where_they_take_more_than_the_update(tmp_path):
    """The reference and the reward model have nothing else; beside an update of small mini-batches they may be more."""
    models, hidden, intermediate, layers, vocabulary = {}, 64, 256, 3, 1000
    for name, architecture in (("policy", "Qwen2ForCausalLM"), ("judge", "Qwen2ForSequenceClassification")):
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, dtype="bfloat16",
            architectures=[architecture], num_labels=1,
        ).save_pretrained(tmp_path / name)  # fmt: skip
        models[name] = str(tmp_path / name)

    def planned(*overrides, device="cuda"):
        given = config(
            f"actor_rollout_ref.model.path={models['policy']}", "data.train_batch_size=8", "data.max_prompt_length=500",
            "data.max_response_length=524", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.model.enable_gradient_checkpointing=true", *overrides,
        )
        return memory(given, student_spec(given), device).phases(None)

    token, embedding = 2 * (2 * hidden + 3 * intermediate), vocabulary * hidden
    kept = 2 * ((layers + 5) * hidden + 3 * intermediate)
    assert planned()["update"]["activations"] == 1024 * kept
    assert planned("data.val_files=x")["update"]["activations"] == 8192 * token > 1024 * kept
    limit = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"
    others = (
        "actor_rollout_ref.actor.use_kl_loss=true", "distillation.enabled=false", "reward_model.enable=true",
        f"reward_model.model.path={models['judge']}", "reward_model.max_length=300", "algorithm.adv_estimator=gae",
        limit,
    )
    phases = planned(*others)
    for phase in ("update", "critic_update", "reference"):
        assert phases[phase]["activations"] == 4096 * token
    assert phases["reward_model"]["activations"] == 8 * 300 * token
    assert phases["reference"]["gathered_params"] == 2 * 2 * embedding
    assert phases["reward_model"]["gathered_params"] == 2 * embedding
    whole = (*others, "actor_rollout_ref.actor.ppo_mini_batch_size=8", limit.replace("4096", "9000"))
    without = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    assert planned(*whole, without)["update"]["activations"] == 8192 * 2 * layers * (6 * hidden + 3 * intermediate)
    short = planned(*others, "reward_model.forward_max_token_len_per_gpu=700")
    assert short["reward_model"]["activations"] == 700 * token
    assert not {"activations", "gathered_params"} & planned(*others, device="cpu")["reference"].keys()


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made under it have taken at the same time."""

    def __init__(self):
        super().__init__()
        self.peak, self._sizes = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    weakref.finalize(storage, self._sizes.pop, storage._cdata)
                self._sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made


def saved_bytes(model, batch):
    """Return the bytes of tensors that a forward pass keeps for the backward pass, without parameters and buffers."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # the storage too, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(**batch.model_kwargs())
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "hidden", "intermediate", "heads", "kv_heads"),
    [(Qwen2Config, 64, 128, 4, 2), (Qwen2Config, 64, 320, 4, 4), (LlamaConfig, 128, 192, 8, 1)],
)
def test_activations_are_what_autograd_keeps(tmp_path, kind, hidden, intermediate, heads, kv_heads):
    """With checkpointing an input per block and all of one block, which is computed anew; without it all of all.

    The plan leaves out no more than this, in float32 per token: keys and values; the gate behind its activation
    function; of each norm the factor, and on the CPU its product with the input; of the attention one number per head,
    and on the CPU a second copy of its output and two int64 indices of the padded copies.
    """
    tokens, batch = 1024, pack([np.arange(64) % 50] * 16, "cpu")
    left_out = tokens * (2 * kv_heads * hidden // heads + intermediate + 2 + 2 * hidden + heads + hidden + 4)

    def built(layers, checkpointing):
        model_config = kind(
            vocab_size=50, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads,
        )  # fmt: skip
        model_config.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation=PACKED_ATTENTION)
        use_torch_norms(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        spec = model_spec(str(tmp_path), trust_remote_code=False, override_config={}, checkpointing=checkpointing)
        return model.train(), tokens * spec.activation_bytes_per_token / 2  # numbers: the plan's have 16 bits

    def of_a_block(checkpointing):
        return (saved_bytes(built(3, checkpointing)[0], batch) - saved_bytes(built(2, checkpointing)[0], batch)) / 4

    block, block_input = of_a_block(False), of_a_block(True)
    assert block_input == tokens * hidden
    assert 0 <= 3 * block - built(3, False)[1] <= 3 * left_out
    model, planned = built(3, True)
    held = 2 * block_input + block
    assert 0 <= held - planned <= left_out
    with PeakMemory() as used:  # gradients come on top
        model.base_model(**batch.model_kwargs()).last_hidden_state.sum().backward()
    assert used.peak / 4 > held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers", "kv_heads", "length", "fields"),
    [
        (Qwen2Config, 2, 4, 512, {}), (Qwen2Config, 4, 1, 512, {}), (GraniteConfig, 2, 4, 512, {"logits_scaling": 2.0}),
        (GraniteConfig, 2, 4, 4096, {"logits_scaling": 2.0}),
    ],
)  # fmt: skip
def test_a_teacher_of_transformers_holds_one_forward_pass_and_no_kv_cache(
    tmp_path, monkeypatch, kind, layers, kv_heads, length, fields
):
    """Beside its weights, with as many sequences as two passes take.

    The plan leaves out no more than this, in float32 per token: the output of the embedding and the input of the block
    (64 each), cosines and sines (16 each), ids and positions (an int64 each). Beside changed logits there is less: the
    last hidden states, ids and positions.
    """
    tokenizer, tokens = make_tokenizer(), max(length, 2048 if fields else 16384)
    model_config = kind(
        vocab_size=1000, hidden_size=64, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=length, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None, bos_token_id=None, **fields,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(model_config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("hybrid_gkd.offload.budget.TEACHER_WORKSPACE_BYTES", 0)
    teacher = "actor_rollout_ref.teacher"
    given = config(
        f"{teacher}.server_ip=null", f"{teacher}.model.path={tmp_path}", f"{teacher}.backend=hf",
        f"data.max_prompt_length={length - 9}", "data.max_response_length=8",
    )
    spec = model_spec(str(tmp_path), trust_remote_code=False, override_config={})
    planned = memory(given, SEVEN_B).teacher_fraction(100) * 100 - 4 * spec.parameters  # a share is rounded to bytes
    engine = load_scoring_engine(EngineOptions(ckpt_path=str(tmp_path), backend="hf", device="cpu", n_logprobs=5))
    reading = Reading(token_ids=np.arange(length, dtype=np.int32) % 50, positions=np.arange(length - 8, length))
    with PeakMemory() as used:
        engine.score([reading] * (2 * tokens // length), 5, 1.0)
    assert 0 <= used.peak - planned <= 4 * tokens * (64 + 64 + 16 + 16 + 4)


def test_a_model_whose_text_part_is_nested_is_measured(tmp_path):
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8,
    }
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }
    Gemma3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path)
    size = model_spec(str(tmp_path), trust_remote_code=False, override_config={})
    assert size.kv_bytes_per_token == 2 * 2 * 2 * 2 * 8
    assert size.head_parameters == 64 * 32


def test_a_field_that_the_model_does_not_have_is_refused(tmp_path):
    make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"override_config: .* has no such field; got 'rope_tehta'"):
        model_spec(str(tmp_path / "model"), trust_remote_code=False, override_config={"rope_tehta": 1.0})


def test_an_engine_that_stays_leaves_room_for_what_is_gathered():
    resident = ("actor_rollout_ref.rollout.free_cache_engine=false", COMPUTED, MANY)
    small = ModelSpec(parameters=1_543_714_304, kv_bytes_per_token=28_672)
    shares = [
        share_of(config(*resident, f"{FSDP}.reshard_after_forward={reshards}"), small, free=CARD)
        for reshards in ("true", "false")
    ]  # fmt: skip
    assert shares[0] - shares[1] == pytest.approx(small.parameters / CARD, abs=0.01)  # half of 2.9 GiB


@pytest.mark.slow
@pytest.mark.parametrize(("student", "teacher"), [("1.5b", "7b"), ("0.5b", "1.5b")])
def test_the_recipe_for_one_gpu_is_accepted(tmp_path, student, teacher):
    for name in (student, teacher):
        hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied, dtype="bfloat16",
        ).save_pretrained(tmp_path / name)  # fmt: skip
    recipe = load_config(
        [
            "data.train_files=unused", f"actor_rollout_ref.model.path={tmp_path / student}",
            f"actor_rollout_ref.teacher.model.path={tmp_path / teacher}",
        ],
        config_name="one_gpu",
    )
    memory(recipe, student_spec(recipe)).check(CARD)


def test_seven_billion_in_the_measured_set_up_hold_what_was_measured():
    """32 prompts of 256 tokens and 128 new ones: the tensors of the update took 113.9 GiB."""
    measured = config(
        *OFFLOAD, COMPUTED, "data.train_batch_size=32", "data.max_prompt_length=256", "data.max_response_length=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    )  # fmt: skip
    phases = memory(measured, SEVEN_B).phases(CARD)
    assert sum(phases["update"].values()) == pytest.approx(113.9 * GIB, rel=0.05)
    memory(measured, SEVEN_B).check(CARD)


def test_size_counts_tied_embeddings_once(tmp_path):
    for tied in (True, False):
        folder = make_tiny_model(tmp_path / str(tied), tied=tied, vocab_size=1000)
        size = model_spec(str(folder), trust_remote_code=False, override_config={})
        assert size.embedding_parameters == (1 if tied else 2) * 1000 * 64
        assert size.stored_itemsize == 4
        assert model_spec(str(folder), trust_remote_code=False, override_config={"dtype": "bfloat16"}) != size


@pytest.mark.slow
def test_an_engine_in_float32_takes_twice_as_much():
    wide = config(*OFFLOAD, "actor_rollout_ref.rollout.dtype=float32", COMPUTED)
    for dtype, itemsize in (("auto", 2), ("bfloat16", 2), ("float16", 2), ("float32", 4)):
        phases = memory(config(f"actor_rollout_ref.rollout.dtype={dtype}"), SEVEN_B).phases(None)
        assert phases["rollout"]["engine_weights"] == itemsize * SEVEN_B.parameters
    assert memory(config(), SEVEN_B, "cpu").phases(None)["rollout"]["engine_weights"] == (
        4 * SEVEN_B.parameters
    )
    # Weights 28.4, sequences 59.5, workspace 8 GiB.
    assert share_of(wide, SEVEN_B) == 0.69
    share = "actor_rollout_ref.rollout.gpu_memory_utilization=0.2"
    memory(config(*OFFLOAD, share), SEVEN_B).check(CARD)
    with pytest.raises(ConfigError, match=r"engine's weights take 28\.4 GiB and the KV cache of one sequence 0\.22"):
        memory(config(*OFFLOAD, share, "actor_rollout_ref.rollout.dtype=float32"), SEVEN_B).check(CARD)


def test_one_sequence_has_the_length_that_the_engine_is_built_for():
    share = "actor_rollout_ref.rollout.gpu_memory_utilization=0.12"  # 16.8 GiB, 14.2 of them weights
    memory(config(*OFFLOAD, share), SEVEN_B).check(CARD)
    longer = config(*OFFLOAD, share, "actor_rollout_ref.rollout.max_model_len=65536")
    with pytest.raises(ConfigError, match=r"the KV cache of one sequence 3\.50 GiB"):
        memory(longer, SEVEN_B).check(CARD)


def test_a_folder_that_cannot_be_read_is_a_model_error(monkeypatch, tmp_path):
    lacking = [
        "data.train_files=unused", f"actor_rollout_ref.model.path={tmp_path}/student",
        f"actor_rollout_ref.teacher.model.path={tmp_path}/nowhere",
    ]
    with pytest.raises(ModelError, match="nowhere: the model's configuration cannot be used"):
        memory(load_config(lacking), SEVEN_B).teacher_fraction(CARD)
    (tmp_path / "student").mkdir()
    with pytest.raises(ModelError, match="student: the model's configuration cannot be used"):
        student_spec(load_config(lacking))


def test_a_state_space_model_is_refused_by_name(tmp_path):
    MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"configuration cannot be used: AttributeError.*num_attention_heads"):
        model_spec(str(tmp_path), trust_remote_code=False, override_config={})


@pytest.mark.slow
def test_the_plan_names_the_offloads_that_a_card_does_not_need():
    spec = ModelSpec(
        parameters=1_543_714_304, kv_bytes_per_token=28_672, activation_bytes_per_token=1_900_000,
        embedding_parameters=233_373_696, stored_itemsize=2,
    )

    def named(total, *overrides):
        """The keys that the plan says to switch off; a run with them is accepted."""
        given = (*OFFLOAD, COMPUTED, *overrides)
        plan = str(plan_of(config(*given), spec, "cuda", gpu_bytes=int(total * GIB)))
        keys = [word for word in plan.split() if word.startswith(FSDP)]
        memory(config(*given, *keys), spec).check(int(total * GIB))
        assert bool(keys) == ("unnecessary offloads on this GPU" in plan)
        return {key.removeprefix(f"{FSDP}.") for key in keys}

    assert named(140) == named(65) == {"param_offload=false", "optimizer_offload=false"}
    assert named(60) == named(50) == {"param_offload=false"}  # beside parameters, gradients, activations
    assert named(44) == set()
    assert named(140, MANY) == set()  # the rollout engine uses what they leave
    assert named(140, f"{FSDP}.param_offload=false") == {"optimizer_offload=false"}
    assert named(140, f"{FSDP}.param_offload=false", f"{FSDP}.optimizer_offload=false") == set()
    pools = ("actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=1")
    assert named(140, *pools) == {"optimizer_offload=false"}


def test_the_plan_for_a_cluster_leaves_out_what_depends_on_its_gpus(tmp_path):
    """They are known when the workers are placed, and this machine may have none."""
    cluster = config(f"actor_rollout_ref.model.path={make_tiny_model(tmp_path)}", "ray_init.address=far:6379")
    text = "\n".join(memory_lines(plan_of(cluster, student_spec(cluster), "cuda", gpu_bytes=CARD)))
    assert "gathered_params" in text
    assert "kv_cache" not in text
    assert text.endswith("computed after the cluster has placed the workers")


def test_the_host_holds_what_leaves_the_gpu_and_the_checkpoint_that_is_written_meanwhile():
    master, saves = 4 * SEVEN_B.parameters, "trainer.save_freq=5"
    assert plan_of(config(), SEVEN_B, "cuda").host == {}
    offloaded = {"actor_params": master, "optimizer_state": 2 * master}
    assert plan_of(config(*OFFLOAD), SEVEN_B, "cuda").host == offloaded
    found = plan_of(config(*OFFLOAD, saves), SEVEN_B, "cuda").host
    assert found == offloaded | {"checkpoint": 3 * master + 2 * SEVEN_B.parameters}
    on_cpu = plan_of(config(saves), SEVEN_B, "cpu").host
    assert on_cpu["largest phase"] >= 4 * master


def test_a_node_has_one_export_and_the_state_of_one_replica():
    """Rank 0 writes the export, and of replicas only the first one its weights and moments."""
    master, export, eight = 4 * SEVEN_B.parameters, 2 * SEVEN_B.parameters, ("trainer.save_freq=5", *OFFLOAD)

    def planned(*overrides):
        """Owner -> bytes of the first node, and the bytes of each worker's copy alone."""
        plan = plan_of(config(*eight, *overrides), SEVEN_B, "cuda")
        moved = sum(plan.memory.host(saves=False)[0].values())
        return plan.host, [each - moved for each in plan.copy_bytes]

    one_node = "trainer.n_gpus_per_node=8"
    host, copies = planned(one_node)
    assert host == {"actor_params": master, "optimizer_state": 2 * master, "checkpoint": 3 * master + export}
    assert sum(host.values()) == pytest.approx(184.4 * GIB, rel=1e-3)
    assert copies == [3 * master / 8 + export, *[3 * master / 8] * 7]
    for size in (1, 4):
        host, copies = planned(one_node, f"{FSDP}.fsdp_size={size}")
        replicas = 8 // size
        assert host["optimizer_state"] == replicas * 2 * master
        assert host["checkpoint"] == 3 * master + export
        assert copies == [3 * master / size + export, *[3 * master / size] * (size - 1), *[0] * (8 - size)]
    nodes = ("trainer.nnodes=2", "trainer.n_gpus_per_node=4")
    assert planned(*nodes)[0]["checkpoint"] == 1.5 * master + export
    assert planned(*nodes)[1] == planned(one_node)[1]
    assert planned(*nodes, "actor_rollout_ref.actor.checkpoint.save_hf_model=false")[0]["checkpoint"] == 1.5 * master


def test_snapshots_in_dev_shm_take_host_memory(tmp_path):
    """Two of them, the newest and the next one, beside the copy that is being written."""
    eight = ("trainer.n_gpus_per_node=8", "trainer.max_restarts=1", f"trainer.default_local_dir={tmp_path}")

    def planned(*overrides):
        """Owner -> bytes of the node, and those of all workers."""
        plan = plan_of(config(*eight, *overrides), SEVEN_B, "cuda")
        return plan.host, sum(plan.copy_bytes)

    copy = {"checkpoint": 14 * SEVEN_B.parameters}
    assert planned() == planned("trainer.snapshot_dir=/proc/none") == (copy, copy["checkpoint"])
    in_memory = "trainer.snapshot_dir=/dev/shm/none/yet"
    assert planned(in_memory) == (copy | {"snapshots": 24 * SEVEN_B.parameters}, 38 * SEVEN_B.parameters)
    assert planned(in_memory, "trainer.max_restarts=0", "trainer.save_freq=5") == planned()
    kept = config(*eight).run_dir / SNAPSHOT / "global_step_1"
    kept.mkdir(parents=True)
    (kept / "weights").write_bytes(bytes(1500))
    present = 24 * SEVEN_B.parameters - planned(in_memory)[0]["snapshots"]
    assert 1500 <= present <= 20_000  # folders take room too


@pytest.mark.slow
def test_a_run_that_saves_at_its_last_step_alone_takes_no_memory_for_copies(tmp_path):
    model = f"actor_rollout_ref.model.path={make_tiny_model(tmp_path)}"

    def copies(steps, *overrides):
        """In the plan, and at the workers."""
        saving = config(model, *overrides)
        spec, place = student_spec(saving), placed()
        place = dataclasses.replace(place, free_host_bytes=GIB)
        plan = plan_of(saving, spec, "cpu", steps=steps)
        return "checkpoint" in str(plan), host_memory_suffices([place], plan.copy_bytes)

    validates = ("data.val_files=x", "trainer.test_freq=5", "trainer.best_metric=val/forward_kl", "trainer.save_freq=9")
    for overrides in (["trainer.save_freq=5"], validates):
        assert copies(6, *overrides) == copies(None, *overrides) == (True, True)
        assert copies(5, *overrides) == copies(3, *overrides) == (False, False)
    assert copies(9, "trainer.save_freq=-1") == (False, False)
    assert copies(9, "trainer.save_freq=5", "data.val_files=x", "trainer.val_only=true") == (False, False)


def test_a_host_without_the_memory_for_a_copy_is_said_once_and_training_waits(tmp_path, caplog):
    saving = config(
        f"actor_rollout_ref.model.path={make_tiny_model(tmp_path)}", "trainer.save_freq=1", "trainer.n_gpus_per_node=3"
    )
    needed = plan_of(saving, student_spec(saving), "cpu").copy_bytes

    def placed(hosts, free):
        places = [
            Placement(rank=rank, host=host, pid=rank, visible_devices="", free_host_bytes=int(free))
            for rank, host in enumerate(hosts)
        ]
        return host_memory_suffices(places, needed)

    # Together, not three times what rank 0 with its export needs.
    assert needed[0] > needed[1] == needed[2]
    assert placed("aaa", 1.12 * sum(needed))
    assert placed("baa", 1.12 * max(needed[0], 2 * needed[1]))
    assert caplog.text == ""
    assert not placed("aab", 1.1 * sum(needed[:2]))
    assert caplog.text.count("checkpoints are not written in the background: 2 worker(s) at a would need 0.0 GiB") == 1
    assert not host_memory_suffices([], plan_of(config(), SEVEN_B, "cuda").copy_bytes)


def test_free_memory_of_a_host_is_that_of_its_container(tmp_path):
    def write(**files):
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    write(proc__meminfo="MemTotal: 200 kB\nMemFree: 50 kB\nMemAvailable: 100 kB\n")
    assert free_host_bytes(tmp_path) == 102400
    write(sys__fs__cgroup__memory_dot_current="50000", sys__fs__cgroup__memory_dot_stat="anon 3\ninactive_file 10000\n")
    write(sys__fs__cgroup__memory_dot_max="max\n")
    assert free_host_bytes(tmp_path) == 102400
    write(sys__fs__cgroup__memory_dot_max="60000")
    assert free_host_bytes(tmp_path) == 20000
    assert free_host_bytes() > 2**20


def test_a_checkpoint_holds_weights_and_moments_and_the_export():
    assert checkpoint_size(config(), SEVEN_B) == 14 * SEVEN_B.parameters
    without = config("actor_rollout_ref.actor.checkpoint.save_hf_model=false")
    assert checkpoint_size(without, SEVEN_B) == 12 * SEVEN_B.parameters
    half = ModelSpec(parameters=100, kv_bytes_per_token=1, stored_itemsize=2)
    assert checkpoint_size(config(), half) == 4 * 3 * 100 + 2 * 100


@pytest.mark.slow
def test_the_disk_holds_one_checkpoint_more_than_are_kept(tmp_path):
    one, folder = 16 * 1000, f"trainer.default_local_dir={tmp_path}"

    def needed(save_freq, keep, steps=None, *overrides):
        keys = (f"trainer.save_freq={save_freq}", f"trainer.max_actor_ckpt_to_keep={keep}", folder, *overrides)
        return disk_bytes(config(*keys), one, steps=steps)

    assert needed(0, 2) == 0
    assert needed(-1, 2) == one
    assert needed(5, 2) == needed(5, 2, 100) == 3 * one
    assert needed(5, 2, 6) == 2 * one  # after 5 steps, and at the end
    assert needed(5, "null") == one
    best = ("trainer.best_metric=val/forward_kl", "data.val_files=unused")
    assert needed(5, 2, 100, *best) == needed(-1, 2, 100, *best, "trainer.test_freq=5") == 4 * one
    assert needed(-1, 2, 100, *best) == 2 * one  # at the end, and at the end
    for step in (5, 10):
        kept = config(folder).run_dir / f"global_step_{step}" / "actor"
        kept.mkdir(parents=True)
        (kept / "weights").write_bytes(bytes(one))
    assert needed(5, 2) == pytest.approx(one, abs=2 * 4096 * 2)  # folders take room too
    assert needed(5, 4) == pytest.approx(3 * one, abs=2 * 4096 * 2)
    assert needed(5, 1) == one  # one of them is removed only when the next is there
    assert needed(5, 4, None, "trainer.resume_mode=disable") == 5 * one
    # A killed run held room, and had begun a checkpoint: both are freed before the next is written.
    (kept.parents[1] / RESERVED).write_bytes(bytes(one // 2))
    assert needed(5, 1) == needed(5, "null") == one - one // 2
    begun = kept.parents[1] / UNFINISHED.replace("*", "15") / "actor"
    begun.mkdir(parents=True)
    (begun / "weights").write_bytes(bytes(one))
    assert needed(5, 1) == needed(5, "null") == 0
    assert needed(5, 4, None, "trainer.resume_mode=disable") == 5 * one


def test_a_number_of_snapshots_needs_room_for_two(tmp_path):
    trained, folder = (SimpleNamespace(saved=1000), SimpleNamespace(saved=500)), f"trainer.default_local_dir={tmp_path}"
    assert room_for_snapshots(config(folder, "trainer.snapshot_freq=4"), trained) == 3000
    for others in (["trainer.max_restarts=3"], ["trainer.max_restarts=3", "trainer.snapshot_freq=0"], []):
        assert room_for_snapshots(config(folder, *others), trained) == 0  # none, or as many as there is room for
    kept = config(folder).run_dir / SNAPSHOT / "global_step_1"
    kept.mkdir(parents=True)
    (kept / "weights").write_bytes(bytes(1500))
    assert room_for_snapshots(config(folder, "trainer.snapshot_freq=4"), trained) <= 1500


SEVERAL = [f"distillation.teacher_models.{name}.model_path=x" for name in ("a", "b", "c")]
LARGE_B = "distillation.teacher_models.b.tensor_model_parallel_size=2"


@pytest.mark.parametrize(("gpus", "overrides", "expected"), [
    (4, (), {"a": ("GPU 1", 0.9), "b": ("GPU 2", 0.9), "c": ("GPU 3", 0.9)}),
    (3, (), {"a": ("GPU 1", 0.45), "b": ("GPU 2", 0.9), "c": ("GPU 1", 0.45)}),
    (2, (), {"a": ("GPU 1", 0.3), "b": ("GPU 1", 0.3), "c": ("GPU 1", 0.3)}),
    (3, (LARGE_B,), {"a": ("GPU 1", 0.45), "b": ("GPU 1, 2", 0.45), "c": ("GPU 2", 0.45)}),
    (2, (LARGE_B,), {"a": ("GPU 1", 0.45), "b": ("GPU 0, 1, shared with workers", None), "c": ("GPU 1", 0.45)}),
    (3, ("distillation.teacher_sharing=turns",), {
        "a": ("GPU 1, in turns with other teachers", 0.85), "b": ("GPU 2", 0.9),
        "c": ("GPU 1, in turns with other teachers", 0.85),
    }),
    (3, ("distillation.teacher_models.a.gpu_memory_utilization=0.6",), {
        "a": ("GPU 1", 0.6), "b": ("GPU 2", 0.9), "c": ("GPU 1", 0.45),
    }),
    (4, ("distillation.teacher_models.a.device=cpu", "distillation.teacher_models.b.server_ip=far"), {
        "a": ("the CPU", 0.9), "c": ("GPU 1", 0.9),
    }),
])  # fmt: skip
def test_several_teachers_are_spread_over_the_gpus_that_no_worker_needs(gpus, overrides, expected):
    given = load_config(["data.train_files=x", "actor_rollout_ref.model.path=x", *SEVERAL, *overrides])
    placed = place_teachers(given, device="cuda", gpus=gpus)
    found = {label.removeprefix("teacher "): (str(place), place.fraction) for label, place in placed.items()}
    assert found == expected


@pytest.mark.slow
def test_several_teachers_on_the_workers_card_are_all_counted(tmp_path):
    teacher = make_tiny_model(tmp_path, tied=True)
    given = load_config(
        ["data.train_files=x", "actor_rollout_ref.model.path=x", *(f"{each[:-1]}{teacher}" for each in SEVERAL)]
    )
    found = memory(given, SEVEN_B)
    assert found.shares_gpu
    phases = found.phases(CARD)
    assert [phases["update"][f"teacher {name}"] for name in "abc"] == pytest.approx([0.05 * CARD] * 3)
    one = replace(found, teachers={"teacher a": found.teachers["teacher a"]})
    assert found.engine_fraction(CARD) == pytest.approx(one.engine_fraction(CARD) - 0.1)
    assert with_planned_caches(given, found, CARD) is None
    given.distillation.teacher_sharing = "turns"
    in_turns = memory(given, SEVEN_B).phases(CARD)["update"]
    in_turn = place_teachers(given, device="cuda", gpus=1)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    check_sleeping_teachers(given, in_turn, 2 * size)  # the third one is awake
    with pytest.raises(ConfigError, match=r"distillation\.teacher_sharing: the models of sleeping teachers need"):
        check_sleeping_teachers(given, in_turn, 2 * size - 1)
    check_sleeping_teachers(given, found.teachers, 0)
    largest = phases["update"]["teacher c"]
    assert [in_turns[f"teacher {name}"] for name in "abc"] == [SLEEPING_ENGINE_BYTES, SLEEPING_ENGINE_BYTES, largest]

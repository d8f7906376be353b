"""Host memory of checkpoints that are written in the background, against the plan. CPU, one and two ranks."""

import json
import threading

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import plan_memory, trained_models
from hybrid_gkd.offload.pinned import ROUNDING_BYTES
from hybrid_gkd.offload.residency import Residency
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.critic import Critic
from hybrid_gkd.testing import make_tiny_model, single_process_group, tiny_config
from hybrid_gkd.workers.saver import Saver

LORA, EMA = "actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.teacher.source=ema"
CHECKPOINT, REPLICAS = "actor_rollout_ref.actor.checkpoint", "actor_rollout_ref.actor.fsdp_config.fsdp_size=1"
AVERAGE = ("actor_rollout_ref.teacher.server_ip=null", EMA, "data.teacher_prompt_key=hint")
CASES = {
    "shards": (), "replicas": (REPLICAS,), "no export": (f"{CHECKPOINT}.save_hf_model=false",),
    "adapters": (LORA,), "merged": (LORA, f"{CHECKPOINT}.save_merged=true"), "average": (*AVERAGE, LORA),
    "average of replicas": (*AVERAGE, REPLICAS),
    "critic": (
        "algorithm.adv_estimator=gae", "distillation.enabled=false", "reward.answer_key=answer", REPLICAS,
        "critic.fsdp_config.fsdp_size=-1",
    ),
}  # fmt: skip


def config_for(case, model, ranks):
    return tiny_config(f"trainer.n_gpus_per_node={ranks}", *CASES[case], model=model)


def make_saver(config):
    """A saver of a student, and of a critic if there is one, that have taken a step."""
    options = {"device": torch.device("cpu"), "num_updates": 2}
    trained = {"critic": Critic(config, **options)} if config.uses_critic else {}
    trained["actor"] = Actor(config, **options)
    for model in trained.values():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.step()
    residency = Residency({}, movable=set(), resident=set())
    return Saver(config, trained, residency, on_gpu=False, behind=True)


def blocks_of(saver):
    """The bytes of each block of host memory, and those in use."""
    return [[block.numel(), used] for block, used in saver._copies._blocks]


def measure(case, model, ranks):
    config = config_for(case, model, ranks)
    saver = make_saver(config)
    saver.take_snapshot(config.actor_rollout_ref.model.path)
    return blocks_of(saver)


def as_rank(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    found = {case: measure(case, folder / "model", ranks) for case in CASES}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with a model, and number of ranks -> for each of them case -> blocks of host memory."""
    folder = tmp_path_factory.mktemp("saver")
    make_tiny_model(folder / "model", tied=False, vocab_size=1000)
    with single_process_group():
        found = {1: [{case: measure(case, folder / "model", 1) for case in CASES}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(as_rank, (2, folder), nprocs=2)
    found[2] = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    return folder, found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_each_worker_reserves_and_uses_what_the_plan_counts(measured, case, ranks):
    """Beside tensors of up to 512 bytes more, which are aligned, and of the critic its new head."""
    folder, found = measured
    config = config_for(case, folder / "model", ranks)
    planned = plan_memory(config, trained_models(config, student_spec(config)), "cpu").checkpoint
    assert len(planned) == len(found[ranks]) == ranks
    for part, blocks in zip(planned, (each[case] for each in found[ranks]), strict=True):
        ((size, used),) = blocks  # the reserved block sufficed
        assert size - ROUNDING_BYTES == pytest.approx(part, abs=1024 if case == "critic" else 0)
        assert 0 <= used - part < 512 * 200


@pytest.mark.slow
def test_the_last_checkpoint_is_exported_from_the_memory_of_the_earlier_ones(tmp_path):
    """It is written at once, while that memory is still there: more would be beyond the plan."""
    config = config_for("merged", make_tiny_model(tmp_path / "model"), 1)
    path = config.actor_rollout_ref.model.path
    with single_process_group():
        saver = make_saver(config)
        saver.take_snapshot(path)
        saver.write_snapshot(tmp_path / "first")
        first, _ = saver.finish_snapshot()
        ((_, before),) = blocks_of(saver)
        assert saver.save(tmp_path / "last", path) == first
        ((_, after),) = blocks_of(saver)
    exports = [name for name in first if name.endswith(".safetensors") and not name.startswith("actor")]
    assert sorted(exports) == ["huggingface/adapter_model.safetensors", "huggingface_merged/model.safetensors"]
    assert after == pytest.approx(sum(first[name].size for name in exports), abs=20_000)  # headers and alignment
    assert before > after


def test_what_is_still_being_written_is_not_overwritten_and_the_timeout_is_named(tmp_path):
    """The thread of a checkpoint that was not written in time may write into the same folder from the same memory."""
    config = config_for("shards", make_tiny_model(tmp_path / "model"), 1)
    config.actor_rollout_ref.load_timeout = 0.5
    path, disk = config.actor_rollout_ref.model.path, threading.Event()
    with single_process_group():
        saver = make_saver(config)
        saver.take_snapshot(path)
        saver._snapshot = {"actor": lambda folder: {"waited": disk.wait(60)}}
        saver.write_snapshot(tmp_path / "slow")
        with pytest.raises(CheckpointError, match=r"a checkpoint was not written within 0.5 s \(.*load_timeout\)"):
            saver.finish_snapshot()
        for again in (lambda: saver.save(tmp_path / "last", path), lambda: saver.take_snapshot(path)):
            with pytest.raises(CheckpointError, match=r"an earlier checkpoint was not written within 0.5 s"):
                again()
        assert not (tmp_path / "last").exists()
        disk.set()
        assert saver.save(tmp_path / "last", path)


def test_memory_that_is_not_allocated_in_time_is_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    config = config_for("shards", make_tiny_model(tmp_path / "model"), 1)
    config.actor_rollout_ref.load_timeout, locked = 0.5, threading.Event()
    monkeypatch.setattr(Saver, "_reserve", lambda saver, num_bytes: locked.wait(60))
    with single_process_group():
        saver = make_saver(config)
        with pytest.raises(CheckpointError, match=r"host memory .* was not allocated within 0.5 s \(.*load_timeout\)"):
            saver.take_snapshot(config.actor_rollout_ref.model.path)
        locked.set()

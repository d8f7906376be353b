"""Student and rollout engine in pools of their own, on real Ray, FSDP2 and gloo: what arrives, and what ends a run."""

import contextlib
import logging
import os
import re
import signal
import time

import numpy as np
import psutil
import pytest
import ray
from processes import stop_process
from test_workers import learn_values, make_config, random_batch, shares

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.errors import WorkerError
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.testing import make_tiny_model
from hybrid_gkd.types import GenerationRequest, RewardText, SampleId, SamplingParams
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup
from hybrid_gkd.workers.pool import gather

REQUESTS = [
    GenerationRequest(id=SampleId(1, i, 0), prompt_ids=np.arange(i % 7 + 1, dtype=np.int32) + i, seed=i)
    for i in range(10)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))  # with a tied output embedding


@pytest.fixture(scope="module", autouse=True)
def cluster(model, tmp_path_factory):
    """One Ray cluster with room for two workers in each pool."""
    with ray_cluster(separate(model, tmp_path_factory.mktemp("ray"), 2, 2), "cpu"):
        yield


def separate(model, folder, actors, rollouts, *overrides):
    return make_config(
        model, folder, f"trainer.n_gpus_per_node={actors}", f"rollout.n_gpus_per_node={rollouts}",
        "actor_rollout_ref.hybrid_engine=false", *overrides,
    )


def make_group(config):
    return contextlib.closing(WorkerGroup(config, device="cpu", num_updates=2, stop_token_ids=[256]))


def generate(group):
    sampling = SamplingParams(max_tokens=24, logprobs=True)
    return sorted((s for part in group.generate(REQUESTS, sampling) for s in part), key=lambda s: s.id)


@pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
@pytest.mark.parametrize(("actors", "rollouts", "tensor_parallel", "lora_rank"), [(2, 1, 1, 4), (1, 2, 2, 0)])
def test_the_engine_generates_with_the_weights_that_were_sent(
    actors, rollouts, tensor_parallel, lora_rank, model, tmp_path, caplog, request
):
    """Every weight compared after it has arrived, and sampled log-probabilities of engine and actor agree. A reward
    model is with the actor. In the end a worker is lost and named, without which nothing can be saved if it is an
    actor's; its pool alone is built again, and the engine's unfinished generation is dropped."""
    def slow_down(worker):  # travels to the worker by value
        step = worker.engine.step
        worker.engine.step = lambda: (time.sleep(1.0), step())[1]

    if tensor_parallel > 1:
        request.getfixturevalue("only_tensor_parallel_engine")
    judge = make_tiny_model(tmp_path / "judge", architecture="Qwen2ForSequenceClassification")
    config = separate(
        model, tmp_path, actors, rollouts, "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}",
        "actor_rollout_ref.rollout.verify_weights=true", f"actor_rollout_ref.model.lora_rank={lora_rank}",
        "data.val_files=unused", "reward_model.enable=true", f"reward_model.model.path={judge}",
    )
    caplog.set_level(logging.INFO, "hybrid_gkd")
    with make_group(config) as group:
        assert "vllm" in group.description[0]["engine"]
        drawn = []
        for version in range(2):
            group.publish(version)
            found = generate(group)
            drawn.append([s.trained_ids.tolist() for s in found])
            assert {number for s in found for number in s.versions} == {version}
            logprobs = group.compute_logprobs([(tuple(found[rank::actors]),) for rank in range(actors)])
            for s in found:
                np.testing.assert_allclose(s.logprobs, logprobs[s.id], atol=2e-5)
            group.update(shares(random_batch(version), actors, 128))
        assert drawn[0] != drawn[1]
        texts = [RewardText(index=request.id.row, token_ids=request.prompt_ids) for request in REQUESTS]
        scores = group.compute_reward_scores([(tuple(texts[rank::actors]),) for rank in range(actors)])
        assert len(set(scores.values())) == len(REQUESTS)
        loaded = [w.__ray_call__.remote(lambda worker: hasattr(worker, "reward_model")) for w in group.rollouts.workers]
        assert not any(ray.get(loaded, timeout=60))
        lines = [record.getMessage() for record in caplog.records]
        if tensor_parallel > 1:  # the other rank only sees a broken connection
            os.kill(pids(group.rollouts)[1], signal.SIGKILL)
            with pytest.raises(WorkerError, match=r"rollout worker 1 died .*rollout_1\.log"):
                generate(group)
        if actors > 1:
            engine, before = group.rollouts.workers[0], pids(group.rollouts)
            ray.get(engine.__ray_call__.remote(slow_down), timeout=60)
            unfinished = group.generate(REQUESTS, SamplingParams(max_tokens=64))
            assert next(unfinished) == []  # of at least a minute
            os.kill(pids(group.actors)[1], signal.SIGKILL)
            with pytest.raises(WorkerError, match=r"actor worker 1 died .*actor_1\.log"):
                group.actors.call("synchronize")
            assert not group.can_save()
            kept, started = group.keep_usable(actors=True), time.monotonic()
            ray.get(engine.__ray_call__.remote(lambda worker: delattr(worker.engine, "step")), timeout=60)
            assert time.monotonic() < started + 20
            group.close()
            with contextlib.closing(WorkerGroup(config, device="cpu", stop_token_ids=[256], kept=kept)) as another:
                assert pids(another.rollouts) == before
                another.publish(7)
                found = generate(another)
                assert [s.trained_ids.tolist() for s in found] == drawn[0]
                assert {number for s in found for number in s.versions} == {7}
    assert lines.count("Starting rollout weight synchronization...") == 2
    assert lines.count("Actor weight sync completed") == 2
    assert lines.count("Waiting for rollout weight sync with timeout=120s... (actor_rollout_ref.nccl_timeout)") == 2
    assert sum(line.startswith("Rollout weight sync completed in ") for line in lines) == 2


def test_critic_and_reference_policy_compute_the_same_as_on_one_pool(model, tmp_path):
    section = (
        "distillation.enabled=false", "reward.answer_key=answer", "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full",
    )  # fmt: skip
    found = []
    for config in (make_config(model, tmp_path / "one", *section), separate(model, tmp_path / "two", 1, 1, *section)):
        with make_group(config) as group:
            group.publish(0)
            curve, values = learn_values(group, range(2))
            group.publish(1)
            plan = [share.micro_batches for (share,) in shares(random_batch(9), 1, 96)]
            found.append((curve, values, group.compute_ref_logprobs(plan)))
    (one, values, reference), (two, values_of_two, reference_of_two) = found
    assert np.ptp(values) > 0
    np.testing.assert_array_equal(values, values_of_two)
    for index, expected in reference.items():
        np.testing.assert_array_equal(reference_of_two[index], expected)
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def pids(pool):
    return [place.pid for place in pool.placements]


def shorten_deadlines(group, seconds=10.0):
    """Shorten the deadlines of a started group, which takes longer to start than a test may wait for a hung worker."""

    def shorten(worker):
        worker.weight_sync.timeout = seconds

    group.timeout = group.actors.timeout = group.rollouts.timeout = seconds
    members = [group.actors.workers[0], *group.rollouts.workers]
    ray.get([worker.__ray_call__.remote(shorten) for worker in members], timeout=60)


@pytest.mark.alone
def test_a_rollout_worker_that_hangs_in_a_weight_sync_is_named_and_the_student_can_be_saved(tmp_path, caplog):
    """The weights are several buckets, so that the sender fails when its peer still has some to gather with it."""
    model = make_tiny_model(tmp_path / "model", hidden=256, layers=4)
    bucket = "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1"
    with make_group(separate(model, tmp_path, 2, 2, bucket)) as group:
        shorten_deadlines(group)
        group.publish(0)
        group.update(shares(random_batch(0), 2, 128))
        processes = pids(group.rollouts)
        stop_process(processes[1])
        with pytest.raises(WorkerError, match=r"rollout worker 1 .*rollout_1\.log"):
            group.publish(1)
        assert re.search(r"Rollout weight sync failed after \d+\.\d\ds: .*rollout worker 1 ", caplog.text)
        assert group.can_save()
        group.save_checkpoint(tmp_path / "saved", tokenizer_path=str(model))
        assert (tmp_path / "saved" / "huggingface" / "model.safetensors").is_file()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=30)
    assert not alive


@pytest.mark.alone
def test_a_rollout_worker_without_memory_is_named_and_one_that_is_lost_and_the_student_can_be_saved(model, tmp_path):
    """Also where it is lost in a generation in which the other one goes on."""

    def plant(worker):  # travels to the worker by value
        def fail(*_):
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory, planted")

        worker.engine.step = worker.engine.load_weights = fail

    def generate_on(worker):
        def go_on(*_):
            import time

            for _ in range(1500):
                time.sleep(0.02)
                yield []
            raise RuntimeError("waited for to the end")

        import hybrid_gkd.workers.worker

        hybrid_gkd.workers.worker.generate_samples = go_on

    with make_group(separate(model, tmp_path, 1, 2)) as group:
        shorten_deadlines(group)
        group.publish(0)
        ray.get(group.rollouts.workers[1].__ray_call__.remote(plant), timeout=60)
        failed = r"rollout worker 1 failed during the {}: OutOfMemoryError.*rollout_1\.log"
        with pytest.raises(WorkerError, match=failed.format("generation")):
            generate(group)
        with pytest.raises(WorkerError, match=failed.format("weight sync")):
            group.publish(1)
        ray.get(group.rollouts.workers[1].__ray_call__.remote(generate_on), timeout=60)
        stop_process(pids(group.rollouts)[0])
        with pytest.raises(WorkerError, match=r"rollout worker 0 .*rollout_0\.log"):
            generate(group)
        assert group.can_save()


@pytest.mark.alone
def test_a_sender_does_not_wait_for_the_others_where_a_receiver_has_failed(model, tmp_path):
    """NCCL would wait until the timeout, and the student could not be saved until then."""

    def fail(worker):
        def fails(*_):
            raise ValueError("planted")

        worker.engine.load_weights = fails

    def take_nothing(worker):
        import time

        worker.engine.load_weights = lambda *_: time.sleep(300)

    with make_group(separate(model, tmp_path, 1, 2)) as group:
        group.publish(0)
        first, second = group.rollouts.workers
        ray.get([first.__ray_call__.remote(take_nothing), second.__ray_call__.remote(fail)], timeout=60)
        with pytest.raises(WorkerError, match=r"rollout worker 1 failed during the weight sync: ValueError: planted"):
            group.publish(1)
        gather("synchronize", group.actors.start("synchronize"), Timeout(30.0))
        os.kill(pids(group.rollouts)[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"rollout worker 1 died during the weight sync"):
            group.publish(2)
        gather("synchronize", group.actors.start("synchronize"), Timeout(30.0))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        (signal.SIGKILL, "rollout worker 0 died during "),
        (signal.SIGSTOP, r"from rollout worker 0 within 6 s \(actor_rollout_ref\.load_timeout\)"),
    ],
)
def test_a_rollout_worker_lost_while_it_loads_is_named(sent, seen, model, tmp_path):
    def lose(placements):
        os.kill(next(place.pid for place in placements if place.role == "rollout worker"), sent)

    config = separate(model, tmp_path, 1, 1, "actor_rollout_ref.load_timeout=6")
    with pytest.raises(WorkerError, match=rf"{seen}.*rollout_0\.log"):
        WorkerGroup(config, device="cpu", on_placed=lose)


def test_whoever_is_waited_for_is_named_in_every_pool(model, tmp_path):
    with make_group(separate(model, tmp_path, 1, 1)) as group:
        stopped = [*pids(group.actors), *pids(group.rollouts)]
        for pid in stopped:
            stop_process(pid)
        group.timeout = group.actors.timeout = group.rollouts.timeout = 1
        with pytest.raises(WorkerError, match=r"actor worker 0 within .*; .*rollout worker 0 within .*rollout_0\.log"):
            group.publish(0)

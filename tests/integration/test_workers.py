"""The worker group on real Ray, FSDP2 over gloo, and the real rollout engines, on the CPU."""

import contextlib
import copy
import dataclasses
import filecmp
import os
import re
import signal
import time

import numpy as np
import pytest
import ray
import torch
from processes import stop_process
from ray.util.placement_group import placement_group, remove_placement_group
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.errors import DeviceMemoryError, WorkerError
from hybrid_gkd.student.checkpoint_store import CheckpointStore, TrainerState, find_damage
from hybrid_gkd.testing import make_sample, make_tiny_model, tail_of, tiny_config
from hybrid_gkd.types import GenerationRequest, MiniBatch, RewardText, SampleId, SamplingParams, TopK
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup, refuse_shared_gpus
from hybrid_gkd.workers.placement import Placement

NUM_STEPS = 4
TOPK = 8
needs_vllm = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module", autouse=True)
def cluster(model, tmp_path_factory):
    """One Ray cluster with room for the groups `one` and `two`, and for two workers besides."""
    with ray_cluster(make_config(model, tmp_path_factory.mktemp("ray"), "ray_init.num_cpus=5"), "cpu"):
        yield


@pytest.fixture(scope="module")
def one(model, tmp_path_factory):
    """`one()`: a group of one worker as it began."""
    with begun_anew(model, tmp_path_factory.mktemp("one")) as group:
        yield group


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    """The same with two workers, over which the weights are sharded."""
    with begun_anew(model, tmp_path_factory.mktemp("two"), "trainer.n_gpus_per_node=2") as group:
        yield group


@contextlib.contextmanager
def begun_anew(model, folder, *overrides):
    """A function that brings a group back to its start, and returns it: to start one takes longer than to train it."""
    with contextlib.closing(make_group(make_config(model, folder, *overrides), num_updates=NUM_STEPS)) as group:
        group.save_checkpoint(folder / "start", tokenizer_path=str(model))

        def begin():
            group.load_checkpoint(folder / "start")
            group.device_metrics()  # forgets seconds of before
            return group

        yield begin


def make_config(model, folder, *overrides):
    """Adam divides by the root of the second moment: with a tiny eps, rounding of a zero gradient is a step."""
    return tiny_config(
        f"trainer.default_local_dir={folder}", "data.max_prompt_length=24", "data.max_response_length=24",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128", f"distillation.topk={TOPK}",
        "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.optim.eps=1e-4", "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.nccl_timeout=120", *overrides, model=model,
    )  # fmt: skip


def make_group(config, num_updates=2):
    copy_bytes = (0.0,) * config.world_size if config.saves_while_training(None) else None
    return WorkerGroup(
        config, device="cpu", num_updates=num_updates, stop_token_ids=[256], copy_bytes=copy_bytes
    )


def random_batch(step, count=12):
    """Samples of odd lengths with random but valid teacher scores."""
    rng = np.random.default_rng(step)
    batch = []
    for index in range(count):
        prompt, response = (rng.integers(0, 256, rng.integers(1, 24)).astype(np.int32) for _ in range(2))
        ids = np.stack([rng.permutation(256)[:TOPK] for _ in response]).astype(np.int32)
        logprobs = np.log(rng.dirichlet(np.ones(TOPK + 1), len(response))[:, :TOPK]).astype(np.float32)
        tail = tail_of(logprobs)
        teacher = TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])
        batch.append(make_sample(index, prompt=prompt, completion=response, version=step, teacher=teacher))
    return batch


def shares(batch, num_workers, max_tokens):
    plan = plan_micro_batches([sample.num_tokens for sample in batch], num_workers, max_tokens, None, True)
    num_tokens = sum(sample.num_trained for sample in batch)
    return [
        [MiniBatch(micro_batches=tuple(tuple(batch[i] for i in m) for m in share), num_tokens=num_tokens)]
        for share in plan
    ]


def in_parts(batch, num_workers):
    """A mini-batch as samples may be scored: one, most of the others, the last two."""
    num_tokens = sum(sample.num_trained for sample in batch)
    cuts = [shares(part, num_workers, 128) for part in (batch[5:6], [*batch[:5], *batch[6:-2]], batch[-2:])]
    return [[dataclasses.replace(share[0], num_tokens=num_tokens) for share in part] for part in cuts]


def update_in_parts(group, batch):
    *parts, last = in_parts(batch, group.size)
    for part in parts:
        group.accumulate(part)
    return group.update([[share] for share in last])


def train(group, folder, *, max_tokens=128, batches=None, streamed=False):
    """The divergences of the first batch, the loss curve, and the final weights of a few steps on given scores."""
    batches = batches or [random_batch(step) for step in range(NUM_STEPS)]
    plan = [share.micro_batches for (share,) in shares(batches[0], group.size, max_tokens)]
    tokens = np.concatenate(list(group.compute_divergences(plan).values())).astype(float)
    names = ("actor/distillation/forward_kl", "actor/distillation/reverse_kl")
    curve = [dict(zip(names, tokens[:, :2].mean(0), strict=True))]
    started = time.monotonic()
    for batch in batches:
        curve += update_in_parts(group, batch) if streamed else group.update(shares(batch, group.size, max_tokens))
    assert_parts_of_updates(group, time.monotonic() - started, "update_actor")
    group.save_checkpoint(folder, tokenizer_path=group.config.actor_rollout_ref.model.path)
    return curve, load_file(folder / "huggingface" / "model.safetensors")


def assert_parts_of_updates(group, seconds, *updates):
    found = {name: value for name, value in group.device_metrics().items() if name.startswith("timing/")}
    assert found.keys() == {f"timing/{u}/{part}" for u in updates for part in ("compute", "optimizer_step", "copies")}
    assert min(found.values()) > 0
    if group.size == 1:  # else they are of the worker where each lasts longest
        assert sum(found.values()) <= seconds


def assert_same(first, second, weights_first, weights_second):
    """Equal up to the order of float32 sums, over all steps: 1e-5 relative for metrics, 2e-5 for weights."""
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"actor/distillation/overlap_ratio"}:  # of a sample that depends on the cut
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert weights_first.keys() == weights_second.keys()
    for name in weights_first:
        np.testing.assert_allclose(weights_first[name], weights_second[name], rtol=0, atol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def one_worker(one, tmp_path_factory):
    """Loss curve and weights of one worker."""
    return train(one(), tmp_path_factory.mktemp("one worker"))


@pytest.mark.parametrize("fsdp_size", [1, 2])
def test_one_worker_and_two_train_the_same(fsdp_size, model, one_worker, two, tmp_path):
    """With the weights sharded over both workers, and replicated on each."""
    replicated = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=1")
    with begun_anew(model, tmp_path, *replicated) if fsdp_size == 1 else contextlib.nullcontext(two) as group:
        curve_two, weights_two = train(group(), tmp_path / "w2", max_tokens=96)
    curve_one, weights_one = one_worker
    assert_same(curve_one, curve_two, weights_one, weights_two)
    assert curve_one[0] == pytest.approx({name: curve_one[1][name] for name in curve_one[0]}, rel=1e-5)
    before = load_file(model / "model.safetensors")
    assert any((weights_one[name] - before[name]).abs().max() > 1e-3 for name in before)


def test_what_is_trained_in_parts_is_trained_the_same(one_worker, two, tmp_path):
    """On two workers, the second of which has no sample of the first part."""
    curve, weights = train(two(), tmp_path, streamed=True)
    assert_same(one_worker[0], curve, one_worker[1], weights)


def test_a_worker_without_samples_takes_part(one, two, tmp_path):
    batches = [random_batch(0, count=1)]
    result_one, result_two = (train(g(), tmp_path / n, batches=batches) for g, n in ((one, "w1"), (two, "w2")))
    assert_same(result_one[0], result_two[0], result_one[1], result_two[1])


def learn_values(group, steps):
    """Values, and an update of critic and actor, of each step; the metrics of both, the values of one more batch."""
    def ready(step):
        batch = random_batch(step)
        plan = shares(batch, group.size, 96)
        parts = [share.micro_batches for (share,) in plan]
        values, reference = group.compute_values(parts), group.compute_ref_topk(parts)
        returns = np.random.default_rng([step, 1])
        return [
            dataclasses.replace(sample, signals={
                "values": values[sample.id], "reference_topk": reference[sample.id],
                "reference": reference[sample.id].sampled_logprobs,
                "advantages": returns.normal(size=sample.num_trained).astype(np.float32),
                "returns": returns.normal(1, 1, sample.num_trained).astype(np.float32),
            })
            for sample in batch
        ]

    metrics = []
    for step in steps:
        plan = shares(ready(step), group.size, 96)
        metrics += [*group.update_critic(plan), *group.update(plan)]
    return metrics, np.concatenate([sample.array("values") for sample in ready(9)])


def assert_written_alike(group, folder, path):
    """Behind the calls and at once. A worker looks at nothing that another one may be writing."""
    stray = folder / "behind" / "huggingface" / "stray"
    stray.parent.mkdir(parents=True)
    stray.touch()
    group.take_snapshot(tokenizer_path=path)
    group.write_snapshot(folder / "behind")
    (behind, _), (second, _) = group.actors.call("finish_snapshot")
    assert second.keys() == {"actor/rank_1_of_2.safetensors", "critic/rank_1_of_2.safetensors"}
    del behind["huggingface/stray"]
    behind, at_once = behind | second, group.save_checkpoint(folder / "at once", tokenizer_path=path)
    assert behind == at_once
    assert {name.split("/")[0] for name in behind} == {"actor", "critic", "huggingface"}
    found = filecmp.cmpfiles(folder / "behind", folder / "at once", behind, shallow=False)
    assert sorted(found[0]) == sorted(behind)


def killed_while_it_writes(group, store, path):
    """The disk takes nothing: a named pipe that nobody reads."""
    group.take_snapshot(tokenizer_path=path)
    folder = store.begin(4)
    (folder / "actor").mkdir()
    os.mkfifo(folder / "actor" / "rank_0_of_1.safetensors")
    group.write_snapshot(folder)
    assert not group.snapshot_written()
    os.kill(group.placements[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 0 died"):
        group.finish_snapshot()
    assert store.latest().name == "global_step_2"


def test_a_critic_on_one_worker_and_on_two_that_continue_from_a_checkpoint(model, tmp_path):
    """On two workers its shards and the actor's are cut in different ways. The reference is the start in both, and the
    reward model is transformers' own. The checkpoint is written while the first worker trains on, which is then killed
    while it writes another one."""
    judge = make_tiny_model(tmp_path / "judge", seed=5, architecture="Qwen2ForTokenClassification")
    gae = (
        "distillation.enabled=false", "algorithm.adv_estimator=gae", "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "critic.optim.lr=1e-2", "critic.optim.eps=1e-4", "critic.fsdp_config.fsdp_size=1",
        "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full",
        "actor_rollout_ref.ref.topk=8", "trainer.save_freq=1",
    )
    store = CheckpointStore(tmp_path / "run", keep=1)
    one = make_config(model, tmp_path / "one", *gae)
    two = make_config(model, tmp_path / "two", *gae, "trainer.n_gpus_per_node=2")
    found, references, judged = [], [], []
    texts = [RewardText(index=i, token_ids=np.arange(i, 2 * i + 3, dtype=np.int32)) for i in range(5)]
    for config in (one, two):
        with contextlib.closing(make_group(config, num_updates=4)) as group:
            plan = [share.micro_batches for (share,) in shares(random_batch(9), group.size, 96)]
            if config is one:
                start = group.compute_logprobs(plan)
            if config is two:
                assert find_damage(store.latest()) == {}
                group.load_checkpoint(store.latest())
            else:
                learn_values(group, range(2))
                assert group.saves_in_background
                group.take_snapshot(tokenizer_path=str(model))
                group.write_snapshot(store.begin(2))
            group.device_metrics()
            started = time.monotonic()
            found.append(learn_values(group, range(2, 4)))
            assert_parts_of_updates(group, time.monotonic() - started, "update_actor", "update_critic")
            references.append(group.compute_ref_logprobs(plan))
            scores = group.compute_ref_topk(plan)
            for index, expected in references[-1].items():
                assert scores[index].ids.shape == (len(expected), 8)
                np.testing.assert_allclose(scores[index].sampled_logprobs, expected, rtol=0, atol=2e-5)
            # The second of two workers has no text.
            judged.append(group.compute_reward_scores([((*texts,), ()), ((), ())][: group.size]))
            if config is two:
                assert_written_alike(group, tmp_path, str(model))
            if config is one:
                written, seconds = group.finish_snapshot()
                assert seconds > 0
                assert {name.split("/")[0] for name in written} == {"actor", "critic", "huggingface"}
                store.complete(TrainerState(step=2, data={}, first_metrics={}), written)
                killed_while_it_writes(group, store, str(model))
    (curve_one, values_one), (curve_two, values_two) = found
    assert curve_one[-1]["actor/ref_kl"] > 1e-3
    assert np.ptp(values_one) > 0.1
    for index, expected in start.items():
        for reference in references:
            np.testing.assert_allclose(reference[index], expected, rtol=0, atol=2e-5)
    plain = AutoModelForTokenClassification.from_pretrained(judge, dtype=torch.float32).eval()
    for text in texts:
        with torch.no_grad():
            expected = plain(torch.from_numpy(text.token_ids.astype(np.int64))[None]).logits[0, -1, 0].item()
        assert [each[text.index] for each in judged] == pytest.approx([expected, expected], rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(values_one, values_two, rtol=0, atol=2e-4)
    for a, b in zip(curve_one, curve_two, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


@needs_vllm
def test_vllm_generates_with_the_published_weights(model, tmp_path):
    """Sampled log-probabilities of engine and actor agree before and after an update, on two workers."""

    def say_more(worker):  # travels to the worker by value
        from hybrid_gkd.rollout import engine as rollout

        rollout.PROGRESS_SECONDS = 0.0

    config = make_config(
        model, tmp_path, "actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=2",
    )
    requests = [
        GenerationRequest(id=SampleId(1, i, 0), prompt_ids=np.arange(i % 7 + 1, dtype=np.int32) + i, seed=i)
        for i in range(10)
    ]
    with contextlib.closing(make_group(config)) as group:
        assert {"vllm" in worker["engine"] for worker in group.description} == {True}
        drawn = []
        for version in range(2):
            group.publish(version)
            ray.get([worker.__ray_call__.remote(say_more) for worker in group.actors.workers], timeout=60)
            parts = list(group.generate(requests, SamplingParams(max_tokens=24, logprobs=True)))
            assert [] in parts  # while nothing finishes
            found = [s for part in parts for s in part]
            found.sort(key=lambda sample: sample.id)
            drawn.append([s.trained_ids.tolist() for s in found])
            assert [s.id for s in found] == [request.id for request in requests]
            assert {v for s in found for v in s.versions.tolist()} == {version}
            logprobs = group.compute_logprobs([(tuple(found[rank::2]),) for rank in range(2)])
            for s in found:
                np.testing.assert_allclose(s.logprobs, logprobs[s.id], atol=2e-5)
            group.update(shares(random_batch(version), 2, 128))
        assert drawn[0] != drawn[1]


def plant_out_of_memory(group, direction, times):
    """The second decoder block of the first worker's model runs out of memory, from its third use on; or the clipping
    of its gradients, once."""

    def plant(worker):  # travels to the worker by value
        uses = []

        def fail(*_):
            uses.append(None)
            if 3 <= len(uses) < 3 + times:
                raise torch.OutOfMemoryError("CUDA out of memory, planted")

        def clip(*_):
            torch.nn.utils.get_total_norm = get_total_norm
            raise torch.OutOfMemoryError("CUDA out of memory, planted")

        block, get_total_norm = worker.actor.hf_model.model.layers[1], torch.nn.utils.get_total_norm
        if direction == "clip":
            torch.nn.utils.get_total_norm = clip
        elif direction == "forward":
            block.register_forward_pre_hook(fail)
        else:
            block.register_full_backward_pre_hook(fail)

    ray.get(group.actors.workers[0].__ray_call__.remote(plant), timeout=60)


@pytest.mark.parametrize(
    ("direction", "streamed", "reshard"),
    [("forward", False, True), ("backward", False, False), ("backward", True, True), ("clip", False, True)],
)
def test_out_of_memory_halves_the_micro_batches_and_changes_nothing_else(
    direction, streamed, reshard, model, one, one_worker, tmp_path
):
    """Also when it ends a part of the mini-batch after another one, and while all weights are gathered."""
    batch = shares(random_batch(0), 1, 128)
    assert len(batch[0][0].micro_batches) >= 3
    gathered = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false"
    with contextlib.nullcontext(one) if reshard else begun_anew(model, tmp_path, gathered) as begin:
        group = begin()
        log = group.log_files[0].read_text(encoding="utf-8")
        plant_out_of_memory(group, direction, 1)
        first = (update_in_parts(group, random_batch(0)) if streamed else group.update(batch))[0]
        second = group.update(shares(random_batch(1), 1, 128))[0]
        log = group.log_files[0].read_text(encoding="utf-8").removeprefix(log)
    for found, expected in zip((first, second), one_worker[0][1:3], strict=True):
        assert found.keys() == expected.keys()
        names = expected.keys() - {"actor/distillation/overlap_ratio"}  # see assert_same
        assert {n: found[n] for n in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-5, abs=1e-6)
    assert log.count("retrying with micro-batches of half the size: CUDA out of memory, planted") == 1


def test_out_of_memory_again_ends_the_run_with_what_was_there_and_what_to_change(model, tmp_path):
    config = make_config(model, tmp_path)
    with contextlib.closing(make_group(config)) as group:
        plant_out_of_memory(group, "backward", 10**6)
        with pytest.raises(DeviceMemoryError, match=r"phase update: worker 0 .*actor_params 0\.00 GiB.*ppo_max") as it:
            group.update(shares(random_batch(0), 1, 128))
        assert not it.value.weights_changed
        group.save_checkpoint(tmp_path / "after", tokenizer_path=str(model))
    after, before = (load_file(p / "model.safetensors") for p in (tmp_path / "after" / "huggingface", model))
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_out_of_memory_within_the_optimizer_step_is_not_tried_again(model, tmp_path):
    """Some parameters may have been stepped already, and would be twice."""

    def plant(worker):
        def fail():
            raise torch.OutOfMemoryError("CUDA out of memory, planted")

        worker.actor.optimizer.step = fail

    with contextlib.closing(make_group(make_config(model, tmp_path))) as group:
        ray.get(group.actors.workers[0].__ray_call__.remote(plant), timeout=60)
        with pytest.raises(DeviceMemoryError, match=r"phase optimizer_step: .*last checkpoint.*planted") as failure:
            group.update(shares(random_batch(0), 1, 128))
        assert failure.value.weights_changed
    assert "once more" not in group.log_files[0].read_text(encoding="utf-8")


def test_a_worker_that_fails_or_is_killed_ends_the_call_and_nobody_waits_for_its_peers(model, tmp_path, caplog):
    """Which are in a collective with it: in a generation by both, and in an update."""
    config = make_config(model, tmp_path, "trainer.n_gpus_per_node=2", "actor_rollout_ref.nccl_timeout=3600")
    goes_on = tmp_path / "goes on"
    goes_on.touch()

    def plant(worker):  # travels to the worker by value
        def generate(*_):
            if worker.rank == 0:
                raise torch.OutOfMemoryError("CUDA out of memory, planted")
            while goes_on.exists():
                yield []
                time.sleep(0.05)

        import hybrid_gkd.workers.worker

        hybrid_gkd.workers.worker.generate_samples = generate

    stuck = "the student cannot be saved: in a collective with a worker that has failed: worker 1"
    with contextlib.closing(make_group(config)) as group:
        ray.get([worker.__ray_call__.remote(plant) for worker in group.actors.workers], timeout=60)
        group.config = group.actors.config = copy.deepcopy(config)
        group.config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
        request = GenerationRequest(id=SampleId(1, 0, 0), prompt_ids=np.arange(4, dtype=np.int32), seed=0)
        with pytest.raises(WorkerError, match=r"worker 0 failed during the generation: OutOfMemoryError"):
            list(group.generate([request], SamplingParams(max_tokens=24)))
        assert not group.can_save()
        assert stuck in caplog.text
        goes_on.unlink()
        ray.get([worker.placement.remote() for worker in group.actors.workers], timeout=60)
        assert group.can_save()
        caplog.clear()
        plant_out_of_memory(group, "forward", 10**6)
        with pytest.raises(DeviceMemoryError, match=r"phase update: worker 0 ran out"):
            group.update(shares(random_batch(0), 2, 48))
        assert not group.can_save()
        assert stuck in caplog.text
        log = group.log_files[0].read_text(encoding="utf-8")
        assert re.findall(r"(\w+) failed\nTraceback \(most recent call last\):", log) == ["generate", "update"]
        ray.kill(group.actors.workers[1])
        with pytest.raises(WorkerError, match=r"worker 1 died during the update.*worker_1\.log"):
            group.update(shares(random_batch(0), 2, 128))


def test_a_hung_worker_ends_the_call_at_the_deadline(model, tmp_path):
    config = make_config(model, tmp_path, "actor_rollout_ref.nccl_timeout=60")
    with contextlib.closing(make_group(config)) as group:
        pid = ray.get(group.actors.workers[0].__ray_call__.remote(lambda worker: os.getpid()), timeout=60)
        stop_process(pid)
        group.actors.timeout = 3
        try:
            with pytest.raises(WorkerError, match=r"no answer from worker 0 within 3 s .* during the weight sync"):
                group.publish(1)
        finally:
            os.kill(pid, signal.SIGKILL)


def test_a_cluster_without_the_resources_is_refused_by_name_at_once(model, tmp_path):
    with pytest.raises(WorkerError, match=r"trainer\.n_gpus_per_node.*1 workers need .*GPU.*has GPU 0"):
        WorkerGroup(make_config(model, tmp_path), device="cuda", num_updates=2, stop_token_ids=[256])


def test_a_cluster_that_is_taken_is_refused_by_name(model, tmp_path):
    everything = f"trainer.n_gpus_per_node={int(ray.cluster_resources()['CPU'])}"
    taken = placement_group([{"CPU": 1}])
    assert taken.wait(timeout_seconds=60)
    try:
        limit = r"within 2 s \(ray_init\.placement_timeout\)"
        with pytest.raises(WorkerError, match=rf"trainer\.n_gpus_per_node.*could not place them {limit}"):
            make_group(make_config(model, tmp_path, everything, "ray_init.placement_timeout=2"))
    finally:
        remove_placement_group(taken)


def test_two_workers_on_one_gpu_are_refused_by_rank():
    def placed(*gpus):
        return [
            Placement(rank=rank, host="a", pid=1, visible_devices="0", device="x", gpu=gpu)
            for rank, gpu in enumerate(gpus)
        ]

    refuse_shared_gpus(placed(None, None))
    refuse_shared_gpus(placed("a 1", "a 2", "b 1"))
    with pytest.raises(WorkerError, match=r"worker 1 and worker 3 have the same GPU \(a 2\)"):
        refuse_shared_gpus(placed("a 1", "a 2", "b 1", "a 2"))

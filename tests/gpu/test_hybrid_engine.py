"""Actor and vLLM taking turns on one GPU: every offload on, sleep mode, bf16, a real model shape.

    bash tests/run.sh -m gpu tests/gpu
"""

import contextlib
import mmap
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import ray
import torch
from transformers import (
    AutoConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import plan_memory, trained_models
from hybrid_gkd.offload.pinned import OffloadedTensors, page_locked
from hybrid_gkd.student.checkpoint_store import find_damage, write_manifest
from hybrid_gkd.testing import make_sample, make_tokenizer, tail_of, tiny_config
from hybrid_gkd.types import GenerationRequest, MiniBatch, RewardText, SampleId, SamplingParams, TopK
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOPK = 16
MEAN_LOGPROB_DIFFERENCE = 0.015
"""Between bf16 in vLLM's kernels and in the actor's, mean over sampled tokens."""
ROUTED_LOGPROB_DIFFERENCE = 0.05
"""The same where rounding also picks another expert now and then: twice what a plain bf16 forward of that model is away
from float32, 0.025. Weights in the wrong places were 2 away."""


def engine_memory(config):
    """By which the rollout engine finds its share of a GPU."""
    return plan_memory(config, trained_models(config, student_spec(config)), "cuda").engine_memory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Qwen2.5-0.5B's shape with random weights."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, rope_theta=1e6,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_for(model, folder, *overrides):
    return tiny_config(
        f"trainer.default_local_dir={folder}", "data.max_prompt_length=256", "data.max_response_length=128",
        "trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.enforce_eager=true",
        f"distillation.topk={TOPK}", "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.rollout.verify_weights=true", *overrides, model=model,
    )  # fmt: skip


def random_requests(lengths):
    """With prompts of so many tokens."""
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(id=SampleId(1, i, 0), prompt_ids=rng.integers(0, 151936, n).astype(np.int32), seed=i)
        for i, n in enumerate(lengths)
    ]


def random_samples(count):
    rng = np.random.default_rng(0)
    return [
        make_sample(i, prompt=rng.integers(0, 151936, 20 + i), completion=rng.integers(0, 151936, 40 + 3 * i))
        for i in range(count)
    ]


def draw(group, requests, sampling):
    """The requests' samples, in their order."""
    return sorted((s for part in group.generate(requests, sampling) for s in part), key=lambda s: s.id)


def versions(samples):
    return {version for s in samples for version in s.versions.tolist()}


def logprob_differences(group, samples, workers=1):
    """Between the engine and the actor, of all tokens."""
    logprobs = group.compute_logprobs([(tuple(samples[rank::workers]),) for rank in range(workers)])
    return np.concatenate([np.abs(s.logprobs - logprobs[s.id]) for s in samples])


def distil(samples, step):
    rng = np.random.default_rng(step)
    batch = []
    for s in samples:
        ids = np.stack([rng.choice(151936, TOPK, replace=False) for _ in range(s.num_trained)]).astype(np.int32)
        logprobs = np.log(rng.dirichlet(np.ones(TOPK + 1), len(ids))[:, :TOPK]).astype(np.float32)
        tail = tail_of(logprobs)
        teacher = TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])
        batch.append(s.with_signals(teacher=teacher))
    num_tokens = sum(s.num_trained for s in samples)
    half = len(batch) // 2
    return [[MiniBatch(micro_batches=(tuple(batch[:half]), tuple(batch[half:])), num_tokens=num_tokens)]]


@pytest.mark.parametrize("offload", [True, False])
def test_actor_and_engine_take_turns(model, tmp_path, offload):
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = config_for(
        model, tmp_path, f"{fsdp}.param_offload={offload}", f"{fsdp}.optimizer_offload={offload}",
        f"actor_rollout_ref.rollout.free_cache_engine={offload}",
    )
    requests = random_requests(range(100, 132))
    losses, drawn = [], []
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=8, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        print(group.description)
        for step in range(4):
            print("publish", group.publish(step))
            found = draw(group, requests, SamplingParams(max_tokens=128, logprobs=True))
            drawn.append([s.trained_ids.tolist() for s in found])
            difference = logprob_differences(group, found)
            print("logprob difference", difference.mean(), difference.max())
            assert difference.mean() < MEAN_LOGPROB_DIFFERENCE
            losses.append(group.update(distil(found, 0))[0]["actor/kl_loss"])
            if step == 1:
                group.save_checkpoint(tmp_path / "checkpoint", tokenizer_path=str(model))
                group.load_checkpoint(tmp_path / "checkpoint")
        memory = group.device_metrics()
        print("losses", losses, "peak GiB", memory)
        neighbour = torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")  # in this process: not the worker's
        group.publish(4)
        again = draw(group, requests, SamplingParams(max_tokens=128, logprobs=True))
        assert [s.id for s in again] == [request.id for request in requests]
        beside = group.device_metrics()
        del neighbour
        torch.cuda.empty_cache()
    assert losses[-1] < losses[0]
    for name in ("engine_weights", "kv_cache", "actor_rest"):
        assert beside[f"memory/rollout/{name}_gb"] == pytest.approx(memory[f"memory/rollout/{name}_gb"], abs=0.1), name
    if offload:
        assert memory["memory/rollout/actor_rest_gb"] < 0.5
        assert memory["memory/update/sleeping_engine_gb"] < 2
    assert drawn[0] != drawn[-1]


def sleep_while_memory_is_taken(folder):
    vllm_compat.prepare_environment("cuda")
    from vllm import LLM

    llm = LLM(
        str(folder), enable_sleep_mode=True, skip_tokenizer_init=True, enforce_eager=True, max_model_len=512,
        kv_cache_memory_bytes=2**28, gpu_memory_utilization=0.1,
    )  # fmt: skip
    llm.collective_rpc(vllm_compat.tolerate_memory_growth)
    free = [(2**36, 2**37), (2**36 - 2**30, 2**37)]  # before and after, of 2**37
    with mock.patch("torch.accelerator.get_memory_info", side_effect=free):
        llm.sleep(level=2)
    executor = llm.llm_engine.model_executor
    assert executor.is_sleeping
    sizes = vllm_compat.sleeping_bytes()
    for tag, size in zip(("weights", "kv_cache"), sizes, strict=True):
        before = torch.cuda.mem_get_info()[0]
        llm.wake_up(tags=[tag])
        taken = before - torch.cuda.mem_get_info()[0]
        print(tag, "as vLLM's allocator has it, and as the card shows it:", size, taken)
        assert size == pytest.approx(taken, abs=2**25)
        assert size > 2**27  # 1 GiB of weights; blocks of less than 256 MiB
    assert not executor.is_sleeping
    assert vllm_compat.sleeping_bytes() == sizes


def test_an_engine_falls_asleep_beside_a_process_that_takes_memory_meanwhile(model):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(sleep_while_memory_is_taken, model).result(300)


@pytest.mark.parametrize("eager", [True, False])
def test_restored_weights_give_the_same_tokens(model, tmp_path, eager):
    """Weights, graphs and caches hold nothing of what was published in between."""
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = config_for(
        model, tmp_path, f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true",
        f"actor_rollout_ref.rollout.enforce_eager={eager}", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes=64",
    )
    requests = random_requests(range(50, 66))
    sampling = SamplingParams(max_tokens=64, temperature=0.0)
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=8, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        group.publish(0)
        start = draw(group, requests, sampling)
        group.save_checkpoint(tmp_path / "start", tokenizer_path=str(model))
        again = draw(group, requests, sampling)  # the engine has made room for the parameters meanwhile
        group.update(distil(start, 0))
        group.publish(1)
        changed = draw(group, requests, sampling)
        group.load_checkpoint(tmp_path / "start")
        group.publish(2)
        restored = draw(group, requests, sampling)
        seconds = [group.publish(version)["publish"] for version in range(3, 23)]
        print("20 publishes, seconds:", np.round(seconds, 4).tolist())
        last = draw(group, requests, sampling)
    tokens = [[s.trained_ids.tolist() for s in found] for found in (start, changed, again, restored, last)]
    assert tokens[0] != tokens[1]
    assert tokens[0] == tokens[2] == tokens[3] == tokens[4]


def test_a_mixture_of_experts_generates_with_what_was_published(tmp_path):
    """vLLM takes its layers of experts apart and puts them together again, which no comparison of weights follows."""
    tokenizer = make_tokenizer()
    shape = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=512, intermediate_size=1024, moe_intermediate_size=384, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=4096, initializer_range=0.05, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(shape).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = config_for(
        tmp_path / "model", tmp_path, f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true",
        "actor_rollout_ref.rollout.verify_weights=false", "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    requests = random_requests(range(20, 36))
    drawn, differences = [], []
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=8, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        for version in range(3):
            group.publish(version)
            found = draw(group, requests, SamplingParams(max_tokens=64, logprobs=True))
            drawn.append([s.trained_ids.tolist() for s in found])
            differences.append(logprob_differences(group, found).mean())
            group.update(distil(found, version))
    print("logprob differences", differences)
    assert max(differences) < ROUTED_LOGPROB_DIFFERENCE
    assert drawn[0] != drawn[1] != drawn[2]


def locked_blocks(group):
    """Return for each block of host memory for checkpoints whether it is locked: one block if its size sufficed."""

    def look(worker):
        copies = getattr(worker.saver, "_copies", None)
        return [] if copies is None else [block.is_pinned() for block, _ in copies._blocks]

    return ray.get(group.actors.workers[0].__ray_call__.remote(look), timeout=60)


@pytest.mark.parametrize("behind", [False, True])
def test_a_run_goes_on_from_its_checkpoint_with_every_offload(model, tmp_path, behind):
    """Weights and optimizer state go from the card to the files and, through another process, back.

    The files are written at once, or while the run publishes, generates and trains on.
    What is on the host afterwards is what was loaded: the student computes the same after a rollout phase.
    """
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = config_for(
        model, tmp_path, f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true",
        f"trainer.save_freq={1 if behind else -1}",
    )
    fixed = random_samples(8)
    requests = random_requests(range(20, 28))
    folder = tmp_path / "checkpoint"
    found = []
    for resumes in (False, True):
        with ray_cluster(config, "cuda"), contextlib.closing(
            WorkerGroup(config, device="cuda", num_updates=8, stop_token_ids=[256],
                        engine_memory=engine_memory(config), copy_bytes=(0.0,) if behind else None)
        ) as group:
            if resumes:
                group.load_checkpoint(folder)
            for step in range(0 if resumes else 2):
                group.publish(step)
                group.update(distil(fixed, step))
            assert group.saves_in_background is behind
            if not resumes and behind:
                group.take_snapshot(tokenizer_path=str(model))
                folder.mkdir()
                group.write_snapshot(folder)
            elif not resumes:
                sums = group.save_checkpoint(folder, tokenizer_path=str(model))
            group.publish(2)
            assert len(draw(group, requests, SamplingParams(max_tokens=16))) == len(requests)
            logprobs = group.compute_logprobs([(tuple(fixed),)])
            metrics = [group.update(distil(fixed, step))[0] for step in (2, 3)]
            found.append((np.concatenate([logprobs[s.id] for s in fixed]), metrics))
            if not resumes:
                sums = group.finish_snapshot()[0] if behind else sums
                assert {name.split("/")[0] for name in sums} == {"actor", "huggingface"}
                write_manifest(folder, sums)
                assert find_damage(folder) == {}
                assert locked_blocks(group) == ([True] if behind else [])
    (expected, whole), (logprobs, resumed) = found
    np.testing.assert_array_equal(logprobs, expected)
    for one, other in zip(whole, resumed, strict=True):
        assert one["actor/kl_loss"] == pytest.approx(other["actor/kl_loss"], rel=1e-4)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=5e-3)  # bf16, any order of sums


def test_host_memory_is_unlocked_with_its_last_tensor_and_a_failure_harms_no_other_work():
    """Everything lies at one address, which CUDA does not lock twice."""
    place = mmap.mmap(-1, 2**25)
    arrays = SimpleNamespace(uint8=np.uint8, empty=lambda size, dtype: np.ndarray(size, dtype, place))
    with mock.patch("hybrid_gkd.offload.pinned.np", arrays):
        first = page_locked(2**24)
        assert first.is_pinned()
        view = first[2**20 :].view(torch.float32)
        del first
        with pytest.raises(MemoryError, match="CUDA error 712"):
            page_locked(2**24)
        assert torch.ones(8, device="cuda").sum().item() == 8
        assert view.is_pinned()
        del view
        again = page_locked(2**24)
    assert again.is_pinned()
    assert again.copy_(torch.full_like(again, 7, device="cuda")).unique().tolist() == [7]


def test_tensors_that_come_back_in_parts_are_what_they_were():
    """Also where they leave in between, and where memory runs out on the way."""
    tensors = [torch.randn(2**26, device="cuda") for _ in range(4)]  # 256 MiB each
    expected = [tensor.cpu() for tensor in tensors]
    size, owner = tensors[0].nbytes, OffloadedTensors(lambda: tensors)
    owner.release()
    bare = torch.cuda.memory_allocated()
    assert owner.num_bytes() == 4 * size
    assert owner.start_acquire(size - 1, 4 * size) == 4 * size  # a tensor comes whole or not at all
    assert owner.start_acquire(4 * size, 1) == 3 * size
    assert owner.start_acquire(2 * size, 4 * size) == size
    owner.release()
    assert torch.cuda.memory_allocated() == bare
    assert owner.start_acquire(4 * size, size) == 3 * size
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((bare + 2.5 * size) / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError):
            owner.start_acquire(4 * size, 4 * size)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() == bare + size
    owner.acquire()
    assert all(torch.equal(tensor.cpu(), content) for tensor, content in zip(tensors, expected, strict=True))
    owner.changed()
    tensors[0].fill_(1)
    owner.release()
    owner.acquire()
    assert tensors[0].unique().tolist() == [1]
    assert torch.equal(tensors[3].cpu(), expected[3])


def in_use(group):
    """Bytes in use on the device and locked on the host, of the first worker."""

    def measure(worker):
        arenas = [tensors.arena for tensors in worker.shared.offloaded.values() if tensors.arena is not None]
        return worker.shared.meter.used(), sum(arena.numel() for arena in arenas)

    return ray.get(group.actors.workers[0].__ray_call__.remote(measure), timeout=60)


def test_a_hundred_verified_publishes_and_no_growth(model, tmp_path):
    """Every publish is compared value by value; memory after step 50 is that after step 3, within 1 %."""
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = config_for(model, tmp_path, f"{fsdp}.param_offload=true", f"{fsdp}.optimizer_offload=true")
    requests = random_requests([60] * 16)
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=50, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        for step in range(1, 51):
            group.publish(2 * step)
            group.publish(2 * step + 1)
            found = draw(group, requests, SamplingParams(max_tokens=16))
            assert versions(found) == {2 * step + 1}
            group.update(distil(found, step))
            group.publish(2 * step + 2)
            if step == 3:
                early = in_use(group)
        late = in_use(group)
    print("bytes on the device and locked on the host, step 3 and step 50:", early, late)
    assert late == pytest.approx(early, rel=0.01)


def train_on_given_samples(model, folder, workers, tensor_parallel):
    """Metrics of three steps on the same samples and scores, after checks of the engine against the actor."""
    fixed = random_samples(16)
    requests = random_requests(range(20, 36))
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = config_for(
        model, folder, f"trainer.n_gpus_per_node={workers}", f"{fsdp}.param_offload=true",
        f"{fsdp}.optimizer_offload=true",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}",
    )
    curve = []
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=8, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        for step in range(3):
            print(workers, tensor_parallel, "publish", group.publish(step))
            found = draw(group, requests, SamplingParams(max_tokens=64, logprobs=True))
            assert [s.id for s in found] == [request.id for request in requests]
            assert logprob_differences(group, found, workers).mean() < MEAN_LOGPROB_DIFFERENCE
            first, second = distil(fixed, 0)[0][0].micro_batches
            batch = [*first, *second]
            num_tokens = sum(s.num_trained for s in fixed)
            shares = [
                [MiniBatch(micro_batches=(tuple(batch[r::workers]),), num_tokens=num_tokens)] for r in range(workers)
            ]
            curve.append(group.update(shares)[0])
        print(curve, "peak GiB", group.device_metrics())
    return curve


@pytest.fixture(scope="module")
def one_card(model, tmp_path_factory):
    return train_on_given_samples(model, tmp_path_factory.mktemp("one_card"), 1, 1)


@pytest.mark.parametrize(("workers", "tensor_parallel"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_several_gpus_train_as_one(workers, tensor_parallel, model, one_card, tmp_path):
    """Same samples and scores: the same loss curve in bf16; the engine agrees with the actor at each layout."""
    if torch.cuda.device_count() < workers:
        pytest.skip(f"needs {workers} GPUs")
    curve = train_on_given_samples(model, tmp_path, workers, tensor_parallel)
    for one, other in zip(one_card, curve, strict=True):
        for name in one.keys() - {"actor/distillation/overlap_ratio"}:  # of a sample of rows, others on each layout
            # bf16 products are summed in another order on each layout; the reduction over ranks is float32.
            assert other[name] == pytest.approx(one[name], rel=5e-3), name


@pytest.mark.parametrize("offload", [True, False])
def test_a_reward_model_comes_and_goes(model, tmp_path, offload):
    """It is on the card in its own phase alone, scores as transformers does, and the same after other phases.

    In bf16: no farther from float32 than twice what transformers' own bf16 is away.
    """
    shape = AutoConfig.from_pretrained(model, num_labels=1)
    torch.manual_seed(1)
    judge = Qwen2ForSequenceClassification(shape).to(torch.bfloat16)
    judge.save_pretrained(tmp_path / "judge")
    rng = np.random.default_rng(0)
    texts = [
        RewardText(index=i, token_ids=rng.integers(0, 151936, 30 + 11 * i).astype(np.int32)) for i in range(16)
    ]
    plain = []
    for dtype in (torch.bfloat16, torch.float32):
        judge = judge.to("cuda", dtype).eval()
        with torch.no_grad():
            inputs = [torch.from_numpy(text.token_ids.astype(np.int64))[None].cuda() for text in texts]
            plain.append(np.array([judge(each).logits.item() for each in inputs]))
    del judge
    torch.cuda.empty_cache()
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = config_for(
        model, tmp_path, f"{fsdp}.param_offload={offload}", f"{fsdp}.optimizer_offload={offload}",
        f"actor_rollout_ref.rollout.free_cache_engine={offload}", "reward_model.enable=true",
        f"reward_model.model.path={tmp_path / 'judge'}", "distillation.enabled=false", "actor_rollout_ref.rollout.n=2",
    )
    requests = random_requests(range(100, 116))
    found = []
    with ray_cluster(config, "cuda"), contextlib.closing(
        WorkerGroup(config, device="cuda", num_updates=8, stop_token_ids=[256], engine_memory=engine_memory(config))
    ) as group:
        for step in range(3):
            group.publish(step)
            drawn = draw(group, requests, SamplingParams(max_tokens=32))
            assert versions(drawn) == {step}
            scores = group.compute_reward_scores([(tuple(texts[:9]), tuple(texts[9:]))])
            found.append(np.array([scores[text.index] for text in texts]))
            group.compute_logprobs([(tuple(drawn),)])
        memory = group.device_metrics()
    print("scores", found[0], plain, memory)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    own, theirs = (np.abs(scores - plain[1]).mean() for scores in (found[0], plain[0]))
    print("mean difference from float32, and transformers' own in bf16:", own, theirs)
    assert own < 2 * theirs
    assert np.ptp(found[0]) > 10 * own
    with_it = {name.split("/")[1] for name in memory if name.endswith("/reward_model_params_gb")}
    assert with_it == {"reward_model"}
    assert memory["memory/reward_model/reward_model_params_gb"] > 0.9  # 494 M parameters in bf16
    assert ("memory/reward_model/actor_params_gb" in memory) == (not offload)

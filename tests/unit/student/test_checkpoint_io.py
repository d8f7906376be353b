"""A resumed actor goes on to the last digit, also one whose architecture draws random numbers. CPU, one rank."""

import filecmp
import stat
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, Glm4MoeConfig, Glm4MoeForCausalLM, PhimoeConfig, PhimoeForCausalLM

from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.models.tokenizer import load_tokenizer, stop_token_ids
from hybrid_gkd.offload.pinned import HostCopies
from hybrid_gkd.offload.residency import Residency
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.checkpoint_io import (
    export_huggingface,
    gather_huggingface,
    load_model,
    save_model,
    snapshot_bytes,
    snapshot_model,
)
from hybrid_gkd.testing import make_sample, make_tiny_model, single_process_group, tail_of, tiny_config
from hybrid_gkd.types import MiniBatch, TopK
from hybrid_gkd.workers.saver import Saver


def make_phimoe(folder):
    """Its router draws random numbers while it is trained."""
    torch.manual_seed(0)
    config = PhimoeConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=2, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, initializer_range=0.2, router_jitter_noise=1.0,
    )  # fmt: skip
    PhimoeForCausalLM(config).save_pretrained(folder)
    return folder


def random_batch(seed):
    rng = np.random.default_rng(seed)
    prompt, response = rng.integers(0, 256, 5, np.int32), rng.integers(0, 256, 20, np.int32)
    ids = np.stack([rng.permutation(256)[:4] for _ in response]).astype(np.int32)
    scores = np.log(rng.dirichlet(np.ones(5), len(response))[:, :4]).astype(np.float32)
    teacher = TopK(ids=ids, logprobs=scores, tail_logprobs=tail_of(scores), sampled_logprobs=scores[:, 0])
    item = make_sample(prompt=prompt.tolist(), completion=response.tolist(), teacher=teacher)
    return MiniBatch(micro_batches=((item,),), num_tokens=len(response))


def make_config(model, *overrides):
    return tiny_config(
        "distillation.topk=4", "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear", *overrides, model=model,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "overrides"),
    [
        (make_tiny_model, []), (make_phimoe, []),
        (make_tiny_model, ["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"]),
        (make_tiny_model, ["actor_rollout_ref.model.lora_rank=2"]),
    ],
)  # fmt: skip
def test_a_resumed_actor_goes_on_to_the_last_digit(make, overrides, tmp_path):
    config = make_config(make(tmp_path / "model"), *overrides)
    with single_process_group():
        whole, resumed = (Actor(config, device=torch.device("cpu"), num_updates=5) for _ in range(2))
        for step in range(2):
            whole.update(random_batch(step))
        save_model(whole, tmp_path / "actor")
        torch.manual_seed(1)  # another process
        load_model(resumed, tmp_path / "actor")
        results = []
        for actor in (whole, resumed):
            (logprobs,) = (found.tolist() for found in actor.compute_logprobs(random_batch(2).micro_batches).values())
            metrics = [actor.update(random_batch(step)) for step in range(2, 4)]
            results.append((logprobs, metrics, dict(actor.full_tensors(torch.float32))))
    assert results[0][:2] == results[1][:2]
    for name, weight in results[0][2].items():
        assert torch.equal(weight, results[1][2][name]), name


@pytest.mark.slow
def test_what_was_learned_since_is_forgotten_with_its_optimizer_state(tmp_path):
    """The checkpoint of a student that has not taken a step has no optimizer state."""
    config = make_config(make_tiny_model(tmp_path / "model"))
    with single_process_group():
        fresh, actor = (Actor(config, device=torch.device("cpu"), num_updates=5) for _ in range(2))
        save_model(actor, tmp_path / "actor")
        actor.update(random_batch(0))
        load_model(actor, tmp_path / "actor")
        assert actor.optimizer_tensors() == []
        assert actor.update(random_batch(1)) == fresh.update(random_batch(1))


@pytest.mark.slow
def test_rates_are_those_of_the_configuration_and_not_of_the_checkpoint(tmp_path):
    path = make_tiny_model(tmp_path / "model")
    with single_process_group():
        first, second = (
            Actor(make_config(path, f"actor_rollout_ref.actor.optim.betas=[0.9,{beta}]"), device=torch.device("cpu"),
                  num_updates=5)
            for beta in (0.99, 0.5)
        )  # fmt: skip
        first.update(random_batch(0))
        save_model(first, tmp_path / "actor")
        load_model(second, tmp_path / "actor")
    assert {group["betas"] for group in second.optimizer.param_groups} == {(0.9, 0.5)}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.model.lora_rank=2"]])
def test_what_is_written_behind_further_updates_is_of_the_moment_of_the_snapshot(overrides, tmp_path):
    """Also the second time, when the copies' memory is used again."""
    config, copies = make_config(path := make_tiny_model(tmp_path / "model"), *overrides), HostCopies(locked=False)
    options = {"tokenizer_path": str(path), "trust_remote_code": False}
    with single_process_group(), mock.patch.object(copies, "reserve", wraps=copies.reserve) as reserve:
        actor = Actor(config, device=torch.device("cpu"), num_updates=5)
        actor.update(random_batch(0))
        copies.reserve(snapshot_bytes(actor) * (2 if not overrides else 1))
        for step in (1, 3):
            copies.clear()
            write = snapshot_model(actor, copies.copy)
            export = gather_huggingface(actor, to_host=copies.copy, **options)
            copies.finish()
            at_once, behind = tmp_path / f"at once {step}", tmp_path / f"behind {step}"
            sums = save_model(actor, at_once / "actor")
            export_huggingface(actor, at_once / "huggingface", **options)
            for further in (step, step + 1):
                actor.update(random_batch(further))
            assert write(behind / "actor") == sums
            export(behind / "huggingface")
            files = {file.relative_to(at_once) for file in at_once.rglob("*.*")}
            assert len(files) >= 4
            assert filecmp.cmpfiles(at_once, behind, files, shallow=False)[1:] == ([], [])
        assert reserve.call_count == 1  # as large as it had to be


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.model.lora_rank=2"]], ids=["full", "merged"])
def test_engine_and_export_get_what_a_folder_has_beside_parameters(overrides, tmp_path):
    path = tmp_path / "model"
    config = Glm4MoeConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=1, eos_token_id=256,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).bfloat16()
    model.get_buffer(name := "model.layers.1.mlp.gate.e_score_correction_bias").copy_(torch.arange(4) / 7)
    bias = model.get_buffer(name).clone()
    model.save_pretrained(path)
    load_tokenizer(str(make_tiny_model(tmp_path / "tokenizer"))).save_pretrained(path)
    overrides = overrides and [*overrides, "actor_rollout_ref.model.target_modules=[q_proj]"]
    with single_process_group():
        actor = Actor(make_config(path, *overrides), device=torch.device("cpu"), num_updates=5)
        published = dict(actor.full_tensors(torch.bfloat16))
        assert [each for names, *_ in actor.layout() for each in names] == list(published)
        assert torch.equal(published[name], bias)
        export_huggingface(actor, tmp_path / "out", tokenizer_path=str(path), trust_remote_code=False, merge=True)
    old, new = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "out"))
    assert old.keys() == new.keys()
    assert torch.equal(new[name], old[name])


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.model.lora_rank=2"]], ids=["full", "merged"])
def test_transformers_ends_an_exported_students_responses_where_training_did(overrides, tmp_path):
    path, other = make_tiny_model(tmp_path / "model"), tmp_path / "tokenizer"
    tokenizer = load_tokenizer(str(path))
    tokenizer.eos_token = "a"
    tokenizer.save_pretrained(other)
    trained = stop_token_ids(str(path), tokenizer)
    with single_process_group():
        actor = Actor(make_config(path, *overrides), device=torch.device("cpu"), num_updates=5)
        for name, tokens in (("same", path), ("other", other)):
            options = {"tokenizer_path": str(tokens), "trust_remote_code": False, "merge": True}
            export_huggingface(actor, tmp_path / name, **options)
    same, ends = (GenerationConfig.from_pretrained(tmp_path / name).eos_token_id for name in ("same", "other"))
    assert same == GenerationConfig.from_pretrained(path).eos_token_id
    assert sorted(ends) == trained
    assert len(trained) == 2
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "same").iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "same").stat().st_mode) & 0o666}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.model.lora_rank=2"]], ids=["full", "lora"])
def test_a_pass_that_failed_costs_the_checkpoint_nothing(overrides, tmp_path):
    """It leaves weights gathered, in the type of the computation, of which the optimizer knows nothing."""
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    config = make_config(make_tiny_model(tmp_path / "model"), f"{fsdp}.reshard_after_forward=false", *overrides)

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory, planted")

    with single_process_group():
        actor = Actor(config, device=torch.device("cpu"), num_updates=5)
        actor.update(random_batch(0))
        expected = save_model(actor, tmp_path / "before")
        actor.hf_model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            actor.compute_logprobs(random_batch(1).micro_batches)
        assert save_model(actor, tmp_path / "after") == expected


@pytest.mark.slow
def test_a_disk_that_fills_is_named(tmp_path, monkeypatch):
    config = make_config(make_tiny_model(tmp_path / "model"))
    (tmp_path / "actor").write_text("in the way", encoding="utf-8")
    with single_process_group():
        actor = Actor(config, device=torch.device("cpu"), num_updates=5)
        with pytest.raises(CheckpointError, match=r"cannot write .*actor/rank_0_of_1\.safetensors"):
            save_model(actor, tmp_path / "actor")
        (export := tmp_path / "step" / "huggingface").mkdir(parents=True)
        (export / "config.json").symlink_to("/dev/full")
        residency = Residency({}, movable=set(), resident=set())
        saver = Saver(config, {"actor": actor}, residency, on_gpu=False, behind=False)
        with pytest.raises(CheckpointError, match=r"cannot write .*step/huggingface: .*No space left on device"):
            saver.save(tmp_path / "step", config.actor_rollout_ref.model.path)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.model.lora_rank=2"]], ids=["full", "lora"])
def test_the_thread_behind_the_steps_leaves_the_model_alone(overrides, tmp_path):
    """FSDP2 frees gathered weights whenever a module's `state_dict` is called, also in the middle of a forward pass."""
    path, threads = make_tiny_model(tmp_path / "model"), set()
    config = make_config(path, *overrides)
    with single_process_group():
        actor = Actor(config, device=torch.device("cpu"), num_updates=5)
        for module in actor.hf_model.modules():
            module.register_state_dict_pre_hook(lambda *_: threads.add(threading.current_thread().name))
        residency = Residency({}, movable=set(), resident=set())
        saver = Saver(config, {"actor": actor}, residency, on_gpu=False, behind=True)
        for step in range(2):
            actor.update(random_batch(step))
            saver.take_snapshot(str(path))
            saver.write_snapshot(tmp_path / f"step {step}")
            written, _ = saver.finish_snapshot()
            assert {name.split("/")[0] for name in written} == {"actor", "huggingface"}
        actor.hf_model.state_dict()
    assert threads == {"MainThread"}

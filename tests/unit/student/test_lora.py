"""LoRA against plain peft, on one and two ranks: the same curve, adapters alone trained, W + scale B A handed out."""

import dataclasses
import json
import shutil

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, MixtralConfig

from hybrid_gkd.config import ModelConfig
from hybrid_gkd.errors import CheckpointError, ConfigError, HybridGKDError, ModelError
from hybrid_gkd.models.spec import model_spec
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.checkpoint_io import export_huggingface, load_model, save_model
from hybrid_gkd.testing import make_sample, make_tiny_model, single_process_group, tail_of, tiny_config
from hybrid_gkd.types import MiniBatch, TopK

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
RANK, ALPHA, STEPS, K = 3, 6, 4, 8


def make_config(model, *overrides):
    return tiny_config(
        f"distillation.topk={K}", f"{ACTOR}.optim.lr=1e-2", f"{ACTOR}.optim.eps=1e-4",
        f"{ACTOR}.grad_clip=0.5", *overrides, model=model,
    )  # fmt: skip


LORA = (f"{MODEL}.lora_rank={RANK}", f"{MODEL}.lora_alpha={ALPHA}")


def make_actor(model, *overrides, num_updates=STEPS):
    return Actor(make_config(model, *overrides), device=torch.device("cpu"), num_updates=num_updates)


def random_items(step, count=4):
    rng = np.random.default_rng(step)
    items = []
    for index in range(count):
        prompt, response = (rng.integers(0, 256, rng.integers(2, 20)).astype(np.int32) for _ in range(2))
        ids = np.stack([rng.permutation(256)[:K] for _ in response]).astype(np.int32)
        scores = np.log(rng.dirichlet(np.ones(K + 1), len(response))[:, :K]).astype(np.float32)
        teacher = TopK(ids=ids, logprobs=scores, tail_logprobs=tail_of(scores), sampled_logprobs=scores[:, 0])
        items.append(make_sample(index, prompt=prompt.tolist(), completion=response.tolist(), teacher=teacher))
    return items


def share(step, rank=0, ranks=1):
    items = random_items(step)
    num_tokens = sum(item.num_trained for item in items)
    return MiniBatch(micro_batches=tuple((item,) for item in items[rank::ranks]), num_tokens=num_tokens)


def plain_losses(model, adapter, config):
    """The same loss on the same sequences with nothing but transformers, peft and torch; and the trained adapter."""
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optim = config.actor_rollout_ref.actor.optim
    optimizer = torch.optim.AdamW(
        trained, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
    )
    losses = []
    for step in range(STEPS):
        loss, num_tokens = 0.0, 0
        for item in random_items(step):
            logits, teacher = model(torch.tensor(item.tokens[None]).long()).logits[0], item.topk("teacher")
            q = logits[item.positions - 1].softmax(-1).gather(1, torch.tensor(teacher.ids).long())
            p = torch.tensor(teacher.logprobs).exp()
            rest_p, rest_q = 1 - p.sum(1), 1 - q.sum(1)
            loss = loss + (p * (p / q).log()).sum() + (rest_p * (rest_p / rest_q).log()).sum()
            num_tokens += item.num_trained
        losses.append((loss / num_tokens).item())
        (loss / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained, config.actor_rollout_ref.actor.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, peft.get_peft_model_state_dict(model)


def check_training(rank, ranks, folder):
    """Train as rank `rank` of `ranks`; write the adapter before and after, a checkpoint, and the losses."""
    base = dict(AutoModelForCausalLM.from_pretrained(folder / "model").state_dict())
    actor = make_actor(folder / "model", *LORA, f"trainer.n_gpus_per_node={ranks}")
    placements = {p.placements for p in actor.hf_model.parameters()}
    assert placements == {(Shard(0),)}
    out = folder / f"{ranks} ranks"
    options = {"tokenizer_path": str(folder / "model"), "trust_remote_code": False}
    export_huggingface(actor, out / "before", **options)
    found = dict(actor.full_tensors(torch.float32))
    assert all(torch.equal(found[name], base[name]) for name in base)
    losses = []
    for step in range(STEPS):
        whole = share(step, rank, ranks)
        actor.accumulate(dataclasses.replace(whole, micro_batches=whole.micro_batches[:1]))
        rest, graded = dataclasses.replace(whole, micro_batches=whole.micro_batches[1:]), set()

        def look(graded=graded):
            graded.update(name for name, p in actor.hf_model.named_parameters() if p.grad is not None)

        losses.append(actor.update(rest, before_step=look)["actor/loss"])
        assert graded == {name for name, _ in actor.hf_model.named_parameters() if ".lora_" in name}
    assert len(actor.optimizer.state) == len(graded)
    export_huggingface(actor, out / "after", **options)
    export_huggingface(actor, out / "merged", merge=True, **options)
    save_model(actor, out / "actor")
    merged, shards = dict(actor.full_tensors(torch.float32)), dict(actor.named_parameters())
    assert list(merged) == list(shards)
    dist.barrier()
    adapter = load_file(out / "after" / "adapter_model.safetensors")
    for name, weight in merged.items():
        stem, expected = f"base_model.model.{name.removesuffix('.weight')}", base[name]
        if f"{stem}.lora_A.weight" in adapter:
            product = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            assert product.abs().max() > 0
            expected = expected + ALPHA / RANK * product
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
    if rank == 0:
        (out / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


def as_rank(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    check_training(rank, ranks, folder)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a model, and what `check_training` has written on one and on two ranks."""
    folder = tmp_path_factory.mktemp("lora")
    make_tiny_model(folder / "model", tied=False)
    with single_process_group():
        check_training(0, 1, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(as_rank, (2, folder), nprocs=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_curve_is_that_of_peft_with_torchs_adamw(trained, ranks):
    out = trained / f"{ranks} ranks"
    plain, adapter = plain_losses(trained / "model", out / "before", make_config(trained / "model", *LORA))
    losses = json.loads((out / "losses.json").read_text(encoding="utf-8"))
    assert losses == pytest.approx(plain, rel=1e-5)
    assert abs(losses[-1] - losses[0]) > 1e-2
    own = load_file(out / "after" / "adapter_model.safetensors")
    assert own.keys() == adapter.keys()
    for name, weight in own.items():
        torch.testing.assert_close(weight, adapter[name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_adapters_begin_the_same_on_any_number_of_ranks_as_peft_begins(trained):
    one, two = (load_file(trained / f"{ranks} ranks" / "before" / "adapter_model.safetensors") for ranks in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    peft_model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(trained / "model"),
        peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    begins = peft.get_peft_model_state_dict(peft_model)
    assert one.keys() == begins.keys()
    for name, weight in one.items():
        if "lora_B" in name:
            assert not weight.any()
            continue
        bound = weight.shape[1] ** -0.5
        for values in (weight, begins[name]):
            assert values.abs().max() <= bound
            assert values.std() == pytest.approx(bound / 3**0.5, rel=0.2)
    assert len({weight.flatten()[0].item() for name, weight in one.items() if "lora_A" in name}) == len(one) // 2


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapters_alone_and_continues_on_another_number_of_ranks(trained):
    two = trained / "2 ranks"
    names = {name for file in (two / "actor").iterdir() for name in load_file(file)}
    assert {name.partition("/")[0] for name in names} == {"weights", "exp_avg", "exp_avg_sq", "step"}
    assert all(".lora_" in name for name in names)
    with single_process_group():
        actor = make_actor(trained / "model", *LORA)
        load_model(actor, two / "actor")
        assert actor.updates_done == STEPS
        merged = dict(actor.full_tensors(torch.float32))
        for name, weight in AutoModelForCausalLM.from_pretrained(two / "merged").state_dict().items():
            torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-6)
        with pytest.raises(CheckpointError, match=r"cannot be loaded: .*lora_A.*is \(3, 64\) instead of \(2, 64\)"):
            load_model(make_actor(trained / "model", f"{MODEL}.lora_rank=2"), two / "actor")
        with pytest.raises(CheckpointError, match=r"it has no weights/model\.embed_tokens\.weight"):
            load_model(make_actor(trained / "model"), two / "actor")


@pytest.mark.slow
def test_training_starts_from_an_adapter_and_what_is_exported_loads_into_peft(trained):
    after, items = trained / "1 ranks" / "after", random_items(9)
    with single_process_group():
        actor = make_actor(trained / "model", f"{MODEL}.lora_adapter_path={after}")
        found = actor.compute_logprobs((tuple(items),))
        assert all(layer.scaling["default"] == ALPHA / RANK for layer in layers_of(actor.hf_model))
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(trained / "model"), after)
    for item in items:
        logits = model(torch.tensor(item.tokens[None]).long()).logits[0, item.positions - 1]
        chosen = torch.tensor(item.trained_ids).long()[:, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0].detach().numpy()
        np.testing.assert_allclose(found[item.id], expected, atol=1e-5)


@pytest.mark.slow
def test_the_reference_is_the_model_below_the_adapters(trained):
    """Also before the first gradient, in a student that begins with adapters which count."""
    items = tuple(random_items(9))
    start = f"{MODEL}.lora_adapter_path={trained}/1 ranks/after"
    with single_process_group():
        actor = make_actor(trained / "model", start)
        reference = actor.compute_ref_logprobs((items,))
        expected = make_actor(trained / "model").compute_logprobs((items,))
        before = actor.compute_logprobs((items,))
        for item, values in expected.items():
            assert np.array_equal(reference[item], values)
            assert np.abs(before[item] - values).max() > 0.01
        actor.update(share(0))
        assert len(actor.optimizer.state) == 2 * len(layers_of(actor.hf_model))
        after, again = actor.compute_logprobs((items,)), actor.compute_ref_logprobs((items,))
        assert all(np.array_equal(again[item], reference[item]) for item in expected)
        assert all(not np.array_equal(after[item], before[item]) for item in expected)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def spec_of(model, **lora):
    section = ModelConfig(path=str(model), **lora)
    return model_spec(str(model), trust_remote_code=False, override_config={}, lora=section)


@pytest.mark.slow
def test_the_layers_are_those_that_are_named(tmp_path):
    model = make_tiny_model(tmp_path, layers=1)  # hidden 64, intermediate 128, two heads and one for keys and values
    attention = {"q_proj": 64 + 64, "k_proj": 64 + 32, "v_proj": 64 + 32, "o_proj": 64 + 64}
    mlp = {"gate_proj": 64 + 128, "up_proj": 64 + 128, "down_proj": 128 + 64}
    whole = sum(attention.values()) + sum(mlp.values())
    for settings, expected in [
        ({}, whole), ({"target_modules": ["q_proj", "v_proj"]}, 128 + 96),
        ({"exclude_modules": ["down_proj"]}, whole - 192),
        ({"target_modules": r".*\.self_attn\..*"}, sum(attention.values())),
        ({"exclude_modules": r".*mlp.*"}, sum(attention.values())),
    ]:
        spec = spec_of(model, lora_rank=RANK, **settings)
        assert (spec.adapter_parameters, spec.trained_parameters) == (RANK * expected, RANK * expected), settings
    full = spec_of(model)
    assert full.adapter_parameters == 0
    assert full.trained_parameters == full.parameters == spec.parameters


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"target_modules": ["q_proj", "qproj"]}, r"target_modules: the model has no such layer.*qproj"),
        ({"target_modules": ["nothing"]}, r"target_modules: .*nothing.* not found"),
        ({"target_modules": ["embed_tokens"]}, r"only linear layers can have adapters, but model.embed_tokens is not"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"the output head \(lm_head\) cannot have an adapter"),
        ({"exclude_modules": ["kproj"]}, r"exclude_modules: the model has no such layer.*kproj"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused_by_name(settings, error, tmp_path):
    with pytest.raises(ConfigError, match=error):
        spec_of(make_tiny_model(tmp_path), lora_rank=2, **settings)


def test_experts_are_not_left_out_in_silence(tmp_path):
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="are not linear layers, so all-linear would skip them"):
        spec_of(tmp_path, lora_rank=2)
    assert spec_of(tmp_path, lora_rank=2, target_modules=["q_proj"]).adapter_parameters == 2 * (32 + 32)


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A model, and a folder of peft's with an adapter for it."""
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(folder / "model"))
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    return folder


@pytest.mark.slow
def test_rank_alpha_and_layers_are_those_of_the_adapter_to_start_from(adapter, caplog):
    path = str(adapter / "adapter")
    for given in ({}, {"lora_rank": 2}, {"lora_alpha": 6}):
        spec = spec_of(adapter / "model", lora_adapter_path=path, **given)
        assert spec.adapter_parameters == 2 * 2 * (64 + 64 + 128 + 64)
    assert "lora_dropout 0.1" in caplog.text
    for given, error in [({"lora_rank": 4}, "lora_rank: must be left out or be 2"),
                         ({"lora_alpha": 8}, "lora_alpha: must be left out or be 6")]:  # fmt: skip
        with pytest.raises(ConfigError, match=error):
            spec_of(adapter / "model", lora_adapter_path=path, **given)


def rename_a_weight(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    weights["base_model.model.other.lora_A.weight"] = weights.pop(min(weights))
    save_file(weights, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "must be a PEFT folder with"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{", encoding="utf-8"),
            "adapter_config.json cannot be read",
        ),
        (lambda folder: change_config(folder, peft_type="IA3"), "not one of type IA3"),
        (lambda folder: change_config(folder, use_dora=True), "adapter without use_dora"),
        (lambda folder: change_config(folder, modules_to_save=["lm_head"]), "without modules_to_save"),
        (lambda folder: change_config(folder, r=3), r"is \[2, \d+\] in the file and \[3, \d+\] in the model"),
        (rename_a_weight, r"lora_A.weight is missing in the file and \[2, 128\] in the model"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "cannot read .*adapter_model"),
    ],
)
def test_an_adapter_that_cannot_be_continued_is_refused_with_the_reason(damage, error, adapter, tmp_path):
    folder = shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    damage(folder)
    with pytest.raises(HybridGKDError, match=rf"lora_adapter_path: .*{error}") as raised:
        spec_of(adapter / "model", lora_adapter_path=str(folder))
    assert isinstance(raised.value, ConfigError | ModelError)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ([f"{MODEL}.lora_alpha=8"], "lora_alpha: needs a lora_rank above 0"),
        ([f"{MODEL}.target_modules=[q_proj]"], "target_modules: needs a lora_rank above 0"),
        ([f"{ACTOR}.checkpoint.save_merged=true"], "save_merged: needs a lora_rank above 0"),
        ([f"{MODEL}.lora_rank=-1"], "lora_rank: must be at least 0"),
        ([f"{MODEL}.lora_adapter_path=x", f"{MODEL}.target_modules=all-linear"], "must not be set with lora_adapter"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_by_name(overrides, error):
    with pytest.raises(ConfigError, match=error):
        make_config("model", *overrides)

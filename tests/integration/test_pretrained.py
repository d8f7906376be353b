"""The student's weights on two FSDP2 ranks over gloo: what is read, what arrives, what is refused."""

import json
import logging
import multiprocessing
import os
import shutil
import socket
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hybrid_gkd.errors import CheckpointError, ConfigError, ModelError
from hybrid_gkd.models.packed_attention import PACKED_ATTENTION, pack
from hybrid_gkd.student import pretrained
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.checkpoint_io import export_huggingface, load_model, save_model
from hybrid_gkd.testing import make_sample, make_tiny_model, single_process_group, tail_of, tiny_config
from hybrid_gkd.types import MiniBatch, TopK

NUM_RANKS = 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks():
    """Calls a function with the same arguments on both ranks; gives their results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    pools = [
        ProcessPoolExecutor(1, mp_context=spawn, initializer=join, initargs=(rank, port)) for rank in range(NUM_RANKS)
    ]

    def call(function, *args):
        futures = [pool.submit(function, *args) for pool in pools]
        errors = [future.exception(timeout=120) for future in futures]
        if any(errors):
            assert all(errors), errors
            assert len({str(error) for error in errors}) == 1, errors
            raise errors[0]
        return [future.result() for future in futures]

    yield call
    for pool in pools:
        pool.shutdown()


def join(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)


def make_config(path, *overrides):
    return tiny_config(f"trainer.n_gpus_per_node={NUM_RANKS}", *overrides, model=path)


def make_llama(folder, *, tied=False, dtype=torch.float32, max_shard_size="1GB"):
    """Hardly any dimension divides by two, and one has a single row, which leaves the second rank none."""
    config = LlamaConfig(
        vocab_size=259, hidden_size=33, intermediate_size=1, num_hidden_layers=3, num_attention_heads=3, head_dim=8,
        num_key_value_heads=1, tie_word_embeddings=tied, initializer_range=0.2, attention_bias=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_base_model_only(folder):
    """Names without the prefix of the causal LM: transformers has to add it."""
    AutoModel.from_pretrained(make_tiny_model(folder / "full")).save_pretrained(folder)
    shutil.rmtree(folder / "full")
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    return folder


def make_pickled(folder):
    make_tiny_model(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def make_tied_twice(folder):
    """Both names of a tied weight are in the file."""
    weights = load_file(make_tiny_model(folder) / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


MAKERS = {
    "qwen2 tied": make_tiny_model,
    "qwen2 untied": lambda folder: make_tiny_model(folder, tied=False),
    "qwen2 tied, both names": make_tied_twice,
    "llama": make_llama,
    "llama tied": lambda folder: make_llama(folder, tied=True),
    "llama, many files": lambda folder: make_llama(folder, max_shard_size="20KB"),
    "llama, bf16 file": lambda folder: make_llama(folder, dtype=torch.bfloat16),
    "fallback: base model": make_base_model_only,
    "fallback: pickle": make_pickled,
}


def compare(config):
    """Load as the worker does and as transformers does; returns what differs, the log, and what was read."""
    records, reads = [], []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    pretrained.logger.addHandler(handler)
    real_open = pretrained.safe_open
    pretrained.safe_open = lambda *args, **kwargs: CountingFile(real_open(*args, **kwargs), reads)
    try:
        actor = Actor(config, device=CPU, num_updates=1)
    finally:
        pretrained.logger.removeHandler(handler)
        pretrained.safe_open = real_open
    local = {name: p.to_local().numel() for name, p in actor.hf_model.named_parameters()}
    path, dtype = config.actor_rollout_ref.model.path, next(actor.hf_model.parameters()).dtype
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=PACKED_ATTENTION)
    differences = differing(dict(actor.full_tensors(dtype)), dict(whole.named_parameters(remove_duplicate=False)))
    differences += differing(dict(actor.hf_model.named_buffers()), dict(whole.named_buffers()))
    own_generation = [model.generation_config for model in (actor.hf_model, whole)]
    if not os.path.exists(os.path.join(path, "generation_config.json")):
        own_generation = [None, None]
    tied = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (actor.hf_model, whole)]
    for name, (ours, theirs) in {
        "tie": tied,
        "generation config": own_generation,
        "dtype in the config": (actor.hf_model.config.dtype, whole.config.dtype),
        "log-probabilities": (logprobs(actor), whole_logprobs(whole)),
    }.items():
        if ours != theirs:
            differences.append(name)
    return differences, records, reads, local


def differing(ours, theirs):
    names = ours.keys() ^ theirs.keys()
    return sorted(names) + [
        name for name in ours.keys() - names
        if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])
    ]


@torch.no_grad()
def logprobs(actor):
    batch, ids = pack([np.arange(1, 8, dtype=np.int32)], CPU), torch.arange(7)[:, None]
    return actor.model(batch, ids[:, 0], ids, temperature=1.0)[0].flatten().tolist()


@torch.no_grad()
def whole_logprobs(model):
    logits = model(**pack([np.arange(1, 8, dtype=np.int32)], CPU).model_kwargs()).logits[0].float()
    found = logits.log_softmax(-1).gather(1, torch.arange(7)[:, None]).flatten()
    return pytest.approx(found.tolist(), rel=1e-5 if model.dtype == torch.float32 else 1e-2)


class CountingFile:
    """A safetensors file that can only be read by rows, and notes how many elements each read gave."""

    def __init__(self, file, reads):
        self.file, self.reads = file, reads

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *exc):
        self.file.__exit__(*exc)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return CountingSlice(self.file.get_slice(name), name, self.reads)


class CountingSlice:
    def __init__(self, real, name, reads):
        self.real, self.name, self.reads = real, name, reads
        self.get_shape = real.get_shape

    def __getitem__(self, rows):
        found = self.real[rows]
        self.reads.append((self.name, found.numel()))
        return found


@pytest.mark.parametrize("kind", MAKERS)
def test_weights_and_buffers_are_those_of_from_pretrained(kind, ranks, tmp_path):
    """And each rank has read its own rows, once, and nothing else."""
    config = make_config(MAKERS[kind](tmp_path))
    for differences, records, reads, local in ranks(compare, config):
        assert differences == []
        if kind.startswith("fallback"):
            assert not reads
        else:
            assert not records
            assert {name: count for name, count in reads if name in local} == {n: c for n, c in local.items() if c}
            assert len(reads) == sum(map(bool, local.values())) + (kind == "qwen2 tied, both names")
    if kind.startswith("fallback"):
        assert "loading the whole model" in ranks(compare, config)[0][1][0]


@pytest.mark.parametrize("override", ["fsdp_size=1", "fsdp_size=2", "model_dtype=bf16"])
def test_other_layouts_and_types(override, ranks, tmp_path):
    config = make_config(make_llama(tmp_path), f"actor_rollout_ref.actor.fsdp_config.{override}")
    for differences, _, reads, local in ranks(compare, config):
        assert differences == []
        assert (local["model.norm.weight"] == 33) == (override == "fsdp_size=1")
        assert dict(reads) == {name: count for name, count in local.items() if count}


def drop(folder, name):
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add(folder, name, tensor):
    weights = load_file(folder / "model.safetensors") | {name: tensor}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_only(config):
    Actor(config, device=CPU, num_updates=1)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda f: drop(f, "model.layers.1.mlp.up_proj.weight"), r"missing weights: model\.layers\.1\.mlp\.up_proj"),
        (lambda f: add(f, "model.extra.weight", torch.ones(2)), r"unexpected weights: model\.extra\.weight"),
        (lambda f: add(f, "model.norm.weight", torch.ones(7)), r"mismatched weights:.*model\.norm\.weight"),
        (lambda f: add(f, "lm_head.weight", torch.ones(259, 64)), r"ties .*lm_head\.weight.*differ"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), r"model\.path: cannot read the weights"),
        (lambda f: (f / "model.safetensors").unlink(), r"model\.path: cannot load the weights"),
        (lambda f: (f / "config.json").unlink(), r"model\.path: cannot load"),
    ],
)
def test_a_broken_folder_is_refused_on_every_rank(breaks, message, ranks, tmp_path):
    breaks(make_tiny_model(tmp_path))
    with pytest.raises(ModelError, match=f"(?s){message}"):
        ranks(load_only, make_config(tmp_path))


def test_a_missing_head_of_an_untied_model_is_named(ranks, tmp_path):
    drop(make_tiny_model(tmp_path, tied=False), "lm_head.weight")
    with pytest.raises(ModelError, match=r"missing weights: lm_head\.weight"):
        ranks(load_only, make_config(tmp_path))


def build(folder, override_config=None):
    return pretrained.build_model(
        str(folder), dtype=torch.float32, trust_remote_code=False, override_config=override_config or {}
    )


def test_building_takes_no_memory_and_refuses_what_cannot_be_trained(tmp_path):
    make_tiny_model(tmp_path)
    model = build(tmp_path, {"attention_dropout": 0.5})
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} == {"cpu"}
    assert model.config.attention_dropout == 0.5
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.override_config.*no such field.*'nonsense'"):
        build(tmp_path, {"nonsense": 1})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="quantised"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),
        ({"do_sample": True, "temperature": 0.7}, {"do_sample": True, "temperature": 0.7}),
        ({"temperature": 0.9, "pad_token_id": -1}, {"temperature": None, "pad_token_id": 257}),
    ],
    ids=["temperature without sampling", "as it should be", "beyond help"],
)
def test_a_generation_config_that_transformers_would_not_save_does_not_end_a_run(written, kept, tmp_path):
    make_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(written), encoding="utf-8")
    config = build(tmp_path / "model").generation_config
    config.save_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in kept} == kept


def train_save_load(config, folder, other):
    """One update, a checkpoint, and the same state on an actor with another layout."""
    first, second = (Actor(c, device=CPU, num_updates=4) for c in (config, other))
    metrics = first.update(random_mini_batch(dist.get_rank()))
    save_model(first, folder / "actor")
    path = config.actor_rollout_ref.model.path
    export_huggingface(first, folder / "huggingface", tokenizer_path=path, trust_remote_code=False)
    load_model(second, folder / "actor")
    same = [differing(dict(first.full_tensors(torch.float32)), dict(second.full_tensors(torch.float32)))]
    more = [actor.update(random_mini_batch(2 + dist.get_rank())) for actor in (first, second)]
    return metrics, same, more


def random_mini_batch(seed):
    rng = np.random.default_rng(seed)
    micro_batches = []
    for index in range(2):
        prompt, response = rng.integers(0, 256, 5, np.int32), rng.integers(0, 256, 6, np.int32)
        ids = np.stack([rng.permutation(256)[:4] for _ in response]).astype(np.int32)
        scores = np.log(rng.dirichlet(np.ones(5), len(response))[:, :4]).astype(np.float32)
        teacher = TopK(ids=ids, logprobs=scores, tail_logprobs=tail_of(scores), sampled_logprobs=scores[:, 0])
        sample = make_sample(2 * seed + index, prompt=prompt, completion=response, teacher=teacher)
        micro_batches.append((sample,))
    return MiniBatch(micro_batches=tuple(micro_batches), num_tokens=24)


def load_damaged(config, folder):
    actor = Actor(config, device=CPU, num_updates=1)
    actor.update(random_mini_batch(dist.get_rank()))
    save_model(actor, folder)
    shard = folder / f"rank_{dist.get_rank()}_of_2.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    dist.barrier()
    load_model(actor, folder)


def test_a_damaged_checkpoint_is_named(ranks, tmp_path):
    with pytest.raises(CheckpointError, match=r"saved/actor/rank_0_of_2\.safetensors cannot be") as caught:
        ranks(load_damaged, make_config(make_tiny_model(tmp_path / "model")), tmp_path / "saved" / "actor")
    assert "\n" not in str(caught.value)


def train_and_save(config, folder):
    """Updates that differ; what was written, and the state after it."""
    actor = Actor(config, device=CPU, num_updates=4)
    actor.update(random_mini_batch(dist.get_rank()))
    written = save_model(actor, folder)
    state = [tensors[kind] for tensors in actor.optimizer.state.values() for kind in sorted(tensors)]
    full = [value.full_tensor() if isinstance(value, DTensor) else value for value in state]
    return written, dict(actor.full_tensors(torch.float32)), full


@pytest.mark.parametrize(("fsdp_size", "dtype"), [(1, "bf16"), (2, "fp32")])
def test_one_rank_reads_what_two_wrote(fsdp_size, dtype, ranks, tmp_path):
    """Rows that do not divide by two, a tied weight, and each value written by one rank alone."""
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    settings = [make_llama(tmp_path / "model", tied=True), f"{fsdp}.model_dtype={dtype}"]
    config = make_config(*settings, f"{fsdp}.fsdp_size={fsdp_size}")
    (written, weights, state), (other, _, _) = ranks(train_and_save, config, tmp_path / "actor")
    values = sum(tensor.nbytes for tensor in state)
    itemsize = {"fp32": 4, "bf16": 2}[dtype]
    values += sum(tensor.numel() * itemsize for name, tensor in weights.items() if name != "lm_head.weight")
    found = {name: load_file(tmp_path / "actor" / name) for name in (*written, *other)}
    assert len(found) == 2
    assert sum(tensor.nbytes for tensors in found.values() for tensor in tensors.values()) == values
    with single_process_group():
        actor = Actor(make_config(*settings, "trainer.n_gpus_per_node=1"), device=CPU, num_updates=4)
        load_model(actor, tmp_path / "actor")
        assert actor.updates_done == 1
        for name, tensor in actor.full_tensors(torch.float32):
            assert torch.equal(tensor, weights[name]), name
        own = [tensors[kind] for tensors in actor.optimizer.state.values() for kind in sorted(tensors)]
    for mine, theirs in zip(own, state, strict=True):
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype


def test_a_checkpoint_moves_between_layouts(ranks, tmp_path):
    """Hybrid sharding gives the same loss and the same clipped gradient norm, before and after the move.

    So do weights that are gathered once for all micro-batches of an update.
    """
    path = make_tiny_model(tmp_path / "model")
    settings = ["actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.model.enable_gradient_checkpointing=true"]
    sharded = make_config(path, *settings)
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    replicated = make_config(path, *settings, f"{fsdp}.fsdp_size=1", f"{fsdp}.reshard_after_forward=false")
    for first, second in ((sharded, replicated), (replicated, sharded)):
        results = ranks(train_save_load, first, tmp_path / str(first.shard_size), second)
        for metrics, same, (one, two) in results:
            assert metrics["actor/grad_norm"] > first.actor_rollout_ref.actor.grad_clip
            assert metrics == pytest.approx(results[0][0])
            assert same == [[]]
            assert one == pytest.approx(two, rel=1e-5)
    saved = [load_file(tmp_path / str(n) / "huggingface" / "model.safetensors") for n in (1, 2)]
    for name in saved[0]:
        assert torch.allclose(saved[0][name], saved[1][name], rtol=0, atol=2e-5), name

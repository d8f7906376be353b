"""Mixtures of experts published to vLLM on the CPU, whose kernels take packed weights, more than once."""

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.rollout.engine import generate_samples
from hybrid_gkd.rollout.vllm import VLLMRolloutEngine
from hybrid_gkd.testing import make_tokenizer, tiny_config
from hybrid_gkd.types import GenerationRequest, SampleId, SamplingParams

pytestmark = pytest.mark.skipif(not vllm_compat.vllm_available(), reason="vLLM is not installed")
MODELS = {
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    # Its router has a bias that is no parameter.
    "glm4_moe": {
        "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
}


def make_model(model_type, seed):
    config = AutoConfig.for_model(
        model_type, vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2, eos_token_id=256, pad_token_id=257,
        bos_token_id=None, **MODELS[model_type],
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=2)
    return model


@torch.no_grad()
def largest_difference(engine, model):
    """Return the largest difference of log-probabilities of sampled tokens between the engine and transformers."""
    requests = [
        GenerationRequest(id=SampleId(1, i, 0), prompt_ids=np.arange(i + 1, dtype=np.int32), seed=i) for i in range(4)
    ]
    found = []
    for finished in generate_samples(engine, requests, SamplingParams(max_tokens=12, logprobs=True)):
        for sample in finished:
            ids = torch.from_numpy(sample.tokens).long()
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[sample.positions - 1]
            expected = logprobs.gather(1, ids[sample.positions, None])[:, 0]
            found.append(np.abs(expected.numpy() - sample.logprobs).max())
    assert len(found) == len(requests)
    return max(found)


def join(port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "HF_HUB_OFFLINE": "1"}
    dist.init_process_group("gloo")


@pytest.fixture(scope="module")
def process():
    """vLLM sets up the process that it is in: one of its own, for one engine after another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=join, initargs=(port,)) as pool:
        yield pool


def publish_twice(model_type, folder):
    make_model(model_type, 0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    config = tiny_config(
        "data.max_prompt_length=24", "data.max_response_length=24", "actor_rollout_ref.rollout.max_num_seqs=4",
        model=folder,
    )  # fmt: skip
    engine = VLLMRolloutEngine(config, device=torch.device("cpu"), stop_token_ids=[256])
    differences = []
    for seed in (1, 2):
        model = make_model(model_type, seed)
        engine.load_weights(model.state_dict().items(), seed)
        differences.append(largest_difference(engine, model))
    return differences


@pytest.mark.parametrize("model_type", MODELS)
def test_every_publish_gives_the_engine_the_students_experts(model_type, process, tmp_path):
    differences = process.submit(publish_twice, model_type, str(tmp_path)).result(timeout=180)
    assert max(differences) < 1e-4, differences

"""A resumed actor goes on to the last digit, also one whose architecture draws random numbers. CPU, one rank."""

import numpy as np
import pytest
import torch
from transformers import PhimoeConfig, PhimoeForCausalLM

from hybrid_gkd.config_loading import load_config
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.checkpoint_io import load_model, save_model
from hybrid_gkd.testing import make_tiny_model, single_process_group, tail_of
from hybrid_gkd.types import MiniBatch, Sequence, TeacherTopK, TrainSequence


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
    sequence = Sequence(
        index=0, prompt_ids=prompt, response_ids=response, weight_version=0, finish_reason="stop"
    )
    ids = np.stack([rng.permutation(256)[:4] for _ in response]).astype(np.int32)
    scores = np.log(rng.dirichlet(np.ones(5), len(response))[:, :4]).astype(np.float32)
    teacher = TeacherTopK(ids=ids, logprobs=scores, tail_logprobs=tail_of(scores), sampled_logprobs=scores[:, 0])
    item = TrainSequence(sequence=sequence, teacher=teacher)
    return MiniBatch(micro_batches=((item,),), num_tokens=len(response))


@pytest.mark.parametrize("make", [make_tiny_model, make_phimoe])
def test_a_resumed_actor_goes_on_to_the_last_digit(make, tmp_path):
    config = load_config(
        [
            "data.train_files=unused", f"actor_rollout_ref.model.path={make(tmp_path / 'model')}", "trainer.device=cpu",
            "actor_rollout_ref.teacher.server_ip=unused", "distillation.topk=4",
            "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
        ]
    )
    with single_process_group():
        whole, resumed = (Actor(config, device=torch.device("cpu"), num_updates=5) for _ in range(2))
        for step in range(2):
            whole.update(random_batch(step))
        save_model(whole, tmp_path / "actor")
        torch.manual_seed(1)  # another process
        load_model(resumed, tmp_path / "actor")
        results = []
        for actor in (whole, resumed):
            logprobs = actor.compute_logprobs(random_batch(2).micro_batches)[0].tolist()
            metrics = [actor.update(random_batch(step)) for step in range(2, 4)]
            results.append((logprobs, metrics, dict(actor.full_tensors(torch.float32))))
    assert results[0][:2] == results[1][:2]
    for name, weight in results[0][2].items():
        assert torch.equal(weight, results[1][2][name]), name

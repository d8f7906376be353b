"""The actor's loss of a micro-batch. CPU, one rank."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd.student import sharded_model
from hybrid_gkd.student.actor import Actor
from hybrid_gkd.student.reference import Reference
from hybrid_gkd.testing import make_sample, make_tiny_model, single_process_group, tail_of, tiny_config
from hybrid_gkd.types import MiniBatch, TopK


def scored(index, length):
    """A sample with the teacher's scores."""
    ids = np.tile(np.arange(4, dtype=np.int32), (length, 1))
    logprobs = np.log(np.full((length, 4), 0.2, np.float32))
    teacher = TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail_of(logprobs), sampled_logprobs=logprobs[:, 0])
    return make_sample(index, prompt=[0, 0], completion=[0] * length, teacher=teacher)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["true", "false"])
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_blocks_that_are_gathered_together_train_as_each_by_itself(tmp_path, monkeypatch, reshard, checkpointing):
    config = tiny_config(
        "distillation.topk=4", f"actor_rollout_ref.actor.fsdp_config.reshard_after_forward={reshard}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={checkpointing}", model=make_tiny_model(tmp_path),
    )  # fmt: skip
    batch = MiniBatch(micro_batches=((scored(0, 3),), (scored(1, 5), scored(2, 2))), num_tokens=10)
    found = []
    for most in (1, sharded_model.GROUP_BYTES):
        monkeypatch.setattr(sharded_model, "GROUP_BYTES", most)
        with single_process_group():
            actor = Actor(config, device=torch.device("cpu"), num_updates=3)
            metrics = [actor.update(batch) for _ in range(3)]
            found.append((metrics, {name: weight.clone() for name, weight in actor.full_tensors(torch.float32)}))
    (alone, weights), (together, others) = found
    assert alone == together
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_what_is_called_before_backward_passes_changes_nothing(tmp_path, checkpointing):
    """In the last micro-batch, once for each block, also where it is computed again."""
    config = tiny_config(
        "distillation.topk=4", f"actor_rollout_ref.model.enable_gradient_checkpointing={checkpointing}",
        model=make_tiny_model(tmp_path),
    )  # fmt: skip
    batch = MiniBatch(micro_batches=((scored(0, 3),), (scored(1, 5), scored(2, 2))), num_tokens=10)
    found, left = [], []
    for called in (True, False):
        with single_process_group():
            actor = Actor(config, device=torch.device("cpu"), num_updates=3)
            around_last = [actor.before_each_backward(left.append) if called else None for _ in range(2)]
            found.append([actor.update(batch, around_last=each) for each in around_last])
    assert found[0] == found[1]
    assert left == [2, 1] * 2


@pytest.mark.slow
def test_rows_that_are_no_tokens_change_nothing(tmp_path):
    """A student trains as the one without them, which a float64 forward confirms; so does a reference choose."""
    padded = make_tiny_model(tmp_path / "padded", vocab_size=300)
    model = AutoModelForCausalLM.from_pretrained(padded)
    model.resize_token_embeddings(260)
    model.save_pretrained(tmp_path / "alone")
    batch = MiniBatch(micro_batches=((scored(0, 3),), (scored(1, 5), scored(2, 2))), num_tokens=10)
    samples, found = batch.micro_batches, []
    for folder, num_ids in (("padded", 260), ("alone", None)):
        config = tiny_config("distillation.topk=4", "actor_rollout_ref.ref.topk=7", model=tmp_path / folder)
        with single_process_group():
            actor = Actor(config, device=torch.device("cpu"), num_updates=3, num_ids=num_ids)
            logprobs, divergences = actor.compute_logprobs(samples), actor.compute_divergences(samples)
            candidates = Reference(config, device=torch.device("cpu"), num_ids=num_ids).compute_ref_topk(samples)
            metrics = [actor.update(batch) for _ in range(3)]
            weights = {name: weight.clone() for name, weight in actor.full_tensors(torch.float32)}
        found.append((logprobs, divergences, candidates, metrics, weights))
    (logprobs, divergences, candidates, metrics, weights), others = found
    for key, expected in others[0].items():
        np.testing.assert_allclose(logprobs[key], expected, atol=1e-6)
        np.testing.assert_allclose(divergences[key], others[1][key], atol=1e-5)
        np.testing.assert_array_equal(candidates[key].ids, others[2][key].ids)
        for part in ("logprobs", "tail_logprobs", "sampled_logprobs"):
            np.testing.assert_allclose(getattr(candidates[key], part), getattr(others[2][key], part), atol=1e-5)
    for mine, expected in zip(metrics, others[3], strict=True):
        assert mine == pytest.approx(expected, rel=1e-4)
    for name, expected in others[4].items():
        torch.testing.assert_close(weights[name][: len(expected)], expected, rtol=1e-4, atol=1e-6)
    model = AutoModelForCausalLM.from_pretrained(padded).double()
    for sample in sum(samples, ()):
        ids = torch.tensor(sample.tokens, dtype=torch.int64)
        with torch.no_grad():
            rows = model(ids[None]).logits[0, sample.positions - 1, :260].log_softmax(-1)
        expected = rows.gather(1, ids[sample.positions, None])[:, 0]
        np.testing.assert_allclose(logprobs[sample.id], expected, atol=1e-5)

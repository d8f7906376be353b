"""Two training steps with my_loss.py."""

import numpy as np

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.testing import LocalGroup, LocalTeacher, MetricRows, make_tiny_model, single_process_group, tail_of
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Task, TopK


def score(reading):
    """The teacher gives the sampled token 0.7, and three others 0.1 each."""
    sampled = reading.token_ids[reading.positions]
    ids = np.stack([sampled, *(np.full(len(sampled), other, np.int32) for other in (100, 101, 102))], 1)
    logprobs = np.log(np.tile(np.array([0.7, 0.1, 0.1, 0.1], np.float32), (len(sampled), 1)))
    return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail_of(logprobs), sampled_logprobs=logprobs[:, 0])


def test_the_loss_falls(tmp_path):
    config = load_config([
        f"actor_rollout_ref.model.path={make_tiny_model(tmp_path / 'student')}", "data.train_files=unused",
        "actor_rollout_ref.teacher.server_ip=unused", "data.train_batch_size=2", "data.max_prompt_length=8",
        "data.max_response_length=8", "actor_rollout_ref.actor.optim.lr=1e-2", "distillation.topk=4",
        "distillation.loss_fn=my_loss.py:skewed_kl", "trainer.total_training_steps=2", "trainer.save_freq=0",
        "trainer.device=cpu",
    ])
    prompts = [Task(index=i, token_ids=np.array([i, 7], np.int32), text="") for i in range(2)]
    rows = MetricRows()
    with single_process_group():
        group = LocalGroup(
            config, respond=lambda request, version: np.array([5, 6, 5], np.int32), num_updates=2,
        )
        GKDTrainer(
            config, group=group, teacher=LocalTeacher(score), tokenizer=None, train_prompts=prompts, val_prompts=[],
            reward=None, tracking=rows, store=None,
        ).fit()
    first, last = [row["actor/kl_loss"] for row in rows.rows]
    assert last < first

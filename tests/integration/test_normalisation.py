"""Loss and gradient do not depend on how a batch is cut, packed or spread: FSDP2 over gloo in float64.

The student is a GPT-2, whose layers compute in float64 throughout (the norms of newer models do not). Ground truth is
its plain transformers forward on one sequence at a time, with full logits and the formulas written out.
"""

import multiprocessing
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.testing import make_sample, make_tokenizer, tail_of, tiny_config
from hybrid_gkd.types import MiniBatch, TopK
from hybrid_gkd.workers.aggregation import with_loss_weights

TOPK = 8
DEADLINE = 300
LOSSES = {
    "forward_kl": [],
    "mixed, rewards": [
        "distillation.loss_mode=mixed", "distillation.mixed_weights={reverse_kl: 0.6, jsd: 0.3, k3: 0.1}",
        "distillation.use_task_rewards=true", "distillation.distillation_loss_coef=0.5",
    ],
    "k1 policy": ["distillation.loss_mode=k1", "distillation.use_policy_gradient=true"],
    "reverse_kl, colder": [
        "distillation.loss_mode=reverse_kl", "distillation.temperature=0.7",
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false",
    ],
    "ppo, colder": ["distillation.enabled=false", "actor_rollout_ref.rollout.temperature=0.7"],
    "ppo, sequences": [
        "distillation.enabled=false", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "actor_rollout_ref.actor.entropy_coeff=0.1",
    ],
}
# Lengths of prompt and completion: odd ones, and completions of one token. The second batch moves the border between
# prompt and completion of the same tokens; the third trains on every other token of a completion, and its first samples
# lack scores or advantages; the fourth leaves ranks without any sample.
BATCHES = {
    "mixed lengths": [(3, 9), (1, 1), (7, 1), (2, 13), (11, 4), (1, 6), (5, 5)],
    "other loss mask": [(8, 4), (1, 1), (1, 7), (14, 1), (4, 11), (6, 1), (9, 1)],
    "holes, lacking signals": [(3, 9), (1, 1), (7, 1), (2, 13), (11, 4), (1, 6), (5, 5)],
    "one sample": [(4, 3)],
}
# Most tokens and sequences of a micro-batch, balanced or not, order of the sequences.
CUTS = {
    "whole": (1000, None, True, 1),
    "by tokens": (20, None, True, 1),
    "one by one, backwards": (None, 1, False, -1),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = GPT2Config(
        vocab_size=259, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_config(model, loss, world_size):
    config = tiny_config(
        "reward.answer_key=answer", "actor_rollout_ref.rollout.n=2", f"distillation.topk={TOPK}",
        f"trainer.n_gpus_per_node={world_size}", "actor_rollout_ref.actor.grad_clip=1e9", *LOSSES[loss], model=model,
    )  # fmt: skip
    config.actor_rollout_ref.actor.optim.lr = 0.0  # every cut is computed from the same weights
    return config


def random_batch(name, loss):
    """Samples with what their loss needs."""
    rng, batch = np.random.default_rng(0), []
    holes = "holes" in name
    tokens = [rng.integers(0, 259, 40).tolist() for _ in BATCHES[name]]
    for index, (prompt, completion) in enumerate(BATCHES[name]):
        mask = [False] * prompt + [not (holes and place % 2) for place in range(completion)]
        count, signals = sum(mask), {}
        ids = np.stack([rng.permutation(259)[:TOPK] for _ in range(count)]).astype(np.int32)
        logprobs = np.log(rng.dirichlet(np.ones(TOPK + 3), count)[:, :TOPK]).astype(np.float32)
        if "ppo" not in loss and not (holes and index < 2):
            tail = tail_of(logprobs)
            signals["teacher"] = TopK(
                ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0] - 1
            )
        if ("ppo" in loss or "rewards" in loss) and not (holes and index in (1, 2, 3)):
            signals["advantages"] = rng.normal(size=count).astype(np.float32)
        if "_kl" not in loss:
            signals["old_logprobs"] = (rng.normal(size=count) - 6).astype(np.float32)
        together = tokens[index][: prompt + completion]
        batch.append(make_sample(
            index, prompt=together[:prompt], completion=together[prompt:], loss_mask=mask, **signals
        ))  # fmt: skip
    return batch


def share(config, batch, cut, world_size, rank):
    max_tokens, max_sequences, balance, order = CUTS[cut]
    batch = with_loss_weights(config, batch[::order])
    lengths = [sample.num_tokens for sample in batch]
    plan = plan_micro_batches(lengths, world_size, max_tokens, max_sequences, balance, 0.01)
    return MiniBatch(
        micro_batches=tuple(tuple(batch[i] for i in members) for members in plan[rank]),
        num_tokens=sum(sample.num_trained for sample in batch),
    )


def run_rank(rank, world_size, model, folder):
    """All losses, batches and cuts on one rank; rank 0 writes loss and gradients."""
    from hybrid_gkd.student import sharded_model
    from hybrid_gkd.student.actor import Actor

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    sharded_model.DTYPES["fp64"] = torch.float64
    results = {}
    for loss in LOSSES:
        config = make_config(model, loss, world_size)
        config.actor_rollout_ref.actor.fsdp_config.model_dtype = "fp64"
        actor = Actor(config, device=torch.device("cpu"), num_updates=1)
        for name in BATCHES:
            for cut in CUTS:
                grads = {}

                def keep_gradients(actor=actor, grads=grads):
                    for key, parameter in actor.hf_model.named_parameters():
                        grads[key] = parameter.grad.full_tensor()

                batch = share(config, random_batch(name, loss), cut, world_size, rank)
                metrics = actor.update(batch, before_step=keep_gradients)
                results[loss, name, cut] = metrics, grads
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def computed(model, tmp_path_factory):
    """Number of ranks -> what `run_rank` computed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hybrid_gkd.student.actor"])  # imported once for all ranks
    results = {}
    for world_size in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"ranks{world_size}")
        ranks = [
            context.Process(target=run_rank, args=(rank, world_size, model, folder)) for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(DEADLINE)
            assert [process.exitcode for process in ranks] == [0] * world_size
        finally:
            for process in ranks:
                process.kill()
        results[world_size] = torch.load(folder / "results.pt", weights_only=False)
    return results


def naive_losses(loss, sample, logits):
    """By the signal that it needs, each term [R] of a sample, from its full logits."""
    temperature, found = 0.7 if "colder" in loss else 1.0, {}
    logprobs = (logits[sample.positions - 1] / temperature).log_softmax(-1)
    sampled = logprobs.gather(1, torch.from_numpy(sample.trained_ids).long()[:, None])[:, 0]
    if "_kl" not in loss:
        old = torch.from_numpy(sample.array("old_logprobs")).double()
        ratio = (sampled - old).exp()

    def policy(advantages):
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    if "sequences" in loss:
        ratio = (sampled - sampled.detach() + (sampled - old).mean().detach()).exp()
        found["entropy"] = 0.1 * (logprobs.exp() * logprobs).sum(-1)
    if "advantages" in sample.signals:
        found["advantages"] = policy(torch.from_numpy(sample.array("advantages")).double())
    if "teacher" not in sample.signals:
        return found
    teacher = sample.topk("teacher")
    teacher_sampled = torch.from_numpy(teacher.sampled_logprobs).double()
    if loss == "k1 policy":
        return found | {"teacher": policy((teacher_sampled - sampled).detach())}
    ids = torch.from_numpy(teacher.ids).long()
    p, q = np.column_stack([teacher.logprobs, teacher.tail_logprobs]), logprobs.exp().gather(1, ids)
    p = torch.from_numpy(p).double().softmax(-1)  # of float32, so not quite of sum 1
    q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], 1)
    if loss == "forward_kl":
        return found | {"teacher": (p * (p / q).log()).sum(-1)}
    if "reverse_kl" in loss:
        return found | {"teacher": (q * (q / p).log()).sum(-1)}
    m = (p + q) / 2
    jsd = ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2
    log_ratio = teacher_sampled - sampled
    mixed = 0.6 * (q * (q / p).log()).sum(-1) + 0.3 * jsd + 0.1 * (log_ratio.exp() - 1 - log_ratio)
    return found | {"teacher": 0.5 * mixed}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", BATCHES)
def test_loss_and_gradient_for_every_cut_order_and_number_of_ranks(loss, name, model, computed):
    reference = GPT2LMHeadModel.from_pretrained(model, dtype=torch.float64)
    batch = random_batch(name, loss)
    each = {}
    for sample in batch:
        logits = reference(torch.from_numpy(sample.tokens).long()[None]).logits[0]
        for term, values in naive_losses(loss, sample, logits).items():
            each.setdefault(term, []).append(values.mean(0, keepdim=True) if "sequences" in loss else values)
    want = sum(torch.cat(values).mean() for values in each.values())
    want.backward()
    expected = {key: parameter.grad for key, parameter in reference.named_parameters()}
    assert max(grad.abs().max() for grad in expected.values()) > 1e-3
    for world_size, results in computed.items():
        for cut in CUTS:
            metrics, grads = results[loss, name, cut]
            where = f"{world_size} ranks, {cut}"
            rounding = 1e3 if "sequences" in loss or "holes" in name else 1.0  # factors of terms travel as float32
            assert metrics["actor/loss"] == pytest.approx(want.item(), rel=1e-9 * rounding), where
            assert grads.keys() == expected.keys()
            for key, grad in grads.items():
                torch.testing.assert_close(
                    grad, expected[key], rtol=1e-7 * rounding, atol=1e-10 * rounding,
                    msg=lambda text, k=key, w=where: f"{w}, {k}: {text}",
                )


def test_cuts_agree_to_the_last_digits(computed):
    """Against each other even more closely than against the reference, metrics included."""
    for (loss, name, cut), (first, grads) in computed[1].items():
        for results in computed.values():
            metrics, others = results[loss, name, cut]
            whole, _ = results[loss, name, "whole"]
            for key in first.keys() - {"actor/distillation/overlap_ratio"}:  # of a sample that depends on the cut
                assert metrics[key] == pytest.approx(first[key], rel=1e-10, abs=1e-12), (loss, name, cut, key)
                assert metrics[key] == pytest.approx(whole[key], rel=1e-10, abs=1e-12), (loss, name, cut, key)
            for key, grad in grads.items():
                torch.testing.assert_close(others[key], grad, rtol=1e-9, atol=1e-13)

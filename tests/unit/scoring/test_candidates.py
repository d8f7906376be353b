"""The student's most likely tokens as candidates (`distillation.candidates`), against dense float64 computations."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.launch import inputs
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.losses.topk import top_logprobs
from hybrid_gkd.scoring.teacher_prompts import CompletionPrompts
from hybrid_gkd.student import sharded_model
from hybrid_gkd.testing import (
    LocalGroup,
    LocalTeacher,
    make_tiny_model,
    make_tokenizer,
    single_process_group,
    tiny_config,
)
from hybrid_gkd.trainer import PARTS, GKDTrainer
from hybrid_gkd.types import Task, TopK

TEMPERATURE, K, N = 0.8, 6, 2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a student and a teacher, and both in float64."""
    root = tmp_path_factory.mktemp("models")
    folders = [make_tiny_model(root / name, seed=seed, hidden=32, layers=1) for seed, name in enumerate("st")]
    return folders, [AutoModelForCausalLM.from_pretrained(folder).double() for folder in folders]


def logprobs_of(model, token_ids, positions):
    """Dense log-probabilities [R, V] at the temperature."""
    logits = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0, positions - 1]
    return (logits / TEMPERATURE).log_softmax(-1)


def make_teacher(model, k, events):
    """Scores of `k` candidates, the given ones among them, as the engines compute them."""

    @torch.no_grad()
    def score(reading):
        events.append(("teacher", reading.name, reading.given_ids is not None))
        logits = logprobs_of(model, reading.token_ids, reading.positions).float()
        given = None if reading.given_ids is None else torch.from_numpy(reading.given_ids.astype(np.int64))
        targets = torch.from_numpy(reading.token_ids[reading.positions].astype(np.int64))
        found = top_logprobs(
            logits, lambda rows: rows, targets, torch.ones(len(logits)), K if given is None else k, logits.shape[1],
            given=given,
        )
        ids, logprobs, tail, sampled = (each.numpy() for each in found)
        return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)

    return LocalTeacher(score)


def respond(request, version):
    rng = np.random.default_rng(request.seed)
    return rng.integers(0, 250, rng.integers(1, 8)).astype(np.int32)


def train(models, *overrides):
    """Take a step at a learning rate of 0; return rollout, metrics, gradients and the order of events."""
    (student, _), (_, teacher) = models
    config = tiny_config(
        "data.train_batch_size=4", "data.max_prompt_length=8", "data.max_response_length=8",
        f"actor_rollout_ref.rollout.n={N}", f"distillation.topk={K}", f"distillation.temperature={TEMPERATURE}",
        "actor_rollout_ref.actor.grad_clip=1e9", "trainer.total_training_steps=1", "trainer.save_freq=0",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24", *overrides, model=student,
    )  # fmt: skip
    section = config.actor_rollout_ref.actor
    section.fsdp_config.model_dtype, section.optim.lr = "fp64", 0.0
    tasks = [Task(index=i, token_ids=np.array([9, i], np.int32), text=str(i)) for i in range(4)]
    grads, events = {}, []
    with pytest.MonkeyPatch.context() as patch, single_process_group():
        patch.setitem(sharded_model.DTYPES, "fp64", torch.float64)
        group = LocalGroup(config, respond=respond)

        def keep():
            grads.update({name: each.grad.full_tensor() for name, each in group.actor.hf_model.named_parameters()})

        update, compute_topk, compute_logprobs = group.actor.update, group.compute_topk, group.compute_logprobs
        group.actor.update = lambda batch: update(batch, before_step=keep)
        group.compute_topk = lambda plan: (events.append(("topk",)), compute_topk(plan))[1]
        group.compute_logprobs = lambda plan: (events.append(("logprobs",)), compute_logprobs(plan))[1]
        k = {"student": K, "union": 2 * K}.get(config.distillation.candidates)
        own = config.distillation.teacher_prompt_fn is not None
        tokenizer = make_tokenizer() if own else None
        trainer = GKDTrainer(
            config, group=group, tokenizer=tokenizer,
            prompts=CompletionPrompts(config, tokenizer, None) if own else None,
            train_prompts=tasks, val_prompts=tasks, reward=None, tracking=None,
            store=None, teacher=make_teacher(teacher, k, events),
        )  # fmt: skip
        rollout = trainer.generation.rollout(1)
        return rollout, trainer._update_actor(rollout), grads, events


def dense_loss(rollout, models, candidates):
    """The mean reverse KL on the candidates and the exact rest, and the teacher's mass on them."""
    _, (student, teacher) = models
    values, masses = [], []
    for sample in rollout.samples:
        q = logprobs_of(student, sample.tokens, sample.positions)
        p = logprobs_of(teacher, sample.tokens, sample.positions).detach()
        chosen = q.detach().topk(K).indices
        if candidates == "union":
            chosen = p.scatter(1, chosen, torch.inf).topk(2 * K).indices
        inside = torch.zeros_like(q, dtype=torch.bool).scatter(1, chosen, True)
        both = [torch.cat([each.gather(1, chosen), rest(each, inside)], 1) for each in (p, q)]
        values.append((both[1].exp() * (both[1] - both[0])).sum(1))
        masses.append(both[0][:, :-1].exp().sum(1))
    return torch.cat(values).mean(), torch.cat(masses).mean().item()


def rest(logprobs, inside):
    return logprobs.masked_fill(inside, -torch.inf).logsumexp(1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("candidates", ["student", "union"])
def test_gradients_are_those_of_the_dense_reverse_kl(models, candidates):
    """Scores are float32, so a log-probability is off by up to 1e-6."""
    rollout, metrics, grads, events = train(
        models, "distillation.loss_mode=reverse_kl", f"distillation.candidates={candidates}"
    )
    want, mass = dense_loss(rollout, models, candidates)
    assert metrics["actor/kl_loss"] == pytest.approx(want.item(), rel=1e-5)
    assert metrics["actor/distillation/teacher_mass"] == pytest.approx(mass, rel=1e-5)
    parameters = dict(models[1][0].named_parameters())
    for name, gradient in zip(parameters, torch.autograd.grad(want, parameters.values()), strict=True):
        assert (grads[name] - gradient).norm() < 1e-5 * (1 + gradient.norm()), name
    assert all(event[-1] for event in events if event[0] == "teacher")


@pytest.mark.slow
def test_the_teacher_scores_a_part_while_the_student_computes_the_next(models):
    _, _, _, events = train(models, "distillation.candidates=student")
    assert [kind for kind, *_ in events] == ["topk", *["teacher"] * (4 * N // PARTS)] * PARTS
    _, _, _, events = train(models)
    assert {kind for kind, *_ in events} == {"teacher"}
    assert not any(given for *_, given in events)


@pytest.mark.slow
def test_samples_without_teacher_need_no_candidates(models, tmp_path):
    """Together with a prompt of the teacher from the completions; groups are asked for as they are complete."""
    function = "def f(task, sample, group):\n    return task.row % 2 * 'x' or None\n"
    (tmp_path / "p.py").write_text(function, encoding="utf-8")
    _, metrics, _, events = train(
        models, "distillation.candidates=student", f"distillation.teacher_prompt_fn={tmp_path}/p.py:f"
    )
    assert metrics["teacher/unscored_fraction"] == 0.5
    scored = [event for event in events if event[0] == "teacher"]
    assert sorted(int(name[4]) for _, name, _ in scored) == [1, 1, 3, 3]
    assert all(given for *_, given in scored)
    assert events.count(("topk",)) == 2


@pytest.mark.slow
def test_one_pass_gives_the_candidates_and_the_old_logprobs(models):
    """Where the temperatures are equal; an importance weight is then the same."""
    corrected = ["algorithm.rollout_is_threshold=2", "distillation.candidates=student"]
    same = f"actor_rollout_ref.rollout.temperature={TEMPERATURE}"
    _, metrics, _, events = train(models, *corrected, same)
    assert ("logprobs",) not in events
    assert events.count(("topk",)) == PARTS
    _, expected, _, events = train(models, "algorithm.rollout_is_threshold=2", same)
    assert events.count(("logprobs",)) == 1
    assert metrics["actor/importance/mean"] == pytest.approx(expected["actor/importance/mean"], rel=1e-5)
    _, _, _, events = train(models, *corrected)
    assert ("logprobs",) in events


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distillation.as_reward=true", "actor_rollout_ref.rollout.n=2"], "must be teacher with .*as_reward, which"),
        (["distillation.loss_mode=k2"], "must be teacher with distillation.loss_mode=k2, which has none"),
        (["actor_rollout_ref.teacher.cache=x"], "must be teacher with actor_rollout_ref.teacher.cache"),
        (["distillation.candidates=both"], "distillation.candidates"),
    ],
)
def test_settings_without_effect_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        tiny_config("distillation.candidates=student", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distillation.candidates=union"], "candidates=union, twice it must be at most the 100 tokens"),
        (["distillation.candidates=student", "data.max_response_length=70000"], "lower distillation.topk"),
    ],
)
def test_candidates_beyond_the_vocabulary_or_a_message_are_refused_before_the_run(overrides, message):
    room = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=99999"
    facts = Facts(tiny_config("distillation.topk=64", room, *overrides))
    facts.num_ids = 100
    with pytest.raises(ConfigError, match=message):
        inputs.check_topk(facts)

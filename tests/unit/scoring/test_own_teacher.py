"""The student's own weights as its teacher, against a dense float64 computation. CPU, one rank."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd.errors import BadTeacherReply, CheckpointError, ConfigError, DataError
from hybrid_gkd.launch.data_checks import check_teacher_prompts
from hybrid_gkd.launch.plan import check_host_memory, checkpoint_bytes, make_plan
from hybrid_gkd.models.adapters import adapter_weights
from hybrid_gkd.models.spec import student_spec
from hybrid_gkd.offload.needs import trained_models
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring.own_teacher import OwnTeacher
from hybrid_gkd.student.checkpoint_io import load_model, save_model, snapshot_bytes
from hybrid_gkd.testing import (
    LocalGroup,
    MetricRows,
    NumberTokenizer,
    make_sample,
    make_tiny_model,
    single_process_group,
    tail_of,
    tiny_config,
)
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import MiniBatch, Reading, Task, TopK

TEACHER, K, TEMPERATURE, DECAY = "actor_rollout_ref.teacher", 8, 2.0, 0.75
LORA = "actor_rollout_ref.model.lora_rank=2"
PROMPT = "data.teacher_prompt_key=hint"


def config_of(model, source, *overrides):
    return tiny_config(
        f"{TEACHER}.server_ip=null", f"{TEACHER}.source={source}", f"{TEACHER}.ema_decay={DECAY}", PROMPT,
        f"distillation.topk={K}", f"distillation.temperature={TEMPERATURE}", "data.train_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=0", *overrides, model=model,
    )  # fmt: skip


def random_sample(seed, row=0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(256)[:K] for _ in range(9)]).astype(np.int32)
    logprobs = np.log(rng.dirichlet(np.ones(K + 1), 9)[:, :K]).astype(np.float32)
    teacher = TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail_of(logprobs), sampled_logprobs=logprobs[:, 0])
    return make_sample(row, prompt=rng.integers(0, 256, 5), completion=rng.integers(0, 256, 9), teacher=teacher)


def train(actor, seed):
    actor.update(MiniBatch(micro_batches=((random_sample(seed),),), num_tokens=9))


def readings(count=3):
    rng = np.random.default_rng(7)
    lengths = rng.integers(4, 20, count)
    return [
        Reading(token_ids=rng.integers(0, 256, n + 3).astype(np.int32), positions=np.arange(n, n + 3), name=str(n))
        for n in lengths
    ]


def trained_weights(actor):
    """Name -> float64 copy of each trained weight."""
    named = actor.named_parameters() if actor.adapters is None else adapter_weights(actor.hf_model).items()
    return {name: weight.full_tensor().detach().double().clone() for name, weight in named}


def dense(folder, actor, trained):
    """The student as a plain float64 model, with these trained weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    state = model.state_dict()
    if actor.adapters is None:
        state.update(trained)
    else:
        scale = actor.adapters.config.lora_alpha / actor.adapters.config.r
        for name in trained:
            layer, found, _ = name.partition(".lora_A")
            if found:
                up = trained[name.replace(".lora_A", ".lora_B")]
                state[f"{layer}.weight"] = state[f"{layer}.weight"] + scale * up @ trained[name]
    model.load_state_dict(state)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("source", ["initial", "ema", "live"])
@pytest.mark.parametrize("lora", [False, True])
def test_scores_are_those_of_a_dense_float64_model_with_these_weights(source, lora, tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    config = config_of(folder, source, *([LORA] if lora else []))
    with single_process_group():
        group = LocalGroup(config, respond=None, num_updates=3)
        actor = group.actor
        first = average = trained_weights(actor)
        for seed in range(3):
            train(actor, seed)
            now = trained_weights(actor)
            average = {name: DECAY * average[name] + (1 - DECAY) * now[name] for name in now}
        before = [weight.full_tensor().clone() for weight in actor.parameters()]
        teacher = OwnTeacher(config, group, Clock(), num_ids=259)
        scores = [future.result(0) for future in teacher.submit(readings())]
        after = [weight.full_tensor() for weight in actor.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        expected = dense(folder, actor, {"initial": first, "ema": average, "live": now}[source])
        others = {"initial": now, "ema": now, "live": first}[source]
        differs = False
        for reading, found in zip(readings(), scores, strict=True):
            rows = torch.tensor(reading.positions) - 1
            ids = torch.tensor(reading.token_ids[None]).long()
            with torch.no_grad():
                logprobs = (expected(ids).logits[0, rows] / TEMPERATURE).log_softmax(-1)
                other = (dense(folder, actor, others)(ids).logits[0, rows] / TEMPERATURE).log_softmax(-1)
            best = logprobs.topk(K).values
            rest = torch.log1p(-best.exp().sum(1))
            sampled = logprobs.gather(1, torch.tensor(reading.token_ids[reading.positions])[:, None].long())[:, 0]
            # float32 forward passes of these sizes are within 1e-5 nats of float64 ones.
            at_ids = logprobs.gather(1, torch.tensor(found.ids).long())
            np.testing.assert_allclose(found.logprobs, best, atol=3e-5)
            np.testing.assert_allclose(found.logprobs, at_ids, atol=3e-5)
            np.testing.assert_allclose(found.tail_logprobs, rest, atol=1e-4)
            np.testing.assert_allclose(found.sampled_logprobs, sampled, atol=3e-5)
            differs |= float((other.gather(1, torch.tensor(found.ids).long()) - at_ids).abs().max()) > 1e-2
        assert differs, "the weights compared with do not differ"


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], [LORA], ["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"]])
def test_the_moving_average_is_saved_and_continues_to_the_last_digit(overrides, tmp_path):
    config = config_of(make_tiny_model(tmp_path / "model"), "ema", *overrides)
    with single_process_group():
        whole, resumed = (LocalGroup(config, respond=None, num_updates=4).actor for _ in range(2))
        train(whole, 0)
        train(whole, 1)
        written = save_model(whole, tmp_path / "actor")
        assert sum(each.size for each in written.values()) >= snapshot_bytes(whole)
        load_model(resumed, tmp_path / "actor")
        for actor in (whole, resumed):
            train(actor, 2)
        for one, other in zip(whole.average.tensors, resumed.average.tensors, strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one.full_tensor(), other.full_tensor())
        sample = random_sample(3)
        ours, theirs = (actor.compute_topk(((sample,),))[sample.id] for actor in (whole, resumed))
        assert np.array_equal(ours.logprobs, theirs.logprobs)
        # A checkpoint without one cannot be resumed with one, and one with it can without.
        plain = LocalGroup(config_of(tmp_path / "model", "live", *overrides), respond=None, num_updates=4).actor
        load_model(plain, tmp_path / "actor")
        save_model(plain, tmp_path / "plain")
        with pytest.raises(CheckpointError, match="it has no ema/"):
            load_model(resumed, tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["initial", "ema", "live"])
def test_a_trainer_learns_from_its_own_weights_behind_another_prompt(source, tmp_path):
    config = config_of(
        make_tiny_model(tmp_path / "model"), source, "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.temperature=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    )
    tasks = [
        Task(index=i, token_ids=np.array([i, 7], np.int32), teacher_ids=np.array([i, 9, 9, 7], np.int32), text="")
        for i in range(2)
    ]
    rows = MetricRows()
    with single_process_group():
        group = LocalGroup(config, respond=lambda request, version: np.array([5, 6, 5], np.int32), num_updates=6)
        clock = Clock()
        GKDTrainer(
            config, group=group, teacher=OwnTeacher(config, group, clock, num_ids=259), tokenizer=NumberTokenizer(),
            train_prompts=tasks, val_prompts=tasks, reward=None, tracking=rows, store=None, clock=clock,
        ).fit()
    steps = rows.by_step
    assert steps[3]["val/forward_kl"] < steps[0]["val/forward_kl"]
    assert steps[1]["actor/kl_loss"] > 0
    assert steps[1]["teacher/tokens_per_second"] > 0
    assert steps[1]["timing/wait_prev_teacher"] > 0
    assert [event[0] for event in group.events].count("update") == 6, "two optimizer steps per rollout"


def test_scores_are_checked_before_they_reach_a_loss(tmp_path):
    config = config_of("unused", "live")

    class Group:
        size, attention_cost = 1, 0.0

        def compute_own_topk(self, plan):
            bad = np.full((3, K), np.nan, np.float32)
            ids = np.tile(np.arange(K, dtype=np.int32), (3, 1))
            topk = TopK(ids=ids, logprobs=bad, tail_logprobs=bad[:, 0], sampled_logprobs=bad[:, 0])
            return {sample.id: topk for share in plan for micro_batch in share for sample in micro_batch}

    with pytest.raises(BadTeacherReply, match=r"the student as its own teacher \(live\).*is NaN"):
        OwnTeacher(config, Group(), Clock(), num_ids=259).submit(readings(1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{TEACHER}.server_ip=here"], "source: must be model with actor_rollout_ref.teacher.server_ip"),
        ([f"{TEACHER}.model.path=t"], "source: must be model with actor_rollout_ref.teacher.model.path"),
        ([f"{TEACHER}.cache=c"], "source: must be model with actor_rollout_ref.teacher.cache"),
        (["data.teacher_prompt_key=null"], "source: needs another prompt for the teacher"),
        (["data.teacher_prompt_key=null", f"{TEACHER}.source=ema"], "without rewards or given completions nothing"),
        ([f"{TEACHER}.source=initial", "actor_rollout_ref.model.lora_adapter_path=a"], "must be ema or live with"),
        ([f"{TEACHER}.source=initial", "actor_rollout_ref.ref.model.path=r"], "ref.model.path: must be null with"),
        ([f"{TEACHER}.ema_decay=1"], "ema_decay: must be above 0 and below 1"),
        (
            ["data.max_teacher_prompt_length=20000"],
            r"ppo_max_token_len_per_gpu: must be at least .*20000 \+ 1024 = 21024",
        ),
    ],
)
def test_refused_by_name(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config_of("unused", "live", *overrides)


def test_a_live_teacher_with_the_students_prompt_in_all_rows_is_refused():
    config = config_of("unused", "live")
    ids = np.array([1, 2], np.int32)
    task = Task(index=0, token_ids=ids, text="")
    same, other = dataclasses.replace(task, teacher_ids=ids), dataclasses.replace(task, teacher_ids=ids[:1])
    with pytest.raises(DataError, match=r"no row has another prompt.*'hint'"):
        check_teacher_prompts(config, [task, same])
    check_teacher_prompts(config, [task, other])
    check_teacher_prompts(config_of("unused", "ema"), [task])


def test_the_plan_has_the_memory_of_the_average_and_of_the_initial_weights(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    plans, sizes = {}, {}
    for source in ("initial", "ema", "live"):
        config = config_of(folder, source)
        trained = trained_models(config, student_spec(config))
        plans[source] = make_plan(config, trained, "cuda", engine="none")
        sizes[source] = checkpoint_bytes(config.actor_rollout_ref.actor.checkpoint, trained)
    weights = 4 * student_spec(config).parameters
    assert plans["ema"].phases["ema_teacher"]["ema_params"] == plans["ema"].host["ema_params"] == weights
    assert plans["ema"].phases["ema_teacher"]["kept_params"] == weights
    assert plans["ema"].phases["optimizer_step"]["ema_params"] == weights
    assert "ema_params" not in plans["ema"].phases["rollout"] | plans["ema"].phases["update"]
    assert plans["initial"].phases["reference"]["ref_params"] == weights / 2  # in the compute type
    assert "ema_teacher" not in plans["initial"].phases | plans["live"].phases
    assert sizes["ema"] - sizes["live"] == weights
    assert sizes["initial"] == sizes["live"]
    for source, text in (
        ("initial", "the student's initial weights"), ("ema", "the student's moving average (decay 0.75)"),
        ("live", "the student's present weights behind another prompt"),
    ):
        assert f"teacher: {text}, top-8, forward_kl" in str(plans[source])
    with pytest.raises(ConfigError, match=r"teacher\.source: with a second copy .* 1 training worker.* live needs no"):
        check_host_memory(config_of(folder, "ema"), plans["ema"].host, weights // 2)
    check_host_memory(config_of(folder, "live"), plans["live"].host, 0)
    check_host_memory(config_of(folder, "initial", LORA), plans["initial"].host, 0)

"""`val/forward_kl` and `val/reverse_kl`: what they are, and that a validation disturbs nothing."""

import numpy as np
import pytest
import torch

from hybrid_gkd import testing
from hybrid_gkd.student.checkpoint_store import CheckpointStore
from hybrid_gkd.testing import LocalGroup, LocalTeacher, MetricRows, RecordingGroup, make_tiny_model, tiny_config
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.types import Task, TopK

TEMPERATURE, VOCABULARY = 1.5, 259
NAMES = ("val/forward_kl", "val/reverse_kl")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a student and a teacher."""
    root = tmp_path_factory.mktemp("models")
    return make_tiny_model(root / "student", seed=1, layers=1), make_tiny_model(root / "teacher", seed=2, layers=1)


def configure(student, *overrides):
    return tiny_config(
        "data.val_files=unused", "actor_rollout_ref.teacher.model.path=unused", "data.train_batch_size=2",
        "data.max_prompt_length=8", "data.max_response_length=8", f"distillation.temperature={TEMPERATURE}",
        f"distillation.topk={VOCABULARY}", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32",
        "actor_rollout_ref.actor.optim.lr=3e-3", "trainer.total_training_steps=6", "trainer.test_freq=3",
        "trainer.save_freq=0", *overrides, model=student,
    )  # fmt: skip


def make_trainer(config, group, teacher, tracking):
    prompts = [Task(index=i, token_ids=np.arange(i + 1, dtype=np.int32), text=str(i)) for i in range(5)]
    return GKDTrainer(
        config, group=group, tokenizer=testing.NumberTokenizer(), train_prompts=prompts, val_prompts=prompts,
        reward=None, tracking=tracking, store=CheckpointStore(None, keep=None), teacher=teacher,
    )


def respond(request, version):
    rng = np.random.default_rng(request.seed)
    return rng.integers(0, VOCABULARY, rng.integers(1, 8)).astype(np.int32)


def trained_ids(reading):
    return reading.token_ids[reading.positions]


def distribution(folder, reading):
    """log-probabilities [R, V] of transformers' own model, in float64 behind its float32 logits."""
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(reading.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(ids[None]).logits[0]
    return (logits[reading.positions - 1].double() / TEMPERATURE).log_softmax(-1)


@pytest.mark.slow
def test_it_is_the_mean_over_all_tokens_and_falls_in_training(models):
    """With the whole vocabulary as candidates it is the full divergence: 1e-5 for the student's float32."""
    student, teacher = models
    asked = []

    def score(reading):
        asked.append(reading)
        logprobs, ids = distribution(teacher, reading).sort(descending=True)
        drawn = torch.from_numpy(trained_ids(reading).astype(np.int64))
        sampled = distribution(teacher, reading).gather(1, drawn[:, None])
        nothing = np.full(len(ids), -np.inf, np.float32)
        return TopK(
            ids=ids.int().numpy(), logprobs=logprobs.float().numpy(), tail_logprobs=nothing,
            sampled_logprobs=sampled[:, 0].float().numpy(),
        )

    config, tracking = configure(student), MetricRows()
    with testing.single_process_group():
        group = LocalGroup(config, respond=respond, num_updates=6)
        make_trainer(config, group, LocalTeacher(score), tracking).fit()
    tokens, quarters = [], []
    for reading in asked[:5]:
        p, q = distribution(teacher, reading), distribution(student, reading)
        tokens += np.stack([(p.exp() * (p - q)).sum(1), (q.exp() * (q - p)).sum(1)], 1).tolist()
        length = len(reading.positions)
        quarters += [next(k for k in (1, 2, 3, 4) if token / length < k / 4) for token in range(length)]
    rows = [tracking.by_step[step] for step in (0, 3, 6)]
    np.testing.assert_allclose([rows[0][name] for name in NAMES], np.mean(tokens, 0), rtol=1e-5)
    for quarter in (1, 2, 3, 4):
        expected = np.mean([value for value, at in zip(tokens, quarters, strict=True) if at == quarter], 0)
        np.testing.assert_allclose([rows[0][f"{name}/q{quarter}"] for name in NAMES], expected, rtol=1e-5)
    for name in NAMES:
        assert rows[0][name] > rows[1][name] > rows[2][name]
    assert all("val/accuracy" not in row for row in rows)
    check_candidates(tracking.tokens, asked, models)


def check_candidates(rows, asked, models):
    """Tokens of the first three answers of each validation, with what is likeliest there before training."""
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, str(n)) for step in (0, 3, 6) for n in range(3)]
    for row, reading in zip(rows[:3], asked[:3], strict=True):
        assert row["response"] == " ".join(map(str, trained_ids(reading)))
        student, teacher = (distribution(folder, reading).exp() for folder in models)
        for at, (text, divergence, *both) in enumerate(row["tokens"]):
            assert text == str(trained_ids(reading)[at])
            assert divergence > 0
            for candidates, p in zip(both, (teacher[at], student[at]), strict=True):
                assert [int(candidate) for candidate, _, _ in candidates] == p.argsort(descending=True)[:5].tolist()
                for candidate, of_teacher, of_student in candidates:  # four decimals, of float32
                    assert of_teacher == pytest.approx(float(teacher[at][int(candidate)]), abs=6e-5)
                    assert of_student == pytest.approx(float(student[at][int(candidate)]), abs=6e-5)


class CountingTeacher(LocalTeacher):
    """Knows which readings were asked for in a block that counts nothing."""

    def __init__(self):
        super().__init__(self.score, delay=0.01)
        self.counts, self.asked = True, []

    def score(self, reading):
        logprobs = np.full((len(reading.positions), 1), -0.5, np.float32)
        ids, tail = trained_ids(reading)[:, None], testing.tail_of(logprobs)
        return TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=logprobs[:, 0])

    def submit(self, readings):
        self.asked += [(self.counts, reading.name) for reading in readings]
        return super().submit(readings)

    def uncounted(self):
        return self

    def __enter__(self):
        self.counts = False

    def __exit__(self, *error):
        self.counts = True


@pytest.mark.parametrize("scheduler", ["sync", "two_step_off"])
def test_validation_asks_for_a_batch_at_a_time_and_counts_nothing(scheduler):
    teacher, group, tracking = CountingTeacher(), RecordingGroup(), MetricRows()
    short = ("distillation.topk=1", "trainer.total_training_steps=3")
    config = configure("unused", *short, f"trainer.scheduler={scheduler}")
    make_trainer(config, group, teacher, tracking).fit()
    assert [name for counts, name in teacher.asked if not counts] == [f"row {row}, sample 0" for row in range(1, 6)] * 2
    assert len(teacher.asked) == 2 * 5 + 3 * 2
    evaluated = [event for event in group.events if event[0] == "divergences"]
    assert evaluated == [("divergences", step, size) for step in (0, 3) for size in (2, 2, 1)]
    assert tracking.by_step[3]["val/forward_kl"] == 0.5

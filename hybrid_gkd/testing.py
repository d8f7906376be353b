"""Stand-ins for testing custom rewards, losses and trainers within seconds, without GPU, Ray or a teacher service.

Rewards and losses are plain functions: call them. `LocalGroup` has a real student and its update, to test their effect
on a run (docs/extending.md has an example). `RecordingGroup` needs no model: it tests when a trainer generates, trains,
publishes and saves, and the test decides when the teacher answers:

    group, teacher = RecordingGroup(), LocalTeacher(scores, delay=None)
    trainer = MyTrainer(config, group=group, teacher=teacher, tokenizer=NumberTokenizer(), tracking=MetricRows(), ...)
    ...  # in another thread, or from RecordingGroup's `respond`: teacher.answer("row 3, sample 1")
    assert group.events == [("publish", 0), ("generate", 0, 8), ("update",), ("publish", 1)]
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.data.packing import attention_cost
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.types import (
    GenerationRequest,
    MiniBatch,
    Plan,
    Reading,
    RewardText,
    Sample,
    SampleId,
    SamplingParams,
    Signal,
    TopK,
    generated_sample,
)

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
Respond = Callable[[GenerationRequest, int], np.ndarray]
"""Function of a request and the requested weight version that returns the response ids, int32 [R]."""


def tail_of(logprobs: np.ndarray) -> np.ndarray:
    """Return `TopK.tail_logprobs` of made-up candidates [R, K]: the log of the remaining mass, [R]."""
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(0, 1 - np.exp(logprobs.astype(np.float64)).sum(1))).astype(np.float32)


def make_tokenizer(extra_tokens: tuple[str, ...] = (), num_words: int = 0) -> Any:
    """Return a tokenizer without merges: 256 bytes, `num_words` tokens that no text produces, three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) + [f"word {i}" for i in range(num_words)]
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE,
        extra_special_tokens=["<|a|>", *extra_tokens],
    )


def make_tiny_model(
    folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, tied: bool = True, std: float = 0.2,
    extra_tokens: tuple[str, ...] = (), num_words: int = 0, vocab_size: int | None = None,
    architecture: str = "Qwen2ForCausalLM", positions: int = 2048,
) -> Path:
    """Write a random Qwen2 that vLLM can run on the CPU (head size 32), and its tokenizer, to `folder`; return it.

    Args:
        hidden: D, a multiple of 32.
        tied: one matrix for the input embedding and the head.
        std: standard deviation of the weights.
        vocab_size: V, rows of the embeddings; None: the number of tokens. Rows of the head without a token are 4 times
            as large, so that tests detect if one is drawn or scored.
        architecture: name of a causal LM's or a classifier's class; the latter has one label.
    """
    import torch
    import transformers

    tokenizer = make_tokenizer(extra_tokens, num_words)
    config = transformers.Qwen2Config(
        vocab_size=vocab_size or len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 32, num_key_value_heads=1,
        max_position_embeddings=positions, tie_word_embeddings=tied, initializer_range=std,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, num_labels=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        if (head := model.get_output_embeddings()) is not None:
            head.weight.data[len(tokenizer) + 1 :] *= 4  # transformers adds a token to a Qwen2's
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_config(*overrides: str, model: str | Path = "unused") -> Config:
    """Load a configuration for the CPU with placeholders as training data and teacher; a rollout is one optimizer step.

    Args:
        overrides: `dotted.key=value`; the last value of a key counts.
        model: the student's folder, if one is loaded.
    """
    from hybrid_gkd.config.loading import load_config

    given = [
        "data.train_files=unused", "actor_rollout_ref.teacher.server_ip=unused", "trainer.device=cpu",
        "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
        f"actor_rollout_ref.model.path={model}",
    ]
    return load_config([*given, *overrides])


def make_sample(
    row: int = 0, *, prompt: Iterable[int] = (1,), completion: Iterable[int] = (2,),
    loss_mask: Iterable[bool] | None = None, batch: int = 1, number: int = 0, version: int = 0,
    status: str = "stop", logprobs: np.ndarray | None = None, **signals: Signal,
) -> Sample:
    """Build a sample from lists of ids; `loss_mask` covers prompt and completion, None trains on the completion."""
    prompt, tokens = [*prompt], np.array([*prompt, *completion], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt) if loss_mask is None else np.array([*loss_mask], bool)
    return Sample(
        id=SampleId(batch, row, number), tokens=tokens, loss_mask=mask, status=status, logprobs=logprobs,
        versions=np.full(mask.sum(), version, np.int32), signals=signals,
    )  # fmt: skip


@contextlib.contextmanager
def single_process_group() -> Iterator[None]:
    """Create a torch.distributed process group of this process alone (gloo), which the sharded student needs."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class RecordingGroup:
    """Replaces `WorkerGroup`: two workers without a model, which record their calls.

    Args:
        respond: its exceptions end the generation. By default it returns the request's seed and row, so that a
            completion identifies its step.

    Attributes:
        respond: as given.
        version: version of the last published weights; -1 before.
        events: ("publish", version), ("generate", version, number of requests), ("update",), ("divergences", version,
            number of sequences), with a critic ("values",) and ("update_critic",), and with a reward model
            ("reward_model", version, number of texts), in order.
        trained: samples of each update, in the order of their requests, or by id.
        accumulated, updates, critic_updates: the arguments of `accumulate`, `update` and `update_critic`.
        saved: number of updates before each checkpoint.
        saves_in_background: set to True for checkpoints that are written in the background.
        num_forwards: number of computations of old log-probabilities.

    The critic's values are 1/4; the reward model scores a text by its number of tokens. Tokens have the probability 1/4
    under the rollout policy and 1/2 under the student: a ratio of 2 each.
    """

    size, attention_cost = 2, 1e-3

    def __init__(self, respond: Respond | None = None):
        self.description = [{"device": "cpu"}] * self.size
        self.events: list[tuple[Any, ...]] = []
        self.trained: list[list[Sample]] = []
        self.accumulated: list[list[MiniBatch]] = []
        self.updates: list[list[list[MiniBatch]]] = []
        self.critic_updates: list[list[list[MiniBatch]]] = []
        self.saved: list[int] = []
        self.saves_in_background = False
        self.num_forwards = 0
        self.respond = respond or (lambda request, version: np.array([request.seed, request.id.row], np.int32))
        self.version = -1
        self._order: dict[SampleId, int] = {}
        """Position of each request among all requests."""
        self._is_generating = False
        self._waiting: list[Sample] = []

    def device_metrics(self, *, generating: bool = False) -> dict[str, float]:
        return {}

    def can_save(self) -> bool:
        return True

    def publish(self, weight_version: int) -> dict[str, float]:
        assert not self._is_generating, "the weights change under a generation"
        self.version = weight_version
        self.events.append(("publish", weight_version))
        return {"publish": 0.0, "offload": 0.0}

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[Sample]]:
        """Yield the samples one by one, the last request's first. Only one generation may run at a time."""
        assert not self._is_generating, "two generations at a time"
        self.events.append(("generate", self.version, len(requests)))
        self._is_generating = True
        time.sleep(0.002)
        self._order |= {request.id: len(self._order) + place for place, request in enumerate(requests)}
        for request in reversed(requests):
            new_ids = self.respond(request, self.version)
            sample = generated_sample(request, new_ids, version=self.version, status="stop", logprobs=None)
            yield [dataclasses.replace(sample, logprobs=self._logprobs(sample)) if sampling.logprobs else sample]
        self._is_generating = False

    def _logprobs(self, sample: Sample) -> np.ndarray:
        return np.full(sample.num_trained, np.log(0.25), np.float32)

    def accumulate(self, parts: list[MiniBatch]) -> None:
        self.accumulated.append(parts)
        self._waiting += [item for part in parts for micro in part.micro_batches for item in micro]

    def update(self, batches: list[list[MiniBatch]], *, last: bool = True) -> list[dict[str, float]]:
        self.updates.append(batches)
        self._waiting += [i for batch in batches for part in batch for micro in part.micro_batches for i in micro]
        self.trained.append(sorted(self._waiting, key=lambda sample: (self._order.get(sample.id, -1), sample.id)))
        self._waiting = []
        self.events.append(("update",))
        return [{"actor/loss": 1.0, "actor/lr": 0.1 * number} for number in range(len(batches[0]))]

    def start_update(
        self, batches: list[list[MiniBatch]], *, last: bool = True
    ) -> Callable[[], list[dict[str, float]]]:
        metrics = self.update(batches, last=last)
        return lambda: metrics

    def compute_logprobs(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        self.num_forwards += 1
        return _everywhere(np.log(0.5), micro_batches)

    def compute_divergences(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        found = _everywhere([0.5, 0.25], micro_batches)
        self.events.append(("divergences", self.version, len(found)))
        return found

    def compute_ref_logprobs(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        self.events.append(("ref",))
        return _everywhere(np.log(0.125), micro_batches)

    def compute_reward_scores(self, micro_batches: list[tuple[tuple[RewardText, ...], ...]]) -> dict[int, float]:
        texts = [text for share in micro_batches for micro_batch in share for text in micro_batch]
        self.events.append(("reward_model", self.version, len(texts)))
        return {text.index: float(len(text.token_ids)) for text in texts}

    def compute_values(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        self.events.append(("values",))
        return _everywhere(0.25, micro_batches)

    def update_critic(self, batches: list[list[MiniBatch]]) -> list[dict[str, float]]:
        self.critic_updates.append(batches)
        self.events.append(("update_critic",))
        return [{"critic/vf_loss": 1.0, "critic/lr": 0.1 * number} for number in range(len(batches[0]))]

    def save_checkpoint(self, folder: Path, *, tokenizer_path: str) -> dict[str, FileSum]:
        self.saved.append(len(self.updates))
        return {}

    def take_snapshot(self, *, tokenizer_path: str | None) -> None:
        self.saved.append(len(self.updates))

    def write_snapshot(self, folder: Path) -> None:
        pass

    def snapshot_written(self) -> bool:
        return True

    def finish_snapshot(self) -> tuple[dict[str, FileSum], float]:
        return {}, 0.0

    def load_checkpoint(self, folder: Path) -> None:
        pass


def _everywhere(value: Any, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
    """Return `value` for each trained token of all samples, float32 [R, ...]."""
    samples = [sample for share in micro_batches for micro_batch in share for sample in micro_batch]
    return {each.id: np.full((each.num_trained, *np.shape(value)), value, np.float32) for each in samples}


class LocalGroup(RecordingGroup):
    """A `RecordingGroup` of one worker with a real student and, if configured, other real models.

    Each model is trained for `num_updates` optimizer steps and not saved.
    """

    size = 1

    def __init__(self, config: Config, *, respond: Respond, num_updates: int = 1):
        import torch

        from hybrid_gkd.student.actor import Actor
        from hybrid_gkd.student.critic import Critic
        from hybrid_gkd.student.reference import Reference
        from hybrid_gkd.student.reward_model import RewardModel

        super().__init__(respond)
        self.config = config
        self.actor = Actor(config, device=torch.device("cpu"), num_updates=num_updates)
        self.attention_cost = attention_cost(self.actor.hidden_size)
        self.reference = Reference(config, device=torch.device("cpu")) if config.has_reference_model else self.actor
        if config.uses_reward_model:
            self.reward_model = RewardModel(config, device=torch.device("cpu"))
        if config.uses_critic:
            self.critic = Critic(config, device=torch.device("cpu"), num_updates=num_updates)

    def _logprobs(self, sample: Sample) -> np.ndarray:
        return self.actor.compute_logprobs(((sample,),))[sample.id]

    def accumulate(self, parts: list[MiniBatch]) -> None:
        super().accumulate(parts)
        self.actor.accumulate(parts[0])

    def update(self, batches: list[list[MiniBatch]], *, last: bool = True) -> list[dict[str, float]]:
        super().update(batches)
        return [self.actor.update(batch) for batch in batches[0]]

    def compute_logprobs(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        return self.actor.compute_logprobs(micro_batches[0])

    def compute_topk(self, micro_batches: Plan) -> dict[SampleId, TopK]:
        return self.actor.compute_topk(micro_batches[0])

    def compute_divergences(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        super().compute_divergences(micro_batches)
        return self.actor.compute_divergences(micro_batches[0])

    def compute_ref_logprobs(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        return self.reference.compute_ref_logprobs(micro_batches[0])

    def compute_ref_topk(self, micro_batches: Plan) -> dict[SampleId, TopK]:
        return self.reference.compute_ref_topk(micro_batches[0])

    def compute_own_topk(self, micro_batches: Plan) -> dict[SampleId, TopK]:
        if self.config.actor_rollout_ref.teacher.source == "initial" and self.config.has_reference_model:
            return self.reference.compute_ref_topk(micro_batches[0])
        return self.actor.compute_topk(micro_batches[0])

    def compute_reward_scores(self, micro_batches: list[tuple[tuple[RewardText, ...], ...]]) -> dict[int, float]:
        super().compute_reward_scores(micro_batches)
        return self.reward_model.compute_scores(micro_batches[0])

    def compute_values(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        return self.critic.compute_values(micro_batches[0])

    def update_critic(self, batches: list[list[MiniBatch]]) -> list[dict[str, float]]:
        super().update_critic(batches)
        return [self.critic.update(batch) for batch in batches[0]]


class LocalTeacher:
    """Replaces `TeacherClient`: `score` returns the scores of a reading, or raises its error.

    A reply takes a random time up to `delay` seconds, so that the order varies; None: it waits for `answer`.
    """

    def __init__(self, score: Callable[[Reading], TopK], delay: float | None = 0.0):
        self._score, self._delay, self._random = score, delay, random.Random(0)
        self.waiting: dict[str, tuple[Reading, Future[TopK]]] = {}
        """Pending readings by name, in the order of submission."""

    def submit(self, readings: list[Reading]) -> list[Future[TopK]]:
        futures: list[Future[TopK]] = [Future() for _ in readings]
        for reading, future in zip(readings, futures, strict=True):
            if self._delay is None:
                assert reading.name not in self.waiting, f"{reading.name} is already waiting"
                self.waiting[reading.name] = reading, future
            elif self._delay:
                threading.Timer(self._random.uniform(0, self._delay), self._answer, [reading, future]).start()
            else:
                self._answer(reading, future)
        return futures

    def answer(self, *names: str) -> None:
        """Answer the readings of these names, or all pending ones."""
        for name in names or list(self.waiting):
            self._answer(*self.waiting.pop(name))

    def describe(self) -> str:
        return "a stand-in"

    def _answer(self, reading: Reading, future: Future[TopK]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(self._score(reading))
        except Exception as error:
            future.set_exception(error)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        yield

    def drain_metrics(self) -> TeacherMetrics:
        return TeacherMetrics()


class NumberTokenizer:
    """Replaces a tokenizer for arbitrary ids: [7, 2] is the text "7 2"."""

    def decode(self, ids: np.ndarray, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


class MetricRows:
    """Replaces the trackers: keeps a trainer's metrics in `rows`, one dictionary per step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.generations: list[Any] = []
        self.tokens: list[dict[str, Any]] = []

    @property
    def by_step(self) -> dict[int, dict[str, float]]:
        """Return the newest row of every step."""
        return {int(row["training/global_step"]): row for row in self.rows}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append({**metrics, "training/global_step": float(step)})

    def log_generations(self, samples: Any, step: int) -> None:
        self.generations += samples

    def log_lengths(self, lengths: Any, step: int) -> None:
        """Do nothing, since tests have the rollouts themselves."""

    def log_tokens(self, answers: Any, step: int) -> None:
        self.tokens += [{"step": step, **answer} for answer in answers]

"""Stand-ins for tests of a reward, a loss or a trainer of your own: no GPU, no Ray, no service, and seconds.

    folder = make_tiny_model(tmp_path / "student")
    config = load_config([f"actor_rollout_ref.model.path={folder}", ...])
    with single_process_group():
        group = LocalGroup(config, respond=lambda request, version: np.array([7, 2], np.int32))
        trainer = GKDTrainer(config, group=group, teacher=LocalTeacher(scores), tracking=MetricRows(), ...)
        trainer.fit()

The student, its update, the loss and the trainer are the product's. What stands in is whatever would need other
processes: the workers, the rollout engine and the teacher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.types import GenerationRequest, MiniBatch, SamplingParams, Sequence, TeacherTopK, TrainSequence

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)


def make_tokenizer(extra_tokens: tuple[str, ...] = (), num_words: int = 0) -> Any:
    """A byte-level tokenizer: 256 bytes, `num_words` tokens that no text gives, three special tokens, no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) + [f"word {i}" for i in range(num_words)]
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|a|>", *extra_tokens]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(
    folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, tied: bool = True, std: float = 0.2,
    extra_tokens: tuple[str, ...] = (), num_words: int = 0, vocab_size: int | None = None,
) -> Path:
    """Write a random Qwen2 and its tokenizer: a real Hugging Face folder that vLLM runs on the CPU (head size 32).

    Args:
        folder: where to.
        seed: of the weights.
        hidden, layers: D, a multiple of 32, and the number of decoder blocks.
        tied: one matrix for the input embedding and the head.
        std: standard deviation of the weights.
        extra_tokens, num_words: see `make_tokenizer`.
        vocab_size: V, rows of the embeddings; None: as many as the tokenizer has tokens.

    Returns:
        `folder`.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(extra_tokens, num_words)
    config = Qwen2Config(
        vocab_size=vocab_size or len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 32, num_key_value_heads=1, max_position_embeddings=2048,
        tie_word_embeddings=tied, initializer_range=std, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def single_process_group() -> Iterator[None]:
    """A torch.distributed process group of this process alone (gloo), which the sharded student needs."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class LocalGroup:
    """Stands in for `WorkerGroup`: a real student in this process, whose responses a function decides.

    Args:
        config: the whole configuration.
        respond: request and the weight version that is asked -> response ids, int32 [R].
        num_updates: optimizer steps of the run, the length of the learning-rate schedule.
    """

    size = 1

    def __init__(
        self, config: Config, *, respond: Callable[[GenerationRequest, int], np.ndarray], num_updates: int = 1
    ):
        import torch

        from hybrid_gkd.data.packing import attention_cost
        from hybrid_gkd.student.actor import Actor

        self.actor = Actor(config, device=torch.device("cpu"), num_updates=num_updates)
        self.attention_cost = attention_cost(self.actor.hidden_size)
        self.description = [{"device": "cpu"}]
        self.weight_version = 0
        self._respond = respond

    def publish(self, weight_version: int) -> dict[str, float]:
        """The next responses are of this version."""
        self.weight_version = weight_version
        return {"publish": 0.0, "offload": 0.0}

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[Sequence]]:
        """Yield the sequences one by one; their log-probabilities, if asked for, are the present student's."""
        for request in requests:
            sequence = Sequence(
                index=request.index, prompt_ids=request.prompt_ids, weight_version=self.weight_version,
                response_ids=self._respond(request, self.weight_version), finish_reason="stop",
            )
            if sampling.logprobs:
                micro_batch = (TrainSequence(sequence=sequence),)
                (logprobs,) = self.actor.compute_logprobs((micro_batch,)).values()
                sequence = Sequence(
                    index=request.index, prompt_ids=request.prompt_ids, weight_version=self.weight_version,
                    response_ids=sequence.response_ids, finish_reason="stop", logprobs=logprobs,
                )
            yield [sequence]

    def accumulate(self, parts: list[MiniBatch]) -> None:
        """See `WorkerGroup.accumulate`."""
        self.actor.accumulate(parts[0])

    def update(self, batches: list[list[MiniBatch]]) -> list[dict[str, float]]:
        """See `WorkerGroup.update`."""
        return [self.actor.update(batch) for batch in batches[0]]

    def compute_logprobs(
        self, micro_batches: list[tuple[tuple[TrainSequence, ...], ...]]
    ) -> dict[int, np.ndarray]:
        """See `WorkerGroup.compute_logprobs`."""
        return self.actor.compute_logprobs(micro_batches[0])

    def memory_metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def can_save(self) -> bool:
        """There is nothing that could have died."""
        return True


class LocalTeacher:
    """Stands in for `TeacherClient`: answers at once with what a function says.

    Args:
        score: sequence -> its scores.
    """

    def __init__(self, score: Callable[[Sequence], TeacherTopK]):
        self._score = score

    def submit(self, sequences: list[Sequence]) -> list[Future[TeacherTopK]]:
        """See `TeacherClient.submit`."""
        futures: list[Future[TeacherTopK]] = [Future() for _ in sequences]
        for sequence, future in zip(sequences, futures, strict=True):
            future.set_result(self._score(sequence))
        return futures

    def drain_metrics(self) -> Any:
        """See `TeacherClient.drain_metrics`: nothing has been sent."""
        from hybrid_gkd.teacher_client import TeacherMetrics

        return TeacherMetrics()


class MetricRows:
    """Stands in for the trackers: keeps what a trainer reports in `rows`, one dictionary a step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.generations: list[Any] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep a step's metrics."""
        self.rows.append({**metrics, "training/global_step": float(step)})

    def log_generations(self, samples: Any, step: int) -> None:
        """Keep sample answers."""
        self.generations += samples

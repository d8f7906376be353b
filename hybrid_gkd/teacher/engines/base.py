"""Interface of scoring engines. Results of different engines agree up to the rounding of the model's dtype."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_gkd.errors import ModelError, describe_error
from hybrid_gkd.models.spec import position_limit
from hybrid_gkd.models.tokenizer import load_tokenizer, num_token_ids, stop_token_ids, tokenizer_hash
from hybrid_gkd.runtime.imports import model_code
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.teacher.protocol import ModelInfo
from hybrid_gkd.types import Reading, TopK

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Item:
    """A reading in an engine, with its index in the job."""

    job: Any
    index: int
    reading: Reading
    k: int
    temperature: float
    num_ids: int
    """Number of scored token ids: those below it."""
    adapter: str | None = None
    """Name of the adapter that scores it; None: the model without one."""

    @property
    def input_ids(self) -> np.ndarray:
        """int32 tokens before the last scored one, which is predicted and never read."""
        return self.reading.token_ids[: self.reading.positions[-1]]

    @property
    def rows(self) -> np.ndarray:
        """int64 [R] positions in `input_ids` whose hidden states predict the scored tokens."""
        return self.reading.positions - 1

    @property
    def targets(self) -> np.ndarray:
        """int64 [R] scored tokens."""
        return self.reading.token_ids[self.reading.positions].astype(np.int64)

    @property
    def batch_key(self) -> tuple[int, ...]:
        """Return the key of items that one call of `top_logprobs` can score together."""
        given = self.reading.given_ids
        return (self.num_ids,) if given is None else (self.num_ids, self.k, given.shape[1])

    @property
    def num_tokens(self) -> int:
        """Number of tokens up to and including the last scored one."""
        return int(self.reading.positions[-1]) + 1


class ScoringEngine(ABC):
    """A loaded model. Jobs are queued with `add` and returned by `step` in the order of completion.

    The device is still computing when a step returns, so that the caller can process the finished jobs meanwhile.
    After an exception from `add` or `step`, `clear` makes the engine usable again.
    """

    def __init__(self, info: ModelInfo):
        self.info = info
        self.num_tokens = 0
        """Number of tokens of the unfinished jobs."""
        self._queue: deque[Item] = deque()
        """Readings not started yet."""
        self._results: dict[Any, list[TopK | None]] = {}

    def add(
        self, job: Any, readings: list[Reading], k: int, temperature: float, num_ids: int | None = None,
        adapter: str | None = None,
    ) -> None:
        """Queue readings within `info`'s limits as a hashable `job`; score the token ids below `num_ids`.

        `adapter`: one of `info.adapters`; None scores with the model itself.
        """
        known = min(self.info.vocab_size, self.info.num_embeddings)
        num_ids = known if num_ids is None else min(num_ids, known)
        self._results[job] = [None] * len(readings)
        for index, reading in enumerate(readings):
            self._queue.append(Item(job, index, reading, k, temperature, num_ids, adapter))
            self.num_tokens += self._queue[-1].num_tokens

    def step(self) -> list[tuple[Any, list[TopK]]]:
        """Compute for a short time; return the finished jobs, often none.

        One entry per reading: ids int32 [R, k] (most likely first, below the job's `num_ids`, the reading's given ids
        among them), logprobs float32 [R, k] over all ids below it, tail_logprobs and sampled_logprobs float32 [R], at
        the job's temperature.
        """
        done = []
        for item, scores in self._step():
            self.num_tokens -= item.num_tokens
            results = self._results[item.job]
            results[item.index] = scores
            complete = [each for each in results if each is not None]
            if len(complete) == len(results):
                del self._results[item.job]
                done.append((item.job, complete))
        return done

    def clear(self) -> list[Any]:
        """Discard all jobs; return the unfinished ones."""
        jobs, self.num_tokens = list(self._results), 0
        self._results.clear()
        self._queue.clear()
        return jobs

    def score(
        self, readings: list[Reading], k: int, temperature: float, num_ids: int | None = None,
        adapter: str | None = None,
    ) -> list[TopK]:
        """Run one job on an idle engine."""
        assert not self._results, "the engine is busy"
        self.add(None, readings, k, temperature, num_ids, adapter)
        while True:
            for _, scores in self.step():
                return scores

    @abstractmethod
    def sleep(self) -> None:
        """Move the model from the GPU to the host; on the CPU it stays. No job may be unfinished."""

    @abstractmethod
    def wake(self) -> None:
        """Move the model back to the GPU."""

    @abstractmethod
    def _step(self) -> list[tuple[Item, TopK]]: ...


def describe_model(options: EngineOptions, backend: str) -> tuple[Any, ModelInfo]:
    """Return the model's config and its description for clients. Raises ModelError: the folder is incomplete."""
    from transformers import AutoConfig

    tokenizer = load_tokenizer(options.ckpt_path, options.trust_remote_code)  # first: detects a missing folder quickly
    with model_code(options.ckpt_path, options.trust_remote_code):
        try:
            config = AutoConfig.from_pretrained(options.ckpt_path, trust_remote_code=options.trust_remote_code)
        except Exception as error:  # whatever a broken folder raises
            cause = describe_error(error)
            raise ModelError(f"{options.ckpt_path}: the model's config cannot be loaded: {cause}") from error
    stop_ids: list[int] = []
    with contextlib.suppress(ModelError):  # an invalid generation_config.json: scoring does not need it
        stop_ids = stop_token_ids(options.ckpt_path, tokenizer)
    text, num_ids = config.get_text_config(), num_token_ids(tokenizer)
    # Not the whole path: workers on other hosts may have the same model in another folder.
    name, (limit, field) = Path(options.ckpt_path).resolve().name, position_limit(text)
    lengths = [length for length in (options.max_model_len, limit) if length is not None]
    if not lengths:
        raise ModelError(f"{options.ckpt_path}: --max-model-len must be set: the config has no maximum length")
    if lengths[0] > lengths[-1]:
        log.warning("--max-model-len %d is limited to %d tokens (%s)", lengths[0], lengths[-1], field)
    return config, ModelInfo(
        model=name, backend=backend, vocab_size=num_ids, num_embeddings=text.vocab_size, any_temperature=True,
        tokenizer_hash=tokenizer_hash(tokenizer), max_topk=min(options.n_logprobs, num_ids, text.vocab_size),
        max_sequence_length=min(lengths),
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        stop_token_ids=tuple(stop_ids), given_ids=True,
    )

"""The interface of scoring engines, whose results differ by no more than the rounding of the model's dtype."""

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
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.teacher.protocol import ModelInfo
from hybrid_gkd.types import Reading, TopK

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Item:
    """The reading with this index in its job, on its way through an engine."""

    job: Any
    index: int
    reading: Reading
    k: int
    temperature: float
    num_ids: int
    """What is scored are the ids below it."""

    @property
    def input_ids(self) -> np.ndarray:
        """int32, the tokens before the last scored one, which is predicted, never read."""
        return self.reading.token_ids[: self.reading.positions[-1]]

    @property
    def rows(self) -> np.ndarray:
        """int64 [R], the places in `input_ids` whose hidden states predict the scored tokens."""
        return self.reading.positions - 1

    @property
    def targets(self) -> np.ndarray:
        """int64 [R], the scored tokens."""
        return self.reading.token_ids[self.reading.positions].astype(np.int64)

    @property
    def num_tokens(self) -> int:
        """As far as the last scored one."""
        return int(self.reading.positions[-1]) + 1


class ScoringEngine(ABC):
    """One model, ready to score: jobs are added, and come back from `step` in the order in which they are done.

    A step leaves work for the device behind when it returns, so that the caller can deal with the finished jobs
    while the device computes. After an exception from `add` or `step`, `clear` makes the engine usable again.
    """

    def __init__(self, info: ModelInfo):
        self.info = info
        self.num_tokens = 0
        """Of the jobs that have not come back."""
        self._queue: deque[Item] = deque()
        """Readings that `_step` has not taken yet."""
        self._results: dict[Any, list[TopK | None]] = {}

    def add(
        self, job: Any, readings: list[Reading], k: int, temperature: float, num_ids: int | None = None
    ) -> None:
        """Queue readings within `info`'s limits as a hashable `job`; scored are the tokens below `num_ids`."""
        known = min(self.info.vocab_size, self.info.num_embeddings)
        num_ids = known if num_ids is None else min(num_ids, known)
        self._results[job] = [None] * len(readings)
        for index, reading in enumerate(readings):
            self._queue.append(Item(job, index, reading, k, temperature, num_ids))
            self.num_tokens += self._queue[-1].num_tokens

    def step(self) -> list[tuple[Any, list[TopK]]]:
        """Compute a little; returns the jobs that are done by now, often none.

        One entry per reading: ids int32 [R, k] (most likely first, below the job's `num_ids`), logprobs
        float32 [R, k] over all ids below it, tail_logprobs and sampled_logprobs float32 [R], at the job's temperature.
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
        """Forget all jobs; returns those that had not come back."""
        jobs, self.num_tokens = list(self._results), 0
        self._results.clear()
        self._queue.clear()
        return jobs

    def score(
        self, readings: list[Reading], k: int, temperature: float, num_ids: int | None = None
    ) -> list[TopK]:
        """Add one job to an idle engine and wait for it."""
        assert not self._results, "the engine is busy"
        self.add(None, readings, k, temperature, num_ids)
        while True:
            for _, scores in self.step():
                return scores

    @abstractmethod
    def _step(self) -> list[tuple[Item, TopK]]: ...


def describe_model(options: EngineOptions, backend: str) -> tuple[Any, ModelInfo]:
    """The model's config, and its description for clients. Raises ModelError for a folder that lacks either."""
    from transformers import AutoConfig

    tokenizer = load_tokenizer(options.ckpt_path, options.trust_remote_code)  # first: it finds a missing folder at once
    try:
        config = AutoConfig.from_pretrained(options.ckpt_path, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # whatever a broken folder raises
        cause = describe_error(error)
        raise ModelError(f"{options.ckpt_path}: the model's config cannot be loaded: {cause}") from error
    stop_ids: list[int] = []
    with contextlib.suppress(ModelError):  # a generation_config.json that transformers refuses: scoring needs none
        stop_ids = stop_token_ids(options.ckpt_path, tokenizer)
    text, num_ids = config.get_text_config(), num_token_ids(tokenizer)
    # Not the whole path: workers on other hosts may keep the same model elsewhere.
    name, (limit, field) = Path(options.ckpt_path).resolve().name, position_limit(text)
    lengths = [length for length in (options.max_model_len, limit) if length is not None]
    if not lengths:
        raise ModelError(f"{options.ckpt_path}: --max-model-len must say how long sequences are: no field of it does")
    if lengths[0] > lengths[-1]:
        log.warning("sequences may have %d tokens (%s), not %d", lengths[-1], field, lengths[0])
    return config, ModelInfo(
        model=name, backend=backend, vocab_size=num_ids, num_embeddings=text.vocab_size, any_temperature=True,
        tokenizer_hash=tokenizer_hash(tokenizer), max_topk=min(options.n_logprobs, num_ids, text.vocab_size),
        max_sequence_length=min(lengths),
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        stop_token_ids=tuple(stop_ids),
    )

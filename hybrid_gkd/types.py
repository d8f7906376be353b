"""Records passed between processes, or between the stages of a step.

Training data are `Sample`s with `signals`; a sample completes a `Task`. Arrays are numpy's, so that this module does
not need torch and Ray copies nothing: int32 ids, float32 everything else.
Shapes: T tokens of a sample, R trained tokens (not necessarily contiguous), K candidates per trained token.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One tokenized row of the data."""

    index: int
    """Position in the data set over all of its files, from 0 on."""
    token_ids: np.ndarray
    """int32 [P], with the chat template applied."""
    teacher_ids: np.ndarray | None = None
    """int32, the teacher's prompt, in its chat template; None: `token_ids`."""
    teacher: str = "default"
    """Key of the teacher that scores the samples, `default` without a choice."""
    response_ids: np.ndarray | None = None
    """int32 [A], the given completion; None if the student generates it."""
    loss_mask: np.ndarray | None = None
    """bool [P + A], trained tokens if the given completion is used; None without one."""
    text: str
    """The user's message, for logs of sample completions."""
    messages: list[dict[str, Any]] | None = None
    """The chat of the prompt, kept for a reward model, which may have its own chat template; else None."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the chat template describes to the model; None if the row has none."""
    answer: str | None = None
    """Ground truth for reward functions; None if the data has none."""
    data_source: str | None = None
    """Name of the row's data set (`data.reward_fn_key`); None if the data has none."""
    source: str = ""
    """Configuration key and file, for messages."""
    place: int = 0
    """Position in the file, from 0 on."""
    file: str = ""
    """Short name of the row's file, used as data source in validation metrics if that is None."""
    entry: int = 0
    """Place of the row's entry in data.train_files, from 0 on; a pattern is one entry of several files."""
    weight: float = 1.0
    """Fraction of the entry's rows in an epoch."""
    extra_info: dict[str, Any] | None = None
    """Further columns for custom reward functions; None without them."""

    @property
    def row(self) -> int:
        """Return the number over all files, from 1 on."""
        return self.index + 1

    @property
    def where(self) -> str:
        """Return the beginning of messages about the row."""
        return f"{self.source}, row {self.place + 1}" if self.source else f"row {self.row} of the data"


class SampleId(NamedTuple):
    """Unique identity of a sample in a run."""

    batch: int
    """Generation batch, from 1 on; in a validation -1 - the preceding step."""
    row: int
    """`Task.index` of the task."""
    number: int
    """Number among the samples of the task in this batch, from 0 on."""

    @property
    def group(self) -> tuple[int, int]:
        """Return the key shared by all samples of a task in a batch."""
        return self.batch, self.row

    def __str__(self) -> str:
        return f"row {self.row + 1}, sample {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The most likely tokens at each trained token of a sample, under a teacher or another policy.

    Row r is the distribution of the r-th trained token given all tokens before it.
    """

    ids: np.ndarray
    """int32 [R, K], distinct within a row, most likely first."""
    logprobs: np.ndarray
    """float32 [R, K], normalised over the whole vocabulary."""
    tail_logprobs: np.ndarray
    """float32 [R], log of the mass outside the K candidates; -inf if there is none."""
    sampled_logprobs: np.ndarray
    """float32 [R], log-probability of the trained token; NaN where a teacher with another tokenizer has none."""
    groups: np.ndarray | None = None
    """int32 [R, K], with another tokenizer (scoring/token_events.py): the column with the log-probability of all tokens
    that have it here; -1: the token belongs to the tail."""

    def parts(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: array for name, array in found.items() if array is not None}

    def only(self, kept: np.ndarray) -> TopK:
        """Return the rows of `kept`, bool [R]."""
        return TopK(**{name: array[kept] for name, array in self.parts().items()})


Arrays = list[np.ndarray]
"""One array per sample."""
Signal = np.ndarray | TopK
"""One value per trained token, float32 [R], or the candidates of a policy."""
SIGNALS = {
    "teacher": "TopK of the teacher",
    "teacher/<name>": "TopK of one of several teachers in place of `teacher`, with distillation.ensemble=sum",
    "student_topk": "TopK of the student, whose ids are candidates of the teacher (distillation.candidates)",
    "rewards": "[R] reward of each token; the score of the whole sample is at its last trained token",
    "advantages": "[R] advantage of each token",
    "old_logprobs": "[R] log-probabilities under the weights before the rollout's first mini-batch",
    "reference": "[R] log-probabilities under the reference policy",
    "reference_topk": "TopK of the reference policy, with actor.kl_loss_type=full",
    "values": "[R] the critic's values before each token, before the rollout's first mini-batch",
    "returns": "[R] targets of the critic's values",
    "weights": "[R] factors of every term of the loss; 0: not trained on",
    "weights/<term>": "[R] factors of one term in place of `weights`, if only some of the samples have its signal",
    "sampled_weights": "[R] further factors of terms of the sampled token: its part of the importance weight",
    "teacher_weights": "[R] further factors of the distillation term",
    "token_weights": "[R] weights of tokens in the distillation term, which is divided by their sum",
    "sft": "[R] factor of the cross-entropy of each token of a given completion",
}
"""Names of the signals that loss terms, critic and metrics read; a sample without one has weight 0 there."""
Scored = TopK | abc.Mapping[str, TopK]
"""Scores of a sample: its teacher's, or with distillation.ensemble=sum each teacher's by signal."""


class TokenMean(float):
    """A metric of an optimizer step: the mean over trained tokens of all workers, with their number."""

    tokens: float

    def __new__(cls, value: float, tokens: float) -> TokenMean:
        mean = super().__new__(cls, value)
        mean.tokens = tokens
        return mean

    def __reduce__(self) -> tuple[type, tuple[float, float]]:
        return TokenMean, (float(self), self.tokens)


STATUSES = ("stop", "length", "repetition", "paused", "given", "failed")
"""stop: end-of-sequence token; length: token limit reached; repetition: ended because of repetitions; paused:
unfinished; given: not generated; failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory of a task: the tokens that the student read and generated, and the training signals of trained
    tokens.

    Example: prompt 5 6, completion 7 8 9, of which a tool wrote the 8:
        tokens [5 6 7 8 9], loss_mask [0 0 1 0 1], R = 2
    """

    id: SampleId
    tokens: np.ndarray
    """int32 [T], prompt first; includes the end-of-sequence token if the engine generated one."""
    loss_mask: np.ndarray
    """bool [T], True on the R trained tokens; never on the first token, which nothing predicts."""
    versions: np.ndarray
    """int32 [R], weight version (number of training steps) that generated each trained token; -1: given."""
    status: str
    """One of STATUSES."""
    logprobs: np.ndarray | None = None
    """float32 [R], log-probabilities under the rollout policy; None unless requested, or if given."""
    signals: abc.Mapping[str, Signal] = field(default_factory=dict)
    """Signals by a name of SIGNALS."""

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        """Return R."""
        return len(self.versions)

    @property
    def positions(self) -> np.ndarray:
        """Return the positions of the trained tokens in `tokens`, int64 [R]."""
        return np.flatnonzero(self.loss_mask)

    @property
    def trained_ids(self) -> np.ndarray:
        """Return the ids of the trained tokens, int32 [R]."""
        return self.tokens[self.loss_mask]

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens before the first trained one; T without trained tokens."""
        return int(self.loss_mask.argmax()) if self.num_trained else self.num_tokens

    def array(self, name: str) -> np.ndarray:
        """Return a signal of the sample, float32 [R]."""
        found = self.signals[name]
        assert isinstance(found, np.ndarray)
        return found

    def topk(self, name: str) -> TopK:
        """Return a signal of candidates of the sample."""
        found = self.signals[name]
        assert isinstance(found, TopK)
        return found

    def with_signals(self, **signals: Signal) -> Sample:
        """Return a copy with these signals added."""
        return replace(self, signals={**self.signals, **signals})

    def only(self, kept: np.ndarray) -> Sample:
        """Return a copy in which the trained tokens are those of `kept`, bool [R]; what follows the last one is cut."""
        positions = self.positions[kept]
        end = positions[-1] + 1 if len(positions) else self.prompt_length
        signals = {
            name: each.only(kept) if isinstance(each, TopK) else each[kept] for name, each in self.signals.items()
        }
        return replace(
            self, tokens=self.tokens[:end], loss_mask=np.isin(np.arange(end), positions), versions=self.versions[kept],
            logprobs=None if self.logprobs is None else self.logprobs[kept], signals=signals,
        )


Pair = tuple[Task, Sample]
"""A sample with its task."""


def teacher_scores(sample: Sample) -> list[TopK]:
    """Return the scores of each teacher of a sample."""
    return [sample.topk(name) for name in sample.signals if name == "teacher" or name.startswith("teacher/")]


def with_tasks(tasks: abc.Iterable[Task], samples: abc.Iterable[Sample]) -> list[Pair]:
    """Return each sample with its task."""
    by_row = {task.index: task for task in tasks}
    return [(by_row[sample.id.row], sample) for sample in samples]


def without_given(samples: abc.Iterable[Sample]) -> list[Sample]:
    """Return the samples that the student generated."""
    return [sample for sample in samples if sample.status != "given"]


def replace_by_id(samples: abc.Iterable[Sample], changed: abc.Iterable[Sample]) -> list[Sample]:
    """Return the samples, with those in `changed` in place of the ones with the same id."""
    by_id = {sample.id: sample for sample in changed}
    return [by_id.get(sample.id, sample) for sample in samples]


QUARTERS = 4


def quarter_of_tokens(length: int) -> np.ndarray:
    """Return the quarter, 0 to 3, of each token of a completion of `length` tokens, [R]: floor(4 r / R)."""
    return np.arange(length) * QUARTERS // max(1, length)


def generated_sample(
    request: GenerationRequest, new_ids: np.ndarray, *, version: int, status: str, logprobs: np.ndarray | None = None
) -> Sample:
    """Return the sample of a request whose completion is `new_ids`, int32 [R], generated by one weight version."""
    tokens = np.concatenate([request.prompt_ids, new_ids]).astype(np.int32, copy=False)
    return Sample(
        id=request.id, tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(request.prompt_ids),
        versions=np.full(len(new_ids), version, np.int32), status=status, logprobs=logprobs,
    )


def given_sample(task: Task, batch: int, coefficient: float) -> Sample:
    """Return the sample of a task's given completion; `coefficient`: factor of its cross-entropy, 0 for none."""
    assert task.response_ids is not None
    assert task.loss_mask is not None
    num_trained = int(task.loss_mask.sum())
    return Sample(
        id=SampleId(batch, task.index, 0), tokens=np.concatenate([task.token_ids, task.response_ids]),
        loss_mask=task.loss_mask, versions=np.full(num_trained, -1, np.int32), status="given",
        signals={"sft": np.full(num_trained, coefficient, np.float32)} if coefficient else {},
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Input of a scorer for a sample: its view of prompt and completion, and the positions of trained tokens."""

    token_ids: np.ndarray
    """int32 [L]."""
    positions: np.ndarray
    """int64 [R], ascending and at least 1: the tokens whose predictions are scored."""
    name: str = ""
    """Name in messages, such as "row 12, sample 3"."""
    given_ids: np.ndarray | None = None
    """int32 [R, C], distinct ids of each row that are among its candidates; None: the most likely ids alone are."""
    keep: bool = False
    """True if the scores should be cached because it is read again, as given completions are."""

    @property
    def num_tokens(self) -> int:
        """Return L."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Return the size of a request for its scores."""
        return 4 * (len(self.token_ids) + (0 if self.given_ids is None else self.given_ids.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a completion."""

    max_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """Number of most likely tokens to sample from; -1: the whole vocabulary."""
    repetitions: int | None = None
    """Number of repetitions of a pattern of up to 32 tokens that ends a completion; None: unlimited."""
    logprobs: bool = False
    """Return the log-probability of every sampled token, which slows down generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A completion to generate."""

    id: SampleId
    prompt_ids: np.ndarray
    """int32 [P]."""
    seed: int
    """Seed of this request, which makes a completion independent of the batch and the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardText:
    """A prompt with a response, as tokens of the reward model."""

    index: int
    """Index of the score in the batch."""
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All samples of one training batch."""

    step: int
    """Training step (1-based) of this rollout."""
    epoch: int
    tasks: tuple[Task, ...]
    samples: tuple[Sample, ...]
    """Samples grouped by task, in the order of the tasks."""
    greedy: tuple[Sample, ...] = ()
    """Greedy completion of each task, in their order, if advantages are relative to it; else empty."""
    extra_batches: int = 0
    """Generation batches beyond one per rollout, of this and all earlier rollouts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the generation, with group filtering."""


Plan = list[tuple[tuple[Sample, ...], ...]]
"""For each worker its micro-batches, the same number for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """A worker's part of an optimizer step.

    All workers have the same number of micro-batches, some of them empty, since each one runs collectives.
    """

    micro_batches: tuple[tuple[Sample, ...], ...]
    num_tokens: int
    """Trained tokens of the mini-batch over ALL workers: the denominator of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sample completion of the student, for logging."""

    prompt: str
    response: str
    answer: str | None = None
    reward: float | None = None
    data_source: str | None = None
    """Data source of the row, or else its file."""
    sample: int = 0
    """Number among the completions of the prompt, from 0 on."""


GENERATION_COLUMNS = ("step", *(field.name for field in fields(Generation)))
"""Columns of a table of sample completions, in generations.jsonl and in trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts about a run for its trackers."""

    project_name: str
    experiment_name: str
    run_dir: Path
    config: abc.Mapping[str, Any]
    """Resolved configuration, nested dictionaries."""
    total_steps: int
    start_step: int
    """Completed steps; 0 for a new run, the checkpoint's step for a resumed one."""
    resume: bool
    """Append to the files in `run_dir`, after removing rows after `start_step`."""
    device: str = "auto"
    """Device of the run: cuda or cpu; auto: unknown."""


class MetricLog(Protocol):
    """Receives the metrics of a trainer."""

    def log(self, metrics: abc.Mapping[str, float], step: int) -> None:
        """Log all metrics of a step; called once per step, in ascending order."""

    def log_generations(self, samples: abc.Sequence[Generation], step: int) -> None:
        """Log sample completions; called before `log` of the same step."""


class TrainerLog(MetricLog, Protocol):
    """Receives all reports of a trainer."""

    def log_lengths(self, lengths: abc.Sequence[int], step: int) -> None:
        """Log the tokens of each response of a step's rollout; called before `log` of the same step."""

    def log_tokens(self, answers: abc.Sequence[abc.Mapping[str, Any]], step: int) -> None:
        """Log held-out completions with the teacher's and student's predictions at each token; called before `log`."""

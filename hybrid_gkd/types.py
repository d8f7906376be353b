"""Records that cross a boundary: between processes, or between the stages of a step.

Everything that is learned from is a `Sample` with `signals`; what it answers is a `Task`. Arrays are numpy's, so that
this module needs no torch and Ray copies nothing: int32 ids, float32 everything else.
Shapes: T tokens of a sample, R of them are trained on (not necessarily contiguous), K candidates per trained token.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of the data, already tokenized."""

    index: int
    """Position in the data set, all of its files together, from 0 on."""
    token_ids: np.ndarray
    """[P], chat template applied."""
    teacher_ids: np.ndarray | None = None
    """The same behind the teacher's chat template, where it has one of its own; None: `token_ids`."""
    response_ids: np.ndarray | None = None
    """int32 [A], the given answer; None where the student always writes one."""
    loss_mask: np.ndarray | None = None
    """bool [P + A], which tokens are trained on where the given answer is; None without one."""
    text: str
    """The user's message, for sample generations."""
    messages: list[dict[str, Any]] | None = None
    """The chat that `token_ids` are of, where there is a reward model, which may have a template of its own."""
    tools: list[dict[str, Any]] | None = None
    """The functions that the chat template describes to the model; None where the row has none."""
    answer: str | None = None
    """Ground truth for rule rewards; None where the data has none."""
    data_source: str | None = None
    """Name of the data set that the row is from (`data.reward_fn_key`); None where the data does not say."""
    file: str = ""
    """Short name of the file that the row is from: the data source in a validation's metrics where that is None."""
    weight: float = 1.0
    """The share of its file's rows that an epoch takes."""
    extra_info: dict[str, Any] | None = None
    """What else the row has for a reward function of the user's own; None where it has nothing or none asks."""

    @property
    def row(self) -> int:
        """As messages count: the first one is row 1."""
        return self.index + 1


class SampleId(NamedTuple):
    """Identity of a sample, unique in a run."""

    batch: int
    """Generation batch that it was drawn for, from 1 on; negative in a validation: -1 - the step that it follows."""
    row: int
    """`Task.index` of its task."""
    number: int
    """Which of the samples of its task in this batch, from 0 on."""

    @property
    def group(self) -> tuple[int, int]:
        """Shared by all samples of one task in one batch."""
        return self.batch, self.row

    def __str__(self) -> str:
        return f"row {self.row + 1}, sample {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The most likely tokens at each trained token of a sample, under a teacher or another policy.

    Row r is the distribution of the r-th trained token given everything before it.
    """

    ids: np.ndarray
    """[R, K], distinct within a row, most likely first."""
    logprobs: np.ndarray
    """[R, K], normalised over the whole vocabulary."""
    tail_logprobs: np.ndarray
    """[R], log of the mass on all other ids together; -inf where there is none."""
    sampled_logprobs: np.ndarray
    """[R], of the trained token itself."""

    def only(self, kept: np.ndarray) -> TopK:
        """Return the rows of `kept`, bool [R]."""
        return TopK(**{each.name: getattr(self, each.name)[kept] for each in fields(self)})


Arrays = list[np.ndarray]
"""One array for each sample."""
Signal = np.ndarray | TopK
"""One value per trained token, float32 [R], or the candidates of a policy."""
SIGNALS = {
    "teacher": "TopK of the teacher",
    "rewards": "[R] what each token has earned; the score of the whole sample is at its last trained token",
    "advantages": "[R] how much better each token was than expected",
    "old_logprobs": "[R] log-probabilities under the weights before the rollout's first mini-batch",
    "reference": "[R] log-probabilities under the reference policy",
    "reference_topk": "TopK of the reference policy, with actor.kl_loss_type=full",
    "values": "[R] the critic's expectation before each token, before the rollout's first mini-batch",
    "returns": "[R] what the critic is to learn in the place of the values",
    "weights": "[R] factors of every term of the loss; 0: not trained on",
    "weights/<term>": "[R] the same for one term, in the place of `weights`, where its samples are not all samples",
    "sampled_weights": "[R] further factors of terms of the sampled token: its part of the importance weight",
    "teacher_weights": "[R] further factors of the distillation term",
    "token_weights": "[R] weights of tokens in the distillation term, which is divided by their sum",
    "sft": "[R] factor of the cross-entropy of each token of a given answer",
}
"""Names of the signals that terms, critic and metrics read. A sample that lacks one has weight 0 where it is read."""
class TokenMean(float):
    """A metric of an optimizer step: a mean over so many trained tokens, of all workers."""

    tokens: float

    def __new__(cls, value: float, tokens: float) -> TokenMean:
        mean = super().__new__(cls, value)
        mean.tokens = tokens
        return mean

    def __reduce__(self) -> tuple[type, tuple[float, float]]:
        return TokenMean, (float(self), self.tokens)


STATUSES = ("stop", "length", "repetition", "paused", "given", "failed")
"""stop: end-of-sequence token; length: the limit of tokens; repetition: ended as it went round in circles; paused:
unfinished; given: not generated; failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory for a task: what the student has read and written, and what is known of the tokens it learns from.

    Example: prompt 5 6, completion 7 8 9, of which a tool wrote the 8:
        tokens [5 6 7 8 9], loss_mask [0 0 1 0 1], R = 2
    """

    id: SampleId
    tokens: np.ndarray
    """int32 [T], prompt first; the end-of-sequence token included where the engine produced one."""
    loss_mask: np.ndarray
    """bool [T], True on the R tokens that are trained on; never the first token, which nothing predicts."""
    versions: np.ndarray
    """int32 [R], optimizer steps behind the weights that wrote each trained token; -1: given."""
    status: str
    """One of STATUSES."""
    logprobs: np.ndarray | None = None
    """float32 [R], of the trained tokens under the policy that wrote them; None unless requested, or given."""
    signals: abc.Mapping[str, Signal] = field(default_factory=dict)
    """By a name of SIGNALS."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        """R."""
        return len(self.versions)

    @property
    def positions(self) -> np.ndarray:
        """int64 [R], of the trained tokens in `tokens`."""
        return np.flatnonzero(self.loss_mask)

    @property
    def trained_ids(self) -> np.ndarray:
        """int32 [R], the trained tokens."""
        return self.tokens[self.loss_mask]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one; T where none is trained on."""
        return int(self.loss_mask.argmax()) if self.num_trained else self.num_tokens

    @property
    def completion_ids(self) -> np.ndarray:
        """int32 [T - prompt_length], everything behind the prompt, trained on or not."""
        return self.tokens[self.prompt_length :]

    def array(self, name: str) -> np.ndarray:
        """A signal [R] that the sample has."""
        found = self.signals[name]
        assert isinstance(found, np.ndarray)
        return found

    def topk(self, name: str) -> TopK:
        """A signal of candidates that the sample has."""
        found = self.signals[name]
        assert isinstance(found, TopK)
        return found

    def with_signals(self, **signals: Signal) -> Sample:
        """Return a copy that also has these signals."""
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


def with_tasks(tasks: abc.Iterable[Task], samples: abc.Iterable[Sample]) -> list[Pair]:
    """Return each sample with its task."""
    by_row = {task.index: task for task in tasks}
    return [(by_row[sample.id.row], sample) for sample in samples]


def drawn(samples: abc.Iterable[Sample]) -> list[Sample]:
    """Return the samples that the student has written."""
    return [sample for sample in samples if sample.status != "given"]


def replaced(samples: abc.Iterable[Sample], changed: abc.Iterable[Sample]) -> list[Sample]:
    """Return the samples with what has changed in the place of those of the same identity."""
    by_id = {sample.id: sample for sample in changed}
    return [by_id.get(sample.id, sample) for sample in samples]


def generated(
    request: GenerationRequest, new_ids: np.ndarray, *, version: int, status: str, logprobs: np.ndarray | None = None
) -> Sample:
    """Return the sample of a request whose completion is `new_ids` int32 [R], written by one weight version."""
    tokens = np.concatenate([request.prompt_ids, new_ids]).astype(np.int32, copy=False)
    return Sample(
        id=request.id, tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(request.prompt_ids),
        versions=np.full(len(new_ids), version, np.int32), status=status, logprobs=logprobs,
    )


def given(task: Task, batch: int, coefficient: float) -> Sample:
    """Return the sample of a task's given answer; `coefficient`: of its cross-entropy, 0: it has none."""
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
    """What a scorer reads for a sample: its own view of prompt and completion, and where the trained tokens are."""

    token_ids: np.ndarray
    """int32 [L]."""
    positions: np.ndarray
    """int64 [R], ascending and at least 1: the tokens whose predictions are asked for."""
    name: str = ""
    """For messages, such as "row 12, sample 3"."""
    keep: bool = False
    """Whether its scores are worth keeping, because it is read again: a given answer."""

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of a response by the rollout engine."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    repetitions: int | None = None
    """A pattern of up to 32 tokens that comes so often in a row ends a response; None: it does not."""
    logprobs: bool = False
    """Return the log-probability of every sampled token (costs generation speed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to draw."""

    id: SampleId
    prompt_ids: np.ndarray
    """int32 [P]."""
    seed: int
    """Seed of this request alone, so that a response depends neither on its neighbours nor on the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardText:
    """A prompt with a response, as the reward model reads them."""

    index: int
    """Of the score among those that are asked for together."""
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All samples of one training batch."""

    step: int
    """The training step (1-based) that this rollout feeds."""
    epoch: int
    tasks: tuple[Task, ...]
    samples: tuple[Sample, ...]
    """Those of a task together, in the order of the tasks."""
    greedy: tuple[Sample, ...] = ()
    """The greedy completion of each task, in their order, where advantages are relative to it; else none."""
    extra_batches: int = 0
    """Generation batches that this rollout and those of the steps before took beyond one each."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of how it was generated, where groups are left out."""


Plan = list[tuple[tuple[Sample, ...], ...]]
"""For each worker its micro-batches, of which all get equally many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """A worker's share of an optimizer step. All get equally many micro-batches, some empty: each runs collectives."""

    micro_batches: tuple[tuple[Sample, ...], ...]
    num_tokens: int
    """Trained tokens of the mini-batch over ALL workers: the denominator of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sample answer of the student, for people to read."""

    prompt: str
    response: str
    answer: str | None = None
    reward: float | None = None
    data_source: str | None = None
    """The one of the row, or else its file."""
    sample: int = 0
    """Which of the answers to the prompt, from 0 on."""


GENERATION_COLUMNS = ("step", *(field.name for field in fields(Generation)))
"""Of a table of sample answers, in generations.jsonl and in trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts about a run that its trackers start with."""

    project_name: str
    experiment_name: str
    run_dir: Path
    config: abc.Mapping[str, Any]
    """Resolved, nested dictionaries."""
    total_steps: int
    start_step: int
    """Steps already done; 0 for a new run, the checkpoint's step for a resumed one."""
    resume: bool
    """Continue the files of the run in `run_dir`, without the rows after `start_step`."""
    device: str = "auto"
    """That the run trains on: cuda or cpu; auto: not known."""


class MetricLog(Protocol):
    """Takes the reports of a trainer."""

    def log(self, metrics: abc.Mapping[str, float], step: int) -> None:
        """Everything of a step, once, steps ascending."""

    def log_generations(self, samples: abc.Sequence[Generation], step: int) -> None:
        """Sample answers, before `log` of the same step."""


class TrainerLog(MetricLog, Protocol):
    """Takes all that a trainer reports."""

    def log_lengths(self, lengths: abc.Sequence[int], step: int) -> None:
        """Tokens of each response of a step's rollout, before `log` of the same step."""

    def log_tokens(self, answers: abc.Sequence[abc.Mapping[str, Any]], step: int) -> None:
        """Held-out answers with what teacher and student would have said at each token, before `log`."""

"""Records that cross a boundary: between processes, or between the stages of a step.

Arrays are numpy's, so that this module needs no torch and Ray copies nothing: int32 ids, float32 everything else.
Shapes: `prompt_ids` [P] prompt tokens, `response_ids` and all that is per response token [R], of K teacher candidates.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the prompt data, already tokenized."""

    index: int
    """Position in the data set, all of its files together, from 0 on."""
    token_ids: np.ndarray
    """[P], chat template applied."""
    teacher_ids: np.ndarray | None = None
    """The same behind the teacher's chat template, where it has one of its own; None: `token_ids`."""
    text: str
    """The user's message, for sample generations."""
    messages: list[dict[str, Any]] | None = None
    """The chat that `token_ids` are of, where there is a reward model, which may have a template of its own."""
    answer: str | None = None
    """Ground truth for rule rewards; None where the data has none."""
    data_source: str | None = None
    """Name of the data set that the row is from (`data.reward_fn_key`); None where the data does not say."""
    file: str = ""
    """Short name of the file that the row is from: the data source in a validation's metrics where that is None."""
    extra_info: dict[str, Any] | None = None
    """What else the row has for a reward function of the user's own; None where it has nothing or none asks."""

    @property
    def row(self) -> int:
        """As messages count: the first one is row 1."""
        return self.index + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of a response by the rollout engine."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    logprobs: bool = False
    """Return the log-probability of every sampled token (costs generation speed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to draw."""

    index: int
    """Position of the sequence in its rollout: prompt i, sample j of n is i * n + j."""
    prompt_ids: np.ndarray
    seed: int
    """Seed of this request alone, so that a response depends neither on its neighbours nor on the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One prompt with one response."""

    index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    """The end-of-sequence token included where the engine produced one."""
    weight_version: int
    """Number of optimizer steps behind the weights that produced the response."""
    finish_reason: str
    """"stop" (end of sequence) or "length" (max_response_length)."""
    logprobs: np.ndarray | None = None
    """Of the sampled tokens in the rollout engine; None if not asked for."""
    teacher_prompt_ids: np.ndarray | None = None
    """What the teacher sees before the response; None: `prompt_ids`."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardText:
    """A prompt with a response, as the reward model reads them."""

    index: int
    """Of the score among those that are asked for together."""
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTopK:
    """The teacher's scores of one response; row r is its distribution of response token r given everything before."""

    ids: np.ndarray
    """[R, K], distinct within a row, most likely first."""
    logprobs: np.ndarray
    """[R, K], normalised over the whole vocabulary."""
    tail_logprobs: np.ndarray
    """[R], log of the mass on all other ids together; -inf where there is none."""
    sampled_logprobs: np.ndarray
    """Of the response token itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """A sequence with its learning signal: teacher scores (GKD), advantages (PPO) or both."""

    sequence: Sequence
    teacher: TeacherTopK | None = None
    teacher_weight: float = 1.0
    """Factor of the distillation term, beside the configured one."""
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    """Under the weights before this rollout's first mini-batch, for a policy loss; None where that is the only one."""
    ref_logprobs: np.ndarray | None = None
    """Of the response tokens under the reference policy; None without one."""
    ref_topk: TeacherTopK | None = None
    """The reference policy's scores, with actor.kl_loss_type=full."""
    loss_weights: np.ndarray | None = None
    """Factors of the tokens' losses: importance weights and `loss_agg_mode`; None is 1, and 0 is not trained on."""
    sampled_weights: np.ndarray | None = None
    """Further factors of what is of the sampled token itself, a policy loss say: its share in the importance weight."""
    values: np.ndarray | None = None
    """Of the critic before this rollout's first mini-batch: what it expects before each token. None without one."""
    returns: np.ndarray | None = None
    """What the critic is to learn in the place of `values`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All sequences of one training batch, in the order of their index."""

    step: int
    """The training step (1-based) that this rollout feeds."""
    epoch: int
    prompts: tuple[Prompt, ...]
    sequences: tuple[Sequence, ...]
    """n of each prompt; sequence i belongs to prompt i // n."""
    greedy: tuple[Sequence, ...] = ()
    """The greedy answer to each prompt, where advantages are relative to it; else none."""
    extra_batches: int = 0
    """Generation batches that this rollout and those of the steps before took beyond one each."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of how it was generated, where groups are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """A worker's share of an optimizer step. All get equally many micro-batches, some empty: each runs collectives."""

    micro_batches: tuple[tuple[TrainSequence, ...], ...]
    num_tokens: int
    """Response tokens of the mini-batch over ALL workers: the denominator of the loss."""



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

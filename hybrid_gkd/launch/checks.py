"""Preflight checks: the type of a check, the facts that checks share, and the report that prints results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hybrid_gkd.config import Config
from hybrid_gkd.data.prompts import Chat, Rows
from hybrid_gkd.errors import HybridGKDError, flatten_errors
from hybrid_gkd.launch.plan import RunPlan
from hybrid_gkd.launch.resume import Resumption
from hybrid_gkd.models.spec import ModelSpec
from hybrid_gkd.offload.budget import TeacherPlacement
from hybrid_gkd.offload.needs import TrainedSpec
from hybrid_gkd.reporting.logs import describe_unexpected
from hybrid_gkd.runtime.waiting import waiting
from hybrid_gkd.scoring.reward_functions import RewardFunction
from hybrid_gkd.scoring.reward_model_scorer import RewardTexts
from hybrid_gkd.types import Task


@dataclass
class Facts:
    """The configuration and the results of the checks."""

    config: Config
    set_keys: Collection[str] = ()
    """Keys that the user set, see `set_keys` of command_line.py."""
    engine: str = "none"
    """Rollout engine, with `auto` resolved."""
    device: str = "cpu"
    """`trainer.device` with auto resolved: cuda or cpu."""
    gpus: int = 0
    """Number of GPUs of this machine that are visible to this process."""
    gpu_bytes: int | None = None
    """Memory of the first GPU; None without one, or if the workers use none."""
    local_teachers: dict[str, TeacherPlacement] = field(default_factory=dict)
    """Label -> placement of each teacher that the run starts."""
    tokenizer: Any = None
    teacher_tokenizers: dict[str, Any] = field(default_factory=dict)
    """Label -> tokenizer of each teacher that the run starts."""
    other_tokenizers: dict[str, Any] = field(default_factory=dict)
    """Key -> tokenizer of each teacher that has another one than the student (distillation.cross_tokenizer)."""
    first_chat: Chat | None = None
    """First training prompt."""
    stop_token_ids: list[int] = field(default_factory=list)
    spec: ModelSpec = None  # type: ignore[assignment]
    """Spec of the student, from the check of the student."""
    num_ids: int = 0
    """Number of ids that are tokens and have an embedding row in every model; higher ids are neither drawn nor scored.
    0 before the check of the student."""
    trained: tuple[TrainedSpec, ...] = ()
    """Trained models: the student and, with PPO, the critic."""
    reward: dict[str, RewardFunction] | None = None
    """Reward functions by name, without the reward model; None without a reward."""
    reward_texts: RewardTexts | None = None
    """Inputs of the reward model; None without one."""
    train_rows: list[Rows] = field(default_factory=list)
    val_rows: list[Rows] = field(default_factory=list)
    train_prompts: list[Task] = field(default_factory=list)
    val_prompts: list[Task] = field(default_factory=list)
    steps: int | None = None
    """Training steps of the whole run."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the learning signal: `learning_settings`, and checksums of training prompts and templates."""
    resumption: Resumption | None = None
    """Checkpoint to resume from; None for a new run."""
    plan: RunPlan = None  # type: ignore[assignment]
    """Plan made from the other facts, by the last check."""

    @property
    def prompts(self) -> Iterator[Task]:
        """Yield the prompts of training and validation."""
        return itertools.chain(self.train_prompts, self.val_prompts)

    @property
    def steps_done(self) -> int:
        """Return the step of the checkpoint to resume from, 0 for a new run."""
        return 0 if self.resumption is None else self.resumption.state.step

    @property
    def finished(self) -> bool:
        """Return whether all training steps are done and no validation is requested."""
        return self.steps is not None and self.steps_done >= self.steps and not self.config.trainer.val_only


@dataclass(frozen=True)
class Check:
    """A check and the checks that must pass before it."""

    name: str
    function: Callable[[Facts], str]
    """Returns a description of the result. Raises HybridGKDError."""
    after: tuple[str, ...] = ()


class Report:
    """Runs checks and prints a line for each: ok, FAIL, or skip if a required check has failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        """Names of the checks that failed or were skipped."""

    def run_all(self, checks: Iterable[Check], facts: Facts) -> None:
        """Run all checks."""
        for check in checks:
            missing = [name for name in check.after if name in self.failed]
            if missing:
                self._print("skip", check.name, f"needs the check {missing[0]}")
                continue
            try:
                with waiting(f"the check of {check.name}"):
                    self._print("ok", check.name, check.function(facts))
            except HybridGKDError as error:
                self._print("FAIL", check.name, "\n".join(map(str, flatten_errors([error]))))
            except Exception as error:  # an unexpected error must not hide the results of the other checks
                self._print("FAIL", check.name, describe_unexpected(error))

    def _print(self, status: str, name: str, text: str) -> None:
        if status != "ok":
            self.failed.append(name)
        lines = ["", *text.splitlines()] if "\n" in text else [text]
        print(f"{status:4} {name}:", "\n       ".join(lines), flush=True)

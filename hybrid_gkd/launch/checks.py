"""What a check before a run is, what checks find out for each other, and the report of those that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hybrid_gkd.config import Config
from hybrid_gkd.data.prompts import Chat, Rows
from hybrid_gkd.errors import HybridGKDError, flatten_errors
from hybrid_gkd.launch.plan import RunPlan
from hybrid_gkd.launch.resume import Resumption
from hybrid_gkd.models.spec import ModelSpec
from hybrid_gkd.offload.budget import LocalTeacher
from hybrid_gkd.offload.needs import TrainedModel
from hybrid_gkd.runtime.waiting import waiting
from hybrid_gkd.scoring.reward_functions import RewardFunction
from hybrid_gkd.scoring.reward_model import RewardTexts
from hybrid_gkd.types import Task


@dataclass
class Facts:
    """The configuration, and what the checks have found out."""

    config: Config
    engine: str = "none"
    """Rollout engine, `auto` resolved."""
    device: str = "cpu"
    """`trainer.device` with auto resolved: cuda or cpu."""
    gpus: int = 0
    """Of this machine, as this process sees them."""
    gpu_bytes: int | None = None
    """Memory of the first one; None without one, or where the workers use none."""
    local_teacher: LocalTeacher | None = None
    """Where the teacher computes that the run starts."""
    tokenizer: Any = None
    teacher_tokenizer: Any = None
    """Of the model that the run starts a teacher with."""
    first_chat: Chat | None = None
    """Of the training prompts."""
    stop_token_ids: list[int] = field(default_factory=list)
    spec: ModelSpec | None = None
    """Of the student."""
    num_ids: int | None = None
    """Ids that are tokens and have a row in every model, from 0 on: what is drawn and scored."""
    trained: tuple[TrainedModel, ...] = ()
    """The student and the critic."""
    reward: dict[str, RewardFunction] | None = None
    """By name, without the reward model; None: there is no reward."""
    reward_texts: RewardTexts | None = None
    """For the reward model; None without one."""
    train_rows: list[Rows] = field(default_factory=list)
    val_rows: list[Rows] = field(default_factory=list)
    train_prompts: list[Task] = field(default_factory=list)
    val_prompts: list[Task] = field(default_factory=list)
    steps: int | None = None
    """Training steps of the whole run."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that decide what is learned: `learning_settings`, and checksums of training prompts and templates."""
    resumption: Resumption | None = None
    """Checkpoint to continue from; None for a new run."""
    plan: RunPlan | None = None
    """What comes of all that."""

    @property
    def steps_done(self) -> int:
        """Those of the checkpoint to continue from."""
        return 0 if self.resumption is None else self.resumption.state.step

    @property
    def finished(self) -> bool:
        """Whether all steps of the run are done, and nothing else is asked for."""
        return self.steps is not None and self.steps_done >= self.steps and not self.config.trainer.val_only


@dataclass(frozen=True)
class Check:
    """One row: what is checked, and which checks have to pass before."""

    name: str
    function: Callable[[Facts], str]
    """Returns what it looked at and found. Raises HybridGKDError."""
    after: tuple[str, ...] = ()


class Report:
    """Walks checks to their end and prints a line for each: ok, FAIL, or skip where one before it has failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        """Names of the checks that failed or were skipped."""

    def walk(self, checks: Iterable[Check], facts: Facts) -> None:
        """Run the checks."""
        for check in checks:
            missing = [name for name in check.after if name in self.failed]
            if missing:
                self._say("skip", check.name, f"needs the check {missing[0]}")
                continue
            try:
                with waiting(f"the check of {check.name}"):
                    self._say("ok", check.name, check.function(facts))
            except HybridGKDError as error:
                self._say("FAIL", check.name, "\n".join(map(str, flatten_errors([error]))))
            except Exception as error:  # whatever a library raises, the other checks are of use
                self._say("FAIL", check.name, f"{type(error).__name__}: {error}")

    def _say(self, status: str, name: str, text: str) -> None:
        if status != "ok":
            self.failed.append(name)
        print(f"{status:4} {name}: {indented(text)}", flush=True)


def indented(text: str) -> str:
    """Text of several lines below the name of its check."""
    return text if "\n" not in text else "\n       ".join(["", *text.splitlines()])

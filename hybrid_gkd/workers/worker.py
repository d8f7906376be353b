"""One worker of a pool: an actor and a rollout engine that alternate on one device, or one of the two.

`workers/pool.py` makes a Ray actor of the class. Heavy imports happen in its methods, in the worker's process, after
the environment variables of torch and vLLM have been set.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hybrid_gkd.compat.ray import is_cancelled
from hybrid_gkd.config import Config
from hybrid_gkd.errors import HybridGKDError, WorkerError, describe_error
from hybrid_gkd.offload.budget import ENGINE_WORKSPACE_BYTES, TEACHER_WORKSPACE_BYTES, EngineMemory
from hybrid_gkd.rollout.engine import generate_samples
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.runtime.imports import freeze_gc, gc_paused
from hybrid_gkd.runtime.spans import SUFFIX, Clock, SpanFile, spanned
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.types import GenerationRequest, MiniBatch, RewardText, Sample, SampleId, SamplingParams, TopK
from hybrid_gkd.workers.placement import Placement, Role
from hybrid_gkd.workers.process_group import GroupMember
from hybrid_gkd.workers.profiling import StepProfiler

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid_gkd.rollout.weight_sync import WeightSync
    from hybrid_gkd.rollout.weights import Layout
    from hybrid_gkd.student.trained_model import TrainedModel
    from hybrid_gkd.workers.updater import Updater

logger = logging.getLogger(__name__)

C = TypeVar("C")
DESCRIPTIONS = {
    "begin": "the start of the worker processes", "begin_step": "the start of a step",
    "placement": "the query of the workers' places", "address": "the choice of a port",
    "all_reduce": "the all-reduce test", "initialize": "the loading of the models",
    "weight_layout": "the connection of the pools", "join_weight_sync": "the connection of the pools",
    "publish": "the weight sync", "send_weights": "the weight sync", "receive_weights": "the weight sync",
    "load_checkpoint": "the reading of the checkpoint", "save_checkpoint": "the writing of the checkpoint",
    "take_snapshot": "the copying of the checkpoint to the host", "write_snapshot": "the writing of the checkpoint",
    "snapshot_written": "the writing of the checkpoint", "finish_snapshot": "the writing of the checkpoint",
    "device_metrics": "the query of the workers' metrics", "write_profiles": "the writing of torch's profile",
    "generate": "the generation", "accumulate": "the update", "update": "the update",
    "update_critic": "the critic's update", "compute_values": "the computation of the critic's values",
    "compute_logprobs": "the computation of log-probabilities",
    "compute_topk": "the computation of the student's most likely tokens",
    "compute_divergences": "the computation of divergences",
    "compute_reward_scores": "the reward model's scoring",
    "compute_ref_logprobs": "the computation of the reference policy's log-probabilities",
    "compute_ref_topk": "the computation of the reference policy's most likely tokens",
    "compute_own_topk": "the scoring by the student's own weights",
    "synchronize": "the end of earlier work", "settle": "the end of unfinished work",
}  # fmt: skip
"""Description of each method of `Worker`, for messages: "waiting for ...", "died during ..."."""


def failures_logged(cls: type[C]) -> type[C]:
    """Log exceptions of public methods with their traceback in this process's log file.

    Exceptions of libraries become WorkerErrors here, since their classes may not survive pickling to the driver.
    """

    @contextlib.contextmanager
    def logged(worker: Any, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            worker.has_failed = True
            logger.exception("%s failed", name)
            if isinstance(error, HybridGKDError):
                raise
            what = f"{worker.role} {worker.rank} failed during {DESCRIPTIONS[name]}"
            raise WorkerError(f"{what}: {describe_error(error)}") from error

    def wrapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with logged(self, name):
                return method(self, *args, **kwargs)

        @functools.wraps(method)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            with logged(self, name):
                yield from method(self, *args, **kwargs)

        return generate if inspect.isgeneratorfunction(method) else call

    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, wrapped(name, method))
    return cls


@failures_logged
class Worker(GroupMember):
    """One process of a pool.

    Relative paths of the configuration begin at `folder`, the driver's working directory, if it exists on this machine.
    Methods for the engine or the actor may be called only if the role has it.
    """

    def __init__(self, config: Config, *, role: Role, rank: int, size: int, device: str, folder: str):
        super().__init__(config, role=role, rank=rank, size=size, device_type=device)
        self.folder = folder
        self.step: int | None = None
        self._published: int | None = None
        """Version of the engine's last weights."""
        self.updaters: dict[str, Updater] = {}
        """Updaters of trained models by span name."""
        self.weight_sync: WeightSync | None = None
        self.has_failed = False
        """Whether a call has raised."""

    def begin(self, log_file: Path) -> None:
        """Begin the run: redirect output to `log_file` and write spans to a file beside it."""
        redirect_output(log_file)
        try:
            os.chdir(self.folder)  # workers of a given cluster start in its folder
        except OSError as error:
            logger.warning("relative paths of the configuration begin at %s: %s", os.getcwd(), error)
        name, spans = f"{self.role} {self.rank}", SpanFile(log_file.with_suffix(SUFFIX))
        self.clock = Clock(name, spans, step=lambda: self.step, sample=self._memory_in_use)
        self.profiler = StepProfiler(self.config.trainer.profile_steps, self.config.run_dir, name)

    def placement(self) -> Placement:
        return Placement.here(self.role, self.rank, self.device_type)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.device_type == "cuda":
            import torch

            torch.cuda.synchronize()

    def settle(self) -> bool:
        """Drop the unfinished work of a failed run; return whether another group of workers can use this one."""
        self.synchronize()
        if self.role != "actor worker" and self.engine.has_unfinished:  # cancelled, also by Ray between two samples
            self.engine.pause()
        for updater in self.updaters.values():
            updater.discard()
        return not self.has_failed

    def begin_step(self, step: int | None) -> None:
        """Attribute the following calls to a training step."""
        self.step = step
        self.profiler.begin(step)

    def write_profiles(self) -> list[str]:
        """End the profile; return its files, see `StepProfiler.take_outcomes`."""
        return self.profiler.take_outcomes()

    @spanned("initialize")
    def initialize(
        self, address: tuple[str, int], *, num_updates: Mapping[str, int], stop_token_ids: list[int],
        num_ids: int | None, saves_in_background: bool, engine_memory: EngineMemory | None,
    ) -> dict[str, str]:
        """Join the process group, build the engine and the models; return descriptions of them.

        Args:
            address: of the rendezvous.
            num_updates: optimizer steps of the whole run by trained model.
            num_ids: number of ids that are tokens, see `LogprobModel`.
            saves_in_background: whether `take_snapshot` will be called.
            engine_memory: see `make_engine`.

        Raises WorkerError: the other workers could not be reached.
        """
        arr = self.config.actor_rollout_ref
        with gc_paused():
            self.join(address, Timeout(arr.load_timeout, "actor_rollout_ref.load_timeout"))
            import torch

            from hybrid_gkd.rollout.engine import make_engine
            from hybrid_gkd.workers.device import SharedDevice
        if self.size > 1:
            self.all_reduce(address, Timeout(arr.nccl_timeout, "actor_rollout_ref.nccl_timeout"))
        self.device = torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")
        self.shared = SharedDevice(self.device_type)
        name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
        description = {"device": name, "torch": version("torch"), "host": socket.gethostname()}
        engine = None
        if self.role != "actor worker":
            ids: dict[str, Any] = {"stop_token_ids": stop_token_ids, "num_ids": num_ids}
            make = functools.partial(make_engine, self.config, device=self.device, room=engine_memory, **ids)
            engine = self.engine = self.shared.build_engine(make)
            description["engine"] = engine.description
            description["engine_dtype"] = str(engine.dtype).removeprefix("torch.")
        if self.role != "rollout worker":
            self._build_models(num_updates, num_ids)
            description["hidden_size"] = str(self.actor.hidden_size)
        self.residency = self.shared.manage(engine)
        if self.role != "rollout worker":
            self._build_updaters(saves_in_background)
            self.updater.forward(lambda: self.actor.check_packing(self.config.max_packed_length))
        freeze_gc()
        return description

    def _build_models(self, num_updates: Mapping[str, int], num_ids: int | None) -> None:
        """Build all models, the actor last, since it is used first; the others are moved off the device if possible."""
        from hybrid_gkd.student.actor import Actor
        from hybrid_gkd.student.critic import Critic
        from hybrid_gkd.student.reference import Reference
        from hybrid_gkd.student.reward_model import RewardModel

        if self.config.uses_critic:
            self.critic = Critic(self.config, device=self.device, num_updates=num_updates["critic"])
            self.shared.add_model("critic", self.critic)
        if self.config.has_reference_model:
            reference = Reference(self.config, device=self.device, num_ids=num_ids)
            self.shared.add_model("reference", reference)
        if self.config.uses_reward_model:
            self.reward_model = RewardModel(self.config, device=self.device)
            self.shared.add_model("reward_model", self.reward_model)
        self.actor = Actor(self.config, device=self.device, num_updates=num_updates["actor"], num_ids=num_ids)
        self.shared.add_model("actor", self.actor)
        self.reference = reference if self.config.has_reference_model else self.actor  # its base model, with LoRA

    def _build_updaters(self, saves_in_background: bool) -> None:
        from hybrid_gkd.workers.saver import Saver
        from hybrid_gkd.workers.updater import PHASES, Updater

        def updater(model: Any, name: str) -> Updater:
            who, alone = f"{self.role} {self.rank}", self.size == 1
            return Updater(model, self.residency, self.shared.meter, worker=who, alone=alone, phases=PHASES[name])

        trained: dict[str, TrainedModel] = {}
        self.updater = self.updaters["update_actor"] = updater(self.actor, "actor")
        self.own_teacher = updater(self.actor, "ema_teacher") if self.config.has_moving_average else self.updater
        self.reference_updater = self.updater
        if self.config.uses_critic:
            trained["critic"] = self.critic
            self.critic_updater = self.updaters["update_critic"] = updater(self.critic, "critic")
        if self.config.has_reference_model:
            self.reference_updater = updater(self.reference, "reference")
        if self.config.uses_reward_model:
            self.reward_updater = updater(self.reward_model, "reward_model")
        trained["actor"] = self.actor
        on_gpu = self.device_type == "cuda"
        self.saver = Saver(self.config, trained, self.residency, on_gpu=on_gpu, behind=saves_in_background)

    def weight_layout(self) -> Layout:
        return self.actor.layout()

    def join_weight_sync(self, address: tuple[str, int], *, rank: int, size: int, layout: Layout, dtype: str) -> None:
        """Join the process group for weight transfers between pools, and leave an earlier one. Raises WorkerError."""
        import torch

        from hybrid_gkd.rollout.weight_sync import WeightSync

        if self.weight_sync is not None:
            self.weight_sync.close()
        arr = self.config.actor_rollout_ref
        self.weight_sync = WeightSync(
            address, rank=rank, size=size, layout=layout, dtype=getattr(torch, dtype), device=self.device,
            bucket_bytes=arr.rollout.update_weights_bucket_megabytes * 2**20, timeout=arr.nccl_timeout,
        )

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[Sample]]:
        """Yield lists of samples as they finish, with the last published weights; empty lists show progress.

        An engine that has released its weights since then gets them again first. With tensor parallelism all ranks of a
        replica run the same requests and the first one yields the samples. Memory for the next phase is copied to the
        device in the background as far as the workspace of engine and teacher stays free, else at the end. A cancelled
        call ends after the engine's present step.
        """
        first_of_replica = self.rank % self.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 0
        with self.clock.span("gen"):
            if self.engine.weight_version is None and self._published is not None:
                self._fill_engine(self._published)
            self.residency.enter("rollout")
            self.residency.prepare(self._phase_after_rollout, reserve=ENGINE_WORKSPACE_BYTES + TEACHER_WORKSPACE_BYTES)
            with self.shared.generation():
                for finished in generate_samples(self.engine, requests, sampling, is_cancelled):
                    yield finished if first_of_replica else []
            self.residency.prepare(self._phase_after_rollout)

    @property
    def _phase_after_rollout(self) -> str:
        if self.config.uses_reward_model and self.config.scores_rollouts:
            return "reward_model"
        if self.config.uses_critic:
            return "critic_update"
        return "ema_teacher" if self.config.has_moving_average else "update"

    @spanned("update_actor")
    def accumulate(self, part: MiniBatch) -> None:
        self.updater.accumulate(part)

    @spanned("update_actor")
    def update(self, batches: list[MiniBatch], *, last: bool = True) -> list[dict[str, float]]:
        return self.updater.update(batches, last=last)

    @spanned("update_actor")
    def compute_logprobs(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        return self.updater.forward(lambda: self.actor.compute_logprobs(micro_batches))

    @spanned("update_actor")
    def compute_topk(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, TopK]:
        return self.updater.forward(lambda: self.actor.compute_topk(micro_batches))

    @spanned("ref")
    def compute_ref_logprobs(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        return self.reference_updater.forward(lambda: self.reference.compute_ref_logprobs(micro_batches))

    @spanned("ref")
    def compute_ref_topk(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, TopK]:
        return self.reference_updater.forward(lambda: self.reference.compute_ref_topk(micro_batches))

    @spanned("own_teacher")
    def compute_own_topk(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, TopK]:
        if self.config.actor_rollout_ref.teacher.source == "initial" and self.config.has_reference_model:
            return self.reference_updater.forward(lambda: self.reference.compute_ref_topk(micro_batches))
        return self.own_teacher.forward(lambda: self.actor.compute_topk(micro_batches))

    @spanned("reward_model")
    def compute_reward_scores(self, micro_batches: tuple[tuple[RewardText, ...], ...]) -> dict[int, float]:
        return self.reward_updater.forward(lambda: self.reward_model.compute_scores(micro_batches))

    @spanned("values")
    def compute_values(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        return self.critic_updater.forward(lambda: self.critic.compute_values(micro_batches))

    @spanned("update_critic")
    def update_critic(self, batches: list[MiniBatch]) -> list[dict[str, float]]:
        return self.critic_updater.update(batches)

    @spanned("testing")
    def compute_divergences(self, micro_batches: tuple[tuple[Sample, ...], ...]) -> dict[SampleId, np.ndarray]:
        return self.updater.forward(lambda: self.actor.compute_divergences(micro_batches))

    @spanned("sync_rollout_weights")
    def publish(self, weight_version: int) -> dict[str, float]:
        """Copy the actor's weights into the engine and make it ready to generate.

        Returns seconds: `publish`, `offload` (all moves of the residency since the last publish), and each move.

        Raises WorkerError: with `rollout.verify_weights`, the engine's weights differ from the actor's.
        """
        self._published = weight_version
        seconds = self._fill_engine(weight_version)
        moves = self.residency.take_seconds()
        if self.residency.has_movable_owners:
            moves["trim"] = self.shared.trim_after_publish()
        return {"publish": seconds, "offload": sum(moves.values())} | moves

    def _fill_engine(self, weight_version: int) -> float:
        """Make the engine ready to generate with the actor's weights; return the seconds of `_load_engine`."""
        # vLLM frees its weights only together with its cache. Other memory owners are released by the end.
        self.residency.enter("update", finish=False)
        self.residency.enter("publish", finish=False)
        seconds = self._load_engine(lambda: self.actor.full_tensors(self.engine.dtype), weight_version)
        self.residency.enter("rollout")
        return seconds

    @spanned("sync_rollout_weights")
    def send_weights(self, dtype: str) -> dict[str, float]:
        """Send the actor's weights to the rollout pool: gathered on all ranks, sent by the first.

        Returns seconds as `publish` does. Raises WorkerError if they were not received within the timeout.
        """
        import torch

        self.residency.enter("publish")
        rounds = 2 if self.config.actor_rollout_ref.rollout.verify_weights else 1
        weights = itertools.chain.from_iterable(self.actor.full_tensors(getattr(torch, dtype)) for _ in range(rounds))
        try:
            if self.rank == 0:
                assert self.weight_sync is not None
                for _ in range(rounds):
                    self.weight_sync.send(weights)
        finally:
            for _ in weights:  # all ranks must gather all, also if sending fails: the student is saved then
                pass
        return {"offload": sum(self.residency.take_seconds().values())}

    @spanned("sync_rollout_weights")
    def receive_weights(self, weight_version: int) -> dict[str, float]:
        """Load weights that the training pool sends into the engine.

        Returns seconds as `publish` does. Raises WorkerError as it does, or if the weights did not arrive in time.
        """
        assert self.weight_sync is not None
        return {"publish": self._load_engine(self.weight_sync.receive, weight_version)}

    def _load_engine(self, weights: Callable[[], Iterator[tuple[str, Tensor]]], weight_version: int) -> float:
        """Load full tensors into the engine, and verify them if configured; return the seconds of the loading."""
        started = time.perf_counter()
        self.engine.load_weights(weights(), weight_version)
        seconds = time.perf_counter() - started
        if self.config.actor_rollout_ref.rollout.verify_weights:
            self.engine.verify_weights(weights())
        return seconds

    def save_checkpoint(self, folder: Path, *, tokenizer_path: str) -> dict[str, FileSum]:
        """Write this rank's part of a checkpoint into `folder`; return checksums of its files by path."""
        return self.saver.save(folder, tokenizer_path)

    def take_snapshot(self, *, tokenizer_path: str | None) -> None:
        """Copy the present state to the host, for `write_snapshot`."""
        self.saver.take_snapshot(tokenizer_path)

    def write_snapshot(self, folder: Path) -> None:
        """Start writing the snapshot in the background; `finish_snapshot` waits for the end."""
        self.saver.write_snapshot(folder)

    def snapshot_written(self) -> bool:
        return self.saver.snapshot_written()

    def finish_snapshot(self) -> tuple[dict[str, FileSum], float]:
        return self.saver.finish_snapshot()

    def load_checkpoint(self, folder: Path) -> None:
        """Restore models, optimizers and schedules. Call `publish` next."""
        self.saver.load(folder)

    def device_metrics(self) -> dict[str, float]:
        """Return memory, and seconds of updates since the last call, by metric name."""
        found = self.shared.metrics(self.residency)
        for name, updater in self.updaters.items():
            found |= {f"timing/{name}/{part}": seconds for part, seconds in updater.take_seconds().items()}
        return found

    def _memory_in_use(self) -> dict[str, float]:
        """Return memory of this process on the host, and of the whole GPU, by curve name."""
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        found = {"host memory, GiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**30}
        if self.device_type == "cuda":
            import torch

            free, total = torch.cuda.mem_get_info(0)
            found["GPU memory, GiB"] = (total - free) / 2**30
        return found


def redirect_output(log_file: Path) -> None:
    """Redirect this process's output, including that of C++ libraries, to a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "ab", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)

"""The pool of workers as one typed object: Ray placement, remote calls, deadlines.

Each method calls the method of the same name on every worker and waits, never longer than
`actor_rollout_ref.nccl_timeout` without news. The first worker that fails ends the wait at once: its peers
may sit in a collective that can no longer complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybrid_gkd.clock import Span, Spans
from hybrid_gkd.config import Config
from hybrid_gkd.data.packing import attention_cost
from hybrid_gkd.errors import HybridGKDError, WorkerError
from hybrid_gkd.types import GenerationRequest, MiniBatch, SamplingParams, Sequence, TrainSequence
from hybrid_gkd.workers.worker import Placement, Worker

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 30
"""How long the cluster may take to find room for the workers."""
CLOSE_SECONDS = 5.0
"""How long the cluster may take to stop the workers."""
CAUSE_SECONDS = 3.0
"""After a failure, how long its peers are listened to: one that died, or says nothing, may be its cause."""
SPANS_SECONDS = 2.0
"""How long a report waits for spans that the workers were asked for when they had nothing else to do."""


class WorkerDiedError(WorkerError):
    """The process of a worker has ended."""


class WorkerGroup:
    """`config.world_size` workers, one GPU each.

    With `load=False` they are placed as in a run, and load nothing: for the doctor. `on_placed` is called with where
    they are before they load.

    Raises:
        WorkerError: the cluster does not have the resources, or a worker could not start.
    """

    def __init__(
        self, config: Config, *, device: str, num_updates: int = 0, stop_token_ids: list[int] | None = None,
        load: bool = True, on_placed: Callable[[list[Placement]], None] = lambda placements: None,
        log_folder: Path | None = None,
    ):  # fmt: skip
        self.config = config
        self.size = config.world_size
        self.timeout = config.actor_rollout_ref.nccl_timeout
        folder = log_folder or config.run_dir / "logs"
        self.log_files = [folder / f"worker_{rank}.log" for rank in range(self.size)]
        self._placement: Any = None
        self._workers: list[Any] = []
        self._spans: dict[Any, int] = {}
        """Calls that will bring spans -> rank."""
        self._spans_until = [-math.inf] * self.size
        self.placements: list[Placement] = []
        """By rank; memory as it was free before anything was loaded."""
        try:
            self._place(device)
            self.placements = self._call("placement")
            self._clock_shifts = [place.clock_shift() for place in self.placements]
            refuse_shared_gpus(self.placements)
            on_placed(self.placements)
            if not load:
                return
            self.description: list[dict[str, str]] = self._call(
                "initialize", self._rendezvous(), num_updates=num_updates, stop_token_ids=stop_token_ids or []
            )
            self.attention_cost = attention_cost(int(self.description[0]["hidden_size"]))
        except BaseException:
            self.close()
            raise

    def _place(self, device: str) -> None:
        bundle: dict[str, float] = {"CPU": 1.0}
        if device == "cuda":
            bundle["GPU"] = 1.0
        there = ray.cluster_resources()
        lacking = [name for name, amount in bundle.items() if there.get(name, 0.0) < amount * self.size]
        if lacking:
            raise WorkerError(
                f"trainer.n_gpus_per_node, trainer.nnodes: {self.size} workers need {bundle} each; "
                f"the Ray cluster has {', '.join(f'{name} {there.get(name, 0.0):g}' for name in lacking)}"
            )
        self._placement = placement_group([bundle] * self.size, strategy="PACK")
        if not self._placement.wait(timeout_seconds=PLACEMENT_SECONDS):
            raise WorkerError(
                f"trainer.n_gpus_per_node, trainer.nnodes: {self.size} workers need {bundle} each; the Ray cluster "
                f"had no room for them within {PLACEMENT_SECONDS} s, free are {ray.available_resources()}"
            )
        for rank in range(self.size):
            options = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, rank),
            }
            remote = ray.remote(Worker).options(**options)
            worker = remote.remote(self.config, rank=rank, device=device, log_file=str(self.log_files[rank]))
            self._workers.append(worker)

    def _rendezvous(self, timeout: float | None = None) -> tuple[str, int]:
        address: tuple[str, int] = self._wait("address", [self._workers[0].address.remote()], timeout)[0]
        return address

    def all_reduce(self, timeout: float) -> None:
        """Check that the workers reach each other. Raises WorkerError that names who did not answer.

        Args:
            timeout: seconds for the collective; a worker that says nothing for twice as long is taken for hung.
        """
        address = self._rendezvous(timeout)
        refs = [worker.all_reduce.remote(address, timeout=timeout) for worker in self._workers]
        # Those that run say that they waited in vain. Who then is silent is what they waited for.
        ready, silent = ray.wait(refs, num_returns=len(refs), timeout=2 * timeout)
        if silent:
            raise self._timeout_error("all_reduce", [refs.index(ref) for ref in silent], 2 * timeout)
        self._wait("all_reduce", ready)

    def ask_for_spans(self) -> None:
        """Have the workers hand over their spans, behind what they are doing."""
        self._spans |= {worker.take_spans.remote(): rank for rank, worker in enumerate(self._workers)}

    def take_spans(self) -> Spans:
        """What the workers did until they were last asked for it, on this process's clock.

        A worker that does not answer within SPANS_SECONDS hands its spans over in a later call.
        """
        ready: list[Any] = []
        if self._spans:
            ready, _ = ray.wait(list(self._spans), num_returns=len(self._spans), timeout=SPANS_SECONDS)
        found: list[Span] = []
        for ref in ready:
            rank = self._spans.pop(ref)
            part: Spans = self._get("take_spans", ref, rank)
            shift = self._clock_shifts[rank]
            self._spans_until[rank] = max(self._spans_until[rank], part.until + shift)
            found += [dataclasses.replace(s, start=s.start + shift, end=s.end + shift) for s in part.spans]
        return Spans(found, min(self._spans_until))

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[Sequence]]:
        """Yield finished sequences of all workers, in the order in which they finish.

        Raises:
            WorkerError: a worker failed, or none had news for the timeout.
        """
        replica_size = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        replicas = self.size // replica_size
        streams: dict[Any, int] = {}
        for rank, worker in enumerate(self._workers):
            share = requests[rank // replica_size :: replicas]
            stream = worker.generate.options(num_returns="streaming").remote(share, sampling)
            streams[stream] = rank
        missing = len(requests)
        while streams:
            ready: list[Any]
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=self.timeout, fetch_local=False)
            if not ready:
                raise self._timeout_error("generate", list(streams.values()))
            stream = ready[0]
            rank = streams[stream]
            try:
                finished = self._get("generate", next(stream), rank)
            except StopIteration:
                del streams[stream]
                continue
            missing -= len(finished)
            yield finished
        if missing:
            raise WorkerError(f"generate: {missing} of {len(requests)} sequences did not come back")

    def accumulate(self, parts: list[MiniBatch]) -> None:
        """Forward and backward of a part of a mini-batch, each worker its share; the last part goes to `update`."""
        self._wait("accumulate", [w.accumulate.remote(part) for w, part in zip(self._workers, parts, strict=True)])

    def update(self, batches: list[list[MiniBatch]]) -> list[dict[str, float]]:
        """One optimizer step per mini-batch. Of the first one, parts may have been accumulated.

        Args:
            batches: for each worker its share of each mini-batch.

        Returns:
            Metrics of each optimizer step.
        """
        calls = [worker.update.remote(share) for worker, share in zip(self._workers, batches, strict=True)]
        return self._wait("update", calls)[0]

    def compute_logprobs(
        self, micro_batches: list[tuple[tuple[TrainSequence, ...], ...]]
    ) -> dict[int, np.ndarray]:
        """Sequence index -> float32 [R], over all workers."""
        calls = [w.compute_logprobs.remote(share) for w, share in zip(self._workers, micro_batches, strict=True)]
        return {index: values for part in self._wait("compute_logprobs", calls) for index, values in part.items()}

    def publish(self, weight_version: int) -> dict[str, float]:
        """Copy the actor's weights into every engine; the slowest worker's seconds by name."""
        seconds = self._call("publish", weight_version)
        self.ask_for_spans()
        return {name: max(part.get(name, 0.0) for part in seconds) for name in seconds[0]}

    def save_checkpoint(self, folder: Path, *, tokenizer_path: str) -> None:
        """Write all parts of a checkpoint into `folder`, which all workers see."""
        self._call("save_checkpoint", str(folder), tokenizer_path=tokenizer_path)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore a checkpoint. Call `publish` next."""
        self._call("load_checkpoint", str(folder))

    def memory_metrics(self) -> dict[str, float]:
        """Memory by metric name, GiB, each of the worker that has most."""
        parts = self._call("memory_metrics")
        return {name: max(part[name] for part in parts) for name in parts[0]}

    def close(self) -> None:
        """Stop the workers. Returns within seconds also when Ray itself has been killed before."""
        # Ray's calls wait a minute for a dead cluster and then abort the process; ours have a deadline.
        closing = threading.Thread(target=self._close, name="close workers", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("Ray did not answer within %.0f s while the workers were stopped", CLOSE_SECONDS)

    def _close(self) -> None:
        for worker in self._workers:
            ray.kill(worker, no_restart=True)
        self._workers = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._wait(method, [getattr(worker, method).remote(*args, **kwargs) for worker in self._workers])

    def _wait(self, method: str, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """Results of all ranks in order; the first failure is raised without waiting for the others."""
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        deadline = time.monotonic() + (timeout or self.timeout)
        while waiting:
            left = deadline - time.monotonic()
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, left))
            if not ready:
                raise self._timeout_error(method, sorted(waiting.values()), timeout)
            rank = waiting.pop(ready[0])
            try:
                results[rank] = self._get(method, ready[0], rank)
            except WorkerError as error:
                raise self._cause(method, error, waiting) from error
        return [results[rank] for rank in range(len(refs))]

    def _get(self, method: str, ref: Any, rank: int) -> Any:
        try:
            return ray.get(ref, timeout=self.timeout)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, HybridGKDError):
                cause.args = (f"{cause} ({self._where(rank)})",)
                raise cause from error
            raise WorkerError(
                f"worker {rank} failed in {method}: {type(cause).__name__}: {cause} ({self._where(rank)})"
            ) from error
        except GetTimeoutError as error:
            raise self._timeout_error(method, [rank]) from error
        except RayError as error:
            lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
            reason = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
            raise WorkerDiedError(f"worker {rank} died in {method}: {reason} ({self._where(rank)})") from error

    def _cause(self, method: str, error: WorkerError, waiting: dict[Any, int]) -> WorkerError:
        """The first failure seen, or that of a peer which explains it: a collective fails on those who still live."""
        if isinstance(error, WorkerDiedError) or not waiting:
            return error
        ready, silent = ray.wait(list(waiting), num_returns=len(waiting), timeout=CAUSE_SECONDS)
        for ref in ready:
            try:
                self._get(method, ref, waiting[ref])
            except WorkerDiedError as died:
                return died
            except HybridGKDError:
                continue
        if not silent:
            return error
        return WorkerError(f"{error}; no answer from {self._places(sorted(waiting[ref] for ref in silent))}")

    def _timeout_error(self, method: str, ranks: list[int], timeout: float | None = None) -> WorkerError:
        key = " (actor_rollout_ref.nccl_timeout)" if timeout is None else ""
        return WorkerError(
            f"no answer to {method} from worker {', '.join(map(str, ranks))} within {timeout or self.timeout:.0f} s"
            f"{key}: {self._places(ranks)}"
        )

    def _places(self, ranks: list[int]) -> str:
        return "; ".join(f"worker {rank} ({self._where(rank)})" for rank in ranks)

    def _where(self, rank: int) -> str:
        """GPU and log file of a worker."""
        place = f"{self.placements[rank].name}, " if self.placements else ""
        return f"{place}log: {self.log_files[rank]}"


def refuse_shared_gpus(placements: list[Placement]) -> None:
    """Raises WorkerError if two workers (by rank) see the same GPU."""
    gpus = [place.gpu for place in placements]
    for rank, gpu in enumerate(gpus):
        if gpu is not None and gpu in gpus[:rank]:
            raise WorkerError(
                f"trainer.n_gpus_per_node: workers {gpus.index(gpu)} and {rank} got the same GPU ({gpu}); "
                f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')} here"
            )


@contextlib.contextmanager
def ray_cluster(config: Config, device: str) -> Iterator[None]:
    """Connect to the cluster of `ray_init.address`, or start one on this machine and stop it at the end.

    Raises:
        WorkerError: Ray could not start or be reached.
    """
    init = config.ray_init
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if init.address is not None:
        options["address"] = init.address
    else:
        # Worker processes may share a core; Ray would refuse to place more of them than it counts cores.
        options["num_cpus"] = max(init.num_cpus or os.cpu_count() or 1, config.world_size)
        # Workers get the first GPUs, so that a local teacher can have the ones after them.
        options["num_gpus"] = config.trainer.n_gpus_per_node if device == "cuda" else 0
        options["include_dashboard"] = False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerError(f"ray_init.address: Ray could not start or be reached: {error}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own aborts the process without any clean-up
    try:
        yield
    finally:
        ray.shutdown()

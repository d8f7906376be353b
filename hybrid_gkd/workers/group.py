"""The pool of workers as one typed object: Ray placement, remote calls, deadlines.

Each method calls the method of the same name on every worker and waits, never longer than
`actor_rollout_ref.nccl_timeout` without news. The first worker that fails ends the wait at once: its peers
may sit in a collective that can no longer complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybrid_gkd.config import Config
from hybrid_gkd.errors import HybridGKDError, WorkerError
from hybrid_gkd.types import GenerationRequest, MiniBatch, SamplingParams, Sequence, TrainSequence
from hybrid_gkd.workers.worker import Worker

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 30
"""How long the cluster may take to find room for the workers."""
CLOSE_SECONDS = 5.0
"""How long the cluster may take to stop the workers."""


class WorkerGroup:
    """`config.world_size` workers, one GPU each.

    Raises:
        WorkerError: the cluster does not have the resources, or a worker could not start.
    """

    def __init__(self, config: Config, *, device: str, num_updates: int, stop_token_ids: list[int]):
        self.config = config
        self.size = config.world_size
        self.timeout = config.actor_rollout_ref.nccl_timeout
        self.log_files = [config.run_dir / "logs" / f"worker_{rank}.log" for rank in range(self.size)]
        self._placement: Any = None
        self._workers: list[Any] = []
        try:
            self._place(device)
            address = self._wait("address", [self._workers[0].address.remote()])[0]
            self.description: list[dict[str, str]] = self._call(
                "initialize", address, num_updates=num_updates, stop_token_ids=stop_token_ids
            )
        except BaseException:
            self.close()
            raise

    def _place(self, device: str) -> None:
        bundle: dict[str, float] = {"CPU": 1.0}
        if device == "cuda":
            bundle["GPU"] = 1.0
        self._placement = placement_group([bundle] * self.size, strategy="PACK")
        if not self._placement.wait(timeout_seconds=PLACEMENT_SECONDS):
            raise WorkerError(
                f"trainer.n_gpus_per_node, trainer.nnodes: {self.size} workers need {bundle} each; "
                f"the Ray cluster has {ray.cluster_resources()}"
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

    def update(self, batches: list[list[MiniBatch]]) -> list[dict[str, float]]:
        """One optimizer step per mini-batch.

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

    def _wait(self, method: str, refs: list[Any]) -> list[Any]:
        """Results of all ranks in order; the first failure is raised without waiting for the others."""
        ranks = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while ranks:
            left = deadline - time.monotonic()
            ready, _ = ray.wait(list(ranks), num_returns=1, timeout=max(0.0, left))
            if not ready:
                raise self._timeout_error(method, sorted(ranks.values()))
            rank = ranks.pop(ready[0])
            results[rank] = self._get(method, ready[0], rank)
        return [results[rank] for rank in range(len(refs))]

    def _get(self, method: str, ref: Any, rank: int) -> Any:
        try:
            return ray.get(ref, timeout=self.timeout)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, HybridGKDError):
                raise cause from error
            raise WorkerError(
                f"worker {rank} failed in {method}: {type(cause).__name__}: {cause} (log: {self.log_files[rank]})"
            ) from error
        except (RayActorError, ActorDiedError, ActorUnavailableError) as error:
            lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
            reason = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
            raise WorkerError(f"worker {rank} died in {method}: {reason} (log: {self.log_files[rank]})") from error

    def _timeout_error(self, method: str, ranks: list[int]) -> WorkerError:
        logs = ", ".join(str(self.log_files[rank]) for rank in ranks)
        return WorkerError(
            f"no answer to {method} from worker {', '.join(map(str, ranks))} within {self.timeout:.0f} s "
            f"(actor_rollout_ref.nccl_timeout; log: {logs})"
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

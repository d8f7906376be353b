"""Workers of one kind on Ray: placement, remote calls, deadlines.

A call goes to every worker and is waited for, never longer than `actor_rollout_ref.nccl_timeout`. The first worker
that fails ends the wait at once: its peers may sit in a collective that can no longer complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybrid_gkd.config import Config
from hybrid_gkd.errors import HybridGKDError, WorkerError
from hybrid_gkd.workers.placement import Placement, Role
from hybrid_gkd.workers.worker import Worker

PLACEMENT_SECONDS = 30
"""Timeout for the cluster to find room for the workers."""
CAUSE_SECONDS = 3.0
"""Grace period for the peers of a failed worker to answer: one that died or stays silent may be the cause."""


class WorkerDiedError(WorkerError):
    """The process of a worker has ended."""


class Pool:
    """`per_node` workers of one role on each of `nodes` machines, one GPU each. Call `place` first and `close` last."""

    def __init__(self, config: Config, *, role: Role, nodes: int, per_node: int, log_folder: Path):
        self.config = config
        self.role = role
        self.nodes, self.per_node = nodes, per_node
        self.size = nodes * per_node
        self.timeout = config.actor_rollout_ref.nccl_timeout
        self.log_files = [log_folder / f"{role.split()[0]}_{rank}.log" for rank in range(self.size)]
        self.workers: list[Any] = []
        self.placements: list[Placement] = []
        """By rank; memory as it was free before anything was loaded."""
        self._group: Any = None
        self._last_progress = time.monotonic()
        """Time of the last call to a worker, or of the last result."""

    def place(self, device: str) -> None:
        """Start the workers' processes. Raises WorkerError if no such machines have room in time."""
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
        self._check_nodes(bundle)
        on_a_node = {name: amount * self.per_node for name, amount in bundle.items()}
        self._group = placement_group([on_a_node] * self.nodes, strategy="STRICT_SPREAD")
        if not self._group.wait(timeout_seconds=PLACEMENT_SECONDS):
            raise WorkerError(
                f"{self._keys}: {self.size} {self.role}s need {bundle} each; the Ray "
                f"cluster had no room for them within {PLACEMENT_SECONDS} s, free are {ray.available_resources()}"
            )
        for rank in range(self.size):
            options = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank // self.per_node),
            }
            remote = ray.remote(Worker).options(**options)
            log_file = str(self.log_files[rank])
            arguments = {"role": self.role, "rank": rank, "size": self.size, "device": device, "log_file": log_file}
            self.workers.append(remote.remote(self.config, **arguments))

    @property
    def _keys(self) -> str:
        section = "rollout" if self.role == "rollout worker" else "trainer"
        return f"{section}.n_gpus_per_node, {section}.nnodes"

    def _check_nodes(self, bundle: dict[str, float]) -> None:
        """Whether so many machines could hold so many workers if nothing else ran there. Raises WorkerError."""
        there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        sizes = [min(int(node.get(name, 0.0) // amount) for name, amount in bundle.items()) for node in there]
        if sum(size >= self.per_node for size in sizes) < self.nodes:
            raise WorkerError(
                f"{self._keys}: {self.per_node} {self.role}s on each of {self.nodes} node(s) need {bundle} each; the "
                f"Ray cluster has nodes for {', '.join(map(str, sorted(sizes, reverse=True))) or 'none'} of them"
            )

    def locate(self) -> None:
        """Fill `placements`. Raises WorkerError if a worker could not start."""
        self.placements = self.call("placement")

    def rendezvous(self, timeout: float | None = None) -> tuple[str, int]:
        """Host and a free port of the first worker."""
        address: tuple[str, int] = self.wait("address", [self.workers[0].address.remote()], timeout)[0]
        return address

    def all_reduce(self, timeout: float) -> None:
        """Check that the workers reach each other. Raises WorkerError that names the ones that did not answer.

        Args:
            timeout: seconds for the collective; a worker that stays silent for twice as long is taken for hung.
        """
        address = self.rendezvous(timeout)
        refs = [worker.all_reduce.remote(address, timeout=timeout) for worker in self.workers]
        # A waiting worker raises at its timeout; one that stays silent is what the others waited for.
        ready, silent = ray.wait(refs, num_returns=len(refs), timeout=2 * timeout)
        if silent:
            raise self.timeout_error("all_reduce", [refs.index(ref) for ref in silent], 2 * timeout)
        self.wait("all_reduce", ready)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every worker; the results by rank. Raises WorkerError."""
        return self.wait(method, self.start(method, *args, **kwargs))

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every worker without waiting."""
        self._last_progress = time.monotonic()
        return [getattr(worker, method).remote(*args, **kwargs) for worker in self.workers]

    def scatter(self, method: str, shares: Sequence[Any]) -> list[Any]:
        """Call a method on every worker, each with its share; the results by rank. Raises WorkerError."""
        self._last_progress = time.monotonic()
        calls = [getattr(worker, method).remote(share) for worker, share in zip(self.workers, shares, strict=True)]
        return self.wait(method, calls)

    def wait(self, method: str, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """Results of all ranks in order; the first failure is raised without waiting for the others."""
        found = gather(method, {ref: (self, rank) for rank, ref in enumerate(refs)}, timeout)
        return [found[ref] for ref in refs]

    def get(self, method: str, ref: Any, rank: int) -> Any:
        """The result of a call that has ended. Raises the worker's HybridGKDError with its place, or WorkerError."""
        self._last_progress = time.monotonic()
        try:
            return ray.get(ref, timeout=self.timeout)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, HybridGKDError):
                cause.args = (f"{cause} ({self._where(rank)})",)
                raise cause from error
            raise WorkerError(
                f"{self.role} {rank} failed in {method}: {type(cause).__name__}: {cause} ({self._where(rank)})"
            ) from error
        except GetTimeoutError as error:
            raise self.timeout_error(method, [rank]) from error
        except RayError as error:
            lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
            reason = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
            raise WorkerDiedError(f"{self.role} {rank} died in {method}: {reason} ({self._where(rank)})") from error

    def answers(self) -> bool:
        """Whether all workers are alive and have ended their calls, so that a new call is of use.

        Waits until a worker without progress would be taken for hung; returns at once where one has died.
        """
        # They may also have been idle for long.
        remaining = max(0.0, self._last_progress + self.timeout - time.monotonic()) + CAUSE_SECONDS
        try:
            self.wait("placement", self.start("placement"), remaining)
        except WorkerError:
            return False
        return True

    def close(self) -> None:
        """Stop the workers."""
        for worker in self.workers:
            ray.kill(worker, no_restart=True)
        self.workers = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def timeout_error(self, method: str, ranks: list[int], timeout: float | None = None) -> WorkerError:
        """An error which says that these workers did not answer in time, with their places."""
        key = " (actor_rollout_ref.nccl_timeout)" if timeout is None else ""
        return WorkerError(
            f"no answer to {method} from {self.role} {', '.join(map(str, ranks))} within "
            f"{timeout or self.timeout:.0f} s{key}: {self.places(ranks)}"
        )

    def places(self, ranks: list[int]) -> str:
        """These workers with GPU and log file."""
        return "; ".join(f"{self.role} {rank} ({self._where(rank)})" for rank in ranks)

    def _where(self, rank: int) -> str:
        """GPU and log file of a worker."""
        place = f"{self.placements[rank].name}, " if self.placements else ""
        return f"{place}log: {self.log_files[rank]}"


def gather(
    method: str, calls: Mapping[Any, tuple[Pool, int]], timeout: float | None = None,
    on_answer: Callable[[Any], None] = lambda ref: None,
) -> dict[Any, Any]:
    """Results of calls to workers of one or several pools; the first failure is raised without waiting for the others.

    Args:
        method: its name, for messages.
        calls: call -> its pool and rank.
        timeout: seconds for all of them together; None is the pools' own.
        on_answer: called with each call that has ended well.

    Raises:
        WorkerError: a worker died, failed or did not answer in time.
        HybridGKDError: raised by a worker.
    """
    waiting, results = dict(calls), dict[Any, Any]()
    some_pool = next(iter(calls.values()))[0]
    deadline = time.monotonic() + (timeout or some_pool.timeout)
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            by_pool: dict[Pool, list[int]] = {}
            for pool, rank in waiting.values():
                by_pool.setdefault(pool, []).append(rank)
            errors = [str(pool.timeout_error(method, sorted(ranks), timeout)) for pool, ranks in by_pool.items()]
            raise WorkerError("; ".join(errors))
        pool, rank = waiting.pop(ready[0])
        try:
            results[ready[0]] = pool.get(method, ready[0], rank)
        except WorkerError as error:
            raise _cause(method, error, waiting) from error
        on_answer(ready[0])
    return results


def _cause(method: str, error: WorkerError, waiting: Mapping[Any, tuple[Pool, int]]) -> WorkerError:
    """The first failure seen, or the death of a peer that explains it: a collective fails on the survivors."""
    if isinstance(error, WorkerDiedError) or not waiting:
        return error
    died, silent = find_dead(method, waiting)
    if died is not None or not silent:
        return died or error
    where = "; ".join(sorted(pool.places([rank]) for pool, rank in map(waiting.__getitem__, silent)))
    return WorkerError(f"{error}; no answer from {where}")


def find_dead(method: str, calls: Mapping[Any, tuple[Pool, int]]) -> tuple[WorkerDiedError | None, list[Any]]:
    """Wait CAUSE_SECONDS for calls: the error of one whose worker has died, and the calls that have not ended."""
    if not calls:
        return None, []
    ready, silent = ray.wait(list(calls), num_returns=len(calls), timeout=CAUSE_SECONDS)
    for ref in ready:
        pool, rank = calls[ref]
        try:
            pool.get(method, ref, rank)
        except WorkerDiedError as died:
            return died, silent
        except HybridGKDError:
            continue
    return None, silent

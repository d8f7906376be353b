"""Workers of one role on Ray: placement, remote calls, deadlines.

A call goes to every worker and has the timeout `actor_rollout_ref.nccl_timeout`, or `load_timeout` if it accesses a
disk. The first failure of a worker ends the wait at once, since its peers may be blocked in a collective that can no
longer complete.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybrid_gkd.config import Config
from hybrid_gkd.errors import HybridGKDError, WorkerError, describe_error
from hybrid_gkd.process_limits import process_limits
from hybrid_gkd.runtime.spans import current_step
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.workers.liveness import RAYLET, RayLost, check_ray, lost_process, raylet_lost
from hybrid_gkd.workers.placement import Placement, Role
from hybrid_gkd.workers.worker import DESCRIPTIONS, Worker

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Seconds between two calls of `check` during a wait for the workers."""
CAUSE_SECONDS = 3.0
"""Grace period for the peers of a failed worker to respond: one that died or hangs may be the cause."""
SETTLE_SECONDS = 10.0
"""Timeout for workers to finish or drop the work queued before a peer failed."""
NCCL_KEY = "actor_rollout_ref.nccl_timeout"
NEVER_RAN = "The actor never ran"
"""Beginning of Ray's line after the reason, if a worker's process did not start."""
OWNER_DIED = "its owner has died"
"""Ray's reason for the end of workers whose owner, this process, is on a machine that Ray counts as lost."""
CHANGES_WEIGHTS = ("update", "update_critic")
Calls = dict[Any, tuple["Pool", int]]
"""Ray reference of a call -> its pool and rank."""


class WorkerDiedError(WorkerError):
    """The process of a worker has ended."""


class Pool:
    """The workers of one role, one GPU each. Call `place` first, `begin` before they load, and `close` last."""

    def __init__(self, config: Config, *, role: Role, log_folder: Path):
        self.config, self.role = config, role
        self.nodes, self.per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
        if role == "rollout worker":
            self.nodes, self.per_node = config.rollout.nnodes, config.rollout_world_size // config.rollout.nnodes
        self.size = self.nodes * self.per_node
        self.timeout = config.actor_rollout_ref.nccl_timeout
        self.log_files = [log_folder / f"{role.split()[0]}_{rank}.log" for rank in range(self.size)]
        self.workers: list[Any] = []
        self.placements: list[Placement] = []
        """Placements by rank, with the free memory before anything was loaded."""
        self.descriptions: list[dict[str, str]] = []
        """Results of `Worker.initialize` by rank; empty before."""
        self.streams: Calls = {}
        """Calls of the last generation."""
        self.stuck_calls: Calls = {}
        """Calls that may never return, see `mark_stuck_peers`."""
        self._group: Any = None
        self._step: int | None = None
        """Last step sent to the workers."""
        self._last_progress = time.monotonic()
        """Time of the last call to a worker, or of the last result."""

    def place(self, device: str, bundle: dict[str, float]) -> None:
        """Start the workers' processes, each with the resources of a bundle.

        Raises WorkerError without enough resources.
        """
        section = "rollout" if self.role == "rollout worker" else "trainer"
        keys = f"{section}.n_gpus_per_node, {section}.nnodes"
        there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        sizes = [min(int(node.get(name, 0.0) // amount) for name, amount in bundle.items()) for node in there]
        if sum(size >= self.per_node for size in sizes) < self.nodes:  # even on an empty cluster
            raise WorkerError(
                f"{keys}: {self.nodes} node(s) with room for {self.per_node} {self.role}(s) are needed, {bundle} each; "
                f"the Ray cluster has {len(sizes)} node(s)"
                + (f", with room for {', '.join(map(str, sorted(sizes, reverse=True)))}" if sizes else "")
            )
        on_a_node = {name: amount * self.per_node for name, amount in bundle.items()}
        self._group = placement_group([on_a_node] * self.nodes, strategy="STRICT_SPREAD")
        limit = Timeout(self.config.ray_init.placement_timeout, "ray_init.placement_timeout")
        whom = f"the Ray cluster to have room for {self.size} {self.role}(s), {bundle} each"
        with waiting(whom, limit, free_resources):
            is_placed = self._group.wait(timeout_seconds=limit.seconds)
        if not is_placed:
            raise WorkerError(
                f"{keys}: {self.size} {self.role}s need {bundle} each; the Ray cluster could not place them within "
                f"{limit}, {free_resources()}"
            )
        for rank in range(self.size):
            remote = ray.remote(Worker).options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank // self.per_node),
            )
            arguments = {"role": self.role, "rank": rank, "size": self.size, "device": device, "folder": os.getcwd()}
            self.workers.append(remote.remote(self.config, **arguments))

    def begin(self) -> None:
        """Send the workers their log files, and collect their placements. Raises as `gather`."""
        self.call("begin", shares=self.log_files, timeout=self.load_timeout)
        self.placements = self.call("placement", timeout=self.load_timeout)

    def rendezvous(self, timeout: Timeout | None = None) -> tuple[str, int]:
        """Return host and a free port of the first worker."""
        address: tuple[str, int] = gather("address", {self.workers[0].address.remote(): (self, 0)}, timeout)[0]
        return address

    def all_reduce(self, timeout: Timeout) -> None:
        """Run an all-reduce over the workers. Raises WorkerError naming the ones that did not respond.

        `timeout`: of the collective; a worker that does not respond for twice as long counts as hung.
        """
        calls, twice = self.start("all_reduce", self.rendezvous(timeout), timeout), 2 * timeout.seconds
        # A waiting worker raises at its timeout; one that does not respond is the cause.
        with waiting(f"all_reduce of {self.size} {self.role}(s)", timeout):
            _, silent = ray.wait(list(calls), num_returns=len(calls), timeout=twice)
        if silent:
            raise self.timeout_error("all_reduce", [calls[ref][1] for ref in silent], Timeout(twice, timeout.key))
        gather("all_reduce", calls)

    @property
    def load_timeout(self) -> Timeout:
        """Return the timeout of a call that accesses a disk."""
        return Timeout(self.config.actor_rollout_ref.load_timeout, "actor_rollout_ref.load_timeout")

    def call(self, method: str, *args: Any, timeout: Timeout | None = None, **kwargs: Any) -> list[Any]:
        """Call a method on every worker and return its results by rank. Raises as `gather`."""
        return gather(method, self.start(method, *args, **kwargs), timeout)

    def start(self, method: str, *args: Any, shares: Sequence[Any] | None = None, **kwargs: Any) -> Calls:
        """Call a method on every worker without waiting; each gets its part of `shares`, if any, as first argument."""
        self._last_progress = time.monotonic()
        if (step := current_step.get()) != self._step:
            self._step = step
            for worker in self.workers:
                worker.begin_step.remote(step)
        own = [()] * len(self.workers) if shares is None else [(share,) for share in shares]
        each = zip(self.workers, own, strict=True)
        return {
            getattr(worker, method).remote(*first, *args, **kwargs): (self, rank)
            for rank, (worker, first) in enumerate(each)
        }

    def get(self, method: str, ref: Any, rank: int) -> Any:
        """Return the result of a finished call.

        Raises the worker's HybridGKDError with its placement, or WorkerError; RayLost if it has died with its raylet.
        """
        self._last_progress = time.monotonic()
        try:
            return ray.get(ref, timeout=self.timeout)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, HybridGKDError):
                cause.args = (f"{cause} ({self._location(rank)})",)
                raise cause from error
            what = f"{self.role} {rank} failed during {DESCRIPTIONS[method]}: {describe_error(cause)}"
            raise WorkerError(f"{what} ({self._location(rank)})") from error
        except GetTimeoutError as error:
            raise self.timeout_error(method, [rank]) from error
        except RayError as error:
            check_ray(raylet_only=True, at_once=True)
            what = f"{self.role} {rank} died during {DESCRIPTIONS[method]}: {describe_death(error)}"
            if OWNER_DIED in str(error):
                raise raylet_lost(f"{what} ({self._location(rank)})") from error
            raise WorkerDiedError(f"{what} ({self._location(rank)})") from error

    def mark_stuck_peers(self, method: str, rank: int, calls: Calls) -> None:
        """Record the calls of peers that may wait in a collective for a failed worker.

        The method determines these peers; all other calls end by themselves, some after minutes.
        """
        config, everyone = self.config, self.size
        # Weights are gathered within a shard group; a backward pass reduces gradients over all of them.
        sizes = {
            "generate": config.actor_rollout_ref.rollout.tensor_model_parallel_size, "finish_snapshot": 1,
            "compute_values": config.critic_shard_size, "accumulate": everyone, "update": everyone,
            "update_critic": everyone, "save_checkpoint": everyone,
        }
        size = sizes.get(method, config.shard_size)
        peers = set(range(rank // size * size, (rank // size + 1) * size)) - {rank}
        self.stuck_calls = {ref: (pool, at) for ref, (pool, at) in calls.items() if pool is self and at in peers}

    def is_responsive(self) -> bool:
        """Return whether all workers are alive and have finished their calls, so that a new call is useful.

        Waits until a worker without progress counts as hung. Logs a warning if a worker died, or if some are stuck in a
        collective with a failed one; the latter are given only a few seconds.
        """
        if lost_process() == RAYLET:
            logger.warning("the student cannot be saved: the workers have ended with Ray's %s", RAYLET)
            return False
        # The workers may also have been idle.
        remaining = max(0.0, self._last_progress + self.timeout - time.monotonic()) + CAUSE_SECONDS
        limit = Timeout(remaining, NCCL_KEY)
        if self.stuck_calls:
            _, stuck = ray.wait(list(self.stuck_calls), num_returns=len(self.stuck_calls), timeout=CAUSE_SECONDS)
            if stuck:
                names = name_workers({ref: self.stuck_calls[ref] for ref in stuck})
                logger.warning("the student cannot be saved: in a collective with a worker that has failed: %s", names)
                return False
            limit = Timeout(SETTLE_SECONDS)
        try:
            gather("synchronize", self.start("synchronize"), limit)
        except WorkerError as error:
            logger.warning("the student cannot be saved: %s", error)
            return False
        return True

    def start_settling(self) -> Calls:
        """Cancel the generation in progress, if any, and let the workers drop other unfinished work."""
        if self.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1:  # else ranks would stop apart
            for stream in self.streams:
                ray.cancel(stream)
        return self.start("settle")

    def hand_over(self) -> Pool:
        """Return another pool with these workers. This one has none from now on, so that no later call reaches them."""
        pool = copy.copy(self)
        pool.streams, pool.stuck_calls = {}, {}
        self.workers, self.placements, self._group = [], [], None
        return pool

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker, no_restart=True)
        self.workers = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def timeout_error(self, method: str, ranks: list[int], timeout: Timeout | None = None) -> WorkerError:
        """Return an error naming the workers that did not respond in time, with their placements."""
        where = "; ".join(map(self.name_of, ranks))
        return WorkerError(
            f"no answer from {self.role} {', '.join(map(str, ranks))} within "
            f"{timeout or Timeout(self.timeout, NCCL_KEY)} during {DESCRIPTIONS[method]}: {where}"
        )

    def name_of(self, rank: int) -> str:
        return f"{self.role} {rank} ({self._location(rank)})"

    def _location(self, rank: int) -> str:
        """Return GPU and log file of a worker."""
        place = f"{self.placements[rank].name}, " if self.placements else ""
        return f"{place}log: {self.log_files[rank]}"


def describe_death(error: RayError) -> str:
    """Return Ray's reason for the end of a worker's process in one line, with the likely cause if it never started.

    Ray's paragraph of possible reasons is in run.log.
    """
    text, is_late, _ = str(error).strip().partition(NEVER_RAN)
    reason = text.partition(" Some common causes include")[0].strip().splitlines()[-1].strip()
    if not is_late:
        return reason
    limits = "".join(f"; {limit}" for limit in process_limits())
    return f"{reason} Its process did not start, likely because memory or processes of the host are exhausted{limits}"


def free_resources() -> str:
    return f"free are {ray.available_resources()}"


def name_workers(calls: Calls) -> str:
    """Describe the first workers of these calls and their number: "worker 0, 1, 2, 3 ... (8 in all)"."""
    ranks: dict[str, list[int]] = {}
    for pool, rank in calls.values():
        ranks.setdefault(pool.role, []).append(rank)
    shown = [f"{role} {', '.join(map(str, some[:4]))}{' ...' if len(some) > 4 else ''}" for role, some in ranks.items()]
    return f"{' and '.join(shown)} ({len(calls)} in all)" if len(calls) > 1 else " and ".join(shown)


def gather(
    method: str, calls: Calls, timeout: Timeout | None = None, on_answer: Callable[[Any], None] = lambda ref: None,
    grace_period: float = 0.0, check: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Return the results of calls to one or several pools in their order; a failure is raised without waiting for the
    others.

    Args:
        method: key of DESCRIPTIONS.
        timeout: for all calls together; None takes the pools' own.
        on_answer: called with each successful call.
        grace_period: additional seconds, for workers that raise at the same timeout.
        check: called every CHECK_SECONDS, besides `check_ray`; its errors end the wait.

    Raises:
        WorkerError: a worker died, failed or did not respond in time.
        HybridGKDError: raised by a worker.
        RayLost: a process of Ray has ended.
    """
    left, results = dict(calls), dict[Any, Any]()
    limit = timeout or Timeout(next(iter(calls.values()))[0].timeout, NCCL_KEY)
    deadline = time.monotonic() + limit.seconds + grace_period
    with waiting(DESCRIPTIONS[method], limit, lambda: f"no answer yet from {name_workers(dict(left))}"):
        while left:
            pause = max(0.0, min(CHECK_SECONDS, deadline - time.monotonic()))
            ready, _ = ray.wait(list(left), num_returns=1, timeout=pause)
            check()
            # An update ends also without the control store; its weights can then be saved.
            check_ray(raylet_only=method in CHANGES_WEIGHTS)
            if not ready and time.monotonic() < deadline:
                continue
            if not ready:
                by_pool: dict[Pool, list[int]] = {}
                for pool, rank in left.values():
                    by_pool.setdefault(pool, []).append(rank)
                errors = [str(pool.timeout_error(method, sorted(ranks), limit)) for pool, ranks in by_pool.items()]
                raise WorkerError("; ".join(errors))
            pool, rank = left.pop(ready[0])
            try:
                results[ready[0]] = pool.get(method, ready[0], rank)
            except HybridGKDError as error:
                pool.mark_stuck_peers(method, rank, calls)
                cause = _cause(method, error, left) if isinstance(error, WorkerError) else error
                if cause is error:
                    raise
                raise cause from error
            on_answer(ready[0])
    return [results[ref] for ref in calls]


def _cause(method: str, error: WorkerError, waiting: Calls) -> WorkerError:
    """Return the first failure, or the death of a peer that explains it, since a collective fails on the survivors."""
    if isinstance(error, WorkerDiedError):
        return error
    died, silent = find_dead(method, waiting)
    if died is not None or not silent:
        return died or error
    where = sorted(pool.name_of(rank) for pool, rank in map(waiting.__getitem__, silent))
    return WorkerError(f"{error}; no answer from {'; '.join(where)}")


def find_dead(method: str, calls: Calls) -> tuple[WorkerDiedError | None, list[Any]]:
    """Wait CAUSE_SECONDS for calls; return the error of a dead worker, if any, and the unfinished calls.

    Raises RayLost: they have died with their raylet.
    """
    if not calls:
        return None, []
    ready, silent = ray.wait(list(calls), num_returns=len(calls), timeout=CAUSE_SECONDS)
    for ref in ready:
        pool, rank = calls[ref]
        try:
            pool.get(method, ref, rank)
        except WorkerDiedError as died:
            return died, silent
        except RayLost:
            raise
        except HybridGKDError:
            continue
    return None, silent

"""Connect to the Ray cluster of a run or start one on this machine, and start and stop its workers."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from hybrid_gkd.compat.ray import on_loopback, private_token
from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError, WorkerError, describe_error
from hybrid_gkd.runtime.environment import environment
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.workers.liveness import forget_ray, lost_process, watch_ray
from hybrid_gkd.workers.own_cluster import joining_group, own_group, private_folder
from hybrid_gkd.workers.placement import Role
from hybrid_gkd.workers.pool import Pool

logger = logging.getLogger(__name__)

SYSTEM_CONFIG = {
    "task_events_report_interval_ms": 0,  # off: the control store would keep them, 17 MiB per 1000 steps
    "gcs_rpc_server_reconnect_timeout_s": 3600,  # of Ray's own, which kills all processes, also while they save
}  # fmt: skip
"""Settings of a run's own cluster."""
CONNECT_SECONDS = 5.0
"""Timeout for a connection to a cluster."""
CLOSE_SECONDS = 5.0
"""Grace period for the cluster to stop the workers."""


def _check_reachable(address: str) -> None:
    """Raise WorkerError if `address` has a host and port where nothing listens; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise WorkerError(f"ray_init.address: nothing answers at {address}: {error}") from error


@contextlib.contextmanager
def ray_cluster(config: Config, device: str, run_dir: Path | None = None) -> Iterator[None]:
    """Connect to the cluster of `ray_init.address`, or start one on this machine and stop it at the end.

    If this process is killed, that is recorded in `run_dir`, if given.

    Raises:
        WorkerError: Ray could not start or be reached.
        ConfigError: `trainer.device=auto` is the CPU by this machine, and the cluster has GPUs.
    """
    init = config.ray_init
    if init.address is not None:
        _check_reachable(init.address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    options["address"] = init.address or "local"  # without an address Ray joins any cluster on this machine
    if init.address is None:
        # Worker processes may share a core; Ray places at most one per counted core.
        cpus = max(init.num_cpus or os.cpu_count() or 1, config.workers_per_node)
        # Workers get the first GPUs, a local teacher those after them.
        gpus = config.workers_per_node if device == "cuda" else 0
        options |= {"num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False}
    with contextlib.ExitStack() as stack:
        group = folder = None
        if init.address is None:
            folder = stack.enter_context(private_folder())
        guarded = stack.enter_context(own_group(folder, run_dir))
        if folder is not None:
            group = guarded
            stack.enter_context(private_token(folder / "token"))
            # The engines' sockets end with the cluster, whose workers are killed.
            place = os.environ.get("VLLM_RPC_BASE_PATH", str(folder))
            stack.enter_context(environment({"VLLM_RPC_BASE_PATH": place}))
            # Below the private folder: Ray opens its own to everyone.
            # Ray starts processes before they are asked for: no more than workers, not one for each core.
            at_once = {"worker_maximum_startup_concurrency": config.workers_per_node}
            options |= {"_temp_dir": str(folder / "r"), "_system_config": SYSTEM_CONFIG | at_once}
        stack.callback(forget_ray)
        stack.callback(_disconnect)
        whom = f"Ray: the cluster at {init.address}" if init.address else "Ray to start on this machine"
        try:
            with waiting(whom), joining_group(group), contextlib.nullcontext() if init.address else on_loopback():
                ray.init(**options)
        except Exception as error:  # Ray raises a plain Exception where a node does not start in time
            reason = describe_error(error)
            raise WorkerError(f"ray_init.address: Ray could not start or be reached: {reason}") from error
        gpus = ray.cluster_resources().get("GPU", 0)
        if config.trainer.device == "auto" and device == "cpu" and gpus:
            raise ConfigError(
                "trainer.device", f"must be cuda or cpu: this machine has no GPU, the cluster has {gpus:g}", "auto"
            )
        watch_ray(folder)
        yield


def _disconnect() -> None:
    """Disconnect from Ray, unless a process of it has ended: Ray would wait for that one, and crash at exit."""
    if lost_process() is None:
        ray.shutdown()
    else:
        atexit.register(_exit_at_once)


def _exit_at_once() -> None:
    """End the process of a failed run before the exit handlers of the libraries, which are called later."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def place_workers(config: Config, device: str, log_folder: Path | None = None, kept: Sequence[Pool] = ()) -> list[Pool]:
    """Start the processes of all workers, without loading anything, except those of pools that are `kept`.

    Returns all pools, the training pool first. Raises WorkerError: the cluster does not have the resources.
    """
    roles: list[Role] = ["worker"] if config.actor_rollout_ref.hybrid_engine else ["actor worker", "rollout worker"]
    there = {pool.role: pool for pool in kept}
    folder = log_folder or config.run_dir / "logs"
    pools = [there.get(role) or Pool(config, role=role, log_folder=folder) for role in roles]
    needed = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
    try:
        _check_resources(pools, needed)
        for pool in pools:
            if pool not in kept:
                pool.place(device, needed)
    except BaseException:
        stop_workers(pools)
        raise
    return pools


def _check_resources(pools: list[Pool], needed: dict[str, float]) -> None:
    number, there = sum(pool.size for pool in pools), ray.cluster_resources()
    lacking = [name for name, amount in needed.items() if there.get(name, 0.0) < amount * number]
    if lacking:
        keys = ", ".join(f"{name}.n_gpus_per_node, {name}.nnodes" for name in ["trainer", "rollout"][: len(pools)])
        raise WorkerError(
            f"{keys}: {number} workers need {needed} each; "
            f"the Ray cluster has {', '.join(f'{name} {there.get(name, 0.0):g}' for name in lacking)}"
        )


def stop_workers(pools: list[Pool]) -> None:
    """Stop all workers; may be called repeatedly. Returns within seconds, also if Ray has been killed."""
    if lost_process() is not None:
        return  # the end of their process group stops them

    # Ray's calls wait a minute for a dead cluster and then abort the process; this deadline prevents that.
    def stop() -> None:
        try:
            for pool in pools:
                pool.close()
        except Exception as error:  # Ray may have ended before, and the workers with it
            logger.debug("the workers could not be stopped by Ray: %s", error)

    closing = threading.Thread(target=stop, name="close workers", daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)
    if closing.is_alive():
        logger.warning("Ray did not stop the workers within %s", Timeout(CLOSE_SECONDS))

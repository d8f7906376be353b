"""All workers as one typed object, with student and rollout engine in the same pool or in separate ones.

Each method calls the method of the same name on the workers of its role, with the deadlines of `Pool`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from hybrid_gkd.config import Config
from hybrid_gkd.data.packing import attention_cost
from hybrid_gkd.errors import ConfigError, HybridGKDError, WorkerError
from hybrid_gkd.offload.budget import EngineMemory
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.types import GenerationRequest, MiniBatch, Plan, RewardText, Sample, SampleId, SamplingParams, TopK
from hybrid_gkd.workers.cluster import place_workers, stop_workers
from hybrid_gkd.workers.liveness import RayLost, check_ray
from hybrid_gkd.workers.placement import Placement
from hybrid_gkd.workers.pool import (
    CAUSE_SECONDS,
    CHECK_SECONDS,
    NCCL_KEY,
    SETTLE_SECONDS,
    Calls,
    Pool,
    WorkerDiedError,
    find_dead,
    gather,
    name_workers,
)
from hybrid_gkd.workers.worker import DESCRIPTIONS

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Minimum wait for progress of a generation."""
MAX_HOST_FRACTION = 0.9
"""Maximum fraction of a host's free memory that workers may be planned to use."""
VISIBLE_SECONDS = 10.0
"""Time until a file that another node has written must be visible."""


class WorkerGroup:
    """`config.world_size` training and `config.rollout_world_size` generating workers, one GPU each.

    With a hybrid engine they are the same.

    Args:
        num_ids: see `LogprobModel`.
        engine_memory: sizes a rollout engine without `gpu_memory_utilization`.
        copy_bytes: see `host_memory_suffices`.
        load: False places the workers without loading anything.
        on_placed: called with the placements before the workers load.
        check: called repeatedly while the workers load; its errors end the start.
        kept: pools of an earlier group, see `keep_usable`; this one closes them, also if it cannot start.

    Raises WorkerError: the cluster does not have the resources, or a worker could not start.
    """

    def __init__(
        self, config: Config, *, device: str, num_updates: int = 0, num_critic_updates: int = 0,
        stop_token_ids: list[int] | None = None, num_ids: int | None = None, engine_memory: EngineMemory | None = None,
        copy_bytes: Sequence[float] | None = None, load: bool = True,
        on_placed: Callable[[list[Placement]], None] = lambda placements: None,
        check: Callable[[], None] = lambda: None, log_folder: Path | None = None, kept: Sequence[Pool] = (),
    ):  # fmt: skip
        self.config, self.timeout = config, config.actor_rollout_ref.nccl_timeout
        self.pools = place_workers(config, device, log_folder, kept)
        self.actors, self.rollouts = self.pools[0], self.pools[-1]
        self.size = self.actors.size
        """Number of training workers."""
        self.log_files = [file for pool in self.pools for file in pool.log_files]
        try:
            for pool in self.pools:
                if pool not in kept:
                    pool.begin()
            refuse_shared_gpus(self.placements)
            if log_folder is None and config.trainer.save_freq != 0 and not config.trainer.val_only:
                refuse_separate_folders(config, self.actors)
            on_placed(self.placements)
            self.saves_in_background = host_memory_suffices(self.actors.placements, copy_bytes)
            """True if training workers have the memory for `take_snapshot`."""
            if load:
                ids: dict[str, Any] = {"stop_token_ids": stop_token_ids or [], "num_ids": num_ids}
                updates = {"actor": num_updates, "critic": num_critic_updates}
                self._initialize(check, num_updates=updates, engine_memory=engine_memory, **ids)
        except BaseException:
            self.close()
            raise

    @property
    def placements(self) -> list[Placement]:
        """Return the placements of all workers, training ones first."""
        return [place for pool in self.pools for place in pool.placements]

    def _initialize(self, check: Callable[[], None], **options: Any) -> None:
        """Load all new pools at the same time, and build the process group for weight transfers between pools."""
        calls: Calls = {}
        loading = [pool for pool in self.pools if not pool.descriptions]
        for pool in loading:
            address = pool.rendezvous(pool.load_timeout)
            calls |= pool.start("initialize", address, saves_in_background=self.saves_in_background, **options)
        results = gather("initialize", calls, self.actors.load_timeout, grace_period=CAUSE_SECONDS, check=check)
        for pool in loading:
            pool.descriptions, results = results[: pool.size], results[pool.size :]
        self.description = [self.rollouts.descriptions[0] | own for own in self.actors.descriptions]
        """Device and versions of each training worker, and the engine that generates for it."""
        self.attention_cost = attention_cost(int(self.description[0]["hidden_size"]))
        self._dtype = self.description[0]["engine_dtype"]
        if len(self.pools) > 1:
            address, layout = self.actors.rendezvous(), self.actors.call("weight_layout")[0]
            members = [(self.actors, 0), *((self.rollouts, rank) for rank in range(self.rollouts.size))]
            options = {"size": len(members), "layout": layout, "dtype": self._dtype}
            joins: Calls = {
                pool.workers[own_rank].join_weight_sync.remote(address, rank=rank, **options): (pool, own_rank)
                for rank, (pool, own_rank) in enumerate(members)
            }
            gather("join_weight_sync", joins, grace_period=CAUSE_SECONDS)

    def all_reduce(self, timeout: Timeout) -> None:
        """Run an all-reduce in each pool. Raises WorkerError naming the workers that do not answer."""
        for pool in self.pools:
            pool.all_reduce(timeout)

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[Sample]]:
        """Yield samples of all workers as they finish; an empty list shows progress without finished samples.

        Raises WorkerError if a worker failed, or made no progress within the timeout.
        """
        pool = self.rollouts
        replica_size = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        shares = [requests[rank // replica_size :: pool.size // replica_size] for rank in range(pool.size)]
        streams = pool.streams = pool.start("generate", sampling, shares=shares)
        missing = len(requests)
        last_progress = dict.fromkeys(streams, time.monotonic())

        def detail() -> str:
            at_work = {stream: streams[stream] for stream in list(last_progress)}
            return f"{missing} of {len(requests)} responses unfinished, at {name_workers(at_work)}"

        with waiting(DESCRIPTIONS["generate"], Timeout(self.timeout, NCCL_KEY), detail) as wait:
            while last_progress:
                stream = self._next_stream(streams, last_progress)
                if stream is None:
                    continue
                _, rank = streams[stream]
                last_progress[stream] = time.monotonic()
                wait.restart_timeout()
                try:
                    finished = pool.get("generate", next(stream), rank)
                except StopIteration:
                    del last_progress[stream]
                    continue
                except WorkerDiedError:
                    raise
                except HybridGKDError as error:
                    pool.mark_stuck_peers("generate", rank, {ref.completed(): at for ref, at in streams.items()})
                    if not isinstance(error, WorkerError):
                        raise
                    # The cause may be the death of a worker that shares the engine.
                    peers = {ref: at for ref, at in pool.start("placement").items() if at != (pool, rank)}
                    if (died := find_dead("generate", peers)[0]) is None:
                        raise
                    raise died from error
                missing -= len(finished)
                yield finished
        if missing:
            raise WorkerError(f"{missing} of {len(requests)} samples are missing at the end of the generation")

    def _next_stream(self, streams: Calls, last_progress: dict[Any, float]) -> Any | None:
        """Return a stream that has results, or None after a short wait. Raises WorkerError if one is overdue."""
        now = time.monotonic()
        overdue = [stream for stream, progress in last_progress.items() if now >= progress + self.timeout]
        candidates = overdue or list(last_progress)  # an overdue one may have unseen results
        remaining = max(POLL_SECONDS, min(last_progress.values()) + self.timeout - now)
        ready: list[Any]
        pause = min(remaining, CHECK_SECONDS)
        ready, _ = ray.wait(candidates, num_returns=1, timeout=pause, fetch_local=False)
        check_ray()
        if not ready and overdue:
            raise self.rollouts.timeout_error("generate", [streams[stream][1] for stream in overdue])
        return ready[0] if ready else None

    def accumulate(self, parts: list[MiniBatch]) -> None:
        """Run forward and backward of a part of a mini-batch on every worker; the last part goes to `update`."""
        self.actors.call("accumulate", shares=parts)

    def update(self, batches: list[list[MiniBatch]]) -> list[dict[str, float]]:
        """Take an optimizer step per mini-batch; return the metrics of each. `batches`: see `start_update`."""
        return self.start_update(batches)()

    def start_update(
        self, batches: list[list[MiniBatch]], *, last: bool = True
    ) -> Callable[[], list[dict[str, float]]]:
        """Send mini-batches to the workers, which take an optimizer step on each; return a function that waits for
        their metrics.

        `batches`: mini-batches of each worker. `last`: no other call for the same rollout follows. Parts of the first
        mini-batch may have been accumulated before. Its first micro-batch is sent ahead, so that the workers compute
        while the rest is transferred.
        """
        calls: Calls = {}
        if all(len(share[0].micro_batches) > 1 for share in batches):
            ahead, rest = zip(*(_split_first(share[0]) for share in batches), strict=True)
            calls = self.actors.start("accumulate", shares=ahead)
            batches = [[first, *share[1:]] for first, share in zip(rest, batches, strict=True)]
        calls |= self.actors.start("update", last=last, shares=batches)

        def wait() -> list[dict[str, float]]:
            metrics: list[dict[str, float]] = gather("update", calls)[-1]
            return metrics

        return wait

    def _merge_results(self, method: str, shares: list[Any]) -> dict[Any, Any]:
        """Call a method on the training workers with a part each, and merge the returned dictionaries."""
        return {each: found for part in self.actors.call(method, shares=shares) for each, found in part.items()}

    def compute_logprobs(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        """Return sample id -> float32 [R], over all workers."""
        return self._merge_results("compute_logprobs", micro_batches)

    def compute_topk(self, micro_batches: Plan) -> dict[SampleId, TopK]:
        """Return sample id -> the student's `distillation.topk` most likely tokens of each position."""
        return self._merge_results("compute_topk", micro_batches)

    def compute_ref_logprobs(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        """Return sample id -> float32 [R] under the reference policy, over all workers."""
        return self._merge_results("compute_ref_logprobs", micro_batches)

    def compute_ref_topk(self, micro_batches: Plan) -> dict[SampleId, TopK]:
        """Return sample id -> the reference policy's `ref.topk` most likely tokens of each position."""
        return self._merge_results("compute_ref_topk", micro_batches)

    def compute_own_topk(self, micro_batches: Plan) -> dict[SampleId, TopK]:
        """Return sample id -> a teacher's scores by the student's own weights of `teacher.source`."""
        return self._merge_results("compute_own_topk", micro_batches)

    def compute_reward_scores(self, micro_batches: list[tuple[tuple[RewardText, ...], ...]]) -> dict[int, float]:
        """Return index of a text -> its score by the reward model, over all workers."""
        return self._merge_results("compute_reward_scores", micro_batches)

    def compute_values(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        """Return sample id -> float32 [R], the critic's values before each response token, over all workers."""
        return self._merge_results("compute_values", micro_batches)

    def update_critic(self, batches: list[list[MiniBatch]]) -> list[dict[str, float]]:
        """Take one optimizer step of the critic per mini-batch; return the metrics of each."""
        metrics: list[dict[str, float]] = self.actors.call("update_critic", shares=batches)[0]
        return metrics

    def compute_divergences(self, micro_batches: Plan) -> dict[SampleId, np.ndarray]:
        """Return sample id -> float32 [R, 2 + 3 s], over all workers; see `Actor.compute_divergences`."""
        return self._merge_results("compute_divergences", micro_batches)

    def publish(self, weight_version: int) -> dict[str, float]:
        """Copy the actor's weights into every engine; return the slowest worker's seconds by name."""
        one_pool = len(self.pools) == 1
        seconds = self.actors.call("publish", weight_version) if one_pool else self._sync_weights(weight_version)
        return {name: max(part.get(name, 0.0) for part in seconds) for part in seconds for name in part}

    def _sync_weights(self, weight_version: int) -> list[dict[str, float]]:
        """Transfer weights from pool to pool. The log lines are documented: users search for them when a run hangs."""
        logger.info("Starting rollout weight synchronization...")
        started, limit = time.monotonic(), Timeout(self.timeout, NCCL_KEY)
        sending, receiving, still_sending = Calls(), Calls(), set[Any]()

        def on_answer(ref: Any) -> None:
            if still_sending:
                still_sending.discard(ref)
                if not still_sending:
                    logger.info("Actor weight sync completed")
                    text = "Waiting for rollout weight sync with timeout=%.0fs... (%s)"
                    logger.info(text, self.timeout, NCCL_KEY)

        try:
            here = self.actors.start("placement") | self.rollouts.start("placement")
            gather("publish", here, limit)  # so that nothing is sent to a lost worker
            sending = self.actors.start("send_weights", self._dtype)
            receiving = self.rollouts.start("receive_weights", weight_version)
            still_sending |= sending.keys()
            # At the timeout a waiting worker raises; one that does not answer is the cause.
            seconds = gather("publish", sending | receiving, limit, on_answer, grace_period=CAUSE_SECONDS)
        except HybridGKDError as error:
            for call in sending | receiving:  # they would wait for the failed one until their timeout
                ray.cancel(call)
            logger.error("Rollout weight sync failed after %.2fs: %s", time.monotonic() - started, error)
            raise
        logger.info("Rollout weight sync completed in %.2fs", time.monotonic() - started)
        return seconds

    def save_checkpoint(self, folder: Path, *, tokenizer_path: str) -> dict[str, FileSum]:
        """Write all parts of a checkpoint into `folder`, which all workers share; return the checksums of its files."""
        timeout = self.actors.load_timeout
        written = self.actors.call("save_checkpoint", folder, tokenizer_path=tokenizer_path, timeout=timeout)
        return {name: each for part in written for name, each in part.items()}

    def take_snapshot(self, *, tokenizer_path: str | None) -> None:
        """Copy the present state to the host for `write_snapshot`; requires `saves_in_background`.

        `tokenizer_path`: for exports; None: without exports.
        """
        self.actors.call("take_snapshot", tokenizer_path=tokenizer_path, timeout=self.actors.load_timeout)

    def write_snapshot(self, folder: Path) -> None:
        """Start writing the snapshot into `folder`, which all workers share, in the background."""
        self.actors.call("write_snapshot", folder)

    def snapshot_written(self) -> bool:
        """Return whether all workers have written the snapshot. Raises as `finish_snapshot` if one failed."""
        return all(self.actors.call("snapshot_written"))

    def finish_snapshot(self) -> tuple[dict[str, FileSum], float]:
        """Wait for the snapshot; return checksums of the files by path in the folder, and the slowest worker's seconds.

        Raises CheckpointError.
        """
        calls = self.actors.start("finish_snapshot")
        # At the timeout a worker whose disk is too slow raises CheckpointError; only a hung one does not answer.
        written = gather("finish_snapshot", calls, self.actors.load_timeout, grace_period=CAUSE_SECONDS)
        return {name: each for part, _ in written for name, each in part.items()}, max(taken for _, taken in written)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore a checkpoint. Call `publish` next."""
        self.actors.call("load_checkpoint", folder, timeout=self.actors.load_timeout)

    def can_save(self) -> bool:
        """Return whether training workers still respond after a failure; log a warning if they are stuck in a
        collective.

        A separate rollout pool is stopped first, unless a training worker is lost.
        """
        if len(self.pools) > 1 and find_dead("placement", self.actors.start("placement"))[0] is None:
            self.rollouts.close()
        return self.actors.is_responsive()

    def keep_usable(self, *, actors: bool) -> list[Pool]:
        """After a failure, take the intact pool out of this group for another one; empty unless a pool lost a worker.

        Unfinished work is dropped within SETTLE_SECONDS. A pool in which a call has failed is not intact.
        `actors`: whether training workers may be taken; their weights are undefined, see `load_checkpoint`.

        Raises RayLost.
        """
        if len(self.pools) == 1:
            return []
        lost, intact = list[Pool](), list[Pool]()
        for pool, calls in [(pool, pool.start_settling()) for pool in self.pools]:
            try:
                if not calls:  # closed by `can_save`
                    lost.append(pool)
                elif all(gather("settle", calls, Timeout(SETTLE_SECONDS))) and (actors or pool is not self.actors):
                    logger.info("not lost, and used again: %s", name_workers(calls))
                    intact.append(pool)
            except WorkerDiedError:
                lost.append(pool)
            except RayLost:
                raise
            except WorkerError as error:
                logger.warning("cannot be used again: %s", error)
        return [pool.hand_over() for pool in intact] if lost else []

    def _responsive_pools(self, generating: bool) -> list[Pool]:
        """Return the pools to call, without a separate rollout pool that is `generating`, which responds at its end."""
        return self.pools[:1] if generating else self.pools

    def device_metrics(self, *, generating: bool = False) -> dict[str, float]:
        """Return memory in GiB, and seconds of updates since the last call, by metric name: the maximum over workers.

        `generating`: the next batch is being generated; a separate rollout pool is then skipped.
        """
        parts = [part for pool in self._responsive_pools(generating) for part in pool.call("device_metrics")]
        return {name: max(part[name] for part in parts if name in part) for part in parts for name in part}

    def write_profiles(self, *, generating: bool) -> list[str]:
        """End the profiles of a step of `trainer.profile_steps`; return their files, or the reasons of failures.

        `generating` as in `device_metrics`; the profiles of that pool have been written before.
        """
        calls: Calls = {}
        for pool in self._responsive_pools(generating):
            calls |= pool.start("write_profiles")
        return [text for part in gather("write_profiles", calls, self.actors.load_timeout) for text in part]

    def close(self) -> None:
        """Stop the workers, as `stop_workers`."""
        stop_workers(self.pools)


def _split_first(batch: MiniBatch) -> tuple[MiniBatch, MiniBatch]:
    """Return the first micro-batch and the others."""
    first, *others = batch.micro_batches
    return dataclasses.replace(batch, micro_batches=(first,)), dataclasses.replace(batch, micro_batches=tuple(others))


def refuse_shared_gpus(placements: list[Placement]) -> None:
    """Raise WorkerError if two workers, of one pool or of two, see the same GPU."""
    holders: dict[str, Placement] = {}
    for place in placements:
        if place.gpu is None:
            continue
        first = holders.setdefault(place.gpu, place)
        if first is not place:
            raise WorkerError(
                f"trainer.n_gpus_per_node: {first.worker} and {place.worker} have the same GPU ({place.gpu}); "
                f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')} here"
            )


def refuse_separate_folders(config: Config, workers: Pool) -> None:
    """Raise ConfigError if a training worker has written its log to a folder that this machine does not see: its part
    of a checkpoint would be lost."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    for place, file in zip(workers.placements, workers.log_files, strict=True):
        while not is_visible(file):
            if time.monotonic() > deadline:
                found = f"{place.worker} at {place.host} has written to {file}, which is not on this machine"
                rule, value = f"must be a folder that all nodes share: {found}", config.trainer.default_local_dir
                raise ConfigError("trainer.default_local_dir", rule, value)
            time.sleep(0.5)


def is_visible(file: Path) -> bool:
    """Return whether a file exists; opening its folders makes network file systems look for new entries."""
    for folder in (file.parent.parent, file.parent):
        if folder.is_dir():
            os.listdir(folder)
    return file.exists()


def host_memory_suffices(placements: list[Placement], copy_bytes: Sequence[float] | None) -> bool:
    """Return whether hosts have the memory to write checkpoints in the background; log a warning if one has not.

    `copy_bytes`: host memory of each worker in total, by rank, with a copy of its part of a checkpoint; None if
    checkpoints are never written in the background. Free memory was measured before the workers load.
    """
    if copy_bytes is None:
        return False
    for host in {place.host for place in placements}:
        here = [place for place in placements if place.host == host]
        free = min(place.free_host_bytes for place in here)
        needed = sum(copy_bytes[place.rank] for place in here)
        if needed > MAX_HOST_FRACTION * free:
            logger.warning(
                "checkpoints are not written in the background: %d worker(s) at %s would need %.1f GiB of host memory "
                "with a copy of one, but %.1f GiB are free", len(here), host, needed / 2**30, free / 2**30,
            )  # fmt: skip
            return False
    return True

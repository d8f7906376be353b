"""One worker of the pool: an actor and a rollout engine that share a device and take turns.

The class is plain; `workers/group.py` makes a Ray actor of it. Heavy imports happen in the constructor, in
the worker's own process, after the environment that torch and vLLM read has been set.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.errors import DeviceMemoryError, WorkerError
from hybrid_gkd.spans import SUFFIX, Clock, SpanFile, spanned
from hybrid_gkd.types import GenerationRequest, MiniBatch, SamplingParams, Sequence, TrainSequence
from hybrid_gkd.workers.placement import Placement, Role, threads_per_process

logger = logging.getLogger(__name__)
T = TypeVar("T")

if TYPE_CHECKING:
    from hybrid_gkd.rollout.vllm import RolloutEngine
    from hybrid_gkd.rollout.weight_sync import WeightSpec
    from hybrid_gkd.student.actor import Actor


class Worker:
    """One worker of a pool. What concerns the engine or the actor is for workers whose role has it.

    Args:
        config: the whole configuration.
        role: what it does.
        rank: 0-based, in its pool.
        size: of the pool.
        device: "cuda" or "cpu".
        log_file: takes everything that this process prints; its spans go to a file beside it.
    """

    def __init__(self, config: Config, *, role: Role, rank: int, size: int, device: str, log_file: str):
        redirect_output(Path(log_file))
        self.config = config
        self.role = role
        self.rank, self.size = rank, size
        self.device_type = device
        self.clock = Clock(f"{role} {rank}", SpanFile(Path(log_file).with_suffix(SUFFIX)))
        self.weight_version = 0
        self.published = self.generated = False
        self.engine_pool_bytes = 0
        self.actor_rest_bytes = 0
        """What is left of the actor on the device after a publish, beyond what the engine alone had taken."""
        self.measured_tokens, self.measured_bytes = 0, 0
        """Of the largest micro-batch so far; most that a mini-batch has taken beside parameters and optimizer state."""
        self.accumulated: tuple[tuple[TrainSequence, ...], ...] = ()
        """Micro-batches behind the gradients that there are, kept until the optimizer step."""

    def address(self) -> tuple[str, int]:
        """Host and a free port of this worker, for the process group's rendezvous."""
        host = "127.0.0.1"
        if not self._on_one_host():
            import ray

            host = ray.util.get_node_ip_address()  # by which Ray's other nodes reach this one
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def placement(self) -> Placement:
        """Where this worker runs."""
        host, gpu = socket.gethostname(), dict[str, Any]()
        if self.device_type == "cuda":
            import torch

            properties, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
            gpu = {
                "device": properties.name, "gpu": f"{host} {properties.uuid}", "free_bytes": free, "total_bytes": total,
            }
        return Placement(
            role=self.role, rank=self.rank, host=host, pid=os.getpid(),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", "not set"), **gpu,
        )

    def all_reduce(self, address: tuple[str, int], *, timeout: float) -> None:
        """One number summed over all workers, on their devices.

        Raises:
            WorkerError: not within `timeout` seconds, or with a wrong sum.
        """
        import torch
        import torch.distributed as dist

        deadline = time.monotonic() + timeout
        if not dist.is_initialized():
            self._join(address, timeout)
        number = torch.tensor([self.rank + 1.0], device=self.device_type)
        work = dist.all_reduce(number, async_op=True)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise WorkerError(f"{self.role} {self.rank} waited {timeout:g} s for the others in an all-reduce")
            time.sleep(0.01)
        work.wait()
        expected = self.size * (self.size + 1) / 2
        if number.item() != expected:
            raise WorkerError(f"{self.role} {self.rank}: an all-reduce gave {number.item()}, not {expected}")

    @spanned("initialize")
    def initialize(self, address: tuple[str, int], *, num_updates: int, stop_token_ids: list[int]) -> dict[str, str]:
        """Join the process group, reach the others through it, build the engine and the actor.

        Returns:
            What runs here: device name, engine and versions.

        Raises:
            WorkerError: the others were not reached.
        """
        timeout = self.config.actor_rollout_ref.nccl_timeout
        self._join(address, timeout)
        if self.size > 1:
            self.all_reduce(address, timeout=timeout)
        import torch

        from hybrid_gkd.offload.device import DeviceMemory, free_device_bytes
        from hybrid_gkd.offload.engine import EngineWeights, KVCache
        from hybrid_gkd.offload.pinned import HostMirror
        from hybrid_gkd.offload.residency import MemoryOwner, Residency
        from hybrid_gkd.student.actor import Actor

        torch.manual_seed(self.config.trainer.seed)
        on_gpu = self.device_type == "cuda"
        self.device = torch.device(self.device_type, 0) if on_gpu else torch.device("cpu")
        self.memory = DeviceMemory(self.device_type)
        # The engine first: it measures how much memory is free.
        description = describe(self.device)
        if self.role != "actor worker":
            description |= self._build_engine(stop_token_ids)
        owners: dict[str, MemoryOwner] = {}
        movable: set[str] = set()
        self.mirrors: dict[str, HostMirror] = {}
        if self.role != "rollout worker":
            self.actor: Actor = Actor(self.config, device=self.device, num_updates=num_updates)
            description["hidden_size"] = str(self.actor.hidden_size)
            self.mirrors = {
                "actor_params": HostMirror(self.actor.parameters),
                "optimizer_state": HostMirror(self.actor.optimizer_tensors),
            }
            owners |= self.mirrors
            fsdp = self.config.actor_rollout_ref.actor.fsdp_config
            movable |= {"actor_params"} if on_gpu and fsdp.param_offload and self.role == "worker" else set()
            movable |= {"optimizer_state"} if on_gpu and fsdp.optimizer_offload else set()
        asleep: set[str] = set()
        if on_gpu and self.role == "worker":
            weights = rest = 0  # measured when they wake
            if not self.engine.can_sleep:
                weights, rest = self.engine.weight_bytes, max(0, self.built_engine_bytes - self.engine.weight_bytes)
            owners["engine_weights"] = EngineWeights(self.engine, weights)
            owners["kv_cache"] = KVCache(self.engine, self._engine_lost_its_weights, rest)
            asleep = {"kv_cache", "engine_weights"} if self.engine.can_sleep else set()
        self.takes_turns = bool(movable | asleep)
        self.residency = Residency(
            owners, movable=movable | asleep, resident=set(owners) - asleep,
            free_bytes=free_device_bytes if on_gpu else None,
        )
        return description

    def _build_engine(self, stop_token_ids: list[int]) -> dict[str, str]:
        import torch

        from hybrid_gkd.rollout.vllm import make_engine

        used_before = self.memory.used()
        self.engine: RolloutEngine = make_engine(self.config, device=self.device, stop_token_ids=stop_token_ids)
        self.memory.trim()
        self.used_with_engine = self.memory.used()
        # torch counts the pool of a sleeping engine as allocated, though nothing is behind the addresses.
        self.engine_pool_bytes = torch.cuda.memory_allocated() if self.engine.can_sleep else 0
        if self.engine.can_sleep:
            self.engine.sleep()
        self.built_engine_bytes = self.memory.used() - used_before  # asleep, if it can sleep
        return {"engine": engine_name(self.engine), "engine_dtype": str(self.engine.dtype).removeprefix("torch.")}

    def _join(self, address: tuple[str, int], timeout: float) -> None:
        os.environ.update(
            RANK=str(self.rank), WORLD_SIZE=str(self.size), LOCAL_RANK="0",
            MASTER_ADDR=address[0], MASTER_PORT=str(address[1]),
        )
        if self.device_type == "cpu":
            os.environ["OMP_NUM_THREADS"] = str(threads_per_process(self.config))
            if self._on_one_host():  # the host's own name may not resolve on a laptop
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        from hybrid_gkd.rollout.weight_sync import ABORT_SECONDS

        if self.device_type == "cuda":
            torch.cuda.set_device(0)  # Ray shows each worker its own GPU only
        # Collectives are given longer than the caller waits for them and than a weight sync between pools may take:
        # whoever waits for a rank that is late in one must still be there when the student is saved.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device_type == "cuda" else "gloo",
            store=dist.TCPStore(*address, self.size, self.rank == 0, timedelta(seconds=timeout)),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout + ABORT_SECONDS),
        )

    def _on_one_host(self) -> bool:
        return self.config.ray_init.address is None or (self.config.trainer.nnodes == 1 and self.role == "worker")

    def weight_layout(self) -> list[WeightSpec]:
        """The student's weights in the order in which they travel."""
        return self.actor.weight_layout()

    def join_weight_sync(
        self, address: tuple[str, int], *, rank: int, size: int, layout: list[WeightSpec], dtype: str
    ) -> None:
        """Become a member of the group through which weights travel from pool to pool. Raises WorkerError."""
        import torch

        from hybrid_gkd.rollout.weight_sync import WeightSync

        arr = self.config.actor_rollout_ref
        self.weight_sync = WeightSync(
            address, rank=rank, size=size, layout=layout, dtype=getattr(torch, dtype), device=self.device,
            bucket_bytes=arr.rollout.update_weights_bucket_megabytes * 2**20, timeout=arr.nccl_timeout,
        )

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[Sequence]]:
        """Yield sequences as they finish, with the weights of the last publish; empty lists: it goes on.

        With tensor parallelism all ranks of a replica run the same requests and the first one yields them.
        """
        assert self.published, "the engine's weights are undefined until they are published"
        first_of_replica = self.rank % self.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 0
        with self.clock.span("gen"):
            self.residency.enter("rollout")
            before = self.memory.used()
            for finished in self.engine.generate(requests, sampling, self.weight_version):
                yield finished if first_of_replica else []
            if not self.generated:  # what the first generation takes and keeps is the engine's
                self.generated = True
                self.memory.trim()
                self.used_with_engine += self.memory.used() - before
            self.residency.prepare("update")

    @spanned("update_actor")
    def accumulate(self, part: MiniBatch) -> None:
        """Forward and backward of a part of a mini-batch, whose last part goes to `update`. Raises as `update`."""
        self._attempt(self._accumulate, part)

    @spanned("update_actor")
    def update(self, batches: list[MiniBatch]) -> list[dict[str, float]]:
        """One optimizer step per mini-batch; the metrics of each, equal on all ranks.

        Of the first one, parts may have been accumulated.

        Copies run behind the work: the optimizer state comes while the last micro-batch is computed, if what the
        micro-batches took so far leaves room for it, and what the rollout does not need leaves from the end on.

        A single worker that runs out of device memory tries once more, with micro-batches of half the size. One of
        several cannot: the others are in collectives that it has left.

        Raises:
            DeviceMemoryError: the micro-batches do not fit, and no weight has changed; or the optimizer step does not,
                and some may have.
        """
        metrics = []
        for batch in batches:
            metrics.append(self._attempt(self._update, batch))
            self.accumulated = ()
        if self.takes_turns:
            self.memory.trim()  # now, while no copy is in flight that it would wait for
        self.residency.prepare("rollout")
        return metrics

    def _attempt(self, compute: Callable[[MiniBatch], T], part: MiniBatch) -> T:
        """`compute` a part, or, if memory runs out, once more all there is of the mini-batch in halves."""
        import torch

        from hybrid_gkd.student.actor import split_micro_batches

        whole = dataclasses.replace(part, micro_batches=(*self.accumulated, *part.micro_batches))
        try:
            result = compute(part)
            self.accumulated = whole.micro_batches
            return result
        except torch.OutOfMemoryError as error:
            halves, reason = split_micro_batches(whole), str(error).splitlines()[0]
        # Only here, when its exception is gone, are the activations of the failed attempt free.
        if self.size > 1 or halves is None:
            raise self._out_of_memory(reason)
        logger.warning("once more with micro-batches of half the size: %s", reason)
        self.accumulated = ()
        self.residency.enter("update")
        self.memory.trim()
        try:
            result = compute(halves)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(str(error).splitlines()[0]) from error
        self.accumulated = halves.micro_batches
        return result

    def _enter_update(self) -> None:
        self.residency.enter("update")
        if not self.accumulated:
            self.memory.start()

    def _accumulate(self, part: MiniBatch) -> None:
        self._enter_update()
        self.actor.accumulate(part)

    def _update(self, batch: MiniBatch) -> dict[str, float]:
        self._enter_update()
        micro_batches = (*self.accumulated, *batch.micro_batches)
        tokens = max(sum(item.sequence.num_tokens for item in micro_batch) for micro_batch in micro_batches)
        arriving = 0

        def before_last() -> None:
            nonlocal arriving
            self.measured_bytes = max(self.measured_bytes, self.memory.taken())
            if self.measured_tokens:  # a larger micro-batch than any before may need more by as much as it is larger
                reserve = round(self.measured_bytes * max(1.0, tokens / self.measured_tokens))
                arriving = self.residency.prepare("optimizer_step", reserve=reserve)

        def before_step() -> None:
            self.measured_bytes = max(self.measured_bytes, self.memory.taken() - arriving)
            self.measured_tokens = max(self.measured_tokens, tokens)
            self.residency.enter("optimizer_step")

        return self.actor.update(batch, before_last=before_last, before_step=before_step)

    def _out_of_memory(self, reason: str) -> DeviceMemoryError:
        owners = {t: b for (phase, t), b in self.residency.bytes_by_phase().items() if phase == "update"}
        sizes = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sorted(owners.items()))
        return DeviceMemoryError(
            f"phase update: {self.role} {self.rank} ran out of device memory beside {sizes}; the last checkpoint is "
            "intact. Lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, switch on "
            "actor_rollout_ref.model.enable_gradient_checkpointing or an offload, or give vLLM or a teacher on this "
            f"GPU a smaller gpu_memory_utilization. {reason}"
        )

    @spanned("update_actor")
    def compute_logprobs(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """Sequence index -> log-probabilities float32 [R] of its response under the current weights.

        Raises:
            DeviceMemoryError: a micro-batch does not fit.
        """
        import torch

        self.residency.enter("update")
        try:
            return self.actor.compute_logprobs(micro_batches)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(str(error).splitlines()[0]) from error

    @spanned("sync_rollout_weights")
    def publish(self, weight_version: int) -> dict[str, float]:
        """Copy the actor's weights into the engine and make it ready to generate.

        Returns:
            Seconds: `publish`, `offload` (all that the residency has moved since the last publish), and each move.

        Raises:
            WorkerError: with `rollout.verify_weights`, the engine holds other weights than the actor.
        """
        # vLLM frees its weights only together with its cache. What leaves has until the end to do so.
        self.residency.enter("update", finish=False)
        self.residency.enter("publish", finish=False)
        started = time.perf_counter()
        self.engine.load_weights(self.actor.full_tensors(self.engine.dtype))
        self.weight_version = weight_version
        self.published = True
        seconds = time.perf_counter() - started
        if self.config.actor_rollout_ref.rollout.verify_weights:
            self.engine.verify_weights(self.actor.full_tensors(self.engine.dtype))
        self.residency.enter("rollout")
        moves = self.residency.take_seconds()
        started = time.perf_counter()
        if self.takes_turns:
            self.memory.trim()
            self.actor_rest_bytes = self.memory.used() - self.used_with_engine
            moves["trim"] = time.perf_counter() - started
        return {"publish": seconds, "offload": sum(moves.values())} | moves

    @spanned("sync_rollout_weights")
    def send_weights(self, weight_version: int, dtype: str) -> dict[str, float]:
        """Send the actor's weights to the rollout engine's pool: gathered on all ranks, sent by the first.

        Returns:
            Seconds: `offload`, all that the residency has moved since the last time.

        Raises:
            WorkerError: they were not taken within the timeout.
        """
        import torch

        self.residency.enter("publish")
        rounds = 2 if self.config.actor_rollout_ref.rollout.verify_weights else 1
        weights = itertools.chain.from_iterable(self.actor.full_tensors(getattr(torch, dtype)) for _ in range(rounds))
        try:
            if self.rank == 0:
                for _ in range(rounds):
                    self.weight_sync.send(weights)
        finally:
            for _ in weights:  # all ranks gather all of it, also when it cannot be sent: the student has to be saved
                pass
        self.weight_version = weight_version
        return {"offload": sum(self.residency.take_seconds().values())}

    @spanned("sync_rollout_weights")
    def receive_weights(self, weight_version: int) -> dict[str, float]:
        """Take the weights that the actor's pool sends into the engine.

        Returns:
            Seconds: `publish`.

        Raises:
            WorkerError: they did not come in time; or, with `rollout.verify_weights`, the engine holds others.
        """
        started = time.perf_counter()
        self.engine.load_weights(self.weight_sync.receive())
        seconds = time.perf_counter() - started
        if self.config.actor_rollout_ref.rollout.verify_weights:
            self.engine.verify_weights(self.weight_sync.receive())
        self.weight_version = weight_version
        self.published = True
        return {"publish": seconds}

    def save_checkpoint(self, folder: str, *, tokenizer_path: str) -> None:
        """Write this rank's part of a checkpoint into `folder`."""
        from hybrid_gkd import checkpoint

        self.residency.enter("optimizer_step")
        checkpoint.save_actor(self.actor, Path(folder), tokenizer_path=tokenizer_path, config=self.config)

    def load_checkpoint(self, folder: str) -> None:
        """Restore model, optimizer, schedule and random states. Call `publish` next."""
        from hybrid_gkd import checkpoint

        self.residency.enter("optimizer_step")
        checkpoint.load_actor(self.actor, Path(folder))

    def memory_metrics(self) -> dict[str, float]:
        """Peak memory since the last call and bytes by phase and owner, GiB, under their metric names."""
        metrics = {
            f"memory/{phase}/{owner}_gb": num_bytes / 2**30
            for (phase, owner), num_bytes in self.residency.bytes_by_phase().items()
        }
        if self.device_type == "cuda":
            metrics["perf/max_memory_allocated_gb"] = (self.memory.take_peak() - self.engine_pool_bytes) / 2**30
            if self.role == "worker" and self.engine.can_sleep:
                metrics["memory/update/sleeping_engine_gb"] = self.built_engine_bytes / 2**30
            if self.role == "worker":
                metrics["memory/rollout/actor_rest_gb"] = self.actor_rest_bytes / 2**30
            for name, mirror in self.mirrors.items():
                for direction, rate in mirror.gigabytes_per_second.items():
                    metrics[f"perf/copy/{name}_{direction}"] = rate
        metrics["perf/max_host_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return metrics

    def _engine_lost_its_weights(self) -> None:
        self.published = False


def redirect_output(log_file: Path) -> None:
    """Send this process's output, that of libraries in C++ included, to a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "ab", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def describe(device: object) -> dict[str, str]:
    """Device and versions of this worker."""
    from importlib.metadata import version

    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {"device": name, "torch": version("torch"), "host": socket.gethostname()}


def engine_name(engine: RolloutEngine) -> str:
    """What generates, with its version."""
    from hybrid_gkd.models import vllm_compat

    is_vllm = type(engine).__name__ == "VLLMEngine"
    return f"vllm {vllm_compat.vllm_version()}" if is_vllm else "hf (transformers generation)"

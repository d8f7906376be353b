"""One worker of the pool: an actor and a rollout engine that share a device and take turns.

The class is plain; `workers/group.py` makes a Ray actor of it. Heavy imports happen in the constructor, in
the worker's own process, after the environment that torch and vLLM read has been set.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.types import GenerationRequest, MiniBatch, SamplingParams, Sequence, TrainSequence

if TYPE_CHECKING:
    from hybrid_gkd.workers.actor import Actor
    from hybrid_gkd.workers.rollout import RolloutEngine


class Worker:
    """Rank `rank` of `config.world_size`.

    Args:
        config: the whole configuration.
        rank: 0-based.
        device: "cuda" or "cpu".
        log_file: takes everything that this process prints.
    """

    def __init__(self, config: Config, *, rank: int, device: str, log_file: str):
        redirect_output(Path(log_file))
        self.config = config
        self.rank = rank
        self.device_type = device
        self.weight_version = 0
        self.published = False

    def address(self) -> tuple[str, int]:
        """Host and a free port of this worker, for the process group's rendezvous."""
        host = "127.0.0.1" if self.config.trainer.nnodes == 1 else socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def initialize(self, address: tuple[str, int], *, num_updates: int, stop_token_ids: list[int]) -> dict[str, str]:
        """Join the process group, build the engine and the actor.

        Returns:
            What runs here: device name, engine and versions.
        """
        self._join(address)
        import torch

        from hybrid_gkd.offload.engine import EngineWeights, KVCache, free_device_bytes
        from hybrid_gkd.offload.host import HostMirror
        from hybrid_gkd.offload.residency import Residency, Tenant
        from hybrid_gkd.workers.actor import Actor
        from hybrid_gkd.workers.rollout import make_engine

        torch.manual_seed(self.config.trainer.seed)
        device = torch.device(self.device_type, 0) if self.device_type == "cuda" else torch.device("cpu")
        # The engine first: it measures how much memory is free.
        self.engine: RolloutEngine = make_engine(self.config, device=device, stop_token_ids=stop_token_ids)
        # torch counts the pool of a sleeping engine as allocated, though nothing is behind the addresses.
        self.engine_pool_bytes = torch.cuda.memory_allocated() if self.engine.can_sleep else 0
        movable: set[str] = set()
        if self.engine.can_sleep:
            self.engine.sleep()
            movable |= {"kv_cache", "engine_weights"}
        self.actor: Actor = Actor(self.config, device=device, num_updates=num_updates)
        tenants: dict[str, Tenant] = {
            "actor_params": HostMirror(self.actor.parameters),
            "optimizer_state": HostMirror(self.actor.optimizer_tensors),
        }
        on_gpu = self.device_type == "cuda"
        if on_gpu:
            tenants["engine_weights"] = EngineWeights(self.engine)
            tenants["kv_cache"] = KVCache(self.engine, self._engine_lost_its_weights)
            fsdp = self.config.actor_rollout_ref.actor.fsdp_config
            movable |= {"actor_params"} if fsdp.param_offload else set()
            movable |= {"optimizer_state"} if fsdp.optimizer_offload else set()
        self.residency = Residency(
            tenants, movable=movable, resident=set(tenants) - (movable & {"kv_cache", "engine_weights"}),
            free_bytes=free_device_bytes if on_gpu else None,
        )
        return describe(device, self.engine)

    def _join(self, address: tuple[str, int]) -> None:
        world_size = self.config.world_size
        os.environ.update(
            RANK=str(self.rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0",
            MASTER_ADDR=address[0], MASTER_PORT=str(address[1]),
        )
        if self.device_type == "cpu":
            # The workers and a local teacher share the cores: threads that spin for each other are slower than few.
            sharers = self.config.trainer.n_gpus_per_node
            if self.config.distillation.enabled and self.config.actor_rollout_ref.teacher.server_ip is None:
                sharers += 1
            os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharers))
            if self.config.trainer.nnodes == 1:  # the host's own name may not resolve on a laptop
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        if self.device_type == "cuda":
            torch.cuda.set_device(0)  # Ray shows each worker its own GPU only
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device_type == "cuda" else "gloo",
            rank=self.rank,
            world_size=world_size,
            timeout=timedelta(seconds=self.config.actor_rollout_ref.nccl_timeout),
        )

    def generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> Iterator[list[Sequence]]:
        """Yield sequences as they finish, with the weights of the last publish.

        With tensor parallelism all ranks of a replica run the same requests and the first one yields them.
        """
        assert self.published, "the engine's weights are undefined until they are published"
        self.residency.enter("rollout")
        first_of_replica = self.rank % self.config.actor_rollout_ref.rollout.tensor_model_parallel_size == 0
        for finished in self.engine.generate(requests, sampling, self.weight_version):
            if first_of_replica:
                yield finished

    def update(self, batches: list[MiniBatch]) -> list[dict[str, float]]:
        """One optimizer step per mini-batch; the metrics of each, equal on all ranks."""
        self.residency.enter("update")
        metrics = []
        for batch in batches:
            metrics.append(self.actor.update(batch, before_step=lambda: self.residency.enter("optimizer_step")))
            self.residency.enter("update")
        return metrics

    def compute_logprobs(self, micro_batches: tuple[tuple[TrainSequence, ...], ...]) -> dict[int, np.ndarray]:
        """Sequence index -> log-probabilities float32 [R] of its response under the current weights."""
        self.residency.enter("update")
        return self.actor.compute_logprobs(micro_batches)

    def publish(self, weight_version: int) -> dict[str, float]:
        """Copy the actor's weights into the engine and make it ready to generate.

        Returns:
            Seconds: `publish`, `offload` (all that the residency has moved since the last publish), and each move.

        Raises:
            WorkerError: with `rollout.verify_weights`, the engine holds other weights than the actor.
        """
        self.residency.enter("update")  # vLLM frees its weights only together with its cache
        self.residency.enter("publish")
        started = time.perf_counter()
        self.engine.load_weights(self.actor.full_tensors(self.engine.dtype))
        self.weight_version = weight_version
        self.published = True
        seconds = time.perf_counter() - started
        if self.config.actor_rollout_ref.rollout.verify_weights:
            self.engine.verify_weights(self.actor.full_tensors(self.engine.dtype))
        self.residency.enter("rollout")
        moves = self.residency.take_seconds()
        return {"publish": seconds, "offload": sum(moves.values())} | moves

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
        """Peak memory since the last call and bytes by phase and tenant, GiB, under their metric names."""
        metrics = {
            f"memory/{phase}/{tenant}_gb": num_bytes / 2**30
            for (phase, tenant), num_bytes in self.residency.bytes_by_phase().items()
        }
        if self.device_type == "cuda":
            import torch

            peak = torch.cuda.max_memory_allocated() - self.engine_pool_bytes
            metrics["perf/max_memory_allocated_gb"] = peak / 2**30
            torch.cuda.reset_peak_memory_stats()
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


def describe(device: object, engine: RolloutEngine) -> dict[str, str]:
    """Device, engine and versions of this worker."""
    from importlib.metadata import version

    import torch

    from hybrid_gkd import vllm_compat

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    engine_name = "hf (transformers generation)"
    if type(engine).__name__ == "VLLMEngine":
        engine_name = f"vllm {vllm_compat.vllm_version()}"
    return {"device": name, "engine": engine_name, "torch": version("torch"), "host": socket.gethostname()}

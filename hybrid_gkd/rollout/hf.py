"""Rollout engine on transformers' `generate`, for machines without vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_gkd.config import Config
from hybrid_gkd.models.spec import read_config
from hybrid_gkd.offload.needs import engine_dtype
from hybrid_gkd.rollout.engine import RolloutEngine
from hybrid_gkd.rollout.verify import check_all_set, verify
from hybrid_gkd.rollout.weights import num_bytes
from hybrid_gkd.types import GenerationRequest, Sample, SamplingParams


class HFRolloutEngine(RolloutEngine):
    """Runs transformers' `generate` on a copy of the student: slow, but works wherever torch does.

    A step generates one batch to its end with one seed. Unlike with vLLM, completions therefore depend on which
    requests are added together. The engine never sleeps.
    """

    description = "hf (transformers generation)"

    def __init__(self, config: Config, *, device: torch.device, stop_token_ids: list[int], num_ids: int | None = None):
        from transformers import AutoModelForCausalLM, GenerationConfig

        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        self.dtype = getattr(torch, engine_dtype(rollout.dtype, device.type))
        self.device, self.stop_token_ids = device, stop_token_ids
        self.pad = stop_token_ids[0] if stop_token_ids else 0
        self.max_num_seqs = rollout.max_num_seqs
        hf_config = read_config(model.path, model.trust_remote_code, model.override_config)
        self.model = AutoModelForCausalLM.from_config(
            hf_config, dtype=self.dtype, trust_remote_code=model.trust_remote_code
        ).to(device).eval()
        self.model.generation_config = GenerationConfig()  # the model's own would supply unset options
        head = self.model.get_output_embeddings()
        if num_ids is not None and num_ids < head.out_features:
            head.register_forward_hook(lambda module, inputs, logits: logits[..., :num_ids])
        self.weight_bytes = num_bytes(self.model)
        self.batches = deque[tuple[Sequence[GenerationRequest], SamplingParams]]()
        """Batches not started yet."""

    def add(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        by_length = sorted(requests, key=lambda request: len(request.prompt_ids))
        starts = range(0, len(by_length), self.max_num_seqs)
        self.batches += [(by_length[start : start + self.max_num_seqs], sampling) for start in starts]

    @property
    def has_unfinished(self) -> bool:
        return bool(self.batches)

    def step(self) -> list[Sample]:
        return self._generate_batch(*self.batches.popleft()) if self.batches else []

    def pause(self) -> list[Sample]:
        waiting = [(request, sampling) for batch, sampling in self.batches for request in batch]
        self.batches.clear()
        return [
            self.sample(request, [], status="paused", logprobs=[] if sampling.logprobs else None)
            for request, sampling in waiting
        ]

    @torch.no_grad()
    def _generate_batch(self, batch: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Sample]:
        from transformers import GenerationConfig

        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.full((len(batch), width), self.pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        greedy = sampling.temperature == 0
        options = {} if greedy else {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0),
        }
        generation = GenerationConfig(
            max_new_tokens=sampling.max_tokens, do_sample=not greedy, eos_token_id=self.stop_token_ids or None,
            pad_token_id=self.pad, return_dict_in_generate=True, output_scores=sampling.logprobs, **options,
        )
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(batch[0].seed)
            output = self.model.generate(
                ids.to(self.device), attention_mask=mask.to(self.device), generation_config=generation
            )
        tokens = output.sequences[:, width:].cpu().numpy().astype(np.int32)
        logprobs = None
        if sampling.logprobs:
            scores = torch.stack(output.scores, dim=1).float()  # after temperature, top_p and top_k
            logprobs = scores.log_softmax(-1).gather(-1, output.sequences[:, width:, None])[..., 0].cpu().numpy()
        samples = []
        for row, request in enumerate(batch):
            ends = np.flatnonzero(np.isin(tokens[row], self.stop_token_ids))
            length = int(ends[0]) + 1 if len(ends) else tokens.shape[1]
            samples.append(
                self.sample(
                    request, tokens[row, :length], status="stop" if len(ends) else "length",
                    logprobs=None if logprobs is None else logprobs[row, :length],
                )
            )
        return samples

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = self.model.state_dict(keep_vars=True)
        for name, tensor in weights:
            own.pop(name).copy_(tensor)
        check_all_set(set(own))
        self.weight_version = version

    def verify_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self.model.state_dict(keep_vars=True)
        verify(weights, own, lambda name, full: [(full, own[name])])

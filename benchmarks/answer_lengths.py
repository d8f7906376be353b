"""Completions of given lengths for benchmarks/peers.py, set in the same way in both of its systems.

`ANSWER_LENGTHS=MEDIAN,SIGMA,LONGEST` in the environment: log-normal lengths with this median and standard deviation of
the logarithm (0: equal lengths), at most LONGEST. The prompt's tokens determine the length, so both systems have the
same. vLLM ends a completion at this length only.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def answer_length(prompt_ids: list[int], median: float, sigma: float, longest: int) -> int:
    """Tokens, 1 or more."""
    drawn = median * np.exp(sigma * np.random.default_rng(prompt_ids).standard_normal())
    return int(np.clip(np.rint(drawn), 1, longest))


def force_lengths(engine: Any) -> None:
    """Give every request that is added to a vLLM LLMEngine the length that its prompt has in ANSWER_LENGTHS."""
    median, sigma, longest = os.environ["ANSWER_LENGTHS"].split(",")
    add_request = engine.add_request

    def add(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        params = params.clone()
        params.ignore_eos, params.stop_token_ids = True, []
        params.max_tokens = answer_length(prompt["prompt_token_ids"], float(median), float(sigma), int(longest))
        return add_request(request_id, prompt, params, *args, **kwargs)

    engine.add_request = add


def rollout_engine(config: Any, **arguments: Any) -> Any:
    """For `actor_rollout_ref.rollout.name`: the program's vLLM engine with forced lengths."""
    from hybrid_gkd.models.tokenizer import load_tokenizer, num_token_ids  # TRL's Python need not have them
    from hybrid_gkd.rollout.vllm import VLLMRolloutEngine

    num_ids = num_token_ids(load_tokenizer(config.actor_rollout_ref.model.path))
    engine = VLLMRolloutEngine(config, num_ids=num_ids, **arguments)
    force_lengths(engine.engine)
    return engine

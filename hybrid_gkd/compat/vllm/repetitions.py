"""Responses that vLLM ends because they go round in circles, in the versions that can."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def detects_repetitions() -> bool:
    """Whether the installed vLLM can end a response that goes round in circles; looks without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return False
    return "repetition_detection" in (Path(spec.origin).parent / "sampling_params.py").read_text(encoding="utf-8")


def repetition_detection(count: int | None) -> dict[str, Any]:
    """An argument of vLLM's SamplingParams: a pattern of up to 32 tokens that comes `count` times in a row ends it."""
    if count is None:
        return {}
    from vllm.sampling_params import RepetitionDetectionParams

    return {"repetition_detection": RepetitionDetectionParams(max_pattern_size=32, min_count=count)}

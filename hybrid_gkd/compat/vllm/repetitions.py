"""End repetitive responses, in vLLM versions that support it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def detects_repetitions() -> bool:
    """Return whether the installed vLLM can end repetitive responses, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return False
    return "repetition_detection" in (Path(spec.origin).parent / "sampling_params.py").read_text(encoding="utf-8")


def repetition_detection(count: int | None) -> dict[str, Any]:
    """Return SamplingParams arguments that end a response after `count` repetitions of a pattern of up to 32 tokens."""
    if count is None:
        return {}
    from vllm.sampling_params import RepetitionDetectionParams

    return {"repetition_detection": RepetitionDetectionParams(max_pattern_size=32, min_count=count)}

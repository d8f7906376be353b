"""Limits of a service: requests and readings that its model can never score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import UNSET

from hybrid_gkd.errors import TeacherRefused
from hybrid_gkd.teacher.protocol import MAX_RANGES, MAX_REQUEST_BYTES, ModelInfo, ScoreRequest
from hybrid_gkd.teacher.ranges import count_ranges
from hybrid_gkd.types import Reading


def check_request(request: ScoreRequest, readings: Sequence[Reading], model: ModelInfo) -> None:
    """Check a request against the limits of `model`. Raises TeacherRefused: it can never be scored."""
    names = [each.name for each in model.adapters or ()]
    if request.adapter is not UNSET and request.adapter not in names:
        raise TeacherRefused(f"adapter {request.adapter!r} is not one of the service's: {', '.join(names) or 'none'}")
    if request.topk > model.max_topk:
        limit = f"the {model.max_topk} that the server was started with (--n-logprobs)"
        raise TeacherRefused(f"topk {request.topk} is above {limit}")
    if request.temperature != 1.0 and not model.any_temperature:
        able = f"the {model.backend} backend scores at 1.0 only; use --backend hf"
        raise TeacherRefused(f"temperature {request.temperature}: {able}")
    if request.num_ids is not None and request.topk > request.num_ids:
        raise TeacherRefused(f"topk {request.topk} is above the {request.num_ids} ids that are to be scored (num_ids)")
    for each in readings:
        if each.given_ids is not None and each.given_ids.shape[1] > request.topk:
            raise TeacherRefused(f"{each.given_ids.shape[1]} given ids are more than topk {request.topk}")
        if reason := rejection_reason(each, model, request.num_ids):
            raise TeacherRefused(reason)


def rejection_reason(reading: Reading, model: ModelInfo, num_ids: int | None = None) -> str | None:
    """Return why `model` can never score the reading, over the ids below `num_ids`; None if it can."""
    ids = reading.token_ids
    if len(ids) > model.max_sequence_length:
        return f"{reading.name} has {len(ids)} tokens, the server's limit is {model.max_sequence_length}"
    if (num_ranges := count_ranges(reading.positions)) > MAX_RANGES:
        return f"{reading.name} has {num_ranges} separate ranges of scored tokens, the limit is {MAX_RANGES}"
    bad = ids[(ids < 0) | (ids >= model.num_embeddings)]
    if bad.size:
        model_ids = f"the {model.num_embeddings} that the model can read"
        return f"{reading.name} has token ids outside {model_ids}, for example {bad[0]}"
    scored, known = ids[reading.positions], min(num_ids or model.vocab_size, model.vocab_size)
    bad = scored[scored >= known]
    if bad.size:
        return f"{reading.name} has a scored id {bad[0]}, which is not one of the {known} token ids"
    given = reading.given_ids
    if given is not None:
        if reading.num_bytes > MAX_REQUEST_BYTES:
            return f"{reading.name} has {reading.num_bytes} bytes with its given ids, the limit is {MAX_REQUEST_BYTES}"
        ordered = np.sort(given, axis=1)
        if (given < 0).any() or (given >= known).any() or (ordered[:, 1:] == ordered[:, :-1]).any():
            return f"{reading.name} has given ids that are not distinct or not among the {known} token ids"
    return None

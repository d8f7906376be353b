"""Cuts large requests into parts, so that other requests need not wait for all of their readings."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import zmq

from hybrid_gkd.errors import TeacherRefused
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.protocol import ScoreRequest, ScoreResult

Message = tuple[ScoreRequest, list[zmq.Frame]]


def cut_request(request: ScoreRequest, payload: list[zmq.Frame]) -> list[Message]:
    """Cut a request between readings, into parts of at most MAX_REQUEST_TOKENS, or of one longer reading.

    Raises ProtocolError: the arrays are damaged; TeacherRefused: lengths, ranges and arrays do not match, or the result
    would exceed MAX_REPLY_BYTES.
    """
    num_bytes, limit = protocol.reply_bytes(request.num_scored, request.topk), protocol.MAX_REPLY_BYTES
    if num_bytes > limit:
        size = f"{request.num_scored} scored tokens with topk {request.topk}"
        raise TeacherRefused(f"the result of {size} would have {num_bytes} bytes, the limit is {limit}")
    if request.num_tokens <= protocol.MAX_REQUEST_TOKENS or len(request.lengths) == 1:
        return [(request, payload)]
    arrays = protocol.checked_arrays(request, [frame.buffer for frame in payload])
    parts, token, row = list[Message](), 0, 0
    for first, last in _part_bounds(request.lengths):
        own = {"lengths": request.lengths[first:last], "ranges": request.ranges[first:last]}
        part = msgspec.structs.replace(request, **own)
        bounds = (token, token := token + part.num_tokens), (row, row := row + part.num_scored)
        rows = [array[start:stop] for array, (start, stop) in zip(arrays, bounds, strict=False)]
        part, buffers = protocol.with_arrays(part, rows)
        parts.append((part, [zmq.Frame(each) for each in buffers]))
    return parts


def _part_bounds(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the index of the first reading of each part, and the index after its last."""
    first = num_tokens = 0
    for number, length in enumerate(lengths):
        if number > first and num_tokens + length > protocol.MAX_REQUEST_TOKENS:
            yield first, number
            first, num_tokens = number, 0
        num_tokens += length
    yield first, len(lengths)


def join_results(results: list[tuple[ScoreResult, list[zmq.Frame]]]) -> tuple[ScoreResult, list[zmq.Frame]]:
    """Join the validated results of the parts of a request, in order."""
    parts = [protocol.decode_arrays(result, [frame.buffer for frame in payload]) for result, payload in results]
    result, buffers = protocol.with_arrays(results[-1][0], [np.concatenate(each) for each in zip(*parts, strict=True)])
    return result, [zmq.Frame(each) for each in buffers]

"""What client, broker and worker of the teacher service say to each other.

A message is a list of frames: one msgspec header (a tagged, strictly typed struct), then the raw
buffers of its arrays. The header carries dtype, shape and CRC-32 of every array, so that damage
anywhere between the two ends is noticed. Nothing that comes from a socket is ever unpickled.

Who answers whom (client and broker on one port, broker and worker on the other):

    client                      broker                           worker
    Hello            ->         Welcome                                          before anything else
    ScoreRequest     ->         ScoreRequest          ->         ScoreResult | ScoreError
    Ping             ->         Pong                                             every second
                                Ping                  ->         Pong            every second
                                Registered | Rejected <-         Register        at start, and when pings stop
    StatusRequest    ->         Status

A Pong lists the requests that its sender still holds. Messages of one connection arrive in order, so a
request sent before the Ping, without a reply and not in the list, is lost and is sent again.

Shapes: n sequences of one request, P prompt and R response tokens of one sequence, K candidates. Only
response positions travel back: token ids int32, log-probabilities of candidates float16, of the
response's own tokens float32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence as ListLike
from typing import Annotated, Any

import msgspec
import numpy as np

from hybrid_gkd.errors import BadTeacherReply, TeacherError
from hybrid_gkd.types import TeacherTopK

PROTOCOL_VERSION = 1
PING_INTERVAL_SECONDS = 1.0
LIVENESS_SECONDS = 4.0
"""A peer that was silent for this long counts as dead."""
MAX_HEADER_BYTES = 1 << 20
MAX_ARRAYS = 3
MAX_REQUEST_BYTES = 64 << 20
"""Largest frame that a broker takes from a client; requests hold token ids only."""
MAX_REPLY_BYTES = 1 << 30
DTYPES: dict[str, np.dtype] = {"int32": np.dtype("<i4"), "float16": np.dtype("<f2"), "float32": np.dtype("<f4")}

TokenIds = np.ndarray
Buffer = bytes | memoryview
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ProtocolError(TeacherError):
    """Frames that are no valid message: unknown kind, wrong type, length, count or checksum."""


class ArraySpec(msgspec.Struct, frozen=True):
    """How to read one array frame."""

    dtype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=2)]
    crc32: int


class Message(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Base of all headers; the subclass name is the kind."""

    arrays: tuple[ArraySpec, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker serves. All workers of one broker serve the same."""

    model: str
    backend: str
    vocab_size: int
    """len(tokenizer)"""
    num_embeddings: int
    """Token ids that the model can read; usually vocab_size rounded up."""
    tokenizer_hash: str
    max_topk: Annotated[int, msgspec.Meta(ge=1)]
    max_sequence_length: Annotated[int, msgspec.Meta(ge=2)]
    """Prompt and response tokens together."""
    any_temperature: bool
    """False: only 1.0."""


class Hello(Message, tag="hello"):
    protocol_version: int


class Welcome(Message, tag="welcome"):
    protocol_version: int
    instance: str
    """Random name of this broker process: a new one may serve another model."""
    num_workers: int
    model: ModelInfo | None
    """None until the first worker has been tested."""


class ScoreRequest(Message, tag="score"):
    """Arrays: all token ids, int32 [sum of P + R], prompt before response, sequence after sequence."""

    id: RequestId
    attempt: Count
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)]
    """Counted from the receipt of the message: the clocks of two hosts need not agree."""
    topk: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    temperature: Annotated[float, msgspec.Meta(gt=0, le=1e4)]
    prompt_lengths: list[Count]
    response_lengths: list[Count]

    @property
    def num_tokens(self) -> int:
        return sum(self.prompt_lengths) + sum(self.response_lengths)


class ScoreResult(Message, tag="result"):
    """Arrays: ids int32 [sum R, K], log-probabilities float16 [sum R, K], sampled float32 [sum R]."""

    id: RequestId
    attempt: Count
    server: str = ""
    """Which worker scored it, for error messages."""


class ScoreError(Message, tag="error"):
    id: RequestId
    attempt: Count
    code: str
    """refused: asking again is useless; busy, expired, failed: worth another attempt."""
    reason: str


class Ping(Message, tag="ping"):
    number: Count


class Pong(Message, tag="pong"):
    number: Count
    instance: str
    pending: list[RequestId]


class Register(Message, tag="register"):
    protocol_version: int
    model: ModelInfo
    credits: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """How many requests the worker wants to hold at a time; every reply frees one."""


class Registered(Message, tag="registered"):
    """The worker forgets what it held before; new work follows."""


class Rejected(Message, tag="rejected"):
    reason: str


class StatusRequest(Message, tag="status_request"):
    pass


class Status(Message, tag="status"):
    model: ModelInfo | None
    num_workers: int
    queue_length: int
    num_in_flight: int
    tokens_per_second: float
    """Prompt and response tokens scored, over the last ten seconds."""
    uptime_seconds: float
    counters: dict[str, int]


AnyMessage = (
    Hello | Welcome | ScoreRequest | ScoreResult | ScoreError | Ping | Pong
    | Register | Registered | Rejected | StatusRequest | Status
)  # fmt: skip
Reply = ScoreResult | ScoreError
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage, arrays: ListLike[np.ndarray] = ()) -> list[Any]:
    """Frames of a message: the header, then one buffer per array."""
    specs, buffers = [], []
    for array in arrays:
        assert array.dtype.name in DTYPES, array.dtype
        buffer = np.ascontiguousarray(array, DTYPES[array.dtype.name])
        specs.append(ArraySpec(array.dtype.name, array.shape, zlib.crc32(buffer.data)))
        buffers.append(buffer)
    if specs:
        message = msgspec.structs.replace(message, arrays=tuple(specs))
    return [msgspec.msgpack.encode(message), *buffers]


def decode_header(frame: Buffer) -> AnyMessage:
    """Raises ProtocolError for anything but one well-typed header."""
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes, the limit is {MAX_HEADER_BYTES}")
    try:
        message = _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"header cannot be decoded: {error}") from error
    if len(message.arrays) > MAX_ARRAYS:
        raise ProtocolError(f"{len(message.arrays)} arrays announced, the limit is {MAX_ARRAYS}")
    return message


def decode_arrays(message: AnyMessage, frames: ListLike[Buffer]) -> list[np.ndarray]:
    """Read-only views of the array frames. Raises ProtocolError where header and frames disagree."""
    if len(frames) != len(message.arrays):
        raise ProtocolError(f"{len(message.arrays)} array frames announced, {len(frames)} arrived")
    arrays = []
    for index, (spec, frame) in enumerate(zip(message.arrays, frames, strict=True)):
        if spec.dtype not in DTYPES:
            raise ProtocolError(f"array {index}: unknown dtype {spec.dtype!r}")
        dtype = DTYPES[spec.dtype]
        num_bytes = math.prod(spec.shape) * dtype.itemsize
        if len(frame) != num_bytes:
            raise ProtocolError(f"array {index}: {len(frame)} bytes arrived, its shape {spec.shape} needs {num_bytes}")
        if zlib.crc32(frame) != spec.crc32:
            raise ProtocolError(f"array {index}: checksum mismatch, the data was damaged on the way")
        arrays.append(np.frombuffer(frame, dtype).reshape(spec.shape))
    return arrays


def request_array(sequences: ListLike[tuple[TokenIds, TokenIds]]) -> np.ndarray:
    """int32 [sum of P + R]: the array of a ScoreRequest for (prompt ids, response ids) pairs."""
    return np.concatenate([part for pair in sequences for part in pair]).astype(np.int32, copy=False)


def unpack_request(request: ScoreRequest, frames: ListLike[Buffer]) -> list[tuple[TokenIds, TokenIds]]:
    """(prompt ids [P], response ids [R]) of every sequence. Raises ProtocolError."""
    if len(request.prompt_lengths) != len(request.response_lengths):
        raise ProtocolError("as many response lengths as prompt lengths are needed")
    arrays = decode_arrays(request, frames)
    if len(arrays) != 1 or arrays[0].dtype != np.int32 or arrays[0].shape != (request.num_tokens,):
        raise ProtocolError(f"a request needs one int32 array of {request.num_tokens} token ids")
    sequences, start = [], 0
    for num_prompt, num_response in zip(request.prompt_lengths, request.response_lengths, strict=True):
        middle, end = start + num_prompt, start + num_prompt + num_response
        sequences.append((arrays[0][start:middle], arrays[0][middle:end]))
        start = end
    return sequences


def result_arrays(scores: ListLike[TeacherTopK]) -> list[np.ndarray]:
    """The arrays of a ScoreResult for the scores of all sequences of a request."""
    with np.errstate(over="ignore"):  # an overflow becomes Inf, which the client's check names
        logprobs = np.concatenate([score.logprobs for score in scores]).astype(np.float16)
    ids = np.concatenate([score.ids for score in scores]).astype(np.int32, copy=False)
    return [ids, logprobs, np.concatenate([score.sampled_logprobs for score in scores]).astype(np.float32, copy=False)]


def unpack_result(
    result: ScoreResult,
    frames: ListLike[Buffer],
    *,
    server: str,
    topk: int,
    vocab_size: int,
    response_lengths: ListLike[int],
) -> list[TeacherTopK]:
    """Checked scores of every sequence. Raises ProtocolError or BadTeacherReply."""  # fmt: skip
    arrays = decode_arrays(result, frames)
    if [array.dtype.name for array in arrays] != ["int32", "float16", "float32"]:
        raise ProtocolError(f"a result needs ids, log-probabilities and sampled; got {result.arrays}")
    ids, logprobs, sampled = arrays
    check_topk(
        ids, logprobs, sampled, num_rows=sum(response_lengths), topk=topk, vocab_size=vocab_size, server=server,
        request=result.id,
    )  # fmt: skip
    scores, start = [], 0
    for num_rows in response_lengths:
        rows = slice(start, start + num_rows)
        scores.append(
            # Copies, so that one long-lived sequence does not keep the whole message in memory.
            TeacherTopK(
                ids=ids[rows].copy(),
                logprobs=logprobs[rows].astype(np.float32),
                sampled_logprobs=sampled[rows].copy(),
            )
        )
        start += num_rows
    return scores


def check_topk(
    ids: np.ndarray,
    logprobs: np.ndarray,
    sampled_logprobs: np.ndarray,
    *,
    num_rows: int,
    topk: int,
    vocab_size: int,
    server: str,
    request: str,
) -> None:
    """Refuse scores that must not reach a loss.

    Args:
        ids: int32 [num_rows, topk], each in [0, vocab_size), distinct within a row
        logprobs: float [num_rows, topk], finite, not positive, of mass 1 at most
        sampled_logprobs: float [num_rows], finite, not positive

    Raises BadTeacherReply with server, request, row and value.
    """  # fmt: skip

    def fail(what: str, bad: np.ndarray, values: np.ndarray) -> None:
        if bad.any():
            place = tuple(int(index) for index in np.argwhere(bad)[0])
            raise BadTeacherReply(f"{server}: request {request}, row {place[0]}: {what} (value {values[place]})")

    shapes = {"ids": (ids, (num_rows, topk)), "logprobs": (logprobs, (num_rows, topk)),
              "sampled_logprobs": (sampled_logprobs, (num_rows,))}  # fmt: skip
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise BadTeacherReply(f"{server}: request {request}: {name} has shape {array.shape}, expected {shape}")
    for name, values in (("log-probability", logprobs), ("log-probability of the sampled token", sampled_logprobs)):
        fail(f"{name} is NaN", np.isnan(values), values)
        fail(f"{name} is infinite", np.isinf(values), values)
        fail(f"{name} is positive", values > 1e-3, values)
    fail(f"token id outside the vocabulary of {vocab_size}", (ids < 0) | (ids >= vocab_size), ids)
    ordered = np.sort(ids, axis=1)
    fail("token id appears twice", ordered[:, 1:] == ordered[:, :-1], ordered)
    mass = np.exp(logprobs.astype(np.float32)).sum(axis=1)
    # Rounding to float16 moves log p by |log p| / 2048 at most, so the mass by entropy / 2048 at most.
    fail("probabilities sum to more than 1", mass > 1.001 + (1 + math.log(topk)) / 2048, mass)


def refusal(request: ScoreRequest, sequences: ListLike[tuple[TokenIds, TokenIds]], model: ModelInfo) -> str | None:
    """Why `model` will never be able to score the request; None if it can."""
    if request.topk > model.max_topk:
        return f"topk {request.topk} is above the {model.max_topk} that the server was started with (--n-logprobs)"
    if request.temperature != 1.0 and not model.any_temperature:
        return f"temperature {request.temperature}: the {model.backend} backend scores at 1.0 only; use --backend hf"
    if not sequences:
        return "no sequences"
    for index, (prompt_ids, response_ids) in enumerate(sequences):
        length = len(prompt_ids) + len(response_ids)
        if length > model.max_sequence_length:
            return f"sequence {index} has {length} tokens, the server's limit is {model.max_sequence_length}"
        if len(prompt_ids) == 0 or len(response_ids) == 0:
            return f"sequence {index} needs a prompt and a response; got {len(prompt_ids)} and {len(response_ids)}"
        for ids in (prompt_ids, response_ids):
            if ids.min() < 0 or ids.max() >= model.num_embeddings:
                return f"sequence {index} has token ids outside the {model.num_embeddings} that the model can read"
    return None

"""The messages between client, broker and worker of the teacher service.

A message is a list of frames: a header (magic, version, CRC-32, a strictly typed msgpack map), then the raw buffers
of its arrays, whose dtype, shape and CRC-32 the header carries. Nothing that comes from a socket is ever unpickled.
docs/teacher_protocol.md says who sends which message when, and how lost requests are found.

Shapes: L tokens of a reading, R of them scored, K candidates. Only the scored positions travel back: token ids int32,
log-probabilities of candidates float16, of all other ids together and of the scored tokens themselves float32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence as ListLike
from typing import Annotated, Any

import msgspec
import numpy as np

from hybrid_gkd.errors import BadTeacherReply, TeacherError, TeacherRefused
from hybrid_gkd.teacher.ranges import count_ranges, positions_of
from hybrid_gkd.types import Reading, TopK

PROTOCOL_VERSION = 4
MAGIC = b"GKD"
PREFIX_BYTES = 8
"""Magic, version (1 byte), CRC-32 of magic, version and map (little endian)."""
PING_INTERVAL_SECONDS = 1.0
LIVENESS_SECONDS = 4.0
"""A peer without a message for this long counts as dead."""
TEST_ID = "test"
"""Of the request that every new worker has to answer."""
MAX_HEADER_BYTES = 1 << 20
MAX_ARRAYS = 4
MAX_FRAMES = 1 + MAX_ARRAYS
"""Of a message: its header, then its arrays."""
MAX_REQUEST_BYTES = 16 << 20
"""Largest frame that a broker takes from a client, and the arrays of one request; they hold token ids only."""
MAX_REPLY_BYTES = 1 << 30
MAX_TIMEOUT_SECONDS = 7 * 86400.0
"""Of one sending of a request."""
MAX_READINGS, MAX_RANGES = 1 << 13, 1 << 16
"""Readings of a request, and ranges of scored tokens of one reading, which leave room in its header."""
DTYPES: dict[str, np.dtype] = {"int32": np.dtype("<i4"), "float16": np.dtype("<f2"), "float32": np.dtype("<f4")}

Buffer = bytes | memoryview
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ProtocolError(TeacherError):
    """Frames that are no valid message: unknown kind, wrong type, length, count or checksum."""


class ForeignVersion(ProtocolError):
    """An undamaged message of another protocol version."""

    def __init__(self, version: int):
        super().__init__(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
        self.version = version


class ArraySpec(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=2)]
    crc32: int


class Message(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Base of all headers; the tag is the kind."""

    arrays: tuple[ArraySpec, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a worker; the same for all workers of one broker."""

    model: str
    backend: str
    vocab_size: int
    """Of the tokenizer: its tokens' ids are below it."""
    num_embeddings: int
    """Token ids that the model can read; usually vocab_size rounded up."""
    tokenizer_hash: str
    max_topk: Annotated[int, msgspec.Meta(ge=1)]
    max_sequence_length: Annotated[int, msgspec.Meta(ge=2)]
    """Largest L."""
    any_temperature: bool
    """False: only 1.0."""
    chat_template: str | None = None
    """Of its tokenizer; None: it has none, or the server does not say."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the model's answers; empty where the server does not say."""
    weights: str = ""
    """Hash that tells its weights, and the type that they are computed in, from others; empty: it is not known."""


class Hello(Message, tag="hello"):
    pass


class Welcome(Message, tag="welcome"):
    instance: str
    """Random name of this broker process: a new one may serve another model."""
    num_workers: Count
    """0 also while the service shuts down."""
    model: ModelInfo | None


class Bye(Message, tag="bye"):
    """The client is gone; its requests are given up."""


class ScoreRequest(Message, tag="score"):
    """Arrays: token ids int32 [sum of L], reading after reading."""

    id: RequestId
    attempt: Count
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_SECONDS)]
    """Counted from the receipt of the message: the clocks of two hosts need not agree."""
    topk: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    temperature: Annotated[float, msgspec.Meta(gt=0, le=1e4)]
    lengths: Annotated[list[Count], msgspec.Meta(max_length=MAX_READINGS)]
    """L of each reading."""
    ranges: Annotated[list[list[Count]], msgspec.Meta(max_length=MAX_READINGS)]
    """Scored positions of each reading, as teacher.ranges has them."""
    num_ids: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Scores are of the ids below it, as if there were no others; None: of all tokens."""

    @property
    def num_tokens(self) -> int:
        """Sum of L."""
        return sum(self.lengths)

    @property
    def num_scored(self) -> int:
        """Sum of R."""
        return sum(sum(each[1::2]) - sum(each[::2]) for each in self.ranges)


class ScoreResult(Message, tag="result"):
    """Arrays: ids int32 [sum R, K], log-probabilities float16 [sum R, K], tail and sampled float32 [sum R] each."""

    id: RequestId
    attempt: Count
    server: str = ""
    """The worker, for error messages."""


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
    pending: list[RequestId]
    instance: str = ""
    """Of the broker; empty from a worker."""
    queue_length: Count = 0
    engine_busy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the last ten seconds in which the engine had work; the broker's is the mean over its workers."""


class Register(Message, tag="register"):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """host:pid"""
    model: ModelInfo
    credits: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """How many requests the worker wants to hold at a time; every reply frees one."""


class Registered(Message, tag="registered"):
    """The worker forgets the requests that it held; new ones follow."""


class Rejected(Message, tag="rejected"):
    reason: str


class StatusRequest(Message, tag="status_request"):
    pass


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ready: bool
    num_held: int
    num_delivered: int
    num_bad: int = 0
    """Replies that failed the service's checks."""
    engine_busy: float
    silent_seconds: float


class Status(Message, tag="status"):
    """docs/teacher_protocol.md has the periods over which the figures are taken."""

    model: ModelInfo | None
    num_workers: int
    queue_length: int
    num_in_flight: int
    tokens_per_second: float
    latency_seconds: dict[str, float]
    bytes_per_token: float
    engine_busy: float
    uptime_seconds: float
    counters: dict[str, int]
    workers: list[WorkerStatus]
    barred: list[str] = []
    """Workers that get no more work, with the reason; the last ones."""


AnyMessage = (
    Hello | Welcome | ScoreRequest | ScoreResult | ScoreError | Ping | Pong
    | Register | Registered | Rejected | StatusRequest | Status | Bye
)
Reply = ScoreResult | ScoreError
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage, arrays: ListLike[np.ndarray] = ()) -> list[Any]:
    """Frames of a message: the header, then one buffer per array."""
    buffers = [np.ascontiguousarray(each, DTYPES[each.dtype.name]) for each in arrays]
    if buffers:
        specs = [ArraySpec(each.dtype.name, each.shape, zlib.crc32(each.data)) for each in buffers]
        message = msgspec.structs.replace(message, arrays=tuple(specs))
    return [seal(msgspec.msgpack.encode(message)), *buffers]


def seal(body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """The header frame of an encoded map."""
    start = MAGIC + bytes([version])
    return start + zlib.crc32(body, zlib.crc32(start)).to_bytes(4, "little") + body


def decode_header(frame: Buffer) -> AnyMessage:
    """Raises ProtocolError for anything but one undamaged, well-typed header; ForeignVersion for another version's."""
    if not PREFIX_BYTES <= len(frame) <= MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes, expected {PREFIX_BYTES} to {MAX_HEADER_BYTES}")
    start, checksum, body = bytes(frame[:4]), bytes(frame[4:PREFIX_BYTES]), memoryview(frame)[PREFIX_BYTES:]
    if start[:3] != MAGIC:
        raise ProtocolError(f"a header starts with {MAGIC!r}, this one with {start[:3]!r}")
    if zlib.crc32(body, zlib.crc32(start)) != int.from_bytes(checksum, "little"):
        raise ProtocolError("header: checksum mismatch, it was damaged on the way")
    if start[3] != PROTOCOL_VERSION:
        raise ForeignVersion(start[3])
    try:
        message = _decoder.decode(body)
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


def request_array(readings: ListLike[Reading]) -> np.ndarray:
    """int32 [sum of L]: the array of a ScoreRequest."""
    return np.concatenate([each.token_ids for each in readings]).astype(np.int32, copy=False)


def make_test_request(model: ModelInfo) -> tuple[ScoreRequest, Buffer]:
    """The smallest request that a worker of this model has to be able to answer, and its array frame."""
    frame = np.array([0, 1], DTYPES["int32"]).tobytes()
    request = ScoreRequest(
        id=TEST_ID, attempt=0, timeout_seconds=3600.0, topk=min(model.max_topk, 2), temperature=1.0,
        lengths=[2], ranges=[[1, 2]], arrays=(ArraySpec("int32", (2,), zlib.crc32(frame)),),
    )
    return request, frame


def check_test_result(result: ScoreResult, frames: ListLike[Buffer], model: ModelInfo) -> None:
    """Raises ProtocolError or BadTeacherReply, as a client would."""
    topk = min(model.max_topk, 2)
    unpack_result(result, frames, topk=topk, vocab_size=model.num_embeddings, num_scored=[1])


def unpack_request(request: ScoreRequest, frames: ListLike[Buffer]) -> list[Reading]:
    """Raises ProtocolError, and TeacherRefused for ranges that no reading can have."""
    arrays = decode_arrays(request, frames)
    if len(arrays) != 1 or arrays[0].dtype != np.int32 or arrays[0].shape != (request.num_tokens,):
        raise ProtocolError(f"a request needs one int32 array of {request.num_tokens} token ids")
    if not request.lengths or len(request.ranges) != len(request.lengths):
        given = f"got {len(request.lengths)} lengths, ranges of {len(request.ranges)}"
        raise TeacherRefused(f"a request needs readings, each with its length and its ranges; {given}")
    readings, start = [], 0
    for index, (length, ranges) in enumerate(zip(request.lengths, request.ranges, strict=True)):
        name, token_ids = f"reading {index}", arrays[0][start : start + length]
        readings.append(Reading(token_ids=token_ids, positions=positions_of(ranges, length, name), name=name))
        start += length
    return readings


def result_arrays(scores: ListLike[TopK]) -> list[np.ndarray]:
    """The arrays of a ScoreResult for the scores of all readings of a request."""
    with np.errstate(over="ignore"):  # an overflow becomes Inf, which the client's check names
        logprobs = np.concatenate([score.logprobs for score in scores]).astype(np.float16)
    ids = np.concatenate([score.ids for score in scores]).astype(np.int32, copy=False)
    rest = [[score.tail_logprobs for score in scores], [score.sampled_logprobs for score in scores]]
    return [ids, logprobs, *(np.concatenate(each).astype(np.float32, copy=False) for each in rest)]


def unpack_result(
    result: ScoreResult, frames: ListLike[Buffer], *, topk: int, vocab_size: int, num_scored: ListLike[int]
) -> list[TopK]:
    """Checked scores of every reading; `num_scored` has the R of each. Raises ProtocolError or BadTeacherReply."""
    arrays = check_result(result, frames, topk=topk, vocab_size=vocab_size, num_rows=sum(num_scored))
    ends = np.cumsum(num_scored)[:-1]
    # Copies, so that one long-lived sample does not keep the whole message in memory.
    parts = zip(*([part.copy() for part in np.split(array, ends)] for array in arrays), strict=True)
    return [
        TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)
        for ids, logprobs, tail, sampled in parts
    ]


def check_result(
    result: ScoreResult, frames: ListLike[Buffer], *, topk: int, vocab_size: int, num_rows: int,
    max_values: int | None = None,
) -> list[np.ndarray]:
    """The arrays of a result, log-probabilities float32, after all checks. Raises ProtocolError or BadTeacherReply.

    With `max_values`, only the rows that have so many candidates, spread over the result, are looked at and returned.
    """
    arrays = decode_arrays(result, frames)
    if [array.dtype.name for array in arrays] != ["int32", "float16", "float32", "float32"]:
        raise ProtocolError(f"a result needs ids, log-probabilities, tail and sampled; got {result.arrays}")
    complete = all(array.shape[:1] == (num_rows,) for array in arrays)
    if complete and max_values is not None and num_rows * topk > max_values:
        rows = np.linspace(0, num_rows - 1, max(1, max_values // topk)).astype(np.int64)
        arrays, num_rows = [array[rows] for array in arrays], len(rows)
    arrays[1] = arrays[1].astype(np.float32)  # float16 is slow to compute with
    check_topk(
        *arrays, num_rows=num_rows, topk=topk, vocab_size=vocab_size, server=result.server or "the server",
        request=result.id,
    )
    return arrays


def check_topk(
    ids: np.ndarray, logprobs: np.ndarray, tail_logprobs: np.ndarray, sampled_logprobs: np.ndarray, *, num_rows: int,
    topk: int, vocab_size: int, server: str, request: str,
) -> None:
    """Refuse unusable scores before they reach a loss: BadTeacherReply with server, request, row and value.

    Usable are ids in [0, vocab_size), distinct within a row, int32 [num_rows, topk]; log-probabilities that are
    finite and not positive, float [num_rows, topk] and [num_rows] of the sampled tokens; and the log of the mass that
    is left for all other ids, [num_rows], which is minus infinity where there is none.
    """

    def fail(what: str, bad: np.ndarray, values: np.ndarray) -> None:
        if bad.any():
            place = tuple(np.argwhere(bad)[0])
            raise BadTeacherReply(f"{server}: request {request}, row {place[0]}: {what} (value {values[place]})")

    shape = (num_rows, topk)
    for name, array, expected in (
        ("ids", ids, shape), ("logprobs", logprobs, shape), ("tail_logprobs", tail_logprobs, shape[:1]),
        ("sampled_logprobs", sampled_logprobs, shape[:1]),
    ):
        if array.shape != expected:
            raise BadTeacherReply(f"{server}: request {request}: {name} has shape {array.shape}, expected {expected}")
    for name, values in (("log-probability", logprobs), ("log-probability of the sampled token", sampled_logprobs)):
        if not -np.inf < values.min(initial=0) <= values.max(initial=0) <= 1e-3:  # NaN included
            fail(f"{name} is NaN", np.isnan(values), values)
            fail(f"{name} is infinite", np.isinf(values), values)
            fail(f"{name} is positive", values > 1e-3, values)
    fail("log-probability of the tail is NaN", np.isnan(tail_logprobs), tail_logprobs)
    fail("log-probability of the tail is positive", tail_logprobs > 1e-3, tail_logprobs)
    fail(f"token id outside the vocabulary of {vocab_size}", (ids < 0) | (ids >= vocab_size), ids)
    ordered = np.sort(ids, axis=1)
    fail("token id appears twice", ordered[:, 1:] == ordered[:, :-1], ordered)
    mass = np.exp(logprobs, dtype=np.float32).sum(axis=1)
    # Rounding to float16 moves log p by |log p| / 2048 at most, so the mass by entropy / 2048 at most.
    tolerance = 0.001 + (1 + math.log(topk)) / 2048
    fail("probabilities sum to more than 1", mass > 1 + tolerance, mass)
    total = mass + np.exp(tail_logprobs, dtype=np.float32)
    fail("probabilities of candidates and tail do not sum to 1", np.abs(total - 1) > tolerance, total)


def check_request(request: ScoreRequest, readings: ListLike[Reading], model: ModelInfo) -> None:
    """Raises TeacherRefused for what `model` will never be able to score."""
    if request.topk > model.max_topk:
        limit = f"the {model.max_topk} that the server was started with (--n-logprobs)"
        raise TeacherRefused(f"topk {request.topk} is above {limit}")
    if request.temperature != 1.0 and not model.any_temperature:
        able = f"the {model.backend} backend scores at 1.0 only; use --backend hf"
        raise TeacherRefused(f"temperature {request.temperature}: {able}")
    if request.num_ids is not None and request.topk > request.num_ids:
        raise TeacherRefused(f"topk {request.topk} is above the {request.num_ids} ids that are to be scored (num_ids)")
    for each in readings:
        if reason := reading_refusal(each, model, request.num_ids):
            raise TeacherRefused(reason)


def reading_refusal(reading: Reading, model: ModelInfo, num_ids: int | None = None) -> str | None:
    """Why `model` will never be able to score the reading, of the ids below `num_ids`; None if it can."""
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
        return f"{reading.name} has the id {bad[0]} to score, which is none of the {known} ids of tokens"
    return None

"""Messages between client, broker and worker of the teacher service.

A message is a list of frames: a header (magic, version, CRC-32, a strictly typed msgpack map), then the raw buffers
of its arrays. The header has dtype, shape and CRC-32 of each array. No data from a socket is ever unpickled.
PROTOCOL.md documents the message flow and the recovery of lost requests.

Shapes: L tokens of a reading, R of them scored, K candidates. Results cover scored positions only: token ids int32,
log-probabilities of candidates float16, those of the tail and of the scored tokens float32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence as ListLike
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from hybrid_gkd.errors import BadTeacherReply, TeacherError, TeacherMismatch, TeacherRefused
from hybrid_gkd.teacher.ranges import positions_of
from hybrid_gkd.types import Reading, TopK

PROTOCOL_VERSION = 4
MAGIC = b"GKD"
PREFIX_BYTES = 8
"""Magic, version (1 byte), CRC-32 of magic, version and map (little endian)."""
PING_INTERVAL_SECONDS = 1.0
LIVENESS_SECONDS = 4.0
"""Inactivity timeout of a peer."""
TEST_ID = "test"
"""Id of the test request to every new worker."""
MAX_HEADER_BYTES = 1 << 20
MAX_ARRAYS = 4
MAX_FRAMES = 1 + MAX_ARRAYS
"""Largest number of frames of a message: header and arrays."""
MAX_REQUEST_BYTES = 16 << 20
"""Largest frame that a broker accepts from a client, and largest size of a request's arrays (token ids only)."""
MAX_REQUEST_TOKENS = 1 << 16
"""Largest number of tokens of several readings that a worker scores as one request; other requests wait for it."""
MAX_REPLY_BYTES = 1 << 30
MAX_TIMEOUT_SECONDS = 7 * 86400.0
"""Largest timeout of one attempt of a request."""
MAX_READINGS, MAX_RANGES = 1 << 13, 1 << 16
"""Largest numbers of readings of a request and of ranges of a reading, bounded by the size of the header."""
SHOWN, SHOWN_BEFORE = 60, 20
"""Characters of a value that differs from another model's, in total and before the first difference."""
DTYPES: dict[str, np.dtype] = {"int32": np.dtype("<i4"), "float16": np.dtype("<f2"), "float32": np.dtype("<f4")}

Buffer = bytes | memoryview
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ProtocolError(TeacherError):
    """Invalid message: unknown kind, or wrong type, length, count or checksum."""


class ForeignVersion(ProtocolError):
    """Intact message of another protocol version."""

    def __init__(self, version: int):
        super().__init__(f"protocol version {version}, this side has {PROTOCOL_VERSION}")
        self.version = version


class ArraySpec(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=2)]
    crc32: int


class Message(msgspec.Struct, kw_only=True, tag_field="kind"):
    """Base of all headers; the tag is the kind of message."""

    arrays: tuple[ArraySpec, ...] = ()


class AdapterInfo(msgspec.Struct, frozen=True):
    """A LoRA adapter of a service's model."""

    name: str
    weights: str
    """`ModelInfo.weights` of the model with this adapter."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a worker; the same for all workers of one broker."""

    model: str
    backend: str
    vocab_size: int
    """Size of the tokenizer: token ids are below it."""
    num_embeddings: int
    """Number of ids that the model can read; usually vocab_size rounded up."""
    tokenizer_hash: str
    max_topk: Annotated[int, msgspec.Meta(ge=1)]
    max_sequence_length: Annotated[int, msgspec.Meta(ge=2)]
    """Largest L."""
    any_temperature: bool
    """Whether scores at any temperature are available; False: only at 1.0."""
    chat_template: str | None = None
    """Chat template of the tokenizer; None if there is none or it is unknown."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion of the model; empty if unknown."""
    given_ids: bool = False
    """Whether requests may name candidates; False in services without this feature."""
    weights: str = ""
    """Fingerprint of the weights and of the data type of the computation; empty if unknown."""
    adapters: tuple[AdapterInfo, ...] | UnsetType = UNSET
    """Adapters that a request may name; not in the messages of a service without them."""

    def with_adapter(self, name: str | None, address: str) -> ModelInfo:
        """Return the description of the model with one of its adapters; None: without.

        Raises TeacherMismatch with the server's address: it has no such adapter.
        """
        if name is None:
            return self
        found = {each.name: each for each in self.adapters or ()}
        if name not in found:
            theirs = ", ".join(found) or "none"
            what = "adapter (the server's --adapters)"
            raise TeacherMismatch(f"{address}: {what}: the teacher {self.model} has {theirs}, the student needs {name}")
        return msgspec.structs.replace(
            self, model=f"{self.model} with adapter {name}", weights=found[name].weights, adapters=UNSET
        )

    def is_same(self, other: ModelInfo) -> bool:
        """Return whether both are one teacher: by their weights or, if unknown, by their names."""
        return self.weights == other.weights if self.weights and other.weights else self.model == other.model

    def differences(self, other: ModelInfo) -> str:
        """Return the fields with other values than another model's: "max_topk 64 instead of 128".

        Long values are cut around the first difference.
        """
        found = []
        for name in self.__struct_fields__:
            both = [repr(getattr(each, name)) for each in (self, other)]
            apart = (place for place, pair in enumerate(zip(*both, strict=False)) if pair[0] != pair[1])
            begin = max(0, next(apart, min(map(len, both))) - SHOWN_BEFORE)
            own, their = (f"{'...' if begin else ''}{text[begin : begin + SHOWN]}" for text in both)
            found += [f"{name} {own} instead of {their}"] if both[0] != both[1] else []
        return ", ".join(found)

    def __str__(self) -> str:
        adapters = "".join(f", adapter {each.name} {each.weights[:12]}" for each in self.adapters or ())
        return f"{self.model} (weights {self.weights[:12] or 'unknown'}{adapters})"


class Hello(Message, tag="hello"):
    pass


class Welcome(Message, tag="welcome"):
    instance: str
    """Random id of this broker process; a restarted broker may serve another model."""
    num_workers: Count
    """Number of ready workers; 0 during shutdown."""
    model: ModelInfo | None


class Bye(Message, tag="bye"):
    """Goodbye of a client; its requests are dropped."""


class ScoreRequest(Message, tag="score"):
    """Request for scores.

    Arrays: token ids int32 [sum of L], concatenated over the readings; optionally given ids int32 [sum of R, C], which
    are among the topk candidates. Only services with `ModelInfo.given_ids` accept the latter.
    """

    id: RequestId
    attempt: Count
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIMEOUT_SECONDS)]
    """Timeout from the receipt of the message, so that clocks of hosts need not be synchronized."""
    topk: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    temperature: Annotated[float, msgspec.Meta(gt=0, le=1e4)]
    lengths: Annotated[list[Count], msgspec.Meta(max_length=MAX_READINGS)]
    """L of each reading."""
    ranges: Annotated[list[list[Count]], msgspec.Meta(max_length=MAX_READINGS)]
    """Scored positions of each reading in the format of teacher.ranges."""
    num_ids: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Scores are normalized over the ids below it; None: over all tokens."""
    adapter: str | UnsetType = UNSET
    """Name of the adapter that scores; not in the message: the model without one."""

    @property
    def num_tokens(self) -> int:
        """Sum of L over the readings."""
        return sum(self.lengths)

    @property
    def num_scored(self) -> int:
        """Sum of R over the readings."""
        return sum(sum(each[1::2]) - sum(each[::2]) for each in self.ranges)


class ScoreResult(Message, tag="result"):
    """Scores. Arrays: ids int32 [sum R, K], logprobs float16 [sum R, K], tail and sampled float32 [sum R] each."""

    id: RequestId
    attempt: Count
    server: str = ""
    """Name of the worker, for error messages."""


class ScoreError(Message, tag="error"):
    id: RequestId
    attempt: Count
    code: str
    """refused: do not retry; busy, expired, failed: may be retried."""
    reason: str


class Ping(Message, tag="ping"):
    number: Count


class Pong(Message, tag="pong"):
    number: Count
    pending: list[RequestId]
    instance: str = ""
    """Id of the broker process; empty from a worker."""
    queue_length: Count = 0
    engine_busy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Fraction of the last ten seconds in which the engine had work; from the broker, the mean over its workers."""


class Register(Message, tag="register"):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """Name of the worker, host:pid."""
    model: ModelInfo
    credits: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """Largest number of requests that the worker holds at a time; every reply frees one."""


class Registered(Message, tag="registered"):
    """Confirmation of a registration; the worker discards the requests that it held."""


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
    """Number of replies that failed validation."""
    engine_busy: float
    silent_seconds: float


class Status(Message, tag="status"):
    """State of the service; PROTOCOL.md lists the averaging periods."""

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
    """Most recently excluded workers, with the reason."""


AnyMessage = (
    Hello | Welcome | ScoreRequest | ScoreResult | ScoreError | Ping | Pong
    | Register | Registered | Rejected | StatusRequest | Status | Bye
)
Reply = ScoreResult | ScoreError
M = TypeVar("M", bound=Message)
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: AnyMessage, arrays: ListLike[np.ndarray] = ()) -> list[Any]:
    """Return the frames of a message: the header, then one buffer per array."""
    message, buffers = with_arrays(message, arrays) if arrays else (message, [])
    return [seal(msgspec.msgpack.encode(message)), *buffers]


def with_arrays(message: M, arrays: ListLike[np.ndarray]) -> tuple[M, list[np.ndarray]]:
    """Return a message that announces these arrays, and their buffers."""
    buffers = [np.ascontiguousarray(each, DTYPES[each.dtype.name]) for each in arrays]
    specs = [ArraySpec(each.dtype.name, each.shape, zlib.crc32(each.data)) for each in buffers]
    return msgspec.structs.replace(message, arrays=tuple(specs)), buffers


def seal(body: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """Return the header frame of an encoded map."""
    start = MAGIC + bytes([version])
    return start + zlib.crc32(body, zlib.crc32(start)).to_bytes(4, "little") + body


def decode_header(frame: Buffer) -> AnyMessage:
    """Decode a header. Raises ProtocolError: damaged or invalid; ForeignVersion: another protocol version."""
    if not PREFIX_BYTES <= len(frame) <= MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes, expected {PREFIX_BYTES} to {MAX_HEADER_BYTES}")
    start, checksum, body = bytes(frame[:4]), bytes(frame[4:PREFIX_BYTES]), memoryview(frame)[PREFIX_BYTES:]
    if start[:3] != MAGIC:
        raise ProtocolError(f"a header must start with {MAGIC!r}, got {start[:3]!r}")
    if zlib.crc32(body, zlib.crc32(start)) != int.from_bytes(checksum, "little"):
        raise ProtocolError("header: checksum mismatch, the message was damaged in transit")
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
    """Return read-only views of the array frames. Raises ProtocolError: header and frames disagree."""
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
            raise ProtocolError(f"array {index}: checksum mismatch, the data was damaged")
        arrays.append(np.frombuffer(frame, dtype).reshape(spec.shape))
    return arrays


def reply_bytes(num_scored: int, topk: int) -> int:
    """Return the size of the arrays of a ScoreResult."""
    return num_scored * (topk * 6 + 8)


def request_arrays(readings: ListLike[Reading]) -> list[np.ndarray]:
    """Return the arrays of a ScoreRequest: token ids int32 [sum of L], and given ids int32 [sum of R, C], if any."""
    arrays, given = [np.concatenate([each.token_ids for each in readings])], joined_given_ids(readings)
    return [each.astype(np.int32, copy=False) for each in ([*arrays, given] if given is not None else arrays)]


def joined_given_ids(readings: ListLike[Reading]) -> np.ndarray | None:
    """Return the given ids [sum of R, C] of the readings of a request, all of which have some or none has."""
    given = [each.given_ids for each in readings if each.given_ids is not None]
    return np.concatenate(given) if given else None


def make_test_request(model: ModelInfo) -> tuple[ScoreRequest, list[np.ndarray]]:
    """Return the test request of a worker, the smallest possible one, and its array."""
    request = ScoreRequest(
        id=TEST_ID, attempt=0, timeout_seconds=3600.0, topk=min(model.max_topk, 2), temperature=1.0,
        lengths=[2], ranges=[[1, 2]],
    )
    return with_arrays(request, [np.array([0, 1], np.int32)])


def check_test_result(result: ScoreResult, frames: ListLike[Buffer], model: ModelInfo) -> None:
    """Validate the reply to the test request. Raises ProtocolError or BadTeacherReply, as a client would."""
    topk = min(model.max_topk, 2)
    unpack_result(result, frames, topk=topk, vocab_size=model.num_embeddings, num_scored=[1])


def checked_arrays(request: ScoreRequest, frames: ListLike[Buffer]) -> list[np.ndarray]:
    """Return the arrays of a request. Raises ProtocolError; TeacherRefused: lengths and ranges are not one each."""
    arrays = decode_arrays(request, frames)
    if not 1 <= len(arrays) <= 2 or arrays[0].dtype != np.int32 or arrays[0].shape != (request.num_tokens,):
        raise ProtocolError(f"a request needs one int32 array of {request.num_tokens} token ids, and given ids at most")
    given_ids = arrays[1] if len(arrays) > 1 else None
    if given_ids is not None and not (
        given_ids.dtype == np.int32 and given_ids.ndim == 2 and len(given_ids) == request.num_scored
    ):
        raise ProtocolError(f"given ids must be an int32 array of {request.num_scored} rows")
    if not request.lengths or len(request.ranges) != len(request.lengths):
        given = f"got {len(request.lengths)} lengths, ranges of {len(request.ranges)}"
        raise TeacherRefused(f"a request needs readings, each with its length and its ranges; {given}")
    return arrays


def unpack_request(request: ScoreRequest, frames: ListLike[Buffer]) -> list[Reading]:
    """Return the readings of a request. Raises ProtocolError; TeacherRefused: invalid ranges."""
    arrays = checked_arrays(request, frames)
    given_ids = arrays[1] if len(arrays) > 1 else None
    readings, start, row = [], 0, 0
    for index, (length, ranges) in enumerate(zip(request.lengths, request.ranges, strict=True)):
        name, token_ids = f"reading {index}", arrays[0][start : start + length]
        positions = positions_of(ranges, length, name)
        own = None if given_ids is None else given_ids[row : row + len(positions)]
        readings.append(Reading(token_ids=token_ids, positions=positions, name=name, given_ids=own))
        start, row = start + length, row + len(positions)
    return readings


def result_arrays(scores: ListLike[TopK]) -> list[np.ndarray]:
    """Return the arrays of a ScoreResult for the scores of all readings of a request."""
    with np.errstate(over="ignore"):  # an overflow becomes Inf, which the client's check reports
        logprobs = np.concatenate([score.logprobs for score in scores]).astype(np.float16)
    ids = np.concatenate([score.ids for score in scores]).astype(np.int32, copy=False)
    rest = [[score.tail_logprobs for score in scores], [score.sampled_logprobs for score in scores]]
    return [ids, logprobs, *(np.concatenate(each).astype(np.float32, copy=False) for each in rest)]


def unpack_result(
    result: ScoreResult, frames: ListLike[Buffer], *, topk: int, vocab_size: int, num_scored: ListLike[int],
    given: np.ndarray | None = None,
) -> list[TopK]:
    """Return the validated scores of every reading, of R in `num_scored`. Raises ProtocolError or BadTeacherReply.

    `given`: int [sum of R, C], ids that must be among the candidates.
    """
    arrays = check_result(result, frames, topk=topk, vocab_size=vocab_size, num_rows=sum(num_scored))
    if given is not None:
        _check_given(arrays[0], given, f"{result.server or 'the server'}: request {result.id}")
    ends = np.cumsum(num_scored)[:-1]
    # Copies, so that one long-lived sample does not keep the whole message in memory.
    parts = zip(*([part.copy() for part in np.split(array, ends)] for array in arrays), strict=True)
    return [
        TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled)
        for ids, logprobs, tail, sampled in parts
    ]


def _check_given(ids: np.ndarray, given: np.ndarray, where: str) -> None:
    """Check that each row of `ids` [N, K] has the given ids [N, C]. Raises BadTeacherReply."""
    both = np.sort(np.concatenate([ids, given], axis=1), axis=1)  # ids are distinct, so are given ones
    bad = np.flatnonzero((both[:, 1:] == both[:, :-1]).sum(axis=1) != given.shape[1])
    if bad.size:
        missing = np.setdiff1d(given[bad[0]], ids[bad[0]])[0]
        raise BadTeacherReply(f"{where}, row {bad[0]}: the given id {missing} is not among the candidates")


def check_result(
    result: ScoreResult, frames: ListLike[Buffer], *, topk: int, vocab_size: int, num_rows: int,
    max_values: int | None = None,
) -> list[np.ndarray]:
    """Validate a result; return its arrays, log-probabilities in float32. Raises ProtocolError or BadTeacherReply.

    With `max_values`, only a sample of rows with at most so many candidates is validated and returned.
    """
    arrays = decode_arrays(result, frames)
    if [array.dtype.name for array in arrays] != ["int32", "float16", "float32", "float32"]:
        raise ProtocolError(f"a result needs ids, log-probabilities, tail and sampled; got {result.arrays}")
    complete = all(array.shape[:1] == (num_rows,) for array in arrays)
    if complete and max_values is not None and num_rows * topk > max_values:
        rows = np.linspace(0, num_rows - 1, max(1, max_values // topk)).astype(np.int64)
        arrays, num_rows = [array[rows] for array in arrays], len(rows)
    arrays[1] = arrays[1].astype(np.float32)  # computing in float16 is slow
    check_scores(
        *arrays, num_rows=num_rows, topk=topk, vocab_size=vocab_size, server=result.server or "the server",
        request=result.id,
    )
    return arrays


def check_scores(
    ids: np.ndarray, logprobs: np.ndarray, tail_logprobs: np.ndarray, sampled_logprobs: np.ndarray, *, num_rows: int,
    topk: int, vocab_size: int, server: str, request: str,
) -> None:
    """Validate scores before they reach a loss. Raises BadTeacherReply with server, request, row and value.

    Args:
        ids: int32 [num_rows, topk] in [0, vocab_size), distinct within a row.
        logprobs: float [num_rows, topk], finite and not positive.
        tail_logprobs: float [num_rows], log of the mass outside the top-k; minus infinity if there is none.
        sampled_logprobs: float [num_rows] of the sampled tokens, finite and not positive.
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
    # Rounding to float16 changes log p by |log p| / 2048 at most, so the mass by entropy / 2048 at most.
    tolerance = 0.001 + (1 + math.log(topk)) / 2048
    fail("probabilities sum to more than 1", mass > 1 + tolerance, mass)
    total = mass + np.exp(tail_logprobs, dtype=np.float32)
    fail("probabilities of candidates and tail do not sum to 1", np.abs(total - 1) > tolerance, total)

"""Messages survive the round trip, and whatever is not a valid message is a ProtocolError."""

import msgspec
import numpy as np
import pytest

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.testing import tail_of
from hybrid_gkd.types import TeacherTopK

SEQUENCES = [
    (np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)),
    (np.array([6], np.int32), np.array([7, 8, 9], np.int32)),
]


def request(**changes) -> protocol.ScoreRequest:
    fields = {
        "id": "a", "attempt": 1, "timeout_seconds": 5.0, "topk": 2, "temperature": 1.0,
        "prompt_lengths": [3, 1], "response_lengths": [2, 3],
    } | changes  # fmt: skip
    return protocol.ScoreRequest(**fields)


def over_the_wire(frames):
    raw = [bytes(frame) for frame in frames]
    return protocol.decode_header(raw[0]), raw[1:]


def test_request_round_trip():
    header, frames = over_the_wire(protocol.encode(request(), [protocol.request_array(SEQUENCES)]))
    unpacked = protocol.unpack_request(header, frames)
    assert header.num_tokens == 9
    for (prompt, response), (expected_prompt, expected_response) in zip(unpacked, SEQUENCES, strict=True):
        np.testing.assert_array_equal(prompt, expected_prompt)
        np.testing.assert_array_equal(response, expected_response)


def test_result_round_trip_is_float16_for_candidates_and_float32_for_all_else():
    rng = np.random.default_rng(0)
    scores = []
    for num_rows in (3, 1, 5):
        logprobs = np.log(rng.dirichlet(np.ones(7), num_rows)).astype(np.float32)[:, :4]
        ids = np.stack([rng.permutation(50)[:4] for _ in range(num_rows)]).astype(np.int32)
        tail, sampled = tail_of(logprobs), logprobs[:, 1].copy()
        scores.append(TeacherTopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled))
    frames = protocol.encode(protocol.ScoreResult(id="a", attempt=1), protocol.result_arrays(scores))
    header, raw = over_the_wire(frames)
    assert [len(frame) for frame in raw] == [9 * 4 * 4, 9 * 4 * 2, 9 * 4, 9 * 4]
    received = protocol.unpack_result(header, raw, topk=4, vocab_size=50, response_lengths=[3, 1, 5])
    for score, expected in zip(received, scores, strict=True):
        np.testing.assert_array_equal(score.ids, expected.ids)
        np.testing.assert_allclose(score.logprobs, expected.logprobs, rtol=1e-3)
        np.testing.assert_array_equal(score.tail_logprobs, expected.tail_logprobs)
        np.testing.assert_array_equal(score.sampled_logprobs, expected.sampled_logprobs)
        assert score.logprobs.dtype == np.float32
        assert score.ids.flags.writeable


@pytest.mark.parametrize(
    "message",
    [
        protocol.Hello(),
        protocol.Ping(number=3),
        protocol.Pong(number=3, instance="i", pending=["a", "b"]),
        protocol.Rejected(reason="r"),
        protocol.ScoreError(id="a", attempt=0, code="busy", reason="full"),
        protocol.StatusRequest(),
    ],
)
def test_headers_keep_their_type(message):
    header, frames = over_the_wire(protocol.encode(message))
    assert header == message
    assert type(header) is type(message)
    assert frames == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"garbage",
        msgspec.msgpack.encode({"kind": "unheard of"}),
        msgspec.msgpack.encode({"kind": "ping", "number": "three"}),
        msgspec.msgpack.encode({"kind": "ping", "number": -1}),
        msgspec.msgpack.encode({"kind": "ping"}),
        msgspec.msgpack.encode({"number": 1}),
        b"\x91" * 5000,
        b"\x00" * (protocol.MAX_HEADER_BYTES + 1),
        msgspec.msgpack.encode({"kind": "ping", "number": 1, "arrays": [["int32", [1], 0]] * 9}),
    ],
)
def test_bad_header(body):
    for raw in (body, protocol.seal(body)):
        with pytest.raises(protocol.ProtocolError):
            protocol.decode_header(raw)


def test_every_flipped_bit_of_a_header_is_noticed():
    """Without the header's checksum, a reply would find another request, or another K or temperature be scored."""
    good = bytes(protocol.encode(request(), [protocol.request_array(SEQUENCES)])[0])
    for position in range(8 * len(good)):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        with pytest.raises(protocol.ProtocolError):
            protocol.decode_header(bytes(bad))
    for length in range(len(good)):
        with pytest.raises(protocol.ProtocolError):
            protocol.decode_header(good[:length])


def test_another_version_is_told_from_damage():
    with pytest.raises(protocol.ForeignVersion, match="protocol version 9, this side speaks"):
        protocol.decode_header(protocol.seal(b"whatever it may be", version=9))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_seconds", float("nan")), ("timeout_seconds", float("inf")), ("timeout_seconds", -1.0),
        ("temperature", 0.0), ("temperature", float("nan")), ("topk", 0), ("prompt_lengths", [-1]),
        ("id", ""), ("id", "x" * 65),
    ],
)  # fmt: skip
def test_impossible_request_values(field, value):
    with pytest.raises(protocol.ProtocolError):
        protocol.decode_header(bytes(protocol.encode(request(**{field: value}))[0]))


def damaged(change):
    header, frames = over_the_wire(protocol.encode(request(), [protocol.request_array(SEQUENCES)]))
    return change(header, list(frames))


def with_spec(header, **changes):
    return msgspec.structs.replace(header, arrays=(msgspec.structs.replace(header.arrays[0], **changes),))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda header, frames: (header, []), "1 array frames announced, 0 arrived"),
        (lambda header, frames: (header, frames * 2), "2 arrived"),
        (lambda header, frames: (header, [frames[0][:-1]]), "35 bytes arrived"),
        (lambda header, frames: (header, [bytes([frames[0][0] ^ 1]) + frames[0][1:]]), "checksum"),
        (lambda header, frames: (with_spec(header, dtype="object"), frames), "unknown dtype 'object'"),
        (lambda header, frames: (with_spec(header, dtype="float32"), frames), "int32 array"),
        (lambda header, frames: (with_spec(header, shape=(3, 3)), frames), "int32 array"),
        (lambda header, frames: (with_spec(header, shape=(2**30, 2**30)), frames), "bytes arrived"),
        (lambda header, frames: (msgspec.structs.replace(header, response_lengths=[5]), frames), "response lengths"),
        (lambda header, frames: (msgspec.structs.replace(header, response_lengths=[2, 4]), frames), "10 token ids"),
    ],
)
def test_bad_frames(change, text):
    header, frames = damaged(change)
    with pytest.raises(protocol.ProtocolError, match=text):
        protocol.unpack_request(header, frames)


MODEL = protocol.ModelInfo(
    model="m", backend="vllm", vocab_size=9, num_embeddings=10, tokenizer_hash="h", max_topk=4, max_sequence_length=5,
    any_temperature=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sequences", "text"),
    [
        ({}, SEQUENCES, None),
        ({"topk": 5}, SEQUENCES, "topk 5 is above the 4"),
        ({"temperature": 0.5}, SEQUENCES, "temperature 0.5: the vllm backend"),
        ({}, [], "no sequences"),
        ({}, [(np.arange(4), np.arange(2))], "6 tokens, the server's limit is 5"),
        ({}, [(np.arange(0), np.arange(2))], "needs a prompt and a response"),
        ({}, [(np.arange(2), np.array([10]))], "outside the 10"),
        ({}, [(np.array([-1]), np.arange(2))], "outside the 10"),
    ],
)
def test_refusals_name_the_reason(changes, sequences, text):
    reason = protocol.refusal(request(**changes), sequences, MODEL)
    assert reason is None if text is None else text in reason


@pytest.mark.parametrize("address", ["", "15555", "host:", "host:x", "host:0", "host:70000", ":15555"])
def test_bad_addresses(address):
    with pytest.raises(TeacherError, match="host:port"):
        network.endpoint_url(address)

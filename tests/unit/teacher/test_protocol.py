"""Messages survive the round trip, and whatever is not a valid message is a ProtocolError."""

import re
import time
from concurrent.futures import Future
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gkd.errors import TeacherError, TeacherRefused
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.__main__ import main
from hybrid_gkd.teacher.client.requests import ReadingQueue
from hybrid_gkd.teacher.limits import check_request, rejection_reason
from hybrid_gkd.teacher.ranges import count_ranges, positions_of, ranges_of
from hybrid_gkd.teacher.server.parts import cut_request
from hybrid_gkd.testing import tail_of
from hybrid_gkd.types import Reading, TopK


def reading(token_ids, positions, name="reading 0"):
    return Reading(token_ids=np.array(token_ids, np.int32), positions=np.array(positions), name=name)


READINGS = [reading([1, 2, 3, 4, 5], [3, 4]), reading([6, 7, 8, 9], [1, 3], name="reading 1")]


def request(**changes) -> protocol.ScoreRequest:
    fields = {
        "id": "a", "attempt": 1, "timeout_seconds": 5.0, "topk": 2, "temperature": 1.0,
        "lengths": [5, 4], "ranges": [[3, 5], [1, 2, 3, 4]],
    } | changes  # fmt: skip
    return protocol.ScoreRequest(**fields)


def over_the_wire(frames):
    raw = [bytes(frame) for frame in frames]
    return protocol.decode_header(raw[0]), raw[1:]


def expect_round_trip(readings):
    changes = {
        "lengths": [each.num_tokens for each in readings],
        "ranges": [ranges_of(each.positions) for each in readings],
    }
    header, frames = over_the_wire(protocol.encode_message(request(**changes), protocol.request_arrays(readings)))
    unpacked = protocol.unpack_request(header, frames)
    assert header.num_tokens == sum(changes["lengths"])
    assert header.num_scored == sum(len(each.positions) for each in readings)
    for index, (found, expected) in enumerate(zip(unpacked, readings, strict=True)):
        assert found.name == f"reading {index}"
        assert found.positions.dtype == np.int64
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_array_equal(found.positions, expected.positions)
    return changes


def test_given_ids_survive_the_round_trip_row_by_row():
    given = np.arange(10, dtype=np.int32).reshape(5, 2)
    halves = zip(READINGS, (given[:2], given[2:4]), strict=True)
    readings = [replace(each, given_ids=half) for each, half in halves]
    header, frames = over_the_wire(protocol.encode_message(request(), protocol.request_arrays(readings)))
    found = protocol.unpack_request(header, frames)
    assert [each.given_ids.tolist() for each in found] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    header, frames = over_the_wire(protocol.encode_message(request(), [*protocol.request_arrays(READINGS), given]))
    with pytest.raises(protocol.ProtocolError, match="given ids must be an int32 array of 4 rows"):
        protocol.unpack_request(header, frames)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2, 3]], "3 given ids are more than topk 2"),
        ([[1, 1]], "distinct"), ([[-1, 1]], "distinct"), ([[1, 99999]], "not among the"),
    ],
)  # fmt: skip
def test_given_ids_that_cannot_be_scored_are_refused(ids, message):
    bad = replace(reading([1, 2, 3], [2]), given_ids=np.array(ids, np.int32))
    with pytest.raises(TeacherRefused, match=message):
        check_request(request(), [bad], MODEL)
    large = replace(bad, given_ids=np.zeros((1, protocol.MAX_REQUEST_BYTES // 4), np.int32))
    assert "bytes with its given ids, the limit is" in rejection_reason(large, MODEL)


def test_request_round_trip():
    assert expect_round_trip(READINGS) == {"lengths": [5, 4], "ranges": [[3, 5], [1, 2, 3, 4]]}


@pytest.mark.slow
@given(st.lists(st.sets(st.integers(1, 40), min_size=1), min_size=1, max_size=5), st.data())
def test_any_positions_survive_the_round_trip_as_the_fewest_ranges(all_positions, data):
    readings = []
    for positions in map(sorted, all_positions):
        length = data.draw(st.integers(positions[-1] + 1, positions[-1] + 9))
        readings.append(reading(np.arange(length), positions))
        pairs = np.array(ranges_of(readings[-1].positions)).reshape(-1, 2)
        assert len(pairs) == count_ranges(readings[-1].positions)
        assert (pairs[1:, 0] > pairs[:-1, 1]).all()
    expect_round_trip(readings)


BAD_RANGES = {
    "none": [], "half of one": [3], "half of the second": [1, 2, 3], "empty": [2, 2], "backwards": [3, 2],
    "the first token, which nothing predicts": [0, 2], "past the end": [3, 6], "far past the end": [1, 2**31 - 1],
    "descending": [3, 4, 1, 2], "overlapping": [1, 3, 2, 4], "the same again": [1, 2, 1, 2],
    "empty at the end": [1, 5, 5, 5],
}  # fmt: skip


@pytest.mark.parametrize("ranges", BAD_RANGES.values(), ids=BAD_RANGES)
def test_ranges_that_no_reading_has_are_refused(ranges):
    with pytest.raises(TeacherRefused, match=r"^name: the ranges of its scored tokens must be ascending within \[1, 5"):
        positions_of(ranges, 5, "name")
    header = request(ranges=[ranges, [1, 4]])
    assert isinstance(header.num_scored, int)  # the broker counts before a worker refuses
    header, frames = over_the_wire(protocol.encode_message(header, protocol.request_arrays(READINGS)))
    with pytest.raises(TeacherRefused, match=r"^reading 0: the ranges"):
        protocol.unpack_request(header, frames)


@pytest.mark.slow
@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 10))
def test_ranges_are_either_refused_or_positions_within_the_reading(ranges, length):
    try:
        positions = positions_of(ranges, length, "name")
    except TeacherRefused:
        pairs = [range(start, stop) for start, stop in zip(ranges[::2], ranges[1::2], strict=False)]
        found = [each for pair in pairs for each in pair]
        fits = found == sorted(set(found)) and all(0 < each < length for each in found)
        assert not ranges or len(ranges) % 2 or not all(pairs) or not fits
    else:
        assert (np.diff(positions, prepend=0, append=length) > 0).all()


@pytest.mark.parametrize(("lengths", "ranges"), [([], []), ([9], [[1, 9], [1, 9]]), ([4, 5], [[1, 4]])])
def test_a_request_whose_lists_do_not_match_is_refused(lengths, ranges):
    ids = np.zeros(sum(lengths), np.int32)
    header, frames = over_the_wire(protocol.encode_message(request(lengths=lengths, ranges=ranges), [ids]))
    with pytest.raises(TeacherRefused, match="each with its length and its ranges"):
        protocol.unpack_request(header, frames)


def test_the_most_hostile_ranges_that_a_message_has_room_for_cost_little():
    """Any number of empty lists would take a hundred times the memory of the message."""
    with pytest.raises(protocol.ProtocolError, match=r"length <= 8192"):
        protocol.decode_header(bytes(protocol.encode_message(request(ranges=[[]] * 500_000))[0]))
    huge = [1, 2**31 - 1] * 100_000
    (array,) = protocol.request_arrays(READINGS)
    header, frames = over_the_wire(protocol.encode_message(request(ranges=[huge, [1, 4]]), [array]))
    started = time.process_time()
    with pytest.raises(TeacherRefused, match="reading 0"):
        protocol.unpack_request(header, frames)
    assert time.process_time() - started < 1  # 0.02 s


def test_result_round_trip_is_float16_for_candidates_and_float32_for_all_else():
    rng = np.random.default_rng(0)
    scores = []
    for num_rows in (3, 1, 5):
        logprobs = np.log(rng.dirichlet(np.ones(7), num_rows)).astype(np.float32)[:, :4]
        ids = np.stack([rng.permutation(50)[:4] for _ in range(num_rows)]).astype(np.int32)
        tail, sampled = tail_of(logprobs), logprobs[:, 1].copy()
        scores.append(TopK(ids=ids, logprobs=logprobs, tail_logprobs=tail, sampled_logprobs=sampled))
    frames = protocol.encode_message(protocol.ScoreResult(id="a", attempt=1), protocol.result_arrays(scores))
    header, raw = over_the_wire(frames)
    assert [len(frame) for frame in raw] == [9 * 4 * 4, 9 * 4 * 2, 9 * 4, 9 * 4]
    received = protocol.unpack_result(header, raw, topk=4, vocab_size=50, num_scored=[3, 1, 5])
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
    header, frames = over_the_wire(protocol.encode_message(message))
    assert header == message
    assert type(header) is type(message)
    assert frames == []


def test_only_messages_about_adapters_have_their_keys():
    """The bytes of all others are those of services and clients that do not know adapters."""
    plain = protocol.Welcome(instance="i", num_workers=1, model=MODEL)
    keys = (
        "arrays", "attempt", "id", "kind", "lengths", "num_ids", "ranges", "temperature", "timeout_seconds", "topk",
    )  # fmt: skip
    assert sorted(on_the_wire(request())) == [*keys]
    assert not on_the_wire(plain)["model"].keys() - {
        "any_temperature", "backend", "chat_template", "given_ids", "max_sequence_length", "max_topk", "model",
        "num_embeddings", "stop_token_ids", "tokenizer_hash", "vocab_size", "weights",
    }  # fmt: skip
    adapters = (protocol.AdapterInfo("a", "w"), protocol.AdapterInfo("b", "x"))
    served = msgspec.structs.replace(MODEL, adapters=adapters)
    for message in (request(adapter="b"), msgspec.structs.replace(plain, model=served)):
        assert over_the_wire(protocol.encode_message(message))[0] == message
    check_request(request(adapter="b"), READINGS, served)
    assert str(served) == "m (weights unknown, adapter a w, adapter b x)"


def on_the_wire(message):
    return msgspec.msgpack.decode(protocol.encode_message(message)[0][protocol.PREFIX_BYTES :])


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
    good = bytes(protocol.encode_message(request(), protocol.request_arrays(READINGS))[0])
    for position in range(8 * len(good)):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        with pytest.raises(protocol.ProtocolError):
            protocol.decode_header(bytes(bad))
    for length in range(len(good)):
        with pytest.raises(protocol.ProtocolError):
            protocol.decode_header(good[:length])


def test_another_version_is_told_from_damage():
    with pytest.raises(protocol.ForeignVersion, match="protocol version 9, this side has"):
        protocol.decode_header(protocol.seal(b"whatever it may be", version=9))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_seconds", float("nan")), ("timeout_seconds", float("inf")), ("timeout_seconds", -1.0),
        ("temperature", 0.0), ("temperature", float("nan")), ("topk", 0), ("lengths", [-1]),
        ("ranges", [[-1, 2]]), ("ranges", [1, 2]), ("lengths", [1] * 8193), ("id", ""), ("id", "x" * 65),
    ],
)  # fmt: skip
def test_impossible_request_values(field, value):
    with pytest.raises(protocol.ProtocolError):
        protocol.decode_header(bytes(protocol.encode_message(request(**{field: value}))[0]))


def damaged(change):
    header, frames = over_the_wire(protocol.encode_message(request(), protocol.request_arrays(READINGS)))
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
        (lambda header, frames: (msgspec.structs.replace(header, lengths=[5, 5]), frames), "10 token ids"),
    ],
)
def test_bad_frames(change, text):
    header, frames = damaged(change)
    with pytest.raises(protocol.ProtocolError, match=text):
        protocol.unpack_request(header, frames)


MODEL = protocol.ModelInfo(
    model="m", backend="vllm", vocab_size=10, num_embeddings=12, tokenizer_hash="h", max_topk=4, max_sequence_length=5,
    any_temperature=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "readings", "text"),
    [
        ({"topk": 5}, READINGS, "topk 5 is above the 4"),
        ({"temperature": 0.5}, READINGS, "temperature 0.5: the vllm backend"),
        ({}, [*READINGS, reading(np.arange(6), [2], "the third")], "the third has 6 tokens, the server's limit is 5"),
        ({}, [reading([0, 1, 12], [2])], "reading 0 has token ids outside the 12 .* for example 12"),
        ({}, [reading([-1, 0], [1])], "outside the 12"),
        ({}, [reading([11, 10, 0], [1])], "reading 0 has a scored id 10, which is not one of the 10 token ids"),
        ({"num_ids": 7}, READINGS, "reading 1 has a scored id 7, which is not one of the 7"),
        ({"num_ids": 1}, READINGS, r"topk 2 is above the 1 ids .*\(num_ids\)"),
        ({"adapter": "a"}, READINGS, "adapter 'a' is not one of the service's: none"),
        ({"adapter": ""}, READINGS, "adapter '' is not one of the service's: none"),
    ],
)
def test_refusals_name_the_reason(changes, readings, text):
    check_request(request(), READINGS, MODEL)
    with pytest.raises(TeacherRefused, match=text):
        check_request(request(**changes), readings, MODEL)


def test_as_many_ranges_are_taken_as_fit_into_a_header():
    """Every other token of a long reading; its numbers have five bytes."""
    most, model = protocol.MAX_RANGES, msgspec.structs.replace(MODEL, max_sequence_length=1 << 20)
    long = reading(np.zeros(1 << 20), (1 << 20) - 1 - 2 * np.arange(most)[::-1])
    assert rejection_reason(long, model) is None
    header = protocol.encode_message(request(lengths=[1 << 20], ranges=[ranges_of(long.positions)]))[0]
    assert len(header) < protocol.MAX_HEADER_BYTES
    more = reading(long.token_ids, [1, *long.positions])
    assert f"has {most + 1} separate ranges" in rejection_reason(more, model)


@pytest.mark.parametrize("address", [
    "", "15555", "host:", "host:x", "host:0", "host:70000", ":15555", "tcp://host:1", "a..b:1", f"{'a' * 64}:1", "-a:1",
    "h\xe9:1", "a b:1", "host:\u0663",
])  # fmt: skip
def test_bad_addresses(address):
    with pytest.raises(TeacherError, match="host:port"):
        network.endpoint_url(address)


def test_a_worker_and_a_service_with_a_bad_address_or_file_end_before_the_model_is_loaded(capsys, monkeypatch):
    for arguments, error in (
        ("join --proxy-addr tcp://host:1", "error: 'tcp://host:1' is not a teacher address; expected host:port"),
        ("serve --insecure --host a..b", "error: --host a..b: not an address of this machine"),
        ("serve --insecure --ready-file /no/ready", "error: --ready-file /no/ready: its folder does not exist or"),
    ):
        monkeypatch.setattr("sys.argv", ["teacher", *arguments.split(), "--ckpt-path", "nothere"])
        assert main() == 1
        assert error in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--drain-timeout nan", "--drain-timeout -1", "--gpu-memory-utilization 2"])
def test_numbers_out_of_range_are_refused_by_the_command_line(option, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["teacher", "serve", "--insecure", "--ckpt-path", "nothere", *option.split()])
    with pytest.raises(SystemExit):
        main()
    name, value = option.split()
    assert re.search(rf"argument {name}: must be a number within .*, got {value}\n", capsys.readouterr().err)


def test_two_long_values_are_shown_where_they_differ():
    model = MODEL
    one, two = (msgspec.structs.replace(model, chat_template="{{ messages }}" * 20 + end) for end in ("a", "b"))
    found = re.fullmatch(r"chat_template (\.\.\..*) instead of (\.\.\..*)", one.differences(two))
    assert found is not None
    assert [text[-len(" }}a'") :] for text in found.groups()] == [" }}a'", " }}b'"]
    other = msgspec.structs.replace(model, max_topk=model.max_topk + 1)
    assert model.differences(other) == f"max_topk {model.max_topk} instead of {model.max_topk + 1}"


def test_a_result_that_no_socket_takes_is_refused_before_it_is_computed_also_of_one_reading():
    request = protocol.ScoreRequest(
        id="1", attempt=0, timeout_seconds=1.0, topk=1 << 17, temperature=1.0, lengths=[2000], ranges=[[1, 2000]],
    )
    with pytest.raises(TeacherRefused, match=r"1999 scored tokens with topk 131072 would .* 15\d+ bytes, the"):
        cut_request(request, [])


def test_readings_whose_joint_result_no_socket_takes_are_not_one_request():
    queue = ReadingQueue(8, topk=1 << 17)
    for _ in range(3):
        queue.add(reading(np.zeros(600, np.int32), range(1, 600)), Future())
    assert len(queue.take_group(time.monotonic())[0]) == 2
    assert protocol.reply_bytes(2 * 599, 1 << 17) < protocol.MAX_REPLY_BYTES < protocol.reply_bytes(3 * 599, 1 << 17)

"""The service as an outsider sees it: a client that knows teacher/PROTOCOL.md and nothing of this package."""

import contextlib
import re
from pathlib import Path

import numpy as np
import plain_client
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_gkd.models.tokenizer import load_tokenizer
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.server.local import TeacherProcess
from hybrid_gkd.teacher.server.statistics import COUNTERS
from hybrid_gkd.testing import make_tiny_model

TIMEOUT = 120.0  # seconds; ends a test that hangs
TOPK, LIMIT = 7, 128


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def teacher(model_path, tmp_path_factory):
    options = ["--backend", "hf", "--device", "cpu", "--max-model-len", str(LIMIT)]
    log_path = tmp_path_factory.mktemp("log") / "teacher.log"
    with TeacherProcess(model_path, log_path=log_path, options=options, start_timeout=TIMEOUT) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def client(teacher):
    with contextlib.closing(plain_client.PlainClient(teacher.address, TIMEOUT, teacher.keys)) as connected:
        yield connected


def make_readings(count):
    """Token ids, and two ranges of scored positions."""
    rng = np.random.default_rng(3)
    return [
        (rng.integers(0, 259, length), np.sort(1 + rng.permutation(length)[:4]).tolist())
        for length in rng.integers(6, 80, count)
    ]


def test_it_imports_nothing_of_ours():
    text = Path(plain_client.__file__).read_text(encoding="utf-8")
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported == {"glob", "msgpack", "numpy", "time", "zlib", "zmq"}


def test_handshake(client, model_path):
    welcome = client.handshake()
    assert welcome["num_workers"] == 1
    assert welcome["model"]["backend"] == "hf"
    assert welcome["model"]["vocab_size"] == len(load_tokenizer(model_path))
    assert welcome["model"]["max_sequence_length"] == LIMIT


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_a_plain_forward(client, model_path, temperature):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    readings = make_readings(5)
    client.ask("first", readings[:2], TOPK, temperature)
    client.ask("second", readings[2:], TOPK, temperature)
    answers = {answer["id"]: answer for answer in (client.scores(), client.scores())}
    for name, own in (("first", readings[:2]), ("second", readings[2:])):
        rows, targets = [], []
        for ids, (start, stop, second_start, second_stop) in own:
            positions = np.array([*range(start, stop), *range(second_start, second_stop)])
            targets += ids[positions].tolist()
            with torch.inference_mode():
                logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, positions - 1]
            rows.append((logits / temperature).log_softmax(-1))
        expected = torch.cat(rows).numpy()
        answer = answers[name]
        assert answer["attempt"] == 1
        top = -np.sort(-expected, axis=1)[:, :TOPK]
        np.testing.assert_allclose(answer["logprobs"], top, rtol=1e-3, atol=2e-4)
        np.testing.assert_allclose(np.take_along_axis(expected, answer["ids"], 1), top, atol=2e-4)
        candidates = np.take_along_axis(expected, answer["ids"], 1)
        np.testing.assert_allclose(np.exp(answer["tail"]), 1 - np.exp(candidates).sum(1), atol=1e-5)
        np.testing.assert_allclose(answer["sampled"], expected[np.arange(len(targets)), targets], atol=2e-4)


def test_errors_have_their_codes(client):
    client.ask("long", [(np.zeros(200, int), [100, 200])], TOPK)
    answer = client.scores()
    assert (answer["id"], answer["code"]) == ("long", "refused")
    assert f"200 tokens, the server's limit is {LIMIT}" in answer["reason"]
    frames = plain_client.encode(
        "score", [np.arange(4, dtype=np.int32)], id="damaged", attempt=1, timeout_seconds=60.0, topk=1, temperature=1.0,
        lengths=[4], ranges=[[2, 4]],
    )  # fmt: skip
    client.send_frames([frames[0], frames[1][:-1] + b"\x01"])
    answer = client.scores()
    assert (answer["id"], answer["code"]) == ("damaged", "failed")
    assert "checksum" in answer["reason"]
    for ranges in ([0, 2], [2, 5], [3, 2], [1, 3, 2, 4], [1], []):
        client.ask("ranges", [(np.zeros(4, int), [1, 4]), (np.zeros(4, int), ranges)], TOPK)
        answer = client.scores()
        assert (answer["id"], answer["code"]) == ("ranges", "refused")
        assert "reading 1: the ranges of its scored tokens must be ascending within [1, 4)" in answer["reason"]


def test_heartbeat_names_what_is_pending_in_order(client):
    instance = client.handshake()["instance"]
    client.ask("a", make_readings(1), TOPK)
    client.send("ping", number=1)
    pong, _ = client.receive("pong")
    assert pong["number"] == 1
    assert pong["instance"] == instance
    assert pong["pending"] in ([], ["a"])
    client.send("ping", number=2)
    assert client.receive("pong")[0]["number"] == 2


def test_another_version_is_answered_with_the_own_one(client):
    frame = bytearray(plain_client.encode("hello")[0])
    frame[3] = 9
    frame[4:8] = plain_client.zlib.crc32(frame[:4] + frame[8:]).to_bytes(4, "little")
    client.send_frames([bytes(frame)])
    assert client.receive("welcome")[0]["num_workers"] == 1


def test_the_page_names_every_field_and_counter(client):
    page = (Path(__file__).parents[2] / "hybrid_gkd" / "teacher" / "PROTOCOL.md").read_text(encoding="utf-8")
    assert f"version {protocol.PROTOCOL_VERSION}" in page.splitlines()[0]
    client.send("status_request")
    status, _ = client.receive("status")
    assert set(status["counters"]) == set(COUNTERS)
    for kind in protocol.AnyMessage.__args__:
        assert f"`{kind.__struct_config__.tag}`" in page or f"### {kind.__struct_config__.tag}" in page, kind
        for name in kind.__struct_fields__:
            assert f"`{name}`" in page, (kind, name)
    for name in (*COUNTERS, *protocol.ModelInfo.__struct_fields__, *protocol.WorkerStatus.__struct_fields__):
        assert f"`{name}`" in page, name

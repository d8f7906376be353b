"""A second client of the teacher service, written from teacher/PROTOCOL.md alone: it imports nothing of ours."""

import glob
import time
import zlib

import msgpack
import numpy as np
import zmq
import zmq.auth

VERSION = 4
TYPES = {"int32": "<i4", "float16": "<f2", "float32": "<f4"}


def encode(kind, arrays=(), **fields):
    buffers = [np.ascontiguousarray(array, TYPES[array.dtype.name]).tobytes() for array in arrays]
    fields["kind"] = kind
    fields["arrays"] = [
        {"dtype": array.dtype.name, "shape": list(array.shape), "crc32": zlib.crc32(buffer)}
        for array, buffer in zip(arrays, buffers, strict=True)
    ]
    body, start = msgpack.packb(fields), b"GKD" + bytes([VERSION])
    return [start + zlib.crc32(start + body).to_bytes(4, "little") + body, *buffers]


def decode(frames):
    header = frames[0]
    assert header[:3] == b"GKD", header[:3]
    assert header[3] == VERSION, f"the service speaks version {header[3]}"
    assert zlib.crc32(header[:4] + header[8:]) == int.from_bytes(header[4:8], "little")
    fields = msgpack.unpackb(header[8:])
    arrays = []
    for spec, frame in zip(fields.pop("arrays", []), frames[1:], strict=True):
        assert zlib.crc32(frame) == spec["crc32"]
        arrays.append(np.frombuffer(frame, TYPES[spec["dtype"]]).reshape(spec["shape"]))
    return fields, arrays


class PlainClient:
    def __init__(self, address, timeout, keys):
        self._timeout = timeout
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        (secret_file,) = glob.glob(f"{keys}/*.key_secret")
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.auth.load_certificate(secret_file)
        self._socket.curve_serverkey, _ = zmq.auth.load_certificate(f"{keys}/server.key")
        self._socket.connect(f"tcp://{address}")

    def close(self):
        self._socket.send_multipart(encode("bye"))
        self._context.destroy(linger=200)

    def send(self, kind, arrays=(), **fields):
        self._socket.send_multipart(encode(kind, arrays, **fields))

    def send_frames(self, frames):
        self._socket.send_multipart(frames)

    def receive(self, *kinds):
        """The next message of one of these kinds; others are passed over."""
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            if self._socket.poll(100):
                fields, arrays = decode(self._socket.recv_multipart())
                if fields["kind"] in kinds:
                    return fields, arrays
        raise TimeoutError(f"waited {self._timeout} s for {kinds}")

    def handshake(self):
        self.send("hello")
        return self.receive("welcome")[0]

    def ask(self, request_id, readings, topk, temperature=1.0, attempt=1):
        """`readings`: pairs of token ids and ranges of scored positions, [start, stop, start, stop, ...]."""
        self.send(
            "score", [np.concatenate([ids for ids, _ in readings]).astype(np.int32)], id=request_id, attempt=attempt,
            timeout_seconds=self._timeout, topk=topk, temperature=temperature,
            lengths=[len(ids) for ids, _ in readings], ranges=[ranges for _, ranges in readings],
        )  # fmt: skip

    def scores(self):
        """(id, [(ids, log-probabilities, of the tail, of the token itself)] for each scored token) or the error."""
        fields, arrays = self.receive("result", "error")
        if fields["kind"] == "error":
            return fields
        ids, logprobs, tail, sampled = arrays
        assert ids.dtype == np.int32
        assert logprobs.dtype == np.float16
        assert tail.dtype == sampled.dtype == np.float32
        assert tail.shape == sampled.shape
        assert ids.shape == logprobs.shape == (len(sampled), ids.shape[1])
        return fields | {"ids": ids, "logprobs": logprobs.astype(np.float32), "tail": tail, "sampled": sampled}

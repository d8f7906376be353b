"""Faults on demand for the teacher service: real processes, sockets and arrays; only the model is a stand-in.

`python tests/faults.py broker PORT WORKER_PORT` and `python tests/faults.py worker ADDRESS` are the processes;
tests/integration/test_teacher_faults.py runs short versions of the scenarios, benchmarks/teacher_faults.py long ones.
Every scenario asserts what must hold and returns what it saw.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import zmq
from processes import TIMEOUT, stop_process, wait_until

from hybrid_gkd.errors import TeacherTimeout
from hybrid_gkd.models.tokenizer import load_tokenizer, tokenizer_hash
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.client.connection import query_status
from hybrid_gkd.teacher.keys import load_keys
from hybrid_gkd.teacher.server import broker, scoring_worker
from hybrid_gkd.teacher.server.local import TeacherProcess, child_environment
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.testing import tail_of
from hybrid_gkd.types import Reading, TopK

VOCAB, TOPK = 1000, 8
HANG_TOKEN = VOCAB - 1
"""A worker that is started with --hang sleeps for an hour on a reading that begins with it."""
STUDENT = {"tokenizer_hash": "h", "tokenizer_size": VOCAB, "max_sequence_length": 256}
MODEL = protocol.ModelInfo(
    model="stand-in", backend="hf", vocab_size=VOCAB, num_embeddings=VOCAB, tokenizer_hash="h", max_topk=TOPK,
    max_sequence_length=512, any_temperature=True,
)  # fmt: skip


def expected_scores(reading, topk=TOPK):
    """Scores that differ between any two readings and positions."""
    state = (np.cumsum(reading.token_ids, dtype=np.int64)[reading.positions] * 31 + reading.positions * 7) % VOCAB
    ids = (state[:, None] + 13 * np.arange(topk)) % VOCAB
    logprobs = (-3.0 - (state[:, None] % 64) / 64 - np.arange(topk) / 8).astype(np.float16).astype(np.float32)
    sampled = -1.0 - state / VOCAB
    return TopK(
        ids=ids.astype(np.int32), logprobs=logprobs, tail_logprobs=tail_of(logprobs),
        sampled_logprobs=sampled.astype(np.float32),
    )  # fmt: skip


class StandInEngine:
    """The engine of scoring_worker.py with `expected_scores` for a model."""

    info = MODEL

    def __init__(self, delay: float = 0.0, hangs: bool = False, spoils: bool = False):
        self._delay, self._hangs, self._spoils = delay, hangs, spoils
        self._jobs: list[tuple] = []

    @property
    def num_tokens(self):
        return sum(reading.num_tokens for job in self._jobs for reading in job[1])

    def add(self, *job):
        self._jobs.append(job)

    def step(self):
        jobs, self._jobs = self._jobs[:1], self._jobs[1:]
        return [(job, self.score(*rest)) for job, *rest in jobs]

    def clear(self):
        jobs, self._jobs = [job[0] for job in self._jobs], []
        return jobs

    def score(self, readings, k, temperature, num_ids=None, adapter=None):
        if self._hangs and any(reading.token_ids[0] == HANG_TOKEN for reading in readings):
            time.sleep(3600)
        time.sleep(self._delay)
        scores = [expected_scores(reading, k) for reading in readings]
        if self._spoils and readings[0].num_tokens > 2:  # all but the test request
            scores[-1].logprobs[-1, -1] = np.nan
        return scores


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


class Cluster:
    """A broker process and worker processes; what is killed can be started again."""

    def __init__(self, num_workers: int, *worker_options: str, hedge_seconds: float = broker.HEDGE_SECONDS):
        self.ports = free_port(), free_port()
        self.address = f"127.0.0.1:{self.ports[0]}"
        self._broker_arguments = ("broker", *map(str, self.ports), "--hedge", str(hedge_seconds))
        self.workers: dict[str, subprocess.Popen] = {}
        self.broker = self.start(*self._broker_arguments)
        for _ in range(num_workers):
            self.add_worker(*worker_options)
        wait_until(self.is_up, "for the broker")
        self.wait_for_workers(num_workers)

    def start(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, __file__, *arguments], env=child_environment())

    def add_worker(self, *options: str) -> None:
        process = self.start("worker", f"127.0.0.1:{self.ports[1]}", *options)
        self.workers[f"{socket.gethostname()}:{process.pid}"] = process

    def restart_broker(self) -> None:
        self.broker.kill()
        self.broker.wait()
        self.broker = self.start(*self._broker_arguments)

    def is_up(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[0]), timeout=1):
            return True
        return False

    def status(self) -> protocol.Status:
        return query_status(self.address, TIMEOUT)

    def wait_for_workers(self, count: int) -> None:
        wait_until(lambda: self.status().num_workers == count, f"for {count} workers")

    def busy_workers(self) -> list[str]:
        return [each.name for each in self.status().workers if each.num_held and each.name in self.workers]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in (self.broker, *self.workers.values()):
            process.kill()
            process.wait()


@contextlib.contextmanager
def connected(address: str, **options):
    defaults = {"topk": TOPK, "vocab_size": VOCAB, "connect_timeout": TIMEOUT, "request_timeout": TIMEOUT}
    with TeacherClient([address], **(defaults | options)) as client:
        client.handshake(**STUDENT)
        yield client


def make_readings(
    rng: np.random.Generator, count: int, first: int = 0, length: int | None = None, num_scored: int | None = None
) -> list[Reading]:
    """Return readings of `length` tokens, by default 2 to 79; `num_scored` or a random number of them are scored."""
    readings = []
    for index in range(first, first + count):
        tokens = length or rng.integers(2, 80)
        positions = 1 + rng.permutation(tokens - 1)[: num_scored or rng.integers(1, tokens)]
        token_ids = rng.integers(0, HANG_TOKEN, tokens, dtype=np.int32)
        readings.append(Reading(token_ids=token_ids, positions=np.sort(positions), name=str(index)))
    return readings


def expect(score: TopK, reading: Reading) -> None:
    wanted = expected_scores(reading)
    np.testing.assert_array_equal(score.ids, wanted.ids)
    np.testing.assert_array_equal(score.logprobs, wanted.logprobs)
    np.testing.assert_array_equal(score.sampled_logprobs, wanted.sampled_logprobs)


class Load:
    """Readings without end, in a thread; every score is compared with what it has to be."""

    def __init__(self, client: TeacherClient, seed: int = 0, size: int = 64):
        self._client, self._rng, self._size = client, np.random.default_rng(seed), size
        self._stopping = threading.Event()
        self.deliveries: collections.Counter[str] = collections.Counter()
        self.submitted = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                batch = make_readings(self._rng, self._size, first=self.submitted)
                self.submitted += len(batch)
                for reading, future in zip(batch, self._client.submit(batch), strict=True):
                    future.add_done_callback(lambda _, name=reading.name: self.deliveries.update([name]))
                    expect(future.result(TIMEOUT), reading)
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def stop(self) -> dict[str, int]:
        """Wait for the requests in flight; nothing may be lost, wrong or delivered twice."""
        self._stopping.set()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        self.check()
        assert self.deliveries.keys() == set(map(str, range(self.submitted)))
        assert set(self.deliveries.values()) == {1}
        return {"sequences": self.submitted, "lost": 0, "delivered twice": 0, "wrong": 0}


def kill_workers(num_kills: int, num_workers: int = 2) -> dict[str, float]:
    """SIGKILL a worker that holds requests, again and again; another one takes its place."""
    with Cluster(num_workers, "--delay", "0.02") as cluster, connected(cluster.address) as client:
        started, memory = time.monotonic(), memory_mib(cluster.broker.pid)
        load, killed = Load(client), 0
        while killed < num_kills:
            load.check()
            before = cluster.status().counters["requeued"]
            busy = cluster.busy_workers()
            if not busy:
                continue
            victim = cluster.workers.pop(busy[0])
            victim.kill()
            victim.wait()
            cluster.add_worker("--delay", "0.02")
            wait_until(
                lambda name=busy[0]: name not in {each.name for each in cluster.status().workers}, "for the loss"
            )
            killed += cluster.status().counters["requeued"] > before  # it held a request when it died
        seen = load.stop()
        state, metrics = cluster.status(), client.drain_metrics()
        assert state.counters["delivered"] == len(metrics.latencies)
        return seen | {
            "kills": killed, "requests": len(metrics.latencies), "requeued": state.counters["requeued"],
            "retries of the client": metrics.retries, "seconds": time.monotonic() - started,
            "broker grew by MiB": memory_mib(cluster.broker.pid) - memory,
        }  # fmt: skip


def kill_service_workers(num_kills: int, model_path: str, folder: Path) -> dict[str, float]:
    """The same with `serve --workers 2` and a real model; the service replaces its workers itself."""
    tokenizer = load_tokenizer(model_path)
    handshake = {"tokenizer_hash": tokenizer_hash(tokenizer), "tokenizer_size": len(tokenizer)}
    options = ["--backend", "hf", "--device", "cpu", "--workers", "2"]
    rng = np.random.default_rng(0)
    batch = [
        Reading(token_ids=rng.integers(0, 259, 80, dtype=np.int32), positions=np.arange(30, 80)) for _ in range(64)
    ]
    with TeacherProcess(model_path, log_path=folder / "teacher.log", options=options) as teacher:
        teacher.wait_ready()
        client = TeacherClient(
            [teacher.address], topk=TOPK, vocab_size=259, connect_timeout=TIMEOUT, request_timeout=TIMEOUT,
            num_microbatches=2, keys=teacher.keys,
        )  # fmt: skip
        with client:
            client.handshake(**handshake, max_sequence_length=80)
            wanted = [future.result(TIMEOUT) for future in client.submit(batch)]
            started, killed, rounds, exact = time.monotonic(), 0, 0, 0
            while killed < num_kills:
                futures = client.submit(batch)
                rounds += 1
                killed += _kill_a_busy_child(teacher)
                for future, want in zip(futures, wanted, strict=True):
                    score = future.result(TIMEOUT)
                    np.testing.assert_allclose(score.sampled_logprobs, want.sampled_logprobs, atol=1e-4)
                    np.testing.assert_allclose(score.logprobs, want.logprobs, rtol=1e-3, atol=1e-4)
                    exact += np.array_equal(score.ids, want.ids) and np.array_equal(score.logprobs, want.logprobs)
            state, metrics = status_of(teacher), client.drain_metrics()
        assert state.counters["delivered"] == len(metrics.latencies)
        return {
            "kills": killed, "sequences": rounds * len(batch), "lost": 0, "bit for bit equal": exact,
            "requests": len(metrics.latencies), "requeued": state.counters["requeued"],
            "retries of the client": metrics.retries, "seconds": time.monotonic() - started,
        }  # fmt: skip


def _kill_a_busy_child(teacher: TeacherProcess) -> bool:
    """Whether a worker was killed while it held requests."""
    state = status_of(teacher)
    before = state.counters["requeued"]
    busy = [each.name for each in state.workers if each.num_held and each.num_delivered]
    if not busy:
        return False
    os.kill(int(busy[0].rpartition(":")[2]), signal.SIGKILL)
    wait_until(lambda: busy[0] not in {each.name for each in status_of(teacher).workers}, "for the loss")
    return status_of(teacher).counters["requeued"] > before


def status_of(teacher: TeacherProcess) -> protocol.Status:
    return query_status(teacher.address, TIMEOUT, load_keys(teacher.keys))


def restart_broker(num_restarts: int, pause: float = 1.0) -> dict[str, object]:
    """SIGKILL the broker under load; client and worker find the new one by themselves."""
    resumed = []
    with Cluster(1) as cluster, connected(cluster.address) as client:
        load = Load(client)
        for _ in range(num_restarts):
            wait_until(lambda: cluster.status().counters["delivered"] > 0, "for results")
            cluster.broker.kill()
            cluster.broker.wait()
            time.sleep(pause)
            done = len(load.deliveries)
            cluster.restart_broker()
            wait_until(cluster.is_up, "for the broker's port")
            returned = time.monotonic()
            wait_until(lambda done=done: len(load.deliveries) > done, "for the next scores")
            resumed.append(time.monotonic() - returned)
            load.check()
        return load.stop() | {"restarts": num_restarts, "seconds until the next scores": resumed}


def stop_worker() -> dict[str, float]:
    """SIGSTOP: the connection stays, the process is silent; it comes back with SIGCONT."""
    with Cluster(2, "--delay", "0.02") as cluster, connected(cluster.address) as client:
        load = Load(client)
        wait_until(cluster.busy_workers, "for a busy worker")
        name = cluster.busy_workers()[0]
        stopped = cluster.workers[name]
        stop_process(stopped.pid)
        started = time.monotonic()
        wait_until(lambda: name not in {each.name for each in cluster.status().workers}, "for the broker to notice")
        noticed = time.monotonic() - started
        requeued = cluster.status().counters["requeued"]
        assert requeued > 0
        stopped.send_signal(signal.SIGCONT)
        cluster.wait_for_workers(2)
        retries = client.drain_metrics().retries
        return load.stop() | {"noticed after seconds": noticed, "requeued": requeued, "retries of the client": retries}


def hang_engine(hedge_seconds: float = broker.HEDGE_SECONDS) -> dict[str, float]:
    """The engine of one worker hangs while its link answers pings; the request goes to the other one as well."""
    with Cluster(1, "--hang", hedge_seconds=hedge_seconds) as cluster, connected(cluster.address) as client:
        (reading,) = make_readings(np.random.default_rng(0), 1)
        reading.token_ids[0] = HANG_TOKEN
        started = time.monotonic()
        (future,) = client.submit([reading])
        wait_until(cluster.busy_workers, "for the worker to take the request")
        cluster.add_worker()
        expect(future.result(TIMEOUT), reading)
        state = cluster.status()
        assert state.counters["hedged"] == 1
        assert state.num_workers == 2
        return {"seconds": time.monotonic() - started, "retries of the client": client.drain_metrics().retries}


def spoil_replies() -> dict[str, object]:
    """One of two workers returns NaN: no client sees it, and after a few times it gets no more work."""
    with Cluster(1, "--delay", "0.01") as cluster, connected(cluster.address) as client:
        cluster.add_worker("--spoil")
        cluster.wait_for_workers(2)
        (spoiler,) = list(cluster.workers)[1:]
        load = Load(client)
        wait_until(lambda: cluster.status().barred, "for the worker to be barred")
        seen, state = load.stop(), cluster.status()
        (reason,) = state.barred
        assert reason.startswith(f"{spoiler}: excluded after {broker.MAX_BAD_REPLIES} bad replies"), reason
        assert "NaN" in reason
        assert spoiler not in {each.name for each in state.workers}
        assert cluster.workers[spoiler].wait(TIMEOUT) == 1
        metrics = client.drain_metrics()
        assert metrics.bad_replies == metrics.retries == 0
        return seen | {"bad replies": state.counters["bad_replies"]}


def hang_only_engine() -> dict[str, object]:
    """Nobody else can take the request: it times out, and a while later the worker ends to be replaced."""
    with Cluster(1, "--hang", "--hung", "1") as cluster, connected(cluster.address, request_timeout=3.0) as client:
        (reading,) = make_readings(np.random.default_rng(0), 1)
        reading.token_ids[0] = HANG_TOKEN
        (future,) = client.submit([reading])
        error = future.exception(TIMEOUT)
        assert isinstance(error, TeacherTimeout), error
        assert cluster.address in str(error)
        (process,) = cluster.workers.values()
        assert process.wait(TIMEOUT) == scoring_worker.HUNG_EXIT_CODE
        return {"the client's error": str(error)}


def deaf_client(num_requests: int) -> dict[str, float]:
    """A client that asks without end and never reads; the others are served and the broker does not grow."""
    rng = np.random.default_rng(0)
    with Cluster(1) as cluster, connected(cluster.address) as client, zmq.Context() as context:
        batch = make_readings(rng, 32)
        for future, reading in zip(client.submit(batch), batch, strict=True):
            expect(future.result(TIMEOUT), reading)
        memory = memory_mib(cluster.broker.pid)
        with context.socket(zmq.DEALER) as deaf:
            deaf.setsockopt(zmq.RCVHWM, 1)
            deaf.setsockopt(zmq.RCVBUF, 4096)
            deaf.setsockopt(zmq.LINGER, 0)
            deaf.connect(f"tcp://{cluster.address}")
            token_ids = rng.integers(0, HANG_TOKEN, 512, dtype=np.int32)
            for index in range(num_requests):
                request = protocol.ScoreRequest(
                    id=str(index), attempt=1, timeout_seconds=600.0, topk=TOPK, temperature=1.0,
                    lengths=[512], ranges=[[16, 512]],
                )  # fmt: skip
                frames = protocol.encode_message(request, [token_ids])
                assert deaf.poll(int(TIMEOUT * 1000), zmq.POLLOUT)
                deaf.send_multipart(frames)
                if index % 100 == 0:
                    for future, reading in zip(client.submit(batch), batch, strict=True):
                        expect(future.result(TIMEOUT), reading)
            state = cluster.status()
            assert state.counters["undelivered"] > 0, state.counters
            growth = memory_mib(cluster.broker.pid) - memory
        assert growth < 256, growth
        latency = client.drain_metrics().latencies
        return {
            "requests of the deaf client": num_requests, "requests of the other": len(latency),
            "slowest of the other, seconds": max(latency), "undelivered": state.counters["undelivered"],
            "refused": state.counters["refused"], "broker grew by MiB": growth,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["broker", "worker"])
    parser.add_argument("places", nargs="+")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--spoil", action="store_true")
    parser.add_argument("--hedge", type=float)
    parser.add_argument("--hung", type=float, default=scoring_worker.HUNG_SECONDS)
    parser.add_argument("--keys")
    args = parser.parse_args()
    if args.role == "broker":
        broker.HEDGE_SECONDS = args.hedge
        broker.Broker(port=int(args.places[0]), worker_port=int(args.places[1])).run(lambda: True)
    else:
        keys = load_keys(args.keys) if args.keys else None
        scoring_worker.HUNG_SECONDS = args.hung
        scoring_worker.ScoringWorker(StandInEngine(args.delay, args.hang, args.spoil), args.places[0], keys).run()


if __name__ == "__main__":
    main()

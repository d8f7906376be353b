"""The trainer's side of the teacher service: sequences in, futures of checked scores out.

A background thread (teacher/client/thread.py) groups sequences into requests, keeps a bounded number of them in
flight, and sees each to its one outcome: scores that passed every check, or an error that names the server, the
request, what was waited for and for how long. A sequence is never skipped.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from hybrid_gkd.errors import TeacherError, TeacherRefused, TeacherTimeout
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.client.connection import ServerInfo, StudentNeeds, query_status
from hybrid_gkd.teacher.client.requests import TeacherMetrics, resolve
from hybrid_gkd.teacher.client.thread import RequestThread
from hybrid_gkd.teacher.keys import load_keys
from hybrid_gkd.teacher.protocol import Status
from hybrid_gkd.types import Sequence, TeacherTopK

__all__ = ["TeacherClient", "TeacherMetrics"]

MAX_WAITING_TOKENS = 1 << 24
"""Of sequences that are not in flight yet; `submit` waits when there are more."""


class TeacherClient:
    """Scores sequences with one or several teacher servers that serve the same model.

    Args:
        endpoints: "host:port" of each server
        topk: K, candidates per response token
        temperature: of the teacher's distribution
        vocab_size: ids in replies are below it
        connect_timeout: seconds for the handshake with all servers
        request_timeout: seconds from the first sending of a request to its scores, all attempts together
        max_retries: further attempts after a reply that fails its checks or an engine failure; an unanswered
            attempt is repeated after request_timeout / (max_retries + 1)
        n_server_workers: requests in flight
        num_microbatches: sequences per request at most
        keys: folder with this client's keys, where the servers have some

    A context manager; call `handshake` before `submit`.
    """

    def __init__(
        self, endpoints: list[str], *, topk: int, temperature: float = 1.0, vocab_size: int,
        connect_timeout: float = 10.0, request_timeout: float = 600.0, max_retries: int = 3,
        n_server_workers: int = 8, num_microbatches: int = 4, keys: str | Path | None = None,
    ):
        if not endpoints:
            raise TeacherError("no teacher address is given")
        for address in endpoints:
            network.endpoint_url(address)  # a bad one is an error before anything is opened
        self._endpoints, self._topk, self._temperature = endpoints, topk, temperature
        self._connect_timeout, self._request_timeout = connect_timeout, request_timeout
        self._keys = load_keys(keys) if keys is not None else None
        self._served: list[ServerInfo] = []
        self._thread = RequestThread(
            endpoints, self._keys, topk=topk, temperature=temperature, vocab_size=vocab_size,
            request_timeout=request_timeout, max_retries=max_retries, max_in_flight=n_server_workers,
            group_size=num_microbatches,
        )

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def handshake(self, *, tokenizer_hash: str, tokenizer_size: int, max_sequence_length: int) -> ServerInfo:
        """Wait until every server has answered and fits; returns what the first one serves.

        Raises TeacherUnreachable after connect_timeout, or at once where keys do not fit, and TeacherMismatch with
        both sides' values.
        """
        needs = StudentNeeds(
            tokenizer_hash=tokenizer_hash, tokenizer_size=tokenizer_size, max_sequence_length=max_sequence_length,
            topk=self._topk, temperature=self._temperature,
        )
        thread = self._thread
        with thread.changed:
            thread.changed.wait_for(
                lambda: thread.failure or all(each.server or each.problem for each in thread.connections),
                self._connect_timeout,
            )
            self._raise_failure()
            self._served = [each.require_server(self._connect_timeout) for each in thread.connections]
            for server in self._served:
                thread.check_fit(server, needs)
            thread.needs = needs
        return self._served[0]

    def submit(self, sequences: list[Sequence]) -> list[Future[TeacherTopK]]:
        """Queue sequences for scoring; returns one future per sequence in the same order.

        Returns at once, or waits for room where very much is queued already: TeacherTimeout after request_timeout.
        A future raises TeacherTimeout, BadTeacherReply, TeacherRefused or TeacherMismatch.
        """
        futures: list[Future[TeacherTopK]] = [Future() for _ in sequences]
        with self._thread.changed:
            for sequence, future in zip(sequences, futures, strict=True):
                self._wait_for_room(len(sequences))
                reason = self._refusal(sequence)
                if reason:
                    resolve(future, TeacherRefused(reason))
                else:
                    self._thread.waiting.add(sequence, future)
        self._thread.wake()
        return futures

    def _wait_for_room(self, num_sequences: int) -> None:
        thread = self._thread
        self._raise_failure()
        if thread.needs is None:
            raise TeacherError("submit before handshake: it is not known whether the teacher fits the student")
        if thread.waiting.num_tokens < MAX_WAITING_TOKENS:
            return
        thread.wake()
        thread.changed.wait_for(
            lambda: thread.failure or thread.waiting.num_tokens < MAX_WAITING_TOKENS, self._request_timeout
        )
        self._raise_failure()
        if thread.waiting.num_tokens >= MAX_WAITING_TOKENS:
            raise TeacherTimeout(
                f"{', '.join(self._endpoints)}: waited {self._request_timeout:g} s to queue "
                f"{num_sequences} sequences, {thread.waiting.num_tokens} tokens are still waiting to be sent"
            )

    def _refusal(self, sequence: Sequence) -> str | None:
        """Why a server will not score the sequence; found before it is sent."""
        for server in self._served:
            reason = protocol.sequence_refusal(sequence.prompt_ids, sequence.response_ids, server.model)
            if reason:
                return f"{server.address}: sequence {sequence.index} {reason}"
        return None

    def _raise_failure(self) -> None:
        if self._thread.failure is not None:
            raise self._thread.failure

    def status(self) -> dict[str, Status]:
        """Current state of every server by address. Raises TeacherUnreachable."""
        return {address: query_status(address, self._connect_timeout, self._keys) for address in self._endpoints}

    def drain_metrics(self) -> TeacherMetrics:
        """Counters since the last call."""
        return self._thread.drain_metrics()

    def close(self) -> None:
        """Stop the thread; futures that are still open raise TeacherError. May be called twice."""
        self._thread.close()

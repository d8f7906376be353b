"""Command line of the teacher service.

python -m hybrid_gkd.teacher serve --ckpt-path MODEL --workers N    start a broker and workers on this machine
python -m hybrid_gkd.teacher join --ckpt-path MODEL --proxy-addr HOST:15556     start one more worker
python -m hybrid_gkd.teacher status --addr HOST:15555       print the state of a service
python -m hybrid_gkd.teacher keys --out FOLDER              create keys of the service, of clients and of workers
python -m hybrid_gkd.teacher generate FILE --ckpt-path MODEL --out ANSWERS      generate completions of prompts
python -m hybrid_gkd.teacher score FILE --ckpt-path MODEL --out STORE           score given completions once

Exit codes: 0 for success, 1 for an error, 2 for wrong arguments, 3 from `status` if no worker is ready.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from hybrid_gkd.errors import HybridGKDError, TeacherError, describe_error
from hybrid_gkd.runtime.imports import freeze_gc, gc_paused
from hybrid_gkd.runtime.signals import handle_signals
from hybrid_gkd.teacher.client.connection import query_status
from hybrid_gkd.teacher.engines.options import EngineOptions, positive, within
from hybrid_gkd.teacher.keys import load_keys, make_keys
from hybrid_gkd.teacher.network import endpoint_url
from hybrid_gkd.teacher.server.broker import Broker
from hybrid_gkd.teacher.server.supervisor import Supervisor, WorkerFailed, assign_gpus
from hybrid_gkd.teacher.server.turns import GpuTurns

log = logging.getLogger("hybrid_gkd.teacher")

PR_SET_PDEATHSIG = 1
DEFAULT_KEYS = Path("teacher_keys")
"""Default folder of the keys of `serve`."""
EXIT_NO_WORKER = 3
"""Exit code of `status` if no worker is ready."""
EXTERNAL_COMMANDS = {
    "generate": ("hybrid_gkd.launch.generate", "generate completions of prompts and write them to a file"),
    "score": ("hybrid_gkd.launch.score", "score given completions once, for runs without a teacher"),
}
"""Commands of higher-level packages: module, imported by name when the command runs, and help text."""


def main() -> int:
    name = next(iter(sys.argv[1:]), "")
    if name in EXTERNAL_COMMANDS:
        code: int = importlib.import_module(EXTERNAL_COMMANDS[name][0]).main(sys.argv[2:])
        return code
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=logging.DEBUG if arguments.debug else logging.INFO, stream=sys.stderr,
        format=f"%(asctime)s teacher {arguments.command} | %(message)s",
    )
    try:
        return {"serve": serve, "join": join, "status": status, "keys": keys}[arguments.command](arguments)
    except HybridGKDError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130


class Service:
    """Broker and workers of `serve`, from start-up to shutdown."""

    def __init__(self, arguments: argparse.Namespace, keys_folder: Path | None):
        self._arguments = arguments
        own_keys = load_keys(keys_folder) if keys_folder else None
        environments = assign_gpus(arguments.workers, arguments.tp_size, arguments.device)
        host, port, worker_port = arguments.host, arguments.port, arguments.worker_port
        self.broker = Broker(host=host, port=port, worker_port=worker_port, keys=own_keys)
        command = [
            sys.executable, "-m", "hybrid_gkd.teacher", "join", "--die-with-parent", str(os.getpid()),
            f"--proxy-addr={'127.0.0.1' if host == '0.0.0.0' else host}:{self.broker.worker_port}",
            f"--ckpt-path={arguments.ckpt_path}", *EngineOptions.parsed(arguments).command_line(),
        ]
        command += [f"--keys={keys_folder}"] if keys_folder else []
        command += ["--debug"] if arguments.debug else []
        self.supervisor = Supervisor(self.broker, command, environments)
        self._announced = False
        self._drain_until: float | None = None

    def on_signal(self, number: int, _: object) -> None:
        """Drain on the first signal; stop on the second."""
        if self._drain_until is not None:
            self._drain_until = time.monotonic()
            return
        self._drain_until = time.monotonic() + self._arguments.drain_timeout
        log.info(
            "%s: finishing %d requests, for at most %g s (--drain-timeout); a second signal stops at once",
            signal.Signals(number).name, self.broker.num_held, self._arguments.drain_timeout,
        )

    def keep_running(self) -> bool:
        """Return whether to continue; called several times per second. Raises TeacherError: no worker can start."""
        if self._arguments.die_with_parent not in (None, os.getppid()):  # the parent has ended
            return False
        if self._drain_until is not None:
            self.broker.drain()
            if not self.broker.num_held:
                return False
            if time.monotonic() >= self._drain_until:
                log.warning("stopping with %d unanswered requests", self.broker.num_held)
                return False
        self.supervisor.check()
        if self.supervisor.has_started and not self._announced:
            self._announced = True
            self._announce()
        return True

    def _announce(self) -> None:
        host, port, worker_port = self._arguments.host, self.broker.port, self.broker.worker_port
        print(f"teacher ready on {host}:{port}, workers join {host}:{worker_port}", flush=True)
        if self._arguments.ready_file:
            partial = Path(f"{self._arguments.ready_file}.{os.getpid()}")
            partial.write_text(
                json.dumps({"port": port, "worker_port": worker_port, "pid": os.getpid()}), encoding="utf-8"
            )
            os.replace(partial, self._arguments.ready_file)


def serve(arguments: argparse.Namespace) -> int:
    if arguments.keys and arguments.insecure:
        raise TeacherError("--keys, --insecure: expected one of them, got both")
    if ready_file := arguments.ready_file:
        if not os.access(Path(ready_file).absolute().parent, os.W_OK):
            raise TeacherError(f"--ready-file {ready_file}: its folder does not exist or cannot be written to")
        try:
            Path(ready_file).unlink(missing_ok=True)  # of an earlier service
        except OSError as error:
            raise TeacherError(f"--ready-file {ready_file}: cannot be replaced: {error.strerror}") from error
    service = Service(arguments, None if arguments.insecure else Path(arguments.keys or default_keys()))
    handle_signals(service.on_signal)
    try:
        service.broker.run(service.keep_running)
    except WorkerFailed as error:
        if not error.reported:
            raise TeacherError(f"{arguments.ckpt_path}: {error}") from error
        return 1
    finally:
        service.supervisor.stop()
        service.broker.close()
    return 0


def default_keys() -> Path:
    """Return the folder of the server's keys in `DEFAULT_KEYS`; create them if missing. Raises TeacherError."""
    if not (DEFAULT_KEYS / "server").exists():
        try:
            make_keys(DEFAULT_KEYS)
        except TeacherError as error:
            raise TeacherError(f"{error}; use --keys FOLDER for existing keys") from error
    print(
        f"keys: {DEFAULT_KEYS.absolute()}; clients need its subfolder client (--keys, or "
        "actor_rollout_ref.teacher.keys), workers its subfolder worker (--keys); copy them to other machines over a "
        "trusted channel",
        flush=True,
    )
    return DEFAULT_KEYS / "server"


def join(arguments: argparse.Namespace) -> int:
    if arguments.die_with_parent is not None:
        # The kernel kills this process with its parent, even during a computation.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != arguments.die_with_parent:  # the parent ended before the call
            return 1
    endpoint_url(arguments.proxy_addr)  # raises for an invalid address before the model is loaded
    own_keys = load_keys(arguments.keys) if arguments.keys else None
    with gc_paused():  # imported here, because the broker's process does not need torch
        from hybrid_gkd.teacher.engines.engine_table import load_scoring_engine
        from hybrid_gkd.teacher.server.scoring_worker import ScoringWorker

    turns = GpuTurns(arguments.turns) if arguments.turns else None
    try:
        if turns is not None:
            turns.take()
        engine = load_scoring_engine(EngineOptions.parsed(arguments))
        freeze_gc()
        log.info("loaded %s with backend %s", engine.info.model, engine.info.backend)
        ScoringWorker(engine, arguments.proxy_addr, own_keys, turns).run()
    except HybridGKDError:
        raise
    except Exception as error:
        if arguments.debug:
            raise
        raise TeacherError(f"the worker failed: {describe_error(error)}") from error
    return 0


def status(arguments: argparse.Namespace) -> int:
    state = query_status(arguments.addr, keys=load_keys(arguments.keys) if arguments.keys else None)
    code = 0 if state.num_workers else EXIT_NO_WORKER
    if arguments.json:
        print(msgspec.json.encode(state).decode())
        return code
    if (model := state.model) is None:
        print("model              none: no worker is ready")
    else:
        print(f"model              {model.model} (backend {model.backend})")
        print(f"vocabulary         {model.vocab_size} tokens, hash {model.tokenizer_hash[:16]}")
        print(f"top-k              up to {model.max_topk}")
        print(f"sequence length    up to {model.max_sequence_length} tokens")
        print(f"temperature        {'any' if model.any_temperature else 'only 1.0'}")
        for adapter in model.adapters or ():
            print(f"adapter            {adapter.name} (weights {adapter.weights[:12] or 'unknown'})")
    latencies = ", ".join(f"{name} {value:.3f} s" for name, value in state.latency_seconds.items())
    print(f"workers alive      {state.num_workers}")
    for worker in state.workers:
        print(f"  {worker.name:16} {'ready' if worker.ready else 'testing'}, in flight {worker.num_held}, delivered "
              f"{worker.num_delivered}, bad replies {worker.num_bad}, engine busy {worker.engine_busy:.0%}")
    for reason in state.barred:
        print(f"  excluded: {reason}")
    print(f"queue length       {state.queue_length}")
    print(f"in flight          {state.num_in_flight}")
    print(f"tokens per second  {state.tokens_per_second:.0f}")
    print(f"latency            {latencies or 'no requests in the last minute'}")
    print(f"bytes per token    {state.bytes_per_token:.0f}")
    print(f"engine busy        {state.engine_busy:.0%}")
    print(f"uptime             {state.uptime_seconds:.0f} s")
    for name, value in state.counters.items():
        print(f"{name:18} {value}")
    return code


def keys(arguments: argparse.Namespace) -> int:
    for folder in make_keys(Path(arguments.out), client=arguments.client, worker=arguments.worker):
        print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.name[0] != '.'))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks and a detailed log")
    engine = argparse.ArgumentParser(add_help=False)
    EngineOptions.add_to(engine)
    secure = argparse.ArgumentParser(add_help=False)
    secure.add_argument("--keys", metavar="FOLDER", help="folder of this side's keys, created by `keys` "
                        f"(default of `serve`: ./{DEFAULT_KEYS})")
    engine.add_argument("--die-with-parent", type=int, metavar="PID", help="end when this parent process ends")

    parser = argparse.ArgumentParser(prog="python -m hybrid_gkd.teacher", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", parents=[common, secure, engine], help="start a broker and its workers")
    server.add_argument("--workers", type=positive, default=1, help="number of processes, each with its own model")
    server.add_argument("--host", default="127.0.0.1", help="address to bind; 0.0.0.0 for other machines")
    server.add_argument("--port", type=_port, default=15555, help="port for clients; 0 picks a free one")
    server.add_argument("--worker-port", type=_port, default=15556, help="port for workers; 0 picks a free one")
    server.add_argument("--ready-file", help="file to write once a worker has answered the test request")
    server.add_argument("--insecure", action="store_true",
                        help="run without keys: everyone who can reach --host (with 127.0.0.1 every user of this "
                             "machine) can use, stop and impersonate the service")
    server.add_argument("--drain-timeout", type=within(0, 86400), default=30.0, metavar="SECONDS",
                        help="time after SIGTERM to finish accepted requests; a second signal stops at once")
    worker = commands.add_parser("join", parents=[common, secure, engine], help="start one more worker")
    worker.add_argument("--proxy-addr", required=True, metavar="HOST:PORT", help="worker port of the broker")
    state = commands.add_parser("status", parents=[common, secure], help="print the state of the service")
    state.add_argument("--addr", default="127.0.0.1:15555", metavar="HOST:PORT", help="client port of the broker")
    state.add_argument("--json", action="store_true", help="print one JSON object")
    maker = commands.add_parser("keys", parents=[common], help="create keys for the server, a client and a worker")
    maker.add_argument("--out", required=True, metavar="FOLDER", help="folder that gets one subfolder per side")
    maker.add_argument("--client", metavar="NAME", help="create keys for one more client instead")
    maker.add_argument("--worker", metavar="NAME", help="create keys for one more worker instead")
    for name, (_, text) in EXTERNAL_COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"must be within 0..65535, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())

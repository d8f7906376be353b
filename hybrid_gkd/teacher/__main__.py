"""Command line of the teacher service.

python -m hybrid_gkd.teacher serve --ckpt-path MODEL        broker and one worker here
python -m hybrid_gkd.teacher join --ckpt-path MODEL --proxy-addr HOST:15556     one more worker
python -m hybrid_gkd.teacher status --addr HOST:15555       what the service is doing
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from hybrid_gkd.errors import HybridGKDError, TeacherError
from hybrid_gkd.teacher.broker import Broker
from hybrid_gkd.teacher.connection import query_status
from hybrid_gkd.teacher.local import child_environment, stop_process
from hybrid_gkd.teacher.network import is_loopback

log = logging.getLogger("hybrid_gkd.teacher")

MAX_RESTARTS = 3
"""Of the worker of `serve`, once it has been ready; more often, and the cause is not an accident."""
PR_SET_PDEATHSIG = 1


def main() -> int:
    arguments = _parser().parse_args()
    logging.basicConfig(
        level=logging.DEBUG if arguments.debug else logging.INFO,
        format=f"%(asctime)s teacher {arguments.command} | %(message)s",
        stream=sys.stderr,
    )
    try:
        return {"serve": serve, "join": join, "status": status}[arguments.command](arguments)
    except HybridGKDError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130


class Supervisor:
    """Keeps the worker process of `serve` and tells the broker's loop when to end."""

    def __init__(self, broker: Broker, arguments: argparse.Namespace):
        self._broker, self._arguments = broker, arguments
        host = "127.0.0.1" if arguments.host == "0.0.0.0" else arguments.host
        self._command = [
            sys.executable, "-m", "hybrid_gkd.teacher", "join", "--proxy-addr", f"{host}:{broker.worker_port}",
            "--die-with-parent", str(os.getpid()), *_engine_arguments(arguments),
        ]  # fmt: skip
        self._ready = False
        self._num_restarts = 0
        self.stopping = False
        self.exit_code = 0
        self.worker = self._start_worker()

    def _start_worker(self) -> subprocess.Popen[bytes]:
        # Its own session: Ctrl-C in a terminal reaches this process, which then stops the worker.
        return subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, env=child_environment(), start_new_session=True
        )

    def keep_running(self) -> bool:
        """Called several times a second. Raises TeacherError when no worker can be had."""
        parent = self._arguments.die_with_parent
        if self.stopping or (parent is not None and os.getppid() != parent):
            return False
        if not self._ready and self._broker.num_workers:
            self._ready = True
            self._announce()
        code = self.worker.poll()
        if code is not None:
            if not self._ready or self._num_restarts >= MAX_RESTARTS:
                return self._give_up(code)
            self._num_restarts += 1
            log.warning("the worker died (exit code %s), starting it again", code)
            self.worker = self._start_worker()
        return True

    def _give_up(self, code: int) -> bool:
        if code != 1:  # with 1 the worker has printed the reason
            cause = f"was killed by {signal.Signals(-code).name} (out of memory?)" if code < 0 else f"ended with {code}"
            raise TeacherError(f"the worker for {self._arguments.ckpt_path} {cause}")
        self.exit_code = 1
        return False

    def _announce(self) -> None:
        ready = {"port": self._broker.port, "worker_port": self._broker.worker_port, "pid": os.getpid()}
        print(f"teacher ready on {self._arguments.host}:{self._broker.port}, "
              f"workers join {self._arguments.host}:{self._broker.worker_port}", flush=True)  # fmt: skip
        if self._arguments.ready_file:
            path = Path(self._arguments.ready_file)
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_text(json.dumps(ready))
            os.replace(partial, path)


def serve(arguments: argparse.Namespace) -> int:
    if not is_loopback(arguments.host) and not arguments.insecure:
        raise TeacherError(
            f"--host {arguments.host}: the service is neither encrypted nor authenticated, so whoever reaches it can "
            "use it and answer in its place; add --insecure if the network is trusted, or keep the default 127.0.0.1"
        )
    broker = Broker(host=arguments.host, port=arguments.port, worker_port=arguments.worker_port)
    supervisor = Supervisor(broker, arguments)

    def stop(*_: object) -> None:
        supervisor.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        broker.run(supervisor.keep_running)
    finally:
        stop_process(supervisor.worker, patience=5.0)
        broker.close()
    return supervisor.exit_code


def join(arguments: argparse.Namespace) -> int:
    if arguments.die_with_parent is not None:
        # The kernel kills this process with its parent, also in the middle of a computation.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != arguments.die_with_parent:  # it died before the call
            return 1
    # Here, so that the broker's process needs neither torch nor the time to import it.
    from hybrid_gkd.teacher.engines import EngineOptions, load_engine
    from hybrid_gkd.teacher.worker import Worker

    try:
        engine = load_engine(
            EngineOptions(**{each.name: getattr(arguments, each.name) for each in fields(EngineOptions)})
        )
        log.info("backend %s scores with %s", engine.info.backend, engine.info.model)
        Worker(engine, arguments.proxy_addr).run()
    except HybridGKDError:
        raise
    except Exception as error:
        if arguments.debug:
            raise
        raise TeacherError(f"the worker failed: {type(error).__name__}: {error}".splitlines()[0]) from error
    return 0


def status(arguments: argparse.Namespace) -> int:
    state = query_status(arguments.addr)
    model = state.model
    if model is None:
        print("model              none yet: no worker is ready")
    else:
        print(f"model              {model.model} (backend {model.backend})")
        print(f"vocabulary         {model.vocab_size} tokens, hash {model.tokenizer_hash[:16]}")
        print(f"top-k              up to {model.max_topk}")
        print(f"sequence length    up to {model.max_sequence_length} tokens")
        print(f"temperature        {'any' if model.any_temperature else 'only 1.0'}")
    print(f"workers alive      {state.num_workers}")
    print(f"queue length       {state.queue_length}")
    print(f"in flight          {state.num_in_flight}")
    print(f"tokens per second  {state.tokens_per_second:.0f}")
    print(f"uptime             {state.uptime_seconds:.0f} s")
    for name, value in state.counters.items():
        print(f"{name:18} {value}")
    return 0


def _engine_arguments(arguments: argparse.Namespace) -> list[str]:
    """The options of the worker as `serve` got them."""
    names = [
        "ckpt_path",
        "backend",
        "n_logprobs",
        "tp_size",
        "device",
        "dtype",
        "max_model_len",
        "gpu_memory_utilization",
    ]
    words = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names if getattr(arguments, name)]
    return words + [
        f"--{flag.replace('_', '-')}" for flag in ("trust_remote_code", "debug") if getattr(arguments, flag)
    ]


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="tracebacks and a detailed log")
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument("--ckpt-path", required=True, help="model folder with its tokenizer")
    engine.add_argument("--n-logprobs", type=_positive, default=64, help="largest K that a request may ask for")
    engine.add_argument("--tp-size", type=_positive, default=1, help="GPUs that share one model (vllm)")
    engine.add_argument("--backend", choices=["auto", "vllm", "hf"], default="auto", help="auto: vllm if installed")
    engine.add_argument("--max-model-len", type=_positive, help="longest prompt and response together, in tokens")
    engine.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of GPU memory (vllm)")
    engine.add_argument("--dtype", default="auto", help="auto: as stored; float32 on the CPU")
    engine.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    engine.add_argument("--trust-remote-code", action="store_true", help="run code from the model folder")
    engine.add_argument("--die-with-parent", type=int, metavar="PID", help="end when this parent process has ended")

    parser = argparse.ArgumentParser(prog="python -m hybrid_gkd.teacher", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", parents=[common, engine], help="start a broker with one worker")
    server.add_argument("--host", default="127.0.0.1", help="address to bind")
    server.add_argument("--port", type=_port, default=15555, help="for clients; 0 picks a free one")
    server.add_argument("--worker-port", type=_port, default=15556, help="for workers; 0 picks a free one")
    server.add_argument("--ready-file", help="written once a worker has answered a test request")
    server.add_argument("--insecure", action="store_true", help="allow a --host that other machines can reach")
    joiner = commands.add_parser("join", parents=[common, engine], help="start one more worker")
    joiner.add_argument("--proxy-addr", required=True, metavar="HOST:PORT", help="worker port of the broker")
    asker = commands.add_parser("status", parents=[common], help="print what the service is doing")
    asker.add_argument("--addr", default="127.0.0.1:15555", metavar="HOST:PORT", help="client port of the broker")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"must be within 0..65535, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())

"""Parts of the service without a model: who replaces a worker, which GPU is whose, and what may be imported."""

import ast
import importlib.util
import signal
import sys
import time
from pathlib import Path

import pytest

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.runtime.processes import members
from hybrid_gkd.teacher.server import supervisor
from hybrid_gkd.teacher.server.local import TeacherProcess
from hybrid_gkd.teacher.server.supervisor import Supervisor, assign_gpus

TIMEOUT = 60.0  # seconds; ends a test that hangs
FOREVER = [sys.executable, "-c", "import time; time.sleep(1000)"]
FAILS = [sys.executable, "-c", "raise SystemExit(1)"]


class FakeBroker:
    model = None
    num_workers = 0
    delivered = 0

    def num_delivered(self, name):
        return self.delivered


def watch(supervisor, condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        supervisor.check()
        time.sleep(0.01)


@pytest.mark.slow
def test_a_teacher_that_aborts_is_not_said_to_be_out_of_memory(tmp_path, monkeypatch):
    says_why = tmp_path / "python"
    says_why.write_text("#!/bin/sh\necho 'Assertion failed: errno == 0'\nkill -ABRT $$\n", encoding="utf-8")
    says_why.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(says_why))
    teacher = TeacherProcess("unused", log_path=tmp_path / "log")
    with teacher, pytest.raises(TeacherError) as error:
        teacher.wait_ready()
    assert "it was killed by SIGABRT; its last line: Assertion failed: errno == 0; its log" in str(error.value)


def test_a_worker_that_never_gets_ready_ends_the_service():
    found = Supervisor(FakeBroker(), FAILS, [{}])
    with pytest.raises(TeacherError, match="ended with code 1") as error:
        watch(found, lambda: False)
    assert error.value.reported


def test_so_does_one_whose_neighbour_is_ready_already():
    broker = FakeBroker()
    broker.model, broker.num_workers = "a model", 1
    script = 'if [ $FAILS = no ]; then exec sleep 1000; else exit 1; fi'
    found = Supervisor(broker, ["sh", "-c", script], [{"FAILS": "no"}, {"FAILS": "yes"}])
    try:
        with pytest.raises(TeacherError, match="ended with code 1"):
            watch(found, lambda: False)
        assert not found.has_started
    finally:
        found.stop()


def test_dead_workers_are_replaced_later_and_later_unless_they_were_of_use(monkeypatch):
    broker = FakeBroker()
    broker.model, broker.num_workers = "a model", 2
    found = Supervisor(broker, FOREVER, [{}, {}])
    try:
        found.check()
        first, second = found.slots
        other = second.process
        waits = []
        for useful in (True, False, False, True):
            broker.delivered = int(useful)
            found.check()
            first.process.kill()
            first.process.wait()
            now = time.monotonic()
            found.check()
            assert first.process is None
            waits.append(round(first.start_at - now))
            first.start_at = 0.0
            watch(found, lambda: first.process is not None)
        assert waits == [0, 1, 2, 0]
        assert second.process is other
        broker.num_workers, broker.delivered = 0, 0
        for _ in range(supervisor.MAX_USELESS_STARTS):
            first.process.kill()
            first.process.wait()
            found.check()
            first.start_at = 0.0
            found.check()
        first.process.kill()
        first.process.wait()
        with pytest.raises(TeacherError, match="was killed by SIGKILL"):
            found.check()
    finally:
        found.stop()
    assert all(slot.process.poll() is not None for slot in found.slots)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [None, signal.SIGKILL])
def test_the_end_waits_for_the_ranks_of_a_worker(sent, tmp_path, monkeypatch):
    """They are processes of its group, and take their time after SIGTERM, or after its death."""
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.1)
    rank = f"trap '' TERM; touch {tmp_path / 'ready'}; while :; do sleep 1; done"
    worker = f"import subprocess, time; subprocess.Popen(['sh', '-c', {rank!r}]); time.sleep(1000)"
    found = Supervisor(FakeBroker(), [sys.executable, "-c", worker], [{}])
    watch(found, (tmp_path / "ready").exists)
    process = found.slots[0].process
    assert len(members(process.pid)) >= 2
    if sent is not None:
        process.send_signal(sent)
        process.wait()
    found.stop()
    assert members(process.pid) == set()


@pytest.mark.parametrize(
    ("arguments", "visible", "expected"),
    [
        ((1, 4, "cuda"), "5", [{}]),
        ((3, 1, "cpu"), None, [{}] * 3),
        ((2, 1, "auto"), "", [{}] * 2),
        ((2, 2, "cuda"), "3,1,2,0", [{"CUDA_VISIBLE_DEVICES": "3,1"}, {"CUDA_VISIBLE_DEVICES": "2,0"}]),
        ((2, 1, "auto"), "GPU-a,GPU-b", [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}]),
    ],
)
def test_every_worker_gets_gpus_of_its_own(monkeypatch, arguments, visible, expected):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert assign_gpus(*arguments) == expected


def test_too_few_gpus_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(TeacherError, match=r"--workers 2 with --tp-size 2 needs 4 GPUs, 3 are visible .*=0,1,2"):
        assign_gpus(2, 2, "cuda")


ENTRIES = ("hybrid_gkd.teacher.__main__", "hybrid_gkd.teacher.server.scoring_worker", "hybrid_gkd.teacher_client")
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "np.load", "numpy.load"}


def own_imports(path):
    """(module, line) of every import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def unsafe_calls(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in UNSAFE_CALLS or name.endswith("_pyobj"):
                yield f"{path.name}:{node.lineno}: {name}"


@pytest.mark.slow
def test_nothing_behind_a_socket_can_unpickle():
    """Over the import graph of our own modules, from everything that owns a socket of the service."""
    seen, todo, problems = set(), list(ENTRIES), []
    while todo:
        name = todo.pop()
        spec = importlib.util.find_spec(name) if name.startswith("hybrid_gkd") and name not in seen else None
        seen.add(name)
        if spec is None or spec.origin is None:
            continue
        path = Path(spec.origin)
        problems += unsafe_calls(path)
        for module, line in own_imports(path):
            if module.partition(".")[0] in UNSAFE_MODULES:
                problems.append(f"{path.name}:{line}: imports {module}")
            if module.startswith("hybrid_gkd"):
                try:
                    found = importlib.util.find_spec(module)
                except ModuleNotFoundError:  # a name inside a module
                    found = None
                if found is not None:
                    todo.append(module)
    assert {f"hybrid_gkd.teacher.{name}" for name in ("server.broker", "engines.base", "protocol")} <= seen
    assert not problems


def test_the_search_finds_what_it_looks_for(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f(s):\n    import pickle\n    torch.load(s)\n    return s.recv_pyobj()\n", encoding="utf-8")
    assert ("pickle", 2) in own_imports(bad)
    assert list(unsafe_calls(bad)) == ["bad.py:3: torch.load", "bad.py:4: s.recv_pyobj"]

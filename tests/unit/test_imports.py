"""Imports run one way, downwards: from every room to rooms before it in ROOMS, and without circles."""

import ast
import functools
import gc
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid_gkd
from hybrid_gkd.runtime.imports import gc_paused, install_command

ROOT = Path(hybrid_gkd.__file__).parent
ROOMS = ["search_path", "standard_streams", "", *"""
process_limits errors types runtime compat losses config models data offload rollout student demo teacher teacher_client
workers scoring ppo trainer reporting testing launch doctor metrics report evaluate __main__
""".split()]
"""The nameless one is the package itself."""
ONLY_IMPORTED_BY = {"reporting": {"launch", "metrics", "report", "__main__"}}
# In a fresh interpreter, importing all of a room but its commands brings in none of these, and no room after it.
FORBIDDEN = {
    "errors": {"torch", "vllm", "ray", "transformers", "zmq", "numpy"},
    "types": {"torch", "vllm", "ray", "transformers", "zmq", "wandb"},
    "runtime": {"torch", "vllm", "ray", "transformers", "zmq", "wandb", "numpy"},
    "compat": {"vllm", "ray", "transformers"},
    "compat.verl": {"torch", "vllm", "ray", "transformers"},
    "compat.vllm.versions": {"torch", "vllm", "ray", "transformers"},
    "losses": {"ray", "vllm", "transformers"},
    "config": {"torch", "vllm", "ray", "transformers", "zmq", "wandb", "numpy"},
    "models": {"ray", "vllm"},
    "data": {"torch", "ray", "vllm"},
    "offload": {"ray", "vllm", "transformers"},
    "rollout": {"ray", "vllm"},
    "student": {"ray", "vllm"},
    "student.checkpoint_store": {"torch", "ray", "vllm"},
    "demo": {"ray", "vllm"},
    "demo.use": {"torch", "ray", "vllm"},
    "teacher": {"ray", "vllm"},
    "teacher.protocol": {"torch", "vllm", "ray", "transformers"},
    "teacher.__main__": {"torch", "ray"},
    "teacher.server.local": {"torch", "ray"},
    "teacher_client": {"torch", "vllm", "ray", "transformers"},
    "workers": {"vllm"},
    "scoring": {"vllm", "ray", "torch.distributed"},
    "ppo": {"vllm", "ray", "torch.distributed"},
    "trainer": {"vllm", "ray", "torch.distributed"},
    "reporting": {"torch", "ray", "vllm", "wandb", "hybrid_gkd.workers"},
    "testing": {"torch", "ray", "vllm", "transformers"},
    "launch": {"vllm", "wandb"},
    "launch.presence": {"torch", "vllm", "ray", "transformers"},
}
NEEDS_TRITON = {
    "hybrid_gkd.losses.head_triton", "hybrid_gkd.losses.topk_triton", "hybrid_gkd.compat.vllm.runner_triton",
}  # fmt: skip


def module_name(file):
    parts = ["hybrid_gkd", *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


def room_of(module):
    return module.split(".")[1] if "." in module else ""


def imports_of(module):
    """Modules of the package that a module imports, also within functions and for types alone."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hybrid_gkd":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hybrid_gkd")


@functools.cache
def imports_of_all():
    return {module: set(imports_of(module)) - {"hybrid_gkd"} for module in MODULES}


def test_every_room_has_its_place():
    assert {room_of(module) for module in MODULES} == set(ROOMS)
    folders = {room for room in ROOMS if room and (ROOT / room).is_dir()}
    assert folders <= FORBIDDEN.keys()


def test_imports_only_run_down():
    upwards = [
        f"{module} imports {other}"
        for module, others in imports_of_all().items()
        for other in others
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    assert not upwards
    for room, allowed in ONLY_IMPORTED_BY.items():
        importers = {room_of(module) for module, others in imports_of_all().items() if room in map(room_of, others)}
        assert importers - {room} <= allowed


def in_circles(edges):
    """Modules that are in a circle, or import one that is."""
    left = dict(edges)
    while free := [module for module, others in left.items() if not others & left.keys() - {module}]:
        for module in free:
            del left[module]
    return sorted(left)


def test_there_is_no_circle():
    assert not in_circles(imports_of_all())


@pytest.mark.slow
def test_there_is_none_among_the_benchmarks():
    edges = {}
    for file in (ROOT.parent / "benchmarks").glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        edges[file.stem] = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        edges[file.stem] |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert "common" in edges["peers"]
    assert not in_circles(edges)


FORKS = """
import importlib, os
for name in {allowed}:
    importlib.import_module(name)
for room, modules in {rooms}.items():
    if not (child := os.fork()):
        import sys
        for name in modules:
            importlib.import_module(name)
        print(room, *sys.modules, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def allowed_in(room):
    """The slow packages that a room may import."""
    names = {"torch", "transformers"} - FORBIDDEN[room]
    return tuple(sorted(names)) if "torch" in names and "torch.distributed" not in FORBIDDEN[room] else ()


def modules_of(room):
    """All modules of a room but its commands."""
    name = f"hybrid_gkd.{room}"
    return [
        module for module in MODULES
        if (module == name or module.startswith(f"{name}.")) and module not in NEEDS_TRITON
        and (module == name or not module.endswith("__main__"))
    ]


@functools.cache
def imported_by_rooms(allowed):
    """Room -> what importing it brings in, and the errors: forks of one interpreter that has imported `allowed`."""
    rooms = {room: modules_of(room) for room in FORBIDDEN if allowed_in(room) == allowed}
    code = FORKS.format(allowed=allowed, rooms=rooms)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    return {room: modules for room, *modules in map(str.split, done.stdout.splitlines())}, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_does_not_bring_in_what_it_must_not_know(room):
    found, errors = imported_by_rooms(allowed_in(room))
    assert room in found, errors
    imported = set(found[room])
    assert imported.issuperset(modules_of(room))
    later = set(ROOMS[ROOMS.index(room_of(f"hybrid_gkd.{room}")) + 1 :])
    assert not FORBIDDEN[room] & imported
    assert not later & {room_of(module) for module in imported if module.startswith("hybrid_gkd.")}


def defined_in(module):
    """Names at the top level of a module, its submodules included."""
    names = {other.rpartition(".")[2] for other in MODULES if other.rpartition(".")[0] == module}
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["benchmarks", "tests/gpu"])
def test_what_cannot_run_here_imports_names_that_exist(folder):
    for file in sorted((ROOT.parent / folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hybrid_gkd":
                assert node.module in MODULES, f"{file.name}: {node.module}"
                missing = {alias.name for alias in node.names} - defined_in(node.module)
                assert not missing, f"{file.name}: {node.module} has no {missing}"


def test_the_collector_rests_while_large_packages_are_imported():
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_is_missing_is_installed_by_what_this_environment_has(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/my env/python")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert install_command("a>=1") == "'/my env/python' -m pip install 'a>=1'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert install_command("a[b]", "c") == "uv pip install --python '/my env/python' 'a[b]' c"


def test_what_is_to_be_installed_is_what_the_package_asks_for():
    asked = (ROOT.parent / "setup.cfg").read_text(encoding="utf-8")
    named = [
        name
        for file in MODULES.values()
        for name in re.findall(r"install_command\('(.*?)'\)", file.read_text(encoding="utf-8"))
    ]
    assert len(named) == 2
    assert all(f"\n    {name}\n" in asked for name in named)

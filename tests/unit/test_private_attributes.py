"""Names of other libraries that begin with one underscore are used in hybrid_gkd/compat only.

An underscore name may be used on `self`, `cls` and `super()` where code of the project defines it, on anything else
where the same file does; benchmarks also look into the project's own objects. Imports may name none.
"""

import ast
import functools
from pathlib import Path

import pytest

import hybrid_gkd

ROOT = Path(hybrid_gkd.__file__).parents[1]
PACKAGE = [file for file in sorted(ROOT.glob("hybrid_gkd/**/*.py")) if "compat" not in file.parts]
BENCHMARKS = sorted(ROOT.glob("benchmarks/**/*.py"))
PUBLIC = {
    # Documented methods of named tuples; the underscore keeps them apart from fields.
    "_replace", "_fields",
    # Documented: ends a process without clean-up.
    "_exit",
}  # fmt: skip
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name):
    return name.startswith("_") and name != "_" and not name.endswith("__") and name not in PUBLIC


def is_own_object(node):
    """`self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


@functools.cache
def nodes(file):
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def defined(file):
    """Names of functions, classes, parameters and variables, and what is assigned to attributes of `self`."""
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own_object(node.value):
            yield node.attr


def used(file):
    """(line, name, whether on an own object, whether imported) of every use that is no plain variable."""
    for node in nodes(file):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, is_own_object(node.value), False
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                yield node.lineno, keyword.arg or "", False, False
            if isinstance(node.func, ast.Name) and node.func.id in BY_NAME and isinstance(node.args[1], ast.Constant):
                yield node.lineno, node.args[1].value, is_own_object(node.args[0]), False
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from ((node.lineno, part, False, True) for name in names for part in name.split("."))


def foreign(files, also_own=()):
    """`file:line: name` of every underscore name that is not the project's."""
    project = {name for file in files for name in defined(file)}.union(also_own)
    for file in files:
        in_file = set(defined(file)).union(also_own)
        for line, name, on_own_object, imported in used(file):
            if is_private(name) and (imported or name not in (project if on_own_object else in_file)):
                yield f"{file}:{line}: {name}"


@pytest.mark.slow
def test_the_package_leaves_private_names_of_libraries_alone():
    assert not list(foreign(PACKAGE))


@pytest.mark.slow
def test_so_do_the_benchmarks():
    assert not list(foreign(BENCHMARKS, {name for file in PACKAGE for name in defined(file)}))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("model._hidden", "_hidden"),
        ("model.part._hidden = 3", "_hidden"),
        ("self._hidden()", "_hidden"),
        ("super()._hidden()", "_hidden"),
        ("getattr(model, '_hidden', None)", "_hidden"),
        ("setattr(model, '_hidden', 1)", "_hidden"),
        ("model(_hidden=1)", "_hidden"),
        ("import library._hidden", "_hidden"),
        ("from library._hidden import name", "_hidden"),
        ("from library import _hidden", "_hidden"),
        ("model._elsewhere", "_elsewhere"),
        ("from other import _elsewhere", "_elsewhere"),
    ],
)
def test_a_planted_one_is_found(tmp_path, line, name):
    file, other = tmp_path / "planted.py", tmp_path / "other.py"
    file.write_text(f"import os\n{line}\n", encoding="utf-8")
    other.write_text("class Own:\n    _elsewhere = 1\n", encoding="utf-8")
    assert list(foreign([file, other])) == [f"{file}:2: {name}"]


@pytest.mark.parametrize(
    "line", ["self._elsewhere", "other._here", "row._replace(a=1)", "os._exit(1)", "_variable", "model.__dict__"]
)
def test_an_own_one_is_not(tmp_path, line):
    file, other = tmp_path / "planted.py", tmp_path / "other.py"
    file.write_text(f"class Own:\n    def _here(self): ...\n{line}\n", encoding="utf-8")
    other.write_text("class Own:\n    def __init__(self):\n        self._elsewhere = 1\n", encoding="utf-8")
    assert not list(foreign([file, other]))

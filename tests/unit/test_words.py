"""Docstrings are sentences or noun phrases, in the field's words, and a public name stands for one thing."""

import ast
import functools
import re
from pathlib import Path

import pytest

import hybrid_gkd

ROOT = Path(hybrid_gkd.__file__).parents[1]
FRAGMENTS = ("Of", "That", "Those", "As", "What")
"""First words that leave a docstring without a subject or a verb."""
GIVEN_UP = (
    "taken for dead", "taken for hung", "goes on without", "is told", "is said", "are told", "the step in hand",
    "lets go of", "round in circles", "under way", "makes room for nobody",
)  # fmt: skip
"""Phrases of docstrings that have a usual word: counts as hung, continues, is sent, is logged, in progress."""
SHARED_NAMES = {
    "main": "the entry point of each command",
}
"""Public names of several folders, and why."""
FILES = [
    file for folder in ("hybrid_gkd", "benchmarks", "tests") for file in sorted((ROOT / folder).rglob("*.py"))
]  # fmt: skip


@functools.cache
def docstrings(text):
    """(line, text) of every string that is a statement: docstrings of modules, classes, functions and attributes."""
    return [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def fragments(text):
    """Lines of docstrings that begin with one of FRAGMENTS."""
    return [line for line, doc in docstrings(text) if re.match(rf"({'|'.join(FRAGMENTS)})\b", doc)]


def given_up(text):
    """(line, phrase) of docstrings with a phrase of GIVEN_UP, also across the end of a line."""
    joined = ((line, " ".join(doc.split())) for line, doc in docstrings(text))
    return [(line, phrase) for line, doc in joined for phrase in GIVEN_UP if re.search(rf"\b{phrase}\b", doc)]


@pytest.mark.parametrize("find", [fragments, given_up])
def test_docstrings(find):
    found = {str(file.relative_to(ROOT)): find(file.read_text(encoding="utf-8")) for file in FILES}
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize("doc", ["Of the actor.", "That the workers were told.", "What\n    follows.", "As it is."])
def test_a_planted_fragment_is_found(doc):
    assert fragments(f'"""Module."""\nVALUE = 1\n"""{doc}"""\n') == [3]
    assert fragments(f'class Own:\n    def method(self):\n        """{doc}"""\n') == [3]
    assert not fragments(f'"""Module."""\nVALUE = """{doc}"""\n')


def test_a_planted_phrase_is_found():
    assert given_up('"""The worker is\ntold."""\n') == [(1, "is told")]
    assert not given_up('"""Return the request."""\n')


def public_names():
    """Name of a public class or function -> the folders of hybrid_gkd that define it."""
    found = {}
    for file in sorted((ROOT / "hybrid_gkd").rglob("*.py")):
        folder = file.relative_to(ROOT / "hybrid_gkd").parts[0]
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(folder)
    return found


def test_a_public_name_is_of_one_folder():
    shared = {name for name, folders in public_names().items() if len(folders) > 1}
    assert shared == set(SHARED_NAMES)

"""Text files are UTF-8: every call that opens one says so. It sees more than PLW1514, which must know of a path."""

import ast
from pathlib import Path

import pytest

import hybrid_gkd
from hybrid_gkd.errors import ConfigError
from hybrid_gkd.launch.inputs import teacher_template

ROOT = Path(hybrid_gkd.__file__).parents[1]
NO_FILES = {"os", "page"}
"""Names of objects with another method `open`."""


def unsaid(source):
    """Lines of the calls that leave the encoding to the locale."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and leaves_open(node)]


def leaves_open(call):
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if method else getattr(call.func, "id", None)
    if "encoding" in [keyword.arg for keyword in call.keywords]:
        return False
    if name in ("read_text", "write_text"):
        return name == "write_text" or not call.args  # with one it is an encoding, or a name as in importlib.metadata
    if name != "open" or (method and getattr(call.func.value, "id", None) in NO_FILES):
        return False
    modes = [each.value for each in (*call.args, *(k.value for k in call.keywords)) if isinstance(each, ast.Constant)]
    return not any(isinstance(mode, str) and len(mode) <= 3 and "b" in mode for mode in modes)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["hybrid_gkd", "benchmarks", "tests"])
def test_no_encoding_is_left_to_the_locale(folder):
    found = {file: unsaid(file.read_text(encoding="utf-8")) for file in sorted((ROOT / folder).rglob("*.py"))}
    assert len(found) > 10
    assert {str(file.relative_to(ROOT)): lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["path.read_text()", "path.write_text(x)", "open(path)", "open(path, 'w')", "path.open(mode='a')"]
)
def test_calls_without_an_encoding_are_found(line):
    assert unsaid(line) == [1]
    assert unsaid("path.read_text(encoding='utf-8'), open(path, 'rb'), path.open('wb'), os.open(path, 0)") == []


def test_a_template_that_is_not_utf_8_is_refused(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_bytes("<|user|>«{{ messages[0].content }}»".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.teacher\.chat_template: the file must be UTF-8 text"):
        teacher_template(str(file))
    file.write_text("«Grüße»", encoding="utf-8")
    assert teacher_template(str(file)) == "«Grüße»"

"""Print the text of every error, log line and rule of hybrid_gkd, by file and line, for reading them in one go.

    python tests/list_messages.py              # all of them
    python tests/list_messages.py teacher/     # those of files whose path has this text

A value that is filled in is printed as its expression in braces. Rules are texts that errors are made of: those
assigned to a name of PARTS, and all of config/*rules.py.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hybrid_gkd"
LOG = {"debug", "info", "warning", "error", "exception", "critical", "print"}
PARTS = {"rule", "what", "reason", "text", "differ", "problem", "message", "remark", "hint", "cause"}


def text(node: ast.expr) -> str:
    """Return the text of an expression; what is no literal is in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    return f"{{{ast.unparse(node)}}}"


def messages(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, message with the name of its error, log function or variable) in the order of the lines."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        raised = isinstance(node, ast.Raise)
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and call.args:
            name = ast.unparse(call.func).rpartition(".")[2]
            if raised or name in LOG or name.endswith("Error"):
                found[call.lineno, call.col_offset] = f"{name}: {' | '.join(map(text, call.args))}"
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in PARTS:
            found[node.lineno, node.col_offset] = f"{ast.unparse(node.targets[0])} = {text(node.value)}"
        if isinstance(node, ast.Tuple) and file.stem.endswith("rules") and " " in "".join(map(text, node.elts)):
            found[node.lineno, node.col_offset] = " | ".join(map(text, node.elts))
    for (line, _), message in sorted(found.items()):
        yield line, " ".join(message.split())


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for path in sorted(PACKAGE.rglob("*.py")):
        if wanted in str(path.relative_to(PACKAGE)):
            for line, message in messages(path):
                print(f"{path.relative_to(PACKAGE)}:{line}: {message}")

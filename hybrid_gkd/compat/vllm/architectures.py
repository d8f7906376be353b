"""Check whether vLLM supports a model and arguments without importing vLLM, which takes ten seconds.

Parses `vllm/model_executor/models/registry.py`: the names of vLLM's own models are the keys of its tables. Other models
run with the code of transformers if its attention can be replaced: vLLM calls `is_backend_compatible` or
`_can_set_attn_implementation` of the class. Tested with vLLM 0.32; without the file, its tables or these methods no
model is rejected here, and vLLM itself raises.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REGISTRY = Path("model_executor", "models", "registry.py")
ENGINE_ARGUMENTS, LLM = Path("engine", "arg_utils.py"), Path("entrypoints", "llm.py")
NOT_SERVED = ("_PREVIOUSLY", "_OOT")
"""Prefixes of the names of tables with models that vLLM no longer supports."""


def cannot_be_served(hf_config: Any) -> str | None:
    """Return why neither vLLM nor its Transformers backend can load a model; None if one can, or it is unknown."""
    import transformers

    own, names = known_architectures(), list(getattr(hf_config, "architectures", None) or [])
    if not own or not names or own.intersection(names) or getattr(hf_config, "auto_map", None) or has_plugins():
        return None
    try:
        model = getattr(transformers, names[0], None)
        asked = [getattr(model, name, None) for name in ("is_backend_compatible", "_can_set_attn_implementation")]
    except (ImportError, RuntimeError):  # a library that the model's code needs is missing
        return None
    if model is None:
        return f"its architecture {names[0]} is in neither vLLM nor transformers"
    if None in asked or any(ask() for ask in asked if ask is not None):
        return None
    return f"vLLM has no {names[0]}, and the attention of transformers' one cannot be replaced"


def cannot_be_split(hf_config: Any, ranks: int) -> str | None:
    """Return the rule that vLLM's tensor parallelism over `ranks` breaks; None without one."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or ranks
    pairs = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks:
        return f"must divide the model's {heads} attention heads"
    if pairs % ranks and ranks % pairs:
        return f"must divide the model's {pairs} key-value heads, or be a multiple of them"
    return None


@functools.cache
def known_architectures() -> frozenset[str]:
    """Return the names of vLLM's own architectures; empty if they cannot be read."""
    tables = [
        node for node in ast.parse(_source(REGISTRY)).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        and not ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target).startswith(NOT_SERVED)
    ]  # fmt: skip
    keys = [key for table in tables if isinstance(table.value, ast.Dict) for key in table.value.keys]
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Return those of `names` that neither `vllm.LLM` nor `EngineArgs`, to which it passes others, takes.

    Empty if the sources of this vLLM cannot be read.
    """
    known = set[str]()
    for path, name in ((ENGINE_ARGUMENTS, "EngineArgs"), (LLM, "LLM")):
        for node in ast.walk(ast.parse(_source(path))):
            if isinstance(node, ast.ClassDef) and node.name == name:
                known |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)
                          and isinstance(part.target, ast.Name)}  # fmt: skip
                starts = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
                known |= {each.arg for start in starts for each in (*start.args.args, *start.args.kwonlyargs)}
    return sorted(set(names) - known) if known else []


def _source(path: Path) -> str:
    """Return a source file of vLLM; empty without one."""
    spec = find_spec("vllm")
    file = Path(spec.origin).parent / path if spec is not None and spec.origin is not None else path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def has_plugins() -> bool:
    """Return whether a third-party package is installed that may add models to vLLM."""
    return any(not entry.value.startswith("vllm.") for entry in entry_points(group="vllm.general_plugins"))

"""Keep values of text keys as they were typed: 1.10 and not 1.1, no and not False, 12:30 and not 750.

YAML would convert these to numbers, booleans and others. Does not import torch.
"""

from __future__ import annotations

import typing
from typing import Any

import yaml  # type: ignore[import-untyped]  # of OmegaConf, which reads with it

from hybrid_gkd.compat.verl.key_tables import Read
from hybrid_gkd.config.spelling import any_name, find, key_types, moved


class TextLoader(yaml.SafeLoader):
    """A YAML loader that keeps every value but null as text, and refuses a mapping with two values of a name."""

    yaml_implicit_resolvers: typing.ClassVar = {
        first: [rule for rule in rules if rule[0].rpartition(":")[2] in ("null", "merge")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: str | None) -> Any:
        """Return a mapping as written. Raises yaml.YAMLError: it has a name twice."""
        node, seen = super().compose_mapping_node(anchor), set[str]()
        for name in (name for name, _ in node.value if name.tag == self.DEFAULT_SCALAR_TAG):
            if name.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{name.value!r} is given twice", problem_mark=name.start_mark)
            seen.add(name.value)
        return node


TEXTS = {key for key, kind in key_types().items() if kind in (str, str | None)}
LISTS = {key for key, kind in key_types().items() if kind == list[str]} | {
    "data.train_files", "data.val_files", "actor_rollout_ref.model.target_modules",
    "actor_rollout_ref.model.exclude_modules",
}  # fmt: skip
"""Keys of lists of texts, some of which also accept a single text."""


def own_keys_of(key: str) -> set[str]:
    """Return the keys of `Config` that a key sets, in our or verl's spelling."""
    row = (find(moved(key)) or (None, None))[1]
    return set(row.keys) if isinstance(row, Read) else {any_name(moved(key))}


def is_text(key: str) -> bool:
    """Return whether the value of a key is a text or a list of texts."""
    return own_keys_of(key) <= TEXTS | LISTS


def typed(text: str, key: str) -> Any:
    """Parse the value of a text key on a command line, where only quotes, brackets and null are YAML.

    Raises yaml.YAMLError: a quote or a bracket is not closed.
    """
    plain = text.strip()
    lists = {"[": LISTS, "{": {"data.train_files"}}
    if plain[:1] in ("'", '"') or own_keys_of(key) <= lists.get(plain[:1], set()):
        return yaml.load(plain, TextLoader)
    return None if plain.lower() in ("", "~", "null") else plain


def keep_typed(tree: Any, text: str, key: str = "") -> Any:
    """Return `tree`, parsed by YAML from `text`, with the values of text keys as typed; `key` is the tree's."""
    return _merged(tree, yaml.load(text, TextLoader), key)


def _merged(tree: Any, texts: Any, key: str) -> Any:
    if isinstance(tree, dict) and isinstance(texts, dict):
        # By name, as merge keys (<<) can change the order; a name that is no text in `tree` by its place among these.
        rest = (each for name, each in texts.items() if name not in tree)
        return {
            name: _merged(value, texts[name] if name in texts else next(rest, value), f"{key}.{name}".lstrip("."))
            for name, value in tree.items()
        }
    return texts if is_text(key) else tree

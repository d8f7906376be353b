"""Load tokenizers, decode responses, and hash vocabularies for comparing student and teacher."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_gkd.errors import ModelError, describe_error
from hybrid_gkd.runtime.hub import check_hub
from hybrid_gkd.runtime.imports import gc_paused, model_code
from hybrid_gkd.types import Sample, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raises ModelError if there is none, or it cannot be loaded."""
    with gc_paused():
        from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1  # a hub id has at most one slash
    if looks_local and not folder.is_dir():
        raise ModelError(f"{path}: no such model folder")
    if trust_remote_code or not folder.is_dir():
        check_hub()
    with model_code(path, trust_remote_code):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever a tokenizer file or a folder's own code raises
            raise ModelError(f"{path}: the tokenizer cannot be loaded: {describe_error(error)}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes without its files
        raise ModelError(f"{path}: there is no tokenizer (tokenizer.json), or it has special tokens only")
    return tokenizer


def encode_open(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return token ids of texts to be continued: with the special tokens before a text, without those after it."""
    plain, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    added = range(len(whole) - len(plain) + 1)
    front = next((count for count in added if whole[count : count + len(plain)] == plain), added[-1])
    back = added[-1] - front
    return [ids[: len(ids) - back] for ids in tokenizer(texts).input_ids]


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the end-of-sequence ids of the tokenizer and of generation_config.json, ascending. Raises ModelError."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    try:
        configured = GenerationConfig.from_pretrained(path).eos_token_id
        check_end(path, "generation_config.json", configured, num_token_ids(tokenizer))
    except OSError:  # the file is optional
        configured = None
    except ValueError as error:
        raise ModelError(f"generation_config.json of {path} cannot be used: {describe_error(error)}") from error
    return sorted((ids | set(configured if isinstance(configured, list) else [configured])) - {None})


def check_end(path: str, source: str, found: Any, number: int) -> None:
    """Check an `eos_token_id`: null, a token id, or a list of ids, each below `number`. Raises ModelError."""
    for end in found if isinstance(found, list | tuple) else [found]:
        if end is not None and not (type(end) is int and 0 <= end < number):
            raise ModelError(f"{path}: eos_token_id {end} of {source} is no token, whose ids are below {number}")


def decode(tokenizer: Any, task: Task, sample: Sample) -> str:
    """Return a completion of a task as text, without special tokens."""
    return tokenizer.decode(sample.tokens[len(task.token_ids) :].tolist(), skip_special_tokens=True)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return SHA-256 over all (token, id) pairs; equal for equal vocabularies, in any process.

    It does not depend on which tokens pad, begin or end a text, see `special_tokens`.
    """
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def num_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id plus 1, the number of tokens if no id is unused."""
    return max(tokenizer.get_vocab().values()) + 1


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str | None]:
    """Return the tokens that begin, end and pad a text, by the tokenizer's name for them."""
    return {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}

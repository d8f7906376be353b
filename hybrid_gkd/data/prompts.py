"""Prompts from files and hub data sets to token ids, with every row checked before training starts.

Reading is left to the `datasets` library; what is added here are the checks, the chat template and messages
that name the configuration key, the file, the row (1-based) and the value. Responses are not read: the student
writes its own.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.errors import ConfigError, DataError
from hybrid_gkd.types import Prompt

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
OTHER_SUFFIXES = {".gz", ".zip", ".zst", ".tsv", ".txt", ".arrow"}
"""Not read, but a name that ends so is a file and not a data set on the hub."""
HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[^:]*))?(:(?P<split>[^:]+))?")
TRUNCATIONS = ("error", "left", "right", "middle")


def load_prompts(
    files: list[str],
    *,
    key: str,
    prompt_key: str,
    answer_key: str | None,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    truncation: str,
    filter_overlong_prompts: bool,
    apply_chat_template_kwargs: dict[str, Any],
) -> list[Prompt]:
    """Every row of `files` as a Prompt, in order; `key` is the configuration key that named the files.

    A prompt is a string (one user message) or a list of chat messages. `answer_key` may be dotted
    (`reward_model.ground_truth`); None reads no answers. `Prompt.index` counts the rows of all files, the
    left-out ones included. Raises DataError for whatever the user has to repair.
    """
    if truncation not in TRUNCATIONS:
        raise ConfigError("data.truncation", f"must be one of {', '.join(TRUNCATIONS)}", truncation)
    for file in files:  # all of them before the first is read: a long download must not delay the message
        _check_source(file, key)
    prompts: list[Prompt] = []
    num_rows = num_overlong = 0
    for file in files:
        where = f"{key}: {file!r}"
        messages, answers = _read_rows(file, where, prompt_key, answer_key)
        token_ids = _tokenize(messages, tokenizer, apply_chat_template_kwargs, where)
        for row, ids in enumerate(token_ids):
            if len(ids) > max_prompt_length:
                if filter_overlong_prompts:
                    num_overlong += 1
                    continue
                ids = _truncate(ids, max_prompt_length, truncation, f"{where}, row {row + 1}")
            prompts.append(
                Prompt(
                    index=num_rows + row,
                    token_ids=np.asarray(ids, np.int32),
                    text=_user_text(messages[row]),
                    answer=answers[row],
                )
            )
        num_rows += len(messages)
    if num_overlong:
        logger.warning(
            "%s: left out %d of %d prompts longer than data.max_prompt_length=%d",
            key, num_overlong, num_rows, max_prompt_length,
        )  # fmt: skip
    if not prompts:
        raise DataError(
            f"{key}: all {num_rows} prompts are longer than data.max_prompt_length={max_prompt_length} and "
            "data.filter_overlong_prompts=true leaves them out"
            if num_rows
            else f"{key}: must name at least one file; got {files!r}"
        )
    return prompts


def _check_source(file: str, key: str) -> None:
    path = Path(file).expanduser()
    if path.is_dir():
        raise DataError(f"{key}: must be a file, not a folder; got {file!r}")
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise DataError(f"{key}: must end in one of {', '.join(READERS)}; got {file!r}")
    elif file.startswith(("/", ".", "~")) or path.suffix.lower() in READERS.keys() | OTHER_SUFFIXES:
        raise DataError(f"{key}: file not found: {file!r}")
    elif not HUB_NAME.fullmatch(file):
        raise DataError(
            f"{key}: file not found, and not the name of a hub data set, org/name[:config][:split]: {file!r}"
        )


def _read_rows(
    file: str, where: str, prompt_key: str, answer_key: str | None
) -> tuple[list[list[dict[str, str]]], list[str | None]]:
    """Chat messages and answer of every row."""
    dataset = _read(file, where)
    columns = ", ".join(dataset.column_names)
    if len(dataset) == 0:
        raise DataError(f"{where}: holds no rows")
    if prompt_key not in dataset.column_names:
        raise DataError(f"{where}: no column {prompt_key!r} (data.prompt_key); its columns are: {columns}")
    messages = [
        _check_messages(value, f"{where}, row {row}, column {prompt_key!r}")
        for row, value in enumerate(dataset[prompt_key], 1)
    ]
    if answer_key is None:
        return messages, [None] * len(messages)
    column, *path = [answer_key] if answer_key in dataset.column_names else answer_key.split(".")
    if column not in dataset.column_names:
        raise DataError(f"{where}: no column {column!r} (reward.answer_key={answer_key}); its columns are: {columns}")
    return messages, [
        _answer(value, path, f"{where}, row {row}, answer {answer_key!r} (reward.answer_key)")
        for row, value in enumerate(dataset[column], 1)
    ]


def _read(file: str, where: str) -> Dataset:
    import datasets

    path = Path(file).expanduser()
    with _quiet_datasets(), tempfile.TemporaryDirectory() as scratch:
        try:
            if not path.is_file():
                match = HUB_NAME.fullmatch(file)
                assert match is not None  # _check_source
                return datasets.load_dataset(match["name"], match["config"] or None, split=match["split"] or "train")
            reader = READERS[path.suffix.lower()]
            if path.stat().st_size < 4096 and not path.read_bytes().strip():
                raise DataError(f"{where}: the file is empty")
            # Into memory: a copy of the user's data that stays in a cache would be a surprise.
            return datasets.load_dataset(
                reader,
                data_files=str(path),
                split="train",
                cache_dir=scratch,
                keep_in_memory=True,
                **(_text_columns(path) if reader == "csv" else {}),
            )
        except DataError:
            raise
        # The readers raise errors of pyarrow, pandas, fsspec and their own: all mean that the data is unreadable.
        except Exception as error:
            if "corresponds to no data" in str(error):  # what the reader says of [] and of a csv with a header only
                raise DataError(f"{where}: holds no rows") from error
            cause = error.__cause__ or error
            reason = _bad_line(path) or (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise DataError(f"{where}: cannot be read: {reason}") from error


def _text_columns(path: Path) -> dict[str, Any]:
    """Options that keep every csv field as it is written: 007 is no number, and an empty text no missing one."""
    import datasets

    with path.open(newline="", encoding="utf-8-sig") as lines:
        header = next(csv.reader(lines))
    return {
        "features": datasets.Features({name: datasets.Value("string") for name in header}),
        "keep_default_na": False,
    }


def _bad_line(path: Path) -> str:
    """The first row of a JSON lines file that is no JSON object, which the reader's error does not name."""
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return ""
    with path.open("rb") as lines:
        for row, line in enumerate(lines, 1):
            try:
                bad = bool(line.strip()) and not isinstance(json.loads(line), dict)
            except ValueError:
                bad = True
            if bad:
                return f"row {row} is not a JSON object; got {_short(line.strip().decode(errors='replace'))}"
    return ""


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No progress bars, and no log lines about an error that is raised anyway."""
    import datasets

    verbosity, had_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


def _check_messages(value: object, where: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: must be a text or a list of chat messages; got {_short(value)}")
    result = []
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"{where}: a message must have a text under 'role' and 'content'; got {_short(message)}")
        result.append({"role": message["role"], "content": message["content"]})
    if not _user_text(result).strip():
        raise DataError(f"{where}: the prompt is empty; got {_short(value)}")
    return result


def _user_text(messages: list[dict[str, str]]) -> str:
    """The last user message, or the last message where no user speaks."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"])


def _answer(value: object, path: list[str], where: str) -> str:
    for name in path:
        if not isinstance(value, dict) or name not in value:
            raise DataError(f"{where}: no field {name!r}; got {_short(value)}")
        value = value[name]
    if not isinstance(value, str | int | float):
        raise DataError(f"{where}: must be a text or a number; got {_short(value)}")
    return str(value)


def _tokenize(
    messages: list[list[dict[str, str]]],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    where: str,
) -> list[list[int]]:
    if not tokenizer.chat_template:
        return tokenizer(["\n".join(m["content"] for m in row) for row in messages]).input_ids
    texts = []
    for row, conversation in enumerate(messages, 1):
        try:
            texts.append(
                tokenizer.apply_chat_template(
                    conversation, add_generation_prompt=True, tokenize=False, **template_kwargs
                )
            )
        # A template is a program of the model's maker; it refuses roles or their order with errors of its own.
        except Exception as error:
            raise DataError(
                f"{where}, row {row}: the chat template refuses it: {error}; got {_short(conversation)}"
            ) from error
    return tokenizer(texts, add_special_tokens=False).input_ids


def _truncate(ids: list[int], limit: int, truncation: str, where: str) -> list[int]:
    if truncation == "left":
        return ids[-limit:]
    if truncation == "right":
        return ids[:limit]
    if truncation == "middle":
        return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
    raise DataError(
        f"{where}: the prompt has {len(ids)} tokens, the limit is data.max_prompt_length={limit}; raise it, set "
        "data.filter_overlong_prompts=true to leave such rows out, or data.truncation to left, right or middle"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

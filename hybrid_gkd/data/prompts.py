"""Prompts from files and hub data sets to token ids, with every row checked before training starts.

Text files are read with the standard library, which keeps every value as it is written. Messages name the
configuration key, the file, the row (1-based) and the value. Responses are not read: the student writes its own.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.errors import DataError
from hybrid_gkd.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
OTHER_SUFFIXES = {".gz", ".zip", ".zst", ".tsv", ".txt", ".arrow"}
"""Not read, but a name that ends so is a file and not a data set on the hub."""
HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[^:]*))?(:(?P<split>[^:]+))?")
Chat = list[dict[str, str]]
Table = tuple[list[str], list[dict[str, Any]]]
"""The names of all columns, and every row with the wanted ones."""


def load_prompts(
    files: list[str], *, key: str, prompt_key: str, answer_key: str | None, tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int, truncation: str, filter_overlong_prompts: bool, apply_chat_template_kwargs: dict[str, Any],
) -> list[Prompt]:
    """Every row of `files` as a Prompt, in order; `key` is the configuration key that named the files.

    A prompt is a string (one user message) or a list of chat messages. `answer_key` may be dotted
    (`reward_model.ground_truth`); None reads no answers. `Prompt.index` counts the rows of all files, the
    left-out ones included. Raises DataError for whatever the user has to repair.
    """
    if not files:
        raise DataError(f"{key}: must name at least one file; got {files!r}")
    for file in files:  # all of them before the first is read: a long download must not delay the message
        _check_source(file, key)
    prompts: list[Prompt] = []
    num_rows = 0
    for file in files:
        where = f"{key}: {file!r}"
        messages, answers = _read_rows(file, where, prompt_key, answer_key)
        for row, ids in enumerate(_tokenize(messages, tokenizer, apply_chat_template_kwargs, where)):
            if filter_overlong_prompts and len(ids) > max_prompt_length:
                continue
            ids = _truncate(ids, max_prompt_length, truncation, f"{where}, row {row + 1}")
            token_ids, text = np.asarray(ids, np.int32), _user_text(messages[row])
            prompts.append(Prompt(index=num_rows + row, token_ids=token_ids, text=text, answer=answers[row]))
        num_rows += len(messages)
    limit = f"longer than data.max_prompt_length={max_prompt_length}"
    if len(prompts) < num_rows:
        logger.warning("%s: left out %d of %d prompts %s", key, num_rows - len(prompts), num_rows, limit)
    if not prompts:
        rule = "data.filter_overlong_prompts=true leaves them out"
        raise DataError(f"{key}: all {num_rows} prompts are {limit} and {rule}")
    return prompts


def _check_source(file: str, key: str) -> None:
    path = Path(file).expanduser()
    if path.is_dir():
        raise DataError(f"{key}: must be a file, not a folder; got {file!r}")
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{key}: must end in one of {', '.join(SUFFIXES)}; got {file!r}")
    elif file.startswith(("/", ".", "~")) or path.suffix.lower() in OTHER_SUFFIXES.union(SUFFIXES):
        raise DataError(f"{key}: file not found: {file!r}")
    elif not HUB_NAME.fullmatch(file):
        rule = "file not found, and not the name of a hub data set, org/name[:config][:split]"
        raise DataError(f"{key}: {rule}: {file!r}")


def _read_rows(file: str, where: str, prompt_key: str, answer_key: str | None) -> tuple[list[Chat], list[str | None]]:
    """Chat messages and answer of every row."""
    wanted = {prompt_key} if answer_key is None else {prompt_key, answer_key, answer_key.split(".")[0]}
    names, rows = _read(file, where, wanted)
    columns = ", ".join(names)
    if names and prompt_key not in names:
        raise DataError(f"{where}: no column {prompt_key!r} (data.prompt_key); its columns are: {columns}")
    if not rows:
        raise DataError(f"{where}: holds no rows")
    messages = [
        _check_messages(values.get(prompt_key), f"{where}, row {row}, column {prompt_key!r}")
        for row, values in enumerate(rows, 1)
    ]
    if answer_key is None:
        return messages, [None] * len(messages)
    column, *path = [answer_key] if answer_key in names else answer_key.split(".")
    if column not in names:
        raise DataError(f"{where}: no column {column!r} (reward.answer_key={answer_key}); its columns are: {columns}")
    return messages, [
        _answer(values.get(column), path, f"{where}, row {row}, answer {answer_key!r} (reward.answer_key)")
        for row, values in enumerate(rows, 1)
    ]


def _read(file: str, where: str, wanted: set[str]) -> Table:
    path = Path(file).expanduser()
    try:
        if not path.is_file():
            return _read_hub(file, wanted)
        if path.suffix.lower() == ".parquet":
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as parquet:
                names = parquet.schema_arrow.names
                return names, parquet.read(columns=[name for name in names if name in wanted]).to_pylist()
        read = _read_csv if path.suffix.lower() == ".csv" else _read_json
        return read(_text(path, where), where, wanted)
    except DataError:
        raise
    # Errors of pyarrow, fsspec and the hub: all mean that the data is unreadable.
    except Exception as error:
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise DataError(f"{where}: cannot be read: {reason}") from error


def _text(path: Path, where: str) -> str:
    content = path.read_bytes()
    try:
        text = content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line, found = content.count(b"\n", 0, error.start) + 1, content[error.start]
        rule = f"must be UTF-8 text; got 0x{found:02x} at byte {error.start}"
        raise DataError(f"{where}, line {line}: {rule}") from error
    if not text or text.isspace():
        raise DataError(f"{where}: the file is empty")
    return text


def _read_json(text: str, where: str, wanted: set[str]) -> Table:
    """Rows from one object per line, or from one list of objects, or from one object on several lines."""
    values: Iterable[Any]
    try:
        whole = json.loads(text)
        values = whole if isinstance(whole, list) else [_json_object(text.strip(), f"{where}, row 1")]
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("[") and error.msg != "Extra data":
            raise
        lines = (match[0].strip() for match in re.finditer(r"[^\r\n]+", text))  # without a copy of all of it
        values = (_json_object(line, f"{where}, row {row}") for row, line in enumerate(filter(None, lines), 1))
    names: dict[str, None] = {}
    rows = []
    for row, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise DataError(f"{where}: cannot be read: row {row} is not a JSON object; got {_short(value)}")
        names |= dict.fromkeys(value)
        rows.append({name: value[name] for name in value if name in wanted})
        try:
            json.dumps(rows[-1], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            bad = error.object[max(0, error.start - 20) : error.end]
            raise DataError(f"{where}, row {row}: must not hold half of a surrogate pair; got {_short(bad)}") from error
    return list(names), rows


def _json_object(line: str, where: str) -> Any:
    """The object that `line` holds, or `line` itself if it holds none."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise DataError(f"{where}: must not have two fields of one name; got {_short(line)}")
        return fields

    try:
        value = json.loads(line, object_pairs_hook=distinct)
    except json.JSONDecodeError:
        return line
    return value if isinstance(value, dict) else line


def _read_csv(text: str, where: str, wanted: set[str]) -> Table:
    csv.field_size_limit(sys.maxsize)  # a long prompt may exceed the default, 128 KiB
    # Strict: else a quote that is never closed would take the rest of the file as one field.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines = (fields for fields in reader if fields and not (len(fields) == 1 and fields[0].isspace()))
    header: list[str] = []
    rows: list[dict[str, Any]] = []
    try:
        header = next(lines, [])
        columns = [(name, header.index(name)) for name in header if name in wanted]
        for fields in lines:
            if len(fields) != len(header):
                rule = f"must have {len(header)} fields, as the header has; got {len(fields)}: {_short(fields)}"
                raise DataError(f"{where}, row {len(rows) + 1}: {rule}")
            rows.append({name: fields[column] for name, column in columns})
    except csv.Error as error:
        place = f"row {len(rows) + 1}" if header else "the header"
        raise DataError(f"{where}: cannot be read: {place}: {error}") from error
    return header, rows


def _read_hub(file: str, wanted: set[str]) -> Table:
    """Rows of a hub data set, without progress bars, and without log lines about an error that is raised anyway."""
    import datasets

    match = HUB_NAME.fullmatch(file)
    assert match is not None  # _check_source
    verbosity, had_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(match["name"], match["config"] or None, split=match["split"] or "train")
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()
    names = dataset.column_names
    return names, list(dataset.select_columns([name for name in names if name in wanted]))


def _check_messages(value: object, where: str) -> Chat:
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


def _user_text(messages: Chat) -> str:
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
    messages: list[Chat], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], where: str
) -> list[list[int]]:
    if not tokenizer.chat_template:
        return tokenizer(["\n".join(m["content"] for m in row) for row in messages]).input_ids
    texts = []
    for row, conversation in enumerate(messages, 1):
        try:
            text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False, **options)
        # A template is a program of the model's maker; it refuses roles or their order with errors of its own.
        except Exception as error:
            reason = f"the chat template refuses it: {error}; got {_short(conversation)}"
            raise DataError(f"{where}, row {row}: {reason}") from error
        texts.append(text)
    return tokenizer(texts, add_special_tokens=False).input_ids


def _truncate(ids: list[int], limit: int, truncation: str, where: str) -> list[int]:
    if len(ids) <= limit or truncation == "right":
        return ids[:limit]
    if truncation == "left":
        return ids[-limit:]
    if truncation == "middle":
        return ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]
    raise DataError(
        f"{where}: the prompt has {len(ids)} tokens, the limit is data.max_prompt_length={limit}; raise it, set "
        "data.filter_overlong_prompts=true to leave such rows out, or data.truncation to left, right or middle"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

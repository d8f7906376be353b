"""Read prompts from tables, check every row before training starts, and tokenize them.

Messages name the configuration key, the entry, the row (1-based) and the value.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_gkd.config import DEFAULT_TEACHER
from hybrid_gkd.data.chat_template import TOOLS, Chat, Tools, renderer, tokenize_chats
from hybrid_gkd.data.given import (
    ANSWER,
    CONTENTS,
    CUT,
    FINISH_REASON,
    GivenCompletion,
    GivenTokens,
    parse_completion,
    split_chat,
    tokenize_completion,
)
from hybrid_gkd.data.routing import TeacherColumn
from hybrid_gkd.data.tables import UNPACKED_BYTES, Source, find_sources, of_json, read_table, short, short_names
from hybrid_gkd.errors import DataError, call_all, raise_all
from hybrid_gkd.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DATA_SOURCE, EXTRA_INFO = "data_source", "extra_info"
"""Optional columns besides `TOOLS`: the data source (unless `data.reward_fn_key` names another one), and further values
for custom reward functions."""

CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")
"""Beginning of a list of chat messages that was written as JSON, or by Python, into a column of texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A checked row of a table."""

    messages: Chat
    teacher_messages: Chat | None = None
    """Prompt of the teacher alone; None if it reads the student's."""
    teacher: str = DEFAULT_TEACHER
    """Key of the teacher that scores the row."""
    tools: Tools = None
    answer: str | None = None
    """Ground truth; None without an answer column."""
    data_source: str | None = None
    extra_info: dict[str, Any] | None = None
    given: GivenCompletion | None = None
    """Given completion; None if the student generates one."""


@dataclass(frozen=True)
class Rows:
    """The rows of one table."""

    where: str
    """Beginning of messages about the rows: configuration key and table name."""
    name: str
    """Name of the table in the configuration."""
    rows: list[Row]
    weight: float
    """Fraction of the entry's rows in an epoch."""
    columns: Sequence[str] = ()
    """Names of all columns of the table."""
    entry: int = 0
    """Place of the table's entry in the configuration key, from 0 on."""

    def without_given(self) -> Rows:
        """Return the prompts alone, for validation."""
        return dataclasses.replace(self, rows=[dataclasses.replace(row, given=None) for row in self.rows])


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns to read, by the configuration keys that name them."""

    prompt_key: str = "prompt"
    """A string (one user message) or a list of chat messages."""
    answer_key: str | None = None
    """Ground truth, possibly dotted (`reward_model.ground_truth`); None reads none."""
    data_source_key: str = DATA_SOURCE
    """Name of the data set."""
    extra_info: bool = False
    """True to read the column of that name, if a table has it."""
    response_key: str | None = None
    """Given completions, a column of at least one table. The same as prompt_key: its last messages of the assistant."""
    excluded_spans_key: str | None = None
    """Character ranges of given completions that are not trained on, a column of at least one table."""
    teacher_prompt_key: str | None = None
    """Prompts for the teacher, as those of prompt_key; null takes the student's."""
    teacher: TeacherColumn | None = None
    """Key of each row's teacher; None with one teacher."""


def read_rows(
    entries: list[str], columns: Columns, *, key: str, weights: list[float] | None = None,
    unpacked_bytes: float = UNPACKED_BYTES,
) -> list[Rows]:  # fmt: skip
    """Read all tables of a configuration key: files, patterns, folders and hub data sets.

    Args:
        entries: value of the key.
        key: the configuration key, for messages.
        weights: of each entry; None: 1.
        unpacked_bytes: limit of the size of a compressed file's text.

    Raises DataError: errors in the data, of several tables together.
    """
    if not entries:
        raise DataError(f"{key}: must name at least one file; got {entries!r}")
    # Resolve all entries first: a long download must not delay an error.
    sources = call_all(functools.partial(find_sources, [entry], key, unpacked_bytes) for entry in entries)
    tables = call_all(
        functools.partial(_read_rows, source, f"{key}: {source.name!r}", columns, place, weight)
        for place, (entry, weight) in enumerate(zip(sources, weights or [1.0] * len(sources), strict=True))
        for source in entry
    )
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    for option, what in (("response_key", "a completion"), ("excluded_spans_key", "spans")):
        column = getattr(columns, option)
        if column is not None and column not in names:
            rule = f"no row has {what} in the column {column!r} (data.{option})"
            raise DataError(f"{key}: {rule}; the columns of the files are: {', '.join(names)}")
    return tables


def make_prompts(
    tables: list[Rows], *, key: str, tokenizer: PreTrainedTokenizerBase, max_prompt_length: int, truncation: str,
    filter_overlong_prompts: bool, apply_chat_template_kwargs: dict[str, Any],
    teacher_templates: Mapping[str, str | None] = MappingProxyType({}),
    teacher_tokenizers: Mapping[str, Any] = MappingProxyType({}),
    max_teacher_prompt_length: int | None = None, keep_messages: bool = False, max_response_length: int = 0,
    loss_mask: str = ANSWER,
) -> list[Task]:
    """Return every row as a Task, in order. `Task.index` counts the rows of all tables, skipped ones included.

    The teacher's prompt, in its template or tokenizer (by `Task.teacher`) or of other messages, must fit into
    `max_teacher_prompt_length` (None: `max_prompt_length`), and a given completion into `max_response_length`, by the
    same rules as the student's prompt into its limit; a completion is truncated at its end. `loss_mask` is that of
    given.py. Raises DataError for rows that a chat template rejects, and for too long ones.
    """
    prompts, problems, exceeded_keys, num_rows = list[Task](), list[DataError](), dict[str, None](), 0
    fit = functools.partial(_fitted, truncation=truncation, limit=max_response_length)
    teacher_limit = max_teacher_prompt_length or max_prompt_length
    for table, file in zip(tables, short_names([table.name for table in tables]), strict=True):
        tokenize = functools.partial(
            tokenize_chats, tokenizer=tokenizer, options=apply_chat_template_kwargs, where=table.where,
        )
        all_ids = tokenize([row.messages for row in table.rows], tools=[row.tools for row in table.rows])
        lengths = list(map(len, all_ids))
        others = _teacher_prompts(table, tokenize, teacher_templates, teacher_tokenizers)
        other_lengths = [0] * len(all_ids) if others is None else list(map(len, others))
        answers = _given_tokens(table, all_ids, tokenizer, apply_chat_template_kwargs, loss_mask)
        answer_lengths = [0 if answer is None else len(answer.token_ids) for answer in answers]
        limits = (
            ("prompt", lengths, max_prompt_length), ("teacher_prompt", other_lengths, teacher_limit),
            ("response", answer_lengths, max_response_length),
        )  # fmt: skip
        exceeded = [limit for limit in limits if max(limit[1]) > limit[2]]
        if exceeded and truncation == "error" and not filter_overlong_prompts:
            problems += [_too_long(*limit, table.where) for limit in exceeded]
            continue
        exceeded_keys |= {f"data.max_{what}_length={limit}": None for what, _, limit in exceeded}
        _warn_about_ended(all_ids, tokenizer, table.where)
        before = len(prompts)
        for place, (row, length, answer) in enumerate(zip(table.rows, lengths, answers, strict=True)):
            if not filter_overlong_prompts or all(found[place] <= limit for _, found, limit in exceeded):
                token_ids = _truncate(all_ids[place], max_prompt_length, truncation)
                prompts.append(Task(
                    index=num_rows + place, token_ids=token_ids,
                    teacher_ids=None if others is None else _truncate(others[place], teacher_limit, truncation),
                    **fit(answer, length, len(token_ids)) if answer else {},
                    messages=row.messages if keep_messages else None, tools=row.tools, text=_user_text(row.messages),
                    answer=row.answer, data_source=row.data_source, extra_info=row.extra_info,
                    source=table.where, place=place, file=file, entry=table.entry, weight=table.weight,
                    teacher=row.teacher,
                ))  # fmt: skip
        problems += _untrained(prompts[before:])
        num_rows += len(all_ids)
    raise_all(problems)
    _report_skipped(key, num_rows - len(prompts), num_rows, " or ".join(exceeded_keys))
    return prompts


def _untrained(tasks: list[Task]) -> list[DataError]:
    """Return the error of the first task whose given completion has no trained token, if any."""
    rule = "no token of the given completion is trained on"
    found = (task.where for task in tasks if task.loss_mask is not None and not task.loss_mask.any())
    return [DataError(f"{where}: {rule}") for where in found][:1]


def _teacher_prompts(
    table: Rows, tokenize: Callable[..., list[list[int]]], templates: Mapping[str, str | None],
    tokenizers: Mapping[str, Any],
) -> list[list[int]] | None:
    """Return the token ids of the prompts that the teachers read; None if they are the student's."""
    if not tokenizers and not any(templates.values()) and not any(row.teacher_messages for row in table.rows):
        return None
    found = [list[int]()] * len(table.rows)
    for key in (None, *tokenizers):  # None: all whose tokenizer is the student's
        numbered = enumerate(table.rows, 1)
        rows = {n: row for n, row in numbered if (row.teacher if row.teacher in tokenizers else None) == key}
        all_ids = tokenize(
            [row.teacher_messages or row.messages for row in rows.values()],
            templates=[templates.get(row.teacher) for row in rows.values()],
            tools=[row.tools for row in rows.values()], rows=[*rows],
            **{} if key is None else {"tokenizer": tokenizers[key]},
        )  # fmt: skip
        for number, ids in zip(rows, all_ids, strict=True):
            found[number - 1] = ids
    return found


def _report_skipped(key: str, skipped: int, num_rows: int, limits: str) -> None:
    """Log how many rows were skipped because of `limits`. Raises DataError: all of them."""
    if skipped == num_rows:
        rule = "data.filter_overlong_prompts=true skips them"
        raise DataError(f"{key}: all {num_rows} prompts are longer than {limits} and {rule}")
    if skipped:
        logger.warning("%s: skipped %d of %d prompts longer than %s", key, skipped, num_rows, limits)


def _read_rows(source: Source, where: str, columns: Columns, entry: int, weight: float) -> Rows:
    wanted = {columns.prompt_key, columns.data_source_key, TOOLS} | ({EXTRA_INFO} if columns.extra_info else set())
    wanted |= {name for name in (columns.response_key, columns.excluded_spans_key, columns.teacher_prompt_key) if name}
    wanted |= {columns.teacher.name} if columns.teacher else set()
    wanted |= {FINISH_REASON} if columns.response_key else set()
    wanted |= set() if columns.answer_key is None else {columns.answer_key, columns.answer_key.split(".")[0]}
    names, rows = read_table(source, where, wanted)
    answer_path = []
    if columns.answer_key is not None:
        answer_path = [columns.answer_key] if columns.answer_key in names else columns.answer_key.split(".")
    needed = {
        "data.prompt_key": columns.prompt_key,
        "data.teacher_prompt_key": columns.teacher_prompt_key,
        "data.reward_fn_key": None if columns.data_source_key == DATA_SOURCE else columns.data_source_key,
        f"reward.answer_key={columns.answer_key}": answer_path[0] if answer_path else None,
        "distillation.teacher_key": columns.teacher.name if columns.teacher else None,
    }
    for key, column in needed.items():
        if names and column is not None and column not in names:
            raise DataError(f"{where}: no column {column!r} ({key}); its columns are: {', '.join(names)}")
    if not rows:
        raise DataError(f"{where}: has no rows")
    columns_of_chats = (columns.prompt_key, columns.response_key, columns.teacher_prompt_key)
    chats = [name for name in dict.fromkeys(columns_of_chats) if name is not None]
    if source.of_arrow:
        rows = [
            {name: without_nulls(value) if name in (*chats, TOOLS) else value for name, value in row.items()}
            for row in rows
        ]
    for name in chats:
        _warn_about_chat_texts([row.get(name) for row in rows], f"{where}, column {name!r}")
    checked = [
        _read_row(values, columns, answer_path, f"{where}, row {number}") for number, values in enumerate(rows, 1)
    ]
    return Rows(where, source.name, checked, weight, names, entry)


def _warn_about_chat_texts(values: list[Any], where: str) -> None:
    """Warn of the text of a list of messages, which is not parsed."""
    found = [row for row, text in enumerate(values, 1) if isinstance(text, str) and CHAT_TEXT.match(text)]
    if found:
        logger.warning(
            "%s: %d texts, first row %d, look like lists of chat messages, and are read as one message each; a list "
            "needs a file of JSON or Parquet, not its text", where, len(found), found[0],
        )  # fmt: skip


def _read_row(values: dict[str, Any], columns: Columns, answer_path: list[str], where: str) -> Row:
    """Return the checked row of a table. `answer_path`: column of the ground truth, then the fields within it."""
    messages, given = _prompt_and_completion(values, columns, where)
    shown = None if columns.teacher_prompt_key is None else values.get(columns.teacher_prompt_key)
    if shown is not None:
        shown = check_messages(shown, f"{where}, column {columns.teacher_prompt_key!r}")
    answer = None
    if answer_path:
        place = f"{where}, answer {columns.answer_key!r} (reward.answer_key)"
        answer = _answer(values.get(answer_path[0]), answer_path[1:], place)
    return Row(
        messages=messages, teacher_messages=shown, given=given, answer=answer,
        tools=_tools(values.get(TOOLS), f"{where}, column {TOOLS!r}"),
        teacher=DEFAULT_TEACHER if columns.teacher is None else columns.teacher.key_of(values, where),
        data_source=_optional(values, columns.data_source_key, str, "a text", where),
        extra_info=_optional(values, EXTRA_INFO, dict, "an object", where),
    )  # fmt: skip


def _prompt_and_completion(values: dict[str, Any], columns: Columns, where: str) -> tuple[Chat, GivenCompletion | None]:
    """Return a row's prompt, and its given completion if there is one."""
    prompt, of_prompt = values.get(columns.prompt_key), f"{where}, column {columns.prompt_key!r}"
    if columns.response_key is None:
        return check_messages(prompt, of_prompt), None
    response = values.get(columns.response_key)
    if columns.response_key == columns.prompt_key:
        prompt, response = split_chat(prompt, of_prompt)
    spans = None if columns.excluded_spans_key is None else values.get(columns.excluded_spans_key)
    is_cut = values.get(FINISH_REASON) == CUT
    answer = parse_completion(
        response, spans, f"{where}, column {columns.response_key!r}", _check_message, is_cut=is_cut,
        excluded_where=f"{where}, column {columns.excluded_spans_key!r} (data.excluded_spans_key)",
    )  # fmt: skip
    return check_messages(prompt, of_prompt), answer


def _optional(values: dict[str, Any], column: str, kind: type, rule: str, where: str) -> Any:
    """Return the value of an optional column."""
    value = values.get(column)
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{where}, column {column!r}: must be {rule}; got {short(value)}")
    return value


def check_messages(value: object, where: str) -> Chat:
    """Return a prompt as chat messages. Raises DataError: it is neither a text nor messages, or is empty."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: must be a text or a list of chat messages; got {short(value)}")
    result = [_check_message(message, where) for message in messages]
    if result[-1]["role"] == "assistant":
        raise DataError(f"{where}: must not end with a message of the assistant; got {short(result[-1])}")
    if not _user_text(result).strip():
        raise DataError(f"{where}: the prompt is empty; got {short(value)}")
    return result


def _check_message(message: object, where: str) -> dict[str, Any]:
    """Return a message with all of its fields, for the chat template; content may be null with tool_calls."""
    found: Any = message
    if isinstance(message, dict):
        found = {name: value for name, value in message.items() if value is not None}
    if isinstance(found, dict) and found.get("role") == "assistant" and found.get("tool_calls"):
        found = {"content": None} | found  # some templates test whether it is null
        whole = isinstance(found["content"], str | None)
    else:
        whole = isinstance(found, dict) and all(isinstance(found.get(name), str) for name in ("role", "content"))
    if not whole:
        raise DataError(f"{where}: a message must have a text under 'role' and 'content'; got {short(message)}")
    return found


def _tools(value: object, where: str) -> Tools:
    """Parse a list of objects, or its JSON text, which tables with a fixed column type use."""
    found = of_json(value)
    if not isinstance(found or [], list) or not all(isinstance(tool, dict) for tool in found or []):
        raise DataError(f"{where}: must be a list of tools (objects), or its JSON; got {short(value)}")
    return found or None


def without_nulls(value: Any) -> Any:
    """Remove null fields at any depth."""
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return value


def _user_text(messages: Chat) -> str:
    """Return the last user message, or the last message if there is none."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), messages[-1]["content"])


def _answer(value: object, path: list[str], where: str) -> str:
    for name in path:
        if not isinstance(value, dict) or name not in value:
            raise DataError(f"{where}: no field {name!r}; got {short(value)}")
        value = value[name]
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    if not text or value != value:  # an empty cell; NaN for a missing number
        raise DataError(f"{where}: must be a text that is not empty or a number; got {short(value)}")
    return str(value)


def _given_tokens(
    table: Rows, all_ids: list[list[int]], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], loss_mask: str
) -> list[GivenTokens | None]:
    """Tokenize the given completions of a table."""
    found = list[GivenTokens | None]()
    for number, (row, prompt_ids) in enumerate(zip(table.rows, all_ids, strict=True), 1):
        where = f"{table.where}, row {number}"
        render = functools.partial(renderer(tokenizer, options, where), tools=row.tools)
        found.append(None if row.given is None else tokenize_completion(
            row.given, row.messages, prompt_ids, tokenizer=tokenizer, where=where, mask=loss_mask,
            render=render if tokenizer.chat_template else None,
        ))  # fmt: skip
    for name in CONTENTS:
        rows = [row for row, given in enumerate(found, 1) if given is not None and name in given.missing]
        if rows:
            logger.warning(
                "%s: the chat template leaves out %r of %d given completions, or a part of it, first row %d",
                table.where, name, len(rows), rows[0],
            )  # fmt: skip
    return found


def _warn_about_ended(all_ids: list[list[int]], tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Warn of prompts that end with the end-of-sequence token."""
    ended = [row for row, ids in enumerate(all_ids, 1) if ids[-1:] == [tokenizer.eos_token_id]]
    if ended:
        logger.warning(
            "%s: %d of %d prompts end with the end-of-sequence token %r, first row %d; it comes from the text or the "
            "chat template, and a model may generate nothing after it",
            where, len(ended), len(all_ids), tokenizer.eos_token, ended[0],
        )  # fmt: skip


def _truncate(ids: list[int], limit: int, truncation: str) -> np.ndarray:
    cut = len(ids) - limit
    if cut > 0:
        start = {"left": 0, "middle": limit // 2, "right": limit}[truncation]
        ids = ids[:start] + ids[start + cut :]
    return np.asarray(ids, np.int32)


def _fitted(answer: GivenTokens, own: int, kept: int, *, truncation: str, limit: int) -> dict[str, np.ndarray]:
    """Return task fields for a completion of at most `limit` tokens whose prompt has `kept` of `own` tokens left."""
    ids, mask = np.asarray(answer.token_ids[:limit], np.int32), answer.loss_mask
    front = _truncate(mask[:own].tolist(), kept, truncation).astype(bool)
    front[:1] = False  # nothing predicts the first token
    return {"response_ids": ids, "loss_mask": np.concatenate([front, mask[own : own + len(ids)]])}


def _too_long(what: str, lengths: list[int], limit: int, where: str) -> DataError:
    """Return an error naming the first prompt or response above the limit, and their number."""
    row, length = next((row, length) for row, length in enumerate(lengths, 1) if length > limit)
    number = sum(length > limit for length in lengths)
    return DataError(
        f"{where}, row {row}: the {what} has {length} tokens, the limit is data.max_{what}_length={limit}; raise it, "
        "set data.filter_overlong_prompts=true to skip such rows, or data.truncation to left, right or middle "
        f"({number} of {len(lengths)} {what}s are longer, the longest has {max(lengths)} tokens)"
    )

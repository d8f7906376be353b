"""Given answers: which tokens they become, and which of these are trained on."""

import json
import re

import numpy as np
import pytest

from hybrid_gkd.data.given import MARK
from hybrid_gkd.data.prompts import Columns, make_prompts, read_rows
from hybrid_gkd.demo.sorting import make_byte_tokenizer
from hybrid_gkd.errors import DataError

CHATML = (
    "{% for m in messages %}<|im|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)
IN_PROMPT = {"prompt_key": "chat", "response_key": "chat"}
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last else 'earlier' }}<|end|>{% endfor %}"


def tokenizer(template=CHATML):
    made = make_byte_tokenizer()  # a token per byte
    made.chat_template = template
    return made


def load(tmp_path, rows, *, template=CHATML, columns=(), **changes):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    spans = "spans" if any("spans" in row for row in rows) else None
    names = {"response_key": "response", "excluded_spans_key": spans} | dict(columns)
    read = read_rows([str(tmp_path / "rows.jsonl")], Columns(**names), key="data.train_files")
    options = {
        "max_prompt_length": 512, "max_response_length": 512, "truncation": "error", "filter_overlong_prompts": False,
        "apply_chat_template_kwargs": {}, "tokenizer": tokenizer(template),
    } | changes
    return make_prompts(read, key="data.train_files", **options)


def trained(task):
    """The text that is trained on, with a | between parts."""
    tokens = np.concatenate([task.token_ids, task.response_ids])
    edges = np.flatnonzero(np.diff(task.loss_mask.astype(int))) + 1
    parts = zip(np.split(tokens, edges), np.split(task.loss_mask, edges), strict=True)
    return "|".join(make_byte_tokenizer().decode(part) for part, mask in parts if mask[0])


def said(role, content):
    return {"role": role, "content": content}


def test_a_text_and_a_message_are_the_same_answer(tmp_path):
    rows = [{"prompt": "1+1", "response": "2 €"}, {"prompt": "1+1", "response": [said("assistant", "2 €")]}]
    text, message = load(tmp_path, rows)
    assert make_byte_tokenizer().decode(text.token_ids) == "<|im|>user\n1+1<|end|>\n<|im|>assistant\n"
    assert make_byte_tokenizer().decode(text.response_ids) == "2 €<|end|>\n"
    assert trained(text) == trained(message) == "2 €<|end|>\n"


CALLING = [said("assistant", "look"), said("tool", "5 < 6"), said("assistant", " so 5 ")]


@pytest.mark.parametrize(
    ("response", "template", "found"),
    [
        ("2 2", CHATML, "2 2"), (" 2 ", None, " 2 "), ([said("assistant", "2")], CHATML, "2"),
        (CALLING, CHATML, "look<|end|>\n| so 5 "),
    ],
)  # fmt: skip
def test_a_cut_completion_has_no_end(tmp_path, response, template, found):
    cut, whole = load(
        tmp_path, [{"prompt": "1", "response": response, "finish_reason": reason} for reason in ("length", "stop")],
        template=template,
    )  # fmt: skip
    assert trained(cut) == found
    assert trained(whole).rstrip() == f"{found}<|end|>"


@pytest.mark.parametrize("end", ["<|end|>", "<|end|>\n"])
def test_an_end_token_that_a_text_has_already_is_not_repeated(tmp_path, end):
    row = {"prompt": "1", "response": f"2{end}"}
    calling = [*CALLING[:2], said("assistant", f"3{end}")]
    whole, spans, cut, several = load(tmp_path, [
        row, row | {"spans": [[0, 1]]}, row | {"finish_reason": "length"}, row | {"response": calling},
    ])  # fmt: skip
    assert (trained(whole), trained(spans), trained(cut)) == ("2<|end|>\n", "<|end|>\n", f"2{end}")
    assert trained(several) == "look<|end|>\n|3<|end|>\n"


def test_without_a_chat_template_an_answer_ends_with_the_end_of_sequence_token(tmp_path):
    rows = [{"prompt": "1+1=", "response": " 2"}, {"prompt": "1+1=", "response": " 2<|end|>"}]
    for task in load(tmp_path, rows, template=None):
        assert make_byte_tokenizer().decode(task.token_ids) == "1+1="
        assert trained(task) == " 2<|end|>"


@pytest.mark.parametrize("empty", [None, float("nan"), "", " \n", [], [said("assistant", " ")]])
def test_rows_and_files_without_an_answer_have_none(tmp_path, empty):
    rows = [{"prompt": "a", "response": empty}, {"prompt": "a", "response": "b"}, {"prompt": "c"}]
    first, second, third = load(tmp_path, rows)
    assert (first.response_ids, first.loss_mask, third.response_ids) == (None, None, None)
    assert trained(second) == "b<|end|>\n"


CHAT = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d"), said("tool", "e"),
        said("assistant", "f")]  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ("answer", "d<|end|>\n|f<|end|>\n"),
        ("assistant", "b<|end|>\n|d<|end|>\n|f<|end|>\n"),
        ("all", tokenizer().apply_chat_template(CHAT, tokenize=False)[1:]),
    ],
)
def test_the_last_messages_of_a_chat_are_the_answer(tmp_path, mask, found):
    """Nothing predicts the first token."""
    [task] = load(tmp_path, [{"chat": CHAT}], columns=IN_PROMPT, loss_mask=mask)
    assert task.text == "c"
    assert trained(task) == found
    whole = make_byte_tokenizer().decode(np.concatenate([task.token_ids, task.response_ids]))
    assert whole == tokenizer().apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("chat", [CHAT[:3], [*CHAT[:3], said("assistant", "")], "c"])
def test_a_prompt_alone_in_a_column_of_chats_has_no_answer(tmp_path, chat):
    [task] = load(tmp_path, [{"chat": chat}], columns=IN_PROMPT)
    assert (task.text, task.response_ids) == ("c", None)


@pytest.mark.parametrize("chat", [["a", "b"], ["a", said("assistant", "b")]])
def test_a_list_without_messages_is_no_chat(tmp_path, chat):
    with pytest.raises(DataError, match="row 1, column 'chat': a message must have a text under 'role' and 'content'"):
        load(tmp_path, [{"chat": chat}], columns=IN_PROMPT)


def test_a_call_of_a_tool_without_a_text_is_an_answer(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    [task] = load(tmp_path, [{"prompt": "p", "response": [call]}])
    assert trained(task) == "None<|end|>\n"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "so\n<think> b </think> c"}, None), ({"content": "b</think>c"}, "content"),
        ({"content": "c", "reasoning_content": "b"}, "reasoning_content"), ({"tool_calls": 5}, None),
        ({"tool_calls": [{"function": {"name": "add"}}]}, "tool_calls"), ({"tool_calls": [{"name": "None"}]}, None),
    ],
)
def test_what_a_template_leaves_out_of_a_completion_is_logged(tmp_path, caplog, message, field):
    """Templates of reasoning models drop what is before </think>, and others drop fields that they do not read."""
    template = CHATML.replace("m.content", "(m.content | string).split('b</think>') | last | trim")
    rows = [{"prompt": "p", "response": each} for each in ("x \n\n y", [message | {"role": "assistant"}])]
    load(tmp_path, rows, template=template)
    rule = f".jsonl': the chat template leaves out {field!r} of 1 given completions, or a part of it, first row 2"
    logged = [record.getMessage().partition("/rows")[2] for record in caplog.records]
    assert logged == ([] if field is None else [rule])


def test_spans_are_left_out_token_by_token(tmp_path):
    """An ä has two tokens, of which both go."""
    row = {"prompt": "p", "response": "abäcd", "spans": [[0, 1], [2, 3]]}
    first, second = load(tmp_path, [row, {"prompt": "p", "response": "x", "spans": None}])
    assert (trained(first), trained(second)) == ("b|cd<|end|>\n", "x<|end|>\n")
    assert make_byte_tokenizer().decode(first.response_ids) == "abäcd<|end|>\n"


REASONING = CHATML.replace(
    "{{ m.content }}", "{{ m.reasoning_content }}>{{ m.content }}{% for c in m.tool_calls %}<{{ c.name }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("fields", "more", "found"),
    [
        ({"content": "42"}, {"spans": [[0, 1]]}, "42? 42>|2<42<|end|>\n"), ({"content": "42"}, {}, "42? 42>42"),
        ({"content": None}, {}, "42? 42"), ({"content": "", "tool_calls": []}, {}, "42? 42"),
    ],
)  # fmt: skip
def test_a_text_is_found_where_reasoning_and_calls_repeat_it(tmp_path, fields, more, found):
    """Spans are excluded from the text itself, and a completion that was cut ends with the last text that it has."""
    message = {"role": "assistant", "reasoning_content": "42? 42", "tool_calls": [{"name": "42"}]} | fields
    [task] = load(
        tmp_path, [{"prompt": MARK, "response": [message], **(more or {"finish_reason": "length"})}], template=REASONING
    )
    assert trained(task) == found


@pytest.mark.parametrize("mask", ["answer", "assistant", "all"])
def test_spans_are_left_out_with_every_mask(tmp_path, mask):
    [task] = load(tmp_path, [{"prompt": "p", "response": "abc", "spans": [[0, 2]]}], loss_mask=mask)
    assert trained(task).endswith("c<|end|>\n")
    assert ("ab" in trained(task), "user" in trained(task)) == (False, mask == "all")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"response": 0}, "row 1, column 'response': must be a text or a list of chat messages; got 0"),
        ({"response": False}, "must be a text or a list of chat messages; got False"),
        ({"response": {}}, "must be a text or a list of chat messages; got {}"),
        ({"response": 7}, "row 1, column 'response': must be a text or a list of chat messages; got 7"),
        ({"response": [said("user", "x")]}, "must begin and end with a message of the assistant"),
        ({"response": [{"role": "assistant"}]}, "a message must have a text under 'role' and 'content'"),
        *(({"response": "abc", "spans": spans}, rf"^data\.train_files: '[^']*rows\.jsonl', row 1, column 'spans' "
            rf"\(data\.excluded_spans_key\): must be a list of spans .* the 3 characters .*; got {re.escape(shown)}$")
            for spans, shown in (
                ([[0, 1], [2, 4]], "[2, 4] in [[0, 1], [2, 4]]"), ([[2, 1]], "[2, 1] in [[2, 1]]"),
                ([[2.0, 3]], "[2.0, 3] in [[2.0, 3]]"), ([[False, 1]], "[False, 1] in [[False, 1]]"),
                ([0, 2], "0 in [0, 2]"), ("0-2", "'0-2'"), ("[[0, 4]]", "[0, 4] in '[[0, 4]]'"), (True, "True"),
            )),
        ({"response": CHAT[3:], "spans": [[0, 1]]}, r"column 'spans' .*: must be empty for .* several messages \(3\)"),
    ],
)
def test_what_is_no_answer_is_named_with_its_row(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path, [{"prompt": "p", **row}])


def test_a_template_that_changes_a_cut_completion_is_refused(tmp_path):
    rows = [{"prompt": "p", "response": "abc", "finish_reason": "length"}]
    with pytest.raises(DataError, match="row 1: the chat template changes the text, so a completion with"):
        load(tmp_path, rows, template=CHATML.replace("m.content", "m.content | upper"))


def test_a_template_that_writes_history_differently_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 1: the chat template renders the beginning .* differently"):
        load(tmp_path, [{"prompt": "p", "response": "r"}], template=FORGETFUL)


def test_a_table_of_texts_has_spans_as_json(tmp_path):
    (tmp_path / "rows.csv").write_text('prompt,response,spans\np,abcd,"[[0, 2]]"\np,abcd,\np,,\n', encoding="utf-8")
    columns = Columns(response_key="response", excluded_spans_key="spans")
    [table] = read_rows([str(tmp_path / "rows.csv")], columns, key="data.train_files")
    assert [row.given and row.given.excluded for row in table.rows] == [[(0, 2)], [], None]


@pytest.mark.parametrize("count", [1, 2])
def test_a_chat_of_the_assistant_alone_has_no_prompt(tmp_path, count):
    chats = [CHAT, CHAT[-1:] * count]
    rule = r"rows\.jsonl', row 2, column 'chat': must have a message before those of the assistant; got \[\{'role'"
    with pytest.raises(DataError, match=rule):
        load(tmp_path, [{"chat": chat} for chat in chats], columns=IN_PROMPT)


@pytest.mark.parametrize("mask", ["answer", "assistant", "all"])
def test_a_template_that_leaves_out_earlier_messages_is_refused_with_every_mask(tmp_path, mask):
    template = CHATML.replace("m.content", "m.content if loop.last or m.role != 'assistant'")
    with pytest.raises(DataError, match=r"row 1: the chat template renders the beginning .* differently"):
        load(tmp_path, [{"prompt": "p", "response": CALLING}], template=template, loss_mask=mask)


def test_several_messages_need_a_chat_template(tmp_path):
    with pytest.raises(DataError, match="row 1: several messages need a chat template"):
        load(tmp_path, [{"prompt": "p", "response": CHAT[3:]}], template=None)


LONG = [{"prompt": "p", "response": "abcdef"}, {"prompt": "p", "response": "ab"}]


def test_a_long_answer_is_an_error_or_left_out_or_loses_its_end(tmp_path, caplog):
    with pytest.raises(DataError, match=r"row 1: the response has 7 tokens, the limit is data\.max_response_length=4"):
        load(tmp_path, LONG, template=None, max_response_length=4)
    [left] = load(tmp_path, LONG, template=None, max_response_length=4, filter_overlong_prompts=True)
    assert left.index == 1
    assert "skipped 1 of 2 prompts longer than data.max_response_length=4" in caplog.text
    cut, whole = load(tmp_path, LONG, template=None, max_response_length=4, truncation="left")
    assert (trained(cut), trained(whole)) == ("abcd", "ab<|end|>")


@pytest.mark.parametrize(("side", "kept"), [("left", "er\nc<|end|>\n<|im|>assistant\n"), ("right", None)])
def test_a_cut_prompt_keeps_the_mask_of_what_is_left(tmp_path, side, kept):
    [whole] = load(tmp_path, [{"chat": CHAT}], columns=IN_PROMPT, loss_mask="assistant")
    size = len(make_byte_tokenizer()(kept, add_special_tokens=False).input_ids) if kept else 24
    [task] = load(
        tmp_path, [{"chat": CHAT}], columns=IN_PROMPT, loss_mask="assistant",
        truncation=side, max_prompt_length=size,
    )  # fmt: skip
    length = len(whole.token_ids)
    part = slice(length - size, length) if side == "left" else slice(0, size)
    np.testing.assert_array_equal(task.token_ids, whole.token_ids[part])
    np.testing.assert_array_equal(task.loss_mask[1:size], whole.loss_mask[part][1:])
    np.testing.assert_array_equal(task.loss_mask[size:], whole.loss_mask[length:])


def test_a_completion_without_a_trained_token_is_named_once_by_its_own_file(tmp_path):
    whole = {"prompt": "1+1", "response": "2", "spans": [[0, 1]]}
    for name, row in (("first", whole), ("second", whole | {"spans": []})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    files = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second")]
    read = read_rows(files, Columns(response_key="response", excluded_spans_key="spans"), key="data.train_files")
    with pytest.raises(DataError, match=r"^data\.train_files: '[^']*first\.jsonl', row 1: no token of the given") as it:
        make_prompts(
            read, key="data.train_files", max_prompt_length=64, max_response_length=64, truncation="error",
            filter_overlong_prompts=False, apply_chat_template_kwargs={},
            tokenizer=tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"),
        )  # fmt: skip
    assert "second" not in str(it.value)


def test_a_column_of_completions_that_no_file_has_is_named_with_those_of_the_files(tmp_path):
    for name, row in (("first", {"prompt": "a", "answer": "b"}), ("second", {"prompt": "a", "response": "b"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    files = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second")]
    assert len(read_rows(files, Columns(response_key="response"), key="data.train_files")) == 2
    for option, columns in (
        ("response_key", Columns(response_key="span")),
        ("excluded_spans_key", Columns(response_key="response", excluded_spans_key="span")),
    ):
        message = rf"^data\.train_files: .* 'span' \(data\.{option}\); the columns of the files are: prompt, answer, "
        with pytest.raises(DataError, match=message):
            read_rows(files, columns, key="data.train_files")

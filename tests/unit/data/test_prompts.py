import json
import logging
import re
import time
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from hybrid_gkd.config.schema import DataConfig
from hybrid_gkd.data.prompts import Columns, make_prompts, read_rows
from hybrid_gkd.data.routing import TeacherColumn
from hybrid_gkd.demo.sorting import make_byte_tokenizer
from hybrid_gkd.errors import DataError, SeveralErrors
from hybrid_gkd.ppo.steps import make_sampler

TOKENIZER = make_byte_tokenizer()  # a token per byte; the chat template adds three tokens to a user message


def load(*files, **changes):
    names = ("prompt_key", "answer_key", "data_source_key", "extra_info", "teacher_prompt_key", "teacher")
    columns = {name: changes.pop(name) for name in names if name in changes}
    key = changes.pop("key", "data.train_files")
    arguments = {
        "tokenizer": TOKENIZER,
        "max_prompt_length": 64,
        "truncation": "error",
        "filter_overlong_prompts": False,
        "apply_chat_template_kwargs": {},
    }
    rows = read_rows([str(file) for file in files], Columns(**columns), key=key)
    return make_prompts(rows, key=key, **(arguments | changes))


@pytest.fixture
def write(tmp_path):
    def write(text, name="rows.jsonl"):
        if isinstance(text, list):
            text = "".join(json.dumps(row) + "\n" for row in text)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return write


def decode(prompt):
    return TOKENIZER.decode(prompt.token_ids)


def test_strings_become_one_user_message_with_answers_as_text(write):
    file = write([{"prompt": "1+1", "answer": 2}, {"prompt": "äö €", "answer": 7}])
    prompts = load(file, answer_key="answer")
    assert [decode(p) for p in prompts] == ["<|user|>1+1<|end|><|assistant|>", "<|user|>äö €<|end|><|assistant|>"]
    assert [(p.index, p.text, p.answer) for p in prompts] == [(0, "1+1", "2"), (1, "äö €", "7")]
    assert prompts[0].token_ids.dtype == np.int32


def test_two_columns_of_one_name_are_refused_where_they_are_read(tmp_path):
    for names in (["prompt", "x", "x"], ["prompt", "prompt", "x"]):
        pq.write_table(pa.table([["a"], ["b"], ["c"]], names=names), tmp_path / "rows.parquet")
        if names[1] == "x":
            assert load(tmp_path / "rows.parquet")[0].text == "a"
    with pytest.raises(DataError, match=r"rows.parquet': must not have two columns of one name; got 'prompt'"):
        load(tmp_path / "rows.parquet")


def test_messages_and_a_nested_answer_in_parquet(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    row = {"prompt": messages, "reward_model": {"style": "rule", "ground_truth": "42"}}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    [prompt] = load(tmp_path / "rows.parquet", answer_key="reward_model.ground_truth")
    assert decode(prompt) == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    assert (prompt.text, prompt.answer) == ("hi", "42")
    with pytest.raises(DataError, match=r"row 1, answer 'reward_model.truth'.*no field 'truth'"):
        load(tmp_path / "rows.parquet", answer_key="reward_model.truth")


def test_rows_say_where_they_are_from_and_what_else_a_reward_may_want(write):
    row = {"prompt": "1+1", "data_source": "sums", "set": "small", "extra_info": {"index": 3}}
    file = write([row, {"prompt": "2+2", "data_source": None}])
    of_both = [(p.data_source, p.extra_info) for p in load(file, extra_info=True)]
    assert of_both == [("sums", {"index": 3}), (None, None)]
    assert [p.extra_info for p in load(file)] == [None, None]
    assert load(file, data_source_key="set")[0].data_source == "small"
    with pytest.raises(DataError, match=r"no column 'origin' \(data\.reward_fn_key\); its columns are: "):
        load(file, data_source_key="origin")
    with pytest.raises(DataError, match=r"row 1, column 'data_source': must be a text; got 3"):
        load(write([{"prompt": "1+1", "data_source": 3}]))
    with pytest.raises(DataError, match=r"row 1, column 'extra_info': must be an object; got 'x'"):
        load(write([{"prompt": "1+1", "extra_info": "x"}]), extra_info=True)


@pytest.mark.parametrize(("name", "text"), [("a.json", '[{"prompt": "x"}]'), ("a.csv", "prompt\nx\n")])
def test_json_array_and_csv(write, name, text):
    assert [p.text for p in load(write(text, name))] == ["x"]


def test_csv_fields_stay_text(write):
    prompts = load(write('prompt,answer\n007,"1,5"\nNA, null \n', "a.csv"), answer_key="answer")
    assert [(p.text, p.answer) for p in prompts] == [("007", "1,5"), ("NA", " null ")]


@pytest.mark.parametrize(
    "text",
    [
        "prompt,answer\na,1\n\n   \nb,2\n",
        "\ufeffprompt,answer\r\na,1\r\nb,2",
        '\nprompt,answer\n"a",1\n"b","2"\n',
        "prompt,answer,\na,1,\nb,2,\n",
    ],
)
def test_csv_with_blank_lines_a_byte_order_mark_or_an_unnamed_column(write, text):
    prompts = load(write(text, "a.csv"), answer_key="answer")
    assert [(p.text, p.answer) for p in prompts] == [("a", "1"), ("b", "2")]


def test_a_csv_field_may_be_long_and_have_lines(write):
    text = "a\n\n" + "b" * 200_000
    [prompt] = load(write(f'prompt\n"{text}"\n', "a.csv"), max_prompt_length=300_000)
    assert prompt.text == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,1\nc,d,2\n", r"row 1: must have 2 fields, as the header has; got 3: \['a', 'b', '1'\]"),
        ("a,1,\nb,2,\n", r"row 1: must have 2 fields, as the header has; got 3: \['a', '1', ''\]"),
        ("a,1\n\nb,2,3\n", r"row 2: must have 2 fields, as the header has; got 3"),
        ("a,1\nb\n", r"row 2: must have 2 fields, as the header has; got 1: \['b'\]"),
        ('a,1\nb,"2\nc,3\n', r"cannot be read: row 2: unexpected end of data"),
    ],
)
def test_a_csv_row_has_as_many_fields_as_the_header(write, text, message):
    with pytest.raises(DataError, match=r"data\.train_files: '.*a\.csv'.*" + message):
        load(write("prompt,answer\n" + text, "a.csv"), answer_key="answer")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_values_keep_their_types(write, name):
    rows = [
        {"prompt": "2020-01-01", "answer": "000005", "reward": {"a": 1}},
        {"prompt": [{"role": "user", "content": "2020-01-02"}], "answer": 5, "reward": "none"},
        {"prompt": "2020-01-03", "answer": 7.5},
        {"prompt": "2020-01-04", "answer": 12345678901234567890123},
    ]
    prompts = load(write(rows if name == "a.jsonl" else json.dumps(rows, indent=1), name), answer_key="answer")
    assert [p.text for p in prompts] == ["2020-01-01", "2020-01-02", "2020-01-03", "2020-01-04"]
    assert [p.answer for p in prompts] == ["000005", "5", "7.5", "12345678901234567890123"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_mixed_column_names_the_row_that_is_no_text(write, name):
    rows = [{"prompt": "5"}, {"prompt": 7}, {"prompt": "6"}]
    with pytest.raises(DataError, match=r"row 2, column 'prompt': must be a text.*got 7"):
        load(write(rows if name == "a.jsonl" else json.dumps(rows), name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "x"}\n{"prompt": "y\u2028z"}\n',
        '\ufeff\r\n{"prompt": "x"}\r\n \r\n{"prompt": "y\u2028z"}',
        '[{"prompt": "x"}, {"prompt": "y\u2028z"}]',
        '\ufeff [\n{"prompt":\n"x"},\n{"prompt": "y\u2028z"}\n]\n',
    ],
)
def test_json_is_an_object_per_line_or_a_list(write, name, text):
    assert [p.text for p in load(write(text, name))] == ["x", "y\u2028z"]
    assert [p.text for p in load(write('{\n "prompt": "x"\n}', name))] == ["x"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_text_that_is_not_utf_8_is_named_with_its_place(write, name):
    text = 'prompt\n"ä"\n' if name == "a.csv" else '{"prompt": "x"}\n{"prompt": "ä"}\n'
    offset = text.index("ä")
    with pytest.raises(DataError, match=rf"{name}', line 2: must be UTF-8 text; got 0xe4 at byte {offset}"):
        load(write(text.encode("latin-1"), name))
    with pytest.raises(DataError, match=r"line 1: must be UTF-8 text; got 0xff at byte 0"):
        load(write(text.encode("utf-16"), name))


def test_several_files_are_numbered_through(write):
    prompts = load(write([{"prompt": "a"}], "a.jsonl"), write([{"prompt": "b"}], "b.jsonl"))
    assert [(p.index, p.text) for p in prompts] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_template_sees_all_that_a_message_has(write, tmp_path, suffix):
    call = {"type": "function", "function": {"name": "add"}}
    chat = [
        {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add"},
    ]
    file = write([{"prompt": chat}])
    if suffix == "parquet":
        datasets.Dataset.from_list([{"prompt": chat}]).to_parquet(file := tmp_path / "rows.parquet")
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}"
        "{% for call in m.tool_calls or [] %} calls {{ call.function.name }}{% endfor %}]{% endfor %}"
    )
    [prompt] = load(file, tokenizer=tokenizer)
    assert decode(prompt) == "[user][assistant calls add][tool add]"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("column", ["list", "json"])
def test_tools_and_calls_without_content_reach_the_template(write, tmp_path, caplog, suffix, column):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "add"}}
    chat = [
        {"role": "user", "content": "1+1"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    rows = [{"prompt": chat, "tools": tools}, {"prompt": [{"role": "user", "content": "x"}], "tools": None}]
    if column == "json":
        rows = [row | {"tools": json.dumps(row["tools"])} for row in rows]
    file = write(rows)
    if suffix == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file := tmp_path / "rows.parquet")
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}{% if m.content is none %} calls{% endif %}]{% endfor %}"
    )
    prompts = load(file, tokenizer=tokenizer, max_prompt_length=256)
    found = [decode(prompt).removeprefix(json.dumps(tools[0])) for prompt in prompts]
    assert found == ["[user][assistant calls][tool]", "[user]"]
    assert decode(prompts[0]).startswith(json.dumps(tools[0]))
    assert [prompt.tools for prompt in prompts] == [tools, None]
    assert not caplog.text
    tokenizer.chat_template = "{{ messages[0].content }}"
    load(file, tokenizer=tokenizer, max_prompt_length=256)
    assert "row 1: the chat template ignores the column 'tools'" in caplog.text
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="row 1: the tokenizer has no chat template, which a conversation"):
        load(file, tokenizer=tokenizer)
    file = write([{"prompt": "x"}, {"prompt": "x", "tools": tools}])
    with pytest.raises(DataError, match="row 2: the tokenizer has no chat template, which tools need"):
        load(file, tokenizer=tokenizer)


def test_prompts_are_the_same_from_every_format(write, tmp_path):
    rows = [
        {"prompt": [
            {"role": "user", "content": "x", "parts": [{"kind": "a", "of": {"size": 1}}, {"kind": "b"}]},
            {"role": "tool", "content": "y", "seen": [1, None]},
        ]},
        {"prompt": [{"role": "user", "content": "z", "parts": [{"of": {"name": "c"}}], "more": {"deep": {"er": "d"}}}]},
        {"prompt": [{"role": "user", "content": "z", "more": {"deep": {}}}]},
    ]  # fmt: skip
    (table := datasets.Dataset.from_list(rows)).to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{{ messages | tojson(sort_keys=true) }}"
    files = write(rows), tmp_path / "rows.parquet", tmp_path / "saved"
    texts, *others = ([decode(each) for each in load(f, tokenizer=tokenizer, max_prompt_length=512)] for f in files)
    assert others == [texts, texts]
    assert json.loads(texts[0]) == rows[0]["prompt"]
    assert json.loads(texts[2]) == rows[2]["prompt"]


@pytest.mark.parametrize("text", ['[{"role": "user", "content": "x"}]', "[{'content': 'x', 'role': 'user'}]"])
def test_a_chat_in_a_column_of_texts_is_logged(write, caplog, text):
    quoted = text.replace('"', '""')
    file = write(f'prompt\nhi\n"{quoted}"\n"{quoted}"\n[1]\n', "a.csv")
    assert [prompt.text for prompt in load(file)] == ["hi", text, text, "[1]"]
    [record] = caplog.records
    assert re.search(r"a.csv', column 'prompt': 2 texts, first row 2, look like lists of chat", record.getMessage())


def test_the_weight_of_a_pattern_is_that_of_all_its_files(write, tmp_path):
    """Each file has one row, of which no fraction is less."""
    for number in range(40):
        write([{"prompt": f"q{number}"}], f"part{number}.jsonl")
    read = read_rows(
        [str(tmp_path / "part?.jsonl"), str(tmp_path / "part??.jsonl")], Columns(), key="data.train_files",
        weights=[0.5, 0.1],
    )
    tasks = make_prompts(
        read, key="data.train_files", tokenizer=TOKENIZER, max_prompt_length=64, truncation="error",
        filter_overlong_prompts=False, apply_chat_template_kwargs={},
    )
    sampler = make_sampler(DataConfig(train_batch_size=8, seed=0), tasks)
    assert sampler.num_prompts == 8
    drawn = [sampler.batch(number)[1] for number in range(1, 11)]
    assert [sorted(rows >= 10) for rows in drawn] == 10 * [5 * [False] + 3 * [True]]
    assert set(np.concatenate(drawn).tolist()) == set(range(40))


def test_nulls_within_a_call_of_a_tool_are_values_except_in_arrow(write, tmp_path):
    """Arrow has null for the arguments of other rows' calls."""
    def row(**arguments):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        messages = [{"role": "user", "content": "x", "name": None}, {"role": "assistant", "tool_calls": calls}]
        return {"prompt": [*messages, {"role": "tool", "content": "y"}], "tools": [{"default": None, "of": arguments}]}

    rows = [row(city="Paris", unit=None), row(amount=3, unit="C")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0].name is defined }} {{ messages[1].tool_calls[0].function.arguments | tojson }} "
        "{{ tools | tojson }}"
    )
    as_text = [each | {"tools": json.dumps(each["tools"])} for each in rows]
    for file in (write(rows, "a.jsonl"), write(as_text, "b.jsonl")):
        found = decode(load(file, tokenizer=tokenizer, max_prompt_length=512)[0])
        arguments = '{"city": "Paris", "unit": null}'
        assert found == f'False {arguments} [{{"default": null, "of": {arguments}}}]'
    found = decode(load(tmp_path / "rows.parquet", tokenizer=tokenizer, max_prompt_length=512)[0])
    assert found == 'False {"city": "Paris"} [{"of": {"city": "Paris"}}]'


def test_template_arguments_and_a_tokenizer_without_a_template(write):
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{{ shout | upper if shout else 'no' }}"
    [prompt] = load(write([{"prompt": "x"}]), tokenizer=tokenizer, apply_chat_template_kwargs={"shout": "hey"})
    assert decode(prompt) == "HEY"
    tokenizer.chat_template = None
    [prompt] = load(write([{"prompt": "plain"}]), tokenizer=tokenizer)
    assert decode(prompt) == "plain"
    tokenizer.chat_template = "{{ raise_exception('only pairs') }}"
    with pytest.raises(DataError, match=r"row 1: the chat template rejects it: only pairs"):
        load(write([{"prompt": "x"}]), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("single", "front"),
    [("<|user|> $A", ["<|user|>"]), ("$A <|end|> <|end|>", []), ("<|user|> $A <|assistant|>", ["<|user|>"])],
)
def test_a_prompt_without_a_template_is_open_for_an_answer(write, single, front):
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = None
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|user|>", "<|assistant|>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    prompts = load(write([{"prompt": "ab"}, {"prompt": "a"}]), tokenizer=tokenizer)
    found = [tokenizer.convert_ids_to_tokens(prompt.token_ids.tolist()) for prompt in prompts]
    assert found == [[*front, "a", "b"], [*front, "a"]]


@pytest.mark.parametrize("roles", [["user", "assistant", "user"], ["system", "user"], ["system"], ["user", "user"]])
def test_roles_that_no_template_renders_are_refused(write, roles):
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = None
    rows = [{"prompt": [{"role": role, "content": "x"} for role in each]} for each in (["user"], roles)]
    with pytest.raises(DataError, match=r"data.train_files: .*, row 2: the tokenizer has no chat template, which"):
        load(write(rows), tokenizer=tokenizer)
    assert decode(load(write(rows[:1]), tokenizer=tokenizer)[0]) == "x"


def test_prompts_that_end_as_answers_do_are_named(write, caplog):
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ '<|end|>' if messages[0].content != 'a' }}"
    file = write([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    assert len(load(file, tokenizer=tokenizer)) == 3
    assert "rows.jsonl': 2 of 3 prompts end with the end-of-sequence token '<|end|>', first row 2;" in caplog.text


@pytest.mark.parametrize("file", ["missing.jsonl", "a/b.parquet", "/no/such/file", "./org/name", "~/x/y", "x.jsonl.gz"])
def test_a_missing_file_is_an_error_at_once_and_before_others_are_read(file):
    started = time.monotonic()
    with pytest.raises(DataError) as caught:
        load("some-org/some-data-set-on-the-hub", file)
    assert str(caught.value) == f"data.train_files: file not found: {file!r}"
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("file", ["gsm8k", "a b/c", "a/b/c", "org/name:config:split:more"])
def test_what_is_neither_file_nor_hub_name_is_refused(file):
    with pytest.raises(DataError, match=r"data\.train_files: .*org/name\[:config\]\[:split\]"):
        load(file)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:main", ("org/name", "main", "train")),
        ("org/name:main:test[:10]", None),
        ("org/name:main:test", ("org/name", "main", "test")),
        ("org/name::test", ("org/name", None, "test")),
    ],
)
def test_hub_names(monkeypatch, file, expected):
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return datasets.Dataset.from_list([{"prompt": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    if expected is None:
        with pytest.raises(DataError, match="hub data set"):
            load(file)
    else:
        assert len(load(file)) == 1
        assert calls == [expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ('{"question": "x", "level": 1}\n', r"no column 'prompt' \(data.prompt_key\).*question, level"),
        ('{"prompt": "x"}\n{"prompt": " "}\n', r"row 2, column 'prompt': the prompt is empty; got ' '"),
        ('{"prompt": "x"}\n{"prompt": null}\n', r"row 2, column 'prompt': must be a text.*got None"),
        ('{"prompt": 7}\n', r"row 1.*must be a text or a list of chat messages; got 7"),
        ('{"prompt": []}\n', r"row 1.*must be a text or a list of chat messages; got \[\]"),
        (
            '{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n',
            r"row 1.*must not end with a message of the assistant; got \{'role': 'assistant'",
        ),
        ('{"prompt": [{"role": "user"}]}\n', r"row 1.*'role' and 'content'; got \{'role': 'user'\}"),
        (
            '{"prompt": [{"role": "user", "content": null, "tool_calls": [{}]}]}\n',
            r"row 1.*'role' and 'content'; got \{'role': 'user'",
        ),
        ('{"prompt": "x", "tools": "add"}\n', r"row 1, column 'tools': must be a list of tools.*; got 'add'"),
        ('{"prompt": "x", "tools": ["add"]}\n', r"row 1, column 'tools': must be a list of tools.*; got \['add'\]"),
        ('{"prompt": "x"}\n{"prompt": "y"\n', r"cannot be read: row 2 is not a JSON object; got '\{\"prompt\": \"y\"'"),
        ('{"prompt": "x"}\n[1]\n', r"cannot be read: row 2 is not a JSON object; got '\[1\]'"),
        ('[1]\n{"prompt": "x"}\n', r"cannot be read: row 1 is not a JSON object; got '\[1\]'"),
        ('{"prompt": "x"\n{"prompt": "y"}\n', r"cannot be read: row 1 is not a JSON object; got '\{\"prompt\": \"x\"'"),
        ('{"prompt": "x"}\nnull\n', r"cannot be read: row 2 is not a JSON object; got 'null'"),
        ('{"prompt": "x"}\n{"answer": 1}\n', r"row 2, column 'prompt': must be a text.*got None"),
        ('{"prompt": "x"}\n{"prompt": "y", "prompt": "z"}\n', r"row 2: must not have two fields of one name; got"),
        ('{"prompt": "x"}\n{"prompt": "y\\ud800"}\n', r"row 2: must not have half of a surrogate pair; got"),
        ('{"prompt": ' + "[" * 100_000, "cannot be read: maximum recursion depth exceeded"),
    ],
)
def test_bad_files_are_named_with_key_file_and_row(write, text, message):
    with pytest.raises(DataError, match=r"data\.train_files: '.*rows\.jsonl'.*" + message):
        load(write(text))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[]", "has no rows"),
        ("a.json", '[{"prompt": "x"},\n1]', "cannot be read: row 2 is not a JSON object; got 1"),
        ("a.json", '[{"prompt": "x"},\n{"prompt"', "cannot be read: Expecting ':' delimiter: line 2 column 10"),
        ("a.csv", "answer\n1\n", r"no column 'prompt' \(data.prompt_key\); its columns are: answer"),
        ("a.csv", "prompt,answer\n", "has no rows"),
        ("a.csv", "prompt,x,x,prompt\na,b,c,d\n", "must not have two columns of one name; got 'prompt'"),
        ("a.parquet", "nonsense", "cannot be read"),
        ("a.txt", "x", r"must end in one of \.jsonl"),
    ],
)
def test_other_formats_are_checked_too(write, name, text, message):
    with pytest.raises(DataError, match=r"data\.train_files.*" + message):
        load(write(text, name))


@pytest.mark.parametrize("num_groups", [0, 1])
def test_a_parquet_file_without_rows(tmp_path, num_groups):
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("prompt", pa.string())])) as writer:
        for _ in range(num_groups):
            writer.write_table(pa.table({"prompt": pa.array([], pa.string())}))
    with pytest.raises(DataError, match=r"a\.parquet': has no rows"):
        load(tmp_path / "a.parquet")


@pytest.mark.slow
def test_a_folder_of_files_is_read_by_the_datasets_library(tmp_path, monkeypatch):
    """Splits by the names of the files, `train` where none is asked for; a folder without data is named."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, text in (("train-0", "a"), ("train-1", "b"), ("test", "c")):
        datasets.Dataset.from_list([{"prompt": text, "answer": 1}]).to_parquet(tmp_path / "set" / f"{name}.parquet")
    assert [(p.text, p.answer) for p in load(tmp_path / "set", answer_key="answer")] == [("a", "1"), ("b", "1")]
    assert [p.text for p in load(f"{tmp_path}/set:test")] == ["c"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.train_files: '.*empty': cannot be read: .*data files"):
        load(tmp_path / "empty")


@pytest.mark.slow
def test_the_bad_file_of_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set" / "part").mkdir(parents=True)
    (tmp_path / "set" / "a.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    (tmp_path / "set" / "part" / "b.jsonl").write_text('{"prompt": "b"}\n{"prompt": "', encoding="utf-8")
    with pytest.raises(DataError, match=r"set': part/b\.jsonl: cannot be read: row 2 is not a JSON object"):
        load(tmp_path / "set")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_git_lfs_pointer_is_named(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"data\.train_files: .*Git LFS pointer \(git lfs pull\); got '.*{name}'"):
        load(tmp_path / name)


def test_what_save_to_disk_wrote(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "x"}])
    rows.save_to_disk(tmp_path / "one")
    assert [p.text for p in load(tmp_path / "one")] == ["x"]
    with pytest.raises(DataError, match=r"one:test': the folder has one data set without splits, not 'test'"):
        load(f"{tmp_path}/one:test")
    splits = {"fit": rows, "held_out": datasets.Dataset.from_list([{"prompt": "y"}])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    assert [p.text for p in load(f"{tmp_path}/two:held_out")] == ["y"]
    with pytest.raises(DataError, match=r"two': its splits are fit, held_out; append one of them after a colon"):
        load(tmp_path / "two")
    datasets.DatasetDict({"only": rows}).save_to_disk(tmp_path / "three")
    assert [p.text for p in load(tmp_path / "three")] == ["x"]


def test_patterns_are_read_in_the_order_of_the_names(write, tmp_path):
    for name in ("b", "a", "c"):
        write([{"prompt": name}], f"{name}.jsonl")
    assert [(p.index, p.text) for p in load(f"{tmp_path}/[ab].jsonl")] == [(0, "a"), (1, "b")]
    assert [p.text for p in load(f"{tmp_path}/**/*.jsonl")] == ["a", "b", "c"]
    with pytest.raises(DataError, match=r"data\.train_files: the pattern matches no file: '.*/x\*\.jsonl'"):
        load(f"{tmp_path}/x*.jsonl")


@pytest.mark.parametrize(("suffix", "codec"), [("gz", "gzip"), ("zst", "zstd")])
def test_compressed_text(write, tmp_path, suffix, codec):
    """Also where several were put one behind the other; a damaged one is named."""
    parts = [pa.compress(f'{{"prompt": "{text}"}}\n'.encode(), codec, asbytes=True) for text in "ab"]
    assert [p.text for p in load(write(b"".join(parts), f"a.jsonl.{suffix}"))] == ["a", "b"]
    assert [p.text for p in load(write(pa.compress(b"prompt\nx\n", codec, asbytes=True), f"a.csv.{suffix}"))] == ["x"]
    for damaged in (b"nonsense", parts[0][:-6]):
        with pytest.raises(DataError, match=rf"a\.json\.{suffix}': cannot be read"):
            load(write(damaged, f"a.json.{suffix}"))
    with pytest.raises(DataError, match=r"must end in one of .*\.gz or \.zst after that of a text file"):
        load(write(b"", f"a.parquet.{suffix}"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_compressed_text_has_a_limit_that_a_key_raises(write, name):
    """The rest of the file is not unpacked: its damaged end is not noticed."""
    text = f'{{"prompt": "{"x" * 3_000_000}"}}' if name != "a.csv" else f"prompt\n{'x' * 3_000_000}\n"
    file = write(pa.compress(text.encode(), "gzip", asbytes=True), f"{name}.gz")
    (rows,) = read_rows([str(file)], Columns(), key="data.train_files", unpacked_bytes=len(text))
    assert rows.rows[0].messages == [{"role": "user", "content": "x" * 3_000_000}]
    cut = write(file.read_bytes()[:-20], f"cut.{name}.gz")
    rule = r"its text must have at most 0\.001 GB \(data\.max_unpacked_gigabytes\); it has more"
    with pytest.raises(DataError, match=rf"^data\.train_files: '.*cut\.{name}\.gz': {rule}$"):
        read_rows([str(cut)], Columns(), key="data.train_files", unpacked_bytes=1e6)


def test_only_the_columns_that_are_used_are_held(write):
    """There are 200 MB of text in a compressed file of lines."""
    line = json.dumps({"prompt": "x", "other": "y" * 1_000_000}).encode() + b"\n"
    file = write(pa.compress(line * 200, "gzip", asbytes=True), "a.jsonl.gz")
    tracemalloc.start()
    try:
        assert len(load(file)) == 200
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


def test_everything_that_is_wrong_is_said_at_once(write, tmp_path):
    with pytest.raises(SeveralErrors) as caught:
        load(tmp_path / "missing.jsonl", f"{tmp_path}/*.json", "gsm8k")
    assert len(caught.value.errors) == 3
    with pytest.raises(SeveralErrors) as caught:
        load(write([{"text": "a"}], "a.jsonl"), write([{"prompt": 7}], "b.jsonl"))
    first, second = map(str, caught.value.errors)
    assert "a.jsonl': no column 'prompt'" in first
    assert "b.jsonl', row 1, column 'prompt': must be a text" in second


def test_an_answer_column_must_exist_only_if_it_was_asked_for(write):
    file = write([{"prompt": "x", "solution": "1"}])
    assert load(file)[0].answer is None
    with pytest.raises(DataError, match=r"no column 'answer' \(reward.answer_key=answer\).*prompt, solution"):
        load(file, answer_key="answer")
    with pytest.raises(DataError, match=r"row 2, answer 'a'.*got None"):
        load(write([{"prompt": "x", "a": "1"}, {"prompt": "x", "a": None}]), answer_key="a")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("empty", ["", " \n", float("nan")])
def test_an_empty_answer_is_none(write, tmp_path, suffix, empty):
    values = ["1", str(empty)] if isinstance(empty, str) else [1.0, empty]
    if suffix == "csv" and isinstance(empty, str):
        file = write(f'prompt,a\nx,1\ny,"{empty}"\n', "rows.csv")
    elif suffix == "parquet":
        pq.write_table(pa.table({"prompt": ["x", "y"], "a": values}), file := tmp_path / "rows.parquet")
    else:
        file = write([{"prompt": "x", "a": value} for value in values])
    with pytest.raises(DataError, match=r"row 2, answer 'a' \(reward.answer_key\): must be a text that is not empty"):
        load(file, answer_key="a")


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("left", "cdef<|end|><|assistant|>"), ("right", "<|user|>abcde"), ("middle", "<|user|>abf<|end|><|assistant|>")],
)
def test_truncation_cuts_where_it_says(write, truncation, expected):
    [prompt] = load(write([{"prompt": "abcdef"}]), truncation=truncation, max_prompt_length=6)
    assert decode(prompt) == expected
    assert prompt.text == "abcdef"


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_truncation_keeps_exactly_the_limit(write, truncation, limit):
    [prompt] = load(write([{"prompt": "abcdef"}]), truncation=truncation, max_prompt_length=limit)
    assert len(prompt.token_ids) == limit


def test_a_long_prompt_is_an_error_that_names_the_ways_out(write):
    file = write([{"prompt": "abc"}, {"prompt": "abcd"}])
    assert len(load(file, max_prompt_length=7)) == 2
    with pytest.raises(DataError) as caught:
        load(file, max_prompt_length=6)
    message = str(caught.value)
    for part in ("rows.jsonl", "row 2", "7 tokens", "data.max_prompt_length=6", "data.truncation",
                 "data.filter_overlong_prompts", "1 of 2 prompts are longer, the longest has 7 tokens"):  # fmt: skip
        assert part in message


def test_filtering_leaves_long_rows_out_and_says_how_many(write, caplog):
    file = write([{"prompt": "abc"}, {"prompt": "abcdefg"}, {"prompt": "de"}])
    with caplog.at_level(logging.INFO):
        prompts = load(file, max_prompt_length=6, filter_overlong_prompts=True)
    assert [(p.index, p.text) for p in prompts] == [(0, "abc"), (2, "de")]
    assert "skipped 1 of 3" in caplog.text
    with pytest.raises(DataError, match=r"all 3 prompts are longer than data.max_prompt_length=2"):
        load(file, max_prompt_length=2, filter_overlong_prompts=True)


def test_reading_is_quiet_and_leaves_nothing_behind(write, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list([{"prompt": "x"}]).to_parquet(tmp_path / "rows.parquet")
    bad = write("nonsense", "bad.parquet")
    before = sorted(tmp_path.iterdir())
    capfd.readouterr()
    load(tmp_path / "rows.parquet")
    with pytest.raises(DataError):
        load(bad)
    assert sorted(tmp_path.iterdir()) == before
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_prompts_that_are_too_long_are_named_in_every_file(tmp_path):
    files = [tmp_path / f"{name}.jsonl" for name in ("first", "fine", "last")]
    for file in files:
        file.write_text(json.dumps({"prompt": "long" * (1 if file.stem == "fine" else 30)}) + "\n", encoding="utf-8")
    with pytest.raises(SeveralErrors, match=r"(?s)first\.jsonl.*last\.jsonl") as raised:
        load(*files)
    assert "fine.jsonl" not in str(raised.value)


def test_the_teacher_reads_its_own_prompt_where_a_row_has_one(write):
    hint = [{"role": "system", "content": "it is 2"}, {"role": "user", "content": "1+1"}]
    file = write([{"prompt": "1+1", "hint": hint}, {"prompt": "2+2", "hint": None}, {"prompt": "3+3", "hint": "6!"}])
    prompts = load(file, teacher_prompt_key="hint")
    assert [decode(p) for p in prompts] == [f"<|user|>{text}<|end|><|assistant|>" for text in ("1+1", "2+2", "3+3")]
    shown = [TOKENIZER.decode(p.teacher_ids) for p in prompts]
    assert shown[0] == TOKENIZER.apply_chat_template(hint, tokenize=False, add_generation_prompt=True)
    assert shown[1:] == [decode(prompts[1]), "<|user|>6!<|end|><|assistant|>"]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    prompts = load(file, teacher_prompt_key="hint", teacher_templates={"default": template})
    shown = [TOKENIZER.decode(p.teacher_ids) for p in prompts]
    assert shown == ["it is 21+1:", "2+2:", "6!:"]
    assert load(file)[0].teacher_ids is None


def test_the_teachers_prompts_have_a_limit_of_their_own(write):
    file = write([{"prompt": "1+1", "hint": "x" * 80}, {"prompt": "2+2", "hint": "y"}])
    rule = r"row 1: the teacher_prompt has 83 tokens, the limit is data.max_teacher_prompt_length=64"
    with pytest.raises(DataError, match=rule):
        load(file, teacher_prompt_key="hint")
    first, _ = load(file, teacher_prompt_key="hint", max_teacher_prompt_length=90)
    assert (len(first.token_ids), len(first.teacher_ids)) == (6, 83)
    (kept,) = load(file, teacher_prompt_key="hint", filter_overlong_prompts=True)
    assert kept.row == 2
    cut, _ = load(file, teacher_prompt_key="hint", truncation="right")
    assert len(cut.teacher_ids) == 64
    with pytest.raises(DataError, match=r"no column 'help' \(data.teacher_prompt_key\); its columns are: prompt, hint"):
        load(file, teacher_prompt_key="help")
    with pytest.raises(DataError, match=r"row 1, column 'hint': must be a text or a list of chat messages; got 7"):
        load(write([{"prompt": "1+1", "hint": 7}]), teacher_prompt_key="hint")


def test_rows_of_a_teacher_with_another_tokenizer_are_rendered_by_it_alone(write):
    """The student's template has no system messages; messages name the row of the file."""
    student, other = make_byte_tokenizer(), make_byte_tokenizer()
    student.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}S:"
    other.chat_template = "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}T:"
    hint = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    column, tokenizers = TeacherColumn("skill", ("math", "default")), {"math": other}
    rows = [{"prompt": "1+1", "skill": "y", "hint": "2"}, {"prompt": "1+1", "skill": "math", "hint": hint}]
    more = {"tokenizer": student, "teacher": column, "teacher_tokenizers": tokenizers, "teacher_prompt_key": "hint"}
    assert [TOKENIZER.decode(prompt.teacher_ids) for prompt in load(write(rows), **more)] == ["S:", "T:"]
    with pytest.raises(DataError, match=r"row 2: the chat template rejects it: no x"):
        load(write([rows[0], rows[1] | {"hint": "x"}]), **more)


def test_a_template_of_one_teacher_is_not_asked_of_others(write):
    """The tokenizer has none: texts are texts for all but that teacher."""
    plain = make_byte_tokenizer()
    plain.chat_template = None
    column, templates = TeacherColumn("skill", ("math", "default")), {"math": "T{{ messages[0].content }}"}
    rows = [{"prompt": "1+1", "skill": skill} for skill in ("math", "y", "math")]
    prompts = load(write(rows), tokenizer=plain, teacher=column, teacher_templates=templates)
    assert [TOKENIZER.decode(prompt.teacher_ids) for prompt in prompts] == ["T1+1", "1+1", "T1+1"]


def test_rows_name_their_teacher_and_read_its_template(write):
    file = write([{"prompt": "1+1", "skill": "math"}, {"prompt": "2+2", "skill": None}, {"prompt": "x", "skill": "y"}])
    column = TeacherColumn("skill", ("math", "default"))
    templates = {"default": "{% for m in messages %}{{ m.content }}{% endfor %}:"}
    prompts = load(file, teacher=column, teacher_templates=templates)
    assert [prompt.teacher for prompt in prompts] == ["math", "default", "default"]
    shown = [TOKENIZER.decode(prompt.teacher_ids) for prompt in prompts]
    assert shown == [decode(prompts[0]), "2+2:", "x:"]
    assert [(prompt.teacher, prompt.teacher_ids) for prompt in load(file)] == [("default", None)] * 3
    with pytest.raises(DataError, match=rf"{file.name}', row 2, column 'skill' .*: math, y; got None"):
        load(file, teacher=TeacherColumn("skill", ("math", "y")))
    with pytest.raises(DataError, match=r"no column 'domain' \(distillation\.teacher_key\); .*: prompt, skill"):
        load(file, teacher=TeacherColumn("domain", ("math", "default")))
